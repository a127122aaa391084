"""Programming problems as an environment: the policy writes a program, hidden tests decide."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

from rla_lightning.environments.base import Episode, TestedEnvironment
from rla_lightning.environments.coding.grading import NOT_RUN, SANDBOX_ERROR, Grade, Grader
from rla_lightning.environments.coding.problems import LEVELS, Problem, problem_from, spec_of
from rla_lightning.environments.coding.rewriting import near_duplicate, read_rewrite, rewrite_prompt, triviality, words_of
from rla_lightning.environments.coding.sources import JsonProblems, ProblemSource
from rla_lightning.sandbox import Sandbox, SandboxSettings
from rla_lightning.types import (
    LOST,
    PASSED,
    WON,
    CheckRequest,
    ConfigError,
    Direction,
    ExpertAction,
    Observation,
    Purpose,
    Solution,
    Split,
    Task,
    Transition,
)

logger = logging.getLogger(__name__)

OFFLINE = Path(__file__).parent / "offline.jsonl"
HELD_OUT = {
    "test": 1 / 4,
    "validation": 1 / 8,
}  # shares of the training problems of each level, for what has no source of its own
MOST_HELD_OUT = 256  # problems for either of them
PROBLEM, ROOT_QUESTION = "problem", "root_question"  # keys of a task's spec
LEEWAY = 0.1  # by which a sample's difficulty may be farther away than the nearest


class SandboxFailedError(RuntimeError):
    """A program could not be run, through no fault of its own."""


class CodingEpisode(Episode):
    """One problem, one program."""

    max_turns = 1

    def __init__(self, environment: CodingEnvironment, task: Task) -> None:
        self.environment = environment
        self.task = task
        self.problem = problem_of(task)
        self.observation = environment.observe(task)

    def step(self, action: str) -> Transition:
        (result,) = self.environment.step_all([self], [action])
        if isinstance(result, Exception):
            raise result
        return result


class CodingEnvironment(TestedEnvironment):
    """Problems that are solved by a Python program from stdin to stdout; programs run in a sandbox only.

    Args:
        train: where the training problems come from; null: the offline set that is part of this package.
        validation: problems for tuning; null: an eighth of the training problems, at most 256.
        test: the reported in-domain problems; null: a quarter of the training problems, at most 256.
        out_of_distribution: other reported problems, e.g. of another collection; null: none. Half of them are for tuning.
        sandbox: how programs are held.
        checkers: functions (stdin, expected, actual) -> bool that problems may name as their `checker`, by name.
    """

    name = "coding"

    def __init__(
        self,
        train: ProblemSource | None = None,
        validation: ProblemSource | None = None,
        test: ProblemSource | None = None,
        out_of_distribution: ProblemSource | None = None,
        sandbox: SandboxSettings = SandboxSettings(),
        checkers: dict[str, Callable[[str, str, str], bool]] | None = None,
    ) -> None:
        self.sources: dict[tuple[Purpose, Split], ProblemSource | None] = {
            ("train", "in_domain"): train or JsonProblems(OFFLINE),
            ("validation", "in_domain"): validation,
            ("test", "in_domain"): test,
            ("test", "out_of_distribution"): out_of_distribution,
        }
        self.grader = Grader(Sandbox(sandbox), checkers)
        self._corpora: dict[tuple[Purpose, Split], tuple[Task, ...]] = {}
        self._solutions: dict[str, tuple[Solution, ...]] = {}  # by task id

    # Tasks

    def corpus(self, purpose: Purpose, split: Split) -> Sequence[Task]:
        if not self._corpora:
            self._corpora = self._load()
        return self._corpora.get((purpose, split), ())

    def sample(self, rng: Random, difficulty: float, split: Split = "in_domain") -> Task:
        """One of the problems with the nearest difficulty, never a reported one."""
        tasks = self.corpus("train" if split == "in_domain" else "validation", split)
        if not tasks:
            raise ConfigError(f"environment {self.name!r} has no {split} problems: give a source for them")
        distance = min(abs(task.difficulty - difficulty) for task in tasks)
        return rng.choice([task for task in tasks if abs(task.difficulty - difficulty) <= distance + LEEWAY])

    def vocabulary(self) -> tuple[str, ...]:
        """The words of the training problems, for a tiny critic."""
        return tuple(sorted({word for task in self.corpus("train", "in_domain") for word in problem_of(task).question.split()}))

    def _load(self) -> dict[tuple[Purpose, Split], tuple[Task, ...]]:
        """All tasks by what they are for; a problem is used once, evaluation first."""
        self.grader.sandbox.start()  # or there is no use in going on
        loaded = {place: self._usable(source.load()) for place, source in self.sources.items() if source is not None}
        left = loaded.pop(("train", "in_domain"))
        total = len(left)
        for purpose, share in HELD_OUT.items():
            if (purpose, "in_domain") not in loaded:
                number = min(share * total, MOST_HELD_OUT)
                loaded[purpose, "in_domain"], left = _split(left, number / len(left), purpose)  # type: ignore[index]
        if ("test", "out_of_distribution") in loaded:
            tuning, reported = _split(loaded["test", "out_of_distribution"], 0.5, "out_of_distribution")
            loaded["validation", "out_of_distribution"], loaded["test", "out_of_distribution"] = tuning, reported
        loaded["train", "in_domain"] = left
        seen: set[str] = set()
        corpora = {}
        for place, problems in loaded.items():
            tasks = {task.id: task for p in problems if words_of(p.question) not in seen for task in [task_of(p, self.name)]}
            seen |= {words_of(problem.question) for problem in problems}
            if not tasks:
                raise ConfigError(f"no {place[1]} problems are left for {place[0]}: all are those of another source as well")
            corpora[place] = tuple(tasks.values())
        return corpora

    def _usable(self, problems: Sequence[Problem]) -> list[Problem]:
        """The problems of one source, each question once, without those that a program solves which always prints the same."""
        usable: dict[str, Problem] = {}
        trivial = 0
        for problem in problems:
            self.grader.check_name(problem)
            if triviality(problem, self.grader.checkers[problem.checker]) is not None:
                trivial += 1
            else:
                usable.setdefault(words_of(problem.question), problem)
        repeated = len(problems) - trivial - len(usable)
        if trivial or repeated:
            logger.warning("left out %d problems that a constant solves and %d repeated questions", trivial, repeated)
        if not usable:
            raise ConfigError(f"a program that always prints the same solves all of the {len(problems)} problems of a source")
        return list(usable.values())

    # Episodes

    def observe(self, task: Task) -> Observation:
        """What the policy and the test writer are shown."""
        return Observation(problem_of(task).question)

    def start(self, task: Task) -> Episode:
        return CodingEpisode(self, task)

    def step_all(self, episodes: Sequence[Episode], actions: Sequence[str]) -> list[Transition | Exception]:
        places, jobs = [], []
        for place, (episode, action) in enumerate(zip(episodes, actions, strict=True)):
            if action:
                assert isinstance(episode, CodingEpisode)
                places.append(place)
                jobs.append((episode.problem, action, episode.problem.tests))
        results: list[Transition | Exception] = [
            Transition(Observation("There was no program in the answer."), done=True, outcome=LOST, is_valid=False)
            for _ in episodes
        ]
        for place, grade in zip(places, self.grader.grades(jobs), strict=True):
            results[place] = _transition(grade)
        return results

    def check_programs(self, requests: Sequence[CheckRequest]) -> list[list[list[bool | None]]]:
        jobs = [(problem_of(request.task), program, request.tests) for request in requests for program in request.programs]
        grades = iter(self.grader.grades(jobs))
        verdicts = []
        for request in requests:
            by_program = [next(grades).checks for _ in request.programs]
            columns = [[_passed(checks[row]) for checks in by_program] for row in range(len(request.tests))]
            verdicts.append(columns)
        return verdicts

    # What is known about problems

    def solutions(self, task: Task) -> Sequence[Solution]:
        """Those that a source gives and that do what it says; public collections are not always right about it."""
        if task.id not in self._solutions:
            problem = problem_of(task)
            given = known_solutions(problem)
            grades = self.grader.grades([(problem, solution.program, problem.tests) for solution in given])
            for grade in grades:
                if SANDBOX_ERROR in grade.checks:  # nothing is known about that program, so nothing is remembered
                    raise SandboxFailedError(grade.complaint)
            kept = [s for s, grade in zip(given, grades, strict=True) if grade.is_correct == s.is_correct]
            self._solutions[task.id] = tuple(kept) if len({s.is_correct for s in kept}) == 2 else ()
        return self._solutions[task.id]

    def expert(self, episode: Episode, rng: Random) -> ExpertAction | None:
        assert isinstance(episode, CodingEpisode)
        return None if episode.problem.solution is None else ExpertAction(episode.problem.solution)

    def detour(self, episode: Episode, rng: Random) -> str | None:
        assert isinstance(episode, CodingEpisode)
        wrong = episode.problem.wrong_solutions
        return rng.choice(wrong) if wrong else None

    # Rewriting

    def validate(self, task: Task, parent: Task | None = None) -> str | None:
        """Problems of a source are taken as they are; a rewrite's solution has to pass its tests, a constant must not."""
        if parent is None:
            return None
        problem = problem_of(task)
        if problem.solution is None:
            return "the rewrite has no solution"
        trivial = triviality(problem, self.grader.checkers[problem.checker])
        if trivial is not None:
            return trivial
        (grade,) = self.grader.grades([(problem, problem.solution, problem.tests)])
        return None if grade.is_correct else f"its solution fails: {grade.summary()}"

    def resembles(self, task: Task, earlier: Sequence[Task]) -> bool:
        question = problem_of(task).question
        held_out = [known for (purpose, _), tasks in self._corpora.items() if purpose != "train" for known in tasks]
        repeats = near_duplicate(question, (problem_of(known).question for known in earlier))
        return (
            repeats or near_duplicate(question, (problem_of(known).question for known in held_out), contained=True)
        ) is not None

    def rewrite_prompt(self, task: Task, direction: Direction, critique: str, successes: int, rollouts: int) -> str | None:
        root_question = str(task.spec[ROOT_QUESTION])
        return rewrite_prompt(problem_of(task), root_question, direction, critique, successes, rollouts)

    def apply_rewrite(self, task: Task, answer: str) -> Task | str:
        written = read_rewrite(problem_of(task), answer)
        return written if isinstance(written, str) else rewritten(task, written)


def task_of(problem: Problem, environment: str) -> Task:
    """A problem of a source as a task; its id is a fingerprint of all but its name."""
    task_id = _fingerprint(problem)
    spec = {PROBLEM: spec_of(problem), ROOT_QUESTION: problem.question}
    return Task(task_id, environment, spec, problem.difficulty, root_id=task_id, kind=problem.level)


def known_solutions(problem: Problem) -> tuple[Solution, ...]:
    """Right and wrong programs; none unless there are both."""
    if problem.solution is None or not problem.wrong_solutions:
        return ()
    return (Solution(problem.solution, True), *(Solution(program, False) for program in problem.wrong_solutions))


def rewritten(parent: Task, problem: Problem) -> Task:
    """A rewrite of a task, anchored to the same root and counted under the same level."""
    return replace(
        parent,
        id=_fingerprint(problem),
        spec={PROBLEM: spec_of(problem), ROOT_QUESTION: parent.spec[ROOT_QUESTION]},
        difficulty=problem.difficulty,
        parent_id=parent.id,
        version=parent.version + 1,
    )


def problem_of(task: Task) -> Problem:
    """The problem that a task's spec describes; read once per task."""
    problem = _READ.get(task.id)
    if problem is None:
        if len(_READ) >= MOST_READ:
            _READ.clear()
        problem = _READ[task.id] = problem_from(task.spec[PROBLEM])
    return problem


MOST_READ = 16384
_READ: dict[str, Problem] = {}  # by task id, which is a fingerprint of the problem


def _fingerprint(problem: Problem) -> str:
    """Of all but the name: equal problems of two sources are one task."""
    told = spec_of(replace(problem, name=""))
    return "coding-" + hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def _split(problems: Sequence[Problem], share: float, key: str) -> tuple[list[Problem], list[Problem]]:
    """A share of the problems of each level, and the others; who belongs where depends on names alone."""
    taken: set[str] = set()
    for level in LEVELS:
        names = sorted((p.name for p in problems if p.level == level), key=lambda name: Random(f"{key}/{name}").random())
        taken.update(names[: round(len(names) * share)])
    chosen, others = [p for p in problems if p.name in taken], [p for p in problems if p.name not in taken]
    if not chosen or not others:
        raise ConfigError(f"{len(problems)} problems are too few to keep some of them for {key}: give a source for it")
    return chosen, others


def _transition(grade: Grade) -> Transition | Exception:
    if SANDBOX_ERROR in grade.checks:
        return SandboxFailedError(grade.complaint)
    outcome = WON if grade.is_correct else LOST
    return Transition(Observation(grade.summary()), done=True, outcome=outcome, checks=grade.checks)


def _passed(check: str) -> bool | None:
    return None if check in (SANDBOX_ERROR, NOT_RUN) else check == PASSED
