"""Colours and words that all pictures share, those of the report too. Nothing here imports matplotlib.

Categories have the palette of Okabe and Ito (2008), which people with colour vision deficiencies tell apart; magnitudes have
viridis, and signed values RdBu with red for positive ones, whose middle is zero.
"""

from __future__ import annotations

from ..spec.statistics import STATISTICS

CATEGORIES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
MAGNITUDE = "viridis"
SIGNED = "RdBu_r"
ZERO = "#9a9a9a"  # what is exactly zero where the scale is logarithmic
WIDE = 100.0  # the largest value over the smallest from which on a scale is logarithmic

_UNITS = {"count": "elements", "fraction": "fraction", "units": "fraction of units", "ratio": "ratio", "value": ""}


def axis_name(statistic: str) -> str:
    """`l2`, `zero_fraction [fraction]`: a statistic with its unit, where it has one of its own."""
    unit = _UNITS[STATISTICS[statistic].unit]
    return f"{statistic} [{unit}]" if unit and unit not in statistic else statistic
