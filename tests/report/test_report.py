"""The report without a browser: contents of the page, equality with the tables, and the command."""

from __future__ import annotations

import math
import re
import runpy
import sys
import warnings
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import scipy
import torch
from conftest import Answer
from report_fixtures import EVERYTHING, SPREAD, convolutional, copy_unfinished, data_of, deep, train
from run_folders import CLIP, write_run
from torch import nn

import instrument
from instrument import InstrumentError
from instrument.analysis.findings import findings
from instrument.analysis.run_history import history_of
from instrument.analysis.tensor_images import maps_in
from instrument.commands.report import main
from instrument.fields.pip_extras import pip_command
from instrument.report import Report, make
from instrument.report.charts import charts, rounded
from instrument.report.live_run import LiveRun
from instrument.report.sweep_page import content, pairs
from instrument.rules.step_rows import location_name
from instrument.storage.run_search import NoRunError

TOLERANCE = 1e-5  # the page has six digits


@pytest.fixture(scope="module")
def html(reported_run: instrument.Run) -> str:
    return make(reported_run).html


@pytest.fixture(scope="module")
def data(html: str) -> dict[str, Any]:
    return data_of(html)


@pytest.fixture(scope="module")
def sweep_html(reported_sweep: instrument.Run) -> str:
    return make(reported_sweep).html


def series_of(data: dict[str, Any], hook: str) -> dict[str, Any]:
    found: dict[str, Any] = next(series for series in data["series"] if series["hook"] == hook)
    return found


# ------------------------------------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize("hook", ["acts", "flow", "gradients", "updates"])
def test_heat_map_equals_the_table(reported_run: instrument.Run, data: dict[str, Any], hook: str) -> None:
    series, stats = series_of(data, hook), reported_run.stats[reported_run.stats["hook"] == hook]
    keys = ["step", "hook", "layer", "path"]
    stats = stats.merge(reported_run.spectra[[*keys, "spectral_norm", "stable_rank", "effective_rank"]], "left", keys)
    assert ("stable_rank" in series["statistics"]) == (hook == "updates")
    assert series["first"] == series["last"] == sorted(stats["step"].unique())
    seen = 0
    for row in stats.to_dict("records"):
        location = location_name(row["layer"], row["path"], row["kind"])
        at = (series["locations"].index(location), series["first"].index(row["step"]))
        for name, values in series["statistics"].items():
            shown = values[at[0]][at[1]]
            assert shown == (pytest.approx(row[name], rel=TOLERANCE) if not math.isnan(row[name]) else None), (
                name,
                row,
            )
            seen += 1
    assert seen == len(stats) * len(series["statistics"])


def test_layers_are_in_forward_order(data: dict[str, Any]) -> None:
    assert series_of(data, "acts")["locations"] == ["0", "1", "2", "3", "."]
    assert series_of(data, "gradients")["locations"] == ["0.weight", "0.bias", "3.weight", "3.bias"]


def test_histograms_and_quantiles_equal_the_table(reported_run: instrument.Run, data: dict[str, Any]) -> None:
    rows = reported_run.distributions.set_index(["layer", "step"])
    assert len(data["distributions"]) == 5
    for shown in data["distributions"]:
        layer = "" if shown["location"] == "." else shown["location"]
        cells = {name: values for name, (values,) in shown["statistics"].items()}
        for i, step in enumerate(shown["first"]):
            row = rows.loc[(layer, step)]
            assert cells["counts"][i] == row["counts"].tolist()
            assert (cells["low"][i], cells["high"][i]) == pytest.approx((row["low"], row["high"]), rel=TOLERANCE)
            assert cells["quantiles"][i] == pytest.approx(row["quantiles"].tolist(), rel=TOLERANCE)
            assert cells["levels"][i] == row["levels"].tolist()


def test_histograms_without_statistics_are_shown(tmp_path: Path) -> None:
    opened = train(tmp_path / "r", convolutional(), {"spread": SPREAD}, shape=(3, 8, 8))
    (shown,) = data_of(make(opened).html)["series"]
    row = opened.distributions.query("layer == '1' and step == 4").iloc[0]
    at = shown["locations"].index("1")
    assert {name: values[at][4] for name, values in shown["statistics"].items()} == {
        "min": pytest.approx(row["low"], rel=TOLERANCE),
        "max": pytest.approx(row["high"], rel=TOLERANCE),
        "median": pytest.approx(row["quantiles"][3], rel=TOLERANCE),
    }


def test_training_curves_equal_the_table(reported_run: instrument.Run, data: dict[str, Any]) -> None:
    shown = data["metrics"]["train"]
    assert shown["first"] == reported_run.metrics["step"].tolist()
    assert shown["statistics"]["loss"][0] == pytest.approx(reported_run.metrics["loss"].tolist(), rel=TOLERANCE)
    assert "accuracy" not in shown["statistics"]  # not recorded


def test_effects_of_interventions_equal_the_table(reported_run: instrument.Run, data: dict[str, Any]) -> None:
    (shown,) = data["effects"]
    assert (shown["hook"], shown["settings"]) == ("tame", "clip norm 0.5")
    for row in reported_run.effects.to_dict("records"):
        at = shown["locations"].index(f"{row['layer']}.{row['path']}"), shown["first"].index(row["step"])
        for name in ("norm_before", "norm_after", "changed_fraction"):
            assert shown["statistics"][name][at[0]][at[1]] == pytest.approx(row[name], rel=TOLERANCE)
    assert data["acted"] == [{"hook": "tame", "steps": [[0, 5]], "count": 6}]


def test_feature_maps_equal_the_recorded_tensors(reported_run: instrument.Run, data: dict[str, Any]) -> None:
    shown = {(one["what"], one["step"]): one for one in data["maps"]["shown"]}
    assert set(shown) == {(what, step) for what in ("feature maps", "filters") for step in range(6)}
    known = {(one.what, one.batch.step): one.values(reported_run) for one in maps_in(reported_run)}
    features, image = known["feature maps", 3], known["inputs", 3]
    picture = shown["feature maps", 3]
    assert picture["shape"] == [1, 5, 6, 6]
    np.testing.assert_allclose(np.array(picture["mosaic"]["z"], float)[:6, :6], features[0], rtol=TOLERANCE)
    np.testing.assert_allclose(np.array(picture["mosaic"]["z"], float)[:6, 7:13], features[1], rtol=TOLERANCE)
    assert (
        picture["mosaic"]["low"] == -picture["mosaic"]["high"] == pytest.approx(-np.abs(features).max(), rel=TOLERANCE)
    )
    shades = np.array(data["maps"]["images"][picture["image"]]["z"])
    assert shades.shape == (8, 8, 3)
    assert np.corrcoef(shades.ravel(), image.transpose(1, 2, 0).ravel())[0, 1] > 0.999
    filters = known["filters", 3]
    np.testing.assert_allclose(
        np.array(shown["filters", 3]["mosaic"]["z"], float)[:3, :3], filters[0, 0], rtol=TOLERANCE
    )
    assert shown["filters", 3]["image"] is None


def test_numbers_have_six_digits_and_non_finite_values_are_null() -> None:
    values = np.array([[1.23456789, math.nan], [math.inf, -1e300]])
    assert rounded(values) == [[1.23457, None], [None, -1e300]]


# --------------------------------------------------------------------------------------------------- sizes and states


def test_large_heat_maps_group_steps(tmp_path: Path) -> None:
    layers, steps, statistics = [f"l{i}" for i in range(13)], 100, ("mean", "std", "min", "max", "l2", "rms")
    rows = [
        {"step": step, "layer": layer, **dict.fromkeys(statistics, float(step))}
        for step in range(steps)
        for layer in layers
    ]
    room = 26 * len(layers) * len(statistics)
    run = instrument.load(write_run(tmp_path / "run", rows={"stats": rows}))
    (shown,) = charts(history_of(run, ("stats",), room))["series"]
    assert len(shown["first"]) == 25  # four steps each
    assert (shown["first"][0], shown["last"][-1]) == (0, steps - 1)
    assert shown["statistics"]["max"][0] == [float(last) for last in shown["last"]]
    assert shown["statistics"]["min"][0] == [float(first) for first in shown["first"]]
    means = [(first + last) / 2 for first, last in zip(shown["first"], shown["last"], strict=True)]
    assert shown["statistics"]["l2"][0] == pytest.approx(means, rel=TOLERANCE)


@pytest.mark.slow
def test_report_of_60_layers_is_below_8_megabytes(tmp_path: Path) -> None:
    """The rows of 50 steps are written twenty times, as those of other steps, with other numbers.

    They take 2.6 MB, and without groups of steps more than the limit here.
    """
    run = train(tmp_path / "r", deep(60), {**EVERYTHING, "spread": SPREAD}, steps=50)
    generator = np.random.default_rng(0)
    for file in run.path.glob("*/part-0000-000000.parquet"):
        table = pq.read_table(file)
        for part in range(1, 20):
            columns = dict(zip(table.column_names, table.columns, strict=True))
            for name, column in columns.items():
                if name == "step":
                    columns[name] = pc.add(column, 50 * part).cast(column.type)
                elif pa.types.is_floating(column.type):
                    columns[name] = pc.multiply(column, generator.uniform(0.5, 1.5, len(column))).cast(column.type)
            if "step" in columns:
                pq.write_table(pa.table(columns, table.schema), file.with_name(f"part-0000-{part:06}.parquet"))
    opened = instrument.load(run.path)
    assert opened.metrics.step.tolist() == list(range(1_000))
    assert 2e6 < len(make(opened).html) < 3e6


def test_page_loads_no_external_resources(html: str) -> None:
    assert 'src="' not in html
    assert "@import" not in html
    assert all(link in ('<link rel="icon" href="data:,">',) for link in html.split("\n") if link.startswith("<link"))


def test_nan_is_reported_at_the_top(tmp_path: Path) -> None:
    def set_nan(step: int, model: nn.Module) -> None:
        if step == 4:
            with torch.no_grad():
                model[0].weight[0, 0] = math.nan

    hooks = {"acts": EVERYTHING["acts"]}
    run = train(tmp_path / "r", convolutional(), hooks, shape=(3, 8, 8), at_step=set_nan)
    live = LiveRun(run.path)
    live.refresh()
    assert ("first recorded non-finite value", 4) in [(one.what, one.step) for one in live.findings()]
    assert repr(live.findings()) == repr(
        [one for one in findings(run) if one.severity != "info"]
    )  # NaN is unequal to itself
    page = make(run)
    data = data_of(page.html)
    assert data["metrics"]["train"]["bad"] == {"loss": [4, 5]}
    assert data["metrics"]["train"]["statistics"]["loss"][0][4:] == [None, None]
    acts = series_of(data, "acts")
    assert acts["statistics"]["nan_count"][0][3:] == [0, 8 * 36, 8 * 5 * 36]
    head = page.html[: page.html.index("<details")]
    assert "non_finite" not in head  # it is among the findings, once
    (diagnosis,) = re.findall('<article class="diagnosis error">(.*?)</article>', page.html, re.S)
    assert diagnosis.index("First recorded non-finite value in") < diagnosis.index("<figcaption>abs_max")
    assert "1 consequence: loss not finite at step 4" in diagnosis
    fired = next(alert for alert in data["alerts"] if alert["rule"] == "non_finite")
    assert (fired["step"], fired["lane"]) == (4, "rules")


@pytest.mark.spread(1)
@pytest.mark.parametrize("steps", [0, 1])
def test_run_with_few_steps_is_shown(tmp_path: Path, steps: int) -> None:
    page = make(train(tmp_path / "r", convolutional(), {"acts": EVERYTHING["acts"]}, steps=steps, shape=(3, 8, 8))).html
    data = data_of(page)
    assert "Conv2d" in page
    assert (
        [series["first"] for series in data["series"]] == [series["last"] for series in data["series"]] == [[0]] * steps
    )
    assert [len(curves["statistics"]["loss"][0]) for curves in data["metrics"].values()] == [1] * steps


def test_killed_run_is_shown_up_to_its_last_step(tmp_path: Path) -> None:
    copy = copy_unfinished(tmp_path / "r", tmp_path / "killed")
    train(tmp_path / "r", convolutional(), {"acts": EVERYTHING["acts"]}, steps=4, shape=(3, 8, 8), at_step=copy)
    page = make(tmp_path / "killed")
    assert 'class="status killed"' in page.html
    assert "The run was killed" in page.html[: page.html.index("<nav")]
    assert "has no coverage table" in page.html
    assert data_of(page.html)["metrics"]["train"]["first"] == [0, 1, 2]


def test_damaged_files_are_reported_at_the_top(tmp_path: Path) -> None:
    train(tmp_path / "r", convolutional(), {"tame": EVERYTHING["tame"]}, steps=1, shape=(3, 8, 8))
    part = next((tmp_path / "r" / "effects").glob("*.parquet"))
    part.write_bytes(part.read_bytes()[:100])
    page = make(tmp_path / "r")
    assert f"{part.name}: cannot be read" in page.html[: page.html.index("<nav")]


def test_names_with_markup_are_escaped(tmp_path: Path) -> None:
    model = nn.Sequential()
    model.add_module("<script>alert(1)</script>", nn.Linear(4, 4))
    model.add_module("a&amp;b", nn.ReLU())
    opened = train(tmp_path / "r", model, {"h": {"layers": "**", "kind": "forward", "action": "record"}})
    page = make(opened).html
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "a&amp;amp;b" in page
    assert data_of(page)["series"][0]["locations"] == ["<script>alert(1)</script>", "a&amp;b", "."]


@pytest.mark.slow
def test_header_has_model_data_status_and_error(reported_sweep: instrument.Run) -> None:
    page = make(reported_sweep.path / "done_0").html
    head = page[: page.index("<nav")]
    kinds = ("instrument.training.models.MLP", "instrument.training.datasets.digits")
    assert all(words in head for words in (*kinds, ">cpu<", ">two <", 'class="status done"'))
    assert "model=mlp" in page
    assert "_target_: instrument.training.models.MLP" in page
    page = make(reported_sweep.path / "failed_0").html
    head = page[: page.index("<nav")]
    assert 'class="status failed"' in head
    assert "hook &#39;odd&#39; (forward) on layer &#39;0&#39; at step 0 failed" in head or "odd" in head
    assert 'class="error"' in head


def test_coverage_has_missed_hooks_with_their_cause(tmp_path: Path) -> None:
    hooks = {"late": {"layers": "0", "kind": "forward", "action": "record", "start": 100}}
    page = make(train(tmp_path / "r", convolutional(), hooks, shape=(3, 8, 8))).html
    coverage = page[page.index('id="coverage"') : page.index('id="events"')]
    assert "never scheduled: its schedule contains none of the completed steps" in coverage


# ------------------------------------------------------------------------------------------------------------- sweeps


@pytest.mark.slow
def test_sweep_report_has_every_run_and_their_errors(reported_sweep: instrument.Run, sweep_html: str) -> None:
    assert sorted(info["status"] for info in reported_sweep.infos) == ["done"] * 4 + ["failed"] * 2
    assert sweep_html.count('class="status failed"') == 2
    head = sweep_html[: sweep_html.index("<nav")]
    assert "4 done, 2 failed" in head
    assert head.count('<li class="error">') == 2
    assert "hooks.tame" in sweep_html


@pytest.mark.slow
def test_sweep_report_equals_the_tables(reported_sweep: instrument.Run, sweep_html: str) -> None:
    data = data_of(sweep_html)
    (acts,) = data["series"]
    for number, folder in enumerate(reported_sweep.folders):
        assert data["runs"][number]["status"] == reported_sweep.infos[number]["status"]
        stats = instrument.load(folder).stats
        for i, location in enumerate(acts["locations"]):
            mine = stats[stats["layer"] == ("" if location == "." else location)].sort_values("step")
            shown = [acts["statistics"]["l2"][end][number][i] for end in ("last", "largest", "smallest")]
            if mine.empty:
                assert shown == [None] * 3
            else:
                # The last value is from the last step of the run; a failed run may have no value of this layer there.
                at_last = mine["l2"][mine["step"] == stats["step"].max()].tolist()
                assert (shown[0] is None) == (not at_last)
                expected = [*at_last[-1:], mine["l2"].max(), mine["l2"].min()]
                assert shown[-len(expected) :] == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.slow
def test_pairs_have_the_same_seed_and_differ_in_one_intervention(
    reported_sweep: instrument.Run, sweep_html: str
) -> None:
    found = [pair for name, pair in pairs(reported_sweep) if name == "tame"]
    done = [i for i, info in enumerate(reported_sweep.infos) if info["status"] == "done"]
    assert sorted(pair.seed for pair in found) == [1, 2]
    losses = [info["metrics"].get("loss") for info in reported_sweep.infos]
    differences = []
    for pair in found:
        treated, control = reported_sweep.infos[pair.index], reported_sweep.infos[pair.baseline]
        assert {pair.index, pair.baseline} <= set(done)
        assert control["overrides"]["hooks.tame"] is None
        assert treated["overrides"]["hooks.tame"]["norm"] == 0.01
        assert treated["seed"] == control["seed"] == pair.seed
        differences.append(losses[pair.index] - losses[pair.baseline])
    assert f"{np.mean(differences):+.4g}" in sweep_html
    assert all(f"{difference:+.4g}" in sweep_html for difference in differences)
    same = [losses[pair.index] for pair in found], [losses[pair.baseline] for pair in found]
    interval = scipy.stats.ttest_rel(*same).confidence_interval()
    assert f"{interval.low:+.4g} to {interval.high:+.4g}" in sweep_html


@pytest.mark.slow
def test_effects_of_matches_the_report(reported_sweep: instrument.Run) -> None:
    frame = reported_sweep.effects_of("hooks.tame")
    done = [info for info in reported_sweep.infos if info["status"] == "done"]
    ends = {(info["overrides"]["hooks.tame"] is None, info["seed"]): info["metrics"]["loss"] for info in done}
    differences = [ends[False, seed] - ends[True, seed] for seed in (1, 2)]
    rows = frame[(frame["table"] == "metrics") & (frame["phase"] == "eval") & (frame["statistic"] == "loss")]
    assert len(rows) == 1
    last = rows.iloc[0]
    assert (last["n"], last["baseline"]) == (2, None)
    assert last["value"] == "{layers: ['**'], kind: parameter_grad, action: clip, norm: 0.01}"
    assert last["difference"] == pytest.approx(np.mean(differences))
    assert {"acts"} == set(frame[frame["table"] == "stats"]["hook"])
    assert frame[frame["table"] == "effects"].empty  # runs without the hook have no rows of its effects
    infos = zip(reported_sweep.folders, reported_sweep.infos, strict=True)
    failed = [folder.name for folder, info in infos if info not in done]
    assert list(frame.attrs["left_out"]) == failed


def test_effect_of_an_intervention_is_averaged_per_seed(tmp_path: Path) -> None:
    losses = {(1, 0): (2.0, 1.0), (1, 1): (2.0, 2.0), (2, 0): (3.0, 1.0), (2, 1): (3.0, 2.0)}  # without, with
    for (seed, other), numbers in losses.items():
        for name, hooks, loss in zip(("without", "with"), ({}, {"tame": CLIP}), numbers, strict=True):
            config = {"hooks": hooks, "other": other}
            metrics = {"loss": loss, "accuracy": math.nan if hooks and seed == 1 else 0.5}
            write_run(tmp_path / f"{seed}-{other}-{name}", config=config, seed=seed, metrics=metrics)
    words = content(instrument.load(tmp_path))[0]
    loss, accuracy = (row for row in words["pairs"] if row["hook"] == "tame")
    assert (loss["survives"], accuracy["survives"]) == (False, False)
    interval = scipy.stats.ttest_rel([1.5, 1.5], [2.0, 3.0]).confidence_interval()
    assert loss["count"] == 4
    assert (loss["without"], loss["treated"], loss["difference"]) == ("2.5", "1.5", "-1")
    assert loss["interval"] == f"{interval.low:+.4g} to {interval.high:+.4g}"
    assert (accuracy["difference"], accuracy["interval"], accuracy["each"]) == ("nan", "", "nan  nan  +0  +0")


SWEPT_KEYS: list[tuple[str, list[Any], dict[str, Any], str]] = [
    ("optimizer.lr", [0.01, 0.1], {}, "0.1 compared with 0.01"),
    ("train.batch", [32, 64], {}, "64 compared with 32"),
    ("deterministic", [False, True], {}, "true compared with false"),
    ("train.precision", ["fp32", "bf16"], {}, "bf16 compared with fp32"),
    ("layers", [[1, 2], [3]], {}, "[3] compared with [1, 2]"),
    ("model", [{"_target_": "A"}, {"_target_": "B"}], {"overrides": ["mlp", "cnn"]}, "cnn compared with mlp"),
    (
        "optimizer",
        [{"fn": "SGD", "lr": 0.1}, {"fn": "Adam", "lr": 0.1}],
        {},
        "fn: Adam compared with fn: SGD",
    ),
    ("hooks.tame", [{**CLIP, "norm": 1.0}, {**CLIP, "norm": 2.0}], {}, "norm: 2.0 compared with norm: 1.0"),
    ("hooks.tame.norm", [1.0, 2.0], {}, "2.0 compared with 1.0"),
    ("exp", [{"lr": 1, "steps": 2}, {"lr": 2, "steps": 1}], {"overrides": ["one", "two"]}, "two compared with one"),
]


@pytest.mark.spread(1)
@pytest.mark.parametrize(("key", "values", "options", "settings"), SWEPT_KEYS, ids=[case[0] for case in SWEPT_KEYS])
def test_sweep_page_has_the_effect_of_each_key(
    tmp_path: Path, key: str, values: list[Any], options: dict[str, list[Any]], settings: str
) -> None:
    losses = {1: (2.0, 1.0), 2: (3.0, 1.5), 3: (2.5, 1.75)}
    for seed, ends in losses.items():
        for value, override, loss in zip(values, options.get("overrides", values), ends, strict=True):
            config: Any = value
            for name in reversed(key.split(".")):
                config = {name: config}
            if key == "exp":  # not a key of the configuration
                config = value
            if key == "hooks.tame.norm":
                config["hooks"]["tame"] = {**CLIP, "norm": value}
            overrides = {key: override, "seed": seed}
            folder = tmp_path / f"{seed}-{values.index(value)}"
            write_run(folder, config=config, seed=seed, overrides=overrides, metrics={"loss": loss})
    words = content(instrument.load(tmp_path))[0]
    (row,) = words["pairs"]
    interval = scipy.stats.ttest_rel([1.0, 1.5, 1.75], [2.0, 3.0, 2.5]).confidence_interval()
    assert (row["hook"], row["settings"], row["count"], row["difference"]) == (key, settings, 3, "-1.083")
    assert row["interval"] == f"{interval.low:+.4g} to {interval.high:+.4g}"
    assert words["unpaired"] == {}


def test_sweep_page_says_why_a_key_has_no_effect(tmp_path: Path) -> None:
    for seed, lr in ((1, 0.1), (2, 0.01)):
        overrides = {"optimizer.lr": lr, "seed": seed}
        metrics = {"loss": 1.0}
        write_run(
            tmp_path / str(seed), config={"optimizer": {"lr": lr}}, seed=seed, overrides=overrides, metrics=metrics
        )
    words = content(instrument.load(tmp_path))[0]
    assert words["pairs"] == []
    assert list(words["unpaired"]) == ["optimizer.lr"]
    assert "no run with optimizer.lr=0.01 has seed 1" in words["unpaired"]["optimizer.lr"]


def test_swept_mappings_have_a_column_per_differing_field(tmp_path: Path) -> None:
    for job, norm in enumerate((1.0, 2.0)):
        spec = {**CLIP, "norm": norm}
        write_run(tmp_path / str(job), config={"hooks": {"tame": spec}}, overrides={"hooks.tame": spec})
    run = instrument.load(tmp_path)
    assert run.runs["hooks.tame.norm"].tolist() == [1.0, 2.0]
    assert [name for name in run.runs if name.startswith("hooks.")] == ["hooks.tame.norm"]
    words, data = content(run)
    assert words["overrides"] == ["hooks.tame.norm"]
    assert [row["overrides"] for row in words["rows"]] == [["1.0"], ["2.0"]]
    assert [row["overrides"] for row in data["runs"]] == [{"hooks.tame.norm": 1.0}, {"hooks.tame.norm": 2.0}]
    metrics = {"loss": 0.5}
    write_run(tmp_path / "2", config={"hooks": {"tame": None}}, overrides={"hooks.tame": None}, metrics=metrics)
    write_run(tmp_path / "3", config={"hooks": {"tame": {**CLIP, "norm": 3.0}}}, metrics=metrics)
    words = content(instrument.load(tmp_path))[0]
    assert [row["overrides"] for row in words["rows"]] == [["1.0"], ["2.0"], ["null"], [""]]
    assert [(pair["hook"], pair["settings"]) for pair in words["pairs"]] == [("tame", "norm: 3.0")]


# --------------------------------------------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> instrument.Run:
    return train(tmp_path_factory.mktemp("small") / "run", deep(2), {"acts": EVERYTHING["acts"]}, steps=1)


def test_command_writes_into_the_run_folder_and_prints_the_path(
    small_run: instrument.Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(small_run.path)]) == 0
    assert capsys.readouterr().out.startswith(f"{small_run.path / 'report.html'}  (")
    assert (small_run.path / "report.html").read_text().startswith("<!doctype html>")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        instrument.load(small_run.path).stats  # noqa: B018 - the report is not an unknown file


def test_command_writes_to_out_and_opens_the_report(
    small_run: instrument.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    assert main([str(small_run.path), "--out", str(tmp_path / "mine.html"), "--open"]) == 0
    assert opened == [(tmp_path / "mine.html").as_uri()]


def test_command_reports_errors(small_run: instrument.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "folder not found" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main([str(small_run.path), "--out", str(tmp_path / "file" / "folder.html")]) == 1
    assert capsys.readouterr().err == f"{tmp_path / 'file'}: File exists\n"
    assert main([str(small_run.path), "--out", str(tmp_path / "no" / "folder.html")]) == 0
    assert (tmp_path / "no" / "folder.html").exists()
    with pytest.raises(NoRunError):
        make(tmp_path)


def test_command_without_plotly_names_the_package(
    small_run: instrument.Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from instrument.report import make_report

    make_report._plotly.cache_clear()
    monkeypatch.setitem(sys.modules, "plotly", None)
    assert main([str(small_run.path)]) == 1
    assert pip_command("report") in capsys.readouterr().err


TINY = ("model=mlp", "model.sizes=[64,8,10]", "data=digits", "train.steps=2")
REPORTED = (*TINY, "report=true", "hydra.run.dir=out")


def test_run_with_report_is_refused_without_plotly(cli: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instrument.report.make_report._plotly_script", missing_plotly)
    answer = cli(*REPORTED)
    assert answer.code == 2
    assert pip_command("report") in answer.err
    assert "the data recorded so far" not in answer.err
    assert not (Path("out") / "run.json").exists()


def missing_plotly() -> Path:
    raise InstrumentError(f"a report requires plotly: {pip_command('report')}")


@pytest.mark.slow
def test_run_with_report_prints_its_path(cli: Callable[..., Answer]) -> None:
    answer = cli(*REPORTED)
    assert answer.code == 0, answer.err
    assert answer.out.splitlines()[-1] == "report      out/report.html"
    assert data_of(Path("out/report.html").read_text())["metrics"]["train"]["first"] == [0, 1]


def test_report_module_is_runnable(
    small_run: instrument.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["", str(small_run.path), "--out", str(tmp_path / "r.html")])
    monkeypatch.delitem(sys.modules, "instrument.report.__main__", raising=False)
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module("instrument.report", run_name="__main__")
    assert stopped.value.code == 0
    shown = capsys.readouterr()
    assert shown.out.startswith(str(tmp_path / "r.html"))
    assert shown.err == ""


def test_report_is_a_frame_in_a_notebook(small_run: instrument.Run) -> None:
    report = make(small_run)
    assert isinstance(report, Report)
    assert repr(report) == "Report()"  # not the page, which has megabytes
    shown = report._repr_html_()
    assert shown.startswith("<iframe srcdoc=")
    assert '"<!doctype' not in shown
    assert "&lt;!doctype html&gt;" in shown
