"""Supervised learning: inputs and targets, and a loss of the model's output and the targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn import functional as F

from .base import Outcome, pair_of


class Supervised:
    """Inputs and targets; a loss of the model's output and the targets.

    Args:
        loss: Called as `loss(output, targets)`; gives the mean over the samples.
        targets: `as_is`, or `one_hot`: classes become distributions [N, classes].
        smoothing: What a distribution takes from the true class and spreads evenly over all of them, from 0 to 1.
    """

    def __init__(
        self,
        loss: Callable[[Tensor, Tensor], Tensor],
        targets: Literal["as_is", "one_hot"] = "as_is",
        smoothing: float = 0.0,
    ) -> None:
        if targets not in ("as_is", "one_hot"):
            raise ValueError(f"targets has to be as_is or one_hot, not {targets!r}")
        if not 0.0 <= smoothing <= 1.0:
            raise ValueError(f"smoothing has to be from 0 to 1, not {smoothing}")
        self.loss = loss
        self.targets = targets
        self.smoothing = smoothing

    def __call__(self, model: nn.Module, batch: Any) -> Outcome:
        inputs, targets = pair_of(batch)
        output = main_output(model(inputs))
        is_class = not targets.is_floating_point() and targets.dim() == output.dim() - 1
        wanted = targets
        if self.targets == "one_hot" and is_class:
            wanted = soft_targets(targets, output.shape[-1], self.smoothing).to(output.dtype)
        correct = (output.detach().argmax(-1) == targets).sum() if is_class and targets.dim() == 1 else None
        return Outcome(self.loss(output, wanted), len(targets), correct)


class KLDivergence(nn.Module):
    """KL(targets || softmax(logits)), the mean over the samples; targets are distributions [N, classes]."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Logits and targets [N, classes] to a scalar."""
        return F.kl_div(F.log_softmax(logits, dim=-1), targets, reduction="batchmean")


def soft_targets(classes: Tensor, count: int, smoothing: float) -> Tensor:
    """Classes [N] as distributions [N, count]: 1 - smoothing for the class, and smoothing spread over all."""
    return F.one_hot(classes, count) * (1.0 - smoothing) + smoothing / count


def main_output(output: Any) -> Tensor:
    """The tensor that a loss is formed from: the output itself, its `logits`, or the first of several.

    Raises:
        TypeError: There is none.
    """
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and isinstance(output.get("logits"), Tensor):
        return output["logits"]  # type: ignore[no-any-return]
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
        return output[0]
    raise TypeError(f"the model returned {type(output).__name__}, in which no tensor stands out as its output")
