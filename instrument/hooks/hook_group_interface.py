"""The base classes of attached hooks: of all groups, of those on modules, and of those on calls of modules."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from torch.utils.hooks import RemovableHandle

from ..actions.base import StepContext
from ..runtime.lazy_compiler import has_compiled
from .attached_hook import AttachedHook
from .clock import Clock
from .module_calls import Calls
from .suspendable_hook import SuspendableHooks


class HookGroup:
    """The hooks of one family at one location."""

    attached_hooks: Sequence[AttachedHook] = ()

    def __init__(self, attached_hooks: Sequence[AttachedHook], clock: Clock) -> None:
        self.attached_hooks = attached_hooks
        self.clock = clock
        self.handles: list[RemovableHandle] = []

    def of_kind(self, kind: str) -> list[AttachedHook]:
        return [attached for attached in self.attached_hooks if attached.site.spec.kind == kind]

    def attach(self) -> None:
        """Register all hooks. After an exception, `detach` removes those that were registered."""

    def refresh(self) -> None:
        """Update after the scheduled sites have changed. Default: they are determined when a hook runs."""

    def detach(self) -> None:
        """Remove all hooks of this group, in reverse order."""
        while self.handles:
            self.handles.pop().remove()


class InertWhenCopied(HookGroup):
    """Base of hooks on a module. If the module is copied or pickled, the copied hooks become no-ops.

    A copied model contains our hooks in its dictionaries. They must neither write rows nor keep the probe alive. Every
    such hook first checks whether the clock is closed.
    """

    early: bool = False  # whether its forward hook runs before those of other code

    def __deepcopy__(self, memo: dict[int, object]) -> InertWhenCopied:
        self._note_copy()
        return _closed_copy(type(self))

    def __reduce__(self) -> tuple[Callable[[type[InertWhenCopied]], InertWhenCopied], tuple[type[InertWhenCopied]]]:
        self._note_copy()
        return _closed_copy, (type(self),)

    def _note_copy(self) -> None:
        for attached in self.attached_hooks:
            attached.copied = True


def _closed_copy(cls: type[InertWhenCopied]) -> InertWhenCopied:
    new = object.__new__(cls)
    new.clock = Clock(StepContext(0, 0, 0, "train"), closed=True)
    return new


class SuspendableModuleHooks(InertWhenCopied):
    """Base of hooks that see the calls of one module.

    They are suspended if no site is scheduled, in each phase after the first call of the module.

    Attributes:
        unscheduled: The sites that are not scheduled. Empty after the next call of the module.
    """

    def __init__(
        self, attached_hooks: Sequence[AttachedHook], calls: Calls, *, suspend: bool, note_inputs: bool = True
    ) -> None:
        super().__init__(attached_hooks, calls.clock)
        self.module = attached_hooks[0].site.layer.module
        self.calls = calls
        self.calls.add_group(note_inputs=note_inputs)
        for attached in attached_hooks:
            attached.module_calls = self.calls
        self._lock = threading.RLock()
        self.active = False
        self.unscheduled: list[AttachedHook] = []
        self.hooks = SuspendableHooks(may_suspend=suspend)

    def refresh(self) -> None:
        """Resume the hooks if a site is scheduled, or is not counted yet in this phase. Otherwise suspend them."""
        with self._lock:
            self.unscheduled = [attached for attached in self.attached_hooks if not attached.is_scheduled]
            self.active = len(self.unscheduled) < len(self.attached_hooks)
            is_counted = all(self.clock.moment.phase in each.other_phases for each in self.unscheduled)
            if self.active or has_compiled() or not is_counted:
                self.hooks.resume()
            else:
                self.suspend()

    def suspend(self) -> None:
        """Suspend the hooks, unless another thread has begun a step with a scheduled site."""
        with self._lock:
            if not self.active:
                self.hooks.suspend()

    def count_unscheduled(self) -> None:
        """Count the first call in this phase for each site that is not scheduled."""
        for attached in self.unscheduled:
            attached.count_unscheduled()
        self.unscheduled = []

    def count_missed_call(self, reason: str) -> None:
        for attached in self.attached_hooks:
            if attached.is_scheduled:
                attached.count_missed_opportunity(reason)

    def detach(self) -> None:
        self.hooks.remove()
