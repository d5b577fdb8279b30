"""Ioffe & Szegedy 2015 and Santurkar et al. 2018, as docs/gallery/batch_norm.md describes them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from conftest import run_in

import instrument

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Measured:
    """What is measured of a training with learning rate 0.1.

    Attributes:
        change: The norm of the difference of successive gradients, relative to the norm of the first one: [steps - 1].
        spread: The difference of the quantiles 85% and 15% of the inputs of the last ReLU: [steps].
    """

    change: np.ndarray
    spread: np.ndarray


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> instrument.Run:
    """The runs `normalized/N` and `plain/N`: three seeds with learning rate 0.1, then three with 1."""
    folder = tmp_path_factory.mktemp("batch_norm")
    command = "-m +exp=batch_norm optimizer.lr=0.1,1 seed=0,1,2 quiet=true"
    for name, fields in (("normalized", ()), ("plain", ("apply.normalize=null",))):
        answer = run_in(folder, *command.split(), *fields, f"hydra.sweep.dir={name}")
        assert answer.code == 0, answer.err
    return instrument.load(folder)


@pytest.fixture(scope="module", params=range(3))
def pair(request: pytest.FixtureRequest, runs: instrument.Run) -> dict[str, Measured]:
    """A training with batch norm and one without it, with the same seed."""

    def measured(name: str) -> Measured:
        run = instrument.load(runs.path / name / str(request.param))
        steps = run.tensors(hook="gradients").groupby("step")["values"]
        gradients = np.stack([np.concatenate([each.ravel() for each in step]) for _, step in steps])
        inputs = run.distributions.query("layer.str.startswith('layers.4')")
        quantiles = np.stack(inputs["quantiles"].to_list())
        norms = np.linalg.norm(gradients, axis=1)
        return Measured(
            np.linalg.norm(np.diff(gradients, axis=0), axis=1) / norms[:-1], quantiles[:, 2] - quantiles[:, 0]
        )

    return {name: measured(name) for name in ("normalized", "plain")}


def test_gradient_predicts_the_next_one_better(pair: dict[str, Measured]) -> None:
    assert np.quantile(pair["normalized"].change, 0.9) < 0.4
    assert np.quantile(pair["plain"].change, 0.9) > 0.7


def test_inputs_of_the_last_activation_keep_their_distribution(pair: dict[str, Measured]) -> None:
    assert pair["normalized"].spread.max() / pair["normalized"].spread.min() < 1.4
    assert pair["plain"].spread.max() / pair["plain"].spread.min() > 2


def test_large_learning_rate_needs_batch_norm(runs: instrument.Run) -> None:
    found = runs.runs[runs.runs["optimizer.lr"] == 1].set_index("run").accuracy
    assert found.filter(like="normalized").min() > 0.75
    assert found.filter(like="plain").max() < 0.5
