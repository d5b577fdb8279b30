"""Fingerprints of a training: those of all tensors of its state after each step and evaluation."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...config.experiment import RunConfig
from ...config.hook_specs import HookSpec
from ...probe.probe import Probe
from ...stats.fingerprint import fingerprint
from ...storage.memory import MemorySink
from ...values.dtensor import local_shard
from ...values.nested import iter_tensors
from ..device_and_seed import process_state
from ..distributed.process_group import Processes
from ..distributed.strategies import choose_strategy
from ..distributed.torchrun import synced_errors
from ..experiment import Experiment, prepare
from ..loop import Progress, train

# Times always differ; gradients are compared one by one.
IGNORED_METRICS = ("seconds", "samples_per_second", "grad_norm")

Key = tuple[str, str]
"""The quantity and its location: `("the gradient", "fc.weight")`. The location is empty if it exists only once."""


@dataclass(frozen=True)
class Fingerprint:
    """The fingerprints of the state after a training step or an evaluation; see `instrument.stats.fingerprint`.

    Attributes:
        step: The index of the training step, from 0. For an evaluation, the number of completed steps.
        bits: The fingerprints of metrics, gradients, parameters, buffers, optimizer state and random
            states. This is the order in which a difference spreads.
    """

    step: int
    phase: str
    bits: Mapping[Key, int]


class Trace(NamedTuple):
    """What a training gave.

    Attributes:
        parameters: The parameters of this process at the end, by name, on the CPU.
    """

    fingerprints: list[Fingerprint]
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
    """Train an experiment and compute a fingerprint after each step and each evaluation.

    Args:
        hooks: The hooks to attach instead of those in the configuration.
        processes: The processes of the training; the fingerprints are those of all of them. Default: None, a single process.
    """
    fingerprints: list[Fingerprint] = []
    with process_state(seed=config.seed, deterministic=config.deterministic):
        with synced_errors(processes):
            strategy = choose_strategy(config, processes)
            experiment = prepare(config.model_copy(update={"hooks": dict(hooks), "rules": {}}), strategy)
        sink = MemorySink()
        probe = Probe(
            experiment.plan,
            sink,
            optimizer=experiment.optimizers,
            scaler=experiment.scaler,
            seed=experiment.config.seed,
            ranks=experiment.strategy.ranks,
            print_line=lambda line: None,
        )

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
    """Compute the fingerprint of the present state."""
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
    """Return the fingerprint of the random states of PyTorch (all devices), Python and NumPy."""
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state(i) for i in range(torch.cuda.device_count()))]
    return _of_object((torch.cat(states).numpy(), random.getstate(), np.random.get_state(legacy=False)))


def _of_object(value: object) -> int:
    """Return the fingerprint of numbers and arrays: that of their pickled bytes."""
    return int(fingerprint(torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)))
