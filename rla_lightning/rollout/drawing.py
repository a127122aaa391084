"""Draw tokens from logits: temperature, filters, inverse CDF."""

from __future__ import annotations

import torch
from torch import Tensor

from rla_lightning.types import SamplingParams


def draw(logits: Tensor, uniform: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Tokens [B] by inverse CDF of `uniform` [B], and their log-probs [B] after temperature and filters.

    Greedy decoding (temperature 0) is a point mass: its log-probs are 0.
    """
    if params.temperature == 0:
        return logits.argmax(-1), torch.zeros(len(logits), device=logits.device)
    log_p = filter_logits(logits.float() / params.temperature, params.top_k, params.top_p).log_softmax(-1)
    cdf = log_p.exp().cumsum(-1)  # [B, V]
    total = cdf[:, -1]
    # Strictly below the total, so that the first entry above the target has positive probability.
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    token = torch.searchsorted(cdf, target[:, None], right=True)
    return token[:, 0], log_p.gather(1, token)[:, 0]


def filter_logits(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Logits [B, V] with -inf outside the k likeliest tokens, then outside the nucleus of mass top_p."""
    if 0 < top_k < logits.shape[-1]:
        threshold = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    if top_p < 1:
        p, order = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
        outside = p.cumsum(-1) - p >= top_p  # the mass before a token already reaches top_p
        outside[:, 0] = False
        logits = logits.masked_fill(torch.zeros_like(outside).scatter_(1, order, outside), -torch.inf)
    return logits
