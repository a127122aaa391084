"""Measures how well candidates for rewritten tasks are chosen: their true success, by many rollouts, for each way to choose."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import lightning as L
from rich.console import Console
from rich.table import Table

from rla_lightning.algorithm.acceptance import trigger
from rla_lightning.curriculum.adapters import ParametricAdapter, usable_variants
from rla_lightning.curriculum.pool import TaskPool
from rla_lightning.curriculum.proposing import Request, Rewrite
from rla_lightning.datamodule import EnvironmentDataModule
from rla_lightning.distributed import failing_together, from_first, rank, share, unshare
from rla_lightning.environments.base import Environment
from rla_lightning.module import ClosedLoop
from rla_lightning.types import ConfigError, Direction, Task

FILE = "proposals.jsonl"


@dataclass(frozen=True)
class Chosen:
    """One candidate that one way of choosing took; one line of proposals.jsonl."""

    epoch: int
    way: str  # how it was chosen
    direction: Direction
    parent_id: str
    parent_success: float  # true, by the study's rollouts
    task_id: str
    success: float  # likewise
    predicted: float | None
    low: float
    high: float

    @property
    def moved(self) -> bool:
        """Whether it is truly harder or easier than its parent, as it was meant to be."""
        return self.success < self.parent_success if self.direction == "harder" else self.success > self.parent_success

    @property
    def is_hit(self) -> bool:
        return self.moved and self.low <= self.success <= self.high


class ProposalStudy(L.Callback):
    """Plays candidates chosen at random, by the critic, by knobs and by both, and tells which moved the right way into the band.

    The run itself goes on as without it. Tasks of the pool whose latest rollouts lie outside the band are the parents; for each
    all ways choose among the same candidates. A line per choice goes to `proposals.jsonl`, a table is printed at the end.

    Args:
        every_n_epochs: how often.
        parents: most tasks that are studied at a time.
        rollouts: of each task, to know its true success.
        candidates: variants that the environment is asked for per task.
        low: lower end of the band.
        high: upper end of it.
    """

    def __init__(
        self,
        every_n_epochs: int = 10,
        parents: int = 32,
        rollouts: int = 48,
        candidates: int = 32,
        low: float = 0.2,
        high: float = 0.8,
    ) -> None:
        sizes = {"every_n_epochs": every_n_epochs, "parents": parents, "rollouts": rollouts, "candidates": candidates}
        for name, value in sizes.items():
            if value < 1:
                raise ConfigError(f"ProposalStudy.{name} must be at least 1, got {value}")
        if not 0 <= low < high <= 1:
            raise ConfigError(f"ProposalStudy needs 0 <= low < high <= 1, got {low} and {high}")
        self.every_n_epochs, self.parents, self.rollouts, self.candidates = every_n_epochs, parents, rollouts, candidates
        self.low, self.high = low, high
        self.ways = {
            "random": ParametricAdapter(ranking="random", pull="target"),
            "critic": ParametricAdapter(ranking="critic", pull="target"),
            "knobs": ParametricAdapter(ranking="knobs", pull="target"),
            "both": ParametricAdapter(ranking="both", pull="target"),
            "both, near the root": ParametricAdapter(ranking="both", pull="root"),
        }

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """After the pool has booked the last epoch: the models are those of that time."""
        assert isinstance(pl_module, ClosedLoop)
        datamodule = trainer.datamodule  # type: ignore[attr-defined]
        assert isinstance(datamodule, EnvironmentDataModule)
        log_dir = trainer.log_dir
        if datamodule.epoch == 0 or datamodule.epoch % self.every_n_epochs or log_dir is None:
            return
        chosen = list(self._study(pl_module, datamodule))
        if trainer.is_global_zero:
            with (Path(log_dir) / FILE).open("a") as file:
                file.writelines(json.dumps(asdict(item)) + "\n" for item in chosen)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        log_dir = trainer.log_dir
        if trainer.is_global_zero and log_dir is not None and (Path(log_dir) / FILE).is_file():
            Console().print(study_table(read_study(Path(log_dir) / FILE)))

    def _study(self, pl_module: ClosedLoop, datamodule: EnvironmentDataModule) -> Iterator[Chosen]:
        environment, pool = datamodule.environment, datamodule.pool
        key = f"{pl_module.seed}/proposal study/{datamodule.epoch}"
        rewrites: list[Rewrite] = []
        with failing_together():
            if rank() == 0:  # validating may run programs, and a clock must not part the processes
                rewrites = self._rewrites(environment, pool, key)
        rewrites = from_first(rewrites)
        picked = {way: self._picked(pl_module, datamodule, way, rewrites) for way in self.ways}
        tasks = {rewrite.request.parent.task.id: rewrite.request.parent.task for rewrite in rewrites}
        tasks |= {task.id: task for choices in picked.values() for task, _ in choices if task is not None}
        success = self._success(pl_module, list(tasks.values()), key)
        for way, choices in picked.items():
            for rewrite, (choice, predicted) in zip(rewrites, choices, strict=True):
                parent = rewrite.request.parent.task
                if choice is not None and not math.isnan(success[choice.id] + success[parent.id]):
                    rates = success[parent.id], choice.id, success[choice.id]
                    direction = rewrite.request.direction
                    yield Chosen(datamodule.epoch, way, direction, parent.id, *rates, predicted, self.low, self.high)

    def _rewrites(self, environment: Environment, pool: TaskPool, key: str) -> list[Rewrite]:
        """Tasks of the pool outside the band, with what they could become."""
        rewrites: list[Rewrite] = []
        for task in Random(key).sample(pool.slots, len(pool.slots)):
            record = pool.record(task.id)
            direction = None if record.rollouts == 0 else trigger(record.successes, record.rollouts, self.low, self.high)
            if direction is not None and len(rewrites) < self.parents:
                request = Request(record, direction, critique="", is_control=False)
                candidates = usable_variants(environment, pool, request, self.candidates, key)
                rewrites += [Rewrite(request, candidates)] if candidates else []
        return rewrites

    def _picked(
        self, pl_module: ClosedLoop, datamodule: EnvironmentDataModule, way: str, rewrites: Sequence[Rewrite]
    ) -> list[tuple[Task | None, float | None]]:
        ranked = self.ways[way].ranked(
            datamodule.environment, datamodule.pool, rewrites, lambda tasks: from_first(pl_module.players.predict(tasks))
        )
        return [candidates[0] if candidates else (None, None) for candidates in ranked]

    def _success(self, pl_module: ClosedLoop, tasks: Sequence[Task], key: str) -> dict[str, float]:
        limit = pl_module.rollout.max_turns
        with failing_together():
            mine = pl_module.players.play(share(tasks), self.rollouts, key, max_turns=limit, progress=pl_module.progress)
        played = [(group.task.id, group.successes, group.rollouts) for group in unshare(mine)]
        return {task_id: wins / rollouts if rollouts else math.nan for task_id, wins, rollouts in played}


def read_study(path: Path) -> list[Chosen]:
    return [Chosen(**json.loads(line)) for line in path.read_text().splitlines()]


def study_table(chosen: Sequence[Chosen]) -> Table:
    """Per way of choosing: the shares that moved the right way and that did so into the band, easier and harder."""
    table = Table(title="proposals: moved the right way / and into the band, by true success")
    for column in ("chosen by", "easier", "harder"):
        table.add_column(column)
    for way in dict.fromkeys(item.way for item in chosen):
        cells = []
        for direction in ("easier", "harder"):
            some = [item for item in chosen if item.way == way and item.direction == direction]
            moved, hits = sum(item.moved for item in some), sum(item.is_hit for item in some)
            cells.append(f"{moved / len(some):.2f} / {hits / len(some):.2f} of {len(some)}" if some else "-")
        table.add_row(way, *cells)
    return table
