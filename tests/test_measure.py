import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from rla_lightning.algorithm.precision import RolloutVotes, precision_intervals
from rla_lightning.measure import (
    NEEDS_LABELS,
    TaskVotes,
    iteration_metrics,
    learning_signal,
    measure,
    on_fixed_steps,
    precision_metrics,
)
from rla_lightning.types import (
    LOST,
    WON,
    Completion,
    Judgment,
    Observation,
    RolloutGroup,
    Step,
    StepLabel,
    Task,
    Trajectory,
    UnitTest,
    WrittenTest,
)

CPU = torch.device("cpu")
TASK = Task("t", "toy", {}, 0.5, "t")
ANSWER = Completion((1,), (0.0,), "", "EOS")
SCORE = {"+": 1, "-": -1, "?": None}


def rollout(outcome: float, *votes: str, stop="DONE", label: int | None = 1, invalid: int = 0):
    """A trajectory with one step per string of votes, the first `invalid` of them invalid, and its judgments."""
    mark = None if label is None else StepLabel(label)
    steps = tuple(Step((1,), ANSWER, Observation(""), "a", k >= invalid, label=mark) for k in range(len(votes)))
    judged = tuple(tuple(Judgment((1,), ANSWER, SCORE[vote]) for vote in text) for text in votes)
    return Trajectory(TASK, steps, outcome, stop), judged


def group(*rollouts) -> RolloutGroup:
    return RolloutGroup(TASK, tuple(t for t, _ in rollouts), tuple(judged for _, judged in rollouts))


# Two active tasks, then a proposal; label is that of every step.
MIXED = group(rollout(WON, "++-", "+++"), rollout(LOST, "--+", "-??", invalid=1, label=-1))
FAILED = group(rollout(LOST, "---", label=-1), rollout(LOST, "+", stop="ENV_ERROR", label=-1))
EASY = group(rollout(WON, "+++"), rollout(WON, "--+"))
GROUPS = [MIXED, FAILED, EASY]
VALUES = [
    [np.array([0.5, 0.9]), np.array([0.5, 0.1])],
    [np.array([0.25]), np.array([0.75])],
    [np.array([0.8]), np.array([0.6])],
]


def test_what_one_iteration_saw():
    metrics = iteration_metrics(GROUPS, VALUES, active=2)
    assert {name: value for name, value in metrics.items() if not name.endswith(("_low", "_high")) and "_at/" not in name} == {
        # of the two active tasks: 3 rollouts without an error, 1 won, 5 steps, 1 of them invalid; 1 error in 4
        "rollout/success_rate": pytest.approx(1 / 3),
        "rollout/invalid_action_rate": pytest.approx(1 / 5),
        "rollout/mean_turns": pytest.approx(5 / 3),
        "rollout/mean_turns_won": 2.0,
        "rollout/truncated_rate": 0.0,
        "rollout/env_error_rate": pytest.approx(1 / 4),
        # won steps: ++- +++ +++ --+ give 9 of 12 votes +1; lost steps: --+ -?? --- give 6 of 7 parsed votes -1
        "reward_model/p_plus": pytest.approx(9 / 12),
        "reward_model/p_minus": pytest.approx(6 / 7),
        "reward_model/mu": pytest.approx(9 / 12 + 6 / 7),
        "reward_model/outcome_accuracy": pytest.approx(15 / 19),
        "reward_model/outcome_accuracy_balanced": pytest.approx((9 / 12 + 6 / 7) / 2),
        "reward_model/parse_error_rate": pytest.approx(2 / 21),
        # squared errors .25 .01 .25 .01 .0625 .04 .16 = .7825 over 7 steps, 4 of them of won rollouts
        "critic/brier": pytest.approx(0.7825 / 7),
        "critic/brier_constant": pytest.approx(4 / 7 * 3 / 7),
        # first steps: .25 .25 .0625 .04 .16 = .7625 over 5 rollouts, 3 of them won
        "critic/brier_start": pytest.approx(0.7625 / 5),
        "critic/brier_start_constant": pytest.approx(3 / 5 * 2 / 5),
    }


def test_an_iteration_of_proposals_only_is_counted_too():
    metrics = iteration_metrics(GROUPS, VALUES, active=0)
    assert metrics["rollout/success_rate"] == pytest.approx(3 / 5)
    assert metrics["rollout/mean_turns"] == pytest.approx(7 / 5)


def test_groups_with_a_learning_signal():
    # the mixed one has won and lost rollouts, the other two tie
    expected = {"rollout/frac_reward_zero_std": pytest.approx(2 / 3), "rollout/groups_with_signal": 1.0}
    assert learning_signal(GROUPS) == expected


def test_a_group_of_errors_is_no_tie():
    errors = group(rollout(LOST, stop="ENV_ERROR"), rollout(LOST, stop="ENV_ERROR"))
    assert learning_signal([MIXED, errors]) == {"rollout/frac_reward_zero_std": 0.0, "rollout/groups_with_signal": 1.0}
    metrics = iteration_metrics([errors], [[np.zeros(0), np.zeros(0)]], active=1)
    assert metrics["rollout/env_error_rate"] == 1.0
    assert learning_signal([errors])["rollout/frac_reward_zero_std"] == 0.0
    assert math.isnan(metrics["rollout/success_rate"])


def test_evaluation_measures_against_the_labels_as_well():
    metrics = measure(GROUPS, VALUES, CPU)
    # valid labelled actions: right ++- +++ +++ --+ (9 of 12 votes +1), wrong -?? --- (4 of 4 votes -1);
    # the invalid action --+ counts in process_accuracy_all only: (9 + 4 + 2) of 19
    assert metrics["reward_model/true_positive_rate"] == pytest.approx(9 / 12)
    assert metrics["reward_model/true_negative_rate"] == 1.0
    assert metrics["reward_model/process_accuracy"] == pytest.approx((9 / 12 + 1) / 2)
    assert metrics["reward_model/process_accuracy_all"] == pytest.approx(15 / 19)
    assert metrics["reward_model/auc"] == 1.0  # mean votes 1/3 1 1 -1/3 against -1 -1
    assert metrics["rollout/right_step_rate"] == pytest.approx(4 / 7)
    assert metrics["rollout/success_rate"] == pytest.approx(3 / 5)  # of all groups here
    missing = {name for name in metrics if name.rsplit("/", 1)[-1] in NEEDS_LABELS}
    assert missing == metrics.keys() - iteration_metrics(GROUPS, VALUES, active=2).keys()


def test_predictions_must_match_the_rollouts():
    with pytest.raises(ValueError, match="zip"):
        measure([MIXED], [VALUES[0][:1]], CPU)


def test_the_judge_is_measured_on_fixed_steps_where_there_are_any():
    on_policy = measure(GROUPS, VALUES, CPU)
    fixed = [group(rollout(WON, "++-", "---", label=1)), group(rollout(LOST, "+--", label=-1))]
    metrics = on_fixed_steps(on_policy, GROUPS, fixed, CPU)
    # right steps: 2 of 6 votes +1; wrong step: 2 of 3 votes -1
    assert metrics["reward_model/true_positive_rate"] == pytest.approx(2 / 6)
    assert metrics["reward_model/true_negative_rate"] == pytest.approx(2 / 3)
    assert metrics["reward_model/mu"] == pytest.approx(2 / 6 + 2 / 3)
    assert metrics["reward_model_on_policy/true_positive_rate"] == pytest.approx(9 / 12)
    assert metrics["reward_model_on_policy/mu"] == pytest.approx(9 / 12 + 6 / 7)
    assert metrics["rollout/success_rate"] == pytest.approx(3 / 5)
    assert metrics["critic/brier"] == pytest.approx(0.7825 / 7)


def test_without_an_expert_the_policys_own_steps_serve_as_both():
    metrics = on_fixed_steps(measure(GROUPS, VALUES, CPU), GROUPS, [], CPU)
    assert metrics["reward_model/mu"] == metrics["reward_model_on_policy/mu"] == pytest.approx(9 / 12 + 6 / 7)


# Unit tests as judgments


def with_tests(*programs, kind: str = "") -> RolloutGroup:
    """Programs with what they make of test j at place j; a test that all mark "?" is unreadable."""
    judged = group(*programs)
    columns = zip(*(votes[-1] for votes in judged.judgments if votes), strict=True)
    known = [any(vote.score is not None for vote in column) for column in columns]
    tests = tuple(WrittenTest((1,), ANSWER, UnitTest("1", "2") if is_known else None) for is_known in known)
    return replace(judged, task=replace(TASK, kind=kind), tests=tests)


# Of the policy's programs: tests 1 and 2 pass the right program, 1 fails both wrong ones, 2 one of them, 3 is unreadable;
# of the other task there is no right program; of the last one no wrong one, and one of two tests passes it.
WRITTEN = [
    with_tests(rollout(WON, "++?-"), rollout(LOST, "--?-"), rollout(LOST, "-+?+"), rollout(LOST, stop="ENV_ERROR")),
    with_tests(rollout(LOST, "----"), rollout(LOST, "++--"), kind="odd"),
    with_tests(rollout(WON, "+-"), rollout(WON, "+-"), kind="odd"),
]
CRITIC = [[np.full(len(t.steps), 0.5) for t in of.trajectories] for of in WRITTEN]
ON_POLICY = {
    "ut": 3 / 6,  # of the 4 tests of the first task and the 2 of the last
    "detect": 1 / 4,  # of the first task's
    "discrimination": (1 + 1 / 2) / 2,
    "readable_rate": 9 / 10,
}
# Of known programs: both tests pass the right one, one fails the wrong one; of the other task a test rejects the right one
KNOWN = [
    with_tests(rollout(WON, "++"), rollout(LOST, "-+", label=-1)),
    with_tests(rollout(WON, "-"), rollout(LOST, "-", label=-1), kind="odd"),
]
ON_KNOWN = {"ut": 2 / 3, "detect": 1 / 3, "discrimination": 1 / 2, "readable_rate": 1.0}


def of_tests(metrics: dict[str, float], prefix: str) -> dict[str, float]:
    return {name: metrics[f"{prefix}/{name}"] for name in ON_POLICY}


def test_an_iteration_measures_its_unit_tests():
    metrics = iteration_metrics(WRITTEN, CRITIC, active=1)
    assert of_tests(metrics, "reward_model") == pytest.approx(ON_POLICY)
    assert metrics["rollout/success_rate"] == pytest.approx(1 / 3)  # of the one active task
    assert metrics["reward_model/parse_error_rate"] == pytest.approx(1 / 10)  # the unreadable test of all that were written


def test_votes_on_steps_have_no_metrics_of_unit_tests():
    names = set(iteration_metrics(GROUPS, VALUES, active=2)) | set(on_fixed_steps(measure(GROUPS, VALUES, CPU), GROUPS, [], CPU))
    assert not {name for name in names if name.rsplit("/", 1)[-1] in ON_POLICY}


def test_unit_tests_are_measured_on_known_programs_and_on_the_policys():
    metrics = on_fixed_steps(measure(WRITTEN, CRITIC, CPU), WRITTEN, KNOWN, CPU, ["odd"])
    assert of_tests(metrics, "reward_model_on_policy") == pytest.approx(ON_POLICY)
    assert of_tests(metrics, "reward_model") == pytest.approx(ON_KNOWN)
    assert metrics["reward_model_on_policy/ut/odd"] == 1 / 2
    assert math.isnan(metrics["reward_model_on_policy/detect/odd"])
    assert (metrics["reward_model/ut/odd"], metrics["reward_model/detect/odd"]) == (0.0, 0.0)
    # scores on known programs: right ++- are 2 of 3 +1, wrong -+- are 2 of 3 -1
    assert metrics["reward_model/true_positive_rate"] == pytest.approx(2 / 3)
    assert metrics["reward_model/true_negative_rate"] == pytest.approx(2 / 3)
    assert metrics["rollout/success_rate"] == pytest.approx(3 / 7)


def test_without_known_programs_the_policys_serve_as_both():
    metrics = on_fixed_steps(measure(WRITTEN, CRITIC, CPU), WRITTEN, [], CPU, ["odd"])
    assert of_tests(metrics, "reward_model") == of_tests(metrics, "reward_model_on_policy") == pytest.approx(ON_POLICY)


def test_precision_has_intervals_over_tasks_and_by_difficulty():
    def votes(difficulty: float, *counts: tuple[float, int]) -> TaskVotes:
        return TaskVotes(difficulty, tuple(RolloutVotes(outcome, plus, 4) for outcome, plus in counts))

    tasks = [votes(0.1, (WON, 4), (WON, 3), (LOST, 0)), votes(0.15, (WON, 1), (LOST, 2)), votes(0.9, (LOST, 1))]
    metrics = precision_metrics(tasks)
    # the two rollouts of the first task count as one of 7 in 8 votes, so three tasks are three clusters, not four
    one = precision_intervals([RolloutVotes(WON, 7, 8), RolloutVotes(WON, 1, 4)]).p_plus
    assert (metrics["p_plus_low"], metrics["p_plus_high"]) == (one.low, one.high)
    assert metrics["mu_low"] <= 8 / 12 + 9 / 12 <= metrics["mu_high"]
    assert metrics["mu_at/0.0-0.2"] == pytest.approx(8 / 12 + 6 / 8)
    assert metrics["mu_at/0.0-0.2_low"] < metrics["mu_at/0.0-0.2"] < metrics["mu_at/0.0-0.2_high"]
    assert math.isnan(metrics["mu_at/0.8-1.0"])  # nothing was won there
    assert precision_metrics([]).keys() == metrics.keys()  # the same names everywhere
    assert all(math.isnan(value) for value in precision_metrics([TaskVotes(0.5, ())]).values())
