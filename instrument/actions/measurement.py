"""Measurement of the statistics of a spec: those of values, those that depend on more, and custom ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy
from numbers import Real
from typing import Any, cast

import torch
from torch import Tensor

from ..errors import HookError
from ..formatting import human_bytes
from ..sparse import is_sparse
from ..spec.kinds import KINDS
from ..spec.record import StatisticsSpec
from ..spec.statistics import VALUE_STATISTICS
from ..stats.device_numbers import DeviceNumbers, joined
from ..stats.measure import Values, measure, part_statistics
from ..stats.merge import PartialStatistics, partial_statistics
from ..stats.unit_statistics import (
    dead_fraction,
    dead_units,
    ratio_of_norms,
    saturated_fraction,
    saturation_limits,
    unit_dim,
)
from .base import Context
from .custom_functions import custom_function, observe
from .intervention import describe

MOST_BYTES = 1 << 30  # of a sparse tensor that becomes dense

Number = float | DeviceNumbers | None
"""A number, or one number on another device; None if the statistic is not defined for the tensor."""


class Measurement:
    """The statistics that a spec requests.

    Attributes:
        statistics: The names of the built-in statistics, in the order of the columns.
        derived: Those of `statistics` that depend on more than the tensor's values.
        custom: The custom statistics: the functions by the names of their columns.
    """

    def __init__(self, spec: StatisticsSpec) -> None:
        self.unit_dim = spec.unit_dim
        self.statistics = spec.statistics
        self.derived = tuple(name for name in spec.statistics if name not in VALUE_STATISTICS)
        self.custom = {
            custom.column: custom_function(custom, f"hooks.{spec.name}.stats", "tensor")
            for custom in spec.custom_statistics
        }

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all statistics, custom ones last."""
        return (*self.statistics, *self.custom)

    def without(self, name: str) -> Measurement:
        """Return a copy without one statistic."""
        reduced = copy(self)
        reduced.statistics = tuple(other for other in self.statistics if other != name)
        reduced.derived = tuple(other for other in self.derived if other != name)
        reduced.custom = {other: function for other, function in self.custom.items() if other != name}
        return reduced

    def __call__(self, tensor: Tensor, context: Context) -> Values:
        """Return the values in the order of `names`.

        Raises:
            HookError: The tensor has no such dimension of units, or a custom statistic failed.
        """
        names = self.statistics[: len(self.statistics) - len(self.derived)]
        values: Values = measure(tensor, names) if names else []
        others = [DERIVED[name](tensor, context, self.unit_dim) for name in self.derived]
        others += self.custom_numbers(tensor, context)
        return _combined(values, others) if others else values

    def custom_numbers(self, tensor: Tensor, context: Context) -> list[Number]:
        """Return the custom statistics in their order.

        Raises:
            HookError: A function failed, modified its tensor, or did not return a number.
        """
        return [_custom_number(name, function, tensor, context) for name, function in self.custom.items()]

    def part(self, tensor: Tensor, context: Context) -> tuple[PartialStatistics, Tensor | None]:
        """Measure this process's part of a tensor.

        Returns:
            The part to merge with those of other processes, and which units are dead, bool [units], if requested.
        """
        requested = self.statistics
        saturated = _saturated_fraction(tensor, context, None) if "saturated_fraction" in requested else None
        weight: float | DeviceNumbers | None = None
        if "update_ratio" in requested and context.value is not None:
            norm = measure(context.value, ("l2",))
            weight = norm if isinstance(norm, DeviceNumbers) else norm[0]
        along = _resolve_unit_dim(tensor, context, self.unit_dim) if "dead_fraction" in requested else None
        dead = None if along is None else dead_units(_strided_or_sparse(tensor), along)
        # `fully_shard` shards along dimension 0: each process then has different units.
        distinct_dead = dead if context.scope == "shard" and along == 0 else None
        return partial_statistics(
            measure(tensor, part_statistics(requested)), saturated, weight, distinct_dead
        ), None if distinct_dead is not None else dead


def _custom_number(name: str, function: Callable[[Tensor], Any], tensor: Tensor, context: Context) -> Number:
    """Return the result of a custom statistic.

    Raises:
        HookError: The function failed, modified its tensor, or did not return a number.
    """
    found = observe(function, to_dense(tensor, describe(context)), context)
    if isinstance(found, Tensor) and found.numel() == 1 and not found.is_complex():
        return float(found) if found.is_cpu else DeviceNumbers((found.detach(),), list)
    if found is None or isinstance(found, Real):
        return None if found is None else float(found)
    what = (
        f"a tensor of shape {list(found.shape)} and {found.dtype}"
        if isinstance(found, Tensor)
        else type(found).__name__
    )
    raise HookError(f"{describe(context)}: the statistic {name!r} must return one real number, but returned {what}")


def _combined(values: Values, others: list[Number]) -> Values:
    """Append further numbers to values. The result is on a device if any of them is."""
    if not isinstance(values, DeviceNumbers) and not any(isinstance(other, DeviceNumbers) for other in others):
        return [*values, *cast(list[float | None], others)]
    parts = [values, *(other if isinstance(other, DeviceNumbers) else [other] for other in others)]

    def convert(*found: list[Any]) -> list[Any]:
        on_device = iter(found)
        return [value for part in parts for value in (next(on_device) if isinstance(part, DeviceNumbers) else part)]

    return joined([part for part in parts if isinstance(part, DeviceNumbers)], convert)


def to_dense(tensor: Tensor, reader: str) -> Tensor:
    """Return a strided tensor without graph. Sparse tensors become dense; nested ones are padded with NaN (integers with 0).

    Args:
        tensor: Any layout.
        reader: What requires the dense tensor, for messages.

    Raises:
        HookError: The tensor is sparse, and would be larger than `MOST_BYTES`.
    """
    if is_sparse(tensor) and tensor.numel() * tensor.element_size() > MOST_BYTES:
        raise HookError(
            f"{reader} requires a dense tensor, but this one is sparse with shape {list(tensor.shape)}: it would have "
            f"{human_bytes(tensor.numel() * tensor.element_size())} (at most {human_bytes(MOST_BYTES)}). Record "
            "built-in statistics, quantiles or a histogram of the complete tensor, which read only the stored values"
        )
    readable = _strided_or_sparse(tensor)
    return readable.to_dense() if is_sparse(readable) else readable


def _strided_or_sparse(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.is_nested:
        padded: Tensor = torch.nested.to_padded_tensor(tensor, math.nan if tensor.is_floating_point() else 0)
        return padded
    return tensor if tensor.layout == torch.strided or is_sparse(tensor) else tensor.to_dense()


def _dead_fraction(tensor: Tensor, context: Context, dim: int | None) -> Number:
    along = _resolve_unit_dim(tensor, context, dim)
    return None if along is None else dead_fraction(_strided_or_sparse(tensor), along)


def _saturated_fraction(tensor: Tensor, context: Context, dim: int | None) -> Number:  # noqa: ARG001
    ends = saturation_limits(context.module)
    return (
        None if ends is None or not tensor.is_floating_point() else saturated_fraction(_strided_or_sparse(tensor), ends)
    )


def _update_ratio(tensor: Tensor, context: Context, dim: int | None) -> Number:  # noqa: ARG001
    assert context.value is not None, "an update requires its parameter"
    return ratio_of_norms(tensor, context.value)


DERIVED: dict[str, Callable[[Tensor, Context, int | None], Number]] = {
    "dead_fraction": _dead_fraction,
    "saturated_fraction": _saturated_fraction,
    "update_ratio": _update_ratio,
}
"""The statistics that depend on more than the tensor's values: functions of the tensor, the call, and the dimension of
the units (None for the default one).

They return a number, or one number on another device; None if the statistic is not defined for the tensor. They raise
`HookError` if the tensor has no such dimension.
"""


def _resolve_unit_dim(tensor: Tensor, context: Context, dim: int | None) -> int | None:
    """Return the dimension of a tensor's units; None if it has no units.

    Raises:
        HookError: The tensor has no such dimension.
    """
    if tensor.is_nested:
        return None
    of_parameter = KINDS[context.kind].family != "module"
    along = unit_dim(tensor.dim(), context.module, of_parameter=of_parameter) if dim is None else dim
    if along is not None and not -tensor.dim() <= along < tensor.dim():
        raise HookError(f"{describe(context)}: unit_dim {along} is out of range for shape {list(tensor.shape)}")
    return along
