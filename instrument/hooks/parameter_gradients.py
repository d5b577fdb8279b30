"""Kinds on a parameter's gradient: parameter_grad_micro, post_accumulate_grad and parameter_grad.

They see the gradient of a micro-batch, the accumulated gradient, and the gradient before the optimizer step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.parameter import Parameter, is_lazy

from ..actions.context_sums import MicroGradients
from ..runtime.lazy_compiler import excluded_method
from ..tables.reasons import CLEARED, NO_SHARD_GRADIENT, SWAPPED
from ..tables.statistics import NOISE
from ..values.dtensor import is_gathered, is_sharded
from .attached_hook import AttachedHook, fire_all, unscaled
from .clock import Clock, FiringIndex
from .hook_group import HookGroup
from .optimizer import OptimizerHooks, parameter_ids
from .plain_calls import CallIndices, batched_launch


class GradientHooks(HookGroup):
    """The parameter_grad_micro and post_accumulate_grad sites at one parameter.

    For parameter_grad sites with the statistic `gradient_noise`, it measures the gradients of micro-batches.
    The hooks are also registered on frozen parameters and on lazy ones without values, and fire from the first gradient
    on. They are lost if the parameter is replaced (`load_state_dict(assign=True)`, a new `nn.Parameter`) or swapped with another
    one (`torch.utils.swap_tensors`). `is_lost` detects this, and `attach` registers them on a new parameter.
    """

    def __init__(self, attached_hooks: Sequence[AttachedHook], clock: Clock) -> None:
        super().__init__(attached_hooks, clock)
        self.micro, self.accumulated = self.of_kind("parameter_grad_micro"), self.of_kind("post_accumulate_grad")
        self.measured = {
            attached: MicroGradients(clock.replicas, is_summed=clock.sums_gradients)
            for attached in attached_hooks
            if attached.needs(NOISE)
        }
        for attached, gradients in self.measured.items():
            attached.state["micro_gradients"] = gradients
        self.site = attached_hooks[0]
        self.passes = {kind: CallIndices() for kind in ("micro", "accumulated")}
        self.parameter: Parameter | None = None
        self.is_swapped = False  # whether PyTorch calls no more hooks on it
        self._content = 0  # of the parameter: the address of what `torch.utils.swap_tensors` exchanges

    def is_lost(self) -> bool:
        """Return whether the parameter is not the one with the hooks. Also note whether it is trained from now on."""
        parameter = self.site.current_parameter()
        if is_gathered(parameter, self.parameter):
            parameter = self.parameter
        for attached in self.attached_hooks:
            attached.requires_grad_at_start = parameter is not None and parameter.requires_grad
        return parameter is not self.parameter or (parameter is not None and parameter._cdata != self._content)

    def attach(self) -> None:
        """Register the hooks on the current parameter, if they are lost, and remove those on the earlier one."""
        if not self.is_lost():
            return
        self.detach()
        parameter = self.site.current_parameter()
        self.is_swapped = parameter is not None and parameter is self.parameter
        self.parameter, self._content = parameter, 0 if parameter is None else parameter._cdata
        if self.is_swapped:
            # PyTorch would not call further hooks, unless all hooks of its new content are removed, also those of the program.
            for attached in self.attached_hooks:
                attached.default_reason = SWAPPED
        elif parameter is not None and _can_train(parameter):
            if is_sharded(parameter):
                for attached in self.accumulated:
                    attached.default_reason = NO_SHARD_GRADIENT
            with _requiring_grad(parameter):
                if self.micro or self.measured:
                    self.handles.append(parameter.register_hook(excluded_method(self.on_gradient)))
                if self.accumulated or self.measured:
                    hook = excluded_method(self.on_accumulated)
                    self.handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def _fire(
        self, attached_hooks: Sequence[AttachedHook], kind: str, gradient: Tensor, value: Tensor | None
    ) -> Tensor:
        """Run the scheduled hooks on a gradient. A micro-step has several of a kind if backward is called several times."""
        scheduled = [
            attached
            for attached in attached_hooks
            if attached.is_scheduled and not self.clock.closed and attached.count_and_check_readable(gradient)
        ]
        self.passes[kind].start_micro_step(self.clock.micro_step_index)
        firing = FiringIndex(backward=self.passes[kind].next_index())
        return fire_all(scheduled, gradient, self.site.site.own_name, firing, value)

    def _scheduled_gradients(self) -> list[MicroGradients]:
        """Return what measures the gradients of this step."""
        is_open = not self.clock.closed
        return [gradients for attached, gradients in self.measured.items() if is_open and attached.is_scheduled]

    def _scale(self) -> Tensor | None:
        return None if self.clock.amp_scale is None else self.clock.amp_scale()

    def on_gradient(self, gradient: Tensor) -> Tensor | None:
        """The hook of `Tensor.register_hook`: the gradient of one micro-batch, before accumulation."""
        for gradients in self._scheduled_gradients():
            accumulated = None if self.parameter is None else self.parameter.grad
            gradients.add(gradient, accumulated, self.clock.moment, self._scale())
        new = self._fire(self.micro, "micro", gradient, self.parameter)
        return None if new is gradient else new

    def on_accumulated(self, parameter: Tensor) -> None:
        """The hook of `register_post_accumulate_grad_hook`: `parameter.grad` contains the micro-batch's gradient."""
        gradient = parameter.grad
        if gradient is None:
            for attached in self.accumulated if not self.clock.closed else ():
                if attached.is_scheduled:
                    attached.count_missed_opportunity(CLEARED)
            return
        for gradients in self._scheduled_gradients():
            gradients.accumulate(gradient, self._scale())
        new = self._fire(self.accumulated, "accumulated", gradient, parameter)
        if new is not gradient:
            _write_gradient(gradient, new)


class BoundaryHooks(OptimizerHooks):
    """The parameter_grad sites of all specs at an optimizer's parameters, served by one hook before its `step`.

    If the step has a closure (LBFGS), the sites run after each call of the closure, which computes the gradients. A
    loop whose closure does more, and that announces complete gradients itself (Lightning), has no hook on its optimizer
    (`steps_by_loop`).
    """

    @cached_property
    def by_spec(self) -> dict[str, list[AttachedHook]]:
        by_spec: dict[str, list[AttachedHook]] = {}
        for attached in self.attached_hooks:
            by_spec.setdefault(attached.site.spec.name, []).append(attached)
        return by_spec

    def before_step(self) -> None:
        """Run the specs in the order of the configuration. Each sees the gradients that the previous one returned."""
        if self.clock.closed:
            return
        optimized_ids = parameter_ids(self.optimizer)  # parameters may be added or removed during the loop
        for attached_hooks in self.by_spec.values():
            scheduled = self.scheduled(attached_hooks)
            # A fused optimizer unscales gradients itself and provides the factor.
            scale = getattr(self.optimizer, "grad_scale", None)
            sites = []
            for attached in scheduled:
                parameter = attached.current_parameter()
                if parameter is None or parameter.grad is None or id(parameter) not in optimized_ids:
                    self.count_missing(attached, parameter)
                else:
                    sites.append((attached, parameter, parameter.grad))
            if attached_hooks[0].is_record_hook:
                with torch.no_grad(), batched_launch(scheduled):
                    for attached, parameter, gradient in sites:
                        attached.count_and_fire(gradient, value=parameter, amp_scale=scale)
            elif ready := [entry for entry in sites if entry[0].count_and_check_readable(entry[2])]:
                self._change(ready, scale)

    @torch.no_grad()
    def _change(self, ready: list[tuple[AttachedHook, Parameter, Tensor]], scale: Tensor | None) -> None:
        gradients = [gradient for _, _, gradient in ready]
        unscaled_gradients = gradients if scale is None else [unscaled(gradient, scale) for gradient in gradients]
        ready[0][0].prepare(unscaled_gradients)
        changed = [
            attached.fire(
                old, attached.site.own_name, FiringIndex(attached.opportunities - 1), value=p, amp_scale=scale
            )
            for attached, p, old in ready
        ]
        # Replace gradients only after all actions have succeeded.
        for gradient, new in zip(gradients, changed, strict=True):
            if new is not gradient:
                _write_gradient(gradient, new)


def _can_train(parameter: Parameter) -> bool:
    """Return whether a parameter can get a gradient: no integer, and no frozen parameter of torch.inference_mode()."""
    if parameter.requires_grad or is_lazy(parameter):
        return True
    return not parameter.is_inference() and (parameter.is_floating_point() or parameter.is_complex())


@contextmanager
def _requiring_grad(parameter: Parameter) -> Iterator[None]:
    """Allow registering hooks on frozen and lazy parameters, on which PyTorch refuses them, but keeps existing ones."""
    frozen = not parameter.requires_grad
    with torch._C.DisableTorchFunctionSubclass() if is_lazy(parameter) else nullcontext():
        if frozen:
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            if frozen:
                parameter.requires_grad_(False)


def _write_gradient(gradient: Tensor, new: Tensor) -> None:
    """Write a changed gradient into the existing tensor, which the optimizer uses and a DDP bucket may contain."""
    with torch.no_grad():
        gradient.copy_(new)
