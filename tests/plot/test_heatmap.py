"""Heat maps: values, order of layers, color scales, labels and errors."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from figures import axis_labels, legend_of, make_run, mesh_of, overlaps, stats_of
from matplotlib.colors import LogNorm, Normalize

import instrument
from instrument import InstrumentError
from instrument.plot import heatmap

PARAMETERS = ["0.weight", "0.bias", "3.weight", "3.bias"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> instrument.Run:
    return make_run(tmp_path_factory.mktemp("heatmap") / "run")


@pytest.mark.slow
def test_cells_equal_the_table(run: instrument.Run) -> None:
    axes = heatmap(run, hook="grads").axes[0]
    table = run.stats.query("hook == 'grads'").assign(place=lambda rows: rows.layer + "." + rows.path)
    expected = table.pivot_table(index="place", columns="step", values="l2").loc[PARAMETERS]
    np.testing.assert_array_equal(mesh_of(axes).get_array(), expected.to_numpy())
    assert axis_labels(axes) == PARAMETERS
    assert axes.get_title() == "l2 of grads: parameter_grad param_grad"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "parameter, in forward order")
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "1", "2", "3"]


@pytest.mark.slow
def test_outputs_show_std_in_forward_order(run: instrument.Run) -> None:
    axes = heatmap(run, hook="acts").axes[0]
    assert axes.get_title().startswith("std of acts")
    assert axis_labels(axes) == ["0", "1", "2", "3", "."]
    one, two = heatmap(run, "mean", hook="acts"), heatmap(run.stats, "mean", hook="acts")
    np.testing.assert_array_equal(mesh_of(one.axes[0]).get_array(), mesh_of(two.axes[0]).get_array())
    assert one._repr_png_() == two._repr_png_()  # type: ignore[attr-defined]


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("values", "norm", "cmap", "limits"),
    [
        ([-1.0, 3.0], Normalize, "RdBu_r", (-3.0, 3.0)),
        ([1.0, 3.0], Normalize, "viridis", (0.0, 3.0)),
        ([1.0, 99.0], Normalize, "viridis", (0.0, 99.0)),
        ([1.0, 100.0], LogNorm, "viridis", (1.0, 100.0)),
        ([0.0, 100.0], Normalize, "viridis", (0.0, 100.0)),
    ],
)
def test_color_scale_follows_the_values(
    values: list[float], norm: type, cmap: str, limits: tuple[float, float]
) -> None:
    mesh = mesh_of(heatmap(stats_of({"a": values})).axes[0])
    assert (type(mesh.norm), mesh.get_cmap().name, mesh.get_clim()) == (norm, cmap, limits)


def test_color_bar_has_a_label_and_ticks() -> None:
    frame = stats_of({"a": [0.5, 0.25]}).rename(columns={"l2": "zero_fraction"})
    figure = heatmap(frame)
    bar = figure.axes[1]
    assert bar.get_ylabel() == "zero_fraction"
    assert mesh_of(figure.axes[0]).get_clim() == (0.0, 1.0)  # of a fraction
    assert len([label for label in bar.get_yticklabels() if label.get_text()]) >= 3


@pytest.mark.slow
def test_missing_and_non_finite_cells_are_in_the_legend(tmp_path: Path) -> None:
    figure = heatmap(make_run(tmp_path / "r", with_nan=True), hook="acts")
    array = mesh_of(figure.axes[0]).get_array()
    assert np.ma.getmaskarray(array)[:, 2:].all()
    assert not np.ma.getmaskarray(array)[:, :2].any()
    (marks,) = (line for line in figure.axes[0].lines if line.get_marker() == "x")
    assert {(x, y) for x, y in zip(*marks.get_data(), strict=True)} >= {(2.5, 0.5), (3.5, 4.5)}
    assert min(marks.get_xdata()) == 2.5
    assert legend_of(figure) == ["no value: not recorded or not finite", "has NaN or infinite elements"]
    assert legend_of(heatmap(stats_of({"a": [1.0]}))) == []
    scores = stats_of({"a": [1.0]}, kind="function", role="scores").assign(numel=9, inf_count=3)
    assert legend_of(heatmap(scores)) == []  # masked keys


def test_default_statistic_is_no_count_of_elements() -> None:
    frame = stats_of({"a": [0.5, 0.25]}, kind="function", role="attention").rename(columns={"l2": "row_entropy"})
    assert heatmap(frame.assign(numel=9)).axes[1].get_ylabel().startswith("row_entropy")


@pytest.mark.slow
def test_many_steps_are_grouped_with_a_note_on_the_axis() -> None:
    axes = heatmap(stats_of({"a": [float(step) for step in range(2_000)]})).axes[0]
    np.testing.assert_allclose(mesh_of(axes).get_array()[0], np.arange(2_000).reshape(200, 10).mean(1))
    assert axes.get_xlabel() == "step (groups of up to 10: mean)"
    column = int(axes.get_xticks()[1])
    assert axes.get_xticklabels()[1].get_text() == f"{10 * column:,}"  # first step of the group
    axes = heatmap(stats_of({"a": [1.0, 3.0]}).assign(step=0)).axes[0]
    assert mesh_of(axes).get_array().tolist() == [[2.0]]
    assert axes.get_xlabel() == "step (mean of several in a step)"


@pytest.mark.slow
@pytest.mark.parametrize("count", [40, 250])
def test_labels_do_not_overlap_and_short_names_stay_unique(count: int) -> None:
    names = [f"encoder.block.{i}.attention.self.query.projection.of.a.very.long.name.{i}" for i in range(count)]
    figure = heatmap(stats_of({name: [1.0] * 20 for name in names}).assign(step=lambda rows: rows.step * 12345))
    assert overlaps(figure) == []
    shown = axis_labels(figure.axes[0])
    assert shown[0].startswith("0.")
    assert shown[0].endswith("nam.0.weight")
    assert len(set(shown)) == len(shown)
    assert max(map(len, shown)) <= 44
    assert (len(shown) == count) == (count <= 240)


def test_names_with_special_characters_are_drawn_as_text() -> None:
    figure = heatmap(stats_of({"a$x$": [1.0], "_b": [2.0], "<script>": [3.0]}))
    assert [name.strip() for name in axis_labels(figure.axes[0])] == [r"a\$x\$.weight", "_b.weight", "<script>.weight"]
    figure._repr_png_()  # type: ignore[attr-defined]


@pytest.mark.slow
def test_single_step_and_non_finite_rows_are_drawn() -> None:
    assert mesh_of(heatmap(stats_of({"a": [2.0]})).axes[0]).get_array().tolist() == [[2.0]]
    frame = stats_of({"a": [math.nan, 1.0], "b": [math.nan, math.nan]})
    assert np.ma.getmaskarray(mesh_of(heatmap(frame).axes[0]).get_array()).tolist() == [[True, False], [True, True]]


@pytest.mark.slow
def test_ambiguous_or_missing_series_is_an_error_with_options(run: instrument.Run) -> None:
    with pytest.raises(InstrumentError, match=r"(?s)several series match; select one of.*hook='acts'.*hook='updates'"):
        heatmap(run)
    with pytest.raises(InstrumentError, match=r"(?s)statistic: .*'l3'.*similar  l2"):
        heatmap(run, "l3")
    with pytest.raises(InstrumentError, match=r"(?s)hook: .*'grad'.*allowed  acts, grads, updates.*similar  grads"):
        heatmap(run, hook="grad")
    with pytest.raises(InstrumentError, match=r"(?s)phase: .*'eval'.*allowed  train"):
        heatmap(run, phase="eval")
    with pytest.raises(InstrumentError, match="the stats table has no rows"):
        heatmap(run.stats.iloc[:0])
    with pytest.raises(InstrumentError, match="requires columns that are missing from the stats table: kind, path"):
        heatmap(run.stats.drop(columns=["kind", "path"]))
    assert heatmap(run, "update_ratio").axes[0].get_title() == "update_ratio of updates: step_post update"


def test_heat_map_of_several_runs_is_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        make_run(tmp_path / name, hooks={"grads": {"kind": "parameter_grad"}}, steps=1)
    both = instrument.load(tmp_path)
    for source in (both, both.stats):
        with pytest.raises(InstrumentError, match=r"2 were given \(one, two\)"):
            heatmap(source)
    assert axis_labels(heatmap(both.stats.query("run == 'two'")).axes[0]) == PARAMETERS


def test_zeros_are_marked_on_a_logarithmic_scale(run: instrument.Run) -> None:
    figure = heatmap(stats_of({"a": [1.0, 1e-3, 0.0]}))
    colours, zeros = figure.axes[0].collections[:2]
    assert isinstance(colours.norm, LogNorm)
    assert zeros.get_array().mask.tolist() == [[True, True, False]]
    assert any("zero" in text.get_text() for legend in figure.legends for text in legend.get_texts())
