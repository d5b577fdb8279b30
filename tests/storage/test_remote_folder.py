"""Remote folders: valid addresses, credentials in addresses, and atomic file uploads."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from buckets import NO_ANSWER, new_clients
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry

from instrument import ConfigError
from instrument.storage.remote_folder import (
    RemoteFolder,
    UploadError,
    check_address,
    check_is_local,
    filesystem,
    folder_at,
    is_address,
    permanent_error_hint,
    remote_address_of,
    safe_message,
)

REMOTE = ("s3://bucket/runs", "memory://x", Path("s3://bucket/runs"), "file:///tmp/x")
LOCAL = ("runs/mine", "/runs/mine", Path("runs"), "C:/runs", "a:b/c", "runs/12:30:00")


@pytest.mark.parametrize("path", [*REMOTE, *LOCAL])
def test_address_is_distinguished_from_a_local_path(path: object) -> None:
    assert is_address(path) == (path in REMOTE)


@pytest.mark.parametrize(
    "address",
    [
        "s3://AKIAKEY:hushhush@bucket/runs",
        "s3://AKIAKEY:hush/hush+hush@bucket/runs",
        "sftp://me:hushhush@host/runs",
        "https://host/runs?X-Amz-Signature=hushhush",
        "az://box/runs#hushhush",
    ],
)
def test_credentials_in_an_address_are_refused_and_not_shown(address: str) -> None:
    with pytest.raises(ConfigError, match="must not contain a password, key or query") as refused:
        check_address(address, "sink.remote")
    assert "hush" not in str(refused.value)
    assert "AKIAKEY" not in str(refused.value)


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        *((address, None) for address in ("sftp://me@host/runs", "s3://bucket/a:b/c", "s3://bucket")),
        *((address, "not the address of a folder") for address in ("bucket/runs", "s3://", "simplecache::s3://bucket")),
        ("s4://bucket", "no such protocol"),
    ],
)
def test_address_is_checked(address: str, problem: str | None) -> None:
    if problem is None:
        check_address(address, "sink.remote")
        return
    with pytest.raises(ConfigError, match=problem) as refused:
        check_address(address, "sink.remote")
    assert address in str(refused.value)


@pytest.mark.parametrize(
    ("missing", "address", "extra", "use"),
    [
        ("fsspec", "s3://bucket", "remote", lambda address: filesystem(address, "sink.remote")),
        ("s3fs", "s3://bucket", "s3", lambda address: filesystem(address, "sink.remote")),
        ("gcsfs", "gs://bucket", "gcs", lambda address: filesystem(address, "sink.remote")),
        ("upath", "memory://runs", "remote", folder_at),
    ],
)
def test_missing_package_is_reported_with_its_extra(
    missing: str, address: str, extra: str, use: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(_registry, address.partition("://")[0], raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigError, match=rf"pip install .*\[{extra}\]"):
        use(address)


def test_address_is_refused_where_a_local_folder_is_required() -> None:
    for path in ("s3://bucket/runs", Path("s3://bucket/runs")):
        with pytest.raises(ConfigError, match="out: not here\n    fix      pass a folder"):
            check_is_local(path, "out", "not here", fix="pass a folder")
    check_is_local(Path("runs/mine"), "out", "not here", fix="pass a folder")


@pytest.mark.parametrize(
    ("folder", "location"),
    [
        ("runs/mnist/2026-01-01", "s3://b/p/mnist/2026-01-01"),
        ("runs/mnist/sweep_1/3", "s3://b/p/mnist/sweep_1/3"),
        ("runs/a/runs/b", "s3://b/p/b"),
        ("elsewhere/out", "s3://b/p/out"),
        ("elsewhere/runs", "s3://b/p/runs"),
    ],
)
def test_remote_path_is_relative_to_runs(folder: str, location: str, tmp_path: Path) -> None:
    assert remote_address_of(tmp_path / folder, "s3://b/p/") == location


def test_jobs_of_sweeps_have_distinct_paths(tmp_path: Path) -> None:
    for sweep in ("one", "two"):
        (tmp_path / sweep).mkdir()
        (tmp_path / sweep / "multirun.yaml").touch()
    folders = ("one", "one/0", "two/0", "one/lr_1/seed_1", "one/lr_2/seed_1")
    assert [remote_address_of(tmp_path / each, "s3://b/p") for each in folders] == [
        f"s3://b/p/{each}" for each in folders
    ]


@pytest.mark.parametrize(
    "text",
    [
        "http://me:hu/sh:word@host:1/bucket is away",
        "http://hushword@host:1/bucket is away",
        "http://host:1/bucket?X-Amz-Credential=AKIA&X-Amz-Signature=hushword is away",
        "https://host/container?sv=2024&sig=hushword%3D",
        "SignatureDoesNotMatch: {'secret': 'shy/secret+of=the:environment'}",
        "storage_options={'key': 'a', 'client_secret': 'shy-secret-of-the-configuration'}",
        "cannot connect with shy-account-key-below",
    ],
)
def test_error_message_omits_secrets(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec.config

    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "shy/secret+of=the:environment")
    keys = {"client_secret": "shy-secret-of-the-configuration", "more": {"account_key": "shy-account-key-below"}}
    monkeypatch.setattr(fsspec.config, "conf", {"abfs": keys})
    answer = safe_message(OSError(text))
    assert "hush" not in answer
    assert "shy" not in answer
    assert answer.startswith("OSError: ")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Could not connect to http://me:hush@host:1/bucket\nand more", "Could not connect to http://host:1/bucket"),
        ("s3://bucket/me@home/run is away", "s3://bucket/me@home/run is away"),
        ("no s3 there: is it on? yes", "no s3 there: is it on? yes"),  # a short value of the environment
    ],
)
def test_error_message_keeps_all_but_credentials(text: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "s3")
    assert safe_message(OSError(text)) == f"OSError: {shown}"


class HttpError(Exception):
    """The error class of gcsfs."""

    code = 401


class DefaultCredentialsError(Exception):
    """The error class of google.auth."""


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (FileNotFoundError("b"), "existing bucket"),
        (PermissionError("b"), "credentials"),
        (OSError("Forbidden: https://storage.googleapis.com/upload"), "credentials"),
        (HttpError("Invalid Credentials, 401"), "credentials"),
        (DefaultCredentialsError("none"), "credentials"),
        (UploadError("another run"), "another address"),
        (ConnectionError("away"), None),
        (TimeoutError("slow"), None),
    ],
)
def test_permanent_errors_are_distinguished_from_temporary_ones(error: Exception, fix: str | None) -> None:
    found = permanent_error_hint(error)
    assert (found is None) if fix is None else fix in str(found)


@pytest.fixture(params=["memory", "file", "s3"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> RemoteFolder:
    """An empty remote folder of each type."""
    if request.param == "s3":
        return RemoteFolder(f"{request.getfixturevalue('bucket')}/runs/a", "sink.remote")
    return RemoteFolder(f"{request.param}://{tmp_path}/there/a", "sink.remote")


@pytest.mark.spread(2)
def test_files_are_uploaded_listed_read_and_removed(remote: RemoteFolder, tmp_path: Path) -> None:
    file = tmp_path / "file"
    assert remote.sizes() == {}
    assert remote.read("run.json") is None
    for name, content in (("stats/a.parquet", b"abc"), ("run.json", b"{}"), ("run.json", b"{ }")):
        file.write_bytes(content)
        remote.put(file, name)
    assert remote.sizes() == {"stats/a.parquet": 3, "run.json": 3}
    assert remote.read("run.json") == b"{ }"
    remote.remove("stats/a.parquet")
    assert remote.sizes() == {"run.json": 3}
    remote.move(".aside/a.1")
    assert remote.sizes() == {}
    assert RemoteFolder(f"{remote.address}/../.aside/a.1".replace("/a/../", "/"), "").sizes() == {"run.json": 3}


@pytest.mark.spread(2)
def test_uploaded_bytes_are_counted(remote: RemoteFolder, tmp_path: Path) -> None:
    file = tmp_path / "file"
    for size in (10, 6_000_000):
        file.write_bytes(b"x" * size)
        remote.put(file, "a")
    assert remote.moved == 6_000_010


@pytest.mark.slow
def test_large_file_is_uploaded_with_bounded_memory(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import asyncio

    remote = RemoteFolder(f"{bucket}/large", "sink.remote")
    files = type(remote._files)
    call, at_once, most, moved = files._call_s3, 0, 0, []

    async def counted(self: Any, method: str, *arguments: Any, **options: Any) -> Any:
        nonlocal at_once, most
        is_piece = method == "upload_part"
        at_once, most = at_once + is_piece, max(most, at_once + is_piece)
        moved.append(remote.moved)
        await asyncio.sleep(0)
        answer = await call(self, method, *arguments, **options)
        at_once -= is_piece
        return answer

    monkeypatch.setattr(files, "_call_s3", counted)
    file = tmp_path / "file"
    with file.open("wb") as content:
        content.truncate(110 * 2**20)
    remote.put(file, "checkpoints/a")
    assert most == 2
    assert len(set(moved)) > 2  # progress is reported
    assert remote.sizes() == {"checkpoints/a": 110 * 2**20}


def test_upload_to_a_file_system_is_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = RemoteFolder(f"file://{tmp_path}/there", "sink.remote")
    file = tmp_path / "file"
    file.write_bytes(b"new")
    remote.put(file, "stats/a")
    file.write_bytes(b"newer")

    def half(self: Any, source: str, target: str, **_: Any) -> None:
        Path(target).write_bytes(b"ne")
        raise ConnectionError("gone")

    monkeypatch.setattr(type(remote._files), "put_file", half)
    with pytest.raises(ConnectionError):
        remote.put(file, "stats/a")
    assert remote.read("stats/a") == b"new"


def test_random_state_is_unchanged_by_connection_retries(bucket: str, tmp_path: Path) -> None:
    import random

    file = tmp_path / "file"
    file.touch()
    before = random.getstate()
    with new_clients(AWS_ENDPOINT_URL=NO_ANSWER), pytest.raises(Exception, match="Could not connect"):
        RemoteFolder(bucket, "sink.remote").put(file, "a")
    assert random.getstate() == before


def test_gcsfs_retries_use_their_own_random_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    import random

    client, retry = ModuleType("gcsfs"), ModuleType("gcsfs.retry")
    retry.random = random  # type: ignore[attr-defined]
    client.retry = retry  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gcsfs", client)
    monkeypatch.setitem(sys.modules, "gcsfs.retry", retry)
    monkeypatch.setitem(_registry, "gs", MemoryFileSystem)
    filesystem("gs://bucket/runs", "sink.remote")
    before = random.getstate()
    assert 0 <= retry.random.random() < 1
    assert random.getstate() == before
