"""A rehearsal: a few steps of a run, made to tell what all of it will cost.

Those are the steps at which each hook is due for the first time, made on the run's first batches, again and again for a while,
and beside them steps without hooks. Rows go to a folder that is thrown away. The experiment is spent by it.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from ..analysis.archive import RunArchive
from ..capture.probe import Probe
from ..capture.sink import Row
from ..capture.tables import TABLES
from ..errors import ConfigError, InstrumentError, Mistake, own_frame
from ..kinds.meter import Meter, hidden_factor
from ..plan.cost import Cost, Firings, Forecast, firings_of
from ..sinks.parquet import ParquetSink
from .experiment import Experiment
from .forecast import Seen, bytes_of_rows, bytes_of_tensors, estimate
from .loop import evaluate, make_step

SECONDS = 2.0  # that steps are made for, where they are short
LEAST, MOST, KEPT = 2, 40, 4  # passes over the steps: at least, at most, and those whose rows are kept
BATCHES = 8  # micro-batches that are trained on; more where one step has more
MOST_BYTES = 256_000_000  # of tensors, after which no more passes are made
HOOK = TABLES["stats"].names.index("hook")
TABLES_OF_ROWS = ("stats", "distributions", "effects")


def rehearse(experiment: Experiment) -> Forecast:
    """Make a few steps of a run.

    Raises:
        ConfigError: A step fails, with hooks or without; the message says which.
    """
    spent = replace(experiment, scheduler=None)
    try:
        batches = _first_batches(experiment)
        bare = _bare_steps(spent, batches, seconds=0.0)
    except Exception as error:
        raise ConfigError(_failure("model, task, data", "a step fails, without any hooks", error)) from error
    with TemporaryDirectory(prefix="instrument-rehearsal-") as name:
        folder = Path(name)
        try:
            found = _hooked_steps(spent, batches, folder)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(_failure("hooks", "a step with these hooks fails", error)) from error
        bare += _bare_steps(spent, batches, SECONDS / 2)
        return _result(experiment, found, bare, folder)


class _Bare:
    """Watches nothing."""

    def loss(self, loss: Tensor) -> Tensor:
        return loss

    def end_micro_step(self) -> None:
        pass

    def end_step(self, *, loss: Tensor | None, **metrics: Any) -> Mapping[str, float | None]:  # noqa: ARG002
        return {"loss": None if loss is None else loss.item()}


@dataclass
class _Visit:
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
    acting: Counter[str] = field(default_factory=Counter)
    firings: Counter[str] = field(default_factory=Counter)


class _Noting:
    """A sink that hands everything on, and notes it."""

    def __init__(self, sink: ParquetSink) -> None:
        self.sink = sink
        self.visit = _Visit(0, "train")
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
class _Found:
    """What the hooked steps told.

    Attributes:
        visits: Those that count for time.
        idle: What the stopwatch says of a step in which nothing is due, in seconds.
        kept: Those whose rows count.
        micro_batches: In each of them.
        tensors: The bytes of all tensors that were written.
    """

    visits: list[_Visit]
    idle: float
    kept: list[_Visit]
    micro_batches: int
    tensors: list[int]


def _first_batches(experiment: Experiment) -> list[Sequence[Any]]:
    """The micro-batches of some first steps: of several, where that is not much to hold."""
    groups: list[Sequence[Any]] = []
    for _, group in experiment.batches:
        if not groups or len(group) == len(groups[0]):  # an epoch's last one may be shorter
            groups.append(group)
        if sum(map(len, groups)) >= BATCHES:
            break
    return groups


def _bare_steps(experiment: Experiment, batches: Sequence[Sequence[Any]], seconds: float) -> list[float]:
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


def _hooked_steps(experiment: Experiment, batches: Sequence[Sequence[Any]], folder: Path) -> _Found:
    config, plan = experiment.config, experiment.plan
    firings = {name: firings_of(spec, experiment.length) for name, spec in plan.specs.items()}
    first = {
        phase: sorted({firings[n].steps[0] for n, s in plan.specs.items() if s.phase == phase and firings[n].steps})
        for phase in ("train", "eval")
    }
    sink = _Noting(ParquetSink(folder, tensors=config.sink.tensors))
    probe = Probe(
        plan, sink, optimizer=experiment.optimizer, scaler=experiment.scaler, seed=config.seed, archive=RunArchive()
    )
    meter = probe.clock.meter = Meter()
    _compile_anew(experiment)
    one_batch: Any = [next(iter(experiment.evaluation))] if first["eval"] else []
    evaluation = replace(experiment, evaluation=one_batch)

    shown = cycle(batches)

    def visit(step: int, phase: str) -> _Visit:
        micro_batches = next(shown)
        sink.visit = made = _Visit(step, phase)
        probe.go_to(step)
        meter.reset()
        began = time.perf_counter()
        metrics = make_step(experiment, probe, micro_batches) if phase == "train" else evaluate(evaluation, probe)
        metrics["loss"]  # waits for a device to be done
        made.seconds = time.perf_counter() - began
        made.told = meter.seconds
        for live, seconds in meter.at.items():
            made.acting[live.site.spec.name] += seconds
        for live, count in meter.firings.items():
            made.firings[live.site.spec.name] += count
        probe.recorder.flush()
        return made

    visits: list[_Visit] = []
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
    return _Found(
        visits[in_a_pass:] or visits,
        median(idle_told or [0.0]),
        visits[: KEPT * in_a_pass],
        len(batches[0]),
        sink.sizes,
    )


def _result(experiment: Experiment, found: _Found, bare: Sequence[float], folder: Path) -> Forecast:
    plan, length = experiment.plan, experiment.length
    firings = {name: firings_of(spec, length) for name, spec in plan.specs.items()}
    per_time: dict[str, int] = {}
    seen: dict[str, dict[str, Seen]] = {table: {} for table in TABLES_OF_ROWS}
    kept: dict[str, list[int]] = {}
    times: dict[str, float] = {}
    for name, spec in plan.specs.items():
        visits = [visit for visit in found.kept if firings[name].steps and _is_due(visit, spec.phase, firings[name])]
        in_a_visit = found.micro_batches if spec.phase == "train" and spec.definition.rhythm == "micro_step" else 1
        kept[name] = [size for visit in visits for size in visit.kept[name]]
        times[name] = firings[name].times / in_a_visit / max(1, len(visits))
        per_time[name] = 0
        for table in TABLES_OF_ROWS:
            rows = [visit.rows[table][name] for visit in visits]
            shortest = min(map(len, rows), default=0)
            share = shortest // in_a_visit
            per_time[name] += share
            seen[table][name] = Seen(
                [some[:shortest] for some in rows], firings[name].steps, share * firings[name].times
            )
        per_time[name] += len(kept[name]) // max(1, len(visits)) // in_a_visit
    sizes: Counter[str] = Counter()
    scratch = folder / "scratch"
    scratch.mkdir()
    every = experiment.config.train.checkpoint.every
    for table, specs in seen.items():
        rows_in_all = sum(spec.rows for spec in specs.values())
        between = rows_in_all * every / length.steps if every else float("inf")
        sizes.update(bytes_of_rows(scratch, TABLES[table], specs, between))
    parts = length.steps / every if every else 0.0
    sizes.update(bytes_of_tensors(scratch, folder, estimate(found.tensors), kept, times, parts))
    seconds, fixed = _seconds(found, bare, [name for name, spec in plan.specs.items() if spec.phase == "train"])
    cost = {
        name: Cost(
            len(due.steps),
            per_time[name] * due.times_per_step,
            per_time[name] * due.times,
            round(sizes[name]),
            seconds.get(name, 0.0),
        )
        for name, due in firings.items()
    }
    added = sum(spent.seconds * spent.firings / length.steps for spent in cost.values())
    return Forecast(cost, median(bare), median(bare) + fixed + added)


def _is_due(visit: _Visit, phase: str, firings: Firings) -> bool:
    return visit.phase == phase and visit.step in firings.steps


def _seconds(found: _Found, bare: Sequence[float], specs: Sequence[str]) -> tuple[dict[str, float], float]:
    """What each spec adds to a step at which it is due, and what hooks add to every step, due or not."""
    visits = [visit for visit in found.visits if visit.phase == "train"]
    if not visits:
        return {}, 0.0
    steps = sorted({visit.step for visit in visits})
    usual = {step: median(visit.seconds for visit in visits if visit.step == step) for step in steps}
    middle = fmean(usual.values())
    certain = [middle + visit.seconds - usual[visit.step] for visit in visits] if len(visits) >= 3 * len(steps) else []
    factor = hidden_factor(certain, bare, fmean(visit.told for visit in visits))
    spent: dict[str, float] = {}
    for name in specs:
        with_it = [visit for visit in visits if visit.firings[name]]
        if with_it:
            around = fmean(
                max(0.0, visit.told - found.idle - sum(visit.acting.values()))
                * visit.firings[name]
                / sum(visit.firings.values())
                for visit in with_it
            )
            spent[name] = factor * (fmean(visit.acting[name] for visit in with_it) + around)
    return spent, factor * found.idle


def _failure(where: str, problem: str, error: Exception) -> Mistake:
    told = str(error).strip()
    if not isinstance(error, InstrumentError):
        told = f"{type(error).__name__}: {told.splitlines()[0] if told else ''}"
    return Mistake(where, f"{problem}{own_frame(error)}", written=told)
