"""Comparison of the metrics and fingerprints of a replay with those of the run that it repeats, bit by bit."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds

from ...config.schedule import STEP_PHASES
from ...rules.step_rows import location_name
from ...storage.run_files import RunFiles
from ...storage.run_record import environment_differences

COMPARED = ("loss", "accuracy", "grad_norm", "lr")  # in the order in which a difference spreads
_MISSING = dict.fromkeys(COMPARED)
NOT_DETERMINISTIC = (
    "no difference of environment, data and code is known; the training may not be deterministic: an operation without a "
    "deterministic algorithm (set deterministic=true), or custom code with a state that no checkpoint contains, such as a counter "
    "or the time. python -m instrument.verify compares two trainings; instrument.diff of two replays with --ops names the operator"
)
Moment = tuple[int, bool, str]
"""The sort key of a row: the step or the number of completed steps, whether the row is a step, and the phase."""


@dataclass(frozen=True)
class ReplayDifference:
    """The first difference between a run and its replay: a metric, or the fingerprint of a tensor. A value is None if it is missing.

    For an evaluation or the probe batch, the step is the number of completed steps.
    """

    step: int
    phase: str
    metric: str
    recorded: float | None
    replayed: float | None

    def __str__(self) -> str:
        names = {"eval": "evaluation", "probe": "probe batch"}
        moment = f"{names[self.phase]} after {self.step} steps" if self.phase in names else f"step {self.step}"
        replayed, recorded = ("missing" if value is None else repr(value) for value in (self.replayed, self.recorded))
        return f"{moment}: {self.metric} is {replayed}, but was {recorded}"


@dataclass(frozen=True)
class ReplayCertificate:
    """The result of a replay; see `ReplaySource`.

    Attributes:
        stop: The step after the last one of the window.
        evaluations: The number of compared evaluations and passes of the probe batch.
        fingerprints: The number of compared fingerprints, which both recorded.
        difference: The first difference; None if all values are bit-identical. In a counterfactual, only values before
            `first_step` count.
        reasons: Likely reasons for the difference, the most likely one first.
        environment: All known differences of environment, data and code, also if the values are equal.
        effect: The first difference from `first_step` on; None if all values are equal.
        changes_left_out: The changes of `instrument.control` that the replay did not repeat; see `RepeatedChanges`.
        repeats_failure: Whether the replay ended with the error of the run; None if neither failed in the repeated steps.
    """

    source: str
    begin: int
    stop: int
    steps: int
    evaluations: int
    fingerprints: int
    difference: ReplayDifference | None
    reasons: tuple[str, ...]
    environment: tuple[str, ...]
    counterfactual: tuple[str, ...]
    first_step: int | None
    effect: ReplayDifference | None
    changes: tuple[str, ...]
    changes_left_out: tuple[str, ...]
    repeats_failure: bool | None

    @property
    def holds(self) -> bool:
        """Whether all values are bit-identical, except for the effect of a counterfactual. Without any, nothing is shown."""
        return self.difference is None and (self.steps > 0 or bool(self.counterfactual))


def certify_replay(source: Path, replay: Path, *, changes_evaluation: bool = False) -> ReplayCertificate:
    """Compare the metrics of a replay, which has ended, with the recorded ones.

    `changes_evaluation`: whether a counterfactual changes the evaluation before its first step.
    """
    info = RunFiles(replay).info()
    recorded, replayed = _metrics(source), _metrics(replay)
    entry, run = info["replay"], RunFiles(source).info()
    first_step = entry["first_step"]
    difference = effect = None
    steps = evaluations = 0
    made = [moment for moment in recorded if moment[1] and entry["begin"] <= moment[0] < entry["steps"][1]]
    for moment in sorted({*replayed, *made}):
        step, is_step, phase = moment
        if moment not in recorded:
            continue  # the step in which the run failed, or a counterfactual after its end
        mismatch = _first_difference(step, phase, recorded[moment], replayed.get(moment, _MISSING))
        affected = first_step is not None and (
            step > first_step or (step == first_step and (is_step or changes_evaluation))
        )
        if affected:
            effect = effect or mismatch
            continue
        if moment in replayed and any(recorded[moment][metric] is not None for metric in COMPARED):
            steps, evaluations = steps + is_step, evaluations + (not is_step)
        difference = difference or mismatch
    bits, bits_of_replay = _fingerprints(source), _fingerprints(replay)
    both = [key for key in bits if key in bits_of_replay and (first_step is None or key[0] < first_step)]
    other = next((key for key in both if bits[key] != bits_of_replay[key]), None)
    if other is not None and (difference is None or other[0] <= difference.step):
        name = f"the fingerprint of {location_name(*other[2:5])} ({' '.join(other[4:6])})"
        difference = ReplayDifference(other[0], other[1], name, bits[other], bits_of_replay[other])
    errors = [each["error"] if each["status"] == "failed" else None for each in (run, info)]
    last = max(step for step, is_step, _ in recorded if is_step)
    is_beyond = any(is_step and step > last for step, is_step, _ in replayed)
    has_failed = errors[1] is not None or (errors[0] is not None and is_beyond)
    environment = environment_differences(run, info)
    reasons = [*map(str, environment)]
    if difference is not None:
        is_missing = (difference.step, difference.phase in STEP_PHASES, difference.phase) not in replayed
        reasons += ["the replay ended before"] if is_missing else _reasons(difference, known=bool(environment))
    return ReplayCertificate(
        source=str(source),
        begin=entry["begin"],
        stop=entry["steps"][1],
        steps=steps,
        evaluations=evaluations,
        fingerprints=len(both),
        difference=difference,
        reasons=() if difference is None else tuple(reasons),
        environment=tuple(map(str, environment)),
        counterfactual=tuple(entry["counterfactual"]),
        first_step=first_step,
        effect=effect,
        changes=tuple(entry["changes"]),
        changes_left_out=tuple(entry["changes_left_out"]),
        repeats_failure=errors[0] == errors[1] if has_failed else None,
    )


def _reasons(difference: ReplayDifference, *, known: bool) -> list[str]:
    reasons = [] if known else [NOT_DETERMINISTIC]
    if difference.metric == "lr":
        reasons.append(
            "the loss and the gradients are equal, so the difference comes from the scheduler or the optimizer"
        )
    if difference.metric == "grad_norm":
        reasons.append("the loss is equal, so the difference comes from the backward pass")
    return reasons


def _metrics(folder: Path) -> dict[Moment, Mapping[str, float | None]]:
    rows: list[dict[str, Any]] = RunFiles(folder).read("metrics", ["step", "phase", "rank", *COMPARED]).to_pylist()
    return {(row["step"], row["phase"] in STEP_PHASES, row["phase"]): row for row in rows if row["rank"] == 0}


def _fingerprints(folder: Path) -> dict[tuple[Any, ...], int]:
    """Return the fingerprints of rank 0, in the order in which they were recorded.

    The keys are the step, the phase, the layer, the path, the kind, the role, and what else identifies a row.
    """
    key = ["step", "phase", "layer", "path", "kind", "role", "hook", "micro_step", "call", "backward", "recompute"]
    condition = ds.field("fingerprint").is_valid() & (ds.field("rank") == 0)
    rows = RunFiles(folder).read("stats", [*key, "fingerprint"], condition)
    cells = zip(*(rows[name].to_pylist() for name in (*key, "fingerprint")), strict=True)
    return {tuple(identity): value for *identity, value in cells}


def _first_difference(
    step: int, phase: str, recorded: Mapping[str, float | None], replayed: Mapping[str, float | None]
) -> ReplayDifference | None:
    for metric in COMPARED:
        if _bits(recorded[metric]) != _bits(replayed[metric]):
            return ReplayDifference(step, phase, metric, recorded[metric], replayed[metric])
    return None


def _bits(value: float | None) -> bytes | None:
    """Return the bytes of a float64. All NaN have the same bytes."""
    return None if value is None else struct.pack("<d", math.nan if math.isnan(value) else value)
