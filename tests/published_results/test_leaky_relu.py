"""Maas et al. 2013, as docs/gallery/leaky_relu.md describes it: units without a gradient, with ReLU and leaky ReLU."""

from __future__ import annotations

import pandas as pd
import pytest
from conftest import finished
from page_blocks import run_gallery_page

import instrument

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> instrument.Run:
    """The runs `leaky/N` and `relu/N`: learning rates of at most 0.1 and 1, and in `others` two more seeds of each."""
    folder = run_gallery_page("leaky_relu", tmp_path_factory.mktemp("leaky_relu")) / "leaky_relu"
    command = "-m +exp=leaky_relu scheduler.max_lr=0.1,1 seed=1,2 quiet=true"
    for name, fields in (("leaky", ()), ("relu", ("apply.leaky=null",))):
        finished(folder / name / "others", *command.split(), *fields)
    return instrument.load(folder)


def last_step(runs: instrument.Run, hook: str, column: str) -> pd.Series:
    """Return the means of a statistic over seeds and layers at the last recorded step, by peak of the learning rate and units."""
    rows = runs.stats[(runs.stats.hook == hook) & (runs.stats.step == 290)]
    return rows.groupby(["scheduler.max_lr", rows.run.str.partition("/")[0]])[column].mean()


def test_units_without_a_gradient_stay_dead_with_relu_only(runs: instrument.Run) -> None:
    dead = last_step(runs, "backpropagated", "dead_fraction")
    assert dead[1, "relu"] > 0.8
    assert dead[0.1, "relu"] < 0.2
    assert dead[1, "leaky"] < 0.05


def test_accuracy_recovers_with_leaky_relu_only(runs: instrument.Run) -> None:
    accuracy = runs.runs.groupby(["scheduler.max_lr", runs.runs.run.str.partition("/")[0]]).accuracy.mean()
    assert accuracy[1, "leaky"] > accuracy[1, "relu"] + 0.2
    assert accuracy[0.1, "leaky"] == pytest.approx(accuracy[0.1, "relu"], abs=0.03)


def test_outputs_of_relu_are_sparse(runs: instrument.Run) -> None:
    zeros = last_step(runs, "outputs", "zero_fraction")
    assert 0.35 < zeros[0.1, "relu"] < 0.65
    assert zeros[0.1, "leaky"] < 0.01
