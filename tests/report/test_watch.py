"""`python -m instrument.watch`: the state of a run or a sweep as text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch
from rich.console import Console
from run_folders import write_run
from torch import nn

import instrument
from instrument.analysis.overview import MISSING, sparkline
from instrument.commands import watch
from instrument.config.rules import RULES
from instrument.report.live_run import LiveRun, frame
from instrument.report.live_server import LivePage
from instrument.report.live_sweep import LiveSweep
from instrument.storage.lock import FolderLock
from instrument.training.sweep_jobs import SweepJob

NAN = float("nan")
STEPS = 8


def statistic(layer: str, step: int, std: float | None, **more: object) -> dict[str, object]:
    return {"layer": layer, "step": step, "std": std, "numel": 4, "nan_count": 0, "inf_count": 0, **more}


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    steady = [statistic("steady", step, 1.0) for step in range(STEPS)]
    growing = [statistic("growing", step, 2.0**step) for step in range(STEPS)]
    broken = [statistic("broken", step, 1.0 if step < 5 else None, nan_count=4 * (step >= 5)) for step in range(STEPS)]
    loss = [{"step": step, "loss": 1.0 / (1 + step), "lr": 0.1, "seconds": 2.0} for step in range(STEPS)]
    message = "values are [not] finite"
    events = [
        {"rule": "non_finite", "layer": "broken", "message": message, "severity": "warning", "step": step}
        for step in (5, 6, 7)
    ]
    events.append({"rule": "resumed", "message": "the run continues", "severity": "info"})
    rows = {"stats": [*steady, *growing, *broken], "metrics": loss, "events": events}
    return write_run(
        tmp_path / "run", config={"train": {"steps": 20}}, used={"name": "mine"}, rows=rows, status="running"
    )


@pytest.fixture
def running(run_folder: Path) -> Iterator[Path]:
    lock = FolderLock(run_folder)
    assert lock.acquire()
    yield run_folder
    lock.release()


def test_frame_shows_findings_before_the_layers_that_changed_most(
    running: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert watch.main([str(running), "--once"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "mine  running  step 8 of 20  0:00:24 left"
    loss = next(line.split() for line in lines if line.startswith("loss"))
    assert loss == ["loss", "█▄▂▂▁▁▁▁", "0.125"]
    finding = next(i for i, line in enumerate(lines) if line.startswith("non_finite"))
    assert lines[finding].split(maxsplit=3)[1:] == ["broken", "5", "values are [not] finite (3 events)"]
    layers = [line.split() for line in lines[finding:] if line.startswith("seen")]
    assert [layer[1] for layer in layers] == ["broken", "growing", "steady"]
    assert layers[0][3:] == ["▅▅▅▅▅!!!"]  # without a last value
    assert layers[1][3:] == ["▁▂▃▄▅▆▇█", "128", "10.7"]
    assert layers[2][3:] == ["▅▅▅▅▅▅▅▅", "1", "1"]


def test_reader_that_closes_the_output_is_not_an_error_of_the_port(
    running: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def close(state: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(watch, "print_json", close)
    with pytest.raises(BrokenPipeError):
        watch.main([str(running), "--once", "--json"])
    assert capsys.readouterr().err == ""


def test_page_shows_how_many_steps_follow(running: Path) -> None:
    live = LiveRun(running)
    live.refresh()
    assert "<dt>steps</dt><dd>8 of 20</dd>" in LivePage(live).html()


def test_consequences_are_below_their_cause_and_its_advice_follows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spike = {"rule": "spike", "layer": "", "message": "loss spike: at step 4: 40", "severity": "warning", "value": 40.0}
    units = {**spike, "rule": "units", "layer": "a", "location": "a output (seen)"}
    units["message"] = "dead units: at step 9 in a output (seen): 60.0%"
    config = {"rules": {"units": {"rule": "dead_units", "for": 1}, "spike": {"rule": "loss_spike"}}}
    losses = [{"step": step, "loss": loss} for step, loss in enumerate((1.0, 1.0, 1.0, 1.0, 40.0, 2.0))]
    rows = {"events": [{**units, "step": 9}, {**spike, "step": 4}], "metrics": losses}
    assert watch.main([str(write_run(tmp_path / "run", config=config, rows=rows)), "--once"]) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    start = lines.index("Findings")
    assert lines[start + 2].split() == ["loss", "spike", "training", "4", "40"]
    assert lines[start + 3].startswith("  dead units")
    assert lines[start + 4] == "loss over the steps: ▁▁▁▁█▁"
    assert lines[start + 5] == f"Next: {RULES['loss_spike'].advice}"


def test_masked_scores_are_no_problem_and_entropy_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    attention = {"hook": "weights", "kind": "function", "role": "attention", "row_entropy": 2.0}
    scores = {"hook": "scores", "kind": "function", "role": "scores", "max": 3.0}
    rows = [statistic("head", step, None, **attention) for step in range(2)]
    rows += [statistic("head", step, None, **scores) | {"inf_count": 3} for step in range(2)]
    rows += [statistic("broken", step, None, **scores) | {"nan_count": 1, "inf_count": 1} for step in range(2)]
    assert watch.main([str(write_run(tmp_path / "run", rows={"stats": rows})), "--once"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "head" in line or "broken" in line]
    assert sorted(line[:4] for line in lines) == [
        ["scores", "broken", "max", "!!"],
        ["scores", "head", "max", "▅▅"],
        ["weights", "head", "row_entropy", "▅▅"],
    ]


def test_small_screen_shows_the_most_important_layers(running: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from instrument.report import live_run

    live = LiveRun(running)
    live.refresh()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(live_run, "FEWEST_LAYERS", 1)
        Console(width=120).print(frame(live, height=10))
    out = capsys.readouterr().out
    assert "Layers, largest change first (1 of 3)" in out
    assert "growing" not in out


def test_killed_run_and_folder_without_a_run_end_the_watch(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert watch.main([str(run_folder)]) == 1
    out = capsys.readouterr().out
    assert "killed" in out
    assert out.endswith("\n")
    (tmp_path / "empty").mkdir()
    assert watch.main([str(tmp_path / "empty")]) == 2
    assert "no run.json in or below" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--port", "8000"], ["--control"]])
def test_options_of_the_page_require_it(option: list[str], running: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        watch.main([str(running), *option])
    assert f"{option[0]} requires --web" in capsys.readouterr().err


def test_watch_ends_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watch, "INTERVAL", 0.01)
    model = nn.Linear(4, 2)
    codes: list[int] = []
    hooks = {"outputs": {"layers": "**", "kind": "forward", "action": "record"}}
    with instrument.attach(model, hooks, out=tmp_path / "run") as probe:
        watcher = Thread(target=lambda: codes.append(watch.main([str(tmp_path / "run")])))
        watcher.start()
        for _ in range(5):
            probe.end_step(loss=model(torch.randn(3, 4)).sum())
    watcher.join()
    assert codes == [0]
    out = capsys.readouterr().out
    assert "done  step 5" in out
    assert "outputs" in out


def test_sweep_is_a_table_of_jobs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, status in enumerate(("done", "failed", "running")):
        rows = [{"step": step, "loss": 1.0 / (step + 1 + number)} for step in range(4)]
        rows.append({"step": 4, "phase": "eval", "loss": 0.5, "accuracy": 0.75})
        overrides = {"optimizer.lr": 0.1 * (1 + number)}
        config = {"train": {"steps": 9}}
        write_run(
            tmp_path / "sweep" / str(number), config=config, status=status, overrides=overrides, rows={"metrics": rows}
        )
    lock = FolderLock(tmp_path / "sweep" / "2")
    assert lock.acquire()
    assert watch.main([str(tmp_path / "sweep"), "--once"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:4]] == [["2", "running"], ["1", "failed"], ["0", "done"]]
    assert "optimizer.lr=0.1 " in lines[3]
    assert lines[3].split()[3:] == ["4", "of", "9", "█▃▁▁", "0.5", "0.75"]
    assert lines[-1] == "3 jobs: 1 done, 1 failed, 1 running"
    lock.release()
    assert watch.main([str(tmp_path / "sweep")]) == 1
    assert "killed" in capsys.readouterr().out


def test_sweep_on_a_narrow_screen_shortens_the_overrides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (1, 2):
        overrides = {"optimizer.lr": f"{seed}" * 200}
        rows = {"metrics": [{"step": step, "loss": 0.5} for step in range(4)]}
        write_run(tmp_path / str(seed), overrides=overrides, rows=rows)
    sweep, sweep_frame = watch.open_view(str(tmp_path))
    sweep.refresh()
    Console(width=80).print(sweep_frame())
    heading, first, *_ = capsys.readouterr().out.splitlines()
    assert heading.split()[:3] == ["job", "status", "overrides"]
    assert first.split()[:2] == ["1", "done"]
    assert first.split()[2:] == [first.split()[2], "4", "▅▅▅▅", "0.5"]
    assert first.split()[2].endswith("1…")


def test_long_names_are_abbreviated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {"stats": [statistic("a" * 80 + name, 0, 1.0) for name in (".query", ".key")]}
    live = LiveRun(write_run(tmp_path / "run", rows=rows))
    live.refresh()
    Console(width=80).print(frame(live))
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("seen")]
    assert [(line[1].rpartition(".")[2], *line[2:]) for line in lines] == [
        (name, "std", "▅", "1", "1") for name in ("query", "key")
    ]


@pytest.mark.parametrize(("status", "is_running"), [("done", True), ("killed", False), ("interrupted", False)])
def test_sweep_that_starts_no_more_jobs_is_over(status: str, is_running: bool, tmp_path: Path) -> None:
    jobs = [SweepJob(name, tmp_path / name, (), state, None) for name, state in (("0", status), ("1", "missing"))]
    write_run(tmp_path / "0")
    sweep = LiveSweep(str(tmp_path))
    sweep.jobs = jobs
    assert sweep.is_running == is_running


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([], MISSING),
        ([1.0, 1.0], "▅▅"),
        ([0.1, 0.1 + 1e-17, 0.3 / 3], "▅▅▅"),
        ([0.0, NAN, 1.0], f"▁{MISSING}█"),
        ([1.0, 10.0, 100.0, 1000.0], "▁▃▆█"),
        ([-1.0, 0.0, 1000.0], "▁▁█"),
        ([1.0, float("inf"), 2.0], "▁!█"),
        (list(range(48)), "▁▁▁▂▂▂▃▃▃▄▄▄▅▅▅▆▆▆▇▇▇███"),
    ],
)
def test_sparkline(values: list[float], line: str) -> None:
    assert sparkline(np.array(values, float)) == line
