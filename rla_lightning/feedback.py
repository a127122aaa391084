"""What one iteration tells the curriculum: verdicts on proposals, counts and critiques of every task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from rla_lightning.algorithm.acceptance import posterior, threshold
from rla_lightning.algorithm.precision import count_votes
from rla_lightning.curriculum.critiques import template_critique
from rla_lightning.measure import GroupValues
from rla_lightning.settings import AcceptanceSettings
from rla_lightning.types import Decision, Proposal, RolloutGroup, TaskFeedback, Trial
from rla_lightning.updates import votes_of


def decide(proposals: Sequence[Proposal], groups: Sequence[RolloutGroup], settings: AcceptanceSettings) -> dict[str, Decision]:
    """What becomes of each proposal, by its task's id.

    Args:
        proposals: that were rolled out.
        groups: all rollouts of this iteration; those of a proposal on trial and of its parent are among them.
        settings: which rule decides.
    """
    counts = {group.task.id: (group.successes, group.rollouts) for group in groups}
    return {
        proposal.task.id: decide_one(proposal, *counts[proposal.task.id], counts.get(proposal.parent_id), settings)
        for proposal in proposals
    }


def decide_one(
    proposal: Proposal, successes: int, rollouts: int, parent: tuple[int, int] | None, settings: AcceptanceSettings
) -> Decision:
    """The decision on one proposal.

    The posterior rule has two stages. The first rollouts, held against those that asked for the rewrite, can only reject:
    the parent was chosen for an extreme result, so a comparison with it favours the proposal. What passes is compared with
    its parent on new rollouts of both, all of the same iterations and so of the same policies.

    Args:
        proposal: as it was drawn.
        successes: of its rollouts in this iteration.
        rollouts: how many they were.
        parent: successes and rollouts of its parent in the same iteration, None where that was not rolled out.
        settings: the rule.
    """
    direction, parent_counts = proposal.direction, (proposal.parent_successes, proposal.parent_rollouts)
    before = f"{successes}/{rollouts} against the {proposal.parent_successes}/{proposal.parent_rollouts} that asked for it"
    if settings.rule == "threshold":
        verdict = threshold(direction, *parent_counts, successes, rollouts, low=settings.low, high=settings.high)
        if verdict == "UNDECIDED":  # every rollout failed in the environment
            return Decision("REJECT", "no rollouts")
        return Decision(verdict, before, Trial(successes, rollouts, proposal.parent_successes, proposal.parent_rollouts, 1))
    rule = partial(posterior, low=settings.low, high=settings.high, level=settings.level, futility=settings.futility)
    if proposal.trial is None:
        verdict = rule(direction, *parent_counts, successes, rollouts)
        return Decision("REJECT", before) if verdict == "REJECT" else Decision("UNDECIDED", f"passed: {before}", Trial())
    parent_successes, parent_rollouts = parent or (0, 0)
    trial = Trial(
        proposal.trial.successes + successes,
        proposal.trial.rollouts + rollouts,
        proposal.trial.parent_successes + parent_successes,
        proposal.trial.parent_rollouts + parent_rollouts,
        proposal.trial.rolls + 1,
    )
    verdict = rule(direction, trial.parent_successes, trial.parent_rollouts, trial.successes, trial.rollouts)
    reason = f"{trial.successes}/{trial.rollouts} against the parent's {trial.parent_successes}/{trial.parent_rollouts}"
    if verdict == "UNDECIDED" and trial.rolls >= settings.max_rerolls:
        return Decision("REJECT", f"undecided: {reason}", trial)
    return Decision(verdict, reason, trial)


def is_trained_on(decision: Decision | None, settings: AcceptanceSettings) -> bool:
    """Whether the policy and the reward model learn from a task's rollouts; None: an active task."""
    return decision is None or decision.verdict == "ACCEPT" or settings.train_on == "all"


def task_feedback(
    group: RolloutGroup, values: GroupValues, decisions: Mapping[str, Decision], settings: AcceptanceSettings
) -> TaskFeedback:
    """What the rollouts of one task say about it.

    Args:
        group: judged rollouts.
        values: the critic's predictions of their steps.
        decisions: on proposals, by task id; an active task has none.
        settings: a success rate above their band is too easy, and criticised for it.
    """
    votes = count_votes(*votes_of(group))
    starts = [value[0] for value in values if len(value)]
    return TaskFeedback(
        task=group.task,
        successes=group.successes,
        rollouts=group.rollouts,
        critic_value=float(np.mean(starts)) if starts else None,
        critiques=template_critique(group, settings.high),
        p_plus=votes.p_plus,
        p_minus=votes.p_minus,
        decision=decisions.get(group.task.id),
    )
