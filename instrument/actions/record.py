"""Recording of a tensor's statistics, distribution and values. The tensor is not changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, cast

import torch
from torch import Tensor

from ..errors import HookError
from ..spec.base import parse_slice
from ..spec.kinds import KINDS
from ..spec.record import RecordSpec
from ..spec.statistics import COUNTS, VALUE_STATISTICS
from ..stats.device_numbers import DeviceNumbers, joined
from ..stats.distribution import distribution
from ..stats.measure import Values, measure
from ..stats.merge import MEASURED, PartialStatistics, partial_statistics, sketch
from ..stats.single_pass import NATIVE, wanted
from ..stats.unit_statistics import (
    dead_fraction,
    dead_units,
    ratio_of_norms,
    saturated_fraction,
    saturation_limits,
    unit_dim,
)
from .base import Context, Rows
from .intervention import describe


def select_part(tensor: Tensor, spec: RecordSpec) -> Tensor:
    """Return the part of a tensor that a spec keeps, as a view.

    `samples` is applied first, then `slice`, then `max_elements` (to the flattened tensor).
    """
    part = tensor
    if spec.samples is not None and part.dim():
        part = part[: spec.samples]
    if spec.slice is not None:
        part = part[parse_slice(spec.slice)]
    if spec.max_elements is not None and part.numel() > spec.max_elements:
        part = part.reshape(-1)[: spec.max_elements]
    return part


def to_dense(tensor: Tensor) -> Tensor:
    """Return a strided tensor. Sparse tensors become dense; nested tensors are padded with NaN (integers with 0)."""
    if tensor.is_nested:
        padded: Tensor = torch.nested.to_padded_tensor(tensor, math.nan if tensor.is_floating_point() else 0)
        return padded
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def _dead_fraction(tensor: Tensor, context: Context, dim: int | None) -> float | DeviceNumbers | None:
    along = _resolve_unit_dim(tensor, context, dim)
    return None if along is None else dead_fraction(to_dense(tensor.detach()), along)


def _saturated_fraction(tensor: Tensor, context: Context, dim: int | None) -> float | DeviceNumbers | None:  # noqa: ARG001
    ends = saturation_limits(context.module)
    return None if ends is None or not tensor.is_floating_point() else saturated_fraction(to_dense(tensor), ends)


def _update_ratio(tensor: Tensor, context: Context, dim: int | None) -> float | DeviceNumbers | None:  # noqa: ARG001
    assert context.value is not None, "an update requires its parameter"
    return ratio_of_norms(tensor, context.value)


DERIVED: dict[str, Callable[[Tensor, Context, int | None], float | DeviceNumbers | None]] = {
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
    along = unit_dim(tensor, context.module, of_parameter=of_parameter) if dim is None else dim
    if along is not None and not -tensor.dim() <= along < tensor.dim():
        raise HookError(f"{describe(context)}: unit_dim {along} is out of range for shape {list(tensor.shape)}")
    return along


class Record:
    """The record action of a spec.

    Attributes:
        statistics: The names of the recorded statistics.
        derived: Those of `statistics` that depend on more than the tensor's values.
        levels: The levels of the quantiles; empty if none are recorded.
        bins: The number of histogram bins; 0 if no histogram is recorded.
        keeps_tensors: Whether tensors are recorded.
        bits: The statistics for `instrument.stats.single_pass.record_plain`; 0 if it does not support all of them.
    """

    def __init__(self, spec: RecordSpec, rows: Rows) -> None:
        self.spec = spec
        self.rows = rows
        self.statistics = spec.statistics
        self.derived = tuple(name for name in spec.statistics if name not in VALUE_STATISTICS)
        self.levels = spec.quantiles or ()
        self.bins = spec.histogram or 0
        self.keeps_tensors = spec.tensors
        self.dtype = None if spec.dtype is None else getattr(torch, spec.dtype)
        self.bits = self._bits()

    def _bits(self) -> int:
        return wanted(self.statistics) if set(self.statistics) <= set(NATIVE) else 0

    def without_most_expensive(self) -> tuple[Record, str] | None:
        """Return a copy of this action without its most expensive part.

        Returns:
            The copy and the name of the part; None if no expensive part is left.
        """
        reduced = copy(self)
        if self.keeps_tensors:
            reduced.keeps_tensors = False
            return reduced, "tensors"
        if self.bins:
            reduced.bins = 0
            return reduced, "histogram"
        if self.levels:
            reduced.levels = ()
            return reduced, "quantiles"
        for expensive in (*self.derived, *(name for name in self.statistics if name == "l1")):
            reduced.statistics = tuple(name for name in self.statistics if name != expensive)
            if set(reduced.statistics) <= set(COUNTS):
                break  # nothing of what was asked for would be left
            reduced.derived = tuple(name for name in self.derived if name != expensive)
            reduced.bits = reduced._bits()
            return reduced, expensive
        return None

    def prepare(self, tensors: Sequence[Tensor]) -> None:
        """Do nothing: each tensor is recorded independently."""

    def __call__(self, tensor: Tensor, context: Context) -> None:
        merges = self.rows.merges(context)
        if self.statistics and merges:
            self.rows.add_part(context, self.statistics, *self._measure_part(tensor, context))
        elif self.statistics:
            self.rows.add_stats(context, self.statistics, self._measure(tensor, context))
        if (self.levels or self.bins) and merges:
            self.rows.add_sketch(context, self.levels, self.bins, sketch(tensor, bool(self.levels), self.bins))
        elif self.levels or self.bins:
            values = distribution(tensor, self.levels, self.bins)
            self.rows.add_distribution(context, self.levels, self.bins, values)
        if self.keeps_tensors:
            plain = to_dense(tensor.detach())
            try:
                selected = select_part(plain, self.spec)
            except IndexError as error:
                shape = list(plain.shape)
                raise HookError(
                    f"{describe(context)}: slice {self.spec.slice!r} is out of range for shape {shape}"
                ) from error
            # Converting a complex tensor to another dtype would keep only the real part.
            self.rows.add_tensor(context, plain.shape, selected, None if selected.is_complex() else self.dtype)

    def _measure_part(self, tensor: Tensor, context: Context) -> tuple[PartialStatistics, Tensor | None]:
        """Measure this process's part of a tensor.

        Returns:
            The part to merge with those of other processes, and which units are dead, bool [units], if requested.
        """
        saturated = _saturated_fraction(tensor, context, None) if "saturated_fraction" in self.derived else None
        weight: float | DeviceNumbers | None = None
        if "update_ratio" in self.derived and context.value is not None:
            norm = measure(context.value, ("l2",))
            weight = norm if isinstance(norm, DeviceNumbers) else norm[0]
        names = (*MEASURED, "l1") if "l1" in self.statistics else MEASURED
        along = _resolve_unit_dim(tensor, context, self.spec.unit_dim) if "dead_fraction" in self.derived else None
        dead = None if along is None else dead_units(to_dense(tensor.detach()), along)
        # `fully_shard` shards along dimension 0: each process then has different units.
        distinct_dead = dead if context.scope == "shard" and along == 0 else None
        return partial_statistics(
            measure(tensor, names), saturated, weight, distinct_dead
        ), None if distinct_dead is not None else dead

    def _measure(self, tensor: Tensor, context: Context) -> Values:
        if not self.derived:
            return measure(tensor, self.statistics)
        values = measure(tensor, self.statistics[: -len(self.derived)])
        others = [DERIVED[name](tensor, context, self.spec.unit_dim) for name in self.derived]
        if not isinstance(values, DeviceNumbers):
            return [*values, *cast(list[float | None], others)]  # on the CPU these are numbers too
        on_device = [isinstance(other, DeviceNumbers) for other in others]

        def convert(first: list[Any], *rest: list[Any]) -> list[Any]:
            found = iter(rest)
            return [*first, *(next(found)[0] if exists else None for exists in on_device)]

        return joined([values, *(other for other in others if isinstance(other, DeviceNumbers))], convert)
