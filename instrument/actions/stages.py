"""What happens between a hook and its action at a site: the condition of `when`, the selected elements, and the parts of `split_dim`.

A condition reads the previous values of its statistic. On a device, values and decisions stay there: an intervention selects its result
with `torch.where`, and a row of a record hook is left out when the numbers of its step are read. With a selection, an action gets the
selected part of a tensor, and an intervention changes nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ..config.base import HookBase, ObservationSpec, parse_slice
from ..config.hook_specs import HookSpec
from ..config.schedule import Condition
from ..config.selection import SelectionError, selected_indices
from ..errors import HookError
from ..runtime.own_operations import unseen_by_checkpoint
from ..stats.portable import widest
from ..stats.sums import needs_of
from ..stats.unit_statistics import unit_dim
from ..tables.kinds import KINDS
from ..values.dtensor import full_tensor
from ..values.nested import to_device
from .base import KNOWN_RECOMPUTED, UNKNOWN_CALL, UNKNOWN_RECOMPUTED, Context, Parts
from .intervention import describe
from .measurement import measure_in_context, to_dense
from .tensor_selection import TensorSelection

Decision = bool | Tensor
"""Whether a condition holds: on a device, a bool tensor with one element."""


class SiteCondition:
    """The condition of a spec at one site. Each path of a nested value has its own previous values."""

    def __init__(self, spec: HookBase, condition: Condition) -> None:
        self.spec = spec
        self.condition = condition
        self._previous: dict[str, _HostValues | _DeviceValues] = {}  # by path
        # The decisions of the current micro-step, which a recomputed forward pass repeats: by path and call.
        self._decisions: dict[tuple[str, int], Decision] = {}
        self._decided_at: Any = None

    def apply(
        self, action: Callable[[Tensor, Context], Tensor | None], tensor: Tensor, context: Context
    ) -> Tensor | None:
        """Call an action with the decision in `context.holds`.

        A hook that changes nothing is not called if the host knows that the condition does not hold.

        Raises:
            LookupError: The forward pass is recomputed, and the original call is unknown.
        """
        holds = self._decide(tensor, context)
        if holds is False and isinstance(self.spec, ObservationSpec):
            return None
        return action(tensor, replace(context, holds=holds))

    def _decide(self, tensor: Tensor, context: Context) -> Decision:
        if context.moment != self._decided_at:
            self._decided_at = context.moment
            self._decisions.clear()
        repeats = KINDS[context.kind].repeats
        original = context.call if context.origin is None else context.origin
        if repeats and (context.recompute or original != context.call):
            try:
                return self._decisions[context.path, original]
            except KeyError:
                missing = "the forward pass is recomputed, but the original call has no decision"
                reason = UNKNOWN_RECOMPUTED if original == UNKNOWN_CALL else missing
                raise LookupError(f"{reason}: cannot repeat the decision of 'when'; {KNOWN_RECOMPUTED}") from None
        decision = self._new_decision(tensor, context)
        if repeats:
            self._decisions[context.path, context.call] = decision
        return decision

    def _new_decision(self, tensor: Tensor, context: Context) -> Decision:
        with torch.no_grad(), unseen_by_checkpoint():  # a recomputed pass repeats the decision
            stat = self.condition.stat
            measured = measure_in_context(tensor.detach(), context, needs_of((stat,)), self.spec.unit_dim)
            value = measured.statistic(stat)  # NaN without a value
            if self.condition.times is None:
                decision: Decision = self._compare(value, self.condition.bound)
                return decision
            previous: Any = self._previous.get(context.path)
            if isinstance(value, Tensor):
                if not isinstance(previous, _DeviceValues) or previous.values.device != value.device:
                    previous = _DeviceValues(self.condition, value.device, **_state_of(previous))
            elif not isinstance(previous, _HostValues):
                previous = _HostValues(self.condition, **_state_of(previous))
            running, is_ready = previous.running()
            decision = self._compare(value, self.condition.bound * running) & is_ready
            previous.add(value)
            self._previous[context.path] = previous
            return decision

    def _compare(self, value: Any, bound: Any) -> Any:
        return value > bound if self.condition.below is None else value < bound

    def state_dict(self) -> dict[str, Any]:
        """Return the previous values by path, as numbers and lists. Waits for a device."""
        return {path: previous.state() for path, previous in self._previous.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._previous = {path: _HostValues(self.condition, **values) for path, values in state.items()}


class _HostValues:
    """The values of the previous firings, on the host: a ring of `window` values, NaN for no value; `count` have a value."""

    def __init__(self, condition: Condition, values: Sequence[float] = (), firings: int = 0, count: int = 0) -> None:
        self.condition = condition
        self.values, self.firings, self.count = [*values], firings, count

    def running(self) -> tuple[float, bool]:
        """Return the median, mean or std, NaN without a value, and whether enough values exist."""
        known = sorted(value for value in self.values if not math.isnan(value))
        n, is_ready = len(known), self.count >= self.condition.after
        if not n:
            return math.nan, is_ready
        if self.condition.times == "median":
            return (known[(n - 1) // 2] + known[n // 2]) / 2, is_ready
        mean = math.fsum(known) / n
        if self.condition.times == "mean":
            return mean, is_ready
        return math.sqrt(math.fsum((value - mean) ** 2 for value in known) / n), is_ready

    def add(self, value: float) -> None:
        if self.firings < self.condition.window:
            self.values.append(value)
        else:
            self.values[self.firings % self.condition.window] = value
        self.firings += 1
        self.count += not math.isnan(value)

    def state(self) -> dict[str, Any]:
        """Return the arguments of `_HostValues` after the condition."""
        return {"values": [*self.values], "firings": self.firings, "count": self.count}


class _DeviceValues:
    """The values of the previous firings, on a device, [window]; see `_HostValues`."""

    def __init__(
        self, condition: Condition, device: torch.device, values: Sequence[float] = (), firings: int = 0, count: int = 0
    ) -> None:
        self.condition = condition
        self.firings = firings
        with torch.inference_mode(False):  # later firings write to these tensors
            self.values = torch.full((condition.window,), math.nan, dtype=widest(device), device=device)
            self.count = torch.full((), count, dtype=torch.int64, device=device)
            if values:
                self.values[: len(values)] = to_device(torch.tensor(values, dtype=self.values.dtype), device)

    def running(self) -> tuple[Tensor, Tensor]:
        """Return the median, mean or std, and whether enough values exist. Both are scalars on the device."""
        ordered = self.values.sort().values  # NaN is sorted last
        known = ~ordered.isnan()
        n = known.sum()
        if self.condition.times == "median":
            middle = torch.stack([n - 1, n]).div(2, rounding_mode="floor").clamp(0, len(ordered) - 1)
            running = ordered.gather(0, middle).mean()
        else:
            mean = running = ordered.nan_to_num(nan=0.0).sum() / n
            if self.condition.times == "std":
                deviations = torch.where(known, ordered - mean, 0.0)
                running = (deviations.square().sum() / n).sqrt()
        return running, self.count >= self.condition.after

    def add(self, value: Tensor) -> None:
        """Add the value of a firing, a scalar on the device."""
        self.values[self.firings % self.condition.window] = value
        self.firings += 1
        self.count += ~value.isnan()

    def state(self) -> dict[str, Any]:
        """Return the state of `_HostValues.state`. Waits for the device."""
        return {"values": self.values[: self.firings].tolist(), "firings": self.firings, "count": int(self.count)}


def _state_of(previous: _HostValues | _DeviceValues | None) -> dict[str, Any]:
    return {} if previous is None else previous.state()


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
        message = f"{describe(context)}: split_dim requires the complete tensor, but this one is sharded over processes"
        raise HookError(message)
    whole = to_dense(tensor, describe(context)).movedim(dim, 0).contiguous()
    parts = Parts(whole, whole.unbind())
    try:
        for index, part in enumerate(parts.parts):
            action(part, replace(context, path=f"{context.path}:{index}", split=(parts, index)))
    finally:
        parts.whole, parts.parts = whole[:0], ()  # rows may keep the context
