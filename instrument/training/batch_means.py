"""Weights of batches, and the means of loss and accuracy over batches and processes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..distributed.batch_sharding import StepBatches
from ..tasks import CountsTerms, Outcome, accuracy, mean_loss
from .experiment import Experiment


def batch_weights(experiment: Experiment, micro_batches: StepBatches) -> tuple[list[int], int]:
    """Return the weight of each micro-batch in the mean of a step, and the sum of weights over all processes.

    Args:
        experiment: The experiment.
        micro_batches: The micro-batches of the step.
    """
    if not isinstance(experiment.task, CountsTerms):
        return micro_batches.sizes, micro_batches.samples
    weights = [experiment.task.number_of_terms(batch) for batch in micro_batches]
    return weights, experiment.strategy.total(sum(weights))


def means_over_processes(
    experiment: Experiment, outcomes: Sequence[Outcome], weights: Sequence[int]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the weighted mean loss and accuracy over the batches of all processes.

    Args:
        experiment: The experiment.
        outcomes: The outcome of each batch of this process.
        weights: The weight of each batch.

    Returns:
        Two scalars; None for an accuracy that the task does not compute.
    """
    local_means = [mean_loss(outcomes, weights), accuracy(outcomes, weights)]
    loss, mean_accuracy = experiment.strategy.mean(local_means, sum(weights))
    return loss, mean_accuracy
