"""What a hook does at one site when it fires, decided once per schedule instead of at every firing.

Most record hooks write the statistics of plain tensors of one process. For these, `PlainRecord` replaces
`AttachedHook.fire` and `Record`: it keeps the identity columns of the row and lets the native kernel compute the numbers.
`PlainIntervention` keeps the context of a clip or scale hook. All other hooks and tensors take the general path, and both
give the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..actions.base import Context
from ..actions.clip import Clip
from ..actions.intervention import Intervention
from ..actions.record import Record
from ..actions.scale import Scale
from ..spec.record import RecordSpec
from ..stats.flatten import unreadable
from .attached_hook import AttachedHook, fire_all
from .clock import Firing

Hook = Callable[[Tensor | None], Tensor | None]


class PlainRecord:
    """Records the statistics of plain tensors at one site.

    Attributes:
        attached: The hook at the site.
    """

    __slots__ = ("_class", "_clock", "_sites", "attached")

    def __init__(self, attached: AttachedHook) -> None:
        self.attached = attached
        self._clock = attached.clock
        self._class: type[nn.Module] = nn.Module  # of the module; a parametrization changes it
        self._sites: dict[tuple[int, int, str], tuple[Any, ...]] = {}

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
        if type(self.attached.site.layer.module) is not self._class:
            self._sites.clear()
        site = self._sites.get((call, backward, path)) or self._new_site(call, backward, path)
        timer = clock.timer
        if timer is None:
            return action.rows.record_plain(tensor, action.bits, clock.moment, site)
        with timer.measure_action(self.attached):
            is_plain = action.rows.record_plain(tensor, action.bits, clock.moment, site)
        if not is_plain:
            timer.firings[self.attached] -= 1  # `AttachedHook.fire` counts it again
        return is_plain

    def _new_site(self, call: int, backward: int, path: str) -> tuple[Any, ...]:
        """Return the identity columns of the rows of one call, without the moment."""
        site, spec, clock = self.attached.site, self.attached.site.spec, self._clock
        self._class = type(site.layer.module)
        self._sites[call, backward, path] = columns = Context(
            hook=spec.name,
            kind=spec.kind,
            role=spec.tensor_role,
            layer=site.layer.name,
            module=site.layer.module,
            path=path,
            moment=clock.moment,
            call=call,
            backward=backward,
            scope=self.attached.scope,
            rank=clock.rank,
        ).site
        return columns


class PlainIntervention:
    """Clips or scales plain tensors at one site.

    Attributes:
        attached: The hook at the site.
    """

    __slots__ = ("_contexts", "attached")

    def __init__(self, attached: AttachedHook) -> None:
        self.attached = attached
        self._contexts: dict[int, Context] = {}

    @classmethod
    def of(cls, attached: AttachedHook) -> PlainIntervention | None:
        """Return the plain intervention of a hook; None if its function could keep the context or use random numbers."""
        action = attached.action
        if (
            isinstance(action, Intervention)
            and isinstance(action.change, Clip | Scale)
            and attached.selector is None
            and attached.site.spec.keep_as is None
            and attached.matches_path("")
            and attached.clock.parallel is None
        ):
            return cls(attached)
        return None

    @property
    def is_checked(self) -> bool:
        """Whether the shape of the tensor was checked."""
        return self.attached.checked_paths is None or "" in self.attached.checked_paths

    def __call__(self, tensor: Tensor, call: int) -> Tensor:
        """Return the changed tensor.

        Args:
            tensor: A tensor of class `Tensor` with floating-point elements in memory.
            call: The index of the module's call.
        """
        attached = self.attached
        context = self._contexts.get(call)
        if context is None:
            context = self._contexts[call] = attached.context("", Firing(call))
        context.moment = attached.clock.moment
        return attached.run(tensor, context)


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
            and output.device.type in ("cpu", "cuda")
            and not output.is_nested
            and not output.is_inference()
            and all(intervention.is_checked for intervention in self.interventions)
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
