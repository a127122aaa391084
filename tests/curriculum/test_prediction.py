import math
from random import Random

import numpy as np
import pytest

from rla_lightning.curriculum.pool import TaskPool
from rla_lightning.curriculum.prediction import fitted, log_odds, prediction_quality
from rla_lightning.environments.base import Environment, Episode
from rla_lightning.types import Split, Task, TaskFeedback


def make(name: str, kind: str = "open", **knobs: float) -> Task:
    return Task(name, "doors", {"knobs": knobs}, 0.5, root_id=name, kind=kind)


class Doors(Environment):
    name = "doors"

    def sample(self, rng: Random, difficulty: float, split: Split = "in_domain") -> Task:
        raise NotImplementedError

    def start(self, task: Task) -> Episode:
        raise NotImplementedError

    def knobs(self, task: Task) -> dict[str, float]:
        return dict(task.spec["knobs"])


def played(count: int, epochs: int, chance, critic=lambda task: 0.5, kinds=("open",)) -> TaskPool:
    """`count` tasks with knobs from 0 to 1, all rolled out 8 times in each epoch."""
    tasks = [make(f"{i}", kinds[i % len(kinds)], locks=i / (count - 1)) for i in range(count)]
    pool, rng = TaskPool(tasks), Random("played")
    for _ in range(epochs):
        wins = [sum(rng.random() < chance(task) for _ in range(8)) for task in tasks]
        pool.book([TaskFeedback(task, won, 8, critic(task)) for task, won in zip(tasks, wins, strict=True)])
    return pool


def test_knobs_predict_what_depends_on_them():
    pool = played(100, 5, lambda task: 0.9 - 0.8 * task.spec["knobs"]["locks"])
    regression = fitted(Doors(), pool, pool.epoch, uses_critic=False)
    predicted = regression.predict([make("a", locks=0.0), make("b", locks=0.5), make("c", locks=1.0)], [None] * 3)
    assert predicted == pytest.approx([0.9, 0.5, 0.1], abs=0.06)
    assert regression.predict([], []) == []


def test_kinds_have_success_rates_of_their_own_and_an_unknown_one_is_between():
    pool = played(100, 5, lambda task: 0.8 if task.kind == "open" else 0.2, kinds=("open", "shut"))
    regression = fitted(Doors(), pool, pool.epoch, uses_critic=False)
    tasks = [make("a", "open", locks=0.5), make("b", "shut", locks=0.5), make("c", "new", locks=0.5)]
    predicted = regression.predict(tasks, [None] * 3)
    assert predicted == pytest.approx([0.8, 0.2, 0.5], abs=0.05)


def test_a_knob_that_a_task_does_not_have_is_taken_as_the_mean():
    pool = played(100, 3, lambda task: 0.9 - 0.8 * task.spec["knobs"]["locks"])
    regression = fitted(Doors(), pool, pool.epoch, uses_critic=False)
    without, mean = regression.predict([make("a"), make("b", locks=0.5, keys=3.0)], [None] * 2)
    assert without == pytest.approx(mean)


def test_what_only_the_critic_sees_is_used_where_it_is_a_feature():
    def chance(task):
        return 0.9 if int(task.id) % 2 else 0.1

    pool = played(100, 5, chance, critic=chance)
    both = fitted(Doors(), pool, pool.epoch, uses_critic=True)
    predicted = both.predict([make("a", locks=0.5), make("b", locks=0.5), make("c", locks=0.5)], [0.9, 0.1, math.nan])
    assert predicted == pytest.approx([0.9, 0.1, 0.5], abs=0.05)
    knobs = fitted(Doors(), pool, pool.epoch, uses_critic=False)
    assert knobs.predict([make("a", locks=0.5)], [0.9]) == pytest.approx([0.5], abs=0.05)


def test_old_sightings_count_less():
    task = make("a", locks=0.0)
    pool = TaskPool([task])
    for won in [8] * 10 + [0] * 5:  # the policy has unlearned it; weights of wins 2^-1 2^-1.2 ..., of losses 1 2^-.2 ...
        pool.book([TaskFeedback(task, won, 8, 0.5)])
    (predicted,) = fitted(Doors(), pool, pool.epoch, uses_critic=False).predict([task], [None])
    lost, won = (sum(0.5 ** (age / 5) for age in ages) for ages in (range(5), range(5, 15)))
    assert predicted == pytest.approx(won / (won + lost), abs=0.02)  # the penalty pulls a little to one half


def test_predictors_are_measured_on_later_rollouts_only():
    rates = {"0": 0.25, "1": 0.75}
    tasks = [make("0", locks=0.0), make("1", locks=1.0)]
    pool = TaskPool(tasks)
    pool.book([TaskFeedback(tasks[0], 2, 8, 0.5), TaskFeedback(tasks[1], 6, 8, 0.5)])
    assert all(math.isnan(value) for value in prediction_quality(Doors(), pool).values())  # nothing came before it
    pool.book([TaskFeedback(task, int(8 * rates[task.id]), 8, rates[task.id]) for task in tasks])
    quality = prediction_quality(Doors(), pool)
    assert quality["prediction_brier_critic"] == pytest.approx(0.1875)  # .25 * .75, as it predicted the rates
    assert quality["prediction_calibration_error_critic"] == pytest.approx(0.0)
    assert quality["prediction_brier_constant"] == pytest.approx(0.25)  # 8 of 16 in the first epoch
    assert 0.1875 < quality["prediction_brier_knobs"] < 0.22
    before = quality["prediction_brier_knobs"]
    pool.book([TaskFeedback(tasks[0], 8, 8, 0.0), TaskFeedback(tasks[1], 0, 8, 1.0)])  # the world turns round
    after = prediction_quality(Doors(), pool)
    assert after["prediction_brier_knobs"] > 0.3 > before
    # 16 rollouts of each epoch: .1875 and 1 for the critic
    assert after["prediction_brier_critic"] == pytest.approx((0.1875 + 1.0) / 2)


def test_log_odds_are_bounded():
    assert log_odds(0.5) == 0.0
    assert -log_odds(1.0) == pytest.approx(log_odds(0.0)) == pytest.approx(np.log(1 / 99))


def test_a_knob_that_is_the_same_everywhere_says_nothing():
    tasks = [make(f"{i}", locks=0.1) for i in range(24)]  # whose deviation is 1e-17, not 0
    for won in (2, 6):
        pool = TaskPool(tasks)
        pool.book([TaskFeedback(task, won, 8, 0.5) for task in tasks])
        predicted = fitted(Doors(), pool, 1, uses_critic=False).predict(
            [make("a", locks=0.05), make("b", locks=0.15)], [None] * 2
        )
        assert predicted == pytest.approx([won / 8] * 2, abs=0.02)


def test_a_knob_that_is_no_number_is_named():
    pool = TaskPool([make("a", locks=math.nan)])
    pool.book([TaskFeedback(make("a", locks=math.nan), 2, 8, 0.5)])
    with pytest.raises(ValueError, match="knob 'locks' of task 'a' must be finite, got nan"):
        fitted(Doors(), pool, 1, uses_critic=False)
