"""From a configuration to a finished run in its folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..analysis.archive import RunArchive
from ..capture.probe import Probe
from ..sinks.parquet import ParquetSink
from ..spec.config import RunConfig
from .compiled import broken_graphs, graph_breaks
from .device import process_state
from .experiment import Experiment, prepare
from .folder import RunFolder, config_hash
from .loop import train
from .terminal import Terminal


@dataclass(frozen=True)
class Result:
    """What came of a run: its folder, and the metrics of its last evaluation."""

    folder: Path
    metrics: dict[str, float | None]


def run(
    config: RunConfig, folder: Path, terminal: Terminal, *, raw: Mapping[str, Any], overrides: Mapping[str, Any]
) -> Result:
    """Run an experiment.

    Args:
        config: The configuration, checked.
        folder: The run's folder; it may exist, but hold no run.
        terminal: Where progress and results are shown.
        raw: The configuration as it was composed, for run.json.
        overrides: What the user put over it, by key.

    Raises:
        ConfigError: Something that the configuration names is not there, does not fit, or matches nothing.
        HookError: A hook failed; what was recorded before is kept and readable.
    """
    place = RunFolder(
        folder,
        name=config.name,
        seed=config.seed,
        config=raw,
        config_hash=config_hash(dict(raw)),
        overrides=overrides,
        device=None,
        data=None,
        on_error=config.sink.on_error,
    )
    with place.recording(), process_state(seed=config.seed, deterministic=config.deterministic):
        experiment = prepare(config)
        place.update(device=str(experiment.device), data=experiment.data.source)
        terminal.begin(experiment)
        sink = ParquetSink(folder, **config.sink.model_dump(), tell=terminal.alarm)
        metrics = _train(experiment, sink, terminal)
        place.update(metrics=metrics, recording_stopped=sink.failure)
    if sink.failure is None:
        terminal.end(experiment, folder, metrics)
    else:
        terminal.end_unrecorded(sink.failure, metrics)
    return Result(folder, metrics)


def _train(experiment: Experiment, sink: ParquetSink, terminal: Terminal) -> dict[str, float | None]:
    config = experiment.config
    probe = Probe(
        experiment.plan,
        sink,
        optimizer=experiment.optimizer,
        scaler=experiment.scaler,
        seed=config.seed,
        archive=RunArchive(),
    )
    with probe, terminal.progress(experiment.steps) as show:
        if experiment.data.fallback:
            probe.event("fallback", experiment.data.fallback)
        breaks = graph_breaks()
        metrics = train(experiment, probe, show)
        if message := broken_graphs(breaks):
            probe.event("graph_break", message, severity="info")
        return metrics
