"""Several processes: the rank of this one, and sharded tensors (DTensor, as used by FSDP2 for parameters)."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Size, Tensor, nn
from torch.nn.parameter import Parameter
from torch.nn.utils import get_total_norm
from torch.nn.utils.parametrize import is_parametrized

from ..runtime.own_operations import own_collectives
from .containers import map_leaves

if TYPE_CHECKING:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement
    from typing_extensions import TypeIs

_SHARD = "instrument/shard"  # key of the dictionary that replaces a sharded tensor


def own_rank() -> int:
    """Return the rank of this process, from 0: that of the process group, or before it exists that of torchrun."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))


def is_sharded(tensor: Tensor) -> TypeIs[DTensor]:
    """Return whether the tensor is sharded over processes."""
    if type(tensor) in (Tensor, Parameter):
        return False
    distributed = sys.modules.get("torch.distributed.tensor")  # imported if any DTensor exists
    return distributed is not None and isinstance(tensor, distributed.DTensor)


def is_awaited(tensor: Tensor) -> TypeIs[AsyncCollectiveTensor]:
    """Return whether the tensor is the result of a collective operation for which its first consumer waits."""
    if type(tensor) in (Tensor, Parameter):
        return False
    functional = sys.modules.get("torch.distributed._functional_collectives")
    return functional is not None and isinstance(tensor, functional.AsyncCollectiveTensor)


def local_shard(tensor: Tensor, *, wait: bool = True) -> Tensor:
    """Return the shard of this process as a view; a tensor that is not sharded is returned unchanged.

    Args:
        wait: Whether to wait for the result of a collective operation, as its first consumer does. Without, only the metadata of the
            result is valid. Default: True.
    """
    shard = tensor.to_local() if is_sharded(tensor) else tensor
    if not is_awaited(shard):
        return shard
    return shard.trigger_wait() if wait else shard.elem


@dataclass(frozen=True)
class Shards:
    """How the parts of several processes form a tensor."""

    # The dimensions along which it is sharded, without those along which processes have other samples.
    dims: tuple[int, ...] = ()
    largest: tuple[int, ...] = ()  # the shape of the largest shard; empty if it is not sharded
    shape: tuple[int, ...] = ()  # the shape of the tensor that the shards form; empty if it is not sharded
    mesh: str = ""  # the names of the dimensions of the device mesh, separated by commas; empty without a mesh
    placement: str = ""  # the placement along each of them: `shard(DIMENSION)`, `replicate`, `partial` or `unknown`
    scope: str = ""  # the scope of the tensor; empty without a mesh
    is_first: bool = True  # whether this process is the first one of those that have the same part
    batch: int | None = None  # the index of the batch shard of this process; None without a mesh
    batches: int = 1  # the number of batch shards
    device_mesh: DeviceMesh | None = None  # the mesh over which the tensor is sharded; None if it is not
    placements: tuple[Placement, ...] = ()  # its placement along each dimension of this mesh
    is_merged: bool = False  # whether the rows of all processes are merged

    @property
    def is_known(self) -> bool:
        return "unknown" not in self.placement

    @property
    def is_partial(self) -> bool:
        """Whether this process has a summand of the tensor."""
        return any(placement.is_partial() for placement in self.placements)

    def indices(self, dim: int) -> Tensor:
        """Return the indices of this process's part along a dimension in the full tensor, int64 [indices]."""
        from torch.distributed.tensor import Replicate, distribute_tensor

        assert self.device_mesh is not None, "the tensor is sharded"
        along = [placement if getattr(placement, "dim", None) == dim else Replicate() for placement in self.placements]
        numbers = torch.arange(self.shape[dim], device=self.device_mesh.device_type)
        numbers = numbers.view([-1 if at == dim else 1 for at in range(len(self.shape))])
        return distribute_tensor(numbers, self.device_mesh, along, src_data_rank=None).to_local().flatten()


NOT_SHARDED = Shards()


def as_dtensor(tensor: Tensor, shards: Shards) -> Tensor:
    """Return a shard of this process as a sharded tensor; one that is not a shard unchanged."""
    if is_sharded(tensor) or shards.device_mesh is None:
        return tensor
    from torch.distributed.tensor import DTensor

    shape = Size(shards.shape)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        tensor, shards.device_mesh, shards.placements, run_check=False, shape=shape, stride=stride
    )


@own_collectives()
def joined_shards(tensor: Tensor, shards: Shards, keep: int | None) -> tuple[Tensor, bool]:
    """Join the shards along all dimensions but one. This is a collective operation, which sends the tensor.

    Args:
        keep: The dimension along which it remains sharded; None for none.

    Returns:
        The larger part, and whether this process is the first one of those that have it.
    """
    joined = _redistributed(tensor, shards, lambda placement: getattr(placement, "dim", None) == keep is not None)
    at = joined.device_mesh.get_coordinate() or ()
    is_first = not any(i for i, placement in zip(at, joined.placements, strict=True) if placement.is_replicate())
    return joined.to_local(), is_first


def complete_along(tensor: Tensor, shards: Shards, dims: Iterable[int]) -> tuple[Tensor | None, bool]:
    """Return a tensor that is complete along some dimensions, for sums over processes, and whether this process counts it.

    If it is sharded along any of them, the shards are joined. None if they are, but the rows of processes are not merged.
    """
    if {*shards.dims}.isdisjoint(dims):
        return tensor, True
    return joined_shards(tensor, shards, None) if shards.is_merged else (None, False)


@own_collectives()
def reduced(tensor: Tensor, shards: Shards) -> Tensor:
    """Return a sharded tensor whose summands are added. This is a collective operation."""
    return _redistributed(tensor, shards, lambda placement: not placement.is_partial())


def _redistributed(tensor: Tensor, shards: Shards, keeps: Callable[[Placement], bool]) -> DTensor:
    """Replicate a tensor along those dimensions of the mesh whose placement is not kept."""
    from torch.distributed.tensor import Replicate

    given = as_dtensor(tensor.detach(), shards)
    assert is_sharded(given), "the tensor is divided"
    return given.redistribute(placements=[each if keeps(each) else Replicate() for each in shards.placements])


@own_collectives()
def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor. For a sharded tensor this is a collective operation: all processes must call it."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def sharded_like(tensor: Tensor, like: DTensor) -> Tensor:
    """Shard a full tensor, which every process has, like another tensor; no data is sent, except for gradients."""
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    if not tensor.requires_grad or tensor.is_leaf:
        return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
    full = DTensor.from_local(tensor, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)
    return full.redistribute(placements=like.placements)


def total_norm(tensors: Sequence[Tensor], ord: float = 2.0) -> Tensor:
    """Return the norm of all tensors, as one vector. For sharded ones this is a collective operation.

    Bit-identical to `torch.nn.utils.get_total_norm` if no tensor is sharded, or all over the same mesh.
    """
    groups: dict[DeviceMesh | None, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device_mesh if is_sharded(tensor) else None, []).append(tensor)
    norms = [full_tensor(get_total_norm(group, ord)) for group in groups.values()]
    return norms[0] if len(norms) == 1 else get_total_norm(norms, ord)


def free_gathered_parameters(model: nn.Module) -> None:
    """Free the parameters that `fully_shard` has gathered and kept, as after an evaluation. The modules then have their shards."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        for module in model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.reshard()


def is_gathered(parameter: Tensor | None, shard: Tensor | None) -> bool:
    """Return whether `fully_shard` has gathered a parameter from this shard and others."""
    if parameter is None or shard is None or not is_sharded(shard):
        return False
    return not is_sharded(parameter) or parameter.device_mesh.ndim < shard.device_mesh.ndim


def sharding_hooks() -> list[Callable[..., Any]]:
    """Return the hooks of `fully_shard` on modules: they gather and free parameters. Empty if it was not imported."""
    fsdp = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")
    if fsdp is None:
        return []
    return [inspect.unwrap(hook) for hook in (fsdp.FSDPState._pre_forward, fsdp.FSDPState._post_forward)]


def pack_shards(value: Any) -> Any:
    """Return a state dict in which each sharded tensor is replaced by a dictionary with the shard of this process."""
    return map_leaves(
        value, lambda _, tensor: _packed(tensor), lambda leaf: isinstance(leaf, Tensor) and is_sharded(leaf)
    )


def _packed(tensor: DTensor) -> dict[str, Any]:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return {
        _SHARD: tensor.to_local(),
        "mesh": [*(tensor.device_mesh.mesh_dim_names or ())],
        # The dimension, and for FSDP2 on a tensor parallel dimension the split factor. Empty: replicated.
        "placements": [
            [int(getattr(placement, name)) for name in ("dim", "split_factor") if hasattr(placement, name)]
            for placement in tensor.placements
        ],
        "offset": [*offset],
        "shape": [*tensor.shape],
        "stride": [*tensor.stride()],
    }


def unpack_shards(value: Any, mesh: DeviceMesh) -> Any:
    """Return the value that was passed to `pack_shards`, with its tensors on the devices of the mesh of all processes."""
    return map_leaves(
        value, lambda _, packed: _unpacked(packed, mesh), lambda leaf: isinstance(leaf, Mapping) and _SHARD in leaf
    )


def _unpacked(packed: Mapping[str, Any], mesh: DeviceMesh) -> DTensor:
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    placements = []
    for fields in packed["placements"]:
        strided = _StridedShard(fields[0], split_factor=fields[1]) if len(fields) > 1 else None
        placements.append(strided or (Shard(fields[0]) if fields else Replicate()))
    local, shape, stride = packed[_SHARD].to(mesh.device_type), Size(packed["shape"]), tuple(packed["stride"])
    return DTensor.from_local(local, mesh[(*packed["mesh"],)], placements, shape=shape, stride=stride)


def join_shards(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a state dict with full tensors, given the result of `pack_shards` in each process."""
    joined: dict[str, Any] = {}
    for state in states:
        for name, value in state.items():
            if not (isinstance(value, Mapping) and _SHARD in value):
                first = joined.setdefault(name, value)
                # A process of a pipeline has empty parameters of other stages.
                joined[name] = value if isinstance(first, Tensor) and not first.numel() else first
                continue
            shard = value[_SHARD]
            full = joined.setdefault(name, shard.new_empty(value["shape"]))
            full[tuple(slice(start, start + n) for start, n in zip(value["offset"], shard.shape, strict=True))] = shard
    return joined


def module_type(module: nn.Module) -> str:
    """Return the name of a module's class.

    `fully_shard` and `register_parametrization` replace the class of a module by a subclass; for such a module the name of
    the original class is returned.
    """
    cls = _without_shards(type(module))
    if is_parametrized(module) and cls.__name__.startswith("Parametrized"):
        cls = _without_shards(cls.__bases__[0])
    return cls.__name__


def _without_shards(cls: type) -> type:
    """Return the class that `fully_shard` replaced by this one; any other class unchanged."""
    first, *others = cls.__bases__
    return others[0] if first.__name__ == "FSDPModule" and others else cls
