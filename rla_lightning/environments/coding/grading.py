"""Programs against tests: run in the sandbox, compared here, where alone the expected outputs are known."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rla_lightning.environments.coding.checkers import CHECKERS, Checker
from rla_lightning.environments.coding.problems import Problem
from rla_lightning.sandbox import Run, RunResult, Sandbox
from rla_lightning.types import PASSED, ConfigError, UnitTest

logger = logging.getLogger(__name__)

WRONG_ANSWER = "wrong_answer"
SANDBOX_ERROR, NOT_RUN = "sandbox_error", "not_run"


@dataclass(frozen=True)
class Grade:
    """What one program makes of some tests."""

    checks: tuple[str, ...]  # PASSED, WRONG_ANSWER or a RunStatus, one per test
    complaint: str = ""  # the last line that the first failing run wrote to stderr

    @property
    def is_correct(self) -> bool:
        return all(check == PASSED for check in self.checks)

    def summary(self) -> str:
        """In a sentence: "2 of 5 tests passed, 3 wrong_answer."""
        failures = Counter(check for check in self.checks if check != PASSED)
        parts = [f"{self.checks.count(PASSED)} of {len(self.checks)} tests passed"]
        parts += [f"{number} {check}" for check, number in failures.most_common()]
        return ", ".join(parts) + "." + (f" {self.complaint}" if self.complaint else "")


class Grader:
    """Runs programs on tests, many at a time.

    Args:
        sandbox: that programs run in.
        checkers: of the user, by the name that problems call them; they come on top of `CHECKERS`. They are given whatever
            programs print and generated tests expect; an exception counts as a wrong answer.
    """

    def __init__(self, sandbox: Sandbox, checkers: Mapping[str, Checker] | None = None) -> None:
        self.sandbox = sandbox
        self.checkers: dict[str, Checker] = dict(CHECKERS) | {
            name: _Tolerant(name, check) for name, check in (checkers or {}).items()
        }

    def check_name(self, problem: Problem) -> None:
        """Raise ConfigError where a problem names a checker that does not exist."""
        if problem.checker not in self.checkers:
            known = ", ".join(self.checkers)
            raise ConfigError(f"problem {problem.name!r} has the unknown checker {problem.checker!r}; there are {known}")

    def grades(self, jobs: Sequence[tuple[Problem, str, Sequence[UnitTest]]]) -> list[Grade]:
        """Of each program on its tests, in order; equal programs of a problem are run once."""
        runs = [Run(program, tuple(test.stdin for test in tests), problem.time_limit) for problem, program, tests in jobs]
        return [
            self._grade(problem, tests, results)
            for (problem, _, tests), results in zip(jobs, self.sandbox.run(runs), strict=True)
        ]

    def _grade(self, problem: Problem, tests: Sequence[UnitTest], results: Sequence[RunResult]) -> Grade:
        checker = self.checkers[problem.checker]
        checks: list[str] = []
        for test, result in zip(tests, results, strict=True):
            if result.status != "ok":
                checks.append(result.status)
            else:
                checks.append(PASSED if checker(test.stdin, test.stdout, result.stdout) else WRONG_ANSWER)
        failed = next((r for r, check in zip(results, checks, strict=True) if check not in (PASSED, WRONG_ANSWER)), None)
        lines = failed.stderr.rstrip().splitlines() if failed else []
        return Grade(tuple(checks), lines[-1][:200] if lines else "")


class _Tolerant:
    """A user's checker that cannot stop a run; what it first stumbled over is logged."""

    def __init__(self, name: str, check: Checker) -> None:
        self.name = name
        self.check = check
        self.has_failed = False

    def __call__(self, stdin: str, expected: str, actual: str) -> bool:
        try:
            return bool(self.check(stdin, expected, actual))
        except Exception as error:
            if not self.has_failed:
                self.has_failed = True
                logger.warning("checker %s failed on %r: %s: %s", self.name, actual[:80], type(error).__name__, error)
            return False
