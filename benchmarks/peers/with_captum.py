"""Captum: LayerActivation of all leaves. It makes an additional forward pass and does not record gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from captum.attr import LayerActivation
from job import Job, Step, Training
from torch import Tensor


@contextmanager
def activations(training: Training, folder: Path) -> Iterator[Step]:  # noqa: ARG001
    layers = [training.model.get_submodule(name) for name in training.leaves()]
    attribution = LayerActivation(training.model, layers)

    def step() -> Sequence[Tensor]:
        kept: Sequence[Tensor] = attribution.attribute(training.inputs)
        training.step().item()
        return kept

    yield step


JOBS = (Job("outputs only, by a second forward pass, in memory", activations),)
