"""Which rows of statistics stand for their tensors. All pictures, findings and means of a run go by this one rule.

Statistics are of the finite elements. Of a gradient that is NaN but for a few zeros the norm is 0.0, which reads as a vanished
gradient, and is none. A row with this share of NaN and infinities, or more, is itself not finite: only its counts are shown.

| of | share |
|---|---|
| gradients, parameters, updates and the like, none of which may have any | 1% |
| other tensors, in which infinities may be a mask | 50% |

The counts are recorded with every other statistic. Runs of earlier versions may lack them: without `numel` the share is not known,
and any NaN or infinity is too much; where they were not counted, none is known of.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from ..spec.kinds import KINDS
from ..spec.statistics import STATISTICS

BAD = ("nan_count", "inf_count")
NEEDED = ("kind", "role", "numel", *BAD)
TOO_MANY, TOO_MANY_OF_A_MASK = 0.01, 0.5
OF_FINITE_VALUES = tuple(name for name, statistic in STATISTICS.items() if statistic.unit != "count")
"""The statistics that such a row does not have."""


def is_gradient(kind: str, role: str) -> bool:
    """Whether a role of a kind is a gradient."""
    return "grad" in role or kind == "tensor"


def is_not_finite(stats: pd.DataFrame) -> pd.Series:
    """Which rows of statistics are themselves not finite.

    Args:
        stats: Rows with `kind` and `role`; of NEEDED it may lack the others.

    Returns:
        bool, with the index of the rows.
    """
    bad = sum((stats[name].fillna(0) for name in BAD if name in stats), pd.Series(0, stats.index))
    if not bad.any():
        return bad > 0
    numel = stats["numel"].fillna(0) if "numel" in stats else 0
    pairs = stats[["kind", "role"]].drop_duplicates().itertuples(index=False)
    most = {
        (kind, role): TOO_MANY if is_gradient(kind, role) or KINDS[kind].family != "module" else TOO_MANY_OF_A_MASK
        for kind, role in pairs
    }
    allowed = np.array([most[pair] for pair in zip(stats["kind"], stats["role"], strict=True)])
    return (bad > 0) & (bad >= allowed * numel)


def finite_only(stats: pd.DataFrame) -> pd.DataFrame:
    """The rows, with counts alone in those that are not finite; the very same object where there are none."""
    lost = is_not_finite(stats)
    if not lost.any():
        return stats
    return stats.assign(**{name: stats[name].mask(lost) for name in OF_FINITE_VALUES if name in stats})


def not_finite_in(batch: pa.RecordBatch) -> np.ndarray:
    """Which rows of a batch with the columns NEEDED are not finite, bool [rows]."""
    if not any(pc.any(pc.greater(batch[name], 0)).as_py() for name in BAD):
        return np.zeros(batch.num_rows, dtype=bool)
    found: np.ndarray = is_not_finite(batch.select(NEEDED).to_pandas()).to_numpy()
    return found
