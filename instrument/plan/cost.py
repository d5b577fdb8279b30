"""What a plan will write: rows and bytes, per step and in all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..errors import ConfigError, Mistake
from ..spec.base import parse_slice
from ..spec.globs import matches
from ..spec.hooks import HookSpec
from ..spec.record import RecordSpec
from ..spec.schedule import Evaluations, common
from .sites import HookPlan, Site
from .trial import TensorInfo, Trial, tensors_of

# Bytes of one row on disk, as measured in files of 2,000 rows and more of 200 steps; the schema of each file comes on
# top, some 8 kB. Labels lie in dictionaries, and counts repeat. A tensor that was seen before in the same micro-step
# (a container puts out what its last module did) has a row of the same numbers, which compression finds.
ROW_BYTES = 3.0
STATISTIC_BYTES = {"mean": 7.5, "std": 7.5, "rms": 7.5, "l1": 7.5, "l2": 7.5, "min": 3.5, "max": 3.5, "abs_max": 3.5}
OTHER_STATISTIC_BYTES = 0.5  # counts and fractions
EFFECT_BYTES = 18.0
TENSOR_BYTES = 64.0  # beside its values; nothing of it is compressed


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

    def micro_steps(self, steps: Sequence[int]) -> int:
        """Micro-batches in these steps together."""
        per_epoch = -(-self.epoch_batches // self.accumulate)
        missing = per_epoch * self.accumulate - self.epoch_batches
        ends = range(per_epoch - 1, self.steps, per_epoch)
        shorter = len(common(steps, ends)) if isinstance(steps, range) else sum(step in ends for step in steps)
        return len(steps) * self.accumulate - missing * shorter


@dataclass(frozen=True)
class Cost:
    """What one spec writes.

    Attributes:
        firings: Steps, or evaluations, at which it is due.
        rows_per_step: Rows in each of them, the last step of an epoch aside, which may have fewer.
        rows: Rows in all.
        bytes: Bytes in all, about.
    """

    firings: int
    rows_per_step: int
    rows: int
    bytes: int


def cost_of(plan: HookPlan, trials: dict[str, Trial], length: Length) -> dict[str, Cost]:
    """What each spec of a plan writes in a run of that length.

    Args:
        plan: The plan.
        trials: A trial forward pass for each phase that specs are for: `train`, `eval`.
        length: How long the run is.
    """
    costs = {}
    for name, spec in plan.specs.items():
        training = spec.phase == "train"
        due = spec.schedule.among(range(length.steps)) if training else ()
        firings = len(due) if training else length.evaluations.due(spec.schedule)
        if spec.definition.rhythm == "occasion":
            per_step, times = 0, 0
        elif spec.definition.rhythm == "step":
            per_step, times = 1, firings
        elif training:
            per_step, times = length.accumulate, length.micro_steps(due)
        else:
            per_step, times = length.eval_batches, firings * length.eval_batches
        seen = [info for site in plan.of(name) for info in tensors_at(site, trials[spec.phase])]
        rows = len(seen) * _rows_at_a_tensor(spec)
        costs[name] = Cost(firings, rows * per_step, rows * times, round(_bytes(seen, spec) * times))
    return costs


def _rows_at_a_tensor(spec: HookSpec) -> int:
    return bool(spec.statistics) + spec.distribution + spec.tensors if isinstance(spec, RecordSpec) else 1


def _bytes(seen: Sequence[TensorInfo], spec: HookSpec) -> float:
    """Bytes that one firing at each of these tensors writes, about."""
    if not isinstance(spec, RecordSpec):
        return len(seen) * (ROW_BYTES + EFFECT_BYTES)
    size = 0.0
    if spec.statistics:
        different = len({info.number for info in seen if info.number}) + sum(not info.number for info in seen)
        size += len(seen) * ROW_BYTES
        size += different * sum(STATISTIC_BYTES.get(name, OTHER_STATISTIC_BYTES) for name in spec.statistics)
    if spec.tensors:
        size += sum(_kept_bytes(info, spec) for info in seen)
    return size


def tensors_at(site: Site, trial: Trial) -> list[TensorInfo]:
    """The tensors that a site sees in one micro-step, or in one step for kinds around the optimizer.

    A trial has no backward pass: a gradient is taken to come to every tensor that requires one.
    """
    spec = site.spec
    if spec.definition.family == "loss":
        return [TensorInfo("", (), torch.float32, True)]
    if spec.definition.family != "module":
        own = {**site.layer.module._parameters, **site.layer.module._buffers}
        parameter = site.parameter if site.parameter is not None else own[site.own_name]
        assert parameter is not None, "a site at a parameter or buffer was resolved from one"
        at_gradient = spec.tensor_role not in ("param", "update", "buffer")
        return (
            []
            if site.note and at_gradient
            else [TensorInfo(site.own_name, tuple(parameter.shape), parameter.dtype, True)]
        )
    infos = tensors_of(site.layer.module, spec.tensor_role, trial)
    wanted = [info for info in infos if spec.path is None or matches(spec.path, info.path)]
    if spec.definition.gradient:
        wanted = [info for info in wanted if info.requires_grad]
    if not isinstance(spec, RecordSpec):
        wanted = [info for info in wanted if info.dtype.is_floating_point]
    return wanted


def _kept_bytes(info: TensorInfo, spec: RecordSpec) -> float:
    """Bytes of a recorded tensor after it is cut, as it will be stored."""
    shape = list(info.shape)
    if spec.samples is not None and shape:
        shape[0] = min(shape[0], spec.samples)
    if spec.slice is not None:
        index = parse_slice(spec.slice)[: len(shape)]
        try:
            shape = list(torch.empty(shape, device="meta")[index].shape)
        except IndexError:
            raise ConfigError(
                Mistake(
                    f"hooks.{spec.name}.slice",
                    f"does not fit a tensor of shape {list(info.shape)} that the hook will see",
                    written=spec.slice,
                )
            ) from None
    numel = 1
    for size in shape:
        numel *= size
    if spec.max_elements is not None:
        numel = min(numel, spec.max_elements)
    dtype = info.dtype if spec.dtype is None else getattr(torch, spec.dtype)
    return numel * max(4, dtype.itemsize) + TENSOR_BYTES
