"""Compaction of small parts into large ones: every row exists exactly once at all times, also after a kill."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow.parquet as pq
import pytest
import torch
from run_folders import row, write_steps
from tiers import tiered

import instrument
from instrument.commands import compact as command
from instrument.storage import maintenance, parts
from instrument.storage.lock import FolderLock
from instrument.storage.maintenance import compact
from instrument.storage.parquet import ParquetSink
from instrument.storage.parts import Part, new_part, part_files, remove_rows_after_checkpoint, written_parts
from instrument.storage.run_files import RunFiles
from instrument.tables.schemas import TABLES
from instrument.training.checkpoint import VERSION

LAYERS = ("stem", "body", "head")


def make_run(folder: Path, count: int = 6, *, steps: int = 3, close: bool = True) -> Path:
    """Write a run of `count` parts with `steps` steps each."""
    rows = [
        {
            "stats": [{"step": step, "layer": layer, "mean": float(step)} for layer in LAYERS],
            "metrics": [{"step": step, "phase": "train", "loss": float(step)}],
            "tensors": [{"step": step, "layer": "stem", "values": torch.full((2,), float(step))}],
        }
        for step in range(count * steps)
    ]
    return write_steps(folder, rows, parts=range(steps - 1, count * steps, steps), close=close)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("original") / "run")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "run"))


def frames(folder: Path) -> dict[str, pd.DataFrame]:
    run = instrument.load(folder)
    found = {name: getattr(run, name) for name in ("stats", "metrics", "events")}
    found["tensors"] = run.tensors().assign(values=lambda rows: [list(values) for values in rows["values"]])
    assert run.problems == []
    return found


@pytest.fixture(scope="module")
def wanted(original: Path) -> dict[str, pd.DataFrame]:
    return frames(original)


def assert_same(folder: Path, wanted: dict[str, pd.DataFrame]) -> None:
    for name, frame in frames(folder).items():
        pd.testing.assert_frame_equal(frame, wanted[name])


def test_compaction_keeps_rows_and_order(folder: Path, wanted: dict[str, pd.DataFrame]) -> None:
    found = compact(folder)
    assert (found.before["stats"], found.after["stats"]) == (6, 1)
    assert [path.name for path in (folder / "stats").iterdir()] == ["part-0000-000000-000005.parquet"]
    assert_same(folder, wanted)
    assert not (folder / "journal").exists()
    plain = pd.read_parquet(folder / "stats")
    assert list(zip(plain.step, plain.layer, strict=True)) == sorted(zip(plain.step, plain.layer, strict=True))
    assert pl.read_parquet(folder / "stats" / "*.parquet").height == 54
    again = compact(folder)
    assert again.before == again.after
    assert again.problems == []


def test_merged_part_is_merged_again_with_later_ones(folder: Path, wanted: dict[str, pd.DataFrame]) -> None:
    compact(folder, [{"stats": 4}])
    assert [path.stem for path in part_files(folder, "stats").values()] == [
        "part-0000-000000-000003",
        "part-0000-000004-000005",
    ]
    compact(folder)
    assert [path.stem for path in part_files(folder, "stats").values()] == ["part-0000-000000-000005"]
    assert_same(folder, wanted)


def test_parts_of_a_rank_unknown_to_the_checkpoint_are_merged(folder: Path) -> None:
    for number in range(2):
        with new_part(folder, TABLES["stats"], Part(1, number)):
            pass
    compact(folder, [{"stats": 4}])
    assert [path.stem for path in part_files(folder, "stats").values()][-1] == "part-0001-000000-000001"


def test_compacted_run_can_be_rewound_to_its_checkpoint(folder: Path) -> None:
    counts = dict.fromkeys(TABLES, 4)
    compact(folder, [counts])
    remove_rows_after_checkpoint(folder, 0, counts)
    assert list(instrument.load(folder).metrics.step) == list(range(12))


def test_row_groups_end_with_a_step_and_declare_their_order(
    folder: Path, wanted: dict[str, pd.DataFrame], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "ROW_GROUP_ROWS", 20)
    compact(folder)
    (file,) = part_files(folder, "stats").values()
    about = pq.read_metadata(file)
    assert [about.row_group(number).num_rows for number in range(about.num_row_groups)] == [18, 18, 18]
    assert len(about.row_group(0).sorting_columns) == 2
    assert_same(folder, wanted)


def test_step_larger_than_a_row_group_spans_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "ROW_GROUP_ROWS", 2)
    folder = make_run(tmp_path / "run", count=2, steps=1)
    compact(folder)
    (file,) = part_files(folder, "stats").values()
    groups = [pq.ParquetFile(file).read_row_group(number).column("step").to_pylist() for number in range(4)]
    assert [step for group in groups for step in group] == [0, 0, 0, 1, 1, 1]
    assert len(instrument.load(folder).stats) == 6


def test_parts_of_sufficient_size_are_not_merged(
    folder: Path, wanted: dict[str, pd.DataFrame], monkeypatch: pytest.MonkeyPatch
) -> None:
    size = (folder / "stats" / "part-0000-000000.parquet").stat().st_size
    monkeypatch.setattr(maintenance, "MAX_PART_BYTES", 2 * size + 100)
    compact(folder)
    names = [path.stem[10:] for path in part_files(folder, "stats").values()]
    assert names == ["000000-000001", "000002-000003", "000004-000005"]
    assert_same(folder, wanted)


@pytest.mark.slow
def test_journal_of_a_killed_run_is_merged_too(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", close=False)
    sink = ParquetSink(folder, parts=dict.fromkeys(TABLES, 6))
    sink.write("stats", [row("stats", step=18, layer="stem")])
    sink.end_step()
    assert list((folder / "journal").glob("stats-*"))
    wanted = frames(folder)["stats"]
    compact(folder)
    assert not list((folder / "journal").glob("stats-*"))
    pd.testing.assert_frame_equal(frames(folder)["stats"], wanted)


class Killed(BaseException):
    """Raised where the process is killed."""


# Per table (three tables): six parts become one, and are removed.
@pytest.mark.spread(1)
@pytest.mark.parametrize("moment", tiered(range(3 * (1 + 6)), [0, 1, 3, 20]))
def test_kill_at_any_moment_loses_and_duplicates_no_row(
    folder: Path, wanted: dict[str, pd.DataFrame], monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    passed = 0

    def kill_in(name: str) -> None:
        module: Any = os if name == "replace" else Path
        real = getattr(module, name)

        def instead(*arguments: Any, **options: Any) -> Any:
            nonlocal passed
            passed += 1
            if passed > moment:
                raise Killed
            return real(*arguments, **options)

        monkeypatch.setattr(module, name, instead)

    kill_in("replace")
    kill_in("unlink")
    with pytest.raises(Killed):
        compact(folder)
    monkeypatch.undo()
    assert_same(folder, wanted)
    compact(folder)
    assert_same(folder, wanted)
    assert len(written_parts(folder, "stats")) == 1
    assert RunFiles(folder).count("stats") == 54


@pytest.mark.slow
def test_concurrent_reader_sees_every_row_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = 8
    folder, rows = make_run(tmp_path / "run", count=parts, steps=1), parts * len(LAYERS)
    monkeypatch.setattr(maintenance, "MAX_PART_BYTES", 30_000)
    done = threading.Event()

    def merge() -> None:
        try:
            while maintenance.MAX_PART_BYTES < 2_000_000:
                compact(folder)
                maintenance.MAX_PART_BYTES *= 4
        finally:
            done.set()

    thread = threading.Thread(target=merge)
    thread.start()
    reads = 0
    while not done.is_set() or reads < 3:
        run = instrument.load(folder)
        assert len(run.stats) == run.count("stats") == rows
        counted = run.sql("select count(*) as n, count(distinct step) as steps from stats")
        assert counted.iloc[0].tolist() == [rows, parts]
        assert sum(batch.num_rows for batch in run.scan("stats", ["step"])) == rows
        assert run.problems == []
        reads += 1
    thread.join()
    assert len(written_parts(folder, "stats")) == 1


def test_started_scan_ends_with_every_row_once(folder: Path) -> None:
    scan = instrument.load(folder).scan("stats", ["step"])
    steps = next(scan)["step"].to_pylist()
    compact(folder)
    steps += [step for batch in scan for step in batch["step"].to_pylist()]
    assert steps == list(np.repeat(range(18), 3))


def test_damaged_and_incompatible_parts_are_kept(folder: Path) -> None:
    damaged, other = (folder / "stats" / f"part-0000-00000{number}.parquet" for number in (2, 4))
    damaged.write_bytes(b"no parquet")
    pq.write_table(pq.read_table(other).drop_columns(["mean"]), other)
    found = compact(folder)
    assert [problem.partition(":")[0] for problem in found.problems] == [f"stats/{damaged.name}", f"stats/{other.name}"]
    assert "columns differ: mean" in found.problems[1]
    names = sorted(path.stem[10:] for path in (folder / "stats").iterdir())
    assert names == ["000000-000001", "000002", "000003", "000004", "000005"]


@pytest.mark.slow
def test_compact_command_accepts_a_sweep_and_reports(
    original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for job in range(3):
        shutil.copytree(original, tmp_path / "sweep" / str(job))
    lock = FolderLock(tmp_path / "sweep" / "1")
    assert lock.acquire()
    assert command.main([str(tmp_path / "sweep")]) == 1
    output = capsys.readouterr()
    assert "0: files merged: stats from 6 to 1, tensors from 6 to 1, metrics from 6 to 1" in output.out
    assert "1: the run is in progress; nothing was changed" in output.err
    assert len(written_parts(tmp_path / "sweep" / "1", "stats")) == 6
    lock.release()
    assert command.main([str(tmp_path / "sweep")]) == 0
    assert "2: nothing to merge" in capsys.readouterr().out
    assert not (tmp_path / "sweep" / "1" / ".lock").exists()
    assert command.main([str(tmp_path / "nowhere")]) == 2
    assert command.main(["s3://bucket/runs"]) == 2
    assert len(instrument.load(tmp_path / "sweep").stats) == 162


def test_compact_command_respects_checkpoint_boundaries(folder: Path) -> None:
    (folder / "checkpoints").mkdir()
    state = {"version": VERSION, "parts": [dict.fromkeys(TABLES, 2)]}
    torch.save(state, folder / "checkpoints" / "step-00000006.pt")
    assert command.main([str(folder)]) == 0
    assert [path.stem[10:] for path in part_files(folder, "stats").values()] == ["000000-000001", "000002-000005"]


def test_folder_changed_while_listing_is_listed_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "LISTING_SIZE", 2)
    listing = Path.iterdir
    half: list[list[Path]] = [list((folder / "stats").iterdir())[:3]]
    monkeypatch.setattr(Path, "iterdir", lambda path: iter(half.pop()) if half else listing(path))
    assert len(written_parts(folder, "stats")) == 6


def test_run_that_is_still_being_written_is_not_compacted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = FolderLock(folder, 2)
    assert lock.acquire()
    assert command.main([str(folder)]) == 1
    assert "in progress" in capsys.readouterr().err
    assert len(written_parts(folder, "stats")) == 6
    lock.release()
    assert command.main([str(folder)]) == 0
