"""Several runs in one table, and what tells them apart."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from ..analysis.load import Run
from ..capture.tables import TABLES
from ..errors import InstrumentError

LONG = 60  # letters of a label


def together(runs: Run | Sequence[Run]) -> Run:
    """Runs that were loaded one by one, as one folder above them would have them.

    Raises:
        InstrumentError: There is none.
    """
    if isinstance(runs, Run) and len(runs.folders) > 1:
        return runs
    given = [runs] if isinstance(runs, Run) else runs
    folders = list(dict.fromkeys(folder.resolve() for run in given for folder in run.folders))
    if not folders:
        raise InstrumentError("there is no run to compare")
    return Run(Path(os.path.commonpath([folder.parent for folder in folders])), folders)


def overrides_of(frame: pd.DataFrame, table: str) -> pd.DataFrame:
    """What the runs of a table were started with: a row a run, a column for each override in which they differ."""
    known = TABLES[table].names
    own = [name for name in frame if name != "run" and name not in known]
    first = frame.drop_duplicates("run").set_index("run")[own]
    return first[[name for name in own if first[name].map(str).nunique() > 1]]


def labels_of(overrides: pd.DataFrame) -> dict[str, str]:
    """A name for each run: its overrides that differ, behind its folder where they are long or do not tell it from others."""
    told = {run: told_of(row) for run, row in overrides.iterrows()}
    count = Counter(told.values())
    alone = {label for label in count if label and count[label] == 1 and len(label) <= LONG}
    return {str(run): label if label in alone else " ".join([str(run), label]).strip() for run, label in told.items()}


def told_of(row: pd.Series) -> str:
    """`optimizer.lr=0.1 seed=1`: overrides in one line, those that a run was not started with left out."""
    return " ".join(f"{name}={written(value)}" for name, value in row.items() if not is_missing(value))


def written(value: object) -> str:
    """A value as one would write it on the command line: 1, where a column with gaps has made it 1.0."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def is_missing(value: object) -> bool:
    """Whether a run has no such override, where others have."""
    return value is pd.NA or (isinstance(value, float) and math.isnan(value))
