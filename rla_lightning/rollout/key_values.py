"""What a model has read, for many conversations at once: rows that can be taken apart and put together again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer


def can_regroup(model: nn.Module) -> bool:
    """Whether every layer keeps all keys and values, and positions are given rather than counted by column.

    Windows and recurrent states cannot be moved between batches, nor rows that have gaps.
    """
    config: Any = model.config
    causal: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    takes_positions = "position_ids" in signature(causal.get_decoder().forward).parameters
    return takes_positions and all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)


class GrowingLayer(DynamicLayer):
    """Keys and values [R, H, W, D] at the start of a buffer that has room for more columns."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        self._buffers: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if self._buffers is None or self._buffers[0].shape[-2] < end:
            grown = _buffer(key_states, end + self.room), _buffer(value_states, end + self.room)
            if start:
                for old, new in zip((self.keys, self.values), grown, strict=True):
                    assert old is not None
                    new[..., :start, :] = old
            self._buffers = grown
        keys, values = self._buffers
        keys[..., start:end, :], values[..., start:end, :] = key_states, value_states
        self.keys, self.values = keys[..., :end, :], values[..., :end, :]
        return self.keys, self.values


def _buffer(like: Tensor, width: int) -> Tensor:
    return like.new_empty((*like.shape[:-2], width, like.shape[-1]))


@dataclass
class KeyValues:
    """R rows of at most W tokens; the last column is the last token of the row that was fed last."""

    cache: Cache
    valid: Tensor  # [R, W] bool: a token of the row, not padding

    @property
    def rows(self) -> int:
        return self.valid.shape[0]

    @property
    def width(self) -> int:
        return self.valid.shape[1]

    @classmethod
    def empty(cls, config: PretrainedConfig, rows: int, room: int | None, device: torch.device) -> KeyValues:
        """Nothing read yet.

        Args:
            config: of the model.
            rows: conversations.
            room: columns that will be added beyond the first feed; None for a model whose rows cannot be regrouped.
            device: of the model.
        """
        cache: Cache = DynamicCache(config=config)
        if room is not None:
            layers: list[Any] = [GrowingLayer(room) for _ in range(config.get_text_config().num_hidden_layers)]
            cache = Cache(layers=layers)
        return cls(cache, torch.zeros((rows, 0), dtype=torch.bool, device=device))


def gather(parts: Sequence[tuple[KeyValues, Tensor]], room: int) -> KeyValues:
    """Copies of rows, one part below the other, each row's tokens moved together at its right end.

    Args:
        parts: where from, and which rows of it [r] (any order, repeated or not).
        room: columns that will be added.
    """
    masks = [source.valid[rows] for source, rows in parts]
    lengths = torch.cat([mask.sum(1) for mask in masks])
    width = int(lengths.max())
    columns = [_in_order(mask, width) for mask in masks]
    layers: list[Any] = []
    for index in range(len(parts[0][0].cache.layers)):
        first: Any = parts[0][0].cache.layers[index]
        keys, values = (
            like.new_empty((len(lengths), like.shape[1], width + room, like.shape[3])) for like in (first.keys, first.values)
        )
        start = 0
        for (source, rows), chosen in zip(parts, columns, strict=True):
            old: Any = source.cache.layers[index]
            stop = start + len(rows)
            left = max(0, width - source.width)
            for target, kept in ((keys, old.keys), (values, old.values)):
                target[start:stop, :, :left] = 0  # masked, but 0 times what is not a number is none
                target[start:stop, :, left:width] = (
                    kept[..., left - width :, :].index_select(0, rows)
                    if chosen is None
                    else kept.transpose(1, 2)[rows[:, None], chosen].transpose(1, 2)
                )
            start = stop
        layer = GrowingLayer(room)
        layer.lazy_initialization(keys, values)
        layer._buffers = (keys, values)
        layer.keys, layer.values = keys[..., :width, :], values[..., :width, :]
        layers.append(layer)
    valid = torch.arange(width, device=lengths.device) >= (width - lengths)[:, None]
    return KeyValues(Cache(layers=layers), valid)


def _in_order(mask: Tensor, width: int) -> Tensor | None:
    """Columns [r, at most width] of each row: padding first, then its tokens; None where they are at the right end already."""
    if bool((mask[:, 1:] >= mask[:, :-1]).all()):
        return None
    return mask.to(torch.uint8).argsort(dim=1, stable=True)[:, -width:]
