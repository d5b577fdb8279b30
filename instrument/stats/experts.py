"""The load of the experts of a mixture of experts, from the output of its router: the table `experts`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ..values.dtensor import Shards
from .merge import Array
from .portable import parts_of, softmax_of, widest
from .table_rows import HookCall, Measure

PER_TOKEN = ("top_k", "num_experts_per_tok")
"""The attributes of a router in which the number of experts per token is looked up."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "out_features")
"""The attributes of a router in which the number of experts is looked up."""
_USUAL_SIZE = 64  # for the estimate of bytes


def attribute_of(module: nn.Module, names: Sequence[str]) -> int | None:
    """Return the first of some attributes of a module that is an integer; None if it has none."""
    values = (getattr(module, name, None) for name in names)
    return next((value for value in values if type(value) is int), None)


@dataclass(frozen=True)
class Experts(Measure):
    """The load of experts; see `instrument.stats.table_rows.Measure`.

    A tensor of floating point is the logits [..., experts]: the experts of a token are those with the largest logits. A tensor of
    integers is the indices [..., experts per token] of the experts that a router has chosen; others than 0 to experts - 1 do not
    count. If the number of experts is an attribute of the module, tensors of other shapes get no row.
    """

    experts: int | Literal["module"] = "module"  # the number of experts per token, or `module` to look it up
    capacity_factor: float | None = None  # the capacity of an expert, as a multiple of the mean load
    count: int = 0

    @property
    def size(self) -> int:
        return self.count or _USUAL_SIZE

    def of_call(self, tensor: Tensor, call: HookCall) -> Experts | None:
        """Return the measure of a call; None if the tensor is neither logits nor indices. See `Measure`.

        Raises:
            ValueError: A token has more experts than there are, or the tensor is sharded along its last dimension.
        """
        count = attribute_of(call.module, EXPERTS)
        per_token = attribute_of(call.module, PER_TOKEN) if self.experts == "module" else self.experts
        if tensor.is_nested or not tensor.dim() or per_token is None:
            return None
        if tensor.dim() - 1 in call.shards.dims:
            raise ValueError("the output of a router that is sharded along its experts has no load")
        last = tensor.shape[-1]
        if tensor.is_floating_point():
            is_of_router = count in (None, last)
            if is_of_router and per_token > last:
                raise ValueError(f"{per_token} experts per token, but the logits have shape {list(tensor.shape)}")
        else:
            is_of_router = count not in (None, last) and last == per_token
        return replace(self, experts=per_token, count=count or last) if is_of_router else None

    def cells(self, values: Sequence[float | None], shape: tuple[int, ...] | None) -> tuple[Any, ...]:
        *loads, entropies, tokens = (math.nan if value is None else value for value in values)
        counts = np.array(loads)
        total = counts.sum()
        source_shape = None if shape is None else list(shape)
        if not total > 0:
            return None, None, None, None, None, source_shape
        dropped = None
        if self.capacity_factor is not None:
            capacity = math.ceil(self.capacity_factor * total / self.count)
            dropped = float(np.maximum(counts - capacity, 0.0).sum() / total)
        entropy = None if math.isnan(entropies) else entropies / tokens
        variation = float(counts.std() / counts.mean())
        return (counts / total).tolist(), variation, int((counts == 0).sum()), entropy, dropped, source_shape

    def part(self, tensor: Tensor, shards: Shards) -> Tensor:  # noqa: ARG002
        """Return the number of assignments of each expert, the sum of the entropies of the tokens in nats, and their number."""
        x = tensor.detach().to_dense()
        dtype = widest(x.device)
        counts, sums = (torch.zeros(size, dtype=dtype, device=x.device) for size in (self.count, 2))
        if not x.is_floating_point():
            is_valid = (x >= 0) & (x < self.count)
            counts.index_add_(0, torch.where(is_valid, x, 0).flatten().long(), is_valid.flatten().to(dtype))
            return torch.cat([counts, torch.full_like(sums, math.nan)])
        for part in parts_of(x.reshape(-1, self.count)):
            rows = part.to(torch.promote_types(part.dtype, torch.float32))
            log_partitions, entropies = softmax_of(rows)
            finite = log_partitions.isfinite()
            chosen = rows.topk(int(self.experts), dim=-1).indices
            counts.index_add_(0, chosen.flatten(), finite[:, None].expand_as(chosen).flatten().to(dtype))
            sums += torch.stack([torch.where(finite, entropies, 0.0).sum(), finite.sum()])
        return torch.cat([counts, sums])

    def merged(self, parts: Array) -> tuple[Any, ...]:
        is_missing = np.isnan(parts).all(axis=0)
        return self.cells(np.where(is_missing, math.nan, np.nansum(parts, axis=0)).tolist(), None)
