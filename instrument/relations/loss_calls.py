"""Observes the calls of losses, in the loop and inside models, while a relation reads them.

The losses of `torch.nn.functional` call functions in C, which are replaced meanwhile. A
`TorchFunctionMode` would change what some modules compute; see `instrument.plan.mode_pauses`. Compiled code is not observed.
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

_NAMES = {
    "cross_entropy_loss": torch._C._nn,
    "nll_loss_nd": torch._C._nn,
    "binary_cross_entropy": torch._C._nn,
    "binary_cross_entropy_with_logits": torch,
    "mse_loss": torch._C._nn,
    "l1_loss": torch._C._nn,
    "smooth_l1_loss": torch._C._nn,
    "huber_loss": torch._C._nn,
}
"""Where the functions are. The arguments of those for classes are input, target, weight, reduction and ignore_index."""
MAX_SAMPLES, MAX_CLASSES = 64, 1000  # of the logits that are copied
TOLERANCE = 0.05  # of the sum of the probabilities of a sample
_UNCHANGED = frozenset([
    "View", "UnsafeView", "Squeeze", "Unsqueeze", "Select", "Slice", "Transpose", "Permute", "T", "ToCopy", "Clone", "Clamp",
])  # fmt: skip
_originals: dict[str, Callable[..., Any]] = {}


class BinaryLossCall(NamedTuple):
    """A call of binary cross-entropy.

    Attributes:
        of_logits: Whether the loss applies a sigmoid to its input.
        operation: The operation that computes the input, such as `Sigmoid`, before views, casts and clamps; empty if it is unknown.
    """

    of_logits: bool
    operation: str


class PairLossCall(NamedTuple):
    """A call of a loss of pairs of a prediction and a target, such as `mse_loss`.

    Attributes:
        name: The name of the function.
        shape: The shape of the pairs.
        broadcasts: Whether each of several predictions [samples, 1] is paired with each of as many targets [samples], or vice versa,
            and the result is one number.
        operation: The operation that computes the predictions, as in `BinaryLossCall`.
        targets: The targets. They are not copied.
        result: The loss.
    """

    name: str
    shape: torch.Size
    broadcasts: bool
    operation: str
    targets: Tensor
    result: Tensor


class LossCall(NamedTuple):
    """A call of cross-entropy for classes.

    Attributes:
        shape: The shape of the logits.
        targets: The classes, int64, of the shape of the logits without the dimension of the classes. They are not copied.
        weight: The weight of each class, [classes]; None without weights.
        is_reduced: Whether the result is one number. Otherwise, the caller may leave targets out of its mean.
        ignore_index: The class of targets that do not count.
        is_mean: Whether the result is the mean.
        result: The loss.
        operation: The operation that computes the input of `cross_entropy`, as in `BinaryLossCall`; empty for other losses.
        logits: The logits. In `Training.losses`, a copy of the first 64 rows; None if they are not [samples, classes], or have more
            than 1,000 classes.
        is_likelihood: Whether it is a call of `nll_loss`, whose input is the logarithms of probabilities.
    """

    shape: torch.Size
    targets: Tensor
    weight: Tensor | None
    is_reduced: bool
    ignore_index: int
    is_mean: bool
    result: Tensor
    operation: str
    logits: Tensor | None
    is_likelihood: bool

    def has_probabilities(self) -> bool:
        """Return whether the input gives probabilities: the loss computes them, or those of most samples add up to 1."""
        if not self.is_likelihood or self.logits is None:
            return True
        sums = self.logits.float().exp().sum(1)
        return 2 * int(((sums - 1).abs() > TOLERANCE).sum()) <= len(sums)


AnyLossCall = LossCall | BinaryLossCall | PairLossCall
_observers: list[Callable[[AnyLossCall], None]] = []


def copied(call: LossCall) -> LossCall:
    """Return a call that does not keep the memory of all its logits."""
    logits, is_small = call.logits, len(call.shape) == 2 and call.shape[1] <= MAX_CLASSES
    if logits is None or not is_small or not is_readable(logits):
        return call._replace(logits=None)
    return call._replace(logits=logits.detach()[:MAX_SAMPLES].clone())


def observe_losses(observer: Callable[[AnyLossCall], None]) -> None:
    """Call a function with each call of a loss whose input requires gradients, until `unobserve_losses`."""
    _observers.append(observer)
    if not _originals:
        for name, module in _NAMES.items():
            _originals[name] = getattr(module, name)
            observed = _observed(name, _originals[name])
            _get_builtin_table()[id(observed)] = f"aten::{name}"  # TorchScript finds functions in C by their identity
            setattr(module, name, observed)


def unobserve_losses(observer: Callable[[AnyLossCall], None]) -> None:
    """Stop calling a function. Do nothing if it is not called."""
    if observer in _observers:
        _observers.remove(observer)
    if not _observers:
        for name, original in _originals.items():
            _get_builtin_table().pop(id(getattr(_NAMES[name], name)), None)
            setattr(_NAMES[name], name, original)
        _originals.clear()


def _observed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if not is_compiling() and len(args) > 1 and args[0].requires_grad:
            loss = _describe(name, args, result)
            if loss is not None:
                for observer in [*_observers]:
                    observer(loss)
        return result

    return call


def _describe(name: str, args: tuple[Any, ...], result: Tensor) -> AnyLossCall | None:
    if name.startswith("binary"):
        return BinaryLossCall(name.endswith("logits"), _operation(args[0]))
    if name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"):
        broadcasts = result.ndim == 0 and _is_outer(*args[:2])
        return PairLossCall(name, args[0].shape, broadcasts, _operation(args[0]), args[1], result)
    if len(args) < 5 or not _has_classes(args[1]):
        return None
    logits, targets, weight, reduction, ignore_index = args[:5]
    return LossCall(
        logits.shape,
        targets,
        weight,
        reduction != 0,
        ignore_index,
        reduction == 1,
        result,
        _operation(logits) if name == "cross_entropy_loss" else "",
        logits,
        name == "nll_loss_nd",
    )


def _is_outer(predictions: Tensor, targets: Tensor) -> bool:
    """Return whether two tensors are views of columns and rows, [samples, samples], as of [samples, 1] and [samples]."""
    shape = predictions.shape
    if len(shape) != 2 or shape != targets.shape or shape[0] != shape[1] or shape[0] == 1:
        return False
    strides = [predictions.stride(), targets.stride()]
    return any(one[0] == 0 < one[1] and other[1] == 0 < other[0] for one, other in (strides, reversed(strides)))


def _operation(tensor: Tensor) -> str:
    """Return the operation that computed a tensor, before those of `_UNCHANGED`; empty if it is unknown."""
    node = tensor.grad_fn
    while node is not None:
        name = node.name().rpartition("Backward")[0]  # `TanhBackwardBackward0` is no Tanh
        if name not in _UNCHANGED:
            return name
        node = node.next_functions[0][0]
    return ""


def _has_classes(targets: Tensor) -> bool:
    is_captured = targets.is_cuda and torch.cuda.is_current_stream_capturing()
    return targets.dtype == torch.int64 and is_readable(targets) and not is_captured
