"""A run on its way to a remote folder: closed parts while it goes on, all the rest at the end, and what goes wrong."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from waiting import HANGS, until

from instrument import ConfigError
from instrument.capture.tables import TABLES
from instrument.sinks import transfer, upload
from instrument.sinks.parts import Part, new_part
from instrument.sinks.recovery import recover
from instrument.sinks.remote import RemoteFolder, UploadError
from instrument.sinks.transfer import remove_sent, send_all, take_back
from instrument.sinks.upload import Upload


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No long pauses."""
    monkeypatch.setattr(upload, "LOOK", 0.01)
    monkeypatch.setattr(transfer, "PAUSES", (0.01,))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a run with two parts of one table, made by two processes."""
    place = tmp_path / "run"
    (place / ".hydra").mkdir(parents=True)
    (place / ".hydra" / "config.yaml").write_text("name: run\n")
    record(place)
    add_part(place, Part(0, 0))
    add_part(place, Part(1, 0))
    return place


@pytest.fixture
def remote(tmp_path: Path) -> Fragile:
    return Fragile(f"memory://{tmp_path}/there", "sink.remote")


class Fragile(RemoteFolder):
    """A remote folder that can be made to fail."""

    error: Exception | None = None
    puts: list[str]

    def put(self, file: Path, name: str) -> None:
        self.puts = [*getattr(self, "puts", []), name]
        if self.error is not None:
            raise self.error
        super().put(file, name)


def record(folder: Path, **more: object) -> None:
    """Write run.json, as runs do: whole, while an upload may read it."""
    (folder / "run.json.tmp").write_text(json.dumps({"started": "now", "status": "running", **more}))
    (folder / "run.json.tmp").rename(folder / "run.json")


def add_part(folder: Path, part: Part, table: str = "stats") -> None:
    with new_part(folder, TABLES[table], part):
        pass


@pytest.fixture
def begun(folder: Path, remote: Fragile) -> Iterator[Upload]:
    """An upload that has begun."""
    going = Upload(folder, remote, rank=0)
    going.begin()
    yield going
    going.end()


def test_parts_are_there_when_they_are_closed_and_the_rest_at_the_end(
    begun: Upload, folder: Path, remote: Fragile
) -> None:
    until(lambda: "stats/part-0000-000000.parquet" in remote.sizes())
    assert json.loads(remote.read("run.json") or b"")["status"] == "running"
    add_part(folder, Part(0, 1))
    both = {"run.json", "stats/part-0000-000000.parquet", "stats/part-0000-000001.parquet"}
    until(lambda: set(remote.sizes()) == both)  # what is on its way is there under another name
    record(folder, status="done")
    (folder / ".lock").touch()
    (folder / ".lock-1").touch()
    (folder / "journal").mkdir(exist_ok=True)
    (folder / "journal" / "stats-0000-000002.arrows").touch()
    (folder / ".run.json.tmp").touch()
    sent = begun.end()
    assert sent.missing == {}
    here = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}
    assert set(remote.sizes()) == here - {".lock", ".lock-1", "journal/stats-0000-000002.arrows", ".run.json.tmp"}
    assert remote.puts[-1] == "run.json"
    assert json.loads(remote.read("run.json") or b"")["status"] == "done"
    assert not begun.messages()


def test_a_part_is_sent_once(begun: Upload, folder: Path, remote: Fragile) -> None:
    until(lambda: "stats/part-0000-000000.parquet" in remote.sizes())
    begun.end()
    assert sorted(name for name in remote.puts if "part" in name) == [
        "stats/part-0000-000000.parquet",
        "stats/part-0001-000000.parquet",
    ]
    again = send_all(folder, remote)
    assert (again.files, again.missing) == (0, {})


def test_tables_in_which_nothing_changes_are_not_listed_again(
    begun: Upload, remote: Fragile, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, listed = [], []
    look = begun._look
    monkeypatch.setattr(begun, "_look", lambda: (look(), looks.append(len(listed))))
    until(lambda: len(looks) > 3)  # the last change was seen twice
    monkeypatch.setattr(upload, "parts_of", lambda folder, table: listed.append(table) or {})
    seen = len(looks)
    until(lambda: len(looks) > seen + 3)
    assert listed == []


def test_a_part_that_comes_in_the_tick_of_the_last_look_is_sent(folder: Path, remote: Fragile) -> None:
    going = Upload(folder, remote, rank=0)
    going._look()
    before = (folder / "stats").stat()
    add_part(folder, Part(0, 1))
    os.utime(folder / "stats", ns=(before.st_atime_ns, before.st_mtime_ns))
    going._look()
    assert "stats/part-0000-000001.parquet" in remote.sizes()


def test_a_process_that_is_not_the_first_sends_its_own_parts_alone(folder: Path, remote: Fragile) -> None:
    going = Upload(folder, remote, rank=1)
    going.begin()
    until(remote.sizes)
    add_part(folder, Part(1, 1))
    assert going.end().missing == {}
    assert sorted(remote.sizes()) == ["stats/part-0001-000000.parquet", "stats/part-0001-000001.parquet"]


def test_where_nobody_answers_it_is_told_once_and_tried_again(begun: Upload, folder: Path, remote: Fragile) -> None:
    until(lambda: "stats/part-0000-000000.parquet" in remote.sizes())
    remote.error = ConnectionError("nobody there")
    add_part(folder, Part(0, 1))
    until(lambda: remote.puts.count("stats/part-0000-000001.parquet") > 2 * transfer.ATTEMPTS)
    (message,) = begun.messages()
    assert message.endswith(f"ConnectionError: nobody there; it is tried again, all is in {folder}")
    remote.error = None
    until(lambda: "stats/part-0000-000001.parquet" in remote.sizes())
    until(lambda: begun.messages() == [f"{remote.address} is reached again"])


def test_where_nobody_answers_from_the_beginning_the_run_goes_on(folder: Path, remote: Fragile) -> None:
    remote.error = ConnectionError("nobody there")
    going = Upload(folder, remote, rank=0)
    going.begin()
    assert len(going.messages()) == 1
    remote.error = None
    assert going.end().missing == {}
    assert "stats/part-0000-000000.parquet" in remote.sizes()


def test_an_answer_that_does_not_come_is_not_waited_for(
    folder: Path, remote: Fragile, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = threading.Event()
    monkeypatch.setattr(upload, "PATIENCE", 0.05)
    monkeypatch.setattr(upload, "STALLED", 0.05)
    monkeypatch.setattr(remote, "put", lambda file, name: answer.wait(HANGS))
    going = Upload(folder, remote, rank=0)
    going.begin()
    assert "has not answered" in going.messages()[0]
    assert going.end().missing == {"": "nothing could be sent for 0 s"}
    answer.set()
    going._thread.join(HANGS)


def test_what_is_not_sent_at_the_end_is_told(folder: Path, remote: Fragile) -> None:
    remote.error = ConnectionError("nobody there")
    sent = send_all(folder, remote)
    assert set(sent.missing) == {
        ".hydra/config.yaml",
        "run.json",
        "stats/part-0000-000000.parquet",
        "stats/part-0001-000000.parquet",
    }
    assert len(remote.puts) == transfer.ATTEMPTS**2  # after three files it is clear that nobody is there


@pytest.mark.parametrize("error", [FileNotFoundError("no such bucket"), PermissionError("access denied")])
def test_a_place_that_may_not_be_written_stops_the_run_before_it_begins(
    error: Exception, folder: Path, remote: Fragile
) -> None:
    remote.error = error
    going = Upload(folder, remote, rank=0)
    with pytest.raises(ConfigError, match=f"cannot be written: {type(error).__name__}: {error}"):
        going.begin()
    assert going.is_refused
    assert going.end().files == 0


def test_another_run_is_not_overwritten(folder: Path, remote: Fragile, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"started": "before"}))
    remote.put(other, "run.json")
    with pytest.raises(ConfigError, match="holds another run already"):
        Upload(folder, remote, rank=0).begin()
    with pytest.raises(UploadError, match="holds another run already"):
        send_all(folder, remote)
    assert set(remote.sizes()) == {"run.json"}


def test_two_runs_that_begin_at_one_moment_do_not_share_a_place(
    folder: Path, remote: Fragile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    record(other, seed=1)
    original = remote.put

    def overtaken(file: Path, name: str) -> None:
        original(file, name)
        if name == "run.json":
            original(other / "run.json", name)  # as if both had looked, and this one was the last to write

    monkeypatch.setattr(remote, "put", overtaken)
    going = Upload(folder, remote, rank=0)
    with pytest.raises(ConfigError, match="holds another run already"):
        going.begin()
    assert set(remote.sizes()) == {"run.json"}


def test_a_run_that_comes_to_the_same_place_later_ends_the_sending(
    begun: Upload, folder: Path, remote: Fragile, tmp_path: Path
) -> None:
    until(lambda: "stats/part-0000-000000.parquet" in remote.sizes())
    (tmp_path / "other").write_text(json.dumps({"started": "then"}))
    RemoteFolder(remote.address, "").put(tmp_path / "other", "run.json")
    add_part(folder, Part(0, 1))
    until(lambda: not begun._thread.is_alive())
    (message,) = begun.messages()
    assert "holds another run already" in message
    assert "nothing is sent" in message
    assert "another run" in begun.end().missing[""]
    assert not begun.is_refused  # so that the end of the run says it again
    assert json.loads(remote.read("run.json") or b"") == {"started": "then"}


def test_a_checkpoint_there_gives_way_to_the_one_that_is_here(folder: Path, remote: Fragile) -> None:
    (folder / "checkpoints").mkdir()
    for names in (["step-00000006.pt", "step-00000006-0001.pt"], ["step-00000008.pt"]):
        for file in (folder / "checkpoints").iterdir():
            file.unlink()
        for name in names:
            (folder / "checkpoints" / name).write_bytes(b"large")
        assert send_all(folder, remote).missing == {}
        assert {name for name in remote.sizes() if "step-" in name} == {f"checkpoints/{name}" for name in names}
    (folder / "checkpoints" / "step-00000008.pt").unlink()
    send_all(folder, remote)
    assert "checkpoints/step-00000008.pt" in remote.sizes(), "what is the only one stays"


def test_the_end_waits_as_long_as_bytes_are_sent(
    folder: Path, remote: Fragile, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, asked, now = RemoteFolder.put, threading.Event(), [0.0]

    def monotonic() -> float:
        asked.set()
        return now[0]

    def slow(self: RemoteFolder, file: Path, name: str) -> None:
        if name.startswith("checkpoints/"):
            for _ in range(10):  # one file, and longer than what is taken for a standstill
                self.moved += 1
                asked.clear()
                assert asked.wait(HANGS)
                now[0] += 0.6 * upload.STALLED
        put(self, file, name)

    monkeypatch.setattr(RemoteFolder, "put", slow)
    monkeypatch.setattr(upload, "time", SimpleNamespace(monotonic=monotonic))
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "step-00000006.pt").write_bytes(b"large")
    going = Upload(folder, remote, rank=0)
    going.begin()
    assert going.end().missing == {}
    assert "checkpoints/step-00000006.pt" in remote.sizes()


def test_the_end_does_not_wait_for_a_standstill(folder: Path, remote: Fragile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "PATIENCE", 0.05)
    monkeypatch.setattr(upload, "STALLED", 0.05)
    released = threading.Event()
    put = RemoteFolder.put

    def stuck(self: RemoteFolder, file: Path, name: str) -> None:
        if name.startswith("stats/"):
            released.wait(HANGS)
        put(self, file, name)

    monkeypatch.setattr(RemoteFolder, "put", stuck)
    going = Upload(folder, remote, rank=0)
    going.begin()
    assert "nothing could be sent" in going.end().missing[""]
    released.set()
    going._thread.join(HANGS)


def test_a_part_of_another_size_is_not_overwritten(folder: Path, remote: Fragile, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"other rows")
    remote.put(other, "stats/part-0000-000000.parquet")
    sent = send_all(folder, remote)
    assert list(sent.missing) == ["stats/part-0000-000000.parquet"]
    assert remote.read("stats/part-0000-000000.parquet") == b"other rows"


def test_files_that_change_are_sent_again_and_others_are_not(folder: Path, remote: Fragile) -> None:
    send_all(folder, remote)
    remote.puts.clear()
    (folder / ".hydra" / "config.yaml").write_text("name: nur\n")
    assert send_all(folder, remote).files == 1
    assert remote.puts == [".hydra/config.yaml"]


def test_steps_that_are_done_again_are_taken_back(folder: Path, remote: Fragile) -> None:
    for number in (1, 2):
        add_part(folder, Part(0, number))
        add_part(folder, Part(1, number))
    send_all(folder, remote)
    take_back(remote, 0, {**dict.fromkeys(TABLES, 0), "stats": 1})
    assert sorted(name for name in remote.sizes() if "part" in name) == [
        "stats/part-0000-000000.parquet",
        *(f"stats/part-0001-00000{number}.parquet" for number in range(3)),
    ]


def test_where_parts_are_not_kept_here_they_go_once_they_are_there(folder: Path, remote: Fragile) -> None:
    going = Upload(folder, remote, rank=0, keep_local=False)
    going.begin()
    until(lambda: not (folder / "stats" / "part-0000-000000.parquet").exists())
    remote.error = ConnectionError("nobody there")
    add_part(folder, Part(0, 1))
    until(lambda: "stats/part-0000-000001.parquet" in remote.puts)
    assert (folder / "stats" / "part-0000-000001.parquet").exists()
    remote.error = None
    assert going.end().missing == {}
    assert list((folder / "stats").iterdir()) == []
    assert (folder / "run.json").exists()
    assert len(remote.sizes()) == 5


def test_a_part_that_is_not_there_as_a_whole_is_not_removed(folder: Path, remote: Fragile, tmp_path: Path) -> None:
    (tmp_path / "half").write_bytes(b"half of it")
    remote.put(tmp_path / "half", "stats/part-0000-000000.parquet")
    remove_sent(folder, remote)
    assert len(list((folder / "stats").iterdir())) == 2


def test_what_is_recovered_of_a_run_whose_parts_have_moved_is_no_empty_part(folder: Path, remote: Fragile) -> None:
    record(folder, remote=remote.address, config={"sink": {"keep_local": False}})
    send_all(folder, remote)
    remove_sent(folder, remote)
    recover(folder)
    assert not list(folder.rglob("*.parquet"))
    assert send_all(folder, remote).missing == {}


def test_parts_that_were_merged_here_are_one_there_too(folder: Path, remote: Fragile) -> None:
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
    take_back(remote, 0, {"stats": 3})
    assert sorted(name for name in remote.sizes() if "part-0000" in name) == ["stats/part-0000-000000-000002.parquet"]
    with pytest.raises(UploadError, match="rows of before and after the checkpoint"):
        take_back(remote, 0, {"stats": 2})
