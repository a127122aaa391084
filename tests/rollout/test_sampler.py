import math
import random
import warnings
from collections import Counter

import numpy as np
import pytest
import torch

from rla_lightning.rollout.drawing import draw, filter_logits
from rla_lightning.rollout.randomness import sample_seeds, uniforms
from rla_lightning.rollout.transformers_sampler import TransformersSampler
from rla_lightning.types import ConfigError, SamplingParams


def make_prompts(number: int, vocab: int, shortest: int = 2, longest: int = 9) -> list[tuple[int, ...]]:
    rng = random.Random("prompts")
    return [tuple(rng.randrange(3, vocab) for _ in range(rng.randint(shortest, longest))) for _ in range(number)]


@pytest.mark.parametrize("filters", [{}, {"top_k": 5, "top_p": 0.9}, {"temperature": 0.0}])
@pytest.mark.parametrize("budget", [30, 10_000])  # 30: chunks of one or two rows
def test_cached_decode_equals_full_recomputation(model, tokenizer, recompute, filters, budget):
    params = SamplingParams(**{"temperature": 0.8, "max_new_tokens": 6, **filters})
    prompts = make_prompts(12, len(tokenizer))
    keys = [f"key {i}" for i in range(12)]
    sampled = TransformersSampler(model, tokenizer, budget).sample(prompts, 3, params, keys)
    seeds = sample_seeds(keys, 3)
    stops = Counter()
    for i, prompt in enumerate(prompts):
        for j in range(3):
            tokens, logprobs = recompute(model, prompt, seeds[i, j], params, {1})
            assert sampled[i][j].token_ids == tokens
            assert sampled[i][j].logprobs == pytest.approx(logprobs, abs=1e-5)
            stops[sampled[i][j].stop_reason] += 1
            assert (sampled[i][j].stop_reason == "EOS") == (tokens[-1] == 1)
    if not filters:
        assert stops["EOS"] > 3 and stops["TRUNCATED"] > 3  # noqa: PT018  # rows really left the batch


def test_a_sample_does_not_depend_on_the_rest_of_the_batch(model, tokenizer):
    params = SamplingParams(max_new_tokens=5)
    prompts, keys = make_prompts(20, len(tokenizer)), [f"k{i}" for i in range(20)]
    sampler = TransformersSampler(model, tokenizer)
    together = sampler.sample(prompts, 2, params, keys)
    backwards = sampler.sample(prompts[::-1], 2, params, keys[::-1])[::-1]
    alone = [sampler.sample([prompt], 4, params, [key])[0][:2] for prompt, key in zip(prompts, keys, strict=True)]
    ids = [[c.token_ids for c in row] for row in together]
    assert ids == [[c.token_ids for c in row] for row in backwards] == [[c.token_ids for c in row] for row in alone]


def test_samples_and_equal_prompts_share_one_prefill(model, tokenizer):
    shapes = []
    model.register_forward_pre_hook(lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True)
    prompt = (6, 7, 8, 9)
    drawn = TransformersSampler(model, tokenizer).sample(
        [prompt, (9, 8, 7), prompt], 5, SamplingParams(max_new_tokens=2), ["a", "b", "c"]
    )
    assert shapes[0] == (2, 4)  # two distinct prompts, padded to four
    assert shapes[1][1] == 1
    assert [len(row) for row in drawn] == [5, 5, 5]
    assert len({c.token_ids for row in drawn for c in row}) > 4  # samples differ


def test_frequencies_follow_the_softmax(model, tokenizer):
    prompt, temperature, number = (6, 9, 12), 0.7, 20_000
    (drawn,) = TransformersSampler(model, tokenizer, 100_000).sample(
        [prompt], number, SamplingParams(temperature=temperature, max_new_tokens=1), ["frequency"]
    )
    with torch.no_grad():
        expected = (model.eval()(input_ids=torch.tensor([prompt])).logits[0, -1] / temperature).softmax(-1).numpy()
    counts = np.bincount([c.token_ids[0] for c in drawn], minlength=len(expected))
    deviation = (counts - number * expected) / np.sqrt(number * expected * (1 - expected))
    assert np.abs(deviation).max() < 4.5  # standard errors, over the whole vocabulary


def test_filters_keep_the_right_tokens():
    logits = torch.tensor([[math.log(0.5), math.log(0.2), math.log(0.2), math.log(0.1)]])
    kept = lambda top_k, top_p: filter_logits(logits, top_k, top_p)[0].isfinite().tolist()  # noqa: E731
    assert kept(0, 1.0) == [True, True, True, True]
    assert kept(1, 1.0) == [True, False, False, False]
    assert kept(0, 0.49) == [True, False, False, False]
    assert kept(0, 0.6) == [True, True, False, False]  # the token that reaches the mass is kept
    assert kept(0, 0.95) == [True, True, True, True]
    assert kept(3, 0.6) == [True, True, False, False]  # 5/9 < .6 after top-k
    # log-probs are those of the filtered distribution: .5 / .7 and .2 / .7
    params = SamplingParams(top_p=0.6)
    tokens, logprobs = draw(logits.expand(4, 4), torch.tensor([0.0, 0.71, 0.72, 1 - 2**-24]), params)
    assert tokens.tolist() == [0, 0, 1, 1]
    assert logprobs.exp().tolist() == pytest.approx([5 / 7, 5 / 7, 2 / 7, 2 / 7], abs=1e-6)


def test_the_last_token_with_probability_is_the_last_that_can_be_drawn():
    logits = torch.full((1000, 50), -torch.inf)
    logits[:, 7] = logits[:, 20] = 0.0
    tokens, logprobs = draw(logits, torch.linspace(0, 1, 1000), SamplingParams())
    assert set(tokens.tolist()) == {7, 20}
    assert logprobs.isfinite().all()


def test_greedy_is_the_argmax_and_a_point_mass(model, tokenizer):
    prompt = (6, 9, 12)
    with torch.no_grad():
        best = int(model.eval()(input_ids=torch.tensor([prompt])).logits[0, -1].argmax())
    params = SamplingParams(temperature=0.0, max_new_tokens=1)
    (drawn,) = TransformersSampler(model, tokenizer).sample([prompt], 3, params, ["x"])
    assert [(c.token_ids, c.logprobs) for c in drawn] == [((best,), (0.0,))] * 3


def test_pad_equal_to_eos_changes_nothing(model, tokenizer, make_tokenizer):
    prompts, keys = make_prompts(15, len(tokenizer)), [f"k{i}" for i in range(15)]
    prompts[3] = (6, 1, 1, 7)  # end tokens inside a prompt are attended to
    usual = TransformersSampler(model, tokenizer).sample(prompts, 2, SamplingParams(), keys)
    shared = TransformersSampler(model, make_tokenizer(pad_token="</s>")).sample(prompts, 2, SamplingParams(), keys)
    sampled = [[(c.token_ids, c.logprobs) for row in drawn for c in row] for drawn in (usual, shared)]
    assert sampled[0] == sampled[1]  # `<pad>` is an ordinary word of the second tokenizer, so texts may differ
    ended = [c for row in shared for c in row if c.stop_reason == "EOS"]
    assert ended
    assert all(c.token_ids[-1] == 1 and "</s>" not in c.text for c in ended)


def test_truncated_and_text(model, tokenizer):
    drawn = TransformersSampler(model, tokenizer).sample([(6, 7)], 50, SamplingParams(max_new_tokens=3), ["t"])[0]
    for completion in drawn:
        assert len(completion.logprobs) == len(completion.token_ids) <= 3
        assert (completion.stop_reason == "TRUNCATED") == (1 not in completion.token_ids)
        assert completion.stop_reason == "EOS" or len(completion.token_ids) == 3
        words = tokenizer.convert_ids_to_tokens(list(completion.token_ids))
        assert completion.text.split() == [word for word in words if not word.startswith("<")]


def test_every_configured_end_token_ends(model, tokenizer):
    model.generation_config.eos_token_id = [1, 10, 11, 12, 13, 14, 15]
    drawn = TransformersSampler(model, tokenizer).sample([(6, 7)], 60, SamplingParams(max_new_tokens=8), ["e"])[0]
    last = {c.token_ids[-1] for c in drawn if c.stop_reason == "EOS"}
    assert len(last & {10, 11, 12, 13, 14, 15}) >= 2
    assert not any(set(c.token_ids[:-1]) & {1, 10, 11, 12, 13, 14, 15} for c in drawn)


def test_training_is_undisturbed_by_sampling(model, tokenizer):
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.train()
    model.model.layers[0].eval()  # a flag of its own must survive too
    ids = torch.tensor([[6, 7, 8, 9, 10]])

    def loss() -> torch.Tensor:
        torch.manual_seed(0)
        return model(input_ids=ids, labels=ids).loss

    before, flags = loss().item(), [module.training for module in model.modules()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TransformersSampler(model, tokenizer).sample([(6, 7, 8)], 4, SamplingParams(), ["x"])
    after = loss()
    assert after.item() == before
    assert [module.training for module in model.modules()] == flags
    after.backward()


def test_low_rank_adapters_reach_the_sampler(model, tokenizer):
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    sampler = TransformersSampler(adapted, tokenizer)
    before = sampler.sample([(6, 7, 8)], 20, SamplingParams(max_new_tokens=4), ["x"])
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.fill_(1.0)
    assert sampler.sample([(6, 7, 8)], 20, SamplingParams(max_new_tokens=4), ["x"]) != before


def test_bad_input_is_named(model, tokenizer):
    sampler = TransformersSampler(model, tokenizer)
    assert sampler.sample([], 1, SamplingParams(), []) == []
    with pytest.raises(ConfigError, match="got 0"):
        sampler.sample([(6,)], 0, SamplingParams(), ["x"])
    with pytest.raises(ConfigError, match=r"prompt 1 .*'y'.* empty"):
        sampler.sample([(6,), ()], 1, SamplingParams(), ["x", "y"])
    with pytest.raises(ConfigError, match=r"top_p=0\.0"):
        sampler.sample([(6,)], 1, SamplingParams(top_p=0.0), ["x"])
    with pytest.raises(ConfigError, match="2 prompts"):
        sampler.sample([(6,), (7,)], 1, SamplingParams(), ["x"])


def test_uniforms_are_uniform_and_independent():
    draws = uniforms(sample_seeds([f"k{i}" for i in range(200)], 5).reshape(-1), 20)
    assert draws.shape == (1000, 20)
    assert 0 <= draws.min() < draws.max() < 1
    assert abs(draws.mean() - 0.5) < 4 * 12**-0.5 / 20_000**0.5
    neighbours = np.corrcoef(draws[:, :-1].reshape(-1), draws[:, 1:].reshape(-1))[0, 1]
    samples = np.corrcoef(draws[0::5].reshape(-1), draws[1::5].reshape(-1))[0, 1]
    assert abs(neighbours) < 0.03
    assert abs(samples) < 0.06
    assert len(np.unique(draws[:, 0])) > 990
