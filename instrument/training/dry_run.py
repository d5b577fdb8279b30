"""Dry run: execute a few steps of a run to estimate the cost of the complete run.

The dry run executes the first scheduled step of each hook, repeatedly for about two seconds, and some steps without
hooks. It uses the first batches of the run. Rows are written to a temporary folder.

The compression ratio of rows cannot be computed from their number. Therefore the measured rows are written as the run
would write them: all of them, and half of them. The difference is the size of further rows. Tensors are estimated to a few
percent. Rows of a long run compress better than those of a few steps, so tables of rows are estimated up to 40% too high.
"""

from __future__ import annotations

import copy
import math
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from ..actions.custom_functions import CallFunction, check_random_state
from ..config.hook_specs import RecordSpec
from ..config.schedule import STEP_PHASES
from ..errors import ConfigError, InstrumentError, Problem, first_line, user_code_location
from ..hooks.clock import HookTimer, overhead_factor
from ..plan.cost import Cost, Forecast, firings_of
from ..storage.blocks import ALIGNMENT
from ..storage.parquet import ROWS_JOURNAL_BYTES, TENSORS_JOURNAL_BYTES, ParquetSink
from ..storage.parts import Part, new_part, part_files, write_rows
from ..storage.row_batches import with_positions
from ..tables.schemas import TABLES, Table
from ..tables.sink_interface import Row
from .experiment import Experiment
from .loader import LoadedBatch
from .loop import Metrics, NoHooks, StepObserver, evaluate, forward_step, run_probe_batch, train_step

SECONDS = 2.0  # Duration of a measurement, if steps are short.
MIN_REPEATS, MAX_REPEATS = 2, 40  # Repetitions of the steps.
BATCHES = 8  # Micro-batches to train on; more if one step has more.
MAX_BYTES = 256_000_000  # Bytes of recorded tensors after which the repetitions stop.
ROW_BYTES = 64  # Approximate bytes per recorded tensor in addition to its values.
HOOK = TABLES["stats"].names.index("hook")
TABLES_OF_ROWS = tuple(name for name, table in TABLES.items() if table.has_identity and name != "tensors")


def dry_run(experiment: Experiment) -> Forecast:
    """Estimate the cost of a run from a few of its steps, which change the experiment: it cannot be used for training afterwards.

    Raise a ConfigError if a step fails. The message says whether it fails without hooks or with them.
    """
    without_scheduler = copy.copy(experiment)
    without_scheduler.scheduler = None
    try:
        batches, loading = _load_batches(experiment)
        baseline = _measure_baseline(without_scheduler, batches, seconds=0.0)
    except Exception as error:
        raise ConfigError(_failure("model, task, data", "a step without hooks fails", error)) from error
    with TemporaryDirectory(prefix="instrument-dry-run-") as name:
        try:
            profile = _Profile(without_scheduler, batches, Path(name))
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(_failure("hooks", "a step with these hooks fails", error)) from error
        baseline += _measure_baseline(without_scheduler, batches, SECONDS / 2)
        return _forecast(experiment, profile, baseline, loading, Path(name))


def _failure(where: str, message: str, error: Exception) -> Problem:
    given = str(error).strip() if isinstance(error, InstrumentError) else f"{type(error).__name__}: {first_line(error)}"
    return Problem(where, f"{message}{user_code_location(error)}", given=given)


def _load_batches(experiment: Experiment) -> tuple[list[list[LoadedBatch]], float]:
    """Load the micro-batches of the first steps, of at least one. Return them, and the seconds to load those of one step.

    Training waits for this time.
    """
    groups: list[list[LoadedBatch]] = []
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


def _measure_baseline(experiment: Experiment, batches: Sequence[Sequence[LoadedBatch]], seconds: float) -> list[float]:
    """Return the durations of steps without hooks, in seconds. The first step is omitted, because it allocates memory.

    The measurement takes so many seconds, or `MAX_REPEATS` steps.
    """
    experiment.model.train(experiment.config.mode == "train")
    durations: list[float] = []
    started_at = time.perf_counter()
    while len(durations) <= max(MIN_REPEATS, len(batches)) or (
        time.perf_counter() - started_at < seconds and len(durations) <= MAX_REPEATS
    ):
        step_started_at = time.perf_counter()
        _run_step(experiment, NoHooks(), batches[len(durations) % len(batches)])
        durations.append(time.perf_counter() - step_started_at)
    return durations[1:]


def _run_step(experiment: Experiment, observer: StepObserver, batches: Sequence[LoadedBatch]) -> Metrics:
    if experiment.config.mode == "train":
        return train_step(experiment, observer, batches)
    return forward_step(experiment, observer, batches[0])[0]


@dataclass
class _Step:
    """The measurements of one step, or of one batch of an evaluation, with hooks."""

    step: int
    phase: str
    rows: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))  # by table and spec
    tensor_bytes: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))  # of each tensor, by spec
    seconds: float = 0.0
    hook_seconds: float = 0.0
    action_seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # the part of actions, by spec
    firings: Counter[str] = field(default_factory=Counter)
    kept_bytes: dict[str, int] = field(default_factory=dict)  # in memory, by spec with `keep`


class _CountingSink(ParquetSink):
    """A sink that counts the rows of the current step by table and spec. `sizes`: of all tensors, in bytes."""

    def __init__(self, folder: Path, tensors: Literal["list", "bytes"] | None) -> None:
        super().__init__(folder, tensors=tensors)
        self.current = _Step(0, "train")
        self.sizes: list[int] = []

    def write(self, table: str, rows: Sequence[Row]) -> None:
        if table in TABLES_OF_ROWS:
            self.current.rows[table].update(row[HOOK] for row in rows)
        super().write(table, rows)

    def keep(
        self, key: Row, source_shape: Sequence[int], tensor: Tensor, dtype: torch.dtype | None = None
    ) -> int | None:
        size = super().keep(key, source_shape, tensor, dtype)
        assert size is not None, "a sink that waits for room drops nothing"
        self.current.tensor_bytes[key[HOOK]].append(size)
        self.sizes.append(size)
        return size

    def close(self) -> None:
        """Convert the journals that the forecast reads. The folder is not read as that of a run, which has all tables."""
        self.end_step(wait=True)
        self._tensors.stop()
        for name, writer in self._writers.items():
            if name == "tensors" or name in TABLES_OF_ROWS:
                writer.finish_part()
            writer.release()
        self._counts.release()


class _Profile:
    """Measures the first scheduled step of each hook, repeatedly for about `SECONDS`.

    `warm_steps` are the measurements for durations, and `unscheduled` those of a step at which no hook is scheduled.
    """

    def __init__(self, experiment: Experiment, batches: Sequence[Sequence[LoadedBatch]], folder: Path) -> None:
        config, specs = experiment.config, experiment.plan.specs
        self._experiment, self._mode, self.micro_batches = experiment, config.mode, len(batches[0])
        firings = {name: firings_of(spec, experiment.length).steps for name, spec in specs.items()}
        first_steps = {
            phase: sorted({firings[n][0] for n, spec in specs.items() if spec.phase == phase and firings[n]})
            for phase in experiment.inferred_by_phase
        }
        experiment.archive.substitutes_samples = True
        self.sink = _CountingSink(folder, config.sink.tensors)
        self._probe = experiment.probe(self.sink, archive=experiment.archive, print_line=lambda line: None)
        for attached in self._probe.attached_hooks:
            if isinstance(attached.action, CallFunction):  # its function has effects that a plan must not have
                attached.action.function = check_random_state(lambda tensor, context: None)
        self._timer = self._probe.clock.timer = HookTimer()
        one_batch: Any = [next(iter(experiment.eval_loader or ()))] if first_steps.get("eval") else []
        self._evaluated = copy.copy(experiment)
        self._evaluated.eval_loader = one_batch
        self._batches = {}
        for step in first_steps[self._mode]:
            sizes = experiment.batches.sizes(step)  # recorded tensors of another run fit only batches of these sizes
            fitting = [group for group in batches if [each.total for each in group] == sizes]
            self._batches[step] = cycle(fitting or batches)
        self.steps: list[_Step] = []
        passes = 0
        with self._probe:
            self._probe.phase = self._mode
            started_at = time.perf_counter()
            while not passes or (
                sum(self.sink.sizes) < MAX_BYTES
                and (passes <= MIN_REPEATS or (passes <= MAX_REPEATS and time.perf_counter() - started_at < SECONDS))
            ):
                self.steps += [self._measure(step, phase) for phase, due in first_steps.items() for step in due]
                passes += 1
            for attached in self._probe.attached_hooks:
                attached.is_paused = attached.is_record_hook
            unscheduled = [step for step in first_steps[self._mode][:1] for _ in range(min(passes, 8))]
            self.unscheduled = [self._measure(step, self._mode) for step in unscheduled]
        self.warm_steps = self.steps[len(self.steps) // passes :] or self.steps

    def _measure(self, step: int, phase: str) -> _Step:
        self.sink.current = measured = _Step(step, phase)
        self._probe.set_step(step)
        self._timer.reset()
        started_at = time.perf_counter()
        if phase == self._mode:
            metrics = _run_step(self._experiment, self._probe, next(self._batches[step]))
        elif phase == "eval":
            metrics = evaluate(self._evaluated, self._probe)
        else:
            metrics = run_probe_batch(self._experiment, self._probe)
        metrics["loss"]  # Synchronizes with the device.
        measured.seconds = time.perf_counter() - started_at
        measured.hook_seconds = self._timer.seconds
        for attached, seconds in self._timer.action_seconds.items():
            measured.action_seconds[attached.site.spec.name] += seconds
        for attached, count in self._timer.firings.items():
            measured.firings[attached.site.spec.name] += count
        self._probe.recorder.flush()
        flight_recorder = self._probe.recorder.flight_recorder
        measured.kept_bytes = flight_recorder.bytes
        for hook in flight_recorder.steps:
            flight_recorder.take(hook)
        return measured


def _forecast(
    experiment: Experiment, profile: _Profile, baseline: Sequence[float], loading: float, folder: Path
) -> Forecast:
    plan, length = experiment.plan, experiment.length
    cost: dict[str, Cost] = {}
    expected: dict[str, dict[str, float]] = {table: {} for table in ("tensors", *TABLES_OF_ROWS)}
    for name, spec in plan.specs.items():
        due = firings_of(spec, length)
        measured = [each for each in profile.steps if each.phase == spec.phase and each.step in due.steps]
        is_per_batch = spec.phase in STEP_PHASES and spec.definition.frequency == "micro_step"
        micro_steps = profile.micro_batches if is_per_batch else 1
        tensors = [size + ROW_BYTES for each in measured for size in each.tensor_bytes[name]]
        # Per step for kinds that act once in it.
        rows = tensor_rows = len(tensors) // max(1, len(measured)) // micro_steps
        expected["tensors"][name] = sum(tensors) * due.times / micro_steps / max(1, len(measured))
        for table in TABLES_OF_ROWS:
            count = min((each.rows[table][name] for each in measured), default=0) // micro_steps
            expected[table][name] = count * due.times
            rows += count
        kept_steps = spec.keep or 0 if isinstance(spec, RecordSpec) else 0
        memory = kept_steps * max((each.kept_bytes.get(name, 0) for each in profile.steps), default=0)
        cost[name] = Cost(len(due.steps), rows * due.times, 0, 0.0, memory, tensor_rows * due.times)
    every = experiment.config.train.checkpoint.every
    checkpoints = experiment.steps / every if every else 0.0  # each of them closes the parts of all tables
    sizes = [size + ROW_BYTES for size in profile.sink.sizes]
    tables = [
        _bytes_on_disk(folder, TABLES[table], sizes if table == "tensors" else None, of_specs, checkpoints)
        for table, of_specs in expected.items()
    ]
    of_steps = [name for name, spec in plan.specs.items() if spec.phase in STEP_PHASES]
    seconds, fixed = _seconds(profile, baseline, of_steps)
    for name, counted in cost.items():
        size, tensor_size = round(sum(of_table[name] for of_table in tables)), round(tables[0][name])
        cost[name] = replace(counted, bytes=size, seconds=seconds.get(name, 0.0), tensor_bytes=tensor_size)
    added = sum(spent.seconds * spent.firings / length.steps for spent in cost.values())
    without = loading + median(baseline)
    return Forecast(cost, without, without + fixed + added)


def _seconds(profile: _Profile, baseline: Sequence[float], specs: Sequence[str]) -> tuple[dict[str, float], float]:
    """Return the time that each spec adds to its scheduled steps, and the time that hooks add to every step."""
    measured = [each for each in profile.warm_steps if each.phase in STEP_PHASES]
    if not measured:
        return {}, 0.0
    overheads = [each.hook_seconds - sum(each.action_seconds.values()) for each in profile.unscheduled]
    unscheduled_seconds = median(overheads or [0.0])
    numbers = sorted({each.step for each in measured})
    steps = [_usual([each for each in measured if each.step == step]) for step in numbers]
    usual = {step.step: step.seconds for step in steps}
    hooked_seconds = [fmean(usual.values()) + each.seconds - usual[each.step] for each in measured]
    if len(measured) < 3 * len(steps):
        hooked_seconds = []
    factor = overhead_factor(hooked_seconds, baseline, fmean(step.hook_seconds for step in steps))
    spent: dict[str, float] = {}
    for name in specs:
        steps_with_firings = [step for step in steps if step.firings[name]]
        if steps_with_firings:
            outside_actions = fmean(
                max(0.0, step.hook_seconds - unscheduled_seconds - sum(step.action_seconds.values()))
                * step.firings[name]
                / sum(step.firings.values())
                for step in steps_with_firings
            )
            spent[name] = factor * (fmean(step.action_seconds[name] for step in steps_with_firings) + outside_actions)
    return spent, factor * unscheduled_seconds


def _usual(measured: Sequence[_Step]) -> _Step:
    """Return the medians over several measurements of one step. Medians suppress interruptions by other processes."""
    first = measured[0]
    seconds, hook_seconds = (median(getattr(each, name) for each in measured) for name in ("seconds", "hook_seconds"))
    action_seconds = {name: median(each.action_seconds[name] for each in measured) for name in first.firings}
    return replace(first, seconds=seconds, hook_seconds=hook_seconds, action_seconds=action_seconds)


def _bytes_on_disk(
    folder: Path, table: Table, amounts: Sequence[int] | None, expected: Mapping[str, float], least_parts: float
) -> dict[str, float]:
    """Estimate the size of a table on disk, in bytes by spec, from the rows in the folder of the dry run, with a closed sink.

    Args:
        amounts: The bytes in each row of the folder, for rows of different size; None for other rows, whose amount is 1.
        expected: By spec, the amount of data in the rows of the run.
        least_parts: The minimum number of parts. Each checkpoint closes a part.
    """
    total = sum(expected.values())
    if not total:
        return dict.fromkeys(expected, 0.0)
    files = part_files(folder, table.name).values()
    rows = pa.concat_tables(pq.read_table(file, columns=list(table.names)) for file in files)
    batch = rows.cast(table.plain_schema).combine_chunks().to_batches()[0]
    half, amounts = batch.num_rows // 2, amounts or [1] * batch.num_rows
    less, full = (_size_of_part(table, batch.slice(0, count)) for count in (half, batch.num_rows))
    growth = max(0.0, (full - less) / sum(amounts[half:]))
    fixed = max(0.0, full - growth * sum(amounts))
    journal_bytes = TENSORS_JOURNAL_BYTES if table.name == "tensors" else ROWS_JOURNAL_BYTES
    parts = max(least_parts, math.ceil(batch.nbytes / sum(amounts) * total / journal_bytes))
    return {name: amount * (growth + fixed * parts / total) for name, amount in expected.items()}


def _size_of_part(table: Table, batch: pa.RecordBatch) -> int:
    with TemporaryDirectory(prefix="instrument-dry-run-") as folder:
        part = Part(0, 0)
        with new_part(Path(folder), table, part) as writer:
            write_rows(writer, table, iter([with_positions(table, batch)]))
        sizes: list[int] = batch["size"].fill_null(0).to_pylist() if table.name == "tensors" else []
        of_blocks = sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)
        return part.file(Path(folder), table.name).stat().st_size + of_blocks
