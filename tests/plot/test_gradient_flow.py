"""Gradients by layer at the first and the last step, updates in the same rows with their usual band, what has no mark."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pandas as pd
import pytest
from drawn import legend_of, make_run, names_on, overlaps, stats_of
from matplotlib.axes import Axes
from tiers import tiered

import instrument
from instrument import InstrumentError
from instrument.plot import gradient_flow
from instrument.spec.statistics import USUAL_UPDATES

PLACES = ["0.weight", "0.bias", "3.weight", "3.bias"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> instrument.Run:
    return make_run(tmp_path_factory.mktemp("flow") / "run")


def marks(axes: Axes) -> dict[str, list[float]]:
    """For each row the values of its marks."""
    found: dict[str, list[float]] = {name: [] for name in names_on(axes)}
    for line in axes.lines:
        for value, row in zip(*line.get_data(), strict=True):
            found[names_on(axes)[int(row)]].append(float(value))
    return found


def recorded(run: instrument.Run, hook: str, statistic: str) -> dict[str, list[float]]:
    """For each parameter the first and the last value in the table."""
    rows = run.stats.query(f"hook == {hook!r}")
    lines = rows.groupby(rows.layer + "." + rows.path)[statistic]
    return {place: [line.iloc[0], line.iloc[-1]] for place, line in lines}


def test_marks_are_the_numbers_of_the_table_in_forward_order(run: instrument.Run) -> None:
    flow, updates = gradient_flow(run).axes
    assert marks(flow) == recorded(run, "grads", "l2")
    assert marks(updates) == recorded(run, "updates", "update_ratio")
    assert names_on(flow) == names_on(updates) == PLACES
    assert flow.get_xscale() == updates.get_xscale() == "log"
    assert flow.get_xlabel() == "l2, at step 0 and 3"
    assert flow.get_position().y0 == pytest.approx(updates.get_position().y0)  # side by side


def test_the_usual_band_of_updates_is_shaded_with_its_source(run: instrument.Run) -> None:
    figure = gradient_flow(run)
    (band,) = (patch for patch in figure.axes[1].patches)
    (low, _), (high, _) = band.get_extents().transformed(figure.axes[1].transData.inverted()).get_points()
    assert (low, high) == pytest.approx(USUAL_UPDATES)
    assert any("CS231n" in line for line in legend_of(figure))
    assert legend_of(figure)[:2] == ["first recorded step", "last recorded step"]


def test_a_frame_gives_the_same_picture(run: instrument.Run) -> None:
    for one, two in zip(gradient_flow(run).axes, gradient_flow(run.stats).axes, strict=True):
        assert marks(one) == marks(two)


def test_updates_of_other_places_stand_beneath() -> None:
    updates = stats_of({"c": [1.0]}, hook="u", kind="step_post", role="update").assign(update_ratio=1e-3)
    figure = gradient_flow(pd.concat([stats_of({"a": [1.0], "b": [2.0]}), updates]))
    assert [names_on(axes) for axes in figure.axes] == [["a.weight", "b.weight"], ["c.weight"]]
    figure.draw_without_rendering()
    assert figure.axes[0].get_position().y0 > figure.axes[1].get_position().y1


def test_gradients_alone_and_one_step_are_enough() -> None:
    figure = gradient_flow(stats_of({"a": [2.0], "b": [3.0]}))
    assert marks(figure.axes[0]) == {"a.weight": [2.0], "b.weight": [3.0]}
    assert figure.axes[0].get_xlabel() == "l2, at step 0"
    assert len(figure.axes) == 1


def test_what_a_logarithmic_axis_cannot_show_is_said() -> None:
    frame = stats_of({"a": [0.0, math.nan], "b": [1.0, math.nan]})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        axes = gradient_flow(frame).axes[0]
    assert axes.get_xlabel().splitlines()[1:] == [
        "not shown at step 0: 1 are 0",
        "not shown at step 1: 2 are not finite",
    ]
    assert np.isnan(marks(axes)["a.weight"]).all()


def test_of_several_gradients_the_parameters_are_shown_unless_told() -> None:
    outputs = stats_of({"a": [5.0]}, hook="o", kind="full_backward", role="grad_output", path="")
    frame = pd.concat([outputs, stats_of({"a": [2.0]})])
    assert marks(gradient_flow(frame).axes[0]) == {"a.weight": [2.0]}
    assert marks(gradient_flow(frame, hook="o").axes[0]) == {"a": [5.0]}
    again = stats_of({"a": [2.0]}, hook="again")
    with pytest.raises(InstrumentError, match=r"(?s)several series fit.*hook='h'.*hook='again'"):
        gradient_flow(pd.concat([frame, again]))


def test_without_gradients_it_is_said_how_to_record_them(run: instrument.Run) -> None:
    with pytest.raises(InstrumentError, match="no gradients were recorded: hooks=gradients"):
        gradient_flow(run.stats.query("hook == 'acts'"))


@pytest.mark.parametrize("most", tiered([1.1, 2.0, 7.0, 40.0, 1e3, 1e9], [1.1, 1e9]))
def test_labels_do_not_touch(most: float) -> None:
    values = np.geomspace(0.15, 0.15 * most, 60)
    figure = gradient_flow(stats_of({f"encoder.block.{i}.attention": [value, 0.2] for i, value in enumerate(values)}))
    assert overlaps(figure) == []
