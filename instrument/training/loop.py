"""The training loop: optimizer steps, evaluations and passes of the probe batch, and the means of their metrics.

In `mode: forward`, the model runs over the data without training; no parameter and no buffer changes.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import InstrumentError
from ..plan.shape_inference import without_side_effects
from ..probe.metrics import custom_metrics_in
from ..probe.probe import Probe
from ..runtime.own_operations import own_collectives
from ..tasks.base import (
    CountsTerms,
    Generated,
    Outcome,
    WeightedMean,
    accuracy,
    batch_weight,
    batch_with_targets,
    call_task,
    is_sum,
    mean_loss,
    mean_metrics,
    number_classified,
    weighted,
)
from ..tasks.model_output import with_input_gradients
from ..values.dtensor import full_tensor, own_rank, total_norm
from ..values.nested import to_device
from ..values.sparse import coalesce, is_sparse
from .experiment import Experiment
from .loader import LoadedBatch

WEIGHT = "weight of "  # prefix of the sum of the weights of a metric
Metrics = Mapping[str, float | None]
"""The metrics of a step, an evaluation or a run, by name."""


@dataclass(frozen=True)
class Progress:
    """The state of a run after a step or an evaluation, for display."""

    step: int  # the number of completed steps
    steps: int
    metrics: Metrics
    rows: int  # the number of rows recorded so far
    phase: str  # `train`; `eval` for an evaluation; `forward` in mode: forward
    overhead: float | None = None  # of hooks, relative to a step without them: 0.05 means 5%; None if not measured
    warnings: Sequence[str] = ()  # the warnings since the start of the training


Show = Callable[[Progress], None]
OnStepEnd = Callable[[Callable[[], Metrics]], None] | None
"""Called with a function that returns the metrics for a checkpoint."""


def progress_reporter(experiment: Experiment, probe: Probe, on_progress: Show) -> Callable[[Metrics, str], None]:
    earlier_warnings = len(probe.warnings)

    def report(metrics: Metrics, phase: str) -> None:
        if probe.step == experiment.steps:
            probe.recorder.flush()  # to report the warnings of the last steps
        rows, warnings = probe.recorder.rows_written, probe.warnings[earlier_warnings:]
        on_progress(Progress(probe.step, experiment.steps, metrics, rows, phase, probe.overhead, warnings))

    return report


def train(
    experiment: Experiment, probe: Probe, on_progress: Show, on_step_end: OnStepEnd = None, last: Metrics | None = None
) -> Metrics:
    """Train to the last step, with scheduled evaluations and passes of the probe batch.

    `on_progress` is called after each step and each evaluation; `on_step_end`, which saves checkpoints, at the end of each step with
    the metrics of the last evaluation. `last` has those from before a resume.
    """
    last = last or {}
    report = progress_reporter(experiment, probe, on_progress)
    experiment.model.train()
    for epoch, micro_batches in experiment.batches:
        probe.epoch = epoch
        if has_probe_pass(experiment, probe.step):
            run_probe_batch(experiment, probe)
        with operators_of_step(experiment, probe):
            metrics = train_step(experiment, probe, micro_batches)
        report(metrics, "train")
        if probe.step in experiment.length.evaluations:
            last = evaluate(experiment, probe)
            report(last, "eval")
        if on_step_end is not None:
            on_step_end(partial(dict, last))
        if probe.should_stop:
            return last
    if has_probe_pass(experiment, probe.step):
        run_probe_batch(experiment, probe)
    return last


class NoHooks:
    """Takes the place of a `Probe` in steps without hooks."""

    def loss(self, loss: Tensor) -> Tensor:
        return loss

    def begin_micro_step(self, *_: Any) -> None:
        """Do nothing."""

    end_micro_step = begin_micro_step

    def end_step(self, *, loss: Tensor | None, **metrics: Any) -> Metrics:  # noqa: ARG002
        return {"loss": None if loss is None else loss.item()}


StepObserver = Probe | NoHooks


def operators_of_step(experiment: Experiment, probe: Probe) -> AbstractContextManager[None]:
    """Return a block that records operators if the current step is one of those of `experiment.operator_steps`."""
    return probe.record_operators() if probe.step in experiment.operator_steps else nullcontext()


def write_generated(observer: StepObserver, generated: Sequence[Generated]) -> None:
    """Write rows of the table `generated` for the current micro-step."""
    if isinstance(observer, Probe) and generated:
        place = (*observer.clock.moment, observer.clock.rank)
        observer.recorder.write("generated", [(*place, index, *astuple(each)) for index, each in enumerate(generated)])


def batch_weights(experiment: Experiment, micro_batches: Sequence[LoadedBatch]) -> tuple[list[float], float]:
    """Return the weight of each micro-batch in the loss of a step, and the number by which they are divided.

    The number is the sum of the weights over all processes, or 1 if losses are added. It may be 0.
    """
    task = experiment.task
    weights = [batch_weight(task, each.batch, each.samples) for each in micro_batches]
    if is_sum(task):
        return weights, 1
    if not isinstance(task, CountsTerms):
        return weights, sum(each.total for each in micro_batches)
    return weights, experiment.strategy.total(sum(weights))


def mean_over_processes(
    experiment: Experiment, outcomes: Sequence[Outcome], weights: Sequence[float]
) -> tuple[dict[str, Tensor | None], dict[str, Tensor | float]]:
    """Return the metrics over the batches of all processes, and the weights of the accuracy and of the custom metrics.

    All processes have the same number of batches and the same metrics. For the weights of the batches, see `batch_weights`. The loss
    is a mean, or the sum if the losses of the task are sums. A loss or an accuracy that the task does not compute is None.
    """
    adds_losses = is_sum(experiment.task)
    loss = WeightedMean(mean_loss(outcomes, weights), sum(weights))
    hits = WeightedMean(accuracy(outcomes), number_classified(outcomes))
    custom = mean_metrics(outcomes, [outcome.samples for outcome in outcomes] if adds_losses else weights)
    loss, hits, *means = experiment.strategy.means([loss, hits, *custom.values()])
    value = loss.value
    if value is not None and adds_losses:
        value = value * (len(outcomes) * experiment.strategy.batch_shard.size)
    others = {"accuracy": hits, **dict(zip(custom, means, strict=True))}
    return {"loss": value, **{name: mean.value for name, mean in others.items()}}, {
        name: mean.weight for name, mean in others.items()
    }


def train_step(experiment: Experiment, observer: StepObserver, micro_batches: Sequence[LoadedBatch]) -> Metrics:
    """Make one optimizer step, with gradient accumulation over its micro-batches.

    An optimizer that requires a closure, such as LBFGS, computes the gradients several times. The loss, accuracy and gradient
    norm of the step are those of the first time, before the parameters change.
    """
    optimizer, scheduler, scaler = experiment.optimizer, experiment.scheduler, experiment.scaler
    assert optimizer is not None, "mode: forward has no optimizer"
    if experiment.uses_closure:
        results: list[tuple[list[Outcome], list[float], Tensor | None]] = []

        def closure() -> Tensor:
            outcomes, weights, losses = _compute_gradients(experiment, observer, micro_batches)
            if not results:
                results.append((outcomes, weights, gradient_norm(experiment.model)))
            return torch.stack(losses).sum() if len(losses) > 1 else losses[0]

        with experiment.lr_scale.applied(optimizer):
            lr = optimizer.param_groups[0]["lr"]
            optimizer.step(closure)  # type: ignore[arg-type]
        outcomes, weights, norm = results[0]
    else:
        outcomes, weights, _ = _compute_gradients(experiment, observer, micro_batches)
        scaler.unscale_(optimizer)
        norm = gradient_norm(experiment.model)
        if experiment.strategy.pipeline is not None:
            norm = experiment.strategy.pipeline.norm(norm)
        with experiment.lr_scale.applied(optimizer):
            lr = optimizer.param_groups[0]["lr"]
            scaler.step(optimizer)
        scaler.update()
    if scheduler is not None:
        scheduler.step()
    metrics, _ = mean_over_processes(experiment, outcomes, weights)
    return observer.end_step(**metrics, lr=lr, grad_norm=norm, samples=sum(each.total for each in micro_batches))


def _compute_gradients(
    experiment: Experiment, observer: StepObserver, micro_batches: Sequence[LoadedBatch]
) -> tuple[list[Outcome], list[float], list[Tensor]]:
    """Compute the gradients of the loss of a step: the mean over all samples or terms, or the sum.

    Return the outcome, the weight and the part of the loss of each micro-batch.
    """
    weights, total = batch_weights(experiment, micro_batches)
    strategy, train_module = experiment.strategy, experiment.train_module
    outcomes: list[Outcome] = []
    losses: list[Tensor] = []
    assert experiment.optimizer is not None, "mode: forward has no optimizer"
    experiment.optimizer.zero_grad()
    if strategy.pipeline is not None:
        targets = [batch_with_targets(experiment.task, each.batch) for each in micro_batches]
        parts = [partial(weighted, weight=weight, total=total) for weight in weights]
        with strategy.micro_step(train_module, last=True):
            outcomes, losses = strategy.pipeline.compute_gradients(
                train_module, observer, micro_batches, targets, parts, experiment.device
            )
        return outcomes, weights, losses
    for number, ((batch, indices, _), weight) in enumerate(zip(micro_batches, weights, strict=True), 1):
        observer.begin_micro_step(indices, batch_with_targets(experiment.task, batch))
        with strategy.micro_step(train_module, last=number == len(micro_batches)):
            outcome, loss = train_module(to_device(batch, experiment.device), observer.loss)
            if loss is None:
                task = type(experiment.task).__qualname__
                raise InstrumentError(f"task {task} returned no loss for a training batch")
            part = weighted(loss, weight, total)
            experiment.scaler.scale(part).backward()
        outcomes.append(outcome)
        losses.append(part.detach())
        observer.end_micro_step()
    return outcomes, weights, losses


@torch.no_grad()
def evaluate(experiment: Experiment, probe: Probe) -> Metrics:
    """Evaluate the model in eval mode, without gradients, and return the metrics. The mode of the model is restored."""
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
                probe.begin_micro_step(indices, batch_with_targets(experiment.task, batch))
                with experiment.autocast():
                    run = partial(call_task, task, experiment.called_model, to_device(batch, experiment.device))
                    pipeline = experiment.strategy.pipeline
                    outcomes.append(run() if pipeline is None else pipeline.call(run))
                write_generated(probe, outcomes[-1].generated)
                weights.append(batch_weight(task, batch, len(indices)))
                samples += len(indices)
                probe.end_micro_step()
            metrics, _ = mean_over_processes(experiment, outcomes, weights)
            seconds = time.perf_counter() - started_at
            return probe.write_metrics(**metrics, seconds=seconds, samples=experiment.strategy.total(samples))
    finally:
        model.train(was_training)


def has_probe_pass(experiment: Experiment, step: int) -> bool:
    """Return whether a hook of phase `probe` is scheduled after this number of steps."""
    return any(spec.schedule.includes(step, "probe") for spec in experiment.plan.specs.values())


def run_probe_batch(experiment: Experiment, probe: Probe) -> Metrics:
    """Run the probe batch.

    The model is in eval mode. Afterwards, the training flags, buffers, gradients, random states and the state of the
    task are those from before. Random numbers that the model draws with PyTorch are the same in each pass.
    """
    loaded = experiment.probe_batch
    assert loaded is not None, "hooks of phase probe require a probe batch"
    started_at = time.perf_counter()
    weights, total = batch_weights(experiment, [loaded])
    with without_side_effects(experiment.model, training=False), _kept_state(experiment), probe.in_phase("probe"):
        probe.begin_micro_step(loaded.indices, batch_with_targets(experiment.task, loaded.batch))
        seed = experiment.config.seed + own_rank()
        torch.default_generator.manual_seed(seed)
        if experiment.device.type == "cuda":
            torch.cuda.manual_seed(seed)
        batch = with_input_gradients(to_device(loaded.batch, experiment.device))
        with experiment.autocast():
            # A compiled model is not called, because it would be compiled again, and there is a limit for that.
            outcome = call_task(experiment.task, experiment.model, batch)
        assert outcome.loss is not None, "shape inference checked that there is a loss"
        loss = probe.loss(outcome.loss)
        experiment.scaler.scale(weighted(loss, weights[0], total)).backward()
        probe.end_micro_step()
        metrics, _ = mean_over_processes(experiment, [outcome], weights)
        return probe.write_metrics(**metrics, seconds=time.perf_counter() - started_at, samples=loaded.total)


@contextmanager
def _kept_state(experiment: Experiment) -> Iterator[None]:
    """Set the gradients of all parameters to None inside the block, and restore them and the task's state afterwards."""
    task: Any = experiment.task
    task_state = copy.deepcopy(task.state_dict()) if hasattr(task, "state_dict") else None
    # The optimizer holds the shards of FSDP2 also while the model holds full parameters.
    optimized = (p for each in experiment.optimizers for group in each.param_groups for p in group["params"])
    parameters = {id(parameter): parameter for parameter in (*experiment.model.parameters(), *optimized)}
    gradients = [(parameter, parameter.grad) for parameter in parameters.values()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        if task_state is not None:
            task.load_state_dict(task_state)


@own_collectives()
def gradient_norm(model: torch.nn.Module) -> Tensor | None:
    """Return the L2 norm of all gradients of a model as one vector: a scalar; None if no parameter has a gradient."""
    given = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    gradients = [coalesce(each).values() if is_sparse(each) else each for each in given]  # sums duplicate indices
    if any(gradient.element_size() < 4 for gradient in gradients):  # Half precision has only three digits.
        wide = ((each, torch.promote_types(each.dtype, torch.float32)) for each in gradients)
        norms = [torch.linalg.vector_norm(each, dtype=dtype).float() for each, dtype in wide]
        return full_tensor(torch.linalg.vector_norm(torch.stack(norms)))
    return total_norm(gradients) if gradients else None


def run_forward(
    experiment: Experiment, probe: Probe, on_progress: Show, on_step_end: OnStepEnd = None, last: Metrics | None = None
) -> Metrics:
    """Run the model over all batches in eval mode. Each batch is a step. Afterwards, all buffers are those from before.

    Args:
        on_progress, on_step_end, last: As for `train`, with the sums over the batches so far, or before a resume.

    Returns:
        The metrics of the run: the mean `loss` and `accuracy` over all samples or terms, the `seconds` of all batches,
        and `samples_per_second`.
    """
    sums = _Sums(last or {}, adds_losses=is_sum(experiment.task))
    report = progress_reporter(experiment, probe, on_progress)
    probe.phase = "forward"
    points: list[float] = ((np.polynomial.legendre.leggauss(experiment.config.forward.passes)[0] + 1) / 2).tolist()
    with without_side_effects(experiment.model, training=False):
        for epoch, (loaded,) in experiment.batches:
            probe.epoch = epoch
            scale = points[epoch] if experiment.config.forward.integrate else 1.0
            with operators_of_step(experiment, probe):
                row, weights = forward_step(experiment, probe, loaded, scale)
            sums.add(row, weights, loaded.total)
            report(row, "forward")
            if on_step_end is not None:
                on_step_end(sums.read)
            if probe.should_stop:
                return sums.means()
    if probe.step < experiment.batches.stop:
        probe.event("data", f"the dataset ended after {probe.step} of at most {experiment.steps} batches")
    return sums.means()


def forward_step(
    experiment: Experiment, observer: StepObserver, loaded: LoadedBatch, scale: float = 1.0
) -> tuple[Metrics, Mapping[str, Tensor | float]]:
    """Run the model, which is in eval mode, on one batch; with `forward.grad` also its backward pass, with inputs times `scale`.

    Returns:
        The metrics of the step, as the observer returned them, and the weight of each metric over all processes: the number of
        samples or terms for the loss, or 1 if losses are added; the number of targets for the accuracy.
    """
    config = experiment.config.forward
    weights, total = batch_weights(experiment, [loaded])
    observer.begin_micro_step(loaded.indices, batch_with_targets(experiment.task, loaded.batch))
    batch = to_device(loaded.batch, experiment.device)
    with torch.set_grad_enabled(config.grad):
        outcome, objective = experiment.train_module(
            with_input_gradients(batch, scale) if config.grad else batch, observer.loss
        )
        if config.grad:
            assert objective is not None, "shape inference checked that there is a loss"
            # With this weight, the gradients are those of the mean over the samples, or terms, of all processes.
            (objective if config.of else weighted(objective, weights[0], total)).backward()
            experiment.model.zero_grad()
    write_generated(observer, outcome.generated)
    observer.end_micro_step()
    metrics, weights_of_metrics = mean_over_processes(experiment, [outcome], weights)
    return observer.end_step(**metrics, samples=loaded.total), {"loss": total, **weights_of_metrics}


class _Sums:
    """The weighted sums of the metrics of all batches so far, and of their weights. The row of a batch is read at the next batch.

    A row on a GPU is complete by then, so that the host does not wait for the device.
    """

    def __init__(self, sums: Metrics, *, adds_losses: bool) -> None:
        self._sums: dict[str, float | None] = dict(sums)
        self._adds_losses = adds_losses
        self._pending: tuple[Metrics, Mapping[str, Tensor | float], int] | None = None

    def add(self, row: Metrics, weights: Mapping[str, Tensor | float], samples: int) -> None:
        self.read()
        self._pending = (row, weights, samples)

    def read(self) -> dict[str, float | None]:
        """Return the sums of all batches. If a batch has no value of a metric, there is no sum of it."""
        if self._pending is not None:
            (row, weights, samples), self._pending = self._pending, None
            logged = samples if self._adds_losses else weights["loss"]
            custom = [name for name, value in custom_metrics_in(row).items() if value is not None]
            added = {"seconds": row["seconds"], "samples": samples}
            for name in ("loss", "accuracy", *custom):
                value, weight = row[name], float(weights.get(name, logged))
                added |= {name: None if value is None else value * weight, f"{WEIGHT}{name}": weight}
            for name, value in added.items():
                so_far = self._sums.get(name, 0.0)
                self._sums[name] = None if so_far is None or value is None else so_far + value
        return self._sums

    def means(self) -> dict[str, float | None]:
        sums, means = self.read(), dict[str, float | None]()
        for name in (key.removeprefix(WEIGHT) for key in sums if key.startswith(WEIGHT)):
            total, weight = sums[name], 1.0 if name == "loss" and self._adds_losses else sums[f"{WEIGHT}{name}"]
            means[name] = None if total is None else total / (weight or 1.0)
        seconds, samples = sums["seconds"] or 0.0, sums["samples"] or 0.0
        return {**means, "seconds": seconds, "samples_per_second": samples / seconds}
