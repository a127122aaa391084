"""Text feedback on rollouts, filled into templates: readable sentences, though no model has to be able to write any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rla_lightning.types import PASSED, Judgment, RolloutGroup, Step, Trajectory

MAX_LISTED = 5  # steps or actions named in one critique


def template_critique(group: RolloutGroup, high: float = 0.8) -> tuple[str, ...]:
    """Why rollouts failed and, above the band, what made the task easy; at most two sentences each.

    The paper critiques failed rollouts only, which leaves nothing to say about a task at success 1.0.
    A group with a success rate over `high` gets one of its wins: how long they took, and what the shortest did. Where
    goals are verified in parts (the hidden tests of programs), the rates at which those are passed are the critique.
    """
    if any(step.checks for trajectory in group.valid_trajectories for step in trajectory.steps):
        return (_check_rates(group),)
    judgments = group.judgments or tuple(() for _ in group.trajectories)
    critiques = [
        _critique_loss(trajectory, votes)
        for trajectory, votes in zip(group.trajectories, judgments, strict=True)
        if not trajectory.is_won and trajectory.stop_reason != "ENV_ERROR"
    ]
    if group.rollouts and group.successes / group.rollouts > high:
        critiques.append(_critique_wins(group))
    return tuple(critiques)


def _check_rates(group: RolloutGroup) -> str:
    """Parts are numbered from 1."""
    last = [trajectory.steps[-1].checks for trajectory in group.valid_trajectories if trajectory.steps]
    verified = [checks for checks in last if checks]
    unreadable = f" {group.rollouts - len(verified)} gave nothing that could be run." if len(verified) < group.rollouts else ""
    parts = []
    for number, column in enumerate(zip(*verified, strict=True), 1):
        failures = Counter(check for check in column if check != PASSED)
        why = ", ".join(f"{count} {name}" for name, count in failures.most_common())
        parts.append(f"{number}: {column.count(PASSED) / len(column):.0%}" + (f" ({why})" if why else ""))
    programs = f"{len(verified)} program" + ("" if len(verified) == 1 else "s")
    return f"Pass rates of the hidden tests over {programs}: {'; '.join(parts)}.{unreadable}"


def _critique_loss(trajectory: Trajectory, judgments: Sequence[Sequence[Judgment]]) -> str:
    """Steps are numbered from 0, as in the trajectory files."""
    endings = {"MAX_TURNS": "ran out of turns", "TRUNCATED": "outgrew the context"}
    ending = endings.get(trajectory.stop_reason, "lost")
    sentence = f"The rollout {ending} after {_turns(trajectory)}."
    if not judgments:
        return sentence
    blamed = [
        f"{index} ({_action(step)})"
        for index, (step, votes) in enumerate(zip(trajectory.steps, judgments, strict=True))
        if votes and all(vote.score == -1 for vote in votes)
    ]
    if not blamed:
        return f"{sentence} No step has only negative votes."
    return f"{sentence} All votes are negative at step{'' if len(blamed) == 1 else 's'} {_listing(blamed)}."


def _critique_wins(group: RolloutGroup) -> str:
    wins = [trajectory for trajectory in group.valid_trajectories if trajectory.is_won]
    mean = sum(len(trajectory.steps) for trajectory in wins) / len(wins)
    shortest = min(wins, key=lambda trajectory: len(trajectory.steps))
    actions = _listing([_action(step) for step in shortest.steps])
    won = f"{len(wins)} of {group.rollouts} rollouts won, in {mean:.1f} turns on average."
    return f"{won} The shortest took {_turns(shortest)}: {actions}."


def _turns(trajectory: Trajectory) -> str:
    return f"{len(trajectory.steps)} turn" + ("" if len(trajectory.steps) == 1 else "s")


def _action(step: Step) -> str:
    return step.action or "no readable action"


def _listing(items: Sequence[str]) -> str:
    more = f" and {len(items) - MAX_LISTED} more" if len(items) > MAX_LISTED else ""
    return ", ".join(items[:MAX_LISTED]) + more
