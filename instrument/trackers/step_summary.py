"""Summary of a step for trackers: numbers, histograms and texts, one per tag."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from ..tables.schemas import TABLES
from ..tables.sink_interface import Row
from .tags import SCALAR_TABLES, Fold, scalars, tag_prefix

# Half the width of a histogram of equal values, relative to the value. Tools do not draw bins without width.
MIN_RELATIVE_WIDTH = 1e-6
MAX_BINS = 512  # of a histogram of W&B or Trackio
_CELLS = itemgetter(*map(TABLES["distributions"].names.index, ("low", "high", "counts")))


class Histogram(NamedTuple):
    """Counts in equal-width bins from the smallest to the largest value. If all values are equal, all are in the first bin."""

    low: float
    high: float
    counts: Sequence[int]

    def bins(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return the edges, shape [bins + 1], and the counts, shape [bins]. One narrow bin if all values are equal."""
        if self.low == self.high:
            half_width = max(abs(self.low), MIN_RELATIVE_WIDTH) * MIN_RELATIVE_WIDTH
            return np.array([self.low - half_width, self.low + half_width]), np.array([sum(self.counts)])
        fraction = np.linspace(0.0, 1.0, len(self.counts) + 1)
        # `high - low` may overflow.
        return self.low * (1.0 - fraction) + self.high * fraction, np.asarray(self.counts)


def few_bins(histogram: Histogram) -> tuple[Any, Any]:
    """Return counts and edges, with adjacent bins combined if there are more than W&B and Trackio allow."""
    edges, counts = histogram.bins()
    bins_per_group = -(-len(counts) // MAX_BINS)
    starts = range(0, len(counts), bins_per_group)
    return np.add.reduceat(counts, starts), np.append(edges[starts], edges[-1])


@dataclass
class StepSummary:
    """The summary of one step, by tag."""

    # Numbers. Several values of a tag are combined as the statistic defines (`merged`), or by their mean.
    scalars: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, Histogram] = field(default_factory=dict)  # the first one of each tag
    texts: dict[str, str] = field(default_factory=dict)  # events, one per line


class SummaryCollector:
    """Collects rows and returns one summary per step."""

    def __init__(self) -> None:
        self._steps: defaultdict[int, StepSummary] = defaultdict(StepSummary)
        self._values: defaultdict[int, defaultdict[tuple[str, Fold], list[float]]] = defaultdict(
            lambda: defaultdict(list)
        )

    def add(self, table: str, rows: Sequence[Row]) -> None:
        """Add rows of any table except `tensors`."""
        for row in rows if table in SCALAR_TABLES else ():
            for tag, step, value, fold in scalars(table, row):
                self._values[step][tag, fold].append(value)
            if table == "distributions" and None not in (cells := _CELLS(row)):  # null if no value was finite
                self._steps[row[0]].histograms.setdefault(f"{tag_prefix(row)}/histogram", Histogram(*cells))
        for step, _, layer, rule, message, severity, *_ in rows if table == "events" else ():
            texts, tag = self._steps[step or 0].texts, f"events/{severity}"
            known = f"{texts[tag]}\n\n" if tag in texts else ""
            texts[tag] = f"{known}{rule}{f' {layer}' if layer else ''}: {message}"

    def take(self) -> Iterator[tuple[int, StepSummary]]:
        """Yield the collected summaries in the order of the steps. Steps without content are omitted."""
        for step in sorted({*self._steps, *self._values}):
            values = self._values.pop(step, {}).items()
            numbers = {tag: each[0] if len(each) == 1 else fold(each) for (tag, fold), each in values}
            yield step, replace(self._steps.pop(step, StepSummary()), scalars=numbers)
