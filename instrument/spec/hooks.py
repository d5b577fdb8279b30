"""The type of all hook specs. Importing this module registers the actions of `instrument.spec`."""

from . import modify, record
from .base import HookBase as HookSpec

__all__ = ["HookSpec", "modify", "record"]
