"""What a study found: table.md, study.json and figures, over the runs that are finished."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ablation_study import Study
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from statistics_of_runs import PairedDifference, interval, paired_difference, read_summary

from rla_lightning.runs import logged_rows

AT_DIFFICULTY = "rollout/success_rate_at/"
SPLITS = {"in domain": "in_domain", "out of domain": "out_of_distribution"}
CURVES = {  # picture: its panels, with a column of metrics.csv each
    "success_curves": {f"success, {name} (validation)": f"validation/{of}/rollout/success_rate" for name, of in SPLITS.items()},
    "difficulty": {"mean difficulty of the pool": "env/difficulty"},
    "judge": {
        "judge, true positive rate (validation)": "validation/in_domain/reward_model/true_positive_rate",
        "judge, true negative rate (validation)": "validation/in_domain/reward_model/true_negative_rate",
    },
}
NOTES = """\
Mean ± half-width of the 95% interval over seeds (Student's t); (n=2) where only two of a variant's runs have the number.
"""
NOTES_ON_CONTRASTS = """\
Differences are paired by seed. Same sign: seeds whose difference has the sign of the mean. p: exact two-sided sign-flip
test over the seeds, at least 2/2^n for n of them, not corrected for the number of rows. What is equal on every seed is left out.
"""


@dataclass(frozen=True)
class Finished:
    """What one run left."""

    folder: Path
    summary: Mapping[str, Any]
    curves: Mapping[str, Mapping[int, float]]  # by column of metrics.csv and iteration, where defined


def read_run(folder: Path) -> Finished:
    curves: dict[str, dict[int, float]] = {}
    for row in logged_rows(folder / "metrics.csv", sys.maxsize):
        for name, value in row.items():
            if not math.isnan(value):
                curves.setdefault(name, {})[int(row["step"])] = value
    return Finished(folder, read_summary(folder), curves)


def measured(run: Finished, measures: Mapping[str, str]) -> dict[str, float]:
    """A run's numbers by label; NaN where it has none, nothing where a * stands for nothing."""
    numbers: dict[str, float] = {}
    for label, source in measures.items():
        kind, _, metric = source.partition(":")
        if not metric.endswith("*"):
            numbers[label] = _number(run, kind, metric)
            continue
        stem = metric.removesuffix("*")
        for name in sorted(name for name in _names(run, kind) if name.startswith(stem)):
            numbers[label.replace("*", name.removeprefix(stem))] = _number(run, kind, name)
    return numbers


def _names(run: Finished, kind: str) -> Sequence[str]:
    if kind in ("mean", "last"):
        return list(run.curves)
    return list(run.summary) if kind == "summary" else list(run.summary["test"]["after"])


def _number(run: Finished, kind: str, metric: str) -> float:
    before, after = run.summary["test"]["before"], run.summary["test"]["after"]
    if kind in ("mean", "last"):
        values = list(run.curves.get(metric, {}).values()) or [math.nan]
        return values[-1] if kind == "last" else float(np.mean(values))
    if kind == "gain":
        return after.get(metric, math.nan) - before.get(metric, math.nan)
    return {"before": before, "after": after, "summary": run.summary}[kind].get(metric, math.nan)


def write_table(study: Study, folders: Mapping[str, Mapping[int, Path]]) -> Path:
    """Of the newest finished run of each variant and seed; the place of the table."""
    order = [variant.name for variant in study.variants if folders.get(variant.name)]
    runs = {name: {seed: read_run(folders[name][seed]) for seed in sorted(folders[name])} for name in order}
    numbers = {name: {s: measured(run, study.measures) for s, run in of.items()} for name, of in runs.items()}
    labels = list(dict.fromkeys(label for of in numbers.values() for one in of.values() for label in one))
    columns = {name: {label: _column(of, label) for label in labels} for name, of in numbers.items()}
    differences = {
        (of, minus): {label: paired_difference(columns[of][label], columns[minus][label]) for label in labels}
        for of, minus in study.contrasts
        if of in columns and minus in columns
    }
    table = study.runs / "table.md"
    table.write_text("\n".join([NOTES, *_rows(columns, labels), "", *_contrasts(differences)]) + "\n")
    content = {
        "variants": {
            name: {
                "runs": {s: {"folder": str(run.folder), "numbers": numbers[name][s]} for s, run in of.items()},
                "measures": {label: _statistics(columns[name][label]) for label in labels},
            }
            for name, of in runs.items()
        },
        "contrasts": [
            {"of": of, "minus": minus, "measures": {label: asdict(found) for label, found in rows.items() if found}}
            for (of, minus), rows in differences.items()
        ],
    }
    (study.runs / "study.json").write_text(json.dumps(_without_nan(content), indent=2) + "\n")
    for name, panels in CURVES.items():
        draw_curves(panels, {variant: list(of.values()) for variant, of in runs.items()}, study.runs / f"{name}.png")
    draw_difficulty({name: list(of.values()) for name, of in runs.items()}, study.runs / "success_by_difficulty.png")
    return table


def _column(runs: Mapping[int, Mapping[str, float]], label: str) -> dict[int, float]:
    return {seed: numbers.get(label, math.nan) for seed, numbers in runs.items()}


def _defined(column: Mapping[int, float]) -> list[float]:
    return [value for value in column.values() if not math.isnan(value)]


def _statistics(column: Mapping[int, float]) -> dict[str, float]:
    values = _defined(column)
    mean, half_width = interval(values) if values else (math.nan, math.nan)
    return {"mean": mean, "half_width": half_width, "runs": len(values)}


def _rows(columns: Mapping[str, Mapping[str, Mapping[int, float]]], labels: Sequence[str]) -> list[str]:
    seeds = {name: ", ".join(map(str, next(iter(column.values()), ()))) for name, column in columns.items()}
    lines = ["| | " + " | ".join(f"{name} (seeds {seeds[name]})" for name in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for label in labels:
        if any(_defined(column[label]) for column in columns.values()):
            lines.append(f"| {label} | " + " | ".join(_cell(column[label]) for column in columns.values()) + " |")
    return lines


def _cell(column: Mapping[int, float]) -> str:
    values = _defined(column)
    if not values:
        return "-"
    return _mean_and_half_width(*interval(values)) + (f" (n={len(values)})" if len(values) < len(column) else "")


def _mean_and_half_width(mean: float, half_width: float, sign: str = "") -> str:
    digits = 3 if abs(mean) < 10 else 1 if abs(mean) < 100 else 0
    return f"{mean:{sign}.{digits}f}" + ("" if math.isnan(half_width) else f" ± {half_width:.{digits}f}")


def _contrasts(differences: Mapping[tuple[str, str], Mapping[str, PairedDifference | None]]) -> list[str]:
    lines = [NOTES_ON_CONTRASTS] if differences else []
    for (of, minus), rows in differences.items():
        lines += [f"### {of} minus {minus}", "", "| | difference | same sign | p |", "|---|---|---|---|"]
        for label, found in rows.items():
            if found is not None and (found.mean != 0 or found.half_width > 0):
                difference = _mean_and_half_width(found.mean, found.half_width, "+")
                lines.append(f"| {label} | {difference} | {found.same_sign} of {found.seeds} | {found.p:.3f} |")
        lines.append("")
    return lines


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def draw_curves(panels: Mapping[str, str], runs: Mapping[str, Sequence[Finished]], picture: Path) -> None:
    """A panel per column, in it a variant's mean over seeds with its 95% interval, over iterations."""
    figure = Figure(figsize=(8 * len(panels), 5), layout="constrained")
    for axes, (title, column) in zip(figure.subplots(1, len(panels), squeeze=False).flat, panels.items(), strict=True):
        for name, of in runs.items():
            curves = [run.curves[column] for run in of if column in run.curves]
            steps = sorted({step for curve in curves for step in curve})
            if not steps:
                continue
            found = [interval([curve[step] for curve in curves if step in curve]) for step in steps]
            mean, half_width = np.array(found).T
            (line,) = axes.plot(steps, mean, marker="o", markersize=3, label=name)
            axes.fill_between(steps, mean - half_width, mean + half_width, color=line.get_color(), alpha=0.12, linewidth=0)
        _finish(axes, title, "iteration")
    figure.savefig(picture, dpi=100)


def draw_difficulty(runs: Mapping[str, Sequence[Finished]], picture: Path) -> None:
    """Success after training in bins of difficulty, a panel per test set; no picture without such numbers."""
    after = {name: [run.summary["test"]["after"] for run in of] for name, of in runs.items()}
    every_name = {metric for of in after.values() for one in of for metric in one if f"/{AT_DIFFICULTY}" in metric}
    if not every_name:
        return
    figure = Figure(figsize=(16, 5), layout="constrained")
    for axes, (title, split) in zip(figure.subplots(1, len(SPLITS)), SPLITS.items(), strict=True):
        bins = sorted(name for name in every_name if name.startswith(f"{split}/"))
        if not bins:
            continue
        for place, (name, of) in enumerate(after.items()):
            columns = [[one[metric] for one in of if not math.isnan(one.get(metric, math.nan))] for metric in bins]
            found = [interval(column) if column else (math.nan, math.nan) for column in columns]
            mean, half_width = np.array(found).T
            x = np.arange(len(bins)) + 0.04 * (place - (len(after) - 1) / 2)  # or the intervals hide each other
            axes.errorbar(x, mean, yerr=half_width, marker="o", markersize=4, capsize=2, label=name)
        axes.set_xlim(-0.5, len(bins) - 0.5)
        axes.set_xticks(range(len(bins)), [metric.partition(AT_DIFFICULTY)[2] for metric in bins])
        _finish(axes, f"success after training, {title}", "difficulty")
    figure.savefig(picture, dpi=100)


def _finish(axes: Axes, title: str, x_label: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(x_label)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")
