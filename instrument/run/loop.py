"""The training loop, in the textbook's order."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..capture.probe import Probe
from ..nested import number_of_samples, to_device
from ..sharded import whole
from ..spec.schedule import Evaluations
from .experiment import Experiment
from .ranks.shares import Group
from .tasks import CountsTerms, Outcome, accuracy, mean_loss


@dataclass(frozen=True)
class Progress:
    """What there is to be shown after a step or an evaluation.

    Attributes:
        step: Steps done.
        steps: Steps in all.
        metrics: The row of metrics: loss, accuracy and the like; None where there is none.
        rows: Rows recorded so far.
        phase: `train`, or `eval` for an evaluation.
        overhead: By which share of itself hooks make a step longer; None where it was not measured.
        warnings: Those that came since the training began.
    """

    step: int
    steps: int
    metrics: Mapping[str, float | None]
    rows: int
    phase: str
    overhead: float | None = None
    warnings: Sequence[str] = ()


def train(
    experiment: Experiment,
    probe: Probe,
    show: Callable[[Progress], None],
    keep: Callable[[Mapping[str, float | None]], None] | None = None,
    last: Mapping[str, float | None] | None = None,
) -> Mapping[str, float | None]:
    """Train to the end, and evaluate when it is time.

    Args:
        experiment: What is trained.
        probe: The attached hooks; it is told when a micro-step, a step and an evaluation end.
        show: Called after each step and each evaluation.
        keep: Called when all of a step is over, with the metrics of the last evaluation: the time for a checkpoint.
        last: The metrics of the last evaluation before this, of a training that goes on.

    Returns:
        The metrics of the last evaluation.
    """
    evaluations = Evaluations(experiment.steps, experiment.config.train.eval_every)
    last = last or {}
    before = len(probe.warnings)

    def tell(metrics: Mapping[str, float | None], phase: str) -> None:
        rows, warnings = probe.recorder.rows_written, probe.warnings[before:]
        show(Progress(probe.step, experiment.steps, metrics, rows, phase, probe.overhead, warnings))

    experiment.model.train()
    for epoch, micro_batches in experiment.batches:
        probe.epoch = epoch
        metrics = make_step(experiment, probe, micro_batches)
        tell(metrics, "train")
        if probe.step in evaluations:
            last = evaluate(experiment, probe)
            tell(last, "eval")
        if keep is not None:
            keep(last)
    return last


class Watcher(Protocol):
    """What a step is shown to: a probe."""

    def loss(self, loss: Tensor) -> Tensor:
        """The loss of a micro-batch; gives the one to call backward on."""

    def end_micro_step(self) -> None:
        """A micro-batch's backward pass is over."""

    def end_step(
        self, *, loss: Tensor | None, samples: int, **metrics: Tensor | float | None
    ) -> Mapping[str, float | None]:
        """The optimizer has made its step; gives the row of metrics."""


def make_step(experiment: Experiment, watcher: Watcher, micro_batches: Group) -> Mapping[str, float | None]:
    """One optimizer step on its micro-batches.

    Returns:
        The step's metrics, as the watcher has them.
    """
    optimizer, scheduler, scaler = experiment.optimizer, experiment.scheduler, experiment.scaler
    strategy, trained = experiment.strategy, experiment.trained
    outcomes: list[Outcome] = []
    weights, total = _weights(experiment, micro_batches)
    optimizer.zero_grad()
    for number, (batch, weight) in enumerate(zip(micro_batches, weights, strict=True), 1):
        with strategy.micro_step(trained, last=number == len(micro_batches)):
            outcome, loss = trained(to_device(batch, experiment.device), watcher.loss)
            # The loss is the mean over all samples of the step, or over all terms.
            scaler.scale(loss * (weight / total)).backward()
        outcomes.append(outcome)
        watcher.end_micro_step()
    scaler.unscale_(optimizer)
    norm = gradient_norm(experiment.model)
    lr = optimizer.param_groups[0]["lr"]
    scaler.step(optimizer)
    scaler.update()
    if scheduler is not None:
        scheduler.step()
    mean, right = _means(experiment, outcomes, weights)
    return watcher.end_step(loss=mean, accuracy=right, lr=lr, grad_norm=norm, samples=micro_batches.samples)


def _weights(experiment: Experiment, micro_batches: Group) -> tuple[list[int], int]:
    """What each micro-batch counts in the mean of a step, and the sum over all processes."""
    if not isinstance(experiment.task, CountsTerms):
        return [number_of_samples(batch) for batch in micro_batches], micro_batches.samples
    weights = [experiment.task.number_of_terms(batch) for batch in micro_batches]
    return weights, max(1, experiment.strategy.total(sum(weights)))


def _means(
    experiment: Experiment, outcomes: Sequence[Outcome], weights: Sequence[int]
) -> tuple[Tensor | None, Tensor | None]:
    """Loss and accuracy over the batches of all processes, each with its weight."""
    own = [mean_loss(outcomes, weights), accuracy(outcomes, weights)]
    loss, right = experiment.strategy.mean(own, sum(weights))
    return loss, right


@torch.no_grad()
def evaluate(experiment: Experiment, probe: Probe) -> Mapping[str, float | None]:
    """Loss and accuracy over the evaluation's slice, in eval mode; the model's mode is put back."""
    model = experiment.model
    began = time.perf_counter()
    was_training = model.training
    model.eval()
    experiment.strategy.share_buffers(model)
    try:
        with probe.evaluating():
            outcomes: list[Outcome] = []
            weights: list[int] = []
            task = experiment.task
            for batch in experiment.evaluation:
                with experiment.autocast():
                    outcomes.append(task(experiment.callable, to_device(batch, experiment.device)))
                weights.append(task.number_of_terms(batch) if isinstance(task, CountsTerms) else outcomes[-1].samples)
                probe.end_micro_step()
            loss, right = _means(experiment, outcomes, weights)
            return probe.write_metrics(
                loss=loss,
                accuracy=right,
                seconds=time.perf_counter() - began,
                samples=experiment.strategy.total(sum(outcome.samples for outcome in outcomes)),
            )
    finally:
        model.train(was_training)


def gradient_norm(model: torch.nn.Module) -> Tensor | None:
    """The L2 norm of all gradients of a model as one vector; None where there are none."""
    gradients = [_entries(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    if any(gradient.element_size() < 4 for gradient in gradients):  # a norm in half precision has three digits
        norms = [
            torch.linalg.vector_norm(each, dtype=torch.promote_types(each.dtype, torch.float32)) for each in gradients
        ]
        return whole(torch.linalg.vector_norm(torch.stack([norm.float() for norm in norms])))
    return whole(torch.nn.utils.get_total_norm(gradients)) if gradients else None


def _entries(gradient: Tensor) -> Tensor:
    """The values of a sparse gradient, each index once; any other gradient as it is."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient
