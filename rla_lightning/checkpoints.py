"""What a checkpoint has to have in common with the run that reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from rla_lightning.types import ConfigError


def require_continues(
    checkpoint: Mapping[str, Any],
    own: Mapping[str, Tensor],
    trained: Sequence[str],
    seed: int,
    on_random_base: Sequence[str],
    is_training: bool,
) -> None:
    """Refuse a checkpoint that this run cannot go on from.

    Args:
        checkpoint: as it was saved; a strategy that has loaded the weights itself has taken them out.
        own: the weights that this run would save.
        trained: the models that this run trains.
        seed: of this run.
        on_random_base: the models that add adapters to random weights of the policy's, which no checkpoint has.
        is_training: an evaluation needs the same architecture only.

    Raises:
        ConfigError: with the first weight that differs, or the models, bases or seeds.
    """
    saved = checkpoint.get("state_dict", own)
    for name in sorted(own.keys() | saved.keys()):
        if name not in saved or name not in own:
            place = "the checkpoint" if name not in saved else "this model"
            raise ConfigError(f"the checkpoint is of another architecture: {place} has no {name}")
        if own[name].shape != saved[name].shape:
            shapes = f"{tuple(saved[name].shape)} in the checkpoint, {tuple(own[name].shape)} in this model"
            raise ConfigError(f"the checkpoint is of another architecture: {name} is {shapes}")
    for name in sorted(set(on_random_base).symmetric_difference(checkpoint.get("on_random_base", ()))):
        was = "own" if name in on_random_base else "policy"
        raise ConfigError(f"the checkpoint's adapters of the {name} belong to other random weights: model.{name}.base was {was}")
    earlier = checkpoint["optimizers_of"]
    if is_training and list(earlier) != list(trained):
        now = ", ".join(trained) or "nothing"
        raise ConfigError(f"the checkpoint trained {', '.join(earlier)}; this run would train {now}")
    if is_training and checkpoint["seed"] != seed:
        raise ConfigError(f"the checkpoint is of a run with seed_everything {checkpoint['seed']}, this run has {seed}")
