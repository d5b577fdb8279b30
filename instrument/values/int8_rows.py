"""Tensors as 8-bit integers with one scale per row: a row is the last dimension, and the scale its largest magnitude / 127.

These are the vector-wise absmax scales of Dettmers et al., "LLM.int8()", NeurIPS 2022, section 2.1. A value x is stored as the code
round(x / scale) and read as code * scale, so that |x - read| <= scale / 2, in addition to the rounding of float32. A row with an
infinity or NaN has no such scale: all of its values are read as NaN. A row is stored as its scale (float32) and its codes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

NAME = "int8_scaled"
"""What the column `dtype` has for them."""
SCALE_BYTES = 4


def int8_rows(tensor: Tensor) -> Tensor:
    """Return the rows of a floating-point tensor as stored: uint8, [rows, 4 + length of a row]; [0, 4] without elements."""
    if not tensor.numel():
        return tensor.new_empty((0, SCALE_BYTES), dtype=torch.uint8)
    rows = tensor.detach().float().reshape(-1, tensor.shape[-1] if tensor.dim() else 1)
    scales = rows.abs().amax(dim=1, keepdim=True) / 127
    scales = scales.where(scales.isfinite(), math.nan)
    codes = (rows / scales).nan_to_num(0).round().clamp(-127, 127).to(torch.int8)
    return torch.cat([scales.view(torch.uint8), codes.view(torch.uint8)], dim=1)


def dtype_of_copy(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of a copy that is passed to `instrument.Sink.keep` with a dtype later."""
    return tensor.dtype if dtype in (None, torch.int8) else dtype


def rounded(tensor: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, torch.dtype | None]:
    """Return the arguments of `instrument.Sink.keep` for a sink that stores no scales: instead of int8, float32 as read from a file."""
    if dtype != torch.int8 or not tensor.is_floating_point():
        return tensor, dtype
    stored = int8_rows(tensor)
    # A single row counts as contiguous, whatever its stride is.
    scales = stored[:, :SCALE_BYTES].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return (stored[:, SCALE_BYTES:].view(torch.int8) * scales).view(tensor.shape), None
