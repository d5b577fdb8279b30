"""Estimate the size of the tables of a run on disk from the rows of a few steps.

The compression ratio of rows cannot be computed from their number. Therefore the measured rows are written as the run
would write them: all of them, and half of them. The difference is the size of further rows. Tensors are estimated to a few
percent. Rows of a long run compress better than those of a few steps, so tables of rows are estimated up to 40% too high.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ..capture.sink_interface import Row
from ..sinks.parquet import ROWS_JOURNAL_BYTES, TENSORS_JOURNAL_BYTES
from ..sinks.parts import part_files
from ..sinks.row_batches import as_batch
from ..sinks.table_writer import TableWriter
from ..spec.tables import TABLES, Table

ROW_BYTES = 64  # approximate bytes per recorded tensor in addition to its values


@dataclass
class Sample:
    """The rows of one spec in one table, from a dry run.

    Attributes:
        steps: The rows of each measured step. All steps have the same number of rows.
        scheduled_steps: The steps of the run at which the spec writes such rows.
        rows: The total number of rows in the run.
    """

    steps: list[list[Row]]
    scheduled_steps: Sequence[int]
    rows: int


def bytes_of_rows(
    temporary_folder: Path, table: Table, samples: Mapping[str, Sample], most_rows: float
) -> dict[str, float]:
    """Estimate the size of a table of rows on disk.

    Args:
        temporary_folder: An empty folder for temporary files.
        table: Any table except `tensors`.
        samples: The measured rows of each spec.
        most_rows: The maximum number of rows per part. The size of the journal is a further limit.

    Returns:
        Bytes by spec.
    """
    total = sum(sample.rows for sample in samples.values())
    if not total:
        return dict.fromkeys(samples, 0.0)
    # The measured steps are repetitions. They are numbered like different steps, as in the run.
    rows = sorted(
        ((step, *row[1:]) for sample in samples.values() if sample.rows for step, row in _numbered(sample)),
        key=lambda row: row[0],
    )
    if len(rows) == 1:
        rows += [(rows[0][0] + 1, *rows[0][1:])]
    batch = as_batch(table, rows)
    per_row, fixed = _size_of_further_rows(temporary_folder, table, batch, range(len(rows) + 1))
    in_journal = batch.serialize().size / len(rows)
    parts = math.ceil(total / max(1.0, min(most_rows, ROWS_JOURNAL_BYTES / in_journal)))
    size = per_row * total + fixed * parts
    return {name: size * sample.rows / total for name, sample in samples.items()}


def _numbered(sample: Sample) -> Iterator[tuple[int, Row]]:
    """Yield the rows of the measured steps, each with the number of a scheduled step or a later one."""
    scheduled = list(islice(sample.scheduled_steps, len(sample.steps)))
    for number, rows in enumerate(sample.steps):
        step = scheduled[number] if number < len(scheduled) else scheduled[-1] + number
        yield from ((step, row) for row in rows)


def bytes_of_tensors(
    temporary_folder: Path,
    written: Path,
    sizes: Sequence[int],
    rows: Mapping[str, list[int]],
    times: Mapping[str, float],
    least_parts: float,
) -> dict[str, float]:
    """Estimate the size of the recorded tensors on disk.

    Args:
        temporary_folder: An empty folder for temporary files.
        written: The folder of the dry run, with a closed sink.
        sizes: The size of each tensor in `written`, in bytes, in the order of the rows.
        rows: By spec, the size of each recorded tensor in the measured steps, in bytes.
        times: By spec, the number of times that the run records this amount.
        least_parts: The minimum number of parts. Each checkpoint closes a part.

    Returns:
        Bytes by spec.
    """
    if not sizes:
        return dict.fromkeys(rows, 0.0)
    table = TABLES["tensors"]
    written_parts = pa.concat_tables(
        pq.read_table(file, columns=list(table.names)) for file in part_files(written, table.name).values()
    )
    batch = written_parts.cast(table.plain_schema).combine_chunks().to_batches()[0]
    cumulative_bytes = [0, *accumulate(size + ROW_BYTES for size in sizes)]
    per_byte, fixed = _size_of_further_rows(temporary_folder, table, batch, cumulative_bytes)
    of_specs = {name: sum(size + ROW_BYTES for size in of_spec) * times[name] for name, of_spec in rows.items()}
    total = sum(of_specs.values())
    if not total:
        return dict.fromkeys(rows, 0.0)
    parts = max(least_parts, math.ceil(per_byte * total / TENSORS_JOURNAL_BYTES))
    return {name: size * (per_byte + fixed * parts / total) for name, size in of_specs.items()}


def _size_of_further_rows(
    temporary_folder: Path, table: Table, batch: pa.RecordBatch, cumulative_bytes: Sequence[int]
) -> tuple[float, float]:
    """Measure how the size of a part grows with its rows.

    Args:
        temporary_folder: An empty folder for temporary files.
        table: The table.
        batch: The measured rows.
        cumulative_bytes: For each number of rows, the amount of data in so many first rows; starts with 0.

    Returns:
        Bytes on disk per amount of data, and bytes of a part without rows.
    """
    half = batch.num_rows // 2
    less, full = (_size_of_part(temporary_folder, table, batch.slice(0, rows)) for rows in (half, batch.num_rows))
    growth = max(0.0, (full - less) / (cumulative_bytes[-1] - cumulative_bytes[half]))
    return growth, max(0.0, full - growth * cumulative_bytes[-1])


def _size_of_part(temporary_folder: Path, table: Table, batch: pa.RecordBatch) -> int:
    """Write rows to a part and return its size in bytes."""
    writer = TableWriter(temporary_folder, table, journal_bytes=2**62)
    writer.append(batch)
    writer.close()
    (file,) = part_files(temporary_folder, table.name).values()
    size = file.stat().st_size
    file.unlink()
    return size
