"""The report page of a run in progress: its text, the data of its charts, and what changed since a version."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from ..analysis.plot_data import UNKNOWN_ORDER
from ..capture.tables import TABLES
from ..report.charts import about, alerts, merge_ranges
from ..report.make_report import render_blocks, with_vocabulary
from ..report.numbers import rounded
from ..report.run_page import PageTables, add_settings, values
from .distribution_history import COLUMNS, LocationDistributions
from .live_run import LiveRun
from .step_history import StepHistory

BLOCKS = ("summary", "findings", "lanes", "coverage", "events", "model")
NO_MAPS: dict[str, Any] = {"shown": [], "images": [], "locations": 0, "pictures": 0}


class LivePage:
    """The page of a run in progress.

    Args:
        live: The run. Call the methods and its method `refresh` from one thread at a time.
    """

    def __init__(self, live: LiveRun) -> None:
        self.live = live
        self._blocks: dict[str, tuple[str, int]] = {}  # by name: the HTML, and the version of its last change

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
            "metrics": {
                phase: {**_curves(history), "bad": self._not_finite(phase)} for phase, history in live.metrics.items()
            },
            "distributions": [
                {**about(series), "location": location, **_distributions(found)}
                for (series, location), found in live.distributions.locations.items()
            ],
            "maps": NO_MAPS,
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
        changes: dict[str, Any] = {"version": live.version, "html": self._changed_blocks(since, numbers)}
        if is_whole:
            return {**changes, "whole": with_vocabulary(numbers)}
        return {
            **changes,
            "series": [self._matrix(history, since) for history in live.series.values()],
            "effects": [_unnested(self._matrix(history, since)) for history in live.effects.values()],
            "metrics": {phase: _curves(history, since) for phase, history in live.metrics.items()},
            "distributions": [_distributions(found, since) for found in live.distributions.locations.values()],
            "bad": {phase: self._not_finite(phase) for phase in live.metrics},
            "lanes": numbers,
        }

    def _changed_blocks(self, since: int, numbers: Mapping[str, Any]) -> dict[str, str]:
        for name, html in render_blocks(self.words(numbers), BLOCKS).items():
            if name not in self._blocks or self._blocks[name][0] != html:
                self._blocks[name] = html, self.live.version
        return {name: html for name, (html, version) in self._blocks.items() if version > since}

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

    def _not_finite(self, phase: str) -> dict[str, list[int]]:
        return {name: steps for (its_phase, name), steps in self.live.not_finite.items() if its_phase == phase}

    def _lanes(self) -> dict[str, Any]:
        """Return the steps of interventions and alerts."""
        acted: dict[str, list[StepHistory]] = {}
        for series, history in self.live.effects.items():
            acted.setdefault(series.hook, []).append(history)
        events = _frame("events", self.live.events)
        return {"acted": [_firings(hook, found) for hook, found in acted.items()], "alerts": alerts(events)}


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
