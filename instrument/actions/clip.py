"""Clipping: limit values or norms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, is_grad_enabled
from torch._C._nn import hardtanh

from ..runtime.own_operations import own_collectives
from ..stats.cpu_kernel import effect_of_clip
from ..stats.directed_rounding import round_down, round_up, toward_zero
from ..stats.portable import widest
from ..values.dtensor import total_norm
from .base import Context
from .builtin.clip import ClipSpec

EPSILON = 1e-6  # As in `torch.nn.utils.clip_grad_norm_`: added to the norm, which may be zero.
MIN_WEIGHT_NORM = 1e-3  # The value of Brock et al. 2021.
# Compensates rounding: 0.07 as a float is slightly more than 0.07, but 0.07 of 100 elements has to be 7 elements.
ROUNDING_MARGIN = 1.0 - 2.0**-50


def clip_values(tensor: Tensor, low: float | None, high: float | None) -> Tensor:
    """Clamp all values of a floating-point tensor to [low, high]; None for no bound. NaN stays NaN. Shape and dtype are kept.

    In float16 and bfloat16, rounding moves a bound by up to 0.4%. There the bound becomes the nearest representable
    number within [low, high]. If no such number exists, all values become the largest number below `high`. In wider
    dtypes the result is bit-identical to `torch.clamp`.
    """
    if tensor.dtype.itemsize < 4:
        low = None if low is None else round_up(low, tensor.dtype)
        high = None if high is None else round_down(high, tensor.dtype)
    if tensor.requires_grad and is_grad_enabled():
        is_inside, _ = effect_of_clip(tensor, low, high) or (False, None)
        if is_inside:  # all elements are finite, and none equals a bound, where only the gradient of clamp passes
            # Same values, and one operation for the gradient instead of five.
            return hardtanh(tensor, -math.inf if low is None else low, math.inf if high is None else high)
    return tensor.clamp(low, high)


def clip_coefficient(norm: Tensor, bound: float) -> Tensor:
    """Return the factor that limits a norm to `bound`. `min(1, bound / (norm + 1e-6))`, as in `torch.nn.utils.clip_grad_norm_`."""
    return (bound / (norm + EPSILON)).clamp(max=1.0)


def clip_norm(tensor: Tensor, bound: float, *, ord: float = 2.0, per_sample: bool = False) -> tuple[Tensor, Tensor]:
    """Scale a floating-point tensor so that its norm of an order is at most `bound`, or that of each sample (dimension 0).

    Norms and products are computed in float32 or wider: half precision would overflow or lose small values and factors.
    The results are rounded towards zero, so that the norm stays within the bound.

    Returns:
        The clipped tensor, same shape and dtype, and the factor: a scalar, or shape [samples].
    """
    wide = torch.promote_types(tensor.dtype, torch.float32)
    if not tensor.numel():  # Some norms of no elements are undefined.
        shape = tensor.shape[:1] if per_sample else ()
        return tensor.clone(), torch.ones(shape, dtype=wide.to_real(), device=tensor.device)
    if per_sample and tensor.dim():
        samples = tensor.flatten(1) if tensor.dim() > 1 else tensor.unsqueeze(1)  # [samples, elements]
        factor = clip_coefficient(torch.linalg.vector_norm(samples, ord, dim=1, dtype=wide), bound)
        factors = factor.view(-1, *[1] * (tensor.dim() - 1))  # [samples, 1, ...]
    else:
        factor = factors = clip_coefficient(torch.linalg.vector_norm(tensor, ord, dtype=wide), bound)
    return toward_zero(tensor.to(wide) * factors, tensor.dtype), factor


@own_collectives()
def total_norm_factor(tensors: Sequence[Tensor], bound: float, *, ord: float = 2.0) -> Tensor:
    """Return the factor that limits the norm of all tensors, as one vector, to `bound`.

    Bit-identical to the factor of `torch.nn.utils.clip_grad_norm_`. For sharded tensors, the norm is that of all
    shards; all processes must call this function.
    """
    nonempty = [tensor for tensor in tensors if tensor.numel()]  # Some norms of no elements are undefined.
    return clip_coefficient(total_norm(nonempty, ord), bound)


def clip_quantile(tensor: Tensor, quantile: float) -> Tensor:
    """Clamp the values of a floating-point tensor to [-q, q], where q is a quantile of its magnitudes, at a level from 0 to 1.

    The quantile is the nearest rank, computed without NaN. NaN stays NaN. The bound is a constant for autograd. Shape and dtype are kept.
    """
    magnitudes = tensor.detach().flatten().abs()
    if not magnitudes.numel():
        return tensor.clone()
    valid = ~magnitudes.isnan()
    # NaN is sorted last, and the index is a tensor: this code never waits for the device.
    ordered = torch.where(valid, magnitudes, torch.inf).sort().values
    rank = (valid.sum(dtype=widest(tensor.device)) * (quantile * ROUNDING_MARGIN)).ceil().long().sub(1).clamp(min=0)
    bound = ordered.gather(0, rank.view(1)).view(())
    return tensor.clamp(-bound, bound)


def clip_ratio(gradient: Tensor, weight: Tensor, ratio: float) -> Tensor:
    """Scale the gradient of each unit so that its norm is at most `ratio` times the norm of the weight, which has the same shape.

    Adaptive gradient clipping: Brock et al. 2021, "High-performance large-scale image recognition without
    normalization", equation 3. A unit is an index of dimension 0 of a weight, or a complete bias. Weight norms are at
    least 1e-3, so that weights that start at zero can change. Precision and rounding are those of `clip_norm`.
    """
    wide = torch.promote_types(gradient.dtype, torch.float32)
    dims = tuple(range(1, weight.dim())) if weight.dim() > 1 else None
    norm_of = partial(torch.linalg.vector_norm, dim=dims, keepdim=True, dtype=wide)
    norm = norm_of(gradient)
    bound = ratio * norm_of(weight.detach()).clamp(min=MIN_WEIGHT_NORM)
    clipped = toward_zero(gradient.to(wide) * (bound / norm.clamp(min=EPSILON)), gradient.dtype)
    return torch.where(norm > bound, clipped, gradient)


class Clip:
    """The clip action of a spec."""

    def __init__(self, spec: ClipSpec) -> None:
        self.spec = spec
        self.total_factor: Tensor | None = None

    @property
    def entrywise(self) -> bool:
        """Whether the result for a sparse tensor follows from its entries alone."""
        spec = self.spec
        if spec.norm is not None:
            return spec.norm_scope != "sample"
        return spec.quantile is None and spec.ratio is None and (spec.min or 0.0) <= 0.0 <= (spec.max or 0.0)

    def prepare(self, tensors: Sequence[Tensor]) -> None:
        """Compute the common factor if the norm is over all tensors."""
        if self.spec.norm is not None and self.spec.norm_scope == "all":
            self.total_factor = total_norm_factor(tensors, self.spec.norm, ord=self.spec.ord)

    def __call__(self, tensor: Tensor, context: Context) -> tuple[Tensor, Tensor | None]:
        spec = self.spec
        if spec.norm is not None and spec.norm_scope == "all":
            assert self.total_factor is not None, "scope all requires a call of prepare first"
            return tensor * self.total_factor.to(tensor.device, tensor.dtype), self.total_factor
        if spec.norm is not None:
            clipped, factor = clip_norm(tensor, spec.norm, ord=spec.ord, per_sample=spec.norm_scope == "sample")
            return clipped, factor if factor.dim() == 0 else None
        if spec.quantile is not None:
            return clip_quantile(tensor, spec.quantile), None
        if spec.ratio is not None:
            assert context.value is not None, "clipping by ratio requires the weight"
            return clip_ratio(tensor, context.value, spec.ratio), None
        low, high = (spec.min, spec.max) if spec.value is None else (-spec.value, spec.value)
        return clip_values(tensor, low, high), None
