"""How well the judge's votes tell successful from failed rollouts (paper, section 4: reward precision).

p_plus = P(vote +1 | step of a success), p_minus = P(vote -1 | step of a failure), mu = p_plus + p_minus. With more votes
per step the precision goes to 1 iff mu > 1.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import TypeVar

from rla_lightning.types import LOST, WON

Key = TypeVar("Key", bound=Hashable)
MAX_DEGREES = 200  # Student's t beyond is taken there: .6% too wide at level .95, never too narrow


@dataclass(frozen=True)
class RolloutVotes:
    """The parsed votes on the steps of one rollout, the unit that varies independently."""

    outcome: float  # WON or LOST
    plus: int  # votes of +1
    votes: int  # of +1 or -1

    def __post_init__(self) -> None:
        if self.outcome not in (WON, LOST):
            raise ValueError(f"an outcome is +1 or -1, got {self.outcome}")
        if not 0 <= self.plus <= self.votes:
            raise ValueError(f"need 0 <= plus <= votes, got {self.plus} of {self.votes}")


@dataclass(frozen=True)
class Interval:
    """An estimate with the ends of its confidence interval; None where nothing tells."""

    value: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class PrecisionEstimate:
    """How often votes agree with the outcome, with intervals."""

    p_plus: Interval
    p_minus: Interval
    mu: Interval


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


def rollout_votes(outcomes: Sequence[float], scores: Sequence[Sequence[Sequence[int | None]]]) -> list[RolloutVotes]:
    """Count the votes on each rollout.

    Args:
        outcomes: [G] in {+1, -1}, one per trajectory.
        scores: [G][K_g][m] votes in {+1, -1, None}.

    Raises:
        ValueError: an outcome other than +1 and -1, or lengths that differ.
    """
    counts = []
    for outcome, steps in zip(outcomes, scores, strict=True):
        parsed = [score for votes in steps for score in votes if score is not None]
        counts.append(RolloutVotes(outcome, plus=parsed.count(1), votes=len(parsed)))
    return counts


def count_votes(outcomes: Sequence[float], scores: Sequence[Sequence[Sequence[int | None]]]) -> VoteCounts:
    """Count the votes that agree with the verified outcome of their rollout; arguments and errors as `rollout_votes`."""
    rollouts = rollout_votes(outcomes, scores)
    won = [rollout for rollout in rollouts if rollout.outcome == WON]
    lost = [rollout for rollout in rollouts if rollout.outcome == LOST]
    return VoteCounts(
        plus_on_won=sum(rollout.plus for rollout in won),
        votes_on_won=sum(rollout.votes for rollout in won),
        minus_on_lost=sum(rollout.votes - rollout.plus for rollout in lost),
        votes_on_lost=sum(rollout.votes for rollout in lost),
    )


def precision_intervals(rollouts: Sequence[RolloutVotes], level: float = 0.95) -> PrecisionEstimate:
    """p_plus, p_minus and mu with intervals that allow for votes on one rollout being alike.

    Each rate is `clustered_rate` over its rollouts. Won and lost rollouts are separate, so mu takes the recovered variances
    of both (Newcombe 1998; Zou and Donner 2008), which keeps its interval within [0, 2]:

        low = mu - sqrt((p_plus - low_plus)^2 + (p_minus - low_minus)^2),  high likewise

    The interval is about further rollouts of the same tasks. For one about further tasks, whose rollouts are alike as
    well, give `pooled_votes` by task: where tasks differ, plain rollouts covered .74 instead of .95 (test_precision.py).

    Args:
        rollouts: of any number of tasks; those without parsed votes count for nothing.
        level: in (0, 1), the share of such intervals that cover the truth.

    Raises:
        ValueError: a level outside (0, 1).
    """
    won = [rollout for rollout in rollouts if rollout.outcome == WON]
    lost = [rollout for rollout in rollouts if rollout.outcome == LOST]
    p_plus = clustered_rate([r.plus for r in won], [r.votes for r in won], level)
    p_minus = clustered_rate([r.votes - r.plus for r in lost], [r.votes for r in lost], level)
    return PrecisionEstimate(p_plus, p_minus, _sum_of(p_plus, p_minus))


def precision_by(rollouts: Sequence[RolloutVotes], keys: Sequence[Key], level: float = 0.95) -> dict[Key, PrecisionEstimate]:
    """`precision_intervals` of the rollouts that share a key, such as their task or the bin of its difficulty.

    Args:
        rollouts: [N].
        keys: [N], one per rollout; groups come in the order of their first rollout.
        level: of each interval on its own, in (0, 1).

    Raises:
        ValueError: lengths that differ, or a level outside (0, 1).
    """
    groups: dict[Key, list[RolloutVotes]] = {}
    for rollout, key in zip(rollouts, keys, strict=True):
        groups.setdefault(key, []).append(rollout)
    return {key: precision_intervals(group, level) for key, group in groups.items()}


def pooled_votes(rollouts: Sequence[RolloutVotes], keys: Sequence[Hashable]) -> list[RolloutVotes]:
    """The sums over the rollouts that share a key and an outcome, so that tasks become the clusters of `precision_intervals`.

    A task's won and lost rollouts then stand for themselves: where tasks that are judged well when won are so when lost,
    the interval of mu is somewhat too narrow.

    Args:
        rollouts: [N].
        keys: [N], one per rollout.

    Raises:
        ValueError: lengths that differ.
    """
    sums: dict[tuple[Hashable, float], tuple[int, int]] = {}
    for rollout, key in zip(rollouts, keys, strict=True):
        plus, votes = sums.get((key, rollout.outcome), (0, 0))
        sums[key, rollout.outcome] = plus + rollout.plus, votes + rollout.votes
    return [RolloutVotes(outcome, plus, votes) for (_, outcome), (plus, votes) in sums.items()]


def clustered_rate(hits: Sequence[int], sizes: Sequence[int], level: float = 0.95) -> Interval:
    """A share with a confidence interval when hits of one cluster are alike: Wilson's, on the effective sample size.

        p = sum_c h_c / sum_c n_c
        v = C / (C - 1) sum_c (h_c - p n_c)^2 / (sum_c n_c)^2       linearised variance of the ratio over C clusters
        n_eff = min(p (1 - p) / v, sum_c n_c)                       at most the binomial's (Korn and Graubard 1998)
        (p + t^2 / 2 n_eff -+ t sqrt(p (1 - p) / n_eff + t^2 / 4 n_eff^2)) / (1 + t^2 / n_eff),  t of C - 1 degrees

    p -+ t sqrt(v) is what this tends to with many clusters; with few, or p near an edge, it leaves [0, 1] and covers too
    seldom. Where p is 0 or 1 the sample says nothing about v; then hits of a cluster count as all alike, which is the
    widest: n_eff = (sum_c n_c)^2 / sum_c n_c^2.

    Args:
        hits: [C] per cluster.
        sizes: [C] trials per cluster; empty clusters are left out.
        level: in (0, 1).

    Returns:
        Without any trial three None; with one cluster only its share, because nothing tells how clusters vary.

    Raises:
        ValueError: hits outside 0..size, lengths that differ, or a level outside (0, 1).
    """
    if not 0.0 < level < 1.0:
        raise ValueError(f"level must be in (0, 1), got {level}")
    for hit, size in zip(hits, sizes, strict=True):
        if not 0 <= hit <= size:
            raise ValueError(f"need 0 <= hits <= size, got {hit} of {size}")
    clusters = [(hit, size) for hit, size in zip(hits, sizes, strict=True) if size]
    total, count = sum(size for _, size in clusters), len(clusters)
    if count < 2:
        return Interval(clusters[0][0] / total if clusters else None, None, None)
    p = sum(hit for hit, _ in clusters) / total
    variance = count / (count - 1) * sum((hit - p * size) ** 2 for hit, size in clusters) / total**2
    if p in (0.0, 1.0):
        effective = total**2 / sum(size**2 for _, size in clusters)
    else:
        effective = total if variance * total <= p * (1.0 - p) else p * (1.0 - p) / variance
    ratio = student_t((1.0 + level) / 2.0, count - 1) ** 2 / effective
    centre = (p + ratio / 2.0) / (1.0 + ratio)
    half = math.sqrt(ratio * p * (1.0 - p) + ratio**2 / 4.0) / (1.0 + ratio)
    return Interval(p, max(0.0, centre - half), min(1.0, centre + half))


def _sum_of(a: Interval, b: Interval) -> Interval:
    """The sum of two independent estimates."""
    if a.value is None or b.value is None:
        return Interval(None, None, None)
    value = a.value + b.value
    if a.low is None or a.high is None or b.low is None or b.high is None:
        return Interval(value, None, None)
    return Interval(
        value, value - math.hypot(a.value - a.low, b.value - b.low), value + math.hypot(a.high - a.value, b.high - b.value)
    )


@lru_cache(maxsize=1024)
def student_t(probability: float, degrees: int) -> float:
    """The quantile of Student's t with whole degrees of freedom, for a probability in [1/2, 1).

        P(T <= t) = 1/2 + A / 2 with theta = atan(t / sqrt(degrees)) and the finite series
        even: A = sin theta (1 + cos^2/2 + 1*3 cos^4/(2*4) + ... up to cos^(degrees - 2))
        odd:  A = 2/pi (theta + sin theta (cos + 2/3 cos^3 + 2*4 cos^5/(3*5) + ... up to cos^(degrees - 2)))

    (Abramowitz and Stegun, 26.7.3 and 26.7.4.) Degrees beyond MAX_DEGREES count as MAX_DEGREES.

    Raises:
        ValueError: a probability outside [1/2, 1) or degrees < 1.
    """
    if not 0.5 <= probability < 1.0:
        raise ValueError(f"the probability must be in [1/2, 1), got {probability}")
    if degrees < 1:
        raise ValueError(f"degrees must be at least 1, got {degrees}")
    degrees = min(degrees, MAX_DEGREES)
    low, high = 0.0, math.pi / 2.0  # of theta, in which A increases
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (middle, high) if _central_mass(middle, degrees) < 2.0 * probability - 1.0 else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


def _central_mass(theta: float, degrees: int) -> float:
    """A = P(|T| <= sqrt(degrees) tan theta)."""
    is_odd = degrees % 2
    squared, term, total = math.cos(theta) ** 2, math.cos(theta) if is_odd else 1.0, 0.0
    for k in range(2 + is_odd, degrees + 1, 2):
        total += term
        term *= squared * (k - 1) / k
    return 2.0 / math.pi * (theta + math.sin(theta) * total) if is_odd else math.sin(theta) * total


def exact_precision(p_plus: float, p_minus: float, m: int) -> float:
    """Probability that a success's step has a higher mean score than a failure's, both with m independent votes.

        A = P(X > Y),  X ~ Binomial(m, p_plus) and Y ~ Binomial(m, 1 - p_minus) positive votes; ties count as failures

    Raises:
        ValueError: a probability outside [0, 1] or m < 1.
    """
    on_won = binomial_distribution(m, p_plus)
    on_lost = binomial_distribution(m, 1.0 - p_minus)
    return math.fsum(won * fewer for won, fewer in zip(on_won[1:], accumulate(on_lost), strict=False))


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


def binomial_distribution(m: int, p: float) -> list[float]:
    """P(Binomial(m, p) = k) for k = 0..m, m up to 1000.

    Raises:
        ValueError: a probability outside [0, 1] or m < 1.
    """
    if m < 1:
        raise ValueError(f"m must be at least 1, got {m}")
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"a probability must be in [0, 1], got {p}")
    return [math.comb(m, k) * p**k * (1.0 - p) ** (m - k) for k in range(m + 1)]
