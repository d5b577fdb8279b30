"""A bucket on a local S3 server, with credentials in the environment."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

KEY, SECRET = "AKIALOCALTESTKEY", "local/test+secret/that/nobody/writes/down"


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The address of a local S3 server."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # its requests are no part of a run's log
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of an empty bucket; clients find the server and the credentials in the environment."""
    import fsspec

    from instrument.sinks.remote import filesystem

    for name, value in (
        ("AWS_ENDPOINT_URL", s3_server),
        ("AWS_ACCESS_KEY_ID", KEY),
        ("AWS_SECRET_ACCESS_KEY", SECRET),
        ("AWS_DEFAULT_REGION", "us-east-1"),
        ("AWS_CONFIG_FILE", "/nonexistent"),
        ("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent"),
        ("AWS_EC2_METADATA_DISABLED", "true"),
    ):
        monkeypatch.setenv(name, value)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    files, _ = filesystem("s3://bucket", "")
    files.mkdir("bucket")
    yield "s3://bucket"
    files.rm("bucket", recursive=True)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
