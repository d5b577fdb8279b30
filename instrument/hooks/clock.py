"""What all hooks of a probe share: the current step and phase, the time that hooks take, and the tensors of `keep_as`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean, median
from threading import get_ident
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..actions.base import KeptTensors, NotKeptError, SampleIds, StepContext
from .distributed_scope import Parallel
from .mesh_layout import MeshLayout

# Measured with three networks, for several minutes each.
USUAL_FACTOR, FACTOR_SPREAD, MAX_FACTOR = 1.25, 0.15, 5.0

# A step that deviates from the median by more than this multiple of the median deviation was interrupted.
OUTLIER_DEVIATIONS = 5.0


def overhead_factor(recording: Sequence[float], paused: Sequence[float], measured: float) -> float:
    """Estimate the ratio of the real cost of hooks to the time measured inside them.

    Hooks also evict data from the caches, which slows down the rest of a step. The real cost is the difference of two
    much larger durations and therefore uncertain. The result is the mean of the measured and the usual ratio, weighted
    by their precision.

    Args:
        recording: Durations of steps with hooks, in seconds.
        paused: Durations of comparable steps without hooks, in seconds.
        measured: The time measured inside the hooks per step, in seconds, minus that of a step without hooks.

    Returns:
        The ratio, from 1 to `MAX_FACTOR`.
    """
    if min(len(recording), len(paused)) < 3 or measured <= 0.0:
        return USUAL_FACTOR
    ratio = (median(recording) - median(paused)) / measured
    noise = [robust_variance(seconds) / len(seconds) for seconds in (recording, paused)]
    variance = sum(noise) / measured**2 + 1e-9
    usual_weight, ratio_weight = 1.0 / FACTOR_SPREAD**2, 1.0 / variance
    factor = (USUAL_FACTOR * usual_weight + ratio * ratio_weight) / (usual_weight + ratio_weight)
    return min(max(factor, 1.0), MAX_FACTOR)


def robust_variance(seconds: Collection[float]) -> float:
    """Return the variance of step durations without outliers, which do not affect a median."""
    middle = median(seconds)
    median_deviation = median(abs(duration - middle) for duration in seconds)
    regular = [duration for duration in seconds if abs(duration - middle) <= OUTLIER_DEVIATIONS * median_deviation]
    mean = fmean(regular)
    return fmean((duration - mean) ** 2 for duration in regular)


class HookTimer:
    """A timer for hooks, in seconds. Nested hooks are counted once. `seconds` includes the `action_seconds` of each site."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.action_seconds: Counter[Any] = Counter()
        self.firings: Counter[Any] = Counter()
        self._depth = 0
        self._started_at = 0.0

    def __enter__(self) -> None:
        if not self._depth:
            self._started_at = time.perf_counter()
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if not self._depth:
            self.seconds += time.perf_counter() - self._started_at

    @property
    def is_running(self) -> bool:
        return self._depth > 0

    def lap(self) -> None:
        """Add the time of the current measurement so far to the total."""
        if self._depth:
            now = time.perf_counter()
            self.seconds += now - self._started_at
            self._started_at = now

    @contextmanager
    def measure_time(self, attached: Any) -> Iterator[None]:
        started_at = time.perf_counter()
        with self:
            yield
        self.action_seconds[attached] += time.perf_counter() - started_at  # type: ignore[assignment]

    @contextmanager
    def measure_action(self, attached: Any) -> Iterator[None]:
        """Measure the action of a site, and count the firing."""
        with self.measure_time(attached):
            yield
        self.firings[attached] += 1

    def reset(self) -> None:
        self.seconds = 0.0
        self.action_seconds.clear()
        self.firings.clear()


class Kept(NamedTuple):
    """A kept tensor. `has_lost_graph`: whether it belongs to the first pass of a reentrant checkpoint, which has no graph."""

    tensor: Tensor
    has_lost_graph: bool


class TensorStore:
    """The tensors that hooks with `keep_as` kept in a step, by name and location, and which of them a hook function may use.

    A pass that activation checkpointing recomputes has its own tensors, so an intervention inside a checkpoint cannot use kept ones.
    Gradients are not recomputed: their hooks use the tensors of the original pass.
    """

    def __init__(self) -> None:
        self._by_thread: dict[int, dict[str, dict[str, Kept]]] = {}

    def clear(self) -> None:
        self._by_thread.clear()

    @property
    def original(self) -> dict[str, dict[str, Kept]]:
        """The kept tensors. Those of this thread take precedence over those of other threads."""
        own = self._by_thread.get(get_ident(), {})
        if own and len(self._by_thread) == 1:
            return own
        kept: dict[str, dict[str, Kept]] = {}
        for by_name in (*self._by_thread.copy().values(), own):
            for name in [*by_name]:
                kept.setdefault(name, {}).update(by_name[name])
        return kept

    def keep(self, name: str, location: str, tensor: Tensor, *, has_lost_graph: bool) -> None:
        """Keep a copy of a tensor, since it may be modified in place later."""
        kept = self._by_thread.setdefault(get_ident(), {}).setdefault(name, {})
        kept[location] = Kept(tensor.clone(), has_lost_graph)

    def all(self) -> KeptTensors:
        """Return the tensors of the original pass."""
        return KeptTensors({name: _tensors(by_location) for name, by_location in self.original.items()})

    def for_intervention(self, *, in_checkpoint: bool) -> KeptTensors:
        """Return the tensors that an intervention in a forward pass may use. The others raise an error when it uses them.

        Args:
            in_checkpoint: Whether activation checkpointing recomputes this part of the pass, now or later.
        """
        needs_graph = torch.is_grad_enabled()
        result = KeptTensors()
        for name, by_location in self.original.items():
            refused = {at for at, kept in by_location.items() if in_checkpoint or (needs_graph and kept.has_lost_graph)}
            tensors = _tensors(by_location)
            result[name] = _UsableTensors(name, tensors, refused) if refused else tensors
        return result


class _UsableTensors(Mapping[str, Tensor]):
    """The tensors of one name, some of which cannot be used."""

    def __init__(self, name: str, tensors: dict[str, Tensor], refused: set[str]) -> None:
        self.name, self.tensors, self.refused = name, tensors, refused

    def __getitem__(self, location: str) -> Tensor:
        if location in self.refused:
            raise self._error([location])
        return self.tensors[location]

    def __iter__(self) -> Iterator[str]:
        raise self._error(sorted(self.refused))

    def __len__(self) -> int:
        raise self._error(sorted(self.refused))

    def _error(self, locations: list[str]) -> NotKeptError:
        layers = ", ".join(repr(location or ".") for location in locations)
        return NotKeptError(
            f"the tensor that was kept as {self.name!r} at {layers} cannot be used with this activation checkpoint: the "
            "gradients would be wrong; disable checkpointing"
        )


def _tensors(by_location: Mapping[str, Kept]) -> dict[str, Tensor]:
    return {location: kept.tensor for location, kept in by_location.items()}


graph_task = torch._C._current_graph_task_id
"""Returns the number of the backward pass that this thread runs; -1 outside of backward passes."""


def operator_name(node: Any) -> str:
    """Return the name of an operator in a backward graph. The context of a custom function may have another attribute `name`."""
    name: str = type(node).name(node)
    return name


Item = TypeVar("Item")


def take(items: list[Item]) -> list[Item]:
    """Empty a list and return its items. Items that other threads append in the meantime stay in it."""
    taken = items[:]
    del items[: len(taken)]
    return taken


@dataclass
class Clock:
    """The current time of a probe, shared by all of its sites."""

    moment: StepContext
    seed: int = 0
    # The number of micro-steps so far, over all phases. Per-micro-step state is reset by it.
    micro_step_index: int = 0
    closed: bool = False
    # Whether any hook on modules is scheduled. Otherwise, compiled code runs without them.
    in_graphs: bool = False
    # Returns the factor by which a gradient scaler multiplies the loss; None without a scaler.
    amp_scale: Callable[[], Tensor] | None = None
    timer: HookTimer | None = None  # measures the time of hooks; None if it is not measured
    parallel: Parallel | None = None  # how several processes train together; None for a single one
    rank: int = 0
    layout: MeshLayout | None = None  # how tensors are placed on the mesh of the processes; None without a mesh
    replicas: int = 1  # the number of processes whose gradients of different batches are averaged or summed
    sums_gradients: bool = False  # whether they are summed
    phases: set[str] = field(default_factory=set)
    kept: TensorStore = field(default_factory=TensorStore)
    in_checkpoint: bool = False  # whether the run saves its own checkpoint, which interventions do not change
    named_at: int = -1  # the micro-step whose samples are named by `sample_ids`
    sample_ids: SampleIds | None = None  # the ids of these samples
    # Their targets, a tensor whose dimension 0 is that of the samples; None if unknown.
    sample_targets: Tensor | None = None
    # The hooks after the steps of optimizers that have ended, until they run.
    ended_steps: dict[tuple[Callable[[Optimizer], None], Optimizer], None] = field(default_factory=dict)
    # The optimizers whose wrapper makes a step, and the hooks to call at its end; None before those of the optimizer.
    after_wrapper: dict[Optimizer, Callable[[], None] | None] = field(default_factory=dict)
    # The optimizers whose hooks before the step ran already, although PyTorch calls them again at `super().step()`.
    begun: set[Optimizer] = field(default_factory=set)
    _boundary: tuple[StepContext | None, StepContext] = field(init=False)

    def __post_init__(self) -> None:
        self._boundary = None, self.moment

    def finish_steps(self) -> None:
        """Run the hooks after steps of optimizers that have ended. A training step may end in a hook of the optimizer before them."""
        while self.ended_steps:
            (after_step, optimizer), _ = self.ended_steps.popitem()  # each was noted before the earlier one
            after_step(optimizer)
        for optimizer, act in self.after_wrapper.items():
            if act is not None:
                self.after_wrapper[optimizer] = None
                act()

    def name_samples(self, ids: SampleIds, targets: Tensor | None = None) -> None:
        self.named_at, self.sample_ids, self.sample_targets = self.micro_step_index, ids, targets

    @property
    def ids(self) -> SampleIds | None:
        """The ids of the samples of the current micro-step; None if they are unknown."""
        return self.sample_ids if self.named_at == self.micro_step_index else None

    @property
    def targets(self) -> Tensor | None:
        """The targets of the samples of the current micro-step; None if they are unknown."""
        return self.sample_targets if self.named_at == self.micro_step_index else None

    @property
    def boundary(self) -> StepContext:
        """The moment of hooks around the optimizer step.

        They belong to the last micro-step, which has ended already. All rows of one moment get the same object, which the slab stores
        once.
        """
        source, boundary = self._boundary
        if source is not self.moment:
            boundary = self.moment._replace(micro_step=max(0, self.moment.micro_step - 1))
            self._boundary = self.moment, boundary
        return boundary


class FiringIndex(NamedTuple):
    """Identifies one of several firings at a site. The fields are those of `Context`."""

    call: int = 0
    backward: int = 0
    recompute: bool = False
    origin: int | None = None


FIRST_CALL = FiringIndex()
