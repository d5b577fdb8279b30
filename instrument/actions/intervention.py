"""The common part of all interventions: error messages, validation of the result, and the recorded effect; and `modify`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..config.base import InterventionSpec
from ..config.hook_specs import ModifySpec
from ..errors import HookError, HookResultError
from ..stats.cpu_kernel import effect_of_plain
from ..stats.flatten import is_on_host
from ..stats.measure import measure, measure_statistics
from ..stats.portable import count_changed
from ..tables.kinds import KINDS
from ..values.dtensor import is_sharded
from ..values.sparse import coalesce, is_sparse, replace_values
from .base import Action, Archive, Context, Effect, Number, Rows


class Change(Protocol):
    """The function of an intervention."""

    @property
    def entrywise(self) -> bool:
        """Whether a sparse tensor can be changed by its entries alone: zeros stay zeros, and the result depends on no positions."""

    def prepare(self, tensors: Sequence[Tensor]) -> None:
        """Receive all tensors of the spec before each of them is changed. Only kinds that have all tensors at once call it."""

    def __call__(self, tensor: Tensor, context: Context) -> tuple[Tensor, float | Tensor | None]:
        """Return the new tensor, and the factor if the change is a multiplication by one number."""


class Modify:
    """The change of a spec with a function."""

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


class Intervention(Action):
    """Replaces a tensor by the validated result of a change, and records the effect."""

    def __init__(self, change: Change, rows: Rows) -> None:
        self.change = change
        self.rows = rows

    def prepare(self, tensors: Sequence[Tensor]) -> None:
        """Pass the tensors to the change. Of sparse tensors, pass the entries."""
        self.change.prepare([coalesce(tensor).values() if is_sparse(tensor) else tensor for tensor in tensors])

    def __call__(self, tensor: Tensor, context: Context) -> Tensor:
        """Return the changed tensor. Of a sparse tensor (an embedding gradient), the entries are changed.

        Raises:
            HookError: The tensor is sparse, and the change requires a dense one.
            HookResultError: The result is invalid, or the change modified its input in place.
        """
        if not is_sparse(tensor):
            return self._change(tensor, context, tensor.numel())
        if not self.change.entrywise:
            raise HookError(
                f"{describe(context)} requires a dense tensor, but this one is sparse: create the layer with "
                "sparse=False, or clip the tensor by value or norm, scale it by a number, or take its sign"
            )
        entries = coalesce(tensor)
        return replace_values(entries, self._change(entries.values(), context, tensor.numel()))

    def _change(self, tensor: Tensor, context: Context, numel: int) -> Tensor:
        if context.holds is False:
            return accept_result(tensor, tensor, context, self.rows, numel=numel)
        given = with_version(tensor)
        version = given._version
        new, factor = self.change(given, context)
        if given._version != version:
            raise HookResultError(f"{describe(context)} modified its tensor in place; return a new tensor instead")
        new = tensor if new is given else new
        return accept_result(tensor, new, context, self.rows, factor=factor, numel=numel)


def accept_result(
    tensor: Tensor, new: Tensor, context: Context, rows: Rows, *, factor: Number = None, numel: int | None = None
) -> Tensor:
    """Check the result of an intervention, record the effect, and return the result, where the condition of `when` holds.

    Args:
        factor: The factor, if the change is a multiplication by one number.
        numel: The number of elements of a sparse tensor. Default: that of `tensor`.

    Raises:
        HookResultError: The result cannot replace the tensor.
    """
    check_result(tensor, new, context)
    if isinstance(context.holds, Tensor) and new is not tensor:
        new = torch.where(context.holds, new, tensor)
    if not (context.recompute and KINDS[context.kind].repeats):
        effect = effect_of(tensor, new, factor, tensor.numel() if numel is None else numel)
        effect.held = context.holds
        rows.add_effect(context, effect)
    return new


def with_version(tensor: Tensor) -> Tensor:
    """Return a tensor whose version counter detects in-place changes: a copy, if it was created in inference mode."""
    return versioned_copy(tensor) if tensor.is_inference() else tensor


def versioned_copy(tensor: Tensor) -> Tensor:
    """Copy a tensor, also one of inference mode. The copy has a version counter."""
    with torch.inference_mode(False), torch.no_grad():
        return tensor.clone()


def describe(context: Context) -> str:
    """Describe a call for messages: `hook 'tame' (parameter_grad) on layer 'decoder.0' at step 3`."""
    place = f"layer {context.layer or '.'!r}" + (f", {context.role} {context.path!r}" if context.path else "")
    phase = "" if context.moment.phase == "train" else f" in {context.moment.phase}"
    return f"hook {context.hook!r} ({context.kind}) on {place} at step {context.step}{phase}"


def check_result(old: Tensor, new: Any, context: Context) -> None:
    """Check that a tensor can replace another one: type, shape, dtype, device, and connection to the graph.

    Raises:
        HookResultError: It cannot.
    """
    if not isinstance(new, Tensor):
        raise HookResultError(f"{describe(context)} must return a tensor, but returned {type(new).__name__}")
    if is_sharded(new):  # `old` is never a DTensor
        raise HookResultError(
            f"{describe(context)} must return a plain tensor, but returned a DTensor: call its full_tensor()"
        )
    if new.shape != old.shape or new.dtype != old.dtype or new.device != old.device:
        what = next(what for what in ("shape", "dtype", "device") if getattr(old, what) != getattr(new, what))
        was, is_now = (list(each.shape) if what == "shape" else getattr(each, what) for each in (old, new))
        raise HookResultError(f"{describe(context)} must return {what} {was}, but returned {what} {is_now}")
    if old.requires_grad and torch.is_grad_enabled() and not new.requires_grad:
        raise HookResultError(
            f"{describe(context)} must return a tensor of the graph, but returned one that is detached from the graph "
            "(by detach, no_grad, .data or NumPy): the layers before this one would not be trained"
        )


def effect_of(old: Tensor, new: Tensor, factor: float | Tensor | None, numel: int) -> Effect:
    """Return the effect: how many of `numel` elements changed, and the norms before and after. NaN that stays NaN is unchanged."""
    factor = factor.detach() if isinstance(factor, Tensor) else factor
    if (measures := effect_of_plain(old, new)) is not None:
        return Effect(numel, measures, factor)
    with torch.no_grad():
        before, after = old.detach(), new.detach()
        if not is_on_host(before):
            return Effect(numel, (count_changed(before, after), measure(before), measure(after)), factor)
        changed = ((before != after) & ~(before.isnan() & after.isnan())).sum().item()
        first, second = (measure_statistics(each, ("l2",))[0] for each in (before, after))
    return Effect(numel, [changed, first, second], factor)


def straight_through(old: Tensor, new: Tensor) -> Tensor:
    """Return the new value with the gradient of the old one (Bengio, Léonard & Courville 2013)."""
    return _StraightThrough.apply(old, new)  # type: ignore[no-any-return]


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, old: Tensor, new: Tensor) -> Tensor:  # noqa: ARG004
        return new.detach().clone()

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return gradients[0], None
