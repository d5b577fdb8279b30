"""Task for data without labels in `mode: forward`. It computes no loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..probe.samples import TARGET_KEYS
from ..values.nested import number_of_samples
from .base import Outcome


class ForwardOnly:
    """Call the model with the inputs of each batch, without a loss. For `mode: forward`.

    The model is called with the first element of a tuple or list, whose other elements are targets; with the entries of
    a mapping by keyword, except `target`, `targets`, `label`, `labels` and `y`; or with any other batch as it is.
    `forward.of` selects a part of the output for gradients.
    """

    def __call__(self, model: nn.Module, batch: Any) -> Outcome:
        """Call the model.

        Returns:
            An outcome without a loss. The number of samples is the size of dimension 0 of the inputs, or the length of
            a list of inputs.
        """
        inputs = batch[0] if isinstance(batch, list | tuple) and batch else batch
        if isinstance(inputs, Mapping):
            inputs = {name: value for name, value in inputs.items() if name not in TARGET_KEYS}
            model(**inputs)
        else:
            model(inputs)
        return Outcome(None, len(inputs) if isinstance(inputs, list | tuple) else number_of_samples(inputs))
