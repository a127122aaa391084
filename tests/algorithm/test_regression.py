import math

import numpy as np
import pytest

from rla_lightning.algorithm.regression import brier_score, calibration_error, fit_logistic, predict_logistic


def array(*values: float) -> np.ndarray:
    return np.array(values, dtype=float)


def test_without_features_the_intercept_balances_data_and_penalty():
    # d/db [40 log(1 + e^b) - 30 b + b²/2] = 40 p - 30 + b, which is 0 at the minimum
    b = fit_logistic(np.zeros((1, 0)), array(30), array(40), array(1), ridge=1.0)
    assert 40 / (1 + math.exp(-b[0])) - 30 + b[0] == pytest.approx(0, abs=1e-6)
    # without weight on the penalty the success rate comes out
    weak = fit_logistic(np.zeros((1, 0)), array(30), array(40), array(1), ridge=1e-6)
    assert predict_logistic(weak, np.zeros((1, 0)))[0] == pytest.approx(0.75, abs=1e-5)


def test_it_finds_the_coefficients_that_made_the_data():
    rng = np.random.default_rng(0)
    features = rng.normal(size=(4000, 2))
    p = 1 / (1 + np.exp(-(0.5 + features @ array(1.0, -2.0))))
    rollouts = np.full(4000, 8.0)
    b = fit_logistic(features, rng.binomial(8, p).astype(float), rollouts, np.ones(4000))
    assert b == pytest.approx([0.5, 1.0, -2.0], abs=0.1)  # standard errors of about .02


def test_separable_data_does_not_diverge():
    features = array(-3000, -2000, 2000, 3000).reshape(-1, 1)
    b = fit_logistic(features, array(0, 0, 8, 8), array(8, 8, 8, 8), np.ones(4), ridge=1.0)
    assert np.isfinite(b).all()
    assert predict_logistic(b, features) == pytest.approx([0, 0, 1, 1], abs=0.01)


def test_a_weight_of_two_is_the_same_row_twice():
    once = fit_logistic(array(0, 1).reshape(-1, 1), array(2, 7), array(8, 8), array(1, 2))
    twice = fit_logistic(array(0, 1, 1).reshape(-1, 1), array(2, 7, 7), array(8, 8, 8), array(1, 1, 1))
    assert once == pytest.approx(twice)


def test_brier_score_by_hand():
    # 2 of 4 at .5: 4 * .25; 4 of 4 at .9: 4 * .01; over 8 rollouts
    assert brier_score(array(0.5, 0.9), array(2, 4), array(4, 4)) == pytest.approx(1.04 / 8)
    assert math.isnan(brier_score(array(), array(), array()))


def test_calibration_error_by_hand():
    # bin .4-.6: 8 rollouts at .5, 6 won: a gap of 2; bin .8-1: 4 at .9, 4 won: a gap of .4; 2.4 of 12
    assert calibration_error(array(0.5, 0.5, 0.9), array(2, 4, 4), array(4, 4, 4)) == pytest.approx(0.2)
    # gaps of one bin cancel: on average over it the predictions are right
    assert calibration_error(array(0.41, 0.59), array(59, 41), array(100, 100)) == pytest.approx(0.0, abs=1e-12)
    assert calibration_error(array(1.0), array(4), array(4)) == 0.0
    assert math.isnan(calibration_error(array(), array(), array()))


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="ridge must be positive, got 0"):
        fit_logistic(np.zeros((1, 1)), array(1), array(2), array(1), ridge=0)
    with pytest.raises(ValueError, match="finite"):
        fit_logistic(np.full((1, 1), np.nan), array(1), array(2), array(1))
    with pytest.raises(ValueError, match="successes <= rollouts"):
        fit_logistic(np.zeros((1, 1)), array(3), array(2), array(1))
