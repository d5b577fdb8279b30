"""Actions on a selection: an action gets the selected part of a tensor, and an intervention changes nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor, nn

from ..config.base import ObservationSpec, parse_slice
from ..config.hook_specs import HookSpec
from ..config.selection import SelectionError, selected_indices
from ..errors import HookError
from ..stats.unit_statistics import unit_dim
from ..tables.kinds import KINDS
from ..values.dtensor import full_tensor
from .base import Context, Parts
from .intervention import describe
from .measurement import to_dense
from .tensor_selection import TensorSelection


class Selector:
    """Applies an action to the elements that a spec selects."""

    def __init__(self, spec: HookSpec, module: nn.Module) -> None:
        self.spec = spec
        self.module = module
        self._find = lru_cache(maxsize=64)(self._selection)

    @classmethod
    def of(cls, spec: HookSpec, module: nn.Module) -> Selector | None:
        """Return the selector of a spec; None if its action gets complete tensors."""
        return cls(spec, module) if spec.selection else None

    def parts(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the selected parts of tensors. All processes must call it if the tensors are sharded."""
        complete = [to_dense(full_tensor(tensor), f"hook {self.spec.name!r}") for tensor in tensors]
        return [self._find(tensor.shape).of(tensor) for tensor in complete]

    def apply(
        self, action: Callable[[Tensor, Context], Tensor | None], tensor: Tensor, context: Context
    ) -> Tensor | None:
        """Call an action with the selected part of a tensor.

        Args:
            context: The call. The action gets it with the selection, and with the selected part of `value`.

        Returns:
            The tensor with the changed part; None if it is unchanged.

        Raises:
            HookError: The tensor does not have the selected elements, or the action failed.
        """
        selection, complete, part = self._select(tensor, context)
        value = context.value
        if value is not None and value.shape == complete.shape:
            value = selection.of(value.detach())
        new = action(part, replace(context, selection=selection, complete=complete, value=value))
        return None if new is None or new is part else selection.into(tensor, new)

    def _select(self, tensor: Tensor, context: Context) -> tuple[TensorSelection, Tensor, Tensor]:
        """Return the selection in a tensor, the dense tensor, and its selected part; see `apply`."""
        is_dense = tensor.layout == torch.strided and not tensor.is_nested
        if not is_dense and not isinstance(self.spec, ObservationSpec):
            raise HookError(f"{describe(context)} selects elements, which requires a dense tensor, but this one is not")
        if context.scope == "shard" and self.spec.slice is None:
            raise HookError(
                f"{describe(context)} selects elements of a shard, whose indices differ from those of the full tensor; "
                "record the complete tensor"
            )
        complete = tensor if is_dense else to_dense(tensor, describe(context))
        try:
            selection = self._find(complete.shape)
            part = selection.of(complete)
        except SelectionError as error:
            message = f"{error} the tensor of shape {list(complete.shape)} (allowed: {error.allowed})"
            raise HookError(f"{describe(context)}: {message}") from error
        except IndexError as error:
            message = f"slice {self.spec.slice!r} is out of range for shape {list(complete.shape)}"
            raise HookError(f"{describe(context)}: {message}") from error
        return selection, complete, part

    def _selection(self, shape: torch.Size) -> TensorSelection:
        """Return the selection in tensors of a shape. Raise SelectionError if they do not have the selected elements."""
        spec = self.spec
        if spec.slice is not None:
            index = parse_slice(spec.slice)
            first = getattr(spec, "samples", None)
            if isinstance(first, int) and shape:  # an index of the first samples becomes one of all samples
                size, along = min(first, shape[0]), index[0]
                index = (range(size)[along] if isinstance(along, int) else slice(*along.indices(size)), *index[1:])
            return TensorSelection(shape, index)
        units = unit_dim(len(shape), self.module, of_parameter=KINDS[spec.kind].family != "module")
        return TensorSelection.of_indices(shape, selected_indices(spec, shape, units))


def act_on_indices(action: Callable[[Tensor, Context], object], dim: int, tensor: Tensor, context: Context) -> None:
    """Call an action that changes nothing with the tensor of each index along a dimension. The index follows the path after a colon.

    Raises:
        HookError: The tensor has no such dimension, or is one of several shards.
    """
    if not -tensor.dim() <= dim < tensor.dim():
        raise HookError(f"{describe(context)}: split_dim {dim} is out of range for shape {list(tensor.shape)}")
    if context.scope == "shard":
        raise HookError(
            f"{describe(context)}: split_dim requires the complete tensor, but this one is sharded over processes"
        )
    whole = to_dense(tensor, describe(context)).movedim(dim, 0).contiguous()
    parts = Parts(whole, whole.unbind())
    try:
        for index, part in enumerate(parts.parts):
            action(part, replace(context, path=f"{context.path}:{index}", split=(parts, index)))
    finally:
        parts.whole, parts.parts = whole[:0], ()  # rows may keep the context
