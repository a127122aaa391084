"""What one iteration tells the curriculum: verdicts on proposals, counts and critiques of every task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from rla_lightning.algorithm.acceptance import posterior, threshold, trigger
from rla_lightning.algorithm.precision import count_votes
from rla_lightning.curriculum.critiques import (
    Writer,
    episode_logs,
    pass_rates,
    template_critique,
    total,
    with_critique,
    write_critiques,
)
from rla_lightning.distributed import failing_together, share, unshare
from rla_lightning.measure import GroupValues
from rla_lightning.rollout.players import Players
from rla_lightning.settings import AcceptanceSettings, CritiqueSettings
from rla_lightning.types import Completion, Decision, EpisodeLog, Proposal, RolloutGroup, TaskFeedback, Trial
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
        proposal.task.id: replace(
            decide_one(proposal, *counts[proposal.task.id], counts.get(proposal.parent_id), settings),
            is_control=proposal.is_control,
        )
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
        if rollouts == 0:
            return Decision("REJECT", "no rollouts")
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
    return decision is None or _becomes_active(decision) or settings.train_on == "all"


def _becomes_active(decision: Decision) -> bool:
    return decision.verdict == "ACCEPT" and not decision.is_control


def task_feedback(
    group: RolloutGroup,
    values: GroupValues,
    decisions: Mapping[str, Decision],
    settings: AcceptanceSettings,
    critiques: CritiqueSettings = CritiqueSettings(),  # noqa: B008 frozen
) -> TaskFeedback:
    """What the rollouts of one task say about it.

    Args:
        group: judged rollouts.
        values: the critic's predictions of their steps.
        decisions: on proposals, by task id; an active task has none.
        settings: a success rate above their band is too easy, and criticised for it.
        critiques: where a language model writes them, tasks outside the band bring the logs that it reads.
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
        logs=_logs(group, decisions.get(group.task.id), settings, critiques),
        pass_rates=pass_rates(group),
    )


def _logs(
    group: RolloutGroup, decision: Decision | None, settings: AcceptanceSettings, critiques: CritiqueSettings
) -> tuple[EpisodeLog, ...]:
    """Of a task that may be rewritten now."""
    may_be_rewritten = decision is None or _becomes_active(decision)
    if critiques.writer == "template" or not may_be_rewritten or group.rollouts == 0:
        return ()
    direction = trigger(group.successes, group.rollouts, settings.low, settings.high)
    return () if direction is None else episode_logs(group, critiques.max_rollouts, direction == "harder")


def feedback_on(
    groups: Sequence[RolloutGroup],
    values: Sequence[GroupValues],
    decisions: Mapping[str, Decision],
    acceptance: AcceptanceSettings,
    critiques: CritiqueSettings,
    players: Players,
    key: str,
) -> tuple[list[TaskFeedback], dict[str, float]]:
    """What the rollouts say about every task, and what came of the critiques if the reward model writes them."""
    rated = zip(groups, values, strict=True)
    feedback = [task_feedback(group, value, decisions, acceptance, critiques) for group, value in rated]
    return criticise(feedback, players, critiques, key) if critiques.writer == "reward_model" else (feedback, {})


def criticise(
    feedback: Sequence[TaskFeedback], players: Players, settings: CritiqueSettings, key: str
) -> tuple[list[TaskFeedback], dict[str, float]]:
    """The feedback with the reward model's critiques of tasks that came with logs, and what became of its answers.

    Every rank gives the same feedback and gets the same; each writes its share.
    """
    decided = [(item.task.parent_id, item.decision) for item in feedback if item.decision is not None]
    replaced = {parent for parent, decision in decided if decision.verdict == "UNDECIDED" or _becomes_active(decision)}
    chosen = [item for item in feedback if item.logs and item.task.id not in replaced]
    params = replace(players.settings.judge_sampling, max_new_tokens=settings.max_new_tokens)

    def answer(prompts: Sequence[tuple[int, ...]], keys: Sequence[str]) -> list[Completion]:
        return [completion for (completion,) in players.judge_sampler.sample(prompts, 1, params, keys)]

    room = players.reward_model.context_length - settings.max_new_tokens
    with failing_together():
        mine = write_critiques(share(chosen), Writer(players.reward_model.tokenizer, room, answer), key)
    written = unshare(mine)
    by_task = {item.task.id: with_critique(item, text) for item, text in zip(chosen, written, strict=True)}
    criticised = [by_task.get(item.task.id, replace(item, logs=())) for item in feedback]
    return criticised, {f"critique/{name}": number for name, number in total(written).items()}
