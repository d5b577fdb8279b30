"""The statistics: one place defines each one's name, formula, unit, type, and what it is where it has no value.

All are of the finite values x of a tensor, n of them; the others are counted. Where there is no finite value
(an empty tensor, or nothing but NaN) everything but the counts is null. Integers and booleans are taken as
numbers, complex values by their magnitude.
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
        unit: `count`, `fraction` of the finite values (0 to 1), or `value`: the unit of the tensor itself.
        dtype: The column's type. Counts, minimum and maximum are exact; the rest agrees with float64 to 1e-5.
        default: Whether `stats: default` has it.
    """

    name: str
    formula: str
    unit: Literal["count", "fraction", "value"]
    dtype: Literal["int64", "float64"]
    default: bool = True


_ALL = (
    Statistic("numel", "number of elements, finite or not", "count", "int64"),
    Statistic("mean", "sum(x) / n", "value", "float64"),
    Statistic("std", "sqrt(sum((x - mean)^2) / n), the population's", "value", "float64"),
    Statistic("rms", "sqrt(sum(x^2) / n)", "value", "float64"),
    Statistic("min", "min(x)", "value", "float64"),
    Statistic("max", "max(x)", "value", "float64"),
    Statistic("abs_max", "max(|x|)", "value", "float64"),
    Statistic("l1", "sum(|x|)", "value", "float64", default=False),
    Statistic("l2", "sqrt(sum(x^2))", "value", "float64"),
    Statistic("zero_fraction", "count(x = 0) / n", "fraction", "float64"),
    Statistic("nan_count", "number of NaN", "count", "int64"),
    Statistic("inf_count", "number of +inf and -inf", "count", "int64"),
)

STATISTICS: dict[str, Statistic] = {statistic.name: statistic for statistic in _ALL}
ALL: tuple[str, ...] = tuple(STATISTICS)
DEFAULT: tuple[str, ...] = tuple(name for name, statistic in STATISTICS.items() if statistic.default)
