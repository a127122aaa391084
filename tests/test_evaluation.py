import math
from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
import torch
from rich.console import Console

from rla_lightning.environments.base import TestedEnvironment
from rla_lightning.environments.household import HouseholdEnvironment
from rla_lightning.evaluation import evaluate, evaluation_table
from rla_lightning.rollout.formats import CompactCriticFormat, CompactJudgeFormat, CompactPolicyFormat
from rla_lightning.rollout.formats_code import CompactTestFormat
from rla_lightning.rollout.players import Formats
from rla_lightning.settings import RolloutSettings
from rla_lightning.types import (
    LOST,
    WON,
    Completion,
    EvaluationSet,
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
ANSWER = Completion((1,), (0.0,), "", "EOS")


def task(name: str, kind: str) -> Task:
    return Task(name, "toy", {}, 0.5, name, kind=kind)


MUG, EGG, LAMP = task("mug", "clean"), task("egg", "heat"), task("lamp", "heat")
TASKS = EvaluationSet("out_of_distribution", (MUG, EGG, LAMP))


def rollouts(of: Task, outcomes: tuple[float, ...], turns: tuple[int, ...], label: int = 1) -> RolloutGroup:
    step = Step((1,), ANSWER, Observation(""), "go", True, label=StepLabel(label))
    return RolloutGroup(of, tuple(Trajectory(of, (step,) * k, won, "DONE") for won, k in zip(outcomes, turns, strict=True)))


class Scripted:
    """Stands in for the three models; every vote on a played step is +1, on a fixed step -1."""

    environment = HouseholdEnvironment()
    formats = Formats(CompactPolicyFormat(), CompactJudgeFormat(), CompactCriticFormat())

    def __init__(self, settings: RolloutSettings) -> None:
        self.settings = settings
        self.calls: list[tuple] = []

    def play(self, tasks, group_size, key, *, max_turns, with_labels, progress):
        self.calls.append(("play", [t.id for t in tasks], group_size, key, max_turns, with_labels))
        progress("rollout turn 1", 1, 6, 0.5)
        played = {"mug": ((WON, LOST), (2, 4)), "egg": ((WON, WON), (1, 2)), "lamp": ((LOST, WON), (6, 3))}
        return [rollouts(t, *played[t.id]) for t in tasks]

    def explore(self, tasks, key):
        self.calls.append(("explore", [t.id for t in tasks], key))
        return [rollouts(t, (LOST,), (1,), label=-1) for t in tasks]

    def judge(self, groups, key):
        self.calls.append(("judge", key))
        vote = (Judgment((1,), ANSWER, -1 if key.endswith("fixed") else 1),)
        return [replace(g, judgments=tuple((vote,) * len(t.steps) for t in g.trajectories)) for g in groups]

    def state_values(self, group):
        return [np.full(len(t.steps), 0.5) for t in group.trajectories]


def test_held_out_tasks_are_played_judged_and_measured():
    players, heard = Scripted(RolloutSettings(eval_samples=2, eval_max_turns=7)), []
    metrics = evaluate(players, TASKS, "0/test", CPU, lambda *args: heard.append(args))
    assert heard == [("rollout turn 1", 1, 6, 0.5)]
    assert players.calls == [
        ("play", ["mug", "egg", "lamp"], 2, "0/test", 7, True),
        ("judge", "0/test"),
        ("explore", ["mug", "egg", "lamp"], "explore/out_of_distribution"),
        ("judge", "0/test/fixed"),
    ]
    expected = {
        "rollout/success_rate": 4 / 6,
        "rollout/success_rate_std": 0.0,  # both passes won 2 of 3
        "rollout/success_rate/clean": 1 / 2,
        "rollout/success_rate/heat": 3 / 4,
        "rollout/mean_turns": 18 / 6,
        "rollout/mean_turns_won": 8 / 4,
        "reward_model/true_negative_rate": 1.0,  # fixed steps are all wrong and voted down
        "reward_model_on_policy/true_positive_rate": 1.0,
        "critic/brier": 0.25,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert math.isnan(metrics["reward_model/true_positive_rate"])


def test_one_sample_per_task_has_no_spread():
    class Once(Scripted):
        def play(self, tasks, group_size, key, **options):
            return [rollouts(t, (WON,), (1,)) for t in tasks]

    metrics = evaluate(Once(RolloutSettings()), TASKS, "key", CPU, lambda *args: None)
    by_kind = {
        name: value for name, value in metrics.items() if name.startswith(("rollout/success_rate/", "rollout/success_rate_std"))
    }
    by_kind["rollout/success_rate"] = metrics["rollout/success_rate"]
    assert by_kind == {"rollout/success_rate": 1.0, "rollout/success_rate/clean": 1.0, "rollout/success_rate/heat": 1.0}


def printed(table) -> list[str]:
    console = Console(width=100, record=True, file=StringIO())
    console.print(table)
    return [" ".join(line.replace("│", "|").split()) for line in console.export_text().splitlines()]


def test_the_table_has_a_column_per_split_and_a_row_per_kind():
    seen = EvaluationSet("in_domain", (replace(MUG, id="cup"), replace(MUG, id="pan")))
    metrics = {
        "test/in_domain/rollout/success_rate": 0.5,
        "test/in_domain/rollout/success_rate_std": 0.125,
        "test/in_domain/rollout/success_rate/clean": 0.5,
        "test/in_domain/rollout/mean_turns": 12.0,
        "test/in_domain/rollout/right_step_rate": math.nan,
        "test/in_domain/critic/brier": 0.2,
        "test/out_of_distribution/rollout/success_rate": 0.6667,
        "test/out_of_distribution/rollout/success_rate_std": 0.0,
        "test/out_of_distribution/rollout/success_rate/clean": 0.25,
        "test/out_of_distribution/rollout/success_rate/heat": 0.875,
        "test/out_of_distribution/rollout/mean_turns": 20.5,
        "test/out_of_distribution/rollout/right_step_rate": math.nan,
        "test/out_of_distribution/critic/brier": math.nan,
        "test/step": 3.0,
    }
    lines = printed(evaluation_table("test", metrics, (seen, TASKS)))
    assert lines[0] == "test"
    assert lines[2] == "┃ ┃ in domain ┃ out of distribution ┃"
    assert lines[4:-1] == [
        "| tasks (of a kind) | 2 | 3 |",
        "| success ± deviation of the samples | 0.500 ± 0.125 | 0.667 ± 0.000 |",
        "| clean | 0.500 (2) | 0.250 (1) |",
        "| heat | - (0) | 0.875 (2) |",
        "| mean turns | 12.000 | 20.500 |",
        "| critic: Brier score | 0.200 | - |",
    ]


def test_a_table_without_kinds_spread_or_the_other_split():
    bare = EvaluationSet("in_domain", (task("mug", ""),))
    lines = printed(evaluation_table("validation", {"validation/in_domain/rollout/success_rate": 1.0}, (bare, TASKS)))
    assert lines[2] == "┃ ┃ in domain ┃"
    assert lines[4:-1] == ["| tasks (of a kind) | 1 |", "| success | 1.000 |"]


# Programs and unit tests


class Programs(TestedEnvironment):
    name = "programs"

    def sample(self, rng, difficulty, split="in_domain"):
        raise NotImplementedError

    def start(self, task):
        raise NotImplementedError

    def check_programs(self, requests):
        raise NotImplementedError


def programs(of: Task, *checked: tuple[float, str]) -> RolloutGroup:
    """Programs and the hidden tests that they passed, "+"; known ones have none."""
    trajectories = []
    for outcome, marks in checked:
        checks = tuple("passed" if mark == "+" else "wrong_answer" for mark in marks)
        step = Step((1,), ANSWER, Observation(""), "print()", True, label=StepLabel(int(outcome)), checks=checks)
        trajectories.append(Trajectory(of, (step,), outcome, "DONE"))
    return RolloutGroup(of, tuple(trajectories))


PLAYED = {"mug": ((WON, "+++"), (LOST, "+--")), "egg": ((LOST, "++-"), (LOST, "---")), "lamp": ((WON, "+++"), (WON, "+++"))}
PASSED_BY = {  # [test] of the programs: the policy's, then the known ones
    "0/test": {"mug": ("+-", "++"), "egg": ("--", "--"), "lamp": ("+-", "++")},
    "0/test/fixed": {"mug": ("+-", "+-"), "egg": ("+-", "-+"), "lamp": ("++", "++")},
}


class TestWriter(Scripted):
    """Writes two tests per task; a table says which programs of a task pass them."""

    __test__ = False  # not a test of pytest's
    environment = Programs()
    formats = replace(Scripted.formats, test=CompactTestFormat())

    def play(self, tasks, group_size, key, *, max_turns, with_labels, progress):
        return [programs(t, *PLAYED[t.id]) for t in tasks]

    def explore(self, tasks, key):
        return [programs(t, (WON, ""), (LOST, "")) for t in tasks]

    def judge(self, groups, key):
        return [with_tests(group, PASSED_BY[key][group.task.id]) for group in groups]


def with_tests(group: RolloutGroup, rows: tuple[str, ...]) -> RolloutGroup:
    tests = tuple(WrittenTest((1,), ANSWER, UnitTest("1", "2")) for _ in rows)
    marks = zip(*rows, strict=True)
    judgments = tuple((tuple(Judgment((1,), ANSWER, 1 if mark == "+" else -1) for mark in column),) for column in marks)
    return replace(group, tests=tests, judgments=judgments)


@pytest.fixture
def code_metrics() -> dict[str, float]:
    return evaluate(TestWriter(RolloutSettings(eval_samples=2)), TASKS, "0/test", CPU, lambda *args: None)


def test_unit_tests_are_measured_on_known_programs_and_on_the_policys(code_metrics):
    expected = {
        "rollout/success_rate": 3 / 6,
        "code/pass@1": 3 / 6,
        "code/pass@2": 2 / 3,
        "code/pass_ratio": (1 + 1 / 3 + 2 / 3 + 0 + 1 + 1) / 6,
        # known programs, one right and one wrong of each task: 5 of 6 tests pass the right one, 3 reject the wrong one besides
        "reward_model/ut": 5 / 6,
        "reward_model/detect": 3 / 6,
        "reward_model/ut/clean": 1.0,
        "reward_model/detect/clean": 1.0,
        "reward_model/ut/heat": 3 / 4,
        "reward_model/detect/heat": 1 / 4,
        # the policy's: mug has one of each, egg no right one, lamp no wrong one
        "reward_model_on_policy/ut": 3 / 4,
        "reward_model_on_policy/detect": 1 / 2,
        "reward_model_on_policy/readable_rate": 1.0,
    }
    assert {name: code_metrics[name] for name in expected} == pytest.approx(expected)
    assert "code/pass@4" not in code_metrics


def test_the_table_has_rows_of_programs_and_unit_tests(code_metrics):
    metrics = {f"test/out_of_distribution/{name}": value for name, value in code_metrics.items()}
    lines = printed(evaluation_table("test", metrics, (TASKS,)))
    assert [line for line in lines if "hidden" in line or "pass@" in line or "tests:" in line] == [
        "| hidden tests passed | 0.667 |",
        "| pass@2 | 0.667 |",
        "| tests: right programs pass (UT) | 0.833 |",
        "| tests: and wrong ones fail (Detect) | 0.500 |",
        "| tests: UT on the policy's programs | 0.750 |",
        "| tests: Detect on the policy's programs | 0.500 |",
    ]


def test_programs_that_are_voted_on_have_no_rows_of_unit_tests():
    class Voting(TestWriter):
        formats = Scripted.formats
        judge = Scripted.judge

    metrics = evaluate(Voting(RolloutSettings(eval_samples=2)), TASKS, "0/test", CPU, lambda *args: None)
    assert metrics["code/pass@2"] == pytest.approx(2 / 3)
    assert not {name for name in metrics if name.endswith(("/ut", "/detect"))}
