import math
import random
from itertools import product

import numpy as np
import pytest

from rla_lightning.algorithm.advantages import balanced_indices, judge_advantages, policy_advantages
from rla_lightning.algorithm.rewards import consistency_rewards, integrated_step_rewards

LONE_STEPS = ("raw", "drop", "baseline")


def arrays(*rows):
    return [np.array(row, dtype=np.float64) for row in rows]


def assert_ragged(actual, expected, atol=1e-6):
    assert [len(a) for a in actual] == [len(e) for e in expected]
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, atol=atol)


def test_step_index_standardises_over_the_trajectories_that_reach_the_step():
    # index 0: 1, 3, 5: mean 3, std sqrt(8/3) = 1.632993 -> -2/1.632993 = -1.224745, 0, 1.224745
    # index 1: 2, 0: mean 1, std 1 -> 1, -1
    advantages = policy_advantages(arrays([1, 2], [3], [5, 0]))
    assert_ragged(advantages, [[-1.224745, 1.0], [0.0], [1.224745, -1.0]])


def test_trajectory_mode_repeats_the_standardised_mean():
    # means 1.5, 3, 2.5: mean 7/3, deviations -5/6, 4/6, 1/6, std sqrt(42/36/3) = 0.623610
    advantages = policy_advantages(arrays([1, 2], [3], [5, 0]), mode="trajectory")
    assert_ragged(advantages, [[-1.336306, -1.336306], [1.069045], [0.267261, 0.267261]])


def test_return_to_go():
    # gamma 1/2: [1 + 2/2, 2] = [2, 2]; [3]; [5 + 0, 0] = [5, 0]
    # index 0: 2, 3, 5: mean 10/3, deviations -4/3, -1/3, 5/3, std sqrt(42/27) = 1.247219.  index 1: 2, 0 -> 1, -1
    advantages = policy_advantages(arrays([1, 2], [3], [5, 0]), mode="return_to_go", gamma=0.5)
    assert_ragged(advantages, [[-1.069045, 1.0], [-0.267261], [1.336306, -1.0]])


def test_return_to_go_lone_step_is_the_return():
    # undiscounted returns of [1, 1, 2]: 4, 3, 2; of [0]: 0.  index 0: 4, 0 -> 1, -1; indices 1 and 2 are lone
    # all returns 4, 3, 2, 0: mean 2.25, var (3.0625 + .5625 + .0625 + 5.0625)/4 = 2.1875, std 1.479020
    # (3 - 2.25)/1.479020 = 0.507093, (2 - 2.25)/1.479020 = -0.169031
    rewards = arrays([1, 1, 2], [0])
    assert_ragged(policy_advantages(rewards, mode="return_to_go", lone_step="raw"), [[1, 3, 2], [-1]])
    assert_ragged(policy_advantages(rewards, mode="return_to_go"), [[1, 0.507093, -0.169031], [-1]])


def test_gae():
    # gamma = gae_lambda = 1/2.  [1, 2] with V [.5, 1]: delta_1 = 2 - 1 = 1, delta_0 = 1 + .5*1 - .5 = 1,
    # A_1 = 1, A_0 = 1 + .25*1 = 1.25.  [3] with V [-1]: A = 3 + 1 = 4.
    # pooled 1.25, 1, 4: mean 2.083333, deviations -.833333, -1.083333, 1.916667, std sqrt(5.541667/3) = 1.359126
    advantages = policy_advantages(arrays([1, 2], [3]), mode="gae", values=arrays([0.5, 1], [-1]), gamma=0.5, gae_lambda=0.5)
    assert_ragged(advantages, [[-0.613139, -0.797081], [1.410220]])


def test_gae_with_lambda_one_and_no_discount_is_return_minus_value():
    # returns-to-go [3, 2], [3]; minus V [1, 1], [1]: 2, 1, 2: mean 5/3, std sqrt(2)/3 = .471405 -> .707107, -1.414214
    advantages = policy_advantages(arrays([1, 2], [3]), mode="gae", values=arrays([1, 1], [1]), gamma=1.0, gae_lambda=1.0)
    assert_ragged(advantages, [[0.707107, -1.414214], [0.707107]])


def test_empty_trajectories_are_allowed_in_every_mode():
    rewards = arrays([], [1], [], [3])
    for mode in ("step_index", "trajectory", "return_to_go", "gae"):
        advantages = policy_advantages(rewards, mode=mode, values=arrays([], [0], [], [0]))
        assert_ragged(advantages, [[], [-1.0], [], [1.0]])
        assert_ragged(policy_advantages(arrays([], []), mode=mode, values=arrays([], [])), [[], []])


def test_ties_and_near_ties_give_exactly_zero():
    # pitfall 6: 0.1 + 0.2 differs from 0.3 in the last bit; dividing by that std would give +-1
    near = arrays([0.1 + 0.2, 1.0], [0.3, 1.0 + 1e-7])
    for mode in ("step_index", "trajectory", "return_to_go"):
        assert all((a == 0.0).all() for a in policy_advantages(near, mode=mode))
    assert policy_advantages(near, tie_tolerance=1e-9)[1][1] == pytest.approx(1.0)


def test_a_group_of_one_is_refused():
    with pytest.raises(ValueError, match="a group of 1"):
        policy_advantages(arrays([1, 2]))
    with pytest.raises(ValueError, match="a group of 0"):
        policy_advantages([])


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=r"rewards\[1\] must be finite, got nan"):
        policy_advantages(arrays([1], [math.nan]))
    with pytest.raises(ValueError, match="'gae' needs values"):
        policy_advantages(arrays([1], [2]), mode="gae")
    with pytest.raises(ValueError, match=r"lengths \[1, 2\], got lengths \[1, 1\]"):
        policy_advantages(arrays([1], [2, 3]), mode="gae", values=arrays([1], [2]))
    with pytest.raises(ValueError, match="got 'grpo'"):
        policy_advantages(arrays([1], [2]), mode="grpo")
    with pytest.raises(ValueError, match="got 'mean'"):
        policy_advantages(arrays([1], [2]), lone_step="mean")
    with pytest.raises(ValueError, match=r"rewards\[0\] must be finite, got inf"):
        judge_advantages([[math.inf, 1.0]])
    with pytest.raises(ValueError, match="got 'rank'"):
        judge_advantages([[1.0]], normalization="rank")


# Length bias (pitfall 18): what does the tail that only the longest rollout has receive, beyond what the rewards say?


@pytest.mark.parametrize(("lone_step", "tail"), [("raw", -1.0), ("drop", 0.0), ("baseline", 0.0)])
def test_length_bias_where_rewards_carry_no_signal(lone_step, tail):
    # Every step of every rollout has the same reward, so nothing should be learned; raw pushes the tail by sign(R):
    # 3 lone steps at -1 when all failed (long failures are punished), at +1 when all won (long successes are rewarded).
    lost = policy_advantages(arrays([-1], [-1, -1], [-1] * 5), lone_step=lone_step)
    won = policy_advantages(arrays([1], [1, 1], [1] * 5), lone_step=lone_step)
    assert_ragged(lost, [[0], [0, 0], [0, 0, tail, tail, tail]])
    assert_ragged(won, [[0], [0, 0], [0, 0, -tail, -tail, -tail]])


@pytest.mark.parametrize(
    ("lone_step", "tail", "total"), [("raw", -1.0, -2.0), ("drop", 0.0, 0.0), ("baseline", -0.866025, -1.732051)]
)
def test_length_bias_where_the_longest_rollout_fails(lone_step, tail, total):
    # index 0: 1, 1, -1: mean 1/3, std sqrt(8)/3 = .942809 -> .707107, .707107, -1.414214.  index 1: 1, -1 -> 1, -1
    # Compared columns sum to 0; the tail's sum is the net push against length. all: three +1, four -1: mean -1/7,
    # std sqrt(1 - 1/49) = .989743, (-1 + 1/7)/.989743 = -.866025.
    advantages = policy_advantages(arrays([1], [1, 1], [-1] * 4), lone_step=lone_step)
    assert_ragged(advantages, [[0.707107], [0.707107, 1.0], [-1.414214, -1.0, tail, tail]])
    assert sum(a.sum() for a in advantages) == pytest.approx(total, abs=1e-6)


@pytest.mark.parametrize(("lone_step", "expected"), [("raw", -1.0), ("drop", 0.0), ("baseline", 0.0)])
def test_length_bias_where_length_and_reward_are_independent(lone_step, expected):
    # Rewards are -2 or 0 with equal odds, whatever the length (a hard task, mean -1): an unbiased rule gives the tail 0
    # on average. Sampled with a fixed seed: 400 groups of 4 x 4..12 steps; the tolerance is about 4 standard errors.
    rng = np.random.default_rng(18)
    tails = []
    for _ in range(400):
        rewards = [rng.choice([-2.0, 0.0], size=size) for size in (4, 4, 4, 12)]
        tails.append(policy_advantages(rewards, lone_step=lone_step)[3][4:].mean())
    assert np.mean(tails) == pytest.approx(expected, abs=0.08)


def test_judge_zscore_and_centered():
    # 2, 2, -2: mean 2/3, deviations 4/3, 4/3, -8/3, std sqrt(96/27) = 1.885618
    rewards = [[2.0, 2.0, -2.0], [1.0, 1.0, 1.0], [5.0], []]
    zscore = judge_advantages(rewards)
    assert_ragged(zscore, [[0.707107, 0.707107, -1.414214], [0, 0, 0], [0], []])
    centered = judge_advantages(rewards, normalization="centered")
    assert_ragged(centered, [[4 / 3, 4 / 3, -8 / 3], [0, 0, 0], [0], []])


@pytest.mark.parametrize("normalization", ["zscore", "centered"])
def test_judge_near_ties_give_exactly_zero(normalization):
    assert judge_advantages([[0.1 + 0.2, 0.3, 0.3]], normalization=normalization) == [[0.0, 0.0, 0.0]]


def majority_zscore(votes):
    # z-score of three votes: unanimous 0; of 2 against 1 the majority is (1 - 1/3)/sqrt(8/9) = .707107 away from the mean,
    # the minority (-1 - 1/3)/sqrt(8/9) = -1.414214, each in the direction of its sign.
    if len(set(votes)) == 1:
        return [0.0] * 3
    return [vote * (0.70710678 if votes.count(vote) == 2 else 1.41421356) for vote in votes]


@pytest.mark.parametrize("score_weight", [0.01, 0.3, 1.0, 2.0, 2.99])
def test_zscore_of_three_votes_is_supervision_by_the_outcome_alone(score_weight):
    # The paper misses it: for every vote pattern and 0 < lambda < 3 the judge's advantage is O * zscore_j(S_ij).
    for outcome, votes in product((1.0, -1.0), product((1, -1), repeat=3)):
        step_rewards = integrated_step_rewards(outcome, [votes], [True], score_weight=score_weight)
        (advantages,) = judge_advantages(consistency_rewards(step_rewards, [votes]))
        np.testing.assert_allclose(advantages, [outcome * z for z in majority_zscore(votes)], atol=1e-6)


def test_from_lambda_three_on_the_votes_overrule_the_outcome():
    # lambda 4, O = -1, votes + + -: R = -1 + 4/3 = 1/3 > 0, so the majority is confirmed against the outcome.
    # lambda 3: R = -1 + 1 = 0, no signal.
    for score_weight, expected in ((4.0, [0.707107, 0.707107, -1.414214]), (3.0, [0.0, 0.0, 0.0])):
        step_rewards = integrated_step_rewards(-1.0, [[1, 1, -1]], [True], score_weight=score_weight)
        (advantages,) = judge_advantages(consistency_rewards(step_rewards, [[1, 1, -1]]))
        np.testing.assert_allclose(advantages, expected, atol=1e-6)


def test_centered_lets_agreement_with_the_outcome_count():
    # lambda 1, votes + + -: mean vote 1/3, deviations 2/3, 2/3, -4/3 times R: O = 1: R = 4/3; O = -1: R = -2/3
    for outcome, expected in ((1.0, [8 / 9, 8 / 9, -16 / 9]), (-1.0, [-4 / 9, -4 / 9, 8 / 9])):
        step_rewards = integrated_step_rewards(outcome, [[1, 1, -1]], [True])
        rewards = consistency_rewards(step_rewards, [[1, 1, -1]])
        np.testing.assert_allclose(judge_advantages(rewards, normalization="centered"), [expected])


def test_balanced_indices_keep_all_of_the_smaller_class():
    is_won = [False, True, False, False, True, False, False]
    indices = balanced_indices(is_won, random.Random(0))
    assert indices == sorted(set(indices))
    assert len(indices) == 4
    assert {1, 4} <= set(indices)


def test_balanced_indices_draw_every_sample_of_the_larger_class():
    drawn = {i for seed in range(50) for i in balanced_indices([True, False, False, False], random.Random(seed))}
    assert drawn == {0, 1, 2, 3}
    assert balanced_indices([True, False, False], random.Random("a")) == balanced_indices(
        [True, False, False], random.Random("a")
    )


def test_balanced_indices_are_empty_without_one_class():
    assert balanced_indices([False, False], random.Random(0)) == []
    assert balanced_indices([True], random.Random(0)) == []
    assert balanced_indices([], random.Random(0)) == []
