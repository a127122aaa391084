"""Text feedback on rollouts: filled into templates, for which no model has to be able to write, or written by one from logs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from rla_lightning.curriculum.critique_prompts import Question, cleaned, ending, fitted, merge_question, questions, turns
from rla_lightning.types import PASSED, Completion, EpisodeLog, Judgment, RolloutGroup, Step, TaskFeedback, Trajectory

MAX_LISTED = 5  # steps or actions named in one critique
COUNTED = (
    "written",  # tasks that have a critique by the model
    "fallbacks",  # tasks that keep the template's
    "unasked",  # questions too long for the context
    "empty",  # answers without a word
    "truncated",  # answers that did not end
    "tokens",  # of all answers
)


# Templates


def template_critique(group: RolloutGroup, high: float = 0.8) -> tuple[str, ...]:
    """Why rollouts failed and, above the band, what made the task easy; at most two sentences each.

    The paper critiques failed rollouts only, which leaves nothing to say about a task at success 1.0.
    A group with a success rate over `high` gets one of its wins: how long they took, and what the shortest did. Where
    goals are verified in parts (the hidden tests of programs), the rates at which those are passed are the critique.
    """
    rates = pass_rates(group)
    if rates:
        return (rates,)
    judgments = group.judgments or tuple(() for _ in group.trajectories)
    critiques = [
        _critique_loss(trajectory, votes)
        for trajectory, votes in zip(group.trajectories, judgments, strict=True)
        if not trajectory.is_won and trajectory.stop_reason != "ENV_ERROR"
    ]
    if group.rollouts and group.successes / group.rollouts > high:
        critiques.append(_critique_wins(group))
    return tuple(critiques)


def pass_rates(group: RolloutGroup) -> str:
    """Of the parts that goals are verified in, numbered from 1; "" where there are none."""
    if not any(step.checks for trajectory in group.valid_trajectories for step in trajectory.steps):
        return ""
    last = [trajectory.steps[-1].checks for trajectory in group.valid_trajectories if trajectory.steps]
    verified = [checks for checks in last if checks]
    unreadable = f" {group.rollouts - len(verified)} gave nothing that could be run." if len(verified) < group.rollouts else ""
    parts = []
    for number, column in enumerate(zip(*verified, strict=True), 1):
        failures = Counter(check for check in column if check != PASSED)
        why = ", ".join(f"{count} {name}" for name, count in failures.most_common())
        parts.append(f"{number}: {column.count(PASSED) / len(column):.0%}" + (f" ({why})" if why else ""))
    programs = f"{len(verified)} program" + ("" if len(verified) == 1 else "s")
    return f"Pass rates of the hidden tests over {programs}: {'; '.join(parts)}.{unreadable}"


def _critique_loss(trajectory: Trajectory, judgments: Sequence[Sequence[Judgment]]) -> str:
    """Steps are numbered from 0, as in the trajectory files."""
    sentence = f"The rollout {ending(trajectory.stop_reason)} after {turns(len(trajectory.steps))}."
    if not judgments:
        return sentence
    blamed = [f"{index} ({_action(trajectory.steps[index])})" for index in _blamed(trajectory, judgments)]
    if not blamed:
        return f"{sentence} No step has only negative votes."
    return f"{sentence} All votes are negative at step{'' if len(blamed) == 1 else 's'} {_listing(blamed)}."


def _critique_wins(group: RolloutGroup) -> str:
    wins = [trajectory for trajectory in group.valid_trajectories if trajectory.is_won]
    mean = sum(len(trajectory.steps) for trajectory in wins) / len(wins)
    shortest = min(wins, key=lambda trajectory: len(trajectory.steps))
    actions = _listing([_action(step) for step in shortest.steps])
    won = f"{len(wins)} of {group.rollouts} rollouts won, in {mean:.1f} turns on average."
    return f"{won} The shortest took {turns(len(shortest.steps))}: {actions}."


def _blamed(trajectory: Trajectory, judgments: Sequence[Sequence[Judgment]]) -> list[int]:
    """Steps that every vote rejects."""
    voted = enumerate(zip(trajectory.steps, judgments, strict=True))
    return [index for index, (_, votes) in voted if votes and all(vote.score == -1 for vote in votes)]


def _action(step: Step) -> str:
    return step.action or "no readable action"


def _listing(items: Sequence[str]) -> str:
    more = f" and {len(items) - MAX_LISTED} more" if len(items) > MAX_LISTED else ""
    return ", ".join(items[:MAX_LISTED]) + more


# By a language model


@dataclass(frozen=True)
class Writer:
    """A language model that answers questions."""

    tokenizer: PreTrainedTokenizerBase
    room: int  # most tokens of a question
    answer: Callable[[Sequence[tuple[int, ...]], Sequence[str]], list[Completion]]  # prompts and their keys


@dataclass(frozen=True)
class Written:
    """One task's critique by a language model."""

    text: str  # "" where no answer could be used
    counts: Mapping[str, int]  # of what is COUNTED


def episode_logs(group: RolloutGroup, max_rollouts: int, is_easy: bool) -> tuple[EpisodeLog, ...]:
    """What a language model reads of a task: losses from all over the group and, if it is easy, the shortest win."""
    judgments = group.judgments or tuple(() for _ in group.trajectories)
    judged = [(group.trajectories[g], judgments[g]) for g in group.valid_indices if group.trajectories[g].steps]
    losses = [(trajectory, votes) for trajectory, votes in judged if not trajectory.is_won]
    wins = [trajectory for trajectory, _ in judged if trajectory.is_won]
    chosen = [_log(min(wins, key=lambda trajectory: len(trajectory.steps)), ())] if is_easy and wins else []
    number = min(max_rollouts - len(chosen), len(losses))
    middles = [(2 * i + 1) * len(losses) // (2 * number) for i in range(number)]  # of equal parts of the list
    return (*chosen, *(_log(*losses[middle]) for middle in middles))


def _log(trajectory: Trajectory, judgments: Sequence[Sequence[Judgment]]) -> EpisodeLog:
    lines = []
    for index, step in enumerate(trajectory.steps):
        note = "" if step.is_valid else " (not accepted)"
        lines.append(f"[{index}] Observed: {step.observation.text}\n[{index}] Did: {step.action or 'nothing readable'}{note}")
    if trajectory.steps and trajectory.steps[-1].feedback:
        lines[-1] += f"\nAt the end: {trajectory.steps[-1].feedback}"
    blamed = _blamed(trajectory, judgments) if judgments and not trajectory.steps[-1].checks else []  # a unit test blames no step
    return EpisodeLog(tuple(lines), trajectory.is_won, trajectory.stop_reason, tuple(blamed))


def write_critiques(feedback: Sequence[TaskFeedback], writer: Writer, key: str) -> list[Written]:
    """A model's critique of each task from its logs: one of every rollout, then what they come to.

    Args:
        feedback: on tasks with logs.
        writer: the model.
        key: with the task's id it seeds all draws, so that other tasks change nothing.
    """
    counts: list[Counter[str]] = [Counter() for _ in feedback]
    asked = [
        (i, f"{key}/critique/{item.task.id}/{number}", question)
        for i, item in enumerate(feedback)
        for number, question in enumerate(questions(item))
    ]
    remarks: list[dict[str, None]] = [{} for _ in feedback]  # distinct ones in order
    for (i, _, _), text in zip(asked, _answers(asked, writer, counts), strict=True):
        if text:
            remarks[i][text] = None
    merged = [
        (i, f"{key}/critique/{item.task.id}/merge", merge_question(list(remarks[i])))
        for i, item in enumerate(feedback)
        if len(remarks[i]) > 1
    ]
    texts = ["".join(found) if len(found) == 1 else "" for found in remarks]
    for (i, _, _), text in zip(merged, _answers(merged, writer, counts), strict=True):
        texts[i] = text
    return [
        Written(text, count + Counter({"written" if text else "fallbacks": 1})) for text, count in zip(texts, counts, strict=True)
    ]


def _answers(asked: Sequence[tuple[int, str, Question]], writer: Writer, counts: Sequence[Counter[str]]) -> list[str]:
    """What is left of the answer to each question, "" for none; `counts` of its task is told what became of it."""
    prompts = [fitted(question, writer.tokenizer, writer.room) for _, _, question in asked]
    fitting = [(prompt, key) for prompt, (_, key, _) in zip(prompts, asked, strict=True) if prompt is not None]
    answers = iter(writer.answer([prompt for prompt, _ in fitting], [key for _, key in fitting]) if fitting else ())
    texts = []
    for prompt, (i, _, _) in zip(prompts, asked, strict=True):
        if prompt is None:
            counts[i]["unasked"] += 1
            texts.append("")
            continue
        completion = next(answers)
        ended = completion.stop_reason == "EOS"
        texts.append(cleaned(completion.text) if ended else "")
        counts[i]["tokens"] += len(completion.token_ids)
        counts[i]["truncated"] += not ended
        counts[i]["empty"] += ended and not texts[-1]
    return texts


def with_critique(item: TaskFeedback, written: Written) -> TaskFeedback:
    """The feedback with the model's critique, after the pass rates if there are any, or else with the template's."""
    rates = (item.pass_rates,) if item.pass_rates else ()
    return replace(item, critiques=(*rates, written.text) if written.text else item.critiques, logs=())


def total(written: Sequence[Written]) -> dict[str, float]:
    """Sums of what is COUNTED, under the same names even for nothing."""
    return {name: float(sum(one.counts.get(name, 0) for one in written)) for name in COUNTED}


def joined(critiques: Sequence[str]) -> str:
    """The critiques of one task as one text, without repeats."""
    return " ".join(dict.fromkeys(critiques))
