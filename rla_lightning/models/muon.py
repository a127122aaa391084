"""Muon for the matrices inside the blocks, AdamW for the rest: tiny models' warm start."""

from __future__ import annotations

from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from rla_lightning.models.sharding import decoder_blocks


def muon_and_adamw(
    model: nn.Module, muon_lr: float = 0.02, lr: float = 3e-3, betas: tuple[float, float] = (0.9, 0.99)
) -> list[Optimizer]:
    """The optimizers of one model's trainable weights, without weight decay; step them together.

    Embeddings, heads, norms and biases go to AdamW, as Muon's author recommends
    (kellerjordan.github.io/posts/muon). A list because torch's Muon takes matrices only, and one optimizer
    given bare parameters could not tell an embedding from a matrix.

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
        optimizers.append(Muon(matrices, lr=muon_lr, weight_decay=0.0))
    if others:
        optimizers.append(AdamW(others, lr=lr, betas=betas, weight_decay=0.0))
    return optimizers
