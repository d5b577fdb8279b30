"""nnsight: the outputs of all leaves saved in a trace, and their gradients in its backward block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from job import Job, Step, Training
from nnsight import NNsight
from torch import Tensor, nn
from torch.nn import functional as F


def in_order(training: Training) -> list[str]:
    """The leaves as the forward pass comes to them: a trace has to ask for them so. One called twice is there once."""
    order: list[str] = []
    names = {training.model.get_submodule(name): name for name in training.leaves()}

    def note(module: nn.Module, args: object, output: object) -> None:  # noqa: ARG001
        order.append(names[module])

    handles = [module.register_forward_hook(note) for module in names]
    training.model(training.inputs)
    for handle in handles:
        handle.remove()
    return list(dict.fromkeys(order))


@contextmanager
def outputs(training: Training, folder: Path) -> Iterator[Step]:  # noqa: ARG001
    model, inputs, targets, optimizer = NNsight(training.model), training.inputs, training.targets, training.optimizer
    layers = [model.get(name) for name in in_order(training)]

    def step() -> Sequence[Tensor]:
        optimizer.zero_grad()
        kept: list[Tensor] = []
        with model.trace(inputs):
            for layer in layers:
                kept.append(layer.output.save())  # what is bound inside is not known outside
            answer = model.output.save()
        F.cross_entropy(answer.flatten(0, -2), targets.flatten()).backward()
        optimizer.step()
        return kept

    yield step


@contextmanager
def outputs_and_gradients(training: Training, folder: Path) -> Iterator[Step]:  # noqa: ARG001
    model, inputs, targets, optimizer = NNsight(training.model), training.inputs, training.targets, training.optimizer
    layers = [model.get(name) for name in in_order(training)]

    def step() -> Sequence[Tensor]:
        optimizer.zero_grad()
        kept: list[Tensor] = []
        with model.trace(inputs):
            for layer in layers:
                kept.append(layer.output.save())  # what is bound inside is not known outside
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
