"""Tokens fed to the model for each token there is, where a conversation is only added to: in sampling and in training.

Groups of trajectories begin with one prompt; every turn adds an answer and an observation. What there is to feed is the
tree of all prompts with their answers, each node once; the last token of a conversation is not fed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from random import Random

import torch
from benchmark_report import measured, report
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from rla_lightning.models.tokenizer import environment_tokenizer
from rla_lightning.rollout.batching import Sample
from rla_lightning.rollout.sampler import Sampler
from rla_lightning.rollout.transformers_sampler import TransformersSampler
from rla_lightning.settings import ClippedUpdateSettings, RolloutSettings
from rla_lightning.types import Completion, SamplingParams
from rla_lightning.updates import TaskSample, pieces

GROUP_SIZE = 8
VOCABULARY = 1000
ENDS = 40  # tokens of it that end an answer, so that answers differ in length


@dataclass
class Conversation:
    """What one trajectory read and said."""

    prompt: tuple[int, ...]  # of its next turn
    turns: list[tuple[tuple[int, ...], Completion]] = field(default_factory=list)  # each prompt and its answer


def converse(
    sampler: Sampler,
    firsts: Sequence[tuple[int, ...]],
    turns: int,
    params: SamplingParams,
    observe: Callable[[], tuple[int, ...]],
) -> list[Conversation]:
    """Conversations that go on at their own pace, one for each first prompt."""
    conversations = [Conversation(first) for first in firsts]
    with sampler.session(params) as session:
        for ticket, conversation in enumerate(conversations):
            session.submit(ticket, conversation.prompt, f"{ticket}/0")
        while answers := session.completed():
            for ticket, answer in answers:
                conversation = conversations[ticket]
                conversation.turns.append((conversation.prompt, answer))
                if len(conversation.turns) < turns:
                    conversation.prompt += answer.token_ids + observe()
                    session.submit(ticket, conversation.prompt, f"{ticket}/{len(conversation.turns)}")
    return conversations


@contextmanager
def counting(model: nn.Module) -> Iterator[list[int]]:
    """The tokens that the model reads in each call, without padding."""
    fed: list[int] = []

    def count(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, torch.Tensor]) -> None:
        fed.append(int(kwargs["attention_mask"][:, -kwargs["input_ids"].shape[1] :].sum()))

    hook = model.register_forward_pre_hook(count, with_kwargs=True)
    yield fed
    hook.remove()


def unique_tokens(sequences: Sequence[tuple[int, ...]]) -> int:
    """Nodes of the tree of all sequences."""

    def shared(before: tuple[int, ...], after: tuple[int, ...]) -> int:
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False)))

    return sum(len(after) - shared(before, after) for before, after in pairwise([(), *sorted(sequences)]))


def build() -> PreTrainedModel:
    """Of width 64; what is fed does not depend on it in sampling, and in training only where less work is weighed."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=192, tie_word_embeddings=True,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config.eos_token_id = list(range(VOCABULARY - ENDS, VOCABULARY))
    return model


def one_line(turns: int, options: argparse.Namespace) -> None:
    """What is fed in sampling and in training."""
    model, rng = build(), Random(f"turns/{turns}")
    tokenizer = environment_tokenizer([f"w{i}" for i in range(VOCABULARY)])
    sampler = TransformersSampler(model, tokenizer, RolloutSettings().sampler_tokens)
    params = SamplingParams(max_new_tokens=options.new_tokens)

    def words(number: int) -> tuple[int, ...]:
        return tuple(rng.choices(range(VOCABULARY), k=number))

    firsts = [first for first in [words(options.prompt_tokens) for _ in range(options.groups)] for _ in range(GROUP_SIZE)]
    with counting(model) as fed:
        seconds, peak_mb, conversations = measured(
            lambda: converse(sampler, firsts, turns, params, lambda: words(options.observation_tokens))
        )
    steps = [step for conversation in conversations for step in conversation.turns]
    samples = [TaskSample(Sample(prompt, answer.token_ids, 1.0), "", answer.logprobs) for prompt, answer in steps]
    sequences = [(*prompt, *answer.token_ids[:-1]) for prompt, answer in steps]
    unique, settings = unique_tokens(sequences), ClippedUpdateSettings(max_samples=len(samples))
    training, padding = {}, {}
    for width in options.widths:
        steps_ = pieces(samples, settings, Random(0), 0, torch.device("cpu"), width)
        batches = [piece.batch for step in steps_ for piece in step]
        trained, padded = sum(batch.tokens for batch in batches), sum(batch.input_ids.numel() for batch in batches)
        training[width], padding[width] = round(trained / unique, 3), round(1 - trained / padded, 3)
    report(
        "tokens fed in conversations", seconds, turns=turns, trajectories=len(firsts), unique_tokens=unique,
        sampling=round(sum(fed) / unique, 3), training=training,
        one_sequence_per_turn=round(sum(map(len, sequences)) / unique, 2), padding_fraction=padding,
        new_tokens_per_second=round(sum(len(answer.token_ids) for _, answer in steps) / seconds), peak_mb=peak_mb,
        longest=max(map(len, sequences)), token_budget=settings.token_budget, **vars(options),
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmark.py --turns", description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8, 16, 32], help="turns of a conversation")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--observation-tokens", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=16, help="of an answer, at most")
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 896, 3584], help="of models that are trained")
    parser.add_argument("--threads", type=int, default=1, help="a tiny model is slower on several")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    lengths = options.lengths
    del options.lengths
    for turns in lengths:
        one_line(turns, options)


if __name__ == "__main__":
    main()
