"""Interpretation of networks. Other packages name this one only in registries of plots and panels.

`layer_similarity` compares the representations of layers, and `logit_lens` applies the output layer of a language model to
them. Both take a run with recorded tensors and return a DataFrame. `class_activation_map` returns the maps of an image classifier.
`attribute` returns the contributions of layers, positions or heads to an output, for a run or a model.
"""

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
