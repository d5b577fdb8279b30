"""The gradients of a tensor that a module gets as several arguments: each argument has its own.

In the graph of the call, the arguments are one tensor. To record without side effects, the module must get this tensor: code
such as `query is key` decides what it computes. So the module is evaluated again, on aliases of the arguments and with the same
random numbers. The copy that is evaluated shares the parameters of the module. It has no hooks and its own buffers and attributes.
"""

from __future__ import annotations

import copy
import random
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..dtensor import is_sharded
from ..nested import iter_tensors, map_tensors, split_arguments
from ..plan.shape_inference import preserve_random_state
from .clock import graph_task
from .gradient_hooks import Hook, TensorGradientHook

_SIMPLE = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.Size)


class Inputs(NamedTuple):
    """What a module is called with.

    Attributes:
        module: The module.
        arguments: Its arguments by name; see `join_arguments`.
        positional: The number of positional arguments.
    """

    module: nn.Module
    arguments: dict[str, Any]
    positional: int


def repeated_tensors(value: Any) -> set[int]:
    """Return the identities of the tensors that occur at several paths."""
    counts = Counter(id(tensor) for _, tensor in iter_tensors(value))
    return {identity for identity, count in counts.items() if count > 1}


class SeparateGradients:
    """The gradients of separate arguments. It refers to the graph of the second evaluation, not to that of the call."""

    def __init__(self) -> None:
        self.outputs: list[Tensor] = []
        self.aliases: list[Tensor] = []
        self.hooks: list[Hook] = []
        self._received: dict[int, dict[int, Tensor]] = {}  # by backward pass, and by the index of the output
        self._lock = threading.Lock()  # several threads may run passes through one graph

    def receive_from(self, outputs: Sequence[Tensor]) -> None:
        """Register hooks on the outputs of the call, which correspond to those of the second evaluation."""
        for i, tensor in enumerate(outputs):
            TensorGradientHook(tensor, partial(self._receive, i)).finish_registration()

    def _receive(self, index: int, gradient: Tensor) -> None:
        self._received.setdefault(graph_task(), {})[index] = gradient

    def deliver(self, gradient: Tensor) -> None:  # noqa: ARG002
        """The hook on the tensor: all gradients of the outputs have arrived."""
        received = self._received.pop(graph_task(), {})
        if not received:
            return
        outputs = [self.outputs[i] for i in received]
        gradients = [*received.values()]
        with self._lock, ExitStack() as stack:
            for output, total in zip(outputs, gradients, strict=True):
                stack.enter_context(_gradient_of(output, total))
            parts = torch.autograd.grad(outputs, self.aliases, gradients, retain_graph=True, allow_unused=True)
        for hook, part in zip(self.hooks, parts, strict=True):
            if part is not None:
                hook(part)


@contextmanager
def _gradient_of(output: Tensor, total: Tensor) -> Iterator[None]:
    """Give an output this gradient, which includes that of other outputs that the module computes from it."""
    handle = output.register_hook(lambda gradient: total)
    try:
        yield
    finally:
        handle.remove()


class SeparateArguments:
    """Evaluates a module again with separate arguments. Create it before the module runs.

    Args:
        inputs: What the module is called with.
        hooks: The hooks on the gradients of those arguments that are the same tensor, by path.
    """

    def __init__(self, inputs: Inputs, hooks: dict[str, Hook]) -> None:
        self.inputs = inputs
        self.hooks = hooks
        self.copy = _copy(inputs.module)  # with the attributes from before the call
        self.versions = self._versions()
        self.random_states = random.getstate(), np.random.get_state(), torch.get_rng_state()
        self.cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def evaluate(self, output: Any, gradients: SeparateGradients) -> bool:
        """Evaluate the module again, after it has run. Return whether this is possible.

        Args:
            output: The output of the module.
            gradients: Gets the results.
        """
        tensors = dict(iter_tensors(self.inputs.arguments))
        given = {id(tensor) for tensor in tensors.values()}
        outputs = [tensor for _, tensor in iter_tensors(output) if tensor.requires_grad]
        if not given.isdisjoint(map(id, outputs)) or not _is_simple(self.inputs.arguments):
            return False
        writes = self._versions() != self.versions  # to its arguments or parameters
        if self.copy is None or writes or any(map(is_sharded, self.inputs.module.parameters())):
            return False
        separate = {id(tensors[path]) for path in self.hooks}
        aliases = {path: tensor.detach().requires_grad_() for path, tensor in tensors.items() if id(tensor) in separate}
        try:
            again = [tensor for _, tensor in iter_tensors(self._run(self.copy, aliases)) if tensor.requires_grad]
            if not all(
                _are_close(*pair) for pair in zip(again, outputs, strict=True)
            ):  # such as with hooks in the module
                return False
        except Exception:  # the module depends on more than its arguments
            return False
        gradients.outputs, gradients.aliases = again, [aliases[path] for path in self.hooks]
        gradients.hooks = [*self.hooks.values()]
        gradients.receive_from(outputs)
        return True

    def _versions(self) -> list[int]:
        tensors = [tensor for _, tensor in iter_tensors(self.inputs.arguments)]
        return [tensor._version for tensor in (*tensors, *self.inputs.module.parameters()) if not tensor.is_inference()]

    def _run(self, module: nn.Module, aliases: dict[str, Tensor]) -> Any:
        """Return the output of the copy of the module, which gets the aliases as arguments."""
        _, arguments, positional = self.inputs
        arguments = map_tensors(arguments, lambda path, tensor: aliases.get(path, tensor.detach()))
        args, kwargs = split_arguments(arguments, positional)
        python, numpy, own = self.random_states
        as_they_are = torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda tensor: tensor)
        with preserve_random_state(), as_they_are, torch._C.DisableTorchFunction():
            random.setstate(python)
            np.random.set_state(numpy)
            torch.set_rng_state(own)
            if self.cuda_states:
                torch.cuda.set_rng_state_all(self.cuda_states)
            return module(*args, **kwargs)


def _copy(module: nn.Module) -> nn.Module | None:
    """Return a copy of a module and its submodules that shares the parameters and has no hooks.

    None if an attribute cannot be copied: the second evaluation could change it.
    """
    copies: dict[nn.Module, nn.Module] = {part: part.__new__(type(part)) for part in module.modules()}
    known: dict[int, Any] = {id(part): new for part, new in copies.items()}
    known |= {id(parameter): parameter for parameter in module.parameters()}
    try:
        for part, new in copies.items():
            for name, value in part.__dict__.items():
                if name.endswith("_hooks") and isinstance(value, OrderedDict):
                    new.__dict__[name] = OrderedDict()
                    continue
                if isinstance(value, FunctionType) and any(
                    isinstance(cell.cell_contents, nn.Module) for cell in value.__closure__ or ()
                ):
                    return None  # such as a `forward` of this module, which would be called instead of the copy
                for _, tensor in iter_tensors(value):  # `deepcopy` refuses tensors of a graph
                    if id(tensor) not in known:
                        known[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
                new.__dict__[name] = copy.deepcopy(value, known)
            new.__dict__["_compiled_call_impl"] = None
    except Exception:  # from the attributes of users
        return None
    return copies[module]


def _are_close(one: Tensor, other: Tensor) -> bool:
    """Return whether two outputs are equal but for rounding: `MultiheadAttention` adds up differently if `query is key`."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    one, other = one.detach(), other.detach()
    tolerance = torch.finfo(other.dtype).eps ** 0.75  # like the tolerances of `torch.testing`: 6e-6 for float32
    size = other.nan_to_num(0, 0, 0).abs().amax().item() if other.numel() else 0.0
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * size, equal_nan=True)


def _is_simple(value: Any) -> bool:
    """Return whether arguments are tensors and numbers: a module may write to other objects, such as caches."""
    if isinstance(value, dict):
        return all(map(_is_simple, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_simple, value))
    return isinstance(value, (Tensor, *_SIMPLE))
