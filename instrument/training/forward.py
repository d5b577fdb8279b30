"""`mode: forward`: the model runs over the data without training; no parameter and no buffer changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple

import torch

from ..capture.probe import Probe
from ..distributed.batch_sharding import StepBatches
from ..nested import to_device
from ..plan.shape_inference import without_side_effects
from .batch_means import batch_weights, means_over_processes
from .experiment import Experiment
from .input_gradients import with_input_gradients
from .loop import Progress, StepObserver


def run_forward(
    experiment: Experiment,
    probe: Probe,
    on_progress: Callable[[Progress], None],
    on_step_end: Callable[[Mapping[str, float | None]], None] | None = None,
    last: Mapping[str, float | None] | None = None,
) -> Mapping[str, float | None]:
    """Run the model over all batches in eval mode. Each batch is a step. Afterwards, all buffers are those from before.

    Args:
        experiment: The experiment.
        probe: The attached probe.
        on_progress: Called after each batch.
        on_step_end: Called at the end of each batch, with the sums over the batches so far. Checkpoints are saved here.
            Default: None.
        last: The sums over the batches before a resume. Default: None.

    Returns:
        The metrics of the run: the mean `loss` and `accuracy` over all samples or terms, the `seconds` of all batches,
        and `samples_per_second`.
    """
    sums = _Sums(last or {})
    earlier_warnings = len(probe.warnings)
    probe.phase = "forward"
    with without_side_effects(experiment.model, training=False):
        for epoch, batches in experiment.batches:
            probe.epoch = epoch
            row, weight = forward_step(experiment, probe, batches)
            sums.add(row, weight, batches.samples)
            if probe.step == experiment.steps:
                probe.flush()  # to report the warnings of the last steps
            rows, warnings = probe.recorder.rows_written, probe.written_warnings[earlier_warnings:]
            on_progress(Progress(probe.step, experiment.steps, row, rows, "forward", probe.overhead, warnings))
            if on_step_end is not None:
                on_step_end(sums)
            if probe.should_stop:
                return sums.means()
    if probe.step < experiment.batches.stop:
        probe.event("data", f"the dataset ended after {probe.step} of at most {experiment.steps} batches")
    return sums.means()


def forward_step(
    experiment: Experiment, observer: StepObserver, batches: StepBatches
) -> tuple[Mapping[str, float | None], int]:
    """Run the model on one batch, with `forward.grad` also its backward pass.

    Args:
        experiment: The experiment. Its model is in eval mode.
        observer: The observer, such as a `Probe`.
        batches: The only batch of the step.

    Returns:
        The metrics of the step, as the observer returned them, and the weight of its means: the number of samples or
        terms, over all processes.
    """
    config = experiment.config.forward
    weights, total = batch_weights(experiment, batches)
    observer.begin_micro_step(batches.indices[0], experiment.batch_with_targets(batches[0]))
    batch = to_device(batches[0], experiment.device)
    with torch.set_grad_enabled(config.grad):
        outcome, objective = experiment.train_module(
            with_input_gradients(batch) if config.grad else batch, observer.loss
        )
        if config.grad:
            assert objective is not None, "shape inference checked that there is a loss"
            # With this weight, the gradients are those of the mean over the samples, or terms, of all processes.
            (objective if config.of else objective * (weights[0] / max(1, total))).backward()
            experiment.model.zero_grad()
    observer.write_generated([astuple(generated) for generated in outcome.generated])
    observer.end_micro_step()
    loss, accuracy = means_over_processes(experiment, [outcome], weights)
    return observer.end_step(loss=loss, accuracy=accuracy, samples=batches.samples), total


class _Sums(Mapping[str, "float | None"]):
    """The weighted sums of the metrics of all batches so far. The row of a batch is read at the next batch.

    A row on a GPU is complete by then, so that the host does not wait for the device.

    Args:
        sums: The sums to continue from; empty for none.
    """

    def __init__(self, sums: Mapping[str, float | None]) -> None:
        names = ("loss", "accuracy", "weight", "seconds", "samples")
        self._sums: dict[str, float | None] = {**dict.fromkeys(names, 0.0), **sums}
        self._pending: tuple[Mapping[str, float | None], int, int] | None = None

    def add(self, row: Mapping[str, float | None], weight: int, samples: int) -> None:
        """Add a batch.

        Args:
            row: Its row of the `metrics` table.
            weight: The weight of its loss and accuracy.
            samples: Its number of samples.
        """
        self._read_pending()
        self._pending = (row, weight, samples)

    def _read_pending(self) -> None:
        if self._pending is None:
            return
        (row, weight, samples), self._pending = self._pending, None
        loss, accuracy, seconds = row["loss"], row["accuracy"], row["seconds"]
        self._add("loss", None if loss is None else loss * weight)
        self._add("accuracy", None if accuracy is None else accuracy * weight)
        self._add("weight", weight)
        self._add("seconds", seconds)
        self._add("samples", samples)

    def _add(self, name: str, value: float | None) -> None:
        """Add a value to a sum; without a value, the sum is None."""
        so_far = self._sums[name]
        self._sums[name] = None if so_far is None or value is None else so_far + value

    def means(self) -> dict[str, float | None]:
        """Return the metrics of all batches."""
        weight, seconds, samples = (self[name] or 0.0 for name in ("weight", "seconds", "samples"))
        loss, accuracy = (
            None if (total := self[name]) is None else total / max(1.0, weight) for name in ("loss", "accuracy")
        )
        return {"loss": loss, "accuracy": accuracy, "seconds": seconds, "samples_per_second": samples / seconds}

    def __getitem__(self, name: str) -> float | None:
        self._read_pending()
        return self._sums[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sums)

    def __len__(self) -> int:
        return len(self._sums)
