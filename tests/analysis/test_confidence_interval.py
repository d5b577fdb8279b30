"""Student's interval, against SciPy's."""

from __future__ import annotations

import numpy as np
import pytest
import scipy
from hypothesis import assume, given
from hypothesis import strategies as st

from instrument.analysis.confidence_interval import half_width


@given(numbers=st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=20), confidence=st.floats(0.01, 0.999))
def test_it_is_the_one_of_scipy(numbers: list[float], confidence: float) -> None:
    given_ones = np.array(numbers)
    mean, squares = given_ones.mean(), ((given_ones - given_ones.mean()) ** 2).sum()
    assume(given_ones.std() > 1e-6 * (1 + abs(mean)))
    interval = scipy.stats.ttest_1samp(given_ones, 0.0).confidence_interval(confidence)
    width = half_width(squares, np.array(len(numbers)), confidence)
    assert [mean - width, mean + width] == pytest.approx([interval.low, interval.high], rel=1e-6, abs=1e-9)


def test_fewer_than_two_numbers_have_none_and_equal_ones_one_of_no_width() -> None:
    found = half_width(np.array([0.0, 0.0, 0.0, np.inf]), np.array([0, 1, 2, 2]))
    assert np.isnan(found).tolist() == [True, True, False, True]
    assert found[2] == 0.0
