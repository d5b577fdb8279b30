"""The number of terms in the mean that a loss function computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from .base import IGNORED

Loss = Callable[[Tensor, Tensor], Tensor]
_CLASS_LOSSES = (nn.CrossEntropyLoss, nn.NLLLoss)  # The mean is divided by the sum of the class weights of the targets.
_CLASS_FUNCTIONS = (F.cross_entropy, F.nll_loss)


def loss_option(loss: Loss | None, name: str, default: Any = None) -> Any:
    """Return an option of a loss, such as `reduction`.

    Args:
        loss: A module of PyTorch, any object with attributes of the same names, or a partial function.
        default: The value if the loss has no such option. Default: None.
    """
    return loss.keywords.get(name, default) if isinstance(loss, partial) else getattr(loss, name, default)


class HasLoss:
    """A task that calls a loss function.

    Attributes:
        loss: The loss function; None for another loss.
    """

    loss: Any

    @property
    def reduction(self) -> str:
        """The reduction of the loss: `sum`, or any other value for a mean."""
        return str(loss_option(self.loss, "reduction", "mean"))


def is_pytorch_loss(loss: Loss | None) -> bool:
    """Return whether a loss is a module or function of PyTorch, whose number of terms is known."""
    function = loss.func if isinstance(loss, partial) else loss
    return type(function).__module__ == nn.CrossEntropyLoss.__module__ or function in _CLASS_FUNCTIONS


def counted_targets(loss: Loss | None, targets: Any) -> Tensor | None:
    """Return which integer targets a loss does not ignore; None if it ignores none."""
    function = loss.func if isinstance(loss, partial) else loss
    ignored = loss_option(loss, "ignore_index", IGNORED if function in _CLASS_FUNCTIONS else None)
    if ignored is None or not isinstance(targets, Tensor) or targets.is_floating_point():
        return None
    counted: Tensor = targets != ignored
    return counted


def number_of_terms(loss: Loss | None, targets: Any, *, as_distributions: bool = False) -> float:
    """Return the number by which a mean over targets is divided, or a fixed multiple of it.

    It is the sum of the class weights of the targets, if a loss of PyTorch for classes has weights; the number of
    samples for the reduction `batchmean`; otherwise the number of targets that the loss does not ignore. The other
    losses of PyTorch divide weighted terms by their number.

    Args:
        as_distributions: Whether the loss gets classes as distributions. It then ignores none, and uses no class weights
            in the number. Default: False.
    """
    if not isinstance(targets, Tensor) or loss_option(loss, "reduction") == "batchmean":
        return len(targets)
    counted = None if as_distributions else counted_targets(loss, targets)
    if counted is None:
        return targets.numel()
    function, weight = loss.func if isinstance(loss, partial) else loss, loss_option(loss, "weight")
    if weight is None or not (isinstance(loss, _CLASS_LOSSES) or function in _CLASS_FUNCTIONS):
        return int(counted.sum())
    return float(weight.to(targets.device).double()[targets[counted]].sum())
