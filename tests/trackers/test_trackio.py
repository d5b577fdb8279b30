"""The Trackio sink with local files, read back from its database."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tracker_files import key, metrics, row

from instrument.trackers.tracking import TrackedRun, open_tracker


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The storage of Trackio, in the folder of the test. It reads `TRACKIO_DIR` at its import."""
    for name in ("TRACKIO_PROJECT", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    from trackio import sqlite_storage

    monkeypatch.setattr(sqlite_storage, "TRACKIO_DIR", tmp_path)
    return sqlite_storage.SQLiteStorage


def test_run_has_its_name_numbers_histograms_and_alerts(storage: Any, tmp_path: Path) -> None:
    run = TrackedRun.of(tmp_path / "runs" / "first", {"name": "tried", "train": {"steps": 3}})
    sink = open_tracker("trackio", run, "sink.trackio")
    for step in range(3):
        sink.write("metrics", [metrics(step, loss=step + 0.5, custom={"episode_return": 2.0 * step})])
        sink.write("stats", [row("stats", *key(step), mean=-1.0)])
        sink.end_step()
    sink.write("distributions", [row("distributions", *key(3), low=-1.0, high=1.0, counts=[3, 1])])
    sink.write("events", [row("events", 3, 0, "a.0", "dead_units", "dead units: at step 3", "warning")])
    sink.close()
    assert storage.get_runs("tried") == ["runs/first"]
    logged = {entry["step"]: entry for entry in storage.get_logs("tried", "runs/first")}
    for step in range(3):
        expected = {"train/loss": step + 0.5, "train/episode_return": 2.0 * step, "seen/a.0/mean": -1.0}
        assert logged[step].items() >= expected.items()
    assert logged[3]["seen/a.0/histogram"]["values"] == [3, 1]
    (alert,) = storage.get_alerts("tried")
    assert (alert["title"], alert["level"], alert["step"]) == ("events/warning", "warn", 3)
    assert alert["text"] == "dead_units a.0: dead units: at step 3"
