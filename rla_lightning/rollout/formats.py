"""What models are shown and how their answers are read: the contracts, and formats for tiny models.

`compact` is for tokenizers in which every vocabulary word is one token: the environment's digest
instead of a history, and an answer of two or three words. `formats_paper` and `formats_chat` are
for language models: the whole history in one message, or a conversation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase

from rla_lightning.types import ConfigError, ExpertAction, Observation, Step, StepLabel

MARKERS = frozenset({"<act>", "<judge>", "<value>"})  # special tokens that say what is asked
FUNCTION_WORDS = frozenset({"to", "from", "with", "in", "on", "in/on"})
CONTENT_WORDS = 2  # of a command's short form
RAW_WORDS = 4  # of an unparsable answer that the judge is shown


@dataclass(frozen=True)
class Turn:
    """An earlier turn of an episode."""

    number: int  # from 1; a jump in a history says that turns are left out
    observation: Observation  # what was shown
    action: str  # what was done, "" when the answer named nothing
    prompt_ids: tuple[int, ...] = ()  # of the policy; () where the answer is a script's
    completion_ids: tuple[int, ...] = ()  # the answer, as it was sampled


History = Sequence[Turn]  # earlier turns, the first and the latest at least


class PolicyFormat(Protocol):
    def prompt(self, tokenizer: PreTrainedTokenizerBase, history: History, observation: Observation) -> tuple[int, ...]:
        """The token ids that the policy continues."""

    def parse(self, text: str, observation: Observation) -> str | None:
        """The command for the environment, or None when the answer names none."""

    def answer(self, tokenizer: PreTrainedTokenizerBase, observation: Observation, expert: ExpertAction) -> tuple[int, ...]:
        """An expert's answer with the end token, for supervised warm starts."""


class JudgeFormat(Protocol):
    def prompt(
        self,
        tokenizer: PreTrainedTokenizerBase,
        history: History,
        observation: Observation,
        action: str,
        raw_text: str,
        is_valid: bool,
        feedback: str,
    ) -> tuple[int, ...]:
        """The token ids that the reward model continues to judge one step."""

    def parse(self, text: str) -> int | None:
        """+1, -1, or None when the judgment holds no score."""

    def answer(self, tokenizer: PreTrainedTokenizerBase, label: StepLabel) -> tuple[int, ...]:
        """A known judgment with the end token, for supervised warm starts."""


class CriticFormat(Protocol):
    def prompt(
        self, tokenizer: PreTrainedTokenizerBase, description: str, history: History, observation: Observation
    ) -> tuple[int, ...]:
        """The token ids of a task and a state, whose success the value model predicts."""


class CompactPolicyFormat:
    """`<act>` and the state; the answer is `#thought verb entity`."""

    def prompt(self, tokenizer: PreTrainedTokenizerBase, history: History, observation: Observation) -> tuple[int, ...]:
        del history  # the digest holds what the agent knows
        return encode_words(tokenizer, ("<act>", *state_words(observation)))

    def parse(self, text: str, observation: Observation) -> str | None:
        words = " ".join(word for word in text.split() if not word.startswith("#"))
        if not observation.commands:
            return words or None
        return _command_of_form(observation.commands).get(words)

    def answer(self, tokenizer: PreTrainedTokenizerBase, observation: Observation, expert: ExpertAction) -> tuple[int, ...]:
        form = expert.action
        if observation.commands:
            forms = short_forms(observation.commands)
            if expert.action not in forms:
                raise ConfigError(f"the expert's action {expert.action!r} is not an admissible command")
            form = forms[expert.action]
        return (*encode_words(tokenizer, (*expert.thought.split(), *form.split())), end_id(tokenizer))


class CompactJudgeFormat:
    """`<judge>`, the state, `<act>` and the agent's answer; the judgment is `#critique +1` or `#critique -1`.

    An answer that the environment did not accept is followed by the unknown token: that nothing happened is
    part of what the judge sees, as in a history.
    """

    def prompt(
        self,
        tokenizer: PreTrainedTokenizerBase,
        history: History,
        observation: Observation,
        action: str,
        raw_text: str,
        is_valid: bool,
        feedback: str,
    ) -> tuple[int, ...]:
        del history, feedback
        form = short_forms(observation.commands).get(action, action)
        answer = form.split() if action else raw_text.split()[:RAW_WORDS]
        words = ("<judge>", *state_words(observation), "<act>", *answer)
        return encode_words(tokenizer, words if is_valid else (*words, str(tokenizer.unk_token)))

    def parse(self, text: str) -> int | None:
        words = text.split()
        if not words or words[-1] not in {"+1", "-1"} or any(word in {"+1", "-1"} for word in words[:-1]):
            return None
        return int(words[-1])

    def answer(self, tokenizer: PreTrainedTokenizerBase, label: StepLabel) -> tuple[int, ...]:
        return (*encode_words(tokenizer, (*label.critique.split(), f"{label.score:+d}")), end_id(tokenizer))


class CompactCriticFormat:
    """`<value>`, the task's description and the state."""

    def prompt(
        self, tokenizer: PreTrainedTokenizerBase, description: str, history: History, observation: Observation
    ) -> tuple[int, ...]:
        del history
        return encode_words(tokenizer, ("<value>", *description.split(), *state_words(observation)))


def turns_of(steps: Sequence[Step]) -> list[Turn]:
    """The history that the steps from an episode's start are."""
    return [Turn(i, s.observation, s.action, s.prompt_ids, s.completion.token_ids) for i, s in enumerate(steps, 1)]


def latest(history: History, number: int | None) -> History:
    """The first turn, where a task is stated, and the `number` latest (at least 1); None keeps all."""
    if number is None or number >= len(history) - 1:
        return history
    return (history[0], *history[-number:])


def gap_notes(history: History) -> list[str]:
    """What to say before each turn: nothing, or which turns before it are left out."""
    notes, following = [], 1
    for turn in history:
        skipped = range(following, turn.number)
        what = f"turns {skipped[0]} to {skipped[-1]} are" if len(skipped) > 1 else f"turn {following} is"
        notes.append(f"({what} left out)\n" if skipped else "")
        following = turn.number + 1
    return notes


def state_words(observation: Observation) -> Sequence[str]:
    """The digest, or the words of the text where an environment makes no digest."""
    return observation.digest or observation.text.split()


@lru_cache(maxsize=16384)
def short_forms(commands: tuple[str, ...]) -> Mapping[str, str]:
    """Each command's first two content words, or more where two commands would look the same.

    "go to cabinet 1" -> "go cabinet_1"; numbers belong to the word before them.
    """
    content = {command: _content_words(command) for command in commands}
    forms = {command: " ".join(words[:CONTENT_WORDS]) for command, words in content.items()}
    counts = Counter(forms.values())
    forms = {command: form if counts[form] == 1 else " ".join(content[command]) for command, form in forms.items()}
    counts = Counter(forms.values())
    return {command: form if counts[form] == 1 else command for command, form in forms.items()}


def _content_words(command: str) -> list[str]:
    words: list[str] = []
    for word in command.split():
        if word.isdigit() and words:
            words[-1] += f"_{word}"
        else:
            words.append(word)
    return [word for word in words if word not in FUNCTION_WORDS]


@lru_cache(maxsize=16384)
def _command_of_form(commands: tuple[str, ...]) -> Mapping[str, str]:
    forms = short_forms(commands)
    counts = Counter(forms.values())
    return {form: command for command, form in forms.items() if counts[form] == 1}


_vocabularies: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[dict[str, int], int]] = WeakKeyDictionary()


def encode_words(tokenizer: PreTrainedTokenizerBase, words: Sequence[str]) -> tuple[int, ...]:
    """One token per word by one look-up each, the unknown token for words outside the vocabulary."""
    known = _vocabularies.get(tokenizer)
    if known is None:
        known = _vocabularies[tokenizer] = _vocabulary(tokenizer)
    vocabulary, unknown = known
    if words and words[0] in MARKERS and words[0] not in vocabulary:
        raise ConfigError(f"compact formats need a tokenizer with the token {words[0]!r}")
    return tuple([vocabulary.get(word, unknown) for word in words])


def _vocabulary(tokenizer: PreTrainedTokenizerBase) -> tuple[dict[str, int], int]:
    if tokenizer.unk_token_id is None:
        raise ConfigError("compact formats need a word-level tokenizer with an unknown token; use the paper formats")
    return tokenizer.get_vocab(), int(tokenizer.unk_token_id)


def end_id(tokenizer: PreTrainedTokenizerBase) -> int:
    if tokenizer.eos_token_id is None:
        raise ConfigError("the tokenizer has no end token, so answers cannot end")
    return int(tokenizer.eos_token_id)
