"""The claims that `scripts/theory.py` checks: each a function that computes its numbers and says what holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Literal

import numpy as np

from rla_lightning.algorithm.acceptance import threshold
from rla_lightning.algorithm.acceptance_power import AcceptancePower, acceptance_power
from rla_lightning.algorithm.precision import exact_precision, hoeffding_bound, paper_bound
from rla_lightning.algorithm.rewards import consistency_rewards, integrated_step_rewards
from rla_lightning.algorithm.theory import (
    dead_share,
    false_accept_rate,
    group_gradient,
    largest_outcome_weight,
    paper_vote_weight,
    vote_patterns,
    vote_weight,
    weight_ratio,
)
from rla_lightning.feedback import decide_one
from rla_lightning.settings import AcceptanceSettings
from rla_lightning.types import LOST, WON, Decision, Direction, Proposal

Scale = Literal["linear", "log", "logit"]
GROUP = 8  # rollouts per task
PAPER_PRECISIONS = {(0.6, 0.6, 3): "0.544", (0.7, 0.7, 3): "0.744", (0.8, 0.8, 3): "0.901", (0.7, 0.7, 33): "0.9995"}
PAPER_FALSE_ACCEPTS = {0.02: 0.13, 0.20: 0.61}
SAMPLES = 200_000
NUISANCES = 1000  # parameters that success does not depend on, for the gradient of a larger policy
# The share of unchanged proposals that a rule accepts, from (direction, true success): another rule is another column.
ACCEPTANCE_RULES: dict[str, Callable[[Direction, float], float]] = {
    "threshold": lambda direction, success: false_accept_rate(threshold, direction, success, GROUP),
    "posterior": lambda direction, success: _posterior(direction, success, success).accepted,
}


@dataclass(frozen=True)
class Check:
    text: str
    holds: bool


@dataclass(frozen=True)
class Curve:
    label: str
    x: Sequence[float]
    y: Sequence[float]
    style: str = "-"
    color: str | None = None  # None: the next one


@dataclass(frozen=True)
class Claim:
    """What was claimed, what was computed and whether it holds."""

    statement: str
    checks: tuple[Check, ...]
    limits: str  # what the numbers do not show
    columns: tuple[str, ...]
    rows: tuple[tuple[float | str, ...], ...]
    curves: tuple[Curve, ...]
    x_label: str
    y_label: str
    x_scale: Scale = "linear"
    y_scale: Scale = "linear"

    @property
    def holds(self) -> bool:
        return all(check.holds for check in self.checks)


def precision() -> Claim:
    """Exact reward precision against the paper's bound, Hoeffding's and samples."""
    rows, bounded, worst = [], True, 0.0
    for (p_plus, p_minus), m in product([(0.6, 0.6), (0.7, 0.7), (0.8, 0.8), (0.9, 0.3), (0.95, 0.6)], [1, 3, 9, 33]):
        mu, exact = p_plus + p_minus, exact_precision(p_plus, p_minus, m)
        hoeffding, paper = hoeffding_bound(mu, m), paper_bound(mu, m)
        sampled = _sampled_precision(p_plus, p_minus, m)
        bounded &= paper <= exact and hoeffding <= exact
        worst = max(worst, abs(sampled - exact) / math.sqrt(exact * (1.0 - exact) / SAMPLES))
        rows.append((p_plus, p_minus, mu, m, exact, hoeffding, paper, sampled))
    shares = [i / 20 for i in range(1, 21)]
    grid = product(shares, shares, (1, 2, 3, 5, 8, 16, 32))
    gaps = [
        exact_precision(a, b, m) - max(hoeffding_bound(a + b, m), paper_bound(a + b, m)) for a, b, m in grid if 1 < a + b <= 2
    ]
    reproduced = all(f"{exact_precision(*case):.{len(text) - 2}f}" == text for case, text in PAPER_PRECISIONS.items())
    votes = range(1, 61)
    curves = []
    for color, p in (("C0", 0.6), ("C1", 0.7), ("C2", 0.8)):
        curves.append(Curve(f"exact, p_plus = p_minus = {p}", votes, [exact_precision(p, p, m) for m in votes], "-", color))
        curves.append(Curve(f"Hoeffding, {p}", votes, [hoeffding_bound(2 * p, m) for m in votes], "--", color))
        curves.append(Curve(f"paper, {p}", votes, [paper_bound(2 * p, m) for m in votes], ":", color))
    return Claim(
        "for mu > 1 reward precision is at least 1 - exp(-m (mu - 1)^2 / 2), and so at least the paper's bound",
        (
            Check("the paper's figures .544, .744, .901 (m = 3) and .9995 (m = 33) to their last digit", reproduced),
            Check("no bound above the exact value in the table", bounded),
            Check(f"nor at {len(gaps):,} further points, least margin {min(gaps):.2g}", min(gaps) >= -1e-12),
            Check(f"samples within 4 standard errors, worst {worst:.1f}", worst <= 4.0),
        ),
        "that votes are independent, which the bounds assume: a judge's votes on one step, and steps of one rollout, are alike.",
        ("p_plus", "p_minus", "mu", "m", "exact", "Hoeffding", "paper", "sampled"),
        tuple(rows),
        tuple(curves),
        "votes per step m",
        "P(a success's step scores higher)",
    )


def convergence() -> Claim:
    """Where precision goes with more votes, on either side of mu = 1."""
    cases = [(0.9, 0.2), (0.6, 0.5), (0.3, 0.8), (0.5, 0.5), (0.7, 0.3), (0.9, 0.1), (0.6, 0.3), (0.1, 0.8)]
    counts = [1, 3, 9, 33, 101, 301, 801]
    table = {case: [exact_precision(*case, m) for m in counts] for case in cases}
    more = {case: values for case, values in table.items() if sum(case) > 1.05}
    even = {case: values for case, values in table.items() if abs(sum(case) - 1.0) < 1e-9}
    less = {case: values for case, values in table.items() if sum(case) < 0.95}
    ties = [(0.5 - values[-1]) * 4.0 * math.sqrt(math.pi * counts[-1] * p * (1.0 - p)) for (p, _), values in even.items()]
    # Swapping the roles of the two steps turns mu into 2 - mu, so that Hoeffding bounds the precision from above.
    above = [v <= 1.0 - hoeffding_bound(2.0 - sum(case), m) for case, vs in less.items() for v, m in zip(vs, counts, strict=True)]
    return Claim(
        "with more votes precision goes to 1 for mu > 1, to 1/2 from below for mu = 1, to 0 for mu < 1",
        (
            Check("mu > 1: above .98 at 801 votes", all(values[-1] > 0.98 for values in more.values())),
            Check("mu = 1: rises and stays below 1/2", all(_rises([*values, 0.5]) for values in even.values())),
            Check(
                "mu = 1: what is missing is half the ties, 1 / (4 sqrt(pi m p (1 - p))) to 1% at 801 votes",
                all(abs(share - 1.0) < 0.01 for share in ties),
            ),
            Check(
                "mu < 1: at most exp(-m (1 - mu)^2 / 2), below .02 at 801 votes",
                all(above) and all(v[-1] < 0.02 for v in less.values()),
            ),
        ),
        "how fast dependent votes converge; m is 3 in practice, where mu has to be well above 1.",
        ("p_plus", "p_minus", "mu", *(f"m = {m}" for m in counts)),
        tuple((*case, sum(case), *values) for case, values in table.items()),
        tuple(Curve(f"{a}, {b}: mu = {a + b:.1f}", counts, values) for (a, b), values in table.items()),
        "votes per step m",
        "exact precision",
        x_scale="log",
    )


def zscore() -> Claim:
    """Standardising R S over the votes of a step leaves the outcome's sign only."""
    counts, weights = range(1, 6), (0.25, 0.5, 1.0, 1.5, 2.0, 2.9, 3.0, 3.5)
    signed = [p for m, weight in product(counts, weights) for p in vote_patterns(m, weight) if p.reward * p.outcome > 0]
    same = all(np.allclose(p.advantages, p.supervised, rtol=0, atol=1e-9) for p in signed)
    edges = {m: largest_outcome_weight(m) for m in (3, 4, 5)}
    below = all(_outcome_alone(m, 0.999 * edge) == 1.0 for m, edge in edges.items())
    at_edge = all(_outcome_alone(m, edge) < 1.0 for m, edge in edges.items())
    overruled = [p for p in vote_patterns(3, 3.5) if any(p.advantages) and np.allclose(p.advantages, np.negative(p.supervised))]
    never = all(_outcome_alone(m, 100.0) == 1.0 for m in (1, 2))
    centred = [p for p in vote_patterns(3, 1.0, "centered") if any(p.advantages)]
    kept = all(np.allclose(p.advantages, p.reward * (np.array(p.votes) - np.mean(p.votes))) for p in centred)
    sizes = sorted({round(abs(p.reward), 9) for p in centred})
    grid = [i / 10 for i in range(1, 41)]
    return Claim(
        "z-scoring R S over a step's votes cancels |R|: the judge learns from the outcome alone",
        (
            Check("advantage = O zscore(S) wherever sign R = O: every vote pattern, m = 1..5, 8 lambdas", same),
            Check("votes that differ: always so for lambda < m / (m - 2), which is 3, 2, 5/3 at m = 3, 4, 5", below),
            Check("and no longer from there on; with m = 1 and 2 never otherwise, even at lambda = 100", at_edge and never),
            Check("m = 3, lambda = 3.5: a majority overrules the outcome, on 6 of 16 patterns", len(overruled) == 6),
            Check(
                "centered keeps |R|: advantage = R (S - mean S), |R| = 2/3 or 4/3 at m = 3, lambda = 1", kept and len(sizes) == 2
            ),
        ),
        "that outcome supervision is bad: it was the only objective that kept a small judge stable. Unanimous votes teach "
        "nothing under either, although R is 0 or flips for them from lambda = 1 on.",
        ("lambda", *(f"outcome alone, m = {m}" for m in counts)),
        tuple((weight, *(_outcome_alone(m, weight) for m in counts)) for weight in weights),
        tuple(Curve(f"m = {m}", grid, [_outcome_alone(m, w) for w in grid]) for m in (2, 3, 4, 5)),
        "lambda",
        "share of patterns with advantage = O zscore(S)",
    )


def weights() -> Claim:
    """The weights of the reward model's objective, derived from the rewards of its votes."""
    shares, lambdas = [i / 10 for i in range(11)], (0.0, 0.25, 1.0, 4.0)
    found = {(o, p, m, w): vote_weight(o, p, m, w) for o, p, m, w in product((WON, LOST), shares, (2, 3, 5, 9), lambdas)}
    errors = [abs(f - paper_vote_weight(p, w * (m - 1) / m)) for (_, p, m, w), f in found.items()]
    many = [abs(vote_weight(WON, p, 100, w) - paper_vote_weight(p, w)) for p, w in product(shares[::5], lambdas)]
    doubled = max(abs(vote_weight(o, p, 100) - 2.0 * p) for o, p in product((WON, LOST), shares[::5]))
    successes = (1e-6, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98, 1 - 1e-6)
    judges = {"fair": (0.7, 0.7), "says +1": (0.9, 0.3), "says -1": (0.3, 0.9)}
    ratios = {
        name: [weight_ratio(s, vote_weight(WON, plus, 3), vote_weight(LOST, minus, 3)) for s in successes]
        for name, (plus, minus) in judges.items()
    }
    off = _sampled_weights_off(0.25, 0.7, 0.4, 3)
    return Claim(
        "the reward model's objective is 4 E[<p_plus, f_plus> + <p_minus, f_minus>]; without successes it only learns to say -1",
        (
            Check(
                "m votes: f = 1 + 2 lambda' p_old - lambda' with lambda' = lambda (m - 1) / m, enumerated", max(errors) < 1e-12
            ),
            Check("the paper's f is the limit of many votes: within lambda / m at m = 100", max(many) <= 4.0 / 100 + 1e-12),
            Check("lambda = 1: f = 2 p_old there, hence 2 f = 4 p_old", doubled <= 1.0 / 100 + 1e-12),
            Check(f"sampled f_plus, f_minus and ratio within 4 standard errors, worst {max(off):.1f}", max(off) <= 4.0),
            Check("||f_plus|| / ||f_minus|| rises with success", all(_rises(values) for values in ratios.values())),
            Check(
                "to 0 with rare and to infinity with sure success: < .01 and > 100 at 1e-6 from the end",
                all(values[0] < 0.01 and values[-1] > 100 for values in ratios.values()),
            ),
            Check(
                "lambda = 4: a judge that agrees with the outcome in 1 of 5 votes is pulled away from it",
                vote_weight(WON, 0.2, 3, 4.0) < 0 < vote_weight(WON, 0.2, 3, 1.0),
            ),
        ),
        "where the band should end: .2 and .8 do not follow. This is the objective of the raw R S; z-scored over the votes all "
        "steps whose votes differ weigh the same, and the ratio is that of their numbers, which balancing makes 1.",
        ("success", *(f"ratio, judge {name} {plus, minus}" for name, (plus, minus) in judges.items())),
        tuple((f"{s:g}", *(values[i] for values in ratios.values())) for i, s in enumerate(successes)),
        tuple(Curve(f"judge {name} {judges[name]}", successes[1:-1], values[1:-1]) for name, values in ratios.items()),
        "the task's success probability",
        "||f_plus|| / ||f_minus||, m = 3, lambda = 1",
        x_scale="logit",
        y_scale="log",
    )


def gradients() -> Claim:
    """The policy gradient's signal and noise by difficulty."""
    successes = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
    scored = [group_gradient(p, GROUP, "zscore") for p in successes]
    centred = [group_gradient(p, GROUP, "centered") for p in successes]
    dead = [dead_share(p, GROUP) for p in successes]
    by_rollout = {
        f"{name}, {n:,} nuisances": [x.signal_to_noise(n) / math.sqrt(GROUP) for x in moments]
        for n in (0, NUISANCES)
        for name, moments in (("z-scored", scored), ("centred", centred))
    }
    half = len(successes) // 2
    closed = [2 * p * (1 - p) * (GROUP - 1) / GROUP for p in successes]
    alive = [(1 - share) / GROUP for share in dead]
    middle = all(_rises(values[: half + 1]) and _rises(values[: half - 1 : -1]) for values in by_rollout.values())
    best = [values[half] / values[0] for values in by_rollout.values()]
    return Claim(
        "tasks in the middle teach the policy most: elsewhere most groups are dead and the rest is noisy",
        (
            Check(
                "centred: the expectation is the true gradient 2 p (1 - p) times (G - 1) / G",
                np.allclose([x.signal for x in centred], closed),
            ),
            Check(
                "z-scored: variance per nuisance parameter is (1 - dead share) / G",
                np.allclose([x.nuisance for x in scored], alive),
            ),
            Check(
                f"G = 8: {dead[0]:.1%} of groups are dead at success .02 and {dead[-1]:.1%} at .98", min(dead[0], dead[-1]) > 0.85
            ),
            Check("signal-to-noise per rollout rises up to success 1/2 and falls after, in all four columns", middle),
            Check(f"at 1/2 it is {min(best):.0f} to {max(best):.0f} times that at .02", min(best) > 3.0),
        ),
        "anything about a language model: exact for one coin that decides success, a score of unit variance in every "
        "parameter that does not matter, one step per rollout, no clipping, and nothing learned on one task for another.",
        ("success", "dead", "signal z", "variance z", "signal c", "variance c", *(f"SNR {name}" for name in by_rollout)),
        tuple(
            (p, dead[i], z.signal, z.variance, c.signal, c.variance, *(values[i] for values in by_rollout.values()))
            for i, (p, z, c) in enumerate(zip(successes, scored, centred, strict=True))
        ),
        (*(Curve(name, successes, values) for name, values in by_rollout.items()), Curve("dead groups", successes, dead, ":")),
        "success probability p",
        "signal-to-noise per rollout, G = 8",
        y_scale="log",
    )


def acceptance() -> Claim:
    """Unchanged proposals that are accepted by luck."""
    successes = (0.02, 0.05, 0.08, 0.1, 0.12, 0.15, 0.2)
    easier = {name: [rate("easier", p) for p in successes] for name, rate in ACCEPTANCE_RULES.items()}
    harder = {name: [rate("harder", 1 - p) for p in successes] for name, rate in ACCEPTANCE_RULES.items()}
    lucky = easier["threshold"]
    fits = [abs(lucky[successes.index(p)] - value) <= 0.005 for p, value in PAPER_FALSE_ACCEPTS.items()]
    mirrored = all(np.allclose(easier[name], harder[name]) for name in ACCEPTANCE_RULES)
    sound, changed = max(easier["posterior"]), _posterior("harder", 0.95, 0.65)
    cost = f"{changed.rollouts:.0f} rollouts and {changed.parent_rollouts:.0f} of its parent"
    idle = _posterior("easier", 0.05, 0.05)
    return Claim(
        "comparing 8 with 8 rollouts accepts many proposals that are exactly as hard as their parent, re-rolling both does not",
        (
            Check(f"threshold: {lucky[0]:.3f} at true success .02 and {lucky[-1]:.3f} at .20, as stated (.13 to .61)", all(fits)),
            Check("threshold: the more, the nearer the parent is to the band", _rises(lucky)),
            Check(f"posterior: at most {sound:.3f} over the range, 5% was asked for", sound <= 0.05),
            Check(
                f"posterior: .95 -> .65 is accepted with {changed.accepted:.2f} (.7 asked for), after {cost}",
                changed.accepted >= 0.7,
            ),
            Check(
                f"posterior: an unchanged one at .05 costs {idle.rollouts:.0f} + {idle.parent_rollouts:.0f} rollouts",
                idle.rollouts < 16,
            ),
            Check("harder proposals at 1 - p mirror easier ones at p", mirrored),
        ),
        "how many proposals are unchanged; the success rates stay as they are, in a run the policy moves between rollouts.",
        ("true success", *(f"{name}, easier" for name in easier), *(f"{name}, harder at 1 - p" for name in harder)),
        tuple((p, *(v[i] for v in easier.values()), *(v[i] for v in harder.values())) for i, p in enumerate(successes)),
        tuple(Curve(name, successes, values) for name, values in easier.items()),
        "true success of parent and proposal",
        "P(accepted | the parent called for an easier task)",
    )


CLAIMS: dict[str, Callable[[], Claim]] = {
    claim.__name__: claim for claim in (precision, convergence, zscore, weights, gradients, acceptance)
}


def _posterior(direction: Direction, parent: float, proposal: float) -> AcceptancePower:
    settings = AcceptanceSettings()

    def decide(proposed: Proposal, successes: int, rollouts: int, along: tuple[int, int] | None) -> Decision:
        return decide_one(proposed, successes, rollouts, along, settings)

    return acceptance_power(decide, direction, parent, proposal, GROUP)


def _generator(*key: object) -> np.random.Generator:
    return np.random.default_rng(list("/".join(map(str, ("theory", *key))).encode()))


def _rises(values: Sequence[float]) -> bool:
    return all(a < b for a, b in pairwise(values))


def _sampled_precision(p_plus: float, p_minus: float, m: int) -> float:
    rng = _generator("precision", p_plus, p_minus, m)
    return float(np.mean(rng.binomial(m, p_plus, SAMPLES) > rng.binomial(m, 1.0 - p_minus, SAMPLES)))


def _outcome_alone(m: int, score_weight: float) -> float:
    """Share of vote patterns on which the judge's advantage is O zscore(S)."""
    patterns = vote_patterns(m, score_weight)
    gaps = np.array([p.advantages for p in patterns]) - np.array([p.supervised for p in patterns])
    return float(np.mean(np.abs(gaps).max(axis=1) <= 1e-9))


def _sampled_weights_off(success: float, p_plus: float, p_minus: float, m: int) -> list[float]:
    """How many standard errors sampled f_plus, f_minus and the ratio of their norms are away from the enumerated ones.

    Votes of one step share its R, so only the first of each step is looked at.
    """
    rng = _generator("weights", success, p_plus, p_minus, m)
    steps = 40_000
    won = int(rng.binomial(steps, success))
    off, relative, sampled = [], [], []
    for outcome, count, p_agree in ((WON, won, p_plus), (LOST, steps - won, p_minus)):
        votes = (np.where(rng.random((count, m)) < p_agree, outcome, -outcome)).astype(int).tolist()
        rewards = consistency_rewards(integrated_step_rewards(outcome, votes, [True] * count), votes)
        first = np.array([of_step[0] for of_step in rewards])
        agrees = np.array([of_step[0] == outcome for of_step in votes])
        f = float(first[agrees].mean() - first[~agrees].mean()) / 2.0
        error = math.sqrt(first[agrees].var() / agrees.sum() + first[~agrees].var() / (~agrees).sum()) / 2.0
        off.append(abs(f - vote_weight(outcome, p_agree, m)) / error)
        sampled.append(f * math.sqrt(count))
        relative.append(error / f)
    ratio = sampled[0] / sampled[1]
    expected = weight_ratio(success, vote_weight(WON, p_plus, m), vote_weight(LOST, p_minus, m))
    counted = 1.0 / (2.0 * math.sqrt(steps * success * (1.0 - success)))  # of sqrt(won / lost), relative
    return [*off, abs(ratio / expected - 1.0) / math.hypot(*relative, counted)]
