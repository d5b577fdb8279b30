"""Upload of a run to a remote folder: closed parts during the run, the rest at the end, and failures."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import TIMEOUT, wait_until

from instrument import ConfigError
from instrument.storage import remote_transfer, run_upload
from instrument.storage.maintenance import recover
from instrument.storage.parts import Part, new_part
from instrument.storage.remote_folder import RemoteFolder, UploadError
from instrument.storage.remote_transfer import remove_parts_after, remove_sent, send_all
from instrument.storage.run_upload import Upload
from instrument.tables.schemas import TABLES


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten all pauses."""
    monkeypatch.setattr(run_upload, "CHECK_SECONDS", 0.01)
    monkeypatch.setattr(remote_transfer, "PAUSES", (0.01,))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a run with two parts of one table, written by two processes."""
    path = tmp_path / "run"
    (path / ".hydra").mkdir(parents=True)
    (path / ".hydra" / "config.yaml").write_text("name: run\n")
    record(path)
    add_part(path, Part(0, 0))
    add_part(path, Part(1, 0))
    return path


@pytest.fixture
def remote(tmp_path: Path) -> FailingRemote:
    return FailingRemote(f"memory://{tmp_path}/there", "sink.remote")


FIRST = "stats/part-0000-000000.parquet"


def status_of(remote: RemoteFolder) -> Any:
    return json.loads(remote.read("run.json") or b"")["status"]


class FailingRemote(RemoteFolder):
    """A remote folder that can be made to fail."""

    error: Exception | None = None
    puts: list[str]

    def put(self, file: Path, name: str) -> None:
        self.puts = [*getattr(self, "puts", []), name]
        if self.error is not None:
            raise self.error
        super().put(file, name)


def record(folder: Path, **more: object) -> None:
    """Write run.json atomically, as runs do, since an upload may read it at the same time."""
    (folder / "run.json.tmp").write_text(json.dumps({"started": "now", "status": "running", **more}))
    (folder / "run.json.tmp").rename(folder / "run.json")


def add_part(folder: Path, part: Part, table: str = "stats") -> None:
    with new_part(folder, TABLES[table], part):
        pass


def begun(folder: Path, remote: RemoteFolder, rank: int = 0, **options: Any) -> Upload:
    upload = Upload(folder, remote, rank=rank, **options)
    upload.begin()
    return upload


@pytest.fixture
def started_upload(folder: Path, remote: FailingRemote) -> Iterator[Upload]:
    """An upload that has started."""
    running_upload = begun(folder, remote)
    yield running_upload
    running_upload.end()


def test_a_run_that_ends_while_run_json_is_sent_is_not_done_before_its_last_parts_are_sent(
    folder: Path, remote: FailingRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end_run(*arguments: object) -> None:
        record(folder, status="done")

    monkeypatch.setattr(run_upload, "check_same_run", end_run)
    upload = begun(folder, remote)
    wait_until(lambda: FIRST in remote.sizes())
    assert status_of(remote) == "running"
    upload.end()
    assert status_of(remote) == "done"


def test_parts_are_uploaded_when_closed_and_the_rest_at_the_end(
    started_upload: Upload, folder: Path, remote: FailingRemote
) -> None:
    wait_until(lambda: FIRST in remote.sizes())
    assert status_of(remote) == "running"
    add_part(folder, Part(0, 1))
    both = {"run.json", "stats/part-0000-000000.parquet", "stats/part-0000-000001.parquet"}
    wait_until(lambda: set(remote.sizes()) == both)  # pending uploads have another name
    record(folder, status="done")
    add_part(folder, Part(0, 2))
    add_part(folder, Part(0, 3))
    wait_until(lambda: "stats/part-0000-000003.parquet" in remote.sizes())
    assert status_of(remote) == "running"  # the final one is sent last
    (folder / ".lock").touch()
    (folder / ".lock-1").touch()
    (folder / "journal").mkdir(exist_ok=True)
    (folder / "journal" / "stats-0000-000002.arrows").touch()
    (folder / ".run.json.tmp").touch()
    sent = started_upload.end()
    assert sent.failed == {}
    local_files = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}
    kept = {".lock", ".lock-1", "journal/stats-0000-000002.arrows", ".run.json.tmp"}
    assert set(remote.sizes()) == local_files - kept
    assert remote.puts[-1] == "run.json"
    assert status_of(remote) == "done"
    assert not started_upload.messages()


def test_part_is_uploaded_once(started_upload: Upload, folder: Path, remote: FailingRemote) -> None:
    wait_until(lambda: FIRST in remote.sizes())
    started_upload.end()
    assert sorted(name for name in remote.puts if "part" in name) == [FIRST, "stats/part-0001-000000.parquet"]
    again = send_all(folder, remote)
    assert (again.files, again.failed) == (0, {})


def test_part_that_ends_while_a_block_file_is_sent_follows_its_own_block_file(
    folder: Path, remote: FailingRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add_tensors(number: int) -> None:
        block = Part(0, number).block(folder)
        block.parent.mkdir(exist_ok=True)
        block.write_bytes(b"1234")
        add_part(folder, Part(0, number), "tensors")

    def put(file: Path, name: str) -> None:
        FailingRemote.put(remote, file, name)
        if name == "blocks/block-0000-000000.raw":
            add_tensors(1)

    add_tensors(0)
    monkeypatch.setattr(remote, "put", put)
    running_upload = Upload(folder, remote, rank=0)
    running_upload._send_new_parts()
    running_upload._send_new_parts()
    sent = [name for name in remote.puts if name.startswith(("blocks/", "tensors/"))]
    pairs = [[f"blocks/block-0000-00000{n}.raw", f"tensors/part-0000-00000{n}.parquet"] for n in range(2)]
    assert sent == [name for pair in pairs for name in pair]


def test_part_written_in_the_same_clock_tick_is_uploaded(folder: Path, remote: FailingRemote) -> None:
    running_upload = Upload(folder, remote, rank=0)
    running_upload._send_new_parts()
    before = (folder / "stats").stat()
    add_part(folder, Part(0, 1))
    os.utime(folder / "stats", ns=(before.st_atime_ns, before.st_mtime_ns))
    running_upload._send_new_parts()
    assert "stats/part-0000-000001.parquet" in remote.sizes()


def test_later_ranks_upload_their_own_parts_only(folder: Path, remote: FailingRemote) -> None:
    running_upload = begun(folder, remote, rank=1)
    wait_until(remote.sizes)
    add_part(folder, Part(1, 1))
    assert running_upload.end().failed == {}
    assert sorted(remote.sizes()) == ["stats/part-0001-000000.parquet", "stats/part-0001-000001.parquet"]


def test_lost_connection_is_reported_once_and_retried(
    started_upload: Upload, folder: Path, remote: FailingRemote
) -> None:
    wait_until(lambda: FIRST in remote.sizes())
    remote.error = ConnectionError("connection refused")
    add_part(folder, Part(0, 1))
    wait_until(lambda: remote.puts.count("stats/part-0000-000001.parquet") > 2 * remote_transfer.ATTEMPTS)
    (message,) = started_upload.messages()
    assert message.endswith(f"ConnectionError: connection refused; the upload is retried, all files are in {folder}")
    remote.error = None
    wait_until(lambda: "stats/part-0000-000001.parquet" in remote.sizes())
    wait_until(lambda: started_upload.messages() == [f"{remote.address} is reachable again"])


def test_run_continues_without_a_connection_at_start(folder: Path, remote: FailingRemote) -> None:
    remote.error = ConnectionError("connection refused")
    running_upload = begun(folder, remote)
    assert len(running_upload.messages()) == 1
    remote.error = None
    assert running_upload.end().failed == {}
    assert FIRST in remote.sizes()


@pytest.mark.parametrize("stalled", ["", "stats/"], ids=["from the start", "later"])
def test_upload_does_not_wait_for_a_stalled_connection(
    folder: Path, remote: FailingRemote, monkeypatch: pytest.MonkeyPatch, stalled: str
) -> None:
    monkeypatch.setattr(run_upload, "RESPONSE_SECONDS", 0.05)
    monkeypatch.setattr(run_upload, "STALL_SECONDS", 0.05)
    released, put = threading.Event(), RemoteFolder.put

    def stuck(self: RemoteFolder, file: Path, name: str) -> None:
        if name.startswith(stalled):
            released.wait(TIMEOUT)
        put(self, file, name)

    monkeypatch.setattr(RemoteFolder, "put", stuck)
    running_upload = begun(folder, remote)
    if not stalled:
        assert "has not responded" in running_upload.messages()[0]
    assert running_upload.end().failed == {"": "nothing was sent for 0 s"}
    released.set()
    running_upload._thread.join(TIMEOUT)


def test_files_not_uploaded_at_the_end_are_reported(folder: Path, remote: FailingRemote) -> None:
    remote.error = ConnectionError("connection refused")
    sent = send_all(folder, remote)
    assert set(sent.failed) == {".hydra/config.yaml", "run.json", FIRST, "stats/part-0001-000000.parquet"}
    assert len(remote.puts) == remote_transfer.ATTEMPTS**2  # after three files the remote is considered unreachable


@pytest.mark.parametrize("error", [FileNotFoundError("no such bucket"), PermissionError("access denied")])
def test_unwritable_address_stops_the_run_before_it_starts(
    error: Exception, folder: Path, remote: FailingRemote
) -> None:
    remote.error = error
    running_upload = Upload(folder, remote, rank=0)
    with pytest.raises(ConfigError, match=f"cannot write to the remote folder: {type(error).__name__}: {error}"):
        running_upload.begin()
    assert running_upload.is_refused
    assert running_upload.end().files == 0


def test_another_run_is_not_overwritten(folder: Path, remote: FailingRemote, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"started": "before"}))
    remote.put(other, "run.json")
    with pytest.raises(ConfigError, match="already contains another run"):
        Upload(folder, remote, rank=0).begin()
    with pytest.raises(UploadError, match="already contains another run"):
        send_all(folder, remote)
    assert set(remote.sizes()) == {"run.json"}


def test_two_runs_starting_at_once_do_not_share_an_address(
    folder: Path, remote: FailingRemote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    record(other, seed=1)
    original = remote.put

    def put_and_overwrite(file: Path, name: str) -> None:
        original(file, name)
        if name == "run.json":
            original(other / "run.json", name)  # as if both had checked, and this one was the last to write

    monkeypatch.setattr(remote, "put", put_and_overwrite)
    running_upload = Upload(folder, remote, rank=0)
    with pytest.raises(ConfigError, match="already contains another run"):
        running_upload.begin()
    assert set(remote.sizes()) == {"run.json"}


def test_later_run_at_the_same_address_stops_the_upload(
    started_upload: Upload, folder: Path, remote: FailingRemote, tmp_path: Path
) -> None:
    wait_until(lambda: FIRST in remote.sizes())
    (tmp_path / "other").write_text(json.dumps({"started": "then"}))
    RemoteFolder(remote.address, "").put(tmp_path / "other", "run.json")
    add_part(folder, Part(0, 1))
    wait_until(lambda: not started_upload._thread.is_alive())
    (message,) = started_upload.messages()
    assert "already contains another run" in message
    assert "the upload stops" in message
    assert "another run" in started_upload.end().failed[""]
    assert not started_upload.is_refused  # so that the end of the run reports it again
    assert json.loads(remote.read("run.json") or b"") == {"started": "then"}


def test_remote_checkpoint_is_replaced_by_the_local_one(folder: Path, remote: FailingRemote) -> None:
    (folder / "checkpoints").mkdir()
    for names in (["step-00000006.pt", "step-00000006-0001.pt"], ["step-00000008.pt"]):
        for file in (folder / "checkpoints").iterdir():
            file.unlink()
        for name in names:
            (folder / "checkpoints" / name).write_bytes(b"large")
        assert send_all(folder, remote).failed == {}
        assert {name for name in remote.sizes() if "step-" in name} == {f"checkpoints/{name}" for name in names}
    (folder / "checkpoints" / "step-00000008.pt").unlink()
    send_all(folder, remote)
    assert "checkpoints/step-00000008.pt" in remote.sizes(), "the only checkpoint is kept"


def test_end_waits_while_bytes_are_uploaded(
    folder: Path, remote: FailingRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, asked, now = RemoteFolder.put, threading.Event(), [0.0]

    def monotonic() -> float:
        asked.set()
        return now[0]

    def slow(self: RemoteFolder, file: Path, name: str) -> None:
        if name.startswith("checkpoints/"):
            for _ in range(10):  # one file, taking longer than the stall timeout
                self.moved += 1
                asked.clear()
                assert asked.wait(TIMEOUT)
                now[0] += 0.6 * run_upload.STALL_SECONDS
        put(self, file, name)

    monkeypatch.setattr(RemoteFolder, "put", slow)
    monkeypatch.setattr(run_upload, "time", SimpleNamespace(monotonic=monotonic))
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "step-00000006.pt").write_bytes(b"large")
    running_upload = begun(folder, remote)
    assert running_upload.end().failed == {}
    assert "checkpoints/step-00000006.pt" in remote.sizes()


def test_remote_part_of_another_size_is_not_overwritten(folder: Path, remote: FailingRemote, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"other rows")
    remote.put(other, "stats/part-0000-000000.parquet")
    sent = send_all(folder, remote)
    assert list(sent.failed) == ["stats/part-0000-000000.parquet"]
    assert remote.read("stats/part-0000-000000.parquet") == b"other rows"


def test_only_changed_files_are_uploaded_again(folder: Path, remote: FailingRemote) -> None:
    send_all(folder, remote)
    remote.puts.clear()
    (folder / ".hydra" / "config.yaml").write_text("name: nur\n")
    assert send_all(folder, remote).files == 1
    assert remote.puts == [".hydra/config.yaml"]


def test_remote_parts_of_repeated_steps_are_removed(folder: Path, remote: FailingRemote) -> None:
    for number in (1, 2):
        add_part(folder, Part(0, number))
        add_part(folder, Part(1, number))
    send_all(folder, remote)
    remove_parts_after(remote, 0, {**dict.fromkeys(TABLES, 0), "stats": 1})
    assert sorted(name for name in remote.sizes() if "part" in name) == [
        "stats/part-0000-000000.parquet",
        *(f"stats/part-0001-00000{number}.parquet" for number in range(3)),
    ]


def test_keep_local_false_removes_uploaded_parts(folder: Path, remote: FailingRemote) -> None:
    running_upload = begun(folder, remote, keep_local=False)
    wait_until(lambda: not (folder / "stats" / "part-0000-000000.parquet").exists())
    remote.error = ConnectionError("connection refused")
    add_part(folder, Part(0, 1))
    wait_until(lambda: "stats/part-0000-000001.parquet" in remote.puts)
    assert (folder / "stats" / "part-0000-000001.parquet").exists()
    remote.error = None
    assert running_upload.end().failed == {}
    assert list((folder / "stats").iterdir()) == []
    assert (folder / "run.json").exists()
    assert len(remote.sizes()) == 5


def test_incompletely_uploaded_part_is_not_removed(folder: Path, remote: FailingRemote, tmp_path: Path) -> None:
    (tmp_path / "half").write_bytes(b"half of it")
    remote.put(tmp_path / "half", "stats/part-0000-000000.parquet")
    remove_sent(folder, remote)
    assert len(list((folder / "stats").iterdir())) == 2


def test_recovery_of_a_run_with_moved_parts_adds_no_empty_part(folder: Path, remote: FailingRemote) -> None:
    record(folder, remote=remote.address, config={"sink": {"keep_local": False}})
    send_all(folder, remote)
    remove_sent(folder, remote)
    recover(folder)
    assert not list(folder.rglob("*.parquet"))
    assert send_all(folder, remote).failed == {}


def test_locally_merged_parts_are_merged_remotely(folder: Path, remote: FailingRemote) -> None:
    for number in (1, 2, 3):
        add_part(folder, Part(0, number))
    send_all(folder, remote)
    add_part(folder, Part(0, 0, 2))
    for number in (0, 1, 2):
        Part(0, number).file(folder, "stats").unlink()
    assert send_all(folder, remote).files == 1
    assert sorted(name for name in remote.sizes() if "part-0000" in name) == [
        "stats/part-0000-000000-000002.parquet",
        "stats/part-0000-000003.parquet",
    ]
    remove_parts_after(remote, 0, {"stats": 3})
    assert sorted(name for name in remote.sizes() if "part-0000" in name) == ["stats/part-0000-000000-000002.parquet"]
    with pytest.raises(UploadError, match=r"cannot resume from this checkpoint: .* mixes rows"):
        remove_parts_after(remote, 0, {"stats": 2})
