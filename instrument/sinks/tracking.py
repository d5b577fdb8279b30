"""Trackers: where people look besides Parquet, and what hands them the rows of a run.

A tracker is told once a step what there is to show. Whatever it does, the training's random numbers are what they were.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from ..capture.sink import Row
from ..errors import ConfigError, Mistake, SinkError
from ..extras import pip_command
from .content import Content, Gathering
from .tags import SHOWN

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Outcome = Literal["done", "failed", "killed"]
ENDINGS: Mapping[str, Outcome] = {"error": "failed", "interrupted": "killed"}  # by the rule of the event that tells it
PLACES = {"tensorboard": "tensorboard"}  # where a tracker puts its files, in the run's folder
EXTRAS = {"zarr": "arrays"}  # of this package, where they have another name than what is imported


@dataclass(frozen=True)
class Tracked:
    """What a tracker has to know of a run.

    Attributes:
        folder: The run's.
        name: The run's `name`: its project, or experiment.
        title: What tells it from other runs of the name.
        config: The resolved configuration.
        resumed_at: The first step that is done again by a run that goes on; None for a new one.
    """

    folder: Path
    name: str
    title: str
    config: Mapping[str, Any]
    resumed_at: int | None = None

    @classmethod
    def of(cls, folder: Path, config: Mapping[str, Any], resumed_at: int | None = None) -> Tracked:
        """The run in a folder: its title is the end of the folder's path."""
        title = "/".join(folder.resolve().parts[-2:])
        if resumed_at is not None:
            title += f" from step {resumed_at}"
        return cls(folder, str(config.get("name") or "run"), title, config, resumed_at)


class Tracker(Protocol):
    """TensorBoard, Weights & Biases, MLflow.

    Attributes:
        draws: Whether it shows pictures.
    """

    draws: bool

    def log(self, step: int, content: Content) -> None:
        """Show what a step has to show."""

    def close(self, outcome: Outcome) -> None:
        """The run is over."""


class TrackingSink:
    """A sink that shows rows on a tracker and keeps none.

    Args:
        tracker: Where they are shown.
        name: What it is called in messages.

    Attributes:
        outcome: How the run ended, as far as its events tell.

    Raises:
        SinkError: From `end_step` and `close`: the tracker failed.
    """

    def __init__(self, tracker: Tracker, name: str) -> None:
        self.tracker = tracker
        self.name = name
        self.outcome: Outcome = "done"
        self._gathering = Gathering()

    @property
    def tables(self) -> tuple[str, ...]:
        """The tables of which anything is shown."""
        return ("events", *SHOWN, *(("tensors",) if self.tracker.draws else ()))

    def write(self, table: str, rows: Sequence[Row]) -> None:
        """Take rows; they are shown when the step ends."""
        self._gathering.add(table, rows)
        for _, _, _, rule, *_ in rows if table == "events" else ():
            self.outcome = ENDINGS.get(rule, self.outcome)

    def keep(
        self,
        key: Row,
        source_shape: Sequence[int],  # noqa: ARG002
        tensor: Tensor,
        dtype: torch.dtype | None = None,
    ) -> int | None:
        """Copy what is to be drawn of a tensor; nothing of it is stored."""
        if self.tracker.draws:
            self._gathering.add_tensor(key, tensor, dtype)
        return 0

    def end_step(self) -> None:
        """Show what was gathered."""
        for step, content in self._gathering.take():
            with _calling(self.name):
                self.tracker.log(step, content)

    def close(self) -> None:
        """Show the rest, and tell that the run is over."""
        try:
            self.end_step()
        finally:
            with _calling(self.name):
                self.tracker.close(self.outcome)


def require(packages: Mapping[str, str]) -> None:
    """Make sure that packages which are no part of this one can be imported.

    Args:
        packages: Where the user asked for each, by its name.

    Raises:
        ConfigError: A package is missing.
    """
    missing = []
    for name, where in packages.items():
        try:
            with _same_random_numbers():
                import_module(name)
        except ImportError as error:
            allowed = pip_command(EXTRAS.get(name, name))
            missing.append(Mistake(where, f"the package {name} cannot be imported: {error}", allowed=allowed))
    if missing:
        raise ConfigError(*missing)


def open_tracker(name: str, run: Tracked, where: str, place: Path | None = None) -> TrackingSink:
    """Begin to track a run.

    Args:
        name: One of `instrument.spec.config.TRACKERS`.
        run: What it has to know.
        where: What the user asked for it by.
        place: Where it puts files, if it writes any; in the run's folder without it.

    Raises:
        ConfigError: The package is missing, or the service cannot be had.
    """
    require({name: where})
    module = import_module(f".{name}", __package__)
    try:
        with _same_random_numbers():
            return TrackingSink(module.begin(run, place or run.folder / PLACES.get(name, ".")), name)
    except Exception as error:
        problem = f"{name} cannot be started: {type(error).__name__}: {_brief(error)}"
        raise ConfigError(Mistake(where, problem, allowed="what docs/export.md says of its environment")) from error


@contextmanager
def _calling(name: str) -> Iterator[None]:
    """What a tracker raises, of whatever type, as one of ours."""
    try:
        with _same_random_numbers():
            yield
    except Exception as error:
        raise SinkError(f"{name} failed: {type(error).__name__}: {_brief(error)}") from error


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Python's and NumPy's random numbers go on behind the block as if it had not been (MLflow draws from them)."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _brief(error: Exception, most: int = 300) -> str:
    return str(error).strip().partition("\n")[0][:most]
