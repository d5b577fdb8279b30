"""The option `--json` of the verbs that print."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import Answer, Call, _run_in, run_in

import instrument
from instrument.commands import diff, findings, sweep, verbs, watch

MODEL = ("model=mlp", "data=digits", "data.slice.stop=64", "quiet=true", "hooks=activations")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, `runs/0` with a non-finite loss, and `runs/1`: the jobs of a sweep."""
    folder = tmp_path_factory.mktemp("json")
    rates = "optimizer.lr=1e30,0.05"
    answer = run_in(folder, "-m", *MODEL, "train.steps=4", rates, "rules=default", "hydra.sweep.dir=runs").expect(0)
    assert "error loss not finite" in answer.out
    return folder


def read(answer: Answer) -> Any:
    """Return what a verb printed."""
    return json.loads(answer.out)


@pytest.mark.slow
def test_findings(folder: Path, call: Call) -> None:
    found = read(call(findings.main, folder / "runs/0", "--json").expect(4))
    assert found[0]["rule"] == "non_finite"
    assert found[0]["step"] in (1, 2)
    assert found[0]["severity"] == "error"
    assert (found[0]["layer"], found[0]["hook"], found[0]["role"]) == (None, "", "")
    assert read(call(findings.main, folder / "runs/1", "--json").expect(0)) == []


def test_findings_of_damaged_files_are_no_success(call: Call, tmp_path: Path) -> None:
    with instrument.attach(torch.nn.Linear(2, 1), {}, out=tmp_path / "run") as probe:
        probe.end_step(loss=1.0)
    assert read(call(findings.main, tmp_path / "run", "--json").expect(0)) == []
    (part,) = (tmp_path / "run" / "metrics").glob("*.parquet")
    part.write_bytes(part.read_bytes()[:50])
    with pytest.warns(instrument.InstrumentWarning, match="cannot be read"):
        assert read(call(findings.main, tmp_path / "run", "--json").expect(1)) == []


@pytest.mark.slow
def test_findings_have_the_location_and_the_severity_of_the_run(call: Call, tmp_path: Path) -> None:
    hooks = {"outputs": {"layers": "1", "kind": "forward", "action": "record"}}
    rule = {"watch": "outputs", "stat": "l2", "above": -1.0}
    rules = {"loud": {**rule, "then": "stop"}, "quiet": {**rule, "then": {"disable": "outputs"}}}
    model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(2, 1))
    with (
        pytest.warns(instrument.InstrumentWarning, match="loud"),
        instrument.attach(model, hooks, out=tmp_path / "run", rules=rules) as probe,
    ):
        model(torch.ones(4, 2))
        probe.end_step(loss=1.0)
    found = read(call(findings.main, tmp_path / "run", "--json").expect(4))
    assert [(each["rule"], each["severity"]) for each in found] == [("loud", "warning"), ("quiet", "info")]
    assert [(each["layer"], each["hook"], each["role"]) for each in found] == [("1", "outputs", "output")] * 2
    expected = instrument.load(tmp_path / "run").findings.query("rule != ''")
    assert expected[["rule", "severity", "layer", "role"]].values.tolist() == [
        ["loud", "warning", "1", "output"],
        ["quiet", "info", "1", "output"],
    ]


@pytest.mark.slow
def test_diff(folder: Path, call: Call) -> None:
    a, b = folder / "runs/0", folder / "runs/1"
    compared = read(call(diff.main, a, b, "--json").expect(1))
    expected = instrument.diff(a, b)
    assert compared["summary"] == str(expected)
    assert (compared["is_identical"], compared["is_within_tolerance"]) == (False, False)
    assert [row["layer"] for row in compared["layers"]] == expected.layers["layer"].tolist()
    assert {row["metric"] for row in compared["metrics"]} == {*expected.metrics["metric"]}


def test_sweep(folder: Path, call: Call) -> None:
    jobs = read(call(sweep.main, folder / "runs", "--json").expect(0))
    assert [(job["name"], job["status"], job["warnings"] > 0) for job in jobs] == [
        ("0", "done", True),
        ("1", "done", False),
    ]
    runs = instrument.load(folder / "runs")
    assert runs.runs["warnings"].tolist() == [job["warnings"] for job in jobs]
    counts = [int((run.events.severity == "warning").sum()) for run in map(instrument.load, runs.folders)]
    assert runs.runs["warnings"].tolist() == counts
    assert "optimizer.lr=1e30" in jobs[0]["overrides"] or "optimizer.lr=1e+30" in jobs[0]["overrides"]
    with pytest.raises(SystemExit, match="2"):
        sweep.main([str(folder / "runs"), "--rerun", "--json"])


def test_watch(folder: Path, call: Call) -> None:
    run = instrument.load(folder / "runs/1")
    state = read(call(watch.main, folder / "runs/1", "--once", "--json").expect(0))
    assert (state["status"], state["step"], state["steps"]) == ("done", 4, 4)
    assert state["metrics"]["train"]["loss"] == run.metrics.query("phase == 'train'")["loss"].iloc[-1]
    jobs = read(call(watch.main, folder / "runs", "--once", "--json").expect(0))
    assert [(job["name"], job["step"]) for job in jobs] == [("0", 4), ("1", 4)]
    with pytest.raises(SystemExit):
        watch.main([str(folder), "--json"])


def test_plan_and_verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few_repeats: None) -> None:
    assert few_repeats is None
    monkeypatch.setattr("sys.argv", ["instrument", "plan", "--json", "+exp=a"])
    verbs.run_verb()
    assert sys.argv == ["instrument", "plan=json", "+exp=a"]
    printing = "from instrument.training.models import MLP\n\n\ndef make(**given):\n    print('made')\n    return MLP(**given)\n"
    (tmp_path / "printing.py").write_text(printing)
    model = (*MODEL, "model._target_=printing.make")
    planned = read(run_in(tmp_path, *model, "train.steps=4", "plan=json").expect(0))
    (hook,) = planned["hooks"]
    assert hook["at"] == [".", "layers", *(f"layers.{at}" for at in ("0", "0.0", "0.1", "1", "1.0", "1.1", "2"))]
    assert planned["rows"] == hook["rows"] == len(hook["at"])  # every 10 steps
    assert hook["tables"] == ["stats"]
    verified = read(_run_in(tmp_path, "instrument.commands.verify", [*model, "train.steps=2", "--json"]).expect(0))
    assert (verified["holds"], verified["steps"], verified["hooks"]) == (True, 2, ["activations"])


def test_print_json_converts_values(capsys: pytest.CaptureFixture[str]) -> None:
    frame = pd.DataFrame({"a": [1, 2], "b": [0.5, math.nan]})
    values = {
        "frame": frame,
        "path": Path("a/b"),
        "array": np.array([1.0, math.inf]),
        "number": np.int64(3),
        5: (True,),
    }
    expected = {
        "frame": [{"a": 1, "b": 0.5}, {"a": 2, "b": None}],
        "path": "a/b",
        "array": [1.0, None],
        "number": 3,
        "5": [True],
    }
    verbs.print_json(values)
    assert json.loads(capsys.readouterr().out) == expected


def test_print_json_writes_ascii(capsys: pytest.CaptureFixture[str]) -> None:
    values = {"sparkline": "▁▂█", "path of undecodable bytes": os.fsdecode(b"runs/\xff")}
    verbs.print_json(values)
    written = capsys.readouterr().out
    assert written.isascii()
    assert json.loads(written) == values
