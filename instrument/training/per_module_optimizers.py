"""Several optimizers for the submodules of one model."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import Parameter
from torch.optim import Optimizer


class PerModule(Optimizer):
    """A separate optimizer for each of several submodules, such as the generator and the critic of a GAN.

    Schedulers, gradient scalers and checkpoints treat it as one optimizer. Its `step` calls the step of each part. A
    hook on a parameter runs at the step of the part that holds the parameter.

    Args:
        optimizers: By submodule name, a function that builds the optimizer from the trainable parameters of the
            submodule. In YAML: a target with `_partial_: true`.

    Raises:
        ValueError: A trainable parameter belongs to none of the submodules or to several of them. Or the `step` of an
            optimizer requires a closure, which would run the backward pass of all submodules.
        AttributeError: The model has no submodule of this name.
    """

    def __init__(self, model: nn.Module, optimizers: Mapping[str, Callable[[list[Parameter]], Optimizer]]) -> None:
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        parameters_by_module = {
            name: [p for p in model.get_submodule(name).parameters() if p.requires_grad] for name in optimizers
        }
        counts = Counter(id(parameter) for parameters in parameters_by_module.values() for parameter in parameters)
        for name, parameter in trained.items():
            if (count := counts[id(parameter)]) != 1:
                how_many = "several" if count else "none"
                raise ValueError(f"parameter {name!r} belongs to {how_many} of the submodules {', '.join(optimizers)}")
        super().__init__(list(trained.values()), {})
        # By submodule name.
        self.parts = {name: make(parameters_by_module[name]) for name, make in optimizers.items()}
        for name, part in self.parts.items():
            if requires_closure(part):
                problem = f"the step of {type(part).__name__} requires a closure"
                raise ValueError(f"{problem}, but PerModule calls the step of each module without one: {name}")
        self._share_groups()

    def _share_groups(self) -> None:
        self.param_groups = [group for part in self.parts.values() for group in part.param_groups]

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Call the step of each optimizer, in the order of `optimizers`.

        Args:
            closure: Called once before the steps, with gradients enabled. Default: None.

        Returns:
            The result of the closure; None without a closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts.values():
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each optimizer, by submodule name."""
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of each optimizer."""
        for name, part in self.parts.items():
            part.load_state_dict(state_dict[name])
        self._share_groups()


def requires_closure(optimizer: Optimizer) -> bool:
    """Return whether `step` of an optimizer requires an argument, as in LBFGS."""
    try:
        inspect.signature(optimizer.step).bind()
    except TypeError:
        return True
    except ValueError:  # Compiled code may have no signature.
        return False
    return False
