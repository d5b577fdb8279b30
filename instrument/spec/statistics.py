"""The statistics: one place defines each one's name, formula, unit, type, and what it is where it has no value.

All are of the finite values x of a tensor, n of them; the others are counted. Where there is no finite value
(an empty tensor, or nothing but NaN) everything but the counts is null. Integers and booleans are taken as
numbers, complex values by their magnitude.

Three say more than the values alone do, of tensors of some kinds only; elsewhere they are null. A unit is a channel of an image
(dimension 1 of a tensor with 4 or 5; of a Conv1d and the like also with 3), a feature of a vector or of a sequence's elements
(the last of 2 or 3; of a Linear, LayerNorm and Embedding always), a row of a parameter or its gradient (dimension 0); `unit_dim`
says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Statistic:
    """One statistic of one tensor.

    Attributes:
        name: As in `stats:`, and the name of the column.
        formula: In terms of the finite values x, n of them.
        unit: `count`, `fraction` of the finite values (0 to 1), `units`: fraction of the units, `ratio`, or `value`: the
            unit of the tensor itself.
        dtype: The column's type. Counts, minimum and maximum are exact; the rest agrees with float64 to 1e-5.
        default: Whether `stats: default` has it.
        merged: What becomes of several tensors' values where one number is to stand for them.
        only: The kinds and roles that have it, where it is of more than the values: of a module's range, of a parameter.
    """

    name: str
    formula: str
    unit: Literal["count", "fraction", "units", "ratio", "value"]
    dtype: Literal["int64", "float64"]
    default: bool = True
    merged: Literal["mean", "min", "max"] = "mean"
    only: tuple[tuple[str, str], ...] = ()


_OF_VALUES = (
    Statistic("numel", "number of elements, finite or not", "count", "int64", merged="max"),
    Statistic("mean", "sum(x) / n", "value", "float64"),
    Statistic("std", "sqrt(sum((x - mean)^2) / n), the population's", "value", "float64"),
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
_OF_MORE = (
    Statistic(
        "dead_fraction",
        "units that are zero for every sample and position, over all units; null below two dimensions, but for parameters",
        "units",
        "float64",
        default=False,
    ),
    Statistic(
        "saturated_fraction",
        "count(x within 1.5% of the range of an end of what the activation can give) / n: beyond 0.97 for Tanh; null for "
        "modules other than Tanh, Sigmoid, Hardtanh, ReLU6 (its upper end), Hardsigmoid, Softsign",
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

STATISTICS: dict[str, Statistic] = {statistic.name: statistic for statistic in (*_OF_VALUES, *_OF_MORE)}
ALL: tuple[str, ...] = tuple(STATISTICS)
COUNTS: tuple[str, ...] = tuple(name for name, statistic in STATISTICS.items() if statistic.unit == "count")
"""They are recorded with all others: without them, a gradient that is NaN but for a few zeros looks like a vanished one."""
OF_VALUES: tuple[str, ...] = tuple(statistic.name for statistic in _OF_VALUES)
DEFAULT: tuple[str, ...] = tuple(name for name, statistic in STATISTICS.items() if statistic.default)
USUAL_UPDATES = (1e-4, 1e-2)
"""Where `update_ratio` usually is in a healthy training, "about 1e-3": CS231n, https://cs231n.github.io/neural-networks-3/#ratio"""
