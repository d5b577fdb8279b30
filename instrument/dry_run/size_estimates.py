"""Estimate the size of the tables of a run on disk from the rows of a few steps.

The compression ratio of the rows cannot be computed from their number. Therefore a sample of each table is written as
the run would write it: the rows of the measured steps are repeated with perturbed values. Values that were constant in
all measured steps stay constant, equal values stay equal, and each value keeps its precision: a value that a float32
represents exactly is perturbed to a value with the same property.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import merge
from itertools import islice, pairwise, repeat
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..capture.sink import Row
from ..capture.tables import TABLES, Table, as_batch
from ..sinks.parquet import ROWS_JOURNAL_BYTES, TENSORS_JOURNAL_BYTES
from ..sinks.parts import parts_of
from ..sinks.table_writer import TableLog

ROW_BYTES = 64  # Approximate bytes per recorded tensor in addition to its values.
DRIFT = 1.15  # Ratio of the variation in a run to that in the measured steps.
FRACTIONS = ("fraction", "fraction of the finite values")
MOST_SPREAD = 1.0
# Columns that are not perturbed: identity and shapes.
EXACT = frozenset(column.name for column in TABLES["tensors"].columns)
Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass
class Seen:
    """The rows of one spec in one table, from a dry run.

    Attributes:
        visits: The rows of each measured step. All steps have the same number of rows.
        due: The steps of the run at which the spec writes such rows.
        rows: The total number of rows in the run.
    """

    visits: list[list[Row]]
    due: Sequence[int]
    rows: int


def bytes_of_rows(scratch: Path, table: Table, seen: Mapping[str, Seen], most_rows: float) -> dict[str, float]:
    """Estimate the size of a table of rows on disk.

    Args:
        scratch: An empty folder for temporary files.
        table: Any table except `tensors`.
        seen: The measured rows of each spec.
        most_rows: The maximum number of rows per part. The size of the journal is a further limit.

    Returns:
        Bytes by spec.
    """
    total = sum(spec.rows for spec in seen.values())
    if not total:
        return dict.fromkeys(seen, 0.0)
    written = [spec for spec in seen.values() if spec.rows]
    step = [row for spec in written for row in spec.visits[0]]
    in_journal = as_batch(table, step).serialize().size / len(step)
    rows = int(max(1.0, min(total, most_rows, ROWS_JOURNAL_BYTES / in_journal)))
    batch = _grown(table, written, rows)
    size = _size_of_part(scratch, table, _by_step(batch)) * total / batch.num_rows
    return {name: size * spec.rows / total for name, spec in seen.items()}


def estimate(sizes: Sequence[int]) -> int:
    """Return the approximate size of recorded tensors before compression, in bytes.

    Args:
        sizes: The size of each tensor, in bytes.
    """
    return sum(sizes) + ROW_BYTES * len(sizes)


def bytes_of_tensors(
    scratch: Path,
    written: Path,
    estimated: int,
    rows: Mapping[str, list[int]],
    times: Mapping[str, float],
    least_parts: float,
) -> dict[str, float]:
    """Estimate the size of the recorded tensors on disk.

    Args:
        scratch: An empty folder for temporary files.
        written: The folder of the dry run, with a closed sink.
        estimated: The result of `estimate` for all tensors in `written`.
        rows: By spec, the size of each recorded tensor in the measured steps, in bytes.
        times: By spec, the number of times that the run records this amount.
        least_parts: The minimum number of parts. Each checkpoint closes a part.

    Returns:
        Bytes by spec.
    """
    table = TABLES["tensors"]
    parts = [path.stat().st_size for path in parts_of(written, table.name).values()]
    if not estimated:
        return dict.fromkeys(rows, 0.0)
    empty = _size_of_part(scratch, table, [])
    scale = (sum(parts) - empty * len(parts)) / estimated
    found = {name: estimate(sizes) * scale * times[name] for name, sizes in rows.items()}
    total = sum(found.values())
    several = max(least_parts, -(-total // TENSORS_JOURNAL_BYTES))
    return {name: size + several * empty * size / total if total else 0.0 for name, size in found.items()}


def _by_step(batch: pa.RecordBatch) -> list[pa.RecordBatch]:
    """Split rows into one batch per step, as a run writes them."""
    steps = batch.column("step").to_numpy()
    starts = [0, *(np.flatnonzero(np.diff(steps)) + 1).tolist(), batch.num_rows]
    return [batch.slice(start, end - start) for start, end in pairwise(starts)]


def _size_of_part(scratch: Path, table: Table, batches: Sequence[pa.RecordBatch]) -> int:
    """Write batches to a part and return its size in bytes."""
    log = TableLog(scratch, table, journal_bytes=2**62)
    for batch in batches:
        log.append(batch)
    log.close()
    (file,) = parts_of(scratch, table.name).values()
    size = file.stat().st_size
    file.unlink()
    return size


@dataclass
class _Copies:
    """The rows of a sample, and the origin of each row.

    Attributes:
        rows: The rows.
        cycle: For each row, how often its original was copied before.
        origin: For each row, the index of the spec and the index of the row in its step.
    """

    rows: list[Row] = field(default_factory=list)
    cycle: list[int] = field(default_factory=list)
    origin: list[tuple[int, int]] = field(default_factory=list)


def _grown(table: Table, specs: Sequence[Seen], most: int) -> pa.RecordBatch:
    """Repeat the measured rows up to the size of one part, in the order of the run, with perturbed values.

    Args:
        table: The table.
        specs: The measured rows of each spec.
        most: The maximum number of rows.
    """
    copies = _Copies()
    dues = merge(*(zip(spec.due, repeat(number)) for number, spec in enumerate(specs)))
    made = [0] * len(specs)
    for step, number in dues:
        visits = specs[number].visits
        cycle, visit = divmod(made[number], len(visits))
        made[number] += 1
        for place, row in enumerate(islice(visits[visit], most - len(copies.rows))):
            copies.rows.append((step, *row[1:]))
            copies.cycle.append(cycle)
            copies.origin.append((number, place))
        if len(copies.rows) >= most:
            break
    batch = as_batch(table, copies.rows)
    cycles = np.asarray(copies.cycle)
    columns = []
    for number, (about, column) in enumerate(zip(table.columns, batch.columns, strict=True)):
        if about.name not in EXACT:
            whole = about.unit in FRACTIONS and "numel" in table.names and not batch.column("numel").null_count
            column = _varied(column, cycles, _spread(number, specs, copies.origin), whole=whole)  # noqa: PLW2901
            if whole:
                column = _of_elements(column, batch.column("numel"))  # noqa: PLW2901
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, schema=table.plain_schema)


def _of_elements(fractions: pa.Array, elements: pa.Array) -> pa.Array:
    """Round fractions to multiples of 1 / `elements`."""
    numel = pc.max_element_wise(elements, 1)
    return pc.divide(pc.round(pc.multiply(fractions, numel)), numel)


def _spread(column: int, specs: Sequence[Seen], origin: Sequence[tuple[int, int]]) -> Floats:
    """Return the relative variation of each row's value in a column from step to step. 0 means constant.

    All varying values of a spec get the median variation of the spec, so that equal values stay equal.

    Args:
        column: The index of the column.
        specs: The measured rows of each spec.
        origin: For each row, the index of the spec and the index of the row in its step.

    Returns:
        float64, shape [rows].
    """
    known: dict[tuple[int, int], float] = {}
    for number, spec in enumerate(specs):
        places = zip(*([row[column] for row in visit] for visit in spec.visits), strict=True)
        shares = [_share(cells) for cells in places]
        usual = median([share for share in shares if share] or [0.0])
        known |= {(number, place): usual if share else 0.0 for place, share in enumerate(shares)}
    return np.asarray([known[key] for key in origin])


def _share(cells: Sequence[Any]) -> float:
    """Return the relative variation of one value over the measured steps, times `DRIFT`."""
    if any(isinstance(cell, list) for cell in cells):
        return median(map(_share, zip(*(cell for cell in cells if cell is not None), strict=False)))
    if len(cells) < 2:
        return MOST_SPREAD
    found = [cell for cell in cells if cell is not None]
    size = max(map(abs, found), default=0.0)
    return min(DRIFT * (max(found) - min(found)) / size, MOST_SPREAD) if size else 0.0


def _varied(column: pa.Array, cycle: np.ndarray[Any, Any], spread: Floats, *, whole: bool = False) -> pa.Array:
    """Perturb the values of copied rows, differently in each cycle. Originals (cycle 0) keep their values.

    Args:
        column: The column.
        cycle: For each row, the number of its cycle.
        spread: For each row, the relative variation.
        whole: Whether the values are rounded to multiples of 1 / numel later; they then need not keep their precision.
    """
    if pa.types.is_list(column.type):
        lengths = np.diff(column.offsets.to_numpy())
        flat = _varied(column.flatten(), np.repeat(cycle, lengths), np.repeat(spread, lengths))
        varied = pa.ListArray.from_arrays(column.offsets, flat)
        return pa.array(varied.to_pylist(), column.type) if column.null_count else varied.cast(column.type)
    missing = column.is_null().to_numpy(zero_copy_only=False)
    old = column.fill_null(0).to_numpy(zero_copy_only=False).astype(np.float64)
    new = old * (1.0 + spread * _noise(old, cycle))
    if pa.types.is_integer(column.type):
        new = np.round(new)
    elif not whole:
        new = _as_short(new, old)
    new = np.where((cycle == 0) | (spread == 0.0), old, new)
    return pa.array(new.astype(column.type.to_pandas_dtype()), column.type, mask=missing)


def _as_short(values: Floats, as_these: Floats) -> Floats:
    """Truncate values to the number of significant mantissa bits of other values.

    This keeps the precision of values that are float32, or sums of float32.
    """
    bits = as_these.view(np.uint64)
    last = bits & (~bits + np.uint64(1))  # The lowest set bit.
    short: Floats = (values.view(np.uint64) & ~np.maximum(last, np.uint64(1)) + np.uint64(1)).view(np.float64)
    return short


def _noise(values: Floats, cycle: np.ndarray[Any, Any]) -> Floats:
    """Return pseudorandom numbers from -1 to 1, from the finaliser of SplitMix64.

    The result depends only on the cycle and the mantissa of the value. Equal values get equal noise, and so do values
    that differ by a power of two.
    """
    x = (values.view(np.uint64) & np.uint64(2**52 - 1)) ^ (cycle.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    noise: Floats = (x ^ (x >> np.uint64(31))) / 2.0**63 - 1.0
    return noise
