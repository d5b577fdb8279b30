"""Confidence intervals of a mean, p-values, and their adjustment for many tests."""

from __future__ import annotations

import numpy as np

CONFIDENCE = 0.95  # the usual confidence level


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

    Returns:
        The adjusted p-values [tests]; NaN for no test.
    """
    from scipy.stats import false_discovery_control

    result = np.full(p_values.shape, np.nan)
    known = ~np.isnan(p_values)
    if known.any():
        result[known] = false_discovery_control(p_values[known])
    return result
