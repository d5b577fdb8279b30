"""Buckets on a local S3 server, with credentials in the environment."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

KEY, SECRET = "AKIALOCALTESTKEY", "local/test+secret/that/nobody/writes/down"
NO_ANSWER = "http://127.0.0.1:9"  # the address of no server


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The address of a local S3 server."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # its requests are no part of a run's log
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    forget_clients()
    server.stop()


@pytest.fixture
def s3(s3_server: str) -> Iterator[None]:
    """Clients find the server and the credentials in the environment.

    A client takes a tenth of a second to make: one that was made serves the following tests too.
    """
    with connected(s3_server):
        yield


@pytest.fixture
def bucket(s3: None) -> Iterator[str]:
    """The address of an empty bucket."""
    files = _make("bucket")
    yield "s3://bucket"
    files.invalidate_cache()
    files.rm("bucket", recursive=True)


@pytest.fixture(scope="session")
def kept_bucket(s3_server: str) -> str:
    """The address of a bucket for folders that many tests read."""
    with connected(s3_server):
        _make("kept")
    return "s3://kept"


def connected(server: str) -> AbstractContextManager[None]:
    """Clients find a server and the credentials in the environment, as with the fixture `s3`."""
    return _environment(
        AWS_ENDPOINT_URL=server,
        AWS_ACCESS_KEY_ID=KEY,
        AWS_SECRET_ACCESS_KEY=SECRET,
        AWS_DEFAULT_REGION="us-east-1",
        AWS_CONFIG_FILE="/nonexistent",
        AWS_SHARED_CREDENTIALS_FILE="/nonexistent",
        AWS_EC2_METADATA_DISABLED="true",
    )


@contextmanager
def new_clients(**variables: str) -> Iterator[None]:
    """Clients are made again, and find something else in the environment."""
    forget_clients()
    try:
        with _environment(**variables):
            yield
    finally:
        forget_clients()


def forget_clients() -> None:
    import fsspec

    fsspec.get_filesystem_class("s3").clear_instance_cache()


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        for name, value in variables.items():
            patched.setenv(name, value)
        yield


def _make(bucket: str) -> Any:
    from instrument.sinks.remote import filesystem

    files, _ = filesystem(f"s3://{bucket}", "")
    files.mkdir(bucket)
    return files
