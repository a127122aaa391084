"""The environment as a LightningDataModule: a task pool that is regenerated from feedback every epoch."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from random import Random
from statistics import fmean
from typing import Any

import lightning as L
from torch.utils.data import DataLoader

from rla_lightning.curriculum.pool import TaskChoice, TaskPool
from rla_lightning.curriculum.proposing import Predict, TaskAdapter
from rla_lightning.curriculum.selection import choose_from_corpus
from rla_lightning.environments.base import Environment
from rla_lightning.models.language_model import LoadedModel
from rla_lightning.settings import require
from rla_lightning.types import ConfigError, EvaluationSet, Purpose, Split, Task, TaskBatch, TaskFeedback

SPLITS: tuple[Split, ...] = ("in_domain", "out_of_distribution")


def _first(items: Sequence[Any]) -> Any:
    return items[0]


class EnvironmentDataModule(L.LightningDataModule):
    """Serves tasks to train on, rewrites them between epochs, and holds the evaluation tasks.

    One epoch is one round of task generation and one iteration. The training loader is a pure function of
    this object's state, so a resumed run draws the same tasks as an uninterrupted one.

    Args:
        environment: makes, plays and rewrites tasks; the model uses the same one.
        adapter: rewrites the pool after each iteration; null keeps the tasks fixed.
        tasks_per_iteration: tasks rolled out in one iteration, proposals included.
        pool_size: slots of active tasks; null: all training tasks, where they are a fixed set.
        difficulty_low: lowest difficulty of fresh tasks, in [0, 1].
        difficulty_high: highest difficulty of fresh tasks, in [0, 1].
        evaluation_difficulty_low: lowest difficulty of evaluation tasks that are made, not read; null: as for fresh tasks.
        evaluation_difficulty_high: highest difficulty of them; null: likewise.
        validation_tasks: held-out tasks per split for tuning; null: all there are, where they are a fixed set.
        test_tasks: held-out tasks per split for the reported numbers; null: likewise.
        task_choice: which active tasks an iteration takes; uniform, or judge_errors: more of those with won and lost rollouts
            where the judge's votes told them apart least.
        seed: of task generation; evaluation tasks do not depend on it.
    """

    def __init__(
        self,
        environment: Environment,
        adapter: TaskAdapter | None = None,
        tasks_per_iteration: int = 24,
        pool_size: int | None = 96,
        difficulty_low: float = 0.0,
        difficulty_high: float = 1.0,
        evaluation_difficulty_low: float | None = None,
        evaluation_difficulty_high: float | None = None,
        validation_tasks: int | None = 64,
        test_tasks: int | None = 320,
        task_choice: TaskChoice = "uniform",
        seed: int = 0,
    ) -> None:
        super().__init__()
        require(tasks_per_iteration >= 1, f"data.tasks_per_iteration must be at least 1, got {tasks_per_iteration}")
        self.difficulty = (difficulty_low, difficulty_high)
        self.evaluation_difficulty = (
            difficulty_low if evaluation_difficulty_low is None else evaluation_difficulty_low,
            difficulty_high if evaluation_difficulty_high is None else evaluation_difficulty_high,
        )
        for name, (low, high) in (("", self.difficulty), ("evaluation_", self.evaluation_difficulty)):
            require(
                0 <= low <= high <= 1,
                f"data.{name}difficulty_low and data.{name}difficulty_high must satisfy 0 <= low <= high <= 1, "
                f"got {low} and {high}",
            )
        for name, value in (("validation_tasks", validation_tasks), ("test_tasks", test_tasks)):
            require(
                value is None or value >= 1, f"data.{name} must be at least 1, got {value}: an empty task set evaluates nothing"
            )
        require(
            task_choice in ("uniform", "judge_errors"), f"data.task_choice must be uniform or judge_errors, got '{task_choice}'"
        )
        if adapter is not None:
            adapter.check(environment)
        self.environment = environment
        self.adapter = adapter
        self.tasks_per_iteration, self.task_choice = tasks_per_iteration, task_choice
        self.evaluation_sizes: dict[Purpose, int | None] = {"validation": validation_tasks, "test": test_tasks}
        self.seed = seed
        self.epoch = 0
        self._adapter_statistics: dict[str, float] = {}  # of its latest work
        self._evaluation_sets: dict[Purpose, tuple[EvaluationSet, ...]] = {}
        if pool_size is not None:  # before all games of a fixed set are read
            self._check_pool_size(pool_size)
        self.pool = TaskPool.fresh(environment, pool_size, f"{seed}/pool", difficulty_low, difficulty_high, self._held_out_ids())
        self._check_pool_size(len(self.pool.slots))

    def train_dataloader(self) -> DataLoader[TaskBatch]:
        batch = self.pool.draw(self.tasks_per_iteration, f"{self.seed}/draw/{self.epoch}", self.task_choice)
        return DataLoader([batch], batch_size=1, collate_fn=_first)  # type: ignore[arg-type]

    def val_dataloader(self) -> list[DataLoader[EvaluationSet]]:
        return self._evaluation_loaders("validation")

    def test_dataloader(self) -> list[DataLoader[EvaluationSet]]:
        return self._evaluation_loaders("test")

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        del device, dataloader_idx
        return batch  # tasks are plain data; tensors are made where they are used

    def evaluation_sets(self, purpose: Purpose) -> tuple[EvaluationSet, ...]:
        """The held-out tasks of `validation` or `test`: the same in every run, disjoint from each other.

        A fixed set of tasks may have none out of distribution.
        """
        if purpose not in self._evaluation_sets:
            splits = [split for split in SPLITS if self.environment.corpus(purpose, split)] or SPLITS
            self._evaluation_sets[purpose] = tuple(self._held_out(purpose, split) for split in splits)
        return self._evaluation_sets[purpose]

    @property
    def tasks(self) -> list[Task]:
        """All that can be rolled out now: the slots of the pool and the evaluation tasks."""
        sets = self.evaluation_sets("validation") + self.evaluation_sets("test")
        return [*self.pool.slots, *(task for evaluation_set in sets for task in evaluation_set.tasks)]

    def lend(self, policy: LoadedModel) -> None:
        """Let an adapter that has no model of its own write with the policy's base; called once the models are built."""
        if self.adapter is not None:
            self.adapter.lend(policy)

    def adapt(self, feedback: Sequence[TaskFeedback], predict: Predict) -> None:
        """Book the verdicts of one iteration and propose the next tasks."""
        self.pool.book(feedback)
        if self.adapter is not None:
            self.adapter.adapt(self.environment, self.pool, feedback, predict, f"{self.seed}/adapt/{self.epoch}")
            self._adapter_statistics = self.adapter.statistics()
        self.epoch += 1

    def statistics(self) -> dict[str, float]:
        """What is logged about the tasks after an iteration, mean knobs of the pool too; a restored state has the same."""
        knobs = [self.environment.knobs(task) for task in self.pool.slots]
        names = dict.fromkeys(name for each in knobs for name in each)
        means = {f"knob/{name}": fmean(each[name] for each in knobs if name in each) for name in names}
        return self.pool.statistics() | means | self._adapter_statistics

    def state_dict(self) -> dict[str, Any]:
        adapter = {} if self.adapter is None else self.adapter.state()
        statistics = self._adapter_statistics
        return {"pool": self.pool.state(), "epoch": self.epoch, "adapter": adapter, "adapter_statistics": statistics}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.pool = TaskPool.from_state(state_dict["pool"], self._held_out_ids())
        self.pool.difficulty = self.difficulty  # a setting, not state
        leaked = next((record.task.id for record in self.pool.records if record.task.id in self.pool.held_out), None)
        require(
            leaked is None,
            f"the checkpoint trained on task {leaked}, which is held out here: resume with the run's own environment, "
            "data.validation_tasks, data.test_tasks and difficulties",
        )
        self.epoch, self._adapter_statistics = state_dict["epoch"], state_dict["adapter_statistics"]
        if self.adapter is not None:
            self.adapter.load_state(state_dict["adapter"])

    def _held_out_ids(self) -> frozenset[str]:
        sets = self.evaluation_sets("validation") + self.evaluation_sets("test")
        return frozenset(task.id for evaluation_set in sets for task in evaluation_set.tasks)

    def _held_out(self, purpose: Purpose, split: Split) -> EvaluationSet:
        taken: set[str] = set()
        if purpose == "test":
            sets = self.evaluation_sets("validation")
            taken = {task.id for evaluated in sets if evaluated.split == split for task in evaluated.tasks}
        is_fixed_set = bool(self.environment.corpus(purpose, split))
        tasks = (self._held_out_of_corpus if is_fixed_set else self._held_out_samples)(purpose, split, taken)
        return EvaluationSet(split, tuple(tasks))

    def _held_out_of_corpus(self, purpose: Purpose, split: Split, taken: AbstractSet[str]) -> list[Task]:
        number, key = self.evaluation_sizes[purpose], f"held-out/{purpose}/{split}"
        tasks = choose_from_corpus(self.environment, purpose, split, number, key, lambda task: task.id not in taken)
        if len(tasks) < (number or 1):
            raise ConfigError(
                f"{self.environment.name} has only {len(tasks)} {split} tasks for {purpose}; "
                f"data.{purpose}_tasks asks for {number or 'all'}"
            )
        return tasks

    def _held_out_samples(self, purpose: Purpose, split: Split, taken: AbstractSet[str]) -> list[Task]:
        number = self.evaluation_sizes[purpose]
        if number is None:
            raise ConfigError(
                f"data.{purpose}_tasks null stands for all {split} tasks of a fixed set, which {self.environment.name} "
                "does not have: give a number"
            )
        tasks: dict[str, Task] = {}
        low, high = self.evaluation_difficulty
        for attempt in range(20 * number):
            rng = Random(f"held-out/{purpose}/{split}/{attempt}")
            task = self.environment.sample(rng, rng.uniform(low, high), split)
            if task.id not in taken and self.environment.validate(task) is None:
                tasks.setdefault(task.id, task)
            if len(tasks) == number:
                return list(tasks.values())
        raise ConfigError(
            f"{self.environment.name} gave only {len(tasks)} distinct {split} tasks; data.{purpose}_tasks asks for {number}"
        )

    def _check_pool_size(self, size: int) -> None:
        drawn = self.tasks_per_iteration
        require(
            drawn >= 2 or self.adapter is None,
            f"data.tasks_per_iteration must be at least 2 with an adapter, got {drawn}: proposals are tried with their parents",
        )
        require(
            size >= 2 * drawn or (self.adapter is None and size >= drawn),
            f"data.pool_size {size} is too small for data.tasks_per_iteration {drawn}: parents of pending "
            "proposals are not drawn, so an adapter needs twice as many slots",
        )

    def _evaluation_loaders(self, purpose: Purpose) -> list[DataLoader[EvaluationSet]]:
        return [
            DataLoader([tasks], batch_size=1, collate_fn=_first)  # type: ignore[arg-type]
            for tasks in self.evaluation_sets(purpose)
        ]
