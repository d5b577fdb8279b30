"""Interpretation of networks. Other packages name this one only in registries of plots and panels.

`layer_similarity` compares the representations of layers, and `logit_lens` applies the output layer of a language model to
them. Both take a run with recorded tensors and return a DataFrame. `class_activation_map` returns the maps of an image classifier.
`attribute` returns the contributions of layers, positions or heads to an output, for a run or a model.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attribution import attribute
    from .attribution_result import Attribution
    from .class_activation import ClassActivation, class_activation_map
    from .layer_comparison import layer_similarity
    from .output_projection import logit_lens
    from .patching import patch_grid

__all__ = [
    "Attribution",
    "ClassActivation",
    "attribute",
    "class_activation_map",
    "layer_similarity",
    "logit_lens",
    "patch_grid",
]

_CLASS_ACTIVATION = ".class_activation"
_LAZY = {
    "Attribution": ".attribution_result",
    "ClassActivation": _CLASS_ACTIVATION,
    "attribute": ".attribution",
    "class_activation_map": _CLASS_ACTIVATION,
    "layer_similarity": ".layer_comparison",
    "logit_lens": ".output_projection",
    "patch_grid": ".patching",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(import_module(_LAZY[name], __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
