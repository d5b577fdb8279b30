"""Reading and analysis of recorded data. Modules that import torch do so when they need it, because reading a run does not."""

from importlib import import_module
from typing import Any

from ..runtime.moved_names import moved_attribute


def __getattr__(name: str) -> Any:
    if name == "attribute":  # a function of `instrument.interpret`, which imports this package
        return getattr(import_module("instrument.interpret"), name)
    return moved_attribute(__name__, name)
