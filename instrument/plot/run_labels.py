"""Tables of several runs, and labels for the runs."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from ..analysis.load import Run
from ..errors import InstrumentError
from ..tables.schemas import TABLES

LONG = 60  # maximum length of a label, in characters


def combine_runs(runs: Run | Sequence[Run]) -> Run:
    """Combine several loaded runs into one `Run`, as if a common parent folder had been loaded.

    Raises:
        InstrumentError: `runs` is empty.
    """
    if isinstance(runs, Run) and len(runs.folders) > 1:
        return runs
    all_runs = [runs] if isinstance(runs, Run) else runs
    folders = list(dict.fromkeys(folder.resolve() for run in all_runs for folder in run.folders))
    if not folders:
        raise InstrumentError("runs is empty")
    return Run(Path(os.path.commonpath([folder.parent for folder in folders])), folders)


def overrides_of(frame: pd.DataFrame, table: str) -> pd.DataFrame:
    """Return the overrides of a table that differ between its runs: one row per run, one column per override."""
    known = TABLES[table].names
    own = [str(name) for name in frame if name != "run" and name not in known and _is_constant(frame, str(name))]
    first = frame.drop_duplicates("run").set_index("run")[own]
    return first[[name for name in own if first[name].map(str).nunique() > 1]]


def _is_constant(frame: pd.DataFrame, name: str) -> bool:
    """Return whether a column has one value in each run: a custom statistic or metric is not an override."""
    if not pd.api.types.is_float_dtype(frame[name]):
        return True
    return bool((frame.groupby("run")[name].nunique(dropna=False) == 1).all())


def labels_of(overrides: pd.DataFrame) -> dict[str, str]:
    """Return the overrides of each run as a label; with the folder of the run if it is too long or not unique."""
    labels = {run: overrides_text(row) for run, row in overrides.iterrows()}
    counts = Counter(labels.values())
    unique = {label for label in counts if label and counts[label] == 1 and len(label) <= LONG}
    return {
        str(run): label if label in unique else " ".join([str(run), label]).strip() for run, label in labels.items()
    }


def overrides_text(row: pd.Series) -> str:
    """Return the overrides of a run as one line, such as `optimizer.lr=0.1 seed=1`; missing overrides are omitted."""
    return " ".join(f"{name}={value_text(value)}" for name, value in row.items() if not is_missing(value))


def value_text(value: object) -> str:
    """Return a value as it is written on the command line."""
    # Missing values turn a column of integers into floats, so 1.0 becomes `1`.
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def is_missing(value: object) -> bool:
    """Return whether the value marks an override that a run does not have."""
    return value is pd.NA or (isinstance(value, float) and math.isnan(value))
