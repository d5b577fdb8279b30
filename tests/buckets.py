"""Fixtures for buckets on a local S3 server, with credentials in environment variables."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

KEY, SECRET = "AKIALOCALTESTKEY", "local/test+secret/that/nobody/writes/down"
NO_ANSWER = "http://127.0.0.1:9"  # an address without a server


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """Address of a local S3 server."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # keeps its requests out of the log of a run
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    forget_clients()
    server.stop()


@pytest.fixture
def s3(s3_server: str) -> Iterator[None]:
    """Set the environment variables with the address and credentials of the S3 server.

    Creating a client takes 0.1 s, so later tests reuse it.
    """
    with connected(s3_server):
        yield


@pytest.fixture
def bucket(s3: None) -> Iterator[str]:
    """Address of an empty bucket, which is removed after the test."""
    files = _create_bucket("bucket")
    yield "s3://bucket"
    for remaining in reversed(range(5)):
        files.invalidate_cache()
        try:
            files.rm("bucket", recursive=True)
            break
        except OSError:  # an upload in the background that the test did not wait for has added a file
            if not remaining:
                raise
            time.sleep(1)


@pytest.fixture(scope="session")
def kept_bucket(s3_server: str) -> str:
    """Address of a bucket for folders that many tests read."""
    with connected(s3_server):
        _create_bucket("kept")
    return "s3://kept"


def connected(server: str) -> AbstractContextManager[None]:
    """Set the environment variables of the fixture `s3` during the `with` block."""
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
    """Set environment variables and use new clients during the `with` block."""
    forget_clients()
    try:
        with _environment(**variables):
            yield
    finally:
        forget_clients()


def forget_clients() -> None:
    """Remove all cached S3 clients."""

    import fsspec

    fsspec.get_filesystem_class("s3").clear_instance_cache()


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        for name, value in variables.items():
            patched.setenv(name, value)
        yield


def _create_bucket(bucket: str) -> Any:
    from instrument.storage.remote_folder import filesystem

    files, _ = filesystem(f"s3://{bucket}", "")
    files.mkdir(bucket)
    return files
