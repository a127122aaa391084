"""Shard a model over processes with FSDP2, and copy its weights out again.

Everything here that reads sharded weights is collective: every rank must make the same calls in the
same order. Generation never runs on the sharded model (it gathers every layer for every token, and
hangs when ranks finish at different lengths); it runs on an unsharded replica kept up to date with
`sync_replica`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary, ref

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from rla_lightning.models.language_model import trainable_state
from rla_lightning.models.specs import DType
from rla_lightning.models.value_model import ValueModel
from rla_lightning.types import ConfigError

_COMPLETE: WeakKeyDictionary[nn.Module, ref[nn.Module]] = WeakKeyDictionary()  # replicas that have every weight of a model


class ShardedStrategy(ModelParallelStrategy):
    """FSDP2 over all processes: `trainer.devices` and `trainer.num_nodes` alone decide how many."""

    def __init__(
        self,
        shard_size: int | Literal["node"] | None = None,
        save_distributed_checkpoint: bool = False,
        process_group_backend: str | None = None,
        timeout_minutes: float = 30,
    ) -> None:
        """Configure shards, checkpoints and communication.

        Args:
            shard_size: processes that share one copy of the weights; there are as many copies as it takes to use all
                processes ("hybrid sharding"). node: those of a node, so that only gradients travel between nodes;
                null: all.
            save_distributed_checkpoint: every process saves its shard into a folder, which needs this strategy to be
                loaded, with any number of processes; false gathers all weights in one file, which one process without it
                can load, too.
            process_group_backend: null chooses by device, nccl or gloo.
            timeout_minutes: after which a process gives up waiting for the others.
        """
        super().__init__(
            tensor_parallel_size=1,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timedelta(minutes=timeout_minutes),
        )
        self.shard_size = shard_size

    def _configure_launcher(self) -> None:
        self._shards()  # refuses a size before any process is started
        assert self.cluster_environment is not None
        try:  # Lightning asks only where it starts the processes itself
            self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        super()._configure_launcher()

    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()
        if (shards := self._shards()) < self.world_size:
            assert self.lightning_module is not None
            self._device_mesh = hybrid_mesh(self.root_device.type, self.world_size // shards, shards)
            self.lightning_module._device_mesh = self._device_mesh

    def _shards(self) -> int:
        """Of each copy of the weights."""
        processes = self.num_nodes * self.num_processes
        if self.shard_size is None:
            return processes
        size = self.num_processes if self.shard_size == "node" else self.shard_size
        if size < 1 or processes % size:
            raise ConfigError(f"trainer.strategy shard_size {size} does not divide {processes}, the number of processes")
        return size

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """In one file: as one process would save it.

        Lightning's own numbers the parameters of all optimizers through, which one process does not, and takes a step
        with an optimizer that has taken none.
        """
        if self._save_distributed_checkpoint:
            return super().optimizer_state(optimizer)
        content = optimizer.state_dict()
        content["state"] = {
            index: {name: full_tensor(value).cpu() if isinstance(value, Tensor) else value for name, value in state.items()}
            for index, state in content["state"].items()
        }
        return content

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """From one file: let the module compare the weights first, Lightning's hook comes when they are gone."""
        path = Path(self.broadcast(checkpoint_path))
        if not path.is_file():
            return super().load_checkpoint(path, weights_only)
        assert self.lightning_module is not None
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
        self.lightning_module.on_load_checkpoint(content)
        weights = content.pop("state_dict")
        with torch.no_grad():
            for name, tensor in self.lightning_module.state_dict().items():
                tensor.copy_(_like(weights[name], tensor))
        for optimizer, saved in zip(self.optimizers, content["optimizer_states"], strict=True):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            state = {
                index: {name: _like(value, parameters[index]) for name, value in values.items()}
                for index, values in saved["state"].items()
            }
            optimizer.load_state_dict({"state": state, "param_groups": saved["param_groups"]})
        return content


def hybrid_mesh(device_type: str, copies: int, shards: int) -> DeviceMesh:
    """A mesh for copies of sharded weights, neighbours sharing one, in which Lightning finds the names that it reads."""
    mesh = init_device_mesh(device_type, (copies, shards, 1), mesh_dim_names=("replicate", "shard", "tensor_parallel"))
    mesh["replicate", "shard"]._flatten("data_parallel")
    return mesh


def shard(model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None = None) -> nn.Module:
    """Shard each transformer block, then the rest, in place; a sharded model is left as it is.

    Call the sharded model only through its own forward: its submodules' weights are gathered by hooks.

    Args:
        mesh: one-dimensional, or a strategy's whole `device_mesh`.
        dtype: to compute in; None computes in the weights' own. Gradients are reduced in float32.
    """
    if isinstance(model, FSDPModule):
        return model
    options = _options(mesh, dtype)
    for block in decoder_blocks(model):
        fully_shard(block, **options)
    # Tied embeddings stay tied: both uses belong to the root. By default the root stays gathered after a forward
    # without a backward, and its parameters are then plain tensors whose storage is later freed.
    fully_shard(model, **options, reshard_after_forward=True)
    return model


def shard_together(models: Sequence[nn.Module], mesh: DeviceMesh, dtype: torch.dtype | None = None) -> None:
    """Shard models that share a base, in place: one root for all, and one unit for the blocks of each layer.

    Call the models as before, one at a time. A forward pass also gathers the adapters of the others.

    Args:
        models: with equal bases, as `same_weights` makes them.
        mesh: as for `shard`.
        dtype: likewise.
    """
    options = _options(mesh, dtype)
    units = [_Unit(blocks) for blocks in zip(*map(decoder_blocks, models), strict=True)]
    for unit in units:
        fully_shard(unit, **options)
        unit.take_calls()
    root = _Unit(models, units)
    below = {parameter for unit in units for parameter in unit.parameters()}
    fully_shard(root, **options, reshard_after_forward=True, ignored_params=below)
    root.take_calls()


class _Unit(nn.Module):
    """Modules with weights in common, of which one is called at a time: a call of it is a call of the unit."""

    def __init__(self, members: Sequence[nn.Module], units: Sequence[nn.Module] = ()) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.units = nn.ModuleList(units)  # where FSDP finds them from the root; no member does

    def forward(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    def take_calls(self) -> None:
        for member in self.members:
            member.forward = partial(self.__call__, member.forward)


def _options(mesh: DeviceMesh, dtype: torch.dtype | None) -> dict[str, Any]:
    if mesh.ndim > 1:
        mesh = mesh["replicate", "shard"] if "replicate" in (mesh.mesh_dim_names or ()) else mesh["data_parallel"]
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    return {"mesh": mesh, "mp_policy": policy}


def decoder_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The transformer blocks: the elements of the outermost ModuleLists that hold weights."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from (block for block in child if any(True for _ in block.parameters()))
        else:
            yield from decoder_blocks(child)


def training_copies(models: Sequence[nn.Module], mesh: DeviceMesh | None, sampling_dtype: DType | None) -> list[nn.Module]:
    """What to train where the models are sampled from: copies, or the models themselves if they can be both.

    Args:
        models: what they have in common, the copies have in common, too.
        mesh: over which the copies will be sharded.
        sampling_dtype: to which the weights of language models, not their buffers, are cast; None: what they are.
    """
    own = next(models[0].parameters()).dtype  # adapters and heads, which may have another, come later
    dtype = own if sampling_dtype is None else getattr(torch, sampling_dtype)
    if mesh is None and dtype == own:
        return list(models)
    trained = deepcopy(list(models))
    if dtype != own:
        for parameter in (p for model in models if not isinstance(model, ValueModel) for p in model.parameters()):
            parameter.data = parameter.data.to(dtype)
    return trained


def unsharded_state(model: nn.Module) -> dict[str, Tensor]:
    """Every weight and persistent buffer in full, on every rank."""
    return {name: full_tensor(tensor).detach() for name, tensor in model.state_dict().items()}


@torch.no_grad()
def sync_replica(replica: nn.Module, model: nn.Module) -> None:
    """Copy the weights of a sharded (or plain) model into an equal unsharded one.

    The first call copies every weight, later ones only those that `trainable_state` names, so that
    a LoRA model sends adapters alone. One weight is gathered at a time, in the replica's dtype.
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
        target[name].copy_(full_tensor(tensor.to(target[name].dtype)))
    _COMPLETE[replica] = ref(model)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def full_tensor(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _like(value: Any, tensor: Tensor) -> Any:
    """A full tensor sharded like another one of its shape; anything else as it is."""
    if not (isinstance(value, Tensor) and isinstance(tensor, DTensor) and value.shape == tensor.shape):
        return value
    # Every process has the file: each takes its part, none sends any.
    return distribute_tensor(value.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None)
