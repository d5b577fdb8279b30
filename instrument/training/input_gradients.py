"""Batches whose inputs require a gradient, so that hooks see gradients with respect to the data."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..values.nested import map_tensors


def with_input_gradients(batch: Any) -> Any:
    """Return a batch whose floating-point tensors require a gradient. The last item of a tuple or list, the targets, is unchanged.

    The tensors are copies, and no leaves of the graph, so that a model may change them in place.

    Args:
        batch: A batch of the data loader, on the device of the model.
    """
    if isinstance(batch, tuple | list) and not hasattr(batch, "_fields") and len(batch) > 1:
        *inputs, targets = batch
        return type(batch)([*(map_tensors(each, _requiring_gradient) for each in inputs), targets])
    return map_tensors(batch, _requiring_gradient)


def _requiring_gradient(path: str, tensor: Tensor) -> Tensor:  # noqa: ARG001
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    return tensor.detach().requires_grad_().clone()
