"""Run folders in any state (damaged, truncated, foreign files): readable files are read, the others reported."""

from __future__ import annotations

import json
import math
import pickle
import random
import shutil
import zlib
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from run_folders import damage_inside, write_steps
from tiers import tiered

import instrument
from instrument import InstrumentError, InstrumentWarning
from instrument.commands import recover
from instrument.storage.journal import Journal, JournalReader
from instrument.storage.journal_truncation_check import CHECKSUM, PAIR, RowCounts, read_counts
from instrument.storage.lock import FolderLock
from instrument.storage.maintenance import recover as recover_files
from instrument.storage.parts import Part
from instrument.storage.run_files import RunFiles, size_on_disk

STEPS = 12


def rows_of(step: int) -> dict[str, Any]:
    """Return the rows of a step, without its tensors."""
    return {"stats": [{"step": step, "mean": float(step)}], "metrics": [{"step": step, "phase": "train", "loss": 0.5}]}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed: three parts per table, and a journal."""
    folder = tmp_path_factory.mktemp("original") / "run"
    tensors = [[{"step": step, "values": torch.full((2,), float(step))}] for step in range(STEPS)]
    steps = [{**rows_of(step), "tensors": rows} for step, rows in enumerate(tensors)]
    return write_steps(folder, steps, parts=(2, 5, 8), close=False, info={"status": "running"})


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "run"))


@pytest.fixture
def journal(folder: Path) -> Path:
    return folder / "journal" / "stats-0000-000003.arrows"


def steps_of(folder: Path, table: str) -> list[int]:
    return list(getattr(instrument.load(folder), table).step)


@pytest.mark.filterwarnings("error::instrument.errors.InstrumentWarning")
def test_parts_and_journal_are_one_table(folder: Path) -> None:
    run = instrument.load(folder)
    assert run.info["status"] == "killed"
    assert list(run.stats.step) == list(run.metrics.step) == list(range(STEPS))
    assert [float(values[0]) for values in run.tensors()["values"]] == list(range(STEPS))
    assert list(run.tensors(step=[1, 11]).step) == [1, 11]
    assert run.sql("select count(*) as n, max(step) as last from stats").iloc[0].tolist() == [STEPS, STEPS - 1]
    assert run.problems == []


def test_journal_of_an_existing_part_is_not_read_twice(folder: Path, journal: Path) -> None:
    """The process was killed between renaming the part and removing its journal."""
    kept = journal.read_bytes()
    assert recover.main([str(folder)]) == 0
    journal.parent.mkdir()
    journal.write_bytes(kept)
    assert steps_of(folder, "stats") == list(range(STEPS))
    assert recover.main([str(folder)]) == 0
    assert not journal.exists()
    assert len(pd.read_parquet(folder / "stats")) == STEPS


def test_incomplete_part_is_removed_by_recovery(folder: Path) -> None:
    aside = folder / "journal" / "stats-0000-000003.tmp"
    aside.write_bytes(b"PAR1 and then nothing more")
    assert steps_of(folder, "stats") == list(range(STEPS))
    assert recover.main([str(folder)]) == 0
    assert not aside.exists()
    assert len(pd.read_parquet(folder / "stats")) == STEPS


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("stats/part-0000-000001.parquet", b"", "cannot be read"),
        ("stats/part-0000-000001.parquet", b"PAR1" + b"\0" * 100 + b"PAR1", "cannot be read"),
        ("stats/part-0000-000001.parquet", b"no parquet at all", "cannot be read"),
        ("journal/stats-0000-000003.arrows", b"not a stream", "not an Arrow stream"),
    ],
)
def test_damaged_file_is_reported_and_the_rest_is_read(folder: Path, file: str, content: bytes, message: str) -> None:
    (folder / file).write_bytes(content)
    run = instrument.load(folder)
    with pytest.warns(InstrumentWarning, match=file):
        steps = list(run.stats.step)
    missing = [3, 4, 5] if file.startswith("stats") else [9, 10, 11]
    assert steps == [step for step in range(STEPS) if step not in missing]
    assert list(run.metrics.step) == list(range(STEPS))
    (problem,) = run.problems
    assert problem.startswith(f"{file}: ")
    assert message in problem


def test_scan_and_count_skip_damaged_files(folder: Path) -> None:
    run = instrument.load(folder)
    late = ds.field("step") >= 4
    assert [step for batch in run.scan("stats", ["step"], late) for step in batch["step"].to_pylist()] == [
        *range(4, STEPS)
    ]
    assert (run.count("stats"), run.count("effects"), run.problems) == (STEPS, 0, [])
    assert size_on_disk(folder) == sum(file.stat().st_size for file in folder.rglob("*-0*"))
    file = folder / "stats" / "part-0000-000001.parquet"
    damage_inside(file)
    for opened, read in (
        (run, lambda: [step for rows in run.scan("stats", ["step", "mean"]) for step in rows["step"].to_pylist()]),
        (frame := instrument.load(folder), lambda: list(frame.stats.step)),
    ):
        with pytest.warns(InstrumentWarning, match=f"stats/{file.name}: cannot be read"):
            assert read() == [0, 1, 2, *range(6, STEPS)]
        assert len(opened.problems) == 1


def test_run_of_a_version_with_fewer_statistics_is_read(folder: Path) -> None:
    wanted = instrument.load(folder).stats
    for file in (folder / "stats").glob("*.parquet"):
        pq.write_table(pq.read_table(file).drop_columns(["dead_fraction", "update_ratio"]), file)
    run = instrument.load(folder)
    assert run.stats["dead_fraction"].isna().all()
    pd.testing.assert_frame_equal(
        run.stats.drop(columns=["dead_fraction", "update_ratio"]),
        wanted.drop(columns=["dead_fraction", "update_ratio"]),
    )
    assert run.problems == []


def test_files_with_other_columns_are_reported(folder: Path) -> None:
    pq.write_table(pa.table({"step": [1], "mine": [2]}), folder / "stats" / "part-0000-000007.parquet")
    shutil.copy(folder / "journal" / "metrics-0000-000003.arrows", folder / "journal" / "stats-0000-000009.arrows")
    run = instrument.load(folder)
    with pytest.warns(InstrumentWarning, match=r"(?s)column micro_step, .* is missing|the columns differ"):
        assert len(run.stats) == STEPS
    part, journal = sorted(run.problems, reverse=True)
    assert "column micro_step, " in part
    assert "the columns differ from those of the table" in journal


class Bomb:
    """An object that fails the test when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (pytest.fail, ("a pickle of the folder was read",))


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "file",
    [
        "stats/mine.parquet",
        "stats/part-0000-000000.pkl",
        "stats/deep/part-0000-000000.parquet",
        "journal/events-0000-000000.pt",
        "journal/what-0000-000000.arrows",
        "tensors/values.npy",
    ],
)
def test_foreign_files_are_reported_and_never_read(folder: Path, file: str) -> None:
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_bytes(pickle.dumps(Bomb()))
    run = instrument.load(folder)
    with pytest.warns(InstrumentWarning, match="not a file of a run"):
        assert len(run.stats) == len(run.tensors()) == STEPS
    assert run.problems == [f"{file}: not a file of a run: skipped"]
    recover.main([str(folder)])
    assert (folder / file).exists(), "foreign files are kept"


@pytest.mark.spread(4)
@pytest.mark.parametrize(
    "content", ["", "{", "[1, 2]", '"text"', "\x00", '{"status": "done", "overrides": 3, "metrics": []}']
)
def test_invalid_run_json_leaves_the_tables_readable(folder: Path, content: str) -> None:
    (folder / "run.json").write_text(content)
    run = instrument.load(folder)
    assert len(run.stats) == STEPS
    assert run.infos[0]["overrides"] == {}
    assert len(run.runs) == 1
    assert "1 run" in repr(run)


@pytest.mark.parametrize("cases", tiered([15, 150], [15]))
@pytest.mark.filterwarnings("ignore::instrument.errors.InstrumentWarning")
def test_random_damage_in_any_file_never_raises(original: Path, tmp_path: Path, cases: int) -> None:
    draw = random.Random(0)
    files = [file.relative_to(original) for file in sorted(original.rglob("*")) if file.is_file()]
    named = 0
    for number in range(cases):
        folder = Path(shutil.copytree(original, tmp_path / str(number)))
        file = folder / draw.choice(files)
        content = bytearray(file.read_bytes())
        for _ in range(draw.choice([1, 8, 64])):
            content[draw.randrange(len(content))] = draw.randrange(256)
        file.write_bytes(content[: draw.choice([len(content), draw.randrange(len(content))])])
        run = instrument.load(folder)
        for table in ("stats", "metrics", "coverage", "events"):
            assert set(run.read(table, ["step"] if table in ("stats", "metrics") else ["rank"]).columns)
        named += bool(run.problems)
        shutil.rmtree(folder)
    assert named > cases / 5


def test_recover_skips_a_running_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = FolderLock(folder)
    assert lock.acquire()
    assert instrument.load(folder).info["status"] == "running"
    assert recover.main([str(folder)]) == 1
    assert "in progress" in capsys.readouterr().err
    assert list((folder / "journal").glob("*.arrows"))
    lock.release()
    assert instrument.load(folder).info["status"] == "killed"


def test_recover_reports_its_work_and_accepts_a_sweep(
    original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for job in range(2):
        shutil.copytree(original, tmp_path / "sweep" / str(job))
    journal = tmp_path / "sweep" / "0" / "journal" / "stats-0000-000003.arrows"
    journal.write_bytes(journal.read_bytes() + last_message(journal)[:-3])  # an incomplete last step
    assert recover.main([str(tmp_path / "sweep")]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert "rows converted to Parquet: metrics 3, stats 3, tensors 3" in first
    assert first.endswith("the incomplete last step was discarded (stats)")
    assert second.endswith("metrics 3, stats 3, tensors 3")
    assert recover.main([str(tmp_path / "sweep" / "0")]) == 0
    assert "no journals to convert" in capsys.readouterr().out
    assert recover.main([str(tmp_path / "nowhere")]) == 2
    assert "folder not found" in capsys.readouterr().err


def boundaries(journal: Path) -> list[int]:
    """Return the ends of all messages of a journal, starting with the schema."""
    reading = JournalReader.of(journal)
    return [reading.end, *(reading.end for _ in reading.batches())]


def last_message(journal: Path) -> bytes:
    *_, start, end = boundaries(journal)
    return journal.read_bytes()[start:end]


@pytest.mark.filterwarnings("ignore::instrument.errors.InstrumentWarning")
@pytest.mark.parametrize("table", tiered(["stats", "metrics", "tensors"], ["stats"]))
def test_truncated_journal_is_reported(folder: Path, table: str) -> None:
    journal = folder / "journal" / f"{table}-0000-000003.arrows"
    content, ends = journal.read_bytes(), boundaries(journal)
    draw = random.Random(0)
    for size in {0, *ends, *(draw.randrange(len(content)) for _ in range(12))}:
        journal.write_bytes(content[:size])
        files = RunFiles(folder)
        rows = files.read(table).num_rows
        complete = sum(end <= size for end in ends[1:])
        assert rows == STEPS - 3 + complete
        problems = [f"journal/{journal.name}: the journal is truncated: it contains {complete} of 3 rows"]
        assert files.problems == (problems if complete < 3 else []), size


@pytest.mark.slow
def test_process_killed_at_any_moment_leaves_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a copy of the folder between any two writes and in the middle of each, as a kill would leave it."""
    folder, plain, count = tmp_path / "run", Journal.append, RowCounts.write
    moments = 0

    def killed(path: Path | None = None, half: bytes = b"") -> None:
        nonlocal moments
        moments += 1
        left = Path(shutil.copytree(folder, tmp_path / str(moments)))
        if path is not None:
            with open(left / path.relative_to(folder), "ab") as journal:
                journal.write(half)
        files = RunFiles(left)
        assert files.read("stats").num_rows >= files.read("metrics").num_rows == done
        assert files.problems == []
        assert recover_files(left).problems == []
        assert RunFiles(left).read("metrics").num_rows == done
        shutil.rmtree(left)

    def append(self: Journal, batch: pa.RecordBatch) -> None:
        message = bytes(batch.serialize())
        killed(self.path, message[: len(message) // 2])
        plain(self, batch)

    def write(self: RowCounts, counts: Iterable[tuple[int, int]]) -> None:
        nonlocal done
        done += 1
        killed()
        count(self, counts)
        killed()

    monkeypatch.setattr(Journal, "append", append)
    monkeypatch.setattr(RowCounts, "write", write)
    monkeypatch.setattr("instrument.storage.parquet.ROWS_JOURNAL_BYTES", 3000)  # some become parts in the meantime
    done = 0
    write_steps(folder, map(rows_of, range(4)), close=False)
    assert moments == 16
    assert len(list(folder.glob("stats/*.parquet"))) > 0


def test_missing_journal_is_reported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "journal" / "stats-0000-000003.arrows").unlink()
    run = instrument.load(folder)
    with pytest.warns(InstrumentWarning, match="the file is missing"):
        assert len(run.stats) == STEPS - 3
    assert run.problems == ["journal/stats-0000-000003.arrows: the file is missing, with 3 rows"]
    assert recover.main([str(folder)]) == 1
    assert "the file is missing, with 3 rows" in capsys.readouterr().err


def test_row_counts_of_an_earlier_version_lack_new_tables(folder: Path) -> None:
    (path,) = (folder / "journal").glob("rows.*")
    before, pairs = read_counts(path), path.read_bytes()[:-4]
    assert before
    earlier = pairs[: -PAIR.size]  # without the table `samples`
    path.write_bytes(earlier + CHECKSUM.pack(zlib.crc32(earlier)))
    assert read_counts(path) == before
    path.write_bytes(earlier[:-1] + CHECKSUM.pack(zlib.crc32(earlier[:-1])))
    assert read_counts(path) is None


def test_damaged_row_counts_are_reported_and_all_rows_read(folder: Path) -> None:
    counts = folder / "journal" / "rows.0000"
    counts.write_bytes(b"\x01" + counts.read_bytes()[1:])
    run = instrument.load(folder)
    with pytest.warns(InstrumentWarning, match="truncated journals cannot be detected"):
        assert len(run.stats) == STEPS


@pytest.mark.parametrize(
    ("damage", "message", "rows"),
    [
        (
            lambda journal: journal.read_bytes()[: boundaries(journal)[1]],
            "the journal is truncated: it contains 1 of 3 rows",
            STEPS - 2,
        ),
        (lambda journal: journal.with_name("metrics-0000-000003.arrows").read_bytes(), "the columns differ", STEPS - 3),
        (lambda journal: journal.read_bytes()[:-200] + b"\xaa" * 50 + journal.read_bytes()[-150:], "", None),
    ],
    ids=["truncated", "other columns", "damaged"],
)
def test_recover_keeps_and_reports_a_damaged_journal(
    journal: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], bytes], message: str, rows: int | None
) -> None:
    content, folder = damage(journal), journal.parents[1]
    journal.write_bytes(content)
    assert recover.main([str(folder)]) == 1
    assert f"journal/{journal.name}: {message}" in capsys.readouterr().err
    assert journal.with_suffix(".damaged").read_bytes() == content
    steps = pd.read_parquet(folder / "stats").step.tolist()
    assert steps[:9] == list(range(9))
    assert rows in (None, len(steps))


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "ask",
    [
        lambda run: len(run.stats),
        lambda run: run.count("stats"),
        lambda run: sum(len(batch) for batch in run.scan("stats", ["step"])),
        lambda run: run.sql("select count(*) as n from stats where step >= 0").n[0],
        lambda run: run.lazy("stats").collect().height,
    ],
)
def test_files_may_be_merged_whenever_they_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: Callable[[instrument.Run], int]
) -> None:
    parts = 5
    folder = write_steps(tmp_path / "run", map(rows_of, range(parts)), parts=range(parts))
    original = RunFiles.table_files

    def merged(self: RunFiles, name: str) -> tuple[list[Path], list[pa.Table]]:
        found = original(self, name)
        if len(found[0]) > 1:  # merge the first two after they were listed
            one, two = found[0][:2]
            rows = pa.concat_tables([pq.read_table(one), pq.read_table(two)])
            pq.write_table(rows, Part(0, 0, int(two.stem.rpartition("-")[2])).file(folder, name))
            one.unlink()
            two.unlink()
        return found

    monkeypatch.setattr(RunFiles, "table_files", merged)
    assert ask(instrument.load(folder)) == parts


@pytest.fixture(scope="module")
def large_part(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose part has 40,000 rows, so that it is not read with its footer."""
    means = np.random.default_rng(0).random(40_000).tolist()
    return write_steps(tmp_path_factory.mktemp("large") / "run", [{"stats": [{"mean": mean} for mean in means]}])


@pytest.mark.slow
@pytest.mark.parametrize("reads", [0, 1, 2])
def test_part_of_a_remote_run_that_is_merged_while_it_is_read_is_read_again(
    large_part: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: int
) -> None:
    files = MemoryFileSystem()
    address = f"memory://{tmp_path}/remote"
    files.put(str(large_part), address, recursive=True)
    (part,) = files.find(f"{address}/stats")
    left = math.inf  # reads of the part before it is merged
    original, opened = RunFiles.table_files, MemoryFileSystem._open

    def listed(self: RunFiles, name: str) -> Any:
        nonlocal left
        found = original(self, name)
        left = reads if found[0] else math.inf
        return found

    class LazyFile:
        """Reads from a file that may not exist any more."""

        def __init__(self, path: str, file: Any) -> None:
            self.path, self.file = path, file

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def read(self, *size: int) -> bytes:
            nonlocal left
            left -= self.path == part
            if left < 0:
                left = math.inf
                files.mv(part, part.replace("part-0000-000000", "part-0000-000000-000001"))
            if not files.exists(self.path):
                raise FileNotFoundError(self.path)
            return self.file.read(*size)  # type: ignore[no-any-return]

    monkeypatch.setattr(RunFiles, "table_files", listed)
    monkeypatch.setattr(
        MemoryFileSystem, "_open", lambda self, path, *more, **given: LazyFile(path, opened(self, path, *more, **given))
    )
    run = instrument.load(address)
    assert len(run.stats) == 40_000
    assert run.problems == []


def test_listed_file_that_is_missing_is_reported(tmp_path: Path) -> None:
    (tmp_path / "run" / "stats").mkdir(parents=True)
    (tmp_path / "run" / "run.json").write_text("{}")
    part = Part(0, 0).file(tmp_path / "run", "stats")
    part.symlink_to(tmp_path / "nowhere")
    run = instrument.load(tmp_path / "run")
    for ask in (lambda: run.stats, lambda: run.count("stats")):
        with pytest.raises(FileNotFoundError, match=part.name):
            ask()
    for query in (lambda: run.sql("select * from stats"), lambda: run.lazy("stats").collect()):
        with pytest.raises(InstrumentError, match=part.name):
            query()


@pytest.mark.parametrize(("missing", "rows"), [("stats", 0), ("stats/part-0000-000001.parquet", 9)])
def test_missing_files_of_a_finished_run_are_reported(tmp_path: Path, missing: str, rows: int) -> None:
    info = {"versions": {"instrument": version("torch-instrument")}}
    folder = write_steps(tmp_path / "run", map(rows_of, range(STEPS)), parts=(2, 5, 8), info=info)
    complete = instrument.load(folder)
    assert (len(complete.stats), len(complete.tensors()), complete.problems) == (STEPS, 0, [])
    shutil.rmtree(folder / missing) if missing == "stats" else (folder / missing).unlink()
    with pytest.warns(InstrumentWarning, match="stats: files of this table are missing"):
        assert len(instrument.load(folder).stats) == rows
    for other in ({"versions": {"instrument": "0.1"}}, {**info, "recording_stopped": "the disk is full"}):
        (folder / "run.json").write_text(json.dumps({"status": "done", **other}))
        run = instrument.load(folder)
        assert (len(run.stats), run.problems) == (rows, [])
