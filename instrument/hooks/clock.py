"""The current step and phase of a probe, and the index of a firing within a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..actions.base import SampleIds, StepContext
from .distributed_scope import Parallel
from .hook_timer import HookTimer
from .kept_tensors import TensorStore
from .mesh_layout import MeshLayout

graph_task = torch._C._current_graph_task_id
"""Returns the number of the backward pass that this thread runs; -1 outside of backward passes."""

Item = TypeVar("Item")


def take(items: list[Item]) -> list[Item]:
    """Empty a list and return its items. Items that other threads append in the meantime stay in it."""
    taken = items[:]
    del items[: len(taken)]
    return taken


@dataclass
class Clock:
    """The current time of a probe, shared by all of its sites.

    Attributes:
        micro_step_index: The number of micro-steps so far, over all phases. Per-micro-step state is reset by it.
        in_graphs: Whether any hook on modules is scheduled. Otherwise, compiled code runs without them.
        amp_scale: Returns the factor by which a gradient scaler multiplies the loss; None without a scaler.
        timer: Measures the time of hooks; None if it is not measured.
        parallel: How several processes train together; None for a single one.
        layout: How tensors are placed on the mesh of the processes; None without a mesh.
        replicas: The number of processes whose gradients of different batches are averaged or summed.
        sums_gradients: Whether they are summed.
        in_checkpoint: Whether the run saves its own checkpoint, which interventions do not change.
        named_at: The micro-step whose samples are named by `sample_ids`.
        sample_ids: The ids of these samples.
        sample_targets: Their targets, a tensor whose dimension 0 is that of the samples; None if unknown.
        after_wrapper: The optimizers whose wrapper makes a step, and the hooks to call at its end; None before those of the optimizer.
        begun: The optimizers whose hooks before the step ran already, although PyTorch calls them again at `super().step()`.
    """

    moment: StepContext
    seed: int = 0
    micro_step_index: int = 0
    closed: bool = False
    in_graphs: bool = False
    amp_scale: Callable[[], Tensor] | None = None
    timer: HookTimer | None = None
    parallel: Parallel | None = None
    rank: int = 0
    layout: MeshLayout | None = None
    replicas: int = 1
    sums_gradients: bool = False
    phases: set[str] = field(default_factory=set)
    kept: TensorStore = field(default_factory=TensorStore)
    in_checkpoint: bool = False
    named_at: int = -1
    sample_ids: SampleIds | None = None
    sample_targets: Tensor | None = None
    after_wrapper: dict[Optimizer, Callable[[], None] | None] = field(default_factory=dict)
    begun: set[Optimizer] = field(default_factory=set)
    _boundary: tuple[StepContext | None, StepContext] = field(init=False)

    def __post_init__(self) -> None:
        self._boundary = None, self.moment

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
