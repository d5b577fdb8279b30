"""nnsight: the outputs of all leaves, saved in a trace, and their gradients, saved in its backward block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from job import Job, Step, Training
from nnsight import NNsight
from torch import Tensor, nn
from torch.nn import functional as F


def forward_order(training: Training) -> list[str]:
    """Return the leaves in forward order, as a trace requires. A leaf that is called twice is listed once."""
    order: list[str] = []
    names = {training.model.get_submodule(name): name for name in training.leaves()}

    def append_name(module: nn.Module, args: object, output: object) -> None:  # noqa: ARG001
        order.append(names[module])

    handles = [module.register_forward_hook(append_name) for module in names]
    training.model(training.inputs)
    for handle in handles:
        handle.remove()
    return list(dict.fromkeys(order))


@contextmanager
def outputs(training: Training, folder: Path) -> Iterator[Step]:  # noqa: ARG001
    model, inputs, targets, optimizer = NNsight(training.model), training.inputs, training.targets, training.optimizer
    layers = [model.get(name) for name in forward_order(training)]

    def step() -> Sequence[Tensor]:
        optimizer.zero_grad()
        kept: list[Tensor] = []
        with model.trace(inputs):
            for layer in layers:
                kept.append(layer.output.save())  # names bound inside the trace are undefined outside
            logits = model.output.save()
        F.cross_entropy(logits.flatten(0, -2), targets.flatten()).backward()
        optimizer.step()
        return kept

    yield step


@contextmanager
def outputs_and_gradients(training: Training, folder: Path) -> Iterator[Step]:  # noqa: ARG001
    model, inputs, targets, optimizer = NNsight(training.model), training.inputs, training.targets, training.optimizer
    layers = [model.get(name) for name in forward_order(training)]

    def step() -> Sequence[Tensor]:
        optimizer.zero_grad()
        kept: list[Tensor] = []
        with model.trace(inputs):
            for layer in layers:
                kept.append(layer.output.save())  # names bound inside the trace are undefined outside
            loss = F.cross_entropy(model.output.flatten(0, -2), targets.flatten())
            with loss.backward():
                for tensor in reversed(list(kept)):
                    kept.append(tensor.grad.save())
        optimizer.step()
        return kept

    yield step


JOBS = (
    Job("references to outputs, in memory", outputs),
    Job("references to outputs and gradients, in memory", outputs_and_gradients),
)
