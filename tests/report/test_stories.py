"""The stories of docs/report.md: their commands are run, and what is told of them is so."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable

import pandas as pd
import pytest
from conftest import REPOSITORY, Answer

import instrument

PAGE = (REPOSITORY / "docs" / "report.md").read_text()
GUESS = math.log(10)  # the loss of a network that knows nothing of ten classes


@pytest.fixture
def told(cli: Callable[..., Answer]) -> Callable[[str], instrument.Run]:
    """Runs the command of a story, and opens its sweep."""

    def tell(experiment: str) -> instrument.Run:
        command = re.search(rf"^    python -m instrument (-m \+exp={experiment} .*)$", PAGE, re.MULTILINE)
        assert command is not None
        answer = cli(*shlex.split(command[1]), "hydra.sweep.dir=out")
        assert answer.code == 0, answer.err
        assert answer.out.splitlines()[-1] == "report      out/report.html"
        sweep = instrument.load("out")
        assert all((folder / "report.html").exists() for folder in (sweep.path, *sweep.folders))
        return sweep

    return tell


def by_layer(run: instrument.Run, hook: str, statistic: str, step: int) -> pd.Series:
    rows = run.stats[(run.stats["hook"] == hook) & (run.stats["step"] == step)]
    return rows.set_index("layer")[statistic]


def test_bad_initialisation(told: Callable[[str], instrument.Run]) -> None:
    sweep = told("bad_init")
    bad, good = (instrument.load(folder) for folder in sweep.folders)
    sums = by_layer(bad, "activations", "std", 0).filter(regex=r"\.0$|^layers\.9$")
    ratios = (sums / sums.shift()).dropna()
    assert len(ratios) == 9
    assert ratios.between(0.09, 0.16).all()
    assert sums.iloc[-1] == pytest.approx(1e-9, rel=0.1)
    biases = bad.stats.query("hook == 'parameter_gradients' and path == 'bias' and step == 0")["l2"]
    assert 1e7 < biases.max() / biases.min() < 1e9
    assert bad.metrics["loss"].iloc[-1] == pytest.approx(GUESS, abs=0.01)
    steady = by_layer(good, "activations", "std", 0)
    assert steady.max() / steady.min() < 10
    assert good.metrics["accuracy"].iloc[-1] > 0.85


def test_dying_relus(told: Callable[[str], instrument.Run]) -> None:
    sweep = told("dying_relu")
    calm, dying = (instrument.load(folder) for folder in sweep.folders)
    dead = dying.stats.query("hook == 'units' and layer == 'layers.2.1'").set_index("step")["dead_fraction"]
    last = dead[dead < 1.0].index.max()
    assert 60 < last < 80
    loss = dying.metrics.query("phase == 'train'").set_index("step")["loss"]
    assert loss[: last - 20].min() < 1.0
    assert loss.idxmax() == pytest.approx(last, abs=5)
    assert loss[last + 30 :].sub(GUESS).abs().max() < 0.6
    assert dying.metrics["loss"].iloc[-1] == pytest.approx(GUESS, abs=0.02)
    assert calm.stats.query("hook == 'units'")["dead_fraction"].max() < 0.2
    assert calm.metrics["accuracy"].iloc[-1] > 0.9


def test_saved_by_clipping(told: Callable[[str], instrument.Run]) -> None:
    sweep = told("clipping")
    assert sorted(sweep.runs["seed"]) == [1, 1, 2, 2, 3, 3]
    for folder, info in zip(sweep.folders, sweep.infos, strict=True):
        run = instrument.load(folder)
        loss = run.metrics.query("phase == 'train'").set_index("step")["loss"]
        if info["overrides"]["hooks.tame"] is None:
            assert loss[loss.isna()].index.min() <= 8
            assert "non_finite" in set(run.events["rule"])
            assert info["metrics"]["accuracy"] < 0.12
        else:
            assert loss.notna().all()
            assert info["metrics"]["accuracy"] > 0.8
