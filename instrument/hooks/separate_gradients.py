"""The gradients of separate arguments, computed in the backward pass of a call from the graph of its second evaluation.

See `instrument.hooks.separate_arguments`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import first_line
from ..plan.shape_inference import preserve_random_state
from ..runtime.lazy_compiler import compiler_imported
from .clock import graph_task
from .gradient_hooks import Hook, ModuleContribution, TensorGradientHook, edge_of


class SeparateGradients:
    """The gradients of separate arguments. It refers to the graph of the second evaluation, not to that of the call.

    Args:
        count_misses: Called with the reason if the gradients are not those of the call.

    Attributes:
        aliases: The separate arguments of the second evaluation, by path. Empty if it was not possible.
        precision: The type with the lowest precision in the computation.
    """

    def __init__(self, hooks: Mapping[str, Hook], count_misses: Callable[[str], None]) -> None:
        self.hooks = hooks
        self.count_misses = count_misses
        self.aliases: dict[str, Tensor] = {}
        self.outputs: list[Tensor] = []
        self.returned: str | None = None
        self.precision = torch.float64
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
            for i, of_output in received.items():
                stack.enter_context(_gradient_of(self.outputs[i], of_output))
            try:
                with without_side_effects():
                    of_aliases = torch.autograd.grad(outputs, aliases, gradients, retain_graph=True, allow_unused=True)
            except Exception as error:  # from the code of users, or from reentrant checkpointing in the module
                self.obstacle = f"its backward pass fails: {describe_error(error)}"
                return None
        parts = {path: part for path, part in zip(self.aliases, of_aliases, strict=True) if part is not None}
        return parts if _is_sum(total, [*parts.values()], self.precision) else None


@contextmanager
def _gradient_of(output: Tensor, total: Tensor) -> Iterator[None]:
    """Give an output this gradient, which includes that of other outputs that the module computes from it."""
    handle = output.register_hook(lambda gradient: total)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def without_side_effects() -> Iterator[None]:
    """Restore the random states after the block. In it, functions run uncompiled, and other code does not see the operators."""
    uncompiled = torch.compiler.set_stance("force_eager") if compiler_imported() else nullcontext()
    with preserve_random_state(), _disable_current_modes(), uncompiled:
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
    others = [
        [other for other in range(tensor.dim()) if other != dim] for dim in range(tensor.dim()) if tensor.dim() > 1
    ]
    largest = [magnitudes.amax(dims, keepdim=True) for dims in others]
    return functools.reduce(torch.minimum, largest) if largest else magnitudes.amax()
