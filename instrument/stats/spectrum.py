"""Singular values of a tensor viewed as a matrix [units, all other dimensions]: the table `spectra`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..tables.kinds import KINDS
from ..values.dtensor import Shards, joined_shards
from .merge import Array
from .portable import widest
from .table_rows import HookCall
from .unit_statistics import unit_dim


@dataclass(frozen=True)
class Spectrum:
    """The largest singular values, the spectral norm, and two ranks; see `instrument.stats.table_rows.Measure`."""

    spectrum: int
    units: int = 0  # the dimension of the units
    is_of_batch: bool = False  # whether the parts of several processes have all units, and different samples

    @property
    def size(self) -> int:
        return self.spectrum + 3

    def of_call(self, tensor: Tensor, call: HookCall) -> Spectrum | None:
        """Return the measure of a call; None for a nested tensor, whose parts differ in shape. See `Measure`."""
        of_batch = KINDS[call.kind].family == "module"
        units = (
            unit_dim(tensor.dim(), call.module, of_parameter=not of_batch) if call.unit_dim is None else call.unit_dim
        )
        if units is None or tensor.is_nested:
            return None
        return replace(self, units=units % tensor.dim(), is_of_batch=of_batch)

    def values(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Return a function that computes the singular values, then the stable rank and the effective rank."""
        matrix = self._matrix(tensor)
        return lambda: self._of(_singular_values(_wide(matrix)))

    def _of(self, singular: Tensor) -> Tensor:
        """Return the largest singular values, and both ranks."""
        stable = (singular / singular[:1]).square().sum()
        effective = torch.special.entr(singular / singular.sum()).sum().exp()
        return torch.cat([singular[: self.spectrum], stable[None], effective[None]])

    def _matrix(self, tensor: Tensor) -> Tensor:
        """Return a copy as a matrix [units, all other dimensions]. The caller may change the tensor before the step ends."""
        return tensor.detach().to_dense().movedim(self.units, 0).flatten(1).clone()

    def cells(self, values: Sequence[float | None], shape: tuple[int, ...] | None) -> tuple[Any, ...]:
        *largest, stable, effective = (None if value is None or math.isnan(value) else value for value in values)
        norm = largest[0] if largest else None
        is_known = norm is not None or not largest
        ranks = (stable, effective) if norm else (None, None)
        return largest if is_known else None, norm, *ranks, None if shape is None else list(shape)

    def part(self, tensor: Tensor, shards: Shards) -> Callable[[], Tensor]:
        """Return a function that computes the triangular factor of a part; see `_triangle`.

        The factors of all shards along the dimension of the units, one above the other, have the singular values of the full tensor.
        Other parts are columns of the matrix, whose order does not matter: it is transposed. If a tensor is sharded along the
        dimension of its units and along others, or has other samples in other processes, the shards are joined along the others.

        Raises:
            ValueError: The tensor is complex.
        """
        if tensor.is_complex():
            raise ValueError("a tensor that is complex has no spectrum with reduce: global")
        dims, largest, is_counted = shards.dims, shards.largest, True
        if self.units in dims and (len(dims) > 1 or (self.is_of_batch and shards.batches > 1)):
            dims = () if self.is_of_batch else (self.units,)
            tensor, is_counted = joined_shards(tensor, shards, None if self.is_of_batch else self.units)
        matrix, numel = self._matrix(tensor), 0 if self.is_of_batch else math.prod(shards.shape)
        if self.units in dims or not (dims or self.is_of_batch):
            factor = partial(_triangle, matrix, largest[self.units] if dims else len(matrix), numel)
        else:
            sizes = (size for dim, size in enumerate(largest) if dim != self.units)
            most_columns = math.prod(sizes) if dims and not self.is_of_batch else len(matrix)
            factor = partial(_triangle, matrix.mT, most_columns, numel)
        return factor if is_counted else lambda: torch.full_like(factor(), math.nan)

    def merged(self, parts: Array) -> tuple[Any, ...]:
        parts = parts[~np.isnan(parts[:, -1])]
        rows, columns, numel = parts[:, -3:].T
        singular = _singular_values(torch.from_numpy(parts[:, :-3]).reshape(-1, int(columns.max(initial=1.0))))
        is_complete = rows @ columns >= numel.max(initial=0.0)  # no process has missed its shard
        values = self._of(singular[: int(rows.sum())] if is_complete else singular.new_full((self.spectrum,), math.nan))
        return self.cells(values.tolist(), None)


def _wide(matrix: Tensor) -> Tensor:
    dtype = widest(matrix.device)
    return matrix.to(dtype.to_complex() if matrix.is_complex() else dtype)


def _singular_values(matrix: Tensor) -> Tensor:
    """Return all singular values, descending; NaN if an element is not finite."""
    finite = matrix.isfinite().all()
    return torch.where(finite, torch.linalg.svdvals(torch.where(finite, matrix, 0.0)), math.nan)


def _triangle(matrix: Tensor, most_rows: int, numel: int) -> Tensor:
    """Return the triangular factor of a real matrix, with rows of zeros, its numbers of rows and columns, and `numel`.

    float64 [min(most_rows, columns) * columns + 3]. The factor is NaN if an element is not finite. `numel` is the number of elements
    of all shards; 0 if each process has other samples.
    """
    matrix = _wide(matrix)
    rows, columns = matrix.shape
    finite = matrix.isfinite().all()
    factor = torch.linalg.qr(torch.where(finite, matrix, 0.0), mode="r").R
    full = torch.nn.functional.pad(factor, (0, 0, 0, min(most_rows, columns) - len(factor)))
    return torch.cat([torch.where(finite, full, math.nan).flatten(), full.new_tensor([rows, columns, numel])]).to(
        torch.float64
    )
