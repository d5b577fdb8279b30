"""Hooks before the step of an optimizer, the assignment of sites to one of several optimizers, and the kinds step_pre and step_post.

Their tensors are the parameter, its gradient, its update, the buffers of its module and the optimizer state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import Parameter, is_lazy
from torch.optim import Optimizer

from ..runtime.lazy_compiler import excluded_method
from ..stats.flatten import unreadable
from ..stats.portable import float32_or_wider
from ..tables.reasons import FROZEN, NO_GRADIENT_AT_STEP, NO_STATE, NO_TENSOR, NOT_OPTIMIZED
from ..tables.statistics import RATE
from .attached_hook import AttachedHook
from .clock import Clock
from .hook_group import HookGroup, StepPostHooks
from .plain_calls import are_recordings, batched_launch

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def parameter_ids(optimizer: Optimizer) -> set[int]:
    """Return the `id` of each parameter that an optimizer holds."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _parameters(attached: AttachedHook) -> set[int]:
    """Return the `id` of a site's parameter, or of all parameters of the module if the site is at a buffer."""
    if attached.role == "buffer":
        return {id(parameter) for _, parameter in attached.site.layer.own_parameters()}
    return {id(attached.current_parameter())}


class OptimizerHooks(HookGroup):
    """Base of hooks before the step of an optimizer. With `steps_by_loop`, the loop calls `before_step`, and no hook is registered."""

    def __init__(
        self,
        optimizer: Optimizer,
        optimizers: Sequence[Optimizer],
        attached_hooks: Sequence[AttachedHook],
        clock: Clock,
        *,
        steps_by_loop: bool = False,
    ) -> None:
        super().__init__(attached_hooks, clock)
        self.optimizer = optimizer
        self.optimizers = optimizers
        self.steps_by_loop = steps_by_loop

    def attach(self) -> None:
        """Register the hook before the step, unless the loop announces the step. It breaks the graph of a compiled step."""
        if not self.steps_by_loop:
            self.handles.append(self.optimizer.register_step_pre_hook(excluded_method(self.on_step)))

    def on_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        return None if optimizer in self.clock.begun else run_after_gradients(args, kwargs, self.before_step)

    def before_step(self) -> None:
        """Run the sites. The loop calls it when all gradients are complete, if it announces the step."""
        raise NotImplementedError

    def scheduled(self, attached_hooks: Sequence[AttachedHook]) -> list[AttachedHook]:
        """Return the scheduled sites that run when this optimizer makes its step, in the given order.

        A parameter belongs to the optimizers that hold it, and a buffer to those that hold a parameter of its module. Sites
        without an optimizer are assigned to the first one. Nothing is cached between steps, since a loop may add parameter
        groups.
        """
        scheduled = [attached for attached in attached_hooks if attached.is_scheduled]
        if len(self.optimizers) == 1:
            return scheduled
        optimized_ids = parameter_ids(self.optimizer)
        others = [other for other in self.optimizers if other is not self.optimizer]
        elsewhere = {key for other in others for key in parameter_ids(other)}
        is_first = self.optimizer is self.optimizers[0]
        return [
            attached
            for attached in scheduled
            if not optimized_ids.isdisjoint(keys := _parameters(attached)) or (is_first and elsewhere.isdisjoint(keys))
        ]

    def count_missing(self, attached: AttachedHook, current: Tensor | None) -> None:
        """Count that the tensor of a site does not exist. `current`: its parameter or buffer; None if it was removed."""
        if current is None:
            is_missing_buffer = attached.role == "buffer" and not attached.is_replaced
            attached.count_missed_opportunity(NO_TENSOR if is_missing_buffer else attached.removed_reason)
        elif not current.requires_grad:
            attached.count_exempt(FROZEN)
        elif id(current) not in parameter_ids(self.optimizer):
            attached.count_exempt(NOT_OPTIMIZED)
        else:
            attached.count_missed_opportunity(NO_GRADIENT_AT_STEP if attached.role == "param_grad" else NO_STATE)


def run_after_gradients(args: tuple[Any, ...], kwargs: dict[str, Any], act: Callable[[], None]) -> Arguments | None:
    """Run a function as soon as gradients exist: at once, or after each call of the closure if there is one.

    With a closure, gradients do not exist when the step begins.

    Args:
        args: The positional arguments of a pre hook of `optimizer.step`: the optimizer, and possibly the closure.

    Returns:
        The arguments with which to call the step instead; None without a closure.
    """
    optimizer, *positional = args
    closure = kwargs.get("closure", positional[0] if positional else None)
    if closure is None:
        act()
        return None

    def wrapped_closure() -> Any:
        loss = closure()
        act()
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": wrapped_closure}
    return (optimizer, wrapped_closure, *positional[1:]), kwargs


def as_rate(value: object) -> float | None:
    """Return a learning rate as a number; None if it is no number, such as a function or one number for each parameter."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        return None


class StepHooks(OptimizerHooks, StepPostHooks):
    """The step_pre and step_post sites of an optimizer, served by one hook before its `step` and one after it.

    The first one also copies the parameters whose update is recorded.
    """

    sites_with_update: frozenset[AttachedHook] = frozenset()  # whose buffer contains the update already
    copied_at: int | None = None  # the training step of the copies of parameters, until the optimizer makes its step

    def attach(self) -> None:
        """Register the hook after the step, and the one before it unless the loop announces the step. Both break a compiled step."""
        self.parameters_before: dict[AttachedHook, Tensor] = {}  # the buffers for parameters before their update
        # The gradients that parameters have now, with their versions, by the `id` of the parameter.
        self._old_gradients: dict[int, tuple[Tensor, int]] = {}
        self.register_after_step(self.optimizer, in_graphs=False)
        sites = (attached for attached in self.of_kind("step_post") if attached.role == "update")
        for parameter in (attached.current_parameter() for attached in sites):
            if parameter is not None and (gradient := parameter.grad) is not None:
                self._old_gradients[id(parameter)] = gradient, gradient._version
        super().attach()

    def on_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """The hook before the step. Sites on gradients run after the closure if there is one."""
        if self.clock.closed or optimizer in self.clock.begun:
            return None
        self._act([attached for attached in self.of_kind("step_pre") if attached.role != "param_grad"])
        self.copy_parameters()
        of_gradients = [attached for attached in self.of_kind("step_pre") if attached.role == "param_grad"]
        return run_after_gradients(args, kwargs, partial(self._act, of_gradients))

    def before_step(self) -> None:
        """Run the step_pre sites, then copy parameters. Call it when all gradients are complete."""
        self._act(self.of_kind("step_pre"))
        self.copy_parameters()

    @torch.no_grad()
    def copy_parameters(self, *, again: bool = True) -> None:
        """Copy the parameters before their update into buffers that are reused at the next step. A wrapper does so when its step begins.

        The copies are float32 or wider: a difference of half-precision numbers would lose most updates.

        Args:
            again: Whether to replace copies of the same training step, which a wrapper does not do while it accumulates gradients.
        """
        if self.optimizer not in self.clock.after_wrapper and (again or self.copied_at != self.clock.moment.step):
            self.copied_at = self.clock.moment.step
            with self.clock.timer or nullcontext():
                self._copy_parameters()

    def _copy_parameters(self) -> None:
        copies: list[tuple[Tensor, Tensor]] = []
        sites = [attached for attached in self.scheduled(self.of_kind("step_post")) if attached.role == "update"]
        parameters = [attached.current_parameter() for attached in sites]
        untrained = self._untrained(parameters)
        for attached, parameter in zip(sites, parameters, strict=True):
            is_readable = type(parameter) is Parameter or (parameter is not None and unreadable(parameter) is None)
            if parameter is None or not is_readable or id(parameter) in untrained:
                self.parameters_before.pop(attached, None)
                continue
            buffer, wide = self.parameters_before.get(attached), float32_or_wider(parameter.dtype)
            wanted = parameter.shape, wide, parameter.device
            if buffer is None or (buffer.shape, buffer.dtype, buffer.device) != wanted:
                buffer = self.parameters_before[attached] = torch.empty_like(parameter, dtype=wide)
            copies.append((buffer, parameter))
        together = [pair for pair in copies if _supports_foreach(*pair)]
        if together:
            torch._foreach_copy_([copy for copy, _ in together], [original for _, original in together])
        for copy, original in copies:
            if not _supports_foreach(copy, original):
                copy.copy_(original)

    def _untrained(self, parameters: Sequence[Parameter | None]) -> set[int]:
        """Return the `id` of those that no optimizer holds and that have no new gradient, such as those of a target network.

        Empty if the optimizers hold none of them: they may hold copies.
        """
        without_gradient = {
            id(each) for each in parameters if each is not None and each.requires_grad and not self._has_gradient(each)
        }
        if not without_gradient:
            return set()
        held = {key for optimizer in self.optimizers for key in parameter_ids(optimizer)}
        return set() if held.isdisjoint(map(id, parameters)) else without_gradient - held

    def _has_gradient(self, parameter: Parameter) -> bool:
        """Return whether a parameter has a gradient that is not that of an earlier training."""
        gradient, old = parameter.grad, self._old_gradients.get(id(parameter))
        if gradient is None or old is None:
            return gradient is not None
        if gradient is old[0] and gradient._version == old[1]:
            return False
        del self._old_gradients[id(parameter)]
        return True

    def after_step(self, optimizer: Optimizer) -> None:
        """Run the step_post sites, after the step of a wrapper if there is one."""
        if self.clock.closed:
            return
        self.copied_at, act = None, partial(self._act, self.of_kind("step_post"))
        if optimizer in self.clock.after_wrapper:
            self.clock.after_wrapper[optimizer] = act
        else:
            act()

    @torch.no_grad()
    def _act(self, attached_hooks: Sequence[AttachedHook]) -> None:
        scheduled = self.scheduled(attached_hooks)
        # If no hook changes a parameter, all updates are computed first. Otherwise later hooks see the change.
        self.sites_with_update = self._subtract_parameters(scheduled) if are_recordings(scheduled) else frozenset()
        if sites := self._sites_with_rate.intersection(scheduled):
            groups = self.optimizer.param_groups
            rates = {id(parameter): group.get("lr") for group in groups for parameter in group["params"]}
            for attached in sites:
                attached.state["rate"] = rates.get(id(attached.current_parameter()))
        with batched_launch(scheduled):
            for attached in scheduled:
                parameter = attached.current_parameter()
                tensor = self._tensor(attached, parameter)
                if tensor is None:
                    continue
                if not attached.is_record_hook:
                    attached.prepare([tensor])
                new = attached.count_and_fire(tensor, value=parameter if attached.role == "update" else None)
                if new is not tensor and new is not None:
                    tensor.copy_(new)

    @cached_property
    def _sites_with_rate(self) -> frozenset[AttachedHook]:
        return frozenset(attached for attached in self.attached_hooks if attached.needs(RATE))

    def _subtract_parameters(self, scheduled: Sequence[AttachedHook]) -> frozenset[AttachedHook]:
        """Turn copies of plain parameters before their update into the updates, and return the sites that have one."""
        pairs = {
            attached: (buffer, parameter)
            for attached in scheduled
            if attached.role == "update"
            and (parameter := attached.current_parameter()) is not None
            and (buffer := self._parameter_before(attached, parameter)) is not None
            and _supports_foreach(buffer, parameter)
        }
        if pairs:
            buffers = [buffer for buffer, _ in pairs.values()]
            # -a + b has the bits of b - a.
            torch._foreach_neg_(buffers)
            torch._foreach_add_(buffers, [parameter for _, parameter in pairs.values()])
        return frozenset(pairs)

    def _parameter_before(self, attached: AttachedHook, parameter: Tensor) -> Tensor | None:
        """Return the copy of a parameter before its update; None if it did not exist, or had another shape."""
        buffer = self.parameters_before.get(attached)
        return buffer if buffer is not None and buffer.shape == parameter.shape else None

    def _tensor(self, attached: AttachedHook, parameter: Parameter | None) -> Tensor | None:
        """Return the tensor of a site. If it does not exist, note the reason and return None."""
        role, is_present = attached.role, not attached.is_replaced
        current = parameter if role != "buffer" else attached.site.current_tensor if is_present else None
        if current is not None and is_lazy(current):
            return current
        tensor = None if current is None else self._in_role(attached, role, current)
        if tensor is None:
            self.count_missing(attached, current)
        return tensor

    def _in_role(self, attached: AttachedHook, role: str, current: Tensor) -> Tensor | None:
        match role:
            case "buffer":
                return current
            case "param":
                return current.detach()
            case "param_grad":
                return current.grad
            case "update":
                buffer = self._parameter_before(attached, current)
                if buffer is None:  # an unreadable tensor has its own reason
                    return None if unreadable(current) is None else current
                computed = attached in self.sites_with_update
                return buffer if computed else torch.sub(current.to(buffer.dtype), buffer, out=buffer)
        state = self.optimizer.state.get(current, {}).get(role.removeprefix("state."))
        return state if isinstance(state, Tensor) else None


def _supports_foreach(buffer: Tensor, parameter: Tensor) -> bool:
    """Return whether a parameter and its copy are of no subclass, and the copy can store the parameter exactly. float8 is not supported."""
    is_known = type(parameter) in (Tensor, Parameter) and type(buffer) is Tensor and not is_lazy(parameter)
    return (
        is_known and parameter.dtype.itemsize > 1 and torch.promote_types(buffer.dtype, parameter.dtype) == buffer.dtype
    )
