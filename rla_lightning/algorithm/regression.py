"""Logistic regression of success counts, and how good predicted success probabilities are."""

from __future__ import annotations

import numpy as np


def fit_logistic(
    features: np.ndarray, successes: np.ndarray, rollouts: np.ndarray, weights: np.ndarray, ridge: float = 1.0
) -> np.ndarray:
    """Coefficients of P(success) = sigmoid(b_0 + x . b) that minimise the penalised negative log-likelihood.

        sum_i w_i [n_i log(1 + exp(z_i)) - s_i z_i] + ridge / 2 |b|^2,  z = b_0 + x . b

    Newton's method with a halving line search: the objective is strictly convex and never goes up, so that separable data
    or a bad start cannot make it diverge. b_0 is penalised, too, as all rollouts may have failed.

    Args:
        features: [N, D].
        successes: [N], s.
        rollouts: [N], n.
        weights: [N], w, not negative.
        ridge: positive.

    Returns:
        [1 + D], b_0 first.

    Raises:
        ValueError: impossible counts, negative weights, a ridge that is not positive, or features that are not finite.
    """
    if not ridge > 0:
        raise ValueError(f"ridge must be positive, got {ridge}")
    if not np.isfinite(features).all():
        raise ValueError("features must be finite")
    if (successes < 0).any() or (successes > rollouts).any() or (weights < 0).any():
        raise ValueError("need 0 <= successes <= rollouts and weights of at least 0")
    design = np.column_stack([np.ones(len(features)), features])

    def objective(b: np.ndarray) -> float:
        z = design @ b
        return float(np.sum(weights * (rollouts * np.logaddexp(0.0, z) - successes * z)) + ridge / 2 * b @ b)

    b = np.zeros(design.shape[1])
    value = objective(b)
    for _ in range(100):
        p = sigmoid(design @ b)
        gradient = design.T @ (weights * (rollouts * p - successes)) + ridge * b
        hessian = (design.T * (weights * rollouts * p * (1 - p))) @ design + ridge * np.eye(len(b))
        step = np.linalg.solve(hessian, gradient)
        size = 1.0
        while size > 1e-10 and (lower := objective(b - size * step)) > value:
            size /= 2
        if size <= 1e-10:
            break
        b, change, value = b - size * step, value - lower, lower
        if change < 1e-10 * (1 + abs(value)):
            break
    return b


def predict_logistic(coefficients: np.ndarray, features: np.ndarray) -> np.ndarray:
    """Probabilities [N] of features [N, D] under coefficients [1 + D] of `fit_logistic`."""
    return sigmoid(coefficients[0] + features @ coefficients[1:])


def brier_score(predicted: np.ndarray, successes: np.ndarray, rollouts: np.ndarray) -> float:
    """Mean squared error of predicted probabilities over single rollouts; NaN without any.

    sum_i [s_i (1 - p_i)^2 + (n_i - s_i) p_i^2] / sum_i n_i
    """
    total = rollouts.sum()
    if total == 0:
        return float("nan")
    return float(np.sum(successes * (1 - predicted) ** 2 + (rollouts - successes) * predicted**2) / total)


def calibration_error(predicted: np.ndarray, successes: np.ndarray, rollouts: np.ndarray, bins: int = 5) -> float:
    """Expected calibration error: |mean prediction - success rate| in equal bins of the prediction, weighed by rollouts.

    Positive for a perfect predictor, too, by chance: about sqrt(bins / total rollouts). NaN without rollouts.
    """
    total = rollouts.sum()
    if total == 0:
        return float("nan")
    index = np.minimum((predicted * bins).astype(int), bins - 1)
    gaps = np.bincount(index, weights=rollouts * predicted - successes, minlength=bins)
    return float(np.abs(gaps).sum() / total)


def sigmoid(z: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0.0, -z))
