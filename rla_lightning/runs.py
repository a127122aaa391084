"""Run folders: `runs/<experiment>/version_N`, the latest checkpoint, and the rows that a resumed run continues."""

from __future__ import annotations

import csv
import io
import math
import os
import re
import shutil
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from rla_lightning.datamodule import EnvironmentDataModule
from rla_lightning.module import ClosedLoop
from rla_lightning.types import ConfigError

START_UP_FILES = re.compile(r"config\.yaml|hparams\.yaml|events\.out\.tfevents\..*")  # written before any work


def process_rank() -> int:
    """The rank of this process in its run, known before process groups exist."""
    node = int(os.environ.get("NODE_RANK", os.environ.get("GROUP_RANK", "0")))
    return int(getattr(rank_zero_only, "rank", 0)) or node  # only whether it is 0 matters where the launcher gives no rank


def new_run_folder(root: Path) -> Path:
    """Make the next free `version_N` under `root`; two runs that start together get two folders.

    Only the first process of a run makes one; the loggers of the others write nothing and ask the first where it is.
    """
    number = max((version for version, _ in versions(root)), default=-1) + 1
    while process_rank() == 0:
        try:
            (root / f"version_{number}").mkdir(parents=True)
        except FileExistsError:
            number += 1
            continue
        break
    return root / f"version_{number}"


def discard_unused(folder: Path) -> None:
    """Remove the folder of a run that failed before it did any work; an experiment's empty folder goes with it."""
    if process_rank() != 0 or not folder.is_dir():
        return
    if all(path.is_file() and START_UP_FILES.fullmatch(path.name) for path in folder.iterdir()):
        shutil.rmtree(folder)
        for parent in (folder.parent, folder.parent.parent):
            if not any(parent.iterdir()):
                parent.rmdir()


def versions(root: Path) -> list[tuple[int, Path]]:
    """The run folders of an experiment, oldest first."""
    found = [(int(match[1]), path) for path in root.glob("version_*") if (match := re.fullmatch(r"version_(\d+)", path.name))]
    return sorted(found)


def last_checkpoint(root: Path) -> Path:
    """`checkpoints/last.ckpt` of the newest run that has one."""
    for _, folder in reversed(versions(root)):
        checkpoint = folder / "checkpoints" / "last.ckpt"
        if checkpoint.exists():  # a folder when every process saved its own shard
            return checkpoint
    raise ConfigError(f"ckpt_path: last, but no run in {root} has checkpoints/last.ckpt")


def check_checkpoint(path: Path, weights_only: bool) -> None:
    """Raise ConfigError unless Lightning can load the checkpoint.

    Args:
        path: a file, or a folder of shards.
        weights_only: refuse pickled objects, which run code when they are loaded.
    """
    if not path.exists():
        raise ConfigError(f"ckpt_path {str(path)!r} does not exist")
    file = path / "meta.pt" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"ckpt_path {str(path)!r} is not a checkpoint: the folder has no meta.pt")
    try:
        content: Any = torch.load(file, map_location="cpu", weights_only=weights_only, mmap=True)
    except (OSError, EOFError, KeyError, RuntimeError, ValueError, UnpicklingError) as error:
        if refused := re.search(r"GLOBAL (\S+)", str(error)):
            raise ConfigError(f"ckpt_path {str(path)!r} holds an object that may run any code: {refused[1]}") from error
        raise ConfigError(f"ckpt_path {str(path)!r} cannot be read, it is damaged or not a checkpoint") from error
    missing = {"epoch", "loops"} - content.keys() if isinstance(content, dict) else {"epoch"}
    if missing:
        raise ConfigError(f"ckpt_path {str(path)!r} is not a checkpoint of a run: it has no {min(missing)!r}")


def _task_metrics(datamodule: EnvironmentDataModule) -> dict[str, float]:
    """What the module logs about the tasks, in the precision in which Lightning logs."""
    return {f"env/{name}": torch.tensor(value).item() for name, value in datamodule.statistics().items()}


def logged_rows(metrics_file: Path, until: int) -> list[dict[str, float]]:
    """Rows of a metrics.csv up to iteration `until`, without its empty cells and without a line cut short by a crash."""
    if not metrics_file.is_file():
        return []
    complete, _, _ = metrics_file.read_text().rpartition("\n")
    reader = csv.DictReader(io.StringIO(complete))
    rows = [{name: float(value) for name, value in row.items() if value} for row in reader]
    return [row for row in rows if row.get("step", math.inf) <= until]


class ReplayMetrics(L.Callback):
    """Starts a resumed run's logs with the rows of the run that it continues, so that its curves are whole."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.ckpt_path is None or not trainer.is_global_zero:
            return
        assert isinstance(pl_module, ClosedLoop)
        iteration = int(pl_module.iteration)
        rows = logged_rows(Path(trainer.ckpt_path).parent.parent / "metrics.csv", iteration)
        datamodule = trainer.datamodule  # type: ignore[attr-defined]
        assert isinstance(datamodule, EnvironmentDataModule)
        if rows and not any("env/proposed" in row for row in rows if row["step"] == iteration):
            # killed after the checkpoint was saved and before the same epoch's row about the tasks was
            rows.append({"step": iteration, **_task_metrics(datamodule)})
        for row in rows:
            step = int(row.pop("step"))
            for logger in trainer.loggers:
                logger.log_metrics(row, step=step)
        for logger in trainer.loggers:
            logger.save()
