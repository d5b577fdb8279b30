"""The number of rows of the tables with one row per sample: `samples` and `generated`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..plan.cost import firings_of
from ..spec.schedule import STEP_PHASES, Schedule, common
from ..training.experiment import Experiment


def sample_rows(experiment: Experiment, tensors: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Return the number of rows that a run writes to the tables `samples` and `generated`.

    Args:
        experiment: The experiment.
        tensors: By spec, one entry for each tensor that it recorded in the dry run.

    Returns:
        Rows by table, over all processes.
    """
    plan, length = experiment.plan, experiment.length
    scheduled: dict[str, list[Sequence[int]]] = {phase: [] for phase in experiment.inferred_by_phase}
    for name, spec in plan.specs.items():
        # The probe batch runs if a hook of its phase is scheduled, also one without tensors.
        is_named = experiment.config.data.ids == "all" and spec.phase == "probe"
        if is_named or (tensors[name] and spec.definition.frequency == "micro_step"):
            scheduled[spec.phase].append(firings_of(spec, length).steps)
    generated = 0
    for phase in scheduled:
        if phase != "probe":
            evaluations = length.evaluations.steps_in(Schedule(phase="eval"))
            steps = evaluations if phase == "eval" else range(length.steps)
            if experiment.config.data.ids == "all":
                scheduled[phase] = [steps]
            if phase in experiment.generating_phases:
                generated += _samples_in(experiment, phase, steps)
    samples = sum(_samples_in_any(experiment, phase, schedules) for phase, schedules in scheduled.items())
    return {"samples": samples, "generated": generated}


def _samples_in(experiment: Experiment, phase: str, steps: Sequence[int]) -> int:
    """Return the number of samples in all batches of these steps, evaluations, or passes of the probe batch."""
    length, batches = experiment.length, experiment.batches
    if phase == "eval":
        return len(steps) * (0 if experiment.eval_loader is None else experiment.eval_loader.length)
    if phase not in STEP_PHASES:
        return len(steps) * (0 if experiment.probe_batch is None else experiment.probe_batch.samples)
    missing = batches.micro_batches_per_epoch * batches.batch_size - batches.length  # in the last batch of an epoch
    return length.micro_steps(steps) * batches.batch_size - missing * length.epoch_ends(steps)


def _samples_in_any(experiment: Experiment, phase: str, schedules: Sequence[Sequence[int]]) -> int:
    """Return the number of samples in the steps that at least one schedule contains, without iterating over ranges."""
    distinct: list[Sequence[int]] = []
    for steps in sorted(schedules, key=len, reverse=True):
        if not any(len(_common(larger, steps)) == len(steps) for larger in distinct):
            distinct.append(steps)
    if not distinct:
        return 0
    first, *others = distinct
    in_both = [_common(first, each) for each in others]
    return (
        _samples_in(experiment, phase, first)
        + _samples_in_any(experiment, phase, others)
        - _samples_in_any(experiment, phase, in_both)
    )


def _common(one: Sequence[int], other: Sequence[int]) -> Sequence[int]:
    """Return the steps that two schedules contain."""
    if isinstance(one, range) and isinstance(other, range):
        return common(one, other)
    listed, rest = (other, one) if isinstance(one, range) else (one, other)
    return [step for step in listed if step in rest]
