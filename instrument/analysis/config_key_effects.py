"""Effects of configuration keys: differences between paired runs, with confidence intervals, and the importance of each override.

Runs are compared by means over their steps, one per location and statistic, computed in batches.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from numbers import Integral
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from ..config.schedule import STEP_PHASES
from ..errors import InstrumentError, InstrumentWarning, Problem
from ..fields.pip_extras import packages_of
from ..tables.schemas import IDENTITY, TABLES
from .config_comparison import RunMatch, match_runs
from .config_fields import canonical_json
from .finite import FINITE_STATISTICS, not_finite_in
from .run_tables import RunTables

Steps = tuple[int | None, int | None]
LOCATION_COLUMNS = tuple(
    c.name for c in IDENTITY if pa.types.is_dictionary(c.type) and c.name not in ("module_type", "mesh", "placement")
)
MEASURED_TABLES = ["metrics", *(name for name, table in TABLES.items() if table.has_numbers and name != "metrics")]
"""The tables with numbers that can be averaged. Their custom statistics and metrics are added."""


@dataclass(frozen=True)
class Means:
    """Means of one table of one run."""

    columns: tuple[str, ...]
    locations: list[tuple[str, ...]]  # of those columns in LOCATION_COLUMNS that the table has
    values: np.ndarray  # float64 [locations, columns]; not finite if any number is not finite, 0 if there are none
    counts: np.ndarray  # of averaged numbers, [locations, columns]


def means_of(run: RunTables, table: str, steps: Steps = (None, None)) -> Means:
    """Return the mean of every numeric column at every location in a half-open range of steps; for evaluation metrics, the last value.

    Rows of recomputed forward passes are ignored.
    """
    keys, names = keys_of(table), averaged_columns(run, table)
    start, stop = steps
    condition = ds.field("step") >= (start or 0)
    if stop is not None:
        condition &= ds.field("step") < stop
    selections = [condition & ~ds.field("recompute")]
    if table == "metrics":
        selections, is_evaluation = [condition & ds.field("phase").isin(STEP_PHASES)], ds.field("phase") == "eval"
        evaluations = run.scan("metrics", ["step"], condition & is_evaluation)
        last = max((pc.max(batch["step"]).as_py() for batch in evaluations if len(batch)), default=None)
        if last is not None:  # after the training, wherever the files have it
            selections.append(is_evaluation & (ds.field("step") == last))
    batches = (batch for chosen in selections for batch in run.scan(table, [*keys, *names], chosen))
    # Memory holds one batch, and one row per batch and location.
    parts = [_sums(_with_nan(batch) if table == "stats" else batch, keys, names) for batch in batches]
    if not parts:
        return Means(names, [], np.zeros((0, len(names))), np.zeros((0, len(names)), np.int64))
    ways = [(f"{name}_{way}", "sum") for name in names for way in ("sum", "count")]
    sums = pa.concat_tables(parts).group_by(keys, use_threads=False).aggregate(ways)
    counts = np.stack([sums[f"{name}_count_sum"].to_numpy() for name in names], axis=1)
    totals = np.stack([sums[f"{name}_sum_sum"].fill_null(0.0).to_numpy() for name in names], axis=1)
    locations = list(zip(*(sums[key].to_pylist() for key in keys), strict=True))
    return Means(names, locations, totals / np.maximum(counts, 1), counts)


def averaged_columns(run: RunTables, table: str) -> tuple[str, ...]:
    """Return the columns of a table that are averaged, with the custom ones of the runs."""
    return (*TABLES[table].numbers, *run.custom_columns(table))


def keys_of(table: str) -> list[str]:
    """Return the columns of a table that identify a location."""
    return [name for name in LOCATION_COLUMNS if name in TABLES[table].names]


def _with_nan(batch: pa.RecordBatch) -> pa.RecordBatch:
    lost = pa.array(not_finite_in(batch))
    if not pc.any(lost).as_py():
        return batch
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    columns |= {name: pc.if_else(lost, math.nan, batch[name]) for name in FINITE_STATISTICS}
    return pa.RecordBatch.from_pydict(columns)


def _sums(batch: pa.RecordBatch, keys: Sequence[str], names: Sequence[str]) -> pa.Table:
    """Return the sum and the count of each column with one row per location; labels are converted to plain strings."""
    numbers = [batch[name].cast(pa.float64()) for name in names]
    rows = pa.table([*(batch[key] for key in keys), *numbers], names=[*keys, *names])
    ways = [(name, way) for name in names for way in ("sum", "count")]
    grouped = rows.group_by(list(keys), use_threads=False).aggregate(ways)
    columns = [grouped[key].cast(pa.string()) for key in keys] + [grouped[f"{name}_{way}"] for name, way in ways]
    return pa.table(columns, names=[*keys, *(f"{name}_{way}" for name, way in ways)])


CONFIDENCE = 0.95  # the usual confidence level
MAX_REASONS = 3  # maximum number of reasons in the warning about unpaired runs


def effects_of(
    run: RunTables, key: str, *, baseline: Any, by: str | Sequence[str], steps: Steps, confidence: float
) -> pd.DataFrame:
    """Estimate the effect of a key; see `Run.effects_of`."""
    if not 0.0 < confidence < 1.0:
        raise InstrumentError(Problem("confidence", "must be between 0 and 1", confidence))
    is_pair = isinstance(steps, tuple | list) and len(steps) == 2
    is_range = is_pair and all(step is None or (isinstance(step, Integral) and int(step) >= 0) for step in steps)
    if not is_range or (steps[1] is not None and (steps[0] or 0) >= steps[1]):
        allowed = "(start, stop), half-open, such as (50, None)"
        raise InstrumentError(Problem("steps", "the range contains no steps", steps, allowed))
    others = [by] if isinstance(by, str) else list(by)
    run_matches = match_runs(run, key, baseline, others)
    if run_matches.left_out:
        counts = Counter(run_matches.left_out.values())
        reasons = "; ".join(f"{reason} ({count})" for reason, count in list(counts.items())[:MAX_REASONS])
        reasons += "; ..." * (len(counts) > MAX_REASONS)
        message = f"{len(run_matches.left_out)} of {len(run.folders)} runs are not in any pair: {reasons}"
        warnings.warn(f"{message}. attrs['left_out'] lists all of them", InstrumentWarning, stacklevel=3)
    comparisons: dict[str, list[RunMatch]] = {}
    for match in run_matches.matches:
        comparisons.setdefault(canonical_json([match.value, *match.by]), []).append(match)
    every = list(comparisons.values())
    tables = [_differences(run, table, every, steps, confidence) for table in MEASURED_TABLES]
    parts = [(pairs[0], table[index]) for index, pairs in enumerate(every) for table in tables]
    frame = pd.concat([part for _, part in parts], ignore_index=True)
    rows = [match for match, part in parts for _ in range(len(part))]
    frame.insert(0, "value", _cells([match.value for match in rows]))
    frame.insert(1, "baseline", _cells([run_matches.baseline] * len(rows)))
    for i, name in enumerate(others):
        frame.insert(2 + i, name, _cells([match.by[i] for match in rows]))
    p_adjusted = adjusted(frame["p_value"].to_numpy())
    after = list(frame.columns).index("p_value") + 1
    frame.insert(after, "p_adjusted", p_adjusted)
    frame.insert(after + 1, "survives", p_adjusted < 1 - confidence)
    frame.attrs = {
        "intervals": int(frame["ci_low"].notna().sum()),
        "pairs": [(one.value, run.names[one.index], run.names[one.baseline]) for one in run_matches.matches],
        "left_out": {run.names[index]: reason for index, reason in run_matches.left_out.items()},
    }
    return frame


def _cells(values: list[Any]) -> pd.Series:
    """Return a column in which numbers stay numbers and None stays None."""
    return pd.Series(values, dtype=object if None in values else None)


def _differences(
    run: RunTables, table: str, comparisons: Sequence[Sequence[RunMatch]], steps: Steps, confidence: float
) -> list[pd.DataFrame]:
    """Return for each comparison one row per location and statistic that occurs in any of its pairs."""
    indices = list(dict.fromkeys(i for pairs in comparisons for pair in pairs for i in (pair.baseline, pair.index)))
    means = [means_of(run.single(index), table, steps) for index in indices]
    row_of = {index: row for row, index in enumerate(indices)}
    names = list(averaged_columns(run, table))
    locations = list(dict.fromkeys(location for each in means for location in each.locations))
    row_of_location = {location: row for row, location in enumerate(locations)}
    values = np.zeros((len(means), len(locations), len(names)))
    has_value = np.zeros(values.shape, dtype=bool)
    for index, each in enumerate(means):
        cells = np.ix_([row_of_location[at] for at in each.locations], [names.index(name) for name in each.columns])
        values[index][cells], has_value[index][cells] = each.values, each.counts > 0
    labels = pd.DataFrame(locations, columns=keys_of(table), dtype=object).reindex(columns=list(LOCATION_COLUMNS))
    labels.insert(0, "table", table)
    parts = []
    for pairs in comparisons:
        without, treated = [row_of[pair.baseline] for pair in pairs], [row_of[pair.index] for pair in pairs]
        before, after = values[without], values[treated]
        with np.errstate(invalid="ignore", over="ignore"):
            numbers = np.stack([before, after, after - before], axis=1)  # [pairs, 3, locations, columns]
        both = has_value[without] & has_value[treated]
        used = both & np.isfinite(numbers[:, 2])
        counts = {"pairs": used, "not_finite": both & ~used, "one_sided": has_value[without] ^ has_value[treated]}
        totals = {name: mask.sum(0) for name, mask in counts.items()}
        rows, columns = np.nonzero(totals["pairs"] + totals["not_finite"])
        seeds = np.array([pair.seed for pair in pairs])
        numbers = np.where(used[:, None], numbers, np.nan)
        of_seeds = np.stack([_mean(numbers[seeds == seed]) for seed in dict.fromkeys(seeds.tolist())])
        arrays = {**_intervals(of_seeds, confidence), **totals}
        measured = {name: cells[rows, columns] for name, cells in arrays.items()}
        statistics = np.array(names, dtype=object)[columns]
        parts.append(labels.iloc[rows].reset_index(drop=True).assign(statistic=statistics, **measured))
    return parts


def _intervals(seeds: np.ndarray, confidence: float) -> dict[str, np.ndarray]:
    """Return the numeric columns of the result from one number per seed, [seeds, 3, locations, columns]."""
    before, after, difference = _mean(seeds)
    seed_counts = (~np.isnan(seeds[:, 2])).sum(0)
    with np.errstate(invalid="ignore", over="ignore"):  # an overflow results in a missing interval
        squares = np.nansum((seeds[:, 2] - difference) ** 2, axis=0)
        width, p_value = student(difference, squares, seed_counts, confidence)
        low, high = (np.where(np.isfinite(end), end, np.nan) for end in (difference - width, difference + width))
    return {
        "n": seed_counts,
        "mean_baseline": before,
        "mean_value": after,
        "difference": difference,
        "ci_low": low,
        "ci_high": high,
        "confidence": np.full(low.shape, confidence),
        "p_value": p_value,
    }


def _mean(numbers: np.ndarray) -> np.ndarray:
    """Return the mean over the first dimension without NaN. Equal numbers give this number, and sums do not overflow."""
    half = numbers / 2
    lowest = np.fmin.reduce(half)
    counts = np.maximum((~np.isnan(half)).sum(0), 1)
    mean: np.ndarray = 2 * (lowest + np.nansum((half - lowest) / counts, axis=0))
    return mean


def student(
    means: np.ndarray, squares: np.ndarray, counts: np.ndarray, confidence: float = CONFIDENCE
) -> tuple[np.ndarray, np.ndarray]:
    """Return half the width of Student's confidence interval of a mean, and the two-sided p-value of the test that it is zero.

    The half width is t((1 + confidence) / 2, n - 1) * s / sqrt(n). The p-value is below 1 - confidence where the interval does
    not contain zero. `squares` are the sums of the squared distances of the numbers to their mean, (n - 1) s^2, and `counts` how many there
    are, n. All have the same shape; NaN for fewer than two numbers.
    """
    with packages_of("analysis", "a confidence interval"):
        from scipy.special import stdtr, stdtrit

    freedom = np.maximum(counts - 1, 1)
    error = np.sqrt(squares / freedom / np.maximum(counts, 1))
    known = (counts > 1) & np.isfinite(error)
    with np.errstate(divide="ignore", invalid="ignore"):  # equal numbers have no error
        t = np.where(means == 0, 0.0, np.abs(means) / error)
        width = stdtrit(freedom, (1 + confidence) / 2) * error
    return np.where(known, width, np.nan), np.where(known & np.isfinite(means), 2 * stdtr(freedom, -t), np.nan)


def adjusted(p_values: np.ndarray) -> np.ndarray:
    """Adjust p-values [tests] for their number, so that a limit on them bounds the false discovery rate; NaN for no test.

    The method is that of Y. Benjamini and Y. Hochberg, Journal of the Royal Statistical Society B 57 (1995), 289-300.
    """
    with packages_of("analysis", "the adjustment of p-values"):
        from scipy.stats import false_discovery_control

    result = np.full(p_values.shape, np.nan)
    known = ~np.isnan(p_values)
    if known.any():
        result[known] = false_discovery_control(p_values[known])
    return result


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
        given = f"{len(y)} runs, overrides that differ: {', '.join(known) or 'none'}"
        raise InstrumentError(Problem("runs", message, given))
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
    table = pd.DataFrame({"importance": np.mean(shares, axis=0), "low": low, "high": high}, index=[*known, OTHERS])
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
