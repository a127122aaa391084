"""What the run is doing now: a live bar in a terminal, one line per iteration elsewhere."""

from __future__ import annotations

import math
import sys
import time
from typing import Any

import lightning as L
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rla_lightning.module import ClosedLoop


class LoopProgress(L.Callback):
    """Shows iteration, stage and success rate; silent on all processes but the first."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._success = math.nan
        self._start = time.monotonic()
        self._stage = ""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if not trainer.is_global_zero or not isinstance(pl_module, ClosedLoop):
            return
        pl_module.progress = self._show
        self._start = time.monotonic()
        if sys.stdout.isatty() and self._bar is None:
            self._bar = Progress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
            )
            self._loop = self._bar.add_task("iterations", total=trainer.max_epochs if stage == "fit" else None)
            self._now = self._bar.add_task("starting", total=1)
            self._bar.start()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        result = outputs["result"]
        self._success = result.metrics["rollout/success_rate"]
        if self._bar is not None:
            self._bar.update(self._loop, completed=result.iteration)
        elif trainer.is_global_zero:
            numbers = [f"success {self._success:.3f}"]
            for label, name in (("judge mu", "reward_model/mu"), ("critic brier", "critic/brier")):
                if name in result.metrics:
                    numbers.append(f"{label} {result.metrics[name]:.3f}")
            elapsed = time.monotonic() - self._start
            print(f"iteration {result.iteration}/{trainer.max_epochs}: {', '.join(numbers)} ({elapsed:.0f} s)", flush=True)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._stop()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._stop()  # Lightning calls no teardown then; a live bar would leave the terminal without a cursor

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _show(self, stage: str, done: int, total: int, success_rate: float) -> None:
        """Listens to `ClosedLoop.progress`."""
        if self._bar is not None:
            rate = self._success if math.isnan(success_rate) else success_rate
            text = stage if math.isnan(rate) else f"{stage} | success {rate:.2f}"
            self._bar.update(self._now, description=text, completed=done, total=total)
        elif stage.startswith("warm start") and stage != self._stage:
            print(f"{stage} ({time.monotonic() - self._start:.0f} s)", flush=True)
        self._stage = stage
