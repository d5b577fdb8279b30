"""Several processes: the rank of this one, and sharded tensors (DTensor, as used by FSDP2 for parameters)."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist
from torch import Size, Tensor, nn
from torch.nn.parameter import Parameter
from torch.nn.utils.parametrize import is_parametrized

from ..runtime.own_collectives import own_collectives
from .containers import map_leaves

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
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


def local_shard(tensor: Tensor) -> Tensor:
    """Return the shard of this process as a view; a tensor that is not sharded is returned unchanged."""
    return tensor.to_local() if is_sharded(tensor) else tensor


class Shards(NamedTuple):
    """How shards form a tensor: the dimensions along which it is sharded, if any, and the shape of the largest shard."""

    dims: tuple[int, ...] = ()
    largest: tuple[int, ...] = ()


NOT_SHARDED = Shards()


def shards_of(tensor: DTensor) -> Shards:
    """Return how a tensor is sharded."""
    largest, dims = [*tensor.shape], set()
    for placement, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
        dim = getattr(placement, "dim", None)  # replicated tensors and partial sums have none
        if dim is not None and size > 1:
            dims.add(dim)
            largest[dim] = -(-largest[dim] // size)
    return Shards(tuple(sorted(dims)), tuple(largest))


@own_collectives()
def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor.

    For a sharded tensor this is a collective operation: all processes must call it.
    """
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def sharded_like(tensor: Tensor, like: DTensor) -> Tensor:
    """Shard a full tensor, which every process has, like another tensor; no data is sent."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


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
        "placements": [_fields(placement) for placement in tensor.placements],
        "offset": [*offset],
        "shape": [*tensor.shape],
        "stride": [*tensor.stride()],
    }


def _fields(placement: Any) -> list[int]:
    return [int(getattr(placement, name)) for name in ("dim", "split_factor") if hasattr(placement, name)]


def unpack_shards(value: Any, mesh: DeviceMesh) -> Any:
    """Return the value that was passed to `pack_shards`, with its tensors on the devices of the mesh.

    Args:
        mesh: The mesh of all processes, with the dimensions of the tensors.
    """
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
