"""Confidence intervals of a mean, p-values, and their adjustment for many tests."""

from __future__ import annotations

import numpy as np

CONFIDENCE = 0.95  # the usual confidence level
RESAMPLES = 9999  # as in scipy.stats.bootstrap
MIN_RESAMPLED = 5  # Fewer numbers have too few different resamples: 3 numbers have 10.
CELLS = 256  # means that are resampled at a time, which takes 20 MB per array


def student(
    means: np.ndarray, squares: np.ndarray, counts: np.ndarray, confidence: float = CONFIDENCE
) -> tuple[np.ndarray, np.ndarray]:
    """Return half the width of Student's confidence interval of a mean, and the two-sided p-value of the test that it is zero.

    The half width is t((1 + confidence) / 2, n - 1) * s / sqrt(n). The p-value is below 1 - confidence where the interval does
    not contain zero.

    Args:
        means: The means; any shape.
        squares: Sum of the squared distances of the numbers to their mean, (n - 1) s^2; same shape.
        counts: How many numbers there are, n; same shape.
        confidence: Confidence level between 0 and 1.

    Returns:
        Both in the same shape; NaN for fewer than two numbers.
    """
    from scipy.special import stdtr, stdtrit

    freedom = np.maximum(counts - 1, 1)
    error = np.sqrt(squares / freedom / np.maximum(counts, 1))
    known = (counts > 1) & np.isfinite(error)
    with np.errstate(divide="ignore", invalid="ignore"):  # equal numbers have no error
        t = np.where(means == 0, 0.0, np.abs(means) / error)
        width = stdtrit(freedom, (1 + confidence) / 2) * error
    return np.where(known, width, np.nan), np.where(known & np.isfinite(means), 2 * stdtr(freedom, -t), np.nan)


def adjusted(p_values: np.ndarray) -> np.ndarray:
    """Adjust p-values for their number, so that a limit on them bounds the false discovery rate.

    The method is that of Y. Benjamini and Y. Hochberg, Journal of the Royal Statistical Society B 57 (1995), 289-300, from
    `scipy.stats.false_discovery_control`.

    Args:
        p_values: P-values [tests]; NaN for no test.

    Returns:
        The adjusted p-values [tests]; NaN for no test.
    """
    from scipy.stats import false_discovery_control

    result = np.full(p_values.shape, np.nan)
    known = ~np.isnan(p_values)
    if known.any():
        result[known] = false_discovery_control(p_values[known])
    return result


def bootstrapped(
    numbers: np.ndarray, confidence: float = CONFIDENCE, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the bootstrap-t intervals of means, and the p-values of the test that a mean is zero.

    The interval is mean - t_high * e to mean - t_low * e, where e is the standard error, and t_low and t_high are quantiles of
    (resampled mean - mean) / resampled standard error over resamples of the numbers (B. Efron and R. J. Tibshirani, An
    Introduction to the Bootstrap, 1993, section 12.5). It needs no normal distribution, and contains the mean of skewed numbers
    more often than Student's interval and than percentiles of resampled means (T. C. Hesterberg, The American Statistician 69
    (2015), 371-386).

    Args:
        numbers: The numbers [n, means]; NaN for no number.
        confidence: Confidence level between 0 and 1.
        seed: Seed of the resamples. Default: 0.

    Returns:
        The lower and upper bounds and the p-values, [means] each; NaN for fewer than 5 numbers, or without a bound because too
        many resamples consist of equal numbers.
    """
    bounds = np.full((3, numbers.shape[1]), np.nan)
    known = ~np.isnan(numbers)
    patterns, which = np.unique(known, axis=1, return_inverse=True)
    for index, pattern in enumerate(patterns.T):
        cells = np.flatnonzero(which.reshape(-1) == index)
        count = int(pattern.sum())
        if count < MIN_RESAMPLED:
            continue
        draws = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), RESAMPLES)
        weights = draws / count  # [resamples, numbers]
        for start in range(0, len(cells), CELLS):
            some = cells[start : start + CELLS]
            bounds[:, some] = _bootstrapped(numbers[np.ix_(pattern, some)], weights, confidence)
    low, high, p = bounds
    return low, high, p


def _bootstrapped(numbers: np.ndarray, weights: np.ndarray, confidence: float) -> np.ndarray:
    """Return the bounds and p-values, [3, means], of complete numbers [n, means] with the weights [resamples, n]."""
    count = len(numbers)
    mean = numbers.mean(0)
    off = numbers - mean
    is_constant = (numbers == numbers[0]).all(0)
    error = np.sqrt((off**2).sum(0) / (count - 1) / count)
    off_means = weights @ off
    variances = np.maximum(weights @ off**2 - off_means**2, 0.0)
    variances[np.isin(weights, (0.0, 1.0)).all(1)] = 0.0  # a resample of one number
    with np.errstate(divide="ignore", invalid="ignore"):
        t = off_means / np.sqrt(variances / (count - 1))
        given = mean / error
        tails = (1 - confidence) / 2
        t_low, t_high = np.quantile(t, [tails, 1 - tails], axis=0, method="inverted_cdf")
        found = np.stack([mean - t_high * error, mean - t_low * error])
    found = np.where(np.isfinite(found), found, np.nan)
    sides = np.stack([(t <= given).sum(0), (t >= given).sum(0)])
    p = np.minimum(2 * (sides.min(0) + 1) / (len(weights) + 1), 1.0)
    p = np.where(np.isnan(found).any(0), np.nan, p)
    found = np.where(is_constant, mean, found)
    p = np.where(is_constant, np.where(mean == 0, 1.0, 0.0), p)
    return np.stack([*found, p])
