"""Steps made to be looked at: without hooks, and with them, where everything that they write is noted."""

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
from ..kinds.meter import Meter
from ..nested import number_of_samples
from ..plan.cost import firings_of
from ..sinks.parquet import ParquetSink
from .experiment import Experiment
from .loop import evaluate, make_step
from .ranks.shares import Group

SECONDS = 2.0  # that steps are made for, where they are short
LEAST, MOST, KEPT = 2, 40, 4  # passes over the steps: at least, at most, and those whose rows are kept
BATCHES = 8  # micro-batches that are trained on; more where one step has more
MOST_BYTES = 256_000_000  # of tensors, after which no more passes are made
HOOK = TABLES["stats"].names.index("hook")
TABLES_OF_ROWS = ("stats", "distributions", "effects")


class _Bare:
    """Watches nothing."""

    def loss(self, loss: Tensor) -> Tensor:
        return loss

    def end_micro_step(self) -> None:
        pass

    def end_step(self, *, loss: Tensor | None, **metrics: Any) -> Mapping[str, float | None]:  # noqa: ARG002
        return {"loss": None if loss is None else loss.item()}


@dataclass
class Visit:
    """One step, or one batch of an evaluation, with hooks.

    Attributes:
        step: Which one.
        phase: `train` or `eval`.
        rows: By table and spec.
        kept: By spec, the bytes of each tensor that was kept.
        seconds: What it took.
        told: What of it was spent in hooks, as the stopwatch says.
        acting: By spec, what its actions took of that.
        firings: By spec.
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
    """A sink that hands everything on, and notes it."""

    def __init__(self, sink: ParquetSink) -> None:
        self.sink = sink
        self.visit = Visit(0, "train")
        self.notes = True
        self.sizes: list[int] = []  # of all tensors that were kept

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
    """What the hooked steps told.

    Attributes:
        visits: Those that count for time.
        idle: What the stopwatch says of a step in which nothing is due, in seconds.
        kept: Those whose rows count.
        micro_batches: In each of them.
        tensors: The bytes of all tensors that were written.
    """

    visits: list[Visit]
    idle: float
    kept: list[Visit]
    micro_batches: int
    tensors: list[int]


def first_batches(experiment: Experiment) -> tuple[list[Group], float]:
    """The micro-batches of some first steps: of several, where that is not much to hold.

    Returns:
        The micro-batches, and what it takes to load those of a step, in seconds: a step of a run waits for them.
    """
    groups: list[Group] = []
    taken: list[float] = []
    began = time.perf_counter()
    for _, group in experiment.batches:
        if not groups or len(group) == len(groups[0]):  # an epoch's last one may be shorter
            groups.append(group)
            taken.append(time.perf_counter() - began)
        if sum(map(len, groups)) >= BATCHES:
            break
        began = time.perf_counter()
    return groups, median(taken[1:] or taken)  # the first one waits for the dataset too


def bare_steps(experiment: Experiment, batches: Sequence[Group], seconds: float) -> list[float]:
    """What steps without hooks take; the first one, which allocates, is left out."""
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
    """What was compiled without hooks does not notice those that come, nor what was compiled with them that they have gone."""
    if experiment.config.train.compile:
        torch.compiler.reset()


def _of_sizes(batches: Sequence[Group], sizes: Sequence[int]) -> Sequence[Group]:
    """The steps whose micro-batches have these sizes, which recorded tensors are put into; all steps where none has."""
    return [group for group in batches if [number_of_samples(batch) for batch in group] == sizes] or batches


def hooked_steps(experiment: Experiment, batches: Sequence[Group], folder: Path) -> Found:
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
        sink.visit = made = Visit(step, phase)
        probe.go_to(step)
        meter.reset()
        began = time.perf_counter()
        metrics = make_step(experiment, probe, next(shown[step])) if phase == "train" else evaluate(evaluation, probe)
        metrics["loss"]  # waits for a device to be done
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
