"""Conversations in a session against every answer recomputed on its own."""

import random

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config

from rla_lightning.rollout.randomness import sample_seeds
from rla_lightning.rollout.transformers_sampler import TransformersSampler
from rla_lightning.types import Completion, SamplingParams

Turn = tuple[tuple[int, ...], str, Completion]


def converse(sampler: TransformersSampler, params: SamplingParams, number: int, turns: int, forgets: float = 0.0) -> list[Turn]:
    """Conversations of up to `turns` turns in groups of three with one first prompt; some change what was said before."""
    rng = random.Random("conversations")

    def words(most: int) -> tuple[int, ...]:
        return tuple(rng.randrange(3, 26) for _ in range(rng.randint(1, most)))

    firsts = [words(9) for _ in range(-(-number // 3))]
    prompts = {ticket: firsts[ticket // 3] for ticket in range(number)}
    limits = {ticket: rng.randint(1, turns) for ticket in range(number)}
    said: list[Turn] = []
    done = dict.fromkeys(prompts, 0)
    with sampler.session(params) as session:
        for ticket, prompt in prompts.items():
            session.submit(ticket, prompt, f"{ticket}/0")
        while answers := session.completed():
            for ticket, answer in answers:
                said.append((prompts[ticket], f"{ticket}/{done[ticket]}", answer))
                done[ticket] += 1
                if done[ticket] < limits[ticket]:
                    kept = words(9) if rng.random() < forgets else prompts[ticket] + answer.token_ids
                    prompts[ticket] = kept + words(5)
                    session.submit(ticket, prompts[ticket], f"{ticket}/{done[ticket]}")
    assert done == limits
    return said


def assert_recomputed(recompute, model, params: SamplingParams, said: list[Turn]) -> None:
    for prompt, key, answer in said:
        tokens, logprobs = recompute(model, prompt, sample_seeds([key], 1)[0, 0], params, {1})
        assert answer.token_ids == tokens
        assert answer.logprobs == pytest.approx(logprobs, abs=1e-4)
        assert (answer.stop_reason == "EOS") == (tokens[-1] == 1)


@pytest.mark.parametrize("budget", [1, 60, 300, 100_000])  # one at a time; a few, others wait; all at a time
@pytest.mark.parametrize("forgets", [0.0, 0.4])
def test_answers_are_those_of_each_conversation_alone(model, tokenizer, recompute, budget, forgets):
    params = SamplingParams(temperature=0.8, top_p=0.95, max_new_tokens=7)
    assert_recomputed(recompute, model, params, converse(TransformersSampler(model, tokenizer, budget), params, 12, 4, forgets))


def test_models_with_sliding_windows_converse_too(tokenizer, recompute):
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, sliding_window=4, pad_token_id=0, bos_token_id=None, eos_token_id=1,
        initializer_range=0.3,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    params = SamplingParams(max_new_tokens=5)
    assert_recomputed(recompute, model, params, converse(TransformersSampler(model, tokenizer, 200), params, 9, 3))


@pytest.mark.parametrize("turns", [8, 16, 32])
@pytest.mark.parametrize(("budget", "most"), [(600, 1.25), (100_000, 1.0)])
def test_what_was_read_is_not_read_again(model, tokenizer, turns, budget, most):
    """Every token of a conversation is fed once, the last of an answer when the conversation goes on.

    With the smaller budget two of the long conversations fit, others wait for them to end, and one is forgotten in between.
    """
    fed = 0

    def count(module, args, kwargs) -> None:
        nonlocal fed
        width = kwargs["input_ids"].shape[1]
        fed += int(kwargs["attention_mask"][:, -width:].sum())

    model.register_forward_pre_hook(count, with_kwargs=True)
    params = SamplingParams(max_new_tokens=4)
    rng = random.Random("turns")
    prompts = {ticket: tuple(rng.randrange(3, 26) for _ in range(6)) for ticket in range(5)}
    done = dict.fromkeys(prompts, 0)
    with TransformersSampler(model, tokenizer, budget).session(params) as session:
        for ticket, prompt in prompts.items():
            session.submit(ticket, prompt, f"{ticket}/0")
        while answers := session.completed():
            for ticket, answer in answers:
                prompts[ticket] += answer.token_ids
                done[ticket] += 1
                if done[ticket] < turns:
                    prompts[ticket] += tuple(rng.randrange(3, 26) for _ in range(3))
                    session.submit(ticket, prompts[ticket], f"{ticket}/{done[ticket]}")
    assert set(done.values()) == {turns}
    assert fed <= most * sum(map(len, prompts.values()))


def test_what_is_kept_of_those_that_wait_stays_within_the_budget(model, tokenizer):
    """Thirty short conversations and a long one, padded to it: not more than the budget, the rest is read again."""
    sampler, params = TransformersSampler(model, tokenizer, 600), SamplingParams(max_new_tokens=3)
    prompts = {ticket: (5, 6, 7 + ticket % 9) for ticket in range(30)} | {30: tuple(3 + i % 20 for i in range(150))}
    done = dict.fromkeys(prompts, 0)
    with sampler.session(params) as session:
        for ticket, prompt in prompts.items():
            session.submit(ticket, prompt, f"{ticket}/0")
        while answers := session.completed():
            kept = {id(r.read.source): r.read.source.valid.numel() for r in session.waiting if r.read is not None}
            assert sum(kept.values()) <= 600
            assert session.running is None or all(request.read is None for request in session.running.requests)
            for ticket, answer in answers:
                prompts[ticket] += (*answer.token_ids, 9)
                done[ticket] += 1
                if done[ticket] < 4:
                    session.submit(ticket, prompts[ticket], f"{ticket}/{done[ticket]}")
    assert set(done.values()) == {4}


def test_short_answers_are_handed_out_before_long_ones(model, tokenizer):
    model.generation_config.eos_token_id = [1, *range(3, 15)]  # likely to end at any token
    params = SamplingParams(max_new_tokens=40)
    rounds = []
    with TransformersSampler(model, tokenizer).session(params) as session:
        for ticket in range(40):
            session.submit(ticket, (20, 18 + ticket % 7), str(ticket))
        while answers := session.completed():
            rounds.append([len(answer.token_ids) for _, answer in answers])
    assert sum(map(len, rounds)) == 40
    assert len(rounds) > 3
    assert len(rounds[0]) >= 20
    assert max(rounds[0]) <= min(rounds[-1])


def test_nothing_to_wait_for(model, tokenizer):
    with TransformersSampler(model, tokenizer).session(SamplingParams()) as session:
        assert session.completed() == []
