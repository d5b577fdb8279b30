"""Relation: the gradient of the last step is zeroed before the next one is added to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from torch import Tensor
from torch.nn.parameter import Parameter
from torch.optim import Optimizer

from .relation import RELATIONS, Checked, Relation, Training

PER_OPTIMIZER = 4  # parameters whose gradients are observed: the smallest one of each of the first groups


class _Observed:
    """A parameter of an optimizer, and what happens to its gradient from one step of the optimizer to the next.

    Attributes:
        parameter: The parameter.
        old: The tensor that contains the gradient of the last step, and its version; None if there is none.
        added: The number of gradients that were added to it.
        is_added: Whether the gradient that arrives now is added to it.
        has_gradient: Whether a gradient arrived since the last step.
    """

    def __init__(self, parameter: Tensor) -> None:
        self.parameter = parameter
        self.old: tuple[Tensor, int] | None = None
        self.added = 0
        self.is_added = self.has_gradient = False

    def has_old_gradient(self) -> bool:
        """Return whether the gradient is unchanged and not zero. This reads values only if no operation has changed them."""
        gradient, old = self.parameter.grad, self.old
        if gradient is None or old is None or gradient is not old[0] or gradient._version != old[1]:
            return False
        return bool(gradient.any())  # the versions do not count `gradient.data.zero_()`

    def accumulate(self) -> None:
        """Note that a gradient was added to the one before, or is the first one."""
        gradient = self.parameter.grad
        self.old = (gradient, gradient._version) if self.is_added and gradient is not None else None
        self.added = self.added + 1 if self.is_added else 0
        self.has_gradient, self.is_added = True, False

    def end_step(self) -> tuple[bool, bool]:
        """Begin the next step. Return whether gradients arrived, and whether they were added to that of the last step."""
        gradient, added, has_gradient = self.parameter.grad, self.added, self.has_gradient
        self.old = None if gradient is None else (gradient, gradient._version)
        self.added, self.has_gradient = 0, False
        return has_gradient, added > 0 and gradient is not None


@RELATIONS.register("gradients_zeroed")
class GradientsZeroed(Relation):
    """Observes the gradients of a few parameters of each optimizer, from one step to the next.

    If a gradient arrives while `parameter.grad` is the tensor that the last step used, unchanged and not zero, both are added. This is
    correct if the sum is zeroed before a later gradient arrives, as that of a critic after the step of its generator.
    """

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._found: dict[int, None] = {}  # parameters by their `id`
        self._count = 0  # steps of a parameter with a gradient

    def attach(self) -> None:
        for optimizer in self.training.optimizers:
            several = [_Observed(parameter) for parameter in _smallest(optimizer)]
            for observed in several:
                self.handles.append(observed.parameter.register_hook(partial(self._before, observed)))
                self.handles.append(
                    observed.parameter.register_post_accumulate_grad_hook(partial(self._after, observed))
                )
            self.handles.append(optimizer.register_step_post_hook(partial(self._after_step, several)))

    def _before(self, observed: _Observed, gradient: Tensor) -> None:  # noqa: ARG002
        observed.is_added = self.training.is_checked and observed.has_old_gradient()

    def _after(self, observed: _Observed, parameter: Tensor) -> None:  # noqa: ARG002
        observed.accumulate()

    def _after_step(self, several: Sequence[_Observed], *arguments: object) -> None:  # noqa: ARG002
        for observed in several:
            has_gradient, is_mixed = observed.end_step()
            self._count += has_gradient
            if is_mixed:
                self._found[id(observed.parameter)] = None

    def check(self) -> Iterator[Checked]:
        if self._found:
            names = {id(parameter): name for name, parameter in self.training.model.named_parameters()}
            for key in self._found:
                layer, _, path = names.get(key, "").rpartition(".")
                yield Checked(False, None, "a gradient was added to that of the last step", layer, path)
            self._found.clear()
        elif self._count:
            yield Checked(True, self._count, f"{self._count} gradients were zeroed before the next one")


def _smallest(optimizer: Optimizer) -> list[Parameter]:
    """Return the smallest trainable parameter of each of the first groups of an optimizer."""
    groups = [
        [each for each in group["params"] if type(each) is Parameter and each.requires_grad and not each.is_meta]
        for group in optimizer.param_groups
    ]
    return [min(group, key=Parameter.numel) for group in groups if group][:PER_OPTIMIZER]
