import random

import pytest
import torch

from rla_lightning.rollout.batching import Sample, make_micro_batch, make_value_batch, micro_batches, zero_weight
from rla_lightning.rollout.logprobs import response_logprobs
from rla_lightning.rollout.sampler import TransformersSampler
from rla_lightning.types import ConfigError, SamplingParams

EOS = 1


def random_samples(number: int, vocab: int) -> list[Sample]:
    rng = random.Random("samples")

    def draw(shortest: int, longest: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocab) for _ in range(rng.randint(shortest, longest)))

    return [Sample(draw(1, 12), draw(1, 5), rng.gauss(0, 1), rng.choice([0.5, 1.0])) for _ in range(number)]


def test_micro_batch_layout_with_pad_equal_to_eos():
    samples = [Sample((7, 8, EOS), (9, EOS), 0.5), Sample((7,), (EOS,), -1.0, 2.0), Sample((5, 6), (9, 9, 9), 0.0)]
    batch = make_micro_batch(samples, pad_id=EOS)
    assert batch.input_ids.tolist() == [
        [7, 8, EOS, 9, EOS, EOS],
        [EOS, EOS, 7, EOS, EOS, EOS],
        [EOS, 5, 6, 9, 9, 9],
    ]
    assert batch.attention_mask.tolist() == [
        [1, 1, 1, 1, 1, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 1, 1, 1, 1, 1],
    ]
    assert batch.position_ids.tolist() == [
        [0, 1, 2, 3, 4, 4],
        [0, 0, 0, 1, 1, 1],
        [0, 0, 1, 2, 3, 4],
    ]
    assert batch.response_ids.tolist() == [[9, EOS, EOS], [EOS, EOS, EOS], [9, 9, 9]]
    assert batch.response_mask.tolist() == [[1, 1, 0], [1, 0, 0], [1, 1, 1]]
    assert batch.advantages.tolist() == [0.5, -1.0, 0.0]
    assert batch.weights.tolist() == [1.0, 2.0, 1.0]
    assert batch.to("cpu").response_mask.dtype == torch.float32


def test_value_batch_layout_with_pad_equal_to_eos():
    batch = make_value_batch([(7, EOS), (8, 9, EOS)], [1.0, -1.0], [1.0, 0.5], pad_id=EOS)
    assert batch.input_ids.tolist() == [[7, EOS, EOS], [8, 9, EOS]]
    assert batch.attention_mask.tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch.outcomes.tolist() == [1.0, -1.0]
    assert batch.weights.tolist() == [1.0, 0.5]
    with pytest.raises(ConfigError, match="1 prompts, 2 outcomes"):
        make_value_batch([(7,)], [1.0, 1.0], [1.0], pad_id=0)


def test_micro_batches_fit_the_budget():
    lengths = [(4, 2), (1, 1), (2, 1), (30, 2), (3, 3), (1, 4)]  # totals 6 2 3 32 6 5
    samples = [Sample((5,) * p, (5,) * r, 0.0) for p, r in lengths]
    # sorted: 1 (1,1), 2 (2,1) | 5 (1,4), 0 (4,2): 2 * (4 + 4) = 16 > 12 | 4 | 3 is alone beyond the budget
    assert micro_batches(samples, 12) == [[1, 2], [5], [0], [4], [3]]
    assert micro_batches(samples, 16) == [[1, 2], [5, 0], [4], [3]]
    assert micro_batches([], 16) == []
    with pytest.raises(ConfigError, match="got 0"):
        micro_batches(samples, 0)
    many = random_samples(300, 20)
    for budget in (1, 40, 1000):
        chosen = micro_batches(many, budget)
        assert sorted(i for rows in chosen for i in rows) == list(range(300))
        for rows in chosen:
            assert len(rows) == 1 or make_micro_batch([many[i] for i in rows], 0).input_ids.numel() <= budget


def summed_loss(model, batch) -> torch.Tensor:
    """Sums over sequences of token means: the denominator of the mean over samples is a constant."""
    logprobs, entropy = response_logprobs(model, batch, 0.9, with_entropy=True)
    per_token = batch.advantages[:, None] * logprobs - 0.1 * entropy
    per_sequence = (per_token * batch.response_mask).sum(1) / batch.response_mask.sum(1).clamp_min(1)
    return (per_sequence * batch.weights).sum()


def gradient(model, batches) -> torch.Tensor:
    model.zero_grad()
    for batch in batches:
        summed_loss(model, batch).backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("pad_id", [0, EOS])
def test_gradients_do_not_depend_on_the_split(model, tokenizer, pad_id):
    model.double()  # in float32 the order of sums alone makes 1e-6
    samples = random_samples(24, len(tokenizer))
    one_by_one = gradient(model, [make_micro_batch([sample], pad_id) for sample in samples])
    assert one_by_one.abs().max() > 1
    for budget in (20, 60, 10_000):
        batches = [make_micro_batch([samples[i] for i in rows], pad_id) for rows in micro_batches(samples, budget)]
        assert torch.allclose(gradient(model, batches), one_by_one, rtol=1e-6, atol=1e-6)
        padded_ranks = [*batches, zero_weight(batches[0]), zero_weight(batches[-1])]
        assert torch.allclose(gradient(model, padded_ranks), one_by_one, rtol=1e-6, atol=1e-6)


def test_an_all_masked_batch_is_a_no_op(model, tokenizer):
    batch = zero_weight(make_micro_batch(random_samples(5, len(tokenizer)), pad_id=EOS))
    assert summed_loss(model, batch).item() == 0
    assert gradient(model, [batch]).abs().max() == 0


def test_response_logprobs_equal_full_logits(model, tokenizer):
    samples = random_samples(10, len(tokenizer))
    logprobs, entropy = response_logprobs(model, make_micro_batch(samples, EOS), 0.7, with_entropy=True)
    assert response_logprobs(model, make_micro_batch(samples, EOS), 0.7, with_entropy=False)[1] is None
    for row, sample in enumerate(samples):
        ids = torch.tensor([sample.prompt_ids + sample.response_ids])
        log_p = (model(input_ids=ids).logits[0] / 0.7).log_softmax(-1)
        for k, token in enumerate(sample.response_ids):
            before = log_p[len(sample.prompt_ids) + k - 1]
            assert logprobs[row, k].item() == pytest.approx(before[token].item(), abs=1e-5)
            assert entropy[row, k].item() == pytest.approx(-(before.exp() * before).sum().item(), abs=1e-5)
    assert logprobs.isfinite().all()
    with pytest.raises(ValueError, match="temperature must be positive, got 0"):
        response_logprobs(model, make_micro_batch(samples, EOS), 0.0)


def test_the_head_sees_response_positions_only(model, tokenizer):
    seen = []
    model.lm_head.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape))
    response_logprobs(model, make_micro_batch([Sample((5,) * 40, (6, 7, 8), 0.0)], 0), 1.0)
    assert seen == [(1, 4, 32)]


def test_sampler_and_trainer_agree(model, tokenizer):
    prompts = [sample.prompt_ids for sample in random_samples(20, len(tokenizer))]
    params = SamplingParams(temperature=0.7, max_new_tokens=6)
    drawn = TransformersSampler(model, tokenizer).sample(prompts, 2, params, [f"k{i}" for i in range(20)])
    pairs = [(prompt, c) for prompt, row in zip(prompts, drawn, strict=True) for c in row]
    batch = make_micro_batch([Sample(prompt, c.token_ids, 1.0) for prompt, c in pairs], tokenizer.pad_token_id)
    logprobs, _ = response_logprobs(model, batch, 0.7)
    for row, (_, completion) in enumerate(pairs):
        assert logprobs[row, : len(completion.token_ids)].tolist() == pytest.approx(completion.logprobs, abs=1e-4)
