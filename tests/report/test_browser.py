"""The report in a real browser: no errors, no requests, working controls and readable names."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
import torch
from report_fixtures import EVERYTHING, RECORD, SPREAD, convolutional, copy_unfinished, deep, new_page, train
from scipy.stats import sem, t
from torch import nn

import instrument
from instrument.report import make

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

WIDE, PHONE = 1400, 400


class OpenReport:
    """A page in the browser, with its errors and requests."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.errors: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda message: self.errors.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("dialog", lambda dialog: self.errors.append(f"dialog: {dialog.message}"))

    def open(self, file: Path) -> None:
        self.address = file.as_uri()
        self.page.goto(self.address)
        self.page.wait_for_selector("html[data-drawn=yes]")
        self.chosen: list[tuple[str, str]] = self._chosen()

    def check(self) -> None:
        assert self.errors == []
        assert [url for url in self.requests if not url.startswith(("data:", "blob:"))] == [self.address]

    def restore(self) -> None:
        """Reset all drop-downs to their state after opening."""
        for select, value in self.chosen:
            if dict(self._chosen())[select] != value:  # read again: an earlier selection may have changed it
                self.page.select_option(f"#{select}", value=value)
        assert self._chosen() == self.chosen

    def _chosen(self) -> list[tuple[str, str]]:
        chosen = self.page.evaluate("[...document.querySelectorAll('select')].map(({id, value}) => [id, value])")
        return [(select, value) for select, value in chosen]

    def plot(self, chart: str) -> list[dict[str, Any]]:
        traces: list[dict[str, Any]] = self.page.evaluate(
            "id => document.getElementById(id).data.map(({type, name, x, y, z, customdata, zmin, zmax, visible, error_y}) =>"
            " ({type, name, x, y, z, customdata, zmin, zmax, visible, errors: error_y?.array}))",
            chart,
        )
        return traces

    def choose(self, select: str, choice: str) -> None:
        self.page.select_option(f"#{select}", label=choice)

    def choices(self, select: str) -> list[str]:
        return self.page.locator(f"#{select} option").all_text_contents()


Open = Callable[..., Any]


@contextmanager
def open_report(
    browser: Browser, file: Path, reported: instrument.Run | Path, *, width: int = WIDE, dark: bool = False
) -> Iterator[OpenReport]:
    """Open a report from disk; assert at the end that there were no errors and no requests."""
    page = new_page(browser, width=width, dark=dark)
    report = OpenReport(page)
    try:
        report.open(make(reported).save(file))
        yield report
        report.check()
    finally:
        page.close()


@pytest.fixture
def open_page(browser: Browser, page_file: Path) -> Open:
    return partial(open_report, browser, page_file)


@pytest.fixture(scope="module")
def full_report_page(browser: Browser, page_file: Path, reported_run: instrument.Run) -> Iterator[OpenReport]:
    with open_report(browser, page_file, reported_run) as report:
        yield report


@pytest.fixture
def full_report(full_report_page: OpenReport) -> Iterator[OpenReport]:
    """Report of a run with all kinds of records. It is opened once; its drop-downs are reset for each test."""
    full_report_page.restore()
    yield full_report_page
    full_report_page.check()


def close_to(rows: pd.DataFrame, condition: str, column: str) -> Any:
    """Return the values of a column in the rows of a condition by step, with the digits of the page."""
    return pytest.approx(rows.query(condition).sort_values("step")[column].tolist(), rel=1e-5)


def test_heat_map_shows_the_table_and_follows_the_drop_downs(
    full_report: OpenReport, reported_run: instrument.Run
) -> None:
    stats = reported_run.stats
    assert full_report.choices("heatmap-series") == [
        "acts: forward output",
        "flow: full_backward grad_output",
        "gradients: parameter_grad param_grad",
        "updates: step_post update",
    ]
    (trace,) = full_report.plot("heatmap-chart")
    assert trace["y"] == ["0", "1", "2", "3", "."]
    assert trace["customdata"][1] == trace["z"][1] == close_to(stats, "hook == 'acts' and layer == '1'", "std")
    full_report.choose("heatmap-statistic", "max")
    (trace,) = full_report.plot("heatmap-chart")
    assert trace["customdata"][1] == close_to(stats, "hook == 'acts' and layer == '1'", "max")
    full_report.choose("heatmap-series", "gradients: parameter_grad param_grad")
    (trace,) = full_report.plot("heatmap-chart")
    assert trace["y"] == ["0.weight", "0.bias", "3.weight", "3.bias"]
    assert trace["customdata"][3] == close_to(stats, "hook == 'gradients' and layer == '3' and path == 'bias'", "max")
    full_report.choose("heatmap-scale", "log")
    (trace,) = full_report.plot("heatmap-chart")
    assert trace["z"][3] != trace["customdata"][3]


@pytest.mark.slow
def test_click_on_the_heat_map_opens_the_layer(full_report: OpenReport, reported_run: instrument.Run) -> None:
    assert full_report.page.text_content("#layer-title") == "0, Conv2d"
    full_report.page.locator("#heatmap-chart").scroll_into_view_if_needed()
    box = full_report.page.locator("#heatmap-chart .nsewdrag").bounding_box()
    assert box is not None
    full_report.page.mouse.click(box["x"] + box["width"] * 0.4, box["y"] + box["height"] * 0.7)
    full_report.page.wait_for_function("document.getElementById('layer-title').textContent === '3, Linear'")
    (curve,) = [trace for trace in full_report.plot("layer-curves") if trace["visible"] is True]
    assert curve["name"] == "std"
    assert curve["y"] == close_to(reported_run.stats, "hook == 'acts' and layer == '3'", "std")
    bands = {trace["name"] for trace in full_report.plot("layer-range") if trace["name"]}
    assert bands == {"1 to 99%", "5 to 95%", "25 to 75%", "median"}
    columns = full_report.plot("layer-histogram")
    rows = reported_run.distributions.query("layer == '3'").sort_values("step")
    assert [[cell[0] for [cell] in column["customdata"]] for column in columns] == [c.tolist() for c in rows["counts"]]
    assert [(column["y"][0], column["y"][-1]) for column in columns] == [
        pytest.approx(ends, rel=1e-4) for ends in zip(rows["low"], rows["high"], strict=True)
    ]
    full_report.page.locator("#heatmap-chart .ytick", has_text="0").first.click()
    assert full_report.page.text_content("#layer-title") == "0, Conv2d"
    full_report.choose("layer-location", "1")
    assert full_report.page.text_content("#layer-title") == "1, ReLU"


def test_other_charts_show_their_tables(full_report: OpenReport, reported_run: instrument.Run) -> None:
    stats = reported_run.stats
    loss = next(trace for trace in full_report.plot("training-chart") if trace["name"] == "training")
    assert loss["y"] == pytest.approx(reported_run.metrics["loss"].tolist(), rel=1e-5)
    lanes = [trace["name"] for trace in full_report.plot("training-chart")]
    assert lanes == ["training", "tame"]
    _, first, last = full_report.plot("flow-chart")
    norms = stats[stats["hook"] == "gradients"].groupby("step")["l2"].apply(list)
    assert (first["x"], last["x"]) == (pytest.approx(norms[0], rel=1e-5), pytest.approx(norms[5], rel=1e-5))
    _, first, last = full_report.plot("updates-chart")
    ratios = stats[stats["hook"] == "updates"].groupby("step")["update_ratio"].apply(list)
    assert last["x"] == pytest.approx(ratios[5], rel=1e-5)
    assert full_report.choices("units-choice")[0] == "dead_fraction of acts: forward output"
    (units,) = full_report.plot("units-chart")
    assert (units["zmin"], units["zmax"]) == (0, 1)
    dead = close_to(stats, "hook == 'acts' and layer == '1'", "dead_fraction")
    assert units["z"][units["y"].index("1")] == dead
    for trace, column in zip(
        full_report.plot("effects-chart"), ("norm_before", "norm_after", "changed_fraction"), strict=True
    ):
        assert trace["y"] == close_to(reported_run.effects, "layer == '0' and path == 'weight'", column)
    full_report.choose("effects-location", "3.bias")
    expected = close_to(reported_run.effects, "layer == '3' and path == 'bias'", "norm_before")
    assert full_report.plot("effects-chart")[0]["y"] == expected


def test_units_of_layers_precede_features_of_the_data(open_page: Open, tmp_path: Path) -> None:
    inputs = {**RECORD, "layers": "0", "kind": "forward_pre", "stats": ["dead_fraction"]}
    run = train(tmp_path, convolutional(), {"inputs": inputs, "acts": EVERYTHING["acts"]}, steps=2, shape=(3, 8, 8))
    with open_page(run) as report:
        choices = report.choices("units-choice")
        assert (choices[0], choices[-1]) == (
            "dead_fraction of acts: forward output",
            "dead_fraction of inputs: forward_pre input",
        )


def last_mosaic(report: OpenReport) -> dict[str, Any]:
    trace: dict[str, Any] = report.page.evaluate(
        "(({z, customdata, zmin, zmax}) => ({z, customdata, zmin, zmax}))"
        "([...document.querySelectorAll('#maps-charts .chart')].at(-1).data[0])"
    )
    return trace


@pytest.mark.slow
def test_feature_maps_are_next_to_their_image(full_report: OpenReport, reported_run: instrument.Run) -> None:
    tensors = reported_run.tensors(hook="maps", step=5)["values"].iloc[0]
    assert full_report.choices("maps-what") == ["feature maps", "filters"]
    kinds = full_report.page.evaluate(
        "[...document.querySelectorAll('#maps-charts .chart')].map(at => at.data[0].type)"
    )
    assert kinds == ["image", "heatmap"] * 6
    first = last_mosaic(full_report)
    mosaic, limits = first["z"], (first["zmin"], first["zmax"])
    assert [row[:6] for row in mosaic[:6]] == [pytest.approx(row, rel=1e-5) for row in tensors[0, 0].tolist()]
    assert limits[0] == -limits[1] < 0
    every = reported_run.tensors(hook="maps")
    assert limits[1] == pytest.approx(max(np.abs(values[0]).max() for values in every["values"]), rel=1e-5)
    full_report.choose("maps-scale", "one per step")
    assert last_mosaic(full_report)["zmax"] == pytest.approx(np.abs(tensors[0]).max(), rel=1e-5)
    full_report.choose("maps-scale", "one per channel")
    drawn = last_mosaic(full_report)
    assert (drawn["zmin"], drawn["zmax"]) == (-1, 1)
    relative = tensors[0, 0] / np.abs(tensors[0, 0]).max()
    assert [row[:6] for row in drawn["z"][:6]] == [pytest.approx(row, rel=1e-4) for row in relative.tolist()]
    assert [row[:6] for row in drawn["customdata"][:6]] == [row[:6] for row in mosaic[:6]]
    assert "divided by its largest magnitude" in full_report.page.inner_text("#maps-note")
    full_report.choose("maps-what", "filters")
    assert full_report.page.locator("#maps-charts .chart").count() == 6


@pytest.mark.slow
def test_killed_run_is_drawn_and_non_finite_values_are_marked(open_page: Open, tmp_path: Path) -> None:
    copy = copy_unfinished(tmp_path / "r", tmp_path / "killed")

    def poison(step: int, model: nn.Module) -> None:
        copy(step, model)
        if step == 1:
            with torch.no_grad():
                model[3].bias[0] = math.nan

    without_updates = {name: hook for name, hook in EVERYTHING.items() if name != "updates"}
    train(tmp_path / "r", convolutional(), without_updates, shape=(3, 8, 8), at_step=poison)
    with open_page(tmp_path / "killed") as report:
        assert not report.page.is_visible("#updates-series")
        assert "Not recorded" in report.page.inner_text("#updates-note")
        cells, crosses = report.plot("heatmap-chart")
        assert len(cells["x"]) == 3
        assert "has no coverage table" in report.page.inner_text("#coverage")
        assert set(zip(crosses["y"], crosses["x"], strict=True)) >= {("3", "1"), (".", "1")}
        assert ("0", "1") not in set(zip(crosses["y"], crosses["x"], strict=True))
        assert "loss not finite" in [trace["name"] for trace in report.plot("training-chart")]


@pytest.mark.slow
def test_numbers_of_rollouts_are_drawn(open_page: Open, tmp_path: Path) -> None:
    with instrument.attach(nn.Linear(2, 2), {}, out=tmp_path / "run") as probe:
        for step in range(3):
            with probe.in_phase("rollout"):
                probe.log(episode_return=step**2)
            probe.end_step(loss=-float(step))
    with open_page(tmp_path / "run") as report:
        report.choose("training-metric", "episode_return")
        assert [(trace["name"], trace["x"], trace["y"]) for trace in report.plot("training-chart")] == [
            ("rollouts", [0, 1, 2], [0, 1, 4])
        ]


@pytest.mark.slow
@pytest.mark.parametrize("width", [WIDE, PHONE])
def test_names_of_60_layers_do_not_overlap(open_page: Open, tmp_path: Path, width: int) -> None:
    run = train(tmp_path / "r", deep(60), {**EVERYTHING, "spread": SPREAD}, steps=5)
    with open_page(run, width=width) as report:
        for chart in ("heatmap-chart", "flow-chart", "updates-chart", "units-chart"):
            boxes = report.page.evaluate(
                "id => [...document.querySelectorAll(`#${id} .ytick text`)].map(text => {"
                " const box = text.getBoundingClientRect(); return [box.top, box.bottom]; })",
                chart,
            )
            assert len(boxes) >= 20
            ordered = sorted(boxes)
            assert all(above[1] <= below[0] + 2 for above, below in pairwise(ordered)), chart
        title, tick = report.page.evaluate(
            "['.xtitle', '.xtick text'].map(part => document.querySelector(`#heatmap-chart ${part}`).getBoundingClientRect())"
            ".map(({top, bottom}) => [top, bottom])"
        )
        assert tick[1] <= title[0]
        assert report.page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.slow
def test_report_is_readable_on_a_phone_in_dark_mode(open_page: Open, reported_run: instrument.Run) -> None:
    with open_page(reported_run, width=PHONE, dark=True) as report:
        check_readable(report)


def check_readable(report: OpenReport) -> None:
    """Assert that a page on a phone in dark mode is readable, then switch it to light mode."""
    assert report.page.evaluate("document.documentElement.scrollWidth") <= PHONE
    text, back = report.page.evaluate(
        "(({color, backgroundColor}) => [color, backgroundColor])(getComputedStyle(document.body))"
    )
    assert _contrast(text, back) >= 7.0  # level AAA of WCAG
    drawn = report.page.evaluate("document.getElementById('training-chart').layout.font.color")
    report.page.emulate_media(color_scheme="light")
    report.page.wait_for_function(
        "before => document.getElementById('training-chart').layout.font.color !== before", arg=drawn
    )


def _contrast(*colours: str) -> float:
    """Return the contrast ratio of two colors as defined by WCAG 2."""
    light = []
    for colour in colours:
        parts = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        light.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(light) + 0.05) / (min(light) + 0.05)


MARKUP, BOLD = "<script>alert(1)</script>", "<b>bold</b>&amp;"
ONE_HOOK = {"h": {"layers": "*", "kind": "forward", "action": "record"}}


@pytest.fixture(scope="module")
def small_report_page(
    browser: Browser, page_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OpenReport]:
    model = nn.Sequential()
    model.add_module(MARKUP, nn.Linear(4, 4))
    model.add_module(BOLD, nn.ReLU())
    model.add_module("last", nn.Linear(4, 4))
    with torch.no_grad():
        model[0].bias.fill_(-100.0)
    update = {"kind": "step_post", "role": "update", "action": "record", "stats": "update_ratio"}
    hooks = {
        **ONE_HOOK,
        "first": {**update, "layers": MARKUP},
        "last": {**update, "layers": "last"},
        "spread": {**SPREAD, "types": "ReLU"},
    }
    run = train(tmp_path_factory.mktemp("small") / "r", model, hooks, steps=2)
    with open_report(browser, page_file, run) as report:
        yield report


@pytest.fixture
def small_report(small_report_page: OpenReport) -> Iterator[OpenReport]:
    """Report of a run with markup in the names of its layers, a dead layer, and updates recorded by two hooks."""
    small_report_page.restore()
    yield small_report_page
    small_report_page.check()


def test_names_with_markup_are_shown_as_text(small_report: OpenReport) -> None:
    assert small_report.plot("heatmap-chart")[0]["x"] == ["0", "1"]
    assert small_report.page.text_content("#layer-title") == f"{MARKUP}, Linear"
    ticks = small_report.page.locator("#heatmap-chart .ytick text").all_text_contents()
    assert ticks == [MARKUP, BOLD, "last"]
    assert MARKUP in small_report.page.inner_text("#model")


def test_long_names_leave_room_for_other_columns(small_report: OpenReport) -> None:
    further = small_report.page.evaluate(
        "() => { const names = [...document.querySelectorAll('td.mono')], shown = names.map(cell => cell.textContent);"
        " names.forEach(cell => { cell.textContent = 'name_'.repeat(60); });"
        " const further = [...document.querySelectorAll('.scroll')].map(box => box.scrollWidth - box.clientWidth);"
        " names.forEach((cell, i) => { cell.textContent = shown[i]; }); return further; }"
    )
    assert further
    assert max(further) == 0


def test_sections_without_records_are_hidden(small_report: OpenReport) -> None:
    hidden = small_report.page.evaluate(
        "[...document.querySelectorAll('section')].filter(part => part.hidden).map(part => part.id)"
    )
    assert hidden == ["maps", "interventions"]
    assert small_report.choices("updates-series") == ["first: step_post update", "last: step_post update"]
    assert small_report.page.locator("#panel-attention").count() == 0
    links = small_report.page.evaluate("[...document.querySelectorAll('nav a')].map(link => link.getAttribute('href'))")
    assert links == ["#findings", "#training", "#layers", "#flow", "#units", "#coverage", "#events", "#model"]
    assert "Set histogram: true" in small_report.page.inner_text("#layer-histogram-note")


@pytest.mark.slow
def test_zero_has_its_own_color_on_a_logarithmic_scale(small_report: OpenReport) -> None:
    scale = "(() => { const s = scaleOf([[1, 1e-2, 1e-4, 0]]); return [1e-4, 0].map(s.to).concat(s.low, s.colours[1][0], s.high); })()"
    least, zero, low, edge, high = small_report.page.evaluate(scale)
    position = [(value - low) / (high - low) for value in (least, zero)]
    assert position[1] < edge < position[0]
    assert small_report.page.evaluate("scaleOf([Array.from({length: 400000}, (_, i) => 1 + i % 7)]).high") == 7


def test_histogram_of_a_dead_layer_is_visible(small_report: OpenReport) -> None:
    small_report.choose("layer-location", BOLD)
    assert small_report.page.text_content("#layer-title") == f"{BOLD}, ReLU"
    columns = small_report.page.evaluate("document.getElementById('layer-histogram').data.map(({y, z}) => [y, z])")
    assert len(columns) == 2
    assert all(y[0] < 0.0 < y[1] and z == [[0.0]] for y, z in columns)  # one bin with all elements: log10(1)


@pytest.mark.slow
def test_run_without_steps_is_shown(open_page: Open, tmp_path: Path) -> None:
    with open_page(train(tmp_path / "none", convolutional(), ONE_HOOK, steps=0, shape=(3, 8, 8))) as report:
        assert "Conv2d" in report.page.inner_text("#model")


@pytest.mark.slow
def test_tool_bar_is_above_its_chart_and_uploads_nothing(full_report: OpenReport) -> None:
    bars = full_report.page.evaluate(
        "[...document.querySelectorAll('.js-plotly-plot')].map(chart => {"
        " const [bar, picture] = ['.modebar', '.main-svg'].map(part => chart.querySelector(part).getBoundingClientRect());"
        " const buttons = [...chart.querySelectorAll('.modebar-btn')].map(button => button.dataset.title);"
        " return [bar.bottom - picture.top, buttons]; })"
    )
    assert len(bars) > 10
    for overlap, buttons in bars:
        assert overlap <= 1
        assert buttons
        assert not [button for button in buttons if "share" in button.lower()]


BOXES = """
[...document.querySelectorAll('.js-plotly-plot')].filter(chart => chart.offsetParent).map(chart => {
  const boxes = selector => [...chart.querySelectorAll(selector)].filter(part => !part.parentNode.closest('.colorbar'))
    .map(part => part.getBoundingClientRect()).filter(box => box.width && box.height)
    .map(({left, top, right, bottom}) => [left, top, right, bottom]);
  return {id: chart.id, bars: boxes('.infolayer > .colorbar'), tools: boxes('.modebar-group'), plots: boxes('.nsewdrag'),
    texts: boxes('.infolayer .legend, .xtick text, .ytick text, .g-gtitle text, .g-xtitle text, .g-ytitle text, .annotation'),
    whole: boxes('.main-svg')[0]};
})
"""
CONTROLS = """
[...document.querySelectorAll('h2, h3, select, .note, .lead, nav, summary')].filter(part => part.offsetParent)
  .map(part => part.getBoundingClientRect()).map(({left, top, right, bottom}) => [left, top, right, bottom])
"""


def overlap(one: list[float], two: list[float]) -> bool:
    """Return whether two boxes [left, top, right, bottom] overlap by more than one pixel in both directions."""
    return min(one[2], two[2]) - max(one[0], two[0]) > 1 and min(one[3], two[3]) - max(one[1], two[1]) > 1


@pytest.mark.parametrize(
    ("reported", "width"),
    [
        ("reported_run", 1280),
        pytest.param("reported_sweep", PHONE, marks=pytest.mark.slow),
        pytest.param("reported_run", PHONE, marks=pytest.mark.slow),
        pytest.param("reported_sweep", 1280, marks=pytest.mark.slow),
    ],
)
def test_color_bars_and_tool_bars_overlap_nothing(
    open_page: Open, request: pytest.FixtureRequest, reported: str, width: int
) -> None:
    with open_page(request.getfixturevalue(reported), width=width) as report:
        if reported == "reported_sweep":
            report.choose("against-view", "heat map")
        charts, controls = report.page.evaluate(BOXES), report.page.evaluate(CONTROLS)
    assert len(charts) > (1 if reported == "reported_sweep" else 8)
    assert any(chart["bars"] for chart in charts)
    assert any(chart["tools"] for chart in charts) == (width > PHONE)
    for chart in charts:
        others = [other for other in charts if other is not chart]
        around = [*controls, *(box for other in others for box in (*other["plots"], *other["bars"], *other["tools"]))]
        for bar in chart["bars"]:
            assert bar[0] >= chart["whole"][0] - 1, chart["id"]
            assert bar[2] <= chart["whole"][2] + 1, chart["id"]
            near = [
                *chart["plots"],
                *chart["texts"],
                *chart["tools"],
                *(box for box in chart["bars"] if box is not bar),
            ]
            assert not [box for box in (*near, *around) if overlap(bar, box)], chart["id"]
        for tool in chart["tools"]:
            assert not [box for box in (*chart["plots"], *chart["texts"], *around) if overlap(tool, box)], chart["id"]


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("first", "last", "ticks"),
    [
        ([0, 5, 10, 15], [0, 5, 10, 15], ["0", "5", "10", "15"]),
        (list(range(0, 1000, 5)), list(range(0, 1000, 5)), [str(step) for step in range(0, 1000, 100)]),
        ([7], [7], ["7"]),
        ([0, 8, 16, 24], [7, 15, 23, 31], ["0", "8", "16", "24"]),
    ],
)
def test_ticks_are_at_round_steps(
    small_report: OpenReport, first: list[int], last: list[int], ticks: list[str]
) -> None:
    assert small_report.page.evaluate("axis => stepTicks(axis).ticktext", {"first": first, "last": last}) == ticks


def test_points_without_neighbors_have_markers(small_report: OpenReport) -> None:
    line = "y => { const {mode, marker} = stepLine([0, 1, 2, 3, 4], y, 'loss'); return [mode, marker?.size]; }"
    assert small_report.page.evaluate(line, [1.0, None, None, 2.0, 3.0]) == ["lines+markers", [7, 0, 0, 0, 0]]
    assert small_report.page.evaluate(line, [1.0, 2.0, None, 2.0, 3.0]) == ["lines", None]


HEATMAP = """
async ([rows, narrow]) => {
  const [usual, chart] = [isNarrow, document.body.appendChild(document.createElement('div'))];
  isNarrow = () => narrow;
  const cells = value => Array.from({length: rows}, () => [value]);
  const series = {locations: cells(0).map((_, i) => `${i}`), first: [0], last: [0], statistics: {std: cells(1), nan_count: cells(1)}};
  heatmap(chart, {statistics: {std: {axis: 'std'}}}, series, 'std');
  await new Promise(requestAnimationFrame);
  const [legend, bar] = ['.legend', '.infolayer > .colorbar'].map(part => chart.querySelector(part).getBoundingClientRect())
    .map(({left, top, right, bottom}) => [left, top, right, bottom]);
  const gap = chart.data[0].ygap;
  chart.remove();
  isNarrow = usual;
  return [gap, legend, bar];
}
"""


@pytest.mark.parametrize(("rows", "gap", "narrow"), [(5, 1, True), (5, 1, False), (2000, 0, False)])
def test_heat_maps_have_visible_cells_and_a_free_legend(
    small_report: OpenReport, rows: int, gap: int, narrow: bool
) -> None:
    between, legend, bar = small_report.page.evaluate(HEATMAP, [rows, narrow])
    assert between == gap  # 2000 rows in 1,500 pixels have no room for gaps
    assert not overlap(legend, bar)


def test_steps_added_to_a_drawn_curve_are_drawn(small_report: OpenReport) -> None:
    draw = (
        "async () => { const chart = document.body.appendChild(document.createElement('div')), curve = {x: [0], y: [1]};"
        " await plot(chart, [curve]); curve.x.push(1); curve.y.push(2); await plot(chart, [curve]);"
        " const drawn = chart.calcdata[0].length; chart.remove(); return drawn; }"
    )
    assert small_report.page.evaluate(draw) == 2


def test_bands_have_gaps_at_missing_values(small_report: OpenReport) -> None:
    band = "y => { const {x, y: outline} = band([0, 2, 4, 6, 8], y, y.map(at => at && at + 1), '', '', 0); return [x, outline]; }"
    x, y = small_report.page.evaluate(band, [1.0, 2.0, None, 3.0, 4.0])
    assert x == [0, 2, 2, 0, None, 6, 8, 8, 6, None]
    assert y == [1, 2, 3, 2, None, 3, 4, 5, 4, None]


def test_missing_gradients_are_not_called_not_finite(small_report: OpenReport) -> None:
    counts = {"nan_count": [[0, 0], [0, 3], [0, None]], "l2": [[0.0, 1.0], [1.0, None], [1.0, None]]}
    series = {"role": "param_grad", "first": [0, 5], "last": [0, 5], "statistics": counts}
    notes = small_report.page.evaluate("series => hiddenValuesNotes(...firstAndLast(series, 'l2'))", series)
    assert notes == ["◁ 1 zero; 1 not finite at step 5; 1 not recorded at step 5"]


def test_logarithmic_axis_has_no_line_to_a_value_of_zero(small_report: OpenReport) -> None:
    values = [1.0, 0.0, -1.0, None]
    assert small_report.page.evaluate("values => onAxis(values, 'log')", values) == [1.0, None, None, None]
    assert small_report.page.evaluate("values => onAxis(values, 'linear')", values) == values
    note = "Values that are zero or negative, which the logarithmic axis omits: 2. "
    assert small_report.page.evaluate("values => omittedValuesNote(values, 'log')", values) == note


@pytest.mark.slow
def test_sweep_shows_a_metric_of_some_steps(open_page: Open, tmp_path: Path) -> None:
    for name in "ab":
        with instrument.attach(nn.Linear(2, 2), {}, out=tmp_path / name) as probe:
            for step in range(5):
                if step % 2 == 0:
                    probe.log(score=float(step))
                probe.end_step()
    with open_page(instrument.load(tmp_path)) as report:
        report.choose("training-metric", "score")
        curves = "document.getElementById('training-chart').data.map(({mode, marker}) => [mode, marker?.size])"
        assert report.page.evaluate(curves) == [["lines+markers", [7, 0, 7, 0, 7]]] * 2


@pytest.mark.slow
def test_configuration_can_be_copied(full_report: OpenReport) -> None:
    full_report.page.click("#configuration summary")
    full_report.page.click("#copy")
    full_report.page.wait_for_function("document.getElementById('copy').textContent === 'Copied'")
    full_report.page.evaluate("document.body.append(Object.assign(document.createElement('textarea'), {id: 'paste'}))")
    full_report.page.focus("#paste")
    full_report.page.keyboard.press("Control+V")
    assert full_report.page.input_value("#paste").strip() == full_report.page.text_content("#config").strip()
    assert "tame" in full_report.page.input_value("#paste")


@pytest.mark.slow
def test_sweep_report_plots_numbers_against_overrides(open_page: Open, reported_sweep: instrument.Run) -> None:
    done = [i for i, info in enumerate(reported_sweep.infos) if info["status"] == "done"]
    names = [reported_sweep.folders[i].name for i in done]
    losses = [reported_sweep.infos[i]["metrics"]["loss"] for i in done]
    with open_page(reported_sweep, width=PHONE, dark=True) as report:
        check_readable(report)
        assert report.choices("against-x") == ["hooks.tame", "hooks.odd", "seed"]
        points = [y for trace in report.plot("against-chart") if trace["x"] for y in trace["y"]]
        assert all(any(y == pytest.approx(loss, rel=1e-5) for y in points) for loss in losses)
        assert "2 of 6 runs are not shown" in report.page.inner_text("#against-note")
        levels = [json.dumps(reported_sweep.overrides[i].get("hooks.tame")) for i in done]
        pairs = [[loss for loss, other in zip(losses, levels, strict=True) if other == level] for level in set(levels)]
        widths = [t.interval(0.95, 1, np.mean(pair), sem(pair))[1] - np.mean(pair) for pair in pairs]
        assert sorted(report.plot("against-chart")[0]["errors"]) == pytest.approx(
            sorted(widths), rel=1e-2
        )  # of losses with six digits
        report.choose("against-x", "seed")
        report.choose("against-colour", "hooks.tame")
        means, dots, *_ = report.plot("against-chart")
        assert means["x"] == [1, 2]
        assert means["errors"] == pytest.approx([math.nan, math.nan], nan_ok=True)
        assert len(dots["y"]) == 2
        report.choose("against-view", "heat map")
        (grid,) = report.plot("against-chart")
        assert sorted(cell for row in grid["customdata"] for cell in row) == pytest.approx(sorted(losses), rel=1e-5)
        report.choose("against-y", "l2 of acts: forward output")
        report.choose("against-location", "layers.0")
        (grid,) = report.plot("against-chart")
        finished = reported_sweep.stats[reported_sweep.stats["run"].isin(names)]
        stats = finished.query("layer == 'layers.0'").sort_values("step").groupby("run")["l2"].last()
        assert sorted(cell for row in grid["customdata"] for cell in row) == pytest.approx(sorted(stats), rel=1e-5)
        assert len(report.plot("training-chart")) == reported_sweep.metrics["run"].nunique()
        assert (
            len([trace for trace in report.plot("layers-chart") if any(trace["x"])])
            == reported_sweep.stats["run"].nunique()
        )
