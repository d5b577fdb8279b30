"""He et al. 2015, as docs/gallery/he_init.md describes it: a ReLU network with thirty layers under two initializations."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from conftest import finished
from page_blocks import run_gallery_page

import instrument

pytestmark = pytest.mark.slow

LAYERS, XAVIER, HE = 30, "xavier_normal_", "kaiming_normal_"


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> instrument.Run:
    """The sweep of the page, and two more seeds."""
    folder = run_gallery_page("he_init", tmp_path_factory.mktemp("he_init")) / "he_init"
    command = f"-m +exp=he_init apply.weights.fn={XAVIER},{HE} seed=1,2 quiet=true"
    finished(folder / "others", *command.split())
    return instrument.load(folder)


@pytest.fixture(scope="module")
def std(sweep: instrument.Run) -> pd.DataFrame:
    """The std at step 0 for each initialization and seed (rows), and each hook and layer (columns)."""
    first = sweep.stats.query("step == 0").copy()
    first["depth"] = first.layer.str.split(".").str[1].astype(int)
    return first.pivot(index=["apply.weights.fn", "seed"], columns=["hook", "depth"], values="std")


def rates(std: pd.DataFrame, hook: str) -> np.ndarray:
    """Return the factor by which a signal changes from a hidden layer to the next, in the order of the layers: [seeds]."""
    return np.asarray((std[hook, LAYERS - 2] / std[hook, 0]) ** (1 / (LAYERS - 2)))


def test_xavier_initialization_shrinks_signals_by_the_predicted_rate(std: pd.DataFrame) -> None:
    assert rates(std.loc[XAVIER], "outputs") == pytest.approx(1 / math.sqrt(2), abs=0.05)
    assert 1 / rates(std.loc[XAVIER], "backpropagated") == pytest.approx(1 / math.sqrt(2), abs=0.05)


def test_he_initialization_keeps_signals(std: pd.DataFrame) -> None:
    assert rates(std.loc[HE], "outputs") == pytest.approx(1, abs=0.06)
    assert 1 / rates(std.loc[HE], "backpropagated") == pytest.approx(1, abs=0.06)


def test_only_he_initialization_learns(sweep: instrument.Run) -> None:
    runs = sweep.runs.groupby("apply.weights.fn")
    assert runs.accuracy.max()[XAVIER] < 0.15
    assert runs.loss.min()[XAVIER] == pytest.approx(math.log(10), abs=0.01)
    assert runs.accuracy.min()[HE] > 0.7
