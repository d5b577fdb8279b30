"""Remote folders at an address such as `s3://bucket/prefix`, for every protocol of fsspec, and the errors of their clients.

Credentials come from the environment and from the fsspec configuration. Addresses must not contain any, since they are
written to files and logs.
"""

from __future__ import annotations

import importlib
import logging
import os
import random
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from ..errors import ConfigError, InstrumentError, Problem, first_line
from ..fields.pip_extras import pip_command

# Object stores replace files atomically. Elsewhere, a file is uploaded under a temporary name and moved.
OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oci", "oss"})
# By protocol; others require fsspec and their own package.
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
SWEEP_RECORD = "multirun.yaml"  # Hydra's record of a sweep, in the folder that contains its jobs
REMOTE_KEY = "sink.remote"  # the config key of a run's remote folder
READ_AHEAD_BYTES = 2**18  # bytes to read ahead: about the size of one column of a row group
ALLOWED = "protocol://bucket/folder, such as s3://bucket/runs, gs://bucket/runs"
LOCAL_FOLDER_ONLY = "the folder of a run must be local; it can be uploaded to a remote folder"
MAX_CONCURRENCY = 2  # the number of pieces of 50 MB of a large file in memory

CLIENTS = (
    *("adlfs", "aiobotocore", "aiohttp", "azure", "boto3", "botocore"),
    *("fsspec", "gcsfs", "google", "paramiko", "s3fs"),
)
_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]*)://(.+)")
_COLLAPSED = re.compile(r"([a-z][a-z0-9+.-]+):/(?!/)")  # an address after pathlib has changed it
_SECRET = re.compile(r"://[^@]*:[^@]*@|://.*[?#]")
CREDENTIALS = "set credentials in the environment (AWS_ACCESS_KEY_ID, AWS_PROFILE, ...) or in the fsspec configuration"
NO_CREDENTIALS = (
    *("NoCredentialsError", "PartialCredentialsError"),  # of AWS
    *("DefaultCredentialsError", "ClientAuthenticationError"),  # of Google and Azure
)
MAX_LETTERS = 300  # of a message
MIN_SECRET_LENGTH = 6  # The minimum length of a secret; shorter strings also occur in ordinary words.
IS_SECRET = re.compile(
    r"secret|token|passw|credential|access_key|account_key|api_key|connection_string|^key$", re.IGNORECASE
)


def is_address(path: object) -> bool:
    """Return whether a folder is given by an address, not by a path. Also true for `s3:/bucket`, which pathlib makes of one."""
    return "://" in str(path) or _COLLAPSED.match(str(path)) is not None


def check_address(address: str, where: str) -> None:
    """Raise a ConfigError, which does not repeat credentials, unless an address is valid and contains none."""
    from fsspec.registry import available_protocols

    check_no_secret(address, where)
    match = _ADDRESS.fullmatch(address)
    if match is None or "::" in address:
        raise ConfigError(Problem(where, "not the address of a folder", address, ALLOWED))
    if match[1] not in available_protocols():
        raise ConfigError(Problem(where, "fsspec has no such protocol", address, sorted(available_protocols())))


def check_no_secret(text: str, where: str) -> None:
    """Raise a ConfigError for an address that contains credentials, without repeating it."""
    if _SECRET.search(text):
        message = "the address must not contain a password, key or query, because it is written to run.json and logs"
        raise ConfigError(Problem(where, message, allowed=ALLOWED, fix=CREDENTIALS))


def filesystem(address: str, where: str) -> tuple[Any, str]:
    """Return the fsspec file system of an address and the path of the folder in it.

    Raise a ConfigError if the address is invalid, or a package is missing.
    """
    try:
        import fsspec
    except ImportError:
        fix = pip_command("remote")
        raise ConfigError(Problem(where, "remote folders require fsspec", given=address, fix=fix)) from None
    check_address(address, where)
    for client in CLIENTS:  # clients log requests with tokens when debug logging is enabled
        logging.getLogger(client).setLevel(logging.WARNING)
    protocol = address.partition("://")[0]
    if EXTRAS.get(protocol) == "gcs":
        with suppress(ImportError):  # the missing package is reported below
            # Its delays before retries draw from Python's global random generator, which belongs to the run.
            cast(Any, importlib.import_module("gcsfs.retry")).random = random.Random()
    try:
        return fsspec.core.url_to_fs(address, **_options(protocol))  # type: ignore[no-any-return]
    except (ImportError, ValueError) as error:
        extra = EXTRAS.get(protocol)
        fix = pip_command(extra) if extra else "install the package that fsspec names"
        message = f"{protocol}:// is not available: {without_secrets(str(error))}"
        raise ConfigError(Problem(where, message, given=address, fix=fix)) from None


def check_remote(remote: str | None, where: str = REMOTE_KEY) -> None:
    """Raise a ConfigError unless a remote folder can be used, before its address is written to any file. None is allowed."""
    if remote is not None:
        filesystem(remote, where)


def _options(protocol: str) -> dict[str, Any]:
    """Return storage options. The user's fsspec configuration has priority.

    botocore draws from Python's global random generator before a retry, so its retries are disabled; this package
    retries itself. By default, s3fs reads 50 MB ahead at each position and keeps ten pieces of 50 MB of an upload in
    memory; smaller values replace these.
    """
    if EXTRAS.get(protocol) != "s3":
        return {}
    from fsspec.config import conf

    configured = conf.get("s3", {})
    return {
        "config_kwargs": {**configured.get("config_kwargs", {}), "retries": {"max_attempts": 0}},
        "default_block_size": configured.get("default_block_size", READ_AHEAD_BYTES),
        "max_concurrency": configured.get("max_concurrency", MAX_CONCURRENCY),
    }


def folder_at(path: str | Path, where: str = "") -> Path:
    """Return a folder to read from, by its path or its address. A remote folder has the interface of pathlib.

    Raise a ConfigError if the address is invalid, or a package is missing.
    """
    address = str(path)
    if not is_address(address):
        return Path(path)
    address = _COLLAPSED.sub(r"\1://", address) if "://" not in address else address
    filesystem(address, where)
    try:
        from upath import UPath
    except ImportError:
        fix = pip_command("remote")
        message = "reading remote folders requires universal_pathlib"
        raise ConfigError(Problem(where, message, given=address, fix=fix)) from None
    return cast(Path, UPath(address, **_options(address.partition("://")[0])))


def open_folder(path: str | Path) -> Path:
    """Return a folder as `folder_at` does. Of a remote folder, the cached listing is discarded and all files are listed in one call.

    Raise an InstrumentError also if the service does not answer or does not allow reading.
    """
    folder = folder_at(path)
    if is_address(folder):
        files = cast(Any, folder).fs
        files.invalidate_cache()
        try:
            files.find(arrow_name(folder))
        except FileNotFoundError:
            return folder  # the caller reports that there is no run
        except Exception as error:  # clients raise exceptions of many types
            raise InstrumentError(f"{folder} cannot be read: {safe_message(error)}") from None
    return folder


def arrow_name(file: Path) -> str:
    """Return the name of a file in its file system."""
    return str(cast(Any, file).path) if is_address(file) else str(file)


def remote_address_of(folder: Path, remote: str) -> str:
    """Return the remote address of a run's folder.

    The path below `runs` is appended to `remote`. A folder outside `runs` keeps its path below the parent of its
    sweep's folder, or else only its name.
    """
    folder = folder.resolve()
    parts = folder.parts
    sweep = next((above for above in folder.parents if (above / SWEEP_RECORD).exists()), folder)
    first = len(sweep.parts) - 1
    if "runs" in parts[:-1]:
        first = len(parts) - 1 - parts[-2::-1].index("runs")
    return "/".join([remote.rstrip("/"), *parts[first:]])


def moved_to(info: Mapping[str, Any]) -> str | None:
    """Return the address of a run whose local folder lacks parts: they were moved, or are on other machines. None for other runs."""
    config = info.get("config")
    sink = config.get("sink") if isinstance(config, dict) else None
    is_moved = isinstance(sink, dict) and sink.get("keep_local") is False
    return info.get("remote") if is_moved or info.get("shared_folder") is False else None


class RemoteFolder:
    """A remote folder.

    Attributes:
        moved: The number of bytes sent, including those of incomplete files.

    Raises:
        ConfigError: The address is invalid, or a package is missing.
        Exception: From the methods: clients raise exceptions of many types if the service cannot be reached.
    """

    def __init__(self, address: str, where: str) -> None:
        self.address = address.rstrip("/")
        self.where = where
        self.moved = 0
        self._files, root = filesystem(self.address, where)
        self._root = root.rstrip("/")
        self._is_atomic = self.address.partition("://")[0] in OBJECT_STORES

    def sizes(self) -> dict[str, int]:
        """Return the sizes of all files in bytes, by path relative to the folder."""
        self._files.invalidate_cache()
        try:
            infos = self._files.find(self._root, detail=True)
        except FileNotFoundError:
            return {}
        return {name[len(self._root) + 1 :]: info["size"] for name, info in infos.items()}

    def put(self, file: Path, name: str) -> None:
        """Upload a file. It appears when it is complete, and replaces an existing file of that name."""
        from fsspec.callbacks import Callback

        path, before = f"{self._root}/{name}", self.moved

        def count(_: int | None, value: int) -> None:
            self.moved = before + value

        above, _, last = path.rpartition("/")
        target = path if self._is_atomic else f"{above}/.{last}.tmp"
        if not self._is_atomic:
            self._files.makedirs(above, exist_ok=True)
        self._files.put_file(str(file), target, callback=Callback(hooks={"moved": count}))
        if not self._is_atomic:
            self._files.mv(target, path)
        self.moved = before + file.stat().st_size

    def read(self, name: str) -> bytes | None:
        """Return the content of a file; None if it does not exist."""
        try:
            return cast(bytes, self._files.cat_file(f"{self._root}/{name}"))
        except FileNotFoundError:
            return None

    def move(self, name: str) -> None:
        """Move all files to a sibling folder, one by one."""
        above = self._root.rpartition("/")[0]
        self._files.invalidate_cache()
        for path in self._files.find(self._root):
            target = f"{above}/{name}/{path[len(self._root) + 1 :]}"
            self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
            self._files.mv(path, target)

    def remove(self, name: str) -> None:
        """Remove a file."""
        self._files.rm_file(f"{self._root}/{name}")


def check_is_local(
    path: str | Path,
    where: str,
    message: str = LOCAL_FOLDER_ONLY,
    *,
    fix: str = f"set {REMOTE_KEY}=protocol://bucket/folder",
) -> None:
    """Raise a ConfigError for an address where a local folder is required."""
    if is_address(path):
        raise ConfigError(Problem(where, message, fix=fix))


class UploadError(InstrumentError):
    """A remote folder contains files of another run. They are not overwritten."""


def safe_message(error: Exception) -> str:
    """Return the first line of an error message without credentials."""
    return f"{type(error).__name__}: {without_secrets(first_line(error))}"[:MAX_LETTERS]


def without_secrets(text: str) -> str:
    """Replace the credentials of addresses, query strings, and values that the environment or the fsspec configuration names as secrets."""
    secrets = {value for name, value in os.environ.items() if IS_SECRET.search(name)}
    if (fsspec := sys.modules.get("fsspec")) is not None:
        settings = [*fsspec.config.conf.items()]
        while settings:
            name, value = settings.pop()
            if isinstance(value, Mapping):
                settings += value.items()
            elif IS_SECRET.search(str(name)):
                secrets.add(str(value))
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***") if len(secret) >= MIN_SECRET_LENGTH else text
    return re.sub(r"\?[^\s\"']*=[^\s\"']*", "?***", re.sub(r"//([^/@\s\"']*|[^@\s\"']*:[^@\s\"']*)@", "//", text))


def permanent_error_hint(error: Exception) -> str | None:
    """Return how to fix an error that is permanent; None if the error may be temporary."""
    name, code = type(error).__name__, str(getattr(error, "code", ""))
    if name in ("PermissionError", *NO_CREDENTIALS) or code in ("401", "403") or "Forbidden" in str(error):
        return CREDENTIALS
    return {"FileNotFoundError": "use an existing bucket or container", "UploadError": "use another address"}.get(name)
