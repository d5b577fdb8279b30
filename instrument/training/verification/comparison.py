"""Comparison of trainings without and with record hooks, bit by bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest

from ...config.base import ObservationSpec
from ...config.experiment import RunConfig
from ...config.hook_specs import HookSpec
from ..distributed.process_group import Processes
from .fingerprints import Fingerprint, trace


@dataclass(frozen=True)
class Difference:
    """The first difference between two trainings.

    Attributes:
        step: The index of the first step that differs. For an evaluation, the number of completed steps.
        what: The first quantity that differs, such as `the loss` or `the gradient`.
        where: The parameter or the buffer; empty if the quantity exists only once.
        hook: The hook that causes the difference; empty if both trainings have no hooks.
        phase: `train` (default) or `eval`.
    """

    step: int
    what: str
    where: str
    hook: str
    phase: str = "train"

    def __str__(self) -> str:
        moment = f"step {self.step}" if self.phase == "train" else f"evaluation after {self.step} steps"
        location = f" at {self.where}" if self.where else ""
        hook = f", with hook {self.hook!r}" if self.hook else ""
        return f"{moment}: {self.what} differs{location}{hook}"


@dataclass(frozen=True)
class Certificate:
    """The result of a verification.

    Attributes:
        left_out: The names of the hooks that change values. They were not attached.
        tensors: The number of gradients, parameters, buffers and optimizer tensors compared after the last step.
        difference: The first difference between the trainings with and without hooks. None if they are bit-identical,
            or if the training without hooks is not reproducible.
        largest: The largest absolute difference of a parameter at the end, and the parameter; None if nothing differs.
        unrepeated: The first difference between two trainings without hooks. None if they are bit-identical, or if a
            second training was not needed.
    """

    steps: int
    evaluations: int
    hooks: tuple[str, ...]
    left_out: tuple[str, ...]
    tensors: int
    sites: int
    rows: int
    difference: Difference | None
    largest: tuple[float, str] | None = None
    unrepeated: Difference | None = None

    @property
    def holds(self) -> bool:
        """Whether recording changed nothing."""
        return self.difference is None and self.unrepeated is None


def verify(config: RunConfig, processes: Processes | None = None) -> Certificate:
    """Train an experiment without hooks and with its record hooks, and compare each step and each evaluation.

    If they differ, the experiment is trained without hooks a second time. If these two trainings differ as well, the
    training is not reproducible, and the difference is not attributed to hooks.

    Args:
        config: The experiment. `train.steps` is the number of compared steps.
        processes: The processes that train it; all of them call this function and return the same. Default: None, a single process.
    """
    recording = {name: spec for name, spec in config.hooks.items() if isinstance(spec, ObservationSpec)}
    left_out = tuple(name for name in config.hooks if name not in recording)
    bare, hooked = trace(config, {}, processes=processes), trace(config, recording, processes=processes)
    baseline, with_hooks = bare.fingerprints, hooked.fingerprints
    difference = unrepeated = largest = None
    if first_difference(baseline, with_hooks) is not None:
        largest = max(
            ((one - hooked.parameters[name]).abs().max().item(), name)
            for name, one in bare.parameters.items()
            if one.numel()
        )
        largest = largest if processes is None else max(processes.exchange(largest))
        unrepeated = first_difference(baseline, trace(config, {}, processes=processes).fingerprints)
        difference = None if unrepeated is not None else _find_cause(config, recording, baseline, with_hooks, processes)
    steps = [fingerprint for fingerprint in baseline if fingerprint.phase == "train"]
    tensors = sum(bool(where) for _, where in steps[-1].bits)
    evaluations = len(baseline) - len(steps)
    return Certificate(
        *(len(steps), evaluations, tuple(recording), left_out, tensors),
        *(hooked.sites, hooked.rows, difference, largest, unrepeated),
    )


def first_difference(first: list[Fingerprint], second: list[Fingerprint], hook: str = "") -> Difference | None:
    """Return the first difference between two trainings; None if they are equal.

    Args:
        hook: The name of the hook to report as the cause. Default: empty.
    """
    for left, right in zip_longest(first, second):
        if left is None or right is None:
            return Difference((left or right).step, "the number of steps", "", hook, (left or right).phase)
        for what, where in dict.fromkeys([*left.bits, *right.bits]):
            if left.bits.get((what, where)) != right.bits.get((what, where)):
                return Difference(left.step, what, where, hook, left.phase)
    return None


def _find_cause(
    config: RunConfig,
    hooks: Mapping[str, HookSpec],
    baseline: list[Fingerprint],
    with_hooks: list[Fingerprint],
    processes: Processes | None,
) -> Difference | None:
    """Attach one hook at a time to find the hook that causes the difference."""
    max_fingerprints = next(
        number for number, pair in enumerate(zip_longest(baseline, with_hooks), 1) if pair[0] != pair[1]
    )
    for name, spec in hooks.items():
        with_one_hook = trace(config, {name: spec}, max_fingerprints, processes=processes).fingerprints
        if (difference := first_difference(baseline[: len(with_one_hook)], with_one_hook, name)) is not None:
            return difference
    return first_difference(baseline, with_hooks, "+".join(hooks))
