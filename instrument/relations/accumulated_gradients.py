"""Observation of the gradient of a parameter: which gradients are added to it from one step of its optimizer to the next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..hooks.clock import Clock
from .observed_calls import version_of

PER_OPTIMIZER = 4
MAX_MICRO_STEPS = 256  # without a step of the optimizer, gradients may be added without end


def smallest_parameters(optimizer: Optimizer) -> list[Parameter]:
    """Return the smallest trainable parameter of each of the first groups of an optimizer, at most `PER_OPTIMIZER`."""
    groups = [
        [each for each in group["params"] if type(each) is Parameter and each.requires_grad and not each.is_meta]
        for group in optimizer.param_groups
    ]
    return [min(group, key=Parameter.numel) for group in groups if group][:PER_OPTIMIZER]


class AccumulatedGradient:
    """The gradient of a parameter, and what is added to it.

    Operations other than the addition of a gradient end a sum: they clear it, or change what the loop wants to add to. This is known
    from the version of the tensor, without reading values.

    Attributes:
        parameter: The parameter.
        micro_steps: The last micro-steps of the gradients in the sum.
        has_old: Whether the sum contains the gradient that the last step of the optimizer used.
        has_stepped: Whether the optimizer has made a step.
        copy: A copy of the sum; None without one.
    """

    def __init__(self, parameter: Parameter, clock: Clock) -> None:
        self.parameter = parameter
        self._clock = clock
        self._last: tuple[Tensor, int] | None = None
        self._is_added = False  # whether the gradient that arrives now is added to the sum
        self.micro_steps: deque[int] = deque(maxlen=MAX_MICRO_STEPS)
        self.has_old = self.has_stepped = False
        self.copy: Tensor | None = None

    def attach(self) -> list[RemovableHandle]:
        """Register the hooks before and after a gradient is added."""
        before: Callable[[Tensor], Any] = self._before
        return [self.parameter.register_hook(before), self.parameter.register_post_accumulate_grad_hook(self._after)]

    def _before(self, gradient: Tensor) -> None:  # noqa: ARG002
        current, last = self.parameter.grad, self._last
        self._is_added = (
            current is not None and last is not None and current is last[0] and version_of(current) == last[1]
        )
        if self._is_added and self.has_old and current is not None:
            # The versions do not count `gradient.data.zero_()`.
            self._is_added = current.layout is torch.strided and bool(current.any())

    def _after(self, parameter: Tensor) -> None:
        if not self._is_added:
            self.has_old = False
            self.micro_steps.clear()
        gradient = parameter.grad
        self._last = None if gradient is None else (gradient, version_of(gradient))
        self.micro_steps.append(self._clock.moment.micro_step)
        self.copy = None if gradient is None else gradient.detach().clone()

    def end_step(self) -> None:
        """Begin a new sum after a step of the optimizer. It contains the old gradient until this one is cleared."""
        gradient = self.parameter.grad
        self._last = None if gradient is None else (gradient, version_of(gradient))
        self.has_old, self.has_stepped = gradient is not None, True
        self.micro_steps.clear()
        self.copy = None

    def relative_change(self) -> Tensor | None:
        """Return the norm of the gradient relative to that of the sum, a scalar: 1 if no operation has changed it. None if unknown."""
        gradient = self.parameter.grad
        if gradient is None or self.copy is None or gradient.layout is not torch.strided:
            return None
        change: Tensor = torch.linalg.vector_norm(gradient.detach()) / torch.linalg.vector_norm(self.copy)
        return change
