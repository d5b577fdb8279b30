"""How well a mean is known: Student's interval."""

from __future__ import annotations

import numpy as np

CONFIDENCE = 0.95  # as usual


def half_width(squares: np.ndarray, counts: np.ndarray, confidence: float = CONFIDENCE) -> np.ndarray:
    """By how much the mean of n numbers may be off, t((1 + confidence) / 2, n - 1) * s / sqrt(n); NaN of fewer than two.

    Args:
        squares: The sum of the squared distances of the numbers to their mean: (n - 1) s^2; any shape.
        counts: How many they are, n; the same shape.
        confidence: Between 0 and 1.
    """
    from scipy.special import stdtrit

    freedom = np.maximum(counts - 1, 1)
    width = stdtrit(freedom, (1 + confidence) / 2) * np.sqrt(squares / freedom / np.maximum(counts, 1))
    return np.where((counts > 1) & np.isfinite(width), width, np.nan)
