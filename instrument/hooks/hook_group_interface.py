"""The interface of attached hooks, and the base class of those on modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ..actions.base import StepContext
from .attached_hook import AttachedHook
from .clock import Clock


class InertWhenCopied:
    """Base of hooks on a module. If the module is copied or pickled, the copied hooks become no-ops.

    A copied model contains our hooks in its dictionaries. They must neither write rows nor keep the probe alive. Every
    such hook first checks whether the clock is closed.
    """

    clock: Clock
    attached_hooks: Sequence[AttachedHook] = ()
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


class HookGroup(Protocol):
    """The hooks of one family at one location."""

    def attach(self) -> None:
        """Register all hooks. After an exception, `detach` removes those that were registered."""

    def refresh(self) -> None:
        """Update after the scheduled sites have changed."""

    def detach(self) -> None:
        """Remove all hooks of this group."""
