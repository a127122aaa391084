"""From what programs make of unit tests to rewards of the tests, and how often a policy solves a problem.

m written tests, P programs of one task.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class UnitTestQuality:
    """How good written tests are; NaN where nothing tells."""

    accuracy: np.ndarray  # [m] p_c: 1.0 where all correct programs pass, else 0.0
    detection: np.ndarray  # [m] p_d: share of the wrong programs that fail


def unit_test_quality(passed: np.ndarray, is_correct: Sequence[bool]) -> UnitTestQuality:
    """Compare tests with the verified correctness of programs (paper, section 2: coding).

    Args:
        passed: [m, P] 1.0 passed, 0.0 failed, NaN not run.
        is_correct: [P] whether a program passes the hidden tests.

    Raises:
        ValueError: shapes that differ, or an entry that is neither 0, 1 nor NaN.
    """
    table = np.asarray(passed, dtype=np.float64)
    correct = np.asarray(is_correct, dtype=bool)
    if table.ndim != 2 or table.shape[1] != len(correct):
        raise ValueError(f"passed must be [m, {len(correct)}] for {len(correct)} programs, got shape {table.shape}")
    is_valid = np.isnan(table) | (table == 0.0) | (table == 1.0)
    if not is_valid.all():
        raise ValueError(f"passed must hold 0, 1 or NaN only, got {table[~is_valid][0]}")
    accuracy, detection = np.full(len(table), np.nan), np.full(len(table), np.nan)
    for j, row in enumerate(table):
        right, wrong = row[correct], row[~correct]
        right, wrong = right[~np.isnan(right)], wrong[~np.isnan(wrong)]
        if len(right):
            accuracy[j] = float(right.min() == 1.0)
        if len(wrong):
            detection[j] = 1.0 - wrong.mean()
    return UnitTestQuality(accuracy, detection)


def unit_test_rewards(passed: np.ndarray, is_correct: Sequence[bool]) -> np.ndarray:
    """Reward tests that tell right programs from wrong ones (paper, section 2: coding).

        r_j = p_c p_d - (1 - p_c) (1 - p_d)

    Returns:
        [m], NaN where there is no correct or no wrong program.
    """
    quality = unit_test_quality(passed, is_correct)
    p_c, p_d = quality.accuracy, quality.detection
    return p_c * p_d - (1.0 - p_c) * (1.0 - p_d)


def unit_test_advantages(rewards: np.ndarray, tie_tolerance: float = 1e-6) -> np.ndarray:
    """Standardise the rewards of one task's tests: population std, no epsilon, 0 for ties and for NaN."""
    array = np.asarray(rewards, dtype=np.float64)
    advantages = np.zeros(len(array))
    known = np.isfinite(array)
    if known.any():
        values = array[known]
        std = values.std()
        if std > tie_tolerance:
            advantages[known] = (values - values.mean()) / std
    return advantages


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased chance that one of k programs is right, when c of n were (arXiv 2107.03374, equation 1).

        1 - C(n - c, k) / C(n, k)

    Raises:
        ValueError: unless 1 <= k <= n and 0 <= c <= n.
    """
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"pass@k needs 1 <= k <= n and 0 <= c <= n, got n={n}, c={c}, k={k}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)
