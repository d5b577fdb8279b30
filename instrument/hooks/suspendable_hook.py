"""Hooks on a module that can be taken out for some steps and put back at their place among the module's other hooks.

PyTorch calls a module without any hook faster. A hook that is registered again would run after the hooks of the user that
were registered in the meantime.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch.utils.hooks import RemovableHandle

from ..runtime.lazy_compiler import has_compiled


class SuspendableHook:
    """One registered hook. The handle is that of a registration without `prepend=True`."""

    def __init__(self, handle: RemovableHandle) -> None:
        self._handle = handle
        self._hook: Callable[..., Any] | None = None  # while it is suspended
        self._before: frozenset[int] = frozenset()  # the hooks that ran before it when it was suspended
        self._after: frozenset[int] = frozenset()

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

        It follows the hooks that ran before it. If none is left, it precedes those that ran after it. If none of those is
        left either, it follows the later hooks that were prepended, which run in descending order of registration, and
        precedes the others. The first of the later hooks counts as not prepended, because PyTorch leaves no trace of that.
        """
        if self._hook is None:
            return
        hooks = self._hooks
        ids, own = list(hooks), self._handle.id
        position = max((i + 1 for i, each in enumerate(ids) if each in self._before), default=None)
        if position is None:
            ran_after = (i for i, each in enumerate(ids) if each in self._after)
            position = next(ran_after, None)
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
