"""Input of the plots: a run, or a DataFrame with the columns of one of its tables."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from ..analysis.load import Run
from ..analysis.series import KEYS, Series, statistics_in
from ..analysis.series_selection import refuse_unless, seen_in
from ..errors import InstrumentError

NEEDED = (*KEYS, "layer", "path", "step", "recompute")
MOST_RUNS = 6  # maximum number of run names in an error message


def table_of(data: Run | pd.DataFrame, table: str) -> pd.DataFrame:
    """Return a table of one run; a DataFrame is returned unchanged.

    Raises:
        InstrumentError: The table has no rows, contains several runs, or lacks a column.
    """
    if isinstance(data, Run):
        refuse_several([str(folder.name) for folder in data.folders])
    frame: pd.DataFrame = getattr(data, table) if isinstance(data, Run) else data
    check(frame, table)
    refuse_several(list(dict.fromkeys(frame["run"])) if "run" in frame else [])
    return frame


def check(frame: pd.DataFrame, table: str, needed: Sequence[str] = NEEDED) -> None:
    """Check that a table has rows and the needed columns.

    Raises:
        InstrumentError: The table is empty, or a column is missing.
    """
    if missing := [name for name in needed if name not in frame]:
        raise InstrumentError(f"for this picture the {table} table lacks the column {', '.join(missing)}")
    if frame.empty:
        raise InstrumentError(f"the {table} table has no rows: nothing of the kind was recorded")


def refuse_several(runs: list[str]) -> None:
    """Check that there is at most one run.

    Raises:
        InstrumentError: There are several runs.
    """
    if len(runs) > 1:
        names = ", ".join(runs[:MOST_RUNS]) + (", ..." if len(runs) > MOST_RUNS else "")
        raise InstrumentError(
            f"this picture is of one run, and here are {len(runs)} ({names}): load one of them, or use instrument.plot.compare"
        )


def series_with(stats: pd.DataFrame, statistic: str | None) -> list[Series]:
    """Return the series that have a value of a statistic; with None, the series that have a value of any statistic.

    Raises:
        InstrumentError: No series has a value of the statistic.
    """
    there = statistics_in(stats)
    if statistic is None:
        return seen_in(stats, lambda rows: bool(statistics_in(rows)))
    refuse_unless(statistic, there, "statistic", "no hook has recorded a value of it")
    return seen_in(stats, lambda rows: bool(rows[statistic].notna().any()))
