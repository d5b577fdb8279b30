"""The condition of a hook at one site: the previous values of its statistic, and the decision of each firing.

On a device, values and decisions stay there: an intervention selects its result with `torch.where`, and a row of a record hook
is left out when the numbers of its step are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..config.base import HookBase, ObservationSpec
from ..config.when import Condition
from ..runtime.selective_checkpoint import unseen_by_checkpoint
from ..stats.portable import widest
from ..stats.sums import needs_of
from ..tables.kinds import KINDS
from ..values.nested import to_device
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
