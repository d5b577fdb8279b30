"""What a hook does at one site when it fires, decided once per schedule instead of at every firing.

Most record hooks write the statistics of plain tensors of one process. For these, `PlainRecord` replaces
`AttachedHook.fire` and `Record`: it keeps the identity columns of the row and lets the native kernel compute the numbers.
`PlainIntervention` does the same for clip and scale hooks on outputs and on their gradients, and for their effects. All other
hooks and tensors take the general path, and both give the same rows.
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
from ..sparse import alias_of
from ..spec.record import RecordSpec
from ..stats.flatten import unreadable
from .attached_hook import AttachedHook, call_action, check_not_captured, fire_all
from .clock import FIRST_CALL, Firing
from .gradient_hooks import TensorGradientHook
from .module_calls import Call

Hook = Callable[[Tensor | None], Tensor | None]


class PlainHook:
    """A hook on plain tensors at one site.

    Attributes:
        attached: The hook at the site.
    """

    __slots__ = ("_class", "_clock", "_module", "_sites", "attached")

    def __init__(self, attached: AttachedHook) -> None:
        self.attached = attached
        self._clock = attached.clock
        self._module = attached.site.layer.module
        self._class: type[nn.Module] = nn.Module  # of the module; a parametrization changes it
        self._sites: dict[tuple[int, int, str], tuple[Any, ...]] = {}

    def _site(self, call: int, backward: int, path: str) -> tuple[Any, ...]:
        """Return the identity columns of the rows of one call, without the moment."""
        if type(self._module) is not self._class:
            self._sites.clear()
            self._class = type(self._module)
        site = self._sites.get((call, backward, path))
        if site is None:
            site = self._sites[call, backward, path] = self.attached.context(path, Firing(call, backward)).site
        return site


class PlainRecord(PlainHook):
    """Records the statistics of plain tensors at one site."""

    __slots__ = ("_action", "_slots")

    def __init__(self, attached: AttachedHook) -> None:
        super().__init__(attached)
        self._action: Record | None = None  # a budget may replace it
        self._slots: dict[tuple[int, int, str], int] = {}

    @classmethod
    def of(cls, attached: AttachedHook) -> PlainRecord | None:
        """Return the plain record of a hook; None if it does more than record statistics of unscaled tensors."""
        action, spec, clock = attached.action, attached.site.spec, attached.clock
        if (
            isinstance(action, Record)
            and isinstance(spec, RecordSpec)
            and action.measurement.is_plain
            and not (action.tables or action.keeps_tensors)
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
        action = cast(Record, self.attached.action)
        if action is not self._action or type(self._module) is not self._class:
            self._action, self._class = action, type(self._module)
            self._slots.clear()
        slot = self._slots.get((call, backward, path))
        if slot is None:
            site = self.attached.context(path, Firing(call, backward)).site
            slot = self._slots[call, backward, path] = action.rows.slot(site, action.measurement.names)
        clock, with_magnitudes = self._clock, action.measurement.with_magnitudes
        timer = clock.timer
        if timer is None:
            return action.rows.record_plain(tensor, slot, clock.moment, with_magnitudes)
        with timer.measure_action(self.attached):
            is_plain = action.rows.record_plain(tensor, slot, clock.moment, with_magnitudes)
        if not is_plain:
            timer.firings[self.attached] -= 1  # `AttachedHook.fire` counts it again
        return is_plain

    def on_gradient(self, gradient: Tensor, call: int, backward: int) -> Tensor:
        """Record a gradient, and return it."""
        if not self(gradient, call, backward):
            fire_all([self.attached], gradient, "", Firing(call, backward))
        return gradient


class PlainIntervention(PlainHook):
    """Clips or scales plain tensors at one site, with the same operations as the general path.

    The checks for the results of custom functions are left out, and the native kernel measures the effect.
    """

    __slots__ = ("_any_call", "_change", "_held", "_rows")

    def __init__(self, attached: AttachedHook, change: Clip | Scale, rows: Rows) -> None:
        super().__init__(attached)
        self._change = change.change_and_measure
        self._rows = rows
        self._any_call = self.attached.context("", FIRST_CALL).without_tensors()
        self._held = None if attached.site.spec.follows is None else True  # see `AttachedHook.context`

    @classmethod
    def of(cls, attached: AttachedHook) -> PlainIntervention | None:
        """Return the plain intervention of a hook; None if its function could keep the context or use random numbers."""
        action, clock = attached.action, attached.clock
        if (
            isinstance(action, Intervention)
            and isinstance(action.change, Clip | Scale)
            and attached.selector is None
            and attached.condition is None
            and attached.site.spec.keep_as is None
            and attached.matches_path("")
            and clock.parallel is None
            and not (attached.is_scaled and clock.amp_scale is not None)
        ):
            return cls(attached, action.change, cast(Rows, action.rows))
        return None

    def __call__(self, tensor: Tensor, call: int, backward: int = 0) -> Tensor:
        """Return the changed tensor.

        Args:
            tensor: A tensor that `is_changeable`.
            call: The index of the module's call.
            backward: The index of the tensor's gradient; 0 for other tensors.
        """
        if self.attached.checked_paths is not None:
            self.attached.check_shape("", tensor)
        timer = self._clock.timer
        if timer is None:
            return self._run(tensor, call, backward)
        with timer.measure_action(self.attached):
            return self._run(tensor, call, backward)

    def _run(self, tensor: Tensor, call: int, backward: int) -> Tensor:
        context, moment = self._any_call, self._clock.moment
        context.moment = moment
        if not tensor.is_cpu:
            check_not_captured(tensor, context)
        new, factor, measures = call_action(self._change, tensor, context)
        if measures is not None and not isinstance(factor, Tensor):
            site = self._site(call, backward, "")
            self._rows.add_plain_effect(moment, site, tensor.numel(), measures, factor, self._held)
            return new
        effect = effect_of(tensor, new, factor, tensor.numel())
        effect.held = self._held
        self._rows.add_effect(self.attached.context("", Firing(call, backward)), effect)
        return new

    def on_gradient(self, gradient: Tensor, call: int, backward: int) -> Tensor:
        """Return the changed gradient."""
        if is_changeable(gradient):
            return self(gradient, call, backward)
        return fire_all([self.attached], gradient, "", Firing(call, backward))


def is_changeable(tensor: Any) -> bool:
    """Return whether a value is a plain tensor that a `PlainIntervention` can change."""
    return (
        type(tensor) is Tensor
        and tensor.is_floating_point()
        and tensor.layout is torch.strided
        and (tensor.is_cpu or tensor.is_cuda)
        and not tensor.is_nested
        and not tensor.is_inference()
    )


class PlainModuleHooks:
    """The scheduled hooks of a module if all of them are plain and act on its output or on the output's gradient.

    Args:
        output: The record hooks on the output.
        interventions: The interventions on the output, which come after them.
        gradient: The hooks on the gradient of the output.

    Attributes:
        changes_gradient: Whether any of them changes the gradient.
    """

    def __init__(
        self,
        output: Sequence[PlainRecord],
        interventions: Sequence[PlainIntervention],
        gradient: Sequence[PlainRecord | PlainIntervention],
    ) -> None:
        self.output = output
        self.interventions = interventions
        self.gradient = gradient
        self._all = [hook.attached for hook in (*output, *interventions)]
        self._changing = self._all[len(output) :]
        changing = [hook.attached for hook in gradient if isinstance(hook, PlainIntervention)]
        self.changes_gradient = bool(changing)
        # See `instrument.kinds.tensor_gradients`.
        self._needs_alias = any(attached.site.spec.kind == "full_backward_pre" for attached in changing)

    @classmethod
    def of(cls, output: Sequence[AttachedHook], gradient: Sequence[AttachedHook]) -> PlainModuleHooks | None:
        """Return the plain hooks; None if some hook requires the general path."""
        count = sum(attached.is_record_hook for attached in output)
        records = [PlainRecord.of(attached) for attached in output[:count]]
        interventions = [PlainIntervention.of(attached) for attached in output[count:]]
        gradients = [
            PlainRecord.of(attached) if attached.is_record_hook else PlainIntervention.of(attached)
            for attached in gradient
        ]
        plain = [hook for hook in records if hook is not None]
        changes = [hook for hook in interventions if hook is not None]
        on_gradient = [hook for hook in gradients if hook is not None]
        if len(plain) + len(changes) + len(on_gradient) < len(output) + len(gradient):
            return None
        return cls(plain, changes, on_gradient)

    def run(self, output: Any, call: Call) -> tuple[Any, Sequence[AttachedHook] | None]:
        """Run the hooks on the output of a module, and register those on its gradient.

        Args:
            output: The output.
            call: The call, with the versions of the inputs if `changes_gradient`.

        Returns:
            The output for the caller, and the hooks on the output that the general path has to run. None instead of the hooks
            if the general path has nothing to do: otherwise it registers the hooks on the gradient.
        """
        index = call.index
        for record in self.output:
            if not record(output, index):
                return output, self._all
            record.attached.count_hit()
        if self.interventions:
            if not is_changeable(output):
                return output, self._changing
            for intervention in self.interventions:
                output = intervention(output, index)
                intervention.attached.count_hit()
        if not self.gradient:
            return output, None
        if not self._can_register(output, call):
            return output, ()
        return self._register(output, index), None

    def _can_register(self, output: Any, call: Call) -> bool:
        """Return whether the hooks on the gradient can be registered on the output itself.

        They cannot for a view, a leaf and a tensor without a gradient. Hooks that change the gradient cannot for an input either.
        """
        return (
            type(output) is Tensor
            and output.requires_grad
            and torch.is_grad_enabled()
            and output.grad_fn is not None
            and output._base is None
            and (bool(self._all) or unreadable(output) is None)
            and not (self.changes_gradient and (call.versions or {}).get(id(output)) == output._version)
        )

    def _register(self, output: Tensor, call: int) -> Tensor:
        """Register the hooks on the gradient of an output. Return the output for the caller."""
        for hook in self.gradient:
            hook.attached.count_opportunity()
        if not self._needs_alias:
            output.register_hook(self._gradient_hook(call))
            return output
        alias = alias_of(output)
        TensorGradientHook(alias, self._gradient_hook(call)).finish_registration()
        return alias

    def _gradient_hook(self, call: int) -> Hook:
        hooks, backward = self.gradient, -1
        clock = hooks[0].attached.clock

        def on_gradient(gradient: Tensor | None) -> Tensor | None:
            # The gradient is None if an operation has several outputs and this one is unused.
            if clock.closed or gradient is None:
                return None
            nonlocal backward
            backward += 1
            new = gradient
            for hook in hooks:
                if not backward:
                    hook.attached.count_firing()
                new = hook.on_gradient(new, call, backward)
            return None if new is gradient else new

        return on_gradient
