"""The task protocol, the outcome of a batch, the averages over several batches, and the number of terms of a loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import InstrumentError
from ..probe.metrics import checked_metrics
from ..values.nested import structure

IGNORED = -100
"""Targets that `torch.nn.functional.cross_entropy` ignores by default."""
Loss = Callable[[Tensor, Tensor], Tensor]
_CLASS_LOSSES = (nn.CrossEntropyLoss, nn.NLLLoss)  # The mean is divided by the sum of the class weights of the targets.
_CLASS_FUNCTIONS = (F.cross_entropy, F.nll_loss)


@dataclass(frozen=True)
class Generated:
    """The continuation of a prompt.

    Attributes:
        prompt: The prompt; None if it is given as tokens and there is no tokenizer.
        text: The generated text; None without a tokenizer.
        prompt_tokens: The token ids of the prompt.
        tokens: The generated token ids.
    """

    prompt: str | None
    text: str | None
    prompt_tokens: Sequence[int]
    tokens: Sequence[int]


@dataclass(frozen=True)
class Outcome:
    """The result of a task on one batch.

    Attributes:
        loss: The mean over the samples, or over the terms if the task implements `CountsTerms`. A differentiable
            scalar. None in an evaluation if the model computes a loss in training only.
        samples: The number of samples.
        correct: The number of correctly classified samples, a scalar tensor. None if the task is not a classification.
        generated: For each sample, what the model generated; empty for other tasks.
        classified: The number of targets from which `correct` was computed, such as the tokens that are not padding. It
            is the weight of the batch in the accuracy over several batches. Default: None, the number of samples.
        metrics: Further numbers by name, columns of the table `metrics`: scalar tensors or numbers, means over the samples, or over
            the terms like `loss`; or a `WeightedMean`, whose weight replaces that of the loss. The mean of ratios with their
            denominators as weights is the ratio of the sums.
    """

    loss: Tensor | None
    samples: int
    correct: Tensor | None = None
    generated: Sequence[Generated] = ()
    classified: Tensor | int | None = None
    metrics: Mapping[str, Tensor | float | WeightedMean] = field(default_factory=dict)


class WeightedMean(NamedTuple):
    """A mean over some batches, and its weight in the mean over more batches.

    Attributes:
        value: A scalar without gradient; None if a batch has no value.
        weight: The sum of the weights of the batches.
    """

    value: Tensor | None
    weight: Tensor | float


class Task(Protocol):
    """A callable that runs a model on a batch and computes its loss.

    If its attribute `reduction` is `sum`, as in the losses of PyTorch, the loss is a sum: the losses of micro-batches and
    processes are added without weights. Otherwise, the loss is a mean over the samples, or see `CountsTerms`.
    """

    def __call__(self, model: nn.Module, batch: Any) -> Outcome:
        """Compute the loss of a batch.

        Args:
            model: The model, on its device.
            batch: The batch from the data loader, on the device of the model.

        Returns:
            The loss, and the number of samples and of correctly classified samples.
        """


@runtime_checkable
class CountsTerms(Protocol):
    """A task whose loss is a mean over terms other than samples, such as tokens, or a weighted mean.

    Micro-batches, processes and evaluation batches are then weighted by their number of terms instead of samples.
    """

    def number_of_terms(self, batch: Any) -> float:
        """Return the number by which the loss of a batch was divided: its number of terms, or the sum of their weights.

        It may be 0. The loss of such a batch has no weight, also if it is NaN, such as a mean of no terms.
        """


@runtime_checkable
class SelectsTargets(Protocol):
    """A task that selects the targets of a batch for the table `samples`.

    Without this method, the targets are the second item of a pair, or the entry `target`, `targets`, `label`, `labels` or
    `y` of a mapping, dataclass, named tuple or similar object.
    """

    def sample_targets(self, batch: Any) -> Tensor | None:
        """Return the targets of a batch.

        Returns:
            One number per sample: [samples]. For None or a tensor of another shape, `target` is null. Hooks with `position_losses`
            also use integers [samples, positions]: the class that the logits at each position predict, -100 for none.
        """


def batch_with_targets(task: Task, batch: Any) -> Any:
    """Return the targets that a task selects as an entry `target`; the batch itself if the task selects none."""
    return {"target": task.sample_targets(batch)} if isinstance(task, SelectsTargets) else batch


def call_task(task: Task, model: nn.Module, batch: Any, *, check: Callable[[object], None] | None = None) -> Outcome:
    """Run a task on a batch, and check its outcome. An error gets a note with the task and the structure of the batch."""
    try:
        outcome = task(model, batch)
        if check is not None:
            check(outcome)
        return outcome
    except Exception as error:
        if not isinstance(error, InstrumentError):
            error.add_note(f"task {type(task).__module__}.{type(task).__qualname__}, batch {structure(batch)}")
        raise


def inputs_of(batch: Any) -> Tensor:
    """Return the inputs of a batch, a tensor: the batch itself, or its first element if it is a tuple or list."""
    inputs = batch[0] if isinstance(batch, list | tuple) and batch else batch
    if isinstance(inputs, Tensor):
        return inputs
    raise TypeError(f"the inputs are {type(inputs).__name__}, but this task requires a tensor; {_other_task(inputs)}")


def pair_of(batch: Any) -> tuple[Any, Any]:
    """Return the inputs and the targets of a batch. Raise a TypeError unless it is a tuple or list of two."""
    if isinstance(batch, list | tuple) and len(batch) == 2:
        return batch[0], batch[1]
    given = f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, Sized) else type(batch).__name__
    raise TypeError(f"the batch is a {given}, but this task requires a pair (inputs, targets); {_other_task(batch)}")


def _other_task(batch: Any) -> str:
    keyword_task = "set task=huggingface, which passes the entries of a dict to the model by keyword, or "
    return f"{keyword_task if isinstance(batch, Mapping) else ''}write a custom task for this batch"


def check_outcome(outcome: object, *, differentiable: bool = True) -> None:
    """Check the result of a task. Without `differentiable`, the loss may be missing, and needs no gradients.

    Raises:
        TypeError: The result is not an `Outcome`, its loss is not a scalar tensor, or one of its metrics has the name of another
            column or is not one number.
        ValueError: The loss does not depend on any trainable parameter.
    """
    if not isinstance(outcome, Outcome):
        raise TypeError(f"the task must return instrument.tasks.Outcome, but returned {type(outcome).__name__}")
    for name in sorted({*outcome.metrics} & {"loss", "lr", "grad_norm"}):
        raise TypeError(f"{name}: the training loop computes this metric; use another name in Outcome.metrics")
    checked_metrics({name: getattr(each, "value", each) for name, each in outcome.metrics.items()})
    if outcome.loss is None:
        if differentiable:
            fix = "set mode=forward; for gradients, also forward.of to a part of the model's output"
            raise TypeError(f"the task returned no loss, but its gradients are required: {fix}")
        return
    if not isinstance(outcome.loss, Tensor) or outcome.loss.dim():
        shape = f"of shape {list(outcome.loss.shape)}" if isinstance(outcome.loss, Tensor) else ""
        raise TypeError(f"the loss is a {type(outcome.loss).__name__} {shape}, not a scalar tensor")
    if differentiable and not outcome.loss.requires_grad:
        raise ValueError("the loss does not depend on any trainable parameter")


def is_sum(task: Task) -> bool:
    return getattr(task, "reduction", "mean") == "sum"


def batch_weight(task: Task, batch: Any, samples: int) -> float:
    """Return the weight of the loss of a batch: its number of terms or samples, or 1 if losses are added."""
    if is_sum(task):
        return 1
    return task.number_of_terms(batch) if isinstance(task, CountsTerms) else samples


def weighted(loss: Tensor, weight: float, total: float) -> Tensor:
    """Return the part of a loss in a weighted mean. `total`: the sum of the weights of all batches; 0 if all of them have no terms.

    With the weight 0, it is 0 also for a mean of no terms, which is NaN.
    """
    return loss * (weight / total) if weight else loss.nan_to_num() * 0.0


def number_classified(outcomes: Sequence[Outcome]) -> Tensor | int:
    """Return the weight of an accuracy over several batches: the number of its targets."""
    return sum(outcome.samples if outcome.classified is None else outcome.classified for outcome in outcomes)


@torch.no_grad()
def accuracy(outcomes: Sequence[Outcome]) -> Tensor | None:
    """Return the fraction of correctly classified targets over several batches, a scalar; None if one has no `correct`."""
    parts = [
        outcome.correct * (number_classified([outcome]) / outcome.samples)
        for outcome in outcomes
        if outcome.correct is not None
    ]
    if len(parts) < len(outcomes) or not parts:
        return None
    total = number_classified(outcomes)
    return torch.stack(parts).sum() / (total.clamp(min=1) if isinstance(total, Tensor) else max(1, total))


@torch.no_grad()
def mean_loss(outcomes: Sequence[Outcome], weights: Sequence[float]) -> Tensor | None:
    """Return the mean loss over several batches, a scalar without gradient; None if an outcome has no loss."""
    losses = [outcome.loss.detach() for outcome in outcomes if outcome.loss is not None]
    return _mean(losses, weights) if len(losses) == len(outcomes) else None


def mean_metrics(outcomes: Sequence[Outcome], weights: Sequence[float]) -> dict[str, WeightedMean]:
    """Return the mean of each further metric over the batches that have it."""
    means = {}
    for name in dict.fromkeys(name for outcome in outcomes for name in outcome.metrics):
        having = [
            (o.metrics[name], weight)
            for o, weight in zip(outcomes, weights, strict=True)
            if o.metrics.get(name) is not None
        ]
        given: list[tuple[Any, Any]] = [each if isinstance(each, WeightedMean) else (each, w) for each, w in having]
        numbers = [checked_metrics({name: value})[name] for value, _ in given]
        device = next((each.device for each in numbers if isinstance(each, Tensor)), None)
        values = [torch.as_tensor(each, dtype=torch.float64, device=device).reshape(()) for each in numbers]
        known = [weight for _, weight in given]
        means[name] = WeightedMean(_mean(values, known) if values else None, sum(known))
    return means


def _mean(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    total = sum(weights)
    return torch.stack([weighted(value, weight, total) for value, weight in zip(values, weights, strict=True)]).sum()


def loss_option(loss: Loss | None, name: str, default: Any = None) -> Any:
    """Return an option, such as `reduction`, of a loss: a module of PyTorch, an object with such attributes, or a partial function."""
    return loss.keywords.get(name, default) if isinstance(loss, partial) else getattr(loss, name, default)


class HasLoss:
    """A task that calls the loss function `loss`; None stands for another loss."""

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
