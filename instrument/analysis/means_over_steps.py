"""Means over the steps of a run, one per location and statistic, computed in batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from ..config.schedule import STEP_PHASES
from ..tables.schemas import IDENTITY, TABLES
from .finite import FINITE_STATISTICS, not_finite_in
from .run_tables import RunTables

Steps = tuple[int | None, int | None]
LOCATION_COLUMNS = tuple(
    c.name for c in IDENTITY if pa.types.is_dictionary(c.type) and c.name not in ("module_type", "mesh", "placement")
)
MEASURED_TABLES = sorted(
    (name for name, table in TABLES.items() if table.has_numbers), key=lambda name: name != "metrics"
)
"""The tables with numbers that can be averaged. Their custom statistics and metrics are added."""


@dataclass(frozen=True)
class Means:
    """Means of one table of one run.

    Attributes:
        locations: The locations, as tuples of those columns in LOCATION_COLUMNS that the table has.
        values: float64, shape [locations, columns]; not finite if any of the numbers is not finite, 0 if there are none.
        counts: Number of averaged numbers, shape [locations, columns].
    """

    columns: tuple[str, ...]
    locations: list[tuple[str, ...]]
    values: np.ndarray
    counts: np.ndarray


def means_of(run: RunTables, table: str, steps: Steps = (None, None)) -> Means:
    """Return the mean of every numeric column at every location; for evaluation metrics, the last value.

    Rows of recomputed forward passes are ignored.

    Args:
        steps: Half-open range of steps (first, end); None leaves a side open.
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
    return _means_of_batches(map(_with_nan, batches) if table == "stats" else batches, keys, names)


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


def _means_of_batches(batches: Iterable[pa.RecordBatch], keys: Sequence[str], names: tuple[str, ...]) -> Means:
    """Return the means of all rows; memory holds one batch, and one row per batch and location."""
    parts = [_sums(batch, keys, names) for batch in batches]
    if not parts:
        return Means(names, [], np.zeros((0, len(names))), np.zeros((0, len(names)), np.int64))
    ways = [(f"{name}_{way}", "sum") for name in names for way in ("sum", "count")]
    sums = pa.concat_tables(parts).group_by(list(keys), use_threads=False).aggregate(ways)
    counts = np.stack([sums[f"{name}_count_sum"].to_numpy() for name in names], axis=1)
    totals = np.stack([sums[f"{name}_sum_sum"].fill_null(0.0).to_numpy() for name in names], axis=1)
    locations = list(zip(*(sums[key].to_pylist() for key in keys), strict=True))
    return Means(names, locations, totals / np.maximum(counts, 1), counts)


def _sums(batch: pa.RecordBatch, keys: Sequence[str], names: Sequence[str]) -> pa.Table:
    """Return the sum and the count of each column with one row per location; labels are converted to plain strings."""
    numbers = [batch[name].cast(pa.float64()) for name in names]
    rows = pa.table([*(batch[key] for key in keys), *numbers], names=[*keys, *names])
    ways = [(name, way) for name in names for way in ("sum", "count")]
    grouped = rows.group_by(list(keys), use_threads=False).aggregate(ways)
    columns = [grouped[key].cast(pa.string()) for key in keys] + [grouped[f"{name}_{way}"] for name, way in ways]
    return pa.table(columns, names=[*keys, *(f"{name}_{way}" for name, way in ways)])
