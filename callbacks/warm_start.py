"""Supervised start of tiny models, before the loop: noisy demonstrations and noisy step labels."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import lightning as L
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from rla_lightning.environments.base import Environment, Episode
from rla_lightning.models.language_model import load_trainable_state, trainable_state
from rla_lightning.models.muon import muon_and_adamw
from rla_lightning.models.sharding import unsharded_state
from rla_lightning.module import ClosedLoop
from rla_lightning.rollout.batching import Sample, make_micro_batch
from rla_lightning.rollout.logprobs import response_logprobs
from rla_lightning.rollout.players import Players
from rla_lightning.types import ConfigError, ExpertAction, Observation, StepLabel, Task

logger = logging.getLogger(__name__)

FORMAT = 1  # of the cache; raise it when training changes


@dataclass(frozen=True)
class Lessons:
    """What the models are taught."""

    policy: tuple[Sample, ...]
    judge: tuple[Sample, ...]


class WarmStart(L.Callback):
    """Teaches tiny random models enough to explore, from an expert whose answers are partly random.

    Does nothing when a run resumes. The result is cached by everything it depends on.

    Args:
        episodes: played to make the lessons.
        policy_updates: optimizer steps of the policy; 0 leaves it as it is.
        judge_updates: optimizer steps of the reward model; 0 leaves it as it is.
        batch_size: samples per optimizer step.
        action_noise: share of demonstrated actions that are a random admissible command instead.
        label_noise: share of step labels that are flipped.
        detour_rate: share of the episodes' actions that are a random admissible command.
        invalid_rate: share of the episodes' actions that are not admissible, so that the judge has seen such.
        matrix_lr: peak learning rate of Muon on weight matrices.
        other_lr: peak learning rate of AdamW on the other weights and the embeddings.
        cache: folder of earlier results; null trains anew.
    """

    def __init__(
        self,
        episodes: int = 2000,
        policy_updates: int = 600,
        judge_updates: int = 600,
        batch_size: int = 64,
        action_noise: float = 0.3,
        label_noise: float = 0.25,
        detour_rate: float = 0.3,
        invalid_rate: float = 0.1,
        matrix_lr: float = 0.02,
        other_lr: float = 3e-3,
        cache: Path | None = Path("runs/.warm_start"),
    ) -> None:
        for name, value in (("episodes", episodes), ("batch_size", batch_size)):
            if value < 1:
                raise ConfigError(f"WarmStart.{name} must be at least 1, got {value}")
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
        lessons = self.lessons(pl_module.players, datamodule.difficulty, datamodule.pool.held_out, pl_module.seed)
        for name, samples, updates in (
            ("policy", lessons.policy, self.policy_updates),
            ("reward_model", lessons.judge, self.judge_updates),
        ):
            if updates > 0:
                self._teach(trainer, pl_module, name, samples, updates)
        pl_module.sync_players()

    def lessons(self, players: Players, difficulty: tuple[float, float], held_out: frozenset[str], seed: int) -> Lessons:
        """Samples of noisy demonstrations and noisy step labels, from in-domain tasks that are not held out."""
        environment = players.environment
        policy: list[Sample] = []
        judge: list[Sample] = []
        for index in range(self.episodes):
            rng = Random(f"{seed}/warm start/{index}")
            task = environment.sample(rng, rng.uniform(*difficulty))
            if task.id not in held_out and environment.validate(task) is None:
                self._play(players, task, rng, policy, judge)
        return Lessons(tuple(policy), tuple(judge))

    def _play(self, players: Players, task: Task, rng: Random, policy: list[Sample], judge: list[Sample]) -> None:
        """One episode: the expert demonstrates at every state, detours lead to states it would not see."""
        environment, formats = players.environment, players.formats
        tokenizer, judge_tokenizer = players.policy.tokenizer, players.reward_model.tokenizer
        episode = environment.start(task)
        history: list[tuple[Observation, str]] = []
        for _ in range(episode.max_turns):
            observation = episode.observation
            expert = environment.expert(episode, rng)
            if expert is None:
                raise ConfigError(f"environment {environment.name!r} has no expert: remove WarmStart or give model paths")
            shown = expert
            if observation.commands and rng.random() < self.action_noise:
                shown = ExpertAction(rng.choice(observation.commands), expert.thought)
            prompt = formats.policy.prompt(tokenizer, history, observation)
            policy.append(Sample(prompt, formats.policy.answer(tokenizer, observation, shown), 1.0))
            action, raw_text = self._executed(players, expert, history, observation, rng)
            label = self._noisy_label(environment, episode, action, rng)
            transition = episode.step(action)
            judge_prompt = formats.judge.prompt(
                judge_tokenizer, history, observation, action, raw_text, bool(action), transition.observation.text
            )
            judge.append(Sample(judge_prompt, formats.judge.answer(judge_tokenizer, label), 1.0))
            history.append((observation, action))
            if transition.done:
                return

    def _executed(
        self,
        players: Players,
        expert: ExpertAction,
        history: Sequence[tuple[Observation, str]],
        observation: Observation,
        rng: Random,
    ) -> tuple[str, str]:
        """The action that is taken ("" when it is not admissible) and the answer that led to it."""
        draw = rng.random()
        stale = [(o, c) for o, _ in history for c in o.commands if c not in observation.commands]
        chosen, shown_in = expert, observation
        if draw < self.invalid_rate and stale:
            shown_in, command = rng.choice(stale)  # was possible earlier in this episode, is not now
            chosen = ExpertAction(command, expert.thought)
        elif draw < self.invalid_rate + self.detour_rate and observation.commands:
            chosen = ExpertAction(rng.choice(observation.commands), expert.thought)
        tokenizer = players.policy.tokenizer
        answer = players.formats.policy.answer(tokenizer, shown_in, chosen)
        raw_text = str(tokenizer.decode(list(answer), skip_special_tokens=True))
        return ("" if shown_in is not observation else chosen.action), raw_text

    def _noisy_label(self, environment: Environment, episode: Episode, action: str, rng: Random) -> StepLabel:
        label = environment.label_step(episode, action)
        if label is None:
            raise ConfigError(f"environment {environment.name!r} has no step labels: set WarmStart.judge_updates to 0")
        if rng.random() >= self.label_noise:
            return label
        return StepLabel(-label.score, label.critique)

    def _teach(self, trainer: L.Trainer, pl_module: ClosedLoop, name: str, samples: Sequence[Sample], updates: int) -> None:
        model = getattr(pl_module, name)
        path = None if self.cache is None else self.cache / f"{name}-{self._fingerprint(model, samples, updates)}.safetensors"
        if path is not None and path.is_file():
            load_trainable_state(model, load_file(path))
            logger.info("warm start of %s from %s", name, path)
            return
        temperature = pl_module.rollout.temperature
        pad_id = getattr(pl_module.players, name).tokenizer.pad_token_id
        optimizers = muon_and_adamw(model, self.matrix_lr, self.other_lr)
        peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
        rng = Random(f"{pl_module.seed}/warm start/{name}")
        for update in range(updates):
            for optimizer, rates in zip(optimizers, peaks, strict=True):
                for group, peak in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = peak * 0.5 * (1 + math.cos(math.pi * update / updates))
            batch = make_micro_batch([samples[rng.randrange(len(samples))] for _ in range(self.batch_size)], pad_id)
            batch = batch.to(pl_module.device)
            logprobs, _ = response_logprobs(model, batch, temperature)
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

    def _fingerprint(self, model: nn.Module, samples: Sequence[Sample], updates: int) -> str:
        """Of all that the result depends on: data, initial weights, settings, torch's version."""
        settings = (FORMAT, updates, self.batch_size, self.matrix_lr, self.other_lr, torch.__version__)
        digest = hashlib.sha256(repr(settings).encode())
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
            partial = path.with_suffix(".partial")
            save_file(state, partial)
            partial.rename(path)
        trainer.strategy.barrier()
