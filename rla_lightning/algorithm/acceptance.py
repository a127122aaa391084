"""Which tasks are out of the difficulty band, and which rewritten tasks to accept.

Success rates are successes / rollouts of the current policy. No rollouts (all ended by an error of the environment) is
no evidence: outside the band, no trigger, UNDECIDED.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from rla_lightning.types import Direction, Verdict


def in_band(successes: int, rollouts: int, low: float, high: float) -> bool:
    """Whether low <= successes / rollouts <= high (paper, section 3: the reward model trains on such tasks only).

    Raises:
        ValueError: counts that are impossible, or not 0 <= low < high <= 1.
    """
    _check(successes, rollouts, low, high)
    return rollouts > 0 and low <= successes / rollouts <= high


def trigger(successes: int, rollouts: int, low: float, high: float) -> Direction | None:
    """Which way a task should be rewritten (paper, section 3): rate > high "harder", rate < low "easier", else None.

    Raises:
        ValueError: counts that are impossible, or not 0 <= low < high <= 1.
    """
    _check(successes, rollouts, low, high)
    if rollouts == 0 or low <= successes / rollouts <= high:
        return None
    return "harder" if successes / rollouts > high else "easier"


def threshold(
    direction: Direction,
    parent_successes: int,
    parent_rollouts: int,
    successes: int,
    rollouts: int,
    *,
    low: float = 0.2,
    high: float = 0.8,
) -> Verdict:
    """Compare observed success rates, the paper's rule (section 3).

        harder  ACCEPT iff low <= acc(q') < acc(q)
        easier  ACCEPT iff acc(q) < acc(q') <= high and acc(q') > 0

    Blind to noise: at 8 rollouts an unchanged proposal is accepted as easier with probability .25, .39 and .61 at true
    success .05, .10 and .20, given that the parent's 8 rollouts called for it (test_acceptance.py enumerates it).

    Args:
        direction: which way q was to be rewritten.
        parent_successes: of q, when it triggered the proposal.
        parent_rollouts: of q, when it triggered the proposal.
        successes: of the proposal q'.
        rollouts: of the proposal q'.
        low: lower edge of the band of success rates.
        high: upper edge of the band of success rates.

    Returns:
        ACCEPT or REJECT; UNDECIDED only when either task has no rollouts.

    Raises:
        ValueError: counts that are impossible, not 0 <= low < high <= 1, or an unknown direction.
    """
    _check(parent_successes, parent_rollouts, low, high)
    _check(successes, rollouts, low, high)
    _check_direction(direction)
    if parent_rollouts == 0 or rollouts == 0:
        return "UNDECIDED"
    parent_rate, rate = parent_successes / parent_rollouts, successes / rollouts
    if direction == "harder":
        return "ACCEPT" if low <= rate < parent_rate else "REJECT"
    return "ACCEPT" if parent_rate < rate <= high else "REJECT"  # rate > parent_rate >= 0 implies rate > 0


def posterior(
    direction: Direction,
    parent_successes: int,
    parent_rollouts: int,
    successes: int,
    rollouts: int,
    *,
    low: float = 0.2,
    high: float = 0.8,
    level: float = 0.95,
    futility: float = 0.5,
) -> Verdict:
    """Accept once the rollouts make it probable enough that the proposal is what was asked for.

        P = posterior_probability(...);  ACCEPT iff P >= level,  REJECT iff P <= futility,  else UNDECIDED

    That a parent was selected for its extreme rollouts is not corrected for: give counts that were drawn afterwards.

    Args:
        direction: which way the parent was to be rewritten.
        parent_successes: of the parent.
        parent_rollouts: of the parent.
        successes: of the proposal.
        rollouts: of the proposal.
        low: lower edge of the band of success rates, bounds the rate of a harder proposal.
        high: upper edge of the band of success rates, bounds the rate of an easier proposal.
        level: in (0.5, 1).
        futility: in (0, level).

    Returns:
        The verdict; UNDECIDED also when either task has no rollouts.

    Raises:
        ValueError: as posterior_probability, or not 0 < futility < level and 0.5 < level < 1.
    """
    if not 0.5 < level < 1.0:
        raise ValueError(f"level must be in (0.5, 1), got {level}")
    if not 0.0 < futility < level:
        raise ValueError(f"futility must be in (0, {level}), got {futility}")
    probability = posterior_probability(direction, parent_successes, parent_rollouts, successes, rollouts, low=low, high=high)
    if parent_rollouts == 0 or rollouts == 0:
        return "UNDECIDED"
    if probability >= level:
        return "ACCEPT"
    return "REJECT" if probability <= futility else "UNDECIDED"


@lru_cache(maxsize=1 << 16)  # enumerations of a rule ask for the same counts again and again
def posterior_probability(
    direction: Direction,
    parent_successes: int,
    parent_rollouts: int,
    successes: int,
    rollouts: int,
    *,
    low: float = 0.2,
    high: float = 0.8,
) -> float:
    """Probability that the proposal's true rate moved the wanted way and did not overshoot the band.

        theta ~ Beta(1 + s, 1 + n - s) of the parent, theta' likewise of the proposal, independent
        harder  P(low <= theta' < theta) = integral_low^1 f'(x) P(theta > x) dx
        easier  P(theta < theta' <= high), which is `harder` of the failure rates with 1 - high for low

    With whole counts the integrand is a polynomial of degree parent_rollouts + rollouts + 1, so Gauss-Legendre
    quadrature on half as many nodes is exact up to rounding (below 1e-12 at up to 200 rollouts each).

    Raises:
        ValueError: counts that are impossible, not 0 <= low < high <= 1, or an unknown direction.
    """
    _check(parent_successes, parent_rollouts, low, high)
    _check(successes, rollouts, low, high)
    _check_direction(direction)
    if direction == "easier":
        parent_successes, successes, low = parent_rollouts - parent_successes, rollouts - successes, 1.0 - high
    nodes, node_weights = _gauss_legendre((parent_rollouts + rollouts) // 2 + 2)
    x = low + (1.0 - low) * (nodes + 1.0) / 2.0  # [-1, 1] -> [low, 1]
    density = (rollouts + 1) * _binomial(successes, rollouts, x)  # of Beta(1 + s, 1 + n - s)
    # P(theta > x) of Beta(1 + s, 1 + n - s) is P(Binomial(n + 1, x) <= s): positive terms, no cancellation.
    survival = sum(_binomial(k, parent_rollouts + 1, x) for k in range(parent_successes + 1))
    return min(1.0, float(np.sum(node_weights * density * survival) * (1.0 - low) / 2.0))


@lru_cache(maxsize=64)
def _gauss_legendre(count: int) -> tuple[np.ndarray, np.ndarray]:
    return np.polynomial.legendre.leggauss(count)


def _binomial(successes: int, rollouts: int, x: np.ndarray) -> np.ndarray:
    """P(Binomial(rollouts, x) = successes) for x strictly inside (0, 1), in log space against overflow."""
    failures = rollouts - successes
    log_count = math.lgamma(rollouts + 1) - math.lgamma(successes + 1) - math.lgamma(failures + 1)
    return np.exp(log_count + successes * np.log(x) + failures * np.log1p(-x))


def _check(successes: int, rollouts: int, low: float, high: float) -> None:
    if not 0 <= successes <= rollouts:
        raise ValueError(f"need 0 <= successes <= rollouts, got {successes} of {rollouts}")
    if not 0.0 <= low < high <= 1.0:
        raise ValueError(f"need 0 <= low < high <= 1, got low {low} and high {high}")


def _check_direction(direction: Direction) -> None:
    if direction not in ("harder", "easier"):
        raise ValueError(f"direction must be 'harder' or 'easier', got {direction!r}")
