"""What a step has to show, where several rows have one tag."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from shown import key, metrics, row

from instrument.sinks.histogram import Histogram, merged
from instrument.sinks.step_summary import Content, Gathering


def content_of(*rows: tuple[str, tuple[object, ...]]) -> dict[int, Content]:
    gathering = Gathering()
    for table, cells in rows:
        gathering.add(table, [cells])
    return dict(gathering.take())


def test_micro_steps_of_a_step_are_one_number() -> None:
    first = row("stats", *key(2, micro_step=0), numel=8, mean=1.0, min=-1.0, max=2.0, nan_count=0, l2=3.0)
    second = row("stats", *key(2, micro_step=1), numel=4, mean=2.0, min=-5.0, max=1.0, nan_count=7, l2=5.0)
    (content,) = content_of(("stats", first), ("stats", second)).values()
    assert content.scalars == {
        "seen/a.0/numel": 8, "seen/a.0/mean": 1.5, "seen/a.0/min": -5.0, "seen/a.0/max": 2.0, "seen/a.0/nan_count": 7,
        "seen/a.0/l2": 4.0,
    }  # fmt: skip


def test_values_that_are_not_finite_have_a_mean_too() -> None:
    (content,) = content_of(*(("metrics", metrics(0, loss=loss)) for loss in (math.inf, -math.inf))).values()
    assert math.isnan(content.scalars["train/loss"])


def test_steps_and_phases_stand_apart_in_the_order_of_the_steps() -> None:
    rows = [
        ("metrics", metrics(5, "eval", loss=2.0)),
        ("metrics", metrics(4, loss=1.0)),
        ("metrics", metrics(5, loss=3.0)),
    ]
    found = content_of(*rows)
    assert [(step, content.scalars) for step, content in found.items()] == [
        (4, {"train/loss": 1.0}), (5, {"eval/loss": 2.0, "train/loss": 3.0}),
    ]  # fmt: skip


def test_what_was_taken_is_not_given_again_and_tables_without_steps_show_nothing() -> None:
    gathering = Gathering()
    gathering.add("metrics", [metrics(0, loss=1.0)])
    gathering.add("layers", [row("layers", "a")])
    gathering.add("coverage", [row("coverage", "seen")])
    gathering.add_tensor(key(1), torch.zeros(3), None)
    assert [step for step, _ in gathering.take()] == [0]
    assert list(gathering.take()) == []


def test_events_are_lines_by_their_severity() -> None:
    events = [
        (None, 0, None, "fallback", "digits, not MNIST", "warning"),
        (0, 0, "a.0", "replaced", "gone", "warning"),
        (0, 0, None, "resumed", "goes on", "info"),
    ]
    (content,) = content_of(*(("events", event) for event in events)).values()
    assert content.texts == {
        "events/warning": "fallback: digits, not MNIST\n\nreplaced a.0: gone", "events/info": "resumed: goes on",
    }  # fmt: skip


def test_the_first_picture_of_a_tag_is_shown_and_is_a_copy() -> None:
    gathering = Gathering()
    shown, written_over = torch.zeros(2, 4, 4), torch.ones(2, 4, 4)
    gathering.add_tensor(key(1), shown, None)
    shown.fill_(1.0)
    gathering.add_tensor(key(1, micro_step=1), written_over, None)
    ((step, content),) = gathering.take()
    assert (step, list(content.pictures)) == (1, ["seen/a.0/image"])
    assert content.pictures["seen/a.0/image"].convert("RGB").getpixel((0, 0)) == (0, 0, 0)


def test_a_histogram_has_the_edges_of_equal_parts() -> None:
    edges, counts = Histogram(-1.0, 3.0, [1, 0, 2, 5]).bins()
    assert edges.tolist() == [-1.0, 0.0, 1.0, 2.0, 3.0]
    assert counts.tolist() == [1, 0, 2, 5]


@pytest.mark.parametrize("value", [0.0, 2.5, -1e30, 1e-30])
def test_equal_values_are_one_narrow_bin_around_them(value: float) -> None:
    edges, counts = Histogram(value, value, [9, 0, 0]).bins()
    assert edges[0] < value < edges[1]
    assert edges[1] - edges[0] <= 1e-5 * max(abs(value), 1e-6)
    assert counts.tolist() == [9]


def test_the_widest_range_has_finite_edges() -> None:
    edges, _ = Histogram(-1.7e308, 1.7e308, [1, 1]).bins()
    assert edges.tolist() == [-1.7e308, 0.0, 1.7e308]
    assert merged([Histogram(-1.7e308, 1.7e308, [1, 1]), Histogram(0.0, 1.0, [3, 0])]).counts == [1, 4]


@given(st.lists(st.lists(st.integers(-50, 50), min_size=1, max_size=30), min_size=1, max_size=4))
def test_histograms_add_up_to_that_of_all_values_or_a_bin_beside(parts: list[list[int]]) -> None:
    def counted(values: list[int]) -> Histogram:
        counts, _ = np.histogram(
            values, bins=10, range=(min(values), max(values)) if min(values) < max(values) else None
        )
        if min(values) == max(values):
            counts = np.array([len(values)] + [0] * 9)
        return Histogram(min(values), max(values), counts.tolist())

    together = merged([counted(values) for values in parts])
    everything = sorted(value for values in parts for value in values)
    assert (together.low, together.high) == (everything[0], everything[-1])
    assert sum(together.counts) == len(everything)
    if together.low < together.high:
        width = (together.high - together.low) / 10
        shown = np.repeat(together.low + (np.arange(10) + 0.5) * width, together.counts)
        assert np.abs(np.sort(shown) - everything).max() <= 1.5 * width


def test_a_row_of_distributions_without_a_histogram_shows_none() -> None:
    rows = [row("distributions", *key(0), levels=[0.5], quantiles=[1.0]), row("distributions", *key(0), counts=[0, 0])]
    (content,) = content_of(*(("distributions", cells) for cells in rows)).values()
    assert content.histograms == {}
