"""Modify: another tensor in its place, by a built-in function or by one of the user's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError, Mistake
from ..spec.fields import Target
from ..spec.hooks import FunctionSpec, MeanSpec, ModifySpec, NoiseSpec, PenaltySpec, SignSpec, ZeroSpec
from ..targets import locate
from .base import Context


def zero(tensor: Tensor) -> Tensor:
    """Zeros, NaN included; still in the graph, with a gradient of zero."""
    return tensor.masked_fill(torch.ones((), dtype=torch.bool, device=tensor.device), 0.0)


def noise(tensor: Tensor, std: float, mean: float, generator: torch.Generator) -> Tensor:
    """The tensor plus independent Gaussian noise; the gradient passes through."""
    drawn = torch.randn(tensor.shape, generator=generator, device=tensor.device, dtype=tensor.dtype)
    return tensor + (drawn * std + mean)


def mean(tensor: Tensor, dim: tuple[int, ...] | int | None) -> Tensor:
    """Each value replaced by the mean over `dim` (None: over all), which keeps the tensor's shape."""
    if tensor.dim() == 0:
        return tensor.clone()
    dims = tuple(range(tensor.dim())) if dim is None else dim
    return tensor.mean(dims, keepdim=True).expand_as(tensor).clone()


def sign(tensor: Tensor) -> Tensor:
    """-1, 0 or 1; NaN stays NaN."""
    return torch.where(tensor.isnan(), tensor, tensor.sign())


def l1(gradient: Tensor, value: Tensor, coefficient: float) -> Tensor:
    """The gradient of loss + coefficient * sum(|value|)."""
    return gradient + coefficient * value.sign().to(gradient.dtype)


def l2(gradient: Tensor, value: Tensor, coefficient: float) -> Tensor:
    """The gradient of loss + coefficient / 2 * sum(value^2): what optimizers call weight decay."""
    return gradient + coefficient * value.to(gradient.dtype)


def _penalty(spec: PenaltySpec) -> Callable[[Tensor, Context], Tensor]:
    formula = {"l1": l1, "l2": l2}[spec.fn]

    def penalise(tensor: Tensor, context: Context) -> Tensor:
        assert context.value is not None, "kinds that carry penalties hand over the value"
        return formula(tensor, context.value.detach(), spec.coefficient)

    return penalise


def _noise(spec: NoiseSpec) -> Callable[[Tensor, Context], Tensor]:
    return lambda tensor, context: noise(tensor, spec.std, spec.mean, context.generator(tensor.device))


BUILTIN: dict[type[ModifySpec], Callable[[Any], Callable[[Tensor, Context], Tensor]]] = {
    ZeroSpec: lambda spec: lambda tensor, context: zero(tensor),
    NoiseSpec: _noise,
    MeanSpec: lambda spec: lambda tensor, context: mean(tensor, spec.dim),
    SignSpec: lambda spec: lambda tensor, context: sign(tensor),
    PenaltySpec: _penalty,
}


def _own_function(target: Target, where: str) -> Callable[[Tensor, Context], Tensor]:
    """A function of the user's with its further arguments bound; a class is built once and its instance called."""
    found: Callable[..., Any] = locate(target.target, where)
    arguments = target.model_extra or {}
    bound = {} if inspect.isclass(found) else arguments
    try:
        function: Any = found(**arguments) if inspect.isclass(found) else found
        _refuse_arguments(function, bound)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            Mistake(
                where,
                f"{target.target} cannot be called as fn(tensor, context): {error}",
                written=arguments or target.target,
            )
        ) from None
    return partial(function, **bound)


def _refuse_arguments(function: Callable[..., Any], bound: dict[str, Any]) -> None:
    """A TypeError where it cannot be called with a tensor, a context, and these."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # a built-in function that does not tell it
    signature.bind(torch.empty(0), None, **bound)


class Modify:
    """The modification that a spec asks for."""

    def __init__(self, spec: ModifySpec) -> None:
        if isinstance(spec, FunctionSpec):
            self.function = _own_function(spec.fn, f"hooks.{spec.name}.fn")
        else:
            self.function = BUILTIN[type(spec)](spec)

    def prepare(self, tensors: Sequence[Tensor]) -> None:
        """Nothing: each tensor is changed for itself."""

    def __call__(self, tensor: Tensor, context: Context) -> tuple[Tensor, None]:
        return self.function(tensor, context), None
