"""Sums of activations that depend on more than the values: the change of a residual stream, tokens, and logits; see `Sum.function`.

Tensors are converted to a wider dtype in parts, so that the additional memory is bounded.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..stats.portable import parts_of, softmax_of, widest
from ..tables.statistics import (
    ENTROPIES,
    INPUT_SQUARES,
    LOG_PARTITION_SQUARES,
    LOGIT_ROWS,
    OUTPUT_SQUARES,
    PRODUCTS,
    SEQUENCES,
    TOKEN_COSINES,
    Sum,
)
from ..values.dtensor import complete_along
from .base import Context, Number
from .measurement import strided_or_sparse


def sums_with_input(tensor: Tensor, context: Context, dim: int | None) -> dict[Sum, Number]:  # noqa: ARG001
    """Return the squared norms of the input and of the output, and their product, of the change of a module.

    The elements are those at which the change is finite. There is no number for the input if it is zero.
    """
    assert context.value is not None, "a change requires the module's input"
    change, given = tensor.detach().reshape(-1), context.value.detach().reshape(-1)
    dtype = widest(change.device)
    total = change.new_zeros(3, dtype=dtype)
    for parts in zip(parts_of(change), parts_of(given), strict=True):
        added, start = (part.to(dtype) for part in parts)
        unknown = start * 0.0 + added * 0.0  # NaN where one is not finite; faster than `isfinite`
        one, other = ((each + unknown).nan_to_num_(0.0, 0.0, 0.0) for each in (start, start + added))
        total += torch.stack([torch.dot(*pair) for pair in ((one, one), (other, other), (one, other))])
    inputs, outputs, products = total
    return {
        INPUT_SQUARES: torch.where(inputs > 0, inputs, math.nan),
        OUTPUT_SQUARES: outputs,
        PRODUCTS: products,
    }


def token_cosines(tensor: Tensor, context: Context, dim: int | None) -> dict[Sum, Number]:  # noqa: ARG001
    """Return the sum over the samples of the mean cosine of all pairs of different tokens, and the number of samples.

    No numbers for a tensor that is not [N, T, D]. Samples with fewer than two tokens that are finite and not zero do not count.
    """
    x = _real(tensor)
    if x is None or x.dim() != 3:
        return {}
    x, is_counted = complete_along(x, context.shards, (1, 2))
    if x is None:
        return {}
    dtype = widest(x.device)
    total = x.new_zeros(2, dtype=dtype)
    for part in parts_of(x):
        sample = part.to(dtype)  # [samples, T, D]
        norms = torch.linalg.vector_norm(sample, dim=-1)
        counted = (norms > 0) & norms.isfinite()
        weights = torch.where(counted, 1 / norms, 0.0)
        directions = torch.bmm(weights[:, None], sample.nan_to_num(0.0, 0.0, 0.0))  # [samples, 1, D], their sum
        tokens = counted.sum(-1)
        cosines = (directions.square().sum((1, 2)) - tokens) / (tokens * (tokens - 1))
        total += torch.stack([torch.where(tokens > 1, cosines, 0.0).sum(), (tokens > 1).sum()])
    total *= is_counted
    return {TOKEN_COSINES: total[0], SEQUENCES: total[1]}


def logit_sums(tensor: Tensor, context: Context, dim: int | None) -> dict[Sum, Number]:  # noqa: ARG001
    """Return sums over the rows of logits [..., classes]: the entropies in nats, the squares of logsumexp, and the number of rows.

    Rows without a finite logsumexp do not count: NaN, plus infinity, or only minus infinity. No numbers for a scalar.
    """
    x = _real(tensor)
    if x is None or not x.dim() or not x.numel():
        return {}
    x, is_counted = complete_along(x, context.shards, (x.dim() - 1,))
    if x is None:
        return {}
    total = x.new_zeros(3, dtype=widest(x.device))
    for rows in parts_of(x.reshape(-1, x.shape[-1])):
        log_partitions, entropies = softmax_of(rows.to(torch.promote_types(rows.dtype, torch.float32)))
        finite = log_partitions.isfinite()
        numbers = (torch.where(finite, each, 0.0).sum() for each in (entropies, log_partitions.square()))
        total += torch.stack([*numbers, finite.sum()])
    total *= is_counted
    return {ENTROPIES: total[0], LOG_PARTITION_SQUARES: total[1], LOGIT_ROWS: total[2]}


def _real(tensor: Tensor) -> Tensor | None:
    """Return a strided tensor; None if its values are not real numbers of floating point, or it is sparse."""
    x = strided_or_sparse(tensor)
    return x if x.is_floating_point() and x.layout == torch.strided else None
