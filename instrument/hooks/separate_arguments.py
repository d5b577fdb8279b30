"""The gradients of a tensor that a module gets as several arguments: each argument has its own.

In the graph of the call, the arguments are one tensor. To record without side effects, the module must get this tensor: code
such as `query is key` decides what it computes. So the module is evaluated again, on aliases of the arguments and with the same
random numbers. The copy that is evaluated has its own parameters, buffers and attributes, and no hooks.

The gradients of the aliases must add up to the module's contribution to the gradient of the tensor, which is known from the graph of
the call. If the sum differs, the second evaluation differs from the call, and no gradient is recorded.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from ..values.dtensor import is_sharded
from ..values.nested import iter_tensors, split_arguments
from .gradient_hooks import StoredTensors, versions_of
from .module_copies import copy_arguments, copy_modules
from .separate_gradients import SeparateGradients, are_close, describe_error, without_side_effects

# Restore the states of the global random generators: those of Python, NumPy, the CPU and all GPUs.
_RESTORE: Any = random.setstate, np.random.set_state, torch.set_rng_state, torch.cuda.set_rng_state_all


class Inputs(NamedTuple):
    """What a module is called with: arguments by name (see `join_arguments`), of which the first `positional` ones are positional."""

    module: nn.Module
    arguments: dict[str, Any]
    positional: int


def repeated_tensors(value: Any) -> set[int]:
    """Return the identities of the tensors that occur at several paths."""
    counts = Counter(id(tensor) for _, tensor in iter_tensors(value))
    return {identity for identity, count in counts.items() if count > 1}


class SeparateArguments:
    """Evaluates a module again with separate arguments. Create it before the module runs."""

    def __init__(self, inputs: Inputs, tensor: Tensor, gradients: SeparateGradients) -> None:
        self.module = inputs.module
        self.given = inputs.arguments
        self.positional = inputs.positional
        self.tensor = tensor
        self.gradients = gradients
        given = dict(iter_tensors(inputs.arguments))
        self.aliases = {path: _alias(tensor) for path, each in given.items() if each is tensor}
        self.obstacle: str | None = None
        try:  # with the attributes from before the call
            self.copies = copy_modules(inputs.module)
            self.arguments = copy_arguments(inputs.arguments, self._argument)
        except Exception as error:  # from the objects of users
            self.obstacle = f"it cannot be copied: {describe_error(error)}"
        self.versions = versions_of(each for each in given.values() if each.requires_grad)
        gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        self.random_states = random.getstate(), np.random.get_state(), torch.get_rng_state(), gpus
        gradients.precision = _precision(inputs.module, tensor.device)

    def _argument(self, path: str, tensor: Tensor) -> Tensor:
        """Return an argument of the second evaluation. A module may write to tensors without a gradient, such as buffers."""
        if path in self.aliases:
            return self.aliases[path]
        return tensor.detach() if tensor.requires_grad else tensor.clone()

    def evaluate(self, output: Any, stored: StoredTensors) -> None:
        """Evaluate the module again, after it has run with this output. Count misses if this is not possible."""
        obstacle = self.obstacle or self._obstacle() or self._evaluate(output, stored)
        if obstacle is not None:
            self.gradients.count_misses(obstacle)

    def _evaluate(self, output: Any, stored: StoredTensors) -> str | None:
        outputs = [tensor for _, tensor in iter_tensors(output)]
        try:
            again = [tensor for _, tensor in iter_tensors(self._run(self.copies[self.module], self.arguments))]
            pairs = [*zip(outputs, again, strict=True)]
            stored_pairs = [*zip(stored(), stored(self.copies), strict=True)]
            pairs += [pair for pair in stored_pairs if pair[0] is not self.tensor]
            if not all(are_close(new, old, [old], self.gradients.precision) for old, new in pairs):
                return (
                    "its second evaluation gives another result: it compares its arguments, uses global variables, or is changed by "
                    "hooks"
                )
        except Exception as error:  # the module depends on more than its arguments
            return f"its second evaluation fails: {describe_error(error)}"
        return self._store_results(pairs)

    def _obstacle(self) -> str | None:
        given = [tensor for _, tensor in iter_tensors(self.given)]
        if any(self.versions.get(key, now) != now for key, now in versions_of(given).items()):
            return "it writes to an argument with a gradient"
        if any(map(is_sharded, self.module.parameters())):  # the second evaluation would communicate
            return "its parameters are sharded"
        return "global hooks on modules are registered" if _has_any_global_hook() else None

    def _store_results(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> str | None:
        """Store pairs of outputs of the call and of the second evaluation. Return why this is not possible; None if it is."""
        paths = {id(alias): path for path, alias in self.aliases.items()}
        returned = {paths.get(id(new)) for old, new in pairs if old is self.tensor}
        if len(returned) > 1 or None in returned:
            return "it returns several of these arguments"
        used = [
            (old, new) for old, new in pairs if old is not self.tensor and old.requires_grad and new.grad_fn is not None
        ]
        self.gradients.receive_from(used, self.aliases, next(iter(returned), None))
        return None

    def _run(self, module: nn.Module, arguments: dict[str, Any]) -> Any:
        args, kwargs = split_arguments(arguments, self.positional)
        # Other hooks on saved tensors would see those of the second graph. A tensor that refers to its graph would never be freed.
        as_they_are = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: tensor if tensor.is_leaf else tensor.detach(), lambda tensor: tensor
        )
        with without_side_effects(), as_they_are, torch._C.DisableTorchFunction():
            for restore, state in zip(_RESTORE, self.random_states, strict=True):
                restore(state)
            return module(*args, **kwargs)


def _alias(tensor: Tensor) -> Tensor:
    """Return an alias outside of the graph. It is a leaf only if the tensor is one: autocast treats leaves as weights."""
    leaf = tensor.detach().requires_grad_()
    return leaf if tensor.is_leaf else leaf.view_as(leaf)


def _precision(module: nn.Module, device: torch.device) -> torch.dtype:
    """Return the type with the lowest precision among those of parameters and of autocast. Default: float64."""
    types = [parameter.dtype for parameter in module.parameters() if parameter.dtype.is_floating_point]
    if torch.is_autocast_enabled(device.type):
        types.append(torch.get_autocast_dtype(device.type))
    return max(types, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)
