"""Proof that recording changes nothing: an experiment trained without and with its record hooks, compared bit by bit."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import zip_longest
from types import new_class
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..capture.probe import Probe
from ..nested import leaves
from ..sinks.memory import MemorySink
from ..spec.config import RunConfig
from ..spec.hooks import HookSpec
from ..spec.record import RecordSpec
from .device import process_state
from .experiment import Experiment, prepare
from .loop import Progress, train

UNCOMPARED = ("seconds", "samples_per_second", "grad_norm")  # times differ always; gradients are compared one by one

Key = tuple[str, str]
"""What a digest is of, and where: `("the gradient", "fc.weight")`; the second is empty where there is only one."""


@dataclass(frozen=True)
class Fingerprint:
    """The state after a training step or an evaluation.

    Attributes:
        step: The training step, from 0; of an evaluation, the number of steps before it.
        phase: `train` or `eval`.
        digests: Of the outputs of an evaluation, the metrics, gradients, parameters, buffers, the state of the optimizer, and
            random states: in this order, in which a difference spreads.
    """

    step: int
    phase: str
    digests: Mapping[Key, str]


@dataclass(frozen=True)
class Difference:
    """Where two trainings part.

    Attributes:
        step: The first step that differs; of an evaluation, the number of steps before it.
        what: What differs first: `the loss`, `the gradient`, ...
        where: The parameter, the buffer, or the call of the model in an evaluation; empty where there is only one.
        hook: The hook that makes the difference; empty where both trainings have none.
        phase: `train` or `eval`.
    """

    step: int
    what: str
    where: str
    hook: str
    phase: str = "train"

    def __str__(self) -> str:
        when = f"step {self.step}" if self.phase == "train" else f"evaluation after {self.step} steps"
        place = f" at {self.where}" if self.where else ""
        hook = f", with hook {self.hook!r}" if self.hook else ""
        return f"{when}: {self.what} differs{place}{hook}"


@dataclass(frozen=True)
class Certificate:
    """What was compared, and the result.

    Attributes:
        steps: Training steps.
        evaluations: Evaluations.
        hooks: The record hooks.
        left_out: Hooks that change values by design, which were not attached.
        tensors: Gradients, parameters, buffers and tensors of the optimizer that were compared after the last step.
        sites: Places at which record hooks were attached.
        rows: Rows that they recorded.
        difference: Where the training with hooks parts from the one without; None where they are equal to the last bit, or
            where the training without hooks does not repeat.
        unrepeated: Where two trainings without hooks part; None where they are equal, or no second one was needed.
    """

    steps: int
    evaluations: int
    hooks: tuple[str, ...]
    left_out: tuple[str, ...]
    tensors: int
    sites: int
    rows: int
    difference: Difference | None
    unrepeated: Difference | None = None

    @property
    def holds(self) -> bool:
        """Whether recording changed nothing."""
        return self.difference is None and self.unrepeated is None


def verify(config: RunConfig) -> Certificate:
    """Train an experiment without hooks and with its record hooks, and compare every step and every evaluation.

    Where the two differ, it is trained without hooks once more: a difference between those two is not made by hooks.

    Args:
        config: The experiment; its `train.steps` is how many steps are compared.

    Raises:
        ConfigError: The experiment cannot be built.
    """
    recording = {name: spec for name, spec in config.hooks.items() if isinstance(spec, RecordSpec)}
    left_out = tuple(name for name in config.hooks if name not in recording)
    baseline, _, _ = trace(config, {})
    observed, sites, rows = trace(config, recording)
    difference = unrepeated = None
    if first_difference(baseline, observed) is not None:
        unrepeated = first_difference(baseline, trace(config, {})[0])
        difference = None if unrepeated is not None else _blame(config, recording, baseline, observed)
    steps = [fingerprint for fingerprint in baseline if fingerprint.phase == "train"]
    tensors = sum(bool(where) for _, where in steps[-1].digests)
    evaluations = len(baseline) - len(steps)
    return Certificate(
        len(steps), evaluations, tuple(recording), left_out, tensors, sites, rows, difference, unrepeated
    )


class _EnoughError(Exception):
    """The fingerprints that are needed were taken."""


def trace(
    config: RunConfig, hooks: Mapping[str, HookSpec], most: int | None = None
) -> tuple[list[Fingerprint], int, int]:
    """Train an experiment and take a fingerprint after each step and each evaluation.

    Args:
        config: The experiment.
        hooks: The hooks in place of its own.
        most: The number of fingerprints after which the training is broken off; None: none.

    Returns:
        The fingerprints, the number of sites, and the number of rows recorded.
    """
    taken: list[Fingerprint] = []
    with process_state(seed=config.seed, deterministic=config.deterministic):
        experiment = prepare(config.model_copy(update={"hooks": dict(hooks)}))
        sink = MemorySink()
        probe = _WatchingProbe(experiment, sink)

        def take(progress: Progress) -> None:
            taken.append(_fingerprint(experiment, progress, probe.outputs))
            probe.outputs.clear()
            if len(taken) == most:
                raise _EnoughError

        with suppress(_EnoughError), probe:
            train(experiment, probe, take)
    return taken, len(experiment.plan.sites), sum(len(sink.rows[table]) for table in ("stats", "tensors"))


class _WatchingProbe(Probe):
    """The probe of an experiment, which digests the outputs of the model in evaluations.

    Attributes:
        outputs: By call, the digests of each tensor of the output.
    """

    def __init__(self, experiment: Experiment, sink: MemorySink) -> None:
        self.model = experiment.callable
        self.outputs: list[dict[str, str]] = []
        super().__init__(
            experiment.plan,
            sink,
            optimizer=experiment.optimizers,
            scaler=experiment.scaler,
            seed=experiment.config.seed,
        )

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        with _watched(self.model, self.outputs), super().evaluating():
            yield


class _Watched:
    """Digests the outputs of a model; put in front of the model's own class, of which the model stays an instance.

    A hook would not do: where a module has hooks, PyTorch may compute it another way.
    """

    own_class: type[nn.Module]
    outputs: list[dict[str, str]]

    def __init_subclass__(cls) -> None:
        """Keep the model's own class from registering the new one."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        output = super().__call__(*arguments, **named)  # type: ignore[misc]
        self.outputs.append({path: digest(tensor) for path, tensor in leaves(output)})
        return output

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy the model as an instance of its own class."""
        watched = type(self)
        object.__setattr__(self, "__class__", self.own_class)
        try:
            return self.__reduce_ex__(protocol)
        finally:
            object.__setattr__(self, "__class__", watched)


@contextmanager
def _watched(model: nn.Module, outputs: list[dict[str, str]]) -> Iterator[None]:
    """Inside, the digests of the model's outputs are added to `outputs`, one entry a call."""
    own = type(model)
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "own_class": own, "outputs": outputs}
    watched = new_class(own.__name__, (_Watched, own), exec_body=lambda body: body.update(names))
    object.__setattr__(model, "__class__", watched)  # a compiled model would pass it on to the model inside
    try:
        yield
    finally:
        object.__setattr__(model, "__class__", own)


def _fingerprint(experiment: Experiment, progress: Progress, calls: list[dict[str, str]]) -> Fingerprint:
    metrics = {(f"the {name}", ""): repr(value) for name, value in progress.metrics.items() if name not in UNCOMPARED}
    outputs = {
        ("the output", f"call {call}" + (f", {path}" if path else "")): found
        for call, tensors in enumerate(calls)
        for path, found in tensors.items()
    }
    step = progress.step - 1 if progress.phase == "train" else progress.step
    tensors = {key: digest(tensor) for key, tensor in _tensors_of(experiment)}
    return Fingerprint(step, progress.phase, outputs | metrics | tensors | {("the random state", ""): _random_state()})


def _tensors_of(experiment: Experiment) -> Iterator[tuple[Key, Tensor]]:
    """Every tensor that a training goes on from; buffers that no state dict has are among them."""
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
            for path, tensor in leaves(optimizer.state.get(parameter, {})):
                yield ("the optimizer's state", f"{name}, {path}"), tensor


def _random_state() -> str:
    """One digest of the generators of PyTorch, on each device, Python and NumPy."""
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state(i) for i in range(torch.cuda.device_count()))]
    return digest(torch.cat(states)) + _hash(repr((random.getstate(), np.random.get_state(legacy=False))).encode())


def digest(tensor: Tensor) -> str:
    """BLAKE2b of a tensor's bytes: equal where, and as good as only where, all bits are."""
    plain = tensor.detach()
    flat = (plain.to_dense() if plain.layout != torch.strided else plain).cpu().contiguous().reshape(-1)
    return _hash(flat.resolve_conj().resolve_neg().view(torch.uint8).numpy().tobytes())


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def first_difference(one: list[Fingerprint], other: list[Fingerprint], hook: str = "") -> Difference | None:
    """Where two trainings part, with the hook that tells them apart; None where they are equal."""
    for left, right in zip_longest(one, other):
        if left is None or right is None:
            return Difference((left or right).step, "the number of steps", "", hook, (left or right).phase)
        for what, where in dict.fromkeys([*left.digests, *right.digests]):
            if left.digests.get((what, where)) != right.digests.get((what, where)):
                return Difference(left.step, what, where, hook, left.phase)
    return None


def _blame(
    config: RunConfig, hooks: Mapping[str, HookSpec], baseline: list[Fingerprint], observed: list[Fingerprint]
) -> Difference | None:
    """Attach one hook at a time, and see which of them makes the difference."""
    most = next(number for number, pair in enumerate(zip_longest(baseline, observed), 1) if pair[0] != pair[1])
    for name, spec in hooks.items():
        alone, _, _ = trace(config, {name: spec}, most)
        if (difference := first_difference(baseline[: len(alone)], alone, name)) is not None:
            return difference
    return first_difference(baseline, observed, "+".join(hooks))
