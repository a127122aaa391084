"""Run folders: `runs/<experiment>/version_N`, the latest checkpoint, and the rows that a resumed run continues."""

from __future__ import annotations

import csv
import math
import os
import re
from pathlib import Path

import lightning as L

from rla_lightning.module import ClosedLoop
from rla_lightning.types import ConfigError

VERSION_VARIABLE = "RLA_RUN_FOLDER"  # tells the other processes of a run which folder the first one made


def new_run_folder(root: Path) -> Path:
    """Make the next free `version_N` under `root`; two runs that start together get two folders."""
    if os.environ.get("LOCAL_RANK", "0") != "0" and VERSION_VARIABLE in os.environ:
        return Path(os.environ[VERSION_VARIABLE])
    number = max((version for version, _ in versions(root)), default=-1) + 1
    while True:
        folder = root / f"version_{number}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
            continue
        os.environ[VERSION_VARIABLE] = str(folder)
        return folder


def versions(root: Path) -> list[tuple[int, Path]]:
    """The run folders of an experiment, oldest first."""
    found = [(int(match[1]), path) for path in root.glob("version_*") if (match := re.fullmatch(r"version_(\d+)", path.name))]
    return sorted(found)


def last_checkpoint(root: Path) -> Path:
    """`checkpoints/last.ckpt` of the newest run that has one."""
    for _, folder in reversed(versions(root)):
        checkpoint = folder / "checkpoints" / "last.ckpt"
        if checkpoint.is_file():
            return checkpoint
    raise ConfigError(f"ckpt_path: last, but no run in {root} has checkpoints/last.ckpt")


def logged_rows(metrics_file: Path, until: int) -> list[dict[str, float]]:
    """Rows of a metrics.csv up to iteration `until`, without its empty cells."""
    if not metrics_file.is_file():
        return []
    with metrics_file.open(newline="") as file:
        rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    return [row for row in rows if row.get("step", math.inf) <= until]


class ReplayMetrics(L.Callback):
    """Starts a resumed run's logs with the rows of the run that it continues, so that its curves are whole."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.ckpt_path is None or not trainer.is_global_zero:
            return
        assert isinstance(pl_module, ClosedLoop)
        source = Path(trainer.ckpt_path).parent.parent / "metrics.csv"
        for row in logged_rows(source, int(pl_module.iteration)):
            step = int(row.pop("step"))
            for logger in trainer.loggers:
                logger.log_metrics(row, step=step)
        for logger in trainer.loggers:
            logger.save()
