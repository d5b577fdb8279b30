"""Statistics of a full tensor, merged from those of its shards."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from instrument.probe.rank_merging import RankNumbers
from instrument.stats.distribution import SAMPLE, distribution
from instrument.stats.measure import measure, measure_statistics
from instrument.stats.merge import merge_distributions, merge_units, pack_units, sketch
from instrument.stats.sums import COLUMNS, extremes, merged, needs_of, statistics_of, totals
from instrument.stats.unit_statistics import count_saturated, dead_units
from instrument.tables.statistics import ALL, SATURATED, STATISTICS, WEIGHT

NAMES = tuple(name for name in ALL if all(need.term is not None for need in STATISTICS[name].needs))
EXACT = {"numel", "min", "max", "abs_max", "nan_count", "inf_count", "zero_fraction", "negative_fraction", "l0"}


def merge_parts(parts: list[Tensor], *, saturated: list[Any] = [], weights: list[float] = []) -> dict[str, float]:  # noqa: B006
    """Return the statistics merged from shards, as processes compute them."""
    rows = []
    for at, part in enumerate(parts):
        measured = measure(part, needs_of(NAMES))
        measured[SATURATED] = saturated[at] if saturated else None
        measured[WEIGHT] = weights[at] if weights else None
        rows.append(torch.from_numpy(measured.row)[None])
    most = torch.stack([extremes(row) for row in rows]).amax(dim=0)
    total = torch.stack([totals(row, most) for row in rows]).sum(dim=0)
    names = (*NAMES, "saturated_fraction", "update_ratio")
    return {name: column.item() for name, column in zip(names, statistics_of(merged(most, total), names), strict=True)}


def check_merge(parts: list[Tensor]) -> None:
    full = dict(zip(NAMES, measure_statistics(torch.cat([part.flatten() for part in parts]), NAMES), strict=True))
    found = merge_parts(parts)
    for name, expected in full.items():
        if expected is None:
            # Rounding may leave a spread of equal values, which have no skewness.
            assert math.isnan(found[name]) or name in ("skewness", "kurtosis"), name
        elif name in EXACT:
            assert found[name] == pytest.approx(expected, rel=1e-15), name
        elif name in ("skewness", "kurtosis"):
            assert found[name] == pytest.approx(expected, rel=1e-5, abs=1e-5), name
        else:
            scale = max(abs(expected), full["std"] or 0.0) if name == "mean" else abs(expected)
            assert abs(found[name] - expected) <= 1e-5 * scale + 1e-300, (name, found[name], expected)


numbers = st.one_of(
    st.floats(width=32),
    st.sampled_from([0.0, -0.0, 1e-30, 3e38, -3e38, math.nan, math.inf, -math.inf, 1000.0, 1000.001]),
)


@pytest.mark.slow
@given(st.lists(st.lists(numbers, max_size=20), min_size=1, max_size=5))
def test_merged_statistics_equal_those_of_the_full_tensor(values: list[list[float]]) -> None:
    check_merge([torch.tensor(part, dtype=torch.float32) for part in values])


@pytest.mark.parametrize("sizes", [(1000, 1000), (7, 50_000, 0, 3)])
@pytest.mark.parametrize("mean", [0.0, 1e4])
def test_merge_of_shards_of_any_size_and_mean(sizes: tuple[int, ...], mean: float) -> None:
    torch.manual_seed(0)
    check_merge([torch.randn(size, dtype=torch.float64) + mean * (1 + i) for i, size in enumerate(sizes)])


def test_merge_does_not_overflow() -> None:
    check_merge([torch.tensor([1e200, -1e200], dtype=torch.float64), torch.tensor([3e199], dtype=torch.float64)])


def test_merge_of_saturation_and_update_ratio() -> None:
    torch.manual_seed(0)
    parts = [torch.tanh(2 * torch.randn(40, 3)), torch.tanh(torch.randn(11, 3))]
    saturated: list[Any] = [count_saturated(part, (-1.0, 1.0)) for part in parts]
    weights = [5.0, 12.0]
    found = merge_parts(parts, saturated=saturated, weights=weights)
    full = torch.cat(parts)
    assert found["saturated_fraction"] == pytest.approx((full.abs() >= 0.97).double().mean().item())
    assert found["update_ratio"] == pytest.approx(full.norm().item() / 13.0)
    without = merge_parts(parts)
    assert math.isnan(without["saturated_fraction"])
    assert math.isnan(without["update_ratio"])


@pytest.mark.parametrize("units", [1, 47, 48, 49, 300])
def test_unit_is_dead_if_it_is_dead_in_all_shards(units: int) -> None:
    torch.manual_seed(units)
    parts = [torch.randn(4, units) * (torch.rand(units) < 0.5) for _ in range(3)]
    packed = np.stack([pack_units(dead_units(part, 1)).numpy() for part in parts])
    assert packed.shape[1] == math.ceil(units / 48)
    assert merge_units(packed) == (torch.cat(parts) == 0).all(0).sum()
    missing = np.full_like(packed[:1], np.nan)
    assert merge_units(np.concatenate([missing, packed])) == merge_units(packed)


LEVELS = (0.0, 0.001, 0.1, 0.25, 0.5, 0.9, 0.99, 1.0)


@pytest.mark.parametrize("sizes", [(20_000, 20_000), (500_000, 300), (3_000, 3_000, 3_000, 3_000)])
def test_merged_quantiles_are_within_one_percent_rank(sizes: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    parts = [torch.randn(size) * (1 + i) + i for i, size in enumerate(sizes)]
    rows = np.stack([sketch(part, True, 0).numpy() for part in parts])
    assert rows.shape[1] * 8 < 4096
    _, quantiles, low, high, counts = merge_distributions(rows, LEVELS, 0)
    assert low is high is counts is None
    full = torch.cat(parts).sort().values
    for level, value in zip(LEVELS, quantiles, strict=True):
        rank = torch.searchsorted(full, torch.tensor(value)).item() / len(full)
        assert abs(rank - level) < 0.01, level
    if max(sizes) <= 2 * SAMPLE:  # larger shards have sampled quantiles
        assert quantiles[0] == full[0]
        assert quantiles[-1] == full[-1]


def test_single_shard_keeps_its_quantiles() -> None:
    x = torch.arange(1001.0)
    _, quantiles, *_ = merge_distributions(sketch(x, True, 0).numpy()[None], (0.25, 0.5), 0)
    assert quantiles == pytest.approx([250.0, 500.0])


def test_merged_histograms_use_the_common_range() -> None:
    torch.manual_seed(0)
    parts = [torch.rand(10_000), torch.rand(30_000) * 2 - 1, torch.full((100,), 0.5), torch.empty(0)]
    rows = np.stack([sketch(part, False, 16).numpy() for part in parts])
    _, _, low, high, counts = merge_distributions(rows, (), 16)
    full = torch.cat(parts)
    assert (low, high) == (full.min().item(), full.max().item())
    assert sum(counts) == len(full)
    exact = distribution(full, (), 16)[2:]
    for count, expected in zip(counts, exact, strict=True):
        assert abs(count - expected) < 0.02 * len(full)  # type: ignore[operator]


def test_shards_with_a_common_range_have_exact_counts() -> None:
    parts = [torch.tensor([0.0, 1.0, 1.0, 4.0]), torch.tensor([0.0, 3.0, 4.0])]
    rows = np.stack([sketch(part, False, 4).numpy() for part in parts])
    assert merge_distributions(rows, (), 4)[-1] == [2, 2, 0, 3]


def test_merge_without_finite_values_is_empty() -> None:
    rows = np.stack([sketch(torch.tensor([math.nan]), True, 4).numpy()] * 2)
    assert merge_distributions(rows, LEVELS, 4) == (0, None, None, None, [0, 0, 0, 0])


def test_step_with_rows_of_interventions_only_is_merged() -> None:
    """Of two processes with the norms 3 and 4 before, 6 and 8 after, and the factors 0.5 and 2."""
    effects = [[8.0, 4.0, 3.0, 6.0, 0.5, math.nan], [8.0, 6.0, 4.0, 8.0, 2.0, math.nan]]
    no_sums = torch.empty(0, len(COLUMNS), dtype=torch.float64)
    parts = [RankNumbers(no_sums, torch.tensor([row], dtype=torch.float64), torch.empty(0)) for row in effects]
    maxima = torch.stack([part.ends for part in parts]).amax(0)
    sums, together = parts[0].merged(maxima, torch.stack([part.totals(maxima) for part in parts]).sum(0))
    assert len(sums) == 0
    assert together.tolist() == [pytest.approx([16.0, 10.0, 5.0, 10.0, math.nan, math.nan], nan_ok=True)]
