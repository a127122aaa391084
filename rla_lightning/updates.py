"""From rollout groups to training samples: which steps and votes each model learns from.

All ranks hold the same groups and make the same choices here; each then trains on its share of the
micro-batches, so that the result does not depend on the number of processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from rla_lightning.algorithm.acceptance import in_band
from rla_lightning.algorithm.advantages import JudgeBalance, balanced_indices, judge_advantages, policy_advantages, surprise
from rla_lightning.algorithm.rewards import consistency_rewards, integrated_step_rewards
from rla_lightning.algorithm.unit_tests import unit_test_advantages, unit_test_rewards
from rla_lightning.distributed import rank, world_size
from rla_lightning.rollout.batching import (
    MicroBatch,
    Sample,
    ValueBatch,
    make_micro_batch,
    make_value_batch,
    pack,
    split_by_budget,
    zero_weight,
)
from rla_lightning.rollout.prefix_tree import related
from rla_lightning.rollout.unit_tests import test_results
from rla_lightning.settings import RewardSettings, UpdateSettings
from rla_lightning.types import IterationResult, Judgment, RolloutGroup, TaskFeedback, Trajectory

T = TypeVar("T")


@dataclass(frozen=True)
class GroupCredit:
    """Rewards and advantages of one group; empty for a trajectory that ended with ENV_ERROR."""

    rewards: tuple[np.ndarray, ...]  # [G][K] integrated step rewards
    advantages: tuple[np.ndarray, ...]  # [G][K] of the policy
    surprise: tuple[np.ndarray, ...]  # [G][K] of the critic about the outcome, in [0, 2]


@dataclass(frozen=True)
class TaskSample:
    """A sample with the task it comes from, for error messages, and the sampler's own log-probs."""

    sample: Sample
    task_id: str
    sampler_logprobs: tuple[float, ...]


@dataclass(frozen=True)
class ValueSample:
    """A state and how its trajectory ended."""

    prompt_ids: tuple[int, ...]
    outcome: float
    task_id: str


@dataclass(frozen=True)
class Piece:
    """What one rank feeds a language model in one forward pass."""

    batch: MicroBatch
    sampler_logprobs: Tensor  # [B, R]
    denominator: float  # samples in the whole optimizer step, all ranks
    task_ids: tuple[str, ...]


@dataclass(frozen=True)
class ValuePiece:
    """What one rank feeds the value model in one forward pass."""

    batch: ValueBatch
    denominator: float
    task_ids: tuple[str, ...]


def scores_of(judgments: Sequence[Sequence[Judgment]]) -> list[list[int | None]]:
    """Votes [K][m] of one trajectory."""
    return [[judgment.score for judgment in votes] for votes in judgments]


def votes_of(group: RolloutGroup) -> tuple[list[float], list[list[list[int | None]]]]:
    """Outcomes [G] and votes [G][K][m] of the trajectories that no error ended."""
    kept = group.valid_indices
    return [group.trajectories[g].outcome for g in kept], [scores_of(group.judgments[g]) for g in kept]


def assign_credit(group: RolloutGroup, settings: RewardSettings, values: Sequence[np.ndarray]) -> GroupCredit:
    """Integrated rewards and policy advantages of one group.

    Args:
        group: judged rollouts.
        settings: of rewards and advantages.
        values: [G][K] predicted success probability before each step.
    """
    kept = group.valid_indices
    rewards = [np.zeros(0)] * len(group.trajectories)
    advantages = list(rewards)
    try:
        for g in kept:
            rewards[g] = _step_rewards(group.trajectories[g], group.judgments[g], settings)
            advantages[g] = np.zeros_like(rewards[g])
        if len(kept) >= 2:
            normalised = policy_advantages(
                [_paid_to_policy(rewards[g], _outcome(group.trajectories[g], settings), settings) for g in kept],
                mode=settings.advantage,
                lone_step=settings.lone_step,
                values=[2 * values[g] - 1 for g in kept],  # on the scale of the outcome
                gamma=settings.gamma,
                gae_lambda=settings.gae_lambda,
            )
            for g, advantage in zip(kept, normalised, strict=True):
                advantages[g] = advantage
    except ValueError as error:
        raise ValueError(f"task {group.task.id}: {error}") from error
    surprises = tuple(surprise(t.outcome, value) for t, value in zip(group.trajectories, values, strict=True))
    return GroupCredit(tuple(rewards), tuple(advantages), surprises)


def _step_rewards(trajectory: Trajectory, judgments: Sequence[Sequence[Judgment]], settings: RewardSettings) -> np.ndarray:
    return integrated_step_rewards(
        _outcome(trajectory, settings),
        scores_of(judgments),
        [step.is_valid for step in trajectory.steps],
        score_weight=settings.score_weight,
        outcome_weight=settings.outcome_weight,
        invalid_penalty=settings.invalid_penalty,
    )


def _outcome(trajectory: Trajectory, settings: RewardSettings) -> float:
    """In [-1, 1], as `settings.outcome` counts it."""
    return 2 * trajectory.partial - 1 if settings.outcome == "partial" else trajectory.outcome


def _paid_to_policy(rewards: np.ndarray, outcome: float, settings: RewardSettings) -> np.ndarray:
    """The rewards [K]; where rewards are summed over steps (gae, return_to_go) with the outcome at the last step only.

    The judge always learns from the integrated rewards: without the outcome in them it would only agree with itself.
    """
    if not settings.policy_outcome:
        return rewards - settings.outcome_weight * outcome
    if settings.advantage not in ("gae", "return_to_go"):
        return rewards
    earlier = np.arange(len(rewards)) < len(rewards) - 1
    return rewards - settings.outcome_weight * outcome * earlier


def policy_samples(groups: Sequence[RolloutGroup], credits: Sequence[GroupCredit], settings: UpdateSettings) -> list[TaskSample]:
    """One sample per step with a non-zero advantage."""
    samples = []
    for group, credit in zip(groups, credits, strict=True):
        if not _is_trained_on(group, settings):
            continue
        for g in group.valid_indices:
            for step, advantage in zip(group.trajectories[g].steps, credit.advantages[g], strict=True):
                if advantage != 0.0:
                    sample = Sample(step.prompt_ids, step.completion.token_ids, float(advantage))
                    samples.append(TaskSample(sample, group.task.id, step.completion.logprobs))
    return samples


def judge_samples(
    groups: Sequence[RolloutGroup],
    credits: Sequence[GroupCredit],
    reward_settings: RewardSettings,
    settings: UpdateSettings,
    rng: Random,
) -> list[TaskSample]:
    """One sample per vote, or per written unit test, with a non-zero advantage (the paper's consistency feedback).

    What cannot be parsed takes no part in the normalisation: its advantage is the parse penalty. Unit tests are compared with
    each other within their task and need no balancing; rated by known programs, they teach at any success rate.
    """
    steps: list[_JudgedStep] = []
    unparsed: list[TaskSample] = []
    written: list[TaskSample] = []
    for group, credit in zip(groups, credits, strict=True):
        if not group.solutions and not _is_trained_on(group, settings):
            continue
        if group.tests:
            written += _test_samples(group, reward_settings.parse_penalty)
            continue
        for g in group.valid_indices:
            for votes, reward, surprised in zip(group.judgments[g], credit.rewards[g], credit.surprise[g], strict=True):
                parsed = [vote for vote in votes if vote.score is not None]
                if reward_settings.parse_penalty != 0.0:
                    unparsed += [_vote_sample(v, reward_settings.parse_penalty, group) for v in votes if v.score is None]
                (consistency,) = consistency_rewards(np.array([reward]), scores_of([parsed])) if parsed else ([],)
                (advantages,) = judge_advantages([consistency], normalization=reward_settings.judge_normalization)
                if any(advantages):
                    steps.append(_JudgedStep(group, tuple(parsed), tuple(advantages), bool(reward > 0), float(surprised)))
    balanced = _balanced(steps, reward_settings.judge_balance, rng)
    return [
        _vote_sample(vote, advantage * scale, step.group)
        for step, scale in balanced
        for vote, advantage in zip(step.votes, step.advantages, strict=True)
        if advantage * scale != 0.0
    ] + [*unparsed, *written]


def _test_samples(group: RolloutGroup, parse_penalty: float) -> list[TaskSample]:
    """One sample per unit test with a non-zero advantage: tests that right programs pass and wrong ones fail gain."""
    passed, is_correct = test_results(group)
    advantages = unit_test_advantages(unit_test_rewards(passed, is_correct))
    samples = []
    for test, advantage in zip(group.tests, advantages.tolist(), strict=True):
        paid = advantage if test.test is not None else parse_penalty
        if paid != 0.0:
            sample = Sample(test.prompt_ids, test.completion.token_ids, paid)
            samples.append(TaskSample(sample, group.task.id, test.completion.logprobs))
    return samples


@dataclass(frozen=True)
class _JudgedStep:
    """A step whose votes differ."""

    group: RolloutGroup
    votes: tuple[Judgment, ...]
    advantages: tuple[float, ...]  # one per vote
    is_praised: bool  # the reward is positive, so that votes of +1 gain
    surprise: float


def _balanced(steps: Sequence[_JudgedStep], balance: JudgeBalance, rng: Random) -> list[tuple[_JudgedStep, float]]:
    """Steps with the factor of their advantages, so that praise and blame weigh the same in sum."""
    if balance == "none":
        return [(step, 1.0) for step in steps]
    if balance == "direction":
        return [(steps[i], 1.0) for i in balanced_indices([step.is_praised for step in steps], rng)]
    praise = sum(step.surprise for step in steps if step.is_praised)
    blame = sum(step.surprise for step in steps if not step.is_praised)
    if not (praise and blame):
        return []
    half = (praise + blame) / 2
    return [(step, step.surprise * half / (praise if step.is_praised else blame)) for step in steps]


def value_samples(groups: Sequence[RolloutGroup], settings: UpdateSettings) -> list[ValueSample]:
    """One sample per step: the state before the action and the verified outcome."""
    return [
        ValueSample(step.critic_ids, trajectory.outcome, group.task.id)
        for group in groups
        if _is_trained_on(group, settings)
        for trajectory in group.valid_trajectories
        for step in trajectory.steps
    ]


def iteration_result(
    iteration: int,
    feedback: Sequence[TaskFeedback],
    groups: Sequence[RolloutGroup],
    credits: Sequence[GroupCredit],
    values: Sequence[Sequence[np.ndarray]],
    metrics: Mapping[str, float],
) -> IterationResult:
    """The record for callbacks, with plain numbers in place of arrays."""

    def plain(groups_of_arrays: Sequence[Sequence[np.ndarray]]) -> tuple[tuple[tuple[float, ...], ...], ...]:
        return tuple(tuple(tuple(array.tolist()) for array in arrays) for arrays in groups_of_arrays)

    return IterationResult(
        iteration=iteration,
        feedback=tuple(feedback),
        groups=tuple(groups),
        advantages=plain([credit.advantages for credit in credits]),
        rewards=plain([credit.rewards for credit in credits]),
        values=plain(values),
        metrics=metrics,
    )


def minibatches(units: Sequence[Sequence[T]], settings: UpdateSettings, rng: Random) -> list[list[T]]:
    """At most `max_samples` samples in random order, cut into `minibatches` equal parts (fewer when few).

    Args:
        units: samples that share work, which stay together; one that is too many for a part, and the last one drawn, are cut.
        settings: of the update.
        rng: for the order.
    """
    drawn: list[Sequence[T]] = []
    room = min(settings.max_samples, sum(map(len, units)))
    most = -(-room // settings.minibatches)
    cut = [unit[i : i + most] for unit in units for i in range(0, len(unit), most)]
    for unit in rng.sample(cut, len(cut)):
        if room > 0:
            drawn.append(unit[:room])
            room -= len(drawn[-1])
    parts: list[list[T]] = [[] for _ in range(min(settings.minibatches, len(drawn)))]
    for unit in sorted(drawn, key=len, reverse=True):  # longest first into the emptiest, so that they come out alike
        min(parts, key=len).extend(unit)
    return parts


def pieces(
    samples: Sequence[TaskSample],
    settings: UpdateSettings,
    rng: Random,
    pad_id: int,
    device: torch.device,
    width: int | None = None,
) -> list[list[Piece]]:
    """This rank's forward passes of each optimizer step; `width` of a model that can share prefixes."""
    steps = []
    answers = [(*item.sample.prompt_ids, *item.sample.response_ids) for item in samples]
    together = [[i] for i in range(len(samples))]
    if width is not None:
        together = related(answers, [len(item.sample.prompt_ids) for item in samples])
    for part in minibatches([[samples[i] for i in unit] for unit in together], settings, rng):
        step = []
        for rows, is_real in _share_of_rank(pack([item.sample for item in part], settings.token_budget, width)):
            batch, chosen = make_micro_batch([item.sample for item in part], rows, pad_id)
            items = [part[index] for index in chosen]
            sampled = torch.zeros(batch.response_mask.shape)
            sampled[batch.response_mask.bool()] = torch.tensor([x for item in items for x in item.sampler_logprobs])
            batch = batch if is_real else zero_weight(batch)
            task_ids = tuple(dict.fromkeys(item.task_id for item in items))
            step.append(Piece(batch.to(device), sampled.to(device), len(part), task_ids))
        steps.append(step)
    return steps


def value_pieces(
    samples: Sequence[ValueSample], settings: UpdateSettings, rng: Random, pad_id: int, device: torch.device
) -> list[list[ValuePiece]]:
    """This rank's forward passes of each optimizer step of the value model."""
    steps = []
    for part in minibatches([[sample] for sample in samples], settings, rng):
        step = []
        lengths = np.array([[len(item.prompt_ids)] for item in part])
        for rows, is_real in _share_of_rank(split_by_budget(lengths, settings.token_budget)):
            chosen = [part[row] for row in rows]
            weights = [1.0 if is_real else 0.0] * len(chosen)
            batch = make_value_batch([item.prompt_ids for item in chosen], [item.outcome for item in chosen], weights, pad_id)
            task_ids = tuple(dict.fromkeys(item.task_id for item in chosen))
            step.append(ValuePiece(batch.to(device), len(part), task_ids))
        steps.append(step)
    return steps


def _share_of_rank(micro_batches: Sequence[T]) -> Iterator[tuple[T, bool]]:
    """This rank's micro-batches; a padding one (False) repeats the first so that all ranks make equal calls."""
    rounds = -(-len(micro_batches) // world_size())
    for turn in range(rounds):
        index = turn * world_size() + rank()
        yield (micro_batches[index], True) if index < len(micro_batches) else (micro_batches[0], False)


def _is_trained_on(group: RolloutGroup, settings: UpdateSettings) -> bool:
    return group.rollouts > 0 and in_band(group.successes, group.rollouts, settings.success_low, settings.success_high)


def _vote_sample(vote: Judgment, advantage: float, group: RolloutGroup) -> TaskSample:
    sample = Sample(vote.prompt_ids, vote.completion.token_ids, advantage)
    return TaskSample(sample, group.task.id, vote.completion.logprobs)
