"""Gradient flow: gradients and updates by layer at the first and last step, the usual band, and omitted values."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pandas as pd
import pytest
from figures import axis_labels, legend_of, make_run, overlaps, stats_of
from matplotlib.axes import Axes

import instrument
from instrument import InstrumentError
from instrument.plot import gradient_flow
from instrument.tables.statistics import USUAL_UPDATE_RATIOS

PARAMETERS = ["0.weight", "0.bias", "3.weight", "3.bias"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> instrument.Run:
    return make_run(tmp_path_factory.mktemp("flow") / "run")


def marks(axes: Axes) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in axis_labels(axes)}
    for line in axes.lines:
        for value, row in zip(*line.get_data(), strict=True):
            found[axis_labels(axes)[int(row)]].append(float(value))
    return found


def recorded(run: instrument.Run, hook: str, statistic: str) -> dict[str, list[float]]:
    """Return the first and last recorded value of each parameter."""
    rows = run.stats.query(f"hook == {hook!r}")
    lines = rows.groupby(rows.layer + "." + rows.path)[statistic]
    return {place: [line.iloc[0], line.iloc[-1]] for place, line in lines}


@pytest.mark.slow
def test_marks_equal_the_table_in_forward_order(run: instrument.Run) -> None:
    flow, updates = gradient_flow(run).axes
    assert marks(flow) == recorded(run, "grads", "l2")
    assert marks(updates) == recorded(run, "updates", "update_ratio")
    assert axis_labels(flow) == axis_labels(updates) == PARAMETERS
    assert flow.get_xscale() == updates.get_xscale() == "log"
    assert flow.get_xlabel() == "l2, at step 0 and 3"
    assert flow.get_position().y0 == pytest.approx(updates.get_position().y0)  # side by side
    assert [marks(axes) for axes in gradient_flow(run.stats).axes] == [marks(flow), marks(updates)]


@pytest.mark.slow
def test_usual_update_band_is_shaded_with_its_source(run: instrument.Run) -> None:
    figure = gradient_flow(run)
    (band,) = (patch for patch in figure.axes[1].patches)
    (low, _), (high, _) = band.get_extents().transformed(figure.axes[1].transData.inverted()).get_points()
    assert (low, high) == pytest.approx(USUAL_UPDATE_RATIOS)
    assert any("CS231n" in line for line in legend_of(figure))
    assert legend_of(figure)[:2] == ["first recorded step", "last recorded step"]


def test_updates_of_other_parameters_are_drawn_below() -> None:
    updates = stats_of({"c": [1.0]}, hook="u", kind="step_post", role="update").assign(update_ratio=1e-3)
    figure = gradient_flow(pd.concat([stats_of({"a": [1.0], "b": [2.0]}), updates]))
    assert [axis_labels(axes) for axes in figure.axes] == [["a.weight", "b.weight"], ["c.weight"]]
    figure.draw_without_rendering()
    assert figure.axes[0].get_position().y0 > figure.axes[1].get_position().y1
    assert marks(figure.axes[0]) == {"a.weight": [1.0], "b.weight": [2.0]}
    assert figure.axes[0].get_xlabel() == "l2, at step 0"  # a single step


def test_values_that_cannot_be_shown_are_noted_on_the_axis() -> None:
    frame = stats_of({"a": [0.0, math.nan], "b": [1.0, math.nan], "c": [1.0]})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        axes = gradient_flow(frame).axes[0]
    assert axes.get_xlabel().splitlines()[1:] == [
        "not shown at step 0: 1 zero",
        "not shown at step 1: 2 not finite, 1 not recorded",
    ]
    assert np.isnan(marks(axes)["a.weight"]).all()


@pytest.mark.slow
def test_parameter_gradients_are_the_default() -> None:
    outputs = stats_of({"a": [5.0]}, hook="o", kind="full_backward", role="grad_output", path="")
    frame = pd.concat([outputs, stats_of({"a": [2.0]})])
    assert marks(gradient_flow(frame).axes[0]) == {"a.weight": [2.0]}
    assert marks(gradient_flow(frame, hook="o").axes[0]) == {"a": [5.0]}
    again = stats_of({"a": [2.0]}, hook="again")
    with pytest.raises(InstrumentError, match=r"(?s)several series match.*hook='h'.*hook='again'"):
        gradient_flow(pd.concat([frame, again]))


def test_missing_gradients_are_an_error_with_a_hint(run: instrument.Run) -> None:
    with pytest.raises(InstrumentError, match="no gradients were recorded: pass hooks=gradients"):
        gradient_flow(run.stats.query("hook == 'acts'"))


@pytest.mark.slow
@pytest.mark.parametrize("most", [1.1, 40.0, 1e9])
def test_labels_do_not_overlap(most: float) -> None:
    values = np.geomspace(0.15, 0.15 * most, 60)
    figure = gradient_flow(stats_of({f"encoder.block.{i}.attention": [value, 0.2] for i, value in enumerate(values)}))
    assert overlaps(figure) == []
