"""`via: module`: full_backward and full_backward_pre with PyTorch's own module hooks.

These add a node to the graph around the module, fail if its output is modified in place, and only see the tensors of
plain tuples. They are for users who need exactly PyTorch's behavior. While no site is scheduled, they are not
registered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..actions.base import UNKNOWN_CALL
from ..errors import ConfigError, Mistake
from ..nested import leaves, map_leaves
from ..stats.vector import unreadable
from .attached import Clock, Firing, LiveSite, Uncopied, fire_all, no_graph
from .calls import Call, Calls
from .reasons import NO_GRAPH, NO_INPUT_GRAPH, NO_TENSOR

IN_PLACE_ERROR = "BackwardHookFunction"  # part of PyTorch's error message if an output is modified in place


class ModuleBackwardHooks(Uncopied):
    """The `via: module` sites at one module.

    Raises:
        ConfigError: The module has a hook of the deprecated kind, which PyTorch does not allow in addition to these.
    """

    def __init__(self, module: nn.Module, lives: Sequence[LiveSite], clock: Clock, *, prepend: bool = False) -> None:
        if module._is_full_backward_hook is False:
            site = lives[0].site
            problem = (
                f"module {site.label!r} has a hook of PyTorch's deprecated kind (register_backward_hook), beside which "
                "PyTorch allows no full backward hook; leave 'via' out"
            )
            raise ConfigError(Mistake(f"hooks.{site.spec.name}.via", problem, written="module"))
        self.module = module
        self.prepend = prepend
        self.lives = lives
        self.clock = clock
        self.bare = True  # whether the output is a tensor, not a tuple
        self.calls = Calls(clock)
        for live in lives:
            live.module_calls = self.calls
        self.awaited: list[Call] = []  # calls whose gradients are expected, the last call first
        self.handles: list[RemovableHandle] = []

    def refresh(self) -> None:
        """Register the hooks if a site is scheduled, and remove them if none is."""
        due = any(live.due for live in self.lives)
        if due and not self.handles:
            keep = self.handles.append  # stored one by one, since PyTorch may refuse the next one
            keep(self.module.register_forward_pre_hook(self.entered, prepend=True))
            keep(self.module.register_forward_hook(self.forward))
            keep(self.module.register_full_backward_pre_hook(self.backward_pre, prepend=self.prepend))
            keep(self.module.register_full_backward_hook(self.backward, prepend=self.prepend))
        elif not due:
            self.detach()

    def entered(self, module: nn.Module, args: tuple[Any, ...]) -> None:  # noqa: ARG002
        """Start a call."""
        if self.clock.closed:
            return
        if self.calls.turn != self.clock.turn:
            self.awaited.clear()
        self.calls.enter()

    def forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:  # noqa: ARG002
        """Count the call, the gradients to expect, and the sites that cannot get one."""
        if self.clock.closed or (call := self.calls.leave()) is None or call.seen_before:
            return
        self.bare = isinstance(output, Tensor)
        if torch.is_grad_enabled() and any(tensor.requires_grad for _, tensor in leaves(output)):
            self.awaited.append(call)
        for live in () if call.again else self.lives:
            if not live.due:
                continue
            at_input = live.site.spec.tensor_role == "grad_input"
            value = args if at_input else output
            obstacle = _obstacle(live, value) if isinstance(output, Tensor | tuple) else NO_TENSOR
            if at_input and obstacle == NO_GRAPH and live.records:
                live.excuse(NO_INPUT_GRAPH)
                continue
            live.called()
            if obstacle:
                live.miss(obstacle)

    def backward_pre(self, module: nn.Module, grad_output: Any) -> Any:  # noqa: ARG002
        """The full backward pre hook."""
        return None if self.clock.closed else self._act("full_backward_pre", "grad_output", grad_output)

    def backward(self, module: nn.Module, grad_input: Any, grad_output: Any) -> Any:  # noqa: ARG002
        """The full backward hook."""
        if self.clock.closed:
            return None
        self._act("full_backward", "grad_output", grad_output)
        new = self._act("full_backward", "grad_input", grad_input)
        if self.awaited:
            self.awaited.pop()
        return new

    def _act(self, kind: str, role: str, gradients: Any) -> Any:
        lives = [
            live
            for live in self.lives
            if live.due and (live.site.spec.kind, live.site.spec.tensor_role) == (kind, role)
        ]
        if not lives:
            return None
        firing = Firing(UNKNOWN_CALL)
        if self.awaited:
            firing = Firing(self.awaited[-1].number, recompute=self.awaited[-1].again)
        fired: set[LiveSite] = set()

        def act(path: str, gradient: Tensor) -> Tensor:
            path = "" if role == "grad_output" and self.bare else path
            mine = [live for live in lives if live.takes(gradient, path) and unreadable(gradient) is None]
            fired.update(mine)
            return fire_all(mine, gradient, path, firing)

        new = map_leaves(gradients, act)
        for live in fired:
            live.hit()
        return None if new is gradients else new

    def detach(self) -> None:
        """Remove all hooks in reverse order."""
        self.awaited.clear()
        while self.handles:
            self.handles.pop().remove()


def _obstacle(live: LiveSite, value: Any) -> str:
    """Return why a site cannot get a gradient of a value; empty if it can."""
    tensors = [tensor for path, tensor in leaves(value) if live.wants(path)]
    if not tensors:
        return NO_TENSOR
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
        return no_graph()
    causes = [unreadable(tensor) for tensor in tensors if tensor.requires_grad]
    return "" if None in causes else causes[0] or ""
