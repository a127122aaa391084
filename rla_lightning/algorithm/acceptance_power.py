"""What an acceptance rule does to proposals whose true success rates are known: exact, by enumerating all counts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from rla_lightning.algorithm.acceptance import trigger
from rla_lightning.types import Decision, Direction, Proposal, Task, Trial

# (proposal, successes of its group, rollouts, its parent's successes and rollouts in the same iteration, or None)
Decide = Callable[[Proposal, int, int, "tuple[int, int] | None"], Decision]

_TASK = Task("proposal", "", {}, 0.0, "parent", "parent", 1)


@dataclass(frozen=True)
class AcceptancePower:
    """Of a proposal whose parent's rollouts asked for it."""

    accepted: float  # the probability
    rollouts: float  # expected number, of the proposal
    parent_rollouts: float  # expected number, of the parent along with it


def acceptance_power(
    decide: Decide, direction: Direction, parent: float, proposal: float, group_size: int = 8, low: float = 0.2, high: float = 0.8
) -> AcceptancePower:
    """Probability that a proposal is accepted, and what it costs, both true success rates being constant.

    Args:
        decide: the rule, as `feedback.decide_one` with its settings.
        direction: of the rewrite.
        parent: true success rate of the parent; only parents whose rollouts trigger the direction count.
        proposal: true success rate of the proposal; the parent's for one that changes nothing.
        group_size: rollouts of a task in one iteration (G).
        low: lower end of the band that triggers.
        high: upper end of it.

    Raises:
        ValueError: a rate outside [0, 1], or a parent that never triggers.
    """
    own, others = _binomial(group_size, proposal), _binomial(group_size, parent)
    triggering = {s: p for s, p in enumerate(others) if p > 0 and trigger(s, group_size, low, high) == direction}
    total = sum(triggering.values())
    if total == 0:
        raise ValueError(f"a parent with success rate {parent} is never rewritten to be {direction}")
    accepted = rollouts = parent_rollouts = 0.0
    waiting: dict[tuple[int, Trial | None], float] = {(s, None): p / total for s, p in triggering.items()}
    while waiting:
        going_on: defaultdict[tuple[int, Trial | None], float] = defaultdict(float)
        for (before, trial), weight in waiting.items():
            asked = Proposal(_TASK, direction, "parent", before, group_size, trial=trial)
            along = [(None, 1.0)] if trial is None else [((s, group_size), p) for s, p in enumerate(others)]
            rollouts += weight * group_size
            parent_rollouts += 0.0 if trial is None else weight * group_size
            for successes, p in enumerate(own):
                for counts, q in along:
                    decision = decide(asked, successes, group_size, counts)
                    if decision.verdict == "ACCEPT":
                        accepted += weight * p * q
                    elif decision.verdict == "UNDECIDED" and weight * p * q > 0:
                        going_on[before, decision.trial] += weight * p * q
        waiting = going_on
    return AcceptancePower(accepted, rollouts, parent_rollouts)


@lru_cache(maxsize=64)
def _binomial(count: int, p: float) -> tuple[float, ...]:
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"a success rate must be in [0, 1], got {p}")
    return tuple(math.comb(count, k) * p**k * (1.0 - p) ** (count - k) for k in range(count + 1))
