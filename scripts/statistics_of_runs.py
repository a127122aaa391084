"""Finished runs and the statistics over their seeds: intervals, paired differences, exact tests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# Of Student's t with 1, 2, ... degrees of freedom; with more, the last is a little too wide, never too narrow.
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


@dataclass(frozen=True)
class PairedDifference:
    """One number of two variants, compared seed by seed."""

    mean: float
    half_width: float  # of the 95% interval; NaN for fewer than two seeds
    seeds: int  # that both have, with the number defined
    same_sign: int  # seeds whose difference has the sign of the mean
    p: float  # of the two-sided sign-flip test


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half-width of the 95% interval; the half-width is NaN for fewer than two values."""
    array = np.array(values, dtype=float)
    if len(array) < 2:
        return float(array.mean()), float("nan")
    t = T_975[min(len(array) - 2, len(T_975) - 1)]
    return float(array.mean()), float(t * array.std(ddof=1) / np.sqrt(len(array)))


def sign_flip_p(differences: Sequence[float]) -> float:
    """Exact two-sided p of "the differences are symmetric around 0": the share of all 2^n signs with as extreme a sum."""
    sums = np.zeros(1)
    for difference in differences:
        sums = np.concatenate([sums + difference, sums - difference])
    rounding = 1e-9 * np.abs(differences).sum()
    return float(np.mean(np.abs(sums) >= abs(sum(differences)) - rounding))


def paired_difference(of: Mapping[int, float], minus: Mapping[int, float]) -> PairedDifference | None:
    """Of two variants' numbers by seed, over the seeds that both have; None if there is no such seed."""
    pairs = np.array([of[seed] - minus[seed] for seed in sorted(of.keys() & minus.keys())], dtype=float)
    pairs = pairs[~np.isnan(pairs)]
    if not len(pairs):
        return None
    mean, half_width = interval(list(pairs))
    same_sign = int(np.sum(pairs * mean > 0))
    return PairedDifference(mean, half_width, len(pairs), same_sign, sign_flip_p(list(pairs)))


def finished_runs(experiment: Path) -> dict[int, Path]:
    """The newest finished run of each seed."""
    folders = sorted(experiment.glob("version_*"), key=lambda path: int(path.name.removeprefix("version_")))
    return {json.loads((f / "summary.json").read_text())["seed"]: f for f in folders if (f / "summary.json").is_file()}


def read_summary(folder: Path) -> Any:
    """summary.json of a run; a number that it could not define is null there and NaN here."""
    return _defined(json.loads((folder / "summary.json").read_text()))


def _defined(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _defined(item) for key, item in value.items()}
    return float("nan") if value is None else value
