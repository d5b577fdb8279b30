"""The folder of a run and its run.json."""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

import instrument
from instrument import ConfigError
from instrument.errors import RankError
from instrument.storage import run_folder
from instrument.storage.run_folder import DiscardedRunError, RunFolder, WorkerRunFolder, create_free_folder
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
    with pytest.raises(ConfigError, match="already contains a run"):
        RunFolder(tmp_path, name="second")
    assert (tmp_path / "run.json").read_bytes() == before


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("nested", ["a", "a/2026"])
def test_folder_with_folders_of_runs_is_refused(tmp_path: Path, nested: str, overwrite: bool) -> None:
    RunFolder(tmp_path / nested, name="first").finish("done")
    with pytest.raises(ConfigError, match=rf"contains other runs, such as {nested},[\s\S]*{tmp_path / 'NAME'}"):
        RunFolder(tmp_path, where="out", overwrite=overwrite, name="second")
    assert instrument.load(tmp_path).info["name"] == "first"


def test_run_with_folders_of_runs_can_be_replaced(tmp_path: Path) -> None:
    for folder, overwrite in ((tmp_path, False), (tmp_path / "a", False), (tmp_path, True)):
        RunFolder(folder, where="out", overwrite=overwrite, name=folder.name, config={}).finish("done")
    assert instrument.load(tmp_path / "a").info["name"] == "a"


def test_discarded_run_leaves_only_the_previous_files(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    create_free_folder(tmp_path, "out")
    folder = RunFolder(tmp_path, name="x")
    with pytest.raises(DiscardedRunError), folder.recording(has_started=lambda: True):
        raise DiscardedRunError
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]
    RunFolder(tmp_path, name="again").finish("done")


def test_failure_of_another_process_ends_the_run_as_failed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, name="x")
    interrupt = KeyboardInterrupt("SIGTERM of torchrun")
    with pytest.raises(RankError, match="rank 1"), folder.recording(has_started=lambda: True):
        raise RankError("rank 1 was killed", 1) from interrupt
    assert read(tmp_path)["status"] == "failed"


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


@pytest.fixture
def announced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[RunFolder]:
    """The folder of rank 0 on another host, which has announced its run to rank 1."""
    store = dist.HashStore()
    monkeypatch.setattr("torch.distributed.distributed_c10d._get_default_store", lambda: store)
    monkeypatch.setattr(run_folder, "_runs", itertools.repeat(0))
    monkeypatch.setattr(run_folder, "VISIBLE_TIMEOUT", 0.1)
    monkeypatch.setattr(run_folder, "RANK_0_TIMEOUT", 0.1)
    with monkeypatch.context() as patched:
        patched.setattr("socket.gethostname", lambda: "first")
        folder = RunFolder(tmp_path / "first", name="x", seed=1, config={}, config_hash="1", ranks=2, remote="s3://b/x")
    yield folder
    folder.finish("done")


def test_folder_on_a_shared_file_system_has_one_record(announced: RunFolder) -> None:
    before = read(announced.path)
    worker = WorkerRunFolder(announced.path, 1, remote="s3://b/x")
    assert worker.is_shared
    assert announced.is_shared
    with worker.recording(has_started=lambda: True):
        pass
    assert read(announced.path) == before


def test_process_that_begins_after_the_end_of_rank_0_shares_its_folder(announced: RunFolder, tmp_path: Path) -> None:
    announced.finish("done")
    assert WorkerRunFolder(announced.path, 1).is_shared
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run.json").write_text(json.dumps({**read(announced.path), "resumed": [{"at": "2020"}]}))
    with pytest.raises(ConfigError, match="does not see the folder of rank 0"):
        WorkerRunFolder(tmp_path / "other", 1)


@pytest.mark.usefixtures("announced")
def test_restarted_process_waits_for_the_new_announcement(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """torchrun starts failed processes again with the same store."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(ConfigError, match="rank 0 did not start a run"):
        WorkerRunFolder(tmp_path / "first", 1)


def test_process_names_why_rank_0_was_refused(announced: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "_runs", itertools.repeat(1))
    with pytest.raises(ConfigError, match=r"^out: the folder already contains a run"):
        RunFolder(announced.path, where="out", config={}, ranks=2)
    with pytest.raises(ConfigError, match=r"^out: rank 0 did not start a run: out: the folder already contains a run"):
        WorkerRunFolder(announced.path, 1, where="out")


@pytest.mark.parametrize("error", [None, ValueError("no luck"), KeyboardInterrupt()])
def test_separate_folder_has_a_record_of_its_own(
    announced: RunFolder, tmp_path: Path, error: BaseException | None
) -> None:
    worker = WorkerRunFolder(tmp_path / "second", 1, remote="s3://b/x")
    assert not announced.is_shared
    assert read(worker.path) == {**read(announced.path), "rank": 1, "shared_folder": False}
    with contextlib.suppress(ValueError, KeyboardInterrupt), worker.recording(has_started=lambda: True):
        if error is not None:
            raise error
    expected = {None: "done", ValueError: "failed", KeyboardInterrupt: "interrupted"}[error and type(error)]
    assert read(worker.path)["status"] == expected
    assert read(announced.path)["status"] == "running"
    announced.update(device="cpu")
    assert read(announced.path)["shared_folder"] is False


def test_refused_run_leaves_no_separate_folder(announced: RunFolder, tmp_path: Path) -> None:
    worker = WorkerRunFolder(tmp_path / "second", 1, remote="s3://b/x")
    with pytest.raises(ValueError, match="no such layer"), worker.recording(has_started=lambda: False):
        raise ValueError("no such layer")
    assert not (tmp_path / "second").exists()


def test_separate_folder_is_refused_with_the_reason(announced: RunFolder, tmp_path: Path) -> None:
    for remote, message in (
        (None, r"out: rank 1 on \S+ does not see the folder of rank 0[\s\S]*or pass remote='protocol://bucket/folder'"),
        ("s3://b/y", r"would upload to s3://b/y, rank 0 to s3://b/x[\s\S]*the same path below `runs`"),
    ):
        with pytest.raises(ConfigError, match=message):
            WorkerRunFolder(tmp_path / "second", 1, where="out", remote=remote)
        assert not (tmp_path / "second").exists()
    RunFolder(tmp_path / "second", name="earlier", config={}, started="2020").finish("done")
    before = read(tmp_path / "second")
    with pytest.raises(ConfigError, match="the folder already contains a run"):
        WorkerRunFolder(tmp_path / "second", 1, remote="s3://b/x")
    assert read(tmp_path / "second") == before


def test_rank_without_an_announcement_is_refused(
    announced: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "_runs", itertools.repeat(1))
    with pytest.raises(ConfigError, match="rank 0 did not start a run in this folder within"):
        WorkerRunFolder(tmp_path / "second", 1)
    assert not (tmp_path / "second").exists()
