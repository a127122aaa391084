from random import Random

import pytest

from rla_lightning.curriculum.adapters import FreshTasks
from rla_lightning.curriculum.pool import TaskPool
from rla_lightning.curriculum.selection import choose_from_corpus, sample_distinct
from rla_lightning.environments.base import Environment
from rla_lightning.types import ConfigError, Purpose, Split, Task, TaskFeedback


class Endless(Environment):
    """Tasks 0 to 999, by difficulty."""

    name = "endless"

    def sample(self, rng: Random, difficulty: float, split: Split = "in_domain") -> Task:
        return numbered(int(1000 * difficulty), difficulty)

    def start(self, task: Task):
        raise NotImplementedError


class Shelf(Endless):
    """Twenty fixed training tasks of difficulties 0, .05, .., .95 and two test tasks; numbers in `broken` are invalid."""

    name = "shelf"

    def __init__(self, *broken: int, twice: int = 1) -> None:
        self.broken, self.twice = broken, twice

    def sample(self, rng, difficulty, split="in_domain"):
        raise AssertionError("there is nothing to sample")

    def corpus(self, purpose: Purpose, split: Split):
        numbers = {("train", "in_domain"): range(20), ("test", "in_domain"): range(20, 22)}.get((purpose, split), range(0))
        return [numbered(n, n / 20) for n in numbers] * self.twice

    def validate(self, task, parent=None):
        return "broken" if task.spec["n"] in self.broken else None


def numbered(n: int, difficulty: float) -> Task:
    return Task(f"t{n}", "toy", {"n": n}, difficulty, f"t{n}")


def numbers(tasks) -> list[int]:
    return [task.spec["n"] for task in tasks]


def test_fresh_draw_comes_from_the_documented_generator() -> None:
    (only,) = sample_distinct(Endless(), 1, "key", 0.0, 1.0)
    assert only.difficulty == Random("key/task/0").uniform(0.0, 1.0)


def test_a_fixed_set_is_taken_without_replacement_in_an_order_of_the_key() -> None:
    first = numbers(sample_distinct(Shelf(), 20, "a", 0.0, 1.0))
    assert sorted(first) == list(range(20))
    assert numbers(sample_distinct(Shelf(), None, "a", 0.0, 1.0)) == first
    assert numbers(sample_distinct(Shelf(), 7, "a", 0.0, 1.0)) == first[:7]
    assert numbers(sample_distinct(Shelf(), 20, "b", 0.0, 1.0)) != first != list(range(20))
    # worked out without the code: the places of three tasks
    places = {n: Random(f"a/t{n}").random() for n in (3, 4, 5)}
    assert [n for n in first if n in places] == sorted(places, key=lambda n: places[n])


def test_invalid_taken_and_too_hard_tasks_are_passed_over_and_the_others_keep_their_order() -> None:
    every = numbers(sample_distinct(Shelf(), None, "a", 0.0, 1.0))
    some = sample_distinct(Shelf(2, 3), None, "a", 0.1, 0.5, is_taken=lambda task_id: task_id in ("t4", "t5"))
    assert numbers(some) == [n for n in every if n in (6, 7, 8, 9, 10)]  # 2 to 10 have the difficulties .1 to .5
    assert numbers(sample_distinct(Shelf(twice=2), None, "a", 0.0, 1.0)) == every


def test_too_few_tasks_of_a_fixed_set_are_named_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"'shelf' has only 19 usable training tasks .*\[0.0, 1.0\]; 20 asked for"):
        sample_distinct(Shelf(0), 20, "a", 0.0, 1.0)
    with pytest.raises(ConfigError, match=r"only 0 usable training tasks .*\[0.96, 1.0\]; at least 1 asked for"):
        sample_distinct(Shelf(), None, "a", 0.96, 1.0)
    with pytest.raises(ConfigError, match=r"'endless' makes new tasks without end: give data.pool_size, not null"):
        sample_distinct(Endless(), None, "a", 0.0, 1.0)


def test_what_is_left_of_a_fixed_set_may_be_less_than_wanted() -> None:
    chosen = choose_from_corpus(Shelf(21), "test", "in_domain", 2, "a", lambda task: True)
    assert numbers(chosen) == [20]
    assert choose_from_corpus(Shelf(), "validation", "in_domain", None, "a", lambda task: True) == []


def test_fresh_tasks_of_a_fixed_set_are_neither_in_use_nor_held_out() -> None:
    pool = TaskPool.fresh(Shelf(), 12, "a", held_out=frozenset({"t0"}))
    for epoch in range(20):
        before = numbers(pool.slots)
        assert 0 not in before
        feedback = [TaskFeedback(task, 8, 8, 0.5) for task in pool.slots[:5]]
        pool.book(feedback)
        FreshTasks().adapt(Shelf(), pool, feedback, lambda tasks: [], f"key/{epoch}")
        after = numbers(pool.slots)
        assert after[5:] == before[5:]
        assert len(set(after)) == 12
    assert {record.task.spec["n"] for record in pool.records} == set(range(1, 20))


def test_fresh_tasks_of_an_exhausted_set_change_places() -> None:
    pool = TaskPool.fresh(Shelf(), None, "a")
    feedback = [TaskFeedback(task, 8, 8, 0.5) for task in pool.slots[:5]]
    pool.book(feedback)
    FreshTasks().adapt(Shelf(), pool, feedback, lambda tasks: [], "key")
    assert sorted(numbers(pool.slots)) == list(range(20))
