from itertools import product
from math import hypot, sqrt

import numpy as np
import pytest

from rla_lightning.algorithm.precision import (
    MAX_DEGREES,
    Interval,
    RolloutVotes,
    VoteCounts,
    binomial_distribution,
    clustered_rate,
    count_votes,
    exact_precision,
    hoeffding_bound,
    paper_bound,
    pooled_votes,
    precision_by,
    precision_intervals,
    rollout_votes,
    student_t,
)


def test_count_votes_by_hand():
    # won: + + - | - None  -> 2 of 4 parsed are +1;  lost: - | + - -  -> 3 of 4 are -1;  won without parsed votes: nothing
    counts = count_votes([1.0, -1.0, 1.0], [[[1, 1, -1], [-1, None]], [[-1], [1, -1, -1]], [[None]]])
    assert counts == VoteCounts(plus_on_won=2, votes_on_won=4, minus_on_lost=3, votes_on_lost=4)
    assert counts.p_plus == 0.5
    assert counts.p_minus == 0.75
    assert counts.mu == 1.25


def test_votes_of_each_rollout():
    # + + - | - None: 2 of 4;  None: 0 of 0;  - | + - -: 1 of 4
    rollouts = rollout_votes([1.0, 1.0, -1.0], [[[1, 1, -1], [-1, None]], [[None]], [[-1], [1, -1, -1]]])
    assert rollouts == [RolloutVotes(1.0, 2, 4), RolloutVotes(1.0, 0, 0), RolloutVotes(-1.0, 1, 4)]


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


def test_binomial_distribution_by_hand():
    assert binomial_distribution(2, 0.3) == pytest.approx([0.49, 0.42, 0.09], abs=1e-15)
    assert binomial_distribution(3, 1.0) == [0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("probability", "degrees", "expected"),
    [  # tables of Student's t
        (0.975, 1, 12.706),
        (0.975, 2, 4.303),
        (0.975, 3, 3.182),
        (0.975, 4, 2.776),
        (0.95, 5, 2.015),
        (0.995, 10, 3.169),
        (0.975, 15, 2.131),
        (0.975, 30, 2.042),
        (0.975, 120, 1.980),
    ],
)
def test_student_t(probability, degrees, expected):
    assert student_t(probability, degrees) == pytest.approx(expected, abs=5e-4)


def test_student_t_of_known_angles_and_of_many_degrees():
    assert student_t(0.75, 1) == pytest.approx(1.0, abs=1e-12)  # Cauchy: tan(pi/4)
    assert student_t(0.75, 2) == pytest.approx(sqrt(2 / 3), abs=1e-12)  # sin theta = 1/2: sqrt(2) tan(pi/6)
    assert student_t(0.5, 7) == pytest.approx(0.0, abs=1e-12)
    assert student_t(0.975, 10**6) == student_t(0.975, MAX_DEGREES)
    assert 1.95996 < student_t(0.975, MAX_DEGREES) < 1.95996 * 1.0065


def test_clustered_rate_by_hand():
    # 3 of 4 and 1 of 4: p = 1/2, residuals 1 and -1, v = 2/1 * 2/8^2 = 1/16, n_eff = (1/4)/(1/16) = 4.
    # At level 1/2 and one degree t = 1: centre 1/2, half-width sqrt(1/4 * 1/4 + 1/16/4)/(5/4) = sqrt(5)/8 * 4/5 = 1/sqrt(20)
    assert_interval(clustered_rate([3, 1], [4, 4], level=0.5), 0.5, 0.5 - 1 / sqrt(20), 0.5 + 1 / sqrt(20))
    # 1 of 2 twice: v = 0, but 4 trials are no more than 4 trials
    assert_interval(clustered_rate([1, 1], [2, 2], level=0.5), 0.5, 0.5 - 1 / sqrt(20), 0.5 + 1 / sqrt(20))
    # 0 of 2, 2 of 2, 2 of 2: p = 2/3, residuals -4/3, 2/3, 2/3, v = 3/2 * (24/9)/36 = 1/9, n_eff = (2/9)/(1/9) = 2.
    # t^2 = 2/3 with two degrees, t^2/n_eff = 1/3: centre (2/3 + 1/6)/(4/3) = 5/8, half sqrt(2/27 + 1/36) * 3/4
    half = sqrt(11 / 108) * 3 / 4
    assert_interval(clustered_rate([0, 2, 2], [2, 2, 2], level=0.5), 2 / 3, 5 / 8 - half, 5 / 8 + half)


def test_clustered_rate_at_the_edges_counts_clusters_as_all_alike():
    # n_eff = (3 + 1)^2/(9 + 1) = 1.6, t = 1: from 1/(1 + 1/1.6) = 8/13 to 1, and mirrored
    assert_interval(clustered_rate([3, 1], [3, 1], level=0.5), 1.0, 8 / 13, 1.0)
    assert_interval(clustered_rate([0, 0], [3, 1], level=0.5), 0.0, 0.0, 5 / 13)
    assert_interval(clustered_rate([0, 0, 0], [3, 0, 1], level=0.5), 0.0, 0.0, 5 / 13)  # an empty cluster is no cluster


def test_too_few_clusters_have_no_interval():
    assert clustered_rate([], []) == Interval(None, None, None)
    assert clustered_rate([0], [0]) == Interval(None, None, None)
    assert clustered_rate([3, 0], [4, 0]) == Interval(0.75, None, None)


def test_precision_intervals_by_hand():
    # won: 3 of 4 and 1 of 4 as above, 1/2 -+ 1/sqrt(20); lost: 2 of 2 twice, n_eff = 2, from 1/(1 + 1/2) = 2/3 to 1
    rollouts = [RolloutVotes(1.0, 3, 4), RolloutVotes(-1.0, 0, 2), RolloutVotes(1.0, 1, 4), RolloutVotes(-1.0, 0, 2)]
    estimate = precision_intervals(rollouts, level=0.5)
    assert_interval(estimate.p_plus, 0.5, 0.5 - 1 / sqrt(20), 0.5 + 1 / sqrt(20))
    assert_interval(estimate.p_minus, 1.0, 2 / 3, 1.0)
    assert_interval(estimate.mu, 1.5, 1.5 - hypot(1 / sqrt(20), 1 / 3), 1.5 + 1 / sqrt(20))


def test_what_cannot_be_told_is_none():
    lost_only = precision_intervals([RolloutVotes(-1.0, 0, 2), RolloutVotes(-1.0, 1, 2), RolloutVotes(1.0, 0, 0)])
    assert lost_only.p_plus == lost_only.mu == Interval(None, None, None)
    assert lost_only.p_minus.value == 0.75
    one_won = precision_intervals([RolloutVotes(-1.0, 0, 2), RolloutVotes(-1.0, 1, 2), RolloutVotes(1.0, 2, 4)])
    assert one_won.mu == Interval(1.25, None, None)
    assert precision_intervals([]).mu == Interval(None, None, None)


@pytest.mark.parametrize(("won", "lost", "p_plus", "p_minus"), [(20, 30, 0.7, 0.6), (6, 10, 0.7, 0.8), (60, 60, 0.9, 0.6)])
def test_intervals_cover_the_truth_where_binomial_ones_do_not(won, lost, p_plus, p_minus):
    # Each rollout of 2 to 12 steps with 3 votes has a rate of its own, Beta with concentration 3. Standard error of a coverage
    # of .95 over 1,000 repetitions: .007.
    rng = np.random.default_rng(list(f"coverage/{won}/{lost}".encode()))
    repetitions = 1000
    covered, naive = np.zeros(3), 0.0
    for _ in range(repetitions):
        rollouts = simulated(rng, 1.0, won, p_plus, 3.0) + simulated(rng, -1.0, lost, 1 - p_minus, 3.0)
        estimate = precision_intervals(rollouts)
        for i, (interval, truth) in enumerate(
            ((estimate.p_plus, p_plus), (estimate.p_minus, p_minus), (estimate.mu, p_plus + p_minus))
        ):
            covered[i] += covers(interval, truth)
        votes = sum(rollout.votes for rollout in rollouts if rollout.outcome > 0)
        rate = estimate.p_plus.value
        naive += abs(rate - p_plus) <= 1.96 * sqrt(rate * (1 - rate) / votes)
    assert covered / repetitions == pytest.approx(0.94, abs=0.04)  # .90 to .98
    assert naive / repetitions < 0.85


def test_pooled_by_task_the_interval_is_about_further_tasks():
    # 24 tasks, each with rates of its own around .7 and .6, 8 rollouts each with rates around those
    rng = np.random.default_rng(list(b"tasks"))
    repetitions = 400
    by_rollout, by_task = 0, np.zeros(3)
    for _ in range(repetitions):
        rollouts, tasks = [], []
        for task in range(24):
            won = int(rng.binomial(8, rng.uniform()))
            rollouts += simulated(rng, 1.0, won, rng.beta(4.2, 1.8), 6.0)
            rollouts += simulated(rng, -1.0, 8 - won, 1 - rng.beta(3.6, 2.4), 6.0)
            tasks += [task] * 8
        by_rollout += covers(precision_intervals(rollouts).mu, 1.3)
        estimate = precision_intervals(pooled_votes(rollouts, tasks))
        by_task += [covers(estimate.p_plus, 0.7), covers(estimate.p_minus, 0.6), covers(estimate.mu, 1.3)]
    assert by_task / repetitions == pytest.approx(0.945, abs=0.045)  # .90 to .99
    assert by_rollout / repetitions < 0.85


def test_pooled_votes_by_hand():
    rollouts = [RolloutVotes(1.0, 3, 4), RolloutVotes(-1.0, 1, 2), RolloutVotes(1.0, 0, 3), RolloutVotes(1.0, 2, 2)]
    pooled = pooled_votes(rollouts, ["a", "a", "a", "b"])
    assert pooled == [RolloutVotes(1.0, 3, 7), RolloutVotes(-1.0, 1, 2), RolloutVotes(1.0, 2, 2)]


def test_intervals_of_independent_votes_are_hardly_wider_than_binomial_ones():
    rng = np.random.default_rng(list(b"independent"))
    ratios = []
    for _ in range(100):
        rollouts = simulated(rng, 1.0, 60, 0.7, 1e6)
        interval = precision_intervals(rollouts).p_plus
        binomial = 1.96 * sqrt(interval.value * (1 - interval.value) / sum(rollout.votes for rollout in rollouts))
        ratios.append((interval.high - interval.low) / (2 * binomial))
    assert 1.0 <= np.mean(ratios) < 1.1


def test_precision_by_task_and_by_difficulty():
    tasks = {"easy": 0.1, "middle": 0.3, "hard": 0.9}
    votes = [("easy", 1.0, 3, 4), ("hard", -1.0, 1, 2), ("middle", 1.0, 1, 4), ("hard", -1.0, 1, 2), ("easy", -1.0, 0, 1)]
    rollouts = [RolloutVotes(outcome, plus, number) for _, outcome, plus, number in votes]
    by_task = precision_by(rollouts, [task for task, *_ in votes])
    assert list(by_task) == ["easy", "hard", "middle"]
    assert by_task["easy"].mu == Interval(1.75, None, None)
    assert by_task["middle"].p_plus == Interval(0.25, None, None)
    assert by_task["hard"].p_plus.value is None
    by_bin = precision_by(rollouts, [tasks[task] >= 0.5 for task, *_ in votes], level=0.5)
    assert list(by_bin) == [False, True]
    assert_interval(by_bin[False].p_plus, 0.5, 0.5 - 1 / sqrt(20), 0.5 + 1 / sqrt(20))  # 3 of 4 and 1 of 4
    assert by_bin[True].p_minus.value == 0.5


def test_bad_votes_are_named():
    with pytest.raises(ValueError, match=r"an outcome is \+1 or -1, got 0.5"):
        RolloutVotes(0.5, 1, 2)
    with pytest.raises(ValueError, match="0 <= plus <= votes, got 3 of 2"):
        RolloutVotes(1.0, 3, 2)
    with pytest.raises(ValueError, match="0 <= hits <= size, got 3 of 2"):
        clustered_rate([1, 3], [2, 2])
    with pytest.raises(ValueError, match=r"level must be in \(0, 1\), got 1.0"):
        precision_intervals([], level=1.0)
    with pytest.raises(ValueError, match="shorter"):
        precision_by([RolloutVotes(1.0, 1, 2)] * 2, ["one key"])
    with pytest.raises(ValueError, match=r"in \[1/2, 1\), got 0.3"):
        student_t(0.3, 3)
    with pytest.raises(ValueError, match="degrees must be at least 1, got 0"):
        student_t(0.975, 0)


def simulated(rng, outcome, count, rate_of_plus, concentration):
    """Rollouts of 2 to 12 steps with 3 votes each; `rate_of_plus` on average, with a Beta distribution over rollouts."""
    votes = 3 * rng.integers(2, 13, count)
    rates = rng.beta(rate_of_plus * concentration, (1 - rate_of_plus) * concentration, count)
    return [RolloutVotes(outcome, int(plus), int(n)) for plus, n in zip(rng.binomial(votes, rates), votes, strict=True)]


def covers(interval, truth):
    return interval.low <= truth <= interval.high


def assert_interval(interval, value, low, high):
    assert (interval.value, interval.low, interval.high) == pytest.approx((value, low, high), abs=1e-12)
