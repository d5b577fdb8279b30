"""Several optimizers of one model, trained in one loop."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import Parameter
from torch.optim import Optimizer


class PerModule(Optimizer):
    """An optimizer for each of several modules, such as the generator and the critic of a GAN.

    To schedules, gradient scalers and checkpoints it is one optimizer, whose step makes the step of each. Hooks at the
    optimizer boundary act at the step of the one that holds the parameter.

    Args:
        model: The model.
        optimizers: By the name of a module, what makes the optimizer of its parameters that train: in a configuration a
            target with `_partial_: true`.

    Attributes:
        parts: The optimizers, by the name of their module.

    Raises:
        ValueError: A parameter that trains is in none of the modules, or in two of them; or an optimizer's `step` requires
            a closure, which calls backward for all modules at once.
        AttributeError: The model has no such module.
    """

    def __init__(self, model: nn.Module, optimizers: Mapping[str, Callable[[list[Parameter]], Optimizer]]) -> None:
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        own = {name: [p for p in model.get_submodule(name).parameters() if p.requires_grad] for name in optimizers}
        held = [id(parameter) for parameters in own.values() for parameter in parameters]
        for name, parameter in trained.items():
            if held.count(id(parameter)) != 1:
                problem = "several of the modules have" if id(parameter) in held else "none of the modules has"
                raise ValueError(f"{problem} the parameter {name!r}: {', '.join(optimizers)}")
        super().__init__(list(trained.values()), {})
        self.parts = {name: make(own[name]) for name, make in optimizers.items()}
        for name, part in self.parts.items():
            if _requires_closure(part):
                problem = f"the step of {type(part).__name__} requires a closure"
                raise ValueError(f"{problem}, and PerModule calls the step of each module without one: {name}")
        self._share_groups()

    def _share_groups(self) -> None:
        """A schedule changes the groups in place: they are the very groups of the parts."""
        self.param_groups = [group for part in self.parts.values() for group in part.param_groups]

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make the step of each optimizer, in the order in which they were given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts.values():
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The state of each optimizer, by the name of its module."""
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put each optimizer into its state."""
        for name, part in self.parts.items():
            part.load_state_dict(state_dict[name])
        self._share_groups()


def _requires_closure(optimizer: Optimizer) -> bool:
    """Whether an optimizer's step cannot be called without an argument, as that of LBFGS."""
    try:
        inspect.signature(optimizer.step).bind()
    except TypeError:
        return True
    except ValueError:  # compiled code may have no signature
        return False
    return False
