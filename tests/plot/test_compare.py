"""Comparison of runs over steps, layers and overrides, with labels made from differing overrides."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from figures import axis_labels, legend_of, make_run, overlaps
from matplotlib.axes import Axes
from torch import nn

import instrument
from instrument import InstrumentError
from instrument.plot import compare, heatmap
from instrument.plot.compare import labels_of, overrides_of

HOOKS = {"acts": {"kind": "forward"}, "grads": {"kind": "parameter_grad"}}
PARAMETERS = ["0.weight", "0.bias", "3.weight", "3.bias"]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> instrument.Run:
    """Sweep of three values with two seeds each; the loss of the last job becomes NaN."""
    folder = tmp_path_factory.mktemp("sweep")
    for job, (value, seed) in enumerate([(0.1, 1), (0.1, 2), (1, 1), (1, 2), (10, 1), (10, 2)]):
        overrides = {"clip.norm": value, "seed": seed, "name": "same"}
        make_run(folder / str(job), hooks=HOOKS, seed=seed, with_nan=job == 5, overrides=overrides)
    return instrument.load(folder)


def lines(axes: Axes) -> dict[str, np.ndarray]:
    """Return the points of each labeled line as arrays [points, 2]."""
    found = {str(line.get_label()): np.column_stack(line.get_data()) for line in axes.lines}
    return {label: points for label, points in found.items() if "=" in label}


def metrics_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a `metrics` table of several runs from the columns run, loss and overrides."""
    return frame.assign(step=0, phase="train", rank=0, accuracy=np.nan)


@pytest.mark.slow
def test_metric_over_steps_equals_the_table(sweep: instrument.Run) -> None:
    figure = compare(sweep)
    drawn = lines(figure.axes[0])
    labels = [f"clip.norm={value} seed={seed}" for value in ("0.1", "1", "10") for seed in (1, 2)]
    assert list(drawn) == labels
    for run, points in enumerate(drawn.values()):
        rows = sweep.metrics[sweep.metrics.run == str(run)]
        np.testing.assert_array_equal(points, rows[["step", "loss"]])
    assert figure.axes[0].get_title() == "loss (train)"
    assert legend_of(figure)[:6] == labels


@pytest.mark.parametrize(
    ("x", "at", "words"), [(None, 1, "not finite from this step on"), ("clip.norm", 10.0, "not finite at the end")]
)
def test_run_with_nan_loss_has_a_cross(sweep: instrument.Run, x: str | None, at: float, words: str) -> None:
    figure = compare(sweep, "loss", x)
    (cross,) = (line for line in figure.axes[0].lines if line.get_marker() == "x")
    assert cross.get_xdata() == [at]
    assert words in legend_of(figure)


def test_steps_without_a_metric_are_not_called_not_finite(tmp_path: Path) -> None:
    for name, last in (("a", 5.0), ("b", math.nan)):
        with instrument.attach(nn.Linear(1, 1), {}, out=tmp_path / name) as probe:
            for step in range(4):
                if step % 2 == 0:
                    probe.log(score=last if step else 1.0)
                probe.end_step()
    axes = compare(instrument.load(tmp_path), "score").axes[0]
    assert all(tick == round(tick) for tick in axes.get_xticks())  # four steps, and none between them
    assert [line.get_xydata().tolist() for line in axes.lines if line.get_marker() == "x"] == [[[0.0, 1.0]]]
    drawn = [line.get_xydata() for line in axes.lines if line.get_marker() != "x"]
    np.testing.assert_array_equal(drawn, [[[0, 1], [2, 5]], [[0, 1], [2, math.nan]]])


@pytest.mark.slow
def test_seeds_share_a_colour_and_differ_in_dashes(sweep: instrument.Run) -> None:
    drawn = [(line.get_color(), line.get_linestyle()) for line in compare(sweep).axes[0].lines]
    assert drawn[0][0] == drawn[1][0] != drawn[2][0] == drawn[3][0]
    assert drawn[0][1] == drawn[2][1] == "-"
    assert drawn[1][1] == drawn[3][1] == "--"


@pytest.mark.slow
def test_list_sweep_and_frame_give_the_same_figure(sweep: instrument.Run) -> None:
    alone = [instrument.load(folder) for folder in sweep.folders]
    pictures = [compare(source) for source in (sweep, alone, sweep.metrics)]
    expected = lines(pictures[0].axes[0])
    for picture in pictures[1:]:
        found = lines(picture.axes[0])
        assert list(found) == list(expected)
        for label, points in found.items():
            np.testing.assert_array_equal(points, expected[label])


@pytest.mark.slow
def test_statistic_of_a_layer_is_drawn_over_steps(sweep: instrument.Run) -> None:
    axes = compare(sweep, "l2", layer="3.weight").axes[0]
    rows = sweep.stats.query("run == '2' and hook == 'grads' and layer == '3' and path == 'weight'")
    np.testing.assert_array_equal(lines(axes)["clip.norm=1 seed=1"], rows[["step", "l2"]])
    assert axes.get_title() == "l2 of 3.weight (grads: parameter_grad param_grad)"


def test_statistic_without_a_layer_is_drawn_over_layers(sweep: instrument.Run) -> None:
    axes = compare(sweep, "l2", hook="grads").axes[0]
    assert axis_labels(axes) == PARAMETERS
    rows = sweep.stats.query("run == '0' and hook == 'grads' and step == 3")
    expected = rows.set_index(rows.layer + "." + rows.path).l2[PARAMETERS]
    np.testing.assert_array_equal(lines(axes)["clip.norm=0.1 seed=1"][:, 0], expected)
    assert axes.get_title().endswith("last recorded step (3)")
    assert axis_labels(compare(sweep.stats, "std", hook="acts").axes[0]) == ["0", "1", "2", "3", "."]


@pytest.mark.slow
def test_last_value_over_an_override_has_points_and_means(sweep: instrument.Run) -> None:
    some = sweep.metrics.query("run != '5'")
    axes = compare(some, "loss", "clip.norm").axes[0]
    last = some[some.step == 3]
    points, means = axes.lines
    np.testing.assert_array_equal(np.column_stack(points.get_data()), last[["clip.norm", "loss"]].astype(float))
    np.testing.assert_allclose(means.get_ydata(), last.groupby("clip.norm").loss.mean())
    assert axes.get_xscale() == "log"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0.1", "1", "10"]
    assert overlaps(axes.figure) == []  # type: ignore[arg-type]
    assert axes.get_title() == "loss (train), last recorded"


def test_runs_with_other_differences_have_separate_lines() -> None:
    keys = {"lr_": [1, 2, 1, 2], "act": ["relu", "relu", "tanh", "tanh"]}
    frame = pd.DataFrame({"run": list("abcd"), "loss": [1.0, 2.0, 3.0, 4.0], **keys})
    found = lines(compare(metrics_table(frame), x="lr_").axes[0])
    assert {label: points.tolist() for label, points in found.items()} == {
        "act=relu": [[1.0, 1.0], [2.0, 2.0]],
        "act=tanh": [[1.0, 3.0], [2.0, 4.0]],
    }


def test_runs_that_differ_in_a_list_share_a_line_of_their_seeds() -> None:
    keys = {"seed": [1, 2, 1, 2], "sizes": [[8], [8], [8, 4], [8, 4]]}
    frame = metrics_table(pd.DataFrame({"run": list("abcd"), "loss": [1.0, 3.0, 5.0, 7.0], **keys}))
    found = lines(compare(frame, interval=0.9).axes[0])
    assert {label: points.tolist() for label, points in found.items()} == {
        "sizes=[8]": [[0.0, 2.0]],
        "sizes=[8, 4]": [[0.0, 6.0]],
    }


def test_non_numeric_values_are_names_on_the_axis() -> None:
    frame = pd.DataFrame({"run": list("abc"), "loss": [1.0, 2.0, 3.0], "act": ["relu", "tanh", np.nan]})
    axes = compare(metrics_table(frame), x="act").axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["relu", "tanh", "not set"]
    assert axes.lines[0].get_xdata().tolist() == [0.0, 1.0, 2.0]  # type: ignore[union-attr]


@pytest.mark.slow
def test_last_metric_is_from_evaluations_if_available() -> None:
    frame = metrics_table(pd.DataFrame({"run": list("ab"), "loss": [1.0, 2.0], "width": [1, 2]}))
    both = pd.concat([frame, frame.assign(phase="eval", loss=[5.0, 6.0])])
    assert compare(both, x="width").axes[0].lines[0].get_ydata().tolist() == [5.0, 6.0]  # type: ignore[union-attr]
    assert compare(both, x="width", phase="train").axes[0].get_title() == "loss (train), last recorded"
    assert compare(both).axes[0].get_title() == "loss (train)"


@pytest.mark.slow
def test_labels_are_differing_overrides_with_folder_if_ambiguous(tmp_path: Path) -> None:
    same = pd.DataFrame(
        {"run": ["a", "b", "c"], "loss": 0.0, "lr_": [1.0, 1.0, np.nan], "exp": "e", "long": ["", "", "x" * 80]}
    )
    overrides = overrides_of(same, "metrics")
    assert list(overrides) == ["lr_", "long"]
    assert list(labels_of(overrides).values()) == ["a lr_=1 long=", "b lr_=1 long=", "c long=" + "x" * 80]
    for job, differing in enumerate([{"a": 1, "c": True}, {"b": 2, "c": False}]):
        make_run(tmp_path / str(job), overrides=differing)
    run = instrument.load(tmp_path)
    assert list(labels_of(overrides_of(run.metrics, "metrics")).values()) == ["a=1 c=True", "c=False b=2"]
    ticks = compare(run, x="a").axes[0].get_xticklabels()
    assert [label.get_text() for label in ticks] == ["1", "not set"]


def test_override_with_the_name_of_a_column_is_found() -> None:
    frame = pd.DataFrame({"run": list("ab"), "loss": [1.0, 2.0], "override.lr": [0.1, 0.2]})
    assert compare(metrics_table(frame), x="lr").axes[0].lines[0].get_xdata().tolist() == [0.1, 0.2]  # type: ignore[union-attr]


@pytest.mark.slow
def test_single_run_is_drawn(tmp_path: Path) -> None:
    figure = compare(make_run(tmp_path / "_mine", hooks=HOOKS, steps=1))
    assert legend_of(figure) == [" _mine"]
    assert len(figure.axes[0].lines[0].get_xdata()) == 1  # type: ignore[arg-type]


def test_probes_in_memory_are_drawn() -> None:
    probes = []
    for loss in (1.0, 2.0):
        with instrument.attach(nn.Linear(2, 2), {}) as probe:
            probe.end_step(loss=loss)
        probes.append(probe)
    (axes,) = compare([probe.run for probe in (*probes, probes[0])]).axes
    found = {line.get_label(): line.get_ydata().tolist() for line in axes.lines}  # type: ignore[union-attr]
    assert found == {"in memory 1": [1.0], "in memory 2": [2.0]}


@pytest.mark.slow
def test_legend_of_many_runs_fits_the_figure() -> None:
    frame = metrics_table(pd.DataFrame({"run": [str(i) for i in range(40)], "loss": 1.0, "width": range(40)}))
    figure = compare(frame)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert len(legend.get_texts()) == 40
    assert legend.get_window_extent().y0 >= 0.0


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda sweep: compare(sweep, "los"), "y: unknown metric or statistic.*'los'.*similar  loss"),
        (
            lambda sweep: compare(sweep, x="norm"),
            r"x: the runs do not differ in this override.*'norm'.*clip\.norm, seed",
        ),
        (lambda sweep: compare(sweep, "l2", "seed", hook="grads"), "plotting l2 over seed requires layer="),
        (lambda sweep: compare(sweep, "accuracy"), "no run has a value of this metric in phase train"),
        (lambda sweep: compare(sweep, phase="eval"), "phase: no metrics were recorded in this phase.*'eval'"),
        (lambda sweep: compare(sweep, "l2"), "several series match.*hook='acts'.*hook='grads'"),
        (lambda sweep: compare([]), "runs is empty"),
        (lambda sweep: compare(str(sweep.path)), r"run: must be a run.*given +str.*pass instrument\.load"),
        (lambda sweep: heatmap(None), "run: must be a run.*given +NoneType.*for a probe, pass probe.run"),
        (lambda sweep: compare(sweep, "l2", layer=0), "layer: nothing was recorded for this layer.*given +0"),
        (
            lambda sweep: compare(sweep.metrics.drop(columns="run")),
            "columns that are missing from the metrics table: run",
        ),
    ],
)
def test_invalid_comparison_is_an_error_with_options(sweep: instrument.Run, draw: Any, message: str) -> None:
    with pytest.raises(InstrumentError, match=f"(?s){message}"):
        draw(sweep)
