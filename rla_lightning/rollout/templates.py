"""Chat templates: messages as token ids, and what continues a conversation whose tokens are kept."""

from __future__ import annotations

from collections.abc import Sequence

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from rla_lightning.types import ConfigError

SYSTEM = "You are a careful assistant."  # only for chat templates that insist on a system message
OPENING, ANSWER = "Begin.", "@ANSWER@"  # stand for the conversation so far

Message = tuple[str, str]  # role, content


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """Token ids with the tokenizer's own start token but never an end token."""
    ids = tokenizer(text).input_ids
    return tuple(ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids)


def encode_chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], system: str | None = None) -> tuple[int, ...]:
    """Token ids of a conversation, up to where the model's answer starts.

    Args:
        messages: in turn from the user and the assistant.
        system: system message; None leaves it to the template.
    """
    return _ids(tokenizer, _render(tokenizer, messages, system))


def encode_next_turn(
    tokenizer: PreTrainedTokenizerBase, answer_ids: Sequence[int], content: str, system: str | None = None
) -> tuple[int, ...]:
    """Token ids that follow the model's own: the end of its turn, the user's message, the start of its next turn.

    They do not depend on what was said before. A template may rewrite earlier messages (drop their thoughts, say), which
    is why it only renders a stand-in here; it is refused where the new message would not simply follow.

    Args:
        answer_ids: as sampled; an end token that the template writes too is not written twice.
        content: of the user's message.
        system: as in `encode_chat`.
    """
    content = content.strip()  # most templates do
    opening = _render(tokenizer, [("user", OPENING)], system)
    whole = _render(tokenizer, [("user", OPENING), ("assistant", ANSWER), ("user", content)], system)
    before, found, after = whole.partition(ANSWER)
    closing, shown, _ = after.partition(content)
    follows = opening.startswith(before) or before.startswith(opening)  # either may hold the mark of a thought
    if not (found and shown and follows) or ANSWER in after:
        raise ConfigError("the tokenizer's chat template does not append new messages: use the paper formats")
    ids = _ids(tokenizer, after)
    end = tokenizer.added_tokens_decoder.get(answer_ids[-1]) if answer_ids else None
    if end is not None and end.content in closing:  # not so after a truncated answer
        return ids[ids.index(answer_ids[-1]) + 1 :]
    return ids


def _render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], system: str | None) -> str:
    if tokenizer.chat_template is None:
        raise ConfigError("the tokenizer has no chat template: use the paper formats")
    try:
        return _apply(tokenizer, messages if system is None else [("system", system), *messages])
    except TemplateError as error:
        if system is not None:
            raise ConfigError(f"the tokenizer's chat template refuses the system message {system!r}: {error}") from error
    try:
        return _apply(tokenizer, [("system", SYSTEM), *messages])
    except TemplateError as error:
        raise ConfigError(f"the tokenizer's chat template refuses a conversation: {error}") from error


def _apply(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> str:
    rows = [{"role": role, "content": content} for role, content in messages]
    return str(tokenizer.apply_chat_template(rows, add_generation_prompt=True, tokenize=False))


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False).input_ids)  # the template writes the special tokens
