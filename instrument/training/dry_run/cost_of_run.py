"""Dry run: execute a few steps of a run to estimate the cost of the complete run.

The dry run executes the first scheduled step of each hook, repeatedly for about two seconds, and some steps without
hooks. It uses the first batches of the run. Rows are written to a temporary folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory

from ...config.hook_specs import HookSpec
from ...config.record import RecordSpec
from ...config.schedule import STEP_PHASES
from ...errors import ConfigError, InstrumentError, Problem, user_code_location
from ...hooks.hook_timer import overhead_factor
from ...plan.cost import Cost, Forecast, firings_of
from ...tables.schemas import TABLES
from ..experiment import Experiment
from .profiling import SECONDS, TABLES_OF_ROWS, Profile, StepProfile, load_batches, profile_baseline, profile_hooks
from .size_estimates import bytes_on_disk

ROW_BYTES = 64  # approximate bytes per recorded tensor in addition to its values


def dry_run(experiment: Experiment) -> Forecast:
    """Estimate the cost of a run from a few of its steps.

    The steps change the experiment, so it cannot be used for training afterwards.

    Raises:
        ConfigError: A step fails. The message says whether it fails without hooks or with them.
    """
    without_scheduler = replace(experiment, scheduler=None)
    try:
        batches, loading = load_batches(experiment)
        baseline = profile_baseline(without_scheduler, batches, seconds=0.0)
    except Exception as error:
        raise ConfigError(_failure("model, task, data", "a step without hooks fails", error)) from error
    with TemporaryDirectory(prefix="instrument-dry-run-") as name:
        folder = Path(name)
        try:
            profile = profile_hooks(without_scheduler, batches, folder)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(_failure("hooks", "a step with these hooks fails", error)) from error
        baseline += profile_baseline(without_scheduler, batches, SECONDS / 2)
        return _result(experiment, profile, baseline, loading, folder)


def _result(
    experiment: Experiment, profile: Profile, baseline: Sequence[float], loading: float, folder: Path
) -> Forecast:
    """Compute the estimated cost of the run."""
    plan, length = experiment.plan, experiment.length
    firings = {name: firings_of(spec, length) for name, spec in plan.specs.items()}
    rows: dict[str, int] = {}  # By spec: rows per micro-step, or per step for kinds that act once per step.
    expected: dict[str, dict[str, float]] = {table: {} for table in ("tensors", *TABLES_OF_ROWS)}
    for name, spec in plan.specs.items():
        due = firings[name]
        measured = [each for each in profile.steps_with_rows if each.phase == spec.phase and each.step in due.steps]
        is_per_batch = spec.phase in STEP_PHASES and spec.definition.frequency == "micro_step"
        micro_steps = profile.micro_batches if is_per_batch else 1
        tensors = [size + ROW_BYTES for each in measured for size in each.tensor_bytes[name]]
        rows[name] = len(tensors) // max(1, len(measured)) // micro_steps
        expected["tensors"][name] = sum(tensors) * due.times / micro_steps / max(1, len(measured))
        for table in TABLES_OF_ROWS:
            count = min((each.rows[table][name] for each in measured), default=0) // micro_steps
            expected[table][name] = count * due.times
            rows[name] += count
    every = experiment.config.train.checkpoint.every
    checkpoints = experiment.steps / every if every else 0.0  # each of them closes the parts of all tables
    amounts = {table: [1] * profile.rows[table] for table in TABLES_OF_ROWS}
    amounts["tensors"] = [size + ROW_BYTES for size in profile.tensor_bytes]
    tables = [
        bytes_on_disk(folder, TABLES[table], amounts[table], of_specs, checkpoints)
        for table, of_specs in expected.items()
    ]
    of_steps = [name for name, spec in plan.specs.items() if spec.phase in STEP_PHASES]
    seconds, fixed = _seconds(profile, baseline, of_steps)
    cost = {
        name: Cost(
            len(due.steps),
            rows[name] * due.times,
            round(sum(sizes[name] for sizes in tables)),
            seconds.get(name, 0.0),
            _memory(plan.specs[name], name, profile),
        )
        for name, due in firings.items()
    }
    added = sum(spent.seconds * spent.firings / length.steps for spent in cost.values())
    without = loading + median(baseline)
    return Forecast(cost, without, without + fixed + added)


def _memory(spec: HookSpec, name: str, profile: Profile) -> int:
    """Return the memory of the tensors that a spec keeps, in bytes: those of one step, times the number of steps."""
    if not isinstance(spec, RecordSpec) or spec.keep is None:
        return 0
    return spec.keep * max((each.kept_bytes[name] for each in profile.steps_with_rows), default=0)


def _seconds(profile: Profile, baseline: Sequence[float], specs: Sequence[str]) -> tuple[dict[str, float], float]:
    """Return the time that each spec adds to its scheduled steps, and the time that hooks add to every step."""
    measured = [each for each in profile.steps if each.phase in STEP_PHASES]
    if not measured:
        return {}, 0.0
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
                max(0.0, step.hook_seconds - profile.unscheduled_seconds - sum(step.action_seconds.values()))
                * step.firings[name]
                / sum(step.firings.values())
                for step in steps_with_firings
            )
            spent[name] = factor * (fmean(step.action_seconds[name] for step in steps_with_firings) + outside_actions)
    return spent, factor * profile.unscheduled_seconds


def _usual(measured: Sequence[StepProfile]) -> StepProfile:
    """Return the medians over several measurements of one step. Medians suppress interruptions by other processes."""
    first = measured[0]
    seconds, hook_seconds = (median(getattr(each, name) for each in measured) for name in ("seconds", "hook_seconds"))
    action_seconds = {name: median(each.action_seconds[name] for each in measured) for name in first.firings}
    return replace(first, seconds=seconds, hook_seconds=hook_seconds, action_seconds=action_seconds)


def _failure(where: str, message: str, error: Exception) -> Problem:
    """Return the error for a step that failed."""
    description = str(error).strip()
    if not isinstance(error, InstrumentError):
        description = f"{type(error).__name__}: {description.splitlines()[0] if description else ''}"
    return Problem(where, f"{message}{user_code_location(error)}", given=description)
