"""Samples to padded tensors. What is trained on comes from positions, never from `ids != pad`.

B rows of T tokens are fed to the model; N samples with at most R response tokens each lie in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Self

import numpy as np
import torch
from torch import Tensor

from rla_lightning.rollout.prefix_tree import Row, prefix_rows
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
        return replace(self, **{f.name: v.to(device) for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)})


@dataclass(frozen=True)
class MicroBatch(_Tensors):
    """Rows of samples that may share prefixes, padded on the right.

    A response token is predicted at the token before it. Each pair of such a place and token is computed once, though
    several samples may have it; the last token of a response is not fed unless something follows it.
    """

    input_ids: Tensor  # [B, T]
    position_ids: Tensor  # [B, T]
    subtree_ends: Tensor | None  # [B, T] which tokens see a token: those up to here; None where all after it do
    places: Tensor  # [P] index into the B * T tokens of each distinct prediction
    targets: Tensor  # [P] what is to be predicted there
    predictions: Tensor  # [N, R] the one of each response token, 0 for padding
    response_mask: Tensor  # [N, R] float
    advantages: Tensor  # [N]
    weights: Tensor  # [N]
    tokens: int  # that are fed, without padding

    @property
    def response_ids(self) -> Tensor:
        """[N, R], anything where padded."""
        return self.targets[self.predictions]


@dataclass(frozen=True)
class ValueBatch(_Tensors):
    """Right-padded states with the outcomes that a value model predicts."""

    input_ids: Tensor  # [B, T]
    attention_mask: Tensor  # [B, T]
    outcomes: Tensor  # [B]
    weights: Tensor  # [B]


def pack(samples: Sequence[Sample], token_budget: int, width: int | None = None) -> list[list[Row]]:
    """The rows of each micro-batch, shortest first; `Row.sequences` are indices of samples.

    Padded, a micro-batch has at most `token_budget` tokens; a single longer row stands alone. Rows in which prefixes are
    shared by branches need an attention mask and are kept apart from those that do not.

    Args:
        samples: with prompts of at least one token.
        token_budget: of a micro-batch.
        width: of the model, where it can share prefixes.
    """
    for index, sample in enumerate(samples):
        if not sample.prompt_ids:
            raise ConfigError(f"sample {index} has an empty prompt")
    rows = prefix_rows([(*s.prompt_ids, *s.response_ids[:-1]) for s in samples], width, token_budget)
    batches = []
    for is_chain in (True, False):
        alike = [row for row in rows if row.is_chain == is_chain]
        lengths = np.array([[len(row.tokens)] for row in alike]).reshape(-1, 1)
        batches += [[alike[i] for i in chosen] for chosen in split_by_budget(lengths, token_budget)]
    return batches


def split_by_budget(lengths: np.ndarray, token_budget: int) -> list[list[int]]:
    """Indices [micro-batch][row] for rows of `lengths` [N, parts], each part padded on its own, shortest first."""
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


def make_micro_batch(samples: Sequence[Sample], rows: Sequence[Row], pad_id: int) -> tuple[MicroBatch, list[int]]:
    """One padded micro-batch of rows that `pack` made of the samples, and the indices of its N samples in their order."""
    if len(rows) == 0:
        raise ConfigError("a batch needs at least one sequence")
    width = max(len(row.tokens) for row in rows)
    input_ids = np.full((len(rows), width), pad_id, dtype=np.int64)
    positions = np.tile(np.arange(width), (len(rows), 1))
    ends = np.tile(np.arange(1, width + 1), (len(rows), 1))  # padding is seen by itself alone
    for b, row in enumerate(rows):
        length = len(row.tokens)
        input_ids[b, :length], positions[b, :length], ends[b, :length] = row.tokens, row.depths, row.ends

    chosen = [index for row in rows for index in row.sequences]
    paths = [path + b * width for b, row in enumerate(rows) for path in row.paths]
    responses = [samples[index].response_ids for index in chosen]
    _, mask = _pad(responses, pad_id)
    before = [path[len(path) - len(response) :] for path, response in zip(paths, responses, strict=True)]
    pairs = np.concatenate(before) << 32 | np.fromiter(chain.from_iterable(responses), dtype=np.int64)  # place, token
    if len(pairs) == 0:  # nothing to predict: the mask is empty, too
        pairs = np.zeros(1, dtype=np.int64)
    distinct, inverse = np.unique(pairs, return_inverse=True)
    predictions = np.zeros(mask.shape, dtype=np.int64)
    predictions[mask] = inverse[: mask.sum()]
    batch = MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(positions),
        subtree_ends=None if all(row.is_chain for row in rows) else torch.from_numpy(ends),
        places=torch.from_numpy(distinct >> 32),
        targets=torch.from_numpy(distinct & 0xFFFFFFFF),
        predictions=torch.from_numpy(predictions),
        response_mask=torch.from_numpy(mask.astype(np.float32)),
        advantages=torch.tensor([samples[index].advantage for index in chosen], dtype=torch.float32),
        weights=torch.tensor([samples[index].weight for index in chosen], dtype=torch.float32),
        tokens=sum(len(row.tokens) for row in rows),
    )
    return batch, chosen


def batch_of(samples: Sequence[Sample], pad_id: int, width: int | None = None) -> MicroBatch:
    """All samples in one micro-batch, in their order, whatever its size."""
    rows = prefix_rows([(*s.prompt_ids, *s.response_ids[:-1]) for s in samples], width, sum(map(_length, samples)))
    batch, chosen = make_micro_batch(samples, rows, pad_id)
    order = torch.from_numpy(np.argsort(chosen))
    rows_of_samples = ("predictions", "response_mask", "advantages", "weights")
    return replace(batch, **{name: getattr(batch, name)[order] for name in rows_of_samples})


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
    input_ids, mask = _pad(prompts, pad_id)
    return ValueBatch(
        input_ids=torch.from_numpy(input_ids),
        attention_mask=torch.from_numpy(mask.astype(np.int64)),
        outcomes=torch.tensor(list(outcomes), dtype=torch.float32),
        weights=torch.tensor(list(weights), dtype=torch.float32),
    )


def _length(sample: Sample) -> int:
    return len(sample.prompt_ids) + len(sample.response_ids)


def _pad(sequences: Sequence[Sequence[int]], pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Right-padded ids [B, W] and a boolean mask [B, W]."""
    if len(sequences) == 0:
        raise ConfigError("a batch needs at least one sequence")
    lengths = np.array([len(sequence) for sequence in sequences])
    width = max(1, int(lengths.max()))
    mask = np.arange(width) < lengths[:, None]
    ids = np.full((len(sequences), width), pad_id, dtype=np.int64)
    ids[mask] = np.fromiter(chain.from_iterable(sequences), dtype=np.int64, count=int(lengths.sum()))
    return ids, mask
