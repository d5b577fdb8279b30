"""Clip: keep the values, or their norm, within a bound."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from ..sharded import whole
from ..spec.interventions import ClipSpec
from ..stats.rounding import round_down, round_up, toward_zero
from .base import Context

EPSILON = 1e-6  # of torch.nn.utils.clip_grad_norm_: added to the norm, so that a norm of zero divides nothing
MIN_WEIGHT_NORM = 1e-3  # of Brock et al. 2021
WRITTEN = 1.0 - 2.0**-50  # so that 0.07 of 100 elements are 7, though the float 0.07 is a little more


def clip_values(tensor: Tensor, low: float | None, high: float | None) -> Tensor:
    """No value below `low`, none above `high`; NaN stays NaN. Any floating dtype, same shape.

    In half precision, where rounding moves a bound by up to 0.4%, it becomes the nearest number within it. If no number
    lies between the two, all values become the one below `high`. In wider dtypes it is `torch.clamp`, to the bit.
    """
    if tensor.element_size() < 4:
        low = None if low is None else round_up(low, tensor.dtype)
        high = None if high is None else round_down(high, tensor.dtype)
    return tensor.clamp(low, high)


def clip_coefficient(norm: Tensor, bound: float) -> Tensor:
    """What to multiply by so that a norm does not exceed `bound`: `min(1, bound / (norm + 1e-6))`, as
    `torch.nn.utils.clip_grad_norm_` has it."""
    return (bound / (norm + EPSILON)).clamp(max=1.0)


def clip_norm(tensor: Tensor, bound: float, *, ord: float = 2.0, per_sample: bool = False) -> tuple[Tensor, Tensor]:
    """The tensor scaled down so that its norm, or that of each sample of it (dimension 0), is at most `bound`.

    Norms are formed and multiplied with in float32 at least, so that half precision neither overflows nor loses
    small values and small factors; its elements are rounded towards zero, so that the norm stays within the bound.

    Returns:
        The clipped tensor, same shape and dtype, and the factor: a scalar, or shape [samples].
    """
    wide = torch.promote_types(tensor.dtype, torch.float32)
    if per_sample and tensor.dim():
        samples = tensor.flatten(1) if tensor.dim() > 1 else tensor.unsqueeze(1)  # [samples, elements]
        norm = torch.linalg.vector_norm(samples, ord, dim=1, dtype=wide)
        factor = clip_coefficient(norm, bound)
        each = factor.view(-1, *[1] * (tensor.dim() - 1))  # [samples, 1, ...]
    else:
        factor = each = clip_coefficient(torch.linalg.vector_norm(tensor, ord, dtype=wide), bound)
    return toward_zero(tensor.to(wide) * each, tensor.dtype), factor


def total_norm_factor(tensors: Sequence[Tensor], bound: float, *, ord: float = 2.0) -> Tensor:
    """What all the tensors are multiplied by so that their norm as one long vector is at most `bound`.

    To the last bit the factor of `torch.nn.utils.clip_grad_norm_`. Of tensors of which each process has a shard the norm is that
    of all shards: all processes have to ask for it.
    """
    return clip_coefficient(whole(get_total_norm(tensors, ord)), bound)


def clip_quantile(tensor: Tensor, quantile: float) -> Tensor:
    """No magnitude above this quantile of the tensor's magnitudes, by the nearest rank: values [-q, q].

    NaN stays and takes no part; the bound itself is a constant to the gradient.
    """
    magnitudes = tensor.detach().flatten().abs()
    if not magnitudes.numel():
        return tensor.clone()
    there = ~magnitudes.isnan()
    # Sorted with NaN last, and indexed by a tensor: nothing here waits for the device.
    ordered = torch.where(there, magnitudes, torch.inf).sort().values
    rank = (there.sum(dtype=torch.float64) * (quantile * WRITTEN)).ceil().long().sub(1).clamp(min=0)
    bound = ordered.gather(0, rank.view(1)).view(())
    return tensor.clamp(-bound, bound)


def clip_ratio(gradient: Tensor, weight: Tensor, ratio: float) -> Tensor:
    """Each unit's gradient scaled down so that its norm is at most `ratio` of its weight's: adaptive gradient clipping.

    A unit is an index of dimension 0 of a weight, and the whole of a bias. Weights' norms count as 1e-3 at least, so
    that what starts at zero can leave it. Brock et al. 2021, "High-performance large-scale image recognition without
    normalization", equation 3. In half precision as `clip_norm`.
    """
    wide = torch.promote_types(gradient.dtype, torch.float32)
    dims = tuple(range(1, weight.dim())) if weight.dim() > 1 else None
    norm_of = partial(torch.linalg.vector_norm, dim=dims, keepdim=True, dtype=wide)
    norm = norm_of(gradient)
    bound = ratio * norm_of(weight.detach()).clamp(min=MIN_WEIGHT_NORM)
    clipped = toward_zero(gradient.to(wide) * (bound / norm.clamp(min=EPSILON)), gradient.dtype)
    return torch.where(norm > bound, clipped, gradient)


class Clip:
    """The clip that a spec asks for."""

    def __init__(self, spec: ClipSpec) -> None:
        self.spec = spec
        self.total_factor: Tensor | None = None

    @property
    def entrywise(self) -> bool:
        """A bound that a zero keeps to, or a norm that does not ask where the zeros are."""
        spec = self.spec
        if spec.norm is not None:
            return spec.norm_scope != "sample"
        return spec.quantile is None and spec.ratio is None and (spec.min or 0.0) <= 0.0 <= (spec.max or 0.0)

    def prepare(self, tensors: Sequence[Tensor]) -> None:
        """Form the one factor for all of them, where the norm is of all of them."""
        if self.spec.norm is not None and self.spec.norm_scope == "all":
            self.total_factor = total_norm_factor(tensors, self.spec.norm, ord=self.spec.ord)

    def __call__(self, tensor: Tensor, context: Context) -> tuple[Tensor, Tensor | None]:
        spec = self.spec
        if spec.norm is not None:
            return self._clip_norm(tensor, spec.norm)
        if spec.quantile is not None:
            return clip_quantile(tensor, spec.quantile), None
        if spec.ratio is not None:
            assert context.value is not None, "kinds whose gradients are clipped by ratio hand over the weight"
            return clip_ratio(tensor, context.value, spec.ratio), None
        low, high = (spec.min, spec.max) if spec.value is None else (-spec.value, spec.value)
        return clip_values(tensor, low, high), None

    def _clip_norm(self, tensor: Tensor, bound: float) -> tuple[Tensor, Tensor | None]:
        if self.spec.norm_scope == "all":
            assert self.total_factor is not None, "kinds whose norm is of all tensors call prepare first"
            return tensor * self.total_factor.to(tensor.device, tensor.dtype), self.total_factor
        clipped, factor = clip_norm(tensor, bound, ord=self.spec.ord, per_sample=self.spec.norm_scope == "sample")
        return clipped, factor if factor.dim() == 0 else None
