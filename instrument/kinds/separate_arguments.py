"""The gradients of a tensor that a module gets as several arguments: each argument has its own.

In the graph of the call, the arguments are one tensor. To record without side effects, the module must get this tensor: code
such as `query is key` decides what it computes. So the module is evaluated again, on aliases of the arguments and with the same
random numbers. The copy that is evaluated has its own parameters, buffers and attributes, and no hooks.
Submodules that are compiled, or have hooks that may change values or gradients, are not evaluated again. Their outputs are those of
the call (`instrument.kinds.replayed_calls`).

The gradients of the aliases must add up to the module's contribution to the gradient of the tensor, which is known from the graph of
the call. If the sum differs, the second evaluation differs from the call, and no gradient is recorded.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._python_dispatch import _disable_current_modes

from ..dtensor import is_sharded
from ..lazy_compiler import compiler_imported
from ..nested import iter_tensors, split_arguments
from ..plan.shape_inference import preserve_random_state
from .clock import Clock, graph_task
from .gradient_hooks import Hook, TensorGradientHook, versions_of
from .module_copies import copy_arguments, copy_modules
from .replayed_calls import GradientSource, RandomStates, ReplayedCalls


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
    """The gradients of separate arguments. It refers to the graph of the second evaluation, not to that of the call.

    Args:
        hooks: The hooks on these gradients, by path.
        count_misses: Called if the gradients are not those of the call.

    Attributes:
        aliases: The separate arguments of the second evaluation, by path. Empty if it was not possible.
        outputs: The outputs of the second evaluation.
        submodule_inputs: The inputs of the submodules that are not evaluated again, each with the source of its gradient.
        returned: The path of the alias that the module returns. None if it returns no alias.
    """

    def __init__(self, hooks: Mapping[str, Hook], count_misses: Callable[[], None]) -> None:
        self.hooks = hooks
        self.count_misses = count_misses
        self.aliases: dict[str, Tensor] = {}
        self.outputs: list[Tensor] = []
        self.submodule_inputs: list[tuple[Tensor, GradientSource]] = []
        self.returned: str | None = None
        self._received: dict[int, dict[int, Tensor]] = {}  # by backward pass, and by the index of the output
        self._lock = threading.Lock()  # several threads may run passes through one graph

    def receive_from(self, outputs: Sequence[Tensor]) -> None:
        """Register hooks on the outputs of the call, which correspond to those of the second evaluation."""
        for i, tensor in enumerate(outputs):
            TensorGradientHook(tensor, partial(self._receive, i)).finish_registration()

    def _receive(self, index: int, gradient: Tensor) -> None:
        self._received.setdefault(graph_task(), {})[index] = gradient

    def deliver(self, contribution: GradientSource, gradient: Tensor) -> None:
        """Compute the gradients, and pass them to the hooks.

        Args:
            contribution: The source of the module's contribution to the gradient of the tensor.
            gradient: The gradient of the tensor, to which other code contributes too.
        """
        total = contribution.take()
        if not self.aliases:
            return
        parts = self.parts(total)
        if parts is None:
            self.count_misses()
            return
        if self.returned is not None:
            parts[self.returned] = gradient - sum(part for path, part in parts.items() if path != self.returned)
        for path, hook in self.hooks.items():
            if path in parts:
                hook(parts[path])

    def parts(self, total: Tensor | None) -> dict[str, Tensor] | None:
        """Return the gradients of the aliases that have one.

        Args:
            total: The expected sum of these gradients. None if no gradient is expected.

        Returns:
            The gradients by path. None if their sum differs, or if they cannot be computed.
        """
        received = self._received.pop(graph_task(), {})
        given = [(tensor, found) for tensor, each in self.submodule_inputs if (found := each.take()) is not None]
        given += [(self.outputs[i], of_output) for i, of_output in received.items()]
        if total is None or not given:
            return {} if total is None else None
        outputs, gradients = zip(*given, strict=True)
        aliases = [*self.aliases.values()]
        with self._lock, ExitStack() as stack:
            for i, of_output in received.items():
                stack.enter_context(_gradient_of(self.outputs[i], of_output))
            try:
                with _without_side_effects():
                    of_aliases = torch.autograd.grad(outputs, aliases, gradients, retain_graph=True, allow_unused=True)
            except Exception:  # from the code of users, or from reentrant checkpointing in the module
                return None
        parts = {path: part for path, part in zip(self.aliases, of_aliases, strict=True) if part is not None}
        return parts if _is_sum(total, [*parts.values()]) else None


@dataclass(eq=False)
class _ArgumentGradient:
    """The source of the gradient of one argument of a submodule."""

    gradients: SeparateGradients
    contribution: GradientSource
    path: str
    taken: dict[int, dict[str, Tensor]]

    def take(self) -> Tensor | None:
        task = graph_task()
        if task not in self.taken:
            contribution = self.contribution.take()
            self.taken[task] = self.gradients.parts(contribution) or {}
        return self.taken[task].pop(self.path, None)


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
        inputs: The module and its arguments.
        tensor: The tensor that the module gets as several arguments.
        gradients: Receives the results of the second evaluation.
        clock: The clock of the probe.
        active: See `ReplayedCalls`.

    Attributes:
        tensor, gradients: See the arguments.
        calls: The calls of the submodules that are not evaluated again.
    """

    def __init__(
        self,
        inputs: Inputs,
        tensor: Tensor,
        gradients: SeparateGradients,
        clock: Clock,
        active: dict[int, ReplayedCalls],
    ) -> None:
        self.module = inputs.module
        self.given = inputs.arguments
        self.positional = inputs.positional
        self.tensor = tensor
        self.gradients = gradients
        self.calls = ReplayedCalls(inputs.module, clock, active, find_repeated_arguments)
        self.copies = copy_modules(inputs.module)  # with the attributes from before the call
        given = dict(iter_tensors(inputs.arguments))
        self.aliases = {path: _leaf(tensor) for path, each in given.items() if each is tensor}
        self.arguments = copy_arguments(inputs.arguments, self._argument)
        self.versions = versions_of(each for each in given.values() if each.requires_grad)
        self.random_states = RandomStates.now()

    @property
    def returned(self) -> str | None:
        """The path of the argument that the module returns."""
        return self.gradients.returned

    def sources(self, contribution: GradientSource) -> dict[str, GradientSource]:
        """Return where the gradient of each argument comes from, by path, given the contribution to the gradient of the tensor."""
        taken: dict[int, dict[str, Tensor]] = {}
        return {path: _ArgumentGradient(self.gradients, contribution, path, taken) for path in self.aliases}

    def _argument(self, path: str, tensor: Tensor) -> Tensor:
        """Return an argument of the second evaluation. A module may write to tensors without a gradient, such as buffers."""
        if path in self.aliases:
            return self.aliases[path]
        return tensor.detach() if tensor.requires_grad else tensor.clone()

    def evaluate(self, output: Any) -> bool:
        """Evaluate the module again, after it has run. Return whether this is possible.

        Args:
            output: The output of the module.
        """
        self.calls.release()
        given = [tensor for _, tensor in iter_tensors(self.given)]
        is_changed = any(self.versions.get(key, now) != now for key, now in versions_of(given).items())
        if self.copies is None or self.arguments is None or is_changed or _has_any_global_hook():
            return False
        if any(map(is_sharded, self.module.parameters())):  # the second evaluation would communicate
            return False
        outputs = [tensor for _, tensor in iter_tensors(self.calls.own_output(output))]
        try:
            self.calls.install(self.copies)
            again = [tensor for _, tensor in iter_tensors(self._run(self.copies[self.module], self.arguments))]
            pairs = [*zip(outputs, again, strict=True)]
            if not all(_are_close(new, old, [old]) for old, new in pairs):
                return False
        except Exception:  # the module depends on more than its arguments
            return False
        return self._store_results(pairs)

    def _store_results(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> bool:
        """Store the results of the second evaluation. Return false if it is ambiguous which argument the module returns.

        Args:
            pairs: Each output of the call with the same output of the second evaluation.
        """
        paths = {id(alias): path for path, alias in self.aliases.items()}
        returned = {paths.get(id(new)) for old, new in pairs if old is self.tensor}
        if len(returned) > 1 or None in returned:
            return False
        used = [(old, new) for old, new in pairs if old is not self.tensor and old.requires_grad and new.requires_grad]
        self.gradients.aliases = self.aliases
        self.gradients.outputs = [new for _, new in used]
        self.gradients.submodule_inputs = self.calls.inputs
        self.gradients.returned = next(iter(returned), None)
        self.gradients.receive_from([old for old, _ in used])
        return True

    def _run(self, module: nn.Module, arguments: dict[str, Any]) -> Any:
        args, kwargs = split_arguments(arguments, self.positional)
        # Other hooks on saved tensors would see those of the second graph. A tensor that refers to its graph would never be freed.
        as_they_are = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: tensor if tensor.is_leaf else tensor.detach(), lambda tensor: tensor
        )
        with _without_side_effects(), as_they_are, torch._C.DisableTorchFunction():
            self.random_states.restore()
            return module(*args, **kwargs)


@contextmanager
def _without_side_effects() -> Iterator[None]:
    """Restore the random states after the block. In it, functions run uncompiled, and other code does not see the operators."""
    uncompiled = torch.compiler.set_stance("force_eager") if compiler_imported() else nullcontext()
    with preserve_random_state(), _disable_current_modes(), uncompiled:
        yield


def find_repeated_arguments(
    module: nn.Module, arguments: dict[str, Any], positional: int, calls: ReplayedCalls
) -> list[SeparateArguments]:
    """Return the tensors with a gradient that a module gets as several arguments. Call this function before the module runs."""
    repeated = repeated_tensors(arguments)
    tensors = {
        id(tensor): tensor for _, tensor in iter_tensors(arguments) if tensor.requires_grad and id(tensor) in repeated
    }
    inputs = Inputs(module, arguments, positional)
    return [
        # The sum check of the outer module detects a missing gradient.
        SeparateArguments(inputs, tensor, SeparateGradients({}, lambda: None), calls.clock, calls.active)
        for tensor in tensors.values()
    ]


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()


def _is_sum(total: Tensor, terms: Sequence[Tensor]) -> bool:
    """Return whether a tensor is the sum of other tensors, up to rounding."""
    try:
        return bool(terms) and _are_close(sum(terms[1:], start=terms[0]), total, terms)
    except RuntimeError:  # from layouts without these operations
        return False


@torch.no_grad()
def _are_close(actual: Tensor, expected: Tensor, terms: Sequence[Tensor]) -> bool:
    """Return whether two tensors are equal up to rounding. `MultiheadAttention` rounds differently if `query is key`.

    Args:
        actual: The tensor to check.
        expected: The expected tensor. Its NaN and infinite elements are not compared.
        terms: The summands. The tolerance is relative to their sizes; see `_sizes`.
    """
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        return False
    is_finite = expected.isfinite()
    actual, expected = (torch.where(is_finite, each, 0) for each in (actual, expected))
    if not (expected.is_floating_point() or expected.is_complex()):
        return torch.equal(actual, expected)
    tolerance = torch.finfo(expected.dtype).eps ** 0.75  # like the tolerances of `torch.testing`: 6e-6 for float32
    return bool(((actual - expected).abs() <= tolerance * sum(map(_sizes, terms))).all())


def _sizes(tensor: Tensor) -> Tensor:
    """Return the size of each element for a comparison: its largest neighbour along the other dimensions.

    Elements of an outlier channel, which can be 1e6 times as large, are compared only with each other.
    """
    magnitudes = tensor.nan_to_num(0, 0, 0).abs()
    if not tensor.numel():
        return magnitudes
    others = [
        [other for other in range(tensor.dim()) if other != dim] for dim in range(tensor.dim()) if tensor.dim() > 1
    ]
    largest = [magnitudes.amax(dims, keepdim=True) for dims in others]
    return functools.reduce(torch.minimum, largest) if largest else magnitudes.amax()
