"""Play episodes and judge their steps, all of them decoded together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from transformers import PreTrainedTokenizerBase

from rla_lightning.environments.base import Environment, Episode
from rla_lightning.rollout.formats import CriticFormat, JudgeFormat, PolicyFormat
from rla_lightning.rollout.sampler import Sampler
from rla_lightning.types import (
    LOST,
    WON,
    ConfigError,
    EpisodesFailedError,
    Judgment,
    Observation,
    RolloutGroup,
    SamplingParams,
    Step,
    Task,
    Trajectory,
    TrajectoryStop,
)

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int, float], None]  # what is happening, done, of how many, success rate so far


@dataclass
class _Live:
    """One episode while it is played."""

    task: Task
    member: int  # of its group
    episode: Episode | None = None
    description: str = ""
    limit: int = 0
    observation: Observation = field(default_factory=lambda: Observation(""))
    history: list[tuple[Observation, str]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    outcome: float = LOST
    stop_reason: TrajectoryStop | None = None
    error: Exception | None = None

    def fail(self, error: Exception) -> None:
        logger.warning("task %s, rollout %d: the environment failed: %s", self.task.id, self.member, describe_error(error))
        self.stop_reason, self.error = "ENV_ERROR", error

    def trajectory(self) -> Trajectory:
        assert self.stop_reason is not None
        error = describe_error(self.error) if self.error else ""
        return Trajectory(self.task, tuple(self.steps), self.outcome, self.stop_reason, error)


def collect(
    tasks: Sequence[Task],
    group_size: int,
    *,
    environment: Environment,
    sampler: Sampler,
    tokenizer: PreTrainedTokenizerBase,
    policy_format: PolicyFormat,
    critic_format: CriticFormat,
    critic_tokenizer: PreTrainedTokenizerBase | None = None,
    params: SamplingParams,
    key: str,
    max_turns: int | None = None,
    context_length: int | None = None,
    with_labels: bool = False,
    progress: Progress | None = None,
) -> list[RolloutGroup]:
    """`group_size` rollouts of every task, one sampler call per turn for all live episodes.

    `key`, the task's id, the rollout's number and the turn seed every draw, so results do not depend on
    how tasks are spread over processes (and tasks with equal ids get equal rollouts). Reaching `max_turns`
    or the episode's own limit is a loss. An exception of the environment ends one trajectory with
    ENV_ERROR. A prompt that leaves no room for an answer in `context_length` raises ConfigError.
    """
    if group_size < 1 or (max_turns is not None and max_turns < 1):
        raise ConfigError(f"group_size and max_turns must be at least 1, got {group_size} and {max_turns}")
    if not tasks:
        raise ConfigError("there are no tasks to roll out")
    lives = _start(tasks, group_size, environment, max_turns)
    turn = 0
    while running := [live for live in lives if live.stop_reason is None]:
        prompts = [policy_format.prompt(tokenizer, live.history, live.observation) for live in running]
        _check_context([live.task for live in running], prompts, params, context_length)
        keys = [f"{key}/{live.task.id}/{live.member}/{turn}" for live in running]
        answers = sampler.sample(prompts, 1, params, keys)
        for live, prompt_ids, (completion,) in zip(running, prompts, answers, strict=True):
            critic_ids = critic_format.prompt(critic_tokenizer or tokenizer, live.description, live.history, live.observation)
            action = policy_format.parse(completion.text, live.observation)
            _advance(live, environment, Step(prompt_ids, completion, live.observation, action or "", action is not None,
                                             critic_ids=critic_ids), with_labels)  # fmt: skip
        turn += 1
        if progress is not None:
            progress(f"rollout turn {turn}", sum(live.stop_reason is not None for live in lives), len(lives), _success(lives))
    trajectories = [live.trajectory() for live in lives]
    return [RolloutGroup(task, tuple(trajectories[i * group_size : (i + 1) * group_size])) for i, task in enumerate(tasks)]


def require_played(groups: Sequence[RolloutGroup]) -> None:
    """Raise EpisodesFailedError when the environment failed in every episode."""
    if groups and not any(group.rollouts for group in groups):
        raise EpisodesFailedError(f"every episode failed, first error: {groups[0].trajectories[0].error}")


def judge(
    groups: Sequence[RolloutGroup],
    m: int,
    *,
    sampler: Sampler,
    tokenizer: PreTrainedTokenizerBase,
    judge_format: JudgeFormat,
    params: SamplingParams,
    key: str,
    context_length: int | None = None,
    progress: Progress | None = None,
) -> list[RolloutGroup]:
    """The groups with m judgments of every step; none for the steps of failed environments."""
    if m < 1:
        raise ConfigError(f"the number of judgments per step must be at least 1, got {m}")
    places = [
        (i, g, k)
        for i, group in enumerate(groups)
        for g, trajectory in enumerate(group.trajectories)
        for k in range(len(trajectory.steps))
        if trajectory.stop_reason != "ENV_ERROR"
    ]
    rate = sum(group.successes for group in groups) / max(1, sum(group.rollouts for group in groups))
    if progress is not None:
        progress("judging", 0, len(places), rate)
    prompts = [_judge_prompt(groups[i].trajectories[g], k, tokenizer, judge_format) for i, g, k in places]
    _check_context([groups[i].task for i, _, _ in places], prompts, params, context_length)
    keys = [f"{key}/{groups[i].task.id}/{g}/{k}" for i, g, k in places]
    votes: dict[tuple[int, int, int], tuple[Judgment, ...]] = {}
    for place, prompt_ids, completions in zip(places, prompts, sampler.sample(prompts, m, params, keys), strict=True):
        votes[place] = tuple([Judgment(prompt_ids, answer, judge_format.parse(answer.text)) for answer in completions])
    if progress is not None:
        progress("judging", len(places), len(places), rate)
    return [
        replace(
            group,
            judgments=tuple(
                tuple(votes.get((i, g, k), ()) for k in range(len(trajectory.steps)))
                for g, trajectory in enumerate(group.trajectories)
            ),
        )
        for i, group in enumerate(groups)
    ]


def describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _start(tasks: Sequence[Task], group_size: int, environment: Environment, max_turns: int | None) -> list[_Live]:
    lives = []
    for task in tasks:
        description: str | None = None
        for member in range(group_size):
            live = _Live(task, member)
            try:
                if description is None:
                    description = environment.describe(task)
                live.episode = environment.start(task)
                live.observation = live.episode.observation
                live.limit = min(live.episode.max_turns, max_turns or live.episode.max_turns)
                live.description = description
            except Exception as error:
                live.fail(error)
            lives.append(live)
    return lives


def _advance(live: _Live, environment: Environment, step: Step, with_labels: bool) -> None:
    """Apply the step's action to the live episode and book the step."""
    assert live.episode is not None
    try:
        label = environment.label_step(live.episode, step.action) if with_labels else None
        transition = live.episode.step(step.action)
        if transition.done and transition.outcome not in (WON, LOST):
            raise ValueError(f"the episode is done with outcome {transition.outcome}, not {WON} or {LOST}")
    except Exception as error:
        live.fail(error)
        return
    is_valid = step.is_valid and transition.is_valid
    live.steps.append(replace(step, is_valid=is_valid, feedback=transition.observation.text, label=label))
    live.history.append((step.observation, step.action))
    live.observation = transition.observation
    if transition.outcome is not None and transition.done:
        live.outcome, live.stop_reason = transition.outcome, "DONE"
    elif len(live.steps) >= live.limit:
        live.outcome, live.stop_reason = LOST, "MAX_TURNS"


def _judge_prompt(
    trajectory: Trajectory, k: int, tokenizer: PreTrainedTokenizerBase, judge_format: JudgeFormat
) -> tuple[int, ...]:
    step = trajectory.steps[k]
    history = [(earlier.observation, earlier.action) for earlier in trajectory.steps[:k]]
    return judge_format.prompt(
        tokenizer, history, step.observation, step.action, step.completion.text, step.is_valid, step.feedback
    )


def _check_context(
    tasks: Sequence[Task], prompts: Sequence[Sequence[int]], params: SamplingParams, context_length: int | None
) -> None:
    if context_length is None:
        return
    for task, prompt in zip(tasks, prompts, strict=True):
        if len(prompt) + params.max_new_tokens > context_length:
            raise ConfigError(
                f"the prompt of task {task.id} has {len(prompt)} tokens; with max_new_tokens = "
                f"{params.max_new_tokens} it exceeds the context of {context_length}"
            )


def _success(lives: Sequence[_Live]) -> float:
    ended = [live for live in lives if live.stop_reason in {"DONE", "MAX_TURNS"}]
    return sum(live.outcome > 0 for live in ended) / max(1, len(ended))
