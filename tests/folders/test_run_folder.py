"""The folder of a run and its run.json."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from instrument import ConfigError
from instrument.folders.run_folder import RunFolder, config_hash, git_revision, refuse_taken


def read(folder: Path) -> dict[str, object]:
    return json.loads((folder / "run.json").read_text())  # type: ignore[no-any-return]


def test_run_json_says_how_the_run_stands_from_its_first_moment_on(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a" / "run", name="x", seed=3, config={"a": 1}, device=None)
    told = read(folder.path)
    assert (told["status"], told["seed"], told["config"], told["ended"]) == ("running", 3, {"a": 1}, None)
    assert {"python", "torch", "instrument", "pyarrow"} <= set(told["versions"])  # type: ignore[call-overload]
    folder.update(device="cpu")
    assert read(folder.path)["device"] == "cpu"
    folder.finish("failed", ValueError("no luck"))
    told = read(folder.path)
    assert (told["status"], told["error"]) == ("failed", "ValueError: no luck")
    assert str(told["started"]) <= str(told["ended"])
    assert [file.name for file in folder.path.iterdir()] == ["run.json"]


def test_a_folder_that_holds_a_run_is_refused_and_left_alone(tmp_path: Path) -> None:
    RunFolder(tmp_path, name="first").finish("done")
    before = (tmp_path / "run.json").read_bytes()
    with pytest.raises(ConfigError, match="none is ever overwritten"):
        RunFolder(tmp_path, name="second")
    assert (tmp_path / "run.json").read_bytes() == before


def test_a_folder_with_other_files_in_it_may_be_used(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    refuse_taken(tmp_path, "out")
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_a_folder_that_another_process_tries_too_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touch = Path.touch

    def touched_by_two(file: Path) -> None:
        touch(file)
        file.unlink()  # as the other one does

    monkeypatch.setattr(Path, "touch", touched_by_two)
    refuse_taken(tmp_path, "out")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written: Not a directory"):
        refuse_taken(tmp_path / "file" / "run", "out")


def test_the_hash_is_of_what_a_configuration_says_whatever_the_order_of_its_keys() -> None:
    assert config_hash({"a": 1, "b": {"c": 2, "d": 3}}) == config_hash({"b": {"d": 3, "c": 2}, "a": 1})
    assert config_hash({"a": 1}) != config_hash({"a": 2})
    assert len(config_hash({})) == 16


def test_the_revision_is_the_commit_and_whether_it_has_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_where_there_is_no_git_there_is_no_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert git_revision() is None
