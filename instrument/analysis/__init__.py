"""Reading and analysis of recorded data. Modules that import torch do so when they need it, because reading a run does not."""

from typing import Any

from ..runtime.moved_names import moved_attribute


def __getattr__(name: str) -> Any:
    return moved_attribute(__name__, name)
