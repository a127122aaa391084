"""Tabulate finished runs: `python scripts/compare.py runs/household runs/household_policy ...`.

One row per experiment over its seeds (the newest finished run of each): mean and 95% interval (Student's t) of the
reported test sets before and after, of the paired gain, and of training-time averages. With several experiments, also the
difference to the first one, paired by seed.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from statistics_of_runs import finished_runs, interval, read_summary

GAINS = {
    "success in domain": "success_in_domain",
    "success OOD": "success_ood",
    "process accuracy": "process_accuracy",
    "UT in domain": "ut",  # of a reward model that writes unit tests
    "UT OOD": "ut_ood",
    "Detect in domain": "detect",
    "Detect OOD": "detect_ood",
}
AVERAGES = {
    "groups with a signal": "rollout/groups_with_signal",
    "judge samples": "reward_model/samples",
    "invalid actions": "rollout/invalid_action_rate",
}


def read(folder: Path) -> dict[str, float]:
    """The numbers of one run, by row name; NaN where a run has none."""
    summary = read_summary(folder)
    numbers: dict[str, float] = {"seconds": summary["seconds"]}
    for name, key in GAINS.items():
        before, after = summary["before"].get(key, float("nan")), summary["after"].get(key, float("nan"))
        numbers |= {f"{name}, before": before, f"{name}, after": after, f"{name}, gain": after - before}
    test = summary["test"]["after"]
    for split in ("in_domain", "out_of_distribution"):
        for name in ("brier", "brier_start"):
            brier, constant = (test.get(f"{split}/critic/{name}{of}", float("nan")) for of in ("", "_constant"))
            numbers |= {f"critic {name}, {split}": brier, f"critic {name} below the best constant, {split}": constant - brier}
        for name in ("true_positive_rate", "true_negative_rate", "auc", "outcome_accuracy", "mu", "discrimination"):
            numbers[f"judge {name}, {split}"] = test.get(f"{split}/reward_model/{name}", float("nan"))
        numbers[f"right-step rate, {split}"] = test.get(f"{split}/rollout/right_step_rate", float("nan"))
        per_kind = f"{split}/rollout/success_rate/"
        numbers |= {
            f"success of {name.removeprefix(per_kind)}, {split}": test[name] for name in test if name.startswith(per_kind)
        }
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for name, key in AVERAGES.items():
        numbers[f"{name} (training mean)"] = float(np.mean([float(row[key]) for row in rows if row.get(key)]))
    return numbers | {"accepted": summary["accepted_tasks"], "proposed": summary["proposed_tasks"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("experiments", nargs="+", type=Path, help="folders of experiments, e.g. runs/household")
    arguments = parser.parse_args()
    found = {path.name: {seed: read(folder) for seed, folder in finished_runs(path).items()} for path in arguments.experiments}
    missing = [name for name, runs in found.items() if not runs]
    if missing:
        parser.error(f"no finished run in {', '.join(missing)}")
    table = Table(title="mean ± half-width of the 95% interval over seeds")
    table.add_column("")
    for name, runs in found.items():
        table.add_column(f"{name}\nseeds {', '.join(map(str, sorted(runs)))}")
    (base, base_runs), *others = found.items()
    every_run = [run for runs in found.values() for run in runs.values()]
    for row in (row for row in every_run[0] if all(row in run for run in every_run)):  # kinds of tasks may differ
        if all(np.isnan(run[row]) for run in every_run):
            continue
        table.add_row(row, *(_cell([run[row] for run in runs.values()]) for runs in found.values()))
    for name in GAINS:
        cells = [_difference(base_runs, runs, f"{name}, after") for _, runs in others]
        if others and not any("nan (" in cell for cell in cells):
            table.add_row(f"{name}, after, minus {base}", "", *cells)
    Console(width=60 + 30 * len(found)).print(table)


def _cell(values: Sequence[float]) -> str:
    mean, half = interval(values)
    return f"{mean:.3f} ± {half:.3f} (least {min(values):.3f})"


def _difference(base: dict[int, dict[str, float]], other: dict[int, dict[str, float]], row: str) -> str:
    seeds = sorted(base.keys() & other.keys())
    return _cell([other[seed][row] - base[seed][row] for seed in seeds]) if seeds else "no common seed"


if __name__ == "__main__":
    main()
