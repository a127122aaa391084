"""Supervised start of tiny models, before the loop: noisy demonstrations and noisy step labels."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from random import Random

import lightning as L
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from rla_lightning.environments.base import TestedEnvironment
from rla_lightning.models.language_model import load_trainable_state, local_seed, trainable_state
from rla_lightning.models.muon import muon_and_adamw
from rla_lightning.models.sharding import unsharded_state
from rla_lightning.module import ClosedLoop
from rla_lightning.rollout.batching import Sample, batch_of
from rla_lightning.rollout.explorer import DETOURS, INVALID, Explorer
from rla_lightning.rollout.players import Players
from rla_lightning.types import ConfigError, Task

logger = logging.getLogger(__name__)

FORMAT = 3  # of the cache; raise it when training changes


@dataclass(frozen=True)
class Lessons:
    """What the models are taught."""

    policy: tuple[Sample, ...]
    judge: tuple[Sample, ...]


class WarmStart(L.Callback):
    """Teaches tiny random models enough to explore, from an expert whose answers are partly random.

    Pretrained models are left alone, and nothing happens when a run resumes. The result is cached by everything it depends
    on. A flipped label keeps its critique: the critique says what the step is, the vote after it is wrong.

    Args:
        episodes: played to make the lessons.
        difficulty_low: lowest difficulty of their tasks; null: as for fresh tasks.
        difficulty_high: highest difficulty of them; null: likewise.
        policy_updates: optimizer steps of the policy; 0 leaves it as it is.
        judge_updates: optimizer steps of the reward model; 0 leaves it as it is.
        batch_size: samples per optimizer step.
        action_noise: share of demonstrated actions that are a random admissible command, or a wrong program, instead.
        label_noise: share of step labels that are flipped, or of unit tests that expect a wrong output.
        detour_rate: share of the episodes' actions that are a random admissible command (not where programs are written).
        invalid_rate: share of the episodes' actions that are not admissible, so that the judge has seen such (likewise).
        matrix_lr: peak learning rate of Muon on weight matrices.
        other_lr: peak learning rate of AdamW on the other weights and the embeddings.
        cache: folder of earlier results; null trains anew.
    """

    def __init__(
        self,
        episodes: int = 2000,
        difficulty_low: float | None = None,
        difficulty_high: float | None = None,
        policy_updates: int = 600,
        judge_updates: int = 600,
        batch_size: int = 64,
        action_noise: float = 0.3,
        label_noise: float = 0.25,
        detour_rate: float = DETOURS,
        invalid_rate: float = INVALID,
        matrix_lr: float = 0.02,
        other_lr: float = 3e-3,
        cache: Path | None = Path("runs/.warm_start"),
    ) -> None:
        for name, value in (("episodes", episodes), ("batch_size", batch_size)):
            if value < 1:
                raise ConfigError(f"WarmStart.{name} must be at least 1, got {value}")
        low, high = difficulty_low, difficulty_high
        if not 0 <= (0 if low is None else low) <= (1 if high is None else high) <= 1:
            raise ConfigError(f"WarmStart needs 0 <= difficulty_low <= difficulty_high <= 1, got {low} and {high}")
        self.difficulty_low, self.difficulty_high = low, high
        rates = {
            "action_noise": action_noise, "label_noise": label_noise, "detour_rate": detour_rate, "invalid_rate": invalid_rate
        }  # fmt: skip
        for name, rate in rates.items():
            if not 0 <= rate <= 1:
                raise ConfigError(f"WarmStart.{name} must be in [0, 1], got {rate}")
        self.episodes, self.batch_size = episodes, batch_size
        self.policy_updates, self.judge_updates = policy_updates, judge_updates
        self.action_noise, self.label_noise = action_noise, label_noise
        self.detour_rate, self.invalid_rate = detour_rate, invalid_rate
        self.matrix_lr, self.other_lr = matrix_lr, other_lr
        self.cache = cache

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.ckpt_path is not None:
            return
        assert isinstance(pl_module, ClosedLoop)
        datamodule = trainer.datamodule  # type: ignore[attr-defined]
        pl_module.progress("warm start: demonstrations", 0, self.episodes, math.nan)
        low, high = datamodule.difficulty
        difficulty = (
            low if self.difficulty_low is None else self.difficulty_low,
            high if self.difficulty_high is None else self.difficulty_high,
        )
        if difficulty[0] > difficulty[1]:
            raise ConfigError(f"WarmStart's difficulties end up as {difficulty[0]} to {difficulty[1]}: give both ends")
        lessons = self.lessons(pl_module.players, difficulty, datamodule.pool.held_out, pl_module.seed)
        for name, samples, updates in (
            ("policy", lessons.policy, self.policy_updates),
            ("reward_model", lessons.judge, self.judge_updates),
        ):
            if updates > 0 and getattr(pl_module, f"{name}_spec").path is None:
                if not any(True for _ in getattr(pl_module, name).parameters()):
                    raise ConfigError(f"the {name} is the policy's frozen base: set its lora, or WarmStart's updates of it to 0")
                with local_seed(f"{pl_module.seed}/warm start/{name}", pl_module.device):  # of dropout on adapters
                    self._teach(trainer, pl_module, name, samples, updates)
        pl_module.sync_players()

    def lessons(self, players: Players, difficulty: tuple[float, float], held_out: frozenset[str], seed: int) -> Lessons:
        """Samples of noisy demonstrations and noisy step labels, from in-domain tasks that are not held out.

        Judge samples weigh 1 / sqrt(how often their critique occurs), so that rare mistakes are learned, too.
        """
        environment = players.environment
        policy: list[Sample] = []
        judge: list[tuple[Sample, str]] = []
        for index in range(self.episodes):
            rng = Random(f"{seed}/warm start/{index}")
            task = environment.sample(rng, rng.uniform(*difficulty))
            if task.id in held_out or environment.validate(task) is not None:
                continue
            lessons = self._write(players, task, rng) if players.formats.test else self._play(players, task, rng)
            for lesson, judged, critique in lessons:
                policy.append(lesson)
                if judged is not None:
                    judge.append((judged, critique))
        if not policy:
            raise ConfigError(f"environment {environment.name!r} has no expert: remove WarmStart or give model paths")
        counts = Counter(critique for _, critique in judge)
        return Lessons(tuple(policy), tuple(replace(judged, weight=counts[c] ** -0.5) for judged, c in judge))

    def _play(self, players: Players, task: Task, rng: Random) -> Iterator[tuple[Sample, Sample | None, str]]:
        """Lessons of one episode: a demonstration, a judged action and its critique at every visited state."""
        environment, formats = players.environment, players.formats
        tokenizer, judge_tokenizer = players.policy.tokenizer, players.reward_model.tokenizer
        explorer = Explorer(environment, formats.policy, tokenizer, self.detour_rate, self.invalid_rate, self.action_noise)
        for visit in explorer.episode(task, rng):
            observation = visit.observation
            prompt = formats.policy.prompt(tokenizer, visit.history, observation)
            lesson = Sample(prompt, formats.policy.answer(tokenizer, observation, visit.shown), 1.0)
            if self.judge_updates == 0:
                yield lesson, None, ""
                continue
            if visit.label is None:
                raise ConfigError(f"environment {environment.name!r} has no step labels: set WarmStart.judge_updates to 0")
            flipped = rng.random() < self.label_noise
            label = replace(visit.label, score=-visit.label.score) if flipped else visit.label
            judge_prompt = formats.judge.prompt(
                judge_tokenizer,
                visit.history,
                observation,
                visit.action,
                visit.raw_text,
                visit.transition.is_valid,
                visit.transition.observation.text,
            )
            yield lesson, Sample(judge_prompt, formats.judge.answer(judge_tokenizer, label), 1.0), label.critique

    def _write(self, players: Players, task: Task, rng: Random) -> Iterator[tuple[Sample, Sample | None, str]]:
        """A demonstrated program and a unit test of one task."""
        environment, formats, test_format = players.environment, players.formats, players.formats.test
        assert isinstance(environment, TestedEnvironment)
        assert test_format is not None
        episode = environment.start(task)
        shown = environment.expert(episode, rng)
        if shown is None:
            return
        wrong = environment.detour(episode, rng) if rng.random() < self.action_noise else None
        if wrong is not None:
            shown = replace(shown, action=wrong)
        tokenizer = players.policy.tokenizer
        prompt = formats.policy.prompt(tokenizer, (), episode.observation)
        lesson = Sample(prompt, formats.policy.answer(tokenizer, episode.observation, shown), 1.0)
        if self.judge_updates == 0:
            yield lesson, None, ""
            return
        example = environment.example_test(task, rng, is_right=rng.random() >= self.label_noise)
        if example is None:
            raise ConfigError(f"environment {environment.name!r} has no example tests: set WarmStart.judge_updates to 0")
        tokenizer = players.reward_model.tokenizer
        prompt = test_format.prompt(tokenizer, episode.observation)
        yield lesson, Sample(prompt, test_format.answer(tokenizer, example.test, example.thought), 1.0), ""

    def _teach(self, trainer: L.Trainer, pl_module: ClosedLoop, name: str, samples: Sequence[Sample], updates: int) -> None:
        model = getattr(pl_module, name)
        fingerprint = self._fingerprint(pl_module, name, samples, updates)
        path = None if self.cache is None else self.cache / f"{name}-{fingerprint}.safetensors"
        if path is not None and trainer.strategy.broadcast(path.is_file()):  # all ranks train, or none does
            load_trainable_state(model, load_file(path))
            logger.info("warm start of %s from %s", name, path)
            return
        temperature = pl_module.rollout.temperature
        pad_id = getattr(pl_module.players, name).tokenizer.pad_token_id
        optimizers = muon_and_adamw(model, self.matrix_lr, self.other_lr)
        peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
        rng = Random(f"{pl_module.seed}/warm start/{name}")
        weights = list(accumulate(sample.weight for sample in samples))
        for update in range(updates):
            for optimizer, rates in zip(optimizers, peaks, strict=True):
                for group, peak in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = peak * 0.5 * (1 + math.cos(math.pi * update / updates))
            drawn = rng.choices(samples, cum_weights=weights, k=self.batch_size)
            batch = batch_of(drawn, pad_id).to(pl_module.device)
            logprobs, _ = model(batch, temperature)
            loss = -(logprobs * batch.response_mask).sum() / batch.response_mask.sum()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if update % 20 == 0:
                pl_module.progress(f"warm start: {name}", update, updates, math.nan)
        if path is not None:
            self._save(trainer, model, path)

    def _fingerprint(self, pl_module: ClosedLoop, name: str, samples: Sequence[Sample], updates: int) -> str:
        """Of all that the result depends on: data, architecture and initial weights, settings, torch's version."""
        model, spec = getattr(pl_module, name), getattr(pl_module, f"{name}_spec")
        settings = (FORMAT, updates, self.batch_size, self.matrix_lr, self.other_lr, torch.__version__)
        loop = (spec, pl_module.rollout.temperature, pl_module.seed)  # equal weights can belong to unequal specs, e.g. heads
        digest = hashlib.sha256(repr((settings, loop)).encode())
        digest.update(json.dumps([asdict(sample) for sample in samples]).encode())
        for key, tensor in trainable_state(model).items():
            digest.update(key.encode() + str(tuple(tensor.shape)).encode())
        for tensor in unsharded_state(model).values():
            digest.update(tensor.detach().float().cpu().numpy().tobytes())
        return digest.hexdigest()[:24]

    def _save(self, trainer: L.Trainer, model: nn.Module, path: Path) -> None:
        kept = trainable_state(model).keys()
        state = {key: value.contiguous().cpu() for key, value in unsharded_state(model).items() if key in kept}
        if trainer.is_global_zero:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(f".{os.getpid()}.partial")  # two runs may train the same weights at a time
            save_file(state, partial)
            partial.rename(path)
        trainer.strategy.barrier()
