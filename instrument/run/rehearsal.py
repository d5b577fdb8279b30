"""A rehearsal: a few steps of a run, made to tell what all of it will cost.

Those are the steps at which each hook is due for the first time, made on the run's first batches, again and again for a while,
and beside them steps without hooks. Rows go to a folder that is thrown away. The experiment is spent by it.
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
from ..kinds.meter import hidden_factor
from ..plan.cost import Cost, Forecast, firings_of
from .experiment import Experiment
from .forecast import Seen, bytes_of_rows, bytes_of_tensors, estimate
from .visits import SECONDS, TABLES_OF_ROWS, Found, Visit, bare_steps, first_batches, hooked_steps


def rehearse(experiment: Experiment) -> Forecast:
    """Make a few steps of a run.

    Raises:
        ConfigError: A step fails, with hooks or without; the message says which.
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
    plan, length = experiment.plan, experiment.length
    firings = {name: firings_of(spec, length) for name, spec in plan.specs.items()}
    rows: dict[str, int] = {}  # by spec, in a micro-step, or in a step for kinds around the optimizer
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
    """How many there will be; each closes the parts of all tables."""
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
    """Bytes by spec, in all tables together."""
    scratch = folder / "scratch"
    scratch.mkdir()
    tables = [bytes_of_tensors(scratch, folder, estimated, kept, times, checkpoints)]
    for table, specs in seen.items():
        between = sum(spec.rows for spec in specs.values()) / checkpoints if checkpoints else math.inf
        tables.append(bytes_of_rows(scratch, TABLES[table], specs, between))
    return {name: sum(sizes[name] for sizes in tables) for name in kept}


def _seconds(found: Found, bare: Sequence[float], specs: Sequence[str]) -> tuple[dict[str, float], float]:
    """What each spec adds to a step at which it is due, and what hooks add to every step, due or not."""
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
    """What visits of one step usually took: medians, so that one in which the machine did something else does not count."""
    first = visits[0]
    acting = {name: median(visit.acting[name] for visit in visits) for name in first.firings}
    seconds, told = median(visit.seconds for visit in visits), median(visit.told for visit in visits)
    return replace(first, seconds=seconds, told=told, acting=acting)


def _failure(where: str, problem: str, error: Exception) -> Mistake:
    told = str(error).strip()
    if not isinstance(error, InstrumentError):
        told = f"{type(error).__name__}: {told.splitlines()[0] if told else ''}"
    return Mistake(where, f"{problem}{own_frame(error)}", written=told)
