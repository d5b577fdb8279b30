"""Formulas of this package as programs for the kernel, which computes all columns of all rows in one call.

A formula is called once with traced columns, which note the operations. One with other operations is left to NumPy, and so are those of
users, which can do anything. Both ways give the same bits: each noted operation is rounded once, as in NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NoReturn, SupportsFloat

import numpy as np
import torch
from torch import Tensor

Matrix = np.ndarray[Any, np.dtype[np.float64]]
evaluate: Callable[[bytes, Any, int, Any], None] | None
try:
    from . import native
except ImportError:  # installed without a C compiler
    evaluate = None
else:
    evaluate = native.evaluate

_CODES = (
    *("column", "constant", "store", "add", "subtract", "multiply", "divide"),
    *("negate", "absolute", "root", "square", "less", "select"),
)
"""The operations, in the order of `native.c`."""
_POWERS = {0.5: "root", 2.0: "square"}


class Program:
    """Operations for each row, at most 512. Each has a value, which later ones use by its index."""

    def __init__(self) -> None:
        self._operations: dict[tuple[int, float, float, float], int] = {}  # with their indices

    def column(self, index: int) -> Traced:
        return self._add("column", index)

    def store(self, value: Traced | SupportsFloat, at: int) -> None:
        """Store a value as a result."""
        self._add("store", self._index(value), at)

    def note(self, operation: str, *operands: Traced | SupportsFloat) -> Traced:
        """Add an operation, unless it is known.

        Raises:
            TypeError: An operand is neither traced nor a number.
        """
        return self._add(operation, *map(self._index, operands))

    def _index(self, value: Traced | SupportsFloat) -> int:
        return (value if isinstance(value, Traced) else self._add("constant", float(value))).index

    def _add(self, operation: str, a: float, b: float = 0, c: float = 0) -> Traced:
        return Traced(self, self._operations.setdefault((_CODES.index(operation), a, b, c), len(self._operations)))

    def to_bytes(self) -> bytes:
        """Return the operations, float64 [operations, 4]: a code, and three operands: indices, or the constant."""
        return np.array([*self._operations], np.float64).tobytes()


def _refuse(*_: object) -> NoReturn:
    raise TypeError("a program does not have this operation")


class Traced:
    """A column of a program, or the result of an operation."""

    def __init__(self, program: Program, index: int) -> None:
        self.index = index
        self._note = program.note

    def __add__(self, other: SupportsFloat) -> Traced:
        return self._note("add", self, other)

    def __sub__(self, other: SupportsFloat) -> Traced:
        return self._note("subtract", self, other)

    def __mul__(self, other: SupportsFloat) -> Traced:
        return self._note("multiply", self, other)

    def __truediv__(self, other: SupportsFloat) -> Traced:
        return self._note("divide", self, other)

    def __pow__(self, exponent: float) -> Traced:
        if exponent not in _POWERS:  # the bits of other powers depend on the library that computes them
            _refuse()
        return self._note(_POWERS[exponent], self)

    def __neg__(self) -> Traced:
        return self._note("negate", self)

    def __abs__(self) -> Traced:
        return self._note("absolute", self)

    def __lt__(self, other: SupportsFloat) -> Traced:
        return self._note("less", self, other)

    def __gt__(self, other: SupportsFloat) -> Traced:
        return self._note("less", other, self)

    def select(self, one: Traced | SupportsFloat, other: Traced | SupportsFloat) -> Traced:
        """Return `one` where this is not zero, and `other` elsewhere."""
        return self._note("select", self, one, other)

    __eq__ = __ne__ = __le__ = __ge__ = __bool__ = __float__ = _refuse
    __hash__ = None  # type: ignore[assignment]


def where(condition: Any, one: Any, other: Any) -> Any:
    """Return `torch.where` or `numpy.where`, also of traced columns."""
    if isinstance(condition, Traced):
        return condition.select(one, other)
    return torch.where(condition, one, other) if isinstance(condition, Tensor) else np.where(condition, one, other)


def computed(formula: Callable[..., Sequence[Any]], matrix: Matrix) -> Matrix:
    """Return the columns that a formula computes from all columns of a matrix: float64 [results, rows]."""
    program, count = _program_of(formula, matrix.shape[1])
    if program and evaluate is not None:
        columns = np.empty((count, len(matrix)))
        evaluate(program, matrix, matrix.shape[1], columns)
        return columns
    with np.errstate(all="ignore"):
        return np.stack(formula(*matrix.T))


@cache
def _program_of(formula: Callable[..., Sequence[Any]], width: int) -> tuple[bytes, int]:
    if evaluate is None:
        return b"", 0
    program = Program()
    results = formula(*map(program.column, range(width)))
    for at, result in enumerate(results):
        program.store(result, at)
    return program.to_bytes(), len(results)
