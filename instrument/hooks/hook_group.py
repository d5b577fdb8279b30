"""The base classes of hook groups: of all groups, of those on modules, and of those on calls of modules.

PyTorch calls a module without any hook faster. So hooks on calls are taken out for some steps, and put back at their place among the
module's other hooks: a hook that is registered again would run after the hooks of the user that were registered in the meantime.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, cast
from weakref import WeakValueDictionary

from torch.compiler import is_compiling
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..actions.base import StepContext
from ..runtime.lazy_compiler import excluded_method, has_compiled, run_outside_of_graphs
from .attached_hook import AttachedHook
from .clock import Clock
from .module_calls import Calls

_OF_HANDLES: WeakValueDictionary[int, SuspendableHook] = WeakValueDictionary()
"""The hooks by the ids of their handles. One that is suspended earlier than another knows their order, but not vice versa."""


class SuspendableHook:
    """One registered hook. The handle is that of a registration without `prepend=True`."""

    def __init__(self, handle: RemovableHandle) -> None:
        self._handle = handle
        self._hook: Callable[..., Any] | None = None  # while it is suspended
        self._before: frozenset[int] = frozenset()  # the hooks that ran before it when it was suspended
        self._after: frozenset[int] = frozenset()
        _OF_HANDLES[handle.id] = self

    @property
    def is_suspended(self) -> bool:
        """Whether the module does not call the hook."""
        return self._hook is not None

    def suspend(self) -> None:
        """Take the hook out of the module, if it is registered."""
        hooks, own = self._hooks, self._handle.id
        ids, hook = list(hooks), hooks.get(own)
        if hook is None or own not in ids:  # another thread, which calls a copy of the module, has suspended it
            return
        position = ids.index(own)
        self._before, self._after = frozenset(ids[:position]), frozenset(ids[position + 1 :])
        self._hook = hook  # before it is taken out: an interrupt must not lose it
        hooks.pop(own, None)

    def resume(self) -> None:
        """Put the hook back, if it is suspended.

        It follows the hooks that ran before it. If none is left, it precedes those that ran after it. Both are
        known from the time when it, or the other hook, was suspended. If none of those is left either, it follows the later hooks that
        were prepended, which run in descending order of registration, and precedes the others. The first of the later hooks counts as
        not prepended, because PyTorch leaves no trace of that.
        """
        if self._hook is None:
            return
        hooks = self._hooks
        ids, own = list(hooks), self._handle.id
        others = [_OF_HANDLES.get(each, self) for each in ids]
        befores = (i + 1 for i, each in enumerate(ids) if each in self._before or own in others[i]._after)
        position = max(befores, default=None)
        if position is None:
            afters = (i for i, each in enumerate(ids) if each in self._after or own in others[i]._before)
            position = next(afters, None)
        if position is None:
            first = min((each for each in ids if each > own), default=None)
            position = len(ids) if first is None else ids.index(first)
        hooks[own] = self._hook
        for each in ids[position:]:
            hooks.move_to_end(each)
        self._hook = None

    def remove(self) -> None:
        self._hook = None
        self._handle.remove()

    @property
    def _hooks(self) -> OrderedDict[int, Callable[..., Any]]:
        """The dictionary of the module, or an empty one if the module was deleted."""
        hooks: OrderedDict[int, Callable[..., Any]] | None = self._handle.hooks_dict_ref()
        return OrderedDict() if hooks is None else hooks


class SuspendableHooks:
    """The hooks of one object on a module, which are suspended and resumed together.

    They stay registered if any code was compiled: compiled code calls only the hooks that were registered when it was compiled.
    """

    def __init__(self, *, may_suspend: bool) -> None:
        self._hooks: list[SuspendableHook] = []
        self._may_suspend = may_suspend

    def add(self, handle: RemovableHandle) -> None:
        self._hooks.append(SuspendableHook(handle))

    @property
    def is_suspended(self) -> bool:
        return any(hook.is_suspended for hook in self._hooks)

    def resume(self) -> None:
        for hook in self._hooks:
            hook.resume()

    def keep_registered(self) -> None:
        """Resume the hooks, and never suspend them again."""
        self._may_suspend = False
        self.resume()

    def suspend(self) -> None:
        """Suspend the hooks, if they may be suspended and no code was compiled."""
        if self._may_suspend and not has_compiled():
            for hook in self._hooks:
                hook.suspend()

    def remove(self) -> None:
        for hook in reversed(self._hooks):  # several threads may do this
            hook.remove()
        self._hooks.clear()


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


class StepPostHooks(HookGroup):
    """Base of hooks after the steps of optimizers. They run earlier if a training step ends in a hook of other code before them."""

    def register_after_step(self, optimizer: Optimizer, *, in_graphs: bool = True) -> None:
        """Register the hook. Without `in_graphs`, it breaks the graph of a compiled step."""
        note, run = (each if in_graphs else excluded_method(each) for each in (self._note_step, self._run_after_step))
        first = optimizer.register_step_post_hook(note)
        self.handles += [first, optimizer.register_step_post_hook(run)]
        cast("OrderedDict[int, Any]", optimizer._optimizer_step_post_hooks).move_to_end(first.id, last=False)

    def _note_step(self, optimizer: Optimizer, *arguments: object) -> None:  # noqa: ARG002
        if not is_compiling():
            self.clock.ended_steps[self.after_step, optimizer] = None

    def _run_after_step(self, optimizer: Optimizer, *arguments: object) -> None:  # noqa: ARG002
        if is_compiling() or self.clock.ended_steps.pop((self.after_step, optimizer), 0) is None:
            self.after_step(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        """Act after the step of an optimizer."""
        raise NotImplementedError


for _hook in (StepPostHooks._note_step, StepPostHooks._run_after_step):
    run_outside_of_graphs(_hook)


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
        self.unscheduled: list[AttachedHook] = []  # empty after the next call of the module
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
