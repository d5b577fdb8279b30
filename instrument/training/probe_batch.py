"""The probe batch: the same samples run through the model between training steps, with gradients and without updates."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ..plan.shape_inference import without_side_effects
from ..probe.collectives import own_rank
from ..probe.probe import Probe
from ..tasks import call_task
from ..tasks.base import weighted
from ..values.nested import to_device
from .batch_means import batch_weights, means_over_processes
from .experiment import Experiment
from .input_gradients import with_input_gradients


def has_probe_pass(experiment: Experiment, step: int) -> bool:
    """Return whether a hook of phase `probe` is scheduled after this number of steps."""
    return any(spec.schedule.includes(step, "probe") for spec in experiment.plan.specs.values())


def run_probe_batch(experiment: Experiment, probe: Probe) -> Mapping[str, float | None]:
    """Run the probe batch.

    The model is in eval mode. Afterwards, the training flags, buffers, gradients, random states and the state of the
    task are those from before. Random numbers that the model draws with PyTorch are the same in each pass.
    """
    batches = experiment.probe_batch
    assert batches is not None, "hooks of phase probe require a probe batch"
    started_at = time.perf_counter()
    weights, total = batch_weights(experiment, batches)
    with without_side_effects(experiment.model, training=False), _kept_state(experiment), probe.in_phase("probe"):
        probe.begin_micro_step(batches.indices[0], experiment.batch_with_targets(batches[0]))
        _seed(experiment)
        batch = with_input_gradients(to_device(batches[0], experiment.device))
        with experiment.autocast():
            # A compiled model is not called, because it would be compiled again, and there is a limit for that.
            outcome = call_task(experiment.task, experiment.model, batch)
        assert outcome.loss is not None, "shape inference checked that there is a loss"
        loss = probe.loss(outcome.loss)
        experiment.scaler.scale(weighted(loss, weights[0], total)).backward()
        probe.end_micro_step()
        means = means_over_processes(experiment, [outcome], weights)
        seconds = time.perf_counter() - started_at
        return probe.write_metrics(loss=means.loss, **means.metrics, seconds=seconds, samples=batches.samples)


def _seed(experiment: Experiment) -> None:
    """Seed PyTorch, with a different seed in each process."""
    seed = experiment.config.seed + own_rank()
    torch.default_generator.manual_seed(seed)
    if experiment.device.type == "cuda":
        torch.cuda.manual_seed(seed)


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
