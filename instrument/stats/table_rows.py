"""What record hooks compute for tables other than `stats`: the interface, and quantiles and histograms."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from ..values.dtensor import NOT_SHARDED, Shards
from .distribution import distribution
from .measure import Measured
from .merge import Array, merge_distributions, sketch

Values = Sequence[float | None] | Tensor
"""Numbers, None for no value; or on the device of a tensor, NaN for no value."""


class HookCall(Protocol):
    """The call of a hook: an `instrument.Context`."""

    hook: str
    module: nn.Module
    kind: str
    path: str
    call: int
    recompute: bool
    state: dict[str, Any]
    unit_dim: int | None
    targets: Tensor | None
    shards: Shards
    measured: Measured | None


class Measure(Protocol):
    """Computes the cells of a table that follow the identity columns. It is equal, with the same repr, in all processes.

    A measure that depends on more than the values also has a method `of_call(tensor, call)`. It returns the measure of a call, or None
    if the tensor gets no row.
    """

    @property
    def size(self) -> int:
        """The number of numbers in a row, for the estimate of its bytes."""

    def values(self, tensor: Tensor) -> Values | Callable[[], Values]:
        """Measure a tensor, which is not modified.

        Args:
            tensor: Any layout, dtype and device. It may change as soon as this returns.

        Returns:
            The numbers, or a function that computes them when the step ends, outside the hook. Default: those of `part`.
        """
        return self.part(tensor, NOT_SHARDED)

    def cells(self, values: Sequence[float | None], shape: tuple[int, ...]) -> tuple[Any, ...]:
        """Return the cells of a row from the numbers on the host and the shape of the tensor."""

    def part(self, tensor: Tensor, shards: Shards) -> Tensor | Callable[[], Tensor]:
        """Measure one process's part of a tensor, for `reduce: global`: float64 [numbers], equally many in all processes.

        Returns:
            The numbers, or a function that computes them when the step ends.
        """

    def merged(self, parts: Array) -> tuple[Any, ...]:
        """Return the cells of a row from the parts of all processes, [processes, numbers]; NaN for a missing part."""


@dataclass(frozen=True)
class Distributions:
    """Quantiles at some levels, and a histogram with this number of bins, 0 for none: the table `distributions`; see `Measure`."""

    quantiles: tuple[float, ...] = ()
    histogram: int = 0

    @property
    def size(self) -> int:
        return 2 * len(self.quantiles) + self.histogram

    def values(self, tensor: Tensor) -> Values:
        return distribution(tensor, self.quantiles, self.histogram)

    def cells(self, values: Sequence[float | None], shape: tuple[int, ...] = ()) -> tuple[Any, ...]:  # noqa: ARG002
        """Return the cells of the columns `sampled` to `counts`."""
        numbers: Iterator[Any] = (None if number is None or math.isnan(number) else number for number in values)
        sampled = quantiles = low = high = counts = None
        if self.quantiles:
            sampled = int(next(numbers))
            quantiles = [next(numbers) for _ in self.quantiles]
            quantiles = quantiles if sampled else None
        if self.histogram:
            low, high = next(numbers), next(numbers)
            counts = [int(next(numbers)) for _ in range(self.histogram)]
        return sampled, list(self.quantiles) or None, quantiles, low, high, counts

    def part(self, tensor: Tensor, shards: Shards) -> Tensor:  # noqa: ARG002
        return sketch(tensor, bool(self.quantiles), self.histogram)

    def merged(self, parts: Array) -> tuple[Any, ...]:
        sampled, *rest = merge_distributions(parts, self.quantiles, self.histogram)
        return (sampled if self.quantiles else None, list(self.quantiles) or None, *rest)


def measure_of_call(measure: Measure, tensor: Tensor, call: HookCall) -> Measure | None:
    """Return the measure of a call; None if the tensor gets no row."""
    of_call = getattr(measure, "of_call", None)
    return measure if of_call is None else of_call(tensor, call)
