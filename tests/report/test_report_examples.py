"""The examples of docs/report.md: their commands run, and the described effects occur."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable

import pandas as pd
import pytest
from conftest import REPOSITORY, Answer

import instrument

pytestmark = pytest.mark.slow

PAGE = (REPOSITORY / "docs" / "report.md").read_text()
RANDOM_GUESS_LOSS = math.log(10)  # loss of random guessing among ten classes


@pytest.fixture
def run_example(cli: Callable[..., Answer]) -> Callable[..., instrument.Run]:
    """Function that runs the command of an example, with other values for some keys, and loads its sweep."""

    def run(experiment: str, **overrides: str) -> instrument.Run:
        command = re.search(rf"^    python -m instrument (-m \+exp={experiment} .*)$", PAGE, re.MULTILINE)
        assert command is not None
        words = [word for word in shlex.split(command[1]) if word.partition("=")[0] not in overrides]
        answer = cli(*words, *(f"{key}={value}" for key, value in overrides.items()), "hydra.sweep.dir=out")
        assert answer.code == 0, answer.err
        sweep = instrument.load("out")
        if "report" not in overrides:
            assert answer.out.splitlines()[-1] == "report      out/report.html"
            assert all((folder / "report.html").exists() for folder in (sweep.path, *sweep.folders))
        return sweep

    return run


def by_layer(run: instrument.Run, hook: str, statistic: str, step: int) -> pd.Series:
    rows = run.stats[(run.stats["hook"] == hook) & (run.stats["step"] == step)]
    return rows.set_index("layer")[statistic]


def test_bad_initialization_vanishes_gradients(run_example: Callable[..., instrument.Run]) -> None:
    sweep = run_example("bad_init")
    bad, good = (instrument.load(folder) for folder in sweep.folders)
    sums = by_layer(bad, "activations", "std", 0).filter(regex=r"\.0$|^layers\.9$")
    ratios = (sums / sums.shift()).dropna()
    assert len(ratios) == 9
    assert ratios.between(0.09, 0.16).all()
    assert sums.iloc[-1] == pytest.approx(1e-9, rel=0.1)
    biases = bad.stats.query("hook == 'parameter_gradients' and path == 'bias' and step == 0")["l2"]
    assert 1e7 < biases.max() / biases.min() < 1e9
    assert bad.metrics["loss"].iloc[-1] == pytest.approx(RANDOM_GUESS_LOSS, abs=0.01)
    steady = by_layer(good, "activations", "std", 0)
    assert steady.max() / steady.min() < 10
    assert good.metrics["accuracy"].iloc[-1] > 0.8


@pytest.mark.parametrize("seed", range(6))
def test_dying_relu_units(run_example: Callable[..., instrument.Run], seed: int) -> None:
    """Training is chaotic after the first units die: units and steps differ between processors."""
    others = {"report": "false"} if seed else {}
    calm, dying = (instrument.load(folder) for folder in run_example("dying_relu", seed=str(seed), **others).folders)
    dead = dying.stats.query("hook == 'units' and layer == 'layers.3.1'").set_index("step")["dead_fraction"]
    assert dead[0] < 0.5
    first = dead.index[dead == 1.0].min()
    assert first < 120
    assert dead.loc[150:].mean() > 0.9
    sums = by_layer(dying, "sums", "mean", dying.stats.query("hook == 'sums'")["step"].max())
    assert sums["layers.3.0"] < 0
    loss = dying.metrics.query("phase == 'train'").set_index("step")["loss"]
    assert loss.notna().all()
    assert loss[:first].min() < 2.0
    assert loss.loc[150:].median() == pytest.approx(RANDOM_GUESS_LOSS, abs=0.4)
    assert dying.metrics["accuracy"].iloc[-1] < 0.2
    assert calm.stats.query("hook == 'units'")["dead_fraction"].max() < 0.6
    assert calm.metrics["accuracy"].iloc[-1] > 0.8


def test_clipping_prevents_divergence(run_example: Callable[..., instrument.Run]) -> None:
    sweep = run_example("clipping")
    assert sorted(sweep.runs["seed"]) == [1, 1, 2, 2, 3, 3]
    for folder, info in zip(sweep.folders, sweep.infos, strict=True):
        run = instrument.load(folder)
        loss = run.metrics.query("phase == 'train'").set_index("step")["loss"]
        if info["overrides"]["hooks.tame"] is None:
            assert loss[loss.isna()].index.min() <= 20
            assert "non_finite" in set(run.events["rule"])
            assert info["metrics"]["accuracy"] < 0.12
        else:
            assert loss.notna().all()
            assert info["metrics"]["accuracy"] > 0.8
