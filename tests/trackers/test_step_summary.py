"""The content of a step, where several rows have one tag."""

from __future__ import annotations

import math

import pytest
from tracker_files import key, metrics, row

from instrument.trackers.step_summary import Histogram, StepSummary, SummaryCollector


def summaries_of(*rows: tuple[str, tuple[object, ...]]) -> dict[int, StepSummary]:
    collector = SummaryCollector()
    for table, cells in rows:
        collector.add(table, [cells])
    return dict(collector.take())


def test_micro_steps_of_a_step_are_combined() -> None:
    first = row("stats", *key(2, micro_step=0), numel=8, mean=1.0, min=-1.0, max=2.0, nan_count=0, l2=3.0)
    second = row("stats", *key(2, micro_step=1), numel=4, mean=2.0, min=-5.0, max=1.0, nan_count=7, l2=5.0)
    (summary,) = summaries_of(("stats", first), ("stats", second)).values()
    assert summary.scalars == {
        "seen/a.0/numel": 8, "seen/a.0/mean": 1.5, "seen/a.0/min": -5.0, "seen/a.0/max": 2.0, "seen/a.0/nan_count": 7,
        "seen/a.0/l2": 4.0,
    }  # fmt: skip


def test_non_finite_values_have_a_mean() -> None:
    (summary,) = summaries_of(*(("metrics", metrics(0, loss=loss)) for loss in (math.inf, -math.inf))).values()
    assert math.isnan(summary.scalars["train/loss"])


def test_steps_and_phases_are_separate_and_ordered() -> None:
    rows = [
        ("metrics", metrics(5, "eval", loss=2.0)),
        ("metrics", metrics(4, loss=1.0)),
        ("metrics", metrics(5, loss=3.0)),
    ]
    found = summaries_of(*rows)
    assert [(step, summary.scalars) for step, summary in found.items()] == [
        (4, {"train/loss": 1.0}), (5, {"eval/loss": 2.0, "train/loss": 3.0}),
    ]  # fmt: skip


def test_content_is_taken_once() -> None:
    collector = SummaryCollector()
    collector.add("metrics", [metrics(0, loss=1.0)])
    collector.add("layers", [row("layers", "a")])
    collector.add("coverage", [row("coverage", "seen")])
    assert [step for step, _ in collector.take()] == [0]
    assert list(collector.take()) == []


def test_events_are_grouped_by_severity() -> None:
    events = [
        (None, 0, None, "fallback", "digits, not MNIST", "warning"),
        (0, 0, "a.0", "replaced", "gone", "warning"),
        (0, 0, None, "resumed", "goes on", "info"),
    ]
    (summary,) = summaries_of(*(("events", event) for event in events)).values()
    assert summary.texts == {
        "events/warning": "fallback: digits, not MNIST\n\nreplaced a.0: gone", "events/info": "resumed: goes on",
    }  # fmt: skip


def test_histogram_has_equal_bins() -> None:
    edges, counts = Histogram(-1.0, 3.0, [1, 0, 2, 5]).bins()
    assert edges.tolist() == [-1.0, 0.0, 1.0, 2.0, 3.0]
    assert counts.tolist() == [1, 0, 2, 5]
    widest = Histogram(-1.7e308, 1.7e308, [1, 1])
    assert widest.bins()[0].tolist() == [-1.7e308, 0.0, 1.7e308]


@pytest.mark.parametrize("value", [0.0, 2.5, -1e30, 1e-30])
def test_histogram_of_equal_values_is_one_narrow_bin(value: float) -> None:
    edges, counts = Histogram(value, value, [9, 0, 0]).bins()
    assert edges[0] < value < edges[1]
    assert edges[1] - edges[0] <= 1e-5 * max(abs(value), 1e-6)
    assert counts.tolist() == [9]


def test_first_histogram_of_a_step_is_shown() -> None:
    rows = [row("distributions", *key(0, micro_step=at), low=0.0, high=1.0 + at, counts=[at, 1]) for at in range(2)]
    (summary,) = summaries_of(*(("distributions", cells) for cells in rows)).values()
    assert [*summary.histograms.values()] == [Histogram(0.0, 1.0, [0, 1])]


def test_distribution_row_without_histogram_has_none() -> None:
    rows = [row("distributions", *key(0), levels=[0.5], quantiles=[1.0]), row("distributions", *key(0), counts=[0, 0])]
    (summary,) = summaries_of(*(("distributions", cells) for cells in rows)).values()
    assert summary.histograms == {}
