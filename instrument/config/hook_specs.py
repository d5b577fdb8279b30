"""The type of all hook specs. Importing this module registers the actions of `instrument.config`."""

from . import modify, record
from .base import HookBase as HookSpec

__all__ = ["HookSpec", "modify", "record"]
