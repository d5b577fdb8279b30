"""Sums over the rows of attention weights: the entropy, the uniformity, and the weight of the first position."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..tables.statistics import FIRST, ROW_ENTROPIES, ROWS, UNIFORMITIES, WIDE_ROWS, Sum
from .portable import widest


def row_sums(weights: Tensor, context: Any, dim: int | None) -> dict[Sum, Tensor]:  # noqa: ARG001
    """Return sums over the rows of weights, as scalars on their device; see `Sum.function`.

    A row has a sum of 1. Rows of zeros, whose keys are all masked, and rows with NaN are left out. Weights that underflow to zero
    count as masked.

    Args:
        weights: Floating point, [..., keys].
    """
    wide = widest(weights.device)
    p = weights.detach().to(wide if weights.dtype == torch.float64 else torch.float32)
    log_p = p.clamp_min(torch.finfo(p.dtype).tiny).log_()  # faster than `torch.special.entr`
    entropies = -log_p.mul_(p).sum(-1, dtype=wide)  # [...]
    counts = p.sign().sum(-1).to(wide)  # faster than a sum of booleans
    is_row = entropies.isfinite() & (counts > 0)
    is_wide = is_row & (counts > 1)
    first = p[..., 0] if p.shape[-1] else entropies
    terms = {
        ROWS: is_row,
        ROW_ENTROPIES: torch.where(is_row, entropies, 0.0),
        WIDE_ROWS: is_wide,
        UNIFORMITIES: torch.where(is_wide, entropies / counts.log(), 0.0),
        FIRST: torch.where(is_wide, first, 0.0),
    }
    return {sum_: term.sum(dtype=wide) for sum_, term in terms.items()}
