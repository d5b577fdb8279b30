"""Proof that recording changes nothing: an experiment trained bare and with its record hooks, compared bit by bit."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..capture.probe import Probe
from ..sinks.memory import MemorySink
from ..spec.config import RunConfig
from ..spec.hooks import HookSpec
from ..spec.record import RecordSpec
from .device import process_state
from .experiment import prepare
from .loop import Progress, train


@dataclass(frozen=True)
class Fingerprint:
    """A training step, as digests: of the loss, of each gradient, weight and buffer, and of the random state."""

    loss: float | None
    gradients: Mapping[str, str]
    weights: Mapping[str, str]
    random_state: str


@dataclass(frozen=True)
class Difference:
    """Where two trainings part: the first step, what differs, the first layer or parameter, and the hook that does it."""

    step: int
    what: str
    where: str
    hook: str

    def __str__(self) -> str:
        place = f" at {self.where}" if self.where else ""
        return f"step {self.step}: {self.what} differs{place}, with hook {self.hook!r}"


@dataclass(frozen=True)
class Certificate:
    """What was compared, and what came of it.

    Attributes:
        steps: Training steps.
        hooks: The record hooks.
        left_out: Hooks that change values by design, which were not attached.
        tensors: Gradients, weights and buffers compared at each step.
        sites: Places at which record hooks were attached.
        rows: Rows that they recorded.
        difference: Where the trainings part; None where they are equal to the last bit.
    """

    steps: int
    hooks: tuple[str, ...]
    left_out: tuple[str, ...]
    tensors: int
    sites: int
    rows: int
    difference: Difference | None

    @property
    def holds(self) -> bool:
        """Whether recording changed nothing."""
        return self.difference is None


def verify(config: RunConfig) -> Certificate:
    """Train an experiment twice, bare and with its record hooks, and compare every step.

    Args:
        config: The experiment; its `train.steps` is how many steps are compared.

    Raises:
        ConfigError: The experiment cannot be built, or it has no record hooks.
    """
    recording = {name: spec for name, spec in config.hooks.items() if isinstance(spec, RecordSpec)}
    left_out = tuple(name for name in config.hooks if name not in recording)
    bare, _, _ = trace(config, {})
    observed, sites, rows = trace(config, recording)
    difference = None
    if (step := first_difference(bare, observed)) is not None:
        difference = _blame(config, recording, bare, step)
    tensors = len(bare[0].gradients) + len(bare[0].weights) if bare else 0
    return Certificate(len(bare), tuple(recording), left_out, tensors, sites, rows, difference)


def trace(config: RunConfig, hooks: Mapping[str, HookSpec]) -> tuple[list[Fingerprint], int, int]:
    """The steps of a training with these hooks, the number of sites, and of rows recorded."""
    steps: list[Fingerprint] = []
    with process_state(seed=config.seed, deterministic=config.deterministic):
        experiment = prepare(config.model_copy(update={"hooks": dict(hooks)}))
        sink = MemorySink()

        def fingerprint(progress: Progress) -> None:
            if progress.phase == "train":
                steps.append(take_fingerprint(experiment.model, progress.metrics["loss"]))

        probe = Probe(experiment.plan, sink, optimizer=experiment.optimizer, scaler=experiment.scaler, seed=config.seed)
        with probe:
            train(experiment, probe, fingerprint)
    return steps, len(experiment.plan.sites), sum(len(sink.rows[table]) for table in ("stats", "tensors"))


def take_fingerprint(model: torch.nn.Module, loss: float | None) -> Fingerprint:
    """The state of a model after a step, and of the random numbers."""
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    states = [torch.get_rng_state()] + [torch.cuda.get_rng_state(i) for i in range(torch.cuda.device_count())]
    return Fingerprint(
        loss,
        {name: digest(gradient) for name, gradient in gradients.items()},
        {name: digest(value) for name, value in model.state_dict(keep_vars=True).items()},
        digest(torch.cat(states)),
    )


def digest(tensor: Tensor) -> str:
    """BLAKE2b of a tensor's bytes: equal where, and as good as only where, all bits are."""
    plain = tensor.detach()
    flat = (plain.to_dense() if plain.layout != torch.strided else plain).cpu().contiguous().reshape(-1)
    return hashlib.blake2b(flat.view(torch.uint8).numpy().tobytes(), digest_size=16).hexdigest()


def first_difference(one: list[Fingerprint], other: list[Fingerprint]) -> int | None:
    """The first step at which two trainings differ; None where they do not."""
    for step, (left, right) in enumerate(zip(one, other, strict=True)):
        if not _same(left, right):
            return step
    return None


def _same(left: Fingerprint, right: Fingerprint) -> bool:
    is_nan = left.loss != left.loss and right.loss != right.loss
    return (is_nan or left.loss == right.loss) and replace(left, loss=None) == replace(right, loss=None)


def _blame(config: RunConfig, hooks: Mapping[str, HookSpec], bare: list[Fingerprint], step: int) -> Difference:
    """Attach one hook at a time, and see which of them makes the difference, and where it shows first."""
    short = config.model_copy(
        update={"train": config.train.model_copy(update={"steps": step + 1, "epochs": None, "eval_every": 0})}
    )
    for name, spec in hooks.items():
        alone, _, _ = trace(short, {name: spec})
        if not _same(bare[step], alone[step]):
            return Difference(step, *_what(bare[step], alone[step]), name)
    return Difference(step, "the training", "", "+".join(hooks))


def _what(left: Fingerprint, right: Fingerprint) -> tuple[str, str]:
    if left.loss != right.loss:
        return "loss", ""
    for what in ("gradients", "weights"):
        ours, theirs = getattr(left, what), getattr(right, what)
        for name in [*ours, *theirs]:
            if ours.get(name) != theirs.get(name):
                return what, name
    return "the random state", ""
