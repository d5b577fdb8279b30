"""Colors and labels that all plots and the report share. This module does not import matplotlib.

Categories use the palette of Okabe and Ito (2008), which is safe for color vision deficiencies. Magnitudes use
`image.cmap` of matplotlib, by default viridis.
Signed values use RdBu, with red for positive values and zero in the middle.
"""

from __future__ import annotations

from ..tables.statistics import statistic_of

CATEGORIES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
SIGNED = "RdBu_r"
ZERO = "#9a9a9a"  # color of zeros on a logarithmic scale
WIDE = 100.0  # ratio of largest to smallest value from which a scale is logarithmic

_LABELS = {"count": "elements", "units": "fraction of units", "value": "", "custom": ""}  # of units with another name


def axis_name(statistic: str) -> str:
    """Return the name of a statistic with its unit, such as `l2` or `zero_fraction [fraction]`."""
    unit = statistic_of(statistic).unit
    label = _LABELS.get(unit, unit)
    return f"{statistic} [{label}]" if label and label not in statistic else statistic
