"""Kingma & Ba 2015, as docs/gallery/adam_update.md describes it: the size of Adam's updates."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd
import pytest
from conftest import finished
from page_blocks import run_gallery_page

import instrument

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the runs of the page."""
    return run_gallery_page("adam_update", tmp_path_factory.mktemp("adam_update"))


@pytest.fixture(scope="module")
def updates(page: Path) -> pd.DataFrame:
    """The statistics of the updates, divided by the learning rate."""
    command = (
        "-m +exp=adam_update optimizer.lr=0.001,0.01 hooks.rescale.factor=1,100 seed=1,2 train.steps=60 quiet=true"
    )
    finished(page / "adam_update" / "others", *command.split())
    rows = instrument.load(page / "adam_update").stats.query("hook == 'updates'").copy()
    rows[["rms", "abs_max"]] = rows[["rms", "abs_max"]].div(rows["optimizer.lr"], axis=0)
    return rows


def test_updates_are_at_most_about_the_learning_rate(updates: pd.DataFrame) -> None:
    bound = (1 - 0.9) / math.sqrt(1 - 0.999)
    assert updates.abs_max.max() < bound
    assert updates.rms.max() < 1.001
    assert updates[updates.step == 0].abs_max.to_numpy() == pytest.approx(1, abs=1e-3)


def test_updates_do_not_depend_on_the_scale_of_the_gradients(updates: pd.DataFrame) -> None:
    keys = ["step", "layer", "seed", "optimizer.lr"]
    rms = updates.pivot(index=keys, columns="hooks.rescale.factor", values="rms").loc[:50]  # later, rounding adds up
    assert rms[100].to_numpy() == pytest.approx(rms[1].to_numpy(), rel=1e-2)


def test_first_gradient_after_zeros_reaches_the_bound(page: Path) -> None:
    stats = instrument.load(page / "adam_sparse").stats
    update = stats.query("hook == 'updates'").groupby("step").abs_max.max() / 0.001
    assert update.loc[:399].max() == 0
    assert update[400] == pytest.approx(0.5 / math.sqrt(0.01 / (1 - 0.99**401)), rel=1e-2)
