import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rla_lightning.metrics import CriticMetrics, JudgeMetrics, RolloutMetrics, SuccessBreakdown, area_under_roc, difficulty_bin
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
    TrajectoryStop,
)

TASK = Task("t", "toy", {}, 0.5, "t")
COMPLETION = Completion((1,), (0.0,), "", "EOS")


def step(label: int | None, is_valid: bool = True) -> Step:
    return Step((1,), COMPLETION, Observation(""), "a", is_valid, label=None if label is None else StepLabel(label))


def trajectory(outcome: float, *steps: Step, stop: TrajectoryStop = "DONE") -> Trajectory:
    return Trajectory(TASK, steps, outcome, stop)


def votes(*scores: int | None) -> tuple[Judgment, ...]:
    return tuple(Judgment((1,), COMPLETION, score) for score in scores)


# Two groups. Votes by step, with the label and whether the action is valid:
#   won   step 1: + + -  right, valid      lost  step 1: - - +  wrong, valid
#         step 2: + + +  right, valid            step 2: - None None  wrong, INVALID
#   error step 1: - - -  (skipped)               step 3: + - None  right, valid
#   lost  step 1: + + -  wrong, valid
GROUPS = (
    RolloutGroup(
        TASK,
        (
            trajectory(WON, step(1), step(1)),
            trajectory(LOST, step(1), stop="ENV_ERROR"),
            trajectory(LOST, step(-1), stop="MAX_TURNS"),
        ),
        ((votes(1, 1, -1), votes(1, 1, 1)), (votes(-1, -1, -1),), (votes(1, 1, -1),)),
    ),
    RolloutGroup(
        TASK,
        (trajectory(LOST, step(-1), step(-1, is_valid=False), step(1)),),
        ((votes(-1, -1, 1), votes(-1, None, None), votes(1, -1, None)),),
    ),
)


def floats(values: dict[str, Tensor]) -> dict[str, float]:
    return {name: value.item() for name, value in values.items()}


def test_rollout_metrics() -> None:
    metric = RolloutMetrics()
    metric.update(GROUPS)
    assert floats(metric.compute()) == pytest.approx(
        {
            "success_rate": 1 / 3,
            "invalid_action_rate": 1 / 6,
            "mean_turns": 2.0,  # (2 + 1 + 3) / 3
            "mean_turns_won": 2.0,
            "truncated_rate": 0.0,
            "env_error_rate": 1 / 4,
            "right_step_rate": 3 / 6,
        }
    )


def test_rollouts_that_outgrew_the_context_count_as_lost() -> None:
    metric = RolloutMetrics()
    won, lost = trajectory(WON, step(1)), trajectory(LOST, step(1), step(1), step(1), stop="TRUNCATED")
    broken = trajectory(LOST, step(1), stop="ENV_ERROR")
    metric.update([RolloutGroup(TASK, (won, lost, broken)), RolloutGroup(TASK, (lost, lost, won))])
    values = floats(metric.compute())
    assert (values["truncated_rate"], values["success_rate"]) == pytest.approx((3 / 5, 2 / 5))
    assert (values["mean_turns"], values["mean_turns_won"]) == pytest.approx((11 / 5, 1.0))


def of_kind(kind: str, *outcomes: float | None) -> RolloutGroup:
    """One trajectory per outcome; None: the environment failed."""
    task = replace(TASK, kind=kind)
    return RolloutGroup(
        task,
        tuple(Trajectory(task, (), outcome or LOST, "DONE" if outcome else "ENV_ERROR") for outcome in outcomes),
    )


# Three samples of each task. By kind: clean 3 of 6, heat 1 of 2; the task without a kind counts in the passes only.
# By pass: 3 of 4, 1 of 4, 1 of 2 (two errors of the environment)
SAMPLED = (
    of_kind("clean", WON, LOST, WON),
    of_kind("heat", WON, LOST, None),
    of_kind("clean", WON, LOST, LOST),
    of_kind("", LOST, WON, None),
)


def without_difficulty(metric: SuccessBreakdown) -> dict[str, float]:
    return {name: value for name, value in floats(metric.compute()).items() if not name.startswith("success_rate_at/")}


def test_success_by_difficulty() -> None:
    metric = SuccessBreakdown([], samples=2)
    for difficulty, outcomes in [(0.0, (WON, WON)), (0.2, (WON, LOST)), (0.39, (LOST, LOST)), (1.0, (None, WON))]:
        metric.update([RolloutGroup(replace(TASK, difficulty=difficulty), of_kind("", *outcomes).trajectories)])
    values = floats(metric.compute())
    # .2 and .39 share a bin: 1 of 4; an error of the environment does not count
    assert [values[f"success_rate_at/{name}"] for name in ("0.0-0.2", "0.2-0.4", "0.8-1.0")] == [1.0, 0.25, 1.0]
    assert math.isnan(values["success_rate_at/0.4-0.6"])
    assert [difficulty_bin(value) for value in (0.0, 0.1999, 0.2, 0.6, 0.8, 1.0)] == [0, 0, 1, 3, 4, 4]


def test_success_by_kind_and_its_spread_over_passes() -> None:
    metric = SuccessBreakdown(["clean", "cool", "heat"], samples=3)
    metric.update(SAMPLED)
    values = without_difficulty(metric)
    assert math.isnan(values.pop("success_rate/cool"))  # nothing of the kind was played
    # rates .75 .25 .5, mean .5: sqrt((.25² + .25² + 0) / 2)
    assert values == pytest.approx({"success_rate_std": 0.25, "success_rate/clean": 0.5, "success_rate/heat": 0.5})


def test_one_sample_has_no_spread_and_no_kind_no_rate() -> None:
    metric = SuccessBreakdown(["heat"], samples=1)
    metric.update([of_kind("heat", WON), of_kind("heat", LOST), of_kind("heat", WON)])
    assert without_difficulty(metric) == pytest.approx({"success_rate/heat": 2 / 3})
    bare = SuccessBreakdown([], samples=1)
    bare.update([of_kind("", WON)])
    assert without_difficulty(bare) == {}
    two = SuccessBreakdown([], samples=2)
    two.update([of_kind("", WON, WON), of_kind("", LOST, WON)])
    assert without_difficulty(two) == pytest.approx({"success_rate_std": 0.125**0.5})  # .5 and 1


def test_processes_with_other_kinds_give_the_numbers_of_one() -> None:
    first, second, idle = (SuccessBreakdown(["clean", "heat"], samples=3) for _ in range(3))
    first.update(SAMPLED[:1])
    second.update(SAMPLED[1:])
    idle.update([])
    first.merge_state(second)
    first.merge_state(idle)
    expected = {"success_rate_std": 0.25, "success_rate/clean": 0.5, "success_rate/heat": 0.5}
    assert without_difficulty(first) == pytest.approx(expected)
    assert second.compute().keys() == idle.compute().keys() == first.compute().keys()  # the same names everywhere


def test_a_kind_that_was_not_announced_is_refused() -> None:
    with pytest.raises(ValueError, match="not in tuple"):
        SuccessBreakdown(["clean"], samples=3).update(SAMPLED)


def test_unlabelled_steps_leave_the_right_step_rate() -> None:
    metric = RolloutMetrics()
    metric.update([RolloutGroup(TASK, (trajectory(WON, step(None), step(1), step(-1), step(-1)),))])
    assert metric.compute()["right_step_rate"].item() == pytest.approx(1 / 3)


def test_judge_metrics() -> None:
    metric = JudgeMetrics()
    metric.update(GROUPS)
    assert floats(metric.compute()) == pytest.approx(
        {
            # valid and right: 3 + 3 + 2 votes, 2 + 3 + 1 of them plus; valid and wrong: 3 + 3 votes, 1 + 2 minus
            "true_positive_rate": 6 / 8,
            "true_negative_rate": 3 / 6,
            "process_accuracy": 0.625,
            # mean votes of right steps 1/3, 1, 0; of wrong ones 1/3, -1/3: pairs .5 + 1, 1 + 1, 0 + 1 of 6
            "auc": 4.5 / 6,
            "process_accuracy_all": 10 / 15,  # 6 of 8, 3 of 6, 1 of 1
            # won: 6 votes, 5 plus; lost: 3 + 3 + 1 + 2 votes, 1 + 2 + 1 + 1 minus
            "outcome_accuracy": 10 / 15,
            "outcome_accuracy_balanced": (5 / 6 + 5 / 9) / 2,
            "p_plus": 5 / 6,
            "p_minus": 5 / 9,
            "mu": 5 / 6 + 5 / 9,
            "parse_error_rate": 3 / 18,
        }
    )


def test_critic_metrics() -> None:
    metric = CriticMetrics()
    metric.update([0.9, 0.6, 0.2, 0.5], [WON, WON, LOST, LOST], [True, False, True, False])
    assert floats(metric.compute()) == pytest.approx(
        {
            "brier": (0.01 + 0.16 + 0.04 + 0.25) / 4,
            "brier_constant": 0.25,
            "brier_start": (0.01 + 0.04) / 2,
            "brier_start_constant": 0.25,
        }
    )
    metric.update([0.5], [WON], [True])  # base rates 3/5 and 2/3
    assert floats(metric.compute()) == pytest.approx(
        {"brier": 0.71 / 5, "brier_constant": 6 / 25, "brier_start": 0.30 / 3, "brier_start_constant": 2 / 9}
    )


def test_critic_metrics_refuse_unequal_lengths() -> None:
    with pytest.raises(ValueError, match="zip"):
        CriticMetrics().update([0.5, 0.5], [WON], [True])


@pytest.mark.parametrize("kind", [RolloutMetrics, JudgeMetrics])
def test_two_merged_states_equal_one_update(kind: type[RolloutMetrics] | type[JudgeMetrics]) -> None:
    first, second, both = kind(), kind(), kind()
    first.update(GROUPS[:1])
    second.update(GROUPS[1:])
    both.update(GROUPS)
    first.merge_state(second)
    assert floats(first.compute()) == floats(both.compute())


def test_two_merged_critic_states_equal_one_update() -> None:
    first, second, both = CriticMetrics(), CriticMetrics(), CriticMetrics()
    first.update([0.9, 0.6], [WON, WON], [True, False])
    second.update([0.2], [LOST], [True])
    both.update([0.9, 0.6, 0.2], [WON, WON, LOST], [True, False, True])
    first.merge_state(second)
    assert floats(first.compute()) == pytest.approx(floats(both.compute()))


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
@pytest.mark.parametrize("kind", [RolloutMetrics, JudgeMetrics, CriticMetrics])
def test_without_data_every_value_is_nan(kind: type[RolloutMetrics] | type[JudgeMetrics] | type[CriticMetrics]) -> None:
    metric = kind()
    assert all(math.isnan(value) for value in metric.compute().values())
    metric.update([], [], []) if isinstance(metric, CriticMetrics) else metric.update([])
    assert all(math.isnan(value) for value in metric.compute().values())


def test_groups_without_judgments_labels_or_parsed_votes() -> None:
    metric = JudgeMetrics()
    lost = trajectory(LOST, step(None), step(-1))
    metric.update([RolloutGroup(TASK, (lost,)), RolloutGroup(TASK, (lost,), ((votes(1, -1), votes(None, None)),))])
    values = floats(metric.compute())
    undefined = {name for name, value in values.items() if math.isnan(value)}
    assert undefined == {
        *("process_accuracy", "true_positive_rate", "true_negative_rate", "auc", "process_accuracy_all"),
        *("outcome_accuracy_balanced", "p_plus", "mu"),
    }
    assert (values["p_minus"], values["outcome_accuracy"], values["parse_error_rate"]) == (0.5, 0.5, 0.5)


def test_reset_forgets_everything() -> None:
    metric = JudgeMetrics()
    metric.update(GROUPS)
    metric.reset()
    metric.update(GROUPS[1:])
    assert metric.compute()["auc"].item() == 1.0  # mean votes 0 against -1/3


def test_area_under_roc_by_hand() -> None:
    assert area_under_roc(torch.tensor([0.8, 0.3]), torch.tensor([0.5, 0.3, 0.1])).item() == pytest.approx(4.5 / 6)
    assert area_under_roc(torch.tensor([1.0]), torch.tensor([1.0])).item() == 0.5
