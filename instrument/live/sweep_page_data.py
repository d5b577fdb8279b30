"""The page of a sweep in progress: its table of jobs, the data of its charts, and what changed since a version."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from ..report.make_report import render, with_vocabulary
from ..report.numbers import rounded
from ..report.sweep_page import METRICS, PARTS
from ..spec.spec_file import YAML_ERRORS
from ..sweeps.jobs import SweepJob, count_by_status
from .page_data import ChangedBlocks, metric_curves
from .sweep import JobView, LiveSweep
from .terminal import format_value

BLOCKS = ("summary", "runs")
SHOWN_PARTS = ("runs", "against", "training")


class LiveSweepPage:
    """The page of a sweep in progress. Call its methods from one thread at a time.

    Args:
        folder: The folder of the sweep, as a path or an address.
        link: Returns the address of the page of a job, given its name.

    Raises:
        ConfigError: See `instrument.sweeps.lookup.jobs_in`.
    """

    def __init__(self, folder: str, link: Callable[[str], str]) -> None:
        self.sweep = LiveSweep(folder, metric_curves)
        self.refresh = self.sweep.refresh
        self._link = link
        self._blocks = ChangedBlocks("sweep.html", BLOCKS)
        self._structure: tuple[object, int] = (
            None,
            0,
        )  # what the charts consist of, and the version of its last change

    @property
    def is_running(self) -> bool:
        """Whether a job is running or was not started yet."""
        return self.sweep.is_running

    @property
    def version(self) -> int:
        """The version of the sweep."""
        return self.sweep.version

    @property
    def is_complete(self) -> bool:
        """Whether all rows have been read."""
        return self.sweep.is_complete

    def folder_of(self, name: str) -> Path | None:
        """Return the folder of a job that has started; None if there is no such job."""
        return next(
            (job.folder for job in self.sweep.jobs if job.name == name and job.folder in self.sweep.views), None
        )

    def html(self) -> str:
        """Return the complete page."""
        return render("sweep.html", self._words(), self._numbers(), self.sweep.folder, live=True)

    def changes(self, since: int) -> dict[str, Any]:
        """Return what changed after a version.

        Args:
            since: The version that the browser has.

        Returns:
            A dictionary with `version`; `html`, the changed parts of the page by name; and either `whole`, the data of all
            charts, or `runs` and `curves`, the training curves of the jobs that changed, by index.
        """
        sweep = self.sweep
        numbers = self._numbers()
        metrics = {name for run in numbers["runs"] for name in run["metrics"]}
        curves = {(phase, name) for one in numbers["curves"] for phase, names in one.items() for name in names}
        structure = [job.name for job in sweep.jobs], numbers["overrides"], metrics, curves
        if structure != self._structure[0]:
            self._structure = structure, sweep.version
        changes = {"version": sweep.version, "html": self._blocks.since(since, sweep.version, self._words())}
        if since > sweep.version or since < self._structure[1]:
            return {**changes, "whole": with_vocabulary(numbers)}
        views = [sweep.views.get(job.folder) for job in sweep.jobs]
        new = {index: view.curves for index, view in enumerate(views) if view is not None and view.version > since}
        return {**changes, "runs": numbers["runs"], "curves": new}

    def _numbers(self) -> dict[str, Any]:
        """Return the data of the charts, in the format of `instrument.report.sweep_charts`, with the version."""
        sweep = self.sweep
        keys = self._keys()
        views = [sweep.views.get(job.folder) for job in sweep.jobs]
        return {
            "version": sweep.version,
            "runs": [self._run(job, view, keys) for job, view in zip(sweep.jobs, views, strict=True)],
            "overrides": keys,
            "curves": [{} if view is None else view.curves for view in views],
            "series": [],
            "pairs": [],
            "patching": None,
            "ends": {},
        }

    def _keys(self) -> list[str]:
        """Return the keys in which the jobs differ, in the order of the command line."""
        return list(dict.fromkeys(key for job in self.sweep.jobs for key in self.sweep.source.differing(job)))

    def _run(self, job: SweepJob, view: JobView | None, keys: list[str]) -> dict[str, Any]:
        overrides = self.sweep.source.differing(job)
        metrics = {} if view is None else view.info["metrics"]
        return {
            "name": job.name,
            "status": job.status,
            "seed": None if view is None else view.info["seed"],
            "overrides": {key: _cell(overrides[key]) for key in keys if key in overrides},
            "metrics": {
                name: rounded(value) if math.isfinite(value) else str(value)
                for name, value in metrics.items()
                if isinstance(value, int | float)
            },
        }

    def _words(self) -> dict[str, Any]:
        """Return the values of the template."""
        sweep = self.sweep
        keys = [key for key in self._keys() if key != "seed"]  # the table has a separate column for the seed
        names = dict.fromkeys(str(view.info.get("name")) for view in sweep.views.values())
        return {
            "title": f"{', '.join(names) or 'sweep'}: {len(sweep.jobs)} runs",
            "facts": [
                ("runs", count_by_status(sweep.jobs)),
                ("overrides that differ", ", ".join(self._keys()) or "none"),
                ("folder", sweep.folder),
            ],
            "alerts": [],
            "overrides": keys,
            "metrics": list(METRICS),
            "rows": [self._row(job, keys) for job in sweep.jobs],
            "pairs": [],
            "parts": [(part, PARTS[part]) for part in SHOWN_PARTS],
        }

    def _row(self, job: SweepJob, keys: list[str]) -> dict[str, Any]:
        view = self.sweep.views.get(job.folder)
        overrides = self.sweep.source.differing(job)
        return {
            "name": job.name,
            "page": None if view is None else self._link(job.name),
            "status": job.status,
            "step": "" if view is None else view.progress,
            "seed": "" if view is None else view.info["seed"],
            "overrides": [overrides.get(key, "") for key in keys],
            "metrics": ["" if view is None else format_value(view.last[name]) for name in METRICS],
            "note": job.error or "",
        }


def _cell(value: str) -> float | str:
    """Return a finite number as a number, and other values as text."""
    try:
        number = yaml.safe_load(value)
        is_number = isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number)
    except (*YAML_ERRORS, OverflowError):
        return value
    return number if is_number else value
