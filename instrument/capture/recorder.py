"""Collects the rows of the current step.

Numbers on a device stay there until the step ends. They are then copied asynchronously, all at once, and read when the
next step ends.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..actions.base import Context, Effect, StepContext
from ..actions.print import line_of
from ..kinds.attached_hook import AttachedHook
from ..kinds.clock import take
from ..nested import shape_of
from ..spec.statistics import ALL
from ..spec.tables import IDENTITY
from ..stats.device_numbers import DeviceNumbers
from ..stats.measure import Values
from ..stats.merge import PartialStatistics
from ..stats.single_pass import record_plain
from ..stats.table_rows import Measure
from .collectives import Ranks
from .device_copy import Transfer
from .flight_recorder import FlightRecorder, RecordedTensor, period_of
from .rank_merging import (
    GlobalRowMerger,
    LocalRowMerger,
    MergedRows,
    effect_piece,
    measured_piece,
    statistics_piece,
)
from .row_cells import changes, effect_cells
from .samples import SampleBatch, SampleRows, Samples
from .sink_interface import Row, Sink
from .step_statistics import ColumnCache, StatisticsRows, StepStatistics

MetricsRow = tuple[int, str, Mapping[str, Any]]
"""Step, phase, and the values of the other columns of a row of metrics."""
Decisions = tuple[Tensor, ...]
"""Whether the condition of a hook holds, if a device decides it. Otherwise empty."""
UndecidedTensor = tuple[Context, Sequence[int], Tensor, Decisions]
"""The call, the shape of the complete tensor, a copy on the device, and the decision."""
NUMBER_BYTES = 4  # approximate size on disk of one number that a `Measure` computes
MeasuredRow = tuple[str, Row, Any, Callable[[Sequence[float | None]], Row], Decisions]
"""Table, identity, the values of a `Measure` or a function that computes them, and what converts the values to cells."""


class Recorder:
    """Collects the results of a step's actions and passes them to the sink at the end of the step. Several threads may add results.

    Args:
        sink: Receives the rows.
        on_rows: Called with the rows of each step, after all of them were passed to the sink.
        ranks: The processes that train together; None for a single one.
        all_samples: Whether the table `samples` has the samples of all batches. Default: those of batches in which a
            tensor is stored.
        print_line: Prints a line of `action: print`, when the values of its step are read.
        keep: The number of steps whose tensors stay in memory, for hooks with `keep`. Default: none.

    Attributes:
        samples: The samples of the batches.
        flight_recorder: The tensors of hooks with `keep`.
    """

    def __init__(
        self,
        sink: Sink,
        on_rows: Callable[[StatisticsRows | None, Sequence[MetricsRow], Sequence[SampleRows]], None] | None = None,
        ranks: Ranks | None = None,
        *,
        all_samples: bool = False,
        print_line: Callable[[str], None] = print,
        keep: Mapping[str, int] | None = None,
    ) -> None:
        self.sink = sink
        self.on_rows = on_rows
        self.print_line = print_line
        self._merger = GlobalRowMerger(ranks) if ranks is not None and ranks.reduces else LocalRowMerger()
        self.rows_written = 0
        self.dropped: Counter[tuple[str, str, str]] = Counter()  # dropped tensors, by hook, layer and path
        self.bytes: Counter[tuple[str, str, str]] = Counter()  # of tensors and measured rows, by the same keys
        self.samples = Samples(of_all_batches=all_samples)
        self.flight_recorder = FlightRecorder(keep or {})
        self._stats = StepStatistics()
        self._columns = ColumnCache()
        self._measured: list[MeasuredRow] = []
        self._effects: list[tuple[Row, Effect | None]] = []  # identity and effect, or the complete row
        self._lines: list[tuple[str, tuple[str, ...], Values, Decisions]] = []
        self._tensors: list[UndecidedTensor] = []
        self._metrics: list[MetricsRow] = []  # of this step
        self._deferred: list[tuple[str, Callable[[], Row]]] = []
        self._copied_from: set[torch.device] = set()  # CUDA devices of the tensors that this step passed to the sink
        self._pending: _Step | None = None

    def merges(self, context: Context) -> bool:
        """Return whether the row is merged from all ranks."""
        return self._merger.merges(context)

    def add_part(self, context: Context, names: tuple[str, ...], part: PartialStatistics, dead: Tensor | None) -> None:
        """Add this process's part of a row of statistics."""
        self._merger.add(statistics_piece(context, names, part, dead))

    def add_stats(self, context: Context, shape: tuple[int, ...], names: tuple[str, ...], values: Values) -> None:
        """Add the statistics of one tensor, in the order of `names`."""
        if not self._merger.is_duplicate(context):
            self._stats.add_values(self._merger.identity(context), shape, names, values, context.holds)

    def record_plain(self, tensor: Tensor, bits: int, moment: StepContext, site: Row) -> bool:
        """Add the statistics of one plain tensor."""
        numbers = record_plain(tensor, bits)
        if numbers is None:
            return False
        self._stats.add(moment, site, tensor.shape, numbers)
        return True

    def add_row(self, table: str, context: Context, measure: Measure, tensor: Tensor) -> None:
        """Measure a tensor for a table other than `stats`, and add a row, or this process's part of it."""
        if self._merger.is_duplicate(context):
            return
        if self._merger.merges(context):
            self._merger.add(measured_piece(table, context, measure, tensor))
        else:
            cells = partial(measure.cells, shape=shape_of(tensor))
            row = self._merger.identity(context)
            self._measured.append((table, row, measure.values(tensor), cells, _undecided(context)))
        self.bytes[context.hook, context.layer, context.path] += NUMBER_BYTES * measure.size

    def add_line(self, context: Context, text: str, names: tuple[str, ...], values: Values) -> None:
        """Add a line to print for one tensor."""
        if not self._merger.is_duplicate(context):
            self._lines.append((text, names, values, _undecided(context)))

    def add_tensor(
        self, context: Context, source_shape: Sequence[int], tensor: Tensor, dtype: torch.dtype | None
    ) -> None:
        """Pass the values of a tensor to the sink, which copies them. A dropped tensor is counted.

        If a device decides whether the tensor is recorded, a copy stays there until the numbers of the step are read.
        """
        if self._merger.is_duplicate(context):
            return
        if context.hook in self.flight_recorder.steps:
            has_pending_step = self._pending is not None
            self.flight_recorder.add(
                context.without_tensors(), source_shape, tensor, dtype, has_pending_step=has_pending_step
            )
            self.samples.note_tensor(context, source_shape, is_kept=True)
        elif decisions := _undecided(context):
            copy = tensor.to(dtype or tensor.dtype, copy=True)
            self._tensors.append((context.without_tensors(), source_shape, copy, decisions))
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
        self.samples.write_kept({period_of(one.context) for one in recorded})
        for one in recorded:
            self._store(one.context, one.source_shape, one.copy.wait(), None)
        return recorded

    def add_effect(self, context: Context, effect: Effect) -> None:
        """Add the effect of one intervention."""
        if self.merges(context):
            self._merger.add(effect_piece(context, effect))
        elif not self._merger.is_duplicate(context):
            self._effects.append((self._merger.identity(context), effect))

    def add_plain_effect(
        self,
        moment: StepContext,
        site: Row,
        numel: int,
        measures: list[float],
        factor: float | None,
        held: bool | None,
    ) -> None:
        """Add the effect of one intervention on a plain tensor."""
        changed, before, after = measures
        self._effects.append(((*moment, *site, *changes(numel, int(changed), before, after, factor, held)), None))

    def bytes_of(self, attached: AttachedHook) -> int:
        """Return the bytes of a site's tensors, and approximately those of its measured rows."""
        return count_at_site(self.bytes, attached)

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, and the hooks whose kept tensors were never written, as numbers and lists."""
        counts = {"dropped": self.dropped, "bytes": self.bytes}
        first = {"rows_written": self.rows_written, "unwritten": self.flight_recorder.unwritten}
        return first | {name: [[*key, count] for key, count in counter.items()] for name, counter in counts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state."""
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

    def end_step(self, *, any_scheduled: bool = True, local_only: bool = False) -> None:
        """Pass the rows of the step to the sink: at the end of the next step, if numbers or tensors are on a GPU.

        Args:
            any_scheduled: Whether any hook was scheduled; equal in all processes.
            local_only: Whether the other processes are gone. Rows are then computed from the parts of this one.
        """
        self.flush()
        if self.flight_recorder.steps:
            self.samples.limit_kept(self.flight_recorder.periods())
        merged = self._merger.merge(any_scheduled=any_scheduled, local_only=local_only)
        stats, effects = self._stats.take(), take(self._effects)
        lines, tensors = take(self._lines), take(self._tensors)
        on_device = [tensor for waiting in stats.on_device for tensor in waiting.values.numbers]
        on_device += [holds for _, holds in stats.conditional]
        measured = [
            (table, row, values() if callable(values) else values, cells, decisions)
            for table, row, values, cells, decisions in take(self._measured)
        ]
        for *_, values, _, decisions in measured:
            on_device += [*(values.numbers if isinstance(values, DeviceNumbers) else ()), *decisions]
        for _, effect in effects:
            if effect is not None:
                on_device += effect.numbers
        on_device += [] if merged is None else merged.numbers
        for *_, values, decisions in lines:
            on_device += [*(values.numbers if isinstance(values, DeviceNumbers) else ()), *decisions]
        batches = self.samples.take()
        for batch in batches:
            on_device += batch.numbers
        for *_, decisions in tensors:
            on_device += decisions
        deferred, metrics = take(self._deferred), take(self._metrics)
        devices, self._copied_from = self._copied_from, set()
        transfer = Transfer(on_device, devices)
        self._pending = _Step(stats, measured, effects, merged, batches, lines, tensors, deferred, metrics, transfer)
        if self._pending.transfer.is_complete and not deferred:
            self.flush()

    @property
    def has_pending_rows(self) -> bool:
        """Whether rows of hooks are still being copied. Writing them will take time in the current step."""
        step = self._pending
        if step is None:
            return False
        rows = step.stats or step.measured or step.effects or step.merged or step.lines or step.tensors
        return bool(rows or step.transfer.devices)

    def write_deferred(self, table: str, row: Callable[[], Row]) -> None:
        """Write a row that is computed when the rows of the step are passed to the sink."""
        self._deferred.append((table, row))

    def note_metrics(self, row: MetricsRow) -> None:
        """Add a row of metrics for `on_rows`. It is passed on when the rows of the step are passed to the sink."""
        self._metrics.append(row)

    def flush(self) -> None:
        """Write the rows of the previous step. Waits for the copy."""
        step, self._pending = self._pending, None
        if step is None:
            return
        fetched = step.transfer.read()
        step.stats.fetch(fetched)
        tables: defaultdict[str, list[Row]] = defaultdict(list)
        for table, row, values, cells, decisions in step.measured:
            if (numbers := _read(values, decisions, fetched)) is not None:
                tables[table].append((*row, *cells(numbers)))
        for row, effect in step.effects:
            tables["effects"].append(row if effect is None else row + effect_cells(effect, fetched))
        if step.merged is not None:
            _add_merged(step.merged.build(*(next(fetched) for _ in step.merged.numbers)), step.stats, tables)
        for text, names, values, decisions in step.lines:
            if (numbers := _read(values, decisions, fetched)) is not None:
                self.print_line(line_of(text, names, numbers))
        stats = step.stats.rows(self._columns) if len(step.stats) else None
        if stats is not None:
            self.write("stats", stats)
        for table, rows in tables.items():
            self.write(table, rows)
        samples = [batch.rows(fetched) for batch in step.batches]
        for batch_rows in samples:
            self.write("samples", batch_rows)
        self._store_decided(step.tensors, fetched)
        for name, deferred in step.deferred:
            self.write(name, [deferred()])
        if self.on_rows is not None:
            in_time = (
                [rows for rows, batch in zip(samples, step.batches, strict=True) if not batch.is_late]
                if samples
                else []
            )
            self.on_rows(stats, step.metrics, in_time)
        self.sink.end_step()

    def _store_decided(self, tensors: Sequence[UndecidedTensor], fetched: Iterator[list[float]]) -> None:
        """Pass those tensors to the sink for which a device has decided that the condition of the hook holds."""
        for context, source_shape, tensor, decisions in tensors:
            if _read((), decisions, fetched) is not None:
                self._store(context, source_shape, tensor, None)


class _Step(NamedTuple):
    """The results of a step. Its numbers may still be on a device."""

    stats: StepStatistics
    measured: list[MeasuredRow]
    effects: list[tuple[Row, Effect | None]]
    merged: MergedRows | None
    batches: list[SampleBatch]
    lines: list[tuple[str, tuple[str, ...], Values, Decisions]]
    tensors: list[UndecidedTensor]
    deferred: list[tuple[str, Callable[[], Row]]]
    metrics: list[MetricsRow]
    transfer: Transfer


def count_at_site(counts: Mapping[tuple[str, str, str], int], attached: AttachedHook) -> int:
    """Return the count of a site. A module's site includes all paths, a parameter's site only its own."""
    name, layer, own_name = attached.site.spec.name, attached.site.layer.name, attached.site.own_name
    return sum(
        count for (hook, at, path), count in counts.items() if (hook, at) == (name, layer) and own_name in ("", path)
    )


def _add_merged(rows: Iterable[tuple[str, Row]], stats: StepStatistics, tables: defaultdict[str, list[Row]]) -> None:
    """Add the merged rows of all processes to those of this one."""
    for table, row in rows:
        if table == "stats":
            stats.add_values(row[: len(IDENTITY)], None, ALL, row[len(IDENTITY) :])
        else:
            tables[table].append(row)


def _undecided(context: Context) -> Decisions:
    return (context.holds,) if isinstance(context.holds, Tensor) else ()


def _read(values: Values, decisions: Decisions, fetched: Iterator[list[float]]) -> Sequence[float | None] | None:
    """Return the values of a row; None if a device has decided that the condition of its hook does not hold."""
    numbers = values.values(fetched) if isinstance(values, DeviceNumbers) else values
    held = [next(fetched)[0] for _ in decisions]
    return numbers if all(held) else None
