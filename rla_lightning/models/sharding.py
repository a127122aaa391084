"""Shard a model over processes with FSDP2, and copy its weights out again.

Everything here that reads sharded weights is collective: every rank must make the same calls in the
same order. Generation never runs on the sharded model (it gathers every layer for every token, and
hangs when ranks finish at different lengths); it runs on an unsharded replica kept up to date with
`sync_replica`.
"""

from __future__ import annotations

from collections.abc import Iterator
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rla_lightning.models.language_model import trainable_state

_COMPLETE: WeakKeyDictionary[nn.Module, ref[nn.Module]] = WeakKeyDictionary()  # replicas that have every weight of a model


def shard(model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None = None) -> nn.Module:
    """Shard each transformer block, then the rest, in place; a sharded model is left as it is.

    Call the sharded model only through its own forward: its submodules' weights are gathered by hooks.

    Args:
        mesh: one-dimensional, e.g. `device_mesh["data_parallel"]`.
        dtype: to compute in; None computes in the weights' own. Gradients are reduced in float32.
    """
    if isinstance(model, FSDPModule):
        return model
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in decoder_blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    # Tied embeddings stay tied: both uses belong to the root. By default the root stays gathered after a forward
    # without a backward, and its parameters are then plain tensors whose storage is later freed.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    return model


def decoder_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The transformer blocks: the elements of the outermost ModuleLists that hold weights."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from (block for block in child if any(True for _ in block.parameters()))
        else:
            yield from decoder_blocks(child)


def unsharded_state(model: nn.Module) -> dict[str, Tensor]:
    """Every weight and persistent buffer in full, on every rank."""
    return {name: _full(tensor).detach() for name, tensor in model.state_dict().items()}


@torch.no_grad()
def sync_replica(replica: nn.Module, model: nn.Module) -> None:
    """Copy the weights of a sharded (or plain) model into an equal unsharded one.

    The first call copies every weight, later ones only those that `trainable_state` names, so that
    a LoRA model sends adapters alone. One weight is gathered at a time.
    """
    known = _COMPLETE.get(replica)
    if known is not None and known() is model:
        source, target = trainable_state(model), trainable_state(replica)
    else:
        source, target = _tensors(model), _tensors(replica)
    different = sorted(source.keys() ^ target.keys())
    if different:
        raise ValueError(f"the replica is not a copy of the model: only one of them has {different[0]!r}")
    for name, tensor in source.items():
        target[name].copy_(_full(tensor))
    _COMPLETE[replica] = ref(model)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
