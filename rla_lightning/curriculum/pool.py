"""The task pool: active slots, proposals that await a verdict, and the record of every task ever seen.

The pool books what it is told. Verdicts are computed once, by `algorithm/acceptance.py` in the
module; candidates are made by the adapters. It holds no random state: `draw` is a pure function of
the pool and a key, so a run that resumes from `state()` sees the same tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any, Literal

from rla_lightning.curriculum.selection import sample_distinct
from rla_lightning.environments.base import Environment
from rla_lightning.types import ConfigError, Decision, Direction, Proposal, Task, TaskBatch, TaskFeedback, Trial, Verdict


@dataclass(frozen=True)
class TaskRecord:
    """What the pool knows about one task; one line of tasks.jsonl.

    Epochs are indices as in `trajectories/epoch=NNN.jsonl`.
    """

    task: Task
    direction: Direction | None = None  # None: sampled by the environment, not rewritten
    parent_successes: int = 0  # the parent's counts when the task was proposed
    parent_rollouts: int = 0
    successes: int = 0  # of the latest iteration (the policy moves, older counts go stale)
    rollouts: int = 0
    rolls: int = 0  # iterations that rolled the task out
    is_control: bool = False  # the parent, unchanged
    trial: Trial | None = None  # what the verdict is based on, and whether there are rolls to come
    verdict: Verdict | None = None  # None: not a proposal, or not rolled out yet
    reason: str = ""  # why it was decided so
    critique: str = ""  # the text feedback that asked for the rewrite
    predicted_success: float | None = None  # when it was chosen
    critic_value: float | None = None  # its prediction before the latest rollouts
    p_plus: float | None = None  # share of +1 among the judge's votes on the latest successes
    p_minus: float | None = None  # share of -1 among its votes on the latest failures
    proposed_epoch: int = 0  # the first epoch that may roll it out
    decided_epoch: int | None = None  # the epoch whose rollouts decided


@dataclass(frozen=True)
class Sighting:
    """Rollouts of one task in one epoch: what predictors of success learn from and are measured on."""

    task_id: str
    epoch: int
    successes: int
    rollouts: int
    critic_value: float | None  # predicted before the rollouts


TaskChoice = Literal["uniform", "judge_errors"]
MEMORY = 20  # epochs of sightings that are kept: the policy moves, older ones say little


class TaskPool:
    """A fixed number of active tasks, each with its lineage, and the proposals that may replace them."""

    def __init__(
        self,
        tasks: Sequence[Task],
        held_out: frozenset[str] = frozenset(),
        difficulty: tuple[float, float] = (0.0, 1.0),
    ) -> None:
        """Start from given tasks, one slot each.

        Args:
            tasks: the first active tasks, ids distinct.
            held_out: ids of evaluation tasks, which never enter the pool.
            difficulty: range of fresh tasks.
        """
        if not tasks:
            raise ConfigError("a task pool needs at least 1 task")
        self.held_out = held_out
        self.difficulty = difficulty
        self.epoch = 0  # of the next rollouts = bookings so far
        self._records: dict[str, TaskRecord] = {}  # in the order of arrival
        self._pending: list[str] = []  # oldest first
        self._sightings: list[Sighting] = []  # oldest first
        self._slots: list[str] = []
        for task in tasks:
            if task.id in self._records:
                raise ConfigError(f"task id '{task.id}' occurs twice")
            self._records[task.id] = TaskRecord(task)
            self._slots.append(task.id)

    @classmethod
    def fresh(
        cls,
        environment: Environment,
        number: int | None,
        seed_key: str,
        difficulty_low: float = 0.0,
        difficulty_high: float = 1.0,
        held_out: frozenset[str] = frozenset(),
    ) -> TaskPool:
        """A pool of `number` distinct tasks of the environment; None: all of a fixed set."""
        tasks = sample_distinct(environment, number, seed_key, difficulty_low, difficulty_high, held_out.__contains__)
        return cls(tasks, held_out, (difficulty_low, difficulty_high))

    # What the pool holds

    @property
    def slots(self) -> tuple[Task, ...]:
        return tuple(self._records[task_id].task for task_id in self._slots)

    @property
    def pending(self) -> tuple[Proposal, ...]:
        return tuple(self._proposal(task_id) for task_id in self._pending)

    @property
    def sightings(self) -> tuple[Sighting, ...]:
        """Of the last `MEMORY` epochs, oldest first."""
        return tuple(self._sightings)

    @property
    def records(self) -> tuple[TaskRecord, ...]:
        return tuple(self._records.values())

    def record(self, task_id: str) -> TaskRecord:
        return self._records[task_id]

    def knows(self, task_id: str) -> bool:
        """Whether the task was ever active or proposed, or is held out; ids are fingerprints of the specs."""
        return task_id in self._records or task_id in self.held_out

    def is_active(self, task_id: str) -> bool:
        return task_id in self._slots

    def has_pending_child(self, task_id: str) -> bool:
        return any(self._records[pending].task.parent_id == task_id for pending in self._pending)

    def count(self, verdict: Verdict | None = None, is_control: bool = False) -> int:
        """Proposals with this verdict (None: all of them); controls are counted apart."""
        proposals = (record for record in self.records if record.direction is not None and record.is_control == is_control)
        return sum(verdict is None or record.verdict == verdict for record in proposals)

    @property
    def proposed(self) -> int:
        return self.count()

    @property
    def accepted(self) -> int:
        return self.count("ACCEPT")

    def statistics(self) -> dict[str, float]:
        """What is logged about the pool after each iteration; a rate is 0 before the first decision."""
        decided = self.accepted + self.count("REJECT")
        wrongly = self.count("ACCEPT", is_control=True)
        controls = wrongly + self.count("REJECT", is_control=True)
        return {
            "proposed": float(self.proposed),
            "accepted": float(self.accepted),
            "pending": float(len(self._pending)),
            "accept_rate": self.accepted / max(1, decided),
            "controls": float(controls),
            "false_accept_rate": wrongly / max(1, controls),
            "difficulty": sum(task.difficulty for task in self.slots) / len(self._slots),
        }

    def history(self) -> list[dict[str, Any]]:
        """One JSON-serialisable row per task ever seen, oldest first."""
        active, pending = frozenset(self._slots), frozenset(self._pending)

        def status(record: TaskRecord) -> str:
            if record.task.id in active:
                return "active"
            if record.task.id in pending:
                return "pending"
            if record.is_control:
                return "control"
            return "rejected" if record.verdict == "REJECT" else "replaced"

        return [{"status": status(record), **asdict(record)} for record in self.records]

    # What happens to it in one iteration: draw, roll out, book, then an adapter proposes or replaces

    def draw(self, tasks_per_iteration: int, key: str, choice: TaskChoice = "uniform") -> TaskBatch:
        """The tasks of one iteration: pending proposals first, the rest sampled from the free slots.

        A proposal on trial brings its parent along; other parents of pending proposals are drawn only where there are no other
        slots (paper section 3: never). Of `2 <= tasks_per_iteration <= len(slots)` every draw succeeds, and none starves.

        Args:
            tasks_per_iteration: how many there are.
            key: of the random draw.
            choice: of active tasks; uniform, or those first where the judge's votes mislead: with weight 1 + 2 - mu if the
                latest rollouts were won and lost, else 1.
        """
        if not 1 <= tasks_per_iteration <= len(self._slots):
            raise ConfigError(
                f"tasks_per_iteration must be between 1 and the number of task slots ({len(self._slots)}), "
                f"got {tasks_per_iteration}"
            )
        proposals: list[Proposal] = []
        parents: list[Task] = []
        for proposal in self.pending:
            along = [] if proposal.trial is None else [self._records[proposal.parent_id].task]
            if len(proposals) + len(parents) + 1 + len(along) <= tasks_per_iteration:
                proposals.append(proposal)
                parents += along
        taken = {proposal.parent_id for proposal in self.pending}
        free = [task for task in self.slots if task.id not in taken]
        wanted = tasks_per_iteration - len(proposals) - len(parents)
        if wanted > len(free):
            free = [task for task in self.slots if task not in parents]
        if choice == "uniform":
            chosen = Random(key).sample(free, wanted)
        else:
            rng = Random(key)  # the largest u^(1/w) are a weighted sample without replacement (Efraimidis, Spirakis 2006)
            ranks = {task.id: rng.random() ** (1.0 / self._judge_error_weight(task.id)) for task in free}
            chosen = sorted(free, key=lambda task: -ranks[task.id])[:wanted]
        return TaskBatch(active=(*chosen, *parents), proposals=tuple(proposals))

    def _judge_error_weight(self, task_id: str) -> float:
        record = self._records[task_id]
        if record.p_plus is None or record.p_minus is None:
            return 1.0
        return 3.0 - record.p_plus - record.p_minus

    def book(self, feedback: Sequence[TaskFeedback]) -> None:
        """Record one epoch's counts and carry out its verdicts.

        Args:
            feedback: each task at most once, this epoch's counts only; a verdict on every pending
                proposal that was rolled out and on nothing else.
        """
        self._check(feedback)
        for item in feedback:
            if item.decision is None:
                self._book_active(item)
            else:
                self._book_proposal(item, item.decision)
        self._sightings = [seen for seen in self._sightings if seen.epoch > self.epoch - MEMORY] + [
            Sighting(item.task.id, self.epoch, item.successes, item.rollouts, item.critic_value)
            for item in feedback
            if item.rollouts > 0
        ]
        self.epoch += 1

    def propose(self, proposal: Proposal) -> bool:
        """Queue a proposal; False when its task was seen before."""
        task, parent_id = proposal.task, proposal.parent_id
        if self.knows(task.id):
            return False
        if task.parent_id != parent_id:
            raise ValueError(f"task '{task.id}' has parent_id '{task.parent_id}', its proposal names '{parent_id}'")
        if not self.is_active(parent_id) or self.has_pending_child(parent_id):
            raise ValueError(f"task '{parent_id}' is not active or already has a pending proposal")
        self._records[task.id] = TaskRecord(
            task,
            direction=proposal.direction,
            parent_successes=proposal.parent_successes,
            parent_rollouts=proposal.parent_rollouts,
            critique=proposal.critique,
            predicted_success=proposal.predicted_success,
            is_control=proposal.is_control,
            proposed_epoch=self.epoch,
        )
        self._pending.append(task.id)
        return True

    def replace_slots(self, leaving: Sequence[str], fresh: Sequence[Task]) -> None:
        """Put fresh tasks into the slots of active ones, without verdicts.

        A task that was active once may come back: independent draws repeat themselves.
        """
        forbidden = next((task.id for task in fresh if task.id in self.held_out), None)
        if forbidden is not None:
            raise ValueError(f"the fresh task '{forbidden}' is held out for evaluation")
        staying = [task_id for task_id in self._slots if task_id not in leaving]
        for task_id in leaving:
            if not self.is_active(task_id) or self.has_pending_child(task_id):
                raise ValueError(f"task '{task_id}' is not active or has a pending proposal")
        ids = [task.id for task in fresh]
        if len(set(ids)) != len(ids) or set(ids) & {*staying, *self._pending}:
            raise ValueError(f"the fresh tasks {ids} repeat each other or tasks that stay in the pool")
        successor = dict(zip(leaving, ids, strict=True))
        for task in fresh:
            self._records.setdefault(task.id, TaskRecord(task, proposed_epoch=self.epoch))
        self._slots = [successor.get(task_id, task_id) for task_id in self._slots]

    # State: primitives, lists and dicts only, so that it passes JSON and torch's weights_only

    def state(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "slots": list(self._slots),
            "pending": list(self._pending),
            "records": [asdict(record) for record in self.records],
            "sightings": [asdict(sighting) for sighting in self._sightings],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], held_out: frozenset[str] = frozenset()) -> TaskPool:
        records = [_record(row) for row in state["records"]]
        by_id = {record.task.id: record for record in records}
        pool = cls([by_id[task_id].task for task_id in state["slots"]], held_out)
        pool.epoch = state["epoch"]
        pool._records = by_id
        pool._pending = list(state["pending"])
        pool._sightings = [Sighting(**row) for row in state["sightings"]]
        return pool

    # Helpers

    def _proposal(self, task_id: str) -> Proposal:
        record = self._records[task_id]
        if record.direction is None or record.task.parent_id is None:
            raise ValueError(f"the record of task '{task_id}' is not that of a proposal")
        return Proposal(
            task=record.task,
            direction=record.direction,
            parent_id=record.task.parent_id,
            parent_successes=record.parent_successes,
            parent_rollouts=record.parent_rollouts,
            critique=record.critique,
            predicted_success=record.predicted_success,
            is_control=record.is_control,
            trial=record.trial,
        )

    def _check(self, feedback: Sequence[TaskFeedback]) -> None:
        ids = [item.task.id for item in feedback]
        if len(set(ids)) != len(ids):
            raise ValueError("feedback names a task twice")
        for item in feedback:
            task_id = item.task.id
            if not 0 <= item.successes <= item.rollouts:
                raise ValueError(f"feedback on task '{task_id}' has {item.successes} successes in {item.rollouts} rollouts")
            if item.verdict is None and not self.is_active(task_id):
                raise ValueError(f"feedback without a verdict on task '{task_id}', which is not active")
            if item.verdict is not None and task_id not in self._pending:
                raise ValueError(f"verdict on task '{task_id}', which is not a pending proposal")

    def _noted(self, item: TaskFeedback) -> TaskRecord:
        """The task's record with what the critic and the judge made of the latest rollouts."""
        record = self._records[item.task.id]
        return replace(record, critic_value=item.critic_value, p_plus=item.p_plus, p_minus=item.p_minus)

    def _book_active(self, item: TaskFeedback) -> None:
        record = self._noted(item)
        if item.rollouts > 0:  # every rollout may have ended in an error of the environment
            record = replace(record, successes=item.successes, rollouts=item.rollouts)
        self._records[item.task.id] = replace(record, rolls=record.rolls + 1)

    def _book_proposal(self, item: TaskFeedback, decision: Decision) -> None:
        record = self._noted(item)
        is_open = decision.verdict == "UNDECIDED"
        self._records[item.task.id] = replace(
            record,
            successes=item.successes,
            rollouts=item.rollouts,
            rolls=record.rolls + 1,
            verdict=decision.verdict,
            reason=decision.reason,
            trial=decision.trial,
            decided_epoch=None if is_open else self.epoch,
        )
        if is_open:
            return
        self._pending.remove(item.task.id)
        if decision.verdict == "ACCEPT" and not record.is_control:
            self._slots[self._slots.index(self._proposal(item.task.id).parent_id)] = item.task.id


def _record(row: Mapping[str, Any]) -> TaskRecord:
    trial = None if row["trial"] is None else Trial(**row["trial"])
    return TaskRecord(**{**row, "task": Task(**row["task"]), "trial": trial})
