"""The rows of one step whose numbers are rows of a slab: those of the tables `stats` and `effects`.

Most hooks add a row by one call of the native kernel, without a Python object per number. Each identity of a row gets the number of
a slot when it is first seen. When the step ends, all rows become columns at once.
"""

from __future__ import annotations

import hashlib
import math
import threading
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from ..actions.base import StepContext
from ..hooks.distributed_scope import scope_of
from ..relations.relation import RecordedFingerprint
from ..rules.step_rows import RowLayout
from ..stats.cpu_kernel import launch_devices, make_slab
from ..stats.device_choice import measure_batch
from ..stats.device_copy import HostCopy
from ..stats.formulas import computed, where
from ..stats.sums import INDEX, Sums, statistics_of
from ..tables.kinds import KINDS
from ..tables.message_template import Column, ListColumn, NumberBlock, NumberColumn, StepColumns
from ..tables.schemas import CUSTOM, IDENTITY, TABLES, joined_table
from ..tables.sink_interface import Row
from ..tables.statistics import ALL, REGISTERED, STATISTICS

Matrix = np.ndarray[Any, np.dtype[np.float64]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]
Keys = np.ndarray[Any, np.dtype[np.int64]]
_KEYS, MOMENT_INDEX, _BUFFER, _BUFFER_ROW = 5, 1, 3, 4  # see `instrument.stats.cpu_kernel.Slab.take`
_MOMENT = len(StepContext._fields)
_SCALE_DEPENDENT = [INDEX[name] for name in ("low", "high", "unit")]
_COUNTS = [INDEX[name] for name in ("numel", "n", "nan", "zeros")]
_Identity = tuple[Row, tuple[str, ...], bool]
_Scale = tuple[Tensor, int, Tensor]
"""The scale of a gradient scaler, its version, and a copy."""
_STATISTIC = {name: index for index, name in enumerate(ALL)}
_FINGERPRINT = _STATISTIC["fingerprint"]
MAX_LAYOUTS = 64


@dataclass
class Layout:
    """What the rows of steps with the same slots have in common."""

    sites: list[Row]  # for each row, the identity columns without the moment
    names: list[tuple[str, ...]]  # for each row, the requested statistics
    scaled: list[int]  # the indices of rows whose tensors were multiplied by the scale of the gradient scaler
    # If processes merge these rows: the slots of the merged ones, set when they are known.
    merged_slots: Keys | None = None
    # The columns of the latest moment that all rows have, and their values.
    moment_columns: list[tuple[Any, Column]] = field(default_factory=lambda: [(None, ())] * _MOMENT)
    shapes: tuple[bytes, Column] = b"", ()  # the column of the latest shapes, and what it depends on
    # The locations of these rows in each phase, set by the rules.
    of_rules: dict[str, RowLayout] = field(default_factory=dict)

    @cached_property
    def identity(self) -> list[Column]:
        """The identity columns without the moment."""
        return [*zip(*self.sites, strict=True)]

    @cached_property
    def digest(self) -> str:
        """A hash of the rows, without the rank."""
        rows = [(site[1:], names) for site, names in zip(self.sites, self.names, strict=True)]
        return hashlib.blake2b(repr(rows).encode()).hexdigest()

    @cached_property
    def requested(self) -> tuple[str, ...]:
        """The statistics of any row: built-in ones in the order of `ALL`, then registered ones."""
        every = dict.fromkeys(name for names in dict.fromkeys(self.names) for name in names)
        return (*(name for name in ALL if name in every), *(name for name in every if name in REGISTERED))

    @cached_property
    def built_in(self) -> list[int]:
        """The indices of the requested built-in statistics in `ALL`."""
        return [_STATISTIC[name] for name in self.requested if name in STATISTICS]

    @cached_property
    def no_values(self) -> list[pa.Array]:
        """Columns without values for `ALL` and custom statistics. Those of one type are the same array."""
        stats = TABLES["stats"].plain_schema
        types = [*(stats.field(name).type for name in ALL), CUSTOM.type]
        empty = {str(dtype): pa.nulls(len(self.sites), dtype) for dtype in types}
        return [empty[str(dtype)] for dtype in types]

    @cached_property
    def statistics(self) -> list[Column]:
        """The columns of `ALL`: those of `NumberBlock`, or without values."""
        return [self.built_in.index(at) if at in self.built_in else none for at, none in enumerate(self.no_values[:-1])]

    @cached_property
    def absent(self) -> Mask | None:
        """Which statistics are not requested, bool [requested, rows]; None if each row has all of them."""
        of = {names: [name not in names for name in self.requested] for names in dict.fromkeys(self.names)}
        if not any(map(any, of.values())):
            return None
        return np.array([of[names] for names in self.names], np.bool_).reshape(len(self.names), -1).T


class Slots:
    """The identities of rows. Each gets a number when it is first seen. Several threads may add some."""

    def __init__(self) -> None:
        self._numbers: dict[_Identity, int] = {}
        self._identities: list[_Identity] = []
        self._layouts: dict[bytes, Layout] = {}
        self._lock = threading.Lock()

    def slot(self, site: Row, names: tuple[str, ...] = (), *, is_scaled: bool = False) -> int:
        """Return the number of an identity; see `instrument.actions.base.Rows.slot`. A site has no moment."""
        identity = site, names, is_scaled
        number = self._numbers.get(identity)
        if number is None:
            with self._lock:
                number = self._numbers.get(identity, len(self._identities))
                if number == len(self._identities):
                    self._identities.append(identity)  # first, because other threads read the number without the lock
                    self._numbers[identity] = number
        return number

    def layout(self, slots: np.ndarray[Any, np.dtype[np.int64]]) -> Layout:
        """Return the layout of rows with these slots. It is the same object in later steps."""
        key = slots.tobytes()
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) >= MAX_LAYOUTS:
                self._layouts.clear()
            identities = [self._identities[slot] for slot in slots.tolist()]
            scaled = [row for row, (*_, is_scaled) in enumerate(identities) if is_scaled]
            sites, names = [site for site, *_ in identities], [names for _, names, _ in identities]
            layout = self._layouts[key] = Layout(sites, names, scaled)
        return layout


class DeviceRows:
    """The rows of a step whose numbers are in a buffer on a device. Creating the object starts the copy to the host.

    `buffer` is float64 [rows of the buffer, columns], and `rows` are the indices of the rows among all rows of the step.
    """

    def __init__(self, buffer: Tensor, keys: Keys, index: int) -> None:
        self.device = buffer.device
        self.rows = np.flatnonzero(keys[:, _BUFFER] == index)
        self._buffer = buffer
        self._buffer_rows = keys[self.rows, _BUFFER_ROW]
        self._copy = HostCopy(buffer[: self._buffer_rows.max() + 1]) if len(self.rows) else None

    def numbers(self) -> Matrix:
        """Return the measured numbers, float64 [rows, columns]. Waits for the copy."""
        assert self._copy is not None, "no row has its numbers in this buffer"
        numbers: Matrix = self._copy.wait().numpy()[self._buffer_rows]
        return numbers

    def device_numbers(self, numbers: Matrix) -> Tensor:
        """Return the numbers of the rows, with those that the device has written, on the device: float64 [rows, slab columns]."""
        matrix = torch.from_numpy(numbers[self.rows]).to(self.device)
        measured = self._buffer[torch.from_numpy(self._buffer_rows).to(self.device)]
        matrix[:, 1 : 1 + measured.shape[1]] = measured  # the host has set the first column, the number of elements
        return matrix


@dataclass
class Taken:
    """The rows of a step."""

    numbers: Matrix  # float64 [rows, columns of the slab]
    keys: Keys  # int64 [rows, 5]; see `instrument.stats.cpu_kernel.Slab.take`
    dims: np.ndarray[Any, np.dtype[np.int64]]  # the dimensions of all rows
    moments: list[StepContext]  # the times of rows; neighbours may be equal
    # What rows have besides their numbers, by the index of the row.
    others: dict[int, Any] = field(default_factory=dict)
    device_rows: list[DeviceRows] = field(default_factory=list)  # the rows whose numbers are on a device until `fetch`
    scale: HostCopy | None = None  # the scale of the gradient scaler in this step; None if no row depends on it

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def moments_of_rows(self) -> list[StepContext]:
        return [self.moments[number] for number in self.keys[:, MOMENT_INDEX].tolist()]

    def fetch(self) -> None:
        """Fill in the numbers of `device_rows`. Waits for the copies."""
        for each in self.device_rows:
            numbers = each.numbers()
            self.numbers[each.rows, 1 : 1 + numbers.shape[1]] = numbers

    def followed_by(self, merged: Taken) -> Taken:
        """Return these rows and then merged ones, which are not on a device and have nothing besides their numbers."""
        keys = np.concatenate([self.keys, merged.keys])
        keys[len(self) :, MOMENT_INDEX] += len(self.moments)
        numbers = np.concatenate([self.numbers, merged.numbers])
        return replace(self, numbers=numbers, keys=keys, moments=[*self.moments, *merged.moments])

    def ordered(self, order: Keys) -> Taken:
        """Return the rows in another order, in which those that are not merged keep theirs."""
        index = {row: at for at, row in enumerate(order.tolist())}
        others = {index[row]: other for row, other in self.others.items()}
        return replace(self, numbers=self.numbers[order], keys=self.keys[order], others=others, device_rows=[])

    def without(self, left_out: Sequence[int]) -> Taken:
        is_kept = np.ones(len(self), np.bool_)
        is_kept[left_out] = False
        kept = np.flatnonzero(is_kept).tolist()
        dims = self.dims[np.repeat(is_kept, np.maximum(self.keys[:, 2], 0))]
        others = {at: self.others[row] for at, row in enumerate(kept) if row in self.others}
        return Taken(self.numbers[is_kept], self.keys[is_kept], dims, self.moments, others, scale=self.scale)


class StepSlab:
    """Collects the rows of one step. Several threads may add some. A device fills `device_columns` columns, after the first one."""

    def __init__(self, width: int, device_columns: int) -> None:
        self.slots = Slots()
        self.slab = make_slab(width)
        self._width, self._device_columns = width, device_columns
        self._others: dict[int, Any] = {}
        self._no_rows = Taken(np.empty((0, width)), np.empty((0, _KEYS), np.int64), np.empty(0, np.int64), [])
        self._lock = threading.RLock()
        self._buffers: list[Tensor] = []  # on each device, for the numbers of this step
        self._previous_buffers: list[Tensor] = []  # those of the step before, which may still be copied to the host
        self._max_rows: Counter[torch.device] = Counter()  # the largest number of rows of a step
        self._scale: _Scale | None = None  # of this step
        # Of this step or an earlier one: another thread may end the step while a row is measured.
        self._latest_scale: _Scale | None = None

    def __len__(self) -> int:
        return len(self.slab)

    def add(
        self,
        identity: Row,
        numbers: Matrix | Sequence[float],
        shape: Sequence[int] | None = None,
        names: tuple[str, ...] = (),
        other: Any = None,
    ) -> None:
        """Add a row.

        Args:
            shape: The shape of the tensor; None if the row is merged from several tensors.
            other: What the row has besides its numbers.
        """
        moment = StepContext(*identity[:_MOMENT])
        memory = np.asarray(numbers, np.float64).tobytes()
        slot = self.slots.slot(identity[_MOMENT:], names)
        with self._lock:
            at = self.slab.append(memory, slot, moment, shape)
            if other is not None:
                self._others[at] = other

    def add_effect(
        self, before: Tensor, after: Tensor, slot: int, moment: StepContext, held: bool | None, other: Any
    ) -> bool:
        """Add an effect; see `instrument.stats.cpu_kernel.Slab.add_effect`. Return whether the row was added: the tensors are plain.

        `other` has what the row has besides its numbers, with the factor.
        """
        with self._lock:
            at = self.slab.add_effect(before, after, slot, moment, None, held)
            if at is not None:
                self._others[at] = other
        return at is not None

    def set_scale(self, scale: Tensor) -> bool:
        """See `instrument.actions.base.Rows.set_scale`."""
        with self._lock:
            if self._scale is None:
                self._scale = self._latest_scale = scale, scale._version, scale.clone()
            known, version, _ = self._scale
        return known is scale and version == scale._version

    @contextmanager
    def batched_launch(self) -> Iterator[None]:
        """See `instrument.actions.base.Rows.batched_launch`."""
        with self._lock:  # no other thread takes rows whose numbers are missing
            self.slab.begin_batch()
            try:
                yield
            finally:
                try:
                    measure_batch(self.slab.end_batch())
                except BaseException:  # rows have no numbers: all rows of the step are dropped
                    self.slab.take()
                    self._others = {}
                    raise

    def take(self, *, rows_elsewhere: int = 0) -> Taken:
        """Return the rows so far, and remove them. Rows that other threads add in the meantime belong to the next step.

        The buffers of the next step also have space for `rows_elsewhere`: rows with numbers on a device that are not in this slab.
        """
        if not (len(self.slab) or rows_elsewhere):
            self._scale = None
            return self._no_rows
        with self._lock:
            numbers, keys, dims, moments = self.slab.take()
            others, self._others = self._others, {}
            scale, self._scale = self._latest_scale, None
            table = np.frombuffer(keys, np.int64).reshape(-1, _KEYS)
            device_rows: list[DeviceRows] = []
            if self._buffers or launch_devices:
                device_rows += (DeviceRows(buffer, table, index) for index, buffer in enumerate(self._buffers))
                self._set_buffers({each.device: len(each.rows) for each in device_rows}, len(others) + rows_elsewhere)
                device_rows = [each for each in device_rows if len(each.rows)]
        return Taken(
            np.frombuffer(numbers).reshape(-1, self._width),
            table,
            np.frombuffer(dims, np.int64),
            moments,
            others,
            device_rows,
            None if scale is None else HostCopy(scale[2]),
        )

    def _set_buffers(self, launched: Mapping[torch.device, int], incomplete: int) -> None:
        """Set the buffers for the next step. Reuse those of the step before the last one, whose numbers the host has read.

        `launched` rows of the last step are in the buffer of each device, and `incomplete` others have numbers on any device.
        """
        free, self._previous_buffers = {each.device: each for each in self._previous_buffers}, self._buffers
        self._buffers = []
        for device in [*launch_devices]:
            rows = self._max_rows[device] = max(self._max_rows[device], launched.get(device, 0) + incomplete)
            buffer = free.get(device)
            if buffer is None or len(buffer) < rows:
                try:
                    with torch.inference_mode(False):
                        buffer = torch.empty((rows, self._device_columns), dtype=torch.float64, device=device)
                except torch.OutOfMemoryError:  # the rows of the last step are more important
                    continue
            self.slab.set_buffer(*buffer.__dlpack_device__(), buffer.data_ptr(), rows)
            self._buffers.append(buffer)


class SlabRows(StepColumns):
    """Rows of a table as columns. Every number has to be on the host.

    Attributes:
        sites: For each row, the identity columns without the moment. The same object in all steps with the same rows.
        moment: The moment of all rows; None if they have several.
    """

    def __init__(self, table: str, slab: StepSlab, taken: Taken) -> None:
        self.schema = TABLES[table].plain_schema
        self.taken = taken
        self.layout = slab.slots.layout(taken.keys[:, 0])
        self.sites = self.layout.sites
        first = taken.moments[0]
        self.moment = first if taken.moments.count(first) == len(taken.moments) else None
        self._count = len(taken.keys)

    @property
    def latest(self) -> tuple[int, str]:
        moment = self.taken.moments[-1]
        return moment.step, moment.phase

    def __len__(self) -> int:
        return self._count

    @abstractmethod
    def number_columns(self) -> Sequence[Column]:
        """Return the columns after the identity."""

    def columns(self) -> list[Column]:
        return [*self._moment_columns(), *self.layout.identity, *self.number_columns()]

    def _moment_columns(self) -> list[Column]:
        if self.moment is None:
            return [*zip(*self.taken.moments_of_rows, strict=True)]
        known, columns = self.layout.moment_columns, []
        for index, value in enumerate(self.moment):
            before, cells = known[index]
            if before != value:  # otherwise, the message has these cells already
                count = len(self)
                cells = (value,) * count if isinstance(value, str) else NumberColumn(np.array(value).repeat(count))
                known[index] = value, cells  # together: another thread may read them
            columns.append(cells)
        return columns


class StatisticsRows(SlabRows):
    """Rows of the table `stats`. What rows have besides their sums are their custom statistics by name.

    Args:
        joined: The rows of the step in other tables, whose numbers are those of the same tensors. Default: none.

    Attributes:
        values: The requested built-in statistics, float64 [statistics, rows]; NaN for no value.
        block: The same, for a message.
    """

    block: NumberBlock

    def __init__(self, slab: StepSlab, taken: Taken, joined: Mapping[str, Sequence[Row]] | None = None) -> None:
        super().__init__("stats", slab, taken)
        self._joined = joined or {}
        self.values = self._statistics()
        nulls, built_in = np.isnan(self.values), self.layout.built_in
        exact = {built_in.index(_FINGERPRINT): Sums(taken.numbers).bits} if _FINGERPRINT in built_in else {}
        self.block = NumberBlock(self.values, nulls if np.count_nonzero(nulls) else None, exact)

    def _statistics(self) -> Matrix:
        """Return the requested built-in statistics. The registered ones become the additional part of their rows."""
        requested, built_in = self.layout.requested, len(self.layout.built_in)
        if self.layout.scaled:
            self._divide_by_scale()
        columns = np.asarray(statistics_of(self.taken.numbers, requested), np.float64)
        if self.layout.absent is not None:
            columns[self.layout.absent] = np.nan
        for name, column in zip(requested[built_in:], columns[built_in:].tolist(), strict=True):
            for row in (row for row, names in enumerate(self.layout.names) if name in names):
                self.taken.others.setdefault(row, {})[name] = None if math.isnan(column[row]) else column[row]
        return columns[:built_in]

    def _divide_by_scale(self) -> None:
        """Replace the sums of scaled rows by those of the elements divided by the scale."""
        assert self.taken.scale is not None, "the scale was set before the rows were added"
        scale, rows = self.taken.scale.wait().item(), self.taken.numbers[self.layout.scaled]
        numel, n, nan, zeros = rows[:, _COUNTS].T.copy()
        if scale:  # the other sums do not depend on it
            rows[:, _SCALE_DEPENDENT] /= scale
        else:  # zeros become NaN, and the others infinite
            rows[:, _COUNTS] = np.stack([numel, 0 * n, nan + zeros, 0 * n], axis=1)
        self.taken.numbers[self.layout.scaled] = rows

    def column(self, name: str) -> Matrix:
        """Return a statistic of all rows, or a number of another table for the same tensors: float64 [rows]; NaN for no value."""
        if name in _STATISTIC:
            at, built_in = _STATISTIC[name], self.layout.built_in
            return self.values[built_in.index(at)] if at in built_in else np.full(len(self), np.nan)
        values = np.full(len(self), np.nan)
        for row, custom in self.taken.others.items():
            value = custom.get(name)
            values[row] = np.nan if value is None else value
        if (table := joined_table(name)) is not None and (joined := self._joined.get(table)):
            at = TABLES[table].names.index(name)
            numbers = {row[: len(IDENTITY)]: row[at] for row in joined}
            for index, (moment, site) in enumerate(zip(self.taken.moments_of_rows, self.sites, strict=True)):
                if (number := numbers.get((*moment, *site))) is not None:
                    values[index] = number
        return values

    def fingerprints(self) -> Iterator[RecordedFingerprint]:
        """Yield the fingerprints in training steps of tensors that all data-parallel processes have."""
        if "fingerprint" not in self.layout.requested:
            return
        columns = Sums(self.taken.numbers).bits.tolist(), self.taken.moments_of_rows, self.sites, self.layout.names
        for value, moment, site, names in zip(*columns, strict=True):
            _, _, layer, _, kind, role, path, *_, scope = site
            is_replica = scope in ("local", "averaged") and scope_of(KINDS[kind], role, "ddp") == "averaged"
            if "fingerprint" in names and moment.phase == "train" and is_replica:
                yield RecordedFingerprint(moment.step, layer, kind, role, path, site[1:-1], value)

    def number_columns(self) -> Sequence[Column]:
        others = self.taken.others
        custom = tuple(map(others.get, range(len(self)))) if others else self.layout.no_values[-1]
        ranks, dims = self.taken.keys[:, 2], self.taken.dims
        key = ranks.tobytes() + dims.tobytes()
        if self.layout.shapes[0] != key:  # otherwise, the message has these cells already
            self.layout.shapes = key, ListColumn(ranks, dims)
        return [*self.layout.statistics, self.layout.shapes[1], custom]


def _effect_columns(numel: Any, changed: Any, before: Any, after: Any, factor: Any, held: Any) -> list[Any]:
    fraction = where(numel > 0, changed / numel, 0.0)
    return [numel, changed, fraction, before, after, where(held < 1, np.nan, factor)]


class EffectRows(SlabRows):
    """Rows of the table `effects`. `block` has all numbers but `held`."""

    block: NumberBlock

    def __init__(self, slab: StepSlab, taken: Taken) -> None:
        super().__init__("effects", slab, taken)
        self._held = taken.numbers[:, -1]
        columns = computed(_effect_columns, taken.numbers)
        nulls = np.isnan(columns)
        for row in taken.others:
            nulls[-1, row] = self._held[row] == 0
        self._columns = [*range(len(columns))]
        self.block = NumberBlock(columns, nulls if np.count_nonzero(nulls) else None, {})

    def number_columns(self) -> Sequence[Column]:
        return [*self._columns, NumberColumn(self._held, np.isnan(self._held))]
