"""The size of the tables of a run on disk, estimated from the rows of a few steps.

The compression ratio of rows cannot be computed from their number. Therefore the measured rows are written as the run
would write them: all of them, and half of them. The difference is the size of further rows. Tensors are estimated to a few
percent. Rows of a long run compress better than those of a few steps, so tables of rows are estimated up to 40% too high.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.parquet as pq

from ...storage.parquet import ROWS_JOURNAL_BYTES, TENSORS_JOURNAL_BYTES
from ...storage.parts import part_files
from ...storage.table_writer import TableWriter
from ...tables.schemas import Table


def bytes_on_disk(
    folder: Path, table: Table, amounts: Sequence[int], expected: Mapping[str, float], least_parts: float
) -> dict[str, float]:
    """Estimate the size of a table on disk.

    Args:
        folder: The folder of the dry run, with a closed sink.
        amounts: The amount of data in each row of the folder: 1, or bytes for rows of different size.
        expected: By spec, the amount of data in the rows of the run.
        least_parts: The minimum number of parts. Each checkpoint closes a part.

    Returns:
        Bytes by spec.
    """
    total = sum(expected.values())
    if not total:
        return dict.fromkeys(expected, 0.0)
    files = part_files(folder, table.name).values()
    rows = pa.concat_tables(pq.read_table(file, columns=list(table.names)) for file in files)
    batch = rows.cast(table.plain_schema).combine_chunks().to_batches()[0]
    half = batch.num_rows // 2
    less, full = (_size_of_part(table, batch.slice(0, count)) for count in (half, batch.num_rows))
    growth = max(0.0, (full - less) / sum(amounts[half:]))
    fixed = max(0.0, full - growth * sum(amounts))
    journal_bytes = TENSORS_JOURNAL_BYTES if table.name == "tensors" else ROWS_JOURNAL_BYTES
    parts = max(least_parts, math.ceil(batch.nbytes / sum(amounts) * total / journal_bytes))
    return {name: amount * (growth + fixed * parts / total) for name, amount in expected.items()}


def _size_of_part(table: Table, batch: pa.RecordBatch) -> int:
    """Return the size of a part with these rows, in bytes."""
    with TemporaryDirectory(prefix="instrument-dry-run-") as folder:
        writer = TableWriter(Path(folder), table, journal_bytes=2**62)
        writer.append(batch)
        writer.close()
        (file,) = part_files(Path(folder), table.name).values()
        return file.stat().st_size
