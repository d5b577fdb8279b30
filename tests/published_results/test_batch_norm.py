"""Ioffe & Szegedy 2015 and Santurkar et al. 2018, as docs/gallery/batch_norm.md describes them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from conftest import finished
from page_blocks import run_gallery_page
from torch import Tensor

import instrument

pytestmark = pytest.mark.slow

NOISE = f"+hooks.shift={{types: BatchNorm1d, kind: forward, action: modify, fn: {{_target_: {__name__}.shift}}}}"


def shift(tensor: Tensor, context: instrument.Context) -> Tensor:
    """Add noise whose mean and std differ between the units and the steps."""
    generator = context.generator(tensor.device)
    means, stds = torch.rand(2, tensor.shape[1], generator=generator)
    return tensor + means - 0.5 + (1 + stds / 4) * torch.randn(tensor.shape, generator=generator)


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
    """The runs `normalized/N`, `plain/N` and `noisy/N`: learning rates 0.1 and 1. `others` and `large` have two more seeds of each.

    No test reads rows of those with learning rate 1.
    """
    folder = run_gallery_page("batch_norm", tmp_path_factory.mktemp("batch_norm")) / "batch_norm"
    command = ("-m", "+exp=batch_norm", "seed=1,2", "quiet=true")
    no_rows = [f"hooks.{hook}=null" for hook in ("inputs", "unit", "gradients")]
    for name, fields in (
        ("normalized", ()),
        ("plain", ("apply.normalize=null",)),
        ("noisy", ("hooks.inputs=null", "hooks.gradients=null", NOISE)),
    ):
        finished(folder / name / "others", *command, "optimizer.lr=0.1", *fields)
        finished(folder / name / "large", *command, "optimizer.lr=1", *fields, *no_rows)
    return instrument.load(folder)


@pytest.fixture(scope="module", params=range(3))
def pair(request: pytest.FixtureRequest, runs: instrument.Run) -> dict[str, Measured]:
    """A training with batch norm and one without it, with the same seed."""

    def measured(name: str) -> Measured:
        run = instrument.load(runs.path / name / ("0", "others/0", "others/1")[request.param])
        steps = run.tensors(hook="gradients").groupby("step")["values"]
        gradients = np.stack([np.concatenate([each.ravel() for each in step]) for _, step in steps])
        quantiles = np.stack(run.distributions["quantiles"].to_list())
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


def test_accuracy_at_the_same_learning_rate_is_not_higher_with_batch_norm(runs: instrument.Run) -> None:
    accuracy = runs.runs[runs.runs["optimizer.lr"] == 0.1].set_index("run").accuracy
    assert accuracy.filter(like="normalized").mean() < accuracy.filter(like="plain").mean()


def test_noise_after_batch_norm_slows_training_with_a_small_learning_rate_only(runs: instrument.Run) -> None:
    accuracy = runs.runs.groupby(["optimizer.lr", runs.runs.run.str.partition("/")[0]]).accuracy.mean()
    assert accuracy[1, "noisy"] == pytest.approx(accuracy[1, "normalized"], abs=0.05)
    assert accuracy[0.1, "noisy"] < accuracy[0.1, "normalized"] - 0.1


def test_noise_moves_the_inputs_of_a_unit(runs: instrument.Run) -> None:
    units = runs.stats[(runs.stats.hook == "unit") & (runs.stats["optimizer.lr"] == 0.1)]
    changes = units.groupby("run")["mean"].agg(lambda means: means.diff().abs().median())
    assert changes.filter(like="noisy").min() > 5 * changes.filter(like="plain").max()
