"""What a plan will write: rows and bytes, per step and in all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..errors import ConfigError, Mistake
from ..spec.globs import matches
from ..spec.hooks import RecordSpec, parse_slice
from .sites import HookPlan, Site
from .trial import Calls, TensorInfo, Trial

# Bytes of one row on disk beside its numbers: labels in dictionaries, counts that repeat, page headers. Measured on
# files of 100 steps and more; see tests/plan/test_cost.py.
STATISTIC_BYTES = 8
ROW_BYTES = 4
EFFECT_BYTES = 34


@dataclass(frozen=True)
class Length:
    """How long a run is: its steps, the micro-batches in each, the steps at which it evaluates, and their batches."""

    steps: int
    accumulate: int
    eval_steps: Sequence[int]
    eval_batches: int


@dataclass(frozen=True)
class Cost:
    """What one spec writes.

    Attributes:
        firings: Steps, or evaluations, at which it is due.
        rows_per_step: Rows in each of them.
        bytes_per_step: Bytes in each of them, about.
    """

    firings: int
    rows_per_step: int
    bytes_per_step: int

    @property
    def rows(self) -> int:
        """Rows in all."""
        return self.firings * self.rows_per_step

    @property
    def bytes(self) -> int:
        """Bytes in all, about."""
        return self.firings * self.bytes_per_step


def cost_of(plan: HookPlan, trials: dict[str, Trial], length: Length) -> dict[str, Cost]:
    """What each spec of a plan writes in a run of that length.

    Args:
        plan: The plan.
        trials: A trial forward pass for each phase that specs are for: `train`, `eval`.
        length: How long the run is.

    Raises:
        ConfigError: A tensor that is to be recorded does not have the part that `slice` names.
    """
    costs = {}
    for name, spec in plan.specs.items():
        steps = range(length.steps) if spec.phase == "train" else length.eval_steps
        batches = length.accumulate if spec.phase == "train" else length.eval_batches
        times = 1 if spec.definition.at_boundary else batches
        seen = [info for site in plan.of(name) for info in tensors_at(site, trials[spec.phase])]
        rows, size = 0, 0
        for info in seen:
            if isinstance(spec, RecordSpec):
                rows += bool(spec.statistics) + spec.tensors
                size += (ROW_BYTES + STATISTIC_BYTES * len(spec.statistics)) if spec.statistics else 0
                size += _kept_bytes(info, spec) if spec.tensors else 0
            else:
                rows, size = rows + 1, size + EFFECT_BYTES
        costs[name] = Cost(len(spec.schedule.among(list(steps))), rows * times, size * times)
    return costs


def tensors_at(site: Site, trial: Trial) -> list[TensorInfo]:
    """The tensors that a site sees in one micro-step, or in one step for kinds around the optimizer."""
    spec = site.spec
    if spec.definition.family != "module":
        parameter = site.parameter if site.parameter is not None else site.layer.module._buffers[site.own_name]
        assert parameter is not None, "a site at a parameter or buffer was resolved from one"
        return [] if site.note else [TensorInfo(site.own_name, tuple(parameter.shape), parameter.dtype, True)]
    calls = trial.get(id(site.layer.module), Calls())
    at_input = spec.tensor_role in ("input", "grad_input")
    infos = [info for call in (calls.inputs if at_input else calls.outputs) for info in call]
    wanted = [info for info in infos if spec.path is None or matches(spec.path, info.path)]
    if spec.definition.gradient:
        wanted = [info for info in wanted if info.requires_grad]
    if not isinstance(spec, RecordSpec):
        wanted = [info for info in wanted if info.dtype.is_floating_point]
    return wanted


def _kept_bytes(info: TensorInfo, spec: RecordSpec) -> int:
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
    return numel * max(4, dtype.itemsize) + 64
