"""How many parameters each model has, and whose they are."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class ModelSize:
    """Parameters of a model."""

    trained: int
    frozen: int
    shared: int  # with a model before it, whose they count as
    bytes: int  # of trained and frozen ones; of all processes where they are sharded

    def __str__(self) -> str:
        own = f"{self.trained:,} parameters trained, {self.frozen:,} frozen ({self.bytes / 2**20:,.1f} MiB)"
        return f"{own}, {self.shared:,} shared"


def model_sizes(models: Mapping[str, nn.Module], trained: Collection[str]) -> dict[str, ModelSize]:
    """The size of each model, without copies to sample from, gradients and optimizers.

    Args:
        trained: the names of those that have an optimizer.
    """
    seen: set[nn.Parameter] = set()
    sizes: dict[str, ModelSize] = {}
    for name, model in models.items():
        own = [parameter for parameter in model.parameters() if parameter not in seen]
        learning = sum(p.numel() for p in own if p.requires_grad) if name in trained else 0
        total = sum(p.numel() for p in own)
        shared = sum(p.numel() for p in model.parameters()) - total
        sizes[name] = ModelSize(learning, total - learning, shared, sum(p.numel() * p.element_size() for p in own))
        seen.update(own)
    return sizes
