from math import inf, sqrt

import numpy as np
import pytest

from rla_lightning.algorithm.acceptance import threshold
from rla_lightning.algorithm.theory import (
    GradientMoments,
    dead_share,
    false_accept_rate,
    group_gradient,
    largest_outcome_weight,
    paper_vote_weight,
    vote_patterns,
    vote_weight,
    weight_ratio,
)


def pattern(outcome, votes, score_weight, normalization="zscore"):
    (found,) = [p for p in vote_patterns(len(votes), score_weight, normalization) if p.outcome == outcome and p.votes == votes]
    return found


def test_zscored_votes_teach_the_outcome():
    # + + -: mean 1/3, std sqrt(8/9), so z = 1/sqrt(2), 1/sqrt(2), -sqrt(2); R = 1 + 1/3 and -1 + 1/3
    z = np.array([1 / sqrt(2), 1 / sqrt(2), -sqrt(2)])
    won, lost = pattern(1.0, (1, 1, -1), 1.0), pattern(-1.0, (1, 1, -1), 1.0)
    assert (won.reward, lost.reward) == pytest.approx((4 / 3, -2 / 3))
    assert won.advantages == pytest.approx(z)
    assert won.supervised == pytest.approx(z)
    assert lost.advantages == pytest.approx(-z)
    assert lost.supervised == pytest.approx(-z)


def test_a_large_lambda_lets_the_majority_overrule_the_outcome():
    # lambda 3.5: R = -1 + 3.5/3 = 1/6 > 0
    overruled = pattern(-1.0, (1, 1, -1), 3.5)
    assert overruled.reward == pytest.approx(1 / 6)
    assert overruled.advantages == pytest.approx(-np.array(overruled.supervised))
    assert [largest_outcome_weight(m) for m in (1, 2, 3, 4, 5)] == [inf, inf, 3.0, 2.0, pytest.approx(5 / 3)]
    assert pattern(-1.0, (1, 1, -1), 3.0).advantages == (0.0, 0.0, 0.0)  # R = 0


def test_unanimous_votes_teach_nothing_whatever_their_reward():
    assert pattern(1.0, (-1, -1, -1), 2.0).reward == -1.0
    assert pattern(1.0, (-1, -1, -1), 2.0).advantages == (0.0, 0.0, 0.0)


def test_centred_votes_keep_the_size_of_the_reward():
    # deviations 2/3, 2/3, -4/3 times R = 4/3 and -2/3
    assert pattern(1.0, (1, 1, -1), 1.0, "centered").advantages == pytest.approx((8 / 9, 8 / 9, -16 / 9))
    assert pattern(-1.0, (1, 1, -1), 1.0, "centered").advantages == pytest.approx((-4 / 9, -4 / 9, 8 / 9))


@pytest.mark.parametrize("outcome", [1.0, -1.0])
def test_vote_weight_by_hand(outcome):
    # m = 2, lambda = 1, the other vote agrees with chance .7. Agreeing: R S = 2 or 1, .7 * 2 + .3 * 1 = 1.7.
    # Disagreeing: R S = -1 or 0, -.7. Half the difference: 1.2 = 1 + 1/2 * (2 * .7 - 1).
    assert vote_weight(outcome, 0.7, 2) == pytest.approx(1.2)
    # m = 3, lambda = 4, agreeing with chance .2: 1 + 4 * 2/3 * (.4 - 1) = -.6
    assert vote_weight(outcome, 0.2, 3, 4.0) == pytest.approx(-0.6)
    assert vote_weight(outcome, 0.2, 3, 0.0) == pytest.approx(1.0)


def test_the_papers_weight_is_that_of_many_votes():
    assert paper_vote_weight(0.7) == pytest.approx(1.4)
    assert paper_vote_weight(0.7, 0.25) == pytest.approx(1.1)
    # at m = 50 a vote's own share of R is still missing: 1 + 49/50 * .4
    assert vote_weight(1.0, 0.7, 50) == pytest.approx(1.392)


def test_weight_ratio_by_hand():
    assert weight_ratio(0.2, 1.0, 1.0) == pytest.approx(0.5)  # sqrt(.2/.8)
    assert weight_ratio(0.8, 2.0, 1.0) == pytest.approx(4.0)
    assert weight_ratio(0.5, -0.6, 1.2) == pytest.approx(0.5)


def test_group_gradient_of_two_rollouts():
    # half of the groups have one success, advantages 1 and -1: g = (1/2 (1 - 1/2) + 1/2 * 1/2) = 1/2; the others 0
    for normalization in ("zscore", "centered"):
        moments = group_gradient(0.5, 2, normalization)
        assert_moments(moments, signal=0.25, variance=0.0625, nuisance=0.25)
        assert moments.signal_to_noise() == pytest.approx(1.0)
        assert moments.signal_to_noise(3) == pytest.approx(0.25 / sqrt(0.0625 + 0.75))


def test_group_gradient_of_four_rollouts():
    # 0..4 successes with chances 1, 4, 6, 4, 1 of 16.
    # centred 2 s (4 - s)/16 = 3/8, 1/2, 3/8: mean 3/8, mean square 1/2 * 9/64 + 3/8 * 1/4 = 21/128; mean A^2 = 3/4, 1, 3/4
    assert_moments(group_gradient(0.5, 4, "centered"), signal=3 / 8, variance=21 / 128 - 9 / 64, nuisance=3 / 16)
    # standardised sqrt(s (4 - s))/4 = sqrt(3)/4, 1/2, sqrt(3)/4: mean sqrt(3)/8 + 3/16, mean square 3/16; mean A^2 = 1 or dead
    signal = sqrt(3) / 8 + 3 / 16
    assert_moments(group_gradient(0.5, 4), signal=signal, variance=3 / 16 - signal**2, nuisance=7 / 32)


@pytest.mark.parametrize("normalization", ["zscore", "centered"])
def test_group_gradient_agrees_with_sampled_groups(normalization):
    rng = np.random.default_rng(list(f"groups/{normalization}".encode()))
    won = (rng.random((100_000, 8)) < 0.2).astype(float)
    advantages = 2 * (won - won.mean(axis=1, keepdims=True))
    if normalization == "zscore":
        advantages /= np.maximum(advantages.std(axis=1, keepdims=True), 1e-9)
    along, nuisance = (advantages * (won - 0.2)).mean(axis=1), (advantages * rng.standard_normal(won.shape)).mean(axis=1)
    moments = group_gradient(0.2, 8, normalization)
    assert along.mean() == pytest.approx(moments.signal, abs=4 * along.std() / sqrt(len(along)))
    assert along.var() == pytest.approx(moments.variance, rel=0.02)  # relative standard error below .4%
    assert nuisance.mean() == pytest.approx(0.0, abs=4 * nuisance.std() / sqrt(len(nuisance)))
    assert nuisance.var() == pytest.approx(moments.nuisance, rel=0.03)  # below .6%


def test_dead_share_by_hand():
    assert dead_share(0.5, 8) == 2 / 256
    assert dead_share(0.1, 2) == pytest.approx(0.82)
    assert dead_share(0.02, 8) == pytest.approx(0.8508, abs=5e-5)  # .98^8 and next to nothing


def test_false_accept_rate_by_hand():
    # two rollouts: only a parent with 0 of 2 calls for easier, and only 1 of 2 is accepted: 2 p (1 - p)
    assert false_accept_rate(threshold, "easier", 0.1, 2) == pytest.approx(0.18)
    assert false_accept_rate(threshold, "harder", 0.9, 2) == pytest.approx(0.18)
    assert false_accept_rate(threshold, "easier", 0.5, 2) == pytest.approx(0.5)


@pytest.mark.parametrize(("verdict", "rate"), [("ACCEPT", 1.0), ("REJECT", 0.0), ("UNDECIDED", 0.0)])
def test_false_accept_rate_counts_accepted_ones_only(verdict, rate):
    assert false_accept_rate(lambda *_: verdict, "easier", 0.3, 8) == pytest.approx(rate)


def test_false_accept_rate_at_eight_rollouts():
    assert false_accept_rate(threshold, "easier", 0.02, 8) == pytest.approx(0.13, abs=0.005)  # the figures of the documentation
    assert false_accept_rate(threshold, "easier", 0.20, 8) == pytest.approx(0.61, abs=0.005)


def test_bad_input_is_named():
    for function in (lambda p: weight_ratio(p, 1.0, 1.0), lambda p: group_gradient(p, 8), lambda p: dead_share(p, 8)):
        with pytest.raises(ValueError, match=r"success must be in \(0, 1\), got 1.0"):
            function(1.0)
    with pytest.raises(ValueError, match="no others to agree with at m = 1"):
        vote_weight(1.0, 0.5, 1)
    with pytest.raises(ValueError, match="m must be at least 1, got 0"):
        largest_outcome_weight(0)
    with pytest.raises(ValueError, match="got a group of 1"):
        group_gradient(0.5, 1)
    with pytest.raises(ValueError, match="got 'raw'"):
        group_gradient(0.5, 8, "raw")
    with pytest.raises(ValueError, match=r"calls for 'easier', band \[0.0, 0.8\]"):
        false_accept_rate(threshold, "easier", 0.5, 8, low=0.0)


def assert_moments(moments: GradientMoments, signal: float, variance: float, nuisance: float) -> None:
    assert (moments.signal, moments.variance, moments.nuisance) == pytest.approx((signal, variance, nuisance), abs=1e-12)
