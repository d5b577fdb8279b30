"""The report page of a run in progress: its text, the data of its charts, and what changed since a version."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..analysis.plot_data import UNKNOWN_ORDER
from ..report.charts import about, alerts, merge_ranges
from ..report.make_report import render, render_blocks, with_vocabulary
from ..report.numbers import rounded
from ..report.run_page import PageTables, add_settings, values
from ..spec.tables import TABLES
from .distribution_history import COLUMNS, LocationDistributions
from .live_run import LiveRun
from .step_history import StepHistory

BLOCKS = ("summary", "findings", "lanes", "coverage", "events", "model")
NO_MAPS: dict[str, Any] = {"shown": [], "images": [], "locations": 0, "pictures": 0}


class ChangedBlocks:
    """The parts of a page that changed after a version.

    Args:
        template: The file of the template.
        names: The names of the parts.
    """

    def __init__(self, template: str, names: Sequence[str]) -> None:
        self.template = template
        self.names = names
        self._blocks: dict[str, tuple[str, int]] = {}  # by name: the HTML, and the version of its last change

    def since(self, since: int, version: int, words: Mapping[str, Any]) -> dict[str, str]:
        """Return the HTML of the changed parts by name.

        Args:
            since: The version that the browser has.
            version: The current version.
            words: The current values of the template.
        """
        for name, html in render_blocks(self.template, words, self.names).items():
            if name not in self._blocks or self._blocks[name][0] != html:
                self._blocks[name] = html, version
        return {name: html for name, (html, changed) in self._blocks.items() if changed > since or since > version}


class LivePage:
    """The page of a run in progress. Call its methods from one thread at a time.

    Args:
        live: The run.
        sweep: The address of the page of the sweep to which the run belongs. Default: None.
        takes_changes: Whether the page has a form that changes the run. Default: False.
    """

    def __init__(self, live: LiveRun, *, sweep: str | None = None, takes_changes: bool = False) -> None:
        self.live = live
        self.refresh = live.refresh
        self._sweep = sweep
        self._takes_changes = takes_changes
        self._blocks = ChangedBlocks("run.html", BLOCKS)

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return self.live.folder

    @property
    def is_running(self) -> bool:
        """Whether the run is in progress."""
        return self.live.is_running

    @property
    def version(self) -> int:
        """The version of the run."""
        return self.live.version

    @property
    def is_complete(self) -> bool:
        """Whether all rows have been read."""
        return self.live.is_complete

    def html(self) -> str:
        """Return the complete page."""
        numbers = self.numbers()
        changes = self._takes_changes
        words = self.words(numbers)
        return render("run.html", words, numbers, self.folder, live=True, takes_changes=changes, sweep=self._sweep)

    def words(self, numbers: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of the template of a report."""
        live = self.live
        tables = PageTables(
            path=live.folder,
            info=live.info,
            steps=live.step,
            layers=_frame("layers", live.layers),
            events=_frame("events", live.events),
            event_count=live.event_count,
            coverage=_frame("coverage", live.coverage),
            findings=live.findings(),
            problems=live.problems,
        )
        return values(tables, numbers)

    def numbers(self) -> dict[str, Any]:
        """Return the data of all charts, in the format of `instrument.report.charts`, with the version."""
        live = self.live
        numbers = {
            "version": live.version,
            "series": [
                {**about(series), **self._locations(history), "several": False, **self._matrix(history)}
                for series, history in live.series.items()
            ],
            "effects": [
                {**about(series), **self._locations(history), **_unnested(self._matrix(history))}
                for series, history in live.effects.items()
            ],
            "metrics": metric_curves(live),
            "distributions": [
                {**about(series), "location": location, **_distributions(found)}
                for (series, location), found in live.distributions.locations.items()
            ],
            "maps": NO_MAPS,
            "attention": [],
            **self._lanes(),
        }
        add_settings(numbers, live.info)
        return numbers

    def changes(self, since: int) -> dict[str, Any]:
        """Return what changed after a version.

        Args:
            since: The version that the browser has.

        Returns:
            A dictionary with `version`; `html`, the changed parts of the page by name; and either `whole`, the data of
            all charts, or `series`, `effects`, `metrics` and `distributions`, the changed groups of steps, with `lanes`.
        """
        live = self.live
        histories = [*live.series.values(), *live.effects.values(), *live.metrics.values()]
        rebuilt = max([live.order_version, live.distributions.rebuilt, *(history.rebuilt for history in histories)])
        is_whole = since > live.version or since < rebuilt
        numbers = self.numbers() if is_whole else self._lanes()
        blocks = self._blocks.since(since, live.version, self.words(numbers))
        changes: dict[str, Any] = {"version": live.version, "html": blocks}
        if is_whole:
            return {**changes, "whole": with_vocabulary(numbers)}
        return {
            **changes,
            "series": [self._matrix(history, since) for history in live.series.values()],
            "effects": [_unnested(self._matrix(history, since)) for history in live.effects.values()],
            "metrics": {phase: _curves(history, since) for phase, history in live.metrics.items()},
            "distributions": [_distributions(found, since) for found in live.distributions.locations.values()],
            "bad": {phase: _not_finite(live, phase) for phase in live.metrics},
            "lanes": numbers,
        }

    def _locations(self, history: StepHistory) -> dict[str, Any]:
        """Return the locations in forward order, and the types of their modules."""
        return {
            "locations": [history.locations[row] for row in self._rows(history)],
            "types": {name: self.live.places[name][1] for name in history.locations},
        }

    def _matrix(self, history: StepHistory, since: int = -1) -> dict[str, Any]:
        """Return the values of the groups of steps that changed after a version; rows are locations."""
        return _columns(history, history.groups(since), self._rows(history))

    def _rows(self, history: StepHistory) -> list[int]:
        """Return the rows of the locations in forward order."""
        ranks = {layer: rank for rank, layer in enumerate(self.live.order)}
        layers = [self.live.places[name][0] for name in history.locations]
        return sorted(range(len(layers)), key=lambda row: ranks.get(layers[row], UNKNOWN_ORDER))

    def _lanes(self) -> dict[str, Any]:
        """Return the steps of interventions and alerts."""
        acted: dict[str, list[StepHistory]] = {}
        for series, history in self.live.effects.items():
            acted.setdefault(series.hook, []).append(history)
        events = _frame("events", self.live.events)
        return {
            "acted": [_firings(hook, found) for hook, found in acted.items()],
            "alerts": alerts(events, self.live.info),
        }


def metric_curves(live: LiveRun) -> dict[str, Any]:
    """Return the metrics of each phase over steps, in the format of `instrument.report.charts.curves`."""
    return {phase: {**_curves(history), "bad": _not_finite(live, phase)} for phase, history in live.metrics.items()}


def _not_finite(live: LiveRun, phase: str) -> dict[str, list[int]]:
    return {name: steps for (its_phase, name), steps in live.not_finite.items() if its_phase == phase}


def _firings(hook: str, histories: Iterable[StepHistory]) -> dict[str, Any]:
    ranges, count = [], 0
    for history in histories:
        first, last, steps = history.steps(history.groups())
        ranges += list(zip(first.tolist(), last.tolist(), strict=True))
        count = max(count, int(steps.sum()))
    return {"hook": hook, "steps": merge_ranges(sorted(ranges)), "count": count}


def _columns(history: StepHistory, groups: np.ndarray, rows: Sequence[int]) -> dict[str, Any]:
    """Return the values of some groups of steps; `groups` has their numbers."""
    first, last, _ = history.steps(groups)
    return {
        "groups": (first // history.width).tolist(),
        "first": first.tolist(),
        "last": last.tolist(),
        "statistics": {name: rounded(history.values(name, groups)[rows]) for name in history.statistics},
    }


def _unnested(columns: dict[str, Any]) -> dict[str, Any]:
    """Return columns with the statistics at the top level, as in the chart of effects."""
    statistics = columns.pop("statistics")
    return {**columns, **statistics}


def _curves(history: StepHistory, since: int = -1) -> dict[str, Any]:
    """Return the values of the only location, as in the training curves."""
    columns = _columns(history, history.groups(since), [0])
    statistics = columns.pop("statistics")
    return {**columns, **{name: values for name, (values,) in statistics.items()}}


def _distributions(found: LocationDistributions, since: int = -1) -> dict[str, Any]:
    """Return the distributions of a location that changed after a version."""
    changed = {key: (step, row) for key, (step, version, row) in sorted(found.rows.items()) if version > since}
    steps = [step for step, _ in changed.values()]
    return {
        "groups": list(changed),
        "first": steps,
        "last": steps,
        "of": found.step_count,
        "several": found.has_several,
        "steps": steps,
        **{name: rounded([row[name] for _, row in changed.values()]) for name in COLUMNS},
    }


def _frame(table: str, rows: list[dict[str, Any]]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=list(TABLES[table].schema.names))
