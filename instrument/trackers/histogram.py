"""Histograms of rows as edges and counts, the format of other tools."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple, Self

import numpy as np

from ..tables.schemas import TABLES
from ..tables.sink_interface import Row

# Half the width of a histogram of equal values, relative to the value. Tools do not draw bins without width.
MIN_RELATIVE_WIDTH = 1e-6
_COLUMNS = ("low", "high", "counts")
_CELLS_OF = {
    name: itemgetter(*map(table.names.index, _COLUMNS))
    for name, table in TABLES.items()
    if {*_COLUMNS} <= {*table.names}
}


class Histogram(NamedTuple):
    """Counts in equal-width bins from the smallest to the largest value. If all values are equal, all are in the first bin."""

    low: float
    high: float
    counts: Sequence[int]

    @classmethod
    def of(cls, table: str, row: Row) -> Self | None:
        """Return the histogram of a row of a table; None if it has none or no value was finite."""
        cells = _CELLS_OF[table](row) if table in _CELLS_OF else (None,)
        return None if None in cells else cls(*cells)

    def bins(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return the edges, shape [bins + 1], and the counts, shape [bins]. One narrow bin if all values are equal."""
        if self.low == self.high:
            half_width = max(abs(self.low), MIN_RELATIVE_WIDTH) * MIN_RELATIVE_WIDTH
            return np.array([self.low - half_width, self.low + half_width]), np.array([sum(self.counts)])
        fraction = np.linspace(0.0, 1.0, len(self.counts) + 1)
        # `high - low` may overflow.
        return self.low * (1.0 - fraction) + self.high * fraction, np.asarray(self.counts)


def merge_histograms(histograms: Sequence[Histogram]) -> Histogram:
    """Combine histograms into one with as many bins as the finest. A count may move to an adjacent bin."""
    if len(histograms) == 1:
        return histograms[0]
    low, high = min(h.low for h in histograms), max(h.high for h in histograms)
    counts = np.zeros(max(len(h.counts) for h in histograms), np.int64)
    for histogram in histograms:
        edges, own = histogram.bins()
        middles = edges[:-1] * 0.5 + edges[1:] * 0.5
        fraction = (middles * 0.5 - low * 0.5) / (high * 0.5 - low * 0.5) if high > low else np.zeros(len(middles))
        np.add.at(counts, np.clip((fraction * len(counts)).astype(np.int64), 0, len(counts) - 1), own)
    return Histogram(low, high, counts.tolist())
