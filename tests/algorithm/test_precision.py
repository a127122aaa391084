from itertools import product

import pytest

from rla_lightning.algorithm.precision import VoteCounts, count_votes, exact_precision, hoeffding_bound, paper_bound


def test_count_votes_by_hand():
    # won: + + - | - None  -> 2 of 4 parsed are +1;  lost: - | + - -  -> 3 of 4 are -1;  won without parsed votes: nothing
    counts = count_votes([1.0, -1.0, 1.0], [[[1, 1, -1], [-1, None]], [[-1], [1, -1, -1]], [[None]]])
    assert counts == VoteCounts(plus_on_won=2, votes_on_won=4, minus_on_lost=3, votes_on_lost=4)
    assert counts.p_plus == 0.5
    assert counts.p_minus == 0.75
    assert counts.mu == 1.25


def test_missing_class_is_none():
    lost_only = count_votes([-1.0], [[[1, 1]]])
    assert lost_only.p_plus is None
    assert lost_only.p_minus == 0.0
    assert lost_only.mu is None
    assert count_votes([], []) == VoteCounts(0, 0, 0, 0)


@pytest.mark.parametrize(
    ("p_plus", "p_minus", "m", "expected"),
    [
        (0.6, 0.6, 1, 0.36),  # + on the success and - on the failure
        (0.5, 0.5, 2, 0.3125),  # (1 - P(tie))/2 = (1 - (1 + 4 + 1)/16)/2
        # X ~ Bin(3, .6): .064 .288 .432 .216;  Y ~ Bin(3, .4): .216 .432 .288 .064
        # .288 * .216 + .432 * .648 + .216 * .936 = .062208 + .279936 + .202176
        (0.6, 0.6, 3, 0.54432),
        # X ~ Bin(3, .7): .027 .189 .441 .343;  Y mirrored: .189 * .343 + .441 * .784 + .343 * .973
        (0.7, 0.7, 3, 0.74431),
        # X ~ Bin(3, .8): .008 .096 .384 .512:  .096 * .512 + .384 * .896 + .512 * .992
        (0.8, 0.8, 3, 0.90112),
        (1.0, 1.0, 3, 1.0),
        (1.0, 0.0, 3, 0.0),  # always +1: every pair ties
    ],
)
def test_exact_precision(p_plus, p_minus, m, expected):
    assert exact_precision(p_plus, p_minus, m) == pytest.approx(expected, abs=1e-12)


def test_exact_precision_of_many_votes():
    assert exact_precision(0.7, 0.7, 33) == pytest.approx(0.9995, abs=5e-5)  # the figure the theory section states


def test_precision_goes_to_one_iff_mu_exceeds_one():
    assert exact_precision(0.9, 0.2, 801) > 0.99  # mu 1.1, although failures are misjudged 80% of the time
    assert exact_precision(0.8, 0.1, 801) < 0.01  # mu 0.9
    assert exact_precision(0.7, 0.3, 801) == pytest.approx(0.5, abs=0.02)  # mu 1: a coin flip less the ties


def test_bounds_by_hand():
    # mu 1.4, m 3: (mu - 1)^2 = .16; 1 - exp(-.12) = .1130796; 1 - exp(-.24) = .2133721
    assert paper_bound(1.4, 3) == pytest.approx(0.1130796, abs=1e-6)
    assert hoeffding_bound(1.4, 3) == pytest.approx(0.2133721, abs=1e-6)
    assert paper_bound(0.5, 3) == hoeffding_bound(1.0, 3) == 0.0


def test_bounds_hold():
    for p_plus, p_minus, m in product((0.2, 0.55, 0.7, 0.95, 1.0), (0.3, 0.5, 0.8, 1.0), (1, 2, 3, 9, 33)):
        mu = p_plus + p_minus
        assert exact_precision(p_plus, p_minus, m) >= hoeffding_bound(mu, m) - 1e-12
        assert hoeffding_bound(mu, m) >= paper_bound(mu, m)


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=r"outcome is \+1 or -1, got 0.0"):
        count_votes([0.0], [[[1]]])
    with pytest.raises(ValueError, match=r"in \[0, 1\], got 1.2"):
        exact_precision(1.2, 0.5, 3)
    with pytest.raises(ValueError, match="m must be at least 1, got 0"):
        exact_precision(0.5, 0.5, 0)
    with pytest.raises(ValueError, match=r"mu must be in \[0, 2\], got 2.5"):
        paper_bound(2.5, 3)
    with pytest.raises(ValueError, match="m must be at least 1, got 0"):
        hoeffding_bound(1.5, 0)
