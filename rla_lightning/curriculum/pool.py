"""The task pool: active slots, proposals that await a verdict, and the record of every task ever seen.

The pool books what it is told. Verdicts are computed once, by `algorithm/acceptance.py` in the
module; candidates are made by the adapters. It holds no random state: `draw` is a pure function of
the pool and a key, so a run that resumes from `state()` sees the same tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any

from rla_lightning.curriculum.selection import sample_distinct
from rla_lightning.environments.base import Environment
from rla_lightning.types import ConfigError, Direction, Proposal, Task, TaskBatch, TaskFeedback, Verdict


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
    verdict: Verdict | None = None  # None: not a proposal, or not rolled out yet
    verdict_successes: int = 0  # what the verdict is based on: merged over the re-rolls
    verdict_rollouts: int = 0
    reason: str = ""  # why it was decided so
    critique: str = ""  # the text feedback that asked for the rewrite
    predicted_success: float | None = None  # the critic's prediction when it was chosen
    critic_value: float | None = None  # its prediction before the latest rollouts
    p_plus: float | None = None  # share of +1 among the judge's votes on the latest successes
    p_minus: float | None = None  # share of -1 among its votes on the latest failures
    proposed_epoch: int = 0  # the first epoch that may roll it out
    decided_epoch: int | None = None  # the epoch whose rollouts decided


class TaskPool:
    """A fixed number of active tasks, each with its lineage, and the proposals that may replace them."""

    def __init__(
        self,
        tasks: Sequence[Task],
        max_rerolls: int = 1,
        held_out: frozenset[str] = frozenset(),
        difficulty: tuple[float, float] = (0.0, 1.0),
    ) -> None:
        """Start from given tasks, one slot each.

        Args:
            tasks: the first active tasks, ids distinct.
            max_rerolls: extra iterations that an undecided proposal gets before it is dropped.
            held_out: ids of evaluation tasks, which never enter the pool.
            difficulty: range of fresh tasks.
        """
        if not tasks:
            raise ConfigError("a task pool needs at least 1 task")
        if max_rerolls < 0:
            raise ConfigError(f"max_rerolls must not be negative, got {max_rerolls}")
        self.max_rerolls = max_rerolls
        self.held_out = held_out
        self.difficulty = difficulty
        self.epoch = 0  # of the next rollouts = bookings so far
        self._records: dict[str, TaskRecord] = {}  # in the order of arrival
        self._pending: list[str] = []  # oldest first
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
        max_rerolls: int = 1,
        held_out: frozenset[str] = frozenset(),
    ) -> TaskPool:
        """A pool of `number` distinct tasks of the environment; None: all of a fixed set."""
        tasks = sample_distinct(environment, number, seed_key, difficulty_low, difficulty_high, held_out.__contains__)
        return cls(tasks, max_rerolls, held_out, (difficulty_low, difficulty_high))

    # What the pool holds

    @property
    def slots(self) -> tuple[Task, ...]:
        return tuple(self._records[task_id].task for task_id in self._slots)

    @property
    def pending(self) -> tuple[Proposal, ...]:
        return tuple(self._proposal(task_id) for task_id in self._pending)

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

    @property
    def proposed(self) -> int:
        return sum(record.direction is not None for record in self.records)

    @property
    def accepted(self) -> int:
        return sum(record.verdict == "ACCEPT" for record in self.records)

    @property
    def rejected(self) -> int:
        return sum(record.verdict == "REJECT" for record in self.records)

    @property
    def accept_rate(self) -> float:
        """Accepted among the decided proposals; 0 before the first decision."""
        return self.accepted / max(1, self.accepted + self.rejected)

    @property
    def mean_difficulty(self) -> float:
        return sum(task.difficulty for task in self.slots) / len(self._slots)

    def statistics(self) -> dict[str, float]:
        """What is logged about the pool after each iteration."""
        return {
            "proposed": float(self.proposed),
            "accepted": float(self.accepted),
            "pending": float(len(self._pending)),
            "accept_rate": self.accept_rate,
            "difficulty": self.mean_difficulty,
        }

    def history(self) -> list[dict[str, Any]]:
        """One JSON-serialisable row per task ever seen, oldest first."""
        active, pending = frozenset(self._slots), frozenset(self._pending)

        def status(record: TaskRecord) -> str:
            if record.task.id in active:
                return "active"
            if record.task.id in pending:
                return "pending"
            return "rejected" if record.verdict == "REJECT" else "replaced"

        return [{"status": status(record), **asdict(record)} for record in self.records]

    # What happens to it in one iteration: draw, roll out, book, then an adapter proposes or replaces

    def draw(self, tasks_per_iteration: int, key: str) -> TaskBatch:
        """The tasks of one iteration: pending proposals first, the rest sampled from the free slots.

        A slot is free unless it is the parent of a pending proposal (paper section 3). As no slot has
        two pending proposals, `tasks_per_iteration <= len(slots)` is enough for every draw to succeed.
        """
        if not 1 <= tasks_per_iteration <= len(self._slots):
            raise ConfigError(
                f"tasks_per_iteration must be between 1 and the number of task slots ({len(self._slots)}), "
                f"got {tasks_per_iteration}"
            )
        proposals = self.pending[:tasks_per_iteration]
        parents = {proposal.parent_id for proposal in self.pending}
        free = [task for task in self.slots if task.id not in parents]
        active = Random(key).sample(free, tasks_per_iteration - len(proposals))
        return TaskBatch(active=tuple(active), proposals=proposals)

    def book(self, feedback: Sequence[TaskFeedback]) -> None:
        """Record one epoch's counts and carry out its verdicts.

        Args:
            feedback: each task at most once, this epoch's counts only; a verdict on every pending
                proposal that was rolled out and on nothing else.
        """
        self._check(feedback)
        for item in feedback:
            if item.verdict is None:
                self._book_active(item)
            else:
                self._book_proposal(item, item.verdict)
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
            "max_rerolls": self.max_rerolls,
            "slots": list(self._slots),
            "pending": list(self._pending),
            "records": [asdict(record) for record in self.records],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], held_out: frozenset[str] = frozenset()) -> TaskPool:
        records = [TaskRecord(**{**row, "task": Task(**row["task"])}) for row in state["records"]]
        by_id = {record.task.id: record for record in records}
        pool = cls([by_id[task_id].task for task_id in state["slots"]], state["max_rerolls"], held_out)
        pool.epoch = state["epoch"]
        pool._records = by_id
        pool._pending = list(state["pending"])
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
            successes=record.verdict_successes,
            rollouts=record.verdict_rollouts,
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

    def _book_proposal(self, item: TaskFeedback, verdict: Verdict) -> None:
        record = self._noted(item)
        successes, rollouts = record.verdict_successes + item.successes, record.verdict_rollouts + item.rollouts
        reason = ""
        if verdict == "UNDECIDED" and record.rolls >= self.max_rerolls:
            verdict, reason = "REJECT", "undecided"
        elif verdict != "UNDECIDED":
            reason = f"{successes}/{rollouts} against the parent's {record.parent_successes}/{record.parent_rollouts}"
        self._records[item.task.id] = replace(
            record,
            successes=item.successes,
            rollouts=item.rollouts,
            rolls=record.rolls + 1,
            verdict=verdict,
            verdict_successes=successes,
            verdict_rollouts=rollouts,
            reason=reason,
            decided_epoch=None if verdict == "UNDECIDED" else self.epoch,
        )
        if verdict == "UNDECIDED":
            return
        self._pending.remove(item.task.id)
        if verdict == "ACCEPT":
            self._slots[self._slots.index(self._proposal(item.task.id).parent_id)] = item.task.id
