"""Play episodes and judge their steps, all of them decoded together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from transformers import PreTrainedTokenizerBase

from rla_lightning.environments.base import Environment, Episode
from rla_lightning.rollout.formats import CriticFormat, History, JudgeFormat, PolicyFormat, Turn, latest, turns_of
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
    StepLabel,
    Task,
    Trajectory,
    TrajectoryStop,
    Transition,
)

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int, float], None]  # what is happening, done, of how many, success rate so far
Place = tuple[int, int, int]  # of a step: group, trajectory, turn


@dataclass
class _Live:
    """One episode while it is played."""

    task: Task
    member: int  # of its group
    episode: Episode | None = None
    description: str = ""
    limit: int = 0
    observation: Observation = field(default_factory=lambda: Observation(""))
    history: list[Turn] = field(default_factory=list)
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
    critic_context_length: int | None = None,
    with_labels: bool = False,
    progress: Progress | None = None,
) -> list[RolloutGroup]:
    """`group_size` rollouts of every task, each at its own pace: who has an answer acts and asks again.

    `key`, the task's id, the rollout's number and the turn seed every draw, so results do not depend on
    how tasks are spread over processes (and tasks with equal ids get equal rollouts). Reaching `max_turns`
    or the episode's own limit is a loss. An exception of the environment ends one trajectory with
    ENV_ERROR. A later prompt that leaves no room for an answer in `context_length` ends its trajectory with
    TRUNCATED, a loss; a first prompt ends it with ENV_ERROR. Of what the critic has no room for, the oldest is left out.
    """
    if group_size < 1 or (max_turns is not None and max_turns < 1):
        raise ConfigError(f"group_size and max_turns must be at least 1, got {group_size} and {max_turns}")
    if not tasks:
        raise ConfigError("there are no tasks to roll out")
    lives = _start(tasks, group_size, environment, max_turns)
    prompts: dict[int, tuple[int, ...]] = {}  # that are being answered, by the episode's number
    with sampler.session(params) as session:
        going_on = list(range(len(lives)))
        while going_on or prompts:
            for number in going_on:
                live = lives[number]
                prompt = _ask(live, policy_format, tokenizer, params, context_length)
                if prompt is not None:
                    prompts[number] = prompt
                    session.submit(number, prompt, f"{key}/{live.task.id}/{live.member}/{len(live.steps)}")
            steps = {}
            for number, completion in session.completed():
                live = lives[number]
                critic_ids = _critic_ids(live, critic_format, critic_tokenizer or tokenizer, critic_context_length)
                action = policy_format.parse(completion.text, live.observation)
                steps[number] = Step(
                    prompts.pop(number), completion, live.observation, action or "", action is not None, critic_ids=critic_ids
                )
            _advance([lives[number] for number in steps], list(steps.values()), environment, with_labels)
            going_on = [number for number in steps if lives[number].stop_reason is None]
            if progress is not None:
                turn = max((len(live.steps) for live in lives), default=0)
                done = sum(live.stop_reason is not None for live in lives)
                progress(f"rollout turn {turn}", done, len(lives), _success(lives))
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
    """The groups with m judgments of every step; none for the steps of failed environments.

    A prompt that leaves no room for an answer in `context_length` is asked with the oldest turns of its history left
    out. A step whose own words are too many has no judgments.
    """
    if m < 1:
        raise ConfigError(f"the number of judgments per step must be at least 1, got {m}")
    prompts = _judge_prompts(groups, tokenizer, judge_format, params, context_length)
    rate = sum(group.successes for group in groups) / max(1, sum(group.rollouts for group in groups))
    if progress is not None:
        progress("judging", 0, len(prompts), rate)
    keys = [f"{key}/{groups[i].task.id}/{g}/{k}" for i, g, k in prompts]
    votes: dict[Place, tuple[Judgment, ...]] = {}
    answers = sampler.sample(list(prompts.values()), m, params, keys)
    for (place, prompt_ids), completions in zip(prompts.items(), answers, strict=True):
        votes[place] = tuple([Judgment(prompt_ids, answer, judge_format.parse(answer.text)) for answer in completions])
    if progress is not None:
        progress("judging", len(prompts), len(prompts), rate)
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


def fit(prompt: Callable[[History], tuple[int, ...]], history: History, room: int | None) -> tuple[int, ...] | None:
    """The prompt with as much of the history as fits, its first and its latest turn at least; None when that is too much.

    Args:
        prompt: renders a history.
        history: of which the oldest turns after the first are left out.
        room: most tokens; None for any number.
    """
    whole = prompt(history)
    if room is None or len(whole) <= room:
        return whole
    best, fewest, most = None, 1, len(history) - 2
    while fewest <= most:
        number = (fewest + most) // 2
        shortened = prompt(latest(history, number))
        if len(shortened) <= room:
            best, fewest = shortened, number + 1
        else:
            most = number - 1
    return best


def _start(tasks: Sequence[Task], group_size: int, environment: Environment, max_turns: int | None) -> list[_Live]:
    """All episodes are begun before one is looked at, so that engines can load side by side."""
    lives = []
    for task in tasks:
        description: str | None = None
        for member in range(group_size):
            live = _Live(task, member)
            try:
                if description is None:
                    description = environment.describe(task)
                live.episode = environment.start(task)
                live.description = description
            except Exception as error:
                live.fail(error)
            lives.append(live)
    for live in lives:
        if live.episode is not None:
            try:
                live.observation = live.episode.observation
                live.limit = min(live.episode.max_turns, max_turns or live.episode.max_turns)
            except Exception as error:
                live.fail(error)
    return lives


def _ask(
    live: _Live,
    policy_format: PolicyFormat,
    tokenizer: PreTrainedTokenizerBase,
    params: SamplingParams,
    context_length: int | None,
) -> tuple[int, ...] | None:
    """The prompt of an episode; None where it has ended, or ends here as there is no room left for an answer."""
    if live.stop_reason is not None:
        return None
    prompt = policy_format.prompt(tokenizer, live.history, live.observation)
    if context_length is None or len(prompt) + params.max_new_tokens <= context_length:
        return prompt
    if live.steps:
        live.outcome, live.stop_reason = LOST, "TRUNCATED"
    else:  # such as a rewrite; other tasks are looked at before a run starts
        live.fail(
            ConfigError(
                f"the prompt of task {live.task.id} has {len(prompt)} tokens; with max_new_tokens = "
                f"{params.max_new_tokens} it exceeds the context of {context_length}"
            )
        )
    return None


def _critic_ids(
    live: _Live, critic_format: CriticFormat, tokenizer: PreTrainedTokenizerBase, room: int | None
) -> tuple[int, ...]:
    def prompt(history: History) -> tuple[int, ...]:
        return critic_format.prompt(tokenizer, live.description, history, live.observation)

    fitting = fit(prompt, live.history, room)
    if fitting is None:  # a value is needed all the same, so the text is cut
        assert room is not None
        return prompt(latest(live.history, 1))[-room:]
    return fitting


def _advance(lives: Sequence[_Live], steps: Sequence[Step], environment: Environment, with_labels: bool) -> None:
    """Apply each step's action to its live episode and book the step."""
    ready: list[tuple[_Live, Step, StepLabel | None]] = []
    for live, step in zip(lives, steps, strict=True):
        assert live.episode is not None
        try:
            label = environment.label_step(live.episode, step.action) if with_labels else None
        except Exception as error:
            live.fail(error)
        else:
            ready.append((live, step, label))
    results = _transitions(environment, [(live.episode, step.action) for live, step, _ in ready if live.episode is not None])
    for (live, step, label), result in zip(ready, results, strict=True):
        if isinstance(result, Exception):
            live.fail(result)
        else:
            _book(live, step, label, result)


def _transitions(environment: Environment, actions: Sequence[tuple[Episode, str]]) -> Sequence[Transition | Exception]:
    """What `step_all` returns, or its own exception for every episode."""
    if not actions:
        return []
    try:
        results = environment.step_all([episode for episode, _ in actions], [action for _, action in actions])
        if len(results) != len(actions):
            raise ValueError(f"step_all returned {len(results)} results for {len(actions)} episodes")
    except Exception as error:
        return [error] * len(actions)
    return results


def _book(live: _Live, step: Step, label: StepLabel | None, transition: Transition) -> None:
    if transition.done and transition.outcome not in (WON, LOST):
        live.fail(ValueError(f"the episode is done with outcome {transition.outcome}, not {WON} or {LOST}"))
        return
    is_valid = step.is_valid and transition.is_valid
    live.steps.append(
        replace(step, is_valid=is_valid, feedback=transition.observation.text, label=label, checks=transition.checks)
    )
    live.history.append(Turn(len(live.steps), step.observation, step.action, step.prompt_ids, step.completion.token_ids))
    live.observation = transition.observation
    if transition.outcome is not None and transition.done:
        live.outcome, live.stop_reason = transition.outcome, "DONE"
    elif len(live.steps) >= live.limit:
        live.outcome, live.stop_reason = LOST, "MAX_TURNS"


def _judge_prompts(
    groups: Sequence[RolloutGroup],
    tokenizer: PreTrainedTokenizerBase,
    judge_format: JudgeFormat,
    params: SamplingParams,
    context_length: int | None,
) -> dict[Place, tuple[int, ...]]:
    """The prompts of all steps that can be judged."""
    room = None if context_length is None else context_length - params.max_new_tokens
    prompts: dict[Place, tuple[int, ...]] = {}
    too_long = 0
    for i, group in enumerate(groups):
        for g in group.valid_indices:
            steps = group.trajectories[g].steps
            turns = turns_of(steps)
            for k, step in enumerate(steps):
                prompt = fit(partial(_judge_prompt, step, judge_format, tokenizer), turns[:k], room)
                if prompt is None:
                    too_long += 1
                else:
                    prompts[i, g, k] = prompt
    if too_long:
        logger.warning("%d of %d steps are not judged: too long for a context of %s tokens with max_new_tokens = %d",
                       too_long, too_long + len(prompts), context_length, params.max_new_tokens)  # fmt: skip
    return prompts


def _judge_prompt(step: Step, judge_format: JudgeFormat, tokenizer: PreTrainedTokenizerBase, history: History) -> tuple[int, ...]:
    return judge_format.prompt(
        tokenizer, history, step.observation, step.action, step.completion.text, step.is_valid, step.feedback
    )


def _success(lives: Sequence[_Live]) -> float:
    ended = [live for live in lives if live.stop_reason in {"DONE", "MAX_TURNS", "TRUNCATED"}]
    return sum(live.outcome > 0 for live in ended) / max(1, len(ended))
