"""The statistics of one step as a matrix, with one row per measured tensor, and their conversion to Arrow columns.

Hooks on plain tensors add the memory of their numbers, without a Python object per number. All rows of a step become
columns at once when the step ends.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property
from itertools import chain
from typing import Any, NamedTuple, overload

import numpy as np
import pyarrow as pa
from torch import Tensor

from ..actions.base import StepContext
from ..errors import ConfigError, Problem
from ..kinds.clock import take
from ..spec.hooks import HookSpec
from ..spec.record import RecordSpec
from ..spec.statistics import ALL, REMAINDERS, STATISTICS
from ..spec.tables import CUSTOM, IDENTITY, SHAPE, TABLES
from ..stats.device_numbers import DeviceNumbers
from ..stats.measure import Values, positions
from ..stats.single_pass import NATIVE
from .message_template import Message, MessageTemplate
from .sink_interface import Row

Shape = tuple[int, ...] | None
_MOMENT = len(StepContext._fields)
_TABLE = TABLES["stats"]
_TYPES: list[pa.DataType] = [field.type for field in _TABLE.plain_schema]
_MOMENT_TYPES, _SITE_TYPES, _NUMBER_TYPES = (
    _TYPES[:_MOMENT],
    _TYPES[_MOMENT : len(IDENTITY)],
    _TYPES[len(IDENTITY) : len(IDENTITY) + len(ALL)],
)
_IS_COUNT = tuple(statistic.unit == "count" for statistic in STATISTICS.values())
_NATIVE_INDEX = {name: index for index, name in enumerate(NATIVE)}
_NATIVE_BYTES = 8 * len(NATIVE)


def check_custom_columns(specs: Mapping[str, HookSpec]) -> None:
    """Check that the names of custom statistics differ from the names of other columns.

    Raises:
        ConfigError: A custom statistic has the name of a column that tables of runs have.
    """
    reserved = {"run", "seed", *(column.name for column in _TABLE.stored), *REMAINDERS.values()}
    problems = [
        Problem(
            f"hooks.{name}.stats",
            f"the table 'stats' already has a column {custom.column!r}",
            given=custom.target,
            fix="set another 'name'",
        )
        for name, spec in specs.items()
        if isinstance(spec, RecordSpec)
        for custom in spec.custom_statistics
        if custom.column.lower() in reserved
    ]
    if problems:
        raise ConfigError(*problems)


class OnDevice(NamedTuple):
    """Statistics whose numbers are still on a device.

    Attributes:
        row: The collected row.
        names: The names of the statistics.
        values: The numbers.
    """

    row: list[Any]
    names: tuple[str, ...]
    values: DeviceNumbers


class StepStatistics:
    """Collects the statistics of one step. Several threads may add rows.

    Attributes:
        on_device: The rows whose numbers are still on a device.
        conditional: The rows with a condition that a device decides, and its decision.
    """

    def __init__(self) -> None:
        # The moment, the other identity columns, the shape of the tensor, the memory of a float64 array (the statistics
        # `NATIVE`, or all), and, if the spec has any, the custom statistics.
        self._rows: list[Sequence[Any]] = []
        self.on_device: list[OnDevice] = []
        self.conditional: list[tuple[list[Any], Tensor]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def take(self) -> StepStatistics:
        """Return the rows so far, and remove them. Rows that other threads add in the meantime belong to the next step."""
        taken = StepStatistics()
        taken._rows, taken.on_device, taken.conditional = take(self._rows), take(self.on_device), take(self.conditional)
        return taken

    def add(self, moment: StepContext, site: Row, shape: Shape, numbers: bytes) -> None:
        """Add the result of `instrument.stats.single_pass.record_plain`."""
        self._rows.append((moment, site, shape, numbers))

    def add_values(
        self, identity: Row, shape: Shape, names: tuple[str, ...], values: Values, holds: bool | Tensor | None = None
    ) -> None:
        """Add a row of values.

        Args:
            identity: The identity columns.
            shape: The shape of the tensor; None if the row is merged from several tensors.
            names: The names of the statistics: built-in ones, then custom ones.
            values: Their values.
            holds: Whether the condition of the hook holds. A row without it is left out.
        """
        row: list[Any] = [StepContext(*identity[:_MOMENT]), identity[_MOMENT:], shape]
        if isinstance(values, DeviceNumbers):
            self.on_device.append(OnDevice(row, names, values))
        else:
            row += _number_cells(names, values)
        if isinstance(holds, Tensor):
            self.conditional.append((row, holds))
        self._rows.append(row)

    def fetch(self, fetched: Iterator[list[float]]) -> None:
        """Set the values of all rows on a device.

        Args:
            fetched: The numbers of all tensors of `on_device`, and the decisions of `conditional`, in order.
        """
        for waiting in self.on_device:
            waiting.row.extend(_number_cells(waiting.names, waiting.values.values(fetched)))
        if left_out := {id(row) for row, _ in self.conditional if not next(fetched)[0]}:
            self._rows = [row for row in self._rows if id(row) not in left_out]

    def rows(self, cache: ColumnCache) -> StatisticsRows:
        """Return the collected rows. Every number has to be on the host.

        Args:
            cache: Keeps columns for the next step.
        """
        moments, sites, shapes, memory = ([row[i] for row in self._rows] for i in range(4))
        sites = cache.known(sites)
        others = {i: np.frombuffer(row[_NATIVE_BYTES:]) for i, row in enumerate(memory) if len(row) > _NATIVE_BYTES}
        numbers = np.frombuffer(b"".join(row[:_NATIVE_BYTES] for row in memory) if others else b"".join(memory))
        custom = {i: row[4] for i, row in enumerate(self._rows) if len(row) > 4}
        return StatisticsRows(
            moments, sites, shapes, numbers.reshape(-1, len(NATIVE)), others=others, custom=custom, cache=cache
        )


def _number_cells(names: tuple[str, ...], values: Sequence[float | None]) -> Iterator[Any]:
    """Yield the built-in statistics as the memory of a float64 array, and then the custom ones if there are any.

    The array contains the statistics `NATIVE` if the others have no value, otherwise all.
    """
    known = _known(names)
    numbers = [math.nan] * len(ALL)
    for position, value in zip(positions(known), values, strict=False):
        numbers[position] = math.nan if value is None else value
    has_others = not all(map(math.isnan, numbers[len(NATIVE) :]))
    yield array("d", numbers if has_others else numbers[: len(NATIVE)]).tobytes()
    if len(known) < len(names):
        custom = zip(names[len(known) :], values[len(known) :], strict=True)
        yield {name: None if value is None or math.isnan(value) else value for name, value in custom}


@cache
def _known(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the built-in statistics, which come before custom ones."""
    return tuple(name for name in names if name in STATISTICS)


class StatisticsRows(Sequence[Row]):
    """Rows of the `stats` table that become tuples only if they are read as such.

    Args:
        moments: For each row, step, micro-step, epoch and phase.
        sites: For each row, the other identity columns.
        shapes: For each row, the shape of the tensor; None if the row is merged from several tensors.
        numbers: float64 [rows, NATIVE]: the statistics of the native kernel, the first ones of `ALL`; NaN for no value.
        others: The other statistics of those rows that have them.
        custom: The custom statistics of those rows that have them, by name.
        cache: Keeps columns for the next step.

    Attributes:
        moments, sites, numbers: See above.
    """

    def __init__(
        self,
        moments: list[StepContext],
        sites: list[Row],
        shapes: list[Shape],
        numbers: np.ndarray,
        *,
        others: dict[int, np.ndarray],
        custom: dict[int, dict[str, float | None]],
        cache: ColumnCache,
    ) -> None:
        self.moments = moments
        self.sites = sites
        self._shapes = shapes
        self.numbers = numbers
        self._others = others
        self._custom = custom
        self._cache = cache

    def __len__(self) -> int:
        return len(self.sites)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        others = self._others.get(index % len(self), _NO_OTHERS).tolist()
        cells = (
            None if math.isnan(value) else int(value) if is_count else value
            for value, is_count in zip((*self.numbers[index].tolist(), *others), _IS_COUNT, strict=True)
        )
        shape = self._shapes[index]
        further = (None if shape is None else list(shape), self._custom.get(index % len(self)))
        return (*self.moments[index], *self.sites[index], *cells, *further)

    def __iter__(self) -> Iterator[Row]:
        return (self[i] for i in range(len(self)))

    @cached_property
    def moment(self) -> StepContext | None:
        """Step, micro-step, epoch and phase, if they are those of all rows; otherwise None."""
        first = self.moments[0]
        return first if self.moments.count(first) == len(self) else None

    @property
    def has_others(self) -> bool:
        """Whether any row has further statistics."""
        return bool(self._others or self._custom)

    def column(self, name: str) -> np.ndarray:
        """Return a built-in or custom statistic of all rows, float64 [rows]; NaN for no value."""
        if name in _NATIVE_INDEX:
            return self.numbers[:, _NATIVE_INDEX[name]]
        values = np.full(len(self), math.nan)
        if name in ALL:
            others, index = self._others, ALL.index(name) - len(NATIVE)
            if others:
                values[[*others]] = [cells[index] for cells in others.values()]
        else:
            for row, custom in self._custom.items():
                value = custom.get(name)
                values[row] = math.nan if value is None else value
        return values

    def to_message(self) -> pa.RecordBatch | Message:
        """Return the rows for a journal: a message with the numbers of these rows, if the cache has a similar one."""
        first, missing = self.moment, np.isnan(self.numbers)
        some_missing = missing.any(axis=0)
        if first is None or self._others or self._custom or (some_missing != missing.all(axis=0)).any():
            return self.to_batch()
        cache, unchanged = self._cache, (self.sites, first[1:], some_missing.tolist())
        if cache.template is None or cache.unchanged != unchanged or not cache.replace_shapes(self._shapes):
            cache.template, cache.unchanged = MessageTemplate(self.to_batch()), unchanged
            cache.message_shapes = self._shapes
            return cache.template.message
        step, statistics = cache.template.numbers[0], cache.template.numbers[len(IDENTITY) :]
        for numbers, values in zip((step, *statistics), (first.step, *self.numbers.T), strict=False):
            if numbers is not None:
                numbers[:] = values
        return cache.template.message

    def to_batch(self) -> pa.RecordBatch:
        """Return the rows as a record batch with labels as strings."""
        cache = self._cache
        identity = [*cache.moments(self.moments), *cache.sites(self.sites)]
        arrays = [*identity, *self._number_arrays(), cache.shapes(self._shapes), self._custom_array()]
        return pa.RecordBatch.from_arrays(arrays, schema=_TABLE.plain_schema)

    def _number_arrays(self) -> Iterator[pa.Array]:
        count = len(self)
        columns = np.empty((len(ALL), count))
        columns[: len(NATIVE)] = self.numbers.T
        if self._others:
            columns[len(NATIVE) :] = math.nan
            for row, others in self._others.items():
                columns[len(NATIVE) :, row] = others
        else:
            columns = columns[: len(NATIVE)]
        missing = np.isnan(columns)
        for column, absent, absences, dtype in zip(
            columns, missing, missing.sum(axis=1).tolist(), _NUMBER_TYPES, strict=False
        ):
            if absences == count:
                yield self._cache.nulls(dtype, count)
            elif absences:
                values = np.where(absent, 0.0, column)
                yield pa.array(values.astype(np.int64) if dtype == pa.int64() else values, dtype, mask=absent)
            else:
                values = column.astype(np.int64) if dtype == pa.int64() else column
                yield pa.Array.from_buffers(dtype, count, [None, pa.py_buffer(values)])
        for dtype in _NUMBER_TYPES[len(columns) :]:
            yield self._cache.nulls(dtype, count)

    def _custom_array(self) -> pa.Array:
        if not self._custom:
            return self._cache.nulls(CUSTOM.type, len(self))
        return pa.array([self._custom.get(row) for row in range(len(self))], CUSTOM.type)


_NO_OTHERS = np.full(len(ALL) - len(NATIVE), math.nan)


class ColumnCache:
    """Columns and messages that are similar in many steps, since most steps record the same tensors in the same order.

    Attributes:
        template: The message of an earlier step; None before the first step.
        message_shapes: The shapes in this message.
        unchanged: What that step and steps with this message have in common: the identity columns and the missing numbers.
    """

    def __init__(self) -> None:
        self.template: MessageTemplate | None = None
        self.unchanged: tuple[Any, ...] = ()
        self._known: list[Row] = []
        self._sites: list[Row] = []
        self._site_arrays: list[pa.Array] = []
        self.message_shapes: list[Shape] = []
        self._shapes: list[Shape] = []
        self._shape_array: pa.Array = pa.array([], SHAPE.type)
        self._repeated: dict[tuple[Any, pa.DataType], pa.Array] = {}  # arrays of one repeated cell
        self._count = 0  # their length

    def known(self, sites: list[Row]) -> list[Row]:
        """Return the list of the last step if it is equal, so that further comparisons take no time."""
        if sites != self._known:
            self._known = sites
        return self._known

    def sites(self, sites: list[Row]) -> list[pa.Array]:
        """Return the identity columns of rows without the moment."""
        if sites != self._sites:
            columns = zip(*sites, strict=True)
            self._sites = sites
            self._site_arrays = [pa.array(cells, dtype) for cells, dtype in zip(columns, _SITE_TYPES, strict=True)]
        return self._site_arrays

    def replace_shapes(self, shapes: list[Shape]) -> bool:
        """Replace the shapes in the message. Return false if they have other numbers of dimensions."""
        known = self.message_shapes
        if shapes == known:
            return True
        numbers = None if self.template is None else self.template.numbers[_TABLE.names.index(SHAPE.name)]
        if numbers is None or None in shapes or [*map(len, shapes)] != [*map(len, known)]:  # type: ignore[arg-type]
            return False
        numbers[:] = [*chain.from_iterable(shapes)]  # type: ignore[arg-type]
        self.message_shapes = shapes
        return True

    def shapes(self, shapes: list[Shape]) -> pa.Array:
        """Return the column of shapes."""
        if shapes != self._shapes:
            self._shapes = shapes
            self._shape_array = pa.array(shapes, SHAPE.type)
        return self._shape_array

    def moments(self, moments: list[StepContext]) -> Iterator[pa.Array]:
        """Return the columns of the moment."""
        first = moments[0]
        if moments.count(first) == len(moments):
            step, *others = first
            yield pa.array(np.full(len(moments), step), _MOMENT_TYPES[0])
            for cell, dtype in zip(others, _MOMENT_TYPES[1:], strict=True):
                yield self._repeat(cell, dtype, len(moments))
        else:
            for cells, dtype in zip(zip(*moments, strict=True), _MOMENT_TYPES, strict=True):
                yield pa.array(cells, dtype)

    def nulls(self, dtype: pa.DataType, count: int) -> pa.Array:
        """Return a column without values."""
        return self._repeat(None, dtype, count)

    def _repeat(self, cell: Any, dtype: pa.DataType, count: int) -> pa.Array:
        if count != self._count:
            self._repeated.clear()
            self._count = count
        array = self._repeated.get((cell, dtype))
        if array is None:
            array = self._repeated[cell, dtype] = pa.repeat(pa.scalar(cell, dtype), count)
        return array
