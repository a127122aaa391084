"""The offline problems as data: complete, graded, distinct, and told apart from plausible mistakes by their tests."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from rla_lightning.environments.coding import environment
from rla_lightning.environments.coding.checkers import CHECKERS
from rla_lightning.environments.coding.grading import Grader
from rla_lightning.environments.coding.problems import problem_from
from rla_lightning.sandbox import Sandbox, SandboxSettings

KEYS = ["name", "question", "level", "difficulty", "time_limit", "checker", "tests", "solution", "wrong_solutions"]
BANDS = {"easy": (0.0, 0.35), "medium": (0.35, 0.7), "hard": (0.7, 1.01)}  # from the first up to, without, the second
LINES = Path(environment.OFFLINE).read_text(encoding="utf-8").splitlines()
ROWS = [json.loads(line) for line in LINES]
PROBLEMS = [problem_from(row) for row in ROWS]


@pytest.fixture(scope="module")
def grader():
    sandbox = Sandbox(SandboxSettings())
    yield Grader(sandbox)
    sandbox.close()


def shingles(text):
    words = text.lower().split()
    return {tuple(words[i : i + 3]) for i in range(len(words) - 2)}


def test_there_are_enough_problems_of_every_level():
    levels = [problem.level for problem in PROBLEMS]
    assert len(PROBLEMS) >= 72
    assert levels.count("easy") >= 28
    assert levels.count("medium") >= 26
    assert levels.count("hard") >= 20


def test_every_row_has_the_same_keys_and_unescaped_text():
    assert all(list(row) == KEYS for row in ROWS)
    assert all(json.dumps(row, ensure_ascii=False) == line for row, line in zip(ROWS, LINES, strict=True))


def test_names_are_unique():
    assert len({problem.name for problem in PROBLEMS}) == len(PROBLEMS)


def test_difficulty_rises_in_small_steps_within_the_bands_of_the_levels():
    difficulties = [problem.difficulty for problem in PROBLEMS]
    steps = [after - before for before, after in pairwise(difficulties)]
    assert difficulties[0] <= 0.02
    assert difficulties[-1] == 1.0
    assert min(steps) >= 0
    assert max(steps) < 0.035
    for problem in PROBLEMS:
        low, high = BANDS[problem.level]
        assert low <= problem.difficulty < high, problem.name


def test_tests_are_small_and_no_constant_passes_them():
    for problem in PROBLEMS:
        inputs = [test.stdin for test in problem.tests]
        check = CHECKERS[problem.checker]
        assert 6 <= len(inputs) <= 12, problem.name
        assert len(set(inputs)) == len(inputs), problem.name
        assert max(map(len, inputs)) <= 2000, problem.name
        for constant in problem.tests:
            assert not all(check(test.stdin, test.stdout, constant.stdout) for test in problem.tests), problem.name


def test_every_checker_is_used():
    assert {problem.checker for problem in PROBLEMS} == {"tokens", "floats", "unordered"}


def test_the_example_of_the_statement_is_the_first_test():
    for problem in PROBLEMS:
        _, example = problem.question.split("\n\nExample: for the input\n")
        stdin, stdout = example.split("\nprint\n")
        assert stdin + "\n" == problem.tests[0].stdin, problem.name
        assert CHECKERS[problem.checker](stdin, problem.tests[0].stdout, stdout), problem.name


def test_no_two_questions_are_nearly_equal():
    sets = [shingles(problem.question) for problem in PROBLEMS]
    for i, a in enumerate(sets):
        for j in range(i):
            assert len(a & sets[j]) < 0.6 * len(a | sets[j]), (PROBLEMS[j].name, PROBLEMS[i].name)


def test_solutions_pass_all_tests(grader):
    grades = grader.grades([(problem, problem.solution, problem.tests) for problem in PROBLEMS])
    assert [problem.name for problem, grade in zip(PROBLEMS, grades, strict=True) if not grade.is_correct] == []


def test_each_wrong_solution_runs_but_fails_a_test(grader):
    jobs = [(problem, program, problem.tests) for problem in PROBLEMS for program in problem.wrong_solutions]
    assert len(jobs) == 3 * len(PROBLEMS)
    for (problem, program, _), grade in zip(jobs, grader.grades(jobs), strict=True):
        assert set(grade.checks) <= {"passed", "wrong_answer"}, (problem.name, program)
        assert "wrong_answer" in grade.checks, (problem.name, program)
