"""Programs against tests in the real sandbox: each status, sentences, checkers, order, and what programs never get to see."""

from collections.abc import Iterator
from typing import Any

import pytest

from rla_lightning.environments.coding.grading import Grade, Grader
from rla_lightning.environments.coding.problems import Problem
from rla_lightning.sandbox import Sandbox, SandboxSettings, pool
from rla_lightning.types import ConfigError, UnitTest

TESTS = (UnitTest("1\n", "2\n"), UnitTest("2\n", "4\n"), UnitTest("5\n", "10\n"))
DOUBLE = Problem("double", "Print twice the number.", TESTS)
QUICK = Problem("quick", "Print twice the number.", TESTS, time_limit=0.2)


def is_shorter(stdin: str, expected: str, actual: str) -> bool:
    """A checker of a user: anything shorter than the input is right."""
    return len(actual.strip()) < len(stdin.strip())


@pytest.fixture(scope="module")
def grader(needs_isolation: None) -> Iterator[Grader]:
    sandbox = Sandbox(SandboxSettings(workers=2, memory_mb=64, output_kb=16))
    yield Grader(sandbox, {"shorter": is_shorter})
    sandbox.close()


def grade(grader: Grader, program: str, problem: Problem = DOUBLE, tests: tuple[UnitTest, ...] = TESTS) -> Grade:
    (result,) = grader.grades([(problem, program, tests)])
    return result


@pytest.mark.parametrize(
    ("program", "checks", "complaint"),
    [
        ("print(int(input()) * 2)", ("passed", "passed", "passed"), ""),
        ("print(int(input()) + 2)", ("wrong_answer", "passed", "wrong_answer"), ""),
        ("x = int(input())\nprint(2 * x if x != 2 else 1 // 0)", ("passed", "runtime_error", "passed"), "ZeroDivisionError"),
        ("x = int(input())\nprint(2 * x)\nif x == 5: raise SystemExit(3)", ("passed", "passed", "runtime_error"), ""),
        ("print(2 *", ("runtime_error",) * 3, "SyntaxError"),
        ("x = bytearray(10 ** 9)", ("memory",) * 3, "MemoryError"),
        ("print('2' * 100_000)", ("output_limit",) * 3, ""),
    ],
    ids=["right", "wrong", "raises", "exit code", "syntax", "memory", "output"],
)
def test_what_a_program_makes_of_its_tests(grader: Grader, program: str, checks: tuple[str, ...], complaint: str) -> None:
    result = grade(grader, program)
    assert result.checks == checks
    assert result.is_correct is (checks == ("passed", "passed", "passed"))
    assert result.complaint.startswith(complaint)
    assert bool(result.complaint) is bool(complaint)


def test_after_two_timeouts_the_others_are_not_run(grader: Grader) -> None:
    result = grade(grader, "x = int(input())\nwhile x < 9: pass\nprint(18)", QUICK, (*TESTS, UnitTest("9\n", "18\n")))
    assert result.checks == ("timeout", "timeout", "not_run", "not_run")
    assert not result.is_correct
    assert result.summary() == "0 of 4 tests passed, 2 timeout, 2 not_run."
    assert grade(grader, "x = int(input())\nwhile x == 2: pass\nprint(2 * x)", QUICK).checks == ("passed", "timeout", "passed")


def test_a_grade_in_a_sentence() -> None:
    assert Grade(("passed", "passed")).summary() == "2 of 2 tests passed."
    mixed = Grade(("timeout", "wrong_answer", "passed", "wrong_answer", "wrong_answer"), "KeyError: 3")
    assert mixed.summary() == "1 of 5 tests passed, 3 wrong_answer, 1 timeout. KeyError: 3"


def test_the_complaint_is_the_last_line_of_the_first_run_that_failed(grader: Grader) -> None:
    result = grade(grader, "x = int(input())\nif x == 1: print(0)\nelse: raise ValueError('a\\nb' + str(x) + '!' * 300)")
    assert result.checks == ("wrong_answer", "runtime_error", "runtime_error")
    assert result.complaint == "b2" + "!" * 198


@pytest.mark.parametrize(
    ("checker", "program", "verdict"),
    [
        ("tokens", "print(0.5, 2, 3)", "passed"),
        ("tokens", "print(0.5000001, 2, 3)", "wrong_answer"),
        ("floats", "print(0.5000001, 2, 3)", "passed"),
        ("floats", "print(3, 2, 0.5)", "wrong_answer"),
        ("unordered", "print(3, 2, 0.5)", "passed"),
        ("lines", "print('0.5 2', 3, sep='\\n')", "passed"),
        ("lines", "print(0.5, 2, 3)", "wrong_answer"),
        ("shorter", "print(12)", "passed"),
        ("shorter", "print(123)", "wrong_answer"),
    ],
)
def test_problems_name_their_checker(grader: Grader, checker: str, program: str, verdict: str) -> None:
    tests = (UnitTest("abc\n", "0.5 2\n3\n"),)
    assert grade(grader, program, Problem("any", "Print.", tests, checker=checker), tests).checks == (verdict,)


def test_a_checker_that_raises_counts_as_a_wrong_answer_and_is_told_once(
    grader: Grader, caplog: pytest.LogCaptureFixture
) -> None:
    def same_number(stdin: str, expected: str, actual: str) -> Any:
        return "yes" if int(expected) == int(actual) else ""

    own = Grader(grader.sandbox, {"number": same_number})
    problem = Problem("double", "Print twice the number.", TESTS, checker="number")
    assert grade(own, "print('+' + str(2 * int(input())))", problem).checks == ("passed",) * 3
    assert caplog.messages == []
    assert grade(own, "x = int(input())\nprint('four' if x == 2 else 2 * x)", problem).checks == (
        "passed",
        "wrong_answer",
        "passed",
    )
    assert grade(own, "print('many')", problem).checks == ("wrong_answer",) * 3
    assert caplog.messages == [
        "checker number failed on 'four\\n': ValueError: invalid literal for int() with base 10: 'four\\n'"
    ]


def test_an_unknown_checker_is_named(grader: Grader) -> None:
    grader.check_name(Problem("a", "b", TESTS, checker="shorter"))
    with pytest.raises(ConfigError, match=r"the unknown checker .longer.; there are tokens, floats, .*shorter"):
        grader.check_name(Problem("a", "b", TESTS, checker="longer"))
    with pytest.raises(ConfigError, match="problem 'a' has the unknown checker 'shorter'; there are"):
        Grader(grader.sandbox).check_name(Problem("a", "b", TESTS, checker="shorter"))


def test_many_programs_come_back_in_order(grader: Grader) -> None:
    jobs = [
        (DOUBLE, f"import time\ntime.sleep({(7 - add) / 200})\nprint(int(input()) + {add})", TESTS[: 1 + add % 3])
        for add in (1, 2, 5, 1, 3)
    ]
    assert [result.checks for result in grader.grades(jobs)] == [
        ("passed", "wrong_answer"),  # of 1 and 2; 2 + 1 is not 4
        ("wrong_answer", "passed", "wrong_answer"),
        ("wrong_answer", "wrong_answer", "passed"),
        ("passed", "wrong_answer"),
        ("wrong_answer",),
    ]
    assert grader.grades([]) == []


def test_one_program_is_graded_by_each_problem_s_tests(grader: Grader) -> None:
    other = Problem("next", "Print the next number.", (UnitTest("1\n", "2\n"), UnitTest("2\n", "3\n")))
    jobs = [(problem, "print(int(input()) + 1)", problem.tests) for problem in (DOUBLE, other)]
    assert [result.checks for result in grader.grades(jobs)] == [
        ("passed", "wrong_answer", "wrong_answer"),
        ("passed", "passed"),
    ]


def test_expected_outputs_never_reach_the_worker(grader: Grader, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []

    def spy(pipe: int, data: bytes, deadline: float, send: Any = pool._send) -> bool:
        sent.append(bytes(data))
        return send(pipe, data, deadline)

    monkeypatch.setattr(pool, "_send", spy)
    secret = (UnitTest("given-4711\n", "expected-4712\n"),)
    problem = Problem("name-4713", "question-4714", secret, solution="print('solution-4715')")
    assert grade(grader, "print('printed-4716')", problem, secret).checks == ("wrong_answer",)
    told = b"".join(sent)
    assert [token in told for token in (b"given-4711", b"printed-4716")] == [True, True]
    for token in (b"expected-4712", b"name-4713", b"question-4714", b"solution-4715"):
        assert token not in told


def test_a_program_cannot_pass_by_what_it_leaves_behind(grader: Grader) -> None:
    program = """
import os
x = int(input())
try:
    seen = open("/tmp/seen").read()
except OSError:
    seen = ""
open("/tmp/seen", "w").write(seen + "x")
print(2 * x if not seen else 0)
"""
    assert grade(grader, program).checks == ("passed", "passed", "passed")
