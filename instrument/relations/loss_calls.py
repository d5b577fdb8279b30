"""Observes the calls of cross-entropy, in the loop and inside models, while a relation reads them.

`torch.nn.functional.cross_entropy` and `nll_loss` call functions in C, which are replaced meanwhile. A `TorchFunctionMode` would
change what some modules compute; see `instrument.plan.mode_pauses`. Compiled code is not observed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.jit._builtins import _get_builtin_table

from .loader_batches import is_readable

_NAMES = ("cross_entropy_loss", "nll_loss_nd")  # with the arguments input, target, weight, reduction and ignore_index
_originals: dict[str, Callable[..., Any]] = {}
_observers: list[Callable[[LossCall], None]] = []


class LossCall(NamedTuple):
    """A call of cross-entropy.

    Attributes:
        shape: The shape of the logits.
        targets: The classes, int64, of the shape of the logits without the dimension of the classes. They are not copied.
        weight: The weight of each class, [classes]; None without weights.
        is_reduced: Whether the result is one number. Otherwise, the caller may leave targets out of its mean.
        ignore_index: The class of targets that do not count.
        is_mean: Whether the result is the mean.
        result: The loss.
    """

    shape: torch.Size
    targets: Tensor
    weight: Tensor | None
    is_reduced: bool
    ignore_index: int
    is_mean: bool
    result: Tensor


def observe_losses(observer: Callable[[LossCall], None]) -> None:
    """Call a function with each call of cross-entropy whose logits require gradients, until `unobserve_losses`."""
    _observers.append(observer)
    if not _originals:
        for name in _NAMES:
            _originals[name] = getattr(torch._C._nn, name)
            observed = _observed(_originals[name])
            _get_builtin_table()[id(observed)] = f"aten::{name}"  # TorchScript finds functions in C by their identity
            setattr(torch._C._nn, name, observed)


def unobserve_losses(observer: Callable[[LossCall], None]) -> None:
    """Stop calling a function. Do nothing if it is not called."""
    if observer in _observers:
        _observers.remove(observer)
    if not _observers:
        for name, original in _originals.items():
            _get_builtin_table().pop(id(getattr(torch._C._nn, name)), None)
            setattr(torch._C._nn, name, original)
        _originals.clear()


def _observed(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if not is_compiling() and len(args) >= 5 and args[0].requires_grad and _has_classes(args[1]):
            logits, targets, weight, reduction, ignore_index = args[:5]
            loss = LossCall(logits.shape, targets, weight, reduction != 0, ignore_index, reduction == 1, result)
            for observer in [*_observers]:
                observer(loss)
        return result

    return call


def _has_classes(targets: Tensor) -> bool:
    """Return whether targets are classes whose values can be read when the step ends."""
    is_captured = targets.is_cuda and torch.cuda.is_current_stream_capturing()
    return targets.dtype == torch.int64 and is_readable(targets) and not is_captured
