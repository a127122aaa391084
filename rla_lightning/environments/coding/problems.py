"""Programming problems as plain data, and what reading rows of any source has in common."""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from rla_lightning.types import ConfigError, UnitTest

logger = logging.getLogger(__name__)

RawT = TypeVar("RawT")

LEVELS = ("easy", "medium", "hard")
CENTRES = {"easy": 0.175, "medium": 0.525, "hard": 0.85}  # of the thirds that `level_of` cuts
LONGEST_TIME_LIMIT = 60.0  # seconds
LARGEST_TEST = 64 * 1024  # bytes of stdin and stdout together


class FieldError(ValueError):
    """A field of a problem that cannot be used."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(field, message)
        self.field = field
        self.message = message

    def __str__(self) -> str:
        return f"field '{self.field}' {self.message}"


class RowError(ValueError):
    """A row that is no row at all."""


class UnusableRow(Exception):  # noqa: N818 (an expected answer, not an error)
    """A well-formed row that is no problem of this kind; the message is the reason."""


@dataclass(frozen=True)
class Problem:
    """A task for programs that read stdin and write stdout."""

    name: str  # unique within its source
    question: str
    tests: tuple[UnitTest, ...]  # hidden ground truth
    time_limit: float = 2.0  # seconds of wall clock per test
    checker: str = "tokens"  # a name of `checkers.CHECKERS` or of the user's own
    difficulty: float = 0.5  # in [0, 1]
    level: str = "medium"  # one of LEVELS: for numbers per difficulty
    solution: str | None = None  # a reference program
    wrong_solutions: tuple[str, ...] = ()


FIELDS = tuple(field.name for field in fields(Problem))
REQUIRED = ("name", "question", "tests")


def problem_from(spec: Mapping[str, Any]) -> Problem:
    """Reads a problem from JSON values; without a level it gets that of its difficulty.

    Raises:
        FieldError: for a field that is missing, unknown, of the wrong type or out of range.
    """
    for key in spec:
        if key not in FIELDS:
            raise FieldError(str(key), f"is unknown; a problem has {', '.join(FIELDS)}")
    for key in REQUIRED:
        if key not in spec:
            raise FieldError(key, "is missing")
    difficulty = number_of("difficulty", spec.get("difficulty", 0.5))
    if not 0 <= difficulty <= 1:
        raise FieldError("difficulty", f"must be in [0, 1], got {difficulty}")
    level = spec.get("level", level_of(difficulty))
    if level not in LEVELS:
        raise FieldError("level", f"must be one of {', '.join(LEVELS)}, got {level!r}")
    solution = spec.get("solution")
    return Problem(
        name=_filled("name", spec["name"]),
        question=_filled("question", spec["question"]),
        tests=_tests_of(spec["tests"]),
        time_limit=time_limit_of("time_limit", spec.get("time_limit", 2.0)),
        checker=_filled("checker", spec.get("checker", "tokens")),
        difficulty=difficulty,
        level=level,
        solution=None if solution is None else text_of("solution", solution),
        wrong_solutions=texts_of("wrong_solutions", spec.get("wrong_solutions", [])),
    )


def spec_of(problem: Problem) -> dict[str, Any]:
    """The JSON values that `problem_from` reads back as an equal problem."""
    values = {name: getattr(problem, name) for name in FIELDS}
    return values | {
        "tests": [{"stdin": test.stdin, "stdout": test.stdout} for test in problem.tests],
        "wrong_solutions": list(problem.wrong_solutions),
    }


def level_of(difficulty: float) -> str:
    """The third of the scale in which a difficulty lies."""
    if difficulty < 0.35:
        return "easy"
    return "medium" if difficulty < 0.7 else "hard"


def text_of(field: str, value: object) -> str:
    """The value, if it is text that a program can be given."""
    if not isinstance(value, str):
        raise FieldError(field, f"must be text, got {_kind(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair; no pipe takes it
        raise FieldError(field, f"holds a lone surrogate at character {error.start}") from None
    return value


def texts_of(field: str, value: object) -> tuple[str, ...]:
    """The values of a list of texts."""
    if not isinstance(value, list | tuple):
        raise FieldError(field, f"must be a list of texts, got {_kind(value)}")
    return tuple(text_of(f"{field}[{index}]", item) for index, item in enumerate(value))


def number_of(field: str, value: object) -> float:
    """The value as a finite float; true and false are no numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise FieldError(field, f"must be a number, got {_kind(value)}")
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        raise FieldError(field, "is too large") from None
    if not math.isfinite(number):
        raise FieldError(field, f"must be finite, got {number}")
    return number


def time_limit_of(field: str, value: object) -> float:
    """The value as seconds that a program may run."""
    seconds = number_of(field, value)
    if not 0 < seconds <= LONGEST_TIME_LIMIT:
        raise FieldError(field, f"must be in (0, {LONGEST_TIME_LIMIT:g}] seconds, got {seconds:g}")
    return seconds


def paired_tests(fields: tuple[str, str], stdins: object, stdouts: object) -> tuple[UnitTest, ...]:
    """Tests from a list of inputs and one of outputs."""
    inputs, outputs = texts_of(fields[0], stdins), texts_of(fields[1], stdouts)
    if len(inputs) != len(outputs):
        raise FieldError(fields[1], f"has {len(outputs)} items, {fields[0]} has {len(inputs)}")
    return tuple(UnitTest(stdin, stdout) for stdin, stdout in zip(inputs, outputs, strict=True))


def tests_to_keep(public: Sequence[UnitTest], others: Sequence[UnitTest], max_tests: int) -> tuple[UnitTest, ...]:
    """The tests to keep, in their order: the public ones before others, of those the smallest."""
    if not public and not others:
        raise UnusableRow("no tests")
    sizes = {test: len(test.stdin.encode()) + len(test.stdout.encode()) for test in (*public, *others)}
    fitting = [test for test, size in sizes.items() if size <= LARGEST_TEST]
    if not fitting:
        raise UnusableRow(f"every test is over {LARGEST_TEST // 1024} KiB")
    shown = set(public)
    order = sorted(range(len(fitting)), key=lambda i: -1 if fitting[i] in shown else sizes[fitting[i]])
    return tuple(fitting[i] for i in sorted(order[:max_tests]))


def json_of(text: str | bytes) -> Any:
    """The value of a JSON text that anyone may have written."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno} " if error.lineno > 1 else ""
        raise RowError(f"invalid JSON: {error.msg} at {line}column {error.colno}") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, a number of thousands of digits, brackets without end
        raise RowError(f"invalid JSON: {error}") from error


def collect(
    title: str, rows: Iterable[tuple[str, int, RawT]], read: Callable[[int, RawT], Problem], limit: int | None
) -> list[Problem]:
    """Reads rows of (where it stands, its number, what is there) until there are enough problems."""
    problems: dict[str, Problem] = {}
    skipped: Counter[str] = Counter()
    errors: list[str] = []
    for where, number, row in rows:
        if len(problems) == limit:
            break
        try:
            problem = read(number, row)
            if problem.name in problems:
                raise FieldError("name", f"repeats {problem.name!r}")
            problems[problem.name] = problem
        except UnusableRow as reason:
            skipped[str(reason)] += 1
        except (FieldError, RowError) as error:
            errors.append(f"{title} {where}: {error}")
    if errors:
        more = len(errors) - 1
        raise ConfigError(errors[0] + (f" (and {more} more malformed row{'s' * (more > 1)})" if more else ""))
    reasons = ", ".join(f"{reason} ({count})" for reason, count in sorted(skipped.items()))
    if not problems:
        raise ConfigError(f"{title} has no problem to use" + (f"; rows were left out: {reasons}" if reasons else ""))
    if reasons:
        logger.warning("%s: rows were left out: %s", title, reasons)
    return list(problems.values())


def _tests_of(value: object) -> tuple[UnitTest, ...]:
    if not isinstance(value, list | tuple):
        raise FieldError("tests", f"must be a list, got {_kind(value)}")
    if not value:
        raise FieldError("tests", "is empty; a problem needs at least one test")
    return tuple(_test_of(f"tests[{index}]", item) for index, item in enumerate(value))


def _test_of(field: str, value: object) -> UnitTest:
    if not isinstance(value, Mapping) or set(value) != {"stdin", "stdout"}:
        found = sorted(map(str, value)) if isinstance(value, Mapping) else _kind(value)
        raise FieldError(field, f"must be an object with stdin and stdout, got {found}")
    return UnitTest(stdin=text_of(f"{field}.stdin", value["stdin"]), stdout=text_of(f"{field}.stdout", value["stdout"]))


def _filled(field: str, value: object) -> str:
    text = text_of(field, value)
    if not text.strip():
        raise FieldError(field, "is empty")
    return text


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__
