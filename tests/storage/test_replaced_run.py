"""Replacement of the run in a folder by a new run."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from instrument import ConfigError
from instrument.storage.folder_snapshot import ASIDE
from instrument.storage.run_folder import DiscardedRunError, RunFolder

PART = "stats/part-0000-000000.parquet"
FOREIGN = ("notes.txt", "stats/notes.txt", "checkpoints/best.pt", "plots/loss.png")


@pytest.fixture
def old(tmp_path: Path) -> dict[str, bytes]:
    """A finished run with files of the user, as the content by relative path."""
    RunFolder(tmp_path, name="old", config={}).finish("done")
    for name in (PART, "journal/stats-0000-000001.arrows", "checkpoints/step-00000001.pt", "report.html", *FOREIGN):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"old {name}")
    return content(tmp_path)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_new_run_replaces_the_files_of_the_old_run_when_it_ends(tmp_path: Path, old: dict[str, bytes]) -> None:
    folder = RunFolder(tmp_path, name="new", config={}, overwrite=True)
    assert content(tmp_path / ASIDE) == {name: data for name, data in old.items() if name not in FOREIGN}
    folder.finish("failed", ValueError("no luck"))
    left = content(tmp_path)
    assert json.loads(left.pop("run.json"))["name"] == "new"
    assert left == {name: old[name] for name in FOREIGN}
    assert not (tmp_path / ASIDE).exists()
    assert not (tmp_path / "journal").exists()


@pytest.mark.parametrize("error", [DiscardedRunError(), ConfigError("hooks do not fit")])
def test_old_run_is_restored_if_the_new_one_does_not_start(
    tmp_path: Path, old: dict[str, bytes], error: Exception
) -> None:
    folder = RunFolder(tmp_path, name="new", config={}, overwrite=True)
    with pytest.raises(type(error)), folder.recording(has_started=lambda: False):  # noqa: PT012
        (tmp_path / "stats/part-0000-000007.parquet").write_text("new")
        raise error
    assert content(tmp_path) == old


def test_run_in_progress_is_not_replaced(tmp_path: Path) -> None:
    first = RunFolder(tmp_path, name="first", config={})
    before = (tmp_path / "run.json").read_bytes()
    with pytest.raises(ConfigError, match="out: the run in this folder is in progress"):
        RunFolder(tmp_path, where="out", name="second", config={}, overwrite=True)
    assert (tmp_path / "run.json").read_bytes() == before
    first.finish("done")


@pytest.mark.parametrize("text", ["{}", "no json", '{"status": "done"}'])
def test_folder_with_another_run_json_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ConfigError, match=r"cannot read run\.json|not written by this package"):
        RunFolder(tmp_path, where="out", config={}, overwrite=True)
    assert content(tmp_path) == {"run.json": text.encode()}


def test_folder_without_a_run_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    RunFolder(tmp_path, config={}, overwrite=True).finish("done")
    RunFolder(tmp_path / "new", config={}, overwrite=True).finish("done")
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.spread(3)
@pytest.mark.parametrize("moved", range(9))
def test_interrupt_leaves_the_old_or_the_new_run(
    tmp_path: Path, old: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, moved: int
) -> None:
    """Ctrl-C at each rename of a file: five files are set aside, then run.json is written, or all are moved back."""
    count = 0

    def interrupting(rename: Callable[[Path, Path], Path]) -> Callable[[Path, Path], Path]:
        def renamed(path: Path, target: Path) -> Path:
            nonlocal count
            if count == moved:
                signal.raise_signal(signal.SIGINT)
            count += 1
            return rename(path, target)

        return renamed

    monkeypatch.setattr(Path, "rename", interrupting(Path.rename))
    try:
        RunFolder(tmp_path, name="new", config={}, overwrite=True).finish("done")
    except KeyboardInterrupt:
        assert content(tmp_path) == old
    else:
        assert json.loads((tmp_path / "run.json").read_bytes())["name"] == "new"
        assert not (tmp_path / ASIDE).exists()


def test_full_disk_or_lost_permission_restores_the_old_run(
    tmp_path: Path, old: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def refused(path: Path, target: Path) -> Path:
        if path == tmp_path / PART:
            raise PermissionError(13, "Permission denied")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(ConfigError, match="cannot be replaced: Permission denied"):
        RunFolder(tmp_path, where="out", config={}, overwrite=True)
    assert content(tmp_path) == old


def test_unreadable_file_restores_the_old_run(
    tmp_path: Path, old: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "instrument.log").symlink_to(tmp_path / "notes.txt")  # links stay in the folder
    read = Path.read_bytes

    def refused(path: Path) -> bytes:
        if path == tmp_path / "instrument.log":
            raise PermissionError(13, "Permission denied")
        return read(path)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", refused)
        with pytest.raises(PermissionError):
            RunFolder(tmp_path, where="out", config={}, overwrite=True)
    (tmp_path / "instrument.log").unlink()
    assert content(tmp_path) == old


def test_run_of_a_process_killed_between_both_runs_is_replaced(tmp_path: Path, old: dict[str, bytes]) -> None:
    (tmp_path / ASIDE).mkdir()
    (tmp_path / "run.json").rename(tmp_path / ASIDE / "run.json")
    RunFolder(tmp_path, name="new", config={}, overwrite=True).finish("done")
    assert set(content(tmp_path)) == {"run.json", *FOREIGN}


def test_message_for_an_existing_run_names_overwrite(tmp_path: Path, old: dict[str, bytes]) -> None:
    with pytest.raises(ConfigError, match="overwrite=True"):
        RunFolder(tmp_path, where="out", config={})
    assert content(tmp_path) == old
