"""Pascanu et al. 2013, as docs/gallery/recurrent_gradients.md describes it: gradients through time, and clipping."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import finished
from page_blocks import run_gallery_page

import instrument

pytestmark = pytest.mark.slow

GAINS, LAST, EARLY = [0.5, 0.8, 1.0, 1.25, 1.5], 31, 3


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the runs of the page."""
    return run_gallery_page("recurrent_gradients", tmp_path_factory.mktemp("recurrent_gradients"))


@pytest.fixture(scope="module")
def norms(page: Path) -> pd.DataFrame:
    """The norm of the gradient of each hidden state (rows) for each singular value and seed (columns)."""
    gains = f"apply.recurrent.gain={','.join(map(str, GAINS))}"
    command = "-m +exp=recurrent_gradients seed=1,2 train.steps=1 quiet=true"
    finished(page / "recurrent" / "others", *command.split(), gains)
    rows = instrument.load(page / "recurrent").stats.query("hook == 'through_time'")
    return rows.pivot(index="call", columns=["apply.recurrent.gain", "seed"], values="l2")


def test_gradient_is_bounded_by_the_power_of_the_singular_value(norms: pd.DataFrame) -> None:
    back = LAST - norms.index.to_numpy()
    for gain, seed in norms.columns:
        assert (norms[gain, seed].to_numpy() <= norms[gain, seed][LAST] * gain**back * 1.001).all(), (gain, seed)


def test_rate_per_time_step_follows_the_singular_value(norms: pd.DataFrame) -> None:
    rates = ((norms.loc[EARLY] / norms.loc[LAST]) ** (1 / (LAST - EARLY))).unstack()
    assert rates.loc[0.5].to_numpy() == pytest.approx(0.5, abs=0.03)
    assert rates.loc[0.8].to_numpy() == pytest.approx(0.8, abs=0.05)
    assert rates.loc[1.0].max() < 1
    assert rates.loc[1.5].min() > 1.02
    assert (np.diff(rates.to_numpy(), axis=0) > 0).all()


def test_exploding_gradients_need_a_clip(page: Path) -> None:
    command = "-m +exp=recurrent_gradients apply.recurrent.gain=1.25 optimizer.lr=0.5 seed=1,2 quiet=true rules=none"
    for name, fields in (("clipped", ()), ("unclipped", ("hooks.clip=null",))):
        finished(page / "clipping" / f"{name}_others", *command.split(), *fields)
    runs = instrument.load(page / "clipping").runs
    accuracy = runs.groupby(runs.run.str.extract("(clipped|unclipped)")[0]).accuracy
    assert accuracy.min()["clipped"] > accuracy.max()["unclipped"] + 0.2
    assert accuracy.mean()["clipped"] > 0.65
