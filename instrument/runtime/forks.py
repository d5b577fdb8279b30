"""Objects that a forked child process inherits and must not use: the probe, the lock and the upload of a run of its parent."""

from __future__ import annotations

import ctypes
import os
from weakref import WeakSet


class OwnedByProcess:
    """Base class of objects that only their process may use. `is_inherited`: whether a parent of this process created the object."""

    is_inherited = False

    def __init__(self) -> None:  # called last: a fork may also find an object whose `__init__` raised an exception
        _OWNED.add(self)

    def inherit(self) -> None:
        """Mark the object in a forked process, which never finalizes it: an open Parquet file would write its end again."""
        self.is_inherited = True
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))


_OWNED: WeakSet[OwnedByProcess] = WeakSet()


def _inherit_all() -> None:
    for owned in [*_OWNED]:
        owned.inherit()


os.register_at_fork(after_in_child=_inherit_all)
