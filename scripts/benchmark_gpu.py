"""Qwen2.5 shapes with random weights on one card: speed of sampling and update, and what each trick of the update saves.

Sampling is from bfloat16 weights. The update is of a group-relative iteration: some prompts, each with eight answers; full
ones keep float32 weights and AdamW states and compute in bfloat16, as configs/scale does, LoRA has a bfloat16 base. Every
measurement builds its model anew; one that fails leaves a line with its error, and none is begun when time is up.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from random import Random
from typing import Any

import torch
from benchmark_memory import FullLogits
from benchmark_report import measured, report
from benchmark_turns import converse
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from rla_lightning.algorithm.losses import policy_loss
from rla_lightning.models.language_model import add_lora
from rla_lightning.models.specs import LoraSpec
from rla_lightning.models.tokenizer import environment_tokenizer
from rla_lightning.rollout.batching import MicroBatch, Sample, make_micro_batch, pack
from rla_lightning.rollout.scorer import Scorer
from rla_lightning.rollout.transformers_sampler import TransformersSampler
from rla_lightning.types import SamplingParams

GROUP_SIZE = 8
WARM_UPS, REPEATS = 1, 2  # of the update
COMPILE_SECONDS = 100  # that have to be left to begin with it
PEAK_TFLOPS = {  # dense bfloat16, of the data sheets; the first name that is in the card's counts
    "B200": 2250, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "A100": 312, "L40S": 362, "L4": 121,
    "A10G": 70, "RTX 4090": 165,
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """Of a model of the family."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    mlp_width: int
    vocabulary: int = 151_936
    tied: bool = True


SHAPES = {
    "toy": Shape(64, 2, 4, 2, 128, vocabulary=4000),
    "0.5B": Shape(896, 24, 14, 2, 4864),
    "1.5B": Shape(1536, 28, 12, 2, 8960),
    "3B": Shape(2048, 36, 16, 2, 11008),
    "7B": Shape(3584, 28, 28, 4, 18944, vocabulary=152_064, tied=False),
}


@dataclass(frozen=True)
class Work:
    """How much is sampled and trained on."""

    sequences: int = 128
    prompt_tokens: int = 512
    new_tokens: int = 256
    turns: int = 8
    turn_tokens: int = 32  # of an answer and of an observation
    groups: int = 4  # trained on in one step
    token_budget: int = 16384


WORK, TOY_WORK = Work(), Work(16, 32, 16, 8, 4, 2, 512)


@dataclass(frozen=True)
class Tricks:
    """Of the update."""

    chunked_head: bool = True
    shared_prefixes: bool = True
    gradient_checkpointing: bool = True
    lora: bool = False
    compile: bool = False


class Preset:
    """Measurements on one card, one after the other, as long as there is time."""

    def __init__(self, device: str, seconds: float) -> None:
        self.device, self.end = device, time.monotonic() + seconds
        name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
        self.peak_tflops = next((tflops for part, tflops in PEAK_TFLOPS.items() if part in name), None)
        self.card_mb = torch.cuda.mem_get_info()[1] / 2**20 if device == "cuda" else None
        card = {"memory_mb": self.card_mb and round(self.card_mb), "peak_bf16_tflops": self.peak_tflops}
        report("card", 0, name=name, **card, torch=torch.__version__)

    def attempt(self, stage: str, about: dict[str, Any], action: Callable[[], dict[str, Any]], needs: float = 0.0) -> None:
        """A line with the numbers of the action, or with the reason why there are none."""
        if self.end - time.monotonic() <= needs:
            report(stage, 0, **about, skipped="time is up")
            return
        gc.collect()  # models have cycles
        start = time.monotonic()
        try:
            numbers = action()
        except RuntimeError as error:  # out of memory, a kernel that a card lacks, a compiler
            numbers = {"seconds": time.monotonic() - start, "error": f"{type(error).__name__}: {error}".split("\n")[0][:300]}
        report(stage, numbers.pop("seconds"), **about, **numbers)

    # Models

    def fits(self, size: str, lora: bool) -> bool:
        """Whether the card holds it in training: float32 weights, gradients, states and bfloat16 copies, or a bfloat16 base."""
        needed = (2.5 if lora else 18) * parameters(SHAPES[size]) / 2**20
        return self.card_mb is None or needed < 0.9 * self.card_mb

    def build(self, size: str, dtype: torch.dtype) -> PreTrainedModel:
        shape = SHAPES[size]
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=shape.vocabulary, hidden_size=shape.width, num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, intermediate_size=shape.mlp_width,
            tie_word_embeddings=shape.tied, rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        )  # fmt: skip
        with torch.device(self.device):
            return AutoModelForCausalLM.from_config(config, dtype=dtype)

    # Sampling

    def sample(self, size: str, work: Work) -> dict[str, Any]:
        """Groups of answers to one prompt each."""
        sampler, rng = self._sampler(size, work.sequences * (work.prompt_tokens + work.new_tokens)), Random("sample")
        prompts = [words(rng, size, work.prompt_tokens) for _ in range(work.sequences // GROUP_SIZE)]
        keys = [str(i) for i in range(len(prompts))]
        sampler.sample(prompts, 1, SamplingParams(max_new_tokens=2), keys)  # warm up
        params = SamplingParams(max_new_tokens=work.new_tokens)
        seconds, peak_mb, groups = measured(lambda: sampler.sample(prompts, GROUP_SIZE, params, keys), self.device)
        new = sum(len(completion.token_ids) for group in groups for completion in group)
        return {"seconds": seconds, "new_tokens": new, "new_tokens_per_second": round(new / seconds), "peak_mb": peak_mb}

    def session(self, size: str, work: Work) -> dict[str, Any]:
        """Conversations that begin alike in groups."""
        longest = work.prompt_tokens + 2 * work.turns * work.turn_tokens
        sampler, rng = self._sampler(size, work.sequences * (longest + work.turn_tokens)), Random("session")
        prompts = [words(rng, size, work.prompt_tokens) for _ in range(work.sequences // GROUP_SIZE)]
        firsts = [prompt for prompt in prompts for _ in range(GROUP_SIZE)]
        params = SamplingParams(max_new_tokens=work.turn_tokens)

        def play(turns: int) -> int:
            said = converse(sampler, firsts, turns, params, lambda: words(rng, size, work.turn_tokens))
            return sum(len(answer.token_ids) for conversation in said for _, answer in conversation.turns)

        play(1)  # warm up
        seconds, peak_mb, new = measured(lambda: play(work.turns), self.device)
        rate = round(new / seconds)
        return {"seconds": seconds, "turns": work.turns, "new_tokens": new, "new_tokens_per_second": rate, "peak_mb": peak_mb}

    def _sampler(self, size: str, tokens: int) -> TransformersSampler:
        """The words of its tokenizer are few: what is drawn does not have to be readable."""
        return TransformersSampler(self.build(size, torch.bfloat16), environment_tokenizer(["word"]), tokens)

    # Update

    def update(self, size: str, work: Work, tricks: Tricks) -> dict[str, Any]:
        """Steps on the same samples."""
        base = self.build(size, torch.bfloat16 if tricks.lora else torch.float32)
        if tricks.gradient_checkpointing:
            base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model = add_lora(base, LoraSpec(), "CAUSAL_LM") if tricks.lora else base
        scorer = Scorer(model.train(), tricks.compile)
        scored = scorer if tricks.chunked_head else FullLogits(model)
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-6, weight_decay=0.0, fused=True)
        batches, pairs = self._batches(size, work, scorer.width if tricks.shared_prefixes else None)
        samples = work.groups * GROUP_SIZE

        def step(times: int) -> None:
            for _ in range(times):
                optimizer.zero_grad()
                for batch in batches:
                    with torch.autocast(self.device, torch.bfloat16):
                        logprobs, _ = scored(batch, 1.0, with_entropy=True)
                    old = logprobs.detach()
                    policy_loss(logprobs, old, batch.advantages, batch.response_mask, denominator=samples).loss.backward()
                nn.utils.clip_grad_norm_(trained, 1.0)
                optimizer.step()

        first, first_peak, _ = measured(lambda: step(WARM_UPS), self.device)
        seconds, peak_mb, _ = measured(lambda: step(REPEATS), self.device)
        fed, places = sum(batch.tokens for batch in batches), sum(len(batch.places) for batch in batches)
        flops = REPEATS * training_flops(SHAPES[size], fed, places, pairs, frozen=tricks.lora) / seconds
        return {
            "seconds": seconds / REPEATS,
            "first_seconds": round(first, 3),
            "shares_prefixes": scorer.width is not None,
            "tokens": fed,
            "padding_fraction": round(1 - fed / sum(batch.input_ids.numel() for batch in batches), 3),
            "tokens_per_second": round(REPEATS * fed / seconds),
            "response_tokens_per_second": round(REPEATS * samples * work.new_tokens / seconds),
            "mfu": self.peak_tflops and round(flops / self.peak_tflops / 1e12, 3),
            "peak_mb": max(first_peak, peak_mb),
        }

    def _batches(self, size: str, work: Work, width: int | None) -> tuple[list[MicroBatch], int]:
        """Micro-batches, and how many pairs of a token and one that it sees they have."""
        rng, samples = Random("update"), []
        for _ in range(work.groups):
            prompt = words(rng, size, work.prompt_tokens)
            samples += [Sample(prompt, words(rng, size, work.new_tokens), (-1.0) ** i) for i in range(GROUP_SIZE)]
        packed = pack(samples, work.token_budget, width)
        pairs = sum(int((row.depths + 1).sum()) for rows in packed for row in rows)
        return [make_micro_batch(samples, rows, 0)[0].to(self.device) for rows in packed], pairs


def words(rng: Random, size: str, number: int) -> tuple[int, ...]:
    return tuple(rng.choices(range(8, SHAPES[size].vocabulary), k=number))


def body_parameters(shape: Shape) -> int:
    """Of the matrices of all blocks."""
    attention = shape.width * (2 * shape.width + 2 * shape.width * shape.kv_heads // shape.heads)
    return shape.layers * (attention + 3 * shape.width * shape.mlp_width)


def parameters(shape: Shape) -> int:
    return body_parameters(shape) + (1 if shape.tied else 2) * shape.width * shape.vocabulary


def training_flops(shape: Shape, fed: int, places: int, pairs: int, frozen: bool) -> float:
    """That the model needs, recomputation not counted: 6 for each weight and token, 12 for each pair, layer and channel.

    Weights that are frozen have no gradient of their own: 4.

    Args:
        shape: of the model.
        fed: tokens that the body reads.
        places: tokens that the head reads.
        pairs: of a token and one that it sees.
        frozen: all but adapters.
    """
    weights = fed * body_parameters(shape) + places * shape.width * shape.vocabulary
    return (4 if frozen else 6) * weights + 12 * pairs * shape.layers * shape.width


def variants(lora: bool) -> list[Tricks]:
    """All tricks but the compiler, then each one the other way round."""
    base = Tricks(lora=lora)
    off = ("chunked_head", "shared_prefixes", "gradient_checkpointing")
    return [base, *(replace(base, **{name: False}) for name in off), *([] if lora else [Tricks(lora=True)])]


def work_of(size: str) -> Work:
    return TOY_WORK if size == "toy" else WORK


def measure(preset: Preset, size: str) -> bool:
    """All but the compiler; whether the card holds the model."""
    work, number, full = work_of(size), parameters(SHAPES[size]), preset.fits(size, lora=False)
    if not preset.fits(size, lora=True):
        report("size", 0, size=size, parameters=number, skipped="it does not fit on this card, even with LoRA")
        return False
    report("size", 0, size=size, parameters=number, full_fits=full, **asdict(work))
    preset.attempt("sampling", {"size": size}, lambda: preset.sample(size, work))
    preset.attempt("session", {"size": size}, lambda: preset.session(size, work))
    for tricks in variants(lora=not full):
        preset.attempt("update", {"size": size, **asdict(tricks)}, partial(preset.update, size, work, tricks))
    return True


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmark.py --gpu", description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=list(SHAPES), default=[size for size in SHAPES if size != "toy"])
    parser.add_argument("--seconds", type=float, default=300, help="nothing is begun after so many")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and options.sizes != ["toy"]:
        parser.error("there is no CUDA device: only --sizes toy is for the CPU")
    preset = Preset(device, options.seconds)
    fitting = [size for size in options.sizes if measure(preset, size)]
    if fitting:  # the compiler, with the smallest: it takes longer with the others
        tricks = Tricks(gradient_checkpointing=False, lora=not preset.fits(fitting[0], lora=False), compile=True)
        about = {"size": fitting[0], **asdict(tricks)}
        if device == "cuda":
            preset.attempt("update", about, lambda: preset.update(fitting[0], work_of(fitting[0]), tricks), COMPILE_SECONDS)
        else:
            report("update", 0, **about, skipped="the compiler takes minutes on a CPU")


if __name__ == "__main__":
    main()
