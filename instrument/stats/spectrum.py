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

    def part(self, tensor: Tensor, shard_dims: tuple[int, ...]) -> Callable[[], Tensor]:
        """Return a function that computes the triangular factor of a shard, and its number of rows.

        The factors of all shards along the first dimension, one above the other, have the singular values of the full tensor. Shards
        along other dimensions are columns of the matrix, whose order does not matter: it is transposed.

        Raises:
            ValueError: The tensor is sharded along its first dimension and along others.
        """
        if 0 in shard_dims and len(shard_dims) > 1:
            dims = " and ".join(map(str, shard_dims))
            raise ValueError(
                f"a tensor that is sharded along the dimensions {dims} has no spectrum with reduce: global"
            )
        matrix = _matrix(tensor)
        return partial(_triangle, matrix if 0 in shard_dims or not shard_dims else matrix.mT)

    def merged(self, parts: Array) -> tuple[Any, ...]:
        """See `Measure`."""
        factors, rows = torch.from_numpy(parts[:, :-1]), parts[:, -1]
        singular = _singular_values(factors.reshape(-1, math.isqrt(factors.shape[1])))
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


def _triangle(matrix: Tensor) -> Tensor:
    """Return the triangular factor, with rows of zeros: [columns * columns], and the number of rows of the matrix.

    The factor is NaN if an element is not finite.
    """
    finite = matrix.isfinite().all()
    factor = torch.linalg.qr(torch.where(finite, matrix, 0.0), mode="r").R
    square = torch.nn.functional.pad(factor, (0, 0, 0, factor.shape[1] - len(factor)))
    return torch.cat([torch.where(finite, square, math.nan).flatten(), square.new_tensor([len(matrix)])]).to(
        torch.float64
    )
