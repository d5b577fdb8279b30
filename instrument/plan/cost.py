"""What a plan costs: how often each spec is due, and what that comes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..spec.hooks import HookSpec
from ..spec.schedule import Evaluations, common


@dataclass(frozen=True)
class Length:
    """How long a run is.

    Attributes:
        steps: Its steps.
        accumulate: Micro-batches in a step.
        epoch_batches: Batches in an epoch; the last step of an epoch takes what is left of them.
        evaluations: When it evaluates.
        eval_batches: The batches of an evaluation.
    """

    steps: int
    accumulate: int
    epoch_batches: int
    evaluations: Evaluations
    eval_batches: int

    @property
    def epoch_steps(self) -> int:
        """Steps in an epoch."""
        return -(-self.epoch_batches // self.accumulate)

    def micro_steps(self, steps: Sequence[int]) -> int:
        """Micro-batches in these steps together."""
        per_epoch = self.epoch_steps
        missing = per_epoch * self.accumulate - self.epoch_batches
        ends = range(per_epoch - 1, self.steps, per_epoch)
        shorter = len(common(steps, ends)) if isinstance(steps, range) else sum(step in ends for step in steps)
        return len(steps) * self.accumulate - missing * shorter


@dataclass(frozen=True)
class Cost:
    """What one spec costs.

    Attributes:
        firings: Steps, or evaluations, at which it is due.
        rows_per_step: Rows in each of them, the last step of an epoch aside, which may have fewer.
        rows: Rows in all.
        bytes: Bytes in all, on disk.
        seconds: What it adds to a step at which it is due; 0 where it is for evaluations.
    """

    firings: int
    rows_per_step: int
    rows: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Forecast:
    """What a run will cost.

    Attributes:
        cost: By spec.
        bare: What a step takes without hooks, in seconds; to load its batches is part of it.
        hooked: What it will take with them, on average over the run's steps.
    """

    cost: dict[str, Cost]
    bare: float
    hooked: float

    @property
    def slowdown(self) -> float:
        """By which share of itself a step becomes longer."""
        return self.hooked / self.bare - 1.0

    def share(self, name: str, steps: int) -> float:
        """What one spec adds to that, in a run of so many steps."""
        return self.cost[name].seconds * self.cost[name].firings / steps / self.bare


@dataclass(frozen=True)
class Firings:
    """When a spec is due in a run of some length.

    Attributes:
        steps: The steps at which it is due; of a spec for evaluations, the numbers of steps that were done before them.
        times: How often it acts on each of its tensors in all: once a micro-batch, or once a step around the optimizer.
        times_per_step: How often in one step of whole length.
    """

    steps: Sequence[int]
    times: int
    times_per_step: int


def firings_of(spec: HookSpec, length: Length) -> Firings:
    """When a spec is due in a run of that length."""
    if spec.phase == "eval":
        steps = length.evaluations.among(spec.schedule)
        return Firings(steps, len(steps) * length.eval_batches, length.eval_batches)
    steps = spec.schedule.among(range(length.steps))
    if spec.definition.rhythm == "occasion":
        return Firings(steps, 0, 0)
    if spec.definition.rhythm == "step":
        stateless = spec.kind == "step_pre" and spec.tensor_role.startswith("state.") and 0 in steps
        return Firings(steps, len(steps) - stateless, 1)  # before its first step an optimizer has no state
    return Firings(steps, length.micro_steps(steps), length.accumulate)
