"""Problems as data, and checkers: what counts as the expected output, and outputs that are meant to hurt."""

import json
import pickle
import time
from typing import Any

import pytest

from rla_lightning.environments.coding.checkers import CHECKERS
from rla_lightning.environments.coding.problems import FieldError, Problem, problem_from, spec_of
from rla_lightning.types import UnitTest

MEGABYTE = 1_000_000
SPEC = {
    "name": "double",
    "question": "Print twice the number.",
    "tests": [{"stdin": "2\n", "stdout": "4\n"}, {"stdin": "-1", "stdout": "-2"}],
    "time_limit": 1.5,
    "checker": "floats",
    "difficulty": 0.8,
    "level": "hard",
    "solution": "print(2 * int(input()))",
    "wrong_solutions": ["print(4)"],
}


# Problems


def test_a_problem_survives_json() -> None:
    problem = problem_from(SPEC)
    assert problem == Problem(
        name="double",
        question="Print twice the number.",
        tests=(UnitTest("2\n", "4\n"), UnitTest("-1", "-2")),
        time_limit=1.5,
        checker="floats",
        difficulty=0.8,
        level="hard",
        solution="print(2 * int(input()))",
        wrong_solutions=("print(4)",),
    )
    assert spec_of(problem) == SPEC
    assert problem_from(json.loads(json.dumps(spec_of(problem)))) == problem


def test_a_problem_needs_little() -> None:
    problem = problem_from({"name": "a", "question": "b", "tests": [{"stdin": "", "stdout": "1"}]})
    assert problem == Problem("a", "b", (UnitTest("", "1"),), 2.0, "tokens", 0.5, "medium", None, ())
    assert problem_from(spec_of(problem)) == problem


@pytest.mark.parametrize(("difficulty", "level"), [(0, "easy"), (0.349, "easy"), (0.35, "medium"), (0.7, "hard"), (1, "hard")])
def test_level_of_a_difficulty(difficulty: float, level: str) -> None:
    spec = {key: value for key, value in SPEC.items() if key != "level"}
    assert problem_from(spec | {"difficulty": difficulty}).level == level


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        ({"name": 3}, "name", "field 'name' must be text, got int"),
        ({"name": " "}, "name", "field 'name' is empty"),
        ({"question": None}, "question", "field 'question' must be text, got null"),
        ({"question": "a\ud800"}, "question", "field 'question' holds a lone surrogate at character 1"),
        ({"tests": []}, "tests", "field 'tests' is empty; a problem needs at least one test"),
        ({"tests": "1"}, "tests", "field 'tests' must be a list, got str"),
        ({"tests": [["1", "2"]]}, "tests[0]", "field 'tests[0]' must be an object with stdin and stdout, got list"),
        ({"tests": [{"stdin": ""}]}, "tests[0]", "field 'tests[0]' must be an object with stdin and stdout, got ['stdin']"),
        ({"tests": [{"stdin": "", "stdout": 4}]}, "tests[0].stdout", "field 'tests[0].stdout' must be text, got int"),
        ({"time_limit": 0}, "time_limit", "field 'time_limit' must be in (0, 60] seconds, got 0"),
        ({"time_limit": 60.5}, "time_limit", "field 'time_limit' must be in (0, 60] seconds, got 60.5"),
        ({"time_limit": True}, "time_limit", "field 'time_limit' must be a number, got bool"),
        ({"difficulty": 1.01}, "difficulty", "field 'difficulty' must be in [0, 1], got 1.01"),
        ({"difficulty": float("nan")}, "difficulty", "field 'difficulty' must be finite, got nan"),
        ({"difficulty": 10**400}, "difficulty", "field 'difficulty' is too large"),
        ({"level": "Hard"}, "level", "field 'level' must be one of easy, medium, hard, got 'Hard'"),
        ({"checker": ""}, "checker", "field 'checker' is empty"),
        ({"solution": ["print()"]}, "solution", "field 'solution' must be text, got list"),
        ({"wrong_solutions": "print()"}, "wrong_solutions", "field 'wrong_solutions' must be a list of texts, got str"),
        ({"wrong_solutions": [1]}, "wrong_solutions[0]", "field 'wrong_solutions[0]' must be text, got int"),
    ],
)
def test_a_bad_field_is_named(change: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(FieldError) as caught:
        problem_from(SPEC | change)
    assert (caught.value.field, str(caught.value)) == (field, message)
    assert str(pickle.loads(pickle.dumps(caught.value))) == message  # it crosses processes


def test_missing_and_unknown_fields() -> None:
    with pytest.raises(FieldError, match="field 'tests' is missing"):
        problem_from({"name": "a", "question": "b"})
    with pytest.raises(FieldError, match="field 'timelimit' is unknown; a problem has name, question, tests, time_limit"):
        problem_from(SPEC | {"timelimit": 1})


# Checkers


def test_names() -> None:
    assert set(CHECKERS) == {"tokens", "floats", "unordered", "lines"}


@pytest.mark.parametrize(
    ("checker", "expected", "actual", "verdict"),
    [
        ("tokens", "1 2\n3\n", "1 2 3", True),
        ("tokens", "1 2\n", "  1\t2 \r\n\n\n", True),
        ("tokens", "", "\n \n", True),
        ("tokens", "", "0", False),
        ("tokens", "12", "1 2", False),
        ("tokens", "1", "1.0", False),
        ("tokens", "1", "01", False),
        ("tokens", "Yes", "YES", False),
        ("tokens", "1 2", "2 1", False),
        ("tokens", "1", "1 1", False),
        ("floats", "0.5", "0.5000009", True),
        ("floats", "0.5", "0.500002", False),
        ("floats", "1000000", "1000000.9", True),  # 9e-7 of it
        ("floats", "1000000", "1000002", False),  # 2e-6 of it
        ("floats", "0", "-9e-7", True),
        ("floats", "-1.", "-1", True),
        ("floats", ".5", "+0.5E0", True),
        ("floats", "1 2", "1", False),
        ("floats", "yes 1", "yes 1.0", True),
        ("floats", "yes", "no", False),
        ("floats", "1.7e308", "-1.7e308", False),
        ("floats", "nan", "nan", False),
        ("floats", "-NaN", "-NaN", False),
        ("floats", "1", "nan", False),
        ("floats", "inf", "1e999999", False),
        ("floats", "inf", "inf", True),  # the same text
        ("floats", "1e999999", "1e999998", False),
        ("floats", "1", "1_0", False),
        ("floats", "10", "1_0", False),
        ("floats", "1", "١", False),  # a digit, but no judge's
        ("floats", "16", "0x10", False),
        ("floats", "1", "1e", False),
        ("floats", "1", ".", False),
        ("unordered", "a b b", "b\na b", True),
        ("unordered", "a b b", "a a b", False),
        ("unordered", "a b", "a b b", False),
        ("lines", "#  #\n ##\n", "#  #  \n ##\r\n\n\n", True),
        ("lines", "# #", "#  #", False),
        ("lines", " #", "#", False),
        ("lines", "a\n\nb", "a\nb", False),
        ("lines", "a\nb", "a\x0cb", False),
        ("lines", "", "\n\n", True),
    ],
)
def test_verdicts(checker: str, expected: str, actual: str, verdict: bool) -> None:
    assert CHECKERS[checker]("", expected, actual) is verdict


@pytest.mark.parametrize("checker", sorted(CHECKERS))
@pytest.mark.parametrize(
    ("expected", "actual"),
    [
        ("9" * MEGABYTE, "9" * (MEGABYTE - 1) + "8"),
        ("0." + "3" * MEGABYTE, "0." + "3" * MEGABYTE + "4"),
        ("1", "1" * MEGABYTE + "x"),
        ("1e5", "1e" + "9" * MEGABYTE),
        ("a", "b" + "\n" * MEGABYTE),
        ("a", "a" + " \n" * (MEGABYTE // 2) + "b"),
        ("a", "\x00" * MEGABYTE),
        ("a", "\ud800\uffff" * (MEGABYTE // 2)),
        ("1 " * (MEGABYTE // 2), "2 " * (MEGABYTE // 2)),
        (("1" * 999 + " ") * (MEGABYTE // 1000), ("1" * 999 + "_ ") * (MEGABYTE // 1000)),
    ],
    ids=[
        "digits",
        "decimals",
        "no number",
        "exponent",
        "blank lines",
        "blanks",
        "zeros",
        "no text",
        "tokens",
        "long tokens",
    ],
)
def test_a_megabyte_of_anything_is_wrong_at_once(checker: str, expected: str, actual: str) -> None:
    start = time.process_time()
    assert not CHECKERS[checker]("", expected, actual)
    assert time.process_time() - start < 2  # quadratic time would be minutes
