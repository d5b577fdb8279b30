"""Student's confidence interval of a mean."""

from __future__ import annotations

import numpy as np

CONFIDENCE = 0.95  # the usual confidence level


def half_width(squares: np.ndarray, counts: np.ndarray, confidence: float = CONFIDENCE) -> np.ndarray:
    """Return half the width of the confidence interval of a mean; NaN for fewer than two numbers.

    The half width is t((1 + confidence) / 2, n - 1) * s / sqrt(n).

    Args:
        squares: Sum of the squared distances of the numbers to their mean, (n - 1) s^2; any shape.
        counts: How many numbers there are, n; same shape.
        confidence: Confidence level between 0 and 1.
    """
    from scipy.special import stdtrit

    freedom = np.maximum(counts - 1, 1)
    width = stdtrit(freedom, (1 + confidence) / 2) * np.sqrt(squares / freedom / np.maximum(counts, 1))
    return np.where((counts > 1) & np.isfinite(width), width, np.nan)
