"""What record hooks compute for tables other than `stats`: the interface, and quantiles and histograms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from .distribution import distribution, distribution_columns
from .measure import Values
from .merge import Array, merge_distributions, sketch


class Measure(Protocol):
    """Computes the cells of a table that follow the identity columns. It is equal, with the same repr, in all processes."""

    @property
    def size(self) -> int:
        """The number of numbers in a row, for the estimate of its bytes."""

    def values(self, tensor: Tensor) -> Values | Callable[[], Values]:
        """Measure a tensor, which is not modified.

        Args:
            tensor: Any layout, dtype and device. It may change as soon as this returns.

        Returns:
            The numbers, or a function that computes them when the step ends, outside the hook.
        """

    def cells(self, values: Sequence[float | None], shape: tuple[int, ...]) -> tuple[Any, ...]:
        """Return the cells of a row.

        Args:
            values: The numbers; those of a device have NaN for None.
            shape: The shape of the tensor.
        """

    def part(self, tensor: Tensor) -> Tensor | Callable[[], Tensor]:
        """Measure one process's part of a tensor, for `reduce: global`: float64 [numbers], equally many in all processes.

        Returns:
            The numbers, or a function that computes them when the step ends.
        """

    def merged(self, parts: Array) -> tuple[Any, ...]:
        """Return the cells of a row from the parts of all processes, [processes, numbers]; NaN for a missing part."""


@dataclass(frozen=True)
class Distributions:
    """Quantiles and histograms: the table `distributions`.

    Attributes:
        quantiles: The levels of the quantiles; None for no quantiles.
        histogram: The number of bins; None for no histogram.
    """

    quantiles: tuple[float, ...] | None
    histogram: int | None

    @property
    def levels(self) -> tuple[float, ...]:
        """The levels of the quantiles; empty for no quantiles."""
        return self.quantiles or ()

    @property
    def bins(self) -> int:
        """The number of bins; 0 for no histogram."""
        return self.histogram or 0

    @property
    def size(self) -> int:
        """See `Measure`."""
        return 2 * len(self.levels) + self.bins

    def values(self, tensor: Tensor) -> Values:
        """See `Measure`."""
        return distribution(tensor, self.levels, self.bins)

    def cells(self, values: Sequence[float | None], shape: tuple[int, ...]) -> tuple[Any, ...]:  # noqa: ARG002
        """See `Measure`."""
        return distribution_columns(self.levels, self.bins, values)

    def part(self, tensor: Tensor) -> Tensor:
        """See `Measure`."""
        return sketch(tensor, bool(self.levels), self.bins)

    def merged(self, parts: Array) -> tuple[Any, ...]:
        """See `Measure`."""
        sampled, *rest = merge_distributions(parts, self.levels, self.bins)
        return (sampled if self.levels else None, list(self.levels) or None, *rest)
