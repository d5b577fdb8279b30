"""Xiong et al. 2020 and Heimersheim & Turner 2023, as docs/gallery/residual_stream.md describes them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import finished
from page_blocks import run_gallery_page

import instrument

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the runs of the page."""
    return run_gallery_page("residual_stream", tmp_path_factory.mktemp("residual_stream"))


@pytest.fixture(scope="module")
def stream(page: Path) -> pd.DataFrame:
    """The rms of the residual stream after each layer (rows) for each step and seed (columns)."""
    command = "-m +exp=residual_stream seed=1,2 quiet=true"
    others = finished(page / "others", *command.split()).path
    rows = instrument.load([page / "residual_stream", others]).stats.query("hook == 'stream'")
    return rows.pivot_table(index="layer", columns=["step", "seed"], values="rms", sort=False)


def test_untrained_stream_is_within_the_bounds(stream: pd.DataFrame) -> None:
    squares = stream[0].mean(axis=1).to_numpy() ** 2
    depth = np.arange(len(squares))
    assert squares[0] == pytest.approx(1, abs=0.1)
    assert (squares[1:] > 1 + depth[1:] / 2).all()
    assert (squares[1:] < 1 + 3 * depth[1:] / 2).all()


def test_trained_stream_grows_linearly_and_not_exponentially(stream: pd.DataFrame) -> None:
    depth = np.arange(1, len(stream))
    for seed in range(3):
        norms = stream[99, seed].to_numpy()[1:]
        linear, exponential = (np.corrcoef(depth, values)[0, 1] ** 2 for values in (norms, np.log(norms)))
        assert norms[-1] > 1.5 * stream[0, seed].iloc[-1]
        assert linear > 0.97
        assert linear > exponential


def test_last_gradient_falls_with_depth_for_pre_norm_only(page: Path) -> None:
    command = "-m +exp=residual_stream apply.order.value=true,false model.layers=3,12 seed=1,2 train.steps=1"
    finished(page / "depth" / "others", *command.split(), "quiet=true")
    rows = instrument.load(page / "depth").stats.query("hook == 'gradients'")
    last = rows[rows.layer.str.split(".").str[1].astype(int) == rows["model.layers"] - 1]
    norms = last.pivot(index=["apply.order.value", "seed"], columns="model.layers", values="l2")
    factors = norms[12] / norms[3]
    assert factors[True].mean() == pytest.approx(1 / math.sqrt(12 / 3), abs=0.15)
    assert 0.85 < factors[False].mean() < 1.5
