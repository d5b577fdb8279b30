"""Scale: multiply by a number."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..spec.hooks import ScaleSpec
from .base import Context


def scale(tensor: Tensor, factor: float) -> Tensor:
    """The tensor times `factor`: same shape, same dtype."""
    return tensor * factor


class Scale:
    """The scaling that a spec asks for."""

    def __init__(self, spec: ScaleSpec) -> None:
        self.factor = spec.factor

    def prepare(self, tensors: Sequence[Tensor]) -> None:
        """Nothing: each tensor is changed for itself."""

    def __call__(self, tensor: Tensor, context: Context) -> tuple[Tensor, float]:  # noqa: ARG002
        return scale(tensor, self.factor), self.factor
