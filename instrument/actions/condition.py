"""The condition of a hook at one site: the previous values of its statistic, and the decision of each firing.

On a device, values and decisions stay there: an intervention selects its result with `torch.where`, and a row of a record hook
is left out when the numbers of its step are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..nested import to_device
from ..spec.base import HookBase, ObservationSpec
from ..spec.condition import Condition
from ..spec.kinds import KINDS
from ..stats.portable import widest
from ..stats.sums import needs_of
from .base import UNKNOWN_CALL, Context
from .measurement import measure_in_context

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

    @classmethod
    def of(cls, spec: HookBase) -> SiteCondition | None:
        """Return the condition of a spec; None if it has none, or follows a rule."""
        return None if spec.condition is None else cls(spec, spec.condition)

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
                known = "the call is unknown" if original == UNKNOWN_CALL else "the original call has no decision"
                raise LookupError(
                    f"the forward pass is recomputed, but {known}: cannot repeat the decision of 'when'; use "
                    "torch.utils.checkpoint"
                ) from None
        decision = self._new_decision(tensor, context)
        if repeats:
            self._decisions[context.path, context.call] = decision
        return decision

    def _new_decision(self, tensor: Tensor, context: Context) -> Decision:
        with torch.no_grad():
            value = self._measured(tensor.detach(), context)
            if self.condition.times is None:
                decision: Decision = self._compare(value, self.condition.bound)
                return decision
            previous = self._previous.get(context.path)
            if isinstance(value, Tensor):
                if not isinstance(previous, _DeviceValues) or previous.values.device != value.device:
                    previous = _DeviceValues.of(previous, self.condition, value.device)
                running, is_ready = previous.running()
                decision = self._compare(value, self.condition.bound * running) & is_ready
                previous.add(value)
            else:
                if not isinstance(previous, _HostValues):
                    previous = _HostValues.of(previous, self.condition)
                decision = previous.is_ready and self._compare(value, self.condition.bound * previous.running())
                previous.add(value)
            self._previous[context.path] = previous
            return decision

    def _measured(self, tensor: Tensor, context: Context) -> float | Tensor:
        """Return the statistic of a tensor; NaN if it has no value."""
        stat = self.condition.stat
        return measure_in_context(tensor, context, needs_of((stat,)), self.spec.unit_dim).statistic(stat)

    def _compare(self, value: Any, bound: Any) -> Any:
        return value > bound if self.condition.below is None else value < bound

    def state_dict(self) -> dict[str, Any]:
        """Return the previous values by path, as numbers and lists. Waits for a device."""
        return {path: previous.state() for path, previous in self._previous.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the previous values."""
        self._previous = {path: _HostValues(self.condition, **values) for path, values in state.items()}


class _HostValues:
    """The values of the previous firings, on the host: a ring of `window` values, NaN for no value; `count` have a value."""

    def __init__(self, condition: Condition, values: list[float], firings: int, count: int) -> None:
        self.condition = condition
        self.values, self.firings, self.count = values, firings, count

    @classmethod
    def of(cls, previous: _DeviceValues | None, condition: Condition) -> _HostValues:
        """Create the values of a site, or move them from a device."""
        return cls(condition, **(previous.state() if previous is not None else _no_values()))

    @property
    def is_ready(self) -> bool:
        """Whether enough values exist."""
        return self.count >= self.condition.after

    def running(self) -> float:
        """Return the median, mean or std; NaN without a value."""
        known = sorted(value for value in self.values if not math.isnan(value))
        n = len(known)
        if not n:
            return math.nan
        if self.condition.times == "median":
            return (known[(n - 1) // 2] + known[n // 2]) / 2
        mean = math.fsum(known) / n
        if self.condition.times == "mean":
            return mean
        return math.sqrt(math.fsum((value - mean) ** 2 for value in known) / n)

    def add(self, value: float) -> None:
        """Add the value of a firing."""
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

    def __init__(self, condition: Condition, values: Tensor, firings: int, count: Tensor) -> None:
        self.condition = condition
        self.values, self.firings, self.count = values, firings, count

    @classmethod
    def of(
        cls, previous: _HostValues | _DeviceValues | None, condition: Condition, device: torch.device
    ) -> _DeviceValues:
        """Create the values of a site, or move them to another device."""
        state = previous.state() if previous is not None else _no_values()
        with torch.inference_mode(False):  # later firings write to these tensors
            values = torch.full((condition.window,), math.nan, dtype=widest(device), device=device)
            count = torch.zeros((), dtype=torch.int64, device=device)
            if previous is not None:
                known = torch.tensor(state["values"], dtype=values.dtype)
                values[: len(known)] = to_device(known, device)
                count += state["count"]
        return cls(condition, values, state["firings"], count)

    def running(self) -> tuple[Tensor, Tensor]:
        """Return the median, mean or std, and whether enough values exist. Both are scalars on the device."""
        ordered = self.values.sort().values  # NaN is sorted last
        known = ~ordered.isnan()
        n = known.sum()
        if self.condition.times == "median":
            middle = torch.stack([n - 1, n]).div(2, rounding_mode="floor").clamp(0, len(ordered) - 1)
            running = ordered.gather(0, middle).mean()
        else:
            filled = ordered.nan_to_num(nan=0.0)
            mean = running = filled.sum() / n
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
        values = self.values[: self.firings].tolist()
        return {"values": values, "firings": self.firings, "count": int(self.count)}


def _no_values() -> dict[str, Any]:
    return {"values": [], "firings": 0, "count": 0}
