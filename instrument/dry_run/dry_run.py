"""Dry run: execute a few steps of a run to estimate the cost of the complete run.

The dry run executes the first scheduled step of each hook, repeatedly for about two seconds, and some steps without
hooks. It uses the first batches of the run. Rows are written to a temporary folder.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory

from ..capture.tables import TABLES
from ..errors import ConfigError, InstrumentError, Mistake, own_frame
from ..kinds.hook_timer import hidden_factor
from ..plan.cost import Cost, Forecast, firings_of
from ..training.experiment import Experiment
from .profiling import SECONDS, TABLES_OF_ROWS, Found, Visit, bare_steps, first_batches, hooked_steps
from .size_estimates import Seen, bytes_of_rows, bytes_of_tensors, estimate


def rehearse(experiment: Experiment) -> Forecast:
    """Estimate the cost of a run from a few of its steps.

    The steps change the experiment, so it cannot be used for training afterwards.

    Args:
        experiment: The experiment.

    Returns:
        The estimated cost of the run.

    Raises:
        ConfigError: A step fails. The message says whether it fails without hooks or with them.
    """
    spent = replace(experiment, scheduler=None)
    try:
        batches, loading = first_batches(experiment)
        bare = bare_steps(spent, batches, seconds=0.0)
    except Exception as error:
        raise ConfigError(_failure("model, task, data", "a step fails, without any hooks", error)) from error
    with TemporaryDirectory(prefix="instrument-rehearsal-") as name:
        folder = Path(name)
        try:
            found = hooked_steps(spent, batches, folder)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(_failure("hooks", "a step with these hooks fails", error)) from error
        bare += bare_steps(spent, batches, SECONDS / 2)
        return _result(experiment, found, bare, loading, folder)


def _result(experiment: Experiment, found: Found, bare: Sequence[float], loading: float, folder: Path) -> Forecast:
    """Compute the estimated cost of the run.

    Args:
        experiment: The experiment.
        found: The measurements of the steps with hooks.
        bare: The durations of steps without hooks, in seconds.
        loading: The time to load the batches of a step, in seconds.
        folder: The temporary folder with the rows.
    """
    plan, length = experiment.plan, experiment.length
    firings = {name: firings_of(spec, length) for name, spec in plan.specs.items()}
    rows: dict[str, int] = {}  # By spec: rows per micro-step, or per step for kinds that act once per step.
    seen: dict[str, dict[str, Seen]] = {table: {} for table in TABLES_OF_ROWS}
    kept: dict[str, list[int]] = {}
    times: dict[str, float] = {}
    for name, spec in plan.specs.items():
        due = firings[name]
        visits = [visit for visit in found.kept if visit.phase == spec.phase and visit.step in due.steps]
        in_a_visit = found.micro_batches if spec.phase == "train" and spec.definition.rhythm == "micro_step" else 1
        for table in TABLES_OF_ROWS:
            written = [visit.rows[table][name] for visit in visits]
            shortest = min(map(len, written), default=0)
            count = shortest // in_a_visit
            seen[table][name] = Seen([some[:shortest] for some in written], due.steps, count * due.times)
            rows[name] = rows.get(name, 0) + count
        kept[name] = [size for visit in visits for size in visit.kept[name]]
        times[name] = due.times / in_a_visit / max(1, len(visits))
        rows[name] += len(kept[name]) // max(1, len(visits)) // in_a_visit
    sizes = _sizes(folder, seen, estimate(found.tensors), kept, times, _checkpoints(experiment))
    seconds, fixed = _seconds(found, bare, [name for name, spec in plan.specs.items() if spec.phase == "train"])
    cost = {
        name: Cost(
            len(due.steps),
            rows[name] * due.times_per_step,
            rows[name] * due.times,
            round(sizes[name]),
            seconds.get(name, 0.0),
        )
        for name, due in firings.items()
    }
    added = sum(spent.seconds * spent.firings / length.steps for spent in cost.values())
    without = loading + median(bare)
    return Forecast(cost, without, without + fixed + added)


def _checkpoints(experiment: Experiment) -> float:
    """Return the expected number of checkpoints. Each of them closes the parts of all tables."""
    every = experiment.config.train.checkpoint.every
    return experiment.steps / every if every else 0.0


def _sizes(
    folder: Path,
    seen: Mapping[str, Mapping[str, Seen]],
    estimated: int,
    kept: Mapping[str, list[int]],
    times: Mapping[str, float],
    checkpoints: float,
) -> dict[str, float]:
    """Return the estimated bytes on disk by spec, summed over all tables.

    Args:
        folder: The temporary folder with the rows.
        seen: By table and spec, the measured rows.
        estimated: The approximate size of all tensors in the folder, in bytes.
        kept: By spec, the size of each recorded tensor, in bytes.
        times: By spec, the number of times that the run records this amount.
        checkpoints: The expected number of checkpoints.
    """
    scratch = folder / "scratch"
    scratch.mkdir()
    tables = [bytes_of_tensors(scratch, folder, estimated, kept, times, checkpoints)]
    for table, specs in seen.items():
        between = sum(spec.rows for spec in specs.values()) / checkpoints if checkpoints else math.inf
        tables.append(bytes_of_rows(scratch, TABLES[table], specs, between))
    return {name: sum(sizes[name] for sizes in tables) for name in kept}


def _seconds(found: Found, bare: Sequence[float], specs: Sequence[str]) -> tuple[dict[str, float], float]:
    """Return the time that each spec adds to its scheduled steps, and the time that hooks add to every step.

    Args:
        found: The measurements of the steps with hooks.
        bare: The durations of steps without hooks, in seconds.
        specs: The names of the specs of the training phase.

    Returns:
        Seconds by spec, and seconds per step.
    """
    visits = [visit for visit in found.visits if visit.phase == "train"]
    if not visits:
        return {}, 0.0
    steps = [_usual([visit for visit in visits if visit.step == step]) for step in sorted({v.step for v in visits})]
    usual = {step.step: step.seconds for step in steps}
    middle = fmean(usual.values())
    certain = [middle + visit.seconds - usual[visit.step] for visit in visits] if len(visits) >= 3 * len(steps) else []
    factor = hidden_factor(certain, bare, fmean(step.told for step in steps))
    spent: dict[str, float] = {}
    for name in specs:
        with_it = [step for step in steps if step.firings[name]]
        if with_it:
            around = fmean(
                max(0.0, step.told - found.idle - sum(step.acting.values()))
                * step.firings[name]
                / sum(step.firings.values())
                for step in with_it
            )
            spent[name] = factor * (fmean(step.acting[name] for step in with_it) + around)
    return spent, factor * found.idle


def _usual(visits: Sequence[Visit]) -> Visit:
    """Return the medians over several measurements of one step. Medians suppress interruptions by other processes."""
    first = visits[0]
    acting = {name: median(visit.acting[name] for visit in visits) for name in first.firings}
    seconds, told = median(visit.seconds for visit in visits), median(visit.told for visit in visits)
    return replace(first, seconds=seconds, told=told, acting=acting)


def _failure(where: str, problem: str, error: Exception) -> Mistake:
    """Return the error for a step that failed."""
    told = str(error).strip()
    if not isinstance(error, InstrumentError):
        told = f"{type(error).__name__}: {told.splitlines()[0] if told else ''}"
    return Mistake(where, f"{problem}{own_frame(error)}", written=told)
