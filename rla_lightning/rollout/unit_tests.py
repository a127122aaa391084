"""Judging programs by unit tests: the reward model writes tests for a task, and every rollout's program is run on them.

A test is one answer that judges all rollouts of its task at once: judgment j of a program is +1 when it passes test j.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from rla_lightning.environments.base import TestedEnvironment
from rla_lightning.rollout.collect import Progress
from rla_lightning.rollout.formats_code import UnitTestFormat
from rla_lightning.rollout.sampler import Sampler
from rla_lightning.types import (
    CheckedSolution,
    CheckRequest,
    Judgment,
    RolloutGroup,
    SamplingParams,
    Solution,
    Task,
    Trajectory,
    WrittenTest,
)

logger = logging.getLogger(__name__)


def judge_by_tests(
    groups: Sequence[RolloutGroup],
    m: int,
    *,
    environment: TestedEnvironment,
    sampler: Sampler,
    tokenizer: PreTrainedTokenizerBase,
    test_format: UnitTestFormat,
    params: SamplingParams,
    key: str,
    context_length: int | None = None,
    with_solutions: bool = False,
    progress: Progress | None = None,
) -> list[RolloutGroup]:
    """The groups with m unit tests each, and what every program makes of them as judgments of its step.

    With solutions, the tests are also run on what the environment knows about the task: right and wrong programs, which rate
    the tests where the policy's programs are all right or all wrong.
    A task whose prompt leaves no room for an answer in `context_length` gets no tests, and its programs no judgments.
    """
    prompts: dict[int, tuple[int, ...]] = {}
    for i, group in enumerate(groups):
        shown = next((t.steps[0].observation for t in group.valid_trajectories if t.steps), None)
        if shown is not None:
            prompt = test_format.prompt(tokenizer, shown)
            if context_length is None or len(prompt) + params.max_new_tokens <= context_length:
                prompts[i] = prompt
            else:
                logger.warning("task %s: its prompt of %d tokens leaves no room for a unit test", group.task.id, len(prompt))
    report = _reporter(progress, groups, len(prompts))
    report("writing tests", 0)
    answers = sampler.sample(list(prompts.values()), m, params, [f"{key}/{groups[i].task.id}/tests" for i in prompts])
    written = {
        i: tuple(WrittenTest(prompts[i], answer, test_format.parse(answer.text)) for answer in completions)
        for i, completions in zip(prompts, answers, strict=True)
    }
    report("running tests", len(prompts) // 2)
    solutions = {i: _solutions(environment, groups[i].task) if with_solutions else () for i in written}
    if with_solutions and written and not any(solutions.values()):
        logger.warning("known_programs has no effect: %s knows no right and wrong programs of its tasks", environment.name)
    judged = _judged(groups, written, solutions, environment)
    report("running tests", len(prompts))
    return judged


def test_results(group: RolloutGroup) -> tuple[np.ndarray, list[bool]]:
    """What the programs of a group make of its tests, as `algorithm.unit_tests` takes it.

    Left out are rollouts without a program, which would be easy to reject, and programs that were not run on every test that
    can be read (they timed out too often, or the sandbox failed): what is known about them depends on the order of the tests.

    Returns:
        [m, P] 1.0 passed, 0.0 failed, NaN unreadable; [P] whether each program is correct. Known programs come last.
    """
    columns: list[list[float]] = []
    is_correct: list[bool] = []
    for g in group.valid_indices:
        trajectory = group.trajectories[g]
        if _program(trajectory) is not None:
            scores = [judgment.score for judgment in group.judgments[g][-1]]
            columns.append([np.nan if score is None else float(score > 0) for score in scores])
            is_correct.append(trajectory.is_won)
    for solution in group.solutions:
        columns.append([np.nan if check is None else float(check) for check in solution.passed])
        is_correct.append(solution.is_correct)
    table = np.array(columns, dtype=np.float64).reshape(len(columns), len(group.tests)).T
    can_be_read = np.array([test.test is not None for test in group.tests], dtype=bool)
    was_run = ~np.isnan(table[can_be_read]).any(axis=0)
    return table[:, was_run], [is_right for is_right, ran in zip(is_correct, was_run, strict=True) if ran]


test_results.__test__ = False  # type: ignore[attr-defined]  # not a test of pytest's


def _judged(
    groups: Sequence[RolloutGroup],
    written: dict[int, tuple[WrittenTest, ...]],
    solutions: dict[int, Sequence[Solution]],
    environment: TestedEnvironment,
) -> list[RolloutGroup]:
    own = {i: [program for t in groups[i].valid_trajectories if (program := _program(t))] for i in written}
    programs = {i: tuple(dict.fromkeys([*own[i], *(s.program for s in solutions[i])])) for i in written}
    readable = {i: [row.test for row in written[i] if row.test is not None] for i in written}
    requests = [CheckRequest(groups[i].task, programs[i], tuple(readable[i])) for i in written]
    passes = dict(zip(written, environment.check_programs(requests), strict=True))
    judged = []
    for i, group in enumerate(groups):
        tests = written.get(i, ())
        rows = iter(passes.get(i, ()))
        verdicts = [dict(zip(programs[i], next(rows), strict=True)) if test.test is not None else None for test in tests]
        judgments = tuple(_judgments(group.trajectories[g], g in group.valid_indices, tests, verdicts)
                          for g in range(len(group.trajectories)))  # fmt: skip
        checked = tuple(
            CheckedSolution(s.is_correct, tuple(None if verdict is None else verdict[s.program] for verdict in verdicts))
            for s in solutions.get(i, ())
        )
        judged.append(replace(group, judgments=judgments, tests=tests, solutions=checked))
    return judged


def _judgments(
    trajectory: Trajectory, is_valid: bool, tests: Sequence[WrittenTest], verdicts: Sequence[dict[str, bool | None] | None]
) -> tuple[tuple[Judgment, ...], ...]:
    """[K][m]: the last step's are the tests', the others have none."""
    if not trajectory.steps:
        return ()
    earlier = ((),) * (len(trajectory.steps) - 1)
    if not is_valid:
        return (*earlier, ())
    program = _program(trajectory)
    return (
        *earlier,
        tuple(
            Judgment(test.prompt_ids, test.completion, _score(program, verdict))
            for test, verdict in zip(tests, verdicts, strict=True)
        ),
    )


def _score(program: str | None, verdict: dict[str, bool | None] | None) -> int | None:
    if verdict is None:
        return None
    passed = verdict[program] if program is not None else False  # what is no program passes no test
    return None if passed is None else 1 if passed else -1


def _solutions(environment: TestedEnvironment, task: Task) -> Sequence[Solution]:
    try:
        return environment.solutions(task)
    except Exception as error:  # of somebody's environment: its tests are rated by the policy's programs alone
        logger.warning("task %s: no known programs: %s: %s", task.id, type(error).__name__, error)
        return ()


def _program(trajectory: Trajectory) -> str | None:
    last = trajectory.steps[-1] if trajectory.steps else None
    return last.action if last is not None and last.is_valid else None


def _reporter(progress: Progress | None, groups: Sequence[RolloutGroup], total: int) -> Callable[[str, int], None]:
    rate = sum(group.successes for group in groups) / max(1, sum(group.rollouts for group in groups))

    def report(stage: str, done: int) -> None:
        if progress is not None:
            progress(stage, done, total, rate)

    return report
