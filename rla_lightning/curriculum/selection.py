"""Which tasks of an environment are used: fresh samples, or some of a fixed set."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from rla_lightning.environments.base import Environment
from rla_lightning.types import ConfigError, Purpose, Split, Task

TRIES_PER_TASK = 100  # draws allowed per wanted task


def sample_distinct(
    environment: Environment,
    number: int | None,
    key: str,
    difficulty_low: float,
    difficulty_high: float,
    is_taken: Callable[[str], bool] = lambda task_id: False,
) -> list[Task]:
    """Valid training tasks with distinct ids that are not taken, difficulties in the range; fresh or of a fixed set.

    Fresh draw i comes from `Random(f"{key}/task/{i}")`, its difficulty uniform; repeats and invalid tasks cost a draw each.

    Args:
        environment: whose tasks.
        number: of tasks; None: all of a fixed set.
        key: of the random draws.
        difficulty_low: lowest difficulty.
        difficulty_high: highest difficulty.
        is_taken: whether a task with this id is not wanted.
    """
    if number is not None and number < 1:
        raise ConfigError(f"the number of tasks must be at least 1, got {number}")
    if not 0.0 <= difficulty_low <= difficulty_high <= 1.0:
        raise ConfigError(f"need 0 <= difficulty_low <= difficulty_high <= 1, got {difficulty_low} and {difficulty_high}")
    if not environment.corpus("train", "in_domain"):
        return _sample_fresh(environment, number, key, difficulty_low, difficulty_high, is_taken)

    def is_wanted(task: Task) -> bool:
        return difficulty_low <= task.difficulty <= difficulty_high and not is_taken(task.id)

    tasks = choose_from_corpus(environment, "train", "in_domain", number, key, is_wanted)
    if len(tasks) < (number or 1):
        raise ConfigError(
            f"environment '{environment.name}' has only {len(tasks)} usable training tasks with difficulty in "
            f"[{difficulty_low}, {difficulty_high}]; {number or 'at least 1'} asked for"
        )
    return tasks


def choose_from_corpus(
    environment: Environment,
    purpose: Purpose,
    split: Split,
    number: int | None,
    key: str,
    is_wanted: Callable[[Task], bool],
) -> list[Task]:
    """The first `number` (None: all) wanted and valid tasks of a fixed set in an order drawn by `key`, or what there is.

    Which of two tasks comes first depends on the key and the two alone, so a larger number extends the list.
    """
    chosen: dict[str, Task] = {}
    for task in sorted(environment.corpus(purpose, split), key=lambda task: Random(f"{key}/{task.id}").random()):
        if len(chosen) == number:
            break
        if task.id not in chosen and is_wanted(task) and environment.validate(task) is None:
            chosen[task.id] = task
    return list(chosen.values())


def _sample_fresh(
    environment: Environment, number: int | None, key: str, low: float, high: float, is_taken: Callable[[str], bool]
) -> list[Task]:
    if number is None:
        raise ConfigError(f"environment '{environment.name}' makes new tasks without end: give data.pool_size, not null")
    tasks: dict[str, Task] = {}
    problem = ""
    for index in range(number * TRIES_PER_TASK):
        rng = Random(f"{key}/task/{index}")
        task = environment.sample(rng, rng.uniform(low, high))
        if task.id in tasks or is_taken(task.id):
            continue
        invalid = environment.validate(task)
        if invalid is not None:
            problem = f"; the last invalid one: {invalid}"
            continue
        tasks[task.id] = task
        if len(tasks) == number:
            return list(tasks.values())
    raise ConfigError(
        f"environment '{environment.name}' gave only {len(tasks)} of {number} distinct valid tasks "
        f"in {number * TRIES_PER_TASK} draws with difficulty in [{low}, {high}]{problem}"
    )
