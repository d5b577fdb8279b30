"""The record of a run, run.json: reading, atomic writing, its final status, and the differences between two runs."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ..errors import ConfigError, Problem

# Entries of run.json, or of one of its mappings, without which a run cannot be repeated exactly.
REQUIRED = ("versions", "hardware", "data")
DECISIVE_VERSIONS = ("torch", "torchvision", "numpy")
CHECKPOINTS = "checkpoints"  # Subfolder of the run folder.
WEIGHTS = "weights.pt"  # File in the run folder: the final state dict of the model.
Status = Literal["running", "done", "stopped", "failed", "interrupted", "killed"]
# Subfolder of a sweep with the previous attempts of repeated jobs: 3.1, 3.2, ... for job 3.
PREVIOUS_ATTEMPTS = ".aside"
# The types of entries that readers rely on. Each may also be missing or null.
_TYPES: dict[Any, str] = {
    dict: "config config.model config.sink config.train overrides metrics data data.hashes versions hardware replay advice init_from",
    str: "name status started ended error device git_revision recording_stopped config.mode",
    list: "command resumed",
    dict | list: "config.hooks",
    int | float: "overhead warnings data.train_samples data.eval_samples",
}
PACKAGES = ("torch", "torchvision", "numpy", "pyarrow", "pandas", "hydra-core", "omegaconf", "pydantic")


def read_record(path: Path, where: str) -> dict[str, Any]:
    """Read the run.json of a folder. Raise a ConfigError if it does not exist, is not JSON, or was not written by this package."""
    try:
        record = json.loads((path / "run.json").read_text())
    except (OSError, ValueError) as error:
        if isinstance(error, FileNotFoundError) and (runs := sorted(path.glob("*/run.json"))):
            message = f"the folder contains folders of runs: pass one of them, such as {path}/{runs[0].parent.name}"
            raise ConfigError(Problem(where, message, given=str(path))) from None
        reason = error.strerror if isinstance(error, OSError) else error
        message = f"cannot read run.json: {reason}" if path.exists() else "the folder does not exist"
        raise ConfigError(Problem(where, message, given=str(path), allowed="the folder of a run")) from None
    if not isinstance(record, dict) or not isinstance(record.get("config"), dict) or "status" not in record:
        raise ConfigError(Problem(where, "run.json was not written by this package", given=str(path)))
    if problems := remove_wrong_types(record):
        raise ConfigError(Problem(where, f"run.json: {problems[0]}", given=str(path)))
    return record


def remove_wrong_types(record: dict[str, Any]) -> list[str]:
    """Remove the entries of a record that have a wrong type, and return a message about each."""
    problems = []
    for types, keys in _TYPES.items():
        for key in keys.split():
            section, _, name = key.rpartition(".")
            entries = (record.get(section) or {}) if section else record
            if not isinstance(entries.get(name), types | None):
                problems.append(f"{key} has a wrong type, {type(entries.pop(name)).__name__}")
    hooks = (record.get("config") or {}).get("hooks") or {}
    for name, spec in [*(hooks.items() if isinstance(hooks, dict) else enumerate(hooks))]:
        if not isinstance(spec, dict | None):
            problems.append(f"config.hooks.{name} has a wrong type, {type(spec).__name__}")
            hooks[name] = None
    return problems


def checkpoint_steps(folder: Path) -> list[int]:
    """Return the numbers of completed steps of a run's checkpoints, in ascending order."""
    files = sorted((folder / CHECKPOINTS).glob(f"step-{'[0-9]' * 8}.pt"))
    return [int(file.stem.partition("-")[2]) for file in files]


def end_if_running(folder: Path, **entries: Any) -> None:
    """Add entries to run.json, if its status is `running`. Call it only if the process that writes it is gone."""
    path = folder / "run.json"
    record = None
    with suppress(ValueError):  # The file is damaged; `load` reports it.
        record = json.loads(path.read_text())
    if isinstance(record, dict) and record.get("status") == "running":
        with suppress(FileNotFoundError):  # Another process wrote the file at the same time.
            write_json(path, {**record, **entries})


def write_json(path: Path, record: Any) -> None:
    """Write a JSON file atomically."""
    write_atomically(path, (json.dumps(record, indent=2, default=str) + "\n").encode())


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file. The previous file remains until the new one is complete. A device such as `/dev/stdout` is written directly."""
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    file = Path(os.path.realpath(path))  # of a symbolic link
    temporary = file.with_name(f".{file.name}.tmp")
    try:
        temporary.write_bytes(content)
        with suppress(OSError):  # a new file has the default mode
            shutil.copymode(file, temporary)
        os.replace(temporary, file)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from error


def final_entries(status: Status, error: BaseException | str | None) -> dict[str, Any]:
    """Return the entries of run.json at the end of a run, which an exception ended, or a rule stopped."""
    message = f"{type(error).__name__}: {error}" if isinstance(error, BaseException) else error
    return {"status": status, "ended": datetime.now(UTC).isoformat(timespec="seconds"), "error": message}


def config_hash(config: dict[str, Any]) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of a configuration, independent of the order of keys."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:16]


def git_revision() -> str | None:
    """Return the commit of the working directory, with `-dirty` for uncommitted changes; None outside a git checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None


class EnvironmentDifference(NamedTuple):
    """A difference between the environments of two runs: an entry of run.json, such as `versions.torch`, and its values.

    A decisive one means that the second run cannot be expected to give the same bits.
    """

    what: str
    recorded: object
    present: object
    is_decisive: bool

    def __str__(self) -> str:
        recorded, present = ("missing" if value is None else value for value in (self.recorded, self.present))
        return f"{self.what} is {present}, but was {recorded}"


def environment_differences(recorded: Mapping[str, Any], present: Mapping[str, Any]) -> list[EnvironmentDifference]:
    """Return the differences between the environments of two runs, the decisive ones first.

    An entry that the first run does not have is not compared.
    """
    pairs = [("device", recorded.get("device"), present.get("device"), True)]
    for section in ("hardware", "versions", "code"):
        ours, theirs = present.get(section) or {}, recorded.get(section) or {}
        pairs += [
            (f"{section}.{name}", value, ours.get(name), section == "hardware" or name in DECISIVE_VERSIONS)
            for name, value in theirs.items()
            if section != "code" or name in ours  # Hooks with other custom code may have been left out.
        ]
    data, own_data = recorded.get("data") or {}, present.get("data") or {}
    pairs += [(f"data.{name}", data.get(name), own_data.get(name), True) for name in ("dataset", "train_samples")]
    hashes, own_hashes = data.get("hashes") or {}, own_data.get("hashes") or {}
    pairs += [(f"content of the {name} samples", hashes.get(name), own_hashes.get(name), True) for name in hashes]
    weights, own_weights = recorded.get("init_from") or {}, present.get("init_from") or {}
    if weights and own_weights:
        pairs.append(("content of init_from", weights["sha256"], own_weights["sha256"], True))
    pairs.append(("git_revision", recorded.get("git_revision"), present.get("git_revision"), False))
    differences = [EnvironmentDifference(*pair) for pair in pairs if pair[1] != pair[2]]
    return sorted(differences, key=lambda difference: not difference.is_decisive)
