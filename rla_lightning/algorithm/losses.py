"""Losses of the three models on padded batches: B sequences, T tokens, V vocabulary.

A loss is a sum over sequences divided by the number of samples of the WHOLE optimizer step, and metrics are sums and
counts, so that gradients and logged values do not depend on how that step is split into micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits


@dataclass(frozen=True)
class LossOutput:
    """A scalar to call backward on, and detached sums that add up over micro-batches."""

    loss: Tensor
    metrics: dict[str, Tensor]


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    denominator: float,
    clip_range: float = 0.2,
    kl_coef: float = 0.01,
    ent_coef: float = 0.0,
    entropy: Tensor | None = None,
    weights: Tensor | None = None,
) -> LossOutput:
    """Clipped policy-gradient loss with a k3 KL penalty to the policy before this iteration's update (paper, section 2).

        d = logp_new - logp_old,  r = exp(d),  k3 = exp(-d) - 1 + d
        l_bt = -min(r A_b, clip(r, 1 - clip_range, 1 + clip_range) A_b) + kl_coef k3 - ent_coef H_bt
        loss = 1 / denominator * sum_b w_b mean_{t in mask_b} l_bt

    The judge is trained with it too. A sequence whose mask is empty or whose weight is 0 (padding) contributes nothing to
    loss, gradient or metrics, whatever its other entries hold.

    Args:
        logprobs: [B, T] log-probs of the sampled tokens under the model being trained, in nats.
        old_logprobs: [B, T] the same before this iteration's first update; no gradient flows into it.
        advantages: [B] one for all tokens of a sequence.
        mask: [B, T] bool or 0/1, true on the tokens the model generated.
        denominator: number of samples in the whole optimizer step.
        clip_range: half-width of the interval around 1 outside which the ratio earns no further gain.
        kl_coef: weight of k3.
        ent_coef: weight of the entropy bonus.
        entropy: [B, T] in nats; required when ent_coef is not 0.
        weights: [B], default 1.

    Returns:
        The loss and sums over masked tokens: `approx_kl` (k3), `clip_fraction` (|r - 1| > clip_range), `tokens` (their
        number) and, when entropy is given, `entropy`.

    Raises:
        ValueError: shapes that differ, a denominator that is not positive, or ent_coef without entropy.
    """
    _check_shapes(logprobs.shape, old_logprobs=old_logprobs, mask=mask, entropy=entropy)
    _check_shapes(logprobs.shape[:1], advantages=advantages, weights=weights)
    _check_denominator(denominator)
    if ent_coef != 0.0 and entropy is None:
        raise ValueError(f"ent_coef is {ent_coef} but no entropy was given")
    if weights is None:
        weights = torch.ones_like(logprobs[:, 0])
    trained = mask.bool() & (weights != 0)[:, None]  # [B, T]
    # Filled before exp: padding may hold anything, and 0 * inf would be NaN in the loss and in the gradient.
    log_ratio = (logprobs - old_logprobs.detach()).masked_fill(~trained, 0.0)
    ratio = log_ratio.exp()
    advantage = advantages.to(logprobs.dtype)[:, None]  # [B, 1]
    gain = torch.minimum(ratio * advantage, ratio.clamp(1.0 - clip_range, 1.0 + clip_range) * advantage)
    k3 = torch.exp(-log_ratio) - 1.0 + log_ratio
    token_loss = -gain + kl_coef * k3  # [B, T]
    metrics = {
        "approx_kl": k3.sum(),
        "clip_fraction": ((ratio - 1.0).abs() > clip_range).sum(),
        "tokens": trained.sum(),
    }
    if entropy is not None:
        entropy = entropy.masked_fill(~trained, 0.0)
        token_loss = token_loss - ent_coef * entropy
        metrics["entropy"] = entropy.sum()
    tokens = trained.sum(dim=1).clamp(min=1)  # [B]
    sequence_loss = token_loss.masked_fill(~trained, 0.0).sum(dim=1) / tokens
    loss = (sequence_loss * weights.to(logprobs.dtype)).sum() / denominator
    return LossOutput(loss, {name: value.detach() for name, value in metrics.items()})


def value_loss(logits: Tensor, outcomes: Tensor, *, denominator: float, weights: Tensor | None = None) -> LossOutput:
    """Binary cross-entropy of the critic's success probability with the verified outcome.

        p_b = sigmoid(logit_b),  y_b = (O_b + 1) / 2
        loss = -1 / denominator * sum_b w_b (y_b log p_b + (1 - y_b) log(1 - p_b))

    A sample of weight 0 (padding) contributes nothing to loss, gradient or metrics.

    Args:
        logits: [B] log-odds of success.
        outcomes: [B] in {+1, -1}.
        denominator: number of samples in the whole optimizer step.
        weights: [B], default 1.

    Returns:
        The loss in nats and the sums `brier` ((p - y)^2) and `samples` (their number).

    Raises:
        ValueError: shapes that differ, a denominator that is not positive, or an outcome other than +1 and -1.
    """
    _check_shapes(logits.shape, outcomes=outcomes, weights=weights)
    _check_denominator(denominator)
    if weights is None:
        weights = torch.ones_like(logits)
    is_padding = weights == 0
    wrong = outcomes[(outcomes.abs() != 1) & ~is_padding]
    if len(wrong) > 0:
        raise ValueError(f"an outcome is +1 or -1, got {wrong[0].item()}")
    logits = logits.masked_fill(is_padding, 0.0)
    target = (outcomes > 0).to(logits.dtype)
    nll = binary_cross_entropy_with_logits(logits, target, reduction="none")  # [B]
    loss = (nll * weights.to(logits.dtype)).sum() / denominator
    squared_error = (logits.detach().sigmoid() - target).square().masked_fill(is_padding, 0.0)
    return LossOutput(loss, {"brier": squared_error.sum(), "samples": (~is_padding).sum()})


def token_logprobs(
    logits: Tensor, targets: Tensor, *, temperature: float, with_entropy: bool = False, entropy_gradient: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of given tokens at the sampling temperature and, if asked, the entropy there; computed in float32.

        z = logits / temperature,  logp = z[target] - logsumexp_v z[v],  H = logsumexp_v z[v] - sum_v p[v] z[v]

    Args:
        logits: [..., V], finite.
        targets: [...] token ids.
        temperature: > 0; the one the tokens were sampled at, otherwise the ratio is not 1 before the first update.
        with_entropy: also return the entropy.
        entropy_gradient: whether a gradient flows into it.

    Returns:
        [...] float32 in nats, and likewise the entropy or None.

    Raises:
        ValueError: a temperature that is not positive.
    """
    if not temperature > 0.0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    z = logits.float() if temperature == 1.0 else logits.float() / temperature
    normaliser = z.logsumexp(-1)
    chosen = z.gather(-1, targets[..., None])[..., 0] - normaliser
    if not with_entropy:
        return chosen, None
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        probabilities = (z - normaliser[..., None]).exp_()  # in place: [..., V] is large
        return chosen, normaliser - torch.linalg.vecdot(probabilities, z)


def _check_shapes(expected: torch.Size, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != expected:
            raise ValueError(f"{name} must have shape {tuple(expected)}, got {tuple(tensor.shape)}")


def _check_denominator(denominator: float) -> None:
    if not denominator > 0:
        raise ValueError(f"denominator must be positive, got {denominator}")
