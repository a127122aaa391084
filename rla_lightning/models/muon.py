"""Muon for the matrices inside the blocks, AdamW for the rest: tiny models' warm start."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import AdamW, Optimizer

from rla_lightning.models.sharding import decoder_blocks, full_tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration (kellerjordan.github.io/posts/muon)


class Muon(Optimizer):
    """Momentum whose matrices are orthogonalised (kellerjordan.github.io/posts/muon), all of one shape at a time.

    The same steps as torch.optim.Muon without weight decay, but in float32 and batched: that one orthogonalises one matrix after
    the other in bfloat16, which took half of an update of 21 small matrices on a CPU, and differs between one process and two.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.02, momentum: float = 0.95, iterations: int = 5) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "iterations": iterations})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            of_shape: defaultdict[torch.Size, list[tuple[nn.Parameter, Tensor]]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                momentum = state.setdefault("momentum_buffer", torch.zeros_like(parameter))
                momentum.lerp_(parameter.grad, 1 - group["momentum"])
                update = parameter.grad.lerp(momentum, group["momentum"])  # Nesterov
                of_shape[parameter.shape].append((parameter, full_tensor(update).float()))
            for shape, items in of_shape.items():
                directions = orthogonal(torch.stack([update for _, update in items]), group["iterations"])
                rate = group["lr"] * sqrt(max(1.0, shape[0] / shape[1]))
                for (parameter, _), direction in zip(items, directions, strict=True):
                    parameter.add_(_like(direction, parameter), alpha=-rate)


def orthogonal(matrices: Tensor, iterations: int) -> Tensor:
    """U V^T of each matrix [B, rows, columns], its singular values within about .7 and 1.2 of 1 (Newton-Schulz)."""
    a, b, c = COEFFICIENTS
    x = matrices.mT if matrices.shape[1] > matrices.shape[2] else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if matrices.shape[1] > matrices.shape[2] else x


def _like(direction: Tensor, parameter: Tensor) -> Tensor:
    direction = direction.to(parameter.dtype)
    if not isinstance(parameter, DTensor):
        return direction
    return distribute_tensor(direction, parameter.device_mesh, parameter.placements, src_data_rank=None)


def muon_and_adamw(
    model: nn.Module, muon_lr: float = 0.02, lr: float = 3e-3, betas: tuple[float, float] = (0.9, 0.99)
) -> list[Optimizer]:
    """The optimizers of one model's trainable weights, without weight decay; step them together.

    Embeddings, heads, norms and biases go to AdamW, as Muon's author recommends. A list because Muon takes matrices only, and
    one optimizer given bare parameters could not tell an embedding from a matrix.

    Args:
        muon_lr: for matrices inside transformer blocks, whose updates are orthogonalised.
        lr: for everything else.
        betas: of AdamW.
    """
    blocks = {parameter for block in decoder_blocks(model) for parameter in block.parameters()}
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trainable if parameter.ndim == 2 and parameter in blocks]
    others = [parameter for parameter in trainable if parameter.ndim != 2 or parameter not in blocks]
    optimizers: list[Optimizer] = []
    if matrices:
        optimizers.append(Muon(matrices, lr=muon_lr))
    if others:
        optimizers.append(AdamW(others, lr=lr, betas=betas, weight_decay=0.0))
    return optimizers
