"""Values over steps in bounded memory, compared with a direct computation."""

from __future__ import annotations

import numpy as np
import pytest

from instrument.analysis.step_history import MOST, StepHistory

NAMES = ("mean", "min", "max", "custom")


def filled(order: np.ndarray, room: int, *, count: int, pieces: int) -> StepHistory:
    random = np.random.default_rng(0)
    steps = np.repeat(np.arange(count) * 3, 2)
    index = np.tile([0, 1], count)
    values = {
        name: np.where(random.random(2 * count) < 0.1, np.nan, random.standard_normal(2 * count)) for name in NAMES
    }
    history = StepHistory(room)
    for version, part in enumerate(np.array_split(order, pieces)):
        history.add(["a", "b"], index[part], steps[part], {name: each[part] for name, each in values.items()}, version)
    return history


def test_every_step_has_its_group_at_first() -> None:
    history = filled(np.arange(20), 1 << 20, count=10, pieces=2)
    first, last = history.steps(history.groups())
    assert first.tolist() == last.tolist() == list(range(0, 30, 3))
    assert history.last_step == 27


@pytest.mark.parametrize("pieces", [1, 40])
def test_order_of_rows_does_not_change_the_values(pieces: int) -> None:
    count = 5_000
    shuffled = np.random.default_rng(1).permutation(2 * count)
    one = filled(np.arange(2 * count), 2 * 4 * 64, count=count, pieces=1)
    other = filled(shuffled, 2 * 4 * 64, count=count, pieces=pieces)
    assert one.width == other.width == 256
    assert len(one.groups()) == len(other.groups()) == 59
    for name in NAMES:
        mine, found = (each.values(name, each.groups()) for each in (one, other))
        assert found[[other.locations.index(location) for location in one.locations]] == pytest.approx(
            mine, nan_ok=True
        )
    assert [each.tolist() for each in one.steps(one.groups())] == [
        each.tolist() for each in other.steps(other.groups())
    ]


def test_groups_are_merged_by_the_rule_of_the_statistic() -> None:
    history = StepHistory(room=16)
    steps = np.arange(64)
    values = steps.astype(np.float64)
    history.add(["a"], np.zeros(64, np.int64), steps, {"mean": values, "min": values, "max": values}, 1)
    groups = history.groups()
    assert history.width == 4
    assert history.values("mean", groups)[0].tolist() == [4 * i + 1.5 for i in range(16)]
    assert history.values("min", groups)[0].tolist() == [4 * i for i in range(16)]
    assert history.values("max", groups)[0].tolist() == [4 * i + 3 for i in range(16)]
    assert history.last("mean").tolist() == [63]


def test_groups_that_changed_after_a_version() -> None:
    history = StepHistory()
    for step in range(5):
        history.add(["a"], np.zeros(1, np.int64), np.array([step]), {"mean": np.ones(1)}, step)
    assert history.steps(history.groups(since=2))[0].tolist() == [3, 4]
    assert history.rebuilt == 0
    history.add(["b"], np.zeros(1, np.int64), np.array([9]), {"mean": np.ones(1)}, 9)
    assert history.rebuilt == 9


def test_memory_is_bounded() -> None:
    history = StepHistory(room=1_000)
    zeros = np.zeros(1_000, np.int64)
    for start in range(0, 10**6, 1_000):
        history.add(["a"], zeros, np.arange(start, start + 1_000), {"mean": np.ones(1_000)}, start)
    assert len(history.groups()) <= MOST
    assert history.values("mean", history.groups()).shape[1] <= MOST
    first, last = history.steps(history.groups())
    assert (last - first + 1).sum() == 10**6
