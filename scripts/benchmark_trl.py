"""Our single-turn iteration against that of TRL's GRPOTrainer, as JSON lines: `python scripts/benchmark_trl.py [--sizes 7M]`.

Both sides do the same work: equal weights at the start, the same prompts, G samples of exactly the same length, a reward that
costs nothing, group-standardised advantages, a clipped loss without KL, equally many AdamW steps; float32, equal threads.
Each side is a process of its own and waits while the other one runs, so that they take turns on the same machine.
A ratio is ours / theirs in samples per second: above 1 ours is faster. On a busy machine trust `cpu_ratio`.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, TextIO
from zlib import crc32

import lightning as L
import numpy as np
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from rla_lightning.algorithm.advantages import policy_advantages
from rla_lightning.models.tokenizer import SPECIAL_TOKENS, VOTES, environment_tokenizer
from rla_lightning.optimization import update_language_model
from rla_lightning.rollout.batching import Sample
from rla_lightning.rollout.scorer import Scorer
from rla_lightning.rollout.transformers_sampler import TransformersSampler
from rla_lightning.settings import ClippedUpdateSettings, RolloutSettings
from rla_lightning.types import Completion, SamplingParams
from rla_lightning.updates import TaskSample, pieces

GROUP_SIZE = 8
LEARNING_RATE = 1e-5
SIDES = ("ours", "theirs")


@dataclass(frozen=True)
class Case:
    """The work of one iteration, and how often it is done by default."""

    size: str
    prompts: int
    prompt_tokens: int
    new_tokens: int
    minibatches: int  # optimizer steps
    rows: int  # of one of TRL's training passes, the fastest of those tried
    repeats: int  # turns of each side
    iterations: int  # of each turn

    @property
    def samples(self) -> int:
        return self.prompts * GROUP_SIZE


SHAPES: dict[str, dict[str, int]] = {  # the last one is SmolLM2-135M
    "0.2M": {"vocab_size": 191, "hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 192},
    "7M": {"vocab_size": 2048, "hidden_size": 256, "num_hidden_layers": 6, "intermediate_size": 896},
    "135M": {"vocab_size": 49152, "hidden_size": 576, "num_hidden_layers": 30, "intermediate_size": 1536},
}
HEADS = {"0.2M": ("qwen2", 4, 4), "7M": ("qwen2", 4, 4), "135M": ("llama", 9, 3)}  # architecture, heads, key-value heads
WORDS = {size: [f"w{i}" for i in range(shape["vocab_size"] - len(SPECIAL_TOKENS + VOTES))] for size, shape in SHAPES.items()}
CASES = (
    Case("0.2M", prompts=24, prompt_tokens=28, new_tokens=4, minibatches=1, rows=192, repeats=3, iterations=5),
    Case("0.2M", prompts=24, prompt_tokens=28, new_tokens=32, minibatches=1, rows=192, repeats=3, iterations=3),
    Case("0.2M", prompts=24, prompt_tokens=28, new_tokens=32, minibatches=4, rows=48, repeats=3, iterations=3),
    Case("7M", prompts=24, prompt_tokens=28, new_tokens=32, minibatches=1, rows=48, repeats=3, iterations=1),
    Case("135M", prompts=1, prompt_tokens=128, new_tokens=64, minibatches=1, rows=8, repeats=1, iterations=1),
)


def build(size: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Equal weights at every call. The end token's id is one past the vocabulary of the model: nobody can draw it."""
    tokenizer = environment_tokenizer(WORDS[size])
    tokenizer.add_special_tokens({"eos_token": "<never>"})
    architecture, heads, kv_heads = HEADS[size]
    config = AutoConfig.for_model(
        architecture, **SHAPES[size], num_attention_heads=heads, num_key_value_heads=kv_heads, tie_word_embeddings=True,
        initializer_range=SHAPES[size]["hidden_size"] ** -0.5, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32), tokenizer


def prompt_texts(case: Case, iterations: int) -> list[list[str]]:
    """Those of each iteration, all different and equally long."""
    rng, length = Random("benchmark"), case.prompt_tokens
    return [[" ".join(rng.choices(WORDS[case.size], k=length)) for _ in range(case.prompts)] for _ in range(iterations)]


def reward(completion_ids: Sequence[int]) -> float:
    """A hash: it costs nothing and differs between the samples of a prompt."""
    return crc32(np.array(completion_ids, dtype=np.int64).tobytes()) / 2**32


def memory(name: str) -> float:
    """Megabytes of this process: VmRSS now, VmHWM at most so far."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith(name)).split()[1]) / 1024


class Meter:
    """Lets a side run as many iterations as the parent process asks for, and answers with their times.

    A side calls `boundary` where every iteration starts, so that what its loop does between two of them counts, too.
    """

    def __init__(self, case: Case, answers: TextIO) -> None:
        self.case, self.answers = case, answers
        self.baseline = memory("VmRSS")  # everything is imported, the model is built
        self.left, self.steps, self.sampling, self.start, self.cpu = 0, 0, 0.0, 0.0, 0.0
        self.rows: list[dict[str, float]] = []
        self.seen: tuple[Sequence[Sequence[int]], Sequence[Sequence[int]], Sequence[float]] = ((), (), ())

    def boundary(self, steps: int) -> None:
        """End the running iteration, if any, and wait if it was the last one; `steps` are the optimizer's so far."""
        seconds, cpu = time.perf_counter() - self.start, time.process_time() - self.cpu
        if self.start:
            prompts = self._checked(steps)
            self.rows.append({"seconds": seconds, "cpu": cpu, "sampling": self.sampling, "prompts": prompts})
        if self.left == 0:
            answer = {"rows": self.rows, "peak_mb": memory("VmHWM") - self.baseline}
            print(json.dumps(answer), file=self.answers, flush=True)
            self.left, self.rows = int(sys.stdin.readline() or 0), []
            if self.left == 0:
                raise SystemExit
        self.left -= 1
        self.steps, self.start, self.cpu = steps, time.perf_counter(), time.process_time()

    @contextmanager
    def timed_sampling(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.sampling = time.perf_counter() - start

    def _checked(self, steps: int) -> int:
        """A checksum of the prompts of an iteration that did what the case says."""
        prompts, completions, advantages = self.seen
        lengths = {len(completion) for completion in completions}
        if len(completions) != self.case.samples or lengths != {self.case.new_tokens} or not all(advantages):
            raise RuntimeError(f"{len(completions)} samples of {lengths} tokens, some without advantage, in {self.case}")
        if steps - self.steps != self.case.minibatches:
            raise RuntimeError(f"{steps - self.steps} optimizer steps instead of {self.case.minibatches}")
        return crc32(json.dumps([list(prompt) for prompt in prompts]).encode())


# Our side


class Iteration(L.LightningModule):
    """The parts of `ClosedLoop` that a single-turn policy needs, with the default settings of training."""

    def __init__(self, case: Case, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, meter: Meter) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.case, self.tokenizer, self.meter = case, tokenizer, meter
        self.policy = Scorer(model.train())
        self.sampler = TransformersSampler(model, tokenizer, RolloutSettings().sampler_tokens)
        self.settings = ClippedUpdateSettings(minibatches=case.minibatches, kl_coef=0.0)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.policy.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)  # as TRL's

    def training_step(self, batch: list[str], batch_idx: int) -> None:
        self.meter.boundary(self.global_step)
        params = SamplingParams(max_new_tokens=self.case.new_tokens)
        with self.meter.timed_sampling():
            prompts = self.tokenizer(batch)["input_ids"]
            keys = [f"{batch_idx}/{i}" for i in range(len(prompts))]
            groups = self.sampler.sample(prompts, GROUP_SIZE, params, keys)
        samples = [sample for i, group in enumerate(groups) for sample in credited(prompts[i], group, keys[i])]
        pad_id, optimizer = int(self.tokenizer.pad_token_id), self.optimizers()
        assert isinstance(optimizer, LightningOptimizer)
        steps = pieces(samples, self.settings, Random(batch_idx), pad_id, self.device, self.policy.width)
        update_language_model(self, "policy", self.policy, optimizer, steps, self.settings, params.temperature)
        pairs = [item.sample for item in samples]
        self.meter.seen = (prompts, [s.response_ids for s in pairs], [s.advantage for s in pairs])


def credited(prompt: Sequence[int], group: Sequence[Completion], key: str) -> list[TaskSample]:
    """The samples of one prompt with their standardised rewards."""
    advantages = policy_advantages([np.array([reward(completion.token_ids)]) for completion in group])
    return [
        TaskSample(Sample(tuple(prompt), completion.token_ids, float(advantage)), key, completion.logprobs)
        for completion, (advantage,) in zip(group, advantages, strict=True)
    ]


def run_ours(case: Case, iterations: int, answers: TextIO) -> None:
    model, tokenizer = build(case.size)
    loop = Iteration(case, model, tokenizer, Meter(case, answers))
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = L.Trainer(max_epochs=1, accelerator="cpu", **dict.fromkeys(off, False))  # type: ignore[arg-type]
    trainer.fit(loop, DataLoader(prompt_texts(case, iterations), batch_size=None))  # type: ignore[arg-type]


# Their side


def run_theirs(case: Case, iterations: int, answers: TextIO) -> None:
    from datasets import Dataset  # noqa: PLC0415
    from trl import GRPOTrainer  # noqa: PLC0415

    class TimedTrainer(GRPOTrainer):  # type: ignore[misc]
        """Sampling is all of `_generate`: tokenize, generate, decode; the rest of an iteration is the update.

        An iteration starts with `_generate_and_score_completions`, called once per `steps_per_generation`.
        """

        def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
            meter.boundary(self.state.global_step)
            batch = super()._generate_and_score_completions(inputs)
            meter.seen = (*meter.seen[:2], batch["advantages"].tolist())
            return batch

        def _generate(self, prompts: list[str]) -> Any:
            with meter.timed_sampling():
                generated = super()._generate(prompts)
            meter.seen = (generated[0][::GROUP_SIZE], generated[1], ())
            return generated

    def rewards(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        return [reward(ids) for ids in completion_ids]

    model, tokenizer = build(case.size)
    prompts = Dataset.from_dict({"prompt": [text for batch in prompt_texts(case, iterations) for text in batch]})
    with TemporaryDirectory() as folder:
        arguments = grpo_settings(case, iterations, folder)
        trainer = TimedTrainer(model, rewards, arguments, train_dataset=prompts, processing_class=tokenizer)
        meter = Meter(case, answers)
        trainer.train()


def grpo_settings(case: Case, iterations: int, folder: str) -> Any:
    """TRL at its best for this work on a CPU.

    loss_type "grpo" is our mean over tokens, then samples; beta 0 needs no reference model. bf16 and gradient_checkpointing are
    on by default, the first is other work and the second more. Steps that are aligned with generation need no pass for the old
    log-probs. Not faster (CPU seconds at 0.2M, 1.13 as is): a static cache 1.20, continuous batching 14.
    """
    from trl import GRPOConfig  # noqa: PLC0415

    passes = case.samples // case.rows
    return GRPOConfig(
        num_generations=GROUP_SIZE, max_completion_length=case.new_tokens, temperature=1.0, shuffle_dataset=False,
        per_device_train_batch_size=case.rows, steps_per_generation=passes, num_iterations=1,
        gradient_accumulation_steps=passes // case.minibatches, max_steps=iterations * case.minibatches,
        loss_type="grpo", epsilon=0.2, beta=0.0, max_grad_norm=1.0,
        learning_rate=LEARNING_RATE, lr_scheduler_type="constant", weight_decay=0.0, optim="adamw_torch_fused",
        use_cpu=True, bf16=False, gradient_checkpointing=False, dataloader_pin_memory=False,
        logging_strategy="no", save_strategy="no", eval_strategy="no", report_to="none", disable_tqdm=True, output_dir=folder,
    )  # fmt: skip


class Side:
    """A process that runs iterations when asked."""

    def __init__(self, name: str, case: Case, iterations: int, threads: int) -> None:
        command = [sys.executable, __file__, "--worker", name, json.dumps(asdict(case)), str(iterations)]
        quiet = {"PYTHONWARNINGS": "ignore", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
        environment = {**os.environ, **quiet, "OMP_NUM_THREADS": str(threads)}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)

    def run(self, iterations: int) -> dict[str, Any]:
        """Times and peak memory; of 0 iterations once, while it is being built."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if iterations:
            print(iterations, file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args!r} ended with {self.process.wait()}")
        return json.loads(line)


def compare(case: Case, threads: int) -> dict[str, Any]:
    """The record of one case: medians over the turns, and the spread of the ratio of neighbouring turns."""
    needed = 2 + case.repeats * case.iterations  # the first is for warming up, the last never runs
    sides = {name: Side(name, case, needed, threads) for name in SIDES}
    try:
        for iterations in (0, 1):  # build; then memory is allocated and AdamW gets its state
            for side in sides.values():
                side.run(iterations)
        turns = [{name: side.run(case.iterations) for name, side in sides.items()} for _ in range(case.repeats)]
    finally:
        for side in sides.values():
            side.process.communicate()  # without input it ends at the boundary where it waits
    ours, theirs = ([row["prompts"] for turn in turns for row in turn[name]["rows"]] for name in SIDES)
    if ours != theirs:
        raise RuntimeError("the two sides saw different prompts")

    def times(name: str, key: str) -> list[float]:
        return [median(row[key] for row in turn[name]["rows"]) for turn in turns]

    seconds = {name: times(name, "seconds") for name in SIDES}
    ratios = [b / a for a, b in zip(seconds["ours"], seconds["theirs"], strict=True)]
    work = {key: value for key, value in asdict(case).items() if key not in ("rows", "iterations")}
    record: dict[str, Any] = {
        **work, "group_size": GROUP_SIZE, "threads": threads,
        **{name: round(case.samples / median(seconds[name]), 2) for name in SIDES},
        "ratio": round(median(seconds["theirs"]) / median(seconds["ours"]), 2),
        "ratio_spread": [round(min(ratios), 2), round(max(ratios), 2)],
        "cpu_ratio": round(median(times("theirs", "cpu")) / median(times("ours", "cpu")), 2),
    }  # fmt: skip
    for name in SIDES:
        sampling = median(times(name, "sampling"))
        record[f"{name}_sampling_s"], record[f"{name}_update_s"] = round(sampling, 4), round(median(seconds[name]) - sampling, 4)
        record[f"{name}_peak_mb"] = round(turns[-1][name]["peak_mb"])
    return record


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--repeats", type=int, help="turns of each side, by default fewer for larger models")
    parser.add_argument("--iterations", type=int, help="of each turn, by default fewer for larger models")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        name, work, needed = options.worker
        answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no answer
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        {"ours": run_ours, "theirs": run_theirs}[name](Case(**json.loads(work)), int(needed), answers)
    elif find_spec("trl") is None:
        print(json.dumps({"skipped": "trl is not installed: pip install 'rla_lightning[trl]'"}))
    else:
        for case in (case for case in CASES if case.size in options.sizes):
            chosen = {"repeats": options.repeats or case.repeats, "iterations": options.iterations or case.iterations}
            print(json.dumps(compare(Case(**{**asdict(case), **chosen}), options.threads)), flush=True)


if __name__ == "__main__":
    main()
