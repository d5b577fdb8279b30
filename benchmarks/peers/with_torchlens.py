"""torchlens: a trace of every operation of the forward pass, with the gradient of each output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torchlens
from job import Job, Step, Training
from torch import Tensor
from torch.nn import functional as F


@contextmanager
def trace(training: Training, folder: Path) -> Iterator[Step]:  # noqa: ARG001
    options = torchlens.options.CaptureOptions(save_grads=True)

    def step() -> Sequence[Tensor]:
        training.optimizer.zero_grad()
        log = torchlens.trace(training.model, training.inputs, capture=options)
        output = log[log.output_layers[0]].out
        log.log_backward(F.cross_entropy(output.flatten(0, -2), training.targets.flatten()))
        training.optimizer.step()
        outputs = [layer.out for layer in log if isinstance(layer.out, Tensor)]
        return [*outputs, *(layer.grad for layer in log if isinstance(layer.grad, Tensor))]

    yield step


JOBS = (Job("outputs and gradients of every operation, in memory", trace),)
