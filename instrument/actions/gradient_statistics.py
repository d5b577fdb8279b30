"""Sums of statistics that compare gradients: with the previous one, those of micro-batches, and updates with the learning rate."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..stats.flatten import is_on_host
from ..stats.portable import widest
from ..tables.statistics import NOISE, PREVIOUS, PRODUCT, RATE, SIGNAL, Sum
from ..values.sparse import is_sparse
from .base import Context, Number, StepContext

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
        self.count: int | None = 0  # None if a micro-step had not exactly one gradient
        self.squares: float | Tensor = 0.0
        self.total: float | Tensor = 0.0

    def add(self, gradient: Tensor, moment: StepContext, scale: Tensor | None) -> None:
        """Add the gradient of a micro-batch. `scale` is the factor of a gradient scaler."""
        if moment.step != self.step:
            self.step, self.count, self.squares = moment.step, 0, 0.0
        self.count = self.count + 1 if self.count == moment.micro_step else None
        self.squares = self.squares + _squares(gradient, scale)

    def accumulate(self, gradient: Tensor, scale: Tensor | None) -> None:
        """Note the sum of the gradients so far."""
        self.total = _squares(gradient, scale)

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


def _squares(gradient: Tensor, scale: Tensor | None) -> float | Tensor:
    """Return the squared norm of a gradient, divided by the factor of a gradient scaler. A tensor on a device stays there."""
    if is_sparse(gradient):
        return math.nan
    real = _real(gradient)
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
