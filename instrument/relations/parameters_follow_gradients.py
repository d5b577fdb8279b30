"""Relation: optimizers change the parameters that have a gradient, and no frozen ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import Parameter
from torch.optim import Optimizer

from ..hooks.optimizer import as_rate, parameter_ids
from ..rules.step_rows import BoolArray, FloatArray
from .relation import RELATIONS, Checked, Relation, Training

TIMES = 4  # in how many checked steps in succession a parameter does not change
PARAMETERS, ELEMENTS = 8, 16  # how many of an optimizer are compared
MAX_FORGOTTEN = 32
MARGIN = 100.0  # how many units in the last place of a parameter the rate times the gradient is at least
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class _Sample:
    """A few elements of parameters, and whether they change.

    Args:
        parameters: The parameters. At most `limit` of them are read, at equal distances.
    """

    def __init__(self, parameters: Sequence[Parameter], limit: int = PARAMETERS) -> None:
        plain = [each for each in parameters if _is_plain(each)]
        self.parameters = plain[:: math.ceil(len(plain) / limit) or 1]
        self.sizes = [math.ceil(each.numel() / _distance(each)) for each in self.parameters]
        self._starts = [0, *accumulate(self.sizes)]
        self.values = self._read(self.parameters)

    @torch.no_grad()
    def _read(self, tensors: Sequence[Tensor | None]) -> FloatArray:
        """Return elements of tensors of the parameters, float64 [elements of all]; zeros for None, NaN if their number has changed.

        There is one wait for each device.
        """
        if not tensors:
            return np.empty(0)
        by_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
        for index, each in enumerate(tensors):
            if each is not None:
                by_device.setdefault(each.device, []).append((index, _elements(each)))
        found = np.zeros(self._starts[-1])
        for several in by_device.values():
            numbers, start = torch.cat([each for _, each in several]).double().cpu().numpy(), 0
            for index, each in several:
                at = slice(*self._starts[index : index + 2])
                found[at] = numbers[start : start + len(each)] if len(each) == self.sizes[index] else math.nan
                start += len(each)
        return found

    def changed(self) -> list[bool]:
        """Return for each parameter whether any of the elements has changed."""
        return self.any_of_each(self._read(self.parameters) != self.values)

    def any_of_each(self, flags: BoolArray) -> list[bool]:
        """Return for each parameter whether a flag of any of its elements is set."""
        if not self.sizes:
            return []
        found: list[bool] = np.logical_or.reduceat(flags, self._starts[:-1]).tolist()
        return found

    def gradients(self) -> FloatArray:
        """Return the gradients of the elements; zeros without one."""
        return self._read([each.grad for each in self.parameters])


@RELATIONS.register("parameters_follow_gradients")
class ParametersFollowGradients(Relation):
    """Compares a few elements of parameters before and after the steps of their optimizer, and those of parameters without one."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._before: dict[Optimizer, tuple[_Sample, _Sample]] = {}  # trainable and frozen parameters
        self._unchanged: dict[Optimizer, int] = {}  # in how many steps in succession
        self._trains: set[Optimizer] = set()  # those that have changed parameters
        self._trained: set[int] = set()  # the `id` of parameters
        self._forgotten: dict[int, Parameter] = {}  # in this step
        self._previous = _Sample(())  # those of the previous step
        self._times: dict[int, int] = {}  # in how many checked steps each of them had a gradient, and none changed
        self._found: list[Checked] = []
        self._count = 0

    def before_step(self, optimizer: Optimizer) -> None:
        held = [each for group in optimizer.param_groups for each in group["params"]]
        trainable = [each for each in held if each.requires_grad]
        frozen = [each for each in held if not each.requires_grad and id(each) in self._trained]
        self._trained.update(map(id, trainable))
        self._before[optimizer] = _Sample(trainable), _Sample(frozen)

    def after_step(self, optimizer: Optimizer) -> None:
        samples, found_inf = self._before.pop(optimizer, None), getattr(optimizer, "found_inf", None)
        # A fused optimizer skips its step if a gradient scaler found values that are not finite.
        if samples is None or (found_inf is not None and bool(found_inf > 0)):
            return
        trainable, frozen = samples
        for parameter, has_changed in zip(frozen.parameters, frozen.changed(), strict=True):
            if has_changed:
                text = "an optimizer changes this frozen parameter, because of an old gradient or its momentum"
                self._add(text, parameter)
        for parameter in self._without_optimizer():
            self._forgotten[id(parameter)] = parameter
        has_changed = any(trainable.changed())
        if not (has_changed or _is_representable(trainable, optimizer)):
            return
        if has_changed:
            self._trains.add(optimizer)
        elif optimizer in self._trains and "tolerance_change" in optimizer.defaults:
            return  # LBFGS makes no further update after it has converged
        self._count += has_changed
        self._unchanged[optimizer] = times = 0 if has_changed else self._unchanged.get(optimizer, 0) + 1
        if times == TIMES:
            self._add(f"{type(optimizer).__name__} changed none of its parameters in {TIMES} checked steps")

    def _add(self, text: str, parameter: Parameter | None = None) -> None:
        names = {id(each): name for name, each in self.training.parameters.items()}
        layer, _, path = names.get(id(parameter), "").rpartition(".")
        self._found.append(Checked(False, None, text, layer, path))

    def check(self) -> Iterator[Checked]:
        parameters, self._forgotten = [*self._forgotten.values()], {}
        times = {} if any(self._previous.changed()) else self._times
        self._times = {id(each): times.get(id(each), 0) + 1 for each in parameters}
        self._previous = _Sample(parameters, MAX_FORGOTTEN)
        for parameter in parameters:
            if self._times[id(parameter)] == TIMES:
                self._add("this parameter has a gradient, but no optimizer holds it", parameter)
        found, self._found = self._found, []
        yield from found
        if self._count and not found:
            yield Checked(True, self._count, "an optimizer changes parameters with gradients")

    def _without_optimizer(self) -> list[Parameter]:
        optimizers, parameters = self.training.optimizers, self.training.parameters.values()
        held = {key for optimizer in optimizers for key in parameter_ids(optimizer)}
        trainable = [each for each in parameters if each.requires_grad]
        others = [each for each in trainable if id(each) not in held]
        if not others:
            return []
        own = {*map(id, parameters)}
        of_optimizers = (
            each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]
        )
        replaced = {each.shape for each in of_optimizers if id(each) not in own and each.grad is None}
        is_choice = len(others) >= len(trainable) - len(others) or id(trainable[0]) not in held
        chosen = [each for each in others if not is_choice or each.shape in replaced]
        sample = _Sample(chosen[:MAX_FORGOTTEN], MAX_FORGOTTEN)
        has_gradient = sample.any_of_each(sample.gradients() != 0)
        return [each for each, has_one in zip(sample.parameters, has_gradient, strict=True) if has_one]


def _is_plain(parameter: Tensor) -> bool:
    is_known = type(parameter) is Parameter and parameter.dtype in _DTYPES
    if not is_known or not parameter.numel() or parameter.is_meta:
        return False
    gradient = parameter.grad
    return gradient is None or (type(gradient) is Tensor and gradient.layout is torch.strided)


def _distance(tensor: Tensor) -> int:
    return math.ceil(tensor.numel() / ELEMENTS) or 1


def _elements(tensor: Tensor) -> Tensor:
    """Return elements of a tensor at equal distances, without a copy of all elements."""
    numel, distance = tensor.numel(), _distance(tensor)
    if tensor.is_contiguous():
        return tensor.as_strided((math.ceil(numel / distance),), (distance,))
    return tensor.take(torch.arange(0, numel, distance, device=tensor.device))


def _is_representable(sample: _Sample, optimizer: Optimizer) -> bool:
    """Return whether the rate times the gradient is larger than the rounding of any element.

    It is that of SGD. A smaller change, as in a warm-up or after convergence, may leave all elements as they are.
    """
    rate_of = {id(each): group.get("lr") for group in optimizer.param_groups for each in group["params"]}
    numbers = [as_rate(rate_of.get(id(each))) for each in sample.parameters]
    rates = [math.nan if number is None else number for number in numbers]
    precisions = [torch.finfo(each.dtype).eps for each in sample.parameters]
    change = np.repeat(rates, sample.sizes) * np.abs(sample.gradients())
    rounding = MARGIN * np.repeat(precisions, sample.sizes) * np.abs(sample.values)
    return bool(((change > rounding) & np.isfinite(change)).any())
