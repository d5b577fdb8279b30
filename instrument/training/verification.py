"""Fingerprints of a training, which `verify` compares without and with record hooks; and the comparison of a replay with its run.

There are fingerprints of the state after each step and evaluation, and of the result, for run.json. All comparisons are bit by bit.
"""

from __future__ import annotations

import hashlib
import math
import pickle
import random
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.dataset as ds
import torch
from pydantic_core import to_json
from torch import Tensor

from ..config.base import ObservationSpec
from ..config.experiment import RunConfig
from ..config.hook_specs import HookSpec
from ..config.schedule import STEP_PHASES
from ..errors import FingerprintError
from ..rules.step_rows import location_name
from ..stats.fingerprint import fingerprint
from ..stats.flatten import unreadable
from ..storage.memory import MemorySink
from ..storage.run_files import RunFiles
from ..storage.run_record import environment_differences
from ..storage.run_search import CERTIFICATE
from ..values.dtensor import local_shard
from ..values.nested import iter_tensors
from .distributed.process_group import Processes
from .distributed.strategies import choose_strategy
from .distributed.torchrun import synced_errors
from .environment import process_state
from .experiment import Experiment
from .loop import Metrics, Progress, train

# Times always differ; gradients are compared one by one.
IGNORED_METRICS = ("seconds", "samples_per_second", "grad_norm")

Key = tuple[str, str]
"""The quantity and its location: `("the gradient", "fc.weight")`. The location is empty if it exists only once."""
COMPARED = ("loss", "accuracy", "grad_norm", "lr")  # in the order in which a difference spreads
_MISSING = dict.fromkeys(COMPARED)
NOT_DETERMINISTIC = (
    "no difference of environment, data and code is known; the training may not be deterministic: an operation without a "
    "deterministic algorithm (set deterministic=true), or custom code with a state that no checkpoint contains, such as a counter "
    "or the time. python -m instrument.verify compares two trainings; instrument.diff of two replays with --ops names the operator"
)
CAUSES = {
    "lr": "the loss and the gradients are equal, so the difference comes from the scheduler or the optimizer",
    "grad_norm": "the loss is equal, so the difference comes from the backward pass",
}
Moment = tuple[int, bool, str]
"""The sort key of a row: the step or the number of completed steps, whether the row is a step, and the phase."""


@dataclass(frozen=True)
class Fingerprint:
    """The fingerprints of the state after a training step or an evaluation; see `instrument.stats.fingerprint`."""

    step: int  # the index of the training step, from 0; for an evaluation, the number of completed steps
    phase: str
    # Those of metrics, gradients, parameters, buffers, optimizer state and random states: the order in which a difference spreads.
    bits: Mapping[Key, int]


Trained = list[Fingerprint]
"""The fingerprints of a training, in order."""


class Trace(NamedTuple):
    """What a training gave. `parameters`: those of this process at the end, by name, on the CPU."""

    fingerprints: Trained
    sites: int
    rows: int
    parameters: Mapping[str, Tensor]


class _StopTrainingError(Exception):
    """The required number of fingerprints is reached."""


def trace(
    config: RunConfig,
    hooks: Mapping[str, HookSpec],
    max_fingerprints: int | None = None,
    *,
    processes: Processes | None = None,
) -> Trace:
    """Train an experiment with other hooks, and compute a fingerprint of all processes after each step and each evaluation."""
    fingerprints: list[Fingerprint] = []
    with process_state(seed=config.seed, deterministic=config.deterministic):
        with synced_errors(processes):
            strategy = choose_strategy(config, processes)
            experiment = Experiment(config.model_copy(update={"hooks": dict(hooks), "rules": {}}), strategy)
        sink = MemorySink()
        probe = experiment.probe(sink, ranks=experiment.strategy.ranks, print_line=lambda line: None)

        def append_fingerprint(progress: Progress) -> None:
            fingerprints.append(_fingerprint(experiment, progress))
            if len(fingerprints) == max_fingerprints:
                raise _StopTrainingError

        with suppress(_StopTrainingError), probe:
            train(experiment, probe, append_fingerprint)
    rows = sum(len(sink.rows[table]) for table in ("stats", "tensors"))
    if processes is not None:
        fingerprints = [joined(each) for each in zip(*processes.exchange(fingerprints), strict=True)]
    parameters = {name: local_shard(each.detach()).cpu() for name, each in experiment.model.named_parameters()}
    return Trace(fingerprints, len(experiment.plan.sites), rows, parameters)


def _fingerprint(experiment: Experiment, progress: Progress) -> Fingerprint:
    metrics = {
        (f"the {name}", ""): _of_object(value)
        for name, value in progress.metrics.items()
        if name not in IGNORED_METRICS
    }
    step = progress.step - 1 if progress.phase == "train" else progress.step
    tensors = {key: int(fingerprint(tensor)) for key, tensor in _tensors_of(experiment)}
    return Fingerprint(step, progress.phase, metrics | tensors | {("the random state", ""): _random_state()})


def joined(fingerprints: Sequence[Fingerprint]) -> Fingerprint:
    """Join the fingerprints of all processes after the same step, quantity by quantity."""
    bits = sorted(
        (index, rank, f"{what} of rank {rank}", where, number)
        for rank, one in enumerate(fingerprints)
        for index, ((what, where), number) in enumerate(one.bits.items())
    )
    return replace(fingerprints[0], bits={(what, where): number for _, _, what, where, number in bits})


def _tensors_of(experiment: Experiment) -> Iterator[tuple[Key, Tensor]]:
    """Yield all tensors of the training state, including buffers that are not in the state dict."""
    parameters = dict(experiment.model.named_parameters())
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            yield ("the gradient", name), parameter.grad
    for name, parameter in parameters.items():
        yield ("the parameter", name), parameter
    for name, buffer in experiment.model.named_buffers():
        yield ("the buffer", name), buffer
    for optimizer in experiment.optimizers:
        for name, parameter in parameters.items():
            for path, tensor in iter_tensors(optimizer.state.get(parameter, {})):
                yield ("the optimizer state", f"{name}, {path}"), tensor


def _random_state() -> int:
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state(i) for i in range(torch.cuda.device_count()))]
    return _of_object((torch.cat(states).numpy(), random.getstate(), np.random.get_state(legacy=False)))


def _of_object(value: object) -> int:
    """Return the fingerprint of numbers and arrays: that of their pickled bytes."""
    return int(fingerprint(torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)))


@dataclass(frozen=True)
class Difference:
    """The first difference between two trainings."""

    step: int  # the index of the first step that differs; for an evaluation, the number of completed steps
    what: str
    where: str  # the parameter or the buffer; empty if the quantity `what` exists only once
    hook: str  # the hook that causes the difference; empty if both trainings have no hooks
    phase: str = "train"

    def __str__(self) -> str:
        moment = f"step {self.step}" if self.phase == "train" else f"evaluation after {self.step} steps"
        location = f" at {self.where}" if self.where else ""
        hook = f", with hook {self.hook!r}" if self.hook else ""
        return f"{moment}: {self.what} differs{location}{hook}"


@dataclass(frozen=True)
class Certificate:
    """The result of a verification."""

    steps: int
    evaluations: int
    hooks: tuple[str, ...]
    left_out: tuple[str, ...]  # the names of the hooks that change values, which were not attached
    tensors: int  # the number of gradients, parameters, buffers and optimizer tensors compared after the last step
    sites: int
    rows: int
    difference: Difference | None  # between the trainings with and without hooks, if the latter is reproducible
    largest: tuple[float, str] | None = None  # absolute difference of a parameter at the end, and its name
    unrepeated: Difference | None = None  # between two trainings without hooks, if a second one was needed

    @property
    def holds(self) -> bool:
        return self.difference is None and self.unrepeated is None


def verify(config: RunConfig, processes: Processes | None = None) -> Certificate:
    """Train an experiment without hooks and with its record hooks, and compare each step and each evaluation.

    If they differ, the experiment is trained without hooks a second time. If these two trainings differ as well, the
    training is not reproducible, and the difference is not attributed to hooks. All processes call this function.
    """
    recording = {name: spec for name, spec in config.hooks.items() if isinstance(spec, ObservationSpec)}
    left_out = tuple(name for name in config.hooks if name not in recording)
    train_with = partial(trace, config, processes=processes)
    bare, hooked = train_with({}), train_with(recording)
    baseline, with_hooks = bare.fingerprints, hooked.fingerprints
    difference = unrepeated = largest = None
    if first_difference(baseline, with_hooks) is not None:
        largest = max(
            ((one - hooked.parameters[name]).abs().max().item(), name)
            for name, one in bare.parameters.items()
            if one.numel()
        )
        largest = largest if processes is None else max(processes.exchange(largest))
        unrepeated = first_difference(baseline, train_with({}).fingerprints)
        difference = None if unrepeated is not None else _find_cause(train_with, recording, baseline, with_hooks)
    steps = [fingerprint for fingerprint in baseline if fingerprint.phase == "train"]
    tensors = sum(bool(where) for _, where in steps[-1].bits)
    evaluations = len(baseline) - len(steps)
    return Certificate(
        *(len(steps), evaluations, tuple(recording), left_out, tensors),
        *(hooked.sites, hooked.rows, difference, largest, unrepeated),
    )


def first_difference(first: Trained, second: Trained, hook: str = "") -> Difference | None:
    """Return the first difference between two trainings, with the hook to report as its cause; None if they are equal."""
    for left, right in zip_longest(first, second):
        if left is None or right is None:
            return Difference((left or right).step, "the number of steps", "", hook, (left or right).phase)
        for what, where in dict.fromkeys([*left.bits, *right.bits]):
            if left.bits.get((what, where)) != right.bits.get((what, where)):
                return Difference(left.step, what, where, hook, left.phase)
    return None


def _find_cause(
    train_with: Callable[..., Trace], hooks: Mapping[str, HookSpec], baseline: Trained, with_hooks: Trained
) -> Difference | None:
    """Attach one hook at a time to find the hook that causes the difference. `train_with`: see `trace`."""
    pairs = enumerate(zip_longest(baseline, with_hooks), 1)
    max_fingerprints = next(number for number, (one, other) in pairs if one != other)
    for name, spec in hooks.items():
        with_one_hook = train_with({name: spec}, max_fingerprints).fingerprints
        if (difference := first_difference(baseline[: len(with_one_hook)], with_one_hook, name)) is not None:
            return difference
    return first_difference(baseline, with_hooks, "+".join(hooks))


def training_fingerprint(experiment: Experiment, folder: Path, processes: Processes | None) -> str:
    """Return two numbers of 64 bits, hexadecimal: that of the losses in the table `metrics`, and that of all parameters and buffers.

    All processes have to call it, after the last rows were written. The second number covers those of all.
    """
    named = [*experiment.model.named_parameters(), *experiment.model.named_buffers()]
    weights = repr([(name, int(fingerprint(tensor))) for name, tensor in named if unreadable(tensor) is None])
    every = [weights] if processes is None else processes.exchange(weights)
    metrics = RunFiles(folder).read("metrics", ["step", "phase", "loss"])
    rows = zip(*(metrics[name].to_pylist() for name in metrics.column_names), strict=True)
    losses = repr(sorted(rows, key=lambda row: row[:2]))
    return "-".join(hashlib.blake2b(text.encode(), digest_size=8).hexdigest() for text in (losses, "".join(every)))


def check_fingerprint(expected: str, found: str) -> None:
    pairs = zip(("losses", "parameters and buffers"), expected.split("-"), found.split("-"), strict=True)
    if differing := [part for part, one, other in pairs if one != other]:
        raise FingerprintError(
            f"train.fingerprint: the {' and the '.join(differing)} of the training differ from the expected ones\n"
            f"    given    {expected}\n    found    {found}\n"
            "    fix      instrument diff names the first difference to an earlier run"
        )


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
    """The result of a replay; see `Replay`."""

    source: str
    begin: int
    stop: int  # the step after the last one of the window
    steps: int
    evaluations: int  # the number of compared evaluations and passes of the probe batch
    fingerprints: int  # the number of compared fingerprints, which both recorded
    difference: ReplayDifference | None  # the first one; in a counterfactual, only values before `first_step` count
    reasons: tuple[str, ...]  # likely reasons for the difference, the most likely one first
    environment: tuple[str, ...]  # all known differences of environment, data and code, also if the values are equal
    counterfactual: tuple[str, ...]
    first_step: int | None
    effect: ReplayDifference | None  # the first difference from `first_step` on; None if all values are equal
    changes: tuple[str, ...]
    changes_left_out: tuple[str, ...]  # see `Replay`
    repeats_failure: bool | None  # whether the replay ended with the error of the run; None if neither failed

    @property
    def holds(self) -> bool:
        """Whether all values are bit-identical, except for the effect of a counterfactual. Without any, nothing is shown."""
        return self.difference is None and (self.steps > 0 or bool(self.counterfactual))


def write_certificate(certificate: Certificate | ReplayCertificate, folder: Path) -> str:
    """Write a certificate to a folder, and return its JSON, which has no NaN: such numbers are texts."""
    content = {**asdict(certificate), "holds": certificate.holds}
    text = to_json(content, indent=2, inf_nan_mode="strings").decode()
    (folder / CERTIFICATE).write_text(f"{text}\n")
    return text


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
        pairs = ((name, recorded[moment][name], replayed.get(moment, _MISSING)[name]) for name in COMPARED)
        differences = (ReplayDifference(step, phase, *pair) for pair in pairs if _bits(pair[1]) != _bits(pair[2]))
        mismatch = next(differences, None)
        begins = step == first_step and (is_step or changes_evaluation)
        if first_step is not None and (step > first_step or begins):
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
        if is_missing or not environment:
            reasons.append("the replay ended before" if is_missing else NOT_DETERMINISTIC)
        if not is_missing and difference.metric in CAUSES:
            reasons.append(CAUSES[difference.metric])
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


def _metrics(folder: Path) -> dict[Moment, Metrics]:
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


def _bits(value: float | None) -> bytes | None:
    """Return the bytes of a float64. All NaN have the same bytes."""
    return None if value is None else struct.pack("<d", math.nan if math.isnan(value) else value)
