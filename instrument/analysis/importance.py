"""Importance of the overrides of a sweep: the fraction of the variance of a number that each of them explains."""

from __future__ import annotations

from functools import reduce

import numpy as np
import pandas as pd

from ..errors import InstrumentError, Problem
from ..fields.pip_extras import packages_of
from .config_key_effects import CONFIDENCE

TREES = 200
CELLS = 4_096  # maximum number of combinations of values at which the trees are evaluated
MIN_RUNS = 4
OTHERS = "interactions"


def importance_of(factors: pd.DataFrame, values: pd.Series, *, interval: float = CONFIDENCE) -> pd.DataFrame:
    """Estimate the fraction of the variance of a number that each factor explains alone, and the rest, their interactions.

    The method is functional analysis of variance (F. Hutter, H. Hoos and K. Leyton-Brown, ICML 2014): 200 regression trees are
    fitted to bootstrap samples of the runs. For each tree, the variance over all combinations of the values is split into the
    main effect of each factor, the variance of the mean prediction given its value, and the rest. The fraction is the mean
    over the trees, and the interval has their quantiles. Each value has the weight of its number of runs. The combinations are
    limited to 4,096: of a factor with more values, quantiles are used. Weak factors of a random search with few runs are
    underestimated, because trees split at strong ones first; on a complete grid, the fractions are those of an analysis of variance.

    Args:
        factors: One row per run and one column per factor: numbers or other values.
        values: The number of each run, float64, with the same index; runs without a finite value do not count.
        interval: The confidence level.

    Returns:
        One row per factor, the largest first, and a row `interactions` if there are several factors: `importance`,
        `low` and `high`, fractions from 0 to 1.

    Raises:
        InstrumentError: There are fewer than 4 runs with a finite value, no factor differs between them, or all values are equal.
    """
    with packages_of("analysis", "importance"):
        from sklearn.ensemble import RandomForestRegressor

    finite = np.isfinite(values.to_numpy(np.float64))
    y, known = values.to_numpy(np.float64)[finite], factors.loc[finite]
    known = known[[name for name in known if known[name].map(repr).nunique() > 1]]
    if len(y) < MIN_RUNS or known.empty or np.ptp(y) == 0:
        message = f"importance requires {MIN_RUNS} runs with different overrides and different finite values"
        raise InstrumentError(
            Problem("runs", message, f"{len(y)} runs, overrides that differ: {', '.join(known) or 'none'}")
        )
    codes = np.column_stack([_numbers(known[name]) for name in known])
    most = max(2, int(CELLS ** (1 / codes.shape[1])))
    levels, weights = zip(*(_levels(column, most) for column in codes.T), strict=True)
    weight = reduce(np.multiply.outer, weights)
    grid = np.stack(np.meshgrid(*levels, indexing="ij"), -1).reshape(-1, codes.shape[1]).astype(np.float32)
    forest = RandomForestRegressor(TREES, max_features=1.0, random_state=0).fit(codes, y)
    shares = []
    for tree in forest.estimators_:
        cells = tree.predict(grid).reshape(weight.shape)
        centred = cells - (weight * cells).sum()
        total = (weight * centred**2).sum()
        sums = [np.moveaxis(weight * centred, axis, 0).reshape(len(own), -1).sum(1) for axis, own in enumerate(weights)]
        mains = np.array([(each**2 / own).sum() for each, own in zip(sums, weights, strict=True)])
        if total > 0:  # otherwise all runs of the bootstrap sample have the same value
            shares.append(np.append(mains, max(0.0, total - mains.sum())) / total)
    tails = (1 - interval) / 2
    low, high = np.quantile(shares, [tails, 1 - tails], axis=0)
    columns = {"importance": np.mean(shares, axis=0), "low": low, "high": high}
    table = pd.DataFrame(columns, index=[*known, OTHERS])
    alone = table.drop(OTHERS).sort_values("importance", ascending=False, kind="stable")
    return alone if len(alone) == 1 else pd.concat([alone, table.loc[[OTHERS]]])


def _numbers(cells: pd.Series) -> np.ndarray:
    """Return numbers unchanged, and the index of each distinct value otherwise."""
    if pd.api.types.is_numeric_dtype(cells) and not cells.isna().any():
        return cells.to_numpy(np.float64)
    return pd.factorize(cells.map(repr))[0].astype(np.float64)


def _levels(column: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct values of a factor, or its quantiles if there are too many, with their weights."""
    found, counts = np.unique(column, return_counts=True)
    if len(found) > most:
        found = np.quantile(column, (np.arange(most) + 0.5) / most, method="nearest")
        counts = np.ones(most, np.int64)
    return found, counts / counts.sum()
