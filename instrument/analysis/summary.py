"""A run in a few numbers a hook. Only the columns that are needed are read."""

from __future__ import annotations

import pandas as pd

from .load import Run


def recorded(run: Run) -> pd.DataFrame:
    """What record hooks left.

    Returns:
        Indexed by hook: `firings`, `rows` of statistics, `tensors` kept.
    """
    rows, tensors = (run.read(table, ["hook"]).value_counts("hook") for table in ("stats", "tensors"))
    table = pd.DataFrame({"firings": _firings(run), "rows": rows, "tensors": tensors})
    return table.fillna(0).astype(int)


def changed(run: Run) -> pd.DataFrame:
    """What interventions did.

    Returns:
        Indexed by hook: `firings`, `changed_fraction` of all elements that passed, and the medians over the firings
        of `norm_before` and `norm_after`.
    """
    effects = run.read("effects", ["hook", "numel", "changed", "norm_before", "norm_after"]).groupby("hook")
    sums = effects[["numel", "changed"]].sum()
    table = effects[["norm_before", "norm_after"]].median()
    table.insert(0, "changed_fraction", sums.changed / sums.numel.clip(lower=1))
    return table.join(_firings(run).rename("firings"), how="left")


def _firings(run: Run) -> pd.Series:
    return run.coverage.groupby("hook").fired.sum()
