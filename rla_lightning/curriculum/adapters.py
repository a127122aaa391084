"""The adapters that a YAML file names: parametric rewrites, and the controls that replace tasks without any verdict.

The one that asks a language model is in rewriter.py. `data.adapter: null` is the static-environment ablation.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Literal

from rla_lightning.algorithm.acceptance import trigger
from rla_lightning.curriculum.pool import TaskPool
from rla_lightning.curriculum.prediction import PREDICTORS
from rla_lightning.curriculum.proposing import Predict, ProposingAdapter, Pull, Ranking, Request, TaskAdapter, replace_by_fresh
from rla_lightning.distributed import failing_together, from_first, rank
from rla_lightning.environments.base import Environment
from rla_lightning.types import ConfigError, Task, TaskFeedback

logger = logging.getLogger(__name__)


class ParametricAdapter(ProposingAdapter):
    """Proposes, for each task outside the band, the variant whose expected success is best."""

    def __init__(
        self,
        low: float = 0.2,
        high: float = 0.8,
        candidates: int = 32,
        target: float = 0.5,
        max_proposals: int | None = None,
        ranking: Ranking = "both",
        pull: Pull = "root",
        redraw: bool = False,
        control_share: float = 0.1,
        fresh_share: float = 0.0,
    ) -> None:
        """Configure when and how tasks are rewritten.

        Args:
            low: a success rate below it asks for an easier variant.
            high: a success rate above it asks for a harder variant.
            candidates: variants that the environment is asked for per task.
            target: wanted success rate of the chosen variant.
            max_proposals: most proposals pending at a time; null: no limit.
            ranking: what predicts the success of the variants: the critic, a regression on the tasks' knobs, both (the critic's
                prediction is another knob), or random, which takes any.
            pull: target takes the variant expected nearest the target; root that with the knobs nearest to the sampled task
                that all began with, among those expected within 0.15 of the target, and half of the variants are then
                easier ones of that root.
            redraw: give rolled-out active tasks another layout with the same knobs.
            control_share: of the requests that get the task itself, unchanged, as their proposal: how many of these are
                accepted is the run's false-accept rate.
            fresh_share: of the slots that hold fresh tasks, another one after each visit, and are never rewritten.
        """
        if ranking not in ("random", *PREDICTORS):
            raise ConfigError(f"ranking must be one of random, {', '.join(PREDICTORS)}, got '{ranking}'")
        predictor = None if ranking == "random" else ranking
        super().__init__(low, high, target, max_proposals, predictor, pull, control_share, fresh_share)
        if candidates < 1:
            raise ConfigError(f"candidates must be at least 1, got {candidates}")
        self.candidates = candidates
        self.redraw = redraw

    def check(self, environment: Environment) -> None:
        if type(environment).vary is Environment.vary:
            raise ConfigError(
                f"environment '{environment.name}' has no vary, so its tasks have no variants: use "
                "rla_lightning.curriculum.rewriter.RewriterAdapter, or no adapter"
            )
        if self.redraw and type(environment).redraw is Environment.redraw:
            raise ConfigError(f"environment '{environment.name}' cannot redraw a task with the same knobs: set redraw to false")

    def _candidates(
        self, environment: Environment, pool: TaskPool, requests: Sequence[Request], key: str
    ) -> list[tuple[Task, ...]]:
        candidates: list[tuple[Task, ...]] = []
        with failing_together():
            if rank() == 0:  # validating may run programs, and a clock must not part the processes' pools
                near_root = self.pull == "root" and self.predictor is not None  # else nobody would sort out wrong directions
                candidates = [usable_variants(environment, pool, r, self.candidates, key, near_root) for r in requests]
        return from_first(candidates)

    def _refresh(self, environment: Environment, pool: TaskPool, feedback: Sequence[TaskFeedback], key: str) -> None:
        super()._refresh(environment, pool, feedback, key)
        if self.redraw:
            redraw_slots(environment, pool, feedback, self._fresh_slots(pool), f"{key}/redraw")


def usable_variants(
    environment: Environment, pool: TaskPool, request: Request, number: int, key: str, near_root: bool = False
) -> tuple[Task, ...]:
    """New and valid ones among `number` variants of the environment, shuffled: stable sorting then breaks ties at random.

    Near the root half of them are easier variants of the task that all began with, made children of this one.
    """
    task = request.parent.task
    root = pool.record(task.root_id).task
    rng = Random(f"{key}/vary/{task.id}")
    of_root = number // 2 if near_root and root.id != task.id else 0
    try:
        varied = {candidate.id: candidate for candidate in environment.vary(task, request.direction, rng, number - of_root)}
        if of_root:
            for candidate in environment.vary(root, "easier", rng, of_root):
                varied[candidate.id] = replace(candidate, parent_id=task.id, version=task.version + 1)
        usable = [c for c in varied.values() if not pool.knows(c.id) and environment.validate(c, task) is None]
    except Exception as error:  # of somebody's environment: the task stays as it is, the run goes on
        logger.warning("task %s could not be rewritten: %s: %s", task.id, type(error).__name__, error)
        return ()
    rng.shuffle(usable)
    return tuple(usable)


class FreshTasks(TaskAdapter):
    """The control: rolled-out tasks give way to others of the same source, fresh or of a fixed set, without any verdict."""

    def __init__(
        self,
        replace: Literal["all", "out_of_band"] = "all",
        low: float = 0.2,
        high: float = 0.8,
    ) -> None:
        """Configure what is replaced.

        Args:
            replace: `all` tasks that were rolled out, or only those `out_of_band`.
            low: lower end of the band of success rates.
            high: upper end of it.
        """
        if not 0.0 <= low < high <= 1.0:
            raise ConfigError(f"need 0 <= low < high <= 1, got {low} and {high}")
        if replace not in ("all", "out_of_band"):
            raise ConfigError(f"replace must be 'all' or 'out_of_band', got '{replace}'")
        self.replace = replace
        self.low = low
        self.high = high

    def adapt(
        self, environment: Environment, pool: TaskPool, feedback: Sequence[TaskFeedback], predict: Predict, key: str
    ) -> None:
        del predict
        leaving = [
            item.task.id
            for item in feedback
            if pool.is_active(item.task.id) and not pool.has_pending_child(item.task.id) and self._leaves(item)
        ]
        replace_by_fresh(environment, pool, leaving, key)

    def _leaves(self, item: TaskFeedback) -> bool:
        if self.replace == "all":
            return True
        return item.rollouts > 0 and trigger(item.successes, item.rollouts, self.low, self.high) is not None


class SameKnobs(TaskAdapter):
    """The control: rolled-out tasks give way to others with the same kind and knobs, without any verdict."""

    def check(self, environment: Environment) -> None:
        if type(environment).redraw is Environment.redraw:
            raise ConfigError(f"environment '{environment.name}' cannot redraw a task with the same knobs")

    def adapt(
        self, environment: Environment, pool: TaskPool, feedback: Sequence[TaskFeedback], predict: Predict, key: str
    ) -> None:
        del predict
        redraw_slots(environment, pool, feedback, frozenset(), key)


def redraw_slots(
    environment: Environment, pool: TaskPool, feedback: Sequence[TaskFeedback], kept: frozenset[str], key: str
) -> None:
    """Replace rolled-out active tasks without pending proposals by others with the same knobs, where there are any."""
    others: list[Task] = []
    with failing_together():
        if rank() == 0:  # validating may run programs, and a clock must not part the processes' pools
            others = _redrawn(environment, pool, [item.task for item in feedback if item.task.id not in kept], key)
    others = from_first(others)
    if others:
        pool.replace_slots([str(task.parent_id) for task in others], others)


def _redrawn(environment: Environment, pool: TaskPool, tasks: Sequence[Task], key: str) -> list[Task]:
    """Successors of those tasks that are active, have no pending proposal and can be drawn anew."""
    redrawn: list[Task] = []
    taken = {task.id for task in pool.slots} | {proposal.task.id for proposal in pool.pending} | pool.held_out
    for task in tasks:
        if not pool.is_active(task.id) or pool.has_pending_child(task.id):
            continue
        try:
            other = environment.redraw(task, Random(f"{key}/{task.id}"))
            is_usable = other is not None and other.id not in taken and environment.validate(other) is None
        except Exception as error:  # of somebody's environment: the task stays as it is, the run goes on
            logger.warning("task %s could not be redrawn: %s: %s", task.id, type(error).__name__, error)
            continue
        if other is not None and is_usable:
            redrawn.append(replace(other, root_id=task.root_id, parent_id=task.id, version=task.version))
            taken.add(other.id)
    return redrawn
