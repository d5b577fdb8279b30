"""What a cast of a tensor to a narrow format would lose: the table `casts`.

An element x is multiplied by the scale, rounded to the format (half to even, as PyTorch rounds), limited to the largest number of the
format, and divided by the scale. It underflows if it becomes zero, and overflows if the rounded number exceeds the largest one: there,
versions and formats of PyTorch return the largest number, infinity or NaN. Elements are first converted to float32, as PyTorch does. NaN
and infinity do not count.

Blocks are consecutive elements of the last dimension, and in convolutions of the channels: the dimension over which a product sums. The
last block of a row may be smaller.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..tables.formats import FORMATS, Cast, Format
from ..values.dtensor import Shards
from .cpu_kernel import lost_by_cast
from .distribution import distribution, distribution_on_device
from .flatten import stored_elements
from .merge import Array, merge_distributions, sketch
from .portable import parts_of, widest
from .table_rows import Call, Values

BLOCK_LEVELS = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
"""The levels of the quantiles of the errors of blocks."""
FINITE, UNDERFLOWS, OVERFLOWS, ERRORS, SQUARES, AMAX, SCALE = range(7)
"""The numbers of a tensor: counts, the sums of squared errors and of squares, the largest magnitude, and the scale."""
_NUMBERS = 7
_LARGEST = torch.finfo(torch.float32).max
_LEAST = 2.0**-149  # the smallest number of float32
_CONVOLUTION = torch.nn.modules.conv._ConvNd


@dataclass(frozen=True)
class Casts:
    """What a cast loses; see `instrument.stats.table_rows.Measure`.

    Attributes:
        cast: The format and the scale.
        along: The dimension of the blocks.
        amaxes: The largest magnitude of the previous tensor of the site, by path and call; a tensor on a device stays there.
        key: The path and the call.
    """

    cast: Cast
    along: int = -1
    amaxes: dict[Any, float | Tensor] = field(default_factory=dict, repr=False, compare=False)
    key: tuple[str, int] = field(default=("", 0), repr=False, compare=False)

    @property
    def format(self) -> Format:
        """The format."""
        return FORMATS[self.cast.to]

    @property
    def size(self) -> int:
        """See `Measure`."""
        return 4 + (len(BLOCK_LEVELS) if self.format.block else 0)

    def of_call(self, tensor: Tensor, call: Call) -> Casts:  # noqa: ARG002
        """Return the measure of a call; see `Measure`."""
        along = 1 if isinstance(call.module, _CONVOLUTION) else -1
        return replace(self, along=along, amaxes=call.state.setdefault("amaxes", {}), key=(call.path, call.call))

    def values(self, tensor: Tensor) -> Values:
        """Return the numbers of a tensor, and with blocks the quantiles of their errors."""
        numbers, errors = self._measure(tensor)
        if errors is None:
            return numbers
        if isinstance(numbers, Tensor):
            return torch.cat([numbers, distribution_on_device(errors, BLOCK_LEVELS, 0)])
        return [*numbers, *distribution(errors, BLOCK_LEVELS, 0)]

    def cells(self, values: Sequence[float | None], shape: tuple[int, ...] | None) -> tuple[Any, ...]:
        """See `Measure`."""
        numbers, quantiles = values[:_NUMBERS], values[_NUMBERS + 1 :]
        known: list[Any] = [math.nan if value is None else value for value in numbers]
        finite, squares, scale = known[FINITE], known[SQUARES], known[SCALE]
        cells: list[Any] = [self.cast.to, None, None, None, None, None]
        is_known = math.isfinite(scale)
        if is_known and self.format.scales != 1:
            cells[1] = scale
        if is_known and finite > 0:
            cells[2:4] = known[UNDERFLOWS] / finite, known[OVERFLOWS] / finite
            error = known[ERRORS] / squares if squares > 0 else math.nan
            cells[4] = error if math.isfinite(error) else None
            if quantiles and not any(value is None or math.isnan(value) for value in quantiles):
                cells[5] = list(quantiles)
        return (*cells, None if shape is None else list(shape))

    def part(self, tensor: Tensor, shards: Shards) -> Tensor:  # noqa: ARG002
        """Return the numbers of `values` for one process's part, with a sketch of the errors of blocks."""
        numbers, errors = self._measure(tensor)
        measured = torch.as_tensor(numbers, dtype=torch.float64)
        return measured if errors is None else torch.cat([measured, sketch(errors, True, 0)])

    def merged(self, parts: Array) -> tuple[Any, ...]:
        """Return the cells of a row. Each part has its own scale; the row has the smallest one."""
        numbers = np.nansum(parts[:, :_NUMBERS], axis=0)
        numbers[SCALE] = np.nanmin(parts[:, SCALE], initial=math.inf)
        quantiles: list[float | None] = []
        if self.format.block:
            sampled, found, *_ = merge_distributions(parts[:, _NUMBERS:], BLOCK_LEVELS, 0)
            quantiles = [sampled, *(found or (None,) * len(BLOCK_LEVELS))]
        return self.cells([*numbers.tolist(), *quantiles], None)

    def _measure(self, tensor: Tensor) -> tuple[list[float] | Tensor, Tensor | None]:
        """Return the numbers of a tensor, NaN for an unknown scale, and the errors of its blocks [blocks]; None without blocks."""
        form = self.format
        if form.block:
            x, zeros = self._rows(tensor), 0
        else:
            vector, zeros = stored_elements(tensor)
            x = _float32(vector)[None]
        given, amax = self.cast.scale or ("amax" if form.scales == 2 else 1.0), self.amaxes.get(self.key)
        scale: float | Tensor | None = None if isinstance(given, str) else given
        if given == "previous":
            scale = 1.0 if amax is None else scale_of(amax, form)
        errors = None if not form.block else torch.empty(_blocks(x, form), dtype=widest(x.device), device=x.device)
        by_kernel = lost_by_cast(x, form, scale, errors) if x.is_cpu and not isinstance(scale, Tensor) else None
        numbers: Any = lost_by_operations(x, form, scale, errors) if by_kernel is None else by_kernel
        numbers[FINITE] += zeros
        if given == "previous":
            self.amaxes[self.key] = numbers[AMAX]
            if amax is None:
                numbers[SCALE] = math.nan
        return numbers, errors

    def _rows(self, tensor: Tensor) -> Tensor:
        """Return the elements as rows that are divided into blocks, float32 or bfloat16, contiguous [rows, length]."""
        x = tensor.detach().resolve_neg()
        if x.is_nested:
            x = torch.nested.to_padded_tensor(_float32(x), math.nan)
        x = x.to_dense()
        x = _float32(x.to(torch.complex128).abs() if x.is_complex() else x)
        return x.reshape(1, -1) if x.dim() < 2 else x.movedim(self.along, -1).flatten(0, -2).contiguous()


def scale_of(amax: float | Tensor, form: Format) -> Any:
    """Return the scale for the largest magnitude of a tensor, rounded to float32; 1 for a tensor of zeros."""
    if not isinstance(amax, Tensor):
        return float(np.float32(min(form.top / amax, _LARGEST))) if amax > 0 else 1.0
    scale = (form.top / amax.to(widest(amax.device))).clamp(max=_LARGEST)
    return torch.where(amax > 0, scale, 1.0).to(torch.float32)


def _float32(x: Tensor) -> Tensor:
    """Return real elements as float32 or bfloat16. Finite elements of float64 stay finite, and those that are not zero stay so."""
    if x.dtype in (torch.float32, torch.bfloat16):
        return x
    narrow = x.to(torch.float32)
    if x.dtype == torch.float64:
        narrow = torch.where(x.isfinite(), narrow.clamp(-_LARGEST, _LARGEST), narrow)
        narrow = torch.where((narrow == 0) & (x != 0), _LEAST, narrow)
    return narrow


def _blocks(x: Tensor, form: Format) -> int:
    rows, length = x.shape
    return int(rows * -(-length // form.block))


def lost_by_operations(x: Tensor, form: Format, scale: float | Tensor | None, errors: Tensor | None) -> Tensor:
    """Return what a cast loses by operations on any device, without waiting for it. Same computation as `casts.c`.

    Args:
        x: float32 or bfloat16, [rows, length].
        form: The format.
        scale: The scale of the tensor; None to scale its largest magnitude to the largest number.
        errors: Receives the error of each block, [blocks]; None without blocks.

    Returns:
        The numbers from `FINITE` to `SCALE`, in the widest dtype of the device.
    """
    dtype = widest(x.device)
    parts = parts_of(x if form.block else x.flatten())
    numbers = torch.zeros(_NUMBERS, dtype=dtype, device=x.device)
    if not x.numel():
        numbers[SCALE] = 1.0 if scale is None else scale
        return numbers
    numbers[AMAX] = torch.stack([_magnitudes(part)[0].amax() for part in parts]).amax()
    if isinstance(scale, float):
        scale = torch.full((), scale, device=x.device)
    of_tensor = scale_of(numbers[AMAX], form) if scale is None else scale
    numbers[SCALE] = of_tensor
    begin = 0
    for part in parts:
        magnitudes, finite = _magnitudes(part)
        factor, inverse = of_tensor, 1.0 / of_tensor.to(dtype)
        if form.block:
            padded = torch.nn.functional.pad(magnitudes, (0, -part.shape[-1] % form.block))
            magnitudes = padded.unflatten(-1, (-1, form.block))
            factor, inverse = _scales_of_blocks(magnitudes.amax(-1, keepdim=True), form, of_tensor)
        rounded = _rounded(magnitudes * factor, form)
        lost = magnitudes.to(dtype) - rounded.clamp(max=form.largest).to(dtype) * inverse
        squares = magnitudes.to(dtype).square()
        counts = finite, (rounded == 0) & (magnitudes != 0), rounded > form.largest
        numbers[:ERRORS] += torch.stack([mask.sum() for mask in counts])
        numbers[ERRORS : SQUARES + 1] += torch.stack([lost.square().sum(), squares.sum()])
        if errors is not None:
            of_blocks = (lost.square().sum(-1) / squares.sum(-1)).flatten()
            errors[begin : begin + len(of_blocks)] = of_blocks
            begin += len(of_blocks)
    return numbers


def _magnitudes(part: Tensor) -> tuple[Tensor, Tensor]:
    """Return the magnitudes as float32, 0 for NaN and infinity, and which elements are finite."""
    magnitudes = part.to(torch.float32).abs()
    finite = magnitudes < math.inf
    return torch.where(finite, magnitudes, 0.0), finite


def _rounded(magnitudes: Tensor, form: Format) -> Tensor:
    """Return magnitudes of float32, rounded to the bits of a format, half to even. Numbers may exceed the largest one."""
    shift = 23 - form.mantissa
    bits, step = magnitudes.view(torch.int32), 2.0 ** (form.least + shift)
    normal = (bits + (1 << (shift - 1)) - 1 + ((bits >> shift) & 1)) & -(1 << shift)
    return torch.where(magnitudes < 2.0**form.least, (magnitudes + step) - step, normal.view(torch.float32))


def _scales_of_blocks(amax: Tensor, form: Format, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors of blocks before the cast, and their inverses, given the largest magnitudes and the scale of the tensor."""
    dtype = widest(amax.device)
    if form.scales == 1:
        exponent = (amax.view(torch.int32) >> 23) - 127 - math.frexp(form.largest)[1] + 1
        factor = ((127 - exponent.clamp(min=-127)) << 23).view(torch.float32) * scale
        return factor, 1.0 / factor.to(dtype)
    of_scale = FORMATS["float8_e4m3fn"]
    stored = _rounded(amax / form.largest * scale, of_scale).clamp(max=of_scale.largest)
    return torch.where(stored > 0, scale / stored, 0.0), stored.to(dtype) / scale.to(dtype)
