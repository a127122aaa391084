"""Formats for language models: whole history, numbered commands, think first, then a boxed answer."""

from __future__ import annotations

import re
from collections.abc import Sequence

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from rla_lightning.rollout.formats import History, end_id
from rla_lightning.types import ConfigError, ExpertAction, Observation, StepLabel

SYSTEM = "You are a careful assistant."  # only for chat templates that insist on a system message
BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
TEXT_MACRO = re.compile(r"\\(?:text|mathrm|textbf)\s*\{([^{}]*)\}")
NO_COMMAND = "(no valid command)"


class PaperPolicyFormat:
    r"""The answer is reasoning, then the number of a command (or a free-text action) in \boxed{}."""

    def prompt(self, tokenizer: PreTrainedTokenizerBase, history: History, observation: Observation) -> tuple[int, ...]:
        parts = ["You are solving a task step by step by acting in an environment."]
        parts += [f"What happened so far:\n{_log(history)}"] if history else []
        parts.append(f"What you observe now:\n{observation.text}")
        if observation.commands:
            listed = "\n".join(f"{i}. {command}" for i, command in enumerate(observation.commands, 1))
            parts.append(f"Commands you can choose from:\n{listed}")
            parts.append("Think about what to do next, then give the number of your command in \\boxed{}.")
        else:
            parts.append("Think about what to do next, then give your action in \\boxed{}.")
        return render(tokenizer, "\n\n".join(parts))

    def parse(self, text: str, observation: Observation) -> str | None:
        boxed = last_boxed(text)
        if not boxed or not observation.commands:
            return boxed or None
        if re.fullmatch(r"\d+", boxed):
            number = int(boxed)
            return observation.commands[number - 1] if 1 <= number <= len(observation.commands) else None
        return boxed if boxed in observation.commands else None

    def answer(self, tokenizer: PreTrainedTokenizerBase, observation: Observation, expert: ExpertAction) -> tuple[int, ...]:
        boxed = expert.action
        if observation.commands:
            if expert.action not in observation.commands:
                raise ConfigError(f"the expert's action {expert.action!r} is not an admissible command")
            boxed = str(observation.commands.index(expert.action) + 1)
        return _answer(tokenizer, expert.thought.removeprefix("#"), boxed)


class PaperJudgeFormat:
    r"""The judgment is reasoning, then \boxed{1} for a step that helps or \boxed{-1} for one that does not."""

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
        start = history[0][0] if history else observation
        parts = [
            "You review one step of an agent that works on a task in an environment.",
            f"The task, as the agent saw it at the start:\n{start.text}",
        ]
        parts += [f"Steps before the one under review:\n{_log(history)}"] if history else []
        parts.append(f"What the agent observed before the step:\n{observation.text}")
        parts += ["Commands it could choose from:\n" + "\n".join(observation.commands)] if observation.commands else []
        parts.append(f"What the agent answered:\n{raw_text.strip() or '(nothing)'}")
        note = "" if is_valid else " (the environment did not accept it)"
        parts.append(f"The command this gave: {action or NO_COMMAND}{note}")
        parts.append(f"What the environment replied:\n{feedback or '(nothing)'}")
        parts.append(
            "Decide whether this step brings the agent closer to finishing the task. Give your reasons first, "
            "then end with \\boxed{1} if the step helps or \\boxed{-1} if it is useless or harmful."
        )
        return render(tokenizer, "\n\n".join(parts))

    def parse(self, text: str) -> int | None:
        return {"1": 1, "+1": 1, "-1": -1}.get(last_boxed(text) or "")

    def answer(self, tokenizer: PreTrainedTokenizerBase, label: StepLabel) -> tuple[int, ...]:
        return _answer(tokenizer, label.critique.removeprefix("#"), str(label.score))


class PaperCriticFormat:
    """The task and the whole history as plain text; the value model reads its last token."""

    def prompt(
        self, tokenizer: PreTrainedTokenizerBase, description: str, history: History, observation: Observation
    ) -> tuple[int, ...]:
        parts = [f"Task: {description}"] if description else []
        parts += [_log(history)] if history else []
        parts.append(f"Now: {observation.text}\nWill the task be solved?")
        return encode_text(tokenizer, "\n\n".join(parts))


def last_boxed(text: str) -> str | None:
    r"""What the last \boxed{} after the thinking holds, without white space around it."""
    found = BOXED.findall(text.rpartition("</think>")[2])
    return TEXT_MACRO.sub(r"\1", found[-1]).strip() if found else None


def render(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """A user's message as token ids, up to where the model's answer starts."""
    if tokenizer.chat_template is None:
        return encode_text(tokenizer, f"{text}\n\nAnswer:\n")
    user = {"role": "user", "content": text}
    try:
        return _apply_template(tokenizer, [user])
    except TemplateError:  # some templates refuse a conversation without a system message
        return _apply_template(tokenizer, [{"role": "system", "content": SYSTEM}, user])


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """Token ids with the tokenizer's own start token but never an end token."""
    ids = tokenizer(text).input_ids
    return tuple(ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids)


def _apply_template(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
    ids = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=True, return_dict=False)
    return tuple(ids)


def _answer(tokenizer: PreTrainedTokenizerBase, reasons: str, boxed: str) -> tuple[int, ...]:
    text = f"{reasons}\n\\boxed{{{boxed}}}" if reasons else f"\\boxed{{{boxed}}}"
    return (*tokenizer(text, add_special_tokens=False).input_ids, end_id(tokenizer))


def _log(history: History) -> str:
    lines = []
    for turn, (observation, action) in enumerate(history, 1):
        lines.append(f"[{turn}] Observed: {observation.text}\n[{turn}] Did: {action or NO_COMMAND}")
    return "\n".join(lines)
