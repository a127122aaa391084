"""Formats for language models with a chat template: turn by turn in one conversation that is only ever appended to."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from rla_lightning.rollout.formats import History, gap_notes, latest
from rla_lightning.rollout.formats_paper import (
    NO_COMMAND,
    PaperJudgeFormat,
    boxed_answer,
    check_max_history,
    expert_choice,
    list_commands,
    read_command,
)
from rla_lightning.rollout.templates import Message, encode_chat, encode_next_turn
from rla_lightning.types import ExpertAction, Observation


class ChatPolicyFormat:
    r"""Every observation is a user's message; the answer is reasoning, then a command in \boxed{}.

    A prompt is the last prompt, the policy's own tokens and the new message. Sampled tokens are never decoded and
    tokenised again, whatever the template would make of them, so that a whole rollout is one sequence.

    Args:
        system: system message; null leaves it to the chat template.
        numbered: commands are numbered and chosen by number, otherwise listed and chosen by their words.
    """

    def __init__(self, system: str | None = None, numbered: bool = True) -> None:
        self.system, self.numbered = system, numbered

    def prompt(self, tokenizer: PreTrainedTokenizerBase, history: History, observation: Observation) -> tuple[int, ...]:
        if not history:
            encode_next_turn(tokenizer, (), "Go on.", self.system)  # raises before training, not in the second turn
            content = f"You are solving a task step by step by acting in an environment.\n\n{self._message(observation)}"
            return encode_chat(tokenizer, [("user", content)], self.system)
        last = history[-1]
        before = last.prompt_ids or self.prompt(tokenizer, history[:-1], last.observation)  # a scripted turn has none
        after = encode_next_turn(tokenizer, last.completion_ids, self._message(observation), self.system)
        return (*before, *last.completion_ids, *after)

    def parse(self, text: str, observation: Observation) -> str | None:
        return read_command(text, observation)

    def answer(self, tokenizer: PreTrainedTokenizerBase, observation: Observation, expert: ExpertAction) -> tuple[int, ...]:
        return boxed_answer(tokenizer, expert.thought, expert_choice(observation, expert, self.numbered))

    def _message(self, observation: Observation) -> str:
        wanted = "your action"
        parts = [observation.text]
        if observation.commands:
            parts.append(f"Commands you can choose from:\n{list_commands(observation.commands, self.numbered)}")
            wanted = "the number of your command" if self.numbered else "your command"
        parts.append(f"Think about what to do next, then give {wanted} in \\boxed{{}}.")
        return "\n\n".join(parts)


class ChatJudgeFormat(PaperJudgeFormat):
    """One user's message with the text of the paper format, after a system message of one's own.

    The reward model is another model with another tokenizer, so that it reads what was said rather than the policy's tokens.

    Args:
        system: system message; null leaves it to the chat template.
        max_history: latest turns that are shown besides the first; null shows all.
    """

    def __init__(self, system: str | None = None, max_history: int | None = None) -> None:
        super().__init__(max_history)
        self.system = system

    def render(self, tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
        return encode_chat(tokenizer, [("user", text)], self.system)


class ChatCriticFormat:
    """Observations are the user's messages and actions the assistant's; the value model reads where the next would start.

    Args:
        max_history: latest turns that are shown besides the first; null shows all.
    """

    def __init__(self, max_history: int | None = None) -> None:
        self.max_history = check_max_history(max_history)

    def prompt(
        self, tokenizer: PreTrainedTokenizerBase, description: str, history: History, observation: Observation
    ) -> tuple[int, ...]:
        shown = latest(history, self.max_history)
        contents = [note + turn.observation.text for note, turn in zip(gap_notes(shown), shown, strict=True)]
        contents.append(observation.text)
        contents[0] = f"Task: {description}\n\n{contents[0]}" if description else contents[0]
        messages: list[Message] = []
        for turn, content in zip(shown, contents, strict=False):  # the observation of now has no action yet
            messages += [("user", content), ("assistant", turn.action or NO_COMMAND)]
        return encode_chat(tokenizer, [*messages, ("user", contents[-1])])
