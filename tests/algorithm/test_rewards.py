import math

import numpy as np
import pytest

from rla_lightning.algorithm.rewards import consistency_rewards, integrated_step_rewards


def test_step_reward_holds_both_outcome_and_votes():
    # pitfall 19: neither overwrites the other.
    # O = 1: 1 + (1+1-1)/3 = 4/3;  1 + (-3)/3 = 0;  1 + 3/3 = 2.   O = -1: -1 + 1/3 = -2/3;  -1 - 1 = -2;  -1 + 1 = 0.
    scores = [[1, 1, -1], [-1, -1, -1], [1, 1, 1]]
    won = integrated_step_rewards(1.0, scores, [True] * 3)
    lost = integrated_step_rewards(-1.0, scores, [True] * 3)
    np.testing.assert_allclose(won, [4 / 3, 0.0, 2.0])
    np.testing.assert_allclose(lost, [-2 / 3, -2.0, 0.0], atol=1e-15)
    assert won.dtype == np.float64


def test_unparsable_votes_leave_the_mean_and_a_step_without_votes_keeps_the_outcome():
    # [None, -1, None] -> mean -1, not -1/3;  [None, None] and [] -> mean 0.
    rewards = integrated_step_rewards(1.0, [[None, -1, None], [None, None], []], [True, True, True])
    np.testing.assert_allclose(rewards, [0.0, 1.0, 1.0])


def test_weights_and_penalty():
    # 2 * (-1) + 0.5 * 1/3 = -11/6;  2 * (-1) + 0.5 * 1 - 0.75 = -2.25
    rewards = integrated_step_rewards(
        -1.0, [[1, -1, 1], [1, 1, 1]], [True, False], score_weight=0.5, outcome_weight=2.0, invalid_penalty=0.75
    )
    np.testing.assert_allclose(rewards, [-11 / 6, -2.25])


def test_outcome_only_and_votes_only():
    scores = [[1, 1, -1], [-1, -1, -1]]
    np.testing.assert_allclose(integrated_step_rewards(1.0, scores, [True, True], score_weight=0.0), [1.0, 1.0])
    np.testing.assert_allclose(integrated_step_rewards(1.0, scores, [True, True], outcome_weight=0.0), [1 / 3, -1.0])


def test_trajectory_without_steps():
    assert integrated_step_rewards(1.0, [], []).shape == (0,)
    assert consistency_rewards(np.zeros(0), []) == []


def test_consistency_reward_is_step_reward_times_vote():
    # 4/3 * (1, 1, -1);  -2 * (-1, 1) with the penalty in the middle, not -2 * something
    rewards = consistency_rewards(np.array([4 / 3, -2.0]), [[1, 1, -1], [-1, None, 1]], parse_penalty=-5.0)
    assert rewards == [[4 / 3, 4 / 3, -4 / 3], [2.0, -5.0, -2.0]]


def test_default_parse_penalty_is_minus_two():
    assert consistency_rewards(np.array([0.5]), [[None, 1]]) == [[-2.0, 0.5]]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_input_is_named(bad):
    with pytest.raises(ValueError, match=f"outcome must be finite, got {bad}"):
        integrated_step_rewards(bad, [[1]], [True])
    with pytest.raises(ValueError, match=f"invalid_penalty must be finite, got {bad}"):
        integrated_step_rewards(1.0, [[1]], [True], invalid_penalty=bad)
    with pytest.raises(ValueError, match=f"step 1 must be finite, got {bad}"):
        consistency_rewards(np.array([1.0, bad]), [[1], [1]])
    with pytest.raises(ValueError, match=f"parse_penalty must be finite, got {bad}"):
        consistency_rewards(np.array([1.0]), [[1]], parse_penalty=bad)


def test_impossible_votes_and_lengths_are_named():
    with pytest.raises(ValueError, match="got 0 at step 1"):
        integrated_step_rewards(1.0, [[1], [0]], [True, True])
    with pytest.raises(ValueError, match="got 2 at step 0"):
        consistency_rewards(np.array([1.0]), [[2]])
    with pytest.raises(ValueError, match="scores has 1 steps but is_valid has 2"):
        integrated_step_rewards(1.0, [[1]], [True, True])
    with pytest.raises(ValueError, match="step_rewards has 2 steps but scores has 1"):
        consistency_rewards(np.array([1.0, 1.0]), [[1]])
