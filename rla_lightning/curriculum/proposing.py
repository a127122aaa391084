"""How the tasks follow the policy: adapters read an epoch's feedback and change the pool.

The datamodule books the feedback first (`TaskPool.book`), then calls `adapt`. The environment is
passed in, so that a YAML file names it once.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from random import Random
from typing import Any, Literal

from rla_lightning.algorithm.acceptance import trigger
from rla_lightning.curriculum.pool import TaskPool, TaskRecord
from rla_lightning.curriculum.prediction import PREDICTORS, Predictor, fitted, log_odds, prediction_quality
from rla_lightning.curriculum.selection import sample_distinct
from rla_lightning.environments.base import Environment
from rla_lightning.models.language_model import LoadedModel
from rla_lightning.types import ConfigError, Direction, Proposal, Task, TaskFeedback

Predict = Callable[[Sequence[Task]], list[float]]  # the critic's success probability of each task, NaN: cannot be played


class TaskAdapter(ABC):
    """Changes the pool after an epoch: queues proposals or replaces slots."""

    @abstractmethod
    def adapt(
        self, environment: Environment, pool: TaskPool, feedback: Sequence[TaskFeedback], predict: Predict, key: str
    ) -> None:
        """Adapt to the feedback that the pool has just booked.

        `predict` is called at most once, with every task to be judged; every random draw is a function of `key`. Under
        several processes all call this with the same arguments and leave the same pool.
        """

    def check(self, environment: Environment) -> None:  # noqa: B027
        """Raise ConfigError for an environment whose tasks cannot be adapted like this."""

    def lend(self, policy: LoadedModel) -> None:  # noqa: B027
        """Take what is needed of the policy, which is on the CPU; raise ConfigError where it cannot be had."""

    def statistics(self) -> dict[str, float]:
        """What is logged about the latest `adapt`, under the same names every time."""
        return {}

    def state(self) -> dict[str, Any]:
        """What it has learned: primitives, lists, tuples, dicts and tensors; that of the first process is kept."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from `state()`; raise ConfigError for that of an adapter that learned otherwise."""
        if state:
            raise ConfigError("the checkpoint's run trained its rewriter: go on with its own data.adapter")


PRIOR_ROLLOUTS = 4.0  # what a prediction of the parent's success counts beside its rollouts
MAX_CRITIQUES = 4  # different ones that a rewriter reads of one task
TOLERANCE = 0.15  # around the target, inside which candidates are equally good

Ranking = Literal["critic", "knobs", "both", "random"]
Pull = Literal["target", "root"]


def anchored_success(successes: int, rollouts: int, parent_prediction: float, prediction: float) -> float:
    """Expected success of a rewrite: what is known of the parent, moved by what the predictor sees between the two.

    A predictor can be biased as a whole and still order tasks well, so the difference of its two predictions counts most:

        logit(expected) = logit((s + k p) / (n + k)) + logit(p') - logit(p),  k = 4

    with predictions p of the parent and p' of the rewrite held inside [0.01, 0.99]. The parent was chosen for an extreme
    s / n, so that is pulled towards p.
    """
    for value in (parent_prediction, prediction):
        if not 0.0 <= value <= 1.0:  # also catches NaN
            raise ValueError(f"a success probability of {value} was predicted")
    prior = min(max(parent_prediction, 0.01), 0.99)
    known = (successes + PRIOR_ROLLOUTS * prior) / (rollouts + PRIOR_ROLLOUTS)
    return 1.0 / (1.0 + math.exp(-(log_odds(known) + log_odds(prediction) - log_odds(parent_prediction))))


@dataclass(frozen=True)
class Request:
    """An active task outside the band that is to be rewritten."""

    parent: TaskRecord
    direction: Direction
    critique: str
    is_control: bool  # the proposal is the task itself


@dataclass(frozen=True)
class Rewrite:
    """A request with what it could become."""

    request: Request
    candidates: tuple[Task, ...]  # usable ones; their order decides where the critic does not


class ProposingAdapter(TaskAdapter):
    """Proposes, for each task outside the band, one of its candidates; a subclass says where candidates come from."""

    def __init__(
        self,
        low: float,
        high: float,
        target: float,
        max_proposals: int | None,
        predictor: Predictor | None,
        pull: Pull = "target",
        control_share: float = 0.0,
        fresh_share: float = 0.0,
    ) -> None:
        """Configure when tasks are rewritten and how the candidate is chosen.

        Args:
            low: a success rate below it asks for an easier task.
            high: a success rate above it asks for a harder task.
            target: wanted success rate of the chosen candidate.
            max_proposals: most proposals pending at a time; None: no limit.
            predictor: of the success that candidates are chosen by; None: the first candidate is taken.
            pull: what is preferred among candidates that are about as good.
            control_share: of the requests that get the task itself, unchanged, as their proposal.
            fresh_share: of the slots that hold fresh tasks and are never rewritten.
        """
        if not 0.0 <= low <= target <= high <= 1.0:
            raise ConfigError(f"need 0 <= low <= target <= high <= 1, got {low}, {target}, {high}")
        if max_proposals is not None and max_proposals < 1:
            raise ConfigError(f"max_proposals must be at least 1 or null, got {max_proposals}")
        if predictor not in (None, *PREDICTORS):
            raise ConfigError(f"tasks are ranked by {', '.join(PREDICTORS)} or by none of them, got '{predictor}'")
        if pull not in ("target", "root"):
            raise ConfigError(f"pull must be 'target' or 'root', got '{pull}'")
        for name, share in (("control_share", control_share), ("fresh_share", fresh_share)):
            if not 0.0 <= share < 1.0:
                raise ConfigError(f"{name} must be in [0, 1), got {share}")
        self.low = low
        self.high = high
        self.target = target
        self.max_proposals = max_proposals
        self.predictor = predictor
        self.pull = pull
        self.control_share = control_share
        self.fresh_share = fresh_share
        self._quality: dict[str, float] = {}

    @abstractmethod
    def _candidates(
        self, environment: Environment, pool: TaskPool, requests: Sequence[Request], key: str
    ) -> list[tuple[Task, ...]]:
        """Of each request the valid tasks that the pool has never seen, without repeats."""

    def statistics(self) -> dict[str, float]:
        """How good the predictions are that candidates can be chosen by."""
        return dict(self._quality)

    def adapt(
        self, environment: Environment, pool: TaskPool, feedback: Sequence[TaskFeedback], predict: Predict, key: str
    ) -> None:
        self._quality = prediction_quality(environment, pool)
        rewrites = self._rewrites(environment, pool, feedback, key)
        for rewrite, ranked in zip(rewrites, self.ranked(environment, pool, rewrites, predict), strict=True):
            request, parent = rewrite.request, rewrite.request.parent
            for task, predicted in ranked:
                proposal = Proposal(
                    task=task,
                    direction=request.direction,
                    parent_id=parent.task.id,
                    parent_successes=parent.successes,
                    parent_rollouts=parent.rollouts,
                    critique=request.critique,
                    predicted_success=predicted,
                    is_control=request.is_control,
                )
                if pool.propose(proposal):  # refused when another parent has just proposed the same task
                    break
        self._refresh(environment, pool, feedback, key)

    def ranked(
        self, environment: Environment, pool: TaskPool, rewrites: Sequence[Rewrite], predict: Predict
    ) -> list[list[tuple[Task, float | None]]]:
        """Of each request the candidates, best first, with their predicted success where one is predicted.

        First those that move the right way, then those expected near the target, then by the pull.
        """
        if self.predictor is None or not rewrites:
            return [[(task, None) for task in rewrite.candidates] for rewrite in rewrites]
        tasks = {task.id: task for rewrite in rewrites for task in (rewrite.request.parent.task, *rewrite.candidates)}
        predicted = predict(list(tasks.values()))  # also says which of them cannot be played
        if self.predictor != "critic":
            regression = fitted(environment, pool, pool.epoch, uses_critic=self.predictor == "both")
            assert regression is not None  # a request has been rolled out
            better = regression.predict(list(tasks.values()), predicted)
            predicted = [math.nan if math.isnan(value) else other for value, other in zip(predicted, better, strict=True)]
        by_id = dict(zip(tasks, predicted, strict=True))
        return [self._ranked(environment, pool, rewrite, by_id) for rewrite in rewrites]

    def _fresh_slots(self, pool: TaskPool) -> frozenset[str]:
        """Active tasks that are never rewritten: those of the first slots, which have no order of their own."""
        return frozenset(task.id for task in pool.slots[: ceil(self.fresh_share * len(pool.slots))])

    def _refresh(self, environment: Environment, pool: TaskPool, feedback: Sequence[TaskFeedback], key: str) -> None:
        """Fresh slots whose task was rolled out get another one."""
        fresh = self._fresh_slots(pool)
        leaving = [item.task.id for item in feedback if item.task.id in fresh and not pool.has_pending_child(item.task.id)]
        replace_by_fresh(environment, pool, leaving, f"{key}/fresh")

    def _rewrites(self, environment: Environment, pool: TaskPool, feedback: Sequence[TaskFeedback], key: str) -> list[Rewrite]:
        """As many as there is room for; where a request comes to nothing, the next one in line gets its place."""
        room = len(feedback) if self.max_proposals is None else self.max_proposals - len(pool.pending)
        waiting = self._requests(pool, feedback, key)
        rewrites: list[Rewrite] = []
        while waiting and len(rewrites) < room:
            free = room - len(rewrites)
            asked, waiting = waiting[:free], waiting[free:]
            rewritten = [request for request in asked if not request.is_control]
            answers = iter(self._candidates(environment, pool, rewritten, key) if rewritten else ())
            for request in asked:
                found = (_unchanged(request.parent.task, pool),) if request.is_control else next(answers)
                if found:
                    rewrites.append(Rewrite(request, found))
        return rewrites

    def _requests(self, pool: TaskPool, feedback: Sequence[TaskFeedback], key: str) -> list[Request]:
        order = list(feedback)
        Random(f"{key}/order").shuffle(order)  # so that a small `max_proposals` favours no slot
        requests: list[Request] = []
        fresh = self._fresh_slots(pool)
        for item in order:
            if item.rollouts == 0 or not pool.is_active(item.task.id) or pool.has_pending_child(item.task.id):
                continue
            if item.task.id in fresh:
                continue
            direction = trigger(item.successes, item.rollouts, self.low, self.high)
            if direction is not None:
                critique = " ".join(list(dict.fromkeys(item.critiques))[:MAX_CRITIQUES])
                is_control = Random(f"{key}/control/{item.task.id}").random() < self.control_share
                requests.append(Request(pool.record(item.task.id), direction, critique, is_control))
        return requests

    def _ranked(
        self, environment: Environment, pool: TaskPool, rewrite: Rewrite, predicted: Mapping[str, float]
    ) -> list[tuple[Task, float | None]]:
        parent = rewrite.request.parent
        before = predicted[parent.task.id]
        root = pool.record(parent.task.root_id).task if self.pull == "root" else None

        def badness(task: Task) -> tuple[bool, float, float]:
            after = predicted[task.id]
            moves = after < before if rewrite.request.direction == "harder" else after > before
            miss = abs(anchored_success(parent.successes, parent.rollouts, before, after) - self.target)
            if root is None:
                return not moves, miss, 0.0
            return not moves, max(0.0, miss - TOLERANCE), knob_distance(environment.knobs(task), environment.knobs(root))

        playable = [task for task in rewrite.candidates if not math.isnan(predicted[task.id])]
        return [] if math.isnan(before) else [(task, predicted[task.id]) for task in sorted(playable, key=badness)]


def knob_distance(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    """Sum over knobs of how far apart two tasks are, relative to the larger value: 0 where all are equal."""
    shared = one.keys() & other.keys()
    return sum(abs(one[k] - other[k]) / max(abs(one[k]), abs(other[k])) for k in sorted(shared) if one[k] != other[k])


def _unchanged(task: Task, pool: TaskPool) -> Task:
    """A control: the task under another name, so that its rollouts are drawn and counted apart."""
    return replace(task, id=f"{task.id}/unchanged-{pool.epoch}", parent_id=task.id)


def replace_by_fresh(environment: Environment, pool: TaskPool, leaving: Sequence[str], key: str) -> None:
    """Put tasks of the pool's source, fresh or of a fixed set, into the slots of active ones."""
    if not leaving:
        return
    staying = {task.id for task in pool.slots}.difference(leaving) | {proposal.task.id for proposal in pool.pending}
    taken = staying | pool.held_out
    pool.replace_slots(leaving, sample_distinct(environment, len(leaving), key, *pool.difficulty, is_taken=taken.__contains__))
