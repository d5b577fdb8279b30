"""Record: statistics of a tensor, its distribution, its values. The tensor itself is left as it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from typing import cast

import torch
from torch import Tensor

from ..errors import HookError
from ..spec.base import parse_slice
from ..spec.kinds import KINDS
from ..spec.record import RecordSpec
from ..spec.statistics import COUNTS, OF_VALUES
from ..stats.distribution import distribution
from ..stats.kernel import Values, measure
from ..stats.merge import MEASURED, Part, part_of, sketch
from ..stats.units import dead_fraction, dead_units, range_of, ratio_of_norms, saturated_fraction, unit_dim
from .base import Context, Rows
from .intervention import describe


def cut(tensor: Tensor, spec: RecordSpec) -> Tensor:
    """The part of a tensor that a spec keeps, as a view: `samples`, then `slice`, then `max_elements` (flat)."""
    part = tensor
    if spec.samples is not None and part.dim():
        part = part[: spec.samples]
    if spec.slice is not None:
        part = part[parse_slice(spec.slice)]
    if spec.max_elements is not None and part.numel() > spec.max_elements:
        part = part.reshape(-1)[: spec.max_elements]
    return part


def as_plain(tensor: Tensor) -> Tensor:
    """A tensor as one block: a sparse one made dense, the parts of a nested one padded with NaN (integers with 0)."""
    if tensor.is_nested:
        padded: Tensor = torch.nested.to_padded_tensor(tensor, math.nan if tensor.is_floating_point() else 0)
        return padded
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def more_of(name: str, tensor: Tensor, context: Context, dim: int | None) -> float | Tensor | None:
    """A statistic of more than a tensor's values.

    Args:
        name: `dead_fraction`, `saturated_fraction` or `update_ratio`.
        tensor: The tensor.
        context: The firing that it is of.
        dim: The dimension that units are along; the usual one without it.

    Returns:
        A number, or a float64 scalar on another device, where NaN is none; None where the statistic has no meaning.

    Raises:
        HookError: The tensor has no such dimension.
    """
    if name == "update_ratio":
        assert context.value is not None, "an update is handed on with its parameter"
        return ratio_of_norms(tensor, context.value)
    if name == "saturated_fraction":
        ends = range_of(context.module)
        return None if ends is None or not tensor.is_floating_point() else saturated_fraction(as_plain(tensor), ends)
    along = _along(tensor, context, dim)
    return None if along is None else dead_fraction(as_plain(tensor.detach()), along)


def _along(tensor: Tensor, context: Context, dim: int | None) -> int | None:
    """The dimension that a tensor's units are along; None where it has none.

    Raises:
        HookError: The tensor has no such dimension.
    """
    if tensor.is_nested:
        return None
    of_parameter = KINDS[context.kind].family != "module"
    along = unit_dim(tensor, context.module, of_parameter=of_parameter) if dim is None else dim
    if along is not None and not -tensor.dim() <= along < tensor.dim():
        raise HookError(f"{describe(context)}: unit_dim {along} is not in shape {list(tensor.shape)}")
    return along


class Record:
    """Writes the rows that a record spec asks for.

    Attributes:
        statistics: The names of those that are measured.
        more: Of those, the ones that are of more than the values.
        levels: Of the quantiles; none where there are none.
        bins: Of the histogram; 0 where there is none.
        keeps_tensors: Whether values are kept.
    """

    def __init__(self, spec: RecordSpec, rows: Rows) -> None:
        self.spec = spec
        self.rows = rows
        self.statistics = spec.statistics
        self.more = tuple(name for name in spec.statistics if name not in OF_VALUES)
        self.levels = spec.quantiles or ()
        self.bins = spec.histogram or 0
        self.keeps_tensors = spec.tensors
        self.dtype = None if spec.dtype is None else getattr(torch, spec.dtype)

    def without_the_dearest(self) -> tuple[Record, str] | None:
        """The same action without what costs most of it, and what that was; None where nothing dear is left."""
        lighter = copy(self)
        if self.keeps_tensors:
            lighter.keeps_tensors = False
            return lighter, "tensors"
        if self.bins:
            lighter.bins = 0
            return lighter, "histogram"
        if self.levels:
            lighter.levels = ()
            return lighter, "quantiles"
        for dear in (*self.more, *(name for name in self.statistics if name == "l1")):
            lighter.statistics = tuple(name for name in self.statistics if name != dear)
            if set(lighter.statistics) <= set(COUNTS):
                break  # nothing of what was asked for would be left
            lighter.more = tuple(name for name in self.more if name != dear)
            return lighter, dear
        return None

    def prepare(self, tensors: Sequence[Tensor]) -> None:
        """Nothing: each tensor is recorded for itself."""

    def __call__(self, tensor: Tensor, context: Context) -> None:
        merges = self.rows.merges(context)
        if self.statistics and merges:
            self.rows.add_part(context, self.statistics, *self._measure_part(tensor, context))
        elif self.statistics:
            self.rows.add_stats(context, self.statistics, self._measure(tensor, context))
        if (self.levels or self.bins) and merges:
            self.rows.add_sketch(context, self.levels, self.bins, sketch(tensor, bool(self.levels), self.bins))
        elif self.levels or self.bins:
            found = distribution(tensor, self.levels, self.bins)
            self.rows.add_distribution(context, self.levels, self.bins, found)
        if self.keeps_tensors:
            plain = as_plain(tensor.detach())
            try:
                kept = cut(plain, self.spec)
            except IndexError as error:
                shape = list(plain.shape)
                raise HookError(f"{describe(context)}: slice {self.spec.slice!r} is not in shape {shape}") from error
            # Of a complex tensor another type would keep the real part only.
            self.rows.add_tensor(context, plain.shape, kept, None if kept.is_complex() else self.dtype)

    def _measure_part(self, tensor: Tensor, context: Context) -> tuple[Part, Tensor | None]:
        """What other processes' parts are merged with; which units are dead, bool [units], if that is asked."""
        saturated = more_of("saturated_fraction", tensor, context, None) if "saturated_fraction" in self.more else None
        weight: float | Tensor | None = None
        if "update_ratio" in self.more and context.value is not None:
            weight = measure(context.value, ("l2",))[0]
        names = (*MEASURED, "l1") if "l1" in self.statistics else MEASURED
        along = _along(tensor, context, self.spec.unit_dim) if "dead_fraction" in self.more else None
        dead = None if along is None else dead_units(as_plain(tensor.detach()), along)
        # Shards are along dimension 0, as fully_shard makes them: each has other units.
        apart = dead if context.scope == "shard" and along == 0 else None
        return part_of(measure(tensor, names), saturated, weight, apart), None if apart is not None else dead

    def _measure(self, tensor: Tensor, context: Context) -> Values:
        if not self.more:
            return measure(tensor, self.statistics)
        values = measure(tensor, self.statistics[: -len(self.more)])
        others = [more_of(name, tensor, context, self.spec.unit_dim) for name in self.more]
        if not isinstance(values, Tensor):
            return [*values, *cast(list[float | None], others)]  # of a tensor on the CPU they are numbers too
        none = torch.full((), math.nan, dtype=torch.float64, device=values.device)
        return torch.cat([values, torch.stack([other if isinstance(other, Tensor) else none for other in others])])
