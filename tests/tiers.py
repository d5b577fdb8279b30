"""Test tiers: `make test` runs the quick part of each sweep, and `make test-all` runs all of it (marker `slow`)."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import pytest
from _pytest.mark import ParameterSet


def tiered(values: Iterable[object], quick: Collection[object]) -> list[ParameterSet]:
    """Parameters for `pytest.mark.parametrize` and `pytest.fixture`; those that are not in `quick` are marked `slow`."""
    values = list(values)
    assert set(quick) <= set(values)
    return [pytest.param(each, id=str(each), marks=() if each in quick else pytest.mark.slow) for each in values]


def portions(quick: int, total: int, size: int) -> list[ParameterSet]:
    """The numbers from 0 to `total` as ranges: the first one has `quick` numbers; the others, which are slow, `size` each.

    Portions rather than one long test, so that several processes can share them.
    """
    starts = [0, *range(quick, total, size)]
    ranges = [range(start, min(end, total)) for start, end in zip(starts, [*starts[1:], total], strict=True)]
    return [
        pytest.param(each, id=f"{each.start}-{each.stop - 1}", marks=pytest.mark.slow if each.start else ())
        for each in ranges
    ]
