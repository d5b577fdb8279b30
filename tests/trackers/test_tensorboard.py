"""The TensorBoard sink, read back by TensorBoard."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from tracker_files import key, make_older, metrics, read_tensorboard, row

from instrument.errors import SinkError
from instrument.trackers.tracking import TrackedRun, TrackingSink, open_tracker


def open_sink(folder: Path, resumed_at: int | None = None) -> TrackingSink:
    return open_tracker("tensorboard", TrackedRun.of(folder, {"name": "tried"}, resumed_at), "sink.tensorboard")


def test_scalars_are_logged_at_their_steps(tmp_path: Path) -> None:
    sink = open_sink(tmp_path)
    for step in range(3):
        sink.write("metrics", [metrics(step, loss=step + 0.5, grad_norm=math.nan, custom={"episode_return": 2.0})])
        sink.write(
            "stats", [row("stats", *key(step), mean=-1.0, numel=8), row("stats", *key(step, layer="b"), mean=2.0)]
        )
        sink.end_step()
    sink.close()
    assert list(tmp_path.iterdir()) == [tmp_path / "tensorboard"]
    found = read_tensorboard(tmp_path / "tensorboard")["scalars"]
    assert found.keys() == {
        "train/loss",
        "train/grad_norm",
        "train/episode_return",
        "seen/a.0/mean",
        "seen/a.0/numel",
        "seen/b/mean",
    }
    assert found["train/loss"] == [(0, 0.5), (1, 1.5), (2, 2.5)]
    assert found["train/episode_return"] == [(0, 2.0), (1, 2.0), (2, 2.0)]
    assert found["seen/b/mean"] == [(0, 2.0), (1, 2.0), (2, 2.0)]
    assert all(math.isnan(value) for _, value in found["train/grad_norm"])


def test_histogram_has_its_bins_and_counts(tmp_path: Path) -> None:
    sink = open_sink(tmp_path)
    sink.write("distributions", [row("distributions", *key(4), low=-1.0, high=1.0, counts=[3, 0, 0, 1])])
    sink.write("distributions", [row("distributions", *key(4, layer="b"), low=0.0, high=0.0, counts=[6, 0])])
    sink.close()
    found = read_tensorboard(tmp_path / "tensorboard")["histograms"]
    ((step, histogram),) = found["seen/a.0/histogram"]
    assert (step, histogram.min, histogram.max, histogram.num) == (4, -1.0, 1.0, 4.0)
    assert list(histogram.bucket_limit) == [-0.5, 0.0, 0.5, 1.0]
    assert list(histogram.bucket) == [3.0, 0.0, 0.0, 1.0]
    assert (histogram.sum, histogram.sum_squares) == (-1.5, 4 * 0.75**2)
    ((_, equal),) = found["seen/b/histogram"]
    assert equal.min < 0.0 < equal.max
    assert list(equal.bucket) == [6.0]


def test_events_are_texts(tmp_path: Path) -> None:
    sink = open_sink(tmp_path)
    sink.write("events", [row("events", 1, 0, "a.0", "replaced", "gone", "warning")])
    sink.close()
    found = read_tensorboard(tmp_path / "tensorboard")
    assert found["texts"] == {"events/warning": [(1, "replaced a.0: gone")]}


def test_repeated_steps_are_logged_once(tmp_path: Path) -> None:
    for resumed_at, end in ((None, 6), (3, 5)):
        sink = open_sink(tmp_path, resumed_at)
        for step in range(resumed_at or 0, end):
            sink.write("metrics", [metrics(step, loss=float(end))])
            sink.end_step()
        sink.close()
        if resumed_at is None:
            make_older(tmp_path / "tensorboard")
    assert read_tensorboard(tmp_path / "tensorboard")["scalars"]["train/loss"] == [
        (0, 6.0), (1, 6.0), (2, 6.0), (3, 5.0), (4, 5.0),
    ]  # fmt: skip


def test_step_is_one_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = open_sink(tmp_path)
    events: list[Any] = []
    monkeypatch.setattr(sink.tracker.events, "add_summary", lambda summary, step: events.append((step, summary)))  # type: ignore[attr-defined]
    sink.write("stats", [row("stats", *key(0, layer=f"l{number}"), mean=1.0, std=1.0) for number in range(50)])
    sink.end_step()
    assert [(step, len(summary.value)) for step, summary in events] == [(0, 100)]


def test_write_error_is_a_sink_error(tmp_path: Path) -> None:
    sink = open_sink(tmp_path)
    sink.tracker.close("done")
    sink.write("metrics", [metrics(0, loss=1.0)])
    with pytest.raises(SinkError, match="tensorboard failed: OSError: Writer is closed"):
        sink.end_step()
