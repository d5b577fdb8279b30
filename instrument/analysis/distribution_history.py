"""Quantiles and histograms over steps in bounded memory: those of some steps, spread evenly over the run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from .plot_data import RecordedSeries

MAX_VALUES = 120_000  # the maximum number of quantiles and counts of all locations
FEWEST, MOST = 2, 40  # limits of the number of steps per location
COLUMNS = ("levels", "quantiles", "low", "high", "counts")


@dataclass
class LocationDistributions:
    """The distributions of one location: the last row of each group of `width` steps, and the first row of a step."""

    rows: dict[int, tuple[int, int, dict[str, Any]]] = field(
        default_factory=dict
    )  # by step // width: step, version, row
    width: int = 1
    step_count: int = 0  # the number of recorded steps
    has_several: bool = False  # whether a step has several rows


class DistributionHistory:
    """The distributions of all locations of a run.

    Attributes:
        locations: The distributions by series and name of the location.
        rebuilt: The version of the last change that concerns more than some steps.
    """

    def __init__(self) -> None:
        self.locations: dict[tuple[RecordedSeries, str], LocationDistributions] = {}
        self.rebuilt = 0
        self._numbers = 1  # the largest number of quantiles and counts in a row

    def add(self, at: tuple[RecordedSeries, str], rows: pa.Table, version: int) -> None:
        """Add rows of one location in the order in which they were written, with the columns `step` and `COLUMNS`."""
        location = self.locations.get(at)
        if location is None:
            location = self.locations[at] = LocationDistributions()
            self.rebuilt = version
        steps, first = np.unique(rows["step"].to_numpy(), return_index=True)
        location.step_count += len(steps)
        location.has_several |= len(steps) < rows.num_rows
        (row,) = rows.slice(int(first[0]), 1).to_pylist()
        self._numbers = max(self._numbers, len(row["quantiles"] or ()) + len(row["counts"] or ()))
        while True:  # groups become wider until there are few enough
            keys = steps // location.width
            most = int(np.clip(MAX_VALUES // (len(self.locations) * self._numbers), FEWEST, MOST))
            if len({*location.rows, *keys.tolist()}) <= most:
                break
            location.width *= 2
            location.rows = {key // 2: location.rows[key] for key in sorted(location.rows)}  # of two, the later row
            self.rebuilt = version
        last = np.append(keys[1:] != keys[:-1], True)
        kept = rows.take(first[last]).select(COLUMNS).to_pylist()
        for key, step, row in zip(keys[last].tolist(), steps[last].tolist(), kept, strict=True):
            if key not in location.rows or location.rows[key][0] < step:
                location.rows[key] = step, version, row
