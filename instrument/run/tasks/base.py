"""What a task is, and what it gives."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Outcome:
    """What came of one batch.

    Attributes:
        loss: Mean over the samples, or over the terms of a task that is `CountsTerms`; a scalar that can be differentiated.
        samples: Number of samples.
        correct: How many of them were classified right, as a scalar tensor; None where that has no meaning.
    """

    loss: Tensor
    samples: int
    correct: Tensor | None = None


class Task(Protocol):
    """Runs a model on a batch."""

    def __call__(self, model: nn.Module, batch: Any) -> Outcome:
        """The loss of one batch, as the data loader gives it."""


@runtime_checkable
class CountsTerms(Protocol):
    """A task whose loss is the mean of other terms than the samples, such as the tokens that count.

    Micro-batches, processes and batches of an evaluation are weighted by their terms in place of their samples.
    """

    def number_of_terms(self, batch: Any) -> int:
        """The number of terms in the mean; may be 0, where the loss has to be finite."""


def inputs_of(batch: Any) -> Tensor:
    """The inputs of a batch: the batch itself, or the first of its parts `(inputs, ...)`.

    Raises:
        TypeError: They are no tensor.
    """
    inputs = batch[0] if isinstance(batch, list | tuple) and batch else batch
    if isinstance(inputs, Tensor):
        return inputs
    raise TypeError(
        f"the inputs are a {type(inputs).__name__}, and this task takes a tensor; write a task for this batch"
    )


def pair_of(batch: Any) -> tuple[Any, Any]:
    """The inputs and the targets of a batch `(inputs, targets)`.

    Raises:
        TypeError: It is something else.
    """
    if isinstance(batch, list | tuple) and len(batch) == 2:
        return batch[0], batch[1]
    given = f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, Sized) else type(batch).__name__
    raise TypeError(
        f"the batch is a {given}, and this task takes a pair (inputs, targets); write a task for this batch"
    )


def check_outcome(outcome: object) -> None:
    """Whether a training can be made of what a task gave.

    Raises:
        TypeError: It is no `Outcome`, or its loss is no scalar that can be differentiated.
    """
    if not isinstance(outcome, Outcome):
        raise TypeError(f"the task gave a {type(outcome).__name__} in place of an instrument.run.tasks.Outcome")
    if not isinstance(outcome.loss, Tensor) or outcome.loss.dim():
        shape = f"of shape {list(outcome.loss.shape)}" if isinstance(outcome.loss, Tensor) else ""
        raise TypeError(f"the loss is a {type(outcome.loss).__name__} {shape}, not a scalar tensor")
    if not outcome.loss.requires_grad:
        raise TypeError("the loss does not depend on any parameter that trains")


@torch.no_grad()
def accuracy(outcomes: Sequence[Outcome], weights: Sequence[int] | None = None) -> Tensor | None:
    """The share of samples classified right over several batches; None where one of them does not say.

    Args:
        outcomes: One for each batch.
        weights: What each batch counts; its samples where they are not given.
    """
    counts = [outcome.correct for outcome in outcomes if outcome.correct is not None]
    if len(counts) < len(outcomes) or not counts:
        return None
    if weights is None:
        weights = [outcome.samples for outcome in outcomes]
    parts = [
        count * (weight / outcome.samples) for count, weight, outcome in zip(counts, weights, outcomes, strict=True)
    ]
    return torch.stack(parts).sum() / max(1, sum(weights))


@torch.no_grad()
def mean_loss(outcomes: Sequence[Outcome], weights: Sequence[int] | None = None) -> Tensor:
    """The mean loss over several batches.

    Args:
        outcomes: One for each batch.
        weights: What each batch counts; its samples where they are not given.
    """
    if weights is None:
        weights = [outcome.samples for outcome in outcomes]
    parts = [outcome.loss.detach() * weight for outcome, weight in zip(outcomes, weights, strict=True)]
    return torch.stack(parts).sum() / max(1, sum(weights))
