"""Peak memory of the update with a large vocabulary: the chunked head against all logits at once.

Both are the policy update's forward and backward pass of the same samples, each in a process of its own; ours also computes
the entropy that is logged, the other one only what the loss needs. Their gradients are compared, too.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch
from benchmark_report import PROCESS, peak_megabytes, report, reset_peak, status_megabytes, timed
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from rla_lightning.algorithm.losses import policy_loss
from rla_lightning.rollout import scorer
from rla_lightning.rollout.batching import MicroBatch, Sample, batch_of

PROMPT_TOKENS = 8
SIDES = ("ours", "full")


class FullLogits(nn.Module):
    """What `Scorer` does, the plain way: float32 log-probs of the whole vocabulary at every place."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: MicroBatch, temperature: float, with_entropy: bool = False) -> tuple[Tensor, None]:
        tree: dict[str, Tensor] = {}
        if batch.subtree_ends is not None:
            tree = {"attention_mask": scorer.tree_mask(batch.subtree_ends), "position_ids": batch.position_ids}
        logits = self.model(input_ids=batch.input_ids, **tree, use_cache=False).logits.float()  # [B, T, V]
        logprobs = (logits if temperature == 1.0 else logits / temperature).log_softmax(-1).flatten(0, 1)
        return logprobs[batch.places, batch.targets][batch.predictions], None


def build(options: argparse.Namespace) -> PreTrainedModel:
    """Equal weights at every call; tied embeddings, as small models with large vocabularies have them."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=options.vocabulary, hidden_size=options.width, num_hidden_layers=options.layers,
        num_attention_heads=4, num_key_value_heads=2, intermediate_size=3 * options.width, tie_word_embeddings=True,
        initializer_range=options.width**-0.5,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def samples_of(options: argparse.Namespace) -> MicroBatch:
    """Equally long ones, some better and some worse than average; in rows of their own, so that only the head differs."""
    rng = Random("memory")
    draw = [
        tuple(rng.choices(range(options.vocabulary), k=PROMPT_TOKENS + options.tokens // options.samples))
        for _ in range(options.samples)
    ]
    samples = [Sample(ids[:PROMPT_TOKENS], ids[PROMPT_TOKENS:], (-1.0) ** i * (i + 1)) for i, ids in enumerate(draw)]
    return batch_of(samples, 0)


def work(side: str, options: argparse.Namespace, gradients: Path) -> None:
    """One side in this process: prints its numbers and leaves its gradients in a file."""
    torch.set_num_threads(options.threads)
    scorer.CHUNK = options.chunk
    model, batch = build(options), samples_of(options)
    scored = scorer.Scorer(model) if side == "ours" else FullLogits(model)

    def update() -> None:
        logprobs, _ = scored(batch, 1.0, with_entropy=True)
        output = policy_loss(
            logprobs, logprobs.detach(), batch.advantages, batch.response_mask, denominator=options.samples, weights=batch.weights
        )
        output.loss.backward()

    reset_peak()
    before, cpu = status_megabytes(PROCESS, "VmRSS"), time.process_time()
    seconds, _ = timed(update)
    print(json.dumps({"mb": peak_megabytes() - before, "seconds": seconds, "cpu_seconds": time.process_time() - cpu}), flush=True)
    torch.save({name: weight.grad for name, weight in model.named_parameters()}, gradients)


def each_side(options: argparse.Namespace, folder: Path) -> None:
    """Each in a process of its own; forks of this one, which has done nothing but import what takes longest."""
    for side in SIDES:
        process = multiprocessing.get_context("fork").Process(target=work, args=(side, options, folder / side))
        process.start()
        process.join()
        if process.exitcode:
            raise RuntimeError(f"{side} ended with {process.exitcode}")


def run(options: argparse.Namespace, folder: str) -> dict[str, dict[str, float]]:
    """The numbers of each side.

    Tensors of 1 MB and more are given back to the system as soon as they are freed. By default glibc keeps blocks of up to
    32 MB, and a heap in pieces would be measured: 1.6 GB instead of 0.3 GB with chunks of 2**22 logits.
    """
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)}
    command = [sys.executable, __file__, "--worker", json.dumps(vars(options)), folder]
    answers = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment).stdout.splitlines()
    return {side: json.loads(answer) for side, answer in zip(SIDES, answers, strict=True)}


def largest_difference(ours: dict[str, Tensor], full: dict[str, Tensor]) -> float:
    """Of a weight's gradients, relative to the largest of them."""
    if ours.keys() != full.keys():
        raise RuntimeError(f"gradients of different weights: {sorted(ours.keys() ^ full.keys())}")
    return max(float((ours[name] - full[name]).abs().max() / full[name].abs().max()) for name in full)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmark.py --memory", description=__doc__)
    parser.add_argument("--vocabulary", type=int, default=152_000)
    parser.add_argument("--tokens", type=int, default=4000, help="of all responses")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--chunk", type=int, default=scorer.CHUNK, help="logits that ours has in memory at a time")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        wanted, folder = options.worker
        each_side(argparse.Namespace(**json.loads(wanted)), Path(folder))
        return
    del options.worker
    numbers: dict[str, Any] = {}
    with TemporaryDirectory() as folder:
        results = run(options, folder)
        numbers["gradient_difference"] = largest_difference(*(torch.load(Path(folder) / side) for side in SIDES))
    for side, result in results.items():
        numbers |= {f"{side}_{name}": round(number, 2) for name, number in result.items()}
        numbers[f"{side}_tokens_per_second"] = round(options.tokens / result["seconds"])
    ratio = round(numbers["ours_mb"] / numbers["full_mb"], 3)
    report("memory of the head", sum(r["seconds"] for r in results.values()), ratio=ratio, **numbers, **vars(options))


if __name__ == "__main__":
    main()
