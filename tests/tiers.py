"""Test tiers: `make test` runs the quick parameters of each test, `make test-all` also those marked `slow`."""

from __future__ import annotations

import itertools
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

import pytest
from _pytest.mark import ParameterSet


def tiered(values: Iterable[object], quick: Collection[object]) -> list[ParameterSet]:
    """Return parameters for `pytest.mark.parametrize` and `pytest.fixture`; values outside `quick` are marked `slow`."""
    values = list(values)
    assert set(quick) <= set(values)
    return [pytest.param(each, id=str(each), marks=() if each in quick else pytest.mark.slow) for each in values]


def portions(quick: int, total: int, size: int) -> list[ParameterSet]:
    """Split the numbers from 0 to `total` into ranges, so that several test processes can share them.

    Args:
        quick: Length of the first range, which is not marked `slow`.
        total: Number of all cases.
        size: Length of each other range, marked `slow`.
    """
    starts = [0, *range(quick, total, size)]
    ranges = [range(start, min(end, total)) for start, end in zip(starts, [*starts[1:], total], strict=True)]
    return [
        pytest.param(each, id=f"{each.start}-{each.stop - 1}", marks=pytest.mark.slow if each.start else ())
        for each in ranges
    ]


def mark_combinations(items: Sequence[pytest.Item]) -> None:
    """Mark most combinations of parameters as slow, in tests with the marker `combinations`.

    `make test` runs a selection in which each value of each parameter occurs; with `combinations(2)`, each pair of
    values of two parameters.
    """
    tested: dict[str, set[tuple[tuple[str, str], ...]]] = defaultdict(set)  # by test function
    combined = [
        item for item in items if item.get_closest_marker("combinations") and not item.get_closest_marker("slow")
    ]
    for item in sorted(combined, key=lambda item: zlib.crc32(item.nodeid.encode())):  # This order mixes the values.
        marker = item.get_closest_marker("combinations")
        assert marker is not None
        assert isinstance(item, pytest.Function)
        values = sorted((name, repr(value)) for name, value in item.callspec.params.items())
        found = set(itertools.combinations(values, *marker.args or (1,)))
        done = tested[item.nodeid.partition("[")[0]]
        if found <= done:
            item.add_marker("slow")
        done |= found


def mark_spread(items: Sequence[pytest.Item]) -> None:
    """Mark parameters as slow in tests with the marker `spread`, except n at equal distances."""
    spread: dict[str, list[pytest.Item]] = defaultdict(list)  # by test function
    for item in items:
        if item.get_closest_marker("spread") and not item.get_closest_marker("slow"):
            spread[item.nodeid.partition("[")[0]].append(item)
    for found in spread.values():
        marker = found[0].get_closest_marker("spread")
        assert marker is not None
        (n,) = marker.args
        quick = {i * len(found) // n for i in range(n)}
        for i, item in enumerate(found):
            if i not in quick:
                item.add_marker("slow")
