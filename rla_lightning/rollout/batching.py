"""Sequences to padded tensors. Masks come from positions, never from `ids != pad`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Self

import numpy as np
import torch
from torch import Tensor

from rla_lightning.types import ConfigError


@dataclass(frozen=True)
class Sample:
    """One response to train on."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    advantage: float
    weight: float = 1.0


@dataclass(frozen=True)
class _Tensors:
    def to(self, device: torch.device | str) -> Self:
        return replace(self, **{f.name: getattr(self, f.name).to(device) for f in fields(self)})


@dataclass(frozen=True)
class MicroBatch(_Tensors):
    """Left-padded prompts, then right-padded responses: all responses start in the same column.

    With `logits_to_keep = R + 1` a model's `logits[:, :-1]` are those of the response tokens.
    """

    input_ids: Tensor  # [B, T]
    attention_mask: Tensor  # [B, T]
    position_ids: Tensor  # [B, T]
    response_ids: Tensor  # [B, R], the last R columns of input_ids
    response_mask: Tensor  # [B, R] float
    advantages: Tensor  # [B]
    weights: Tensor  # [B]


@dataclass(frozen=True)
class ValueBatch(_Tensors):
    """Right-padded states with the outcomes that a value model predicts."""

    input_ids: Tensor  # [B, T]
    attention_mask: Tensor  # [B, T]
    outcomes: Tensor  # [B]
    weights: Tensor  # [B]


def micro_batches(samples: Sequence[Sample], token_budget: int) -> list[list[int]]:
    """Indices of the samples of each micro-batch, shortest first.

    The padded size of a micro-batch is at most `token_budget`; a single longer sample stands alone.
    """
    lengths = np.array([(len(s.prompt_ids), len(s.response_ids)) for s in samples]).reshape(-1, 2)
    return split_by_budget(lengths, token_budget)


def split_by_budget(lengths: np.ndarray, token_budget: int) -> list[list[int]]:
    """Indices [micro-batch][row] for rows of `lengths` [N, parts], each part padded on its own."""
    if token_budget < 1:
        raise ConfigError(f"the token budget of a micro-batch must be positive, got {token_budget}")
    order = np.argsort(lengths.sum(1), kind="stable")
    batches: list[list[int]] = []
    start = 0
    while start < len(order):
        most = max(1, token_budget // max(1, int(lengths[order[start]].sum())))  # none is shorter than the first
        widths = np.maximum.accumulate(lengths[order[start : start + most]], axis=0).sum(1)
        padded = widths * np.arange(1, len(widths) + 1)  # ascending
        size = max(1, int(np.searchsorted(padded, token_budget, side="right")))
        batches.append(order[start : start + size].tolist())
        start += size
    return batches


def make_micro_batch(samples: Sequence[Sample], pad_id: int) -> MicroBatch:
    """One padded micro-batch of the samples, in their order."""
    prompt_ids, prompt_mask = _pad([s.prompt_ids for s in samples], pad_id, left=True)
    response_ids, response_mask = _pad([s.response_ids for s in samples], pad_id, left=False)
    mask = np.concatenate([prompt_mask, response_mask], axis=1)
    input_ids = torch.from_numpy(np.concatenate([prompt_ids, response_ids], axis=1))
    return MicroBatch(
        input_ids=input_ids,
        attention_mask=torch.from_numpy(mask.astype(np.int64)),
        position_ids=torch.from_numpy(np.maximum(mask.cumsum(1) - 1, 0)),
        response_ids=input_ids[:, prompt_ids.shape[1] :],
        response_mask=torch.from_numpy(response_mask.astype(np.float32)),
        advantages=torch.tensor([s.advantage for s in samples], dtype=torch.float32),
        weights=torch.tensor([s.weight for s in samples], dtype=torch.float32),
    )


def zero_weight(micro_batch: MicroBatch) -> MicroBatch:
    """The same forward pass without any token to train on.

    Ranks must call a sharded model equally often; one that runs out of samples repeats this.
    """
    return replace(
        micro_batch,
        response_mask=torch.zeros_like(micro_batch.response_mask),
        advantages=torch.zeros_like(micro_batch.advantages),
        weights=torch.zeros_like(micro_batch.weights),
    )


def make_value_batch(
    prompts: Sequence[Sequence[int]], outcomes: Sequence[float], weights: Sequence[float], pad_id: int
) -> ValueBatch:
    """One right-padded batch of states for the value model."""
    if not len(prompts) == len(outcomes) == len(weights):
        raise ConfigError(f"{len(prompts)} prompts, {len(outcomes)} outcomes and {len(weights)} weights do not match")
    input_ids, mask = _pad(prompts, pad_id, left=False)
    return ValueBatch(
        input_ids=torch.from_numpy(input_ids),
        attention_mask=torch.from_numpy(mask.astype(np.int64)),
        outcomes=torch.tensor(list(outcomes), dtype=torch.float32),
        weights=torch.tensor(list(weights), dtype=torch.float32),
    )


def _pad(sequences: Sequence[Sequence[int]], pad_id: int, left: bool) -> tuple[np.ndarray, np.ndarray]:
    """Ids [B, W] and a boolean mask [B, W]."""
    if len(sequences) == 0:
        raise ConfigError("a batch needs at least one sequence")
    lengths = np.array([len(sequence) for sequence in sequences])
    width = max(1, int(lengths.max()))
    columns = np.arange(width)
    mask = columns >= (width - lengths)[:, None] if left else columns < lengths[:, None]
    ids = np.full((len(sequences), width), pad_id, dtype=np.int64)
    ids[mask] = np.fromiter(chain.from_iterable(sequences), dtype=np.int64, count=int(lengths.sum()))
    return ids, mask
