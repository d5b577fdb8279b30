"""The common arguments of all plots: width, labels, scale, interval and axes; the style, fonts in PDF files, and stored images."""

from __future__ import annotations

import re
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from figures import faults_of, stats_of
from matplotlib.figure import Figure
from matplotlib.testing.compare import compare_images
from matplotlib.text import Text
from plot_examples import IMAGES, TOLERANCE, WIDTHS, Draw, plot_examples, save_image, sweep_metrics
from scipy import stats
from tiers import tiered

from instrument import InstrumentError
from instrument.plot import PLOTS, compare, gradient_flow, heatmap

NAMES = [
    *("attention", "casts", "class_activation_map", "compare", "compare_runs", "compare_steps", "diff", "feature_maps"),
    *("gradient_flow", "heatmap", "histogram_over_time", "importance", "layer_similarity", "logit_lens", "patching"),
    *("patching_attribution", "replay"),
]
QUICK = ["compare", "feature_maps", "gradient_flow"]  # one chart, a grid of charts, and charts next to each other
WITH_INTERVAL = ["compare", "importance", "patching"]
WITHOUT_SCALE = ["casts", "class_activation_map"]


@pytest.fixture(scope="module", autouse=True)
def default_style() -> Iterator[None]:
    with mpl.rc_context(mpl.rcParamsDefault):
        yield


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Draw]:
    return plot_examples(tmp_path_factory.mktemp("examples"))


@pytest.fixture(scope="module")
def drawn(examples: dict[str, Draw]) -> dict[tuple[str, float], Figure]:
    return {}


def figure_of(examples: dict[str, Draw], drawn: dict[tuple[str, float], Figure], name: str, width: float) -> Figure:
    if (name, width) not in drawn:
        drawn[name, width] = examples[name](width=width)
    return drawn[name, width]


def test_every_plot_has_an_example(examples: dict[str, Draw]) -> None:
    assert sorted(examples) == NAMES
    assert {*PLOTS} == {name for name in NAMES if name not in ("compare_runs", "compare_steps", "patching_attribution")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "width"),
    [
        pytest.param(name, width, marks=() if width == min(WIDTHS) or name in QUICK else pytest.mark.slow)
        for name in NAMES
        for width in WIDTHS
    ],
)
def test_text_and_charts_fit_the_width(examples: Any, drawn: Any, name: str, width: float, tmp_path: Path) -> None:
    figure = figure_of(examples, drawn, name, width)
    assert figure.get_figwidth() == width
    assert faults_of(figure) == []
    sizes = {text.get_fontsize() for text in figure.findobj(Text) if text.get_text()}  # type: ignore[attr-defined]
    assert sizes == {8.0}
    found = save_image(figure, tmp_path / f"{name}-{width:g}.png")
    assert compare_images(str(IMAGES / found.name), str(found), TOLERANCE) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", tiered(NAMES, QUICK))
def test_text_and_charts_fit_the_default_width(examples: dict[str, Draw], name: str) -> None:
    figure = examples[name]()
    assert figure.get_figwidth() <= 15.0
    assert faults_of(figure) == []


@pytest.mark.slow
def test_images_of_other_data_differ(examples: Any, drawn: Any, tmp_path: Path) -> None:
    figure = heatmap(stats_of({"embedding": [1.0, 2.0]}), "l2", width=3.4)
    figure.set_figheight(figure_of(examples, drawn, "heatmap", 3.4).get_figheight())
    found = save_image(figure, tmp_path / "heatmap-3.4.png")
    assert "RMS" in (compare_images(str(IMAGES / found.name), str(found), TOLERANCE) or "")


@pytest.mark.slow
@pytest.mark.parametrize("name", tiered(NAMES, QUICK))
def test_pdf_files_have_only_type_42_fonts(examples: Any, drawn: Any, name: str) -> None:
    file = BytesIO()
    figure_of(examples, drawn, name, 3.4).savefig(file, format="pdf")
    assert set(re.findall(rb"/Subtype /(Type\d|CIDFontType\d)", file.getvalue())) == {b"Type0", b"CIDFontType2"}
    assert b"/FontFile2" in file.getvalue()


@pytest.mark.spread(2)
@pytest.mark.parametrize("name", tiered(NAMES, QUICK))
def test_every_plot_takes_the_common_arguments_or_refuses_them(examples: dict[str, Draw], name: str) -> None:
    draw, plot = examples[name], re.sub("_(runs|steps|attribution)$", "", name)
    if plot in WITH_INTERVAL:
        draw(interval=0.9)
    else:
        with pytest.raises(
            InstrumentError, match=rf"(?s)interval: {plot} draws .*allowed +in compare, importance, patching$"
        ):
            draw(interval=0.9)
    for scale in ("linear", "log"):
        if plot in WITHOUT_SCALE:
            with pytest.raises(InstrumentError, match=rf"(?s)scale: {plot} .*allowed +in attention, compare"):
                draw(scale=scale)
        elif plot == "feature_maps":
            with pytest.raises(InstrumentError, match=r"(?s)scale: unknown color scale.*step, shared, channel"):
                draw(scale=scale)
        elif scale == "log" and plot == "patching":
            with pytest.raises(InstrumentError, match=r"(?s)scale: a logarithmic scale requires positive values"):
                draw(scale=scale)
        else:
            draw(scale=scale)


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", tiered(NAMES, QUICK))
def test_labels_replace_any_text(examples: Any, drawn: Any, name: str) -> None:
    figure = figure_of(examples, drawn, name, 7.0)
    texts = [text.get_text() for text in figure.findobj(Text)]  # type: ignore[attr-defined]
    title = figure.get_suptitle() or figure.axes[0].get_title()
    new = examples[name](width=7.0, labels={"title": "new $x$"})
    assert (new.get_suptitle() or new.axes[0].get_title()) == "new $x$"
    assert title in texts
    with pytest.raises(
        InstrumentError, match=r"(?s)labels: the figure has no such text.*'no text'.*title, x, y, color"
    ):
        examples[name](labels={"no text": ""})


def test_labels_replace_names_of_data_and_axes() -> None:
    frame = stats_of({"encoder.0": [1.0, 2.0], "encoder.1": [3.0, 400.0]})
    labels = {"encoder.0.weight": "$W_0$", "x": "iteration", "color": "norm", "title": ""}
    figure = heatmap(frame, labels=labels)
    axes, bar = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["$W_0$", "encoder.1.weight"]
    assert (axes.get_title(), axes.get_xlabel(), bar.get_ylabel()) == ("", "iteration", "norm")
    metrics = sweep_metrics(1).query("`optimizer.lr` == 0.01 and step < 20")
    (legend,) = compare(metrics, labels={"model.activation=relu": "ReLU"}).legends
    assert [text.get_text() for text in legend.get_texts()] == ["ReLU", "model.activation=gelu"]


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", tiered(NAMES, QUICK))
def test_every_plot_draws_into_given_axes(examples: dict[str, Draw], name: str) -> None:
    figure = Figure(figsize=(10.0, 12.0), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(9, 3))
    below.plot([0.0, 1.0])
    before = below.get_window_extent()
    assert examples[name](ax=above) is figure
    assert faults_of(figure) == []
    assert len(below.lines) == 1
    figure.draw_without_rendering()
    assert below.get_window_extent().width == pytest.approx(before.width, rel=0.5)
    assert all(axes is below or axes.get_window_extent().y0 > below.bbox.y1 for axes in figure.axes)


@pytest.mark.slow
def test_scale_of_values_and_colors() -> None:
    frame = stats_of({"a": [1.0, 2.0]})
    assert heatmap(frame).axes[0].collections[0].norm.__class__.__name__ == "Normalize"
    assert heatmap(frame, scale="log").axes[0].collections[0].norm.__class__.__name__ == "LogNorm"
    metrics = sweep_metrics(1)
    assert [compare(metrics, scale=scale).axes[0].get_yscale() for scale in ("linear", "log")] == ["linear", "log"]
    assert gradient_flow(frame, scale="linear").axes[0].get_xscale() == "linear"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"width": 1.0}, r"width: must be a width in inches.*1\.0.*2 or more"),
        ({"width": "3"}, r"width: must be a width in inches.*'3'"),
        ({"scale": "logarithmic"}, "scale: unknown scale.*'logarithmic'.*linear, log"),
        ({"interval": 95}, "interval: must be a confidence level.*95.*0 to less than 1"),
        ({"labels": "loss"}, "labels: must be a mapping of texts to texts"),
        ({"labels": {"steps": "s"}}, r"labels: the figure has no such text.*'steps'.*similar +step"),
        ({"ax": 1}, "ax: must be axes of matplotlib.*int"),
        (
            {"ax": Figure().add_subplot(), "width": 3.4},
            r"width: axes have the width of their figure.*3\.4.*omit width or ax",
        ),
        ({"widht": 3.4}, r"widht: compare has no such argument\n +similar +width"),
    ],
)
def test_wrong_arguments_are_an_error(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InstrumentError, match=f"(?s){message}"):
        compare(sweep_metrics(2), **arguments)


def test_several_charts_need_axes_of_a_grid(examples: dict[str, Draw]) -> None:
    with pytest.raises(InstrumentError, match=r"(?s)ax: several charts need axes that belong to a grid.*add_subplot"):
        examples["feature_maps"](ax=Figure().add_axes((0, 0, 1, 1)))


@pytest.mark.slow
def test_style_follows_rc_params() -> None:
    metrics = sweep_metrics(1)
    mine = {
        **{"font.family": "DejaVu Serif", "font.size": 9.0, "lines.linewidth": 3.0, "grid.color": "red"},
        **{"axes.prop_cycle": mpl.cycler(color=["#111111", "#222222"]), "image.cmap": "magma", "grid.linestyle": ":"},
    }
    before = dict(mpl.rcParams)
    with mpl.rc_context(mine):
        axes = compare(metrics).axes[0]
        map_axes = heatmap(stats_of({"a": [1.0, 2.0]})).axes[0]
    assert [line.get_color() for line in axes.lines][:3] == ["#111111", "#222222", "#111111"]
    assert {line.get_linewidth() for line in axes.lines} == {3.0}
    assert {line.get_color() for line in axes.get_xgridlines()} == {"red"}
    assert {line.get_linestyle() for line in axes.get_xgridlines()} == {":"}
    texts = [axes.title, axes.xaxis.label, *axes.get_xticklabels()]
    assert {(text.get_fontname(), text.get_fontsize()) for text in texts} == {("DejaVu Serif", 9.0)}
    assert map_axes.collections[0].get_cmap().name == "magma"
    assert dict(mpl.rcParams) == before


@pytest.mark.slow
def test_interval_is_students_interval_of_the_mean_over_seeds() -> None:
    metrics = sweep_metrics(4).query("`model.activation` == 'relu'")
    axes = compare(metrics, x="optimizer.lr", interval=0.9).axes[0]
    last = metrics[metrics["step"] == 190].groupby("optimizer.lr")["loss"]
    (bars,) = axes.collections
    for segment, (rate, values) in zip(bars.get_segments(), last, strict=True):  # type: ignore[attr-defined]
        low, high = stats.t.interval(0.9, len(values) - 1, values.mean(), stats.sem(values))
        np.testing.assert_allclose(segment, [[rate, low], [rate, high]])
    assert "bars: 90% intervals" in axes.get_xlabel().replace("\n", " ")
    band = compare(metrics.query("`optimizer.lr` == 0.01")).axes[0]
    at_10 = metrics.query("`optimizer.lr` == 0.01 and step == 10")["loss"]
    (path,) = band.collections[0].get_paths()
    ends = path.vertices[path.vertices[:, 0] == 10.0][:, 1]
    expected = stats.t.interval(0.95, 3, at_10.mean(), stats.sem(at_10))
    np.testing.assert_allclose((ends.min(), ends.max()), expected)
    assert band.lines[0].get_ydata()[1] == pytest.approx(at_10.mean())  # type: ignore[index]
    assert len(compare(metrics, interval=0).axes[0].lines) == 16
    assert len(compare(sweep_metrics(2)).axes[0].lines) == 16  # two seeds: one line per run
    assert len(compare(sweep_metrics(2), interval=0.95).axes[0].lines) == 8


def test_bands_over_layers_keep_the_forward_order() -> None:
    parts = [
        stats_of({"b": [1.0 + seed], "a": [2.0 + seed]}, run=str(seed), seed=seed).assign(lr=0.1) for seed in range(3)
    ]
    axes = compare(pd.concat(parts), "l2").axes[0]
    assert axes.lines[0].get_xdata().tolist() == [2.0, 3.0]  # type: ignore[union-attr]
    half = stats.t.ppf(0.975, 2) / np.sqrt(3)
    edges = axes.collections[0].get_paths()[0].vertices
    assert sorted(set(np.round(edges[edges[:, 1] == 0.0][:, 0], 9))) == pytest.approx([2.0 - half, 2.0 + half])


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("name", "values", "scale"),
    [
        ("optimizer.lr", [0.1, 0.2, 0.3], "log"),
        ("optimizer.lr", [0.0, 0.1], "linear"),
        ("decay", [0.001, 0.003, 0.01, 0.03], "log"),
        ("width", [8, 16, 32, 64], "log"),
        ("depth", [1, 2, 3, 4, 5, 6, 7, 8, 9], "linear"),
        ("depth", [2, 4, 6, 8, 10, 12, 14, 16], "linear"),
    ],
)
def test_axis_of_rates_is_logarithmic(name: str, values: list[float], scale: str) -> None:
    frame = pd.DataFrame({"run": [str(i) for i in range(len(values))], "loss": 1.0, name: values})
    metrics = frame.assign(step=0, phase="train", rank=0, accuracy=np.nan)
    assert compare(metrics, x=name).axes[0].get_xscale() == scale


def test_fewer_steps_and_positions_are_shown_in_a_narrow_figure(examples: Any, drawn: Any) -> None:
    titles = [axes.get_title() for axes in figure_of(examples, drawn, "feature_maps", 3.4).axes]
    assert [title for title in titles if title.startswith("image")] == ["image, step 0", "image, step 200"]
    assert "of 11 positions" in figure_of(examples, drawn, "logit_lens", 3.4).axes[0].get_title()
    assert "positions" not in examples["logit_lens"](width=7.0).axes[0].get_title()
