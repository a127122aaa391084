"""Word-level tokenizers made from an environment's vocabulary, for tiny models."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from rla_lightning.types import ConfigError

PAD, EOS, UNKNOWN = "<pad>", "</s>", "<unk>"
ACT, JUDGE, VALUE = "<act>", "<judge>", "<value>"  # end a prompt and say who answers
SPECIAL_TOKENS = (PAD, EOS, UNKNOWN, ACT, JUDGE, VALUE)
VOTES = ("+1", "-1")


def environment_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per word; ids depend on the set of words only, not on their order.

    Args:
        words: of the environment, without white space inside; special tokens and votes are added.
    """
    if not words:
        raise ConfigError("the environment has no vocabulary for a tiny model's tokenizer: give a model path")
    for word in words:
        if not word or word.split() != [word]:
            raise ConfigError(f"vocabulary word {word!r} is empty or contains white space")
    ordered = [*SPECIAL_TOKENS, *VOTES, *sorted(set(words) - set(SPECIAL_TOKENS) - set(VOTES))]
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(ordered)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        additional_special_tokens=[ACT, JUDGE, VALUE],
        clean_up_tokenization_spaces=False,
    )
