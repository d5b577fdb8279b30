"""Singular values of a tensor viewed as a matrix [first dimension, all others]: the table `spectra`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..values.dtensor import Shards
from .merge import Array
from .portable import widest


@dataclass(frozen=True)
class Spectrum:
    """The largest singular values, the spectral norm and the stable rank; see `instrument.stats.table_rows.Measure`.

    Attributes:
        spectrum: The number of singular values.
    """

    spectrum: int

    @property
    def size(self) -> int:
        """See `Measure`."""
        return self.spectrum + 2

    def values(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Return a function that computes the singular values, and the stable rank as the last number."""
        matrix = _matrix(tensor)
        return lambda: self._of(_singular_values(matrix))

    def _of(self, singular: Tensor) -> Tensor:
        """Return the largest singular values, and the stable rank: the sum of their squares relative to the largest one."""
        return torch.cat([singular[: self.spectrum], (singular / singular[:1]).square().sum()[None]])

    def cells(self, values: Sequence[float | None], shape: tuple[int, ...] | None) -> tuple[Any, ...]:
        """See `Measure`."""
        *largest, rank = (None if value is None or math.isnan(value) else value for value in values)
        norm = largest[0] if largest else None
        is_known = norm is not None or not largest
        return largest if is_known else None, norm, rank if norm else None, None if shape is None else list(shape)

    def part(self, tensor: Tensor, shards: Shards) -> Callable[[], Tensor]:
        """Return a function that computes the triangular factor of a shard, and its number of rows and columns.

        The factors of all shards along the first dimension, one above the other, have the singular values of the full tensor. Shards
        along other dimensions are columns of the matrix, whose order does not matter: it is transposed.

        Raises:
            ValueError: The tensor is sharded along its first dimension and along others, or it is complex.
        """
        dims, largest = shards
        if (0 in dims and len(dims) > 1) or tensor.is_complex():
            what = (
                "is complex"
                if tensor.is_complex()
                else f"is sharded along the dimensions {' and '.join(map(str, dims))}"
            )
            raise ValueError(f"a tensor that {what} has no spectrum with reduce: global")
        matrix = _matrix(tensor)
        if dims and 0 not in dims:
            return partial(_triangle, matrix.mT, math.prod(largest[1:]))
        return partial(_triangle, matrix, largest[0] if dims else len(matrix))

    def merged(self, parts: Array) -> tuple[Any, ...]:
        """See `Measure`."""
        factors, rows, columns = torch.from_numpy(parts[:, :-2]), parts[:, -2], np.nanmax(parts[:, -1], initial=1.0)
        singular = _singular_values(factors.reshape(-1, int(columns)))
        return self.cells(self._of(singular[: int(np.nansum(rows))]).tolist(), None)


def _matrix(tensor: Tensor) -> Tensor:
    """Return a copy as a matrix in the widest dtype. The caller may change the tensor before the step ends."""
    dense = tensor.detach().to_dense()
    dtype = widest(dense.device)
    return dense.to(dtype.to_complex() if dense.is_complex() else dtype, copy=True).flatten(1)


def _singular_values(matrix: Tensor) -> Tensor:
    """Return all singular values, descending; NaN if an element is not finite."""
    finite = matrix.isfinite().all()
    return torch.where(finite, torch.linalg.svdvals(torch.where(finite, matrix, 0.0)), math.nan)


def _triangle(matrix: Tensor, most_rows: int) -> Tensor:
    """Return the triangular factor, with rows of zeros, and the number of rows and columns of the matrix.

    Args:
        matrix: [rows, columns], real.
        most_rows: The largest number of rows of any shard.

    Returns:
        float64 [min(most_rows, columns) * columns + 2]. The factor is NaN if an element is not finite.
    """
    rows, columns = matrix.shape
    finite = matrix.isfinite().all()
    factor = torch.linalg.qr(torch.where(finite, matrix, 0.0), mode="r").R
    full = torch.nn.functional.pad(factor, (0, 0, 0, min(most_rows, columns) - len(factor)))
    return torch.cat([torch.where(finite, full, math.nan).flatten(), full.new_tensor([rows, columns])]).to(
        torch.float64
    )
