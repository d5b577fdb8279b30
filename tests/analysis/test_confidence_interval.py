"""Student's confidence interval, compared with SciPy's."""

from __future__ import annotations

import numpy as np
import pytest
import scipy
from hypothesis import assume, given
from hypothesis import strategies as st

from instrument.analysis.confidence_interval import half_width


@given(numbers=st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=20), confidence=st.floats(0.01, 0.999))
def test_interval_equals_that_of_scipy(numbers: list[float], confidence: float) -> None:
    sample = np.array(numbers)
    mean, squares = sample.mean(), ((sample - sample.mean()) ** 2).sum()
    assume(sample.std() > 1e-6 * (1 + abs(mean)))
    interval = scipy.stats.ttest_1samp(sample, 0.0).confidence_interval(confidence)
    width = half_width(squares, np.array(len(numbers)), confidence)
    assert [mean - width, mean + width] == pytest.approx([interval.low, interval.high], rel=1e-6, abs=1e-9)


def test_interval_of_few_or_equal_numbers() -> None:
    found = half_width(np.array([0.0, 0.0, 0.0, np.inf]), np.array([0, 1, 2, 2]))
    assert np.isnan(found).tolist() == [True, True, False, True]
    assert found[2] == 0.0
