"""`via: module`: full_backward and full_backward_pre with PyTorch's own module hooks.

These add a node to the graph around the module, fail if its output is modified in place, and only see the tensors of
plain tuples. They are for users who need exactly PyTorch's behavior. While no site is scheduled, they are not
registered.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ..actions.base import UNKNOWN_CALL
from ..errors import ConfigError, HookError, Problem
from ..plan.hook_plan import Site
from ..stats.flatten import unreadable
from ..tables.reasons import NO_GRAPH, NO_INPUT_GRAPH, NOT_SEEN_BY_PYTORCH
from ..values.nested import iter_tensors
from .attached_hook import AttachedHook, act_on_tensors, no_gradient_reason
from .clock import FiringIndex
from .compiled_hooks import export_refusal
from .hook_group_interface import ModuleCallHooks
from .module_calls import Call, Calls

IN_PLACE_ERROR = "BackwardHookFunction"  # part of PyTorch's error message if an output is modified in place


class ModuleBackwardHooks(ModuleCallHooks):
    """The `via: module` sites at one module.

    Raises:
        ConfigError: The module has a hook of the deprecated kind, which PyTorch does not allow in addition to these.
    """

    def __init__(self, attached_hooks: Sequence[AttachedHook], calls: Calls, *, prepend: bool) -> None:
        if attached_hooks[0].site.layer.module._is_full_backward_hook is False:
            site = attached_hooks[0].site
            message = (
                f"module {site.label!r} has a hook of PyTorch's deprecated kind (register_backward_hook), which PyTorch "
                "does not allow together with a full backward hook"
            )
            raise ConfigError(Problem(f"hooks.{site.spec.name}.via", message, given="module", fix="remove 'via'"))
        super().__init__(attached_hooks, calls)
        self.prepend = prepend
        self.returns_tensor = True  # whether the output is a tensor, not a tuple
        # By PyTorch's object for the backward hooks of one call: the call and its counters. They count the backward passes by kind and
        # role, and the firings of each site.
        self.expected_calls: WeakKeyDictionary[object, tuple[Call, defaultdict[object, count[int]]]] = (
            WeakKeyDictionary()
        )

    def refresh(self) -> None:
        """Register the hooks if a site is scheduled, and remove them if none is."""
        scheduled = any(attached.is_scheduled for attached in self.attached_hooks)
        if scheduled and not self.handles:
            keep = self.handles.append  # stored one by one, since PyTorch may refuse the next one
            try:
                keep(self.module.register_forward_pre_hook(self.forward_pre, prepend=True))
                keep(self.module.register_forward_hook(self.forward))
                keep(self.module.register_full_backward_pre_hook(self.backward_pre, prepend=self.prepend))
                keep(self.module.register_full_backward_hook(self.backward, prepend=self.prepend))
            except BaseException:
                self.detach()
                raise
        elif not scheduled:
            self.detach()

    def forward_pre(self, module: nn.Module, args: tuple[Any, ...]) -> None:  # noqa: ARG002
        """Start a call."""
        if self.clock.closed:
            return
        if is_compiling() and (refusal := export_refusal(self.attached_hooks)):  # torch.export runs this code
            raise HookError(refusal)
        self.calls.enter(self, args)

    def forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:  # noqa: ARG002
        """Count the call, the gradients to expect, and the sites that cannot get one."""
        if self.clock.closed or (call := self.calls.leave(self)) is None or call.graph_is_discarded:
            return
        self.returns_tensor = isinstance(output, Tensor)
        if torch.is_grad_enabled() and any(tensor.requires_grad for _, tensor in iter_tensors(output)):
            owner = sys._getframe(1).f_locals.get("bw_hook")
            if owner is not None:
                self.expected_calls[owner] = call, defaultdict(count)
        for attached in () if call.repeats else self.attached_hooks:
            if not attached.is_scheduled:
                continue
            at_input = attached.role == "grad_input"
            value = args if at_input else output
            obstacle = _obstacle(attached, value) if isinstance(output, Tensor | tuple) else NOT_SEEN_BY_PYTORCH
            if at_input and obstacle == NO_GRAPH and attached.is_record_hook:
                attached.count_exempt(NO_INPUT_GRAPH)
                continue
            attached.count_opportunity()
            if obstacle:
                attached.count_miss(obstacle)

    def backward_pre(self, module: nn.Module, grad_output: Any) -> Any:  # noqa: ARG002
        """The full backward pre hook."""
        return None if self.clock.closed else self._act("full_backward_pre", "grad_output", grad_output)

    def backward(self, module: nn.Module, grad_input: Any, grad_output: Any) -> Any:  # noqa: ARG002
        """The full backward hook."""
        if self.clock.closed:
            return None
        self._act("full_backward", "grad_output", grad_output)
        return self._act("full_backward", "grad_input", grad_input)

    def _act(self, kind: str, role: str, gradients: Any) -> Any:
        attached_hooks = [
            attached
            for attached in self.attached_hooks
            if attached.is_scheduled and (attached.site.spec.kind, attached.role) == (kind, role)
        ]
        if not attached_hooks:
            return None
        owner = sys._getframe(2).f_locals.get("self")
        call, counters = (None if owner is None else self.expected_calls.get(owner)) or (None, defaultdict(count))
        firing = FiringIndex(UNKNOWN_CALL) if call is None else call.firing(next(counters[kind, role]))
        is_tensor = role == "grad_output" and self.returns_tensor
        value = gradients[0] if is_tensor else gradients
        new, fired, _ = act_on_tensors(attached_hooks, value, firing)
        for attached in fired:
            attached.count_gradient(is_repeated=bool(next(counters[attached])))
        if new is value:
            return None
        return (new,) if is_tensor else new

    def detach(self) -> None:
        """Remove all hooks in reverse order."""
        self.expected_calls.clear()
        super().detach()


def _obstacle(attached: AttachedHook, value: Any) -> str:
    """Return why a site cannot get a gradient of a value; empty if it can."""
    tensors = [tensor for path, tensor in iter_tensors(value) if attached.matches_path(path)]
    if not tensors:
        return NOT_SEEN_BY_PYTORCH
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
        return no_gradient_reason()
    reasons = [unreadable(tensor) for tensor in tensors if tensor.requires_grad]
    return "" if None in reasons else reasons[0] or ""


def in_place_message(sites: Sequence[Site], step: int) -> str:
    """Return the message for an output that was changed in place after these hooks.

    Args:
        sites: All sites of the plan. Those with `via: module` are named.
    """
    affected = [site for site in sites if site.spec.via == "module"]
    names = ", ".join(dict.fromkeys(f"{site.label!r} ({site.layer.type})" for site in affected))
    return (
        f"hook {affected[0].spec.name!r} ({affected[0].spec.kind}) at step {step}: with 'via: module' PyTorch wraps the "
        f"output of a layer, and a later operation changes one of these outputs in place; the layers are {names}. Remove "
        "'via': tensor hooks give the same values and allow in-place operations"
    )
