"""The values of a run that a page shows, in bounded memory. The rows of a run in progress are added over time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..config.schedule import STEP_PHASES
from ..rules.rule_set import RuleEvent
from ..rules.step_rows import location_name
from ..tables.schemas import CUSTOM, TABLES
from ..tables.statistics import STATISTICS
from .findings import RULE_EVENT_COLUMNS
from .finite import FINITE_STATISTICS, not_finite_in
from .frames import custom_metrics_in, custom_statistics_of, floats, with_custom_columns
from .plot_data import RecordedSeries, in_forward_order
from .run_tables import RunTables
from .step_history import DISTRIBUTION_COLUMNS, DistributionHistory, StepHistory

MAX_VALUES, MAX_EFFECT_VALUES = 500_000, 60_000  # maximum number of values of all series, and of all effects
EFFECTS = ("norm_before", "norm_after", "changed_fraction")
METRICS = {
    "loss": "loss",
    "accuracy": "accuracy [fraction]",
    "grad_norm": "grad_norm: L2 norm of all gradients",
    "lr": "learning rate",
    "samples_per_second": "samples per second [1/s]",
    "seconds": "seconds per step [s]",
}
"""The label of each metric on an axis."""
MAX_EVENTS = 1_000  # of each severity, in addition to the first of each rule and layer
MAX_STEPS = 1_000  # steps at which a metric was not finite
WHERE = ("hook", "kind", "role", "phase", "layer", "path")
MIDDLE = 0.5


class RunHistory:
    """The tables of one run: statistics, effects, distributions and metrics over groups of steps, and all other rows.

    `room`: the maximum number of values of all series, and of the metrics of a phase. `version` increases with each change.
    """

    def __init__(self, folder: Path, info: dict[str, Any], room: int = MAX_VALUES, version: int = 0) -> None:
        self.folder = folder
        self.info = info
        self.room = room
        self.version = self.order_version = version  # the current one, and that of the last change of `order`
        self.custom = custom_statistics_of([info])
        self.layers: list[dict[str, Any]] = []  # the rows of this table
        self.coverage: list[dict[str, Any]] = []  # the rows of this table
        self.events: list[dict[str, Any]] = []  # the first ones of each severity, and that of each rule and layer
        self.event_counts: Counter[tuple[str, str, str | None]] = Counter()  # by rule, severity and layer
        self.fired: list[RuleEvent] = []  # with a value, which rules write; each rule writes few
        self.effects: dict[RecordedSeries, StepHistory] = {}  # of interventions
        self.acted: dict[str, StepHistory] = {}  # when each intervention fired and its condition held, without values
        self.acted_steps: dict[str, np.ndarray] = {}  # the same steps, in ascending order
        self.distributions = DistributionHistory()  # the quantiles and histograms
        self.metrics: dict[str, StepHistory] = {}  # by phase; the only location is empty
        self.not_finite: dict[tuple[str, str], list[int]] = {}  # the steps of such values, by phase and metric
        self.last_metrics: dict[str, dict[str, tuple[int, float]]] = {}  # by phase and metric: the last step, the value
        self.places: dict[str, tuple[str, str]] = {}  # the layer and the module type of each location
        self._measured: dict[RecordedSeries, StepHistory] = {}
        self._spread: dict[RecordedSeries, StepHistory] = {}  # minimum, maximum and median of distributions
        # The first process whose statistics, or distributions, of a location were read.
        self._rank_of: dict[tuple[RecordedSeries, str, bool], int] = {}
        self._severities: Counter[str] = Counter()
        self._called: list[str] = []  # layers in the order of the step at which most of them returned an output
        self._most_called = 0
        self._order: list[str] | None = None

    def columns(self, table: str) -> list[str]:
        """Return the columns of a table that `add` requires."""
        identity = ["step", "rank", "recompute", "module_type", *WHERE]
        if TABLES[table].joins_statistics:
            more = ["position", *([CUSTOM.name] if self.custom else [])] if table == "stats" else []
            return [*identity, *TABLES[table].numbers, *more]
        if table in ("effects", "distributions"):
            return [*identity, *((*EFFECTS, "held") if table == "effects" else DISTRIBUTION_COLUMNS)]
        return ["step", "phase", *METRICS, CUSTOM.name] if table == "metrics" else list(TABLES[table].schema.names)

    def add(self, table: str, rows: pa.Table) -> None:
        """Add rows of a table; those of recomputed forward passes are left out."""
        if "recompute" in rows.schema.names:
            rows = rows.filter(pc.invert(rows["recompute"]))
        add = _adder_of(table)
        if add is not None and rows.num_rows:
            add(self, rows.combine_chunks())

    @property
    def series(self) -> dict[RecordedSeries, StepHistory]:
        """The recorded statistics by series. Distributions without statistics have `min`, `max` and `median`."""
        tensors = {(series.kind, series.role, series.phase) for series in self._measured}
        alone = [series for series in self._spread if (series.kind, series.role, series.phase) not in tensors]
        return self._measured | {series: self._spread[series] for series in alone}

    @property
    def rebuilt(self) -> int:
        """The version of the last change that concerns more than some groups of steps."""
        histories = (*self._measured.values(), *self._spread.values(), *self.effects.values(), *self.metrics.values())
        return max([self.order_version, self.distributions.rebuilt, *(history.rebuilt for history in histories)])

    @property
    def order(self) -> list[str]:
        """The names of the modules in the order in which they return their outputs."""
        if self._order is None:
            self._order = in_forward_order(list(dict.fromkeys(row["layer"] for row in self.layers)), self._called)
        return self._order

    @property
    def step(self) -> int:
        """The number of completed steps, as far as the metrics have been read."""
        return 1 + max([-1, *(history.last_step for phase, history in self.metrics.items() if phase in STEP_PHASES)])

    @property
    def steps(self) -> int | None:
        """The number of steps of a training; None if the configuration does not contain it, and for a replay."""
        config = self.info.get("config") or {}
        is_training = config.get("mode") != "forward" and not self.info.get("replay")
        train = config.get("train")
        steps = train.get("steps") if is_training and isinstance(train, Mapping) else None
        return steps if isinstance(steps, int) else None

    def last_metric(self, phase: str, name: str) -> float | None:
        """Return the last value of a metric, which may not be finite; None without a value."""
        _, value = self.last_metrics.get(phase, {}).get(name, (-1, None))
        return value

    def _add_stats(self, rows: pa.Table) -> None:
        rows = with_custom_columns(rows, self.custom)
        names = [*(name for name in STATISTICS if name in TABLES["stats"].numbers), *self.custom]
        values = {name: floats(rows[name]) for name in names if rows[name].null_count < rows.num_rows}
        lost = not_finite_in(rows.to_batches()[0])
        if lost.any():
            finite = values.keys() & {*FINITE_STATISTICS, *self.custom}
            values |= {name: np.where(lost, np.nan, values[name]) for name in finite}
        self._add_to(self._measured, rows, values, self.room)
        self._add_calls(rows.filter(pc.and_(pc.equal(rows["kind"], "forward"), pc.equal(rows["role"], "output"))))

    def _add_calls(self, outputs: pa.Table) -> None:
        """Find the step at which outputs of the most layers were recorded; its order is that of the layers."""
        if not outputs.num_rows:
            return
        (layers,), (phases,) = (outputs[name].chunks for name in ("layer", "phase"))
        count = len(layers.dictionary)
        moments = outputs["step"].to_numpy() * len(phases.dictionary) + phases.indices.to_numpy()
        called, sizes = np.unique(np.unique(moments * count + layers.indices.to_numpy()) // count, return_counts=True)
        fullest = np.flatnonzero(moments == called[sizes.argmax()])
        fullest = fullest[np.argsort(outputs["position"].to_numpy()[fullest], kind="stable")]
        names = dict.fromkeys(layers.take(pa.array(fullest)).to_pylist())
        more = dict.fromkeys(layers.dictionary.take(pc.unique(layers.indices)).to_pylist())
        is_fuller = len(names) > self._most_called
        known = dict.fromkeys(self._called) | more
        ordered = list(names | known if is_fuller else known)
        self._most_called = max(self._most_called, len(names))
        if ordered != self._called:
            self._called, self._order, self.order_version = ordered, None, self.version

    def _add_numbers(self, rows: pa.Table) -> None:
        names = [name for name in rows.schema.names if name not in ("step", "rank", "recompute", "module_type", *WHERE)]
        self._add_to(self._measured, rows, {name: floats(rows[name]) for name in names}, self.room)

    def _add_effects(self, rows: pa.Table) -> None:
        self._add_to(self.effects, rows, {name: floats(rows[name]) for name in EFFECTS}, MAX_EFFECT_VALUES)
        held = rows.filter(pc.fill_null(rows["held"], True))
        hooks, steps = held["hook"].to_numpy(zero_copy_only=False), held["step"].to_numpy()
        for hook in dict.fromkeys(hooks.tolist()):
            fired = steps[hooks == hook]
            self.acted_steps[hook] = np.union1d(self.acted_steps.get(hook, fired), fired)
            history = self.acted.setdefault(hook, StepHistory())
            history.add([""], np.zeros(len(fired), np.int64), fired, {}, self.version)

    def _add_distributions(self, rows: pa.Table) -> None:
        for series, location, index, is_first in self._locations(rows):
            if is_first.any():
                self.distributions.add((series, location), rows.take(index[is_first]), self.version)
            self.distributions.locations[series, location].has_several |= not is_first.all()
        pairs = zip(rows["levels"].to_pylist(), rows["quantiles"].to_pylist(), strict=True)
        medians = (of[at.index(MIDDLE)] if at and of and MIDDLE in at else np.nan for at, of in pairs)
        values = {"min": floats(rows["low"]), "max": floats(rows["high"]), "median": np.array([*medians], np.float64)}
        self._add_to(self._spread, rows, values, self.room)

    def _add_metrics(self, rows: pa.Table) -> None:
        rows = with_custom_columns(rows, custom_metrics_in(rows[CUSTOM.name].chunks))
        names = [name for name in rows.schema.names if name not in ("step", "phase")]
        phases = rows["phase"].to_numpy(zero_copy_only=False)
        steps = rows["step"].to_numpy()
        for phase in dict.fromkeys(phases.tolist()):
            here = phases == phase
            values = {}
            for name in names:
                column, there = floats(rows[name])[here], rows[name].is_valid().to_numpy(zero_copy_only=False)[here]
                bad = there & ~np.isfinite(column)
                if bad.any():
                    bad_steps = self.not_finite.setdefault((phase, name), [])
                    bad_steps += steps[here][bad][: max(0, MAX_STEPS - len(bad_steps))].tolist()
                values[name] = np.where(bad, np.nan, column)
                if there.any():
                    at = int(np.where(there, steps[here], -1).argmax())
                    last = self.last_metrics.setdefault(phase, {})
                    if name not in last or last[name][0] <= steps[here][at]:
                        last[name] = int(steps[here][at]), float(column[at])
            history = self.metrics.setdefault(phase, StepHistory(self.room))
            history.add([""], np.zeros(here.sum(), np.int64), steps[here], values, self.version)

    def _add_events(self, rows: pa.Table) -> None:
        for event in rows.to_pylist():
            key = (event["rule"], event["severity"], event["layer"])
            if key not in self.event_counts or self._severities[event["severity"]] < MAX_EVENTS:
                self.events.append(event)
            if event["value"] is not None:
                self.fired.append(RuleEvent(**{name: event[name] for name in RULE_EVENT_COLUMNS}))
            self._severities[event["severity"]] += 1
            self.event_counts[key] += 1

    def _add_layers(self, rows: pa.Table) -> None:
        self.layers += rows.to_pylist()
        self._order, self.order_version = None, self.version

    def _add_coverage(self, rows: pa.Table) -> None:
        self.coverage += rows.to_pylist()

    def _locations(self, rows: pa.Table) -> Iterator[tuple[RecordedSeries, str, np.ndarray, np.ndarray]]:
        """Yield each location with the indices of its rows, and whether they are of the first process that recorded it."""
        ranks = rows["rank"].to_numpy()
        numbered = rows.select(WHERE).append_column("index", pa.array(np.arange(rows.num_rows)))
        groups = numbered.group_by(list(WHERE), use_threads=False).aggregate([("index", "list")])
        indices = (cells.values.to_numpy() for cells in groups["index_list"])
        combinations = zip(groups.select(WHERE).to_pylist(), indices, strict=True)
        for combination, index in sorted(combinations, key=lambda group: int(group[1][0])):
            series = RecordedSeries(*(combination[name] for name in WHERE[:4]))
            location = location_name(combination["layer"], combination["path"], series.kind)
            if location not in self.places:
                self.places[location] = combination["layer"], str(rows["module_type"][int(index[0])])
            at = series, location, "quantiles" in rows.schema.names
            yield series, location, index, ranks[index] == self._rank_of.setdefault(at, ranks[index[0]])

    def _add_to(
        self, target: dict[RecordedSeries, StepHistory], rows: pa.Table, values: Mapping[str, np.ndarray], room: int
    ) -> None:
        steps = rows["step"].to_numpy()
        by_series: dict[RecordedSeries, list[tuple[str, np.ndarray]]] = {}
        for series, location, index, is_first in self._locations(rows):
            by_series.setdefault(series, []).append((location, index))
            history = target.setdefault(series, StepHistory())
            history.has_several |= not is_first.all()
        for history in target.values():
            history.room = room // len(target)
        for series, parts in by_series.items():
            index = np.concatenate([part for _, part in parts])
            numbers = np.repeat(np.arange(len(parts)), [len(part) for _, part in parts])
            own = {name: column[index] for name, column in values.items()}
            target[series].add([location for location, _ in parts], numbers, steps[index], own, self.version)


def history_of(run: RunTables, tables: tuple[str, ...] = (), room: int = MAX_VALUES) -> RunHistory:
    """Read some tables of one run, by default all with something that is shown. `room`: see `RunHistory`."""
    history = RunHistory(run.path, run.info, room)
    for name in tables or shown_tables():
        for batch in run.scan(name, history.columns(name)):
            history.add(name, pa.Table.from_batches([batch]))
    return history


def _adder_of(table: str) -> Callable[[RunHistory, pa.Table], None] | None:
    """Return the function that adds rows of a table; None if no page shows them."""
    return getattr(RunHistory, f"_add_{table}", RunHistory._add_numbers if TABLES[table].joins_statistics else None)


def shown_tables() -> tuple[str, ...]:
    """Return the tables of which something is shown, those with one row per tensor last: they are the largest."""
    return tuple(sorted(filter(_adder_of, TABLES), key=lambda name: TABLES[name].has_identity))
