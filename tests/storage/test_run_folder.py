"""The folder of a run and its run.json."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from instrument import ConfigError
from instrument.storage.run_folder import DiscardedRunError, RunFolder, create_free_folder
from instrument.storage.run_record import config_hash, git_revision


def read(folder: Path) -> dict[str, object]:
    return json.loads((folder / "run.json").read_text())  # type: ignore[no-any-return]


def test_run_json_has_the_status_from_the_start(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a" / "run", name="x", seed=3, config={"a": 1}, device=None)
    info = read(folder.path)
    assert (info["status"], info["seed"], info["config"], info["ended"]) == ("running", 3, {"a": 1}, None)
    assert {"python", "torch", "instrument", "pyarrow"} <= set(info["versions"])  # type: ignore[call-overload]
    folder.update(device="cpu")
    assert read(folder.path)["device"] == "cpu"
    folder.finish("failed", ValueError("no luck"))
    info = read(folder.path)
    assert (info["status"], info["error"]) == ("failed", "ValueError: no luck")
    assert str(info["started"]) <= str(info["ended"])
    assert [file.name for file in folder.path.iterdir()] == ["run.json"]


def test_folder_with_a_run_is_refused_and_unchanged(tmp_path: Path) -> None:
    RunFolder(tmp_path, name="first").finish("done")
    before = (tmp_path / "run.json").read_bytes()
    with pytest.raises(ConfigError, match="runs are never overwritten"):
        RunFolder(tmp_path, name="second")
    assert (tmp_path / "run.json").read_bytes() == before


def test_discarded_run_leaves_only_the_previous_files(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    create_free_folder(tmp_path, "out")
    folder = RunFolder(tmp_path, name="x")
    with pytest.raises(DiscardedRunError), folder.recording(has_started=lambda: True):
        raise DiscardedRunError
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]
    RunFolder(tmp_path, name="again").finish("done")


def test_writable_check_tolerates_a_concurrent_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch = Path.touch

    def touched_by_two(file: Path) -> None:
        touch(file)
        file.unlink()  # as another process would do

    monkeypatch.setattr(Path, "touch", touched_by_two)
    create_free_folder(tmp_path, "out")
    assert list(tmp_path.iterdir()) == []


def test_folder_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="not writable: Not a directory"):
        create_free_folder(tmp_path / "file" / "run", "out")


def test_config_hash_does_not_depend_on_the_order_of_keys() -> None:
    assert config_hash({"a": 1, "b": {"c": 2, "d": 3}}) == config_hash({"b": {"d": 3, "c": 2}, "a": 1})
    assert config_hash({"a": 1}) != config_hash({"a": 2})
    assert len(config_hash({})) == 16


def test_git_revision_is_the_commit_with_a_dirty_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_revision() is None

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(["git", *identity, *arguments], check=True, capture_output=True, text=True).stdout.strip()

    git("init")
    Path("file").write_text("1")
    git("add", "file")
    git("commit", "-m", "first")
    commit = git("rev-parse", "HEAD")
    assert git_revision() == commit
    Path("file").write_text("2")
    assert git_revision() == f"{commit}-dirty"
    monkeypatch.setenv("PATH", "")
    assert git_revision() is None
