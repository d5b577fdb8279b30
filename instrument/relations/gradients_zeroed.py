"""Relation: the gradient of the last step is zeroed before the next one is added to it."""

from __future__ import annotations

from collections.abc import Iterator

from torch.optim import Optimizer

from .relation import RELATIONS, Checked, Relation, Training


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

    def after_step(self, optimizer: Optimizer) -> None:
        for each in self.training.gradients[optimizer]:
            self._count += bool(each.micro_steps) and each.has_stepped
            if each.micro_steps and each.has_old and each.parameter.grad is not None:
                self._found[id(each.parameter)] = None

    def check(self) -> Iterator[Checked]:
        if self._found:
            names = {id(parameter): name for name, parameter in self.training.parameters.items()}
            for key in self._found:
                layer, _, path = names.get(key, "").rpartition(".")
                yield Checked(False, None, "a gradient was added to that of the previous step", layer, path)
            self._found.clear()
        elif self._count:
            yield Checked(True, self._count, "gradients are zeroed before the next ones are added")
