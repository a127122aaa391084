"""How well the judge's votes tell successful from failed rollouts (paper, section 4: reward precision).

p_plus = P(vote +1 | step of a success), p_minus = P(vote -1 | step of a failure), mu = p_plus + p_minus. With more votes
per step the precision goes to 1 iff mu > 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rla_lightning.types import LOST, WON


@dataclass(frozen=True)
class VoteCounts:
    """Parsed votes on won and on lost rollouts; unparsable votes are not counted."""

    plus_on_won: int
    votes_on_won: int
    minus_on_lost: int
    votes_on_lost: int

    @property
    def p_plus(self) -> float | None:
        """P(vote +1 | step of a success); None without such votes."""
        return self.plus_on_won / self.votes_on_won if self.votes_on_won else None

    @property
    def p_minus(self) -> float | None:
        """P(vote -1 | step of a failure); None without such votes."""
        return self.minus_on_lost / self.votes_on_lost if self.votes_on_lost else None

    @property
    def mu(self) -> float | None:
        """p_plus + p_minus in [0, 2], above 1 when the votes carry information; None when either is."""
        if self.p_plus is None or self.p_minus is None:
            return None
        return self.p_plus + self.p_minus


def count_votes(outcomes: Sequence[float], scores: Sequence[Sequence[Sequence[int | None]]]) -> VoteCounts:
    """Count the votes that agree with the verified outcome of their rollout.

    Args:
        outcomes: [G] in {+1, -1}, one per trajectory.
        scores: [G][K_g][m] votes in {+1, -1, None}.

    Raises:
        ValueError: an outcome other than +1 and -1, or lengths that differ.
    """
    plus_on_won = votes_on_won = minus_on_lost = votes_on_lost = 0
    for outcome, steps in zip(outcomes, scores, strict=True):
        parsed = [score for votes in steps for score in votes if score is not None]
        if outcome == WON:
            plus_on_won += parsed.count(1)
            votes_on_won += len(parsed)
        elif outcome == LOST:
            minus_on_lost += parsed.count(-1)
            votes_on_lost += len(parsed)
        else:
            raise ValueError(f"an outcome is +1 or -1, got {outcome}")
    return VoteCounts(plus_on_won, votes_on_won, minus_on_lost, votes_on_lost)


def exact_precision(p_plus: float, p_minus: float, m: int) -> float:
    """Probability that a success's step has a higher mean score than a failure's, both with m independent votes.

        A = P(X > Y),  X ~ Binomial(m, p_plus) and Y ~ Binomial(m, 1 - p_minus) positive votes; ties count as failures

    Raises:
        ValueError: a probability outside [0, 1] or m < 1.
    """
    on_won = _binomial_distribution(m, p_plus)
    on_lost = _binomial_distribution(m, 1.0 - p_minus)
    return math.fsum(on_won[x] * math.fsum(on_lost[:x]) for x in range(1, m + 1))


def paper_bound(mu: float, m: int) -> float:
    """The paper's lower bound of the precision (section 4): A >= 1 - exp(-m (mu - 1)^2 / 4) for mu > 1, else 0.

    Raises:
        ValueError: mu outside [0, 2] or m < 1.
    """
    return _exponential_bound(mu, m, 4.0)


def hoeffding_bound(mu: float, m: int) -> float:
    """Hoeffding's tighter lower bound: A >= 1 - exp(-m (mu - 1)^2 / 2) for mu > 1, else 0.

    The m differences of a success's and a failure's vote lie in [-2, 2] and have mean 2 (mu - 1), so
    P(their mean <= 0) <= exp(-2 m (2 (mu - 1))^2 / 4^2).

    Raises:
        ValueError: mu outside [0, 2] or m < 1.
    """
    return _exponential_bound(mu, m, 2.0)


def _exponential_bound(mu: float, m: int, divisor: float) -> float:
    if not 0.0 <= mu <= 2.0:
        raise ValueError(f"mu must be in [0, 2], got {mu}")
    if m < 1:
        raise ValueError(f"m must be at least 1, got {m}")
    return -math.expm1(-m * (mu - 1.0) ** 2 / divisor) if mu > 1.0 else 0.0


def _binomial_distribution(count: int, p: float) -> list[float]:
    if count < 1:
        raise ValueError(f"m must be at least 1, got {count}")
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"a probability must be in [0, 1], got {p}")
    return [math.comb(count, k) * p**k * (1.0 - p) ** (count - k) for k in range(count + 1)]
