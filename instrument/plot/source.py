"""Input of the plots: a run, or a DataFrame with the columns of one of its tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import pandas as pd

from ..analysis.load import Run
from ..analysis.plot_data import KEYS, PlottedTensor, RecordedSeries, check_choice, series_where, statistics_in
from ..errors import InstrumentError, Problem
from ..tables.schemas import TABLES
from ..tables.statistics import STATISTICS

REQUIRED_COLUMNS = (*KEYS, "layer", "path", "step", "recompute")
MAX_RUNS = 6  # maximum number of run names in an error message
T = TypeVar("T", bound=PlottedTensor)


def table_of(data: Run | pd.DataFrame, table: str) -> pd.DataFrame:
    """Return a table of one run; a DataFrame is returned unchanged.

    Raises:
        InstrumentError: The table has no rows, contains several runs, or lacks a column.
    """
    check_source(data, table)
    if not isinstance(data, Run):
        return data
    frame: pd.DataFrame = getattr(data, table)
    check_columns(frame, table)
    return frame


def check_source(data: Run | pd.DataFrame, table: str) -> None:
    """Raise an InstrumentError unless the data are a single run, or rows with all columns of a table of a single run."""
    check_type(data)
    if isinstance(data, Run):
        check_single_run([folder.name for folder in data.folders])
    else:
        check_columns(data, table, (*REQUIRED_COLUMNS, *(("dtype", "source_shape") if table == "tensors" else ())))
        check_single_run(list(dict.fromkeys(data["run"])) if "run" in data else [])


def check_type(data: object, *, only_run: bool = False) -> None:
    """Raise an InstrumentError if the data are neither a run nor, unless `only_run`, rows."""
    if not isinstance(data, Run if only_run else Run | pd.DataFrame):
        fix = "for a probe, pass probe.run; for a folder, pass instrument.load(FOLDER)"
        message = "must be a run" + ("" if only_run else ", or a DataFrame of its rows")
        raise InstrumentError(Problem("run", message, type(data).__name__, fix=fix))


def check_columns(frame: pd.DataFrame, table: str, needed: Sequence[str] = REQUIRED_COLUMNS) -> None:
    """Raise an InstrumentError if a table is no DataFrame, has no rows, or lacks a needed column."""
    if not isinstance(frame, pd.DataFrame):
        raise InstrumentError(f"this plot requires the {table} table, but a {type(frame).__name__} was given")
    if missing := [name for name in needed if name not in frame]:
        names = ", ".join(missing)
        raise InstrumentError(f"this plot requires columns that are missing from the {table} table: {names}")
    if frame.empty:
        of_table = " or ".join(map(repr, TABLES[table].fields)) if table in TABLES else ""
        settings = {"stats": "'stats'", "tensors": "'tensors: true'"}.get(table, of_table)
        fix = f"; set {settings} in a record hook" if settings else ""
        raise InstrumentError(f"the {table} table has no rows{fix}")


def check_single_run(runs: list[str]) -> None:
    """Raise an InstrumentError if there are several runs."""
    if len(runs) > 1:
        names = ", ".join(runs[:MAX_RUNS]) + (", ..." if len(runs) > MAX_RUNS else "")
        raise InstrumentError(
            f"this plot requires a single run, but {len(runs)} were given ({names}): "
            "load one of them, or use instrument.plot.compare"
        )


def at_layers(tensors: Sequence[T], layers: str | Sequence[str] | None, message: str, fix: str = "") -> list[T]:
    """Return the tensors of some layers or locations; with None, all of them.

    Raises:
        InstrumentError: A layer has no tensor; `message` and `fix` describe it.
    """
    wanted = [layers] if isinstance(layers, str) else layers
    if wanted is None:
        return list(tensors)
    names = [(one.location, one.layer or ".") for one in tensors]
    for layer in wanted:
        check_choice(layer, [name for both in names for name in both], "layer", message, fix)
    return [one for one, both in zip(tensors, names, strict=True) if not set(wanted).isdisjoint(both)]


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
