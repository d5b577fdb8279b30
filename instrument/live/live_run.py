"""A run in progress in bounded memory. Each refresh reads only the rows that were added since the previous one."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..analysis.custom_columns import custom_metrics_in, custom_statistics_of, with_custom_columns
from ..analysis.findings import Finding, Severity, advice_by_rule
from ..analysis.finite import FINITE_STATISTICS, not_finite_in
from ..analysis.new_rows import NewRows, RowsRemovedError
from ..analysis.plot_data import RecordedSeries, in_forward_order
from ..analysis.run_files import RunFiles
from ..errors import InstrumentError, InstrumentWarning
from ..report.charts import CURVE_KEYS
from ..rules.step_rows import location_name
from ..sinks.remote_folder import is_address, moved_to
from ..spec.schedule import STEP_PHASES
from ..spec.statistics import STATISTICS
from ..spec.tables import CUSTOM, TABLES
from .distribution_history import COLUMNS, DistributionHistory
from .step_history import StepHistory

EFFECTS = ("norm_before", "norm_after", "changed_fraction")
METRICS = ("loss", "accuracy", "grad_norm", "lr", "samples_per_second", "seconds")
MOST_EVENTS = 200  # of each severity
MOST_STEPS = 1_000  # steps at which a metric was not finite
WHERE = ("hook", "kind", "role", "phase", "layer", "path")
RUNNING = "running"
DELETED = "deleted"  # run.json does not exist any more; the rows that were read are kept
SEVERITIES = ("error", "warning", "info")


@dataclass(frozen=True)
class EventGroup:
    """Events with the same rule, severity and layer.

    Attributes:
        rule: The rule that wrote them.
        severity: `info`, `warning` or `error`.
        layer: The layer; None if they concern no layer.
        count: The number of events.
        first: The step of the first event; None before the first step.
        message: The message of the first event.
    """

    rule: str
    severity: str
    layer: str | None
    count: int
    first: int | None
    message: str


class LiveRun:
    """The state of a run, updated by `refresh`.

    Args:
        folder: The folder of the run, local or remote.
        tables: The tables to read. Default: all with something that is shown.
        version: The first version. Default: 0.

    Attributes:
        folder: The folder.
        info: The content of run.json.
        version: A number that increases with each refresh that finds changes.
        order_version: The version of the last change of `order`.
        unreachable: The error of the last refresh, if the folder could not be read; otherwise None.
        layers: The rows of the table `layers`, as dictionaries.
        coverage: The rows of the table `coverage`, as dictionaries.
        events: The first events of each severity, as dictionaries.
        event_count: The number of events.
        series: The recorded statistics by series.
        effects: The effects of interventions by series.
        distributions: The quantiles and histograms.
        metrics: The metrics by phase. The only location is empty.
        places: The layer and the module type of each location.
        not_finite: By phase and metric, steps at which the metric was recorded but is not finite.
    """

    def __init__(
        self,
        folder: Path,
        tables: Sequence[str] = (),
        version: int = 0,
    ) -> None:
        self.folder = folder
        self.tables = tuple(tables) or _shown_tables()
        self.version = version
        self.unreachable: str | None = None
        self._reset()

    def _reset(self) -> None:
        with _without_warnings():
            self._files = RunFiles(self.folder)
            self.info = self._files.info()
        moved = moved_to(self.info) is not None and not is_address(self.folder)
        self.custom = custom_statistics_of([self.info])
        self._readers = {name: NewRows(self.folder, name, self._columns(name), moved=moved) for name in self.tables}
        self.layers: list[dict[str, Any]] = []
        self.coverage: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.event_count = 0
        self.series: dict[RecordedSeries, StepHistory] = {}
        self.effects: dict[RecordedSeries, StepHistory] = {}
        self.distributions = DistributionHistory()
        self.metrics: dict[str, StepHistory] = {}
        self.not_finite: dict[tuple[str, str], list[int]] = {}
        self.places: dict[str, tuple[str, str]] = {}  # layer and module type of each location
        self._shown: Counter[str] = Counter()  # events by severity
        self._groups: dict[tuple[str, str, str | None], EventGroup] = {}
        self._called: dict[str, int] = {}  # position of the first output of each layer in its step
        self._order: list[str] | None = None
        self.order_version = self.version

    def _columns(self, table: str) -> list[str]:
        identity = ["step", "recompute", "module_type", *WHERE]
        if TABLES[table].joins_statistics:
            more = ["position", *([CUSTOM.name] if self.custom else [])] if table == "stats" else []
            return [*identity, *TABLES[table].numbers, *more]
        if table in ("effects", "distributions"):
            return [*identity, *(EFFECTS if table == "effects" else COLUMNS)]
        return ["step", "phase", *METRICS, CUSTOM.name] if table == "metrics" else list(TABLES[table].schema.names)

    @property
    def is_running(self) -> bool:
        """Whether the run is in progress."""
        return bool(self.info["status"] == RUNNING)

    @property
    def fraction_read(self) -> float:
        """The fraction of the files that has been read. Less than 1 only for a while after a long run was opened."""
        return min(reader.fraction_read for reader in self._readers.values())

    @property
    def is_complete(self) -> bool:
        """Whether all rows have been read."""
        return self.fraction_read == 1

    @property
    def is_successful(self) -> bool:
        """Whether the run is done or in progress."""
        return self.info["status"] in ("done", RUNNING)

    @property
    def problems(self) -> list[str]:
        """The files that cannot be read, each with the reason, and the error of an unreachable remote folder."""
        unreachable = [] if self.unreachable is None else [self.unreachable]
        return [
            *unreachable,
            *self._files.problems,
            *(problem for reader in self._readers.values() for problem in reader.problems),
        ]

    def refresh(self, seconds: float = float("inf")) -> bool:
        """Read new rows.

        Args:
            seconds: The time for reading older rows, in seconds. The rest follows in later calls. Default: no limit.

        Returns:
            Whether anything changed.
        """
        if self._is_deleted():
            changed = bool(self.info["status"] != DELETED)
            self.info = {**self.info, "status": DELETED}
            self.version += changed
            return changed
        until = time.monotonic() + seconds
        before, unreachable = self.version, self.unreachable
        self.version += 1
        if is_address(self.folder):
            cast(Any, self.folder).fs.invalidate_cache()
        self.unreachable = None
        try:
            changed = self._read(until)
        except (InstrumentError, OSError) as error:
            self.unreachable = str(error)
            changed = False
        changed |= self.unreachable != unreachable
        if not changed:
            self.version = before
        return changed

    def _read(self, until: float) -> bool:
        """Read new rows, and all rows again if rows were removed. Return whether anything changed."""
        try:
            return self._read_new(until)
        except RowsRemovedError:
            self._reset()
        with suppress(RowsRemovedError):  # removed at the same time: the next call starts again
            self._read_new(until)
        return True

    def _read_new(self, until: float) -> bool:
        changed = self._refresh_info()
        for name, reader in self._readers.items():
            for rows in reader.read(until):
                if rows.num_rows:
                    self._add(name, rows)
                    changed = True
        return changed

    def _is_deleted(self) -> bool:
        return not is_address(self.folder) and not (self.folder / "run.json").exists()

    def _refresh_info(self) -> bool:
        """Read run.json.

        Returns:
            Whether it has changed.

        Raises:
            RowsRemovedError: The run was resumed, or another run was started in the folder.
        """
        with _without_warnings():
            info = self._files.info()
        changed = bool(info != self.info)
        if any(info.get(key) != self.info.get(key) for key in ("started", "resumed")):
            raise RowsRemovedError(self.folder)
        self.info = info
        return changed

    def _add(self, table: str, rows: pa.Table) -> None:
        if "recompute" in rows.schema.names:
            rows = rows.filter(pc.invert(rows["recompute"]))
        add = _adder_of(table)
        if add is not None and rows.num_rows:
            add(self, rows.combine_chunks())

    def _add_stats(self, rows: pa.Table) -> None:
        rows = with_custom_columns(rows, self.custom)
        names = [*STATISTICS, *self.custom]
        values = {name: _floats(rows[name]) for name in names if rows[name].null_count < rows.num_rows}
        lost = not_finite_in(rows.to_batches()[0])
        if lost.any():
            values |= {
                name: np.where(lost, np.nan, values[name])
                for name in (*FINITE_STATISTICS, *self.custom)
                if name in values
            }
        self._add_to(self.series, rows, values)
        positions = rows["position"].to_numpy()
        for combination, index in _combinations(rows):
            of_output = combination["kind"] == "forward" and combination["role"] == "output"
            if of_output and combination["layer"] not in self._called:
                self._called[combination["layer"]] = int(positions[index].min())
                self._order, self.order_version = None, self.version

    def _add_numbers(self, rows: pa.Table) -> None:
        """Add the numbers of a table to the statistics of the same tensors."""
        names = [name for name in rows.schema.names if name not in ("step", "recompute", "module_type", *WHERE)]
        self._add_to(self.series, rows, {name: _floats(rows[name]) for name in names})

    def _add_effects(self, rows: pa.Table) -> None:
        self._add_to(self.effects, rows, {name: _floats(rows[name]) for name in EFFECTS})

    def _add_distributions(self, rows: pa.Table) -> None:
        for series, location, index in self._locations(rows):
            self.distributions.add((series, location), rows.take(index), self.version)

    def _locations(self, rows: pa.Table) -> Iterator[tuple[RecordedSeries, str, np.ndarray]]:
        """Yield each series and location with the indices of its rows."""
        for combination, index in _combinations(rows):
            series = RecordedSeries(*(combination[name] for name in WHERE[:4]))
            location = location_name(combination["layer"], combination["path"], series.kind)
            if location not in self.places:
                self.places[location] = combination["layer"], str(rows["module_type"][int(index[0])])
            yield series, location, index

    def _add_to(
        self, target: dict[RecordedSeries, StepHistory], rows: pa.Table, values: Mapping[str, np.ndarray]
    ) -> None:
        steps = rows["step"].to_numpy()
        by_series: dict[RecordedSeries, list[tuple[str, np.ndarray]]] = {}
        for series, location, index in self._locations(rows):
            by_series.setdefault(series, []).append((location, index))
        for series, parts in by_series.items():
            index = np.concatenate([part for _, part in parts])
            numbers = np.repeat(np.arange(len(parts)), [len(part) for _, part in parts])
            history = target.setdefault(series, StepHistory())
            own = {name: column[index] for name, column in values.items()}
            history.add([location for location, _ in parts], numbers, steps[index], own, self.version)

    def _add_metrics(self, rows: pa.Table) -> None:
        rows = with_custom_columns(
            rows, [name for name in custom_metrics_in(rows[CUSTOM.name].chunks) if name not in CURVE_KEYS]
        )
        names = [name for name in rows.schema.names if name not in ("step", "phase")]
        phases = rows["phase"].to_numpy(zero_copy_only=False)
        steps = rows["step"].to_numpy()
        for phase in dict.fromkeys(phases.tolist()):
            here = phases == phase
            values = {}
            for name in names:
                column, there = _floats(rows[name])[here], rows[name].is_valid().to_numpy(zero_copy_only=False)[here]
                bad = there & ~np.isfinite(column)
                if bad.any():
                    found = self.not_finite.setdefault((phase, name), [])
                    found += steps[here][bad][: max(0, MOST_STEPS - len(found))].tolist()
                values[name] = np.where(bad, np.nan, column)
            history = self.metrics.setdefault(phase, StepHistory())
            history.add([""], np.zeros(here.sum(), np.int64), steps[here], values, self.version)

    def _add_events(self, rows: pa.Table) -> None:
        for event in rows.to_pylist():
            self.event_count += 1
            self._shown[event["severity"]] += 1
            if self._shown[event["severity"]] <= MOST_EVENTS:
                self.events.append(event)
            key = (event["rule"], event["severity"], event["layer"])
            group = self._groups.get(key)
            if group is None:
                group = EventGroup(*key, count=0, first=event["step"], message=event["message"])
            self._groups[key] = replace(group, count=group.count + 1)

    def _add_layers(self, rows: pa.Table) -> None:
        self.layers += rows.to_pylist()
        self._order, self.order_version = None, self.version

    def _add_coverage(self, rows: pa.Table) -> None:
        self.coverage += rows.to_pylist()

    @property
    def order(self) -> list[str]:
        """The names of the modules in the order in which they return their outputs."""
        if self._order is None:
            recorded = sorted(self._called, key=lambda layer: self._called[layer])
            self._order = in_forward_order(list(dict.fromkeys(row["layer"] for row in self.layers)), recorded)
        return self._order

    def findings(self) -> list[Finding]:
        """Return warnings and errors, the most severe ones first; events of the same rule and layer are one finding."""
        groups = [group for group in self._groups.values() if group.severity != "info"]
        advice = advice_by_rule((self.info.get("config") or {}).get("rules") or {}, self.info)
        return [
            Finding(
                group.rule,
                group.layer or "",
                group.first,
                group.message + (f" ({group.count:,} events)" if group.count > 1 else ""),
                _severity(group.severity),
                float(group.count),
                advice.get(group.rule, ""),
            )
            for group in sorted(groups, key=lambda group: SEVERITIES.index(group.severity))
        ]

    @property
    def step(self) -> int:
        """The number of completed steps, as far as the metrics have been read."""
        return 1 + max(
            (history.last_step for phase, history in self.metrics.items() if phase in STEP_PHASES), default=-1
        )

    @property
    def steps(self) -> int | None:
        """The number of steps of the run; None if the configuration does not contain it."""
        train = (self.info.get("config") or {}).get("train")
        steps = train.get("steps") if isinstance(train, Mapping) else None
        return steps if isinstance(steps, int) else None

    def last_metric(self, phase: str, name: str) -> float | None:
        """Return the last finite value of a metric; None without a value."""
        history = self.metrics.get(phase)
        if history is None or name not in history.statistics:
            return None
        return float(history.last(name)[0])


def _adder_of(table: str) -> Callable[[LiveRun, pa.Table], None] | None:
    """Return what adds rows of a table; None if the live view shows nothing of it."""
    return getattr(LiveRun, f"_add_{table}", LiveRun._add_numbers if TABLES[table].joins_statistics else None)


def _shown_tables() -> tuple[str, ...]:
    """Return the tables of which something is shown, those with one row per tensor last: they are the largest."""
    return tuple(sorted(filter(_adder_of, TABLES), key=lambda name: TABLES[name].has_identity))


def _severity(name: str) -> Severity:
    return "error" if name == "error" else "warning"


def _floats(column: pa.ChunkedArray) -> np.ndarray:
    """Return a column as float64; missing values are NaN."""
    numbers: np.ndarray = column.cast(pa.float64()).to_numpy(zero_copy_only=False)
    return numbers


def _combinations(rows: pa.Table) -> Iterator[tuple[dict[str, str], np.ndarray]]:
    """Yield each combination of hook, kind, role, phase, layer and path with the indices of its rows, in order."""
    codes = np.zeros(rows.num_rows, np.int64)
    labels = []
    for name in WHERE:
        (cells,) = rows[name].chunks
        codes = codes * max(1, len(cells.dictionary)) + cells.indices.to_numpy()
        labels.append(cells.dictionary.to_pylist())
    order = np.argsort(codes, kind="stable")
    found, starts = np.unique(codes[order], return_index=True)
    for code, index in zip(found.tolist(), np.split(order, starts[1:]), strict=True):
        names = []
        for values in reversed(labels):
            code, at = divmod(code, max(1, len(values)))  # noqa: PLW2901
            names.append(values[at])
        yield dict(zip(WHERE, reversed(names), strict=True)), index


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Suppress warnings about damaged files, which `LiveRun.problems` lists."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InstrumentWarning)
        yield
