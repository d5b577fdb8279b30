"""Runs overlaid: over steps, over layers, over an override; labelled by what they differ in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from drawn import legend_of, make_run, names_on, overlaps
from matplotlib.axes import Axes

import instrument
from instrument import InstrumentError
from instrument.plot import compare
from instrument.plot.run_tables import labels_of, overrides_of

HOOKS = {"acts": {"kind": "forward"}, "grads": {"kind": "parameter_grad"}}
PLACES = ["0.weight", "0.bias", "3.weight", "3.bias"]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> instrument.Run:
    """Three values with two seeds each; the last one's loss is lost."""
    folder = tmp_path_factory.mktemp("sweep")
    for job, (value, seed) in enumerate([(0.1, 1), (0.1, 2), (1, 1), (1, 2), (10, 1), (10, 2)]):
        overrides = {"clip.norm": value, "seed": seed, "name": "same"}
        make_run(folder / str(job), hooks=HOOKS, seed=seed, spoilt=job == 5, overrides=overrides)
    return instrument.load(folder)


def lines(axes: Axes) -> dict[str, np.ndarray]:
    """The numbers of each line with a label of its own: [points, 2]."""
    found = {str(line.get_label()): np.column_stack(line.get_data()) for line in axes.lines}
    return {label: points for label, points in found.items() if "=" in label}


def of_runs(frame: pd.DataFrame) -> pd.DataFrame:
    """A metrics table with the loss of several runs, from columns run, loss and overrides."""
    return frame.assign(step=0, phase="train", rank=0, accuracy=np.nan)


def test_a_metric_over_steps_is_the_table_s_labelled_by_what_differs(sweep: instrument.Run) -> None:
    figure = compare(sweep)
    drawn = lines(figure.axes[0])
    labels = [f"clip.norm={value} seed={seed}" for value in ("0.1", "1", "10") for seed in (1, 2)]
    assert list(drawn) == labels
    for run, points in enumerate(drawn.values()):
        rows = sweep.metrics[sweep.metrics.run == str(run)]
        np.testing.assert_array_equal(points, rows[["step", "loss"]])
    assert figure.axes[0].get_title() == "loss (train)"
    assert legend_of(figure)[:6] == labels


def test_a_run_whose_loss_is_lost_has_a_cross_at_its_last_number(sweep: instrument.Run) -> None:
    figure = compare(sweep)
    (cross,) = (line for line in figure.axes[0].lines if line.get_marker() == "x")
    assert cross.get_xdata() == [1]
    assert legend_of(figure)[-1] == "not finite from here on"


def test_seeds_share_a_colour_and_differ_in_dashes(sweep: instrument.Run) -> None:
    drawn = [(line.get_color(), line.get_linestyle()) for line in compare(sweep).axes[0].lines]
    assert drawn[0][0] == drawn[1][0] != drawn[2][0] == drawn[3][0]
    assert drawn[0][1] == drawn[2][1] == "-"
    assert drawn[1][1] == drawn[3][1] == "--"


def test_a_list_a_folder_and_a_frame_give_the_same_picture(sweep: instrument.Run) -> None:
    alone = [instrument.load(folder) for folder in sweep.folders]
    pictures = [compare(source) for source in (sweep, alone, sweep.metrics)]
    wanted = lines(pictures[0].axes[0])
    for picture in pictures[1:]:
        found = lines(picture.axes[0])
        assert list(found) == list(wanted)
        for label, points in found.items():
            np.testing.assert_array_equal(points, wanted[label])


def test_a_statistic_of_a_layer_is_drawn_over_steps(sweep: instrument.Run) -> None:
    axes = compare(sweep, "l2", layer="3.weight").axes[0]
    rows = sweep.stats.query("run == '2' and hook == 'grads' and layer == '3' and path == 'weight'")
    np.testing.assert_array_equal(lines(axes)["clip.norm=1 seed=1"], rows[["step", "l2"]])
    assert axes.get_title() == "l2 of 3.weight (grads: parameter_grad param_grad)"


def test_a_statistic_without_a_layer_is_drawn_over_layers_at_the_last_step(sweep: instrument.Run) -> None:
    axes = compare(sweep, "l2", hook="grads").axes[0]
    assert names_on(axes) == PLACES
    rows = sweep.stats.query("run == '0' and hook == 'grads' and step == 3")
    wanted = rows.set_index(rows.layer + "." + rows.path).l2[PLACES]
    np.testing.assert_array_equal(lines(axes)["clip.norm=0.1 seed=1"][:, 0], wanted)
    assert axes.get_title().endswith("last recorded step (3)")
    assert names_on(compare(sweep.stats, "std", hook="acts").axes[0]) == ["0", "1", "2", "3", "."]


def test_the_last_value_over_an_override_has_a_point_a_run_and_their_means(sweep: instrument.Run) -> None:
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


def test_a_last_value_that_is_not_finite_is_a_cross(sweep: instrument.Run) -> None:
    figure = compare(sweep, "loss", "clip.norm")
    (cross,) = (line for line in figure.axes[0].lines if line.get_marker() == "x")
    assert cross.get_xdata() == [10.0]
    assert "not finite at the end" in legend_of(figure)


def test_runs_that_differ_in_more_have_a_line_each() -> None:
    frame = pd.DataFrame(
        {
            "run": list("abcd"),
            "loss": [1.0, 2.0, 3.0, 4.0],
            "lr_": [1, 2, 1, 2],
            "act": ["relu", "relu", "tanh", "tanh"],
        }
    )
    found = lines(compare(of_runs(frame), x="lr_").axes[0])
    assert {label: points.tolist() for label, points in found.items()} == {
        "act=relu": [[1.0, 1.0], [2.0, 2.0]],
        "act=tanh": [[1.0, 3.0], [2.0, 4.0]],
    }


def test_values_that_are_no_numbers_are_names_on_the_axis() -> None:
    frame = pd.DataFrame({"run": list("abc"), "loss": [1.0, 2.0, 3.0], "act": ["relu", "tanh", np.nan]})
    axes = compare(of_runs(frame), x="act").axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["relu", "tanh", "not given"]
    assert axes.lines[0].get_xdata().tolist() == [0.0, 1.0, 2.0]  # type: ignore[union-attr]


def test_a_last_metric_is_that_of_the_evaluations_where_there_are_some() -> None:
    frame = of_runs(pd.DataFrame({"run": list("ab"), "loss": [1.0, 2.0], "width": [1, 2]}))
    both = pd.concat([frame, frame.assign(phase="eval", loss=[5.0, 6.0])])
    assert compare(both, x="width").axes[0].lines[0].get_ydata().tolist() == [5.0, 6.0]  # type: ignore[union-attr]
    assert compare(both, x="width", phase="train").axes[0].get_title() == "loss (train), last recorded"
    assert compare(both).axes[0].get_title() == "loss (train)"


def test_labels_are_what_runs_differ_in_and_their_folder_where_that_is_not_enough() -> None:
    same = pd.DataFrame(
        {"run": ["a", "b", "c"], "loss": 0.0, "lr_": [1.0, 1.0, np.nan], "exp": "e", "long": ["", "", "x" * 80]}
    )
    overrides = overrides_of(same, "metrics")
    assert list(overrides) == ["lr_", "long"]
    assert list(labels_of(overrides).values()) == ["a lr_=1 long=", "b lr_=1 long=", "c long=" + "x" * 80]


def test_an_override_that_is_called_like_a_column_is_found() -> None:
    frame = pd.DataFrame({"run": list("ab"), "loss": [1.0, 2.0], "override.lr": [0.1, 0.2]})
    assert compare(of_runs(frame), x="lr").axes[0].lines[0].get_xdata().tolist() == [0.1, 0.2]  # type: ignore[union-attr]


def test_one_run_alone_is_drawn(tmp_path: Path) -> None:
    figure = compare(make_run(tmp_path / "_mine", hooks=HOOKS, steps=1))
    assert legend_of(figure) == [" _mine"]
    assert len(figure.axes[0].lines[0].get_xdata()) == 1  # type: ignore[arg-type]


def test_many_runs_have_room_for_their_legend() -> None:
    frame = of_runs(pd.DataFrame({"run": [str(i) for i in range(40)], "loss": 1.0, "width": range(40)}))
    figure = compare(frame)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert len(legend.get_texts()) == 40
    assert legend.get_window_extent().y0 >= 0.0


def test_what_cannot_be_compared_is_an_error_that_names_what_can(sweep: instrument.Run) -> None:
    with pytest.raises(InstrumentError, match=r"(?s)y: neither a metric nor a statistic.*'los'.*nearest  loss"):
        compare(sweep, "los")
    with pytest.raises(InstrumentError, match=r"(?s)x: no override in which the runs differ.*'norm'.*clip\.norm, seed"):
        compare(sweep, x="norm")
    with pytest.raises(InstrumentError, match="l2 over seed is of one layer"):
        compare(sweep, "l2", "seed", hook="grads")
    with pytest.raises(InstrumentError, match="no run has a value of it in train"):
        compare(sweep, "accuracy")
    with pytest.raises(InstrumentError, match=r"(?s)phase: no metrics of it.*'eval'"):
        compare(sweep, phase="eval")
    with pytest.raises(InstrumentError, match=r"(?s)several series fit.*hook='acts'.*hook='grads'"):
        compare(sweep, "l2")
    with pytest.raises(InstrumentError, match="no run to compare"):
        compare([])
    with pytest.raises(InstrumentError, match="the metrics table lacks the column run"):
        compare(sweep.metrics.drop(columns="run"))


def test_a_run_that_lacks_a_whole_number_of_others_is_labelled_without_it(tmp_path: Path) -> None:
    for job, overrides in enumerate([{"a": 1, "c": True}, {"b": 2, "c": False}]):
        make_run(tmp_path / str(job), overrides=overrides)
    overrides = overrides_of(instrument.load(tmp_path).metrics, "metrics")
    assert list(labels_of(overrides).values()) == ["a=1 c=True", "c=False b=2"]
    figure = compare(instrument.load(tmp_path), x="a")
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["1", "not given"]
