import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from rla_lightning.algorithm.unit_tests import unit_test_rewards
from rla_lightning.environments.base import Episode, TestedEnvironment
from rla_lightning.rollout.formats_code import CompactTestFormat
from rla_lightning.rollout.sampler import Sampler
from rla_lightning.rollout.unit_tests import judge_by_tests, test_results
from rla_lightning.types import (
    LOST,
    WON,
    CheckedSolution,
    CheckRequest,
    Completion,
    Judgment,
    Observation,
    RolloutGroup,
    SamplingParams,
    Solution,
    Step,
    Task,
    Trajectory,
    UnitTest,
)

PARAMS = SamplingParams(max_new_tokens=8)
NOTHING = Completion((), (), "", "EOS")
THREE = UnitTest("1 2\n", "3")  # the right output of an adder
FOUR = UnitTest("1 2\n", "4")
ONE = UnitTest("1 0\n", "1")
PASSES = {  # program: tests that it passes; None: it could not be run on any
    "right": {THREE, ONE},
    "wrong": {ONE},
    "lucky": {FOUR},
    "broken": None,
}


class Adders(TestedEnvironment):
    """Programs are names, a table says which tests they pass; notes what it is asked to run."""

    name = "adders"

    def __init__(self) -> None:
        self.requests: list[CheckRequest] = []

    def sample(self, rng, difficulty, split="in_domain") -> Task:
        raise NotImplementedError

    def start(self, task: Task) -> Episode:
        raise NotImplementedError

    def check_programs(self, requests: Sequence[CheckRequest]) -> list[list[list[bool | None]]]:
        self.requests += requests
        return [[[passes(program, test) for program in asked.programs] for test in asked.tests] for asked in requests]


def passes(program: str, test: UnitTest) -> bool | None:
    passed = PASSES[program]
    return None if passed is None else test in passed


class ScriptedWriter(Sampler):
    """Samples the answers of a table, by the task in the key, and notes what it was asked."""

    def __init__(self, **answers: tuple[str, ...]) -> None:
        self.answers = answers
        self.calls: list[tuple] = []

    def sample(self, prompts, n, params, keys):
        self.calls.append((list(prompts), n, params, list(keys)))
        return [[written(text) for text in self.answers[key.split("/")[-2]]] for key in keys]


def written(text: str) -> Completion:
    """An answer of as many tokens as words, with an end token; token i is 40 + i."""
    length = len(text.split())
    return Completion((*range(40, 40 + length), 1), (-0.5,) * (length + 1), text, "EOS")


def task(name: str) -> Task:
    return Task(name, "adders", {}, 0.5, name)


def rollout(of: str, outcome: float, program: str, *words: str, stop: str = "DONE") -> Trajectory:
    """One step that was shown the words; "" stands for an answer without a program."""
    step = Step((3,), Completion((50, 1), (-0.5,) * 2, "", "EOS"), Observation("", digest=words), program, bool(program))
    return Trajectory(task(of), (step,), outcome, stop)


def adder(*programs: tuple[float, str]) -> RolloutGroup:
    return RolloutGroup(task("add"), tuple(rollout("add", outcome, program, "reach", "goal") for outcome, program in programs))


@pytest.fixture
def judge(tokenizer):
    """Judges groups by the answers of a scripted writer; what else there is are options of judge_by_tests."""

    def run(groups, writer: ScriptedWriter, environment: TestedEnvironment | None = None, m: int = 3, **options):
        return judge_by_tests(
            groups,
            m,
            environment=environment or Adders(),
            sampler=writer,
            tokenizer=tokenizer,
            test_format=CompactTestFormat(),
            params=PARAMS,
            key="0/judge",
            **options,
        )

    return run


def scores(group: RolloutGroup) -> list[list[list[int | None]]]:
    """[G][K][m]"""
    return [[[vote.score for vote in votes] for votes in steps] for steps in group.judgments]


# Three tests: right, unreadable, with a wrong output
ANSWERS = ("1 2 : = 3", "1 2 = 3", "1 2 : = 4")


def test_every_program_is_run_on_every_readable_test(judge):
    environment, writer = Adders(), ScriptedWriter(add=ANSWERS)
    (group,) = judge([adder((WON, "right"), (LOST, "wrong"), (LOST, ""))], writer, environment)
    # <judge> reach goal; one prompt for the task, however many programs there are
    assert writer.calls == [([(4, 24, 23)], 3, PARAMS, ["0/judge/add/tests"])]
    assert environment.requests == [CheckRequest(task("add"), ("right", "wrong"), (THREE, FOUR))]
    # right: passes the first, fails the third; wrong: fails both; what is no program passes nothing
    assert scores(group) == [[[1, None, -1]], [[-1, None, -1]], [[-1, None, -1]]]
    assert [(test.prompt_ids, test.completion, test.test) for test in group.tests] == [
        ((4, 24, 23), written("1 2 : = 3"), THREE),
        ((4, 24, 23), written("1 2 = 3"), None),
        ((4, 24, 23), written("1 2 : = 4"), FOUR),
    ]
    assert group.judgments[1][0][2] == Judgment((4, 24, 23), written("1 2 : = 4"), -1)


def test_the_groups_own_trajectories_are_left_as_they_are(judge):
    before = [adder((WON, "right"), (LOST, "wrong"))]
    (after,) = judge(before, ScriptedWriter(add=ANSWERS))
    assert replace(after, judgments=(), tests=()) == before[0]
    assert before[0].judgments == () == before[0].tests


def test_equal_programs_are_run_once_and_equal_tests_as_often_as_they_are_written(judge):
    environment = Adders()
    programs = adder((LOST, "wrong"), (WON, "right"), (LOST, "wrong"), (LOST, ""), (WON, "right"))
    (group,) = judge([programs], ScriptedWriter(add=("1 2 : = 3", "1 0 : = 1", "1 2 : = 3")), environment)
    assert environment.requests == [CheckRequest(task("add"), ("wrong", "right"), (THREE, ONE, THREE))]
    assert scores(group) == [[[-1, 1, -1]], [[1, 1, 1]], [[-1, 1, -1]], [[-1, -1, -1]], [[1, 1, 1]]]


def test_every_task_has_its_own_tests(judge):
    environment = Adders()
    writer = ScriptedWriter(add=("1 2 : = 3", "1 0 : = 1"), far=("nonsense", "1 2 : = 4"))
    far = RolloutGroup(task("far"), (rollout("far", LOST, "lucky", "far"), rollout("far", LOST, "wrong", "far")))
    first, second = judge([adder((WON, "right")), far], writer, environment, m=2)
    assert writer.calls == [([(4, 24, 23), (4, 25)], 2, PARAMS, ["0/judge/add/tests", "0/judge/far/tests"])]
    assert environment.requests == [
        CheckRequest(task("add"), ("right",), (THREE, ONE)),
        CheckRequest(task("far"), ("lucky", "wrong"), (FOUR,)),
    ]
    assert scores(first) == [[[1, 1]]]
    assert scores(second) == [[[None, 1]], [[None, -1]]]


def test_an_environment_error_is_not_judged(judge):
    environment = Adders()
    failed = (rollout("add", LOST, "broken", "far", stop="ENV_ERROR"), Trajectory(task("add"), (), LOST, "ENV_ERROR"))
    healthy = adder((WON, "right"))
    (group,) = judge([replace(healthy, trajectories=failed + healthy.trajectories)], ScriptedWriter(add=ANSWERS), environment)
    assert environment.requests == [CheckRequest(task("add"), ("right",), (THREE, FOUR))]
    assert scores(group) == [[[]], [], [[1, None, -1]]]


def test_a_task_without_a_valid_rollout_is_not_asked_about(judge):
    environment, writer = Adders(), ScriptedWriter(add=ANSWERS)
    failed = RolloutGroup(task("failed"), (Trajectory(task("failed"), (), LOST, "ENV_ERROR"),))
    first, second = judge([failed, adder((WON, "right"))], writer, environment)
    assert [keys for *_, keys in writer.calls] == [["0/judge/add/tests"]]
    assert (first.tests, scores(first)) == ((), [[]])
    assert scores(second) == [[[1, None, -1]]]


def test_programs_that_could_not_be_run_have_no_score(judge):
    (group,) = judge([adder((LOST, "broken"), (WON, "right"))], ScriptedWriter(add=ANSWERS))
    assert scores(group) == [[[None, None, None]], [[1, None, -1]]]


def test_only_the_last_of_several_programs_is_judged(judge):
    environment = Adders()
    early, last = rollout("add", LOST, "wrong", "reach", "goal").steps[0], rollout("add", LOST, "right", "far").steps[0]
    group = RolloutGroup(task("add"), (Trajectory(task("add"), (early, last), WON, "DONE"),))
    writer = ScriptedWriter(add=ANSWERS)
    (judged,) = judge([group], writer, environment)
    assert writer.calls[0][0] == [(4, 24, 23)]  # what was shown first
    assert [request.programs for request in environment.requests] == [("right",)]
    assert scores(judged) == [[[], [1, None, -1]]]


@pytest.mark.parametrize(("context", "is_asked"), [(11, True), (10, False)])  # 3 tokens of the prompt, 8 of the answer
def test_a_prompt_that_leaves_no_room_for_a_test(judge, caplog, context, is_asked):
    environment, writer = Adders(), ScriptedWriter(add=ANSWERS)
    with caplog.at_level(logging.WARNING):
        (group,) = judge([adder((WON, "right"), (LOST, ""))], writer, environment, context_length=context)
    assert bool(environment.requests) is is_asked
    assert len(group.tests) == (3 if is_asked else 0)
    if is_asked:
        assert caplog.messages == []
    else:
        assert caplog.messages == ["task add: its prompt of 3 tokens leaves no room for a unit test"]
        assert scores(group) == [[[]], [[]]]
        assert group.generated_tokens == 4  # of the two programs


def test_tokens_of_tests_count_once_however_many_programs_they_judge(judge):
    (group,) = judge([adder((WON, "right"), (LOST, "wrong"), (LOST, ""))], ScriptedWriter(add=ANSWERS))
    # three programs of 2 tokens, answers of 5, 4 and 5 words with an end token each
    assert group.generated_tokens == 6 + 6 + 5 + 6


def test_progress_is_told(judge):
    heard = []
    groups = [adder((WON, "right"), (LOST, "wrong"), (LOST, ""), (LOST, ""))]
    judge(groups, ScriptedWriter(add=ANSWERS), progress=lambda *told: heard.append(told))
    assert heard == [("writing tests", 0, 1, 0.25), ("running tests", 0, 1, 0.25), ("running tests", 1, 1, 0.25)]


# Results


def test_the_results_are_a_table_of_tests_by_programs(judge):
    programs = adder((WON, "right"), (LOST, ""), (LOST, "wrong"), (LOST, "broken"), (LOST, "lucky"))
    failed = Trajectory(task("add"), (), LOST, "ENV_ERROR")
    group = replace(programs, trajectories=(failed, *programs.trajectories))
    (judged,) = judge([group], ScriptedWriter(add=("1 2 : = 3", "1 2 = 3", "1 2 : = 4", "1 0 : = 1")), m=4)
    passed, is_correct = test_results(judged)
    nan = np.nan  # columns right, wrong, lucky: neither the failed one, nor what is no program, nor what could not be run
    np.testing.assert_array_equal(passed, [[1.0, 0.0, 0.0], [nan, nan, nan], [0.0, 0.0, 1.0], [1.0, 1.0, 0.0]])
    assert is_correct == [True, False, False]


def test_a_program_that_was_not_run_on_every_test_says_nothing(judge):
    """It timed out on the first two, so nothing is known about the others: equal tests must not be told apart by their place."""

    class Slow(Adders):
        def check_programs(self, requests):
            (checks,) = super().check_programs(requests)
            (asked,) = requests
            late = asked.programs.index("broken")
            return [[[*row[:late], False if number < 2 else None, *row[late + 1 :]] for number, row in enumerate(checks)]]

    group = adder((WON, "right"), (LOST, "wrong"), (LOST, "broken"))
    (judged,) = judge([group], ScriptedWriter(add=("1 2 : = 3",) * 5), Slow(), m=5)
    passed, is_correct = test_results(judged)
    np.testing.assert_array_equal(passed, [[1.0, 0.0]] * 5)
    assert is_correct == [True, False]
    assert unit_test_rewards(passed, is_correct).tolist() == [1.0] * 5
    assert [vote.score for vote in judged.judgments[2][0]] == [-1, -1, None, None, None]  # what the policy is told


def test_the_results_of_rollouts_without_any_program(judge):
    (judged,) = judge([adder((LOST, ""), (LOST, ""))], ScriptedWriter(add=ANSWERS))
    passed, is_correct = test_results(judged)
    assert passed.shape == (3, 0)
    assert is_correct == []


# Known programs


class KnownAdders(Adders):
    def solutions(self, task: Task) -> tuple[Solution, ...]:
        return (Solution("right", True), Solution("wrong", False), Solution("broken", False))


def test_known_programs_rate_tests_where_the_policys_are_all_wrong(judge):
    """As in the first table above, but the policy has no right program, so that alone they would say nothing."""
    environment = KnownAdders()
    group = adder((LOST, "lucky"), (LOST, "wrong"))
    writer = ScriptedWriter(add=("1 2 : = 3", "1 2 = 3", "1 2 : = 4", "1 0 : = 1"))
    (judged,) = judge([group], writer, environment, m=4, with_solutions=True)
    assert [asked.programs for asked in environment.requests] == [("lucky", "wrong", "right", "broken")]  # each once
    assert judged.solutions == (
        CheckedSolution(True, (True, None, False, True)),
        CheckedSolution(False, (False, None, False, True)),
        CheckedSolution(False, (None, None, None, None)),
    )
    passed, is_correct = test_results(judged)
    nan = np.nan  # columns lucky, wrong, then the known ones that could be run: right, wrong
    np.testing.assert_array_equal(
        passed, [[0.0, 0.0, 1.0, 0.0], [nan, nan, nan, nan], [1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 1.0, 1.0]]
    )
    assert is_correct == [False, False, True, False]
    # p_c 1, 0, 1 of the readable tests; p_d 1, 2/3, 1/3
    np.testing.assert_allclose(unit_test_rewards(passed, is_correct), [1.0, nan, -1 / 3, 1 / 3])
    assert scores(judged) == scores(judge([group], writer, m=4)[0])  # what the policy is told stays the same


def test_known_programs_that_nobody_knows_are_told_of(judge, caplog):
    judge([adder((LOST, "lucky"))], ScriptedWriter(add=ANSWERS), with_solutions=True)
    assert "known_programs has no effect: adders knows no right and wrong programs of its tasks" in caplog.text


def test_known_programs_are_not_asked_for_unless_wanted(judge):
    environment = KnownAdders()
    (judged,) = judge([adder((LOST, "lucky"))], ScriptedWriter(add=ANSWERS), environment)
    assert judged.solutions == ()
    assert [asked.programs for asked in environment.requests] == [("lucky",)]


def test_an_environment_that_fails_to_tell_them_costs_a_warning(judge, caplog):
    class Forgetful(Adders):
        def solutions(self, task: Task) -> tuple[Solution, ...]:
            raise OSError("no table")

    with caplog.at_level(logging.WARNING):
        (judged,) = judge([adder((LOST, "lucky"))], ScriptedWriter(add=ANSWERS), Forgetful(), with_solutions=True)
    assert judged.solutions == ()
    assert len(judged.judgments[0][0]) == 3
    assert "task add: no known programs: OSError: no table" in caplog.text
