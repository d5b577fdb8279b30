"""The training loop: optimizer steps and evaluations."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from ..config.schedule import Evaluations
from ..errors import InstrumentError
from ..probe.probe import Probe
from ..runtime.own_collectives import own_collectives
from ..tasks import Outcome, call_task
from ..tasks.base import batch_weight, weighted
from ..values.dtensor import full_tensor
from ..values.nested import to_device
from ..values.sparse import coalesce, is_sparse
from .batch_means import batch_weights, means_over_processes
from .distributed.batch_sharding import StepBatches
from .experiment import Experiment
from .probe_batch import has_probe_pass, run_probe_batch


@dataclass(frozen=True)
class Progress:
    """The state of a run after a step or an evaluation, for display.

    Attributes:
        step: The number of completed steps.
        steps: The number of steps of the run.
        metrics: The metrics of the step or evaluation, such as loss and accuracy. Missing values are None.
        rows: The number of rows recorded so far.
        phase: `train`; `eval` for an evaluation; `forward` in mode: forward.
        overhead: The relative overhead of hooks per step; 0.05 means 5%. None if it was not measured.
        warnings: The warnings since the start of the training.
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
    on_progress: Callable[[Progress], None],
    on_step_end: Callable[[Mapping[str, float | None]], None] | None = None,
    last: Mapping[str, float | None] | None = None,
) -> Mapping[str, float | None]:
    """Train to the last step, with scheduled evaluations and passes of the probe batch.

    Args:
        on_progress: Called after each step and each evaluation.
        on_step_end: Called at the end of each step, after an evaluation, with the metrics of the last evaluation.
            Checkpoints are saved here. Default: None.
        last: The metrics of the last evaluation before a resume. Default: None.
    """
    evaluations = Evaluations(experiment.steps, experiment.config.train.eval_every)
    last = last or {}
    earlier_warnings = len(probe.warnings)

    def report(metrics: Mapping[str, float | None], phase: str) -> None:
        if probe.step == experiment.steps:
            probe.recorder.flush()  # to report the warnings of the last steps
        rows, warnings = probe.recorder.rows_written, probe.warnings[earlier_warnings:]
        on_progress(Progress(probe.step, experiment.steps, metrics, rows, phase, probe.overhead, warnings))

    experiment.model.train()
    for epoch, micro_batches in experiment.batches:
        probe.epoch = epoch
        if has_probe_pass(experiment, probe.step):
            run_probe_batch(experiment, probe)
        with probe.operators_of_step():
            metrics = train_step(experiment, probe, micro_batches)
        report(metrics, "train")
        if probe.step in evaluations:
            last = evaluate(experiment, probe)
            report(last, "eval")
        if on_step_end is not None:
            on_step_end(last)
        if probe.should_stop:
            return last
    if has_probe_pass(experiment, probe.step):
        run_probe_batch(experiment, probe)
    return last


class NoHooks:
    """Takes the place of a `Probe` in steps without hooks."""

    def loss(self, loss: Tensor) -> Tensor:
        """Return the loss."""
        return loss

    def begin_micro_step(self, indices: Sequence[int], batch: Any) -> None:
        """Do nothing."""

    def write_generated(self, generated: Any) -> None:
        """Do nothing."""

    def end_micro_step(self) -> None:
        """Do nothing."""

    def end_step(self, *, loss: Tensor | None, **metrics: Any) -> Mapping[str, float | None]:  # noqa: ARG002
        """Return the loss as a number."""
        return {"loss": None if loss is None else loss.item()}


StepObserver = Probe | NoHooks


def train_step(
    experiment: Experiment, observer: StepObserver, micro_batches: StepBatches
) -> Mapping[str, float | None]:
    """Make one optimizer step, with gradient accumulation over its micro-batches.

    An optimizer that requires a closure, such as LBFGS, computes the gradients several times. The loss, accuracy and gradient
    norm of the step are those of the first time, before the parameters change.

    Args:
        observer: The probe, or `NoHooks`.
    """
    optimizer, scheduler, scaler = experiment.optimizer, experiment.scheduler, experiment.scaler
    assert optimizer is not None, "mode: forward has no optimizer"
    weights, total = batch_weights(experiment, micro_batches)
    if experiment.uses_closure:
        results: list[tuple[list[Outcome], Tensor | None]] = []

        def closure() -> Tensor:
            outcomes, losses = _compute_gradients(experiment, observer, micro_batches, weights, total)
            if not results:
                results.append((outcomes, gradient_norm(experiment.model)))
            return torch.stack(losses).sum() if len(losses) > 1 else losses[0]

        with experiment.lr_scale.applied(optimizer):
            lr = optimizer.param_groups[0]["lr"]
            optimizer.step(closure)  # type: ignore[arg-type]
        outcomes, norm = results[0]
    else:
        outcomes, _ = _compute_gradients(experiment, observer, micro_batches, weights, total)
        scaler.unscale_(optimizer)
        norm = gradient_norm(experiment.model)
        with experiment.lr_scale.applied(optimizer):
            lr = optimizer.param_groups[0]["lr"]
            scaler.step(optimizer)
        scaler.update()
    if scheduler is not None:
        scheduler.step()
    means = means_over_processes(experiment, outcomes, weights)
    return observer.end_step(loss=means.loss, **means.metrics, lr=lr, grad_norm=norm, samples=micro_batches.samples)


def _compute_gradients(
    experiment: Experiment, observer: StepObserver, micro_batches: StepBatches, weights: Sequence[float], total: float
) -> tuple[list[Outcome], list[Tensor]]:
    """Compute the gradients of the loss of a step: the mean over all samples or terms, or the sum."""
    strategy, train_module = experiment.strategy, experiment.train_module
    outcomes: list[Outcome] = []
    losses: list[Tensor] = []
    assert experiment.optimizer is not None, "mode: forward has no optimizer"
    experiment.optimizer.zero_grad()
    of_samples = zip(micro_batches, micro_batches.indices, weights, strict=True)
    for number, (batch, indices, weight) in enumerate(of_samples, 1):
        observer.begin_micro_step(indices, experiment.batch_with_targets(batch))
        with strategy.micro_step(train_module, last=number == len(micro_batches)):
            outcome, loss = train_module(to_device(batch, experiment.device), observer.loss)
            if loss is None:
                raise InstrumentError(
                    f"task {type(experiment.task).__qualname__} returned no loss for a training batch"
                )
            part = weighted(loss, weight, total)
            experiment.scaler.scale(part).backward()
        outcomes.append(outcome)
        losses.append(part.detach())
        observer.end_micro_step()
    return outcomes, losses


@torch.no_grad()
def evaluate(experiment: Experiment, probe: Probe) -> Mapping[str, float | None]:
    """Evaluate the model in eval mode, without gradients. The mode of the model is restored.

    Returns:
        The metrics, such as `loss`, `accuracy`, `seconds` (the duration) and `samples`.
    """
    model = experiment.model
    assert experiment.eval_loader is not None, "mode: forward has no evaluations"
    started_at = time.perf_counter()
    was_training = model.training
    model.eval()
    experiment.strategy.broadcast_buffers(model)
    try:
        with probe.evaluating():
            outcomes: list[Outcome] = []
            weights: list[float] = []
            samples = 0
            task = experiment.task
            for batch, indices, _ in experiment.eval_loader:
                probe.begin_micro_step(indices, experiment.batch_with_targets(batch))
                with experiment.autocast():
                    outcomes.append(call_task(task, experiment.called_model, to_device(batch, experiment.device)))
                probe.write_generated([astuple(generated) for generated in outcomes[-1].generated])
                weights.append(batch_weight(task, batch, len(indices)))
                samples += len(indices)
                probe.end_micro_step()
            means = means_over_processes(experiment, outcomes, weights)
            return probe.write_metrics(
                loss=means.loss,
                **means.metrics,
                seconds=time.perf_counter() - started_at,
                samples=experiment.strategy.total(samples),
            )
    finally:
        model.train(was_training)


@own_collectives()
def gradient_norm(model: torch.nn.Module) -> Tensor | None:
    """Return the L2 norm of all gradients of a model as one vector.

    Returns:
        A scalar; None if no parameter has a gradient.
    """
    gradients = [_entries(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    if any(gradient.element_size() < 4 for gradient in gradients):  # Half precision has only three digits.
        norms = [
            torch.linalg.vector_norm(each, dtype=torch.promote_types(each.dtype, torch.float32)) for each in gradients
        ]
        return full_tensor(torch.linalg.vector_norm(torch.stack([norm.float() for norm in norms])))
    return full_tensor(torch.nn.utils.get_total_norm(gradients)) if gradients else None


def _entries(gradient: Tensor) -> Tensor:
    """Return the values of a sparse gradient, with duplicate indices summed; any other gradient unchanged."""
    return coalesce(gradient).values() if is_sparse(gradient) else gradient
