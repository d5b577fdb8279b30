"""Calls of submodules that are compiled or have hooks that may change values or gradients, in one call of a module.

If the module is evaluated again (`instrument.hooks.separate_arguments`), these submodules and their hooks do not run a second
time. Their outputs are those of the call, and their contributions to the gradients of their inputs are read from its graph.
"""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ..runtime.lazy_compiler import runs_compiled
from ..values.nested import iter_tensors, join_arguments, map_tensors
from .clock import Clock
from .gradient_contribution import Edge, ModuleContribution, edge_of, find_contributions, next_sequence_number
from .gradient_hooks import ViewBase, ViewRegion, versions_of
from .hook_group_interface import InertWhenCopied

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class RandomStates(NamedTuple):
    """The states of the global random generators."""

    python: Any
    numpy: Any
    torch: Tensor
    cuda: list[Tensor]

    @classmethod
    def now(cls) -> RandomStates:
        """Return the current states."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda)

    def restore(self) -> None:
        """Set the states."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)


class GradientSource(Protocol):
    """Provides a gradient that the backward pass through the call has computed."""

    def take(self) -> Tensor | None:
        """Return and remove the gradient of the current backward pass. None if there was no gradient."""


class RepeatedArgument(Protocol):
    """A tensor that a submodule gets as several arguments; see `instrument.hooks.separate_arguments.SeparateArguments`."""

    tensor: Tensor
    calls: ReplayedCalls

    def sources(self, contribution: GradientSource) -> dict[str, GradientSource]:
        """Return where the gradient of each argument comes from, by path, given the contribution to the gradient of the tensor."""

    def evaluate(self, output: Any) -> str | None:
        """Evaluate the submodule again, after it has run. Return why this is not possible."""

    @property
    def returned(self) -> str | None:
        """The path of the argument that the submodule returns."""


class ReplayedCall:
    """One call of a submodule.

    Args:
        module: The submodule.
        arguments: Its arguments by name, before its hooks change them.
        repeated: The tensors that occur several times in these arguments.
    """

    def __init__(self, module: nn.Module, arguments: dict[str, Any], repeated: Sequence[RepeatedArgument]) -> None:
        self.module = module
        self.repeated = repeated
        self._tensors = dict(iter_tensors(arguments))
        self._versions = versions_of(self._tensors.values())
        with_gradient = {path: tensor for path, tensor in self._tensors.items() if tensor.requires_grad}
        self._contributions = {edge_of(tensor): ModuleContribution() for tensor in with_gradient.values()}
        self._sources: dict[str, GradientSource] = {
            path: self._contributions[edge_of(tensor)] for path, tensor in with_gradient.items()
        }
        self._views: dict[Edge, list[tuple[ModuleContribution, ViewRegion]]] = {}
        for edge, tensor in {edge_of(tensor): tensor for tensor in with_gradient.values()}.items():
            if (base := ViewBase.of(tensor)) is not None:  # the submodule may write to it
                self._views.setdefault((base.node, base.output), []).append((self._contributions[edge], base.region))
        self._since = next_sequence_number()

    def release(self) -> None:
        """Remove the hooks on parts of the submodule."""
        for each in self.repeated:
            each.calls.release()

    def end(self, output: Any) -> None:
        """Record the output of the submodule after its hooks, and start to collect its contributions."""
        tensors = [tensor for _, tensor in iter_tensors(output)]
        find_contributions(tensors, self._contributions, self._views, self._since)
        for each in self.repeated:
            each.evaluate(output)
        is_given = {key: version == self._versions.get(key) for key, version in versions_of(tensors).items()}
        self._output = map_tensors(  # other code may write to the output later
            output, lambda path, tensor: tensor if is_given.get(id(tensor)) else tensor.detach().clone()
        )
        self._random_states = RandomStates.now()

    def replay(self, arguments: dict[str, Any]) -> tuple[Any, list[tuple[Tensor, GradientSource]]]:
        """Return the recorded output, and the new arguments that have a gradient, each with its gradient source."""
        tensors, sources = dict(iter_tensors(arguments)), dict(self._sources)
        new = {id(self._tensors[path]): tensor for path, tensor in tensors.items()}
        for each in self.repeated:
            paths = [path for path, tensor in self._tensors.items() if tensor is each.tensor]
            if len({id(tensors[path]) for path in paths}) > 1:
                sources |= each.sources(sources[paths[0]])
                new[id(each.tensor)] = tensors[each.returned or paths[0]]
        self._random_states.restore()
        inputs = {source: tensors[path] for path, source in sources.items() if tensors[path].requires_grad}
        output = map_tensors(self._output, lambda path, tensor: new.get(id(tensor), tensor))
        return output, [(tensor, source) for source, tensor in inputs.items()]


FindRepeated = Callable[[nn.Module, dict[str, Any], int, "ReplayedCalls"], Sequence[RepeatedArgument]]
"""Takes a module, its arguments by name, the number of positional ones, and the calls that the module is one of."""


class ReplayedCalls(InertWhenCopied):
    """The calls of the submodules that the second evaluation does not run. Create this object before the module runs.

    Args:
        module: The module.
        clock: The clock of the probe.
        active: Contains this object, by its identity, until `release`.
        find_repeated: Returns the tensors that a submodule gets as several arguments.

    Attributes:
        micro_step_index: The micro-step of the call.
        inputs: The inputs of these submodules in the second evaluation that have a gradient, each with its gradient source.
    """

    def __init__(
        self, module: nn.Module, clock: Clock, active: dict[int, ReplayedCalls], find_repeated: FindRepeated
    ) -> None:
        self.clock = clock
        self.micro_step_index = clock.micro_step_index
        self.module = module
        self.active = active
        self.find_repeated = find_repeated
        self.inputs: list[tuple[Tensor, GradientSource]] = []
        self._calls: defaultdict[nn.Module, list[ReplayedCall]] = defaultdict(list)
        self._running: list[ReplayedCall] = []
        self._output: tuple[Any, ...] = ()
        self._thread = threading.get_ident()
        self._restorations: list[Callable[[], None]] = []
        active[id(self)] = self
        self._watch_parts(module, set())

    def _watch_parts(self, module: nn.Module, visited: set[nn.Module]) -> None:
        visited.add(module)
        changes = any(_may_change(hook) for name in _HOOKS for hook in getattr(module, name).values())
        if module is self.module:
            if changes:
                self._restorations.append(module.register_forward_hook(self._record_own_output, prepend=True).remove)
        elif module._compiled_call_impl is not None:
            self._restorations.append(_WatchedCall.watch(module, self))
            return
        elif changes or runs_compiled(module):
            start = module.register_forward_pre_hook(self.start, prepend=True, with_kwargs=True)
            self._restorations += [start.remove, module.register_forward_hook(self.end).remove]
        for part in () if module is not self.module and runs_compiled(module) else module.children():
            if part not in visited:
                self._watch_parts(part, visited)

    def release(self) -> None:
        """Remove the hooks of this object and of its running calls."""
        while self._restorations:
            self._restorations.pop()()
        while self._running:
            self._running.pop().release()
        self.active.pop(id(self), None)

    def own_output(self, output: Any) -> Any:
        """Return the output of the module before its hooks, given the one after some of them."""
        return self._output[0] if self._output else output

    def _is_active(self) -> bool:
        return not is_dynamo_compiling() and not self.clock.closed and self._thread == threading.get_ident()

    def _record_own_output(self, module: nn.Module, args: object, output: Any) -> None:  # noqa: ARG002
        if self._is_active():
            self._output = (output,)

    def start(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """The forward pre hook of a submodule."""
        if self._is_active():
            arguments = join_arguments(args, kwargs)
            repeated = self.find_repeated(module, arguments, len(args), self)
            self._running.append(ReplayedCall(module, arguments, repeated))

    def end(self, module: nn.Module, args: object, output: Any) -> None:  # noqa: ARG002
        """The forward hook of a submodule."""
        if not (self._is_active() and any(call.module is module for call in self._running)):
            return
        while (call := self._running.pop()).module is not module:  # an exception ended the call
            call.release()
        if self._running:  # the output of the outer call is replayed
            call.release()
            return
        call.end(output)
        self._calls[module].append(call)

    def install(self, copies: Mapping[nn.Module, nn.Module]) -> None:
        """Make the copies of the submodules return the recorded outputs.

        Args:
            copies: The copy of each submodule. They are used for one evaluation.
        """
        for part, calls in self._calls.items():
            copies[part].forward = partial(self._replay, iter(calls))

    def _replay(self, calls: Iterator[ReplayedCall], *args: Any, **kwargs: Any) -> Any:
        output, inputs = next(calls).replay(join_arguments(args, kwargs))
        self.inputs += inputs
        return output


class _WatchedCall:
    """Watches a module whose hooks are part of compiled code. Several calls may watch it at the same time."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        self.module = module
        self.call = call
        self.watching: list[ReplayedCalls] = []

    @classmethod
    def watch(cls, module: nn.Module, calls: ReplayedCalls) -> Callable[[], None]:
        """Let calls watch a compiled module. Return the function that ends it."""
        watched = module._compiled_call_impl
        if not isinstance(watched, cls):
            watched = cls(module, cast("Callable[..., Any]", watched))
            module._compiled_call_impl = watched
        watched.watching.append(calls)
        return partial(watched.end, calls)

    def end(self, calls: ReplayedCalls) -> None:
        """Let calls no longer watch the module."""
        self.watching.remove(calls)
        if not self.watching and self.module._compiled_call_impl is self:
            self.module._compiled_call_impl = self.call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        watching = [*self.watching]
        for calls in watching:
            calls.start(self.module, args, kwargs)
        output = self.call(*args, **kwargs)
        for calls in watching:
            calls.end(self.module, args, output)
        return output


def _may_change(hook: Any) -> bool:
    """Return whether a hook may change values or gradients. Record hooks of this package change neither."""
    owner = getattr(hook, "__self__", None)
    is_package_hook = isinstance(owner, InertWhenCopied)
    return not is_package_hook or not all(attached.is_record_hook for attached in owner.attached_hooks)  # type: ignore[union-attr]
