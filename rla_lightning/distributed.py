"""What the ranks of a multi-process run exchange; without process groups every function is the identity."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from rla_lightning.types import ConfigError

T = TypeVar("T")


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def share(items: Sequence[T]) -> list[T]:
    """This rank's part of a list that all ranks hold."""
    return list(items[rank() :: world_size()])


def unshare(mine: Sequence[T]) -> list[T]:
    """The whole list, in its order, on every rank, from each rank's `share`."""
    if world_size() == 1:
        return list(mine)
    parts: list[Any] = [None] * world_size()
    dist.all_gather_object(parts, list(mine))
    return [parts[index % len(parts)][index // len(parts)] for index in range(sum(map(len, parts)))]


@contextmanager
def failing_together() -> Iterator[None]:
    """Raise an error of one rank on all of them, so that none waits for ever; the body must not communicate."""
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    reports: list[Any] = [None if error is None else (isinstance(error, ConfigError), f"{type(error).__name__}: {error}")]
    if world_size() > 1:
        mine, reports = reports[0], [None] * world_size()
        dist.all_gather_object(reports, mine)
    if error is not None:
        raise error
    for failed, report in enumerate(reports):
        if report is not None:
            is_config_error, message = report
            raise (ConfigError if is_config_error else RuntimeError)(f"process {failed} failed: {message}")


def from_first(value: T) -> T:
    """What the first rank has, on every rank."""
    if world_size() == 1:
        return value
    box: list[Any] = [value]
    dist.broadcast_object_list(box)
    return box[0]


def sum_over_ranks(values: Mapping[str, float | Tensor], device: torch.device) -> dict[str, float]:
    """The sum of each value over the ranks; every rank must give the same keys."""
    stacked = torch.tensor([float(value) for value in values.values()], dtype=torch.float64)
    if world_size() > 1:
        stacked = stacked.to(device, torch.float64 if device.type == "cpu" else torch.float32)
        dist.all_reduce(stacked)
    return dict(zip(values, stacked.tolist(), strict=True))
