"""Problems as an environment: who is trained on what, episodes, unit tests, and rewrites by text."""

import json
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from rla_lightning.environments.coding.environment import (
    CodingEnvironment,
    SandboxFailedError,
    problem_of,
    rewritten,
    task_of,
)
from rla_lightning.environments.coding.problems import Problem
from rla_lightning.environments.coding.sources import JsonProblems
from rla_lightning.sandbox import Run, RunResult, Sandbox, SandboxSettings
from rla_lightning.types import (
    CheckRequest,
    Completion,
    ConfigError,
    ExpertAction,
    Observation,
    Purpose,
    Solution,
    Split,
    Step,
    Task,
    Trajectory,
    Transition,
    UnitTest,
)

Make = Callable[..., CodingEnvironment]
DIFFICULTIES = {"easy": 0.1, "medium": 0.5, "hard": 0.9}
PARTS: tuple[tuple[Purpose, Split], ...] = (
    ("train", "in_domain"),
    ("validation", "in_domain"),
    ("test", "in_domain"),
    ("validation", "out_of_distribution"),
    ("test", "out_of_distribution"),
)
ADD_ONE = Problem(
    name="add one",
    question="Read a number and print the next one.",
    tests=(UnitTest("1\n", "2\n"), UnitTest("10\n", "11\n")),
    difficulty=0.1,
    level="easy",
    solution="print(int(input()) + 1)",
    wrong_solutions=("print(2)", "print(int(input()) * 2)"),
)
ADD_TWO = replace(ADD_ONE, name="add two", tests=(UnitTest("1\n", "3\n"), UnitTest("10\n", "12\n")), wrong_solutions=())
SUMS = (("1 2", "3"), ("0 0", "0"), ("5 -5", "0"), ("10 20", "30"))
ANSWER = """### Question
Read two numbers and print the sum of both.

### Solution
```python
print(sum(map(int, input().split())))
```
""" + "".join(
    f"\n### Test {number} input\n```\n{numbers}\n```\n\n### Test {number} output\n```\n{total}\n```\n"
    for number, (numbers, total) in enumerate(SUMS, 1)
)


def is_close_to_a_hundred(stdin: str, expected: str, actual: str) -> bool:
    """A checker of a user."""
    return actual.strip() in ("99", "100", "101")


def row(level: str, number: int, **changes: Any) -> dict[str, Any]:
    """A problem that adds the number."""
    return {
        "name": f"{level} {number}",
        "question": f"Read a number and print it plus {number}.",
        "tests": [{"stdin": "1\n", "stdout": f"{1 + number}\n"}, {"stdin": "10\n", "stdout": f"{10 + number}\n"}],
        "difficulty": DIFFICULTIES[level],
        "level": level,
        "solution": f"print(int(input()) + {number})",
        "wrong_solutions": ["print(0)"],
    } | changes


ROWS = [row(level, 100 * index + number) for index, level in enumerate(DIFFICULTIES) for number in range(8)]


@pytest.fixture(scope="module")
def make(needs_isolation: None) -> Iterator[Make]:
    """Environments that share a sandbox."""
    sandbox = Sandbox(SandboxSettings(workers=2))

    def environment(**settings: Any) -> CodingEnvironment:
        made = CodingEnvironment(**settings)
        made.grader.sandbox = sandbox
        return made

    yield environment
    sandbox.close()


@pytest.fixture(scope="module")
def coding(make: Make) -> CodingEnvironment:
    """With the offline set."""
    return make()


@pytest.fixture
def source(tmp_path: Path) -> Callable[[str, Sequence[dict[str, Any]]], JsonProblems]:
    def write(name: str, rows: Sequence[dict[str, Any]]) -> JsonProblems:
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(each) + "\n" for each in rows))
        return JsonProblems(path)

    return write


@pytest.fixture
def faulty_sandbox(coding: CodingEnvironment, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs with the word faulty cannot be run."""
    run = coding.grader.sandbox.run

    def broken(runs: Sequence[Run]) -> list[list[RunResult]]:
        failed = RunResult("sandbox_error", "", "the worker did not answer", 7.0)
        results = run(runs)
        return [[failed] * len(made) if "faulty" in asked.program else made for asked, made in zip(runs, results, strict=True)]

    monkeypatch.setattr(coding.grader.sandbox, "run", broken)


def ids(environment: CodingEnvironment) -> dict[tuple[Purpose, Split], set[str]]:
    return {part: {task.id for task in environment.corpus(*part)} for part in PARTS}


def names(environment: CodingEnvironment, purpose: Purpose, split: Split = "in_domain") -> list[str]:
    return [task.spec["problem"]["name"] for task in environment.corpus(purpose, split)]


def trajectory(task: Task, transition: Transition) -> Trajectory:
    step = Step((), Completion((), (), "", "EOS"), Observation(""), "", transition.is_valid, checks=transition.checks)
    assert transition.outcome is not None
    return Trajectory(task, (step,), transition.outcome, "DONE")


# Which tasks there are


def test_a_share_of_each_level_is_held_out(make: Make, source: Any) -> None:
    environment = make(train=source("all", ROWS))
    kinds = {part: Counter(task.kind for task in environment.corpus(*part)) for part in PARTS}
    assert kinds["test", "in_domain"] == {"easy": 2, "medium": 2, "hard": 2}  # of 8 each
    assert kinds["validation", "in_domain"] == {"easy": 1, "medium": 1, "hard": 1}  # an eighth of the 6 left
    assert kinds["train", "in_domain"] == {"easy": 5, "medium": 5, "hard": 5}
    assert kinds["test", "out_of_distribution"] == kinds["validation", "out_of_distribution"] == {}
    assert environment.corpus("train", "out_of_distribution") == ()
    assert len(set().union(*ids(environment).values())) == 24  # disjoint: 6 + 3 + 15


def test_who_is_held_out_does_not_depend_on_the_order_of_rows(make: Make, source: Any) -> None:
    shuffled = Random(1).sample(ROWS, len(ROWS))
    assert ids(make(train=source("one", ROWS))) == ids(make(train=source("two", shuffled)))


def test_sources_of_their_own_are_used_whole(make: Make, source: Any) -> None:
    environment = make(
        train=source("train", ROWS[:6]),
        validation=source("validation", ROWS[8:10]),
        test=source("test", ROWS[16:19]),
        out_of_distribution=source("other", [row("easy", 50 + n) for n in range(4)] + [row("hard", 60 + n) for n in range(4)]),
    )
    assert names(environment, "train") == [f"easy {number}" for number in range(6)]
    assert names(environment, "validation") == ["medium 100", "medium 101"]
    assert names(environment, "test") == ["hard 200", "hard 201", "hard 202"]
    tuning, reported = (names(environment, purpose, "out_of_distribution") for purpose in ("validation", "test"))
    assert [len(tuning), len(reported), len({*tuning, *reported})] == [4, 4, 8]
    for half in (tuning, reported):
        assert Counter(name.split()[0] for name in half) == {"easy": 2, "hard": 2}


def test_too_few_problems(make: Make, source: Any) -> None:
    with pytest.raises(ConfigError, match="1 problems are too few to keep some of them for test: give a source for it"):
        make(train=source("one", ROWS[:1])).corpus("train", "in_domain")
    with pytest.raises(ConfigError, match="2 problems are too few to keep some of them for validation"):
        make(train=source("two", ROWS[:2]), test=source("test", ROWS[8:9])).corpus("test", "in_domain")
    with pytest.raises(ConfigError, match="1 problems are too few to keep some of them for out_of_distribution"):
        make(out_of_distribution=source("other", ROWS[:1])).corpus("train", "in_domain")


def test_equal_questions_are_one_problem_and_evaluation_comes_first(make: Make, source: Any) -> None:
    shouted = row("hard", 1, name="in other words", question="READ a number, and print it: plus 1!", solution=None)
    other_tests = row("easy", 2, name="again", tests=[{"stdin": f"{x}\n", "stdout": f"{x + 2}\n"} for x in (5, 6, 7)])
    environment = make(
        train=source("train", ROWS[:5]),
        validation=source("validation", [row("easy", 7), other_tests]),
        test=source("test", [shouted, row("easy", 9)]),
        out_of_distribution=source("other", [row("hard", n) for n in (50, 60, 9)] + [row("easy", n) for n in (70, 80, 3)]),
    )
    assert names(environment, "test") == ["in other words", "easy 9"]
    assert names(environment, "validation") == ["easy 7", "again"]
    other = names(environment, "validation", "out_of_distribution") + names(environment, "test", "out_of_distribution")
    assert sorted(other) == ["easy 3", "easy 70", "easy 80", "hard 50", "hard 60"]
    assert names(environment, "train") == ["easy 0", "easy 4"]


def test_constant_problems_and_repeated_questions_of_a_source_are_left_out(
    make: Make, source: Any, caplog: pytest.LogCaptureFixture
) -> None:
    same = [{"stdin": f"{x}\n", "stdout": "7\n"} for x in (1, 2)]
    either = [{"stdin": "1\n", "stdout": "1 2\n"}, {"stdin": "2\n", "stdout": "2 1\n"}]
    rows = [
        ROWS[0],
        row("easy", 1, tests=same),
        row("easy", 2, tests=either),
        row("easy", 3, tests=either, checker="unordered"),
        row("easy", 2, name="repeated"),
        row("easy", 4, tests=same[:1]),
        row("easy", 5, tests=same),
        row("easy", 5, name="the one that counts"),
    ]
    held_out = {"validation": source("validation", ROWS[8:9]), "test": source("test", ROWS[9:10])}
    environment = make(train=source("train", rows), **held_out)
    assert names(environment, "train") == ["easy 0", "easy 2", "the one that counts"]
    assert caplog.messages == ["left out 4 problems that a constant solves and 1 repeated questions"]
    with pytest.raises(ConfigError, match="a program that always prints the same solves all of the 2 problems of a source"):
        make(train=source("constant", [rows[1], rows[3]]), **held_out).corpus("train", "in_domain")


def test_a_source_that_is_held_out_entirely_leaves_nothing_to_train_on(make: Make, source: Any) -> None:
    environment = make(train=source("train", ROWS[:2]), test=source("test", ROWS[:3]), validation=source("validation", ROWS[8:9]))
    with pytest.raises(ConfigError, match="no in_domain problems are left for train"):
        environment.corpus("train", "in_domain")


def test_ids_depend_on_all_but_the_name() -> None:
    task = task_of(ADD_ONE, "coding")
    assert task_of(replace(ADD_ONE, name="other"), "coding").id == task.id
    changes = {"question": "Print.", "tests": ADD_TWO.tests, "time_limit": 1.0, "checker": "lines", "solution": "print(1)"}
    changed = [task_of(replace(ADD_ONE, **{field: value}), "coding").id for field, value in changes.items()]  # type: ignore[arg-type]
    assert len({task.id, *changed}) == 6
    assert (task.environment, task.root_id, task.parent_id, task.version, task.kind) == ("coding", task.id, None, 0, "easy")
    assert task.difficulty == 0.1


def test_a_task_is_json_and_reads_back() -> None:
    task = task_of(ADD_ONE, "coding")
    read = Task(**json.loads(json.dumps(asdict(task))))
    assert read == task
    assert problem_of(replace(read, id="not seen before")) == ADD_ONE


def test_unknown_checkers_are_found_before_anything_is_run(make: Make, source: Any) -> None:
    rows = [*ROWS[1:], row("easy", 0, checker="hundred")]
    with pytest.raises(ConfigError, match="problem 'easy 0' has the unknown checker 'hundred'"):
        make(train=source("train", rows)).corpus("train", "in_domain")
    environment = make(train=source("train", rows), checkers={"hundred": is_close_to_a_hundred})
    tasks = [task for part in PARTS for task in environment.corpus(*part) if task.spec["problem"]["name"] == "easy 0"]
    requests = [CheckRequest(task, ("print(99)", "print(1)"), (UnitTest("1\n", "1\n"),)) for task in tasks]
    assert environment.check_programs(requests) == [[[True, False]]]


def test_a_pickled_environment_has_the_same_tasks_and_workers_of_its_own(make: Make, source: Any) -> None:
    environment = make(train=source("train", ROWS), checkers={"hundred": is_close_to_a_hundred})
    fresh = pickle.loads(pickle.dumps(environment))
    assert ids(fresh) == ids(environment)
    loaded = pickle.loads(pickle.dumps(environment))
    task = loaded.corpus("test", "in_domain")[0]
    try:
        episode = loaded.start(task)
        assert episode.step(problem_of(task).solution).outcome == 1.0
        assert loaded.grader.sandbox is not environment.grader.sandbox
        assert "hundred" in loaded.grader.checkers
    finally:
        fresh.grader.sandbox.close()
        loaded.grader.sandbox.close()


def test_samples_are_training_problems_of_the_nearest_difficulty(make: Make, source: Any) -> None:
    environment = make(train=source("train", ROWS), out_of_distribution=source("other", [row("easy", 50), row("easy", 60)]))
    for difficulty, kinds in ((0.0, "easy"), (0.2, "easy"), (0.3, "easy medium"), (0.45, "medium"), (1.0, "hard")):
        drawn = [environment.sample(Random(f"{difficulty}/{i}"), difficulty) for i in range(60)]
        expected = {task.id for task in environment.corpus("train", "in_domain") if task.kind in kinds}
        assert {task.id for task in drawn} == expected
    assert environment.sample(Random(3), 0.4) == environment.sample(Random(3), 0.4)


def test_the_vocabulary_is_that_of_the_training_questions(make: Make, source: Any) -> None:
    environment = make(
        train=source("train", ROWS[:2]), validation=source("validation", ROWS[8:9]), test=source("test", ROWS[9:10])
    )
    assert environment.vocabulary() == ("0.", "1.", "Read", "a", "and", "it", "number", "plus", "print")


def test_the_offline_set_has_every_level_for_every_purpose(coding: CodingEnvironment) -> None:
    sizes = {part: len(coding.corpus(*part)) for part in PARTS}
    assert sum(sizes.values()) >= 60
    for part in PARTS[:3]:
        assert {task.kind for task in coding.corpus(*part)} == {"easy", "medium", "hard"}
    assert sizes["train", "in_domain"] > sizes["test", "in_domain"] > sizes["validation", "in_domain"]
    assert len(set().union(*ids(coding).values())) == sum(sizes.values())
    assert all(coding.solutions(task) for part in PARTS for task in coding.corpus(*part))


# Episodes


def test_right_wrong_failing_and_missing_programs_side_by_side(coding: CodingEnvironment) -> None:
    one, two = task_of(ADD_ONE, "coding"), task_of(ADD_TWO, "coding")
    actions = ["print(int(input()) + 1)", "", "print(int(input()) + 1)", "print(3)", "print(undefined)"]
    tasks = [one, one, two, two, two]
    results = coding.step_all([coding.start(task) for task in tasks], actions)
    assert all(isinstance(result, Transition) and result.done for result in results)
    told = [(result.outcome, result.is_valid, result.checks) for result in results if isinstance(result, Transition)]
    assert told == [
        (1.0, True, ("passed", "passed")),
        (-1.0, False, ()),
        (-1.0, True, ("wrong_answer", "wrong_answer")),
        (-1.0, True, ("passed", "wrong_answer")),
        (-1.0, True, ("runtime_error", "runtime_error")),
    ]
    texts = [result.observation.text for result in results if isinstance(result, Transition)]
    assert texts == [
        "2 of 2 tests passed.",
        "There was no program in the answer.",
        "0 of 2 tests passed, 2 wrong_answer.",
        "1 of 2 tests passed, 1 wrong_answer.",
        "0 of 2 tests passed, 2 runtime_error. NameError: name 'undefined' is not defined",
    ]
    partial = [trajectory(t, r).partial for t, r in zip(tasks, results, strict=True) if isinstance(r, Transition)]
    assert partial == [1.0, 0.0, 0.0, 0.5, 0.0]


def test_an_episode_has_one_turn_and_shows_the_question_alone(coding: CodingEnvironment) -> None:
    episode = coding.start(task_of(ADD_ONE, "coding"))
    assert episode.max_turns == 1
    assert episode.observation == Observation("Read a number and print the next one.")
    right = episode.step("print(int(input()) + 1)")
    assert (right.done, right.outcome) == (True, 1.0)
    missing = coding.start(task_of(ADD_ONE, "coding")).step("")
    assert (missing.done, missing.outcome, missing.is_valid) == (True, -1.0, False)


def test_nothing_but_the_question_and_the_sentence_is_shown(coding: CodingEnvironment) -> None:
    secret = replace(ADD_ONE, tests=(UnitTest("4711\n", "4712\n"),), solution="print(4713)", wrong_solutions=("print(4714)",))
    episode = coding.start(task_of(secret, "coding"))
    shown = episode.observation.text + episode.step("print(input())").observation.text
    assert not any(token in shown for token in ("4711", "4712", "4713", "4714"))


def test_an_error_of_the_sandbox_ends_only_its_episode(coding: CodingEnvironment, faulty_sandbox: None) -> None:
    episodes = [coding.start(task_of(ADD_ONE, "coding")) for _ in range(3)]
    right = "print(int(input()) + 1)"
    first, second, third = coding.step_all(episodes, [right, "faulty = 1", right])
    assert isinstance(second, SandboxFailedError)
    assert str(second) == "the worker did not answer"
    assert isinstance(first, Transition) and first.outcome == 1.0  # noqa: PT018 (narrows the type)
    assert isinstance(third, Transition) and third.outcome == 1.0  # noqa: PT018
    with pytest.raises(SandboxFailedError, match="the worker did not answer"):
        episodes[1].step("faulty = 1")


def test_episodes_and_actions_come_in_pairs(coding: CodingEnvironment) -> None:
    with pytest.raises(ValueError, match="zip"):
        coding.step_all([coding.start(task_of(ADD_ONE, "coding"))], ["print(1)", "print(2)"])
    assert coding.step_all([], []) == []


# Unit tests


def test_which_programs_pass_which_tests(coding: CodingEnvironment) -> None:
    plus, double, fails = "print(int(input()) + 1)", "print(int(input()) * 2)", "print(1 // (int(input()) - 1))"
    tests = (UnitTest("1\n", "2\n"), UnitTest("3\n", "4\n"), UnitTest("2\n", "1\n"))
    one, two = task_of(ADD_ONE, "coding"), task_of(ADD_TWO, "coding")
    requests = [
        CheckRequest(one, (plus, double, plus, fails), tests),
        CheckRequest(two, (double,), (tests[1], UnitTest("3\n", "6\n"), tests[1])),
        CheckRequest(one, (plus,), ()),
        CheckRequest(one, (), tests[:2]),
    ]
    assert coding.check_programs(requests) == [
        [[True, True, True, False], [True, False, True, False], [False, False, False, True]],
        [[False], [True], [False]],
        [],
        [[], []],
    ]


def test_programs_that_cannot_be_run_have_no_verdict(coding: CodingEnvironment, faulty_sandbox: None) -> None:
    request = CheckRequest(task_of(ADD_ONE, "coding"), ("print(2)", "faulty = 1"), ADD_ONE.tests)
    assert coding.check_programs([request]) == [[[True, None], [False, None]]]


def test_programs_that_were_given_up_have_no_verdict(coding: CodingEnvironment) -> None:
    slow = "x = int(input())\nwhile x < 9: pass\nprint(10)"
    tests = tuple(UnitTest(f"{x}\n", f"{x + 1}\n") for x in (1, 2, 3, 9))
    request = CheckRequest(task_of(replace(ADD_ONE, time_limit=0.1), "coding"), (slow, "print(4)"), tests)
    assert coding.check_programs([request]) == [[[False, False], [False, False], [None, True], [None, False]]]


def test_solutions_are_those_that_do_what_the_source_says(coding: CodingEnvironment, monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong = "print(int(input()) + 1)", "print(2)"
    also_right = "print(1 + int(input()))"
    partly = task_of(replace(ADD_ONE, wrong_solutions=(also_right, wrong, "print(")), "coding")
    assert coding.solutions(partly) == (Solution(right, True), Solution(wrong, False), Solution("print(", False))
    for changes in ({"solution": "print(3)"}, {"wrong_solutions": (also_right, right)}):
        assert coding.solutions(task_of(replace(ADD_ONE, **changes), "coding")) == ()  # type: ignore[arg-type]
    monkeypatch.setattr(coding.grader.sandbox, "run", None)  # verified once
    assert [solution.program for solution in coding.solutions(partly)] == [right, wrong, "print("]


def test_solutions_and_experts(coding: CodingEnvironment) -> None:
    task = task_of(ADD_ONE, "coding")
    assert coding.solutions(task) == (
        Solution("print(int(input()) + 1)", True),
        Solution("print(2)", False),
        Solution("print(int(input()) * 2)", False),
    )
    episode = coding.start(task)
    assert coding.expert(episode, Random(1)) == ExpertAction("print(int(input()) + 1)")
    assert {coding.detour(episode, Random(seed)) for seed in range(20)} == {"print(2)", "print(int(input()) * 2)"}
    without_wrong, bare = task_of(ADD_TWO, "coding"), task_of(replace(ADD_ONE, solution=None), "coding")
    assert coding.solutions(without_wrong) == coding.solutions(bare) == ()
    assert coding.detour(coding.start(without_wrong), Random(1)) is None
    assert coding.expert(coding.start(bare), Random(1)) is None


# Rewriting

FOUR = tuple(UnitTest(f"{x}\n", f"{x + 1}\n") for x in (1, 2, 3, 4))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"solution": None}, "the rewrite has no solution"),
        ({"solution": "print(5)"}, "its solution fails: 1 of 4 tests passed, 3 wrong_answer."),
        ({"solution": "raise KeyError(7)"}, "its solution fails: 0 of 4 tests passed, 4 runtime_error. KeyError: 7"),
        (
            {"tests": tuple(UnitTest(f"{x}\n", "5 \n" if x % 2 else "5\n") for x in range(4))},
            "always prints '5'",
        ),
        (
            {"tests": (UnitTest("a\n", "1 2\n"), UnitTest("b\n", "2 1\n")), "checker": "unordered"},
            "always prints '1 2'",
        ),
    ],
    ids=["no solution", "wrong", "raises", "constant", "constant up to the order"],
)
def test_what_is_wrong_with_a_rewrite(coding: CodingEnvironment, changes: dict[str, Any], reason: str) -> None:
    parent = task_of(ADD_ONE, "coding")
    problem = replace(ADD_ONE, **{"question": "Print the number that follows.", "tests": FOUR} | changes)
    task = rewritten(parent, problem)
    assert reason in (coding.validate(task, parent) or "")
    assert coding.validate(task) is None  # as a problem of a source it is taken as it is


def test_what_a_rewrite_resembles(make: Make, source: Any) -> None:
    trained = "You are given the heights of n towers in a row; print how many of them are higher than both neighbours."
    held_out = "A shop sells apples in bags of three different sizes; find the cheapest way to buy exactly m of its apples today."
    other = "Count the letters of every word in the text and print the longest word that has an even number of letters."
    environment = make(
        train=source("train", [row("easy", 1, question=trained)]),
        validation=source("validation", [row("easy", 2, question=other)]),
        test=source("test", [row("easy", 3, question=held_out)]),
    )
    (parent,) = environment.corpus("train", "in_domain")

    def rewrite(question: str) -> Task:
        return rewritten(parent, replace(problem_of(parent), question=question))

    new = rewrite("Read the weights of some parcels and print the fewest vans that can carry all of them at once.")
    assert not environment.resembles(new, [parent])
    assert environment.resembles(rewrite(trained.upper().removesuffix(".")), [parent])
    assert environment.resembles(rewrite(trained + " Now."), [new, parent])
    assert not environment.resembles(rewrite(trained + " Now."), [new])  # training problems do not count by themselves
    assert environment.resembles(rewrite(held_out.replace("today", "now")), [])
    assert environment.resembles(rewrite("Please: " + other), [])
    more = (
        " Then read a second line in which every third value is to be left out, and say on another line what has changed since."
    )
    assert environment.resembles(rewrite(held_out + more), [])  # a held-out problem is not trained on with a part added
    assert not environment.resembles(rewrite(trained + more), [parent])  # but that is how a problem becomes harder


def test_rewrites_stay_anchored_to_their_root(coding: CodingEnvironment) -> None:
    root = task_of(ADD_ONE, "coding")
    child = coding.apply_rewrite(root, ANSWER)
    assert isinstance(child, Task)
    problem = problem_of(child)
    assert problem.question == "Read two numbers and print the sum of both."
    assert problem.solution is not None
    assert problem.solution.strip() == "print(sum(map(int, input().split())))"
    assert problem.tests == tuple(UnitTest(f"{numbers}\n", f"{total}\n") for numbers, total in SUMS)
    assert problem.wrong_solutions == ()
    assert coding.validate(child, root) is None
    grandchild = coding.apply_rewrite(child, ANSWER.replace("the sum of both", "both added up"))
    assert isinstance(grandchild, Task)
    assert len({root.id, child.id, grandchild.id}) == 3
    for task, parent, version in ((child, root, 1), (grandchild, child, 2)):
        assert (task.root_id, task.parent_id, task.version, task.kind) == (root.id, parent.id, version, "easy")
        assert task.spec["root_question"] == "Read a number and print the next one."
        assert json.loads(json.dumps(task.spec)) == task.spec
    prompt = coding.rewrite_prompt(child, "harder", "Test 2 is passed by all.", 3, 8)
    assert prompt is not None
    for told in (ADD_ONE.question, problem.question, problem.solution, "Test 2 is passed by all.", "harder"):
        assert told in prompt


def test_an_answer_that_is_no_rewrite_says_what_is_wrong(coding: CodingEnvironment) -> None:
    root = task_of(ADD_ONE, "coding")
    for answer in ("", "I cannot.", ANSWER[: ANSWER.index("### Test 4")]):
        assert isinstance(coding.apply_rewrite(root, answer), str)
    wrong = coding.apply_rewrite(root, ANSWER.replace("30", "31"))
    assert isinstance(wrong, Task)
    assert coding.validate(wrong, root) == "its solution fails: 3 of 4 tests passed, 1 wrong_answer."
