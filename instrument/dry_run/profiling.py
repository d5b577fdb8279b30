"""Profiling of steps: durations of steps without hooks, and durations and rows of steps with hooks."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ..capture.probe import Probe
from ..capture.sink import Row
from ..capture.tables import TABLES
from ..distributed.sharding import Group
from ..kinds.hook_timer import Meter
from ..nested import number_of_samples
from ..plan.cost import firings_of
from ..sinks.parquet import ParquetSink
from ..training.experiment import Experiment
from ..training.loop import evaluate, make_step

SECONDS = 2.0  # Duration of a measurement, if steps are short.
LEAST, MOST, KEPT = 2, 40, 4  # Repetitions of the steps: minimum, maximum, and those whose rows are stored.
BATCHES = 8  # Micro-batches to train on; more if one step has more.
MOST_BYTES = 256_000_000  # Bytes of recorded tensors after which the repetitions stop.
HOOK = TABLES["stats"].names.index("hook")
TABLES_OF_ROWS = ("stats", "distributions", "effects")


class _Bare:
    """A watcher that does nothing, for steps without hooks."""

    def loss(self, loss: Tensor) -> Tensor:
        return loss

    def end_micro_step(self) -> None:
        pass

    def end_step(self, *, loss: Tensor | None, **metrics: Any) -> Mapping[str, float | None]:  # noqa: ARG002
        return {"loss": None if loss is None else loss.item()}


@dataclass
class Visit:
    """The measurements of one step, or of one batch of an evaluation, with hooks.

    Attributes:
        step: The index of the step.
        phase: `train` or `eval`.
        rows: The written rows, by table and spec.
        kept: By spec, the size of each recorded tensor, in bytes.
        seconds: The duration of the step.
        told: The time spent in hooks, from the stopwatch, in seconds.
        acting: By spec, the part of `told` that its actions took, in seconds.
        firings: By spec, the number of firings.
    """

    step: int
    phase: str
    rows: dict[str, dict[str, list[Row]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    kept: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    seconds: float = 0.0
    told: float = 0.0
    acting: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    firings: Counter[str] = field(default_factory=Counter)


class _Noting:
    """A sink that passes all rows to another sink and stores them for the profile.

    Args:
        sink: The other sink.

    Attributes:
        visit: The present step, to which rows are added.
        notes: Whether rows are stored.
        sizes: The size of each recorded tensor, in bytes.
    """

    def __init__(self, sink: ParquetSink) -> None:
        self.sink = sink
        self.visit = Visit(0, "train")
        self.notes = True
        self.sizes: list[int] = []

    def write(self, table: str, rows: Sequence[Row]) -> None:
        if table in TABLES_OF_ROWS and self.notes:
            for row in rows:
                self.visit.rows[table][row[HOOK]].append(row)
        self.sink.write(table, rows)

    def keep(
        self, key: Row, source_shape: Sequence[int], tensor: Tensor, dtype: torch.dtype | None = None
    ) -> int | None:
        size = self.sink.keep(key, source_shape, tensor, dtype)
        assert size is not None, "a sink that waits for room drops nothing"
        self.visit.kept[key[HOOK]].append(size)
        self.sizes.append(size)
        return size

    def end_step(self) -> None:
        self.sink.end_step()

    def close(self) -> None:
        self.sink.close()


@dataclass
class Found:
    """The measurements of all steps with hooks.

    Attributes:
        visits: The measurements for durations.
        idle: The time spent in hooks in a step at which no hook is scheduled, in seconds.
        kept: The measurements for rows.
        micro_batches: The number of micro-batches per step.
        tensors: The size of each recorded tensor, in bytes.
    """

    visits: list[Visit]
    idle: float
    kept: list[Visit]
    micro_batches: int
    tensors: list[int]


def first_batches(experiment: Experiment) -> tuple[list[Group], float]:
    """Load the micro-batches of the first steps: of several steps if they are few, of at least one step.

    Args:
        experiment: The experiment.

    Returns:
        The micro-batches of each step, and the time to load those of one step, in seconds. Training waits for this
        time.
    """
    groups: list[Group] = []
    taken: list[float] = []
    began = time.perf_counter()
    for _, group in experiment.batches:
        if not groups or len(group) == len(groups[0]):  # The last step of an epoch may be shorter.
            groups.append(group)
            taken.append(time.perf_counter() - began)
        if sum(map(len, groups)) >= BATCHES:
            break
        began = time.perf_counter()
    return groups, median(taken[1:] or taken)  # The first step also waits for the dataset.


def bare_steps(experiment: Experiment, batches: Sequence[Group], seconds: float) -> list[float]:
    """Measure steps without hooks. The first step is omitted, because it allocates memory.

    Args:
        experiment: The experiment.
        batches: The micro-batches of each step, used in turn.
        seconds: The duration of the measurement. It ends earlier after `MOST` steps.

    Returns:
        The duration of each step, in seconds.
    """
    _compile_anew(experiment)
    experiment.model.train()
    watcher = _Bare()
    taken: list[float] = []
    began = time.perf_counter()
    while len(taken) <= max(LEAST, len(batches)) or (time.perf_counter() - began < seconds and len(taken) <= MOST):
        step_began = time.perf_counter()
        make_step(experiment, watcher, batches[len(taken) % len(batches)])
        taken.append(time.perf_counter() - step_began)
    return taken[1:]


def _compile_anew(experiment: Experiment) -> None:
    """Discard compiled code, because it does not notice that hooks were attached or removed."""
    if experiment.config.train.compile:
        torch.compiler.reset()


def _of_sizes(batches: Sequence[Group], sizes: Sequence[int]) -> Sequence[Group]:
    """Return the steps with the given micro-batch sizes; all steps if no step has them.

    Recorded tensors of another run fit only batches of the same size.
    """
    return [group for group in batches if [number_of_samples(batch) for batch in group] == sizes] or batches


def hooked_steps(experiment: Experiment, batches: Sequence[Group], folder: Path) -> Found:
    """Measure steps with hooks: the first scheduled step of each hook, repeatedly for about `SECONDS`.

    Args:
        experiment: The experiment.
        batches: The micro-batches of each step, used in turn.
        folder: The folder to which rows are written.

    Returns:
        The measurements.
    """
    config, plan = experiment.config, experiment.plan
    firings = {name: firings_of(spec, experiment.length) for name, spec in plan.specs.items()}
    first = {
        phase: sorted({firings[n].steps[0] for n, s in plan.specs.items() if s.phase == phase and firings[n].steps})
        for phase in ("train", "eval")
    }
    sink = _Noting(ParquetSink(folder, tensors=config.sink.tensors))
    probe = Probe(
        plan,
        sink,
        optimizer=experiment.optimizers,
        scaler=experiment.scaler,
        seed=config.seed,
        archive=experiment.archive,
    )
    meter = probe.clock.meter = Meter()
    _compile_anew(experiment)
    one_batch: Any = [next(iter(experiment.evaluation))] if first["eval"] else []
    evaluation = replace(experiment, evaluation=one_batch)

    shown = {step: cycle(_of_sizes(batches, experiment.batches.sizes(step))) for step in first["train"]}

    def visit(step: int, phase: str) -> Visit:
        """Execute and measure one step or evaluation."""
        sink.visit = made = Visit(step, phase)
        probe.go_to(step)
        meter.reset()
        began = time.perf_counter()
        metrics = make_step(experiment, probe, next(shown[step])) if phase == "train" else evaluate(evaluation, probe)
        metrics["loss"]  # Synchronizes with the device.
        made.seconds = time.perf_counter() - began
        made.told = meter.seconds
        for live, seconds in meter.at.items():
            made.acting[live.site.spec.name] += seconds
        for live, count in meter.firings.items():
            made.firings[live.site.spec.name] += count
        probe.recorder.flush()
        return made

    visits: list[Visit] = []
    passes = 0
    with probe:
        began = time.perf_counter()
        while not passes or (
            sum(sink.sizes) < MOST_BYTES
            and (passes <= LEAST or (passes <= MOST and time.perf_counter() - began < SECONDS))
        ):
            visits += [visit(step, phase) for phase, steps in first.items() for step in steps]
            passes += 1
            sink.notes = passes < KEPT
        for live in probe.lives:
            live.away = live.records
        idle = [visit(step, "train") for step in first["train"][:1] for _ in range(min(passes, 8))]
    in_a_pass = sum(map(len, first.values()))
    idle_told = [made.told - sum(made.acting.values()) for made in idle]
    return Found(
        visits[in_a_pass:] or visits,
        median(idle_told or [0.0]),
        visits[: KEPT * in_a_pass],
        len(batches[0]),
        sink.sizes,
    )
