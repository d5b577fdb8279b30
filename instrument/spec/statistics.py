"""Definitions of the statistics: names, formulas, units, dtypes, and when they have no value.

Statistics are computed over the n finite values x of a tensor. NaN and infinities are counted separately. If no value
is finite (an empty tensor, or only NaN), every statistic except the counts is null. Integers and booleans are converted
to numbers, complex values to their magnitude.

Three statistics depend on more than the values, and are null where they are not defined. A unit is a channel of an
image (dimension 1 of a tensor with 4 or 5 dimensions, and with 3 for a Conv1d and similar), a feature of a vector or of
a sequence element (the last of 2 or 3 dimensions, and always for Linear, LayerNorm and Embedding), or a row of a
parameter or its gradient (dimension 0). `unit_dim` selects another dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Statistic:
    """The definition of one statistic of a tensor.

    Attributes:
        name: The value in `stats:`, and the name of the column.
        formula: The formula over the n finite values x.
        unit: `count`; `fraction` of the finite values (0 to 1); `units`: fraction of the units; `ratio`; or `value`:
            the unit of the tensor; `custom`: unknown.
        dtype: The dtype of the column. Counts, minimum and maximum are exact; the others agree with float64 to 1e-5.
        default: Whether `stats: default` includes it.
        merged: How the values of several tensors are combined into one.
        only: The kinds and roles that have it; empty for all.
    """

    name: str
    formula: str
    unit: Literal["count", "fraction", "units", "ratio", "value", "custom"]
    dtype: Literal["int64", "float64"]
    default: bool = True
    merged: Literal["mean", "min", "max"] = "mean"
    only: tuple[tuple[str, str], ...] = ()


_VALUE_STATISTICS = (
    Statistic("numel", "number of elements, including NaN and infinity", "count", "int64", merged="max"),
    Statistic("mean", "sum(x) / n", "value", "float64"),
    Statistic("std", "sqrt(sum((x - mean)^2) / n) (population)", "value", "float64"),
    Statistic("rms", "sqrt(sum(x^2) / n)", "value", "float64"),
    Statistic("min", "min(x)", "value", "float64", merged="min"),
    Statistic("max", "max(x)", "value", "float64", merged="max"),
    Statistic("abs_max", "max(|x|)", "value", "float64", merged="max"),
    Statistic("l1", "sum(|x|)", "value", "float64", default=False),
    Statistic("l2", "sqrt(sum(x^2))", "value", "float64"),
    Statistic("zero_fraction", "count(x = 0) / n", "fraction", "float64"),
    Statistic("nan_count", "number of NaN", "count", "int64", merged="max"),
    Statistic("inf_count", "number of +inf and -inf", "count", "int64", merged="max"),
)
_DERIVED_STATISTICS = (
    Statistic(
        "dead_fraction",
        "fraction of units that are zero for every sample and position; null for activations with fewer than two dimensions",
        "units",
        "float64",
        default=False,
    ),
    Statistic(
        "saturated_fraction",
        "count(x within 1.5% of the output range from one of its ends) / n, |x| > 0.97 for Tanh; null for "
        "modules other than Tanh, Sigmoid, Hardtanh, ReLU6 (upper end only), Hardsigmoid, Softsign",
        "fraction",
        "float64",
        default=False,
        only=(("forward", "output"),),
    ),
    Statistic(
        "update_ratio",
        "l2 of the update / l2 of the parameter after it",
        "ratio",
        "float64",
        default=False,
        only=(("step_post", "update"),),
    ),
)

STATISTICS: dict[str, Statistic] = {
    statistic.name: statistic for statistic in (*_VALUE_STATISTICS, *_DERIVED_STATISTICS)
}
ALL: tuple[str, ...] = tuple(STATISTICS)


NONNEGATIVE = ("std", "rms", "abs_max", "l1", "l2", "update_ratio")
"""The statistics of values that are never negative."""


def unreachable_bound(name: str, above: float | None, below: float | None) -> str | None:
    """Return why a built-in statistic can never be above or below a number; None if it can."""
    unit = STATISTICS[name].unit
    is_fraction = unit in ("fraction", "units")
    if is_fraction and above is not None and above >= 1:
        return f"above ({above:g}) cannot be reached: {name} is at most 1"
    if (is_fraction or unit == "count" or name in NONNEGATIVE) and below is not None and below <= 0:
        return f"below ({below:g}) cannot be reached: {name} is at least 0"
    return None


def statistic_of(name: str) -> Statistic:
    """Return the definition of a built-in or custom statistic."""
    return STATISTICS.get(name) or Statistic(name, "a custom statistic", "custom", "float64", default=False)


COUNTS: tuple[str, ...] = tuple(name for name, statistic in STATISTICS.items() if statistic.unit == "count")
"""Recorded with every other statistic.

Without them, a gradient that is NaN except for a few zeros would look like a small one.
"""
VALUE_STATISTICS: tuple[str, ...] = tuple(statistic.name for statistic in _VALUE_STATISTICS)
DEFAULT: tuple[str, ...] = tuple(name for name, statistic in STATISTICS.items() if statistic.default)
USUAL_UPDATE_RATIOS = (1e-4, 1e-2)
"""The usual range of `update_ratio` in a healthy training, "about 1e-3".

CS231n, https://cs231n.github.io/neural-networks-3/#ratio
"""

REMAINDERS = {name: f"{name}_remainder" for name in ("min", "max", "abs_max")}
"""For each statistic of 64-bit integers that float64 rounds beyond 2^53, the name of its remainder among the custom statistics.

The exact integer is the sum of both.
"""
