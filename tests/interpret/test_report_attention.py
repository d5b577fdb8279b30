"""Attention maps on the page of a run, and the effect of an intervention by location on the page of a sweep."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from attached_runs import forward_steps
from hook_runs import Calls
from report_fixtures import data_of, new_page
from torch import nn

import instrument
from instrument.interpret.panels import PIXELS
from instrument.report import make
from instrument.report.panels import RUN_PANELS, SWEEP_PANELS, Panel

if TYPE_CHECKING:
    from playwright.sync_api import Browser

RECORD = {"kind": "forward", "action": "record", "stats": "none", "tensors": True}


def run_of(folder: Path, length: int, **maps: str) -> instrument.Run:
    torch.manual_seed(0)
    model = Calls(
        lambda embed, scores, probabilities, tokens: probabilities(scores(embed(tokens)[:, None])),
        **{"embed": nn.Embedding(100, length), "scores": nn.Conv2d(1, 3, 1), "probabilities": nn.Softmax(-1)},
    )
    hooks = {
        "maps": {**RECORD, "layers": ["scores", "probabilities"], **maps},
        "tokens": {**RECORD, "layers": ".", "kind": "forward_pre"},
    }
    ids, tokens = [[4, 5], [9, 8]], torch.arange(2 * length).reshape(2, length) % 90
    return forward_steps(model, hooks, [tokens + first for first, _ in ids], sample_ids=ids, out=folder).run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> instrument.Run:
    return run_of(tmp_path_factory.mktemp("attention") / "run", 5)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> instrument.Run:
    """A sweep over two layers and three units, without one of the runs, and with a baseline."""
    folder = tmp_path_factory.mktemp("patching")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    places: list[Any] = [(layer, unit) for layer in "01" for unit in range(3)][:-1]
    for place in (*places, None):
        zero = {"kind": "forward", "action": "modify", "fn": "zero"}
        hooks = {"ablate": {**zero, "layers": place[0], "units": [place[1]]}} if place else {}
        hooks["kept"] = {**RECORD, "layers": "1"}
        out = folder / ("base" if place is None else "_".join(map(str, place)))
        with instrument.attach(model, hooks, out=out) as probe:
            probe.end_step(loss=model(torch.ones(2, 3)).square().mean())
    return instrument.load(folder)


def test_page_of_a_run_has_the_attention_of_the_last_step(run: instrument.Run) -> None:
    data = data_of(make(run).html)
    (layer,) = data["panels"]["attention"]
    expected = run.tensors(layer="probabilities", step=1)["values"].iloc[0][0]
    np.testing.assert_allclose(layer["z"], expected, rtol=1e-5)
    assert (layer["location"], layer["step"], layer["sample"], layer["heads"]) == ("probabilities", 1, "9", [0, 1, 2])
    assert layer["keys"] == [[i, i + 9] for i in range(5)]
    assert [one["location"] for one in data["maps"]["shown"]] == ["scores", "scores"]  # not shown twice


def test_page_has_the_attention_of_hooks_with_this_role(run: instrument.Run, tmp_path: Path) -> None:
    data = data_of(make(run_of(tmp_path / "run", 5, kind="function", role="attention")).html)
    (layer,), (expected,) = (each["panels"]["attention"] for each in (data, data_of(make(run).html)))
    assert layer["location"] == "probabilities[softmax.0]"
    assert layer["z"] == expected["z"]
    assert not data["maps"]["shown"]


def test_long_sequences_are_averaged(tmp_path: Path) -> None:
    (layer,) = data_of(make(run_of(tmp_path / "run", 2 * PIXELS)).html)["panels"]["attention"]
    assert np.shape(layer["z"]) == (3, PIXELS, PIXELS)


@pytest.mark.slow
def test_page_of_a_sweep_has_the_effect_by_location(sweep: instrument.Run) -> None:
    page = make(sweep).html
    assert '<a href="#panel-by_location">' in page
    section = page[page.index('<section id="panel-by_location">') : page.index('<section id="training">')]
    assert section.count("</svg>") == 1  # no accuracy was recorded


@pytest.mark.slow
def test_panels_of_other_code_are_shown(
    run: instrument.Run, sweep: instrument.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(run: instrument.Run) -> None:
        raise ValueError(f"<{run.path.name}>")

    of_run = {
        "curve_of_mine": lambda run: Panel("<b>mine</b>", script="RUN.push(mine)", data=[1]),
        "none": lambda run: None,
    }
    monkeypatch.setattr(RUN_PANELS, "_entries", {**of_run, "attention": RUN_PANELS["attention"], "broken": broken})
    monkeypatch.setattr(RUN_PANELS, "places", {**RUN_PANELS.places, "broken": "here"})
    page = make(run).html
    assert '<a href="#panel-curve_of_mine">Curve of mine</a>' in page
    assert '<section id="panel-curve_of_mine"><h2>Curve of mine</h2>\n  <b>mine</b>' in page
    assert "RUN.push(mine)" in page
    assert "here failed: ValueError: &lt;run&gt;" in page
    assert [*data_of(page)["panels"]] == ["attention", "curve_of_mine", "broken"]
    monkeypatch.setattr(SWEEP_PANELS, "_entries", {"runs": lambda run: f"{len(run.folders)} runs"})
    assert f"<h2>Runs</h2>\n  {len(sweep.folders)} runs" in make(sweep).html


@pytest.mark.slow
def test_charts_are_drawn(browser: Browser, run: instrument.Run, sweep: instrument.Run, tmp_path: Path) -> None:
    page = new_page(browser)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text))
    page.goto(make(run).save(tmp_path / "run.html").as_uri())
    page.wait_for_selector("html[data-drawn=yes]")
    assert page.locator("#panel-attention .chart").count() == 3
    assert page.locator("#panel-attention h3").all_text_contents() == ["Head 0", "Head 1", "Head 2"]
    assert "sample 9" in page.locator("#attention-note").inner_text()
    page.goto(make(sweep).save(tmp_path / "sweep.html").as_uri())
    page.wait_for_selector("html[data-drawn=yes]")
    assert page.locator("#panel-by_location svg").is_visible()
    page.close()
    assert errors == []
