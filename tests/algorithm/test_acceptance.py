from math import comb

import numpy as np
import pytest

from rla_lightning.algorithm.acceptance import in_band, posterior, posterior_probability, threshold, trigger

G = 8


def test_in_band_is_inclusive():
    assert in_band(1, 5, 0.2, 0.8)  # 0.2 exactly
    assert in_band(4, 5, 0.2, 0.8)  # 0.8 exactly
    assert not in_band(1, 8, 0.2, 0.8)  # 0.125
    assert not in_band(7, 8, 0.2, 0.8)  # 0.875
    assert not in_band(0, 0, 0.0, 1.0)  # no evidence


def test_trigger():
    assert trigger(7, 8, 0.2, 0.8) == "harder"
    assert trigger(1, 8, 0.2, 0.8) == "easier"
    assert trigger(4, 5, 0.2, 0.8) is None
    assert trigger(1, 5, 0.2, 0.8) is None
    assert trigger(0, 0, 0.2, 0.8) is None


@pytest.mark.parametrize(
    ("direction", "parent", "proposal", "verdict"),
    [
        ("harder", 8, 7, "ACCEPT"),
        ("harder", 8, 2, "ACCEPT"),  # .25 >= .2
        ("harder", 8, 1, "REJECT"),  # .125 < .2: too hard
        ("harder", 8, 8, "REJECT"),  # not harder
        ("harder", 7, 8, "REJECT"),  # easier
        ("easier", 0, 1, "ACCEPT"),
        ("easier", 0, 6, "ACCEPT"),  # .75 <= .8
        ("easier", 0, 7, "REJECT"),  # .875 > .8: too easy
        ("easier", 0, 0, "REJECT"),  # never solved
        ("easier", 1, 1, "REJECT"),
        ("easier", 1, 0, "REJECT"),
    ],
)
def test_threshold(direction, parent, proposal, verdict):
    assert threshold(direction, parent, G, proposal, G) == verdict


def test_threshold_compares_rates_not_counts_and_includes_the_edges():
    assert threshold("harder", 4, 4, 4, 5) == "ACCEPT"  # .8 < 1
    assert threshold("harder", 8, 8, 1, 5) == "ACCEPT"  # exactly .2
    assert threshold("easier", 0, 8, 4, 5) == "ACCEPT"  # exactly .8
    assert threshold("easier", 1, 8, 1, 8) == "REJECT"
    assert threshold("easier", 1, 8, 1, 7) == "ACCEPT"  # 1/7 > 1/8


@pytest.mark.parametrize("rule", [threshold, posterior])
def test_no_rollouts_is_undecided(rule):
    assert rule("harder", 8, 8, 0, 0) == "UNDECIDED"
    assert rule("easier", 0, 0, 4, 8) == "UNDECIDED"


def test_posterior_probability_of_uniform_priors():
    # theta, theta' uniform: P(theta' < theta) = 1/2; P(.2 <= theta' < theta) = integral_.2^1 (1 - x) dx = .8^2/2 = .32
    assert posterior_probability("harder", 0, 0, 0, 0, low=0.0, high=1.0) == pytest.approx(0.5, abs=1e-14)
    assert posterior_probability("easier", 0, 0, 0, 0, low=0.0, high=1.0) == pytest.approx(0.5, abs=1e-14)
    assert posterior_probability("harder", 0, 0, 0, 0) == pytest.approx(0.32, abs=1e-14)
    assert posterior_probability("easier", 0, 0, 0, 0) == pytest.approx(0.32, abs=1e-14)


def test_posterior_probability_of_opposite_results():
    # theta ~ Beta(9, 1), theta' ~ Beta(1, 9): P(theta' > theta) = integral 9 x^8 (1 - x)^9 dx = 9 * 8! 9!/18!
    # = 9! 9!/18! = 1/C(18, 9) = 1/48620
    for direction, parent, proposal in (("harder", 8, 0), ("easier", 0, 8)):
        right = posterior_probability(direction, parent, 8, proposal, 8, low=0.0, high=1.0)
        wrong = posterior_probability(direction, proposal, 8, parent, 8, low=0.0, high=1.0)
        assert right == pytest.approx(1 - 1 / 48620, abs=1e-13)
        assert wrong == pytest.approx(1 / 48620, abs=1e-13)


def test_posterior_probability_counts_the_side_of_the_band():
    # theta ~ Beta(9, 1) has P(theta > x) = 1 - x^9; theta' uniform: integral_.2^1 (1 - x^9) dx = .8 - (1 - .2^10)/10
    # = .7 + 1.024e-8; mirrored for easier
    assert posterior_probability("harder", 8, 8, 0, 0) == pytest.approx(0.70000001024, abs=1e-13)
    assert posterior_probability("easier", 0, 8, 0, 0) == pytest.approx(0.70000001024, abs=1e-13)
    # the far side is not bounded: harder is indifferent to high, easier to low
    assert posterior_probability("harder", 8, 8, 0, 0, high=0.9) == pytest.approx(0.70000001024, abs=1e-13)
    assert posterior_probability("easier", 0, 8, 0, 0, low=0.1) == pytest.approx(0.70000001024, abs=1e-13)


def test_posterior_probability_of_equal_counts_is_one_half_at_any_size():
    # exchangeable theta and theta'; also shows that large counts neither overflow nor lose the stated accuracy
    for successes, rollouts in ((3, 8), (40, 50), (200, 200), (90, 200), (0, 600)):
        probability = posterior_probability("harder", successes, rollouts, successes, rollouts, low=0.0, high=1.0)
        assert probability == pytest.approx(0.5, abs=1e-11)


@pytest.mark.parametrize(
    ("direction", "counts"), [("harder", (7, 8, 3, 8)), ("easier", (1, 8, 3, 8)), ("easier", (2, 16, 11, 24))]
)
def test_posterior_probability_agrees_with_monte_carlo(direction, counts):
    parent_successes, parent_rollouts, successes, rollouts = counts
    rng = np.random.default_rng(0)
    parent = rng.beta(1 + parent_successes, 1 + parent_rollouts - parent_successes, 400_000)
    proposal = rng.beta(1 + successes, 1 + rollouts - successes, 400_000)
    if direction == "harder":
        sampled = np.mean((proposal < parent) & (proposal >= 0.2))
    else:
        sampled = np.mean((proposal > parent) & (proposal <= 0.8))
    # the standard error is at most .5/sqrt(400,000) = .0008
    assert posterior_probability(direction, *counts) == pytest.approx(sampled, abs=0.003)


def test_posterior_verdicts():
    # one rollout each, parent won and proposal lost: P(theta' < theta) = 1 - 1/C(4, 2) = 5/6 = .833; swapped 1/6 = .167
    wide = {"low": 0.0, "high": 1.0}
    assert posterior("harder", 1, 1, 0, 1, **wide, level=0.8) == "ACCEPT"
    assert posterior("harder", 1, 1, 0, 1, **wide, level=0.85) == "UNDECIDED"
    assert posterior("harder", 0, 1, 1, 1, **wide, level=0.8, futility=0.2) == "REJECT"
    assert posterior("harder", 0, 1, 1, 1, **wide, level=0.8, futility=0.15) == "UNDECIDED"
    assert posterior("easier", 0, 1, 1, 1, **wide, level=0.8) == "ACCEPT"


def test_posterior_rejects_a_proposal_that_overshoots():
    # 0/8 -> 8/8: theta' ~ Beta(9, 1), P(theta' <= .8) = .8^9 = .134 bounds the probability from above
    assert posterior("easier", 0, 8, 8, 8) == "REJECT"
    assert posterior("harder", 8, 8, 0, 8) == "REJECT"


def binomial(successes, p):
    return comb(G, successes) * p**successes * (1 - p) ** (G - successes)


def false_accept_rate(rule, p, direction="easier"):
    """P(rule accepts | the parent's G rollouts trigger `direction`) when parent and proposal both have true success p."""
    parents = [x for x in range(G + 1) if trigger(x, G, 0.2, 0.8) == direction]
    accepted = sum(
        binomial(x, p) * binomial(y, p) for x in parents for y in range(G + 1) if rule(direction, x, G, y, G) == "ACCEPT"
    )
    return accepted / sum(binomial(x, p) for x in parents)


@pytest.mark.parametrize(
    ("p", "expected"),
    [
        # parent x in {0, 1} triggers; accepted iff x < y <= 6:  (P0 P(1..6) + P1 P(2..6)) / (P0 + P1)
        (0.05, 0.2538),  # (.66342 * .33658 + .27933 * .05724) / .94276
        (0.10, 0.3895),  # (.43047 * .56953 + .38264 * .18690) / .81310
        (0.20, 0.6084),  # (.16777 * .83214 + .33554 * .49660) / .50332
    ],
)
def test_false_accept_rate_of_threshold_for_unchanged_proposals(p, expected):
    assert false_accept_rate(threshold, p) == pytest.approx(expected, abs=1e-4)
    assert false_accept_rate(threshold, 1 - p, "harder") == pytest.approx(expected, abs=1e-4)  # by symmetry


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="got 9 of 8"):
        in_band(9, 8, 0.2, 0.8)
    with pytest.raises(ValueError, match="got -1 of 8"):
        trigger(-1, 8, 0.2, 0.8)
    with pytest.raises(ValueError, match=r"got low 0.8 and high 0.2"):
        threshold("harder", 8, 8, 4, 8, low=0.8, high=0.2)
    with pytest.raises(ValueError, match="got 'sideways'"):
        threshold("sideways", 8, 8, 4, 8)
    with pytest.raises(ValueError, match=r"level must be in \(0.5, 1\), got 0.2"):
        posterior("harder", 8, 8, 4, 8, level=0.2)
    with pytest.raises(ValueError, match=r"futility must be in \(0, 0.9\), got 0.95"):
        posterior("harder", 8, 8, 4, 8, level=0.9, futility=0.95)
