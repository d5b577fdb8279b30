"""Glorot & Bengio 2010, as docs/gallery/glorot_init.md describes it: signals by layer under two initializations."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from conftest import finished
from page_blocks import run_gallery_page

import instrument

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> instrument.Run:
    """The runs `standard` and `normalized` of the page, and `standard_others/N` and `normalized_others/N`: two more seeds."""
    folder = run_gallery_page("glorot_init", tmp_path_factory.mktemp("glorot_init")) / "glorot_init"
    for name, weights in (("normalized", ()), ("standard", ("apply.weights=null",))):
        finished(folder / f"{name}_others", "-m", "+exp=glorot_init", "seed=1,2", *weights, "quiet=true")
    return instrument.load(folder)


def weights_of(rows: pd.DataFrame) -> pd.Series:
    """Return the initialization of each row."""
    return rows.run.str.extract("(standard|normalized)")[0].rename("weights")


@pytest.fixture(scope="module")
def std(runs: instrument.Run) -> pd.DataFrame:
    """The std at step 0 for each initialization and seed (rows), and each hook and layer (columns)."""
    first = runs.stats.query("step == 0").copy()
    first["weights"] = weights_of(first)
    first["depth"] = first.layer.str.split(".").str[1].astype(int)
    return first.pivot(index=["weights", "seed"], columns=["hook", "depth"], values="std")


def rates(std: pd.DataFrame, hook: str) -> np.ndarray:
    """Return the factor by which a signal changes from a hidden layer to the next, in the order of the layers: [seeds]."""
    return np.asarray((std[hook, 4] / std[hook, 0]) ** (1 / 4))


def test_standard_initialization_shrinks_signals_by_the_predicted_rate(std: pd.DataFrame) -> None:
    assert rates(std.loc["standard"], "activations") == pytest.approx(1 / np.sqrt(3), abs=0.04)
    assert 1 / rates(std.loc["standard"], "backpropagated") == pytest.approx(1 / np.sqrt(3), abs=0.06)


def test_normalized_initialization_nearly_keeps_signals(std: pd.DataFrame) -> None:
    assert rates(std.loc["normalized"], "activations").min() > 0.85
    assert (1 / rates(std.loc["normalized"], "backpropagated")).min() > 0.8


def test_weight_gradients_do_not_depend_on_the_layer(std: pd.DataFrame) -> None:
    gradients = std.loc["standard"]["weight_gradients"][range(5)]
    assert (gradients.max(axis=1) / gradients.min(axis=1)).max() < 1.5


def test_normalized_initialization_learns_faster(runs: instrument.Run) -> None:
    found = runs.metrics.query("phase == 'eval'").assign(weights=weights_of)
    accuracy = found.groupby(["weights", "step"]).accuracy.agg(["min", "max"])
    assert accuracy.loc["normalized", 50]["min"] > accuracy.loc["standard", 150]["max"]
