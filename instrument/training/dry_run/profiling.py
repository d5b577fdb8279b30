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

from ...actions.call import CallFunction
from ...actions.custom_functions import check_random_state
from ...hooks.hook_timer import HookTimer
from ...plan.cost import firings_of
from ...probe.probe import Probe
from ...storage.parquet import ParquetSink
from ...tables.schemas import TABLES
from ...tables.sink_interface import Row
from ..distributed.batch_sharding import StepBatches
from ..experiment import Experiment
from ..forward import forward_step
from ..loop import NoHooks, StepObserver, evaluate, train_step
from ..probe_batch import run_probe_batch

SECONDS = 2.0  # Duration of a measurement, if steps are short.
MIN_REPEATS, MAX_REPEATS = 2, 40  # Repetitions of the steps.
BATCHES = 8  # Micro-batches to train on; more if one step has more.
MAX_BYTES = 256_000_000  # Bytes of recorded tensors after which the repetitions stop.
HOOK = TABLES["stats"].names.index("hook")
TABLES_OF_ROWS = tuple(name for name, table in TABLES.items() if table.has_identity and name != "tensors")


@dataclass
class StepProfile:
    """The measurements of one step, or of one batch of an evaluation, with hooks.

    Attributes:
        step: The index of the step.
        phase: `train`, `forward`, `eval` or `probe`.
        rows: The number of written rows, by table and spec.
        tensor_bytes: By spec, the size of each recorded tensor, in bytes.
        seconds: The duration of the step.
        hook_seconds: The time spent in hooks, from the hook timer, in seconds.
        action_seconds: By spec, the part of `hook_seconds` that its actions took, in seconds.
        firings: By spec, the number of firings.
        kept_bytes: By spec with `keep`, the memory of the tensors of the step.
    """

    step: int
    phase: str
    rows: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    tensor_bytes: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    seconds: float = 0.0
    hook_seconds: float = 0.0
    action_seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    firings: Counter[str] = field(default_factory=Counter)
    kept_bytes: dict[str, int] = field(default_factory=dict)


class _RecordingSink:
    """A sink that passes all rows to another sink and counts them by table. `sizes`: of the recorded tensors, in bytes."""

    def __init__(self, sink: ParquetSink) -> None:
        self.sink = sink
        self.step_profile = StepProfile(0, "train")
        self.rows: Counter[str] = Counter()
        self.sizes: list[int] = []

    def write(self, table: str, rows: Sequence[Row]) -> None:
        if table in TABLES_OF_ROWS:
            self.rows[table] += len(rows)
            self.step_profile.rows[table].update(row[HOOK] for row in rows)
        self.sink.write(table, rows)

    def keep(
        self, key: Row, source_shape: Sequence[int], tensor: Tensor, dtype: torch.dtype | None = None
    ) -> int | None:
        size = self.sink.keep(key, source_shape, tensor, dtype)
        assert size is not None, "a sink that waits for room drops nothing"
        self.step_profile.tensor_bytes[key[HOOK]].append(size)
        self.sizes.append(size)
        return size

    def end_step(self) -> None:
        self.sink.end_step()

    def close(self) -> None:
        self.sink.close()


@dataclass
class Profile:
    """The measurements of all steps with hooks.

    Attributes:
        steps: The measurements for durations.
        unscheduled_seconds: The time spent in hooks in a step at which no hook is scheduled, in seconds.
        steps_with_rows: The measurements for rows.
        rows: The number of rows in the folder, by table.
        micro_batches: The number of micro-batches per step.
        tensor_bytes: The size of each recorded tensor, in bytes.
    """

    steps: list[StepProfile]
    unscheduled_seconds: float
    steps_with_rows: list[StepProfile]
    rows: Mapping[str, int]
    micro_batches: int
    tensor_bytes: list[int]


def load_batches(experiment: Experiment) -> tuple[list[StepBatches], float]:
    """Load the micro-batches of the first steps: of several steps if they are few, of at least one step.

    Returns:
        The micro-batches of each step, and the time to load those of one step, in seconds. Training waits for this
        time.
    """
    groups: list[StepBatches] = []
    durations: list[float] = []
    started_at = time.perf_counter()
    for _, group in experiment.batches:
        if not groups or len(group) == len(groups[0]):  # The last step of an epoch may be shorter.
            groups.append(group)
            durations.append(time.perf_counter() - started_at)
        if sum(map(len, groups)) >= BATCHES:
            break
        started_at = time.perf_counter()
    return groups, median(durations[1:] or durations)  # The first step also waits for the dataset.


def profile_baseline(experiment: Experiment, batches: Sequence[StepBatches], seconds: float) -> list[float]:
    """Measure steps without hooks. The first step is omitted, because it allocates memory.

    Args:
        batches: The micro-batches of each step, used in turn.
        seconds: The duration of the measurement. It ends earlier after `MAX_REPEATS` steps.

    Returns:
        The duration of each step, in seconds.
    """
    experiment.model.train(experiment.config.mode == "train")
    observer = NoHooks()
    durations: list[float] = []
    started_at = time.perf_counter()
    while len(durations) <= max(MIN_REPEATS, len(batches)) or (
        time.perf_counter() - started_at < seconds and len(durations) <= MAX_REPEATS
    ):
        step_started_at = time.perf_counter()
        _run_step(experiment, observer, batches[len(durations) % len(batches)])
        durations.append(time.perf_counter() - step_started_at)
    return durations[1:]


def _run_step(experiment: Experiment, observer: StepObserver, batches: StepBatches) -> Mapping[str, float | None]:
    """Execute one step of the mode of the run, and return its metrics."""
    if experiment.config.mode == "train":
        return train_step(experiment, observer, batches)
    return forward_step(experiment, observer, batches)[0]


class _Profiler:
    """A probe for selected steps and evaluations, with a timer and a sink that stores the rows."""

    def __init__(self, experiment: Experiment, batches: Sequence[StepBatches], folder: Path) -> None:
        config, plan = experiment.config, experiment.plan
        firings = {name: firings_of(spec, experiment.length) for name, spec in plan.specs.items()}
        self.first_steps = {
            phase: sorted({firings[n].steps[0] for n, s in plan.specs.items() if s.phase == phase and firings[n].steps})
            for phase in experiment.inferred_by_phase
        }
        experiment.archive.substitutes_samples = True
        self.sink = _RecordingSink(ParquetSink(folder, tensors=config.sink.tensors))
        self.probe = Probe(
            plan,
            self.sink,
            optimizer=experiment.optimizers,
            scaler=experiment.scaler,
            seed=config.seed,
            archive=experiment.archive,
            print_line=lambda line: None,
        )
        for attached in self.probe.attached_hooks:
            if isinstance(attached.action, CallFunction):  # its function has effects that a plan must not have
                attached.action.function = check_random_state(lambda tensor, context: None)
        self.timer = self.probe.clock.timer = HookTimer()
        one_batch: Any = [next(iter(experiment.eval_loader or ()))] if self.first_steps.get("eval") else []
        self.experiment = experiment
        self.mode = experiment.config.mode
        self.eval_experiment = replace(experiment, eval_loader=one_batch)
        self.batches = {}
        for step in self.first_steps[self.mode]:
            sizes = experiment.batches.sizes(step)  # recorded tensors of another run fit only batches of these sizes
            self.batches[step] = cycle([group for group in batches if group.sizes == sizes] or batches)

    def measure(self, step: int, phase: str) -> StepProfile:
        """Execute and measure one step, one batch of an evaluation, or one pass of the probe batch."""
        self.sink.step_profile = profile = StepProfile(step, phase)
        self.probe.set_step(step)
        self.timer.reset()
        started_at = time.perf_counter()
        if phase == self.mode:
            metrics = _run_step(self.experiment, self.probe, next(self.batches[step]))
        elif phase == "eval":
            metrics = evaluate(self.eval_experiment, self.probe)
        else:
            metrics = run_probe_batch(self.experiment, self.probe)
        metrics["loss"]  # Synchronizes with the device.
        profile.seconds = time.perf_counter() - started_at
        profile.hook_seconds = self.timer.seconds
        for attached, seconds in self.timer.action_seconds.items():
            profile.action_seconds[attached.site.spec.name] += seconds
        for attached, count in self.timer.firings.items():
            profile.firings[attached.site.spec.name] += count
        self.probe.recorder.flush()
        flight_recorder = self.probe.recorder.flight_recorder
        profile.kept_bytes = flight_recorder.bytes
        for hook in flight_recorder.steps:
            flight_recorder.take(hook)
        return profile


def profile_hooks(experiment: Experiment, batches: Sequence[StepBatches], folder: Path) -> Profile:
    """Measure steps with hooks: the first scheduled step of each hook, repeatedly for about `SECONDS`.

    Args:
        batches: The micro-batches of each step, used in turn.
    """
    profiler = _Profiler(experiment, batches, folder)
    sink = profiler.sink
    steps: list[StepProfile] = []
    passes = 0
    with profiler.probe:
        profiler.probe.phase = profiler.mode
        started_at = time.perf_counter()
        while not passes or (
            sum(sink.sizes) < MAX_BYTES
            and (passes <= MIN_REPEATS or (passes <= MAX_REPEATS and time.perf_counter() - started_at < SECONDS))
        ):
            steps += [profiler.measure(step, phase) for phase, due in profiler.first_steps.items() for step in due]
            passes += 1
        for attached in profiler.probe.attached_hooks:
            attached.is_paused = attached.is_record_hook
        unscheduled = [
            profiler.measure(step, profiler.mode)
            for step in profiler.first_steps[profiler.mode][:1]
            for _ in range(min(passes, 8))
        ]
    steps_per_pass = len(steps) // passes
    overheads = [profile.hook_seconds - sum(profile.action_seconds.values()) for profile in unscheduled]
    return Profile(
        steps[steps_per_pass:] or steps, median(overheads or [0.0]), steps, sink.rows, len(batches[0]), sink.sizes
    )
