"""Rows to several places, of which one counts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shown import key, metrics, row

import instrument
from instrument import InstrumentWarning, MemorySink
from instrument.errors import SinkError
from instrument.sinks.parquet import ParquetSink
from instrument.sinks.step_summary import Content
from instrument.sinks.tee import Several
from instrument.sinks.tracking import Outcome, TrackingSink


class Tracker:
    """Notes what it is told, and fails where it is to."""

    draws = True

    def __init__(self, *, fails_at: int | None = None, fails_at_the_end: bool = False) -> None:
        self.fails_at = fails_at
        self.fails_at_the_end = fails_at_the_end
        self.steps: list[int] = []
        self.outcomes: list[Outcome] = []

    def log(self, step: int, content: Content) -> None:
        random.random()
        np.random.rand()
        if step == self.fails_at:
            raise ConnectionError("nobody there\nfurther lines")
        self.steps.append(step)

    def close(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        if self.fails_at_the_end:
            raise ConnectionError("nobody there any more")


class Broken(MemorySink):
    """Raises an error from one of its methods."""

    def __init__(self, method: str, error: BaseException) -> None:
        super().__init__()

        def fail(*args: Any) -> None:
            raise error

        setattr(self, method, fail)


def steps(sink: Several, count: int = 5) -> None:
    for step in range(count):
        sink.write("metrics", [metrics(step, loss=float(step))])
        sink.keep(key(step), [2, 2, 2], torch.zeros(2, 2, 2), None)
        sink.end_step()


def test_everything_goes_to_all_and_the_first_one_says_what_was_kept() -> None:
    first, other = MemorySink(), MemorySink()
    sink = Several(first, {"other": other})
    assert sink.keep(key(), [4], torch.zeros(4), torch.float16) == 8
    steps(sink)
    sink.close()
    for each in (first, other):
        assert (len(each.rows["metrics"]), len(each.rows["tensors"]), each.steps, each.closed) == (5, 6, 5, True)
    assert other.records("tensors")[0]["dtype"] == "float16"


def test_what_the_first_one_has_no_room_for_goes_nowhere() -> None:
    class Full(MemorySink):
        def keep(self, *args: Any) -> None:
            return None

    other = MemorySink()
    assert Several(Full(), {"other": other}).keep(key(), [4], torch.zeros(4)) is None
    assert not other.rows["tensors"]


@pytest.mark.parametrize("method", ["write", "keep", "end_step", "close"])
def test_an_error_of_another_one_costs_no_row_and_is_told_of_once(method: str) -> None:
    first, broken, healthy = MemorySink(), Broken(method, ValueError("no more")), MemorySink()
    told: list[str] = []
    sink = Several(first, {"broken": broken, "healthy": healthy}, tell=told.append)
    steps(sink)
    sink.close()
    assert len(told) == 1
    assert told[0].startswith("broken failed: ValueError: no more; nothing more goes to broken")
    for each in (first, healthy):
        assert (len(each.rows["metrics"]), len(each.rows["tensors"]), each.steps, each.closed) == (5, 5, 5, True)
        (event,) = each.records("events")
        assert (event["rule"], event["severity"], event["message"]) == ("tracking", "warning", told[0])
        assert event["step"] == (4 if method == "close" else 0)
    assert broken.closed == (method != "close"), "it was let go"
    assert list(sink.others) == ["healthy"]


@pytest.mark.parametrize("method", ["write", "keep", "end_step"])
def test_an_error_of_the_first_one_is_raised(method: str) -> None:
    sink = Several(Broken(method, SinkError("the disk is full")), {"other": MemorySink()})
    with pytest.raises(SinkError, match="the disk is full"):
        steps(sink)


def test_all_are_closed_whatever_happens_and_the_first_error_is_raised() -> None:
    interrupt = KeyboardInterrupt()
    first, last = Broken("close", SinkError("full")), MemorySink()
    sink = Several(first, {"interrupted": Broken("close", interrupt), "last": last})
    with pytest.raises(KeyboardInterrupt) as caught:
        sink.close()
    assert caught.value is interrupt
    assert last.closed
    first = Broken("close", SinkError("full"))
    with pytest.raises(SinkError, match="full"):
        Several(first, {"last": last}).close()


def test_rows_are_in_parquet_whatever_a_tracker_does(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    tracker = Tracker(fails_at=2, fails_at_the_end=True)
    sink = Several(ParquetSink(tmp_path), {"mlflow": TrackingSink(tracker, "mlflow")})
    with pytest.warns(InstrumentWarning, match="mlflow failed: ConnectionError: nobody there; nothing more") as warned:
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
def test_a_tracker_is_told_how_the_run_ended(rules: list[str], outcome: str) -> None:
    tracker = Tracker()
    sink = TrackingSink(tracker, "tracker")
    sink.write("events", [row("events", 3, 0, None, rule, "so it was", "error") for rule in rules])
    sink.close()
    assert tracker.outcomes == [outcome]
    assert tracker.steps == ([3] if rules else []), "what was left is shown"


@pytest.mark.parametrize("fails_at", [None, 0])
def test_a_tracker_changes_no_random_number(fails_at: int | None) -> None:
    before = random.getstate(), np.random.get_state()
    steps(
        Several(MemorySink(), {"tracker": TrackingSink(Tracker(fails_at=fails_at), "tracker")}, tell=lambda told: None)
    )
    after = random.getstate(), np.random.get_state()
    assert after[0] == before[0]
    assert all(np.array_equal(one, other) for one, other in zip(after[1], before[1], strict=True))


def test_a_tracker_that_draws_nothing_is_given_no_pictures() -> None:
    tracker = Tracker()
    tracker.draws = False
    sink = TrackingSink(tracker, "tracker")
    assert "tensors" not in sink.tables
    sink.keep(key(), [2, 2, 2], torch.zeros(2, 2, 2))
    sink.end_step()
    assert tracker.steps == []
