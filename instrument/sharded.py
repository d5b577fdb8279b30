"""Tensors of which each of several processes has a shard: DTensor, as FSDP2 makes parameters of."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn.parameter import Parameter

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


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


def module_type(module: nn.Module) -> str:
    """The short name of a module's class: of one that `fully_shard` has given a class of its own, that of the class before."""
    cls = type(module)
    first, *others = cls.__bases__
    return others[0].__name__ if first.__name__ == "FSDPModule" and others else cls.__name__
