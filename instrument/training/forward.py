"""`mode: forward`: the model runs over the data without training; no parameter and no buffer changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple

import numpy as np
import torch
from torch import Tensor

from ..plan.shape_inference import without_side_effects
from ..probe.metrics import custom_metrics_in
from ..probe.probe import Probe
from ..tasks.base import is_sum, weighted
from ..tasks.model_output import with_input_gradients
from ..values.nested import to_device
from .experiment import Experiment
from .loader import LoadedBatch
from .loop import Progress, StepObserver, batch_weights, mean_over_processes, progress_reporter

WEIGHT = "weight of "  # prefix of the sum of the weights of a metric


def run_forward(
    experiment: Experiment,
    probe: Probe,
    on_progress: Callable[[Progress], None],
    on_step_end: Callable[[Mapping[str, float | None]], None] | None = None,
    last: Mapping[str, float | None] | None = None,
) -> Mapping[str, float | None]:
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
            with probe.operators_of_step():
                row, weights = forward_step(experiment, probe, loaded, scale)
            sums.add(row, weights, loaded.total)
            report(row, "forward")
            if on_step_end is not None:
                on_step_end(sums)
            if probe.should_stop:
                return sums.means()
    if probe.step < experiment.batches.stop:
        probe.event("data", f"the dataset ended after {probe.step} of at most {experiment.steps} batches")
    return sums.means()


def forward_step(
    experiment: Experiment, observer: StepObserver, loaded: LoadedBatch, scale: float = 1.0
) -> tuple[Mapping[str, float | None], Mapping[str, Tensor | float]]:
    """Run the model, which is in eval mode, on one batch; with `forward.grad` also its backward pass, with inputs times `scale`.

    Returns:
        The metrics of the step, as the observer returned them, and the weight of each metric over all processes: the number of
        samples or terms for the loss, or 1 if losses are added; the number of targets for the accuracy.
    """
    config = experiment.config.forward
    weights, total = batch_weights(experiment, [loaded])
    observer.begin_micro_step(loaded.indices, experiment.batch_with_targets(loaded.batch))
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
    observer.write_generated([astuple(generated) for generated in outcome.generated])
    observer.end_micro_step()
    metrics, weights_of_metrics = mean_over_processes(experiment, [outcome], weights)
    return observer.end_step(**metrics, samples=loaded.total), {"loss": total, **weights_of_metrics}


class _Sums(Mapping[str, "float | None"]):
    """The weighted sums of the metrics of all batches so far, and of their weights. The row of a batch is read at the next batch.

    A row on a GPU is complete by then, so that the host does not wait for the device.
    """

    def __init__(self, sums: Mapping[str, float | None], *, adds_losses: bool) -> None:
        self._sums: dict[str, float | None] = dict(sums)
        self._adds_losses = adds_losses
        self._pending: tuple[Mapping[str, float | None], Mapping[str, Tensor | float], int] | None = None

    def add(self, row: Mapping[str, float | None], weights: Mapping[str, Tensor | float], samples: int) -> None:
        self._read_pending()
        self._pending = (row, weights, samples)

    def _read_pending(self) -> None:
        if self._pending is None:
            return
        (row, weights, samples), self._pending = self._pending, None
        custom = [name for name, value in custom_metrics_in(row).items() if value is not None]
        logged = samples if self._adds_losses else weights["loss"]
        for name in ("loss", "accuracy", *custom):
            value, weight = row[name], float(weights.get(name, logged))
            self._add(name, None if value is None else value * weight)
            self._add(f"{WEIGHT}{name}", weight)
        self._add("seconds", row["seconds"])
        self._add("samples", samples)

    def _add(self, name: str, value: float | None) -> None:
        """Add a value to a sum; without a value, the sum is None."""
        so_far = self._sums.setdefault(name, 0.0)
        self._sums[name] = None if so_far is None or value is None else so_far + value

    def means(self) -> dict[str, float | None]:
        means: dict[str, float | None] = {}
        for name in (key.removeprefix(WEIGHT) for key in self if key.startswith(WEIGHT)):
            total, weight = self[name], 1.0 if name == "loss" and self._adds_losses else self[f"{WEIGHT}{name}"]
            means[name] = None if total is None else total / (weight or 1.0)
        seconds, samples = self["seconds"] or 0.0, self["samples"] or 0.0
        return {**means, "seconds": seconds, "samples_per_second": samples / seconds}

    def __getitem__(self, name: str) -> float | None:
        self._read_pending()
        return self._sums[name]

    def __iter__(self) -> Iterator[str]:
        self._read_pending()
        return iter(self._sums)

    def __len__(self) -> int:
        return len(self._sums)
