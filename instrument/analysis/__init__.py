"""Reading and analysis of recorded data. Modules that import torch do so when they need it, because reading a run does not.

`layer_similarity` compares the representations of layers, and `logit_lens` applies the output layer of a language model to
them. Both take a run with recorded tensors and return a DataFrame.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .layer_comparison import layer_similarity
    from .output_projection import logit_lens

__all__ = ["layer_similarity", "logit_lens"]

_LAZY = {"layer_similarity": ".layer_comparison", "logit_lens": ".output_projection"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(import_module(_LAZY[name], __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
