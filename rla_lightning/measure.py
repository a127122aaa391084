"""Named numbers about rollouts, of one training iteration and of one evaluation set."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torchmetrics import Metric

from rla_lightning.algorithm.precision import Interval, RolloutVotes, pooled_votes, precision_intervals, rollout_votes
from rla_lightning.distributed import sum_over_ranks
from rla_lightning.metrics import DIFFICULTY_BINS, CriticMetrics, JudgeMetrics, RolloutMetrics, difficulty_bin
from rla_lightning.metrics_code import UnitTestMetrics
from rla_lightning.types import RolloutGroup
from rla_lightning.updates import votes_of

GroupValues = list[np.ndarray]  # [G] of [K] predicted success probabilities before each step
NEEDS_LABELS = ("process_accuracy", "true_positive_rate", "true_negative_rate", "auc", "process_accuracy_all", "right_step_rate")


def measure(
    groups: Sequence[RolloutGroup], values: Sequence[GroupValues], device: torch.device, over_ranks: bool = True
) -> dict[str, float]:
    """Rollout, judge and critic metrics.

    Args:
        groups: of this rank, or the same groups on every rank when `over_ranks` is False.
        values: the critic's predictions of the same groups.
        device: where ranks exchange their sums.
    """
    metrics: dict[str, Metric] = {
        "rollout": RolloutMetrics(sync_on_compute=over_ranks),
        "reward_model": JudgeMetrics(sync_on_compute=over_ranks),
        "critic": CriticMetrics(sync_on_compute=over_ranks),
    }
    for metric in metrics.values():
        metric.to(device)
    metrics["rollout"].update(groups)
    metrics["reward_model"].update(groups)
    metrics["critic"].update(*_predictions(groups, values))
    return {f"{prefix}/{name}": float(v) for prefix, metric in metrics.items() for name, v in metric.compute().items()}


def on_fixed_steps(
    metrics: dict[str, float],
    groups: Sequence[RolloutGroup],
    fixed: Sequence[RolloutGroup],
    device: torch.device,
    tests_of: Sequence[str] | None = None,
) -> dict[str, float]:
    """`reward_model/...` of the judged `fixed` groups; what `metrics` had becomes `reward_model_on_policy/...`.

    Without fixed groups (an environment without an expert) the policy's own steps serve as both.

    Args:
        metrics: of the policy's own rollouts.
        groups: those rollouts.
        fixed: judged steps, or programs, that no model has a part in.
        device: where ranks exchange their sums.
        tests_of: kinds of tasks where unit tests were written, None where steps were voted on.
    """
    metrics = metrics | _of_tests(groups, device, tests_of)
    on_policy = {n.replace("reward_model/", "reward_model_on_policy/"): v for n, v in metrics.items()}
    if sum_over_ranks({"groups": len(fixed)}, device)["groups"] == 0:
        return {**metrics, **on_policy}
    judge = JudgeMetrics().to(device)
    judge.update(fixed)
    of_fixed = {f"reward_model/{name}": float(value) for name, value in judge.compute().items()}
    return {**on_policy, **of_fixed, **_of_tests(fixed, device, tests_of)}


def _of_tests(groups: Sequence[RolloutGroup], device: torch.device, kinds: Sequence[str] | None) -> dict[str, float]:
    if kinds is None:
        return {}
    tests = UnitTestMetrics(kinds).to(device)
    tests.update(groups)
    return {f"reward_model/{name}": float(value) for name, value in tests.compute().items()}


@dataclass(frozen=True)
class TaskVotes:
    """The judge's votes on the rollouts of one task."""

    difficulty: float
    rollouts: tuple[RolloutVotes, ...]


def task_votes(groups: Sequence[RolloutGroup]) -> list[TaskVotes]:
    """Of each group; nothing where it was not judged."""
    return [
        TaskVotes(group.task.difficulty, tuple(rollout_votes(*votes_of(group))) if group.judgments else ()) for group in groups
    ]


def precision_metrics(votes: Sequence[TaskVotes]) -> dict[str, float]:
    """95% intervals of p_plus, p_minus and mu over tasks, and mu with its interval per bin of difficulty; NaN without votes.

    The tasks are the clusters: rollouts of one are alike, too.
    """
    pooled: dict[str, list[RolloutVotes]] = {"": []}
    pooled |= {f"_at/{name}": [] for name in DIFFICULTY_BINS}
    for task in votes:
        both = pooled_votes(task.rollouts, [0] * len(task.rollouts))
        pooled[""] += both
        pooled[f"_at/{DIFFICULTY_BINS[difficulty_bin(task.difficulty)]}"] += both
    estimates = {name: precision_intervals(rollouts) for name, rollouts in pooled.items()}
    shown: dict[str, Interval] = {"p_plus": estimates[""].p_plus, "p_minus": estimates[""].p_minus}
    shown |= {f"mu{name}": estimate.mu for name, estimate in estimates.items()}
    ends = {f"{name}_low": interval.low for name, interval in shown.items()}
    ends |= {f"{name}_high": interval.high for name, interval in shown.items()}
    ends |= {name: interval.value for name, interval in shown.items() if name.startswith("mu_at/")}
    return {name: math.nan if end is None else end for name, end in sorted(ends.items())}


def iteration_metrics(groups: Sequence[RolloutGroup], values: Sequence[GroupValues], active: int) -> dict[str, float]:
    """What one iteration saw; success and turns of the `active` first groups, which proposals and their parents do not colour."""
    shown = measure(groups, values, torch.device("cpu"), over_ranks=False)
    if active:
        rollouts = RolloutMetrics(sync_on_compute=False)
        rollouts.update(groups[:active])
        shown |= {f"rollout/{name}": float(value) for name, value in rollouts.compute().items()}
    shown = {name: value for name, value in shown.items() if name.rsplit("/", 1)[-1] not in NEEDS_LABELS}
    shown |= {f"reward_model/{name}": value for name, value in precision_metrics(task_votes(groups)).items()}
    if any(group.tests for group in groups):
        tests = UnitTestMetrics((), sync_on_compute=False)
        tests.update(groups)
        shown |= {f"reward_model/{name}": float(value) for name, value in tests.compute().items()}
    return shown


def learning_signal(trained: Sequence[RolloutGroup]) -> dict[str, float]:
    """How many of the groups that are trained on have won and lost rollouts, and the share that has not."""
    rated = [group for group in trained if group.rollouts]
    same = sum(group.successes in (0, group.rollouts) for group in rated)
    return {
        "rollout/frac_reward_zero_std": same / max(1, len(rated)),
        "rollout/groups_with_signal": float(len(rated) - same),
    }


def _predictions(groups: Sequence[RolloutGroup], values: Sequence[GroupValues]) -> tuple[list[float], list[float], list[bool]]:
    predicted: list[float] = []
    outcomes: list[float] = []
    is_first: list[bool] = []
    for group, arrays in zip(groups, values, strict=True):
        for trajectory, array in zip(group.trajectories, arrays, strict=True):
            if trajectory.stop_reason != "ENV_ERROR":
                predicted += array.tolist()
                outcomes += [trajectory.outcome] * len(array)
                is_first += [k == 0 for k in range(len(array))]
    return predicted, outcomes, is_first
