"""The errors of a cast to a narrow format, by PyTorch operations on any device; see `instrument.stats.casts`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from ..tables.formats import FORMATS, Format
from .flatten import order_in_memory
from .portable import parts_of, widest

FINITE, UNDERFLOWS, OVERFLOWS, ERRORS, SQUARES, SCALE, NUMBERS = range(7)
"""The indices of the numbers of a tensor, and how many there are: counts, sums of squared errors and of squares, and the scale."""


@dataclass(slots=True)
class TensorCast:
    """The cast of a tensor, to compute together with its sums."""

    form: Format
    scale: float | Tensor  # the scale of the tensor, a number or float32 on its device
    outer: int  # the elements are read as [outer, length, inner], with blocks along `length`
    length: int
    inner: int
    # The numbers, in the widest dtype of the device, where the scale is not set, and the error of each block, [blocks]; None until they are
    # computed.
    lost: tuple[Tensor, Tensor] | None = None

    @classmethod
    def along(cls, dim: int, form: Format, scale: float | Tensor, tensor: Tensor) -> Self:
        """Return the cast of a tensor whose elements are read as by `as_vector`, with blocks along a dimension, counted from the last one.

        A tensor with blocks is strided. If it has no such dimension, or only one, all elements are one row.
        """
        length, inner = tensor.numel(), 1
        if form.block and tensor.dim() >= max(2, -dim):
            order = order_in_memory(tensor)
            length = tensor.shape[dim]
            inner = math.prod(tensor.shape[each] for each in order[order.index(tensor.dim() + dim) + 1 :])
        length, inner = max(length, 1), max(inner, 1)
        return cls(form, scale, tensor.numel() // (length * inner), length, inner)

    @property
    def blocks(self) -> int:
        return self.outer * self.inner * -(-self.length // self.form.block) if self.form.block else 0


def lost_by_operations(flat: Tensor, cast: TensorCast) -> tuple[Tensor, Tensor]:
    """Compute `TensorCast.lost` by operations on any device, without waiting for it. The computation is that of `casts.c`.

    Args:
        flat: float64, float32, bfloat16 or float16, [elements], contiguous.
    """
    form, scale = cast.form, cast.scale
    if not flat.numel():
        x = flat.new_full((1, 1), math.nan)
    elif form.block:
        x = flat.view(cast.outer, cast.length, cast.inner).mT.reshape(-1, cast.length)
    else:
        x = flat
    if not isinstance(scale, Tensor):
        scale = torch.full((), scale, dtype=torch.float32, device=x.device)
    lost = [_lost(part, form, scale) for part in parts_of(x)]
    numbers = torch.stack([each for each, _ in lost]).sum(0)
    return torch.nn.functional.pad(numbers, (0, 1)), torch.cat([each for _, each in lost])


def _lost(part: Tensor, form: Format, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers of a part, without the scale, and the errors of its blocks."""
    dtype, magnitudes = widest(part.device), _magnitudes(part)
    factor, inverse = scale, 1.0 / scale.to(dtype)
    if form.block:
        padded = torch.nn.functional.pad(magnitudes, (0, -part.shape[-1] % form.block))
        magnitudes = padded.unflatten(-1, (-1, form.block))
        factor, inverse = _scales_of_blocks(magnitudes.amax(-1, keepdim=True), form, scale)
    rounded = _rounded(magnitudes * factor, form)
    lost = magnitudes.to(dtype) - rounded.clamp(max=form.largest).to(dtype) * inverse
    errors, squares = lost.square().sum(-1), magnitudes.to(dtype).square().sum(-1)
    counts = part.isfinite(), (rounded == 0) & (magnitudes != 0), rounded > form.largest
    sums = [*(mask.sum() for mask in counts), errors.sum(), squares.sum()]
    return torch.stack([each.to(dtype) for each in sums]), (errors / squares).reshape(-1)


def _magnitudes(part: Tensor) -> Tensor:
    """Return the magnitudes as float32, 0 for NaN and infinity. Nonzero finite numbers of float64 stay nonzero and finite."""
    magnitudes = part.abs()
    if part.dtype == torch.float64:
        in_range = magnitudes.clamp(2.0**-149, torch.finfo(torch.float32).max)
        magnitudes = torch.where((magnitudes > 0) & (magnitudes < math.inf), in_range, magnitudes)
    magnitudes = magnitudes.to(torch.float32)
    return torch.where(magnitudes < math.inf, magnitudes, 0.0)


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
        exponent = (amax.view(torch.int32) >> 23) - 126 - math.frexp(form.largest)[1]
        factor = ((127 - exponent.clamp(min=-127)) << 23).view(torch.float32)
        return factor, 1.0 / factor.to(dtype)
    stored = _rounded(amax / form.largest * scale, FORMATS["float8_e4m3fn"]).clamp(max=448.0)
    return torch.where(stored > 0, scale / stored, 0.0), stored.to(dtype) / scale.to(dtype)
