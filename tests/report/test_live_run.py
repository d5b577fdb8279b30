"""The state of a run in progress: each row is read once, and the values are those of the tables."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from attached_runs import train_step
from report_fixtures import EVERYTHING
from run_folders import write_run, write_steps
from torch import nn

import instrument
from instrument.analysis.config_comparison import rules_of
from instrument.analysis.findings import findings
from instrument.analysis.new_rows import NewRows, RowsRemovedError, evenly_covering
from instrument.analysis.overview import metric_rows
from instrument.analysis.run_history import MAX_EVENTS
from instrument.commands.compact import main as compact
from instrument.commands.findings import check
from instrument.report.live_run import LiveRun
from instrument.report.live_sweep import last_metrics
from instrument.storage import parquet
from instrument.storage.remote_folder import folder_at

STEPS = 24
Watched = tuple[Path, LiveRun, list[int]]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """Run that is refreshed after some steps; journals become Parquet parts several times. With the rows of each refresh."""
    folder = tmp_path_factory.mktemp("live") / "run"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sizes = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(parquet, "ROWS_JOURNAL_BYTES", 20_000)  # two or three steps of `stats`
        with instrument.attach(model, EVERYTHING, optimizer=optimizer, out=folder) as probe:
            live = LiveRun(folder)
            stats = NewRows(folder, "stats", ["step", "layer", "hook", "position"])
            for step in range(STEPS):
                train_step(model, optimizer, probe, torch.randn(8, 4))
                if step % 5 != 2:
                    live.refresh()
                    sizes.append(sum(rows.num_rows for rows in stats.read(float("inf"))))
    live.refresh()
    sizes.append(sum(rows.num_rows for rows in stats.read(float("inf"))))
    return folder, live, sizes


@pytest.fixture
def copy(watched: Watched, tmp_path: Path) -> Path:
    return Path(shutil.copytree(watched[0], tmp_path / "copy"))


def test_each_row_is_read_once_across_journals_and_parts(watched: Watched) -> None:
    folder, _, sizes = watched
    run = instrument.load(folder)
    assert len(list((folder / "stats").iterdir())) > 3
    assert sum(sizes) == run.count("stats")
    per_step = run.count("stats") // STEPS
    assert set(sizes) <= {0, per_step, 2 * per_step}


def test_values_are_those_of_the_tables(watched: Watched) -> None:
    folder, live, _ = watched
    run = instrument.load(folder)
    assert live.step == STEPS
    assert not live.is_running
    assert live.order == ["0", "1", "2", ""]
    series, history = next((series, history) for series, history in live.series.items() if series.hook == "acts")
    rows = series.of(run.stats)
    groups = history.groups()
    assert history.width == 1
    for row, location in enumerate(history.locations):
        here = rows[rows["layer"] == location.replace(".", "")]
        for name in ("std", "l2", "max", "nan_count"):
            assert history.values(name, groups)[row] == pytest.approx(here[name].to_numpy(np.float64), rel=1e-12)
            assert history.last(name)[row] == pytest.approx(here[name].iloc[-1], rel=1e-12)
    assert live.last_metric("train", "loss") == run.metrics["loss"].iloc[-1]
    assert len(live.coverage) == len(run.coverage)
    (effects,) = live.effects.values()
    assert effects.values("norm_before", effects.groups()).shape == (len(effects.locations), STEPS)


@pytest.mark.parametrize(
    ("more", "progress"),
    [
        ({}, "2 of 100"),
        ({"config": {"mode": "forward", "train": {"steps": 100}}}, "2"),
        ({"used": {"replay": {"source": "runs/a", "steps": [0, 2]}}}, "2"),
    ],
)
def test_only_a_training_has_the_configured_number_of_steps(
    tmp_path: Path, more: dict[str, Any], progress: str
) -> None:
    rows = {"metrics": [{"step": 1, "loss": 1.0}]}
    live = LiveRun(write_run(tmp_path / "run", **{"config": {"train": {"steps": 100}}, **more}, rows=rows))
    live.refresh()
    assert live.progress == progress


def test_last_value_of_a_metric_may_not_be_finite(tmp_path: Path) -> None:
    train = [{"step": step, "loss": loss} for step, loss in enumerate([1.0, math.nan, 3.0, math.nan])]
    evaluation = {"step": 4, "phase": "eval", "loss": math.nan, "accuracy": 0.5}
    rows = {"metrics": [*train, {"step": 4, "accuracy": 0.25}, evaluation]}
    live = LiveRun(write_run(tmp_path / "run", rows=rows))
    live.refresh()
    assert live.state["metrics"] == {
        "train": {"loss": pytest.approx(math.nan, nan_ok=True), "accuracy": 0.25},
        "eval": {"loss": pytest.approx(math.nan, nan_ok=True), "accuracy": 0.5},
    }
    assert last_metrics(live) == {"loss": pytest.approx(math.nan, nan_ok=True), "accuracy": 0.5}
    assert [row.cells[::2] for row in metric_rows(live)] == [
        ("loss", "nan"),
        ("accuracy", "0.25"),
        ("eval accuracy", "0.5"),
        ("loss", ""),
        ("eval loss", ""),
    ]


@pytest.mark.slow
def test_new_reader_finds_the_same_values(watched: Watched) -> None:
    folder, live, _ = watched
    opened = LiveRun(folder)
    opened.refresh(seconds=0)
    assert opened.fraction_read < 1
    while opened.fraction_read < 1:
        assert opened.refresh(seconds=0)
    assert not opened.refresh()
    for series, history in live.series.items():
        other = opened.series[series]
        rows = [other.locations.index(location) for location in history.locations]
        for name in history.statistics:
            mine, found = (each.values(name, each.groups()) for each in (history, other))
            assert found[rows] == pytest.approx(mine, rel=1e-12, nan_ok=True)


def test_removed_rows_restart_the_state(copy: Path) -> None:
    live, stats = LiveRun(copy), NewRows(copy, "stats", ["step"])
    live.refresh()
    assert sum(rows.num_rows for rows in stats.read(float("inf")))
    last = sorted((copy / "stats").iterdir())[-1]
    last.unlink()
    with pytest.raises(RowsRemovedError):
        list(stats.read(float("inf")))
    live.refresh()
    without_spectra = [history for series, history in live.series.items() if series.hook != "updates"]
    steps = {history.last_step for history in without_spectra}
    assert steps == {int(instrument.load(copy).stats["step"].max())} != {STEPS - 1}


def test_replaced_file_restarts_the_state(copy: Path) -> None:
    stats = NewRows(copy, "stats", ["step"])
    list(stats.read(float("inf")))
    first, *_, last = sorted((copy / "stats").iterdir())
    shutil.copy(first, last)  # as a resumed run does: another file with the number of a removed one
    with pytest.raises(RowsRemovedError):
        list(stats.read(float("inf")))


def test_resumed_or_new_run_restarts_the_state(copy: Path) -> None:
    live = LiveRun(copy)
    live.refresh()
    record = json.loads((copy / "run.json").read_text())
    (copy / "run.json").write_text(json.dumps({**record, "resumed": [{"at": "now"}]}))
    version = live.version
    assert live.refresh()
    assert live.rebuilt > version  # the page is drawn again
    assert live.step == STEPS
    assert live.event_counts.total() == len(instrument.load(copy).events)


def test_deleted_run_keeps_what_was_read(copy: Path, tmp_path: Path) -> None:
    live = LiveRun(copy)
    live.refresh()
    shutil.move(copy, tmp_path / "moved")
    assert live.refresh()
    assert (live.info["status"], live.step, live.is_running) == ("deleted", STEPS, False)
    assert not live.refresh()
    shutil.move(tmp_path / "moved", copy)
    assert live.refresh()
    assert live.info["status"] == "done"


def test_unreadable_folder_is_reported(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    live = LiveRun(watched[0])
    with monkeypatch.context() as patched:
        patched.setattr("instrument.analysis.new_rows.part_files", no_answer)
        assert live.refresh()
    assert live.problems == ["no answer"]
    assert live.refresh()
    assert live.problems == []


def test_errors_are_shown_after_many_other_events(tmp_path: Path) -> None:
    events = [{"rule": "remote", "message": f"message {i}", "severity": "info"} for i in range(MAX_EVENTS + 5)]
    events.append({"rule": "error", "message": "failed", "severity": "error"})
    live = LiveRun(write_run(tmp_path / "run", rows={"events": events}))
    live.refresh()
    assert len(live.events) == MAX_EVENTS + 1
    assert live.events[-1]["message"] == "failed"
    assert live.event_counts.total() == MAX_EVENTS + 6


def test_merged_files_are_not_read_again(copy: Path) -> None:
    stats = NewRows(copy, "stats", ["step"])
    assert sum(rows.num_rows for rows in stats.read(float("inf"))) == instrument.load(copy).count("stats")
    assert compact([str(copy)]) == 0
    assert not list(stats.read(float("inf")))
    assert stats.fraction_read == 1
    assert sum(rows.num_rows for rows in NewRows(copy, "stats", ["step"]).read(float("inf"))) > 0


def test_remote_run_is_read_when_its_files_are_uploaded(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, local, _ = watched
    remote = folder_at("memory://watched/run")
    files = cast(Any, remote).fs

    def upload(name: str) -> None:
        files.pipe(f"/watched/run/{name}", (folder / name).read_bytes())

    upload("run.json")
    first, *later = sorted(str(file.relative_to(folder)) for file in folder.rglob("part-*"))
    upload(first)
    live = LiveRun(remote)
    live.refresh()
    assert live.info["status"] == "done"
    for name in later:
        upload(name)
    with monkeypatch.context() as patched:
        patched.setattr(type(files), "open", no_answer)
        assert live.refresh()
    assert live.unreachable is not None
    assert "no answer" in live.unreachable
    assert live.refresh()
    assert live.problems == []
    assert not live.refresh()
    for series, history in local.series.items():
        assert live.series[series].values("l2", live.series[series].groups()).shape[1] == len(history.groups())
    assert live.last_metric("train", "loss") == local.last_metric("train", "loss")


def no_answer(*arguments: Any, **options: Any) -> None:
    raise OSError("no answer")


def test_damaged_file_is_reported_and_skipped(copy: Path) -> None:
    damaged = sorted((copy / "stats").iterdir())[1]
    damaged.write_bytes(b"PAR1 no file")
    live = LiveRun(copy)
    live.refresh()
    assert [problem.partition(":")[0] for problem in live.problems] == [f"stats/{damaged.name}"]
    assert live.step == STEPS


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64, 100])
def test_evenly_covering_order(count: int) -> None:
    order = evenly_covering(count)[::-1]
    assert sorted(order) == list(range(count))
    assert order[0] == count - 1
    if count == 64:
        assert sorted(order[:4]) == [15, 31, 47, 63]


@pytest.mark.parametrize(
    "rules", [{"mine": {"rule": "exploding_gradient"}}, [{"name": "mine", "rule": "exploding_gradient"}]]
)
def test_findings_of_rules_are_those_of_the_report(rules: Any, tmp_path: Path) -> None:
    """The parts of a run that has ended are not read in the order of the steps."""
    rule = {"rule": "mine", "layer": "a", "location": "a", "threshold": 0.0}
    steps = [
        {**rule, "step": step, "message": f"growth: at step {step} in a: l2 {step}", "value": float(step)}
        | {"severity": "info" if step else "warning"}
        for step in range(4)
    ]
    info = {"config": {"rules": rules}}
    folder = write_steps(tmp_path / "run", [{"events": [event]} for event in steps], parts=range(4), info=info)
    live = LiveRun(folder)
    live.refresh()
    (finding,) = live.findings()
    assert [finding] == findings(instrument.load(folder))
    assert (finding.step, finding.severity, finding.value) == (0, "warning", "l2 0 (3 more events)")
    assert [*rules_of(live.info)] == ["mine"]
    assert check(instrument.load(folder)) == []  # its rows do not grow
