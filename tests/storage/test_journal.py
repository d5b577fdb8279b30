"""The journal: complete messages up to the last one, whatever happens to the end or the middle of the file."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pyarrow as pa
import pytest

from instrument.storage.journal import Journal, JournalReader

SCHEMA = pa.schema([("step", pa.int64()), ("layer", pa.string()), ("values", pa.list_(pa.float32()))])


def batch(step: int) -> pa.RecordBatch:
    rows = [[step, step], ["a", "b" * step], [[1.0, step], [step]]]
    return pa.record_batch([pa.array(c, t) for c, t in zip(rows, SCHEMA.types, strict=True)], schema=SCHEMA)


def write_journal(path: Path, steps: int) -> list[int]:
    """Write a journal of `steps` steps; return its initial size and its size after each step."""
    journal = Journal(path, SCHEMA)
    sizes = [journal.size]
    for step in range(steps):
        journal.append(batch(step))
        sizes.append(journal.size)
        assert path.stat().st_size == journal.size
        assert journal.rows == 2 * (step + 1)
    journal.close()
    return sizes


@pytest.mark.slow
def test_truncated_journal_has_all_complete_steps(tmp_path: Path) -> None:
    path = tmp_path / "j.arrows"
    sizes = write_journal(path, 4)
    content = path.read_bytes()
    for end in range(len(content) + 1):
        path.write_bytes(content[:end])
        reading = JournalReader.of(path)
        found = list(reading.batches())
        assert found == [batch(step) for step in range(max(0, sum(size <= end for size in sizes) - 1))]
        assert reading.torn == (end not in sizes)
        assert reading.problem is None
        assert reading.rows == 2 * len(found)


@pytest.mark.slow
def test_damaged_journal_never_raises_or_invents_a_batch(tmp_path: Path) -> None:
    cases = 1000
    path = tmp_path / "j.arrows"
    write_journal(path, 4)
    content, draw = path.read_bytes(), random.Random(0)
    named = 0
    for _ in range(cases):
        damaged = bytearray(content)
        for _ in range(draw.choice([1, 1, 4, 30])):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        path.write_bytes(damaged)
        reading = JournalReader.of(path)
        found = list(reading.batches())
        assert len(found) <= 4
        if len(found) < 4:
            assert reading.torn or reading.problem
            named += reading.problem is not None
    assert named > cases // 4


def test_incomplete_batch_is_removed_from_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "j.arrows"
    journal = Journal(path, SCHEMA)
    journal.append(batch(0))
    size = journal.size

    room, write = [20], os.write

    def write_some(descriptor: int, data: bytes) -> int:
        """Write to a disk with room for 20 more bytes, ten at once."""
        if not room[0]:
            raise OSError(28, "No space left on device")
        count = write(descriptor, data[:10])
        room[0] -= count
        return count

    with monkeypatch.context() as full:
        full.setattr("instrument.storage.journal.os.write", write_some)
        full.setattr(
            "instrument.storage.journal.os.writev", lambda descriptor, parts: write_some(descriptor, b"".join(parts))
        )
        with pytest.raises(OSError, match="No space left"):
            journal.append(batch(1))
    assert room == [0]
    assert path.stat().st_size == size
    journal.append(batch(2))
    journal.close()
    assert list(JournalReader.of(path).batches()) == [batch(0), batch(2)]


def test_rows_with_other_columns_follow_their_schema(tmp_path: Path) -> None:
    path = tmp_path / "j.arrows"
    written = [batch(0), batch(1).select(["step"]), batch(2).select(["step"]), batch(3)]
    journal, sizes = Journal(path, SCHEMA), []
    for each in written:
        journal.append(each)
        sizes.append(journal.size)
    content = path.read_bytes()
    for end in range(sizes[0], len(content) + 1):
        path.write_bytes(content[:end])
        reading = JournalReader.of(path)
        assert [*reading.batches()] == written[: sum(size <= end for size in sizes)]
        assert reading.problem is None
        path.write_bytes(content)
        rest = JournalReader.of(path, after=reading.without_content())
        assert [*rest.batches()] == written[sum(size <= end for size in sizes) :]
        assert (rest.rows, rest.torn) == (8, False)
    journal.close()


def test_removed_journal_is_detected_at_the_next_step(tmp_path: Path) -> None:
    path = tmp_path / "j.arrows"
    journal = Journal(path, SCHEMA)
    path.unlink()
    with pytest.raises(FileNotFoundError, match="was removed"):
        journal.append(batch(0))
    journal.close()


def test_fsync_option_syncs_rows_before_append_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr("instrument.storage.journal.os.fsync", synced.append)
    plain = Journal(tmp_path / "plain.arrows", SCHEMA)
    plain.append(batch(0))
    assert synced == []
    safe = Journal(tmp_path / "safe.arrows", SCHEMA, fsync=True)
    safe.append(batch(0))
    assert len(synced) == 2
    plain.close()
    safe.close()
