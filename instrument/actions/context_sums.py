"""Sums of tensors that depend on more than the values, see `Sum.function`: of activations and of gradients.

Activations: the change of a residual stream, tokens, and logits. Gradients: the previous one, those of micro-batches, and updates with the
learning rate. Activations are converted to a wider dtype in parts, so that the additional memory is bounded.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..stats.flatten import is_on_host
from ..stats.portable import float32_or_wider, parts_of, softmax_of, widest
from ..tables.statistics import (
    ENTROPIES,
    INPUT_SQUARES,
    LOG_PARTITION_SQUARES,
    LOGIT_ROWS,
    NOISE,
    OUTPUT_SQUARES,
    PREVIOUS,
    PRODUCT,
    PRODUCTS,
    RATE,
    SEQUENCES,
    SIGNAL,
    TOKEN_COSINES,
    Sum,
)
from ..values.dtensor import complete_along, local_shard
from ..values.sparse import is_sparse
from .base import Context, Number, StepContext
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
    return {INPUT_SQUARES: torch.where(inputs > 0, inputs, math.nan), OUTPUT_SQUARES: outputs, PRODUCTS: products}


def token_cosines(tensor: Tensor, context: Context, dim: int | None) -> dict[Sum, Number]:  # noqa: ARG001
    """Return the sum over the samples of the mean cosine of all pairs of different tokens, and the number of samples.

    No numbers for a tensor that is not [N, T, D]. Samples with fewer than two tokens that are finite and not zero do not count.
    """
    x = _strided_reals(tensor)
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
    x = _strided_reals(tensor)
    if x is None or not x.dim() or not x.numel():
        return {}
    x, is_counted = complete_along(x, context.shards, (x.dim() - 1,))
    if x is None:
        return {}
    total = x.new_zeros(3, dtype=widest(x.device))
    for rows in parts_of(x.reshape(-1, x.shape[-1])):
        log_partitions, entropies = softmax_of(rows.to(float32_or_wider(rows.dtype)))
        finite = log_partitions.isfinite()
        numbers = (torch.where(finite, each, 0.0).sum() for each in (entropies, log_partitions.square()))
        total += torch.stack([*numbers, finite.sum()])
    total *= is_counted
    return {ENTROPIES: total[0], LOG_PARTITION_SQUARES: total[1], LOGIT_ROWS: total[2]}


def _strided_reals(tensor: Tensor) -> Tensor | None:
    """Return a strided tensor; None if its values are not real numbers of floating point, or it is sparse."""
    x = strided_or_sparse(tensor)
    return x if x.is_floating_point() and x.layout == torch.strided else None


CHUNK = 1 << 22  # elements that are converted to float64 at once


def product_with_previous(tensor: Tensor, context: Context, dim: int | None) -> dict[Sum, Number]:  # noqa: ARG001
    """Return the dot product with the previous tensor of the site, and the squared norm of that one; see `Sum.function`.

    Empty for the first tensor, for a sparse one, and if the shape has changed. The site keeps one copy of the tensor.
    """
    state, firing = context.state, (context.moment, context.call, context.backward)
    compared, known = state.get("comparison", (None, {}))
    if compared == firing:  # a condition has read this tensor already
        return dict(known)
    previous: Tensor | None = state.pop("previous", None)
    sums: dict[Sum, Number] = {}
    if not is_sparse(tensor):
        # A copy: `nan_to_num` changes nothing in place.
        state["previous"] = current = torch.nan_to_num(_real(tensor), nan=0.0, posinf=0.0, neginf=0.0)
        if previous is not None and (previous.shape, previous.device) == (current.shape, current.device):
            sums = {PRODUCT: _dot(current, previous), PREVIOUS: _dot(previous, previous)}
    state["comparison"] = firing, sums
    return sums


class MicroGradients:
    """The squared norms of the gradients of the micro-batches of a step at one parameter, and of their sum."""

    def __init__(self, replicas: int, *, is_summed: bool) -> None:
        """Create it for a number of processes, each with its own batches, whose gradients are averaged or summed."""
        self.replicas = replicas
        self.factor = replicas if is_summed else 1
        self.step = -1
        self.count: int | None = 0  # None if a micro-step had not exactly one gradient, or their sum was changed
        self.squares: float | Tensor = 0.0
        self.total: float | Tensor = 0.0
        self.written: tuple[int, int] | None = None  # the sum of the gradients so far, and the writes to it

    def add(self, gradient: Tensor, accumulated: Tensor | None, moment: StepContext, scale: Tensor | None) -> None:
        """Add the gradient of a micro-batch to those `accumulated` before it. `scale` is the factor of a gradient scaler."""
        if moment.step != self.step:
            self.step, self.count, self.squares = moment.step, 0, 0.0
        elif self.written != _writes(accumulated):  # such as the mean over all processes, without `no_sync`
            self.count = None
        self.count = self.count + 1 if self.count == moment.micro_step else None
        self.squares = self.squares + _squares(gradient, scale)

    def accumulate(self, gradient: Tensor, scale: Tensor | None) -> None:
        """Note the sum of the gradients so far."""
        self.total, self.written = _squares(gradient, scale), _writes(gradient)

    def estimates(self, gradient: Tensor, step: int) -> dict[Sum, Number]:
        """Return the sums of the statistics `gradient_noise` and `gradient_signal`, given the gradient of the step.

        With g_i the gradients of n micro-batches and G their sum, n g_i and G have the same expectation. Their squared norms
        differ by the variance of n g_i, n times that of G, minus that of G. These are the equations of appendix A.1 in
        McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", for the batch sizes B / n and B.
        """
        n, factor = self.count, self.factor**2
        if step != self.step or not n or (n == 1 and self.replicas == 1):
            return {}
        if n == 1:  # the gradient of this process, and that of all processes
            total = _squares(gradient, None)
            noise = (factor * self.squares - total) / (self.replicas - 1)
            return {NOISE: noise, SIGNAL: total - noise}
        noise = factor * (n * self.squares - self.total) / (n - 1)
        return {NOISE: noise / self.replicas, SIGNAL: factor * self.total - noise}


def noise_of_micro_batches(tensor: Tensor, context: Context, dim: int | None) -> dict[Sum, Number]:  # noqa: ARG001
    """Return the estimates of `MicroGradients`; see `Sum.function`. Empty if the gradients of a step have no known parts."""
    gradients: MicroGradients | None = context.state.get("micro_gradients")
    return {} if gradients is None else gradients.estimates(tensor, context.step)


def rate_of_update(tensor: Tensor, context: Context, dim: int | None) -> dict[Sum, Number]:  # noqa: ARG001
    """Return the learning rate of the parameter's group times the number of elements; see `Sum.function`. Empty if it is unknown or 0."""
    rate = context.state.get("rate")
    if isinstance(rate, Tensor) and not is_on_host(rate):
        return {RATE: torch.where(rate > 0, rate, math.nan) * tensor.numel()}
    return {RATE: float(rate) * tensor.numel()} if rate else {}


def _writes(gradient: Tensor | None) -> tuple[int, int] | None:
    return None if gradient is None else (id(gradient), gradient._version)


def _squares(gradient: Tensor, scale: Tensor | None) -> float | Tensor:
    """Return the squared norm of a gradient, divided by the factor of a gradient scaler. A tensor on a device stays there."""
    if is_sparse(gradient):
        return math.nan
    real = _real(local_shard(gradient))
    squares = _dot(real, real)
    unscaled: float | Tensor = squares if scale is None else squares / scale.to(squares.device, squares.dtype).square()
    return float(unscaled) if is_on_host(gradient) else unscaled


def _real(tensor: Tensor) -> Tensor:
    """Return the numbers of a tensor as a vector, without graph."""
    tensor = tensor.detach()
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).reshape(-1)


def _dot(one: Tensor, other: Tensor) -> Tensor:
    """Return the dot product of two vectors, in float64 where the device has it."""
    wide = widest(one.device)
    products = [torch.dot(a.to(wide), b.to(wide)) for a, b in zip(one.split(CHUNK), other.split(CHUNK), strict=True)]
    return torch.stack(products).sum() if len(products) > 1 else products[0]
