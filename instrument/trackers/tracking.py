"""Trackers, and the sink that passes the rows of a run to them.

A tracker receives one summary per step. It never affects the random numbers of the training; MLflow draws some.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol

from ..config.experiment import TRACKERS
from ..errors import ConfigError, Problem, SinkError, first_line, raise_problems
from ..fields.pip_extras import pip_command
from ..runtime.random_states import preserve_python_and_numpy
from ..tables.sink_interface import Row
from .step_summary import StepSummary, SummaryCollector
from .tags import SCALAR_TABLES

Outcome = Literal["done", "failed", "killed"]
OUTCOMES: Mapping[str, Outcome] = {"error": "failed", "interrupted": "killed"}  # by the rule of the run's final event
MAX_LETTERS = 300  # of the message of an error
TRACKER_FOLDERS = {"tensorboard": "tensorboard"}  # subfolders of the run's folder for files of trackers


@dataclass(frozen=True)
class TrackedRun:
    """The description of a run that a tracker receives."""

    folder: Path
    name: str  # the run's `name`: its project or experiment
    title: str  # distinguishes it from other runs of that name
    config: Mapping[str, Any]
    resumed_at: int | None = None  # the first repeated step of a resumed run; None for a new run

    @classmethod
    def of(cls, folder: Path, config: Mapping[str, Any], resumed_at: int | None = None) -> TrackedRun:
        """Describe the run in a folder. Its title is the end of the folder's path."""
        title = "/".join(folder.resolve().parts[-2:])
        if resumed_at is not None:
            title += f" from step {resumed_at}"
        return cls(folder, str(config.get("name") or "run"), title, config, resumed_at)


class Tracker(Protocol):
    """The interface of TensorBoard, Weights & Biases, MLflow and Trackio."""

    def log(self, step: int, summary: StepSummary) -> None:
        """Show the summary of a step."""

    def close(self, outcome: Outcome) -> None:
        """End the run with its outcome."""


class TrackingSink:
    """A sink that passes rows to a tracker and stores none. `outcome` is how the run ended, according to its events.

    Raises:
        SinkError: From `end_step` and `close`: the tracker failed.
    """

    def __init__(self, tracker: Tracker, name: str) -> None:
        self.tracker = tracker
        self.name = name
        self.outcome: Outcome = "done"
        self._collector = SummaryCollector()

    tables = ("events", *SCALAR_TABLES)
    """The tables that are shown."""

    def write(self, table: str, rows: Sequence[Row]) -> None:
        """Collect rows. They are shown at the end of the step."""
        self._collector.add(table, rows)
        for _, _, _, rule, *_ in rows if table == "events" else ():
            self.outcome = OUTCOMES.get(rule, self.outcome)

    def keep(self, *tensor: Any, **options: Any) -> int | None:  # noqa: ARG002
        """Do nothing: tensors are not shown. Returns 0, since no bytes are stored."""
        return 0

    def end_step(self) -> None:
        """Pass the collected summaries to the tracker."""
        for step, summary in self._collector.take():
            with _calling(self.name):
                self.tracker.log(step, summary)

    def close(self) -> None:
        """Pass on the remaining summaries and end the run."""
        try:
            self.end_step()
        finally:
            with _calling(self.name):
                self.tracker.close(self.outcome)


def require(packages: Mapping[str, str]) -> None:
    """Check that trackers can be imported. Each is given with the config key that requires it.

    Raises:
        ConfigError: A package is missing.
    """
    missing = []
    for name, where in packages.items():
        try:
            with preserve_python_and_numpy():
                import_module(name) if name in TRACKERS.builtin else TRACKERS[name]
        except ImportError as error:
            message = f"the package {name} cannot be imported: {error}"
            missing.append(Problem(where, message, fix=pip_command(name)))
    raise_problems(missing)


def open_tracker(name: str, run: TrackedRun, where: str, tracker_folder: Path | None = None) -> TrackingSink:
    """Start tracking a run.

    Args:
        name: One of `instrument.config.experiment.TRACKERS`.
        tracker_folder: The folder for files of the tracker. Default: in the run's folder.

    Raises:
        ConfigError: The package is missing, or the service is not available.
    """
    require({name: where})
    tracker_folder = tracker_folder or run.folder / TRACKER_FOLDERS.get(name, ".")
    try:
        with preserve_python_and_numpy():
            return TrackingSink(TRACKERS[name](run, tracker_folder), name)
    except Exception as error:
        message = f"{name} cannot be started: {type(error).__name__}: {first_line(error)[:MAX_LETTERS]}"
        raise ConfigError(Problem(where, message, fix="check the environment variables in docs/export.md")) from error


@contextmanager
def _calling(name: str) -> Iterator[None]:
    try:
        with preserve_python_and_numpy():
            yield
    except Exception as error:
        raise SinkError(f"{name} failed: {type(error).__name__}: {first_line(error)[:MAX_LETTERS]}") from error
