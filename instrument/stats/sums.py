"""The sums of tensors as a matrix, from which all statistics follow, and the merging of the sums of parts of tensors.

Each way of measuring fills the same columns: the kernel and PyTorch operations on the CPU, a Triton kernel and operations on
other devices. The formulas of `instrument.tables.statistics` are applied to columns, and only here.

Parts of a tensor are merged by one maximum and one sum over all parts. The maximum gives the extremes. The sum then adds powers of
values divided by the largest magnitude, so that none overflows, about the midpoint of the extremes. No element is further
from the mean than sqrt(n - 1) standard deviations (Samuelson 1968, "How deviant can you be?"). The relative error of the
variance, from which the squared distance of the midpoint is subtracted, is therefore at most about n * 1e-16: 1e-6 for a tensor
of 1e10 elements.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from math import comb, inf, nan
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError, Problem
from ..tables.schemas import RESERVED_COLUMNS
from ..tables.statistics import (
    MAGNITUDES,
    REGISTERED,
    STATISTICS,
    WEIGHT,
    WITHOUT_VALUES,
    Statistic,
    Sum,
    statistic_of,
)
from .formulas import Program, Traced, evaluate, where

Matrix = Any
"""float64 [rows, columns]: an array of NumPy, or a tensor on any device."""
Column = Any
"""float64 [rows], likewise."""

BASE = ("numel", "n", "nan", "zeros", "low", "high", "mean", "deviations", "magnitudes", "unit")
"""The columns that each way of measuring fills, in the order of `native.c`. With x the n finite elements and y = x / unit:

numel, n, nan and zeros are numbers of elements; low and high are the extremes of x; mean is sum(y) / n; deviations is
sum((y - mean)^2); magnitudes is sum(|y|), if requested. unit is a power of two, or the largest magnitude. It prevents overflow and
underflow of powers. Without a finite element, all but the numbers of elements are NaN or meaningless.
"""
MEASURED_COLUMNS = slice(1, len(BASE))
"""The columns of `BASE` that are measured: all but the first."""
FURTHER: list[Sum] = list(
    dict.fromkeys(need for each in STATISTICS.values() for need in each.needs if need.name not in BASE)
)
"""The sums that only some statistics need. Those of registered statistics come last."""
FACTOR = 0x9E3779B97F4A7C15 - 2**64
"""2^64 divided by the golden ratio, an odd number, as int64: it spreads small integers over 64 bits (Knuth, 1973)."""
_SPARE = 8  # columns for sums of registered statistics
COLUMNS = (*BASE, *(each.name for each in FURTHER), *(f"registered {index}" for index in range(_SPARE)))
INDEX = {name: index for index, name in enumerate(COLUMNS[: len(BASE) + len(FURTHER)])}


class Sums:
    """Columns of a matrix of sums, float64 [rows, COLUMNS], by name, and what several formulas need of them."""

    def __init__(self, matrix: Matrix) -> None:
        self.matrix = matrix
        self.__dict__.update(zip(BASE, matrix.T, strict=False))  # all at once: each of the others takes longer

    def __getattr__(self, name: str) -> Column:
        try:
            index = INDEX[name]
        except KeyError:
            known = ", ".join([*INDEX][: len(BASE) + len(FURTHER)])
            raise AttributeError(f"there is no sum {name!r}; the sums are {known}") from None
        column = self.__dict__[name] = self.matrix[:, index]
        return column

    @cached_property
    def variance(self) -> Column:
        """sum((y - mean)^2) / n."""
        return self.deviations / self.n

    @cached_property
    def squares(self) -> Column:
        """sum(y^2)."""
        return self.n * self.mean**2 + self.deviations

    @cached_property
    def largest(self) -> Column:
        """The largest magnitude of x."""
        return where(self.high < -self.low, -self.low, self.high)

    @cached_property
    def bits(self) -> Column:
        """The fingerprint, int64 [rows]; meaningless without one."""
        columns = self.bits_low, self.bits_high, self.form
        if isinstance(self.form, Tensor):
            low, high, form = (column.to(torch.int64) for column in columns)
        else:
            with np.errstate(invalid="ignore"):  # a device writes no bits to rows without a fingerprint
                low, high, form = (column.astype(np.int64) for column in columns)
        return (low | high << 32) + form * FACTOR

    @cached_property
    def fingerprint(self) -> Column:
        """The fingerprint, NaN without one. It is rounded to float64 on a device, and if any row has none."""
        exists = self.form == self.form
        if isinstance(exists, Tensor):
            return where(exists, self.bits.to(self.form.dtype), nan)
        return self.bits if exists.all() else where(exists, self.bits, nan)


def statistics_of(matrix: Matrix, names: Sequence[str]) -> Any:
    """Return statistics of all rows: [names, rows], or a list of [rows]. They are float64, fingerprints int64; NaN for no value."""
    program, others = (b"", names) if isinstance(matrix, Tensor) else program_of(tuple(names))
    columns: Any = np.empty((len(names), len(matrix)))
    if program and evaluate is not None:
        evaluate(program, np.ascontiguousarray(matrix, np.float64), matrix.shape[1], columns)
    if others:
        sums, columns = Sums(matrix), [*columns]
        with np.errstate(all="ignore"):
            for at, name in enumerate(names):
                if name in others:
                    columns[at] = _statistic(name, sums)
    return columns


def _statistic(name: str, sums: Sums) -> Column:
    """Return a statistic, NaN for rows without a finite element."""
    value = statistic_of(name).formula(sums)
    return value if name in WITHOUT_VALUES else where(sums.n > 0, value, nan)


@cache
def program_of(names: tuple[str, ...]) -> tuple[bytes, Sequence[str]]:
    """Return the program of the kernel for built-in statistics, and those that it does not compute."""
    if evaluate is None:
        return b"", names
    program, others = Program(), []
    sums = _TracedSums(program)
    for at, name in enumerate(names):
        try:
            if name in STATISTICS:
                program.store(_statistic(name, sums), at)
                continue
        except TypeError:  # it has other operations
            pass
        others.append(name)
    return program.to_bytes(), others


class _TracedSums(Sums):
    """The columns of a program."""

    def __init__(self, program: Program) -> None:
        self._program = program

    def __getattr__(self, name: str) -> Traced:
        return self._program.column(INDEX[name])


def statistic(
    name: str,
    *,
    unit: Literal["elements", "fraction", "ratio", "value"] = "value",
    meaning: str = "",
    needs: Sequence[Sum | str] = (),
    merged: Literal["mean", "min", "max"] = "mean",
) -> Callable[[Callable[[Sums], Column]], Statistic]:
    """Register a statistic of the sums of tensors. Hooks request it by its name, like a built-in one.

        @instrument.statistic("positive_fraction", unit="fraction", needs=[instrument.Sum("positives", lambda x, mean: x > 0)])
        def positive_fraction(sums):
            return sums.positives / sums.n

    It is measured on every device, merged by `reduce: global`, and usable in conditions and rules. In the files, it is a custom
    statistic. A package registers it with an entry point of the group `instrument.statistics`.

    Args:
        name: The name, not that of a column of the tables `stats` and `metrics`.
        unit: The unit; see `instrument.tables.statistics.Statistic`.
        meaning: The formula in words. Default: the documentation of the function.
        needs: Sums in addition to those of every tensor: new ones, or the names of others: magnitudes, cubes, fourths. PyTorch
            operations compute them, which read the tensor again.
        merged: How the values of several tensors are combined into one.

    Returns:
        A decorator for the formula: a function of the sums of many tensors, float64 [rows] each, an array of NumPy or a
        tensor. It returns [rows], NaN for no value.

    Raises:
        ConfigError: From the decorator: the name is taken, a sum is missing, or the formula fails or does not return real numbers.
    """
    caller = sys._getframe(1)
    place = f"{caller.f_code.co_filename}:{caller.f_lineno}"

    def add(formula: Callable[[Sums], Column]) -> Statistic:
        known = {each.name: each for each in (MAGNITUDES, *FURTHER)}
        if missing := [need for need in needs if isinstance(need, str) and known.get(need, WEIGHT).term is None]:
            allowed = [each.name for each in known.values() if each.term is not None]
            raise ConfigError(Problem(place, "there is no such sum", missing[0], allowed))
        sums = tuple(known[need] if isinstance(need, str) else need for need in needs)
        for each in sums:
            _add_sum(each, place)
        if name.lower() in RESERVED_COLUMNS:
            raise ConfigError(Problem(place, f"the tables already have a column {name!r}", fix="choose another name"))
        text = meaning or (formula.__doc__ or "").strip().partition("\n")[0] or "a registered statistic"
        entry = Statistic(name, text, unit, formula, sums, merged=merged)
        _check_formula(entry, place)
        return REGISTERED.register(name, place=place)(entry)

    return add


def _add_sum(new: Sum, place: str) -> None:
    """Give a sum a column."""
    if new in (MAGNITUDES, *FURTHER):
        return
    reason = None
    if new.name in INDEX:
        reason = "has another definition already"
    elif len(INDEX) == len(COLUMNS):
        reason = f"is one too many: {_SPARE} are possible"
    elif new.term is None or new.is_central:
        reason = "requires a term that is not central"
    if reason is not None:
        raise ConfigError(Problem(place, f"sum {new.name!r} {reason}"))
    INDEX[new.name] = len(INDEX)
    FURTHER.append(new)


def _check_formula(entry: Statistic, place: str) -> None:
    """Apply a formula to the sums of 1, 2 and 4, in NumPy and in PyTorch."""
    row = dict.fromkeys(INDEX, 1.0) | {"numel": 3.0, "n": 3.0, "nan": 0.0, "zeros": 0.0, "low": 1.0, "high": 4.0}
    matrix = np.array(
        [[*(row | {"mean": 7 / 3, "deviations": 14 / 3}).values(), *[nan] * (len(COLUMNS) - len(row))]] * 2
    )
    for given in (matrix, torch.from_numpy(matrix)):
        try:
            column = entry.formula(Sums(given))
            is_real = tuple(column.shape) == (2,) and not (
                column.is_complex() if isinstance(column, Tensor) else np.iscomplexobj(column)
            )
        except Exception as error:
            message = f"the formula of {entry.name!r} fails: {type(error).__name__}: {error}"
            raise ConfigError(Problem(place, message)) from error
        if not is_real:
            what = f"{column.dtype} of shape {list(column.shape)}"
            message = f"the formula of {entry.name!r} must return one real number for each row, but returns {what}"
            raise ConfigError(Problem(place, message))


@cache
def needs_of(names: tuple[str, ...]) -> tuple[Sum, ...]:
    """Return the sums that statistics need in addition to those that every tensor has."""
    return tuple(dict.fromkeys(need for name in names for need in statistic_of(name).needs))


_OTHERS = [INDEX["magnitudes"], *range(len(BASE), len(COLUMNS))]  # columns that not every tensor has
EXTREMES = 2 + len(_OTHERS)
"""The number of columns of `extremes`."""
_CENTRAL = [each for each in FURTHER if each.is_central]  # in the order of their powers, from 3


def extremes(matrix: Tensor) -> Tensor:
    """Return the numbers of which the maximum over all parts is computed, given float64 [rows, COLUMNS], NaN for missing numbers.

    Returns:
        float64 [rows, EXTREMES]: the maximum, minus the minimum, and the columns that not every tensor has; minus infinity for missing
        numbers.
    """
    numbers = torch.cat([matrix[:, INDEX["high"], None], -matrix[:, INDEX["low"], None], matrix[:, _OTHERS]], dim=1)
    return numbers.nan_to_num(nan=-inf, posinf=inf, neginf=-inf)


def totals(matrix: Tensor, maxima: Tensor) -> Tensor:
    """Return the numbers of which the sum over all parts is computed, float64 [rows, COLUMNS], given the extremes of all parts.

    The sums are of powers of values divided by the largest magnitude: `mean` becomes sum(y), and central sums refer to the midpoint of
    the extremes. The weight is squared and divided by the largest one.
    """
    sums, unit, numbers = Sums(matrix), _unit(maxima), matrix.clone()
    scale = sums.unit / unit
    by = sums.mean * scale - _midpoint(maxima)
    central = [sums.n, 0.0 * sums.n, sums.deviations * scale**2]
    central += [getattr(sums, each.name) * scale**each.power for each in _CENTRAL]
    _, _, deviations, *others = _about(central, by)
    numbers[:, INDEX["mean"]] = sums.n * sums.mean * scale
    numbers[:, INDEX["deviations"]] = deviations
    numbers[:, INDEX["magnitudes"]] = sums.magnitudes * scale
    for each in FURTHER:
        if not each.is_central:
            numbers[:, INDEX[each.name]] *= scale**each.power
    for each, column in zip(_CENTRAL, others, strict=True):
        numbers[:, INDEX[each.name]] = column
    numbers[:, INDEX[WEIGHT.name]] = (sums.weight / _weight_unit(maxima)).square()
    return numbers.nan_to_num(nan=0.0)


def merged(maxima: Tensor, total: Tensor) -> Tensor:
    """Return the sums of all parts together, float64 [rows, COLUMNS]; NaN for missing numbers."""
    sums, numbers = Sums(total), total.clone()
    exists = torch.where(sums.n > 0, 0.0, nan)
    mean = sums.mean / sums.n
    first = sums.n * (mean - _midpoint(maxima))
    central = [sums.n, first, sums.deviations, *(getattr(sums, each.name) for each in _CENTRAL)]
    _, _, deviations, *others = _about(central, -first / sums.n)
    numbers[:, INDEX["low"]], numbers[:, INDEX["high"]] = -maxima[:, 1] + exists, maxima[:, 0] + exists
    numbers[:, INDEX["mean"]], numbers[:, INDEX["deviations"]] = mean, deviations.clamp(min=0.0)
    numbers[:, INDEX["unit"]] = _unit(maxima)
    for each, column in zip(_CENTRAL, others, strict=True):
        numbers[:, INDEX[each.name]] = column
    weight = sums.weight.sqrt() * _weight_unit(maxima)
    numbers[:, INDEX[WEIGHT.name]] = torch.where(weight > 0, weight, nan)
    numbers[:, INDEX["form"]] = nan  # there is no fingerprint of several tensors
    numbers[:, _OTHERS] += torch.where(maxima[:, 2:] == -inf, nan, 0.0)
    return numbers


def _about(powers: Sequence[Tensor], by: Tensor) -> list[Tensor]:
    """Return sums of powers of values that all increase by a number, given the sums of their powers, from 0."""
    return [
        sum(comb(k, j) * by ** (k - j) * powers[j] for j in range(k + 1))  # type: ignore[misc]
        for k in range(len(powers))
    ]


def _unit(maxima: Tensor) -> Tensor:
    """Return the largest magnitude of each row; 1 if it is zero or not finite."""
    largest = maxima[:, :2].amax(dim=1)
    return torch.where((largest > 0) & largest.isfinite(), largest, 1.0)


def _midpoint(maxima: Tensor) -> Tensor:
    """Return the midpoint of minimum and maximum, divided by the unit; 0 if it is not finite."""
    unit = _unit(maxima)
    middle = maxima[:, 0] / unit / 2.0 - maxima[:, 1] / unit / 2.0
    return torch.where(middle.isfinite(), middle, 0.0)


def _weight_unit(maxima: Tensor) -> Tensor:
    weight = maxima[:, 2 + _OTHERS.index(INDEX[WEIGHT.name])]
    return torch.where((weight > 0) & weight.isfinite(), weight, 1.0)


def add_zeros(matrix: Matrix, zeros: int, terms: Sequence[Sum]) -> Matrix:
    """Return the sums of tensors with further zeros, of which the other elements already have one, [rows, COLUMNS].

    `terms` are the measured sums with a term.
    """
    sums, numbers, zero = Sums(matrix), matrix + 0.0, np.zeros(1)
    n = sums.n + zeros
    mean = sums.mean * (sums.n / n)
    central = [sums.n, 0.0 * n, sums.deviations, *(getattr(sums, each.name) for each in _CENTRAL)]
    _, _, deviations, *others = _about(central, sums.mean * (zeros / n))
    for each in terms:
        if each.term is not None and not each.is_central:
            numbers[:, INDEX[each.name]] += zeros * float(each.term(zero, zero).sum())
    for name in ("numel", "n", "zeros"):
        numbers[:, INDEX[name]] += zeros
    numbers[:, INDEX["mean"]], numbers[:, INDEX["deviations"]] = mean, deviations + zeros * mean**2
    for each, column in zip(_CENTRAL, others, strict=True):
        numbers[:, INDEX[each.name]] = column + zeros * (-mean) ** each.power
    return numbers
