"""What a language model is asked for a critique, and what is kept of its answer, which is text that nobody vouches for."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from rla_lightning.rollout.formats_paper import render
from rla_lightning.types import EpisodeLog, TaskFeedback, TrajectoryStop

MAX_SENTENCES = 2
MAX_CHARACTERS = 600
SHORTEST_TURN = 16  # characters that a turn is cut to at most
MARK = re.compile(
    r"</?[^<>\s]{1,40}>|\[/?[A-Z][A-Z_]{2,30}\]"
)  # tokens of some chat template, which the next prompt must not hold
LIST_MARK = re.compile(r"^\s*(?:\d+[.)]|[-*•])\s+", re.MULTILINE)
SENTENCE_END = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][\"')\]]))\s+(?=[^a-z])")
ONLY = "Answer with these sentences only."


@dataclass(frozen=True)
class Question:
    """A log between instructions; only the log is ever cut."""

    before: str
    log: tuple[str, ...]
    after: str


def questions(item: TaskFeedback) -> list[Question]:
    """One about each log of a task."""
    return [_about_win(log, item) if log.is_won else _about_loss(log, item) for log in item.logs]


def _about_loss(log: EpisodeLog, item: TaskFeedback) -> Question:
    facts = [f"The attempt {ending(log.stop_reason)} after {turns(len(log.turns))}."]
    if log.blamed:
        facts.append(f"Every reviewer rejected what was done at: {', '.join(map(str, log.blamed))}.")
    facts += [item.pass_rates] if item.pass_rates else []
    return Question(
        "An agent tried to solve a task in an environment and failed. This is the log of its attempt, with numbered steps.",
        log.turns,
        f"{' '.join(facts)}\n\nSay in at most two sentences why the attempt failed. {ONLY}",
    )


def _about_win(log: EpisodeLog, item: TaskFeedback) -> Question:
    facts = [f"{item.successes} of {item.rollouts} attempts succeeded. This one took {turns(len(log.turns))}."]
    facts += [item.pass_rates] if item.pass_rates else []
    return Question(
        "A task in an environment is too easy for an agent. This is the log of its shortest successful attempt, with numbered "
        "steps.",
        log.turns,
        f"{' '.join(facts)}\n\nSay in at most two sentences what made the task easy. {ONLY}",
    )


def merge_question(remarks: Sequence[str]) -> Question:
    """For one text from several critiques."""
    return Question(
        "These are remarks on several attempts of an agent at the same task.",
        tuple(f"- {remark}" for remark in remarks),
        f"Sum them up in at most two sentences, what most of them say first. {ONLY}",
    )


def ending(stop_reason: TrajectoryStop) -> str:
    """How a rollout was lost, after its name."""
    return {"MAX_TURNS": "ran out of turns", "TRUNCATED": "outgrew the context"}.get(stop_reason, "lost")


def turns(number: int) -> str:
    return f"{number} turn" + ("" if number == 1 else "s")


def fitted(question: Question, tokenizer: PreTrainedTokenizerBase, room: int) -> tuple[int, ...] | None:
    """The question as a prompt of at most `room` tokens, None where even the instructions leave too little of it.

    What is too long loses turns from the middle of the log; the first and the last one stay, at the worst without their middle.
    """

    def prompt(kept: int, characters: int | None = None) -> tuple[int, ...]:
        log = [_shortened(MARK.sub(" ", turn), characters) for turn in _without_middle(question.log, kept)]
        return render(tokenizer, "\n\n".join((question.before, "\n".join(log), question.after)))

    number, ends = len(question.log), min(2, len(question.log))
    kept = _largest(ends, number, lambda kept: len(prompt(kept)) <= room)
    if kept is not None:
        return prompt(kept)
    longest = max(map(len, question.log), default=0)
    characters = _largest(SHORTEST_TURN, longest, lambda characters: len(prompt(ends, characters)) <= room)
    return None if characters is None else prompt(ends, characters)


def cleaned(text: str) -> str:
    """What can be shown to the next model: two sentences without thoughts, control characters and marks of chat templates.

    It is "" where no word is left.
    """
    spoken = text.rpartition("</think>")[2].partition("<think>")[0]
    unlisted = LIST_MARK.sub("", spoken)
    visible = "".join(" " if unicodedata.category(character)[0] == "C" else character for character in unlisted)
    sentences = SENTENCE_END.split(" ".join(MARK.sub(" ", visible).split()))
    kept = " ".join(sentences[:MAX_SENTENCES])
    if len(kept) > MAX_CHARACTERS:
        kept = kept[: MAX_CHARACTERS - 3].rpartition(" ")[0] + "..."
    return kept if any(character.isalnum() for character in kept) else ""


def _without_middle(log: Sequence[str], kept: int) -> list[str]:
    left_out = len(log) - kept
    if left_out == 0:
        return list(log)
    first = kept - kept // 2
    return [*log[:first], f"({left_out} left out)", *log[first + left_out :]]


def _shortened(turn: str, characters: int | None) -> str:
    if characters is None or len(turn) <= characters:
        return turn
    last = characters // 2
    return f"{turn[: characters - last]} ... {turn[len(turn) - last :]}"


def _largest(low: int, high: int, fits: Callable[[int], bool]) -> int | None:
    """The largest number in [low, high] that fits, as do all smaller ones; None: not even `low`."""
    if high < low or not fits(low):
        return None
    if fits(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
