"""Problems for tiny models: pipelines over a line of digits, sampled without end and rewritten by one edit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain, count
from random import Random
from typing import Any

from rla_lightning.environments.base import Environment, Episode
from rla_lightning.environments.coding.environment import (
    ROOT_QUESTION,
    CodingEnvironment,
    CodingEpisode,
    known_solutions,
    problem_of,
    task_of,
)
from rla_lightning.environments.coding.pipeline_programs import (
    DIGITS,
    FILTERS,
    LARGEST,
    MAPS,
    REDUCTIONS,
    Operation,
    Pipeline,
    Used,
    vocabulary,
)
from rla_lightning.environments.coding.problems import LEVELS, Problem
from rla_lightning.sandbox import SandboxSettings
from rla_lightning.types import ConfigError, Direction, ExpertTest, Observation, Purpose, Solution, Split, Task, UnitTest

HIDDEN_TESTS = 6
MOST_FILTERS, MOST_MAPS = 2, 2
MOST_SIZE = MOST_FILTERS + MOST_MAPS
LONGEST_INPUT = 6
FEWEST_WRONG, MOST_WRONG = 3, 5  # solutions of a problem
PIPELINE = "pipeline"  # key of a task's spec
STYLES = 12  # ways to word a problem
RESERVED_SHAPES = 4  # one in so many combinations of operations is never trained on
PLACES = 16  # among which what a pipeline does is spread
HELD_OUT_TASKS: dict[Purpose, int] = {"validation": 48, "test": 96}  # of each split, no two of which do the same
CANDIDATES = 60  # inputs that hidden tests are chosen from
TRIES = 100  # draws of an example of a unit test, or of a problem of one size
EXCHANGES = 0.3  # share of the edits that exchange an operation for another one


Use = tuple[Purpose, Split]
TRAINING: Use = ("train", "in_domain")
HELD_OUT_PLACES: tuple[Use, ...] = (  # that of the test out of distribution twice: few pipelines have a reserved shape
    ("test", "in_domain"), ("validation", "in_domain"),
    ("test", "out_of_distribution"), ("test", "out_of_distribution"), ("validation", "out_of_distribution"),
)  # fmt: skip


class PipelineEnvironment(CodingEnvironment):
    """Problems like "the sum of those that are even each squared", for models whose vocabulary is made for them.

    Evaluation problems are told from training problems by what their programs do, not by their words: no program that is
    right for one is right for the other. Out of distribution are combinations of operations that are never trained on.

    Args:
        sandbox: how programs are held.
        longest_example: most numbers in the input of a unit test that the test writer is taught; the fewest are half of it.
        example_draws: such an input is the best of 1 to so many random ones at telling mistakes from the pipeline.
    """

    name = "pipelines"

    def __init__(self, sandbox: SandboxSettings = SandboxSettings(), longest_example: int = 4, example_draws: int = 8) -> None:
        for name, value in (("longest_example", longest_example), ("example_draws", example_draws)):
            if value < 1:
                raise ConfigError(f"PipelineEnvironment.{name} must be at least 1, got {value}")
        super().__init__(sandbox=sandbox)
        self.longest_example, self.example_draws = longest_example, example_draws

    def corpus(self, purpose: Purpose, split: Split) -> Sequence[Task]:
        """The held-out problems; those to train on are sampled without end."""
        if purpose == "train":
            return ()
        if (purpose, split) not in self._corpora:
            tasks: dict[tuple[int, ...], Task] = {}
            for index in count():
                rng = Random(f"{purpose}/{split}/{index}")
                task = self._sample(rng, rng.random(), (purpose, split))
                tasks.setdefault(_behaviour(_pipeline_of(task)), task)
                if len(tasks) == HELD_OUT_TASKS[purpose]:
                    break
            self._corpora[purpose, split] = tuple(tasks.values())
        return self._corpora[purpose, split]

    def sample(self, rng: Random, difficulty: float, split: Split = "in_domain") -> Task:
        """A training problem, or one out of distribution for tuning."""
        self.grader.sandbox.start()  # or there is no use in going on
        return self._sample(rng, difficulty, ("train" if split == "in_domain" else "validation", split))

    def _sample(self, rng: Random, difficulty: float, use: Use) -> Task:
        size = 1 + round(difficulty * (MOST_SIZE - 1))
        for attempt in count(1):
            if attempt % TRIES == 0:  # there may be none of that size
                size = rng.randint(1, MOST_SIZE)
            pipeline = _draw(rng, size)
            if pipeline.is_sound and _use_of(pipeline) == use:
                task = self._task(pipeline, rng.randrange(STYLES))
                if task is not None:
                    return task
        raise AssertionError("unreachable")

    def vary(self, task: Task, direction: Direction, rng: Random, number: int) -> Sequence[Task]:
        """One operation more or less, or (of the same size) another one; worded anew."""
        found: dict[str, Task] = {}
        original = _pipeline_of(task)
        for _ in range(4 * number):
            if len(found) == number:
                break
            pipeline = _edited(original, direction, rng)
            if pipeline is None or not pipeline.is_sound or _behaviour(pipeline) == _behaviour(original):
                continue  # another way to say the same would be an unchanged problem
            if _use_of(pipeline) != TRAINING:
                continue
            made = self._task(pipeline, rng.randrange(STYLES))
            if made is not None:
                spec = {**made.spec, ROOT_QUESTION: task.spec[ROOT_QUESTION]}
                found[made.id] = replace(made, spec=spec, root_id=task.root_id, parent_id=task.id, version=task.version + 1)
        return list(found.values())

    def observe(self, task: Task) -> Observation:
        """The digest is the phrase of the question alone."""
        question = problem_of(task).question
        return Observation(question, digest=tuple(question.partition(": ")[2].removesuffix(".").split()))

    def vocabulary(self) -> tuple[str, ...]:
        return vocabulary()

    def resembles(self, task: Task, earlier: Sequence[Task]) -> bool:
        return False  # all questions are alike; what differs is exact

    rewrite_prompt = Environment.rewrite_prompt  # there is none: a rewrite has to be a pipeline, too

    def solutions(self, task: Task) -> Sequence[Solution]:
        return known_solutions(problem_of(task))  # right and wrong by construction

    def detour(self, episode: Episode, rng: Random) -> str | None:
        assert isinstance(episode, CodingEpisode)
        return rng.choice(_wrong_programs(_pipeline_of(episode.task)))

    def example_test(self, task: Task, rng: Random, is_right: bool) -> ExpertTest | None:
        """A wrong one says how to get to the output, and then gives that of a similar problem, whatever the input."""
        pipeline = _pipeline_of(task)
        mistakes = tuple(pipeline.mistakes())
        for _ in range(TRIES):
            numbers = self._telling(pipeline, mistakes, rng)
            right = pipeline.answer(numbers)
            wrong = sorted({mistake.answer(numbers) for mistake in mistakes} - {right}) or [right + 1]
            answer = right if is_right else rng.choice(wrong)
            if all(0 <= number <= LARGEST for number in chain((answer,), *map(pipeline.stages, numbers))):
                return ExpertTest(UnitTest(_line(numbers), f"{answer}\n"), pipeline.thought(numbers))
        return None

    def _telling(self, pipeline: Pipeline, mistakes: Sequence[Pipeline], rng: Random) -> tuple[int, ...]:
        """The input of some random ones that most mistakes get wrong; the first of equals."""
        shortest = (self.longest_example + 1) // 2
        drawn = [_numbers(rng, self.longest_example, shortest) for _ in range(rng.randint(1, self.example_draws))]
        answers = [pipeline.answer(numbers) for numbers in drawn]
        caught = [sum(m.answer(xs) != answer for m in mistakes) for xs, answer in zip(drawn, answers, strict=True)]
        return drawn[caught.index(max(caught))]

    def _task(self, pipeline: Pipeline, style: int) -> Task | None:
        """The pipeline as a problem whose tests tell it from every mistake; None where there is little to tell."""
        tests, wrong = _hidden_tests(pipeline), _wrong_programs(pipeline)
        if len({test.stdout for test in tests}) < 2 or len(wrong) < FEWEST_WRONG:
            return None
        phrase = pipeline.phrase(style)
        problem = Problem(
            name=phrase,
            question=f"Read one line of digits and print one integer, 0 when there is none to print: {phrase}.",
            tests=tests,
            difficulty=(pipeline.size - 1) / (MOST_SIZE - 1),
            level=LEVELS[min(pipeline.size - 1, len(LEVELS) - 1)],
            solution=pipeline.program(),
            wrong_solutions=tuple(Random(f"wrong/{pipeline}").sample(wrong, min(MOST_WRONG, len(wrong)))),
        )
        task = task_of(problem, self.name)
        return replace(task, spec={**task.spec, PIPELINE: _told(pipeline)})


def _told(pipeline: Pipeline) -> dict[str, Any]:
    """JSON values, so lists in place of tuples."""
    used = {"filters": pipeline.filters, "maps": pipeline.maps}
    return {field: [list(use) for use in uses] for field, uses in used.items()} | {"reduction": pipeline.reduction}


def _pipeline_of(task: Task) -> Pipeline:
    told: Mapping[str, Any] = task.spec[PIPELINE]
    filters, maps = (tuple((str(name), int(k)) for name, k in told[field]) for field in ("filters", "maps"))
    return Pipeline(filters, maps, str(told["reduction"]))


def _draw(rng: Random, size: int) -> Pipeline:
    filters = rng.randint(max(0, size - MOST_MAPS), min(MOST_FILTERS, size))
    return Pipeline(
        tuple(_use(rng, FILTERS) for _ in range(filters)),
        tuple(_use(rng, MAPS) for _ in range(size - filters)),
        rng.choice(tuple(REDUCTIONS)),
    )


def _use(rng: Random, operations: Mapping[str, Operation]) -> Used:
    name = rng.choice(tuple(operations))
    return name, rng.choice(operations[name].constants)


def _use_of(pipeline: Pipeline) -> Use | None:
    """What a pipeline is for, by its combination of operations and by what it does; None: for nothing."""
    reserved = Random(f"shape/{pipeline.shape}").randrange(RESERVED_SHAPES) == 0
    place = Random(f"behaviour/{_behaviour(pipeline)}").randrange(PLACES)
    if place >= len(HELD_OUT_PLACES):
        return None if reserved else TRAINING
    use = HELD_OUT_PLACES[place]
    return use if (use[1] == "out_of_distribution") == reserved else None


@lru_cache(maxsize=16384)
def _behaviour(pipeline: Pipeline) -> tuple[int, ...]:
    return tuple(pipeline.answer(numbers) for numbers in PROBES)


def _edited(pipeline: Pipeline, direction: Direction, rng: Random) -> Pipeline | None:
    """One random edit: harder adds or exchanges an operation, easier removes or exchanges one."""
    field = rng.choice(("filters", "maps", "reduction"))
    if field == "reduction":
        return replace(pipeline, reduction=rng.choice(tuple(REDUCTIONS)))
    used: tuple[Used, ...] = getattr(pipeline, field)
    operations, most = (FILTERS, MOST_FILTERS) if field == "filters" else (MAPS, MOST_MAPS)
    if rng.random() < EXCHANGES and used:
        index = rng.randrange(len(used))
        changed = (*used[:index], _use(rng, operations), *used[index + 1 :])
    elif direction == "harder" and len(used) < most:
        index = rng.randint(0, len(used))
        changed = (*used[:index], _use(rng, operations), *used[index:])
    elif direction == "easier" and used and pipeline.size > 1:
        index = rng.randrange(len(used))
        changed = (*used[:index], *used[index + 1 :])
    else:
        return None
    return replace(pipeline, **{field: changed})  # type: ignore[arg-type]


@lru_cache(maxsize=4096)
def _hidden_tests(pipeline: Pipeline) -> tuple[UnitTest, ...]:
    """Few inputs that tell the pipeline from its mistakes: the input that catches most of those left, again and again."""
    rng = Random(f"tests/{pipeline}")
    inputs = list(dict.fromkeys(_numbers(rng, LONGEST_INPUT) for _ in range(CANDIDATES)))
    answers = [pipeline.answer(numbers) for numbers in inputs]
    left = [{i for i, numbers in enumerate(inputs) if mistake.answer(numbers) != answers[i]} for mistake in pipeline.mistakes()]
    chosen: list[int] = []
    for _ in range(HIDDEN_TESTS):
        caught = Counter(i for catching in left for i in catching)
        best = max((i for i in range(len(inputs)) if i not in chosen), key=lambda i: (caught[i], -i))
        left = [catching for catching in left if best not in catching]
        chosen.append(best)
    return tuple(UnitTest(_line(inputs[i]), f"{answers[i]}\n") for i in chosen)


@lru_cache(maxsize=4096)
def _wrong_programs(pipeline: Pipeline) -> tuple[str, ...]:
    """The mistakes that fail a hidden test; the others do the same as the pipeline, or nearly."""
    inputs = [[int(word) for word in test.stdin.split()] for test in _hidden_tests(pipeline)]
    wrong = (m.program() for m in pipeline.mistakes() if any(m.answer(xs) != pipeline.answer(xs) for xs in inputs))
    return tuple(dict.fromkeys(wrong))


def _numbers(rng: Random, longest: int, shortest: int = 1) -> tuple[int, ...]:
    return tuple(rng.choice(DIGITS) for _ in range(rng.randint(shortest, longest)))


def _line(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers)) + "\n"


PROBES = tuple(
    _numbers(Random(f"probe/{index}"), LONGEST_INPUT) for index in range(48)
)  # pipelines that agree here are taken for one
