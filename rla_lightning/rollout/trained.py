"""The three models as they are trained, and how the players get their weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from peft import PeftModel
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from rla_lightning.models.sharding import shard, shard_together, sync_replica, training_copies
from rla_lightning.models.specs import LanguageModelSpec, ValueModelSpec
from rla_lightning.rollout.players import Players
from rla_lightning.rollout.scorer import Scorer
from rla_lightning.types import ConfigError


@dataclass(frozen=True)
class TrainedModels:
    """The players' own models, or copies of them that are sharded or of another dtype."""

    policy: Scorer
    reward_model: nn.Module  # a Scorer, or empty: its weights are elsewhere or only the policy's base
    critic: nn.Module

    def update(self, players: Players, device: torch.device) -> None:
        """Act, judge and predict with the weights of now; nothing to do where the models themselves are used."""
        players.policy_sampler.update_weights(self.policy.model)
        if isinstance(self.reward_model, Scorer):
            players.judge_sampler.update_weights(self.reward_model.model)
        else:
            judge: nn.Module = players.reward_model.model
            judge.to(device)  # the base is there; each copy of its modules has buffers of its own
        if self.critic is not players.critic.model:
            sync_replica(players.critic.model.to(device), self.critic)


def trained_models(
    players: Players, policy: LanguageModelSpec, reward_model: LanguageModelSpec, critic: ValueModelSpec, mesh: DeviceMesh | None
) -> TrainedModels:
    """What to train, sharded if there is a mesh; models on one base stay on one."""
    if mesh is not None and (policy.compile or reward_model.compile):
        raise ConfigError("compile: true does not go with sharded models: set it to false for the policy and the reward model")
    specs: dict[str, LanguageModelSpec | ValueModelSpec] = {"policy": policy, "reward_model": reward_model, "critic": critic}
    played = {name: getattr(players, name).model for name in specs}
    if not reward_model.weights or (reward_model.base == "policy" and not isinstance(played["reward_model"], PeftModel)):
        del played["reward_model"]
    together = [name for name in played if name == "policy" or specs[name].base == "policy"]
    trained: dict[str, nn.Module] = {"reward_model": nn.Module()}
    for names in (together, *([name] for name in played if name not in together)):
        dtype = getattr(specs[names[0]], "sampling_dtype", None)  # the critic's is its own
        copies = training_copies([played[name] for name in names], mesh, dtype)
        models = [_trained(model, specs[name]) for name, model in zip(names, copies, strict=True)]
        if mesh is not None and len(models) > 1:
            shard_together(models, mesh)
        elif mesh is not None:
            shard(models[0], mesh)
        trained |= zip(names, models, strict=True)
    return TrainedModels(**trained)  # type: ignore[arg-type]


def _trained(model: nn.Module, spec: LanguageModelSpec | ValueModelSpec) -> nn.Module:
    return Scorer(model, spec.compile) if isinstance(spec, LanguageModelSpec) else model
