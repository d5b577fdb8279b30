"""Growth: a value that exceeds the median of the previous values at its location many times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, TypeVar

import numpy as np

from ..spec.rules import ExplodingActivationRule, ExplodingGradientRule
from .rule import Firing, LocatedRule, extended, pack, unpack
from .step_rows import Chosen, StepRows

GrowthT = TypeVar("GrowthT", bound=ExplodingGradientRule | ExplodingActivationRule)


class WindowSpec(Protocol):
    """The fields of a rule that compares a value with the median of previous ones."""

    @property
    def factor(self) -> float: ...
    @property
    def window(self) -> int: ...
    @property
    def after(self) -> int: ...


class Windows:
    """The last values at each location.

    The median is only computed if a value exceeds `factor` times a lower bound of it, the smallest positive value, because the
    median of every location would cost more than all rules together.

    Args:
        spec: The fields of the rule.
    """

    def __init__(self, spec: WindowSpec) -> None:
        self.spec = spec
        self._values = np.zeros((0, spec.window))  # a ring for each location
        self._count = np.zeros(0, np.int64)
        self._lowest = np.zeros(0)  # at most the smallest positive value in the window

    def grow(self, count: int) -> None:
        """Extend the state to a number of locations."""
        self._values = extended(self._values, count, np.nan)
        self._count = extended(self._count, count)
        self._lowest = extended(self._lowest, count, np.inf)

    def medians(self, slots: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> dict[int, float]:
        """Return the median at those locations whose value exceeds `factor` times the median, by index in `slots`.

        Args:
            slots: The locations.
            values: Their values; NaN for no value.
        """
        exceeds = (values > self.spec.factor * self._lowest[slots]) & (self._count[slots] >= self.spec.after)
        found = {}
        for at in np.flatnonzero(exceeds):
            window = self._values[slots[at]]
            median = float(np.nanmedian(window))
            positive = window[window > 0]
            self._lowest[slots[at]] = positive.min() if len(positive) else np.inf
            if median > 0 and values[at] > self.spec.factor * median:
                found[int(at)] = median
        return found

    def add(self, slots: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> None:
        """Add a value at each location, and forget the oldest one."""
        known = values == values  # noqa: PLR0124 - not NaN
        if not known.all():
            slots, values = slots[known], values[known]
        count = self._count[slots]
        self._values[slots, count % self.spec.window] = values
        self._count[slots] = count + 1
        lowest = np.minimum(self._lowest[slots], values)
        self._lowest[slots] = np.where(values > 0, lowest, self._lowest[slots]) if (values <= 0).any() else lowest

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as strings, numbers and lists."""
        return {"values": pack(self._values), "count": pack(self._count), "lowest": pack(self._lowest)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state."""
        self._values, self._count, self._lowest = (unpack(state[name]) for name in ("values", "count", "lowest"))


class GrowthRule(LocatedRule[GrowthT]):
    """A statistic that grows suddenly, or beyond an absolute bound. It fires when this begins at a location."""

    def __init__(self, spec: GrowthT) -> None:
        super().__init__(spec)
        self._windows = Windows(spec)
        self._holds = np.zeros(0, np.bool_)

    def grow(self, count: int) -> None:
        self._windows.grow(count)
        self._holds = extended(self._holds, count)

    def check(self, rows: StepRows, chosen: Chosen) -> Iterator[Firing]:
        values, slots = chosen.values(rows.column(self.statistics[0]), self.merge), chosen.slots
        medians = self._windows.medians(slots, values)
        self._windows.add(slots, values)
        too_large = values > self.spec.above
        if not medians and not too_large.any() and not self._holds.any():
            return
        holds = too_large.copy()
        holds[list(medians)] = True
        fired = np.flatnonzero(holds & ~self._holds[slots])
        self._holds[slots] = holds
        for at in fired:
            value, median = float(values[at]), medians.get(int(at))
            bound = self.spec.above if median is None else self.spec.factor * median
            compared = f"above {bound:.4g}" if median is None else f"{value / median:.0f} times its median {median:.4g}"
            text = f"{self.statistics[0]} {value:.4g}, {compared}"
            yield Firing(text, value, bound, chosen.locations[at])

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "windows": self._windows.state_dict(), "holds": self._holds.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._windows.load_state_dict(state["windows"])
        self._holds = np.array(state["holds"], np.bool_)
