"""How likely the policy is to succeed in a task: the critic, a regression on the task's knobs, or both together.

All are measured before they are used: on each epoch's rollouts, fitted to earlier epochs only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np

from rla_lightning.algorithm.regression import brier_score, calibration_error, fit_logistic, predict_logistic
from rla_lightning.curriculum.pool import Sighting, TaskPool
from rla_lightning.environments.base import Environment
from rla_lightning.types import Task

Predictor = Literal["critic", "knobs", "both"]
PREDICTORS: tuple[Predictor, ...] = ("critic", "knobs", "both")
KnobsOf = Callable[[Task], Mapping[str, float]]
HALF_LIFE = 5.0  # epochs after which a sighting counts half: the policy moves
WINDOW = 5  # latest epochs that predictors are measured on


def log_odds(probability: float) -> float:
    """Of a probability held inside [0.01, 0.99]."""
    clipped = min(max(probability, 0.01), 0.99)
    return math.log(clipped / (1.0 - clipped))


class KnobRegression:
    """Logistic regression of success on a task's kind and knobs, and on the critic's log odds where asked for."""

    def __init__(
        self, knobs_of: KnobsOf, tasks: Sequence[Task], sightings: Sequence[Sighting], uses_critic: bool, epoch: int
    ) -> None:
        """Fit to what was seen.

        Args:
            knobs_of: a task's knobs.
            tasks: of each sighting.
            sightings: rollouts of earlier epochs.
            uses_critic: whether the critic's prediction is a feature.
            epoch: that is to be predicted; sightings weigh 2^(-age / HALF_LIFE).
        """
        self._knobs_of = knobs_of
        self._uses_critic = uses_critic
        self._kinds = sorted({task.kind for task in tasks})
        knobs = [knobs_of(task) for task in tasks]
        self._names = sorted({name for values in knobs for name in values})
        columns = {name: np.array([values[name] for values in knobs if name in values]) for name in self._names}
        varying = {name: bool(np.ptp(column) > 0) for name, column in columns.items()}  # the deviation of equal floats is not 0
        self._center = {name: float(column.mean() if varying[name] else column[0]) for name, column in columns.items()}
        self._scale = {name: float(column.std()) if varying[name] else 1.0 for name, column in columns.items()}
        weights = np.array([0.5 ** ((epoch - 1 - seen.epoch) / HALF_LIFE) for seen in sightings])
        successes = np.array([seen.successes for seen in sightings], dtype=float)
        rollouts = np.array([seen.rollouts for seen in sightings], dtype=float)
        features = self._features(tasks, [seen.critic_value for seen in sightings])
        self._coefficients = fit_logistic(features, successes, rollouts, weights)

    def predict(self, tasks: Sequence[Task], critic_values: Sequence[float | None]) -> list[float]:
        """Success probability of each task; the critic's are ignored unless they are a feature."""
        if not tasks:
            return []
        return predict_logistic(self._coefficients, self._features(tasks, critic_values)).tolist()

    def _features(self, tasks: Sequence[Task], critic_values: Sequence[float | None]) -> np.ndarray:
        rows = []
        for task, value in zip(tasks, critic_values, strict=True):
            knobs = self._knobs_of(task)
            odd = next((name for name in knobs if not math.isfinite(knobs[name])), None)
            if odd is not None:
                raise ValueError(f"knob '{odd}' of task '{task.id}' must be finite, got {knobs[odd]}")
            row = [float(task.kind == kind) for kind in self._kinds]
            row += [(knobs.get(name, self._center[name]) - self._center[name]) / self._scale[name] for name in self._names]
            if self._uses_critic:
                row.append(0.0 if value is None or math.isnan(value) else log_odds(value))
            rows.append(row)
        return np.array(rows)


def fitted(environment: Environment, pool: TaskPool, before: int, uses_critic: bool) -> KnobRegression | None:
    """The regression on sightings before an epoch; None without any."""
    return _fitted(environment.knobs, pool, before, uses_critic)


def _fitted(knobs_of: KnobsOf, pool: TaskPool, before: int, uses_critic: bool) -> KnobRegression | None:
    seen = [sighting for sighting in pool.sightings if sighting.epoch < before]
    if not seen:
        return None
    return KnobRegression(knobs_of, [pool.record(s.task_id).task for s in seen], seen, uses_critic, before)


def prediction_quality(environment: Environment, pool: TaskPool) -> dict[str, float]:
    """Brier score and calibration error of each predictor on the latest epochs' rollouts, next to a constant's.

    The regressions and the constant (the success rate) know earlier epochs only, the critic predicted before its update.
    NaN before the second epoch.
    """
    known = {task_id: environment.knobs(pool.record(task_id).task) for task_id in {seen.task_id for seen in pool.sightings}}

    def knobs_of(task: Task) -> Mapping[str, float]:
        return known[task.id]  # every fit asks for the same ones

    rows: list[tuple[float, float, float, float, int, int]] = []  # critic, knobs, both, constant, successes, rollouts
    for epoch in range(max(1, pool.epoch - WINDOW), pool.epoch):
        earlier = [sighting for sighting in pool.sightings if sighting.epoch < epoch]
        seen = [s for s in pool.sightings if s.epoch == epoch and s.critic_value is not None]
        if not earlier or not seen:
            continue
        constant = sum(s.successes for s in earlier) / sum(s.rollouts for s in earlier)
        tasks, values = [pool.record(s.task_id).task for s in seen], [s.critic_value for s in seen]
        by_knobs, by_both = (_fitted(knobs_of, pool, epoch, uses_critic) for uses_critic in (False, True))
        assert by_knobs is not None
        assert by_both is not None
        predicted = zip(by_knobs.predict(tasks, values), by_both.predict(tasks, values), strict=True)
        for sighting, (knobs, both) in zip(seen, predicted, strict=True):
            assert sighting.critic_value is not None
            rows.append((sighting.critic_value, knobs, both, constant, sighting.successes, sighting.rollouts))
    table = np.array(rows).reshape(-1, 6)
    successes, rollouts = table[:, 4], table[:, 5]
    quality = {}
    for column, name in enumerate((*PREDICTORS, "constant")):
        quality[f"prediction_brier_{name}"] = brier_score(table[:, column], successes, rollouts)
        quality[f"prediction_calibration_error_{name}"] = calibration_error(table[:, column], successes, rollouts)
    return quality
