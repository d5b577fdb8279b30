"""Confidence intervals and p-values of means: few and equal numbers, and simulations. `effects_of` is compared with SciPy."""

from __future__ import annotations

import numpy as np
import pytest

from instrument.analysis.config_key_effects import adjusted, student


def test_interval_of_few_or_equal_numbers() -> None:
    found, _ = student(np.ones(4), np.array([0.0, 0.0, 0.0, np.inf]), np.array([0, 1, 2, 2]))
    assert np.isnan(found).tolist() == [True, True, False, True]
    assert found[2] == 0.0


def test_p_value_of_few_or_equal_numbers() -> None:
    _, found = student(np.array([3.0, 3.0, 0.0, 3.0]), np.array([0.0, 0.0, 0.0, np.inf]), np.array([1, 2, 2, 2]))
    assert np.isnan(found).tolist() == [True, False, False, True]
    assert found[1:3].tolist() == [0.0, 1.0]


def test_adjusted_p_values() -> None:
    found = adjusted(np.array([0.01, np.nan, 0.04, 0.03, 0.5]))  # p * tests / rank, and never above those that follow
    assert found[[0, 2, 3, 4]] == pytest.approx([0.04, 0.04 * 4 / 3, 0.04 * 4 / 3, 0.5])
    assert np.isnan(found[1])
    assert np.isnan(adjusted(np.full(2, np.nan))).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "bounds"),  # of the share of intervals that contain the mean
    [("normal", (0.94, 0.96)), ("lognormal", (0.81, 0.86))],
)
def test_coverage_of_the_intervals(name: str, bounds: tuple[float, float]) -> None:
    """4,000 samples of 10 numbers; the standard error of a share is below 0.6%."""
    rng = np.random.default_rng(0)
    sample = {"normal": rng.normal(1, 1, (10, 4000)), "lognormal": rng.lognormal(0, 1, (10, 4000))}[name]
    true = {"normal": 1.0, "lognormal": np.exp(0.5)}[name]
    mean = sample.mean(0)
    width, _ = student(mean, ((sample - mean) ** 2).sum(0), np.full(4000, 10))
    assert bounds[0] < (abs(mean - true) <= width).mean() < bounds[1]


@pytest.mark.slow
def test_false_discoveries_among_many_intervals() -> None:
    """1,000 tests of 8 numbers, 900 of which have no effect, repeated 50 times."""
    rng = np.random.default_rng(0)
    shares, found = [], []
    for _ in range(50):
        sample = rng.normal(0, 1, (8, 1000))
        sample[:, :100] += 2.0
        mean = sample.mean(0)
        _, p = student(mean, ((sample - mean) ** 2).sum(0), np.full(1000, 8))
        assert (p[100:] < 0.05).sum() > 20  # without the adjustment
        survives = adjusted(p) < 0.05
        shares.append(survives[100:].sum() / max(survives.sum(), 1))
        found.append(survives[:100].mean())
    assert np.mean(shares) < 0.05
    assert np.mean(found) > 0.8
