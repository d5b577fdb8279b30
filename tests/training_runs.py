"""Runs in this process without the command line: Hydra composes the configuration, but starts no job."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.types import RunMode
from torch import nn

import instrument
from instrument import MemorySink, Probe
from instrument.commands.job import read_config, report_writer
from instrument.config.experiment import RunConfig
from instrument.config.hydra_internals import config_loader
from instrument.config.parse import parse_config
from instrument.training.distributed.strategies import Strategy
from instrument.training.experiment import Experiment
from instrument.training.loop import Progress, train
from instrument.training.runner import run
from instrument.training.terminal import Terminal

DIGITS = {"_target_": "instrument.training.datasets.digits"}
CONFIG: dict[str, Any] = {
    "model": {"_target_": "instrument.training.models.MLP", "sizes": [64, 16, 10]},
    "data": {"dataset": DIGITS},
    "task": {"_target_": "instrument.tasks.Supervised", "loss": {"_target_": "torch.nn.CrossEntropyLoss"}},
    "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1},
    "train": {"steps": 3, "batch_size": 16},
}
"""The sections of a small training on digits."""


class Dropping(nn.Sequential):
    """A network for digits with dropout, and with batch normalization, whose buffers a pass in training mode changes."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 10))


class Stateful(Dropping):
    """The network with two counts of its passes: in a buffer, and in an attribute, which no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, images: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        self.passes += 1
        self.calls += 1
        scores: torch.Tensor = super().forward(images)
        return scores


def prepared(strategy: Strategy | None = None, **sections: Any) -> Experiment:
    """Return an experiment with the sections of `CONFIG`, of which the given ones are replaced, from seed 0."""
    torch.manual_seed(0)
    return Experiment(parse_config({**CONFIG, **sections}), strategy)


def run_in_memory(
    experiment: Experiment, report: Callable[[Progress], None] = lambda progress: None, loop: Callable[..., Any] = train
) -> tuple[MemorySink, dict[str, float | None]]:
    """Run a prepared experiment; `loop` is `run_forward` for `mode: forward`.

    Returns:
        The rows, and the metrics of the last evaluation or of all batches.
    """
    sink = MemorySink()
    with Probe(
        experiment.plan, sink, optimizer=experiment.optimizers, scaler=experiment.scaler, archive=experiment.archive
    ) as probe:
        return sink, loop(experiment, probe, report)


class ObservedTerminal(Terminal):
    """Terminal that calls a function after each step and each evaluation, and prints nothing."""

    def __init__(self, observe: Callable[[Progress], None]) -> None:
        super().__init__(quiet=True)
        self.observe = observe

    @contextlib.contextmanager
    def progress(self, steps: int) -> Iterator[Callable[[Progress], None]]:
        yield self.observe


@contextlib.contextmanager
def failing_after(calls: int, function: str = "loop.gradient_norm") -> Iterator[None]:
    """Let a function of `instrument.training` raise `RuntimeError("stopped here")` after a number of calls.

    Each step calls the default function once.
    """
    module, _, name = f"instrument.training.{function}".rpartition(".")
    original, left = getattr(__import__(module, fromlist=[name]), name), [calls]

    def fail(*arguments: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("stopped here")
        return original(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{module}.{name}", fail)
        yield


def compose(*arguments: str) -> tuple[RunConfig, dict[str, Any]]:
    """Return the configuration of a command, validated and as a dictionary."""
    return read_config(config_loader().load_configuration("config", [*arguments], RunMode.RUN))


def train_here(folder: Path, *arguments: str) -> instrument.Run:
    """Train in this process, in the parent of the folder of the run, and load it."""
    with contextlib.chdir(folder.parent):
        config, raw = compose(*arguments)
        here = Path(folder.name)
        make_report = report_writer(config, here)
        run(config, here, Terminal(quiet=True), raw=raw, overrides={}, make_report=make_report)
    return instrument.load(folder)


def resume_here(folder: Path) -> instrument.Run:
    """Resume a run in this process, and load it."""
    raw = {**instrument.load(folder).info["config"], "resume": folder.name}
    with contextlib.chdir(folder.parent):
        run(parse_config(raw), Path(folder.name), Terminal(quiet=True), raw=raw, overrides={})
    return instrument.load(folder)


def stop_and_resume(folder: Path, *arguments: str, calls: int, function: str = "loop.gradient_norm") -> instrument.Run:
    """Train until a function fails (see `failing_after`), resume the run from its last checkpoint, and load it."""
    with failing_after(calls, function), pytest.raises(RuntimeError, match="stopped here"):
        train_here(folder, *arguments)
    return resume_here(folder)
