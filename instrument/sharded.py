"""Tensors of which each of several processes has a shard: DTensor, as FSDP2 makes parameters of."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Size, Tensor, nn
from torch.nn.parameter import Parameter

from .nested import map_children

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

_SHARD = "instrument/shard"  # where a plain value stands for a sharded tensor


def is_sharded(tensor: Tensor) -> TypeIs[DTensor]:
    """Whether each process has a shard of the tensor."""
    if type(tensor) in (Tensor, Parameter):
        return False
    distributed = sys.modules.get("torch.distributed.tensor")  # imported by whoever made one
    return distributed is not None and isinstance(tensor, distributed.DTensor)


def own_part(tensor: Tensor) -> Tensor:
    """This process's shard, as a view; a tensor that is no shard is whole."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor, gathered from all processes where each has a shard: all of them have to ask for it."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def sharded_like(tensor: Tensor, like: DTensor) -> Tensor:
    """A whole tensor, which every process has, in the shards of another one; nothing is sent."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def as_plain(value: Any) -> Any:
    """A state dict with this process's shards in the place of sharded tensors, each as a dictionary of plain values."""
    if not (isinstance(value, Tensor) and is_sharded(value)):
        return map_children(value, lambda _, child: as_plain(child))
    from torch.distributed.tensor import Shard

    placements = [place.dim if isinstance(place, Shard) else None for place in value.placements]
    return {_SHARD: value.to_local(), "placements": placements, "shape": [*value.shape], "stride": [*value.stride()]}


def from_plain(value: Any, mesh: DeviceMesh) -> Any:
    """What `as_plain` was given; its tensors are on the devices of the mesh."""
    if not (isinstance(value, Mapping) and _SHARD in value):
        return map_children(value, lambda _, child: from_plain(child, mesh))
    from torch.distributed.tensor import DTensor, Replicate, Shard

    placements = [Replicate() if dim is None else Shard(dim) for dim in value["placements"]]
    local, shape, stride = value[_SHARD].to(mesh.device_type), Size(value["shape"]), tuple(value["stride"])
    return DTensor.from_local(local, mesh, placements, shape=shape, stride=stride)


def mesh_of(model: nn.Module) -> DeviceMesh | None:
    """The devices that a model's parameters are sharded over; None where they are whole."""
    return next((parameter.device_mesh for parameter in model.parameters() if is_sharded(parameter)), None)


def module_type(module: nn.Module) -> str:
    """The short name of a module's class: of one that `fully_shard` has given a class of its own, that of the class before."""
    cls = type(module)
    first, *others = cls.__bases__
    return others[0].__name__ if first.__name__ == "FSDPModule" and others else cls.__name__
