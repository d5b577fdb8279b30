"""Modification of a tensor by the function of a spec."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..config.base import InterventionSpec
from ..config.modify import ModifySpec
from .base import Archive, Context
from .intervention import straight_through


class Modify:
    """The action of a spec with a function."""

    def __init__(self, spec: InterventionSpec, archive: Archive) -> None:
        self.straight_through = isinstance(spec, ModifySpec) and spec.straight_through
        self.entrywise = spec.entrywise
        self.function = spec.function(archive)

    def prepare(self, tensors: Sequence[Tensor]) -> None:
        """Do nothing: each tensor is changed independently."""

    def __call__(self, tensor: Tensor, context: Context) -> tuple[Tensor, None]:
        new = self.function(tensor, context)
        if new is None:
            return tensor, None
        return (straight_through(tensor, new) if self.straight_through else new), None
