"""The cost of a plan: how often each spec fires, and the resulting rows, bytes and time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..config.hook_specs import HookSpec
from ..config.schedule import Evaluations, common
from ..stats.merge import MAX_GATHERED
from ..stats.sums import COLUMNS


@dataclass(frozen=True)
class Length:
    """The length of a run."""

    steps: int
    accumulate: int  # micro-batches per step
    epoch_batches: int  # of which the last step of an epoch takes the remaining ones
    evaluations: Evaluations  # the steps with an evaluation
    eval_batches: int  # per evaluation

    @property
    def epoch_steps(self) -> int:
        return -(-self.epoch_batches // self.accumulate)

    def micro_steps(self, steps: Sequence[int]) -> int:
        missing = self.epoch_steps * self.accumulate - self.epoch_batches
        ends = range(self.epoch_steps - 1, self.steps, self.epoch_steps)
        epochs = len(common(steps, ends)) if isinstance(steps, range) else sum(step in ends for step in steps)
        return len(steps) * self.accumulate - missing * epochs


@dataclass(frozen=True)
class Cost:
    """The estimated cost of one spec in a run."""

    firings: int  # the number of steps, or evaluations, at which it is scheduled
    rows: int
    bytes: int  # on disk
    seconds: float  # that it adds to a scheduled step; 0 for other phases
    memory: int = 0  # bytes of the tensors that a spec with `keep` keeps
    tensor_rows: int = 0  # those that contain a recorded tensor
    tensor_bytes: int = 0  # of these rows


@dataclass(frozen=True)
class Forecast:
    """The estimated cost of a run."""

    cost: dict[str, Cost]  # of each spec by name
    baseline_seconds: float  # the duration of a step without hooks, with data loading
    hooked_seconds: float  # that with hooks, the mean over all steps

    @property
    def slowdown(self) -> float:
        """The relative overhead of all hooks. 0.05 means 5%."""
        return self.hooked_seconds / self.baseline_seconds - 1.0

    def share(self, name: str, steps: int) -> float:
        return self.cost[name].seconds * self.cost[name].firings / steps / self.baseline_seconds


class MeshCost(NamedTuple):
    """The estimated rows and bytes of all processes of a mesh, and the collective operations of a step with scheduled hooks.

    There are at most so many bytes, because a row of a tensor parallel process may have a shard of the tensor. The operations are those for
    rows of all processes, without those for single tensors: partial ones, rows of shards that are gathered, and changes of shards.
    """

    rows: int
    bytes: int
    collectives: int


def mesh_cost(
    forecast: Forecast,
    specs: Mapping[str, HookSpec],
    sizes: Mapping[str, int],
    *,
    shards: bool,
    reduces: bool,
    on_gpu: bool = False,
) -> MeshCost:
    """Estimate the output of all processes of a mesh from that of a single one, which has the same batches.

    A layer is in the processes of all dimensions except `pp`, and each of them records it. If `reduce` is `global` (`reduces`), one
    process writes the row for all of them, if the placement of the tensor is known. Recorded tensors are never merged: those of
    modules are batch shards over `dp`. `shards`: `data` is `fsdp2`.
    """
    tensor_parallel, data_parallel = sizes.get("tp", 1), sizes.get("dp", 1)
    processes = data_parallel * tensor_parallel
    rows = size = 0
    merged = 0.0  # rows of a step that are merged over the processes
    for name, spec in specs.items():
        cost, family = forecast.cost[name], spec.definition.family
        is_parameter = family in ("parameter", "optimizer") and spec.tensor_role != "buffer"
        # Equal in all processes that have the whole parameter.
        is_equal = is_parameter and spec.definition.frequency == "step"
        is_equal |= data_parallel == 1 and family in ("parameter", "loss")
        is_part = family == "module" or (is_parameter and (shards or (tensor_parallel > 1 and is_equal)))
        copies = 1 if reduces and (is_part or is_equal) else processes
        tensor_copies = tensor_parallel if family == "module" else processes
        rows += (cost.rows - cost.tensor_rows) * copies + cost.tensor_rows * processes
        size += (cost.bytes - cost.tensor_bytes) * copies + cost.tensor_bytes * tensor_copies
        merged += is_part * cost.rows / max(cost.firings, 1)
    # The processes check that they have the same rows, and send the rest by another operation. The check contains the maxima, unless
    # these are on a GPU: then rank 0 gathers the numbers, or there is a third operation.
    is_large = on_gpu and processes * merged * len(COLUMNS) > MAX_GATHERED
    return MeshCost(rows, size, 1 + (merged > 0) + is_large if reduces and specs else 0)


class Firings(NamedTuple):
    """The steps at which a spec is scheduled, and how often it acts on each of its tensors in total.

    For the phases eval and probe, the steps are the numbers of those completed before an evaluation, or a pass of the probe batch.
    """

    steps: Sequence[int]
    times: int


def firings_of(spec: HookSpec, length: Length) -> Firings:
    if spec.phase == "eval":
        steps = length.evaluations.steps_in(spec.schedule)
        return Firings(steps, len(steps) * length.eval_batches)
    if spec.phase == "probe":
        steps = spec.schedule.steps_in(range(length.steps + 1))
        return Firings(steps, len(steps))
    steps = spec.schedule.steps_in(range(length.steps))
    if spec.definition.frequency in ("occasion", "operation"):
        return Firings(steps, 0)
    if spec.definition.frequency == "step":
        stateless = spec.kind == "step_pre" and spec.tensor_role.startswith("state.") and 0 in steps
        return Firings(steps, len(steps) - stateless)  # before its first step, an optimizer has no state
    return Firings(steps, length.micro_steps(steps))
