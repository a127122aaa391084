"""The updates of policy, reward model and critic, all by one loop."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import lightning as L
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn

from rla_lightning.algorithm.losses import LossOutput, policy_loss, value_loss
from rla_lightning.distributed import sum_over_ranks, world_size
from rla_lightning.models.sharding import full_tensor
from rla_lightning.rollout.scorer import Scorer
from rla_lightning.settings import ClippedUpdateSettings, UpdateSettings
from rla_lightning.updates import Piece, ValuePiece

AnyPiece = TypeVar("AnyPiece", Piece, ValuePiece)


def update_language_model(
    module: L.LightningModule,
    name: str,
    model: Scorer,
    optimizer: LightningOptimizer,
    steps: Sequence[Sequence[Piece]],
    settings: ClippedUpdateSettings,
    temperature: float,
) -> dict[str, float]:
    """Clipped policy-gradient update of the policy or the reward model; the sums of `optimize`."""
    with torch.no_grad():  # by the forward pass of below at the same shapes; the first step's are its own
        old = {id(piece): model(piece.batch, temperature)[0] for step in steps[1:] for piece in step}

    def loss(piece: Piece) -> LossOutput:
        batch = piece.batch
        logprobs, entropy = model(batch, temperature, with_entropy=True, entropy_gradient=settings.ent_coef > 0)
        output = policy_loss(
            logprobs,
            old.setdefault(id(piece), logprobs.detach()),
            batch.advantages,
            batch.response_mask,
            denominator=piece.denominator,
            clip_range=settings.clip_range,
            kl_coef=settings.kl_coef,
            ent_coef=settings.ent_coef,
            entropy=entropy,
            weights=batch.weights,
        )
        gap = ((old[id(piece)] - piece.sampler_logprobs).abs() * batch.response_mask).sum()
        return LossOutput(output.loss, {**output.metrics, "sampler_gap": gap})

    return optimize(module, name, optimizer, steps, loss, settings, settings.target_kl)


def update_value_model(
    module: L.LightningModule,
    model: nn.Module,
    optimizer: LightningOptimizer,
    steps: Sequence[Sequence[ValuePiece]],
    settings: UpdateSettings,
) -> dict[str, float]:
    """Fit the predicted success to the verified outcomes; the sums of `optimize`."""

    def loss(piece: ValuePiece) -> LossOutput:
        batch = piece.batch
        logits = model(batch.input_ids, batch.attention_mask)
        return value_loss(logits, batch.outcomes, denominator=piece.denominator, weights=batch.weights)

    return optimize(module, "critic", optimizer, steps, loss, settings)


def optimize(
    module: L.LightningModule,
    name: str,
    optimizer: LightningOptimizer,
    steps: Sequence[Sequence[AnyPiece]],
    loss_fn: Callable[[AnyPiece], LossOutput],
    settings: UpdateSettings,
    target_kl: float | None = None,
) -> dict[str, float]:
    """Take one optimizer step per element of `steps`, `settings.update_epochs` times over.

    Args:
        module: runs the backward pass, so that any Lightning strategy and precision works.
        name: of the model, for messages.
        steps: this rank's forward passes of each optimizer step; every rank gives as many.
        loss_fn: its loss is this rank's part of the step's loss, its metrics are sums.

    Returns:
        Sums over steps and ranks of the metrics and of `loss`, with `grad_norm` (sum over steps, before clipping),
        `optimizer_steps`, `stopped_early` when a step saw a mean KL above `target_kl`, and `max_kl`, the largest mean KL
        of a step (that of a step which ended the update is in here only).

    Raises:
        FloatingPointError: a loss or gradient is not finite; no step is taken on it and the tasks are named.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    totals: Counter[str] = Counter(optimizer_steps=0, grad_norm=0, stopped_early=0)
    largest_kl = 0.0
    module.toggle_optimizer(optimizer)
    try:
        for step in [step for _ in range(settings.update_epochs) for step in steps]:
            optimizer.zero_grad()
            sums, suspects = _backward(module, step, loss_fn)
            reduced = sum_over_ranks(sums, module.device)
            kl = reduced.get("approx_kl", 0.0) / max(reduced.get("tokens", 0), 1)
            largest_kl = max(largest_kl, kl)
            if target_kl is not None and kl > target_kl:
                totals["stopped_early"] += 1
                break
            if reduced.get("tokens", reduced.get("samples")) == 0:  # an optimizer with momentum would still move
                warnings.warn(f"a step of the {name} update has no token to train on: {_tasks(step)}", stacklevel=2)
                continue
            norm = float(full_tensor(nn.utils.clip_grad_norm_(parameters, settings.max_grad_norm)))
            if not (math.isfinite(reduced["loss"]) and math.isfinite(norm)):
                raise FloatingPointError(
                    f"the {name} update is not finite (loss {reduced['loss']}, gradient norm {norm}); "
                    f"tasks: {_tasks(suspects or step)}"
                )
            optimizer.step()
            totals.update(reduced)
            totals.update({"grad_norm": norm, "optimizer_steps": 1})
    finally:
        optimizer.zero_grad()
        module.untoggle_optimizer(optimizer)
    return {**totals, "max_kl": largest_kl}


def averages(sums: Mapping[str, float]) -> dict[str, float]:
    """What is logged of the sums that `optimize` returns: per optimizer step, per token or per sample."""
    steps, tokens, samples = (max(sums.get(name, 0), 1) for name in ("optimizer_steps", "tokens", "samples"))
    per_token = {n: sums[n] / tokens for n in ("approx_kl", "clip_fraction", "entropy", "sampler_gap") if n in sums}
    if per_token:
        per_token["max_kl"] = sums["max_kl"]
    per_sample = {f"train_{n}": sums[n] / samples for n in ("brier",) if n in sums}
    return {
        "loss": sums.get("loss", 0.0) / steps,
        "grad_norm": sums["grad_norm"] / steps,
        "optimizer_steps": sums["optimizer_steps"],
        "stopped_early": sums["stopped_early"],
        **per_token,
        **per_sample,
    }


def _backward(
    module: L.LightningModule, step: Sequence[AnyPiece], loss_fn: Callable[[AnyPiece], LossOutput]
) -> tuple[dict[str, Tensor], list[AnyPiece]]:
    """Gradients of one optimizer step; the sums of its metrics and the pieces with a loss that is not finite."""
    sums: dict[str, Tensor] = {}
    suspects: list[AnyPiece] = []
    for piece in step:
        output = loss_fn(piece)
        module.manual_backward(output.loss * world_size())  # sharded gradients are averaged over ranks
        for metric, value in {"loss": output.loss.detach(), **output.metrics}.items():
            sums[metric] = sums.get(metric, torch.zeros((), dtype=torch.float64)) + value.cpu().double()
        if not torch.isfinite(output.loss):
            suspects.append(piece)
    return sums, suspects


def _tasks(pieces: Sequence[AnyPiece]) -> str:
    return ", ".join(dict.fromkeys(task for piece in pieces for task in piece.task_ids))
