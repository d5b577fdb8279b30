"""Figures: imports of matplotlib, PNG and SVG output, text, scales, step labels and legends."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from figures import legend_of, overlaps, stats_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import tiered

import instrument
from instrument.plot.axes_and_scales import (
    LONGEST,
    add_legend,
    colours,
    figure_of,
    label_steps,
    needs_log_scale,
    new_charts,
    new_figure,
    plain,
    scale,
    write_numbers,
)
from instrument.plot.plot_function import fit


@pytest.mark.slow
def test_matplotlib_is_imported_with_the_first_figure_without_pyplot(tmp_path: Path) -> None:
    stats_of({"a": [1.0, 2.0]}).to_pickle(tmp_path / "stats")
    code = (
        "import sys, instrument; f = instrument.plot.heatmap; assert 'matplotlib' not in sys.modules;"
        "import instrument.plot.heatmap, instrument.plot.look; assert instrument.plot.heatmap is f;"
        "print(callable(f), 'torch' in sys.modules);"
        "import pandas; figure = f(pandas.read_pickle(sys.argv[1]));"
        "figure._repr_png_(); print('matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "stats"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False", "False"]


def test_missing_matplotlib_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"] + ["instrument.plot.figure"]:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(instrument.InstrumentError, match=r"^a plot requires matplotlib: pip install .*\[report\]"):
        instrument.plot.heatmap(stats_of({"a": [1.0]}))


@pytest.mark.slow
def test_figure_is_saved_as_png_and_svg(tmp_path: Path) -> None:
    figure = instrument.plot.heatmap(stats_of({"<script>$a$": [1.0, 2.0]}))
    figure.savefig(tmp_path / "one.png")
    figure.savefig(tmp_path / "one.svg")
    head = b"\x89PNG\r\n"
    assert (tmp_path / "one.png").read_bytes().startswith(head)
    assert figure._repr_png_().startswith(head)  # type: ignore[attr-defined]
    assert ET.parse(tmp_path / "one.svg").getroot().tag.endswith("svg")


def test_plot_functions_are_listed() -> None:
    assert instrument.plot.__all__ == [
        *(
            "Look",
            "attention",
            "casts",
            "class_activation_map",
            "compare",
            "diff",
            "feature_maps",
            "gradient_flow",
            "heatmap",
        ),
        *("histogram_over_time", "importance", "layer_similarity", "logit_lens", "patching", "replay"),
    ]
    assert all(callable(getattr(instrument.plot, name)) for name in instrument.plot.__all__)
    assert {*instrument.plot.__all__} <= {*dir(instrument.plot)}


@given(st.text(alphabet="ab$_\\. ", max_size=100))
def test_text_is_drawn_literally_and_shortened(text: str) -> None:
    figure = new_figure(1.0, 1.0)
    drawn = figure.text(0.0, 0.0, plain(text))
    shown, is_formula = drawn._preprocess_math(drawn.get_text())  # type: ignore[attr-defined]
    assert not is_formula
    assert len(shown) <= LONGEST + 1
    if len(text) <= LONGEST:
        assert shown.removeprefix(" ") == text.removeprefix(" ")
    assert not plain(text).startswith("_")


@pytest.mark.parametrize(
    ("values", "wide"),
    [
        ([1.0, 100.0], True),
        ([1.0, 99.0], False),
        ([0.0, 100.0], False),
        ([-1.0, 100.0], False),
        ([1e-300, 1e300], True),
    ],
)
def test_scale_is_wide_from_a_ratio_of_100(values: list[float], wide: bool) -> None:
    assert needs_log_scale(np.array([*values, np.nan])) is wide
    assert ("norm" in colours(np.array([*values, np.inf]))) is wide


def test_scale_without_finite_values_has_defaults() -> None:
    assert not needs_log_scale(np.full(3, np.nan))
    assert colours(np.full(3, np.nan)) == {"cmap": None, "vmin": 0.0, "vmax": 1.0}


@pytest.mark.slow
@settings(max_examples=15)
@given(st.integers(1, 300), st.integers(1, 10**9))
def test_step_labels_have_even_distances(count: int, every: int) -> None:
    axes = new_figure(4.0, 2.0).subplots()
    label_steps(axes, [step * every for step in range(count)])
    fit(figure := axes.figure, [axes])
    figure.draw_without_rendering()
    gaps = np.diff(axes.get_xticks())
    assert (gaps == gaps[:1]).all()
    named = [int(label.get_text().replace(",", "")) for label in axes.get_xticklabels()]
    assert named == [int(at) * every for at in axes.get_xticks()]


@pytest.mark.spread(1)
@pytest.mark.parametrize("ends", tiered([(0.15, 7.0), (1.0, 1.2), (3.0, 3.0), (1e-9, 1e9)], [(1.0, 1.2), (3.0, 3.0)]))
def test_logarithmic_axis_has_labels_for_any_range(ends: tuple[float, float]) -> None:
    low, high = ends
    figure = new_figure(4.0, 2.0)
    axes = figure.subplots()
    axes.plot([low, high], [0, 1])
    scale(axes, "x", np.array([low, high, np.nan]), is_log=True)
    figure.draw_without_rendering()
    named = [label.get_text() for label in axes.get_xticklabels() if low / 2 < label.get_position()[0] < high * 2]
    assert len([text for text in named if text]) >= 2
    assert axes.get_xscale() == "log"
    assert overlaps(figure) == []


def test_legend_has_each_label_once() -> None:
    charts = new_charts(4.0, 2.0, 1, 2)
    for axes in charts.flat:
        axes.plot([0], label="same")
    charts[0, 1].plot([0], label="own")
    add_legend(charts)
    figure = figure_of(charts)
    assert legend_of(figure) == ["same", "own"]


def test_rounded_number_has_no_negative_zero() -> None:
    figure = new_figure(4, 2)
    axes = figure.add_subplot()
    values = np.array([[-0.001, -2.0]])
    write_numbers(axes, values, axes.pcolormesh(values))
    assert [text.get_text() for text in axes.texts] == ["0.0", "-2.0"]
