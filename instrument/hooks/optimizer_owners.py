"""Hooks before the step of an optimizer, and the assignment of sites to one of several optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..runtime.lazy_compiler import excluded_method
from ..tables.reasons import FROZEN, NO_GRADIENT_AT_STEP, NO_STATE, NO_TENSOR, NOT_OPTIMIZED, REMOVED
from .attached_hook import AttachedHook
from .clock import Clock
from .hook_group import HookGroup

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
        if optimizer in self.clock.begun:
            return None
        return run_after_gradients(args, kwargs, self.before_step)

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
            attached.count_missed_opportunity(NO_TENSOR if attached.role == "buffer" else REMOVED)
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
