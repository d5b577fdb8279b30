"""What a cast of a tensor to a narrow format would lose: the table `casts`.

An element x is multiplied by the scale, rounded to the format (half to even, as PyTorch rounds), limited to the largest number of the
format, and divided by the scale. It underflows if it becomes zero, and overflows if the rounded number exceeds the largest one: there,
versions and formats of PyTorch return the largest number, infinity or NaN. Elements are first converted to float32, as PyTorch does. NaN
and infinity do not count.

Blocks are consecutive elements of the last dimension, in convolutions of the channels, and in a weight of its inputs: the dimension
over which the product of the forward pass sums. The last block of a row may be smaller.

The elements are read once, for the statistics and the cast: the compiled kernel casts each chunk of a CPU tensor behind its sums, and the
Triton kernel each block. So a scale cannot follow from the largest magnitude of the same tensor. With `previous`, it follows from that of
the previous tensor of the site, as by `DelayedScaling(margin=1)` of NVIDIA's TransformerEngine. The cast of the first tensor is unknown:
TransformerEngine scales it by 1, with which small gradients would underflow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..tables.formats import FORMATS, Cast, Format
from ..tables.kinds import KINDS
from ..values.dtensor import Shards
from .cast_operations import NUMBERS, SCALE, TensorCast
from .cpu_kernel import DTYPE_OF_KIND
from .measure import CastOf, Measured, measure
from .merge import Array
from .portable import widest
from .table_rows import Distributions, HookCall

_BLOCKS = Distributions((0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99))  # of the errors of blocks


@dataclass(frozen=True)
class Casts:
    """What a cast loses; see `instrument.stats.table_rows.Measure`."""

    cast: Cast
    along: int = -1  # the dimension of the blocks
    # The sums of the tensor; None to measure it.
    measured: Measured | None = field(default=None, repr=False, compare=False)
    # The scale that follows from the previous tensor of the site, by key; a tensor on a device stays there.
    scales: dict[Any, float | Tensor] = field(default_factory=dict, repr=False, compare=False)
    # The path, the call, and whether it is recomputed.
    key: tuple[str, int, bool] = field(default=("", 0, False), repr=False, compare=False)

    @property
    def format(self) -> Format:
        return FORMATS[self.cast.to]

    @property
    def size(self) -> int:
        return 4 + (len(_BLOCKS.quantiles) if self.format.block else 0)

    def of_call(self, tensor: Tensor, call: HookCall) -> Casts | None:
        """Return the casts of a call. None for other dtypes, and for formats with blocks if the tensor is sparse or nested."""
        is_strided = tensor.layout == torch.strided and not tensor.is_nested
        if tensor.dtype not in DTYPE_OF_KIND.values() or not (is_strided or not self.format.block):
            return None
        along, module, of_parameter = -1, call.module, KINDS[call.kind].family != "module"
        if isinstance(module, torch.nn.modules.conv._ConvNd):
            along -= len(module.kernel_size) + (module.transposed and of_parameter)
        elif type(module).__name__ == "Conv1D":  # of transformers, with a weight [in, out]
            along -= of_parameter
        key = call.path, call.call, call.recompute
        scales = call.state.setdefault("scales", {})
        return replace(self, along=along, measured=call.measured, scales=scales, key=key)

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
        known = parts[~np.isnan(parts[:, SCALE]), :NUMBERS]
        numbers = known.sum(axis=0)
        numbers[SCALE] = known[:, SCALE].min(initial=math.inf)
        blocks = _BLOCKS.merged(parts[:, NUMBERS:])[2] if self.format.block else None
        return (*self._cells(numbers, blocks), None)

    @property
    def cast_of(self) -> CastOf | None:
        """The cast that is computed together with the sums. None for the first tensor of a site, whose scale is unknown."""
        known = isinstance(self._scale, Tensor) or not math.isnan(self._scale)
        return partial(TensorCast.along, self.along, self.format, self._scale) if known else None

    @property
    def _scale(self) -> Tensor | float:
        """The scale, float32 or a given number; NaN if it is unknown."""
        return self.scales.get(self.key, math.nan) if self._is_delayed else float(self.cast.scale or 1.0)

    @property
    def _is_delayed(self) -> bool:
        """Whether the scale follows from the previous tensor."""
        return self.cast.scale == "previous" or (self.cast.scale is None and self.format.scales == 2)

    def _measure(self, tensor: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the numbers of a tensor, and the errors of its blocks [blocks]; None without blocks."""
        scale, measured = self._scale, self.measured or measure(tensor, cast_of=self.cast_of)
        if self._is_delayed:
            self.scales[self.key] = next_scale(measured.amax, self.format, scale)
        unknown = torch.full((NUMBERS,), math.nan, dtype=widest(tensor.device), device=tensor.device)
        numbers, errors = measured.lost or (unknown, unknown)
        measured.lost = None  # the errors of many blocks need memory
        numbers[SCALE] = scale
        return numbers, errors if self.format.block else None


def next_scale(amax: float | Tensor, form: Format, scale: float | Tensor) -> float | Tensor:
    """Return the scale of the next tensor, float32: the present one after a tensor without finite elements other than 0."""
    top, most = form.top, torch.finfo(torch.float32).max
    if not isinstance(amax, Tensor):
        return float(np.float32(min(top / min(amax, most), most))) if 0 < amax < math.inf else scale
    known = (top / amax.clamp(max=most)).clamp(max=most)
    return torch.where((amax > 0) & (amax < math.inf), known, scale).to(torch.float32)
