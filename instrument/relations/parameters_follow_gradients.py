"""Relation: optimizers change the parameters that have a gradient, and no frozen ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter
from torch.optim import Optimizer

from ..hooks.optimizer_owners import parameter_ids
from .relation import RELATIONS, Checked, Relation, Training, as_rate

TIMES = 4  # in how many checked steps in succession a parameter does not change
PARAMETERS, ELEMENTS = 32, 16  # how many are compared
MARGIN = 100.0  # how many units in the last place of a parameter the rate times the gradient is at least
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class _Sample:
    """A few elements of parameters, and whether they change.

    Args:
        parameters: The parameters. At most `PARAMETERS` of them are read, at equal distances.
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        plain = [each for each in parameters if _is_plain(each)]
        self.parameters = plain[:: math.ceil(len(plain) / PARAMETERS) or 1]
        self._values = [_elements(each) for each in self.parameters]

    def changed(self) -> list[bool]:
        """Return for each parameter whether any of the elements has changed."""
        new = map(_elements, self.parameters)
        return _read([(now != before).any() for now, before in zip(new, self._values, strict=True)])


@RELATIONS.register("parameters_follow_gradients")
class ParametersFollowGradients(Relation):
    """Compares a few elements of parameters before and after the steps of their optimizer, and those of parameters without one.

    A parameter without an optimizer was forgotten if it replaced one that an optimizer holds. It was also forgotten if all parameters
    without an optimizer are registered after one that an optimizer holds, and are fewer than these. The loop may update it itself.
    """

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._before: dict[Optimizer, tuple[_Sample, _Sample]] = {}  # trainable and frozen parameters
        self._unchanged: dict[Optimizer, int] = {}  # in how many steps in succession
        self._trained: set[int] = set()  # the `id` of parameters
        self._forgotten: dict[int, Parameter] = {}  # in this step
        self._previous, self._times = (
            _Sample(()),
            0,
        )  # those of the previous step, and in how many steps they did not change
        self._found: list[Checked] = []
        self._count = 0

    def attach(self) -> None:
        for optimizer in self.training.optimizers:
            self.observe_steps(optimizer, self._before_step, self._after_step)

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer) -> None:
        held = [each for group in optimizer.param_groups for each in group["params"]]
        trainable = [each for each in held if each.requires_grad]
        frozen = [each for each in held if not each.requires_grad and id(each) in self._trained]
        self._trained.update(map(id, trainable))
        self._before[optimizer] = _Sample(trainable), _Sample(frozen)

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer) -> None:
        samples = self._before.pop(optimizer, None)
        if samples is None or _is_skipped(optimizer):
            return
        trainable, frozen = samples
        for parameter, has_changed in zip(frozen.parameters, frozen.changed(), strict=True):
            if has_changed:
                self._add(
                    "an optimizer changes this frozen parameter, because of an old gradient or its momentum", parameter
                )
        for parameter in _without_optimizer(self.training.model, self.training.optimizers):
            self._forgotten[id(parameter)] = parameter
        rates = {id(each): group.get("lr") for group in optimizer.param_groups for each in group["params"]}
        moves = [_is_representable(each, rates.get(id(each))) for each in trainable.parameters]
        if not any(_read(moves)):
            return
        has_changed = any(trainable.changed())
        self._count += has_changed
        self._unchanged[optimizer] = times = 0 if has_changed else self._unchanged.get(optimizer, 0) + 1
        if times == TIMES:
            self._add(f"{type(optimizer).__name__} changed none of its parameters in {TIMES} checked steps")

    def _add(self, text: str, parameter: Parameter | None = None) -> None:
        names = {id(each): name for name, each in self.training.model.named_parameters()}
        layer, _, path = names.get(id(parameter), "").rpartition(".")
        self._found.append(Checked(False, None, text, layer, path))

    @torch.no_grad()
    def check(self) -> Iterator[Checked]:
        self._check_forgotten()
        found, self._found = self._found, []
        yield from found
        if self._count and not found:
            yield Checked(True, self._count, "an optimizer changes parameters with gradients")

    def _check_forgotten(self) -> None:
        parameters, self._forgotten = [*self._forgotten.values()], {}
        is_same = [*map(id, self._previous.parameters)] == [*map(id, parameters)]
        self._times = self._times + 1 if parameters and is_same and not any(self._previous.changed()) else 0
        self._previous = _Sample(parameters)
        if self._times == TIMES - 1:
            for parameter in parameters:
                self._add("this parameter has a gradient, but no optimizer holds it", parameter)


def _without_optimizer(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[Parameter]:
    """Return the forgotten parameters that have a gradient; see `ParametersFollowGradients`. At most `PARAMETERS`."""
    held = {key for optimizer in optimizers for key in parameter_ids(optimizer)}
    trainable = [each for each in model.parameters() if each.requires_grad]
    others = [each for each in trainable if id(each) not in held]
    if not others:
        return []
    own = {*map(id, model.parameters())}
    parameters = (each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"])
    replaced = {each.shape for each in parameters if id(each) not in own and each.grad is None}
    is_choice = len(others) >= len(trainable) - len(others) or id(trainable[0]) not in held
    chosen = [each for each in others if (not is_choice or each.shape in replaced) and _is_plain(each)][:PARAMETERS]
    has_gradient = _read([_gradient(each).count_nonzero() > 0 for each in chosen])
    return [each for each, has_one in zip(chosen, has_gradient, strict=True) if has_one]


def _is_plain(parameter: Tensor) -> bool:
    """Return whether a parameter and its gradient are dense tensors with values."""
    is_known = type(parameter) is Parameter and parameter.dtype in _DTYPES
    if not is_known or not parameter.numel() or parameter.is_meta:
        return False
    gradient = parameter.grad
    return gradient is None or (type(gradient) is Tensor and gradient.layout is torch.strided)


def _elements(tensor: Tensor) -> Tensor:
    """Return a copy of elements of a tensor at equal distances, [elements]."""
    distance = math.ceil(tensor.numel() / ELEMENTS)
    return tensor.detach().take(torch.arange(0, tensor.numel(), distance, device=tensor.device))


def _gradient(parameter: Parameter) -> Tensor:
    """Return elements of the gradient of a parameter at the same positions; zeros without one."""
    return _elements(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)


def _is_representable(parameter: Parameter, rate: object) -> Tensor:
    """Return whether the rate times the gradient is larger than the rounding of any element, as a scalar on the device.

    It is that of SGD. A smaller change, as in a warm-up or after convergence, may leave all elements as they are.
    """
    number = as_rate(rate)
    if parameter.grad is None or number is None:
        return torch.zeros((), dtype=torch.bool)
    change = number * _gradient(parameter).abs()
    rounding = MARGIN * torch.finfo(parameter.dtype).eps * _elements(parameter).abs()
    return ((change > rounding) & change.isfinite()).any()


def _read(flags: Sequence[Tensor]) -> list[bool]:
    """Return flags that may be on several devices, with one wait for each device."""
    by_device: dict[torch.device, list[int]] = {}
    for at, flag in enumerate(flags):
        by_device.setdefault(flag.device, []).append(at)
    found: dict[int, bool] = {}
    for indices in by_device.values():
        found.update(zip(indices, torch.stack([flags[at] for at in indices]).tolist(), strict=True))
    return [found[at] for at in range(len(flags))]


def _is_skipped(optimizer: Optimizer) -> bool:
    """Return whether a fused optimizer skipped its step, because a gradient scaler found values that are not finite."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found > 0)
