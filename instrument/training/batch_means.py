"""Weights of batches, and the means of loss and accuracy over batches and processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..tasks import CountsTerms, Outcome, accuracy, mean_loss, mean_metrics
from ..tasks.base import WeightedMean, batch_weight, is_sum, number_classified
from .distributed.batch_sharding import StepBatches
from .experiment import Experiment


@dataclass(frozen=True)
class BatchMeans:
    """The means over some batches of all processes.

    Attributes:
        loss: A scalar; None if the task computes none. If the losses of the task are sums, it is their sum.
        metrics: The accuracy and the custom metrics of the task by name: scalars; None for an accuracy that the task does not
            compute.
        classified: The number of targets in the accuracy.
    """

    loss: Tensor | None
    metrics: dict[str, Tensor | None]
    classified: Tensor | float


def batch_weights(experiment: Experiment, micro_batches: StepBatches) -> tuple[list[float], float]:
    """Return the weight of each micro-batch in the loss of a step, and the number by which they are divided.

    The number is the sum of the weights over all processes, or 1 if losses are added. It may be 0.
    """
    task = experiment.task
    weights = [batch_weight(task, *each) for each in zip(micro_batches, micro_batches.sizes, strict=True)]
    if is_sum(task):
        return weights, 1
    if not isinstance(task, CountsTerms):
        return weights, micro_batches.samples
    return weights, experiment.strategy.total(sum(weights))


def means_over_processes(experiment: Experiment, outcomes: Sequence[Outcome], weights: Sequence[float]) -> BatchMeans:
    """Return the loss, the accuracy and the custom metrics over the batches of all processes.

    Args:
        outcomes: The outcome of each batch of this process. All processes have the same number of batches and the same metrics.
        weights: The weight of each batch, see `batch_weight`.
    """
    adds_losses = is_sum(experiment.task)
    loss = WeightedMean(mean_loss(outcomes, weights), sum(weights))
    hits = WeightedMean(accuracy(outcomes), number_classified(outcomes))
    custom = mean_metrics(outcomes, [outcome.samples for outcome in outcomes] if adds_losses else weights)
    loss, hits, *means = experiment.strategy.means([loss, hits, *custom.values()])
    value = loss.value
    if value is not None and adds_losses:
        value = value * (len(outcomes) * experiment.strategy.batch_shard.size)
    metrics = {"accuracy": hits.value, **{name: mean.value for name, mean in zip(custom, means, strict=True)}}
    return BatchMeans(value, metrics, hits.weight)
