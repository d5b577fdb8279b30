"""Growth: a value that exceeds the median of the previous values at its location many times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, TypeVar

import numpy as np

from ..spec.rules import ExplodingActivationRule, ExplodingGradientRule
from ..spec.statistics import ALL
from .rule import Bounds, Firing, LocatedRule, QuietSteps, extended, pack, unpack
from .step_rows import Chosen, FloatArray, IndexArray, StepRows

FEWEST = 2  # required previous values: a single one, such as that of weights that start at zero, is no reference
SLACK = 4.0  # how many times smaller than the smallest value of the window the next values may be
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

    The median is only computed if a value exceeds `factor` times a lower bound of it, because the median of every location
    would cost more than all rules together. Before `after` values exist, the square of `factor` is used instead of `factor`.
    The lower bound is half of the smallest positive value: the median of an even number of values can be the mean of zero and
    this value.

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

    def exceeded(self, slots: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> dict[int, tuple[float, float]]:
        """Return the median and the bound at those locations whose value exceeds the bound, by index in `slots`.

        Args:
            slots: The locations.
            values: Their values; NaN for no value.
        """
        fewest = min(FEWEST, self.spec.after)
        exceeds = (values > self.spec.factor * (self._lowest[slots] / 2)) & (self._count[slots] >= fewest)
        found = {}
        for at in np.flatnonzero(exceeds):
            window = self._values[slots[at]]
            median = float(np.nanmedian(window))
            self._lowest[slots[at]] = _lowest(window)
            bound = median * self.spec.factor ** (1 if self._count[slots[at]] >= self.spec.after else 2)
            if median > 0 and values[at] > bound:
                found[int(at)] = median, bound
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

    def bounds(self) -> tuple[FloatArray, FloatArray]:
        """Return the bounds within which no further value exceeds `factor` times the median: two arrays [locations].

        No positive value in the window becomes smaller than the lower bound, so that no positive median becomes smaller than half
        of it.
        """
        lowest = _lowest(self._values)
        low = np.where(np.isfinite(lowest), lowest / SLACK, 0.0)
        return low, self.spec.factor * (low / 2)

    def add_all(self, slots: IndexArray, values: FloatArray) -> None:
        """Add values [steps, slots] one after the other; see `add`."""
        if np.isnan(values).any():
            for each in values:
                self.add(slots, each)
            return
        count = self._count[slots] + len(values)
        last = values[-self.spec.window :]
        at = (count - np.arange(len(last), 0, -1)[:, None]) % self.spec.window
        self._values[slots, at] = last
        self._count[slots] = count
        self._lowest[slots] = np.minimum(self._lowest[slots], _lowest(values.T))

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as strings, numbers and lists."""
        return {"values": pack(self._values), "count": pack(self._count)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state."""
        self._values, self._count = (unpack(state[name]) for name in ("values", "count"))
        self._lowest = _lowest(self._values)


def _lowest(windows: FloatArray) -> FloatArray:
    """Return the smallest positive value of each window [..., values]; infinity without a positive value."""
    lowest: FloatArray = np.where(windows > 0, windows, np.inf).min(axis=-1)
    return lowest


class GrowthRule(LocatedRule[GrowthT]):
    """A statistic that grows suddenly, or beyond an absolute bound. It fires when this begins at a location."""

    def __init__(self, spec: GrowthT) -> None:
        super().__init__(spec)
        self._above = np.inf if spec.above is None else spec.above
        self._windows = Windows(spec)
        self._holds = np.zeros(0, np.bool_)

    def grow(self, count: int) -> None:
        self._windows.grow(count)
        self._holds = extended(self._holds, count)

    def bounds(self) -> Bounds | None:
        if self._holds.any():
            return None
        low, high = self._windows.bounds()
        return Bounds(self.statistics[0], low, np.minimum(high, self._above))

    def remember(self, steps: QuietSteps) -> None:
        for layout, numbers in steps.tables:
            chosen = self.choose(layout)
            if chosen is not None:
                column = numbers[:, :, ALL.index(self.statistics[0])]
                self._windows.add_all(chosen.slots, chosen.values(column, self.merge))

    def check(self, rows: StepRows, chosen: Chosen) -> Iterator[Firing]:
        values, slots = chosen.values(rows.column(self.statistics[0]), self.merge), chosen.slots
        exceeded = self._windows.exceeded(slots, values)
        self._windows.add(slots, values)
        holds = values > self._above
        if not exceeded and not holds.any() and not self._holds.any():
            return
        holds[list(exceeded)] = True
        fired = np.flatnonzero(holds & ~self._holds[slots])
        self._holds[slots] = holds
        for at in fired:
            value = float(values[at])
            median, bound = exceeded.get(int(at), (None, self._above))
            compared = f"above {bound:.4g}" if median is None else f"{value / median:.0f} times its median {median:.4g}"
            text = f"{self.statistics[0]} {value:.4g}, {compared}"
            yield Firing(text, value, bound, chosen.locations[at])

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "windows": self._windows.state_dict(), "holds": self._holds.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._windows.load_state_dict(state["windows"])
        self._holds = np.array(state["holds"], np.bool_)
