"""Pipelines: programs, phrases and mistakes written out by hand; sampled problems, edits and examples against the sandbox."""

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import islice
from random import Random

import pytest

from rla_lightning.environments.base import Environment
from rla_lightning.environments.coding.environment import problem_of
from rla_lightning.environments.coding.pipeline_programs import Pipeline, vocabulary
from rla_lightning.environments.coding.pipelines import PipelineEnvironment
from rla_lightning.sandbox import SandboxSettings
from rla_lightning.types import CheckRequest, ConfigError, Direction, Purpose, Split, Task, Transition, UnitTest

SPLITS: tuple[Split, ...] = ("in_domain", "out_of_distribution")
HELD_OUT: tuple[tuple[Purpose, Split], ...] = tuple((purpose, split) for purpose in ("validation", "test") for split in SPLITS)  # type: ignore[misc]
LINES = tuple(
    tuple(Random(f"line/{i}").choices(range(10), k=1 + i % 6)) for i in range(300)
)  # not those that the environment probes
WORDS = frozenset(vocabulary())
SQUARES = Pipeline((("even", 0),), (("square", 0),), "sum")
GAPS = Pipeline((("above", 3), ("odd", 0)), (("gap", 0), ("plus", 2)), "max")


@pytest.fixture(scope="module")
def pipelines(needs_isolation: None) -> Iterator[PipelineEnvironment]:
    environment = PipelineEnvironment(SandboxSettings(workers=2))
    yield environment
    environment.grader.sandbox.close()


@pytest.fixture(scope="module")
def sampled(pipelines: PipelineEnvironment) -> dict[Split, list[Task]]:
    """50 tasks of each split, from the easiest to the hardest."""
    return {split: [pipelines.sample(Random(f"{split}/{i}"), i / 49, split) for i in range(50)] for split in SPLITS}


@pytest.fixture(scope="module")
def everything(sampled: dict[Split, list[Task]]) -> list[Task]:
    return [task for split in SPLITS for task in sampled[split]]


def pipeline_of(task: Task) -> Pipeline:
    told = task.spec["pipeline"]
    filters, maps = (tuple((name, k) for name, k in told[field]) for field in ("filters", "maps"))
    return Pipeline(filters, maps, told["reduction"])


def shape_of(task: Task) -> tuple[tuple[str, ...], tuple[str, ...], str]:
    """Which operations, whatever their constants; the order of filters changes nothing."""
    pipeline = pipeline_of(task)
    return tuple(sorted(name for name, _ in pipeline.filters)), tuple(name for name, _ in pipeline.maps), pipeline.reduction


# By hand


def test_programs() -> None:
    assert SQUARES.program() == "print ( sum ( x * x for x in map(int,input().split()) if x % 2 == 0 ) )"
    assert GAPS.program() == (
        "print ( max ( ( ( 10 - x ) + 2 for x in map(int,input().split()) if x > 3 and x % 2 == 1 ) , default = 0 ) )"
    )
    assert Pipeline((), (("plus", 1), ("square", 0)), "distinct").program() == (
        "print ( len ( { ( x + 1 ) * ( x + 1 ) for x in map(int,input().split()) } ) )"
    )
    assert (
        Pipeline((("least", 4),), (), "count").program() == "print ( len ( [ x for x in map(int,input().split()) if x >= 4 ] ) )"
    )


def test_answers() -> None:
    assert SQUARES.answer([1, 2, 3, 4, 2]) == 24  # 4 + 16 + 4
    assert SQUARES.answer([1, 3]) == 0
    assert GAPS.answer([3, 5, 8, 9]) == 7  # 10 - 5 + 2, more than 10 - 9 + 2
    assert GAPS.answer([1, 3, 4]) == 0
    assert (GAPS.kept([3, 5, 8, 9]), GAPS.changed([5, 9])) == ([5, 9], [7, 3])
    assert Pipeline((), (("gap", 0),), "min").answer([4, 9, 2]) == 1
    assert Pipeline((("third", 0),), (), "count").answer([3, 3, 0, 4, 9]) == 4
    assert Pipeline((("third", 0),), (), "distinct").answer([3, 3, 0, 4, 9]) == 3


def test_thoughts() -> None:
    assert SQUARES.thought([1, 2, 4]) == "1 - 2 4 4 16"
    assert GAPS.thought([3, 5, 8, 9]) == "3 - 5 5 7 8 - 9 1 3"
    assert Pipeline((("odd", 0),), (), "sum").thought([3, 4]) == "3 4 -"


def test_phrases() -> None:
    assert [SQUARES.phrase(style) for style in range(4)] == [
        "the sum of those that are divisible by two each squared",
        "take those that are divisible by two each squared and give the sum",
        "the total of those that are even each times itself",
        "take those that are even each times itself and give the total",
    ]
    assert GAPS.phrase(0) == "the largest of those that are greater than 3 and not even each taken from ten then plus 2"
    assert GAPS.phrase(5) == "take those that are above 3 and not even each taken from ten then plus 2 and give the largest"
    assert Pipeline((), (("triple", 0),), "count").phrase(0) == "the number of all each tripled"
    assert Pipeline((("most", 5),), (), "distinct").phrase(1) == (
        "take those that are not above 5 and give the number of different values"
    )


def test_mistakes() -> None:
    assert list(SQUARES.mistakes()) == [
        Pipeline((), (("square", 0),), "sum"),
        Pipeline((("odd", 0),), (("square", 0),), "sum"),
        Pipeline((("third", 0),), (("square", 0),), "sum"),
        Pipeline((("even", 0),), (), "sum"),
        Pipeline((("even", 0),), (("double", 0),), "sum"),
        Pipeline((("even", 0),), (("square", 0),), "max"),
        Pipeline((("even", 0),), (("square", 0),), "count"),
    ]
    above, odd, gap, plus = ("above", 3), ("odd", 0), ("gap", 0), ("plus", 2)
    assert list(GAPS.mistakes()) == [
        Pipeline((odd,), (gap, plus), "max"),
        Pipeline((("above", 2), odd), (gap, plus), "max"),
        Pipeline((("above", 4), odd), (gap, plus), "max"),
        Pipeline((("least", 3), odd), (gap, plus), "max"),
        Pipeline((("below", 3), odd), (gap, plus), "max"),
        Pipeline((above,), (gap, plus), "max"),
        Pipeline((above, ("even", 0)), (gap, plus), "max"),
        Pipeline((above, odd), (plus,), "max"),
        Pipeline((above, odd), (("plus", 1), plus), "max"),
        Pipeline((above, odd), (gap,), "max"),
        Pipeline((above, odd), (gap, ("plus", 1)), "max"),
        Pipeline((above, odd), (gap, ("plus", 3)), "max"),
        Pipeline((above, odd), (gap, gap), "max"),
        Pipeline((above, odd), (plus, gap), "max"),
        Pipeline((above, odd), (gap, plus), "min"),
        Pipeline((above, odd), (gap, plus), "sum"),
    ]


@pytest.mark.parametrize(
    ("filters", "maps", "reduction", "is_sound"),
    [
        ([], ["square", "triple"], "sum", True),  # up to 243
        ([], ["triple", "square"], "sum", False),  # 27 * 27
        ([], ["double", "square"], "max", False),  # 18 * 18
        ([], ["square", "square"], "distinct", False),
        ([], ["gap", "square"], "sum", True),  # up to 100
        ([], ["square", "gap"], "sum", False),  # 10 - 81
        ([], ["plus", "gap"], "min", True),  # 10 - (9 + 1)
        ([], ["double", "gap"], "min", False),  # 10 - 18
        (["even", "above"], [], "sum", True),
        (["above", "above"], [], "sum", False),
        (["even"], ["double"], "count", False),  # doubling changes no number of numbers
        (["even"], ["double"], "distinct", True),
    ],
)
def test_which_pipelines_are_sound(filters: list[str], maps: list[str], reduction: str, is_sound: bool) -> None:
    constants = {"plus": 1, "above": 3}
    used = [tuple((name, constants.get(name, 0)) for name in names) for names in (filters, maps)]
    assert Pipeline(used[0], used[1], reduction).is_sound is is_sound


def test_the_vocabulary() -> None:
    for text in (SQUARES.program(), GAPS.program(), GAPS.phrase(0), GAPS.phrase(5), "Test : 0 1 2 99 100 243 500 >"):
        assert set(text.split()) - {"Test"} <= WORDS
    assert not WORDS & {"k", "E", "501", ""}
    assert len(vocabulary()) == len(WORDS)


# Sampled problems


def test_solutions_pass_and_mistakes_fail(pipelines: PipelineEnvironment, everything: list[Task]) -> None:
    solutions = [pipelines.solutions(task) for task in everything]
    requests = [
        CheckRequest(task, tuple(solution.program for solution in told), problem_of(task).tests)
        for task, told in zip(everything, solutions, strict=True)
    ]
    verdicts = pipelines.check_programs(requests)  # [task][test][program]
    for task, told, by_test in zip(everything, solutions, verdicts, strict=True):
        assert [solution.is_correct for solution in told] == [True] + [False] * (len(told) - 1)
        assert 4 <= len(told) <= 6, task.spec
        passes = [all(checks) for checks in zip(*by_test, strict=True)]
        assert passes == [True] + [False] * (len(told) - 1), task.spec


def test_problems_have_different_inputs_and_outputs(everything: list[Task]) -> None:
    for task in everything:
        tests = problem_of(task).tests
        assert len(tests) == len({test.stdin for test in tests}) == 6
        assert len({test.stdout for test in tests}) > 1
        for test in tests:
            assert 1 <= len(test.stdin.split()) <= 6
            assert set(test.stdin.split()) <= set("0123456789")


def test_every_word_of_problems_is_known(pipelines: PipelineEnvironment, everything: list[Task]) -> None:
    for task in everything:
        episode = pipelines.start(task)
        expert = pipelines.expert(episode, Random(0))
        detour = pipelines.detour(episode, Random(0))
        assert expert is not None
        assert detour is not None
        programs = [solution.program for solution in pipelines.solutions(task)]
        texts = [*episode.observation.digest, expert.action, detour, *programs]
        assert {word for text in texts for word in text.split()} <= WORDS
        assert " ".join(episode.observation.digest) == problem_of(task).name
        assert episode.observation.text.endswith(f": {problem_of(task).name}.")


def test_difficulty_is_the_number_of_operations(pipelines: PipelineEnvironment) -> None:
    for difficulty, size, level in ((0.0, 1, "easy"), (0.3, 2, "medium"), (0.7, 3, "hard"), (1.0, 4, "hard")):
        for seed in range(10):
            task = pipelines.sample(Random(f"{difficulty}/{seed}"), difficulty)
            assert (pipeline_of(task).size, task.kind, task.difficulty) == (size, level, pytest.approx((size - 1) / 3))
            assert (task.root_id, task.parent_id, task.version, task.environment) == (task.id, None, 0, "pipelines")


def test_out_of_distribution_another_size_stands_in_for_one_that_is_rare(sampled: dict[Split, list[Task]]) -> None:
    levels = {1: "easy", 2: "medium", 3: "hard", 4: "hard"}
    for index, task in enumerate(sampled["out_of_distribution"]):
        size = pipeline_of(task).size
        assert (task.kind, task.difficulty) == (levels[size], pytest.approx((size - 1) / 3)), index
    as_asked = [pipeline_of(task).size == 1 + round(index / 49 * 3) for index, task in enumerate(sampled["out_of_distribution"])]
    assert sum(as_asked) > 25


def test_tasks_are_functions_of_the_generator_and_ids_of_the_spec(
    pipelines: PipelineEnvironment, sampled: dict[Split, list[Task]], everything: list[Task]
) -> None:
    fresh = PipelineEnvironment()
    fresh.grader.sandbox = pipelines.grader.sandbox
    assert [fresh.sample(Random(f"in_domain/{i}"), i / 49) for i in range(20)] == sampled["in_domain"][:20]
    assert len({task.id for task in everything}) == len({json.dumps(task.spec) for task in everything}) > 90
    for task in everything:
        assert Task(**json.loads(json.dumps(asdict(task)))) == task


def test_a_task_that_was_read_back_is_played_and_varied_alike(pipelines: PipelineEnvironment, everything: list[Task]) -> None:
    task = Task(**json.loads(json.dumps(asdict(everything[30]))))
    episodes = [pipelines.start(task), pipelines.start(task)]
    right, wrong = pipelines.step_all(episodes, [pipelines.solutions(task)[0].program, "print ( 0 )"])
    assert isinstance(right, Transition)
    assert isinstance(wrong, Transition)
    assert (right.outcome, right.checks, wrong.outcome) == (1.0, ("passed",) * 6, -1.0)
    assert pipelines.vary(task, "harder", Random(1), 3) == pipelines.vary(everything[30], "harder", Random(1), 3)


def test_there_is_no_fixed_set_to_train_on_and_no_rewriting_by_text(pipelines: Environment, everything: list[Task]) -> None:
    assert [pipelines.corpus("train", split) for split in SPLITS] == [(), ()]
    assert pipelines.rewrite_prompt(everything[0], "harder", "", 3, 4) is None
    assert pipelines.resembles(everything[0], everything) is False


def test_evaluation_problems_are_the_same_in_every_environment(pipelines: PipelineEnvironment) -> None:
    other = PipelineEnvironment(longest_example=3)
    for purpose, split in HELD_OUT:
        tasks = pipelines.corpus(purpose, split)
        assert tasks == other.corpus(purpose, split)
        assert len({task.id for task in tasks}) == len(tasks) == {"validation": 48, "test": 96}[purpose]
        behaviours = {tuple(pipeline_of(task).answer(line) for line in LINES) for task in tasks}
        assert len(behaviours) > len(tasks) - 3  # as good as all different, also on lines that they were not chosen by
        assert {task.kind for task in tasks} >= {"medium", "hard"}
        assert all(task.id == task.root_id for task in tasks)
    assert {task.kind for split in SPLITS for task in pipelines.corpus("test", split)} == {"easy", "medium", "hard"}


def test_no_two_sets_have_problems_that_one_program_solves(pipelines: PipelineEnvironment) -> None:
    trained = [pipelines.sample(Random(f"trained/{i}"), i / 499) for i in range(500)]
    directions: tuple[Direction, ...] = ("harder", "easier")
    edits = [task for way in directions for _, task in islice(variants(pipelines, trained, way), 100)]
    tuned = [pipelines.sample(Random(f"tuned/{i}"), i / 99, "out_of_distribution") for i in range(100)]
    assert (len(trained), len(edits)) == (500, 200)
    sets = {"train": [*trained, *edits]} | {"/".join(place): list(pipelines.corpus(*place)) for place in HELD_OUT}
    sets["validation/out_of_distribution"] += tuned
    known: dict[tuple[int, ...], str] = {}
    for name, tasks in sets.items():
        behaviours = {tuple(pipeline_of(task).answer(line) for line in LINES) for task in tasks}
        assert len(behaviours) > 20, name
        for behaviour in behaviours:
            assert known.setdefault(behaviour, name) == name
    shapes = {name: {pipeline_of(task).shape for task in tasks} for name, tasks in sets.items()}
    in_domain = shapes["train"] | shapes["validation/in_domain"] | shapes["test/in_domain"]
    assert not in_domain & (shapes["validation/out_of_distribution"] | shapes["test/out_of_distribution"])


# Edits


def variants(pipelines: PipelineEnvironment, tasks: list[Task], direction: Direction) -> Iterator[tuple[Task, Task]]:
    for index, task in enumerate(tasks):
        for variant in pipelines.vary(task, direction, Random(f"{direction}/{index}"), 12):
            yield task, variant


def test_what_is_out_of_distribution_is_never_trained_on(
    pipelines: PipelineEnvironment, sampled: dict[Split, list[Task]]
) -> None:
    more = [pipelines.sample(Random(f"more/{i}"), i / 199, "out_of_distribution") for i in range(200)]
    held_out = {shape_of(task) for task in (*sampled["out_of_distribution"], *more)}
    trained = [pipelines.sample(Random(f"trained/{i}"), i / 299) for i in range(300)]
    edits = [
        variant
        for direction in ("harder", "easier")
        for _, variant in islice(variants(pipelines, trained, direction), 250)  # type: ignore[arg-type]
    ]
    assert len(edits) == 500
    assert len(held_out) > 60
    assert not held_out & {shape_of(task) for task in (*sampled["in_domain"], *trained, *edits)}
    assert {task.difficulty for task in more} == {task.difficulty for task in trained}  # reserved at every size


@pytest.mark.parametrize("direction", ["harder", "easier"])
def test_edits(pipelines: PipelineEnvironment, sampled: dict[Split, list[Task]], direction: Direction) -> None:
    changes = []
    for parent, variant in variants(pipelines, sampled["in_domain"], direction):
        before, after = pipeline_of(parent), pipeline_of(variant)
        assert after != before  # not only worded anew
        assert any(after.answer(line) != before.answer(line) for line in LINES)  # nor the same in other operations
        assert after.is_sound
        assert 1 <= after.size <= 4
        changes.append(after.size - before.size)
        assert (variant.root_id, variant.parent_id, variant.version) == (parent.id, parent.id, 1)
        assert variant.spec["root_question"] == problem_of(parent).question
        assert variant.id != parent.id
        if len(changes) % 50 == 0:  # a run takes a while
            assert pipelines.validate(variant, parent) is None
    assert set(changes) == ({0, 1} if direction == "harder" else {0, -1})
    assert len(changes) > 200


def test_variants_are_distinct_and_as_many_as_asked_for(pipelines: PipelineEnvironment, sampled: dict[Split, list[Task]]) -> None:
    task = replace(sampled["in_domain"][25], root_id="root", version=3)
    for number in (0, 1, 5):
        found = pipelines.vary(task, "harder", Random(2), number)
        assert len({variant.id for variant in found}) == len(found) == number
        assert all((variant.root_id, variant.version) == ("root", 4) for variant in found)
    assert pipelines.vary(task, "harder", Random(2), 5) == pipelines.vary(task, "harder", Random(2), 5)


# Examples of unit tests


def test_examples_of_unit_tests_are_right_or_wrong_as_asked(pipelines: PipelineEnvironment, everything: list[Task]) -> None:
    requests: list[CheckRequest] = []
    for index, task in enumerate(everything):
        program = pipelines.solutions(task)[0].program
        for is_right in (True, False):
            told = [pipelines.example_test(task, Random(f"{index}/{i}"), is_right) for i in range(3)]
            examples = [example for example in told if example is not None]
            assert len(examples) == 3, task.spec
            for example in examples:
                text = f"{example.thought} {example.test.stdin} {example.test.stdout}"
                assert set(text.split()) <= WORDS, text
                assert 2 <= len(example.test.stdin.split()) <= 4
            requests.append(CheckRequest(task, (program,), tuple(example.test for example in examples)))
    verdicts = pipelines.check_programs(requests)
    assert verdicts == [[[True]] * 3, [[False]] * 3] * 100  # 300 right ones, 300 wrong ones


def test_wrong_examples_have_the_inputs_of_right_ones(pipelines: PipelineEnvironment, everything: list[Task]) -> None:
    """Or inputs that mistakes get right would be rare among wrong examples, and a writer would be safe with those."""
    same = 0
    for index, task in enumerate(everything):
        right, wrong = (pipelines.example_test(task, Random(str(index)), is_right) for is_right in (True, False))
        assert right is not None
        assert wrong is not None
        if right.test.stdin == wrong.test.stdin:
            same += 1
            assert right.thought == wrong.thought
            assert right.test.stdout != wrong.test.stdout
    assert same > 95  # of 100; a few mistakes print numbers that have no word


def test_the_thought_of_an_example_is_that_of_its_input(pipelines: PipelineEnvironment) -> None:
    task = pipelines._task(SQUARES, 0)
    assert task is not None
    seen: set[UnitTest] = set()
    for seed in range(20):
        example = pipelines.example_test(task, Random(seed), is_right=True)
        assert example is not None
        numbers = [int(word) for word in example.test.stdin.split()]
        assert example.thought == " ".join(f"{x} -" if x % 2 else f"{x} {x * x}" for x in numbers)
        assert example.test.stdout == f"{sum(x * x for x in numbers if x % 2 == 0)}\n"
        seen.add(example.test)
    assert len(seen) > 10


def test_inputs_of_examples_are_chosen_to_tell_mistakes_apart(pipelines: PipelineEnvironment, everything: list[Task]) -> None:
    def caught(task: Task, draws: int) -> float:
        """The share of the task's mistakes that a taught test tells from it."""
        environment = PipelineEnvironment(example_draws=draws)
        example = environment.example_test(task, Random(task.id), is_right=True)
        assert example is not None
        numbers = [int(word) for word in example.test.stdin.split()]
        pipeline = pipeline_of(task)
        mistakes = list(pipeline.mistakes())
        return sum(mistake.answer(numbers) != pipeline.answer(numbers) for mistake in mistakes) / len(mistakes)

    means = [sum(caught(task, draws) for task in everything) / len(everything) for draws in (1, 4, 100)]
    assert means[0] + 0.05 < means[1] < means[2] - 0.05


def test_the_input_that_catches_most_is_taken(pipelines: PipelineEnvironment) -> None:
    mistakes = (replace(SQUARES, filters=()), replace(SQUARES, maps=()))  # keeps odd numbers too; does not square
    for seed in range(30):
        environment = PipelineEnvironment(example_draws=30)
        numbers = environment._telling(SQUARES, mistakes, Random(seed))
        drawn = Random(seed).randint(1, 30)
        if drawn > 20:  # then an odd number, and an even one that squaring changes, are among them
            assert any(x % 2 for x in numbers), numbers
            assert any(x in (2, 4, 6, 8) for x in numbers), numbers


@pytest.mark.parametrize("name", ["longest_example", "example_draws"])
def test_settings_of_examples_are_checked(name: str) -> None:
    with pytest.raises(ConfigError, match=f"PipelineEnvironment.{name} must be at least 1, got 0"):
        PipelineEnvironment(**{name: 0})
