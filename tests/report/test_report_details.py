"""Correctness of the report: order, missing and non-finite values, limits on size, and charts in the browser."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hook_runs import Calls
from report_fixtures import IMAGE, convolutional, data_of, deep, new_page, train
from run_folders import write_run
from torch import nn

import instrument
from instrument import ConfigError, InstrumentWarning
from instrument.analysis.features import settings_of
from instrument.analysis.run_history import history_of
from instrument.report import Report, make
from instrument.report.charts import metric_curves
from instrument.storage.run_record import read_record

ACTS = {"layers": "**", "kind": "forward", "action": "record"}
GRADIENTS = {"layers": "**", "kind": "parameter_grad", "action": "record"}


def set_nan_at(at: int) -> Callable[[int, nn.Module], None]:
    def set_nan(step: int, model: nn.Module) -> None:
        if step == at:
            with torch.no_grad():
                next(model.parameters()).fill_(math.nan)

    return set_nan


def change_info(folder: Path, **info: Any) -> None:
    file = folder / "run.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **info}))


def test_entries_of_wrong_types_are_reported(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", config={"model": {"_target_": "m"}}, used={"data": {"train_samples": 2}})
    wrong = {"status": None, "started": 5, "config": [1], "replay": True, "command": {"a": 1}, "advice": "x"}
    change_info(folder, **wrong, data={"train_samples": 3})
    run = instrument.load(folder)
    with pytest.warns(InstrumentWarning, match=r"run\.json: config has a wrong type, list: skipped"):
        assert make(run).html
    assert [problem.split()[1] for problem in run.problems] == ["config", "replay", "advice", "started", "command"]
    assert run.info["status"] == "unknown"
    with pytest.raises(ConfigError, match=r"run\.json: overhead has a wrong type, str"):
        read_record(write_run(tmp_path / "s", used={"overhead": "1%"}), "resume")
    with pytest.raises(ConfigError, match=r"run\.json: config\.train has a wrong type, int"):
        read_record(write_run(tmp_path / "t", config={"train": 3}), "resume")
    for name, hooks in (("a", {"a": 3, "b": {}}), ("0", [3, {}])):
        run = instrument.load(write_run(tmp_path / name, config={"hooks": hooks}))
        assert run.findings.empty
        assert [problem.split(": ", 1)[1] for problem in run.problems] == [
            f"config.hooks.{name} has a wrong type, int: skipped"
        ]


def test_hooks_of_a_record_can_be_a_list(tmp_path: Path) -> None:
    hooks = [{"kind": "forward", "action": "record"}, {"name": "last", "kind": "forward", "action": "print"}]
    run = instrument.load(write_run(tmp_path / "r", config={"hooks": hooks}))
    assert [settings_of(run.files[0], name) for name in ("hooks_0", "last", "hooks_1")] == [*hooks, {}]
    assert not run.problems
    assert read_record(tmp_path / "r", "resume")["config"]["hooks"] == hooks


def test_full_disk_keeps_the_previous_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, write = tmp_path / "report.html", Path.write_bytes
    file.write_text("previous")

    def fail(path: Path, content: bytes) -> int:
        write(path, content[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(OSError, match=rf"No space left on device: '{file}'"):
        Report("new").save(file)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["previous"]
    monkeypatch.undo()
    file.chmod(0o600)
    link, loop = tmp_path / "link.html", tmp_path / "loop.html"
    link.symlink_to(file)
    Report("new").save(link)
    assert link.is_symlink()
    assert (file.read_text(), file.stat().st_mode & 0o777) == ("new", 0o600)
    loop.symlink_to(loop)
    Report("new").save(loop)
    assert loop.read_text() == "new"


def test_last_step_is_kept_if_nothing_is_finite(tmp_path: Path) -> None:
    run = train(tmp_path / "r", convolutional(), {"g": GRADIENTS}, shape=(3, 8, 8), at_step=set_nan_at(3))
    (series,) = data_of(make(run).html)["series"]
    assert [row[-1] for row in series["statistics"]["l2"]] == [None] * 4
    train(tmp_path / "s" / "a", convolutional(), {"g": GRADIENTS}, shape=(3, 8, 8), at_step=set_nan_at(3))
    train(tmp_path / "s" / "b", convolutional(), {"g": GRADIENTS}, shape=(3, 8, 8))
    (series,) = data_of(make(tmp_path / "s").html)["series"]
    last, largest = series["statistics"]["l2"]["last"], series["statistics"]["l2"]["largest"]
    assert last[0] == [None] * 4
    assert all(value is not None for value in (*last[1], *largest[0]))


def test_missing_metric_is_not_marked_as_non_finite(tmp_path: Path) -> None:
    rows = [{"step": step, "phase": "train", "loss": None if step % 2 else 1.0} for step in range(6)]
    rows += [{"step": step, "phase": "eval", "loss": math.nan} for step in (3, 6)]
    rows[4]["grad_norm"] = math.inf
    result = metric_curves(history_of(instrument.load(write_run(tmp_path / "r", rows={"metrics": rows}))))
    assert result["train"]["bad"] == {"grad_norm": [4]}
    assert result["eval"]["bad"] == {"loss": [3, 6]}
    assert result["eval"]["statistics"] == {}


def test_mean_of_grouped_steps_uses_finite_values(tmp_path: Path) -> None:
    rows = [{"step": step, "phase": "train", "loss": math.nan if step == 1 else 2.0} for step in range(32)]
    result = metric_curves(history_of(instrument.load(write_run(tmp_path / "r", rows={"metrics": rows})), room=16))
    assert result["train"]["statistics"]["loss"] == [[2.0] * 16]
    assert result["train"]["bad"] == {"loss": [1]}


@pytest.mark.slow
def test_every_layer_has_a_picture_and_images_are_stored_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = 40_000
    monkeypatch.setattr("instrument.report.run_page.MAX_VALUES", room)
    convolutions = [layer for _ in range(12) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())]
    model = nn.Sequential(nn.Conv2d(3, 8, 1), *convolutions, nn.Flatten(), nn.Linear(8 * 8 * 8, 2))
    hooks = {
        "maps": {**ACTS, "types": ["Conv2d", "ReLU"], "stats": "none", "tensors": True, "samples": 2},
        "image": IMAGE,
    }
    run = train(tmp_path / "r", model, hooks, steps=6, shape=(3, 8, 8))
    maps = data_of(make(run).html)["maps"]
    shown = maps["shown"]
    assert (maps["locations"], maps["pictures"]) == (25, 150)
    assert len({one["location"] for one in shown}) == 25
    assert len(shown) < 150
    numbers = sum(len(row) for one in shown for row in one["mosaic"]["z"])
    assert numbers < 1.3 * room
    assert len(maps["images"]) == len({one["step"] for one in shown})
    assert {one["samples"] for one in shown} == {2}


@pytest.mark.slow
def test_gradient_maps_are_not_shown_as_inputs(tmp_path: Path) -> None:
    hooks = {
        "saliency": {"layers": "2", "kind": "tensor", "role": "input", "action": "record", "tensors": True},
        "maps": {"layers": "2", "kind": "forward", "action": "record", "tensors": True, "samples": 1},
    }
    model = nn.Sequential(nn.Conv2d(3, 1, 3), nn.ReLU(), nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(32, 2))
    maps = data_of(make(train(tmp_path / "r", model, hooks, steps=1, shape=(3, 8, 8))).html)["maps"]
    assert maps["images"] == []
    assert {one["what"] for one in maps["shown"]} == {"gradient maps", "feature maps"}


@pytest.mark.slow
def test_layer_order_is_from_the_step_with_most_layers(tmp_path: Path) -> None:
    hooks = {"late": {**ACTS, "layers": ["0", "1", "2", "3"]}, "early": {**ACTS, "layers": "3"}}
    hooks["late"]["start"] = 3
    data = data_of(make(train(tmp_path / "r", convolutional(), hooks, shape=(3, 8, 8))).html)
    late = next(series for series in data["series"] if series["hook"] == "late")
    assert late["locations"] == ["0", "1", "2", "3"]


def test_several_calls_in_a_step_are_marked(tmp_path: Path) -> None:
    model = Calls(lambda layer, x: layer(layer(x)), layer=nn.Linear(4, 4))
    hooks = {"twice": {**ACTS, "layers": "layer"}, "once": {**ACTS, "layers": "."}}
    twice, once = data_of(make(train(tmp_path / "r", model, hooks, steps=1)).html)["series"]
    assert (twice["hook"], once["hook"]) == ("twice", "once")
    assert twice["several"]
    assert not once["several"]


def test_rows_of_several_processes_are_marked_and_steps_counted_once(tmp_path: Path) -> None:
    for rank in range(2):
        where = [{"step": step, "rank": rank, "hook": "h", "layer": "0", "phase": "train"} for step in range(3)]
        spread = [
            {**at, "kind": "forward", "role": "output", "low": 0.0, "high": 1.0 + rank, "counts": [1]} for at in where
        ]
        rows = {
            "stats": [{**at, "kind": "forward", "role": "output", "mean": float(rank)} for at in where],
            "distributions": spread,
            "effects": [{**at, "kind": "forward", "role": "output", "norm_after": float(rank)} for at in where],
        }
        write_run(tmp_path / str(rank), rows=rows)
    for file in (tmp_path / "1").glob("*/*.parquet"):
        file.rename(tmp_path / "0" / file.parent.name / "part-0001-000000.parquet")
    data = data_of(make(tmp_path / "0").html)
    (series,), (spread,), (effect,), (acted,) = (data[key] for key in ("series", "distributions", "effects", "acted"))
    assert series["several"]
    assert effect["several"]
    assert series["statistics"]["mean"] == [[0.5] * 3]
    assert (spread["of"], spread["several"], spread["statistics"]["high"]) == (3, True, [[1.0] * 3])
    assert acted["count"] == 3
    next((tmp_path / "0" / "distributions").glob("part-0000-*.parquet")).unlink()  # not written yet
    (spread,) = data_of(make(tmp_path / "0").html)["distributions"]
    assert spread["statistics"]["high"] == [[2.0] * 3]


def test_damaged_file_of_a_job_is_reported_on_the_sweep_page(tmp_path: Path) -> None:
    for name in ("a", "b"):
        train(tmp_path / name, deep(2), {"h": ACTS}, steps=1)
    part = next((tmp_path / "b" / "stats").glob("*.parquet"))
    part.write_bytes(part.read_bytes()[:50])
    page = make(tmp_path).html
    assert f"b/stats/{part.name}: cannot be read" in page[: page.index("<nav")]


@pytest.mark.slow
def test_list_of_failed_runs_is_shortened(tmp_path: Path) -> None:
    train(tmp_path / "0", deep(2), {"h": ACTS}, steps=1)
    for number in range(1, 12):
        used = {"error": f"HookError: number {number}", "name": f"failed_{number}"}
        write_run(tmp_path / str(number), status="failed", used=used)
    page = make(tmp_path).html
    assert "0, failed_1, failed_2, ... (12 in all): 12 runs" in page
    head = page[: page.index("<nav")]
    assert head.count('<li class="error">') == 9
    assert "3 more runs did not finish" in head
    assert page.count('class="status failed"') == 11


def test_overrides_of_training_are_shown_also_infinite_values(tmp_path: Path) -> None:
    for name, lr in (("a", math.inf), ("b", 0.1)):
        train(tmp_path / name, deep(2), {"h": ACTS}, steps=1)
        change_info(tmp_path / name, overrides={"lr": lr, "report": name == "a", "sink.tensorboard": name == "a"})
    data = data_of(make(tmp_path).html)
    assert data["overrides"] == ["lr"]
    assert [run["overrides"]["lr"] for run in data["runs"]] == [".inf", 0.1]


def open_html(browser: Any, html: str, file: Path) -> Any:
    file.write_text(html)
    page = new_page(browser)
    errors: list[str] = []
    page.on("console", lambda message: errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(file.as_uri())
    page.wait_for_selector("html[data-drawn=yes]")
    assert errors == []
    return page


@pytest.mark.slow
def test_links_in_a_frame_stay_in_the_frame(browser: Any, tmp_path: Path) -> None:
    report = make(train(tmp_path / "r", deep(2), {"h": ACTS}))
    (tmp_path / "notebook.html").write_text(f"<!doctype html><body>notebook{report._repr_html_()}</body>")
    page = new_page(browser)
    page.goto((tmp_path / "notebook.html").as_uri())
    frame = page.frame_locator("iframe")
    frame.locator("html[data-drawn=yes]").wait_for()
    frame.locator("nav a[href='#coverage']").click()
    assert frame.locator("#coverage h2").inner_text() == "Coverage"
    assert page.frames[1].url == "about:srcdoc"
