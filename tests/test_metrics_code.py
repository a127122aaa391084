import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from torch import Tensor

from rla_lightning.metrics_code import PassMetrics, UnitTestMetrics
from rla_lightning.types import (
    LOST,
    PASSED,
    WON,
    Completion,
    Judgment,
    Observation,
    RolloutGroup,
    Step,
    Task,
    Trajectory,
    TrajectoryStop,
    UnitTest,
    WrittenTest,
)

TASK = Task("t", "programs", {}, 0.5, "t")
COMPLETION = Completion((1,), (0.0,), "", "EOS")
SCORES = {"+": 1, "-": -1, "?": None}
Judged = tuple[Trajectory, tuple[tuple[Judgment, ...], ...]]


def floats(values: dict[str, Tensor]) -> dict[str, float]:
    return {name: value.item() for name, value in values.items()}


def step(is_valid: bool = True, checks: Sequence[str] = ()) -> Step:
    return Step((1,), COMPLETION, Observation(""), "print(1)" if is_valid else "", is_valid, checks=tuple(checks))


def program(outcome: float, scores: str, is_valid: bool = True, stop: TrajectoryStop = "DONE") -> Judged:
    """A rollout of one step and a vote per character: + passes the test, - fails it, ? is not known."""
    votes = tuple(Judgment((1,), COMPLETION, SCORES[score]) for score in scores)
    return Trajectory(TASK, (step(is_valid),), outcome, stop), (votes,)


def group(kind: str, readable: str, *programs: Judged) -> RolloutGroup:
    """Programs of one task; r is a readable test, u an unreadable one."""
    tests = tuple(WrittenTest((1,), COMPLETION, UnitTest("1", "2") if mark == "r" else None) for mark in readable)
    trajectories, judgments = zip(*programs, strict=True)
    return RolloutGroup(replace(TASK, kind=kind), trajectories, judgments, tests)


# Tests by task, what they make of the programs, and what that says (of all tests of the task):
#   1 list, two correct programs and two wrong ones, four tests:
#       1 passes both, rejects both: UT, Detect          3 rejects a correct one, and both wrong ones
#       2 passes both, rejects one of two: UT            4 is unreadable
#     An answer without a program and an environment error would change all of that if they counted.
#   2 text, one correct, one wrong, two tests: 1 passes the correct one, rejects nothing: UT; 2 UT, Detect
#   3 list, no correct program, three tests: only their readability is known
#   4 text, correct programs only, two tests: 1 passes both: UT; 2 passes one of two
#   5 of no kind, one correct and one wrong, one test: UT, Detect
GROUPS = (
    group(
        "list",
        "rrru",
        program(WON, "++-?"),
        program(LOST, "-+-?"),
        program(LOST, "+++?", is_valid=False),
        program(WON, "+++?"),
        program(LOST, "+++?", stop="ENV_ERROR"),
        program(LOST, "---?"),
    ),
    group("text", "rr", program(LOST, "+-"), program(WON, "++")),
    group("list", "rur", program(LOST, "-?+"), program(LOST, "-?-")),
    group("text", "rr", program(WON, "++"), program(WON, "+-")),
    group("", "r", program(WON, "+"), program(LOST, "-")),
)
EXPECTED = {
    "ut": 6 / 9,  # 2 of 4, 2 of 2, 1 of 2, 1 of 1
    "detect": 3 / 7,  # 1 of 4, 1 of 2, 1 of 1
    "discrimination": 3.5 / 5,  # 1, 1/2; 0, 1; 1
    "readable_rate": 10 / 12,
    "ut/list": 2 / 4,
    "detect/list": 1 / 4,
    "ut/text": 3 / 4,
    "detect/text": 1 / 2,
}


def unit_tests(*groups: RolloutGroup, kinds: Sequence[str] = ()) -> dict[str, float]:
    metric = UnitTestMetrics(kinds)
    metric.update(groups)
    return floats(metric.compute())


# Unit tests


def test_unit_test_metrics() -> None:
    assert unit_tests(*GROUPS, kinds=["list", "text"]) == pytest.approx(EXPECTED)


def test_kinds_that_were_not_asked_for_count_in_the_totals_only() -> None:
    totals = {name: EXPECTED[name] for name in ("ut", "detect", "discrimination", "readable_rate")}
    assert unit_tests(*GROUPS) == pytest.approx(totals)
    values = unit_tests(*GROUPS, kinds=["text", "graph"])
    assert math.isnan(values.pop("ut/graph"))  # nothing of the kind was played
    assert math.isnan(values.pop("detect/graph"))
    assert values == pytest.approx(totals | {"ut/text": 3 / 4, "detect/text": 1 / 2})


def test_no_correct_program_leaves_only_the_readable_rate() -> None:
    values = unit_tests(GROUPS[2], kinds=["list"])
    assert values.pop("readable_rate") == pytest.approx(2 / 3)
    assert len(values) == 5
    assert all(math.isnan(value) for value in values.values())


def test_correct_programs_only_leave_detection_open() -> None:
    values = unit_tests(GROUPS[3])
    assert (values["ut"], values["readable_rate"]) == (0.5, 1.0)
    assert math.isnan(values["detect"])
    assert math.isnan(values["discrimination"])


def test_an_answer_without_a_program_is_not_a_wrong_program() -> None:
    nothing = (Trajectory(TASK, (), LOST, "TRUNCATED"), ())
    values = unit_tests(group("", "r", program(WON, "+"), program(LOST, "-", is_valid=False), nothing))
    assert values["ut"] == 1.0
    assert math.isnan(values["detect"])  # both would be easy to reject


def test_unreadable_tests_count_as_failures() -> None:
    values = unit_tests(group("", "ruuu", program(WON, "+???"), program(LOST, "-???")))
    assert values == {"ut": 0.25, "detect": 0.25, "discrimination": 1.0, "readable_rate": 0.25}


def test_a_program_that_was_not_run_on_every_test_does_not_spoil_the_mean() -> None:
    # nothing is known for sure about the wrong program of the second task: both tests are right there, neither is opposed
    values = unit_tests(
        group("", "r", program(WON, "+"), program(LOST, "+"), program(LOST, "-")),
        group("", "rr", program(WON, "++"), program(LOST, "?-")),
    )
    assert values == pytest.approx({"ut": 1.0, "detect": 0.0, "discrimination": 1 / 2, "readable_rate": 1.0})


def test_pairs_that_were_not_run_are_left_out() -> None:
    # passes the correct program that was run, rejects the wrong one that was
    values = unit_tests(group("", "r", program(WON, "+"), program(WON, "?"), program(LOST, "-"), program(LOST, "?")))
    assert values == {"ut": 1.0, "detect": 1.0, "discrimination": 1.0, "readable_rate": 1.0}


def test_only_the_last_step_is_judged() -> None:
    (trajectory, judgments), wrong = program(WON, "+-"), program(LOST, "--")
    longer = (replace(trajectory, steps=(step(is_valid=False), *trajectory.steps)), ((), *judgments))
    values = unit_tests(group("", "rr", longer, wrong))
    assert (values["ut"], values["detect"]) == (0.5, 0.5)


def test_tasks_without_tests_are_skipped() -> None:
    bare = RolloutGroup(TASK, (program(WON, "")[0],))
    assert unit_tests(bare, *GROUPS, bare, kinds=["list", "text"]) == pytest.approx(EXPECTED)


@pytest.mark.parametrize("cut", range(6))
def test_two_updates_equal_one_and_so_do_two_processes(cut: int) -> None:
    twice, first, second = (UnitTestMetrics(["list", "text"]) for _ in range(3))
    twice.update(GROUPS[:cut])
    twice.update(GROUPS[cut:])
    assert floats(twice.compute()) == pytest.approx(EXPECTED)
    first.update(GROUPS[:cut])  # one of the processes may have nothing
    second.update(GROUPS[cut:])
    first.merge_state(second)
    assert floats(first.compute()) == pytest.approx(EXPECTED)


def test_reset_forgets_everything() -> None:
    metric = UnitTestMetrics([])
    metric.update(GROUPS)
    metric.reset()
    metric.update(GROUPS[1:2])
    assert floats(metric.compute()) == {"ut": 1.0, "detect": 0.5, "discrimination": 0.5, "readable_rate": 1.0}


# pass@k


def played(*outcomes: float | None) -> RolloutGroup:
    """One trajectory per outcome; None: the environment failed."""
    return RolloutGroup(
        TASK,
        tuple(Trajectory(TASK, (step(),), outcome or LOST, "DONE" if outcome else "ENV_ERROR") for outcome in outcomes),
    )


# pass@1, @2 and @4 of each:
#   2 of 4 right: 1/2, 1 - 1/6 = 5/6, 1             0 of 4: 0, 0, 0
#   1 of 3 right and an error: 1/3, 1 - 1/3 = 2/3   1 of 1 and three errors: 1
#   errors only: nothing
SAMPLED = (
    played(WON, LOST, LOST, WON),
    played(LOST, LOST, LOST, LOST),
    played(LOST, None, WON, LOST),
    played(None, None, WON, None),
    played(None, None, None, None),
)
PASSES = {
    "pass@1": (1 / 2 + 0 + 1 / 3 + 1) / 4,
    "pass@2": (5 / 6 + 0 + 2 / 3) / 3,
    "pass@4": 1 / 2,
    "pass_ratio": 4 / 12,  # all or nothing where nothing was checked on its own
}


def test_pass_metrics() -> None:
    metric = PassMetrics(4, [1, 2, 4, 8])  # 8 programs are never drawn
    metric.update(SAMPLED)
    assert floats(metric.compute()) == pytest.approx(PASSES)


def test_the_pass_ratio_is_the_share_of_hidden_tests() -> None:
    half = Trajectory(TASK, (step(checks=[PASSED, "wrong answer", "time limit", PASSED]),), LOST, "DONE")
    whole = Trajectory(TASK, (step(checks=["wrong answer"]), step(checks=[PASSED, PASSED])), WON, "DONE")
    nothing = Trajectory(TASK, (step(is_valid=False),), LOST, "DONE")
    broken = Trajectory(TASK, (step(checks=[PASSED]),), LOST, "ENV_ERROR")
    metric = PassMetrics(4, [1])
    metric.update([RolloutGroup(TASK, (half, broken)), RolloutGroup(TASK, (whole, nothing, broken))])
    # a mean over rollouts, not over tasks or tests: 1/2, 1, 0
    assert floats(metric.compute()) == pytest.approx({"pass@1": (0 + 1 / 2) / 2, "pass_ratio": 1.5 / 3})


def test_a_k_that_no_task_reaches_has_no_value() -> None:
    metric = PassMetrics(4, [4, 1])
    metric.update(SAMPLED[2:4])
    values = floats(metric.compute())
    assert math.isnan(values.pop("pass@4"))
    assert values == pytest.approx({"pass@1": 2 / 3, "pass_ratio": 2 / 4})


@pytest.mark.parametrize("cut", range(6))
def test_passes_of_two_updates_and_of_two_processes(cut: int) -> None:
    twice, first, second = (PassMetrics(4, [1, 2, 4]) for _ in range(3))
    twice.update(SAMPLED[:cut])
    twice.update(SAMPLED[cut:])
    assert floats(twice.compute()) == pytest.approx(PASSES)
    first.update(SAMPLED[:cut])
    second.update(SAMPLED[cut:])
    first.merge_state(second)
    assert floats(first.compute()) == pytest.approx(PASSES)


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_without_data_every_value_is_nan() -> None:
    for metric, names in (
        (UnitTestMetrics(["list"]), {"ut", "detect", "discrimination", "readable_rate", "ut/list", "detect/list"}),
        (PassMetrics(2, [1, 2]), {"pass@1", "pass@2", "pass_ratio"}),
    ):
        assert metric.compute().keys() == names
        assert all(math.isnan(value) for value in metric.compute().values())
        metric.update([])
        assert all(math.isnan(value) for value in metric.compute().values())
