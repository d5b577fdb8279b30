"""Input of the plots: a run, or a DataFrame with the columns of one of its tables."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from ..analysis.load import Run
from ..analysis.plot_data import KEYS, RecordedSeries, statistics_in
from ..analysis.series_selection import check_choice, series_where
from ..errors import InstrumentError
from ..spec.statistics import STATISTICS
from ..spec.tables import TABLES

REQUIRED_COLUMNS = (*KEYS, "layer", "path", "step", "recompute")
MOST_RUNS = 6  # maximum number of run names in an error message


def table_of(data: Run | pd.DataFrame, table: str) -> pd.DataFrame:
    """Return a table of one run; a DataFrame is returned unchanged.

    Raises:
        InstrumentError: The table has no rows, contains several runs, or lacks a column.
    """
    if isinstance(data, Run):
        check_single_run([str(folder.name) for folder in data.folders])
    frame: pd.DataFrame = getattr(data, table) if isinstance(data, Run) else data
    check_columns(frame, table)
    check_single_run(list(dict.fromkeys(frame["run"])) if "run" in frame else [])
    return frame


def check_columns(frame: pd.DataFrame, table: str, needed: Sequence[str] = REQUIRED_COLUMNS) -> None:
    """Check that a table has rows and the needed columns.

    Raises:
        InstrumentError: The table is empty, or a column is missing.
    """
    if missing := [name for name in needed if name not in frame]:
        names = ", ".join(missing)
        raise InstrumentError(f"this plot requires columns that are missing from the {table} table: {names}")
    if frame.empty:
        settings = {"stats": "'stats'", "tensors": "'tensors: true'"}.get(
            table, " or ".join(map(repr, TABLES[table].fields))
        )
        raise InstrumentError(
            f"the {table} table has no rows" + (f"; set {settings} in a record hook" if settings else "")
        )


def check_single_run(runs: list[str]) -> None:
    """Check that there is at most one run.

    Raises:
        InstrumentError: There are several runs.
    """
    if len(runs) > 1:
        names = ", ".join(runs[:MOST_RUNS]) + (", ..." if len(runs) > MOST_RUNS else "")
        raise InstrumentError(
            f"this plot requires a single run, but {len(runs)} were given ({names}): "
            "load one of them, or use instrument.plot.compare"
        )


def series_with(stats: pd.DataFrame, statistic: str | None) -> list[RecordedSeries]:
    """Return the series that have a value of a statistic; with None, the series that have a value of any statistic.

    Raises:
        InstrumentError: No series has a value of the statistic.
    """
    there = statistics_in(stats)
    if statistic is None:
        return series_where(stats, lambda rows: bool(statistics_in(rows)))
    fix = f"add {statistic} to 'stats' in a record hook" if statistic in STATISTICS else ""
    check_choice(statistic, there, "statistic", "no hook recorded this statistic", fix)
    return series_where(stats, lambda rows: bool(rows[statistic].notna().any()))
