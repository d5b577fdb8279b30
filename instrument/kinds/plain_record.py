"""What a hook does at one site when it fires, decided once per schedule instead of at every firing.

Most record hooks write the statistics of plain tensors of one process. For these, `PlainRecord` replaces
`AttachedHook.fire` and `Record`: it keeps the identity columns of the row and lets the native kernel compute the numbers.
`PlainIntervention` does the same for clip and scale hooks and their effects. All other hooks and tensors take the general
path, and both give the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..actions.base import Rows
from ..actions.clip import Clip
from ..actions.intervention import Intervention, effect_of
from ..actions.record import Record
from ..actions.scale import Scale
from ..spec.record import RecordSpec
from ..stats.flatten import unreadable
from .attached_hook import AttachedHook, call_action, check_not_captured, fire_all
from .clock import FIRST_CALL, Firing

Hook = Callable[[Tensor | None], Tensor | None]


class PlainHook:
    """A hook on plain tensors at one site.

    Attributes:
        attached: The hook at the site.
    """

    __slots__ = ("_class", "_clock", "_sites", "attached")

    def __init__(self, attached: AttachedHook) -> None:
        self.attached = attached
        self._clock = attached.clock
        self._class: type[nn.Module] = nn.Module  # of the module; a parametrization changes it
        self._sites: dict[tuple[int, int, str], tuple[Any, ...]] = {}

    def _site(self, call: int, backward: int = 0, path: str = "") -> tuple[Any, ...]:
        """Return the identity columns of the rows of one call, without the moment."""
        module_class = type(self.attached.site.layer.module)
        if module_class is not self._class:
            self._sites.clear()
            self._class = module_class
        site = self._sites.get((call, backward, path))
        if site is None:
            site = self._sites[call, backward, path] = self.attached.context(path, Firing(call, backward)).site
        return site


class PlainRecord(PlainHook):
    """Records the statistics of plain tensors at one site."""

    __slots__ = ()

    @classmethod
    def of(cls, attached: AttachedHook) -> PlainRecord | None:
        """Return the plain record of a hook; None if it does more than record statistics of unscaled tensors."""
        action, spec, clock = attached.action, attached.site.spec, attached.clock
        if (
            isinstance(action, Record)
            and isinstance(spec, RecordSpec)
            and action.bits
            and not (action.levels or action.bins or action.keeps_tensors)
            and spec.unit_dim is None
            and attached.selector is None
            and attached.condition is None
            and spec.keep_as is None
            and (spec.functions or attached.matches_path(""))
            and clock.parallel is None
            and not (attached.is_scaled and clock.amp_scale is not None)
        ):
            return cls(attached)
        return None

    def __call__(self, tensor: Tensor, call: int, backward: int = 0, path: str = "") -> bool:
        """Record a tensor. Return false if it is not plain; `AttachedHook.fire` records it then.

        Args:
            tensor: The tensor.
            call: The index of the module's call.
            backward: The index of the tensor's gradient; 0 for other tensors.
            path: The path of the tensor, for the functions of a module.
        """
        clock, action = self._clock, cast(Record, self.attached.action)  # a budget may replace it
        site = self._site(call, backward, path)
        timer = clock.timer
        if timer is None:
            return action.rows.record_plain(tensor, action.bits, clock.moment, site)
        with timer.measure_action(self.attached):
            is_plain = action.rows.record_plain(tensor, action.bits, clock.moment, site)
        if not is_plain:
            timer.firings[self.attached] -= 1  # `AttachedHook.fire` counts it again
        return is_plain


class PlainIntervention(PlainHook):
    """Clips or scales plain tensors at one site, with the same operations as the general path.

    The checks for the results of custom functions are left out, and the native kernel measures the effect.
    """

    __slots__ = ("_any_call", "_change", "_held", "_rows")

    def __init__(self, attached: AttachedHook, change: Clip | Scale, rows: Rows) -> None:
        super().__init__(attached)
        self._change = change
        self._rows = rows
        self._any_call = self.attached.context("", FIRST_CALL).without_tensors()
        self._held = None if attached.site.spec.follows is None else True  # see `AttachedHook.context`

    @classmethod
    def of(cls, attached: AttachedHook) -> PlainIntervention | None:
        """Return the plain intervention of a hook; None if its function could keep the context or use random numbers."""
        action = attached.action
        if (
            isinstance(action, Intervention)
            and isinstance(action.change, Clip | Scale)
            and attached.selector is None
            and attached.condition is None
            and attached.site.spec.keep_as is None
            and attached.matches_path("")
            and attached.clock.parallel is None
        ):
            return cls(attached, action.change, cast(Rows, action.rows))
        return None

    def __call__(self, tensor: Tensor, call: int) -> Tensor:
        """Return the changed tensor.

        Args:
            tensor: A tensor of class `Tensor` with floating-point elements in memory.
            call: The index of the module's call.
        """
        self.attached.check_shape("", tensor)
        timer = self._clock.timer
        if timer is None:
            return self._run(tensor, call)
        with timer.measure_action(self.attached):
            return self._run(tensor, call)

    def _run(self, tensor: Tensor, call: int) -> Tensor:
        context, moment = self._any_call, self._clock.moment
        context.moment = moment
        if not tensor.is_cpu:
            check_not_captured(tensor, context)
        new, factor, measures = call_action(self._change.change_and_measure, tensor, context)
        if measures is not None and not isinstance(factor, Tensor):
            self._rows.add_plain_effect(moment, self._site(call), tensor.numel(), measures, factor, self._held)
            return new
        effect = effect_of(tensor, new, factor, tensor.numel())
        effect.held = self._held
        self._rows.add_effect(self.attached.context("", Firing(call)), effect)
        return new


class PlainModuleHooks:
    """The scheduled hooks of a module if all of them are plain and act on its output or on the output's gradient.

    Args:
        output: The record hooks on the output.
        interventions: The interventions on the output, which come after them.
        gradient: The record hooks on the gradient of the output.
    """

    def __init__(
        self,
        output: Sequence[PlainRecord],
        interventions: Sequence[PlainIntervention],
        gradient: Sequence[PlainRecord],
    ) -> None:
        self.output = output
        self.interventions = interventions
        self.gradient = gradient

    @classmethod
    def of(cls, output: Sequence[AttachedHook], gradient: Sequence[AttachedHook]) -> PlainModuleHooks | None:
        """Return the plain hooks; None if some hook requires the general path."""
        count = sum(attached.is_record_hook for attached in output)
        records = [PlainRecord.of(attached) for attached in (*output[:count], *gradient)]
        interventions = [PlainIntervention.of(attached) for attached in output[count:]]
        plain = [record for record in records if record is not None]
        changes = [intervention for intervention in interventions if intervention is not None]
        if len(plain) < len(records) or len(changes) < len(interventions):
            return None
        return cls(plain[:count], changes, plain[count:])

    def record_output(self, output: Any, call: int) -> bool:
        """Record a module's output. Return false, without any row, if the output is not a plain tensor."""
        for record in self.output:
            if not record(output, call):
                return False
            record.attached.count_hit()
        return True

    def change_output(self, output: Any, call: int) -> Any:
        """Return the changed output of a module; None, without any change, if the general path has to change it."""
        if not (
            type(output) is Tensor
            and output.is_floating_point()
            and output.layout is torch.strided
            and (output.is_cpu or output.is_cuda)
            and not output.is_nested
            and not output.is_inference()
        ):
            return None
        for intervention in self.interventions:
            output = intervention(output, call)
            intervention.attached.count_hit()
        return output

    def register(self, output: Any, call: int) -> bool:
        """Register the hooks on the gradient of a module's output. Return false if the general path has to.

        It has to for a view, a leaf and a tensor without a gradient.
        """
        if not self.gradient:
            return True
        if not (
            type(output) is Tensor
            and output.requires_grad
            and torch.is_grad_enabled()
            and output.grad_fn is not None
            and output._base is None
            and (self.output or unreadable(output) is None)
        ):
            return False
        for record in self.gradient:
            record.attached.count_opportunity()
        output.register_hook(self._gradient_hook(call))
        return True

    def _gradient_hook(self, call: int) -> Hook:
        records, backward = self.gradient, -1
        clock = records[0].attached.clock

        def on_gradient(gradient: Tensor | None) -> None:
            # The gradient is None if an operation has several outputs and this one is unused.
            if clock.closed or gradient is None:
                return
            nonlocal backward
            backward += 1
            for record in records:
                if not backward:
                    record.attached.count_firing()
                if not record(gradient, call, backward):
                    fire_all([record.attached], gradient, "", Firing(call, backward))

        return on_gradient
