"""The pages of a run or a sweep in progress: complete, and what changed since a version."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ..config.spec_file import YAML_ERRORS
from ..training.sweeps.jobs import SweepJob
from .charts import changed_charts, charts, lanes
from .live_run import LiveRun
from .live_sweep import LiveSweep, last_metrics
from .make_report import render, render_blocks, with_vocabulary
from .run_page import values
from .sweep_page import PageRow, page

RUN_BLOCKS = ("summary", "findings", "lanes", "coverage", "events", "model")
SWEEP_BLOCKS = ("summary", "runs")


class _ChangingPage:
    """A page of which the blocks of the template that changed after a version are rendered again."""

    def __init__(self, template: str, names: Sequence[str]) -> None:
        self._template = template
        self._names = names
        self._blocks: dict[str, tuple[str, int]] = {}  # by name: the HTML, and the version of its last change

    def _changed_blocks(self, since: int, version: int, words: Mapping[str, Any]) -> dict[str, str]:
        for name, html in render_blocks(self._template, words, self._names).items():
            if name not in self._blocks or self._blocks[name][0] != html:
                self._blocks[name] = html, version
        return {name: html for name, (html, changed) in self._blocks.items() if changed > since or since > version}


class LivePage(_ChangingPage):
    """The page of a run in progress. Call its methods from one thread at a time.

    Args:
        live: The run.
        sweep: The address of the page of the sweep to which the run belongs. Default: None.
        takes_changes: Whether the page has a form that changes the run. Default: False.
    """

    def __init__(self, live: LiveRun, *, sweep: str | None = None, takes_changes: bool = False) -> None:
        super().__init__("run.html", RUN_BLOCKS)
        self.source = live
        self._options: dict[str, Any] = {"sweep": sweep, "takes_changes": takes_changes}

    def html(self) -> str:
        """Return the complete page."""
        numbers = charts(self.source)
        return render("run.html", self._words(numbers), numbers, self.source.folder, live=True)

    def _words(self, numbers: Mapping[str, Any]) -> dict[str, Any]:
        return values(self.source, numbers, self.source.findings(), self.source.problems) | self._options

    def changes(self, since: int) -> dict[str, Any]:
        """Return what changed after a version.

        Args:
            since: The version that the browser has.

        Returns:
            A dictionary with `version`; `html`, the changed parts of the page by name; and either `whole`, the data of
            all charts, or `parts`, the changed groups of steps, and `lanes`.
        """
        live, shown = self.source, lanes(self.source)
        blocks = self._changed_blocks(since, live.version, self._words(shown))
        changes: dict[str, Any] = {"version": live.version, "html": blocks}
        if since > live.version or since < live.rebuilt:
            return {**changes, "whole": with_vocabulary(charts(live))}
        return {**changes, "parts": changed_charts(live, since), "lanes": shown}


class LiveSweepPage(_ChangingPage):
    """The page of a sweep in progress. Call its methods from one thread at a time.

    Args:
        folder: The folder of the sweep, as a path or an address.
        link: Returns the address of the page of a job, given its name.

    Raises:
        ConfigError: See `instrument.training.sweeps.jobs.jobs_in`.
    """

    def __init__(self, folder: str, link: Callable[[str], str]) -> None:
        super().__init__("sweep.html", SWEEP_BLOCKS)
        self.source = LiveSweep(folder)
        self._link = link
        self._structure: tuple[object, int] = None, 0  # what the charts contain, and the version of its last change

    def folder_of(self, name: str) -> Path | None:
        """Return the folder of a job that has started; None if there is no such job."""
        return {job.name: job.folder for job in self.source.jobs if job.folder in self.source.runs}.get(name)

    def html(self) -> str:
        """Return the complete page."""
        return render("sweep.html", *self._content(), self.source.folder, live=True)

    def changes(self, since: int) -> dict[str, Any]:
        """Return what changed after a version.

        Args:
            since: The version that the browser has.

        Returns:
            A dictionary with `version`; `html`, the changed parts of the page by name; and either `whole`, the data of all
            charts, or `runs` and `curves`, the training curves of the jobs that changed, by index.
        """
        sweep = self.source
        words, numbers = self._content()
        metrics = {name for run in numbers["runs"] for name in run["metrics"]}
        curves = {(phase, *one["statistics"]) for run in numbers["curves"] for phase, one in run.items()}
        structure = [job.name for job in sweep.jobs], numbers["overrides"], metrics, curves
        if structure != self._structure[0]:
            self._structure = structure, sweep.version
        changes = {"version": sweep.version, "html": self._changed_blocks(since, sweep.version, words)}
        if since > sweep.version or since < self._structure[1]:
            return {**changes, "whole": with_vocabulary(numbers)}
        new = {i: numbers["curves"][i] for i, job in enumerate(sweep.jobs) if sweep.changed.get(job.folder, -1) > since}
        return {**changes, "runs": numbers["runs"], "curves": new}

    def _content(self) -> tuple[dict[str, Any], dict[str, Any]]:
        sweep = self.source
        keys = list(dict.fromkeys(key for job in sweep.jobs for key in sweep.source.differing(job)))
        names = [str(live.info.get("name")) for live in sweep.runs.values()]
        words, numbers = page([self._row(job) for job in sweep.jobs], keys, sweep.folder, names)
        return words, {"version": sweep.version, **numbers}

    def _row(self, job: SweepJob) -> PageRow:
        overrides = {key: _value(text) for key, text in self.source.source.differing(job).items()}
        live = self.source.runs.get(job.folder)
        if live is None:
            return PageRow(job.name, job.status, overrides, note=job.error or "")
        return PageRow(
            job.name,
            job.status,
            {"seed": live.info["seed"], **overrides},
            metrics=live.info["metrics"],
            shown=last_metrics(live),
            curves=self.source.curves[job.folder],
            note=job.error or "",
            page=self._link(job.name),
            step=live.progress,
        )


def _value(text: str) -> Any:
    """Return the value of an override; the text itself if it cannot be read."""
    try:
        return yaml.safe_load(text)
    except (*YAML_ERRORS, OverflowError):
        return text
