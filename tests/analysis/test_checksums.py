"""A bit that flips in a file of a run is reported, or changes nothing that is read, whichever reader reads the file."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from run_folders import write_steps
from tiers import portions

import instrument
from instrument import InstrumentError
from instrument.analysis.new_rows import NewRows, RowsRemovedError
from instrument.storage.checksums import LOCAL_FILES, DamagedFileError
from instrument.storage.journal import Journal, JournalReader
from instrument.storage.maintenance import compact
from instrument.tables.schemas import TABLES

STEPS = 6
MEANS = [0.5 + step for step in range(STEPS)]
VALUES = np.random.default_rng(0).normal(size=(STEPS, 3, 2)).astype("f4")


def write_run(folder: Path, *, close: bool) -> Path:
    """Write `MEANS` and `VALUES`, one part per table after three steps; the rest is in the journals unless closed."""
    steps = [
        {"stats": [{"step": step, "mean": mean}], "tensors": [{"step": step, "values": torch.from_numpy(values)}]}
        for step, (mean, values) in enumerate(zip(MEANS, VALUES, strict=True))
    ]
    return write_steps(folder, steps, parts=[2], close=close)


Reader = Callable[[Path], tuple[list[float], list[Any], list[str]]]


def from_new_rows(folder: Path) -> tuple[list[float], list[Any], list[str]]:
    """Read as the page of a run in progress does."""
    stats, tensors = NewRows(folder, "stats", ["step", "mean"]), NewRows(folder, "tensors", ["step", "values"])
    rows = [sorted(zip(*_columns(new), strict=True)) for new in (stats, tensors)]
    values = [np.reshape(value, (3, 2)).tolist() for _, value in rows[1]]
    return [mean for _, mean in rows[0]], values, [*stats.problems, *tensors.problems]


def _columns(new: NewRows) -> list[list[Any]]:
    read = pa.concat_tables([table.combine_chunks() for table in new.read(float("inf"))])
    return [column.to_pylist() for column in read.columns]


def reader(means: Callable[[instrument.Run], Any], values: Callable[[instrument.Run], Any]) -> Reader:
    """Return a function that reads the means and the values of a run. Its result has the problems, too."""

    def read(folder: Path) -> tuple[list[float], list[Any], list[str]]:
        run = instrument.load(folder)
        return list(means(run)), [np.reshape(value, (3, 2)).tolist() for value in values(run)], run.problems

    return read


def from_one_query(folder: Path) -> tuple[list[float], list[Any], list[str]]:
    """Read both tables with one query, because DuckDB takes longer to start than to read them."""
    run = instrument.load(folder)
    means, values = run.sql(
        "select (select coalesce(list(mean order by step), []) from stats), "
        """(select coalesce(list("values" order by step), []) from tensors)"""
    ).iloc[0]
    return list(means), [np.reshape(value, (3, 2)).tolist() for value in values], run.problems


READERS: dict[str, Reader] = {
    "pandas": reader(lambda run: run.stats["mean"], lambda run: run.tensors()["values"]),
    "duckdb": from_one_query,
    "polars": reader(
        lambda run: run.lazy("stats").sort("step").collect()["mean"],
        lambda run: run.lazy("tensors").sort("step").select("values").collect()["values"],
    ),
    "scan": reader(  # in batches, as features, replays and exports do
        lambda run: (mean for batch in run.scan("stats", ["mean"]) for mean in batch["mean"].to_pylist()),
        lambda run: (value for batch in run.scan("tensors", ["values"]) for value in batch["values"].to_pylist()),
    ),
    "new_rows": from_new_rows,
}


def in_values(content: bytes) -> list[int]:
    """Return the positions of the bytes of `MEANS` and `VALUES` in the content of a file."""
    values = [value.tobytes() for value in (*np.array(MEANS), *VALUES)]
    starts = [(content.find(value), len(value)) for value in values]
    return [start + byte for start, size in starts for byte in range(size) if start >= 0]


def flips(folder: Path, numbers: range) -> Iterator[Path]:
    """Flip one bit at a time, which depends on the number, in a file of the tables or the journal, and restore it.

    Every second bit is in a value that the readers return: most bytes of a small file are metadata.
    """
    read = ("stats", "tensors", "journal")  # the folders that the readers read
    files = sorted(file for file in folder.rglob("*-0*") if file.parent.name in read and file.stat().st_size)
    for number in numbers:
        draw = random.Random(number)
        file = draw.choice(files)
        content = file.read_bytes()
        damaged = bytearray(content)
        damaged[draw.choice((number % 2 and in_values(content)) or range(len(content)))] ^= 1 << draw.randrange(8)
        file.write_bytes(damaged)
        yield file
        file.write_bytes(content)


@pytest.mark.spread(1)
@pytest.mark.filterwarnings("ignore::instrument.InstrumentWarning")
@pytest.mark.combinations
@pytest.mark.parametrize("numbers", portions(10, 120, 110))
@pytest.mark.parametrize("close", [True, False])
@pytest.mark.parametrize("name", READERS)
def test_flipped_bit_is_reported_or_changes_nothing(tmp_path: Path, name: str, close: bool, numbers: range) -> None:
    folder = write_run(tmp_path / "run", close=close)
    read = READERS[name]
    assert read(folder) == (MEANS, VALUES.tolist(), [])
    reported = 0
    for file in flips(folder, numbers):
        try:
            means, values, problems = read(folder)
        except (InstrumentError, RowsRemovedError, pa.ArrowInvalid):
            continue
        named = [problem for problem in problems if str(file.relative_to(folder)) in problem]
        if (means, values) != (MEANS, VALUES.tolist()):
            assert named
            assert all("restore the file from a copy" in problem for problem in named)
        reported += bool(named)
    assert reported > len(numbers) // 5


@pytest.mark.filterwarnings("ignore::instrument.InstrumentWarning")
def test_flipped_bit_is_not_merged_into_another_file(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", close=True)
    file = folder / "stats" / "part-0000-000000.parquet"
    content = bytearray(file.read_bytes())
    start = pq.read_metadata(file).row_group(0).column(list(TABLES["stats"].schema.names).index("mean"))
    content[start.data_page_offset + start.total_compressed_size - 1] ^= 1
    file.write_bytes(content)
    (problem,) = compact(folder).problems
    assert problem.startswith("stats/part-0000-000000.parquet: cannot be read: bytes")
    assert file.read_bytes() == content


def test_plain_readers_read_and_verify_the_pages(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", close=True)
    assert pd.read_parquet(folder / "stats")["mean"].tolist() == MEANS
    file = folder / "tensors" / "part-0000-000000.parquet"
    content = bytearray(file.read_bytes())
    assert content.count(VALUES[1].tobytes()) == 1
    content[content.index(VALUES[1].tobytes())] ^= 1
    file.write_bytes(content)
    with pytest.raises(OSError, match="CRC"):
        pq.read_table(file, page_checksum_verification=True)
    with pytest.raises(DamagedFileError, match="do not match their checksum"):
        pq.read_table(str(file), filesystem=LOCAL_FILES)


@pytest.mark.slow
def test_files_without_checksums_stay_readable(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", close=True)
    for file in folder.rglob("*.parquet"):
        pq.write_table(pq.read_table(file), file)  # as an earlier version did
    for read in READERS.values():
        assert read(folder) == (MEANS, VALUES.tolist(), [])


def test_every_flipped_bit_of_a_journal_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "j.arrows"
    batch = pa.record_batch({"step": pa.array([1, 2])})
    journal = Journal(path, batch.schema)
    head = journal.size
    journal.append(batch)
    journal.close()
    content = path.read_bytes()
    for at in range(head, len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 16]) + content[at + 1 :])
        reading = JournalReader.of(path)
        assert list(reading.batches()) == []
        assert "checksum" in str(reading.problem), at


ENDING = """
import atexit, sys, threading, time
in_use = []
atexit.register(lambda: print(len(in_use)))  # called after the functions that are registered later
from instrument.storage.checksums import open_checked
in_use.append(open_checked(sys.argv[1]))
threading.Thread(target=lambda: (time.sleep(0.1), in_use.clear()), daemon=True).start()
"""


def test_process_ends_after_other_threads_have_released_its_files(tmp_path: Path) -> None:
    """A thread of Arrow that released a file while the interpreter ended aborted the process, about once in 25 sweeps."""
    file = tmp_path / "numbers.parquet"
    pq.write_table(pa.table({"x": [1.0]}), file)
    done = subprocess.run([sys.executable, "-c", ENDING, str(file)], capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"
