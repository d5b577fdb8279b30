"""Folders behind an address, such as `s3://bucket/prefix`: whatever fsspec has a protocol for.

Credentials come from the environment and from fsspec's own configuration. An address has none: it is written down.
"""

from __future__ import annotations

import importlib
import logging
import random
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..errors import ConfigError, InstrumentError, Mistake
from ..extras import pip_command
from .client_errors import CREDENTIALS, told, without_secrets

if TYPE_CHECKING:
    from fsspec.callbacks import Callback

# Where a file is there as a whole or not at all; elsewhere it is sent aside and moved.
OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oci", "oss"})
EXTRAS = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gcs",
    "gcs": "gcs",
}  # by protocol; the others need fsspec and their own package
SWEEP_RECORD = "multirun.yaml"  # Hydra's record of a sweep, in the folder of all its jobs
REMOTE = "sink.remote"  # what a run's remote folder is asked for by
AHEAD = 2**18  # bytes that are read ahead of what DuckDB asks for: a column of a row group has about as many
ALLOWED = "protocol://place/folder, such as s3://bucket/runs, gs://bucket/runs"
WRITTEN_HERE = "a run is written to a folder of this machine, from where it can be sent on"
AT_ONCE = 2  # pieces of 50 MB that are in memory of a large file

CLIENTS = (
    "adlfs",
    "aiobotocore",
    "aiohttp",
    "azure",
    "boto3",
    "botocore",
    "fsspec",
    "gcsfs",
    "google",
    "paramiko",
    "s3fs",
)
_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]*)://(.+)")
_COLLAPSED = re.compile(r"([a-z][a-z0-9+.-]+):/(?!/)")  # what pathlib makes of an address
_SECRET = re.compile(r"://[^@]*:[^@]*@|://.*[?#]")


def is_address(path: object) -> bool:
    """Whether a folder is named by an address rather than by a path; also where pathlib has made it `s3:/bucket`."""
    return "://" in str(path) or _COLLAPSED.match(str(path)) is not None


def check_address(address: str, where: str) -> None:
    """Make sure that an address is one, and has nothing in it that is not to be written down.

    Raises:
        ConfigError: It is not; one with credentials is not repeated.
    """
    refuse_secret(address, where)
    found = _ADDRESS.fullmatch(address)
    if found is None or "::" in address:
        raise ConfigError(Mistake(where, "this is no address of a folder", written=address, allowed=ALLOWED))
    from fsspec.registry import available_protocols

    if found[1] not in available_protocols():
        known = sorted(available_protocols())
        raise ConfigError(Mistake(where, "fsspec has no such protocol", written=address, allowed=known))


def refuse_secret(text: str, where: str) -> None:
    """Stop at an address with credentials in it, without repeating it.

    Args:
        text: The address, or what holds it.
        where: What the user says it by.

    Raises:
        ConfigError: There are credentials.
    """
    if _SECRET.search(text):
        problem = "an address is written into run.json and logs: it may hold no password, key or query"
        raise ConfigError(Mistake(where, problem, allowed=f"{ALLOWED}; {CREDENTIALS}"))


def filesystem(address: str, where: str) -> tuple[Any, str]:
    """fsspec's file system for an address, and the path of the folder in it.

    Raises:
        ConfigError: The address is none, or a package is missing.
    """
    try:
        import fsspec
    except ImportError:
        allowed = pip_command("remote")
        raise ConfigError(Mistake(where, "remote folders need fsspec", written=address, allowed=allowed)) from None
    check_address(address, where)
    for client in CLIENTS:  # what they tell of their requests, where everything is logged, has tokens in it
        logging.getLogger(client).setLevel(logging.WARNING)
    protocol = address.partition("://")[0]
    if EXTRAS.get(protocol) == "gcs":
        _leave_random_numbers()
    try:
        return fsspec.core.url_to_fs(address, **_options(protocol))  # type: ignore[no-any-return]
    except (ImportError, ValueError) as error:
        extra = EXTRAS.get(protocol)
        allowed = pip_command(extra) if extra else "the package that fsspec names"
        problem = f"{protocol}:// cannot be had: {without_secrets(str(error))}"
        raise ConfigError(Mistake(where, problem, written=address, allowed=allowed)) from None


def check_remote(remote: str | None, where: str = REMOTE) -> None:
    """Make sure that a remote folder, where one is asked for, can be meant: before anything of it is written down.

    Raises:
        ConfigError: The address is none or has credentials in it, or a package is missing.
    """
    if remote is not None:
        filesystem(remote, where)


def _leave_random_numbers() -> None:
    """Have gcsfs draw the pauses between its attempts from a generator of its own: Python's is the run's."""
    with suppress(ImportError):  # that it is missing is told where it is used
        retry: Any = importlib.import_module("gcsfs.retry")
        retry.random = random.Random()


def _options(protocol: str) -> dict[str, Any]:
    """Storage options, where the user's own configuration of fsspec has no others.

    botocore draws from Python's random numbers before it tries again, and these are the run's own: it does not try again,
    since that is done here. Of a file that is read here and there, s3fs fetches 50 MB behind each place, and of a large one that
    is sent it has ten pieces of 50 MB in memory: here it is less.
    """
    if EXTRAS.get(protocol) != "s3":
        return {}
    from fsspec.config import conf

    own = conf.get("s3", {})
    return {
        "config_kwargs": {**own.get("config_kwargs", {}), "retries": {"max_attempts": 0}},
        "default_block_size": own.get("default_block_size", AHEAD),
        "max_concurrency": own.get("max_concurrency", AT_ONCE),
    }


def folder_at(path: str | Path, where: str = "") -> Path:
    """A folder to read from, by its path or its address; the latter has pathlib's interface too.

    Raises:
        ConfigError: The address is none, or a package is missing.
    """
    address = str(path)
    if not is_address(address):
        return Path(path)
    address = _COLLAPSED.sub(r"\1://", address) if "://" not in address else address
    filesystem(address, where)
    try:
        from upath import UPath
    except ImportError:
        allowed = pip_command("remote")
        problem = "remote folders are read with universal_pathlib"
        raise ConfigError(Mistake(where, problem, written=address, allowed=allowed)) from None
    return cast(Path, UPath(address, **_options(address.partition("://")[0])))


def opened(path: str | Path) -> Path:
    """A folder to read from, as `folder_at` gives it; of a remote one, what was known of its files is forgotten, and all of
    them are listed at once.

    Raises:
        ConfigError: The address is none, or a package is missing.
        InstrumentError: Nobody answers there, or reading is not allowed.
    """
    folder = folder_at(path)
    if is_address(folder):
        files = cast(Any, folder).fs
        files.invalidate_cache()
        try:
            files.find(arrow_name(folder))
        except FileNotFoundError:
            return folder  # whoever looks for a run there says so
        except Exception as error:  # of many kinds: whatever a client raises
            raise InstrumentError(f"{folder} cannot be read: {told(error)}") from None
    return folder


def arrow_name(file: Path) -> str:
    """What a file is called in the file system that it lies in."""
    return str(cast(Any, file).path) if is_address(file) else str(file)


def place_of(folder: Path, remote: str) -> str:
    """The address of a folder: below `remote` as it lies below `runs`, or else as it lies in the folder above its sweep's.

    A folder that lies in neither has its name there.
    """
    folder = folder.resolve()
    parts = folder.parts
    sweep = next((above for above in folder.parents if (above / SWEEP_RECORD).exists()), folder)
    first = len(sweep.parts) - 1
    if "runs" in parts[:-1]:
        first = len(parts) - 1 - parts[-2::-1].index("runs")
    return "/".join([remote.rstrip("/"), *parts[first:]])


def moved_to(info: Mapping[str, Any]) -> str | None:
    """The address that a run's parts were moved to; None where they stayed.

    Args:
        info: Its run.json.
    """
    config = info.get("config")
    sink = config.get("sink") if isinstance(config, dict) else None
    return info.get("remote") if isinstance(sink, dict) and sink.get("keep_local") is False else None


class RemoteFolder:
    """A folder behind an address.

    Args:
        address: Without credentials.
        where: What the user says it by.

    Attributes:
        moved: How many bytes were sent, those of files included that are not there yet as a whole.

    Raises:
        ConfigError: The address is none, or a package is missing.
        Exception: From the methods, of many kinds: whatever a client raises where it cannot be reached.
    """

    def __init__(self, address: str, where: str) -> None:
        self.address = address.rstrip("/")
        self.where = where
        self.moved = 0
        self._files, root = filesystem(self.address, where)
        self._root = root.rstrip("/")
        self._whole = self.address.partition("://")[0] in OBJECT_STORES

    def sizes(self) -> dict[str, int]:
        """The files that are there, by their path below the folder, with their bytes."""
        self._files.invalidate_cache()
        try:
            found = self._files.find(self._root, detail=True)
        except FileNotFoundError:
            return {}
        return {name[len(self._root) + 1 :]: info["size"] for name, info in found.items()}

    def put(self, file: Path, name: str) -> None:
        """Send a file; it is there when all of it is, and in the place of another one of the name."""
        path, before = f"{self._root}/{name}", self.moved
        if self._whole:
            self._files.put_file(str(file), path, callback=self._counting(before))
        else:
            above, _, last = path.rpartition("/")
            aside = f"{above}/.{last}.tmp"
            self._files.makedirs(above, exist_ok=True)
            self._files.put_file(str(file), aside, callback=self._counting(before))
            self._files.mv(aside, path)
        self.moved = before + file.stat().st_size

    def _counting(self, before: int) -> Callback:
        from fsspec.callbacks import Callback

        def count(_: int | None, value: int) -> None:
            self.moved = before + value

        return Callback(hooks={"moved": count})

    def read(self, name: str) -> bytes | None:
        """What a file holds; None where there is none."""
        try:
            return cast(bytes, self._files.cat_file(f"{self._root}/{name}"))
        except FileNotFoundError:
            return None

    def move(self, place: str) -> None:
        """Move all files to another folder beside this one, file by file."""
        above = self._root.rpartition("/")[0]
        self._files.invalidate_cache()
        for path in self._files.find(self._root):
            target = f"{above}/{place}/{path[len(self._root) + 1 :]}"
            self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
            self._files.mv(path, target)

    def remove(self, name: str) -> None:
        """Take a file away."""
        self._files.rm_file(f"{self._root}/{name}")


def refuse_address(
    path: str | Path, where: str, problem: str = WRITTEN_HERE, *, allowed: str = f"{REMOTE}=protocol://place/folder"
) -> None:
    """Stop where a folder of this machine is needed.

    Args:
        path: What was given.
        where: What the user says it by.
        problem: Why an address is none of use.
        allowed: What is.

    Raises:
        ConfigError: It is an address.
    """
    if is_address(path):
        raise ConfigError(Mistake(where, problem, allowed=allowed))


class UploadError(InstrumentError):
    """A remote folder holds what cannot be of this run; nothing there is overwritten."""
