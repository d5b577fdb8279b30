"""Collects the rows of the current step.

Numbers on a device stay there until the step ends. They are then copied asynchronously, all at once, and read when the
next step ends.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..actions.base import EFFECT, Context, Effect, Number, Numbers, StepContext
from ..actions.record import line_of
from ..hooks.attached_hook import AttachedHook
from ..hooks.clock import take
from ..rules.step_rows import RelationRow
from ..stats.cpu_kernel import Slab, is_connected
from ..stats.device_copy import HostCopy, Transfer
from ..stats.device_sums import DeviceMemory
from ..stats.exact_integers import remainders
from ..stats.measure import Measured, as_cell, on_host
from ..stats.sums import COLUMNS, INDEX, statistics_of
from ..stats.table_rows import Measure, Values
from ..tables.sink_interface import Row, Sink
from ..values.int8_rows import dtype_of_copy
from ..values.nested import shape_of
from .collectives import Ranks
from .flight_recorder import FlightRecorder, RecordedTensor, period_of
from .rank_merging import MergedRows, RowMerger, effect_piece, measured_piece, statistics_piece
from .samples import SampleBatch, SampleRows, Samples
from .slab_rows import EffectRows, Matrix, StatisticsRows, StepSlab, Taken

MetricsRow = tuple[int, str, Mapping[str, Any]]
"""Step, phase, and the values of the other columns of a row of metrics."""
Relations = Mapping[tuple[int, str], Sequence[RelationRow]]
"""The rows of relations of each step and phase."""
OnRows = Callable[[StatisticsRows | None, Sequence[MetricsRow], Sequence[SampleRows], Relations, bool], None]
"""A function of the rows of a step. The last argument is whether the step has ended, and not only an evaluation in it."""
Decisions = tuple[Tensor, ...]
"""Whether the condition of a hook holds, if a device decides it. Otherwise empty."""
UndecidedTensor = tuple[Context, Sequence[int], Tensor, torch.dtype | None, Decisions]
"""The call, the shape of the complete tensor, a copy on the device, the dtype in which it is stored, and the decision."""
NUMBER_BYTES = 4  # approximate size on disk of one number that a `Measure` computes
# The number of columns, after the first one, that a device fills.
_DEVICE_SUMS = INDEX["bits_high"]
_DEVICE_EFFECTS = EFFECT.index("norm_after")
_FACTOR = EFFECT.index("factor")
MeasuredRow = tuple[str, Row, Any, Callable[[Sequence[float | None]], Row], Decisions]
"""Table, identity, the values of a `Measure` or a function that computes them, and what converts the values to cells."""


class Recorder:
    """Collects the results of a step's actions and passes them to the sink at the end of the step; see `Rows`, which it implements.

    Several threads may add results.

    Args:
        on_rows: Called with the rows of each step, after all of them were passed to the sink.
        all_samples: Whether the table `samples` has the samples of all batches. Default: those of batches in which a
            tensor is stored.
        print_line: Prints a line of `action: print`, when the values of its step are read.
        keep: The number of steps whose tensors stay in memory, for hooks with `keep`. Default: none.

    Attributes:
        merges, set_scale, batched_launch: See `Rows`.
    """

    def __init__(
        self,
        sink: Sink,
        on_rows: OnRows | None = None,
        ranks: Ranks | None = None,
        *,
        all_samples: bool = False,
        print_line: Callable[[str], None] = print,
        keep: Mapping[str, int] | None = None,
    ) -> None:
        self.sink = sink
        self.on_rows = on_rows
        self.print_line = print_line
        self.rows_written = 0
        self.dropped: Counter[tuple[str, str, str]] = Counter()  # dropped tensors, by hook, layer and path
        self.bytes: Counter[tuple[str, str, str]] = Counter()  # of tensors and measured rows, by the same keys
        self.samples = Samples(of_all_batches=all_samples)
        self.flight_recorder = FlightRecorder(keep or {})
        self._stats, self._effects = StepSlab(len(COLUMNS), _DEVICE_SUMS), StepSlab(len(EFFECT), _DEVICE_EFFECTS)
        merging = ranks if ranks is not None and ranks.reduces else None
        self._merger = RowMerger(merging, self._stats.slots)
        # This process's sums of rows that are merged from all processes.
        self._merged_stats = StepSlab(len(COLUMNS), _DEVICE_SUMS)
        self.merges = self._merger.merges
        self.set_scale, self.batched_launch = self._stats.set_scale, self._stats.batched_launch
        self._memory = DeviceMemory()
        self._measured: list[MeasuredRow] = []
        self._lines: list[tuple[str, _Values]] = []
        self._tensors: list[UndecidedTensor] = []
        self._metrics: list[MetricsRow] = []  # of this step
        self._relations: dict[tuple[int, str], Sequence[RelationRow]] = {}
        self._deferred: list[Callable[[], Row]] = []  # rows of metrics whose numbers are on a device
        self._copied_from: set[torch.device] = set()  # CUDA devices of the tensors that this step passed to the sink
        self._pending: _Step | None = None

    def memory(self, device: torch.device) -> Tensor | None:
        return None if device.type == "cpu" else self._memory.row(device)

    def add_part(self, context: Context, names: tuple[str, ...], part: Measured, dead: Tensor | None) -> None:
        order = len(self._merged_stats) - 0.5  # after the rows of the slab so far
        self._merger.add(statistics_piece(context, names, part, dead, order), context)

    def add_stats(
        self, context: Context, shape: tuple[int, ...], names: tuple[str, ...], measured: Measured, custom: Numbers
    ) -> None:
        if not self._merger.is_duplicate(context):
            is_complete = measured.on_device is None and measured.exact_extremes is None and not custom
            other = None if is_complete else _Values(measured, custom, names)
            self._stats.add(self._merger.identity(context), measured.row, shape, names, other)

    def record_plain_effect(
        self, before: Tensor, after: Tensor, slot: int, moment: StepContext, factor: Number, held: bool | None
    ) -> bool:
        """Add the effect of an intervention; see `Rows`. Return false if the tensors are not plain, or if processes merge their rows."""
        if self._merger.ranks is not None:
            return False
        if isinstance(factor, Tensor):
            return self._effects.add_effect(before, after, slot, moment, held, _EffectValues(factor.detach()))
        if factor is not None and math.isnan(factor):  # in a row of the slab, NaN means no factor
            return self._effects.add_effect(before, after, slot, moment, held, _EffectValues(factor))
        return self._effects.slab.add_effect(before, after, slot, moment, factor, held) is not None

    def slab_of(self, context: Context, table: str = "stats") -> Slab | None:
        is_elsewhere = self._merger.is_duplicate(context) if table == "stats" else self._merger.ranks is not None
        return None if is_elsewhere or not is_connected else self._slab_of(table, context).slab

    def slot(self, table: str, context: Context, names: tuple[str, ...], *, is_scaled: bool = False) -> int:
        site = self._merger.identity(context)[len(context.moment) :]
        return self._slab_of(table, context).slots.slot(site, names, is_scaled=is_scaled)

    def _slab_of(self, table: str, context: Context) -> StepSlab:
        if table == "effects":
            return self._effects
        return self._merged_stats if self._merger.merges(context) else self._stats

    def add_row(self, table: str, context: Context, measure: Measure, tensor: Tensor) -> None:
        if self._merger.is_duplicate(context):
            return
        if self._merger.merges(context):
            self._merger.add(measured_piece(table, context, measure, tensor), context)
        else:
            cells = partial(measure.cells, shape=shape_of(tensor))
            row = self._merger.identity(context)
            self._measured.append((table, row, measure.values(tensor), cells, _undecided(context)))
        self.bytes[context.hook, context.layer, context.path] += NUMBER_BYTES * measure.size

    def add_line(
        self, context: Context, text: str, names: tuple[str, ...], measured: Measured, custom: Numbers
    ) -> None:
        if not self._merger.is_duplicate(context):
            self._lines.append((text, _Values(measured, custom, names)))

    def add_tensor(
        self, context: Context, source_shape: Sequence[int], tensor: Tensor, dtype: torch.dtype | None
    ) -> None:
        """Pass the values of a tensor to the sink, which copies them. A dropped tensor is counted.

        If a device decides whether the tensor is recorded, a copy stays there until the numbers of the step are read.
        """
        if self._merger.is_duplicate(context):
            return
        if context.hook in self.flight_recorder.steps:
            call, is_pending = context.without_tensors(), self._pending is not None
            self.flight_recorder.add(call, source_shape, tensor, dtype, has_pending_step=is_pending)
            self.samples.note_tensor(context, source_shape, is_kept=True)
        elif decisions := _undecided(context):
            copy = tensor.to(dtype_of_copy(tensor, dtype), copy=True)
            self._tensors.append((context.without_tensors(), source_shape, copy, dtype, decisions))
            self.samples.note_tensor(context, source_shape)
        elif self._store(context, source_shape, tensor, dtype):
            self.samples.note_tensor(context, source_shape)

    def _store(self, context: Context, source_shape: Sequence[int], tensor: Tensor, dtype: torch.dtype | None) -> bool:
        """Pass the values of a tensor to the sink. Return whether it stored them."""
        stored = self.sink.keep(self._merger.identity(context), source_shape, tensor, dtype)
        if stored is None:
            self.dropped[context.hook, context.layer, context.path] += 1
            return False
        self.rows_written += 1
        self.bytes[context.hook, context.layer, context.path] += stored
        if tensor.is_cuda:
            self._copied_from.add(tensor.device)
        return True

    def write_kept(self, hook: str) -> list[RecordedTensor]:
        """Pass the tensors that a hook with `keep` has in memory to the sink, and return them."""
        recorded = self.flight_recorder.take(hook)
        for batch in self.samples.take_kept({period_of(one.context) for one in recorded}):
            self.write("samples", batch.rows(number.tolist() for number in batch.numbers))
        for one in recorded:
            self._store(one.context, one.source_shape, one.copy.wait(), one.dtype)
        return recorded

    def add_effect(self, context: Context, effect: Effect) -> None:
        if self.merges(context):
            self._merger.add(effect_piece(context, effect), context)
        elif not self._merger.is_duplicate(context):
            is_complete = not effect.numbers and not (effect.factor is not None and math.isnan(effect.factor))
            other = None if is_complete else _EffectValues(effect.factor, effect)
            self._effects.add(self._merger.identity(context), effect.row(), other=other)

    def bytes_of(self, attached: AttachedHook) -> int:
        """Return the bytes of a site's tensors, and approximately those of its measured rows."""
        return count_at_site(self.bytes, attached)

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, and the hooks whose kept tensors were never written, as numbers and lists."""
        counts = {"dropped": self.dropped, "bytes": self.bytes}
        first = {"rows_written": self.rows_written, "unwritten": self.flight_recorder.unwritten}
        return first | {name: [[*key, count] for key, count in counter.items()] for name, counter in counts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows_written = state["rows_written"]
        self.flight_recorder.unwritten = list(state["unwritten"])
        self.dropped, self.bytes = (
            Counter({(hook, layer, path): count for hook, layer, path, count in state[name]})
            for name in ("dropped", "bytes")
        )

    def write(self, table: str, rows: Sequence[Row]) -> None:
        """Write rows of a table without actions directly to the sink."""
        self.sink.write(table, rows)
        self.rows_written += len(rows)

    def end_step(self, *, any_scheduled: bool = True, local_only: bool = False, is_complete: bool = True) -> None:
        """Pass the rows of the step to the sink: at the end of the next step, if numbers or tensors are on a GPU.

        Args:
            any_scheduled: Whether any hook was scheduled; equal in all processes.
            local_only: Whether the other processes are gone. Rows are then computed from the parts of this one.
            is_complete: Whether the step has ended, and not only an evaluation or the saving of a checkpoint in it.
        """
        self.flush()
        if self.flight_recorder.steps:
            self.samples.limit_kept(self.flight_recorder.periods())
        merged = None if self._merger.ranks is None else self._merge(any_scheduled, local_only)
        stats, effects = self._stats.take(), self._effects.take()
        if merged is not None and merged.block is not None:
            stats = stats.followed_by(merged.block)
        further = self._take_further([*stats.others.values(), *effects.others.values()])
        metrics, relations, self._metrics, self._relations = self._metrics, self._relations, [], {}
        step = _Step(stats, effects, merged, metrics, relations, further, is_complete)
        is_on_host = further is _NOTHING or (further.transfer.is_complete and not (further.sums or further.deferred))
        if is_on_host and not (stats.device_rows or effects.device_rows) and (merged is None or merged.is_complete):
            self._pass_on(step)
        else:
            self._pending = step

    def _merge(self, any_scheduled: bool, local_only: bool) -> MergedRows | None:
        if len(parts := self._merged_stats.take(rows_elsewhere=self._merger.statistics_on_device)):
            self._merger.add_rows(parts, self._merged_stats.slots.layout(parts.keys[:, 0]))
        merged = self._merger.merge(any_scheduled=any_scheduled, local_only=local_only)
        for row in () if merged is None else merged.rows:
            (self._stats if row.table == "stats" else self._effects).add(row.identity, (), None, row.names, row)
        return merged

    def _take_further(self, others: Sequence[_Values | _EffectValues]) -> _Further:
        """Return the results besides rows of numbers on the host, and begin to copy their numbers, and those of `others`."""
        has_rows = others or self.samples.finished or self._lines or self._tensors or self._measured or self._deferred
        if not (has_rows or self._memory.is_used or self._copied_from):
            return _NOTHING
        batches, lines, tensors = take(self.samples.finished), take(self._lines), take(self._tensors)
        on_device = [number for each in (*others, *(values for _, values in lines)) for number in each.numbers]
        measured = [
            (table, row, values() if callable(values) else values, cells, decisions)
            for table, row, values, cells, decisions in take(self._measured)
        ]
        for *_, numbers, _, decisions in measured:
            on_device += [each for each in (numbers, *decisions) if isinstance(each, Tensor)]
        for batch in batches:
            on_device += batch.numbers
        for *_, decisions in tensors:
            on_device += decisions
        devices, self._copied_from = self._copied_from, set()
        sums = [(rows, HostCopy(memory)) for rows, memory in self._memory.take()]
        return _Further(measured, batches, lines, tensors, take(self._deferred), sums, Transfer(on_device, devices))

    @property
    def has_pending_rows(self) -> bool:
        """Whether rows of hooks are still being copied. Writing them will take time in the current step."""
        step = self._pending
        if step is None:
            return False
        further = step.further
        rows = len(step.stats) + len(step.effects) or step.merged or further.measured or further.lines
        return bool(rows or further.tensors or further.transfer.devices)

    def add_metrics(self, row: MetricsRow, cells: Callable[[], Row], *, now: bool) -> None:
        """Write a row of metrics, now or with the rows of the step, with which it is passed to `on_rows`."""
        self._metrics.append(row)
        if now:
            self.write("metrics", [cells()])
        else:
            self._deferred.append(cells)

    def write_relations(self, step: int, phase: str, rank: int, rows: Sequence[RelationRow]) -> None:
        """Write the rows of relations of a step, and pass them to `on_rows` with the other rows of the step."""
        if rows:
            self._relations[step, phase] = rows
            self.write("relations", [(step, phase, rank, *row) for row in rows])

    def flush(self) -> None:
        """Pass the rows of all completed steps to the sink and to the rules. Waits for values that are being copied from a GPU."""
        step, self._pending = self._pending, None
        if step is not None:
            self._pass_on(step)

    def _pass_on(self, step: _Step) -> None:
        has_rows = step.further is not _NOTHING or len(step.stats.keys) or len(step.effects.keys) or step.merged
        stats, samples = self._write_rows(step) if has_rows else (None, ())
        if self.on_rows is not None:
            self.on_rows(stats, step.metrics, samples, step.relations, step.is_complete)
        self.sink.end_step()

    def _write_rows(self, step: _Step) -> tuple[StatisticsRows | None, Sequence[SampleRows]]:
        """Pass rows of hooks and samples to the sink. Return the rows of statistics, and the samples of this step."""
        further = step.further
        fetched = further.transfer.read()
        stats, effects, tables = self._completed(step, fetched)
        stats_rows = StatisticsRows(self._stats, stats, tables) if len(stats.keys) else None
        if stats_rows is not None:
            self.write("stats", stats_rows)
        for table, rows in tables.items():
            self.write(table, rows)
        if len(effects.keys):
            self.write("effects", EffectRows(self._effects, effects))
        samples = [batch.rows(fetched) for batch in further.batches]
        for batch_rows in samples:
            self.write("samples", batch_rows)
        for context, source_shape, tensor, dtype, decisions in further.tensors:
            if _read((), decisions, fetched) is not None:  # a device has decided that the condition of the hook holds
                self._store(context, source_shape, tensor, dtype)
        for cells_of_metrics in further.deferred:
            self.write("metrics", [cells_of_metrics()])
        return stats_rows, samples

    def _completed(
        self, step: _Step, fetched: Iterator[list[float]]
    ) -> tuple[Taken, Taken, Mapping[str, Sequence[Row]]]:
        """Return the rows of statistics and of effects with all of their numbers, and those of other tables. Print the lines."""
        further, stats, effects = step.further, step.stats, step.effects
        tables: defaultdict[str, list[Row]] = defaultdict(list)
        merged = () if step.merged is None else step.merged.fetch(stats.numbers)
        stats.fetch()
        effects.fetch()
        if further is _NOTHING and step.merged is None:
            return stats, effects, tables
        if further.sums:
            _read_sums(step)
        stats, effects = _complete(stats, fetched), _complete(effects, fetched)
        if step.merged is not None:
            stats = stats.ordered(step.merged.order(len(stats)))
        lines = [(text, values.names, values.cells(fetched)) for text, values in further.lines]
        for table, row, values, as_cells, decisions in further.measured:
            if (numbers := _read(values, decisions, fetched)) is not None:
                tables[table].append((*row, *as_cells(numbers)))
        for table, row in merged:
            tables[table].append(row)
        for text, names, cells in lines:
            if cells is not None:
                self.print_line(line_of(text, names, cells))
        return stats, effects, tables


class _Values(NamedTuple):
    """Sums that may be on a device, and custom statistics by name: the additional part of a row (`Taken.others`)."""

    measured: Measured
    custom: Numbers
    names: tuple[str, ...]

    @property
    def numbers(self) -> list[Tensor]:
        """The numbers on a device, without the sums."""
        measured = self.measured
        return [e for e in (*self.custom.values(), measured.holds, measured.exact_extremes) if isinstance(e, Tensor)]

    def complete(self, row: Matrix, fetched: Iterator[list[float]]) -> dict[str, float | None] | None:
        """Write the sums to the row. Return the custom statistics, NaN as None; None if the condition of the hook does not hold."""
        row[:] = self.measured.row
        numbers = {name: next(fetched)[0] if isinstance(each, Tensor) else each for name, each in self.custom.items()}
        held = next(fetched)[0] if isinstance(self.measured.holds, Tensor) else True
        extremes = [] if self.measured.exact_extremes is None else [next(fetched)]
        custom: dict[str, float | None] = {
            name: None if number is None or math.isnan(number) else number for name, number in numbers.items()
        }
        return {**custom, **remainders(extremes, self.names, row)} if held else None

    def cells(self, fetched: Iterator[list[float]]) -> list[float | None] | None:
        """Return the statistics, None for no value; None instead if the condition of the hook does not hold."""
        row = np.empty(len(COLUMNS))
        custom = self.complete(row, fetched)
        if custom is None:
            return None
        known = self.names[: len(self.names) - len(custom)]
        values = (column.item() for column in statistics_of(row[None], known))
        return [*(as_cell(name, value) for name, value in zip(known, values, strict=True)), *custom.values()]


class _EffectValues(NamedTuple):
    """An effect whose numbers may be on a device, or whose factor is NaN: the additional part of a row."""

    factor: Number
    effect: Effect | None = None  # None if all numbers but the factor are in the slab

    @property
    def numbers(self) -> list[Tensor]:
        if self.effect is not None:
            return self.effect.numbers
        return [self.factor] if isinstance(self.factor, Tensor) else []

    def complete(self, row: Matrix, fetched: Iterator[list[float]]) -> dict[str, float]:
        """Write the numbers to the row. Return the factor if it is NaN."""
        if self.effect is not None:
            row[:] = self.effect.row(fetched)
        elif self.factor is not None:
            row[_FACTOR] = next(fetched)[0] if isinstance(self.factor, Tensor) else self.factor
        factor = float(row[_FACTOR])
        return {"factor": factor} if self.factor is not None and math.isnan(factor) else {}


class _Further(NamedTuple):
    """The results of a step besides rows of numbers on the host. Their numbers may still be on a device."""

    measured: Sequence[MeasuredRow]
    batches: Sequence[SampleBatch]
    lines: Sequence[tuple[str, _Values]]
    tensors: Sequence[UndecidedTensor]
    deferred: Sequence[Callable[[], Row]]
    sums: Sequence[tuple[list[Tensor], HostCopy]]
    transfer: Transfer


_NOTHING = _Further((), (), (), (), (), (), Transfer(()))


class _Step(NamedTuple):
    """The results of a step. Its numbers may still be on a device."""

    stats: Taken
    effects: Taken
    merged: MergedRows | None
    metrics: list[MetricsRow]
    relations: Relations
    further: _Further
    is_complete: bool


def _read_sums(step: _Step) -> None:
    """Set the sums of all tensors on a device from the copies of the memory of each device."""
    numbers_of = [(rows, copy.wait().numpy()) for rows, copy in step.further.sums]
    copied = {id(row): numbers for rows, memory in numbers_of for row, numbers in zip(rows, memory, strict=True)}
    values = [*step.stats.others.values(), *(values for _, values in step.further.lines)]
    waiting = [each.measured for each in values if isinstance(each, _Values) and each.measured.on_device is not None]
    if waiting:
        rows = np.stack([copied[id(measured.on_device.row)] for measured in waiting])  # type: ignore[union-attr]
        for measured, row in zip(waiting, on_host(waiting, rows), strict=True):
            measured.row = row


def _complete(taken: Taken, fetched: Iterator[list[float]]) -> Taken:
    """Return rows with all of their numbers, without those whose condition does not hold."""
    if not taken.others:
        return taken
    left_out, others = [], {}
    for at, other in taken.others.items():
        statistics = other.complete(taken.numbers[at], fetched)
        if statistics is None:
            left_out.append(at)
        elif statistics:
            others[at] = statistics
    complete = replace(taken, others=others)
    return complete.without(left_out) if left_out else complete


def count_at_site(counts: Mapping[tuple[str, str, str], int], attached: AttachedHook) -> int:
    """Return the count of a site. A module's site includes all paths, a parameter's site only its own."""
    name, layer, own_name = attached.site.spec.name, attached.site.layer.name, attached.site.own_name
    return sum(
        count for (hook, at, path), count in counts.items() if (hook, at) == (name, layer) and own_name in ("", path)
    )


def _undecided(context: Context) -> Decisions:
    return (context.holds,) if isinstance(context.holds, Tensor) else ()


def _read(values: Values, decisions: Decisions, fetched: Iterator[list[float]]) -> Sequence[float | None] | None:
    """Return the values of a row; None if a device has decided that the condition of its hook does not hold."""
    numbers = next(fetched) if isinstance(values, Tensor) else values
    held = [next(fetched)[0] for _ in decisions]
    return numbers if all(held) else None
