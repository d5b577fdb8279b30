"""How large a run's tables will be on disk, from the rows of a few of its steps.

Rows are small numbers of many kinds, whose compression nobody foretells. So a part is written as the run would write it: the
rows of the steps that were seen, again and again with other numbers in the same places. Numbers that were the same in all steps
stay so, equal ones stay equal, and each keeps its precision: what a float32 can hold is held by one.
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
from ..sinks.log import TableLog
from ..sinks.parquet import ROWS_JOURNAL_BYTES, TENSORS_JOURNAL_BYTES
from ..sinks.parts import parts_of

ROW_BYTES = 64  # of a recorded tensor, beside its values, about
DRIFT = 1.15  # how much more numbers vary in a run than in the few steps that were seen
FRACTIONS = ("fraction", "fraction of the finite values")
MOST_SPREAD = 1.0
EXACT = frozenset(
    column.name for column in TABLES["tensors"].columns
)  # of which nothing is changed: identity and shapes
Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass
class Seen:
    """What one spec wrote into one table in a rehearsal.

    Attributes:
        visits: The rows of each step that was made, of one length all.
        due: The steps of the run at which there will be such rows.
        rows: How many rows there will be in all.
    """

    visits: list[list[Row]]
    due: Sequence[int]
    rows: int


def bytes_of_rows(scratch: Path, table: Table, seen: Mapping[str, Seen], most_rows: float) -> dict[str, float]:
    """What a table of rows will take on disk.

    Args:
        scratch: An empty folder.
        table: Any but `tensors`.
        seen: What each spec wrote.
        most_rows: How many rows a part has at most, beside what the size of its journal allows.

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
    """About what recorded tensors of these bytes take on disk."""
    return sum(sizes) + ROW_BYTES * len(sizes)


def bytes_of_tensors(
    scratch: Path,
    written: Path,
    estimated: int,
    rows: Mapping[str, list[int]],
    times: Mapping[str, float],
    least_parts: float,
) -> dict[str, float]:
    """What recorded tensors will take on disk.

    Args:
        scratch: An empty folder.
        written: The folder of a rehearsal, closed.
        estimated: The estimate of all that is there.
        rows: By spec, the bytes of each tensor that it kept in some of the steps.
        times: By spec, how often as much will be kept in the run.
        least_parts: How many parts there are to be whatever the bytes: one a checkpoint.

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
    """Rows as the steps hand them over."""
    steps = batch.column("step").to_numpy()
    starts = [0, *(np.flatnonzero(np.diff(steps)) + 1).tolist(), batch.num_rows]
    return [batch.slice(start, end - start) for start, end in pairwise(starts)]


def _size_of_part(scratch: Path, table: Table, batches: Sequence[pa.RecordBatch]) -> int:
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
    """Rows to be written, and for each the row that it is a copy of."""

    rows: list[Row] = field(default_factory=list)
    cycle: list[int] = field(default_factory=list)  # how often it was copied before
    origin: list[tuple[int, int]] = field(default_factory=list)  # spec, and place in the step


def _grown(table: Table, specs: Sequence[Seen], most: int) -> pa.RecordBatch:
    """As many rows as a part may have, or as there will be, as the run will write them."""
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
    """Fractions that are a whole number of so many elements."""
    numel = pc.max_element_wise(elements, 1)
    return pc.divide(pc.round(pc.multiply(fractions, numel)), numel)


def _spread(column: int, specs: Sequence[Seen], origin: Sequence[tuple[int, int]]) -> Floats:
    """By which share of itself each row's number in a column varies from step to step, as far as was seen; 0: not at all.

    What varies at all varies alike in all rows of a spec, so that equal numbers stay equal.
    """
    known: dict[tuple[int, int], float] = {}
    for number, spec in enumerate(specs):
        places = zip(*([row[column] for row in visit] for visit in spec.visits), strict=True)
        shares = [_share(cells) for cells in places]
        usual = median([share for share in shares if share] or [0.0])
        known |= {(number, place): usual if share else 0.0 for place, share in enumerate(shares)}
    return np.asarray([known[key] for key in origin])


def _share(cells: Sequence[Any]) -> float:
    """By which share of itself one number varied in the steps that were seen, and a little more."""
    if any(isinstance(cell, list) for cell in cells):
        return median(map(_share, zip(*(cell for cell in cells if cell is not None), strict=False)))
    if len(cells) < 2:
        return MOST_SPREAD
    found = [cell for cell in cells if cell is not None]
    size = max(map(abs, found), default=0.0)
    return min(DRIFT * (max(found) - min(found)) / size, MOST_SPREAD) if size else 0.0


def _varied(column: pa.Array, cycle: np.ndarray[Any, Any], spread: Floats, *, whole: bool = False) -> pa.Array:
    """The numbers of copies of rows, somewhat different from cycle to cycle; not yet as `whole` numbers of elements."""
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
    """Numbers with as many zeros at the end of their binary fraction as others: those of a float32, or of sums of them."""
    bits = as_these.view(np.uint64)
    last = bits & (~bits + np.uint64(1))  # the lowest bit that is set
    short: Floats = (values.view(np.uint64) & ~np.maximum(last, np.uint64(1)) + np.uint64(1)).view(np.float64)
    return short


def _noise(values: Floats, cycle: np.ndarray[Any, Any]) -> Floats:
    """Numbers from -1 to 1 (SplitMix64's finaliser), the same for the same value in the same cycle, and for twice as much."""
    x = (values.view(np.uint64) & np.uint64(2**52 - 1)) ^ (cycle.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    noise: Floats = (x ^ (x >> np.uint64(31))) / 2.0**63 - 1.0
    return noise
