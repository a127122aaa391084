import random

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
)

from rla_lightning.rollout import scorer
from rla_lightning.rollout.batching import MicroBatch, Sample, batch_of, make_micro_batch, make_value_batch, pack, zero_weight
from rla_lightning.rollout.scorer import Scorer
from rla_lightning.rollout.transformers_sampler import TransformersSampler
from rla_lightning.types import ConfigError, SamplingParams

EOS = 1


def random_samples(number: int, vocab: int) -> list[Sample]:
    rng = random.Random("samples")

    def draw(shortest: int, longest: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocab) for _ in range(rng.randint(shortest, longest)))

    return [Sample(draw(1, 12), draw(1, 5), rng.gauss(0, 1), rng.choice([0.5, 1.0])) for _ in range(number)]


def micro_batches(samples: list[Sample], budget: int, pad_id: int = 0, width: int | None = None) -> list[MicroBatch]:
    return [make_micro_batch(samples, rows, pad_id)[0] for rows in pack(samples, budget, width)]


def test_micro_batch_layout_with_pad_equal_to_eos():
    samples = [Sample((7, 8, EOS), (9, EOS), 0.5), Sample((7,), (EOS,), -1.0, 2.0), Sample((5, 6), (9, 9, 9), 0.0)]
    batch = batch_of(samples, pad_id=EOS)
    # in the order of their ids: 5 6 9 9, then 7 (the start of the last one, too, were this a model that shares), 7 8 EOS 9
    assert batch.input_ids.tolist() == [[5, 6, 9, 9], [7, EOS, EOS, EOS], [7, 8, EOS, 9]]
    assert batch.subtree_ends is None
    assert batch.tokens == 9
    # of each response token, in the order of the samples: the place before it
    assert batch.places[batch.predictions].tolist() == [[10, 11, 1], [4, 1, 1], [1, 2, 3]]
    assert batch.response_ids.tolist() == [[9, EOS, 9], [EOS, 9, 9], [9, 9, 9]]
    assert batch.response_mask.tolist() == [[1, 1, 0], [1, 0, 0], [1, 1, 1]]
    assert batch.advantages.tolist() == [0.5, -1.0, 0.0]
    assert batch.weights.tolist() == [1.0, 2.0, 1.0]
    assert batch.to("cpu").response_mask.dtype == torch.float32


def test_micro_batch_layout_of_shared_prefixes():
    """Three votes on one prompt; the second turn of the first one; a padded neighbour."""
    votes = [Sample((5, 6), (1, EOS), 1.0), Sample((5, 6), (1, 2), 2.0), Sample((5, 6), (3, EOS), 3.0)]
    samples = [*votes, Sample((5, 6, 1, EOS, 7), (4,), 4.0), Sample((8,), (9,), 5.0)]
    batch = batch_of(samples, pad_id=0, width=1000)
    # 5 6 1 EOS 7 and below 6 also 3; the last tokens of responses are not fed unless something follows
    assert batch.input_ids.tolist() == [[5, 6, 1, EOS, 7, 3], [8, 0, 0, 0, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 2], [0, 1, 2, 3, 4, 5]]
    assert batch.subtree_ends is not None
    assert batch.subtree_ends.tolist() == [[6, 6, 5, 5, 5, 6], [1, 2, 3, 4, 5, 6]]
    assert batch.response_mask.tolist() == [[1, 1], [1, 1], [1, 1], [1, 0], [1, 0]]
    assert batch.tokens == 7
    pairs = set(zip(batch.places.tolist(), batch.targets.tolist(), strict=True))
    assert pairs == {(1, 1), (1, 3), (2, EOS), (2, 2), (5, EOS), (4, 4), (6, 9)}  # the 1 of two votes is one prediction
    assert batch.advantages.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_value_batch_layout_with_pad_equal_to_eos():
    batch = make_value_batch([(7, EOS), (8, 9, EOS)], [1.0, -1.0], [1.0, 0.5], pad_id=EOS)
    assert batch.input_ids.tolist() == [[7, EOS, EOS], [8, 9, EOS]]
    assert batch.attention_mask.tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch.outcomes.tolist() == [1.0, -1.0]
    assert batch.weights.tolist() == [1.0, 0.5]
    with pytest.raises(ConfigError, match="1 prompts, 2 outcomes"):
        make_value_batch([(7,)], [1.0, 1.0], [1.0], pad_id=0)


def test_micro_batches_fit_the_budget():
    samples = [Sample((i,) * length, (5,), 0.0) for i, length in enumerate((6, 2, 3, 32, 6, 5))]

    def chosen(budget: int) -> list[list[int]]:
        return [[index for row in rows for index in row.sequences] for rows in pack(samples, budget)]

    assert chosen(12) == [[1, 2], [5, 0], [4], [3]]  # 2 x 3, 2 x 6, 6, 32 alone beyond the budget
    assert chosen(18) == [[1, 2, 5], [0, 4], [3]]  # 3 x 5, 2 x 6
    assert pack([], 16) == []
    with pytest.raises(ConfigError, match="got 0"):
        pack(samples, 0)
    with pytest.raises(ConfigError, match="sample 0 has an empty prompt"):
        pack([Sample((), (1,), 0.0)], 16)
    many = random_samples(300, 20)
    for width in (None, 64):
        for budget in (1, 40, 1000):
            rows = pack(many, budget, width)
            assert sorted(i for batch in rows for row in batch for i in row.sequences) == list(range(300))
            for batch in rows:
                assert len(batch) == 1 or make_micro_batch(many, batch, 0)[0].input_ids.numel() <= budget


def summed_loss(model, batch) -> torch.Tensor:
    """Sums over sequences of token means: the denominator of the mean over samples is a constant."""
    logprobs, entropy = Scorer(model)(batch, 0.9, with_entropy=True, entropy_gradient=True)
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
    one_by_one = gradient(model, [batch_of([sample], pad_id) for sample in samples])
    assert one_by_one.abs().max() > 1
    for budget in (20, 60, 10_000):
        batches = micro_batches(samples, budget, pad_id)
        assert torch.allclose(gradient(model, batches), one_by_one, rtol=1e-6, atol=1e-6)
        padded_ranks = [*batches, zero_weight(batches[0]), zero_weight(batches[-1])]
        assert torch.allclose(gradient(model, padded_ranks), one_by_one, rtol=1e-6, atol=1e-6)


def conversations(vocab: int) -> list[Sample]:
    """Four groups of three conversations that begin with one prompt and have up to three turns."""
    rng = random.Random("conversations")
    samples = []
    for _ in range(4):
        first = tuple(rng.randrange(vocab) for _ in range(rng.randint(3, 9)))
        for _ in range(3):
            prompt = first
            for _ in range(rng.randint(1, 3)):
                answer = tuple(rng.randrange(3) for _ in range(rng.randint(1, 4)))
                samples.append(Sample(prompt, answer, rng.gauss(0, 1), rng.choice([0.5, 1.0])))
                prompt = prompt + answer + tuple(rng.randrange(vocab) for _ in range(3))
    return samples


@pytest.mark.parametrize("chunk", [2**24, 3 * 32])
@pytest.mark.parametrize("layers", [1, 2])
def test_shared_prefixes_and_chunks_change_no_gradient(make_model, tokenizer, monkeypatch, chunk, layers):
    """Merged turns, shared prompts and votes, and a head in chunks of three places, against every sample on its own."""
    model = make_model(len(tokenizer), layers=layers).double()
    samples = conversations(len(tokenizer))
    plain = gradient(model, [batch_of([sample], 0) for sample in samples])
    fed = sum(len(sample.prompt_ids) + len(sample.response_ids) - 1 for sample in samples)
    monkeypatch.setattr(scorer, "CHUNK", chunk)
    for width, budget in ((None, 100), (4, 100), (64, 30), (10_000, 10_000)):
        batches = micro_batches(samples, budget, EOS, width)
        assert torch.allclose(gradient(model, batches), plain, rtol=1e-5, atol=2e-5)
        assert (sum(batch.tokens for batch in batches) < 0.6 * fed) is (width is not None)


def test_prefixes_are_shared_only_by_models_that_can(tokenizer, make_model):
    assert Scorer(make_model(len(tokenizer))).width == 32
    options = {
        "vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
    }  # fmt: skip
    sliding = AutoModelForCausalLM.from_config(Gemma2Config(**options, sliding_window=4))
    capped = Scorer(sliding)
    assert (capped.width, capped.splits) == (None, False)  # every other layer sees a window; logits are capped
    for config in (LlamaConfig(**options), Qwen3Config(**options), GraniteConfig(**options, logits_scaling=8.0)):
        loaded = Scorer(AutoModelForCausalLM.from_config(config))
        assert loaded.width == 16
        assert loaded.splits is not isinstance(config, GraniteConfig)
    window = MistralConfig(**options, sliding_window=4)  # of every layer, which its configuration does not list
    assert Scorer(AutoModelForCausalLM.from_config(window)).width is None
    falcon = FalconConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, alibi=True)
    assert Scorer(AutoModelForCausalLM.from_config(falcon)).width is None  # makes its bias from a mask of two dimensions
    eager = AutoModelForCausalLM.from_config(LlamaConfig(**options), attn_implementation="eager")
    assert Scorer(eager).width is None


def test_models_that_change_their_logits_are_scored_by_their_own_forward():
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        head_dim=8, final_logit_softcapping=0.05, pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    samples = random_samples(10, 40)
    logprobs, _ = Scorer(model)(batch_of(samples, 0), 0.7)
    for row, sample in enumerate(samples):
        log_p = (model(input_ids=torch.tensor([sample.prompt_ids + sample.response_ids])).logits[0] / 0.7).log_softmax(-1)
        for k, token in enumerate(sample.response_ids):
            assert logprobs[row, k].item() == pytest.approx(log_p[len(sample.prompt_ids) + k - 1][token].item(), abs=1e-5)


@pytest.mark.slow  # minutes of compiling
@pytest.mark.timeout(1200)
def test_a_compiled_body_gives_the_same(model, tokenizer):
    samples = conversations(len(tokenizer))
    plain, compiled = Scorer(model), Scorer(model, compile=True)
    for width in (None, 64):
        batch = batch_of(samples, 0, width)
        expected, ours = plain(batch, 0.7)[0], compiled(batch, 0.7)[0]
        assert torch.allclose(ours * batch.response_mask, expected * batch.response_mask, atol=1e-5)


def test_an_all_masked_batch_is_a_no_op(model, tokenizer):
    batch = zero_weight(batch_of(random_samples(5, len(tokenizer)), pad_id=EOS))
    assert summed_loss(model, batch).item() == 0
    assert gradient(model, [batch]).abs().max() == 0


def test_response_logprobs_equal_full_logits(model, tokenizer):
    samples = random_samples(10, len(tokenizer))
    scored = Scorer(model)
    logprobs, entropy = scored(batch_of(samples, EOS), 0.7, with_entropy=True)
    assert scored(batch_of(samples, EOS), 0.7, with_entropy=False)[1] is None
    for row, sample in enumerate(samples):
        ids = torch.tensor([sample.prompt_ids + sample.response_ids])
        log_p = (model(input_ids=ids).logits[0] / 0.7).log_softmax(-1)
        for k, token in enumerate(sample.response_ids):
            before = log_p[len(sample.prompt_ids) + k - 1]
            assert logprobs[row, k].item() == pytest.approx(before[token].item(), abs=1e-5)
            assert entropy[row, k].item() == pytest.approx(-(before.exp() * before).sum().item(), abs=1e-5)
    assert logprobs.isfinite().all()
    with pytest.raises(ValueError, match="temperature must be positive, got 0"):
        scored(batch_of(samples, EOS), 0.0)


def test_the_head_sees_response_positions_only(model, tokenizer):
    scored, seen = Scorer(model), []
    model.lm_head.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape))
    scored(batch_of([Sample((5,) * 40, (6, 7, 8), 0.0)], 0), 1.0)
    assert seen == [(3, 32)]


def test_sampler_and_trainer_agree(model, tokenizer):
    prompts = [sample.prompt_ids for sample in random_samples(20, len(tokenizer))]
    params = SamplingParams(temperature=0.7, max_new_tokens=6)
    drawn = TransformersSampler(model, tokenizer).sample(prompts, 2, params, [f"k{i}" for i in range(20)])
    pairs = [(prompt, c) for prompt, row in zip(prompts, drawn, strict=True) for c in row]
    batch = batch_of([Sample(prompt, c.token_ids, 1.0) for prompt, c in pairs], tokenizer.pad_token_id, 32)
    logprobs, _ = Scorer(model)(batch, 0.7)
    for row, (_, completion) in enumerate(pairs):
        assert logprobs[row, : len(completion.token_ids)].tolist() == pytest.approx(completion.logprobs, abs=1e-4)
