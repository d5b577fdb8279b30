"""What a cast of a tensor to a narrow format would lose: the table `casts`.

An element x is multiplied by the scale, rounded to the format (half to even, as PyTorch rounds), limited to the largest number of the
format, and divided by the scale. It underflows if it becomes zero, and overflows if the rounded number exceeds the largest one: there,
versions and formats of PyTorch return the largest number, infinity or NaN. Elements are first converted to float32, as PyTorch does. NaN
and infinity do not count.

Blocks are consecutive elements of the last dimension, in convolutions of the channels, and in a weight of its inputs: the dimension
over which the product of the forward pass sums. The last block of a row may be smaller.

The compiled kernel casts each chunk of a CPU tensor behind its sums, so that memory is read once. With the scale `amax`, it reads the
tensor again, because the scale follows from the sums. Tensors whose elements are converted or moved first are read again, too.

The first scale of `previous` is 1, as in NVIDIA's TransformerEngine (`DelayedScalingRecipeState` of `transformer_engine.pytorch`).
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
from ..tables.kinds import KINDS
from ..values.dtensor import Shards
from .cpu_kernel import DTYPE_OF_KIND, KernelCast, lost_by_cast
from .flatten import stored_elements
from .measure import Measured, measure
from .merge import Array
from .portable import parts_of, widest
from .table_rows import Call, Distributions

_BLOCKS = Distributions((0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99))  # of the errors of blocks
FINITE, UNDERFLOWS, OVERFLOWS, ERRORS, SQUARES, SCALE, NUMBERS = range(7)
"""The numbers of a tensor: counts, sums of squared errors and of squares, and the scale; how many these are."""


@dataclass(frozen=True)
class Casts:
    """What a cast loses; see `instrument.stats.table_rows.Measure`.

    Attributes:
        cast: The format and the scale.
        along: The dimension of the blocks.
        measured: The sums of the tensor; None to measure it.
        amaxes: The largest magnitude of the previous tensor of the site, by key; a tensor on a device stays there.
        key: The path, the call, and whether it is recomputed.
    """

    cast: Cast
    along: int = -1
    measured: Measured | None = field(default=None, repr=False, compare=False)
    amaxes: dict[Any, float | Tensor] = field(default_factory=dict, repr=False, compare=False)
    key: tuple[str, int, bool] = field(default=("", 0, False), repr=False, compare=False)

    @property
    def format(self) -> Format:
        """The format."""
        return FORMATS[self.cast.to]

    @property
    def size(self) -> int:
        """See `Measure`."""
        return 4 + (len(_BLOCKS.quantiles) if self.format.block else 0)

    def of_call(self, tensor: Tensor, call: Call) -> Casts:  # noqa: ARG002
        """Return the measure of a call; see `Measure`."""
        along, module, of_parameter = -1, call.module, KINDS[call.kind].family != "module"
        if isinstance(module, torch.nn.modules.conv._ConvNd):
            along -= len(module.kernel_size) + (module.transposed and of_parameter)
        elif type(module).__name__ == "Conv1D":  # of transformers, with a weight [in, out]
            along -= of_parameter
        key = call.path, call.call, call.recompute
        amaxes = call.state.setdefault("amaxes", {})
        return replace(self, along=along, measured=call.measured, amaxes=amaxes, key=key)

    def values(self, tensor: Tensor) -> Tensor:
        """Return the numbers of a tensor, and with blocks the quantiles of their errors."""
        numbers, errors = self._measure(tensor)
        if errors is None:
            return numbers
        quantiles = _BLOCKS.values(errors)
        if not isinstance(quantiles, Tensor):
            quantiles = numbers.new_tensor([math.nan if value is None else value for value in quantiles])
        return torch.cat([numbers, quantiles])

    def cells(self, values: Sequence[float | None], shape: tuple[int, ...] | None) -> tuple[Any, ...]:
        """See `Measure`."""
        known: list[Any] = [math.nan if value is None else value for value in values[:NUMBERS]]
        blocks = _BLOCKS.cells(values[NUMBERS:])[2] if self.format.block else None
        return (*self._cells(np.array(known), blocks), None if shape is None else list(shape))

    def _cells(self, numbers: Array, blocks: list[float] | None) -> tuple[Any, ...]:
        finite, underflows, overflows, errors, squares, scale = numbers.tolist()
        if not math.isfinite(scale):
            return self.cast.to, None, None, None, None, None
        fractions = (underflows / finite, overflows / finite) if finite else (None, None)
        error = errors / squares if squares else None
        return self.cast.to, None if self.format.scales == 1 else scale, *fractions, error, blocks

    def part(self, tensor: Tensor, shards: Shards) -> Tensor:
        """Return the numbers of `values` for one process's part, with a sketch of the errors of blocks."""
        numbers, errors = self._measure(tensor)
        return numbers.double() if errors is None else torch.cat([numbers.double(), _BLOCKS.part(errors, shards)])

    def merged(self, parts: Array) -> tuple[Any, ...]:
        """Return the cells of a row. Each part has its own scale; the row has the smallest one."""
        numbers = np.nansum(parts[:, :NUMBERS], axis=0)
        numbers[SCALE] = np.nanmin(parts[:, SCALE], initial=math.inf)
        blocks = _BLOCKS.merged(parts[:, NUMBERS:])[2] if self.format.block else None
        return (*self._cells(numbers, blocks), None)

    def known(self, tensor: Tensor) -> KernelCast | None:
        """Return the cast of a CPU tensor, for the read of its sums; each element is then read once.

        None if its scale depends on the tensor (`amax`), and if its rows are not in the order of memory.
        """
        scale, is_plain = self._known_scale, tensor.is_cpu and tensor.layout == torch.strided and not tensor.is_nested
        if scale is None or isinstance(scale, Tensor) or not is_plain:
            return None
        if not self.format.block:
            return KernelCast(tensor.numel(), tensor.numel(), self.format, scale)
        x = self._along_last(tensor.detach())
        is_in_order = x.is_contiguous() and x.data_ptr() == tensor.data_ptr()
        return KernelCast(x.numel(), x.shape[-1], self.format, scale) if is_in_order else None

    @property
    def _scale(self) -> float | str:
        """The field `scale`, or its default value."""
        return self.cast.scale or ("amax" if self.format.scales == 2 else 1.0)

    @property
    def _known_scale(self) -> Tensor | float | None:
        """The scale if it does not depend on the tensor, float32 or a given number."""
        if not isinstance(self._scale, str):
            return self._scale
        return scale_of(self.amaxes.get(self.key, 0.0), self.format) if self._scale == "previous" else None

    def _measure(self, tensor: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the numbers of a tensor, and the errors of its blocks [blocks]; None without blocks."""
        form, known, zeros, measured = self.format, self._known_scale, 0, self.measured
        if isinstance(self._scale, str):
            measured = measured or measure(tensor, cast=self.known(tensor))
            self.amaxes[self.key] = measured.amax
        scale = scale_of(self.amaxes[self.key], form) if known is None else known
        if measured is not None and measured.lost is not None:
            (numbers, errors), measured.lost = measured.lost, None  # the errors of many blocks need memory
        else:
            if form.block:
                x = self._rows(tensor)
            else:
                vector, zeros = stored_elements(tensor)
                x = _castable(vector)[None]
            numbers, errors = lost_by_cast(x, form, scale) or lost_by_operations(x, form, scale)
        numbers[FINITE] += zeros
        numbers[SCALE] = scale
        return numbers, errors if form.block else None

    def _rows(self, tensor: Tensor) -> Tensor:
        """Return the elements as rows that are divided into blocks, of a dtype that the kernel casts, contiguous [rows, length]."""
        x = tensor.detach().resolve_neg()
        if x.is_nested:
            x = torch.nested.to_padded_tensor(_castable(x), math.nan)
        x = x.to_dense()
        x = _castable(x.to(torch.complex128).abs() if x.is_complex() else x)
        return self._along_last(x).flatten(0, -2).contiguous()

    def _along_last(self, x: Tensor) -> Tensor:
        """Return a tensor with the blocks along the last dimension."""
        return x.movedim(self.along, -1) if x.dim() >= max(2, -self.along) else x.reshape(1, -1)


def _castable(x: Tensor) -> Tensor:
    """Return a dtype that the kernel casts."""
    return x if x.dtype in DTYPE_OF_KIND.values() else x.to(torch.float32)


def scale_of(amax: float | Tensor, form: Format) -> float | Tensor:
    """Return the scale for the largest magnitude of a tensor, as float32; 1 for a tensor without finite elements other than 0."""
    if not isinstance(amax, Tensor):
        return float(np.float32(min(form.top / amax, torch.finfo(torch.float32).max))) if 0 < amax < math.inf else 1.0
    scale = (form.top / amax).clamp(max=torch.finfo(torch.float32).max)
    return torch.where((amax > 0) & (amax < math.inf), scale, 1.0).to(torch.float32)


def lost_by_operations(x: Tensor, form: Format, scale: Tensor | float) -> tuple[Tensor, Tensor]:
    """Return what a cast loses by operations on any device, without waiting for it. Same computation as `casts.c`.

    Args:
        x: float64, float32, bfloat16 or float16, [rows, length].
        form: The format.
        scale: The scale of the tensor.

    Returns:
        The numbers, in the widest dtype of the device, with 0 for the scale, and the error of each block, [blocks].
    """
    x = x if x.numel() else x.new_full((1, 1), math.nan)
    parts = parts_of(x if form.block else x.flatten())
    if not isinstance(scale, Tensor):
        scale = torch.full((), scale, dtype=torch.float32, device=x.device)
    lost = [_lost(part, form, scale) for part in parts]
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
    """Return the magnitudes as float32, 0 for NaN and infinity. Finite numbers of float64 other than zero stay finite and not zero."""
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
