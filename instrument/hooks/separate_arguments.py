"""The gradients of a tensor that a module gets as several arguments: each argument has its own.

In the graph of the call, the arguments are one tensor. To record without side effects, the module must get this tensor: code
such as `query is key` decides what it computes. So the module is evaluated again, on aliases of the arguments and with the same
random numbers. The copy that is evaluated has its own parameters, buffers and attributes, and no hooks.

The gradients of the aliases must add up to the module's contribution to the gradient of the tensor, which is known from the graph of
the call. If the sum differs, the second evaluation differs from the call, and no gradient is recorded.
"""

from __future__ import annotations

import functools
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import first_line
from ..plan.shape_inference import preserve_random_state
from ..runtime.lazy_compiler import uncompiled
from ..values.dtensor import is_sharded
from ..values.nested import iter_tensors, split_arguments
from .clock import graph_task
from .gradient_hooks import Hook, ModuleContribution, StoredTensors, TensorGradientHook, edge_of, versions_of
from .module_copies import copy_arguments, copy_modules


class SeparateGradients:
    """The gradients of separate arguments. It refers to the graph of the second evaluation, not to that of the call.

    Args:
        count_misses: Called with the reason if the gradients are not those of the call.
    """

    def __init__(self, hooks: Mapping[str, Hook], count_misses: Callable[[str], None]) -> None:
        self.hooks = hooks
        self.count_misses = count_misses
        self.aliases: dict[str, Tensor] = {}  # of the second evaluation, by path; empty if it was not possible
        self.outputs: list[Tensor] = []
        self.returned: str | None = None
        self.precision = torch.float64  # the lowest one in the computation
        self.obstacle = (
            "the gradients of the arguments do not add up to that of the tensor, as in a double backward pass or with hooks that "
            "change gradients in the module"
        )
        self._received: dict[int, dict[int, Tensor]] = {}  # by backward pass, and by the index of the output
        self._lock = threading.Lock()  # several threads may run passes through one graph

    def receive_from(
        self, pairs: Sequence[tuple[Tensor, Tensor]], aliases: dict[str, Tensor], returned: str | None
    ) -> None:
        """Register hooks on the outputs of the call.

        Args:
            pairs: Each output of the call with the same output of the second evaluation.
            returned: The path of the alias that the module returns. None if it returns no alias.
        """
        self.aliases, self.returned = aliases, returned
        self.outputs = [new for _, new in pairs]
        for i, (tensor, _) in enumerate(pairs):
            node, at = edge_of(tensor)
            if tensor._base is not None or tensor.is_leaf:
                TensorGradientHook(tensor, partial(self._receive, i)).finish_registration()
            else:  # the hook runs after those on the tensor, also after later ones, which may change the gradient
                node.register_prehook(lambda gradients, i=i, at=at: self._receive(i, gradients[at]))

    def _receive(self, index: int, gradient: Tensor | None) -> None:
        if gradient is not None:
            self._received.setdefault(graph_task(), {})[index] = gradient

    def deliver(self, contribution: ModuleContribution, gradient: Tensor) -> None:
        """Pass the gradients to the hooks, given the module's contribution to the gradient of the tensor, and this complete gradient."""
        total = contribution.take()
        if not self.aliases:
            return
        parts = self._parts(total)
        if parts is None:
            self.count_misses(self.obstacle)
            return
        if self.returned is not None:
            parts[self.returned] = gradient - sum(part for path, part in parts.items() if path != self.returned)
        for path, hook in self.hooks.items():
            if path in parts:
                hook(parts[path])

    def _parts(self, total: Tensor | None) -> dict[str, Tensor] | None:
        """Return the gradients of the aliases by path; None if they cannot be computed, or their sum is not `total`."""
        received = self._received.pop(graph_task(), {})
        given = [(self.outputs[i], of_output) for i, of_output in received.items()]
        if total is None or not given:
            return {} if total is None else None
        outputs, gradients = zip(*given, strict=True)
        aliases = [*self.aliases.values()]
        with self._lock, ExitStack() as stack:
            for i, of_output in received.items():  # includes that of other outputs that the module computes from it
                handle = self.outputs[i].register_hook(lambda _, total=of_output: total)
                stack.callback(handle.remove)
            try:
                with without_side_effects():
                    of_aliases = torch.autograd.grad(outputs, aliases, gradients, retain_graph=True, allow_unused=True)
            except Exception as error:  # from the code of users, or from reentrant checkpointing in the module
                self.obstacle = f"its backward pass fails: {describe_error(error)}"
                return None
        parts = {path: part for path, part in zip(self.aliases, of_aliases, strict=True) if part is not None}
        return parts if _is_sum(total, [*parts.values()], self.precision) else None


@contextmanager
def without_side_effects() -> Iterator[None]:
    """Restore the random states after the block. In it, functions run uncompiled, and other code does not see the operators."""
    with preserve_random_state(), _disable_current_modes(), uncompiled():
        yield


def _is_sum(total: Tensor, terms: Sequence[Tensor], precision: torch.dtype) -> bool:
    """Return whether a tensor is the sum of other tensors, up to rounding."""
    try:
        return bool(terms) and are_close(sum(terms[1:], start=terms[0]), total, terms, precision)
    except RuntimeError:  # from layouts without these operations
        return False


def describe_error(error: Exception) -> str:
    text = first_line(error)[:100]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@torch.no_grad()
def are_close(actual: Tensor, expected: Tensor, terms: Sequence[Tensor], precision: torch.dtype) -> bool:
    """Return whether two tensors are equal up to rounding. `MultiheadAttention` rounds differently if `query is key`.

    Args:
        expected: The expected tensor. Its NaN and infinite elements are not compared.
        terms: The summands. The tolerance is relative to their sizes; see `_sizes`.
        precision: The type with the lowest precision in the computation, besides that of the tensors.
    """
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        return False
    is_finite = expected.isfinite()
    actual, expected = (torch.where(is_finite, each, 0) for each in (actual, expected))
    if not (expected.is_floating_point() or expected.is_complex()):
        return torch.equal(actual, expected)
    limits = max(torch.finfo(expected.dtype), torch.finfo(precision), key=lambda each: each.eps)
    tolerance = limits.eps**0.75  # like the tolerances of `torch.testing`: 6e-6 for float32
    largest_difference = tolerance * sum(map(_sizes, terms)) + limits.smallest_normal
    return bool(((actual - expected).abs() <= largest_difference).all())


def _sizes(tensor: Tensor) -> Tensor:
    """Return the largest neighbour of each element along the other dimensions: outlier channels are 1e6 times as large."""
    magnitudes = tensor.nan_to_num(0, 0, 0).abs()
    if not tensor.numel():
        return magnitudes
    dims = range(tensor.dim())
    others = [[other for other in dims if other != dim] for dim in dims if len(dims) > 1]
    largest = [magnitudes.amax(dims, keepdim=True) for dims in others]
    return functools.reduce(torch.minimum, largest) if largest else magnitudes.amax()


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
