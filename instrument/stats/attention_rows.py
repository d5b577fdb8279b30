"""Sums over the rows of attention weights: the entropy, the uniformity, and the weight of the first position."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..tables.statistics import FIRST, ROW_ENTROPIES, ROWS, UNIFORMITIES, WIDE_ROWS, Sum
from .portable import widest


def row_sums(weights: Tensor, context: Any, dim: int | None) -> dict[Sum, Tensor]:  # noqa: ARG001
    """Return sums over the rows of weights [..., keys], floating point, as scalars on their device; see `Sum.function`.

    A row has a sum of 1. Rows of zeros, whose keys are all masked, and rows with NaN are left out. Weights that underflow to zero
    count as masked.
    """
    parts, index = getattr(context, "split", None) or (None, 0)
    if parts is None or parts.parts[index] is not weights:  # a field of the spec selects elements of the part
        return {sum_: of_parts[0] for sum_, of_parts in _sums_of_parts(weights[None]).items()}
    if ROWS not in parts.sums:
        parts.sums |= {sum_: of_parts.unbind() for sum_, of_parts in _sums_of_parts(parts.whole).items()}
    return {sum_: parts.sums[sum_][index] for sum_ in (ROWS, ROW_ENTROPIES, WIDE_ROWS, UNIFORMITIES, FIRST)}


def _sums_of_parts(weights: Tensor) -> dict[Sum, Tensor]:
    """Return the sums of each part of weights [parts, ..., keys]: [parts]. One operation for all parts is faster."""
    wide = widest(weights.device)
    p = weights.detach().to(wide if weights.dtype == torch.float64 else torch.float32)
    if p.is_cpu:  # `entr` takes twice the time there
        # The logarithm is finite for a weight of zero, NaN for a negative one.
        entropies = torch.linalg.vecdot((p + torch.finfo(p.dtype).tiny).log_(), p).neg_().to(wide)  # [...]
    else:
        entropies = torch.special.entr(p).sum(-1, dtype=wide)
    counts = p.sign().sum(-1).to(wide)  # faster than a sum of booleans
    is_row = entropies.isfinite() & (counts > 0)
    is_wide = is_row & (counts > 1)
    first = p[..., 0] if p.shape[-1] else entropies
    numbers = {
        ROWS: is_row,
        ROW_ENTROPIES: torch.where(is_row, entropies, 0.0),
        WIDE_ROWS: is_wide,
        UNIFORMITIES: torch.where(is_wide, entropies / counts.log(), 0.0),
        FIRST: torch.where(is_wide, first, 0.0),
    }
    return {sum_: term.reshape(len(term), -1).sum(1, dtype=wide) for sum_, term in numbers.items()}
