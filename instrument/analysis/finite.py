"""The rule that decides which rows of statistics are finite. All plots, findings and means use it.

Statistics are computed over finite elements. A gradient that is NaN except for a few zeros has the norm 0.0, which
looks like a vanished gradient. A row counts as non-finite if the fraction of NaN and infinite elements reaches the threshold of
`instrument.rules.step_rows.non_finite_fraction`; only the counts of such a row are shown. Without `numel`, as in runs of earlier
versions, any NaN or infinity makes the row non-finite.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from ..rules.step_rows import non_finite_fraction
from ..tables.statistics import STATISTICS

NON_FINITE_COUNTS = ("nan_count", "inf_count")
REQUIRED_COLUMNS = ("kind", "role", "numel", *NON_FINITE_COUNTS)
FINITE_STATISTICS = tuple(name for name, statistic in STATISTICS.items() if statistic.unit not in ("count", "bits"))
"""The statistics that are invalid in a non-finite row."""


def is_not_finite(stats: pd.DataFrame) -> pd.Series:
    """Return which rows of statistics are non-finite: a boolean Series. Of `REQUIRED_COLUMNS`, only `kind` and `role` are required."""
    bad = sum((stats[name].fillna(0) for name in NON_FINITE_COUNTS if name in stats), pd.Series(0, stats.index))
    if not bad.any():
        return bad > 0
    numel = stats["numel"].fillna(0) if "numel" in stats else 0
    pairs = stats[["kind", "role"]].drop_duplicates().itertuples(index=False)
    most = {(kind, role): non_finite_fraction(kind, role) for kind, role in pairs}
    allowed = np.array([most[pair] for pair in zip(stats["kind"], stats["role"], strict=True)])
    return (bad > 0) & (bad >= allowed * numel)


def finite_only(stats: pd.DataFrame) -> pd.DataFrame:
    """Return the rows with statistics other than counts removed from non-finite rows.

    If all rows are finite, the same object is returned.
    """
    lost = is_not_finite(stats)
    if not lost.any():
        return stats
    return stats.assign(**{name: stats[name].mask(lost) for name in FINITE_STATISTICS if name in stats})


def not_finite_in(batch: pa.RecordBatch) -> np.ndarray:
    """Return which rows of a batch with the columns `REQUIRED_COLUMNS` are non-finite; bool, shape [rows]."""
    if not any(pc.any(pc.greater(batch[name], 0)).as_py() for name in NON_FINITE_COUNTS):
        return np.zeros(batch.num_rows, dtype=bool)
    return is_not_finite(batch.select(REQUIRED_COLUMNS).to_pandas()).to_numpy()
