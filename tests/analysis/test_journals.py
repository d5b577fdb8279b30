"""Incremental reading of a running run's journals: each byte is read once, and new rows are seen."""

from __future__ import annotations

import copy
import json
import os
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from run_folders import stats_row

import instrument
from instrument.analysis.findings import findings
from instrument.analysis.journals import MOST_PIECES
from instrument.report.run_page import content
from instrument.sinks import journal
from instrument.sinks.lock import FolderLock
from instrument.sinks.parquet import ParquetSink

KEY = ("train", 0, "seen", "a", "Linear", "forward", "output", "", 0, 0, False, "global")
METRICS = ("train", 0, 0.5, None, 0.1, 1.0, 0.01, 100.0, None, None)
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
            sink.write("stats", [stats_row(step, float(step))])
            sink.write("metrics", [(step, 0, *METRICS)])
            sink.end_step()

    return steps


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the bytes that are read of each journal."""
    found: Counter[str] = Counter()
    plain = journal._content_from

    def counted(path: Path, start: int) -> bytes:
        data = plain(path, start)
        found[path.name] += len(data)
        return data

    monkeypatch.setattr(journal, "_content_from", counted)
    return found


def sizes(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in folder.glob("journal/*.arrows")}


@pytest.mark.parametrize("ask", [findings, content], ids=["findings", "the report"])
def test_running_run_is_read_once(
    folder: Path, write: Steps, read: Counter[str], ask: Callable[[instrument.Run], object]
) -> None:
    lock = FolderLock(folder)
    assert lock.acquire()
    write(0, 30)
    run = instrument.load(folder)
    assert run.info["status"] == "running"
    ask(run)
    assert read == sizes(folder)
    lock.release()


def test_only_new_bytes_of_a_running_run_are_read(folder: Path, write: Steps, read: Counter[str]) -> None:
    run = instrument.load(folder)
    done = 0
    for stop in range(10, 10 * (MOST_PIECES + 4), 10):
        write(done, stop)
        done = stop
        assert run.count("stats") == done
        assert [step for batch in run.scan("stats", ["step"]) for step in batch["step"].to_pylist()] == [*range(done)]
        assert run.count("metrics") == done
        assert read == sizes(folder)
    assert list(run.read("stats", ["step"]).step) == list(range(done))


def test_frame_is_cached_after_the_first_read(folder: Path, write: Steps) -> None:
    write(0, 2)
    run = instrument.load(folder)
    assert len(run.stats) == 2
    write(2, 5)
    assert (len(run.stats), run.count("stats"), len(instrument.load(folder).stats)) == (2, 5, 5)


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
