"""Human-readable byte counts, durations and lists of names."""

from __future__ import annotations

import pytest

from instrument.formatting import counted, human_bytes, human_seconds, shorten


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (12_345, "12.3 kB"),
        (999_400, "999 kB"),
        (999_999, "1 MB"),
        (2.5e9, "2.5 GB"),
        (1e13, "10 TB"),
        (5e15, "5,000 TB"),
    ],
)
def test_human_bytes(count: float, expected: str) -> None:
    assert human_bytes(count) == expected


@pytest.mark.parametrize(("seconds", "expected"), [(0.0253, "25.3 ms"), (0.9996, "1 s"), (1234.0, "1.23e+03 s")])
def test_human_seconds(seconds: float, expected: str) -> None:
    assert human_seconds(seconds) == expected


@pytest.mark.parametrize(
    ("count", "text"), [(0, ""), (2, "n0, n1"), (3, "n0, n1, n2"), (4, "n0, n1, n2, ... (4 in all)")]
)
def test_long_list_is_truncated_with_a_count(count: int, text: str) -> None:
    assert shorten([f"n{i}" for i in range(count)], limit=3) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 steps"), (1, "1 step"), (12, "12 steps")])
def test_noun_of_one_is_singular(count: int, text: str) -> None:
    assert counted(count, "step") == text
