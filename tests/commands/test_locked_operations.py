"""Maintenance commands on finished runs: locking, damaged records and error messages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Call

import instrument
from instrument.commands import compact, recover, upload
from instrument.storage.lock import FolderLock
from instrument.storage.parquet import ParquetSink
from instrument.tables.schemas import TABLES


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """Folder of a killed run with rows in its journal."""
    folder = tmp_path / "runs" / "killed"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"status": "running", "seed": 0}))
    sink = ParquetSink(folder)
    cells = {"step": 0, "rank": 0, "phase": "train", "loss": 1.0}
    sink.write("metrics", [tuple(cells.get(name) for name in TABLES["metrics"].names)])
    sink.end_step()
    return folder


Main = Callable[[list[str]], int]
COMMANDS: list[Main] = [compact.main, recover.main]


@pytest.mark.parametrize("main", COMMANDS)
def test_command_waits_for_the_lock_of_the_folder(
    main: Main, killed: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("instrument.storage.lock.LOCK_TIMEOUT", 0.01)
    monkeypatch.setattr("instrument.storage.lock.is_written", lambda _: False)  # the run started after the check
    lock = FolderLock(killed)
    assert lock.acquire()
    assert "the run is in progress; nothing was changed" in call(main, killed).expect(1).err
    assert list((killed / "journal").glob("metrics-*.arrows"))
    lock.release()
    assert main([str(killed)]) == 0
    assert not (killed / "journal").exists()
    assert not (killed / ".lock").exists()


def test_upload_does_not_recover_a_locked_run(
    killed: Path, call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("instrument.storage.lock.LOCK_TIMEOUT", 0.01)
    monkeypatch.setattr("instrument.storage.lock.is_written", lambda _: False)
    lock = FolderLock(killed)
    assert lock.acquire()
    answer = call(upload.main, killed, f"memory://{tmp_path}/there").expect(1)
    assert answer.err == f"{killed}: the run is in progress; nothing was changed\n"
    lock.release()
    assert upload.main([str(killed), f"memory://{tmp_path}/there"]) == 0


@pytest.mark.spread(2)
@pytest.mark.parametrize("main", COMMANDS)
@pytest.mark.parametrize("content", ["", "{", "[]", "{}"])
def test_command_works_with_a_damaged_run_json(main: Main, killed: Path, content: str) -> None:
    (killed / "run.json").write_text(content)
    assert main([str(killed)]) == 0
    assert len(instrument.load(killed).metrics) == 1


@pytest.mark.parametrize("main", COMMANDS)
def test_unwritable_folder_is_reported(main: Main, killed: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:

    def refuse(_: FolderLock) -> bool:
        raise PermissionError(13, "Permission denied", str(killed / ".lock"))

    monkeypatch.setattr(FolderLock, "acquire", refuse)
    message = call(main, killed, killed / "nowhere").expect(2).err
    assert "Permission denied" in message
    assert "folder not found" in message
