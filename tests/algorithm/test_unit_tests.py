import math

import numpy as np
import pytest

from rla_lightning.algorithm.unit_tests import pass_at_k, unit_test_advantages, unit_test_quality, unit_test_rewards

NAN = math.nan

# Programs a b are correct, c d e are wrong.
#
#            a b   c d e   p_c   p_d   p_c p_d - (1 - p_c)(1 - p_d)
#   test 1   1 1   0 0 0    1     1     1 - 0       =  1
#   test 2   1 1   1 0 1    1    1/3   1/3 - 0      =  1/3
#   test 3   1 0   0 1 0    0    2/3    0 - 1/3     = -1/3
#   test 4   0 0   1 1 1    0     0     0 - 1       = -1
IS_CORRECT = [True, True, False, False, False]
PASSED = np.array(
    [
        [1.0, 1.0, 0.0, 0.0, 0.0],
        [1.0, 1.0, 1.0, 0.0, 1.0],
        [1.0, 0.0, 0.0, 1.0, 0.0],
        [0.0, 0.0, 1.0, 1.0, 1.0],
    ]
)


# Quality


def test_quality_by_hand():
    quality = unit_test_quality(PASSED, IS_CORRECT)
    np.testing.assert_array_equal(quality.accuracy, [1.0, 1.0, 0.0, 0.0])
    np.testing.assert_allclose(quality.detection, [1.0, 1 / 3, 2 / 3, 0.0], atol=1e-15)


def test_programs_may_come_in_any_order():
    # the columns as d a e b c
    order = [3, 0, 4, 1, 2]
    quality = unit_test_quality(PASSED[:, order], [False, True, False, True, False])
    np.testing.assert_array_equal(quality.accuracy, [1.0, 1.0, 0.0, 0.0])
    np.testing.assert_allclose(quality.detection, [1.0, 1 / 3, 2 / 3, 0.0], atol=1e-15)


def test_what_was_not_run_is_left_out():
    passed = np.array(
        [
            [1.0, NAN, NAN, 0.0, 1.0],  # a passes; of d and e one fails
            [NAN, 0.0, 1.0, NAN, NAN],  # b fails; c passes
            [NAN, NAN, 0.0, 0.0, 0.0],  # no correct program was run
            [1.0, 1.0, NAN, NAN, NAN],  # no wrong one
            [NAN, NAN, NAN, NAN, NAN],  # unreadable
        ]
    )
    quality = unit_test_quality(passed, IS_CORRECT)
    np.testing.assert_array_equal(quality.accuracy, [1.0, 0.0, NAN, 1.0, NAN])
    np.testing.assert_array_equal(quality.detection, [0.5, 0.0, 1.0, NAN, NAN])


def test_quality_without_correct_or_without_wrong_programs():
    all_correct = unit_test_quality(PASSED, [True] * 5)
    np.testing.assert_array_equal(all_correct.accuracy, [0.0, 0.0, 0.0, 0.0])
    np.testing.assert_array_equal(all_correct.detection, [NAN] * 4)
    all_wrong = unit_test_quality(PASSED, [False] * 5)
    np.testing.assert_array_equal(all_wrong.accuracy, [NAN] * 4)
    np.testing.assert_allclose(all_wrong.detection, [3 / 5, 1 / 5, 3 / 5, 2 / 5])


def test_quality_without_tests_or_programs():
    no_tests = unit_test_quality(np.zeros((0, 5)), IS_CORRECT)
    assert no_tests.accuracy.shape == no_tests.detection.shape == (0,)
    no_programs = unit_test_quality(np.zeros((3, 0)), [])
    np.testing.assert_array_equal(no_programs.accuracy, [NAN] * 3)
    np.testing.assert_array_equal(no_programs.detection, [NAN] * 3)


def test_the_table_is_not_changed():
    passed = PASSED.copy()
    unit_test_quality(passed, IS_CORRECT)
    np.testing.assert_array_equal(passed, PASSED)


@pytest.mark.parametrize(
    ("passed", "is_correct", "message"),
    [
        (PASSED, [True, False], r"\[m, 2\] for 2 programs, got shape \(4, 5\)"),
        (PASSED[0], IS_CORRECT, r"got shape \(5,\)"),
        ([[1.0, 0.5]], [True, False], "0, 1 or NaN only, got 0.5"),
        ([[1.0, -1.0]], [True, False], "got -1.0"),  # a score is not a share
        ([[math.inf, 0.0]], [True, False], "got inf"),
    ],
)
def test_tables_that_cannot_be_right_are_refused(passed, is_correct, message):
    with pytest.raises(ValueError, match=message):
        unit_test_quality(passed, is_correct)


# Rewards


def test_rewards_by_hand():
    np.testing.assert_allclose(unit_test_rewards(PASSED, IS_CORRECT), [1.0, 1 / 3, -1 / 3, -1.0], atol=1e-15)


def test_a_right_test_is_never_punished_and_a_wrong_one_never_rewarded():
    # correct, correct, wrong, wrong. All that can be seen of a test: p_c 1 pays p_d, p_c 0 pays p_d - 1.
    passed = [
        [1.0, 1.0, 1.0, 1.0],
        [1.0, 1.0, 1.0, 0.0],
        [1.0, 1.0, 0.0, 0.0],
        [1.0, 0.0, 1.0, 1.0],
        [1.0, 0.0, 1.0, 0.0],
        [1.0, 0.0, 0.0, 0.0],
    ]
    rewards = unit_test_rewards(np.array(passed), [True, True, False, False])
    np.testing.assert_array_equal(rewards, [0.0, 0.5, 1.0, -1.0, -0.5, 0.0])


def test_rewards_need_both_a_correct_and_a_wrong_program():
    np.testing.assert_array_equal(unit_test_rewards(PASSED, [True] * 5), [NAN] * 4)
    np.testing.assert_array_equal(unit_test_rewards(PASSED, [False] * 5), [NAN] * 4)
    passed = np.array([[NAN, 1.0, 0.0], [1.0, NAN, NAN], [NAN, NAN, 0.0], [NAN, NAN, NAN]])
    np.testing.assert_array_equal(unit_test_rewards(passed, [True, True, False]), [1.0, NAN, NAN, NAN])


# Advantages


def test_advantages_by_hand():
    # mean 0, variance (1 + 1/9 + 1/9 + 1) / 4 = 5/9, std sqrt(5) / 3: 3 / sqrt(5) and 1 / sqrt(5)
    advantages = unit_test_advantages(np.array([1.0, 1 / 3, -1 / 3, -1.0]))
    np.testing.assert_allclose(advantages, [3 / math.sqrt(5), 1 / math.sqrt(5), -1 / math.sqrt(5), -3 / math.sqrt(5)])


def test_what_is_not_known_neither_counts_nor_gets_an_advantage():
    # of 1, 1 and -0.5: mean 0.5, variance (0.25 + 0.25 + 1) / 3 = 0.5
    advantages = unit_test_advantages(np.array([1.0, NAN, 1.0, -0.5, NAN]))
    np.testing.assert_allclose(advantages, [math.sqrt(0.5), 0.0, math.sqrt(0.5), -math.sqrt(2), 0.0])


@pytest.mark.parametrize("rewards", [[], [NAN, NAN], [0.7], [NAN, -1.0], [0.1, 0.1, 0.1], [1 / 3, 1 / 3 + 1e-9, NAN]])
def test_nothing_to_compare_gives_exactly_zero(rewards):
    np.testing.assert_array_equal(unit_test_advantages(np.array(rewards)), [0.0] * len(rewards))


def test_the_tolerance_of_ties_is_a_std():
    # stds 0.5e-6 and 2e-6
    np.testing.assert_array_equal(unit_test_advantages(np.array([0.0, 1e-6])), [0.0, 0.0])
    np.testing.assert_allclose(unit_test_advantages(np.array([0.0, 4e-6])), [-1.0, 1.0])
    np.testing.assert_array_equal(unit_test_advantages(np.array([0.0, 0.2]), tie_tolerance=0.1), [0.0, 0.0])


def test_a_positive_affine_map_of_the_rewards_leaves_the_advantages():
    # p_c + p_d = 1 + r for these rewards, so standardised over a task it is no other objective
    rewards = np.array([1.0, 1 / 3, -1 / 3, -1.0])
    by_sum = unit_test_advantages(np.array([2.0, 4 / 3, 2 / 3, 0.0]))
    np.testing.assert_allclose(by_sum, [3 / math.sqrt(5), 1 / math.sqrt(5), -1 / math.sqrt(5), -3 / math.sqrt(5)])
    np.testing.assert_allclose(unit_test_advantages(4.0 * rewards - 7.0), by_sum)
    np.testing.assert_allclose(unit_test_advantages(-rewards), -by_sum)


# pass@k


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (4, 1, 1, 1 / 4),
        (4, 1, 2, 1 / 2),  # 1 - C(3, 2) / C(4, 2) = 1 - 3/6
        (4, 2, 2, 5 / 6),  # 1 - 1/6
        (4, 2, 3, 1.0),  # two wrong ones cannot fill three places
        (5, 2, 3, 9 / 10),  # 1 - 1/10
        (8, 3, 4, 13 / 14),  # 1 - 5/70
        (10, 1, 5, 1 / 2),  # 1 - 126/252
        (3, 0, 3, 0.0),
        (3, 0, 1, 0.0),
        (3, 3, 1, 1.0),
        (1, 1, 1, 1.0),
    ],
)
def test_pass_at_k_by_hand(n, c, k, expected):
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-15)


def test_pass_at_k_stays_exact_beyond_what_floats_can_hold():
    # C(2000, 1000) has 600 digits; with one right program the chance is k/n
    assert pass_at_k(2000, 1, 1000) == 0.5


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 2), (4, -1, 2), (0, 0, 1), (0, 0, 0)])
def test_pass_at_k_of_impossible_counts(n, c, k):
    with pytest.raises(ValueError, match=f"got n={n}, c={c}, k={k}"):
        pass_at_k(n, c, k)
