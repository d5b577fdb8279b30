"""Importance of overrides: variance fractions against analysis of variance on the grid, intervals, and errors."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from figures import make_run

import instrument
from instrument import InstrumentError
from instrument.analysis.config_key_effects import importance_of
from instrument.interpret.panels import importance_of_overrides
from instrument.plot import importance
from instrument.report import make


def grid(noise: float) -> tuple[pd.DataFrame, pd.Series]:
    """Return a full factorial sweep and its losses: additive in the learning rate and the activation, with noise."""
    rows = list(itertools.product([0.001, 0.003, 0.01, 0.03], ["relu", "gelu"], range(3)))
    factors = pd.DataFrame(rows, columns=["rate", "act", "seed"])
    rng = np.random.default_rng(0)
    losses = [3 * [0.001, 0.003, 0.01, 0.03].index(lr) + 4 * (act == "gelu") for lr, act, _ in rows]
    return factors, pd.Series(losses + noise * rng.normal(size=len(rows)), dtype=float)


def test_fractions_are_those_of_an_analysis_of_variance() -> None:
    factors, losses = grid(0.3)
    table = importance_of(factors, losses)
    cells = losses.to_numpy().reshape(4, 2, 3) - losses.mean()
    exact = {"rate": cells.mean((1, 2)), "act": cells.mean((0, 2)), "seed": cells.mean((0, 1))}
    for name, effects in exact.items():
        assert table["importance"][name] == pytest.approx((effects**2).mean() / (cells**2).mean(), abs=0.02)
    assert list(table.index) == ["rate", "act", "seed", "interactions"]
    assert table["importance"].sum() == pytest.approx(1.0)
    assert ((table["low"] <= table["importance"]) & (table["importance"] <= table["high"])).all()


@pytest.mark.slow
def test_numbers_of_a_random_search_and_a_pure_interaction() -> None:
    rng = np.random.default_rng(1)
    points = pd.DataFrame(rng.uniform(size=(100, 3)), columns=["a", "b", "c"])
    table = importance_of(points, 2 * points["a"] + points["b"])  # 4 / 5 and 1 / 5 of the variance
    assert table["low"]["a"] < 0.8 < table["high"]["a"]
    assert table["importance"]["b"] == pytest.approx(0.2, abs=0.1)  # weak factors of a random search are underestimated
    assert table["importance"]["c"] < 0.02
    signs = pd.DataFrame(list(itertools.product([0, 1], [0, 1], range(5))), columns=["a", "b", "seed"])
    product = (2.0 * signs["a"] - 1) * (2.0 * signs["b"] - 1)
    table = importance_of(signs, product)
    assert table["high"]["interactions"] > 0.95  # exactly 1
    assert table["importance"]["interactions"] > 0.8


@pytest.mark.slow
def test_a_wider_confidence_level_gives_wider_intervals() -> None:
    narrow, wide = (importance_of(*grid(1.0), interval=level) for level in (0.5, 0.95))
    assert (wide["high"] - wide["low"] >= narrow["high"] - narrow["low"]).all()
    pd.testing.assert_series_equal(narrow["importance"], wide["importance"])


def test_bars_are_the_table() -> None:
    factors, losses = grid(0.5)
    frame = factors.assign(run=factors.index.astype(str), loss=losses, step=0, phase="train", rank=0)
    diverged = frame.tail(1).assign(run="diverged", loss=np.inf)
    axes = importance(pd.concat([frame, diverged])).axes[0]
    bars = [bar.get_width() for bar in axes.patches]  # type: ignore[attr-defined]
    assert bars == importance_of(factors, losses)["importance"].tolist()
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rate", "act", "seed", "interactions"]
    assert axes.get_title() == "importance for loss (train)"
    assert axes.get_xlabel().splitlines()[1] == "24 runs; bars: 95% intervals"


@pytest.mark.parametrize(
    ("change", "given"),
    [
        (lambda frame: frame.iloc[:3], "3 runs"),
        (lambda frame: frame.assign(loss=1.0), "24 runs, overrides that differ: rate, act, seed"),
        (lambda frame: frame.assign(loss=np.nan), "0 runs, overrides that differ: none"),
        (lambda frame: frame.drop(columns=["rate", "act", "seed"]), "24 runs, overrides that differ: none"),
    ],
)
def test_too_few_different_runs_are_an_error(change: object, given: str) -> None:
    factors, losses = grid(0.5)
    frame = factors.assign(run=factors.index.astype(str), loss=losses, step=0, phase="train", rank=0)
    with pytest.raises(InstrumentError, match=f"(?s)importance requires 4 runs .*{given}|no run has a value"):
        importance(change(frame))  # type: ignore[operator]


@pytest.mark.slow
def test_report_of_a_sweep_shows_the_importance(tmp_path: Path) -> None:
    for i, (rate, width, seed) in enumerate(itertools.product((0.1, 0.2), (3, 4), (0, 1))):
        overrides = {"optimizer.lr": rate, "model.width": width, "seed": seed}
        make_run(tmp_path / str(i), hooks={"acts": {"kind": "forward"}}, steps=2, seed=seed, overrides=overrides)
    sweep = instrument.load(tmp_path)
    panel = importance_of_overrides(sweep)
    assert panel is not None
    assert panel.title == "Importance of overrides"
    assert panel.html.count("<svg") == 1  # of the loss: the runs have no accuracy
    assert 'id="panel-importance"' in make(sweep).html
    assert importance_of_overrides(instrument.load(tmp_path / "0")) is None
