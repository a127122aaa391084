"""What is measured over rollouts, judgments and predictions; sums across batches and processes.

Every value is a float tensor, NaN where there is no data to define it. Trajectories that an exception
of the environment ended are skipped everywhere except in `env_error_rate`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from rla_lightning.types import Judgment, RolloutGroup, Step, Trajectory

DIFFICULTY_BINS = ("0.0-0.2", "0.2-0.4", "0.4-0.6", "0.6-0.8", "0.8-1.0")  # the last one includes its end


class RolloutMetrics(Metric):
    """How the policy's rollouts went.

    mean_turns_won is that of won rollouts, truncated_rate the share of rollouts that outgrew the context, right_step_rate
    the share of steps that the ground truth labels +1, among labelled ones.
    """

    full_state_update = False
    trajectories: Tensor
    errors: Tensor
    successes: Tensor
    truncated: Tensor
    steps: Tensor
    steps_won: Tensor
    invalid: Tensor
    labelled: Tensor
    right: Tensor
    _COUNTS = ("trajectories", "errors", "successes", "truncated", "steps", "steps_won", "invalid", "labelled", "right")

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        _add_counts(self, self._COUNTS)

    def update(self, groups: Sequence[RolloutGroup]) -> None:
        counts: Counter[str] = Counter()
        for group in groups:
            rollouts = group.valid_trajectories
            steps = [step for trajectory in rollouts for step in trajectory.steps]
            labels = [step.label.score for step in steps if step.label is not None]
            counts.update(
                trajectories=group.rollouts,
                errors=len(group.trajectories) - group.rollouts,
                successes=group.successes,
                truncated=sum(trajectory.stop_reason == "TRUNCATED" for trajectory in rollouts),
                steps=len(steps),
                steps_won=sum(len(trajectory.steps) for trajectory in rollouts if trajectory.is_won),
                invalid=sum(not step.is_valid for step in steps),
                labelled=len(labels),
                right=labels.count(1),
            )
        _add(self, counts)

    def compute(self) -> dict[str, Tensor]:
        return {
            "success_rate": self.successes / self.trajectories,
            "invalid_action_rate": self.invalid / self.steps,
            "mean_turns": self.steps / self.trajectories,
            "mean_turns_won": self.steps_won / self.successes,
            "truncated_rate": self.truncated / self.trajectories,
            "env_error_rate": self.errors / (self.trajectories + self.errors),
            "right_step_rate": self.right / self.labelled,
        }


class SuccessBreakdown(Metric):
    """Success on evaluation tasks by kind, by difficulty and, with several samples of each, its spread.

    success_rate_at/0.2-0.4 is that of tasks with a difficulty from 0.2 to below 0.4. Pass j is sample j of every task;
    success_rate_std is the standard deviation of the passes' success rates (n - 1 in the denominator).
    """

    full_state_update = False
    kind_rollouts: Tensor  # [kinds]
    kind_successes: Tensor
    bin_rollouts: Tensor  # [difficulty bins]
    bin_successes: Tensor
    pass_rollouts: Tensor  # [samples]
    pass_successes: Tensor

    def __init__(self, kinds: Sequence[str], samples: int, **kwargs: Any) -> None:
        """Args:
        kinds: of all evaluation tasks, so that every process has the same numbers, whatever its share.
        samples: rollouts of each task.
        kwargs: of torchmetrics.
        """
        super().__init__(**kwargs)
        self.kinds = tuple(kinds)
        for name, length in (("kind", len(self.kinds)), ("bin", len(DIFFICULTY_BINS)), ("pass", samples)):
            for count in ("rollouts", "successes"):
                self.add_state(f"{name}_{count}", default=torch.zeros(length, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, groups: Sequence[RolloutGroup]) -> None:
        counts = {
            "kind": torch.zeros(2, len(self.kinds), dtype=torch.long),  # rollouts, successes
            "bin": torch.zeros(2, len(DIFFICULTY_BINS), dtype=torch.long),
            "pass": torch.zeros(2, len(self.pass_rollouts), dtype=torch.long),
        }
        for group in groups:
            rolled = torch.tensor([group.rollouts, group.successes])
            counts["bin"][:, difficulty_bin(group.task.difficulty)] += rolled
            if group.task.kind:
                counts["kind"][:, self.kinds.index(group.task.kind)] += rolled
            for sample in group.valid_indices:
                counts["pass"][:, sample] += torch.tensor([1, int(group.trajectories[sample].is_won)])
        for name, (rollouts, successes) in counts.items():
            _add(self, {f"{name}_rollouts": rollouts.to(self.device), f"{name}_successes": successes.to(self.device)})

    def compute(self) -> dict[str, Tensor]:
        rates = self.kind_successes / self.kind_rollouts
        by_kind = {f"success_rate/{kind}": rate for kind, rate in zip(self.kinds, rates, strict=True)}
        at = self.bin_successes / self.bin_rollouts
        by_difficulty = {f"success_rate_at/{name}": rate for name, rate in zip(DIFFICULTY_BINS, at, strict=True)}
        if len(self.pass_rollouts) == 1:
            return by_kind | by_difficulty
        spread = (self.pass_successes / self.pass_rollouts).std()
        return {"success_rate_std": spread, **by_kind, **by_difficulty}


def difficulty_bin(difficulty: float) -> int:
    """The index in DIFFICULTY_BINS of a difficulty in [0, 1]."""
    return min(len(DIFFICULTY_BINS) - 1, int(difficulty * len(DIFFICULTY_BINS) + 1e-9))


class JudgeMetrics(Metric):
    """How good the reward model's votes are, against step labels (process) and against outcomes.

    process_accuracy, true_positive_rate, true_negative_rate and auc count valid actions only: an invalid
    command is easy to spot and would dominate them. auc is the chance that a right step's mean vote exceeds
    a wrong step's, ties counted half. process_accuracy_all is the plain share over all actions. Votes that
    cannot be parsed count in parse_error_rate and nowhere else. mu = p_plus + p_minus (paper section 2).
    """

    full_state_update = False
    votes: Tensor
    parsed: Tensor
    right_votes: Tensor  # by label, valid actions
    right_plus: Tensor
    wrong_votes: Tensor
    wrong_minus: Tensor
    all_votes: Tensor  # by label, all actions
    all_agree: Tensor
    won_votes: Tensor  # by outcome
    won_plus: Tensor
    lost_votes: Tensor
    lost_minus: Tensor
    right_means: list[Tensor]  # mean vote of each labelled step with a valid action
    wrong_means: list[Tensor]
    _COUNTS = (
        *("votes", "parsed", "right_votes", "right_plus", "wrong_votes", "wrong_minus", "all_votes", "all_agree"),
        *("won_votes", "won_plus", "lost_votes", "lost_minus"),
    )

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        _add_counts(self, self._COUNTS)
        for name in ("right_means", "wrong_means"):
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def update(self, groups: Sequence[RolloutGroup]) -> None:
        counts: Counter[str] = Counter()
        means: dict[bool, list[float]] = {True: [], False: []}
        for group in groups:  # a unit test that could not be run was parsed all the same
            counts.update(votes=len(group.tests), parsed=sum(test.test is not None for test in group.tests))
        for trajectory, step, judgments, is_test in _judged_steps(groups):
            votes = [judgment.score for judgment in judgments if judgment.score is not None]
            plus, minus = votes.count(1), votes.count(-1)
            if not is_test:
                counts.update(votes=len(judgments), parsed=len(votes))
            if trajectory.is_won:
                counts.update(won_votes=len(votes), won_plus=plus)
            else:
                counts.update(lost_votes=len(votes), lost_minus=minus)
            if step.label is None or not votes:
                continue
            is_right = step.label.score == 1
            counts.update(all_votes=len(votes), all_agree=plus if is_right else minus)
            if not step.is_valid:
                continue
            means[is_right].append(sum(votes) / len(votes))
            if is_right:
                counts.update(right_votes=len(votes), right_plus=plus)
            else:
                counts.update(wrong_votes=len(votes), wrong_minus=minus)
        _add(self, counts)
        # float32 like the placeholder that torchmetrics gathers from a rank that saw no data
        self.right_means.append(torch.tensor(means[True], dtype=torch.float32, device=self.votes.device))
        self.wrong_means.append(torch.tensor(means[False], dtype=torch.float32, device=self.votes.device))

    def compute(self) -> dict[str, Tensor]:
        true_positive_rate = self.right_plus / self.right_votes
        true_negative_rate = self.wrong_minus / self.wrong_votes
        p_plus, p_minus = self.won_plus / self.won_votes, self.lost_minus / self.lost_votes
        return {
            "process_accuracy": (true_positive_rate + true_negative_rate) / 2,
            "true_positive_rate": true_positive_rate,
            "true_negative_rate": true_negative_rate,
            "auc": area_under_roc(_values(self.right_means), _values(self.wrong_means)),
            "process_accuracy_all": self.all_agree / self.all_votes,
            "outcome_accuracy": (self.won_plus + self.lost_minus) / (self.won_votes + self.lost_votes),
            "outcome_accuracy_balanced": (p_plus + p_minus) / 2,
            "p_plus": p_plus,
            "p_minus": p_minus,
            "mu": p_plus + p_minus,
            "parse_error_rate": (self.votes - self.parsed) / self.votes,
        }


class CriticMetrics(Metric):
    """Brier score of predicted success probabilities, next to that of the best constant.

    brier_start and brier_start_constant count only predictions for a task's first observation.
    """

    full_state_update = False
    number: Tensor
    won: Tensor
    squared_error: Tensor
    number_start: Tensor
    won_start: Tensor
    squared_error_start: Tensor
    _COUNTS = ("number", "won", "number_start", "won_start")
    _SUMS = ("squared_error", "squared_error_start")

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        _add_counts(self, self._COUNTS)
        for name in self._SUMS:
            self.add_state(name, default=torch.zeros(()), dist_reduce_fx="sum")

    def update(self, probabilities: Sequence[float], outcomes: Sequence[float], is_first: Sequence[bool]) -> None:
        """Args:
        probabilities: predicted, of success, one per state.
        outcomes: +1 or -1 of the trajectory that the state belongs to.
        is_first: whether the state is the first of its trajectory.
        """
        counts: Counter[str] = Counter()
        errors = errors_start = 0.0
        for probability, outcome, first in zip(probabilities, outcomes, is_first, strict=True):
            is_won = int(outcome > 0)
            error = (float(probability) - is_won) ** 2
            counts.update(number=1, won=is_won)
            errors += error
            if first:
                counts.update(number_start=1, won_start=is_won)
                errors_start += error
        _add(self, counts)
        self.squared_error = self.squared_error + errors
        self.squared_error_start = self.squared_error_start + errors_start

    def compute(self) -> dict[str, Tensor]:
        rate, rate_start = self.won / self.number, self.won_start / self.number_start
        return {
            "brier": self.squared_error / self.number,
            "brier_constant": rate * (1 - rate),
            "brier_start": self.squared_error_start / self.number_start,
            "brier_start_constant": rate_start * (1 - rate_start),
        }


def area_under_roc(positive: Tensor, negative: Tensor) -> Tensor:
    """P(positive > negative) + P(equal) / 2 over all pairs, exactly; NaN without pairs.

    Args:
        positive: scores [P] of positives.
        negative: scores [N] of negatives.
    """
    if not len(positive) or not len(negative):
        return torch.tensor(torch.nan, device=positive.device)
    ordered = negative.sort().values
    below = torch.searchsorted(ordered, positive, right=False)
    below_or_equal = torch.searchsorted(ordered, positive, right=True)
    return (below + below_or_equal).sum() / (2 * len(positive) * len(negative))


def _judged_steps(groups: Sequence[RolloutGroup]) -> Iterator[tuple[Trajectory, Step, tuple[Judgment, ...], bool]]:
    """Steps with their judgments, and whether those are unit tests."""
    for group in groups:
        if not group.judgments:
            continue
        for trajectory, judged in zip(group.trajectories, group.judgments, strict=True):
            if trajectory.stop_reason != "ENV_ERROR":
                for step, judgments in zip(trajectory.steps, judged, strict=True):
                    yield trajectory, step, judgments, bool(group.tests)


def _add_counts(metric: Metric, names: Sequence[str]) -> None:
    for name in names:
        metric.add_state(name, default=torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")


def _add(metric: Metric, counts: Mapping[str, int | Tensor]) -> None:
    """Not in place: a state that was reset in inference mode could not be changed outside of it."""
    for name, count in counts.items():
        setattr(metric, name, getattr(metric, name) + count)


def _values(state: Any) -> Tensor:
    """The values of a concatenated state, which is a tensor once synced and may be empty."""
    if isinstance(state, Tensor):
        return state
    return dim_zero_cat(state) if state else torch.zeros(0)
