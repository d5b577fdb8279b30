"""Rows to several sinks, of which the first one is authoritative."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tracker_files import key, metrics, row

import instrument
from instrument import InstrumentWarning, MemorySink
from instrument.errors import SinkError
from instrument.storage.parquet import ParquetSink
from instrument.storage.tee import TeeSink
from instrument.trackers.step_summary import StepSummary
from instrument.trackers.tracking import Outcome, TrackingSink


class Tracker:
    """A tracker that records its calls, and fails where configured."""

    shows_images = True

    def __init__(self, *, fails_at: int | None = None, fails_at_the_end: bool = False) -> None:
        self.fails_at = fails_at
        self.fails_at_the_end = fails_at_the_end
        self.steps: list[int] = []
        self.outcomes: list[Outcome] = []

    def log(self, step: int, summary: StepSummary) -> None:
        random.random()
        np.random.rand()
        if step == self.fails_at:
            raise ConnectionError("connection refused\nfurther lines")
        self.steps.append(step)

    def close(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        if self.fails_at_the_end:
            raise ConnectionError("connection lost")


class Broken(MemorySink):
    """A sink that raises an error from one of its methods."""

    def __init__(self, method: str, error: BaseException) -> None:
        super().__init__()

        def fail(*args: Any) -> None:
            raise error

        setattr(self, method, fail)


def steps(sink: TeeSink, count: int = 5) -> None:
    for step in range(count):
        sink.write("metrics", [metrics(step, loss=float(step))])
        sink.keep(key(step), [2, 2, 2], torch.zeros(2, 2, 2), None)
        sink.end_step()


def test_rows_go_to_all_sinks() -> None:
    first, other = MemorySink(), MemorySink()
    sink = TeeSink(first, {"other": other})
    assert sink.keep(key(), [4], torch.zeros(4), torch.float16) == 8
    steps(sink)
    sink.close()
    for each in (first, other):
        assert (len(each.rows["metrics"]), len(each.rows["tensors"]), each.steps, each.closed) == (5, 6, 5, True)
    assert other.records("tensors")[0]["dtype"] == "float16"


def test_tensor_dropped_by_the_first_sink_goes_nowhere() -> None:
    full, other = MemorySink(), MemorySink()
    full.keep = lambda *args: None  # type: ignore[method-assign, assignment]
    assert TeeSink(full, {"other": other}).keep(key(), [4], torch.zeros(4)) is None
    assert not other.rows["tensors"]


@pytest.mark.parametrize("method", ["write", "keep", "end_step", "close"])
def test_failing_secondary_sink_is_reported_once_and_dropped(method: str) -> None:
    first, broken, healthy = MemorySink(), Broken(method, ValueError("no more")), MemorySink()
    messages: list[str] = []
    sink = TeeSink(first, {"broken": broken, "healthy": healthy}, report=messages.append)
    steps(sink)
    sink.close()
    assert len(messages) == 1
    assert messages[0].startswith("broken failed: ValueError: no more; broken receives no more data")
    for each in (first, healthy):
        assert (len(each.rows["metrics"]), len(each.rows["tensors"]), each.steps, each.closed) == (5, 5, 5, True)
        (event,) = each.records("events")
        assert (event["rule"], event["severity"], event["message"]) == ("tracking", "warning", messages[0])
        assert event["step"] == (4 if method == "close" else 0)
    assert broken.closed == (method != "close"), "a failed sink is closed"
    assert list(sink.others) == ["healthy"]


@pytest.mark.parametrize("method", ["write", "keep", "end_step"])
def test_error_of_the_first_sink_is_raised(method: str) -> None:
    sink = TeeSink(Broken(method, SinkError("the disk is full")), {"other": MemorySink()})
    with pytest.raises(SinkError, match="the disk is full"):
        steps(sink)


def test_all_sinks_are_closed_and_the_first_error_is_raised() -> None:
    interrupt = KeyboardInterrupt()
    first, last = Broken("close", SinkError("full")), MemorySink()
    sink = TeeSink(first, {"interrupted": Broken("close", interrupt), "last": last})
    with pytest.raises(KeyboardInterrupt) as caught:
        sink.close()
    assert caught.value is interrupt
    assert last.closed
    first = Broken("close", SinkError("full"))
    with pytest.raises(SinkError, match="full"):
        TeeSink(first, {"last": last}).close()


def test_parquet_rows_are_complete_when_a_tracker_fails(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    tracker = Tracker(fails_at=2, fails_at_the_end=True)
    sink = TeeSink(ParquetSink(tmp_path), {"mlflow": TrackingSink(tracker, "mlflow")})
    message = "mlflow failed: ConnectionError: connection refused; mlflow receives no more data"
    with pytest.warns(InstrumentWarning, match=message) as warned:
        steps(sink)
        sink.close()
    assert len(warned) == 1
    run = instrument.load(tmp_path)
    assert list(run.metrics.step) == [0, 1, 2, 3, 4]
    assert len(run.tensors()) == 5
    assert list(run.events.rule) == ["tracking"]
    assert run.events.step[0] == 2
    assert tracker.steps == [0, 1]


@pytest.mark.parametrize(
    ("rules", "outcome"), [([], "done"), (["coverage"], "done"), (["error"], "failed"), (["interrupted"], "killed")]
)
def test_tracker_receives_the_outcome_of_the_run(rules: list[str], outcome: str) -> None:
    tracker = Tracker()
    sink = TrackingSink(tracker, "tracker")
    sink.write("events", [row("events", 3, 0, None, rule, "so it was", "error") for rule in rules])
    sink.close()
    assert tracker.outcomes == [outcome]
    assert tracker.steps == ([3] if rules else []), "pending rows are logged"


@pytest.mark.parametrize("fails_at", [None, 0])
def test_tracker_does_not_change_random_state(fails_at: int | None) -> None:
    before = random.getstate(), np.random.get_state()
    tracker = TrackingSink(Tracker(fails_at=fails_at), "tracker")
    steps(TeeSink(MemorySink(), {"tracker": tracker}, report=lambda messages: None))
    after = random.getstate(), np.random.get_state()
    assert after[0] == before[0]
    assert all(np.array_equal(one, other) for one, other in zip(after[1], before[1], strict=True))


def test_tracker_without_images_receives_no_tensors() -> None:
    tracker = Tracker()
    tracker.shows_images = False
    sink = TrackingSink(tracker, "tracker")
    assert "tensors" not in sink.tables
    sink.keep(key(), [2, 2, 2], torch.zeros(2, 2, 2))
    sink.end_step()
    assert tracker.steps == []
