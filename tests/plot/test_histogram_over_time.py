"""Histograms over time: bins and fractions of each step, quantiles, empty steps and errors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from figures import legend_of, make_run
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.patches import StepPatch

import instrument
from instrument import InstrumentError
from instrument.plot import histogram_over_time
from instrument.plot.histogram_over_time import edges_of


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> instrument.Run:
    return make_run(tmp_path_factory.mktemp("histogram") / "run")


def columns(axes: Axes) -> list[QuadMesh]:
    return [artist for artist in axes.collections if isinstance(artist, QuadMesh)]


def edges(mesh: QuadMesh) -> list[float]:
    return mesh.get_coordinates()[:, 0, 1].tolist()


def distributions(*cells: dict[str, Any]) -> pd.DataFrame:
    """Return a `distributions` table of one layer with a row per step."""
    names = ("hook", "kind", "role", "phase", "layer", "path", "recompute")
    same = dict(zip(names, ("h", "forward", "output", "train", "a", "", False), strict=True))
    empty = {"levels": None, "quantiles": None, "low": math.nan, "high": math.nan, "counts": None}
    return pd.DataFrame([{**same, "step": step, **empty, **cell} for step, cell in enumerate(cells)])


@pytest.mark.slow
def test_columns_have_the_bins_and_fractions_of_their_step(run: instrument.Run) -> None:
    axes = histogram_over_time(run, "0").axes[0]
    rows = run.distributions.query("layer == '0'")
    assert len(columns(axes)) == len(rows) == 4
    for at, (mesh, row) in enumerate(zip(columns(axes), rows.itertuples(), strict=True)):
        np.testing.assert_allclose(edges(mesh), np.linspace(row.low, row.high, 9))
        counts = np.asarray(row.counts)
        np.testing.assert_allclose(np.ma.filled(mesh.get_array(), 0.0)[:, 0], counts / counts.sum())
        assert mesh.get_coordinates()[0, :, 0].tolist() == [at, at + 1]
    assert len({mesh.get_clim() for mesh in columns(axes)}) == 1
    assert axes.get_title() == "0 (acts: forward output)"
    assert axes.figure.axes[1].get_ylabel() == "fraction of the step's finite elements"
    same = histogram_over_time(run.distributions, "0").axes[0]
    assert [edges(mesh) for mesh in columns(same)] == [edges(mesh) for mesh in columns(axes)]


@pytest.mark.slow
def test_quantiles_are_lines_over_histograms(run: instrument.Run) -> None:
    figure = histogram_over_time(run, "0")
    drawn = [patch.get_data().values for patch in figure.axes[0].patches if isinstance(patch, StepPatch)]
    expected = np.stack(run.distributions.query("layer == '0'")["quantiles"].to_numpy())
    np.testing.assert_array_equal(sorted(map(tuple, drawn)), sorted(map(tuple, expected.T)))
    assert legend_of(figure) == ["0.25 to 0.75 quantile", "median"]


def test_quantiles_without_histograms_are_bands() -> None:
    cell = {"levels": [0.1, 0.5, 0.9, 0.99], "quantiles": [1.0, 2.0, 3.0, 4.0]}
    figure = histogram_over_time(distributions(cell, cell), "a")
    band, *_ = (patch for patch in figure.axes[0].patches if isinstance(patch, StepPatch) and patch.get_fill())
    assert band.get_data().values.tolist() == [3.0, 3.0]
    assert np.asarray(band.get_data().baseline).tolist() == [1.0, 1.0]
    assert legend_of(figure) == ["0.1 to 0.9 quantile", "median", "0.99 quantile"]
    assert len(figure.axes) == 1


@pytest.mark.slow
def test_empty_bins_are_blank_and_wide_scales_logarithmic() -> None:
    frame = distributions(
        {"low": 0.0, "high": 3.0, "counts": [990, 0, 10]}, {"low": 0.0, "high": 2.0, "counts": [1, 0, 1]}
    )
    one, two = columns(histogram_over_time(frame, "a").axes[0])
    assert np.ma.getmaskarray(one.get_array())[:, 0].tolist() == [False, True, False]
    assert one.get_clim() == two.get_clim() == (0.0, 0.99)
    frame.at[0, "counts"] = [9990, 0, 10]
    assert columns(histogram_over_time(frame, "a").axes[0])[0].get_clim() == pytest.approx((0.001, 0.999))


@pytest.mark.slow
def test_equal_elements_are_a_thin_line_and_none_are_hatched(tmp_path: Path) -> None:
    frame = distributions({"low": 2.0, "high": 2.0, "counts": [7, 0]}, {"low": 0.0, "high": 4.0, "counts": [3, 4]})
    mesh = columns(histogram_over_time(frame, "a").axes[0])[0]
    assert np.ma.filled(mesh.get_array(), 0.0)[:, 0].tolist() == [1.0, 0.0]
    assert edges(mesh) == pytest.approx([2.0 - 0.016, 2.0 + 0.016, 2.0 + 0.016])
    figure = histogram_over_time(make_run(tmp_path / "r", with_nan=True), "3")
    assert len(columns(figure.axes[0])) == 2
    assert "no finite elements" in legend_of(figure)


@given(st.floats(-1e9, 1e9), st.floats(0, 1e9), st.integers(1, 50), st.floats(0, 1e9))
def test_edges_increase_and_contain_the_range(low: float, width: float, bins: int, span: float) -> None:
    found = edges_of(low, low + width, bins, span)
    assert len(found) == bins + 1
    assert (np.diff(found) >= 0).all()
    assert found[0] < found[-1]
    assert found[0] <= low <= low + width <= found[-1] or low + width == low


def test_many_steps_are_sampled_and_only_the_first_call_is_shown() -> None:
    frame = distributions(*({"low": 0.0, "high": 1.0 + step, "counts": [1, 2]} for step in range(399)))
    axes = histogram_over_time(pd.concat([frame, frame]), "a").axes[0]
    assert [edges(mesh)[-1] for mesh in columns(axes)] == [1.0 + 2 * i for i in range(200)]
    assert axes.get_xlabel() == "step (200 of 399 recorded)"


def test_missing_histograms_are_an_error_with_options(run: instrument.Run) -> None:
    with pytest.raises(InstrumentError, match=r"(?s)layer: .*'encoder'.*allowed  0, 1, 2, 3, \."):
        histogram_over_time(run, "encoder")
    with pytest.raises(InstrumentError, match="the distributions table has no rows"):
        histogram_over_time(run.distributions.iloc[:0], "0")
    with pytest.raises(
        InstrumentError, match="missing from the distributions table: levels, quantiles, low, high, counts"
    ):
        histogram_over_time(run.stats, "0")
    assert histogram_over_time(run, ".").axes[0].get_title() == ". (acts: forward output)"
