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
from rla_lightning.types import Proposal, RolloutGroup, TaskFeedback, Verdict
from rla_lightning.updates import votes_of


def decide(proposals: Sequence[Proposal], groups: Sequence[RolloutGroup], settings: AcceptanceSettings) -> dict[str, Verdict]:
    """The verdict on each proposal, by its task's id, from all its rollouts so far.

    Args:
        proposals: that were rolled out.
        groups: their rollouts of this iteration, in the same order.
        settings: which rule decides.
    """
    rule = threshold if settings.rule == "threshold" else partial(posterior, level=settings.level)
    return {
        proposal.task.id: rule(
            proposal.direction,
            proposal.parent_successes,
            proposal.parent_rollouts,
            proposal.successes + group.successes,
            proposal.rollouts + group.rollouts,
            low=settings.low,
            high=settings.high,
        )
        for proposal, group in zip(proposals, groups, strict=True)
    }


def task_feedback(
    group: RolloutGroup, values: GroupValues, verdicts: Mapping[str, Verdict], settings: AcceptanceSettings
) -> TaskFeedback:
    """What the rollouts of one task say about it.

    Args:
        group: judged rollouts.
        values: the critic's predictions of their steps.
        verdicts: on proposals, by task id; an active task has none.
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
        verdict=verdicts.get(group.task.id),
    )
