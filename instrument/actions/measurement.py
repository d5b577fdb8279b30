"""Measurement of the statistics of a spec: those of values, those that depend on more, and custom ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from numbers import Real
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor

from ..config.hook_specs import StatisticsSpec
from ..errors import HookError
from ..formatting import human_bytes
from ..stats.flatten import is_on_host
from ..stats.measure import CastOf, Measured, measure
from ..stats.portable import widest
from ..stats.sums import INDEX, needs_of
from ..stats.unit_statistics import count_saturated, dead_units, saturation_limits, unit_dim
from ..tables.kinds import KINDS
from ..tables.statistics import (
    BITS_HIGH,
    BITS_LOW,
    DEAD,
    FORM,
    MAGNITUDES,
    NORMED_UNITS,
    SATURATED,
    UNIT_NORMS,
    UNITS,
    WEIGHT,
    Sum,
)
from ..values.dtensor import complete_along
from ..values.sparse import is_sparse
from .base import Context, Number
from .custom_functions import custom_function, observe
from .intervention import describe

_imported = cache(resolve_name)

MAX_BYTES = 1 << 30  # of a sparse tensor that becomes dense


class Measurement:
    """The statistics that a spec requests."""

    def __init__(self, spec: StatisticsSpec) -> None:
        self.unit_dim = spec.unit_dim
        custom = spec.custom_statistics
        # The functions of custom statistics, by the names of their columns.
        self.custom = {each.column: custom_function(each, f"hooks.{spec.name}.stats", "tensor") for each in custom}
        self.statistics = spec.statistics  # the names of the built-in ones, in the order of the columns
        self.needs = needs_of(spec.statistics)  # the sums that they need in addition to those that every tensor has

    @property
    def further(self) -> int:
        """The further sums that the compiled kernel has to form; see `instrument.stats.cpu_kernel.Slab.add`."""
        return (MAGNITUDES in self.needs) + 2 * (FORM in self.needs)

    @property
    def is_plain(self) -> bool:
        """Whether the compiled kernel forms all sums, and there are some."""
        is_plain = set(self.needs) <= {MAGNITUDES, BITS_LOW, BITS_HIGH, FORM}
        return bool(self.statistics) and not self.custom and is_plain

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all statistics, custom ones last."""
        return (*self.statistics, *self.custom)

    def __call__(
        self, tensor: Tensor, context: Context, memory: Tensor | None = None, cast_of: CastOf | None = None
    ) -> Measured:
        """Measure the sums of a tensor, or this process's part of a tensor.

        Raises:
            HookError: The tensor has no such dimension of units.
        """
        return measure_in_context(tensor, context, self.needs, self.unit_dim, memory, cast_of)

    def custom_numbers(self, tensor: Tensor, context: Context) -> dict[str, Number]:
        """Return the custom statistics by name.

        Raises:
            HookError: A function failed, modified its tensor, or did not return a number.
        """
        return {name: _custom_number(name, function, tensor, context) for name, function in self.custom.items()}

    def dead_units(self, tensor: Tensor, context: Context) -> Tensor | None:
        """Return which units are dead, bool [units]; also true for units of other processes. None if the statistic is not requested."""
        along = _unit_dim_of(tensor, context, self.unit_dim) if DEAD in self.needs else None
        if along is None:
            return None
        dead, dim = dead_units(strided_or_sparse(tensor), along), along % tensor.dim()
        if dim not in context.shards.dims:
            return dead
        of_all = dead.new_ones(context.shards.shape[dim])
        of_all[context.shards.indices(dim)] = dead
        return of_all


def measure_in_context(
    tensor: Tensor,
    context: Context,
    needs: Sequence[Sum],
    dim: int | None,
    memory: Tensor | None = None,
    cast_of: CastOf | None = None,
) -> Measured:
    """Measure the sums of a tensor, also those that depend on its module.

    Args:
        needs: The sums, in addition to those that every tensor has.
        dim: The dimension of the units; None for the default one.
        memory, cast_of: See `measure`.

    Raises:
        HookError: The tensor has no such dimension of units.
    """
    measured = measure(tensor, needs, memory, cast_of)
    known = {need.function for need in needs if not math.isnan(measured.row[INDEX[need.name]])}
    for function in dict.fromkeys(need.function for need in needs if need.function and need.function not in known):
        for sum_, number in _imported(function)(tensor, context, dim).items():
            measured[sum_] = number
    return measured


def count_dead_units(tensor: Tensor, context: Context, dim: int | None) -> dict[Sum, Number]:
    """Return the numbers of dead units and of all units; see `Sum.function`. Empty for a tensor without units.

    Raises:
        HookError: The tensor has no such dimension of units.
    """
    along = _unit_dim_of(tensor, context, dim) if tensor.numel() else None
    if along is None:
        return {}
    dead = dead_units(strided_or_sparse(tensor), along)
    return {DEAD: dead.sum(), UNITS: len(dead)}


def norms_of_units(tensor: Tensor, context: Context, dim: int | None) -> dict[Sum, Number]:
    """Return the sum of the L2 norms of the units, and the number of units; see `Sum.function`.

    Empty for fewer than two dimensions, for tensors with NaN or infinity, and for a part of a unit.

    Raises:
        HookError: The tensor has no such dimension of units.
    """
    along = _unit_dim_of(tensor, context, dim)
    if along is None or tensor.dim() < 2:
        return {}
    complete, is_counted = complete_along(tensor, context.shards, {*range(tensor.dim())} - {along % tensor.dim()})
    if complete is None:
        return {}
    rows = strided_or_sparse(complete).to_dense().movedim(along, 0).flatten(1)
    total = torch.linalg.vector_norm(rows, dim=1, dtype=widest(rows.device)).sum()
    return {
        UNIT_NORMS: torch.where(total.isfinite(), total, math.nan) * is_counted,
        NORMED_UNITS: len(rows) * is_counted,
    }


def saturated_elements(tensor: Tensor, context: Context, dim: int | None) -> dict[Sum, Number]:  # noqa: ARG001
    """Return the number of saturated elements; see `Sum.function`. Empty for modules without known limits."""
    ends = saturation_limits(context.module) if tensor.is_floating_point() else None
    return {} if ends is None else {SATURATED: count_saturated(strided_or_sparse(tensor), ends)}


def norm_of_value(tensor: Tensor, context: Context, dim: int | None) -> dict[Sum, Number]:  # noqa: ARG001
    """Return the L2 norm of the parameter that an update belongs to; see `Sum.function`. No number if it is 0."""
    assert context.value is not None, "an update requires its parameter"
    norm = measure(context.value).statistic("l2")
    return {WEIGHT: torch.where(norm > 0, norm, math.nan) if isinstance(norm, Tensor) else norm or None}


def _custom_number(name: str, function: Callable[[Tensor], Any], tensor: Tensor, context: Context) -> Number:
    number = observe(function, to_dense(tensor, describe(context)), context)
    if isinstance(number, Tensor) and number.numel() == 1 and not number.is_complex():
        return float(number) if is_on_host(number) else number.detach()
    if number is None or isinstance(number, Real):
        return None if number is None else float(number)
    is_tensor = isinstance(number, Tensor)
    what = f"a tensor of shape {list(number.shape)} and {number.dtype}" if is_tensor else type(number).__name__
    raise HookError(f"{describe(context)}: the statistic {name!r} must return one real number, but returned {what}")


def to_dense(tensor: Tensor, reader: str) -> Tensor:
    """Return a strided tensor without graph. Sparse tensors become dense; nested ones are padded with NaN (integers with 0).

    Raises:
        HookError: The tensor is sparse, and would be larger than `MAX_BYTES`.
    """
    if is_sparse(tensor) and tensor.numel() * tensor.element_size() > MAX_BYTES:
        raise HookError(
            f"{reader} requires a dense tensor, but this one is sparse with shape {list(tensor.shape)}: it would have "
            f"{human_bytes(tensor.numel() * tensor.element_size())} (at most {human_bytes(MAX_BYTES)}). Record "
            "built-in statistics, quantiles or a histogram of the complete tensor, which read only the stored values"
        )
    readable = strided_or_sparse(tensor)
    return readable.to_dense() if is_sparse(readable) else readable


def strided_or_sparse(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.is_nested:
        padded: Tensor = torch.nested.to_padded_tensor(tensor, math.nan if tensor.is_floating_point() else 0)
        return padded
    return tensor if tensor.layout == torch.strided or is_sparse(tensor) else tensor.to_dense()


def _unit_dim_of(tensor: Tensor, context: Context, dim: int | None) -> int | None:
    """Return the dimension of a tensor's units; None if it has no units. Raise HookError if it has no such dimension."""
    if tensor.is_nested:
        return None
    of_parameter = KINDS[context.kind].family != "module"
    along = unit_dim(tensor.dim(), context.module, of_parameter=of_parameter) if dim is None else dim
    if along is not None and not -tensor.dim() <= along < tensor.dim():
        raise HookError(f"{describe(context)}: unit_dim {along} is out of range for shape {list(tensor.shape)}")
    return along
