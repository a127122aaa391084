"""How the tasks follow the policy: adapters read an epoch's feedback and change the pool.

The datamodule books the feedback first (`TaskPool.book`), then calls `adapt`. The environment is
passed in, so that a YAML file names it once. `data.adapter: null` is the static-environment ablation.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, Protocol

from rla_lightning.algorithm.acceptance import trigger
from rla_lightning.curriculum.pool import TaskPool, TaskRecord
from rla_lightning.curriculum.selection import sample_distinct
from rla_lightning.distributed import failing_together, from_first, rank
from rla_lightning.environments.base import Environment
from rla_lightning.models.language_model import LoadedModel
from rla_lightning.types import ConfigError, Direction, Proposal, Task, TaskFeedback

logger = logging.getLogger(__name__)

Predict = Callable[[Sequence[Task]], list[float]]  # the critic's success probability of each task, NaN: cannot be played


class TaskAdapter(Protocol):
    """Changes the pool after an epoch: queues proposals or replaces slots."""

    def adapt(
        self, environment: Environment, pool: TaskPool, feedback: Sequence[TaskFeedback], predict: Predict, key: str
    ) -> None:
        """Adapt to the feedback that the pool has just booked.

        `predict` is called at most once, with every task to be judged; every random draw is a function of `key`. Under
        several processes all call this with the same arguments and leave the same pool.
        """

    def statistics(self) -> dict[str, float]:
        """What is logged about the latest `adapt`, under the same names every time."""


def anchored_success(successes: int, rollouts: int, parent_prediction: float, prediction: float) -> float:
    """Expected success of a rewrite: the parent's observed rate, moved by what the critic sees between the two.

    A critic can be biased as a whole and still order tasks well, so only the difference of its two predictions counts:

        logit(expected) = logit((s + 1/2) / (n + 1)) + logit(prediction) - logit(parent_prediction)

    with predictions held inside [0.01, 0.99] and the parent's rate shrunk by the Jeffreys prior.
    """
    for value in (parent_prediction, prediction):
        if not 0.0 <= value <= 1.0:  # also catches NaN
            raise ValueError(f"the critic predicted a success probability of {value}")
    log_odds = _logit((successes + 0.5) / (rollouts + 1)) + _logit(prediction) - _logit(parent_prediction)
    return 1.0 / (1.0 + math.exp(-log_odds))


def _logit(probability: float) -> float:
    clipped = min(max(probability, 0.01), 0.99)
    return math.log(clipped / (1.0 - clipped))


@dataclass(frozen=True)
class Request:
    """An active task outside the band that is to be rewritten."""

    parent: TaskRecord
    direction: Direction
    critique: str


@dataclass(frozen=True)
class _Rewrite:
    """A request with what it could become."""

    request: Request
    candidates: tuple[Task, ...]  # usable ones; their order decides where the critic does not


class ProposingAdapter(ABC):
    """Proposes, for each task outside the band, one of its candidates; a subclass says where candidates come from."""

    def __init__(self, low: float, high: float, target: float, max_proposals: int | None, asks_critic: bool) -> None:
        """Configure when tasks are rewritten and how the candidate is chosen.

        Args:
            low: a success rate below it asks for an easier task.
            high: a success rate above it asks for a harder task.
            target: wanted success rate of the chosen candidate.
            max_proposals: most proposals pending at a time; None: no limit.
            asks_critic: choose by `anchored_success`; otherwise the first candidate is taken.
        """
        if not 0.0 <= low <= target <= high <= 1.0:
            raise ConfigError(f"need 0 <= low <= target <= high <= 1, got {low}, {target}, {high}")
        if max_proposals is not None and max_proposals < 1:
            raise ConfigError(f"max_proposals must be at least 1 or null, got {max_proposals}")
        self.low = low
        self.high = high
        self.target = target
        self.max_proposals = max_proposals
        self.asks_critic = asks_critic

    @abstractmethod
    def check(self, environment: Environment) -> None:
        """Raise ConfigError for an environment whose tasks cannot be rewritten like this."""

    @abstractmethod
    def _candidates(
        self, environment: Environment, pool: TaskPool, requests: Sequence[Request], key: str
    ) -> list[tuple[Task, ...]]:
        """Of each request the valid tasks that the pool has never seen, without repeats."""

    def lend(self, policy: LoadedModel) -> None:  # noqa: B027
        """Take what is needed of the policy, which is on the CPU; raise ConfigError where it cannot be had."""

    def statistics(self) -> dict[str, float]:
        return {}

    def adapt(
        self, environment: Environment, pool: TaskPool, feedback: Sequence[TaskFeedback], predict: Predict, key: str
    ) -> None:
        rewrites = self._rewrites(environment, pool, feedback, key)
        if not rewrites:
            return
        predictions: dict[str, float] | None = None
        if self.asks_critic:
            tasks = {task.id: task for rewrite in rewrites for task in (rewrite.request.parent.task, *rewrite.candidates)}
            predictions = dict(zip(tasks, predict(list(tasks.values())), strict=True))
        for rewrite in rewrites:
            request, parent = rewrite.request, rewrite.request.parent
            for task in self._rank(rewrite, predictions):
                proposal = Proposal(
                    task=task,
                    direction=request.direction,
                    parent_id=parent.task.id,
                    parent_successes=parent.successes,
                    parent_rollouts=parent.rollouts,
                    critique=request.critique,
                    predicted_success=None if predictions is None else predictions[task.id],
                )
                if pool.propose(proposal):  # refused when another parent has just proposed the same task
                    break

    def _rewrites(self, environment: Environment, pool: TaskPool, feedback: Sequence[TaskFeedback], key: str) -> list[_Rewrite]:
        """As many as there is room for; where a request comes to nothing, the next one in line gets its place."""
        room = len(feedback) if self.max_proposals is None else self.max_proposals - len(pool.pending)
        waiting = self._requests(pool, feedback, key)
        rewrites: list[_Rewrite] = []
        while waiting and len(rewrites) < room:
            free = room - len(rewrites)
            asked, waiting = waiting[:free], waiting[free:]
            answered = zip(asked, self._candidates(environment, pool, asked, key), strict=True)
            rewrites += [_Rewrite(request, candidates) for request, candidates in answered if candidates]
        return rewrites

    def _requests(self, pool: TaskPool, feedback: Sequence[TaskFeedback], key: str) -> list[Request]:
        order = list(feedback)
        Random(f"{key}/order").shuffle(order)  # so that a small `max_proposals` favours no slot
        requests: list[Request] = []
        for item in order:
            if item.rollouts == 0 or not pool.is_active(item.task.id) or pool.has_pending_child(item.task.id):
                continue
            direction = trigger(item.successes, item.rollouts, self.low, self.high)
            if direction is not None:
                critique = " ".join(dict.fromkeys(item.critiques))
                requests.append(Request(pool.record(item.task.id), direction, critique))
        return requests

    def _rank(self, rewrite: _Rewrite, predictions: dict[str, float] | None) -> list[Task]:
        """Candidates, best first: those that move the right way, then by distance from the target."""
        if predictions is None:
            return list(rewrite.candidates)
        parent = rewrite.request.parent
        before = predictions[parent.task.id]

        def badness(task: Task) -> tuple[bool, float]:
            after = predictions[task.id]
            moves = after < before if rewrite.request.direction == "harder" else after > before
            expected = anchored_success(parent.successes, parent.rollouts, before, after)
            return not moves, abs(expected - self.target)

        playable = [task for task in rewrite.candidates if not math.isnan(predictions[task.id])]
        return [] if math.isnan(before) else sorted(playable, key=badness)


class ParametricAdapter(ProposingAdapter):
    """Proposes, for each task outside the band, the variant whose expected success is nearest the target."""

    def __init__(
        self,
        low: float = 0.2,
        high: float = 0.8,
        candidates: int = 24,
        target: float = 0.5,
        max_proposals: int | None = None,
        ranking: Literal["critic", "random"] = "critic",
    ) -> None:
        """Configure when and how tasks are rewritten.

        Args:
            low: a success rate below it asks for an easier variant.
            high: a success rate above it asks for a harder variant.
            candidates: variants that the environment is asked for per task.
            target: wanted success rate of the chosen variant.
            max_proposals: most proposals pending at a time; null: no limit.
            ranking: `critic` chooses by `anchored_success`, `random` among all valid variants.
        """
        super().__init__(low, high, target, max_proposals, asks_critic=ranking == "critic")
        if candidates < 1:
            raise ConfigError(f"candidates must be at least 1, got {candidates}")
        if ranking not in ("critic", "random"):
            raise ConfigError(f"ranking must be 'critic' or 'random', got '{ranking}'")
        self.candidates = candidates

    def check(self, environment: Environment) -> None:
        if type(environment).vary is Environment.vary:
            raise ConfigError(
                f"environment '{environment.name}' has no vary, so its tasks have no variants: use "
                "rla_lightning.curriculum.rewriter.RewriterAdapter, or no adapter"
            )

    def _candidates(
        self, environment: Environment, pool: TaskPool, requests: Sequence[Request], key: str
    ) -> list[tuple[Task, ...]]:
        candidates: list[tuple[Task, ...]] = []
        with failing_together():
            if rank() == 0:  # validating may run programs, and a clock must not part the processes' pools
                candidates = [usable_variants(environment, pool, request, self.candidates, key) for request in requests]
        return from_first(candidates)


def usable_variants(environment: Environment, pool: TaskPool, request: Request, number: int, key: str) -> tuple[Task, ...]:
    """New and valid ones among `number` variants of the environment, shuffled: stable sorting then breaks ties at random."""
    task = request.parent.task
    rng = Random(f"{key}/vary/{task.id}")
    try:
        varied = {candidate.id: candidate for candidate in environment.vary(task, request.direction, rng, number)}
        usable = [c for c in varied.values() if not pool.knows(c.id) and environment.validate(c, task) is None]
    except Exception as error:  # of somebody's environment: the task stays as it is, the run goes on
        logger.warning("task %s could not be rewritten: %s: %s", task.id, type(error).__name__, error)
        return ()
    rng.shuffle(usable)
    return tuple(usable)


class FreshTasks:
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

    def statistics(self) -> dict[str, float]:
        return {}

    def adapt(
        self, environment: Environment, pool: TaskPool, feedback: Sequence[TaskFeedback], predict: Predict, key: str
    ) -> None:
        del predict
        leaving = [
            item.task.id
            for item in feedback
            if pool.is_active(item.task.id) and not pool.has_pending_child(item.task.id) and self._leaves(item)
        ]
        if not leaving:
            return
        staying = {task.id for task in pool.slots}.difference(leaving) | {proposal.task.id for proposal in pool.pending}
        taken = staying | pool.held_out
        fresh = sample_distinct(environment, len(leaving), key, *pool.difficulty, is_taken=taken.__contains__)
        pool.replace_slots(leaving, fresh)

    def _leaves(self, item: TaskFeedback) -> bool:
        if self.replace == "all":
            return True
        return item.rollouts > 0 and trigger(item.successes, item.rollouts, self.low, self.high) is not None
