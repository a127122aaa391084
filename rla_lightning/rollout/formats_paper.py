"""Formats for language models: whole history, numbered commands, think first, then a boxed answer."""

from __future__ import annotations

import re
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from rla_lightning.rollout.formats import History, end_id, gap_notes, latest
from rla_lightning.rollout.templates import encode_chat, encode_text
from rla_lightning.types import ConfigError, ExpertAction, Observation, StepLabel

BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
TEXT_MACRO = re.compile(r"\\(?:text|mathrm|textbf)\s*\{([^{}]*)\}")
NO_COMMAND = "(no valid command)"


class PaperPolicyFormat:
    r"""The answer is reasoning, then the number of a command (or a free-text action) in \boxed{}.

    Args:
        max_history: latest turns that are shown besides the first; null shows all.
    """

    def __init__(self, max_history: int | None = None) -> None:
        self.max_history = check_max_history(max_history)

    def prompt(self, tokenizer: PreTrainedTokenizerBase, history: History, observation: Observation) -> tuple[int, ...]:
        parts = ["You are solving a task step by step by acting in an environment."]
        parts += [f"What happened so far:\n{_log(latest(history, self.max_history))}"] if history else []
        parts.append(f"What you observe now:\n{observation.text}")
        if observation.commands:
            parts.append(f"Commands you can choose from:\n{list_commands(observation.commands, numbered=True)}")
            parts.append("Think about what to do next, then give the number of your command in \\boxed{}.")
        else:
            parts.append("Think about what to do next, then give your action in \\boxed{}.")
        return render(tokenizer, "\n\n".join(parts))

    def parse(self, text: str, observation: Observation) -> str | None:
        return read_command(text, observation)

    def answer(self, tokenizer: PreTrainedTokenizerBase, observation: Observation, expert: ExpertAction) -> tuple[int, ...]:
        return boxed_answer(tokenizer, expert.thought, expert_choice(observation, expert, numbered=True))


class PaperJudgeFormat:
    r"""The judgment is reasoning, then \boxed{1} for a step that helps or \boxed{-1} for one that does not.

    Args:
        max_history: latest turns that are shown besides the first; null shows all.
    """

    def __init__(self, max_history: int | None = None) -> None:
        self.max_history = check_max_history(max_history)

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
        parts = ["You review one step of an agent that works on a task in an environment."]
        if history:
            parts.append(f"Steps before the one under review:\n{_log(latest(history, self.max_history))}")
        parts.append(f"What the agent observed before the step:\n{observation.text}")
        if observation.commands:
            parts.append(f"Commands it could choose from:\n{list_commands(observation.commands, numbered=True)}")
        parts.append(f"What the agent answered:\n{raw_text.strip() or '(nothing)'}")
        note = "" if is_valid else " (the environment did not accept it)"
        parts.append(f"The command this gave: {action or NO_COMMAND}{note}")
        parts.append(f"What the environment replied:\n{feedback or '(nothing)'}")
        parts.append(
            "Decide whether this step brings the agent closer to finishing the task. Give your reasons first, "
            "then end with \\boxed{1} if the step helps or \\boxed{-1} if it is useless or harmful."
        )
        return self.render(tokenizer, "\n\n".join(parts))

    def render(self, tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
        """The text as token ids, up to where the judgment starts."""
        return render(tokenizer, text)

    def parse(self, text: str) -> int | None:
        return {"1": 1, "+1": 1, "-1": -1}.get(last_boxed(text) or "")

    def answer(self, tokenizer: PreTrainedTokenizerBase, label: StepLabel) -> tuple[int, ...]:
        return boxed_answer(tokenizer, label.critique, str(label.score))


class PaperCriticFormat:
    """The task and the history as plain text.

    Args:
        max_history: latest turns that are shown besides the first; null shows all.
    """

    def __init__(self, max_history: int | None = None) -> None:
        self.max_history = check_max_history(max_history)

    def prompt(
        self, tokenizer: PreTrainedTokenizerBase, description: str, history: History, observation: Observation
    ) -> tuple[int, ...]:
        parts = [f"Task: {description}"] if description else []
        parts += [_log(latest(history, self.max_history))] if history else []
        parts.append(f"Now: {observation.text}\nWill the task be solved?")
        return encode_text(tokenizer, "\n\n".join(parts))


def last_boxed(text: str) -> str | None:
    r"""What the last \boxed{} after the thinking holds, without white space around it."""
    found = BOXED.findall(text.rpartition("</think>")[2])
    return TEXT_MACRO.sub(r"\1", found[-1]).strip() if found else None


def check_max_history(number: int | None) -> int | None:
    if number is not None and number < 1:
        raise ConfigError(f"max_history must be at least 1 or null, got {number}")
    return number


def list_commands(commands: Sequence[str], numbered: bool) -> str:
    return "\n".join(f"{i}. {command}" if numbered else f"- {command}" for i, command in enumerate(commands, 1))


def read_command(text: str, observation: Observation) -> str | None:
    """The command that a boxed number or a boxed text stands for, None when it stands for none."""
    boxed = last_boxed(text)
    if not boxed or not observation.commands:
        return boxed or None
    if re.fullmatch(r"\d+", boxed):
        number = int(boxed)
        return observation.commands[number - 1] if 1 <= number <= len(observation.commands) else None
    return boxed if boxed in observation.commands else None


def expert_choice(observation: Observation, expert: ExpertAction, numbered: bool) -> str:
    """What an expert puts into the box."""
    if observation.commands and expert.action not in observation.commands:
        raise ConfigError(f"the expert's action {expert.action!r} is not an admissible command")
    return str(observation.commands.index(expert.action) + 1) if observation.commands and numbered else expert.action


def boxed_answer(tokenizer: PreTrainedTokenizerBase, thought: str, boxed: str) -> tuple[int, ...]:
    """A known answer with the end token; a thought may be a vocabulary word starting with '#'."""
    reasons = thought.removeprefix("#")
    text = f"{reasons}\n\\boxed{{{boxed}}}" if reasons else f"\\boxed{{{boxed}}}"
    return (*tokenizer(text, add_special_tokens=False).input_ids, end_id(tokenizer))


def render(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """A user's message as token ids, up to where the model's answer starts; plain text where there is no chat template."""
    if tokenizer.chat_template is None:
        return encode_text(tokenizer, f"{text}\n\nAnswer:\n")
    return encode_chat(tokenizer, [("user", text)])


def _log(history: History) -> str:
    lines = []
    for note, turn in zip(gap_notes(history), history, strict=True):
        observed, did = turn.observation.text, turn.action or NO_COMMAND
        lines.append(f"{note}[{turn.number}] Observed: {observed}\n[{turn.number}] Did: {did}")
    return "\n".join(lines)
