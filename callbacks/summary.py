"""Measures the reported test sets before and after training: summary.json, curves.png and a small table."""

from __future__ import annotations

import csv
import json
import math
import time
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning as L
from rich.console import Console
from rich.table import Table

from rla_lightning.datamodule import EnvironmentDataModule
from rla_lightning.models.sizes import ModelSize, model_sizes
from rla_lightning.module import ClosedLoop

KEYS = {  # of summary.json: metric of the test sets
    "success_in_domain": "in_domain/rollout/success_rate",
    "success_ood": "out_of_distribution/rollout/success_rate",
    "process_accuracy": "in_domain/reward_model/process_accuracy",
    "outcome_accuracy": "in_domain/reward_model/outcome_accuracy",
    "mu": "in_domain/reward_model_on_policy/mu",
    "process_accuracy_on_policy": "in_domain/reward_model_on_policy/process_accuracy",
    "invalid_action_rate": "in_domain/rollout/invalid_action_rate",
    "ut": "in_domain/reward_model/ut",  # of a reward model that writes unit tests
    "detect": "in_domain/reward_model/detect",
    "ut_ood": "out_of_distribution/reward_model/ut",
    "detect_ood": "out_of_distribution/reward_model/detect",
    "critic_brier": "in_domain/critic/brier",
    "critic_brier_constant": "in_domain/critic/brier_constant",
}
CURVES = {  # panel: metrics of metrics.csv
    "success rate (validation)": (
        "validation/in_domain/rollout/success_rate",
        "validation/out_of_distribution/rollout/success_rate",
    ),
    "reward model (validation, in domain)": (
        "validation/in_domain/reward_model/process_accuracy",
        "validation/in_domain/reward_model/true_positive_rate",
        "validation/in_domain/reward_model/true_negative_rate",
        "validation/in_domain/reward_model/ut",
        "validation/in_domain/reward_model/detect",
    ),
    "critic (validation, in domain)": ("validation/in_domain/critic/brier", "validation/in_domain/critic/brier_constant"),
    "training tasks": ("rollout/success_rate", "rollout/invalid_action_rate", "env/difficulty"),
    "proposals": ("env/proposed", "env/accepted"),
    "policy update": ("policy/approx_kl", "policy/clip_fraction"),
}


class RunSummary(L.Callback):
    """Evaluates the test sets before the first and after the last iteration and writes what changed."""

    def __init__(self) -> None:
        self.before: dict[str, float] = {}
        self.seconds = 0.0
        self._start = time.monotonic()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._start = time.monotonic()

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for name, size in _sizes(pl_module).items():
            if trainer.is_global_zero:
                Console(soft_wrap=True).print(f"{name}: {size}", highlight=False)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self.before:  # a resumed run has it in its checkpoint
            self.before = _evaluate(trainer, pl_module)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        after = _evaluate(trainer, pl_module)
        log_dir = trainer.log_dir  # asks the first process, so all must
        if not trainer.is_global_zero or log_dir is None:
            return
        assert isinstance(pl_module, ClosedLoop)
        folder = Path(log_dir)
        datamodule = trainer.datamodule  # type: ignore[attr-defined]
        assert isinstance(datamodule, EnvironmentDataModule)
        summary = {
            "experiment": folder.parent.name,
            "seed": pl_module.seed,
            "seconds": round(self._elapsed(), 1),
            "epochs": trainer.current_epoch,
            "before": {key: self.before.get(metric, math.nan) for key, metric in KEYS.items()},
            "after": {key: after.get(metric, math.nan) for key, metric in KEYS.items()},
            "accepted_tasks": datamodule.pool.accepted,
            "proposed_tasks": datamodule.pool.proposed,
            "tokens_generated": int(pl_module.tokens_generated),
            "tokens_trained": int(pl_module.tokens_trained),
            "parameters": {name: asdict(size) for name, size in _sizes(pl_module).items()},
            "test": {"before": self.before, "after": after},
        }
        (folder / "summary.json").write_text(json.dumps(_without_nan(summary), indent=2) + "\n")
        if (folder / "metrics.csv").is_file():  # not every logger writes one
            draw_curves(folder / "metrics.csv", folder / "curves.png")
        _print_table(summary, folder)

    def state_dict(self) -> dict[str, Any]:
        return {"before": self.before, "seconds": self._elapsed()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.before, self.seconds = state_dict["before"], state_dict["seconds"]

    def _elapsed(self) -> float:
        return self.seconds + time.monotonic() - self._start


def draw_curves(metrics_file: Path, picture: Path) -> None:
    """The curves of metrics.csv over iterations, one panel per entry of CURVES."""
    from matplotlib.figure import Figure  # noqa: PLC0415  # imported late: half a second that only the end of a run needs

    points: dict[str, list[tuple[float, float]]] = defaultdict(list)
    with metrics_file.open(newline="") as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if value and name != "step":
                    points[name].append((float(row["step"]), float(value)))
    figure = Figure(figsize=(15, 8), layout="constrained")
    for axes, (title, names) in zip(figure.subplots(2, 3).flat, CURVES.items(), strict=True):
        for name in names:
            if points[name]:
                axes.plot(*zip(*points[name], strict=True), label=name.removeprefix("validation/"))
        axes.set_title(title)
        axes.set_xlabel("iteration")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize="small")
    figure.savefig(picture, dpi=100)


def _sizes(pl_module: L.LightningModule) -> dict[str, ModelSize]:
    assert isinstance(pl_module, ClosedLoop)
    factories = pl_module.optimizer_factories
    models = {name: getattr(pl_module, name) for name in factories}
    return model_sizes(models, [name for name, factory in factories.items() if factory is not None])


def _evaluate(trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, float]:
    assert isinstance(pl_module, ClosedLoop)
    datamodule = trainer.datamodule  # type: ignore[attr-defined]
    return {
        f"{batch.split}/{name}": value
        for batch in datamodule.evaluation_sets("test")
        for name, value in pl_module.evaluate(batch, "test").items()
    }


def _without_nan(value: Any) -> Any:
    """JSON has no NaN: a number that is not defined is null."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


def _print_table(summary: dict[str, Any], folder: Path) -> None:
    table = Table(
        title=f"{summary['experiment']}, seed {summary['seed']}: {summary['epochs']} epochs, {summary['seconds']:.0f} s"
    )
    for column in ("on the test sets", "before", "after"):
        table.add_column(column)
    for key in KEYS:
        if not (math.isnan(summary["before"][key]) and math.isnan(summary["after"][key])):
            table.add_row(key, f"{summary['before'][key]:.3f}", f"{summary['after'][key]:.3f}")
    before, after = summary["test"]["before"], summary["test"]["after"]
    for name in sorted(name for name in after if "/rollout/success_rate/" in name):  # per kind of task
        table.add_row(name.replace("/rollout/success_rate/", ", "), f"{before[name]:.3f}", f"{after[name]:.3f}")
    console = Console()
    console.print(table)
    console.print(f"accepted {summary['accepted_tasks']} of {summary['proposed_tasks']} proposed tasks")
    console.print(f"curves.png, summary.json, metrics.csv and checkpoints are in {folder}", soft_wrap=True)
