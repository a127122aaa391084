"""The records that flow between the stages of the loop.

Everything that crosses a boundary is one of these frozen dataclasses. Those without tensors are
JSON-serialisable through `dataclasses.asdict`. Legend for shapes: B sequences, T tokens,
G rollouts of one task, K turns of one trajectory, m judgments of one step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Direction = Literal["harder", "easier"]
Verdict = Literal["ACCEPT", "REJECT", "UNDECIDED"]
Split = Literal["in_domain", "out_of_distribution"]
Purpose = Literal["train", "validation", "test"]  # validation tunes, test is reported
CompletionStop = Literal["EOS", "TRUNCATED"]  # TRUNCATED: max_new_tokens reached without an end token
TrajectoryStop = Literal["DONE", "MAX_TURNS", "TRUNCATED", "ENV_ERROR"]  # TRUNCATED: the next prompt outgrew the context

WON = 1.0
LOST = -1.0
PASSED = "passed"


class ConfigError(ValueError):
    """A setting or input that cannot work; its message names the offending value."""


class EpisodesFailedError(RuntimeError):
    """Every episode of an iteration ended with an error of the environment; the message holds the first."""


class ServerError(RuntimeError):
    """A model server that does not do its work; the message names its address and what it said."""


@dataclass(frozen=True)
class Task:
    """One task as plain data: it can be written to a file and read back."""

    id: str
    environment: str  # the environment's name
    spec: Mapping[str, Any]  # JSON values only; everything `Environment.start` needs
    difficulty: float  # in [0, 1], by the environment's own scale
    root_id: str  # the sampled task that this one descends from (itself for a fresh task)
    parent_id: str | None = None
    version: int = 0  # rewrites since the root
    kind: str = ""  # what sort of task, for numbers per kind


@dataclass(frozen=True)
class Trial:
    """Counts of a proposal, and of its parent where that is rolled out along with it: then both met the same policies."""

    successes: int = 0
    rollouts: int = 0
    parent_successes: int = 0
    parent_rollouts: int = 0
    rolls: int = 0  # iterations that these counts come from


@dataclass(frozen=True)
class Proposal:
    """A rewritten task that awaits a verdict from rollouts of the current policy."""

    task: Task
    direction: Direction
    parent_id: str
    parent_successes: int  # of the iteration that asked for the rewrite
    parent_rollouts: int
    critique: str = ""
    predicted_success: float | None = None  # when it was chosen
    is_control: bool = False  # the parent itself, unchanged: accepting it is an error of the rule
    trial: Trial | None = None  # since the first rollouts let it pass; None: not rolled out yet


@dataclass(frozen=True)
class TaskBatch:
    """What one training iteration rolls out: |active| + |proposals| is constant."""

    active: tuple[Task, ...]  # drawn at random, then the parents of proposals on trial
    proposals: tuple[Proposal, ...] = ()

    @property
    def drawn(self) -> int:
        """How many active tasks were drawn at random: parents on trial were chosen for being too hard or too easy."""
        return len(self.active) - sum(proposal.trial is not None for proposal in self.proposals)

    @property
    def tasks(self) -> tuple[Task, ...]:
        return self.active + tuple(proposal.task for proposal in self.proposals)


@dataclass(frozen=True)
class EvaluationSet:
    """Held-out tasks that are evaluated together."""

    split: Split
    tasks: tuple[Task, ...]


@dataclass(frozen=True)
class Observation:
    """What an agent is shown before it acts."""

    text: str  # natural language, complete for an agent that reads the whole history
    commands: tuple[str, ...] = ()  # admissible commands; empty where actions are free text
    digest: tuple[str, ...] = ()  # the agent's knowledge as vocabulary words, for tiny models


@dataclass(frozen=True)
class Transition:
    """The result of one action."""

    observation: Observation
    done: bool
    outcome: float | None = None  # WON or LOST when done
    is_valid: bool = True  # False: not understood or not admissible, the state is unchanged
    checks: tuple[str, ...] = ()  # PASSED or what went wrong, of each part of the goal that is verified on its own


@dataclass(frozen=True)
class StepLabel:
    """Ground truth about one action, where an environment has it."""

    score: int  # +1 or -1
    critique: str = ""  # a few vocabulary words that say why


@dataclass(frozen=True)
class ExpertAction:
    """What an expert would do next."""

    action: str
    thought: str = ""  # a vocabulary word starting with '#', the phase of the plan


@dataclass(frozen=True)
class UnitTest:
    """What a program reads and what it should print."""

    stdin: str
    stdout: str


@dataclass(frozen=True)
class ExpertTest:
    """A unit test that an expert would write."""

    test: UnitTest
    thought: str = ""  # how the output follows from the input


@dataclass(frozen=True)
class CheckRequest:
    """Programs of one task that are to be run on unit tests."""

    task: Task
    programs: tuple[str, ...]
    tests: tuple[UnitTest, ...]


@dataclass(frozen=True)
class Solution:
    """A program whose correctness is known."""

    program: str
    is_correct: bool


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn. top_p = 1 and top_k = 0 switch the filters off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 16


@dataclass(frozen=True)
class Completion:
    """What a sampler produced: its own token ids are trained on, text is never re-tokenised."""

    token_ids: tuple[int, ...]  # includes the end token when stop_reason is EOS
    logprobs: tuple[float, ...]  # of each token under the sampling distribution
    text: str  # decoded without special tokens
    stop_reason: CompletionStop


@dataclass(frozen=True)
class Step:
    """One turn of the agent."""

    prompt_ids: tuple[int, ...]
    completion: Completion
    observation: Observation  # shown before the action
    action: str  # as given to the environment ("" when the answer could not be parsed)
    is_valid: bool
    feedback: str = ""  # the text of the observation that followed
    critic_ids: tuple[int, ...] = ()  # the value model's prompt for the state before the action
    label: StepLabel | None = None  # ground truth, evaluation only
    checks: tuple[str, ...] = ()  # as in Transition


@dataclass(frozen=True)
class Trajectory:
    """One rollout of one task."""

    task: Task
    steps: tuple[Step, ...]
    outcome: float  # WON or LOST
    stop_reason: TrajectoryStop
    error: str = ""  # of the environment, when stop_reason is ENV_ERROR

    @property
    def is_won(self) -> bool:
        return self.outcome == WON

    @property
    def partial(self) -> float:
        """The share of the goal that was reached, in [0, 1]; all or nothing where it has no parts."""
        checks = self.steps[-1].checks if self.steps else ()
        return checks.count(PASSED) / len(checks) if checks else float(self.is_won)


@dataclass(frozen=True)
class Judgment:
    """One vote of the reward model on one step."""

    prompt_ids: tuple[int, ...]
    completion: Completion
    score: int | None  # +1, -1, or None when it cannot be parsed


@dataclass(frozen=True)
class WrittenTest:
    """A unit test by the reward model: one answer that judges all rollouts of its task."""

    prompt_ids: tuple[int, ...]
    completion: Completion
    test: UnitTest | None  # None when it cannot be parsed


@dataclass(frozen=True)
class CheckedSolution:
    """A known program of a task, and what it makes of the unit tests that were written for it."""

    is_correct: bool
    passed: tuple[bool | None, ...]  # [m]; None where it was not run, or the test cannot be parsed


@dataclass(frozen=True)
class RolloutGroup:
    """All rollouts of one task in one iteration."""

    task: Task
    trajectories: tuple[Trajectory, ...]  # [G]
    judgments: tuple[tuple[tuple[Judgment, ...], ...], ...] = ()  # [G][K][m]; empty when not judged
    tests: tuple[WrittenTest, ...] = ()  # [m] where judgments are unit tests: judgment j of the last step is test j's
    solutions: tuple[CheckedSolution, ...] = ()  # known programs that the tests are rated by, too

    @property
    def generated_tokens(self) -> int:
        """Of all answers and judgments."""
        acted = sum(len(step.completion.token_ids) for trajectory in self.trajectories for step in trajectory.steps)
        if self.tests:
            return acted + sum(len(test.completion.token_ids) for test in self.tests)
        return acted + sum(len(vote.completion.token_ids) for steps in self.judgments for votes in steps for vote in votes)

    @property
    def valid_indices(self) -> tuple[int, ...]:
        """Of the trajectories that no error of the environment ended."""
        return tuple(g for g, trajectory in enumerate(self.trajectories) if trajectory.stop_reason != "ENV_ERROR")

    @property
    def valid_trajectories(self) -> tuple[Trajectory, ...]:
        return tuple(self.trajectories[g] for g in self.valid_indices)

    @property
    def rollouts(self) -> int:
        return len(self.valid_trajectories)

    @property
    def successes(self) -> int:
        return sum(t.is_won for t in self.valid_trajectories)


@dataclass(frozen=True)
class Decision:
    """What an iteration's rollouts say about a proposal."""

    verdict: Verdict
    reason: str
    trial: Trial | None = None  # how it goes on, or what the verdict is based on
    is_control: bool = False  # accepting it replaces nothing


@dataclass(frozen=True)
class EpisodeLog:
    """One rollout as text, for a language model that criticises it."""

    turns: tuple[str, ...]  # what was observed and done, numbered from 0; the last one with the reply to it
    is_won: bool
    stop_reason: TrajectoryStop
    blamed: tuple[int, ...] = ()  # steps that every vote rejects


@dataclass(frozen=True)
class TaskFeedback:
    """What one iteration learned about one task; the curriculum's only input."""

    task: Task
    successes: int
    rollouts: int
    critic_value: float | None  # predicted success probability of the task's first observation
    critiques: tuple[str, ...] = ()
    p_plus: float | None = None  # P(vote +1 | step of a success); None without such votes
    p_minus: float | None = None  # P(vote -1 | step of a failure)
    decision: Decision | None = None  # None for active tasks
    logs: tuple[EpisodeLog, ...] = ()  # of a task outside the band, where a language model is to write the critiques
    pass_rates: str = ""  # of the hidden tests, where goals are verified in parts

    @property
    def verdict(self) -> Verdict | None:
        return None if self.decision is None else self.decision.verdict


@dataclass(frozen=True)
class IterationResult:
    """What training_step hands to callbacks in on_train_batch_end."""

    iteration: int
    feedback: tuple[TaskFeedback, ...]
    groups: tuple[RolloutGroup, ...]
    advantages: tuple[tuple[tuple[float, ...], ...], ...]  # [group][G][K] of the policy
    rewards: tuple[tuple[tuple[float, ...], ...], ...]  # [group][G][K] integrated step rewards
    values: tuple[tuple[tuple[float, ...], ...], ...]  # [group][G][K] predicted success before each step
    metrics: Mapping[str, float] = field(default_factory=dict)
