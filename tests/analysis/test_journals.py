"""Reading of a running run's journals: new rows are seen."""

from __future__ import annotations

import copy
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from run_folders import row

import instrument
from instrument.storage.parquet import ParquetSink

Steps = Callable[[int, int], None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.json").write_text(json.dumps({"status": "running", "seed": 0}))
    return tmp_path


@pytest.fixture
def write(folder: Path) -> Steps:
    """Write steps of a run whose rows are all in journals."""
    sink = ParquetSink(folder)

    def steps(start: int, stop: int) -> None:
        for step in range(start, stop):
            sink.write("stats", [row("stats", step=step, mean=float(step))])
            sink.write("metrics", [row("metrics", step=step, phase="train")])
            sink.end_step()

    return steps


def test_new_rows_of_a_running_run_are_read(folder: Path, write: Steps) -> None:
    run = instrument.load(folder)
    done = 0
    for stop in (10, 20, 30):
        write(done, stop)
        done = stop
        assert run.count("stats") == done
        assert [step for batch in run.scan("stats", ["step"]) for step in batch["step"].to_pylist()] == [*range(done)]
        assert run.count("metrics") == done
        assert len(run.stats) == 10, "a frame is cached after the first read"
    assert list(run.read("stats", ["step"]).step) == list(range(done))
    assert len(instrument.load(folder).stats) == done


def test_replaced_journal_is_read_again(folder: Path, write: Steps) -> None:
    write(0, 3)
    run = instrument.load(folder)
    assert run.count("stats") == 3
    path = folder / "journal" / "stats-0000-000000.arrows"
    data, stat = path.read_bytes(), path.stat()
    path.write_bytes(data[:-100])
    with pytest.warns(instrument.InstrumentWarning, match="the journal is truncated: it contains 2 of 3 rows"):
        assert run.count("stats") == 2
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert run.count("stats") == 3


def test_run_can_be_pickled_and_copied(folder: Path, write: Steps) -> None:
    write(0, 3)
    run = instrument.load(folder)
    assert len(run.stats) == 3
    write(3, 5)
    for other in (pickle.loads(pickle.dumps(instrument.load(folder))), copy.deepcopy(run)):
        assert other.folders == [folder]
        assert len(other.sql("select * from stats")) == 5
