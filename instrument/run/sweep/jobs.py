"""What jobs a sweep has, and what became of each: read from its folder."""

from __future__ import annotations

import os
import re
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import yaml
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ...errors import ConfigError, InstrumentWarning, Mistake
from ...sinks.remote import REMOTE, SWEEP_RECORD, place_of
from ..cli.search_path import config_loader

READ = ("hydra.overrides", "hydra.sweep", "hydra.sweeper", "hydra.runtime")
REFUSED = "refused.txt"  # in a job's folder: why it was not begun
BASIC = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
BY_NUMBER = "${hydra.job.num}"
DONE, RUNNING, MISSING, UNKNOWN = "done", "running", "missing", "unknown"


@dataclass(frozen=True)
class SweepJob:
    """One job of a sweep.

    Attributes:
        name: Its folder below that of the sweep: its number.
        folder: Where it is, or is to be.
        overrides: What it is composed of, as on the command line.
        status: That of its run.json. Where there is none: `failed` where the job was refused, else `missing`.
        error: What ended it, in a line; None where nothing did.
    """

    name: str
    folder: Path
    overrides: tuple[str, ...]
    status: str
    error: str | None


class Jobs(ABC):
    """Jobs in a folder, and what tells them from each other.

    Attributes:
        is_laid_out: Whether all jobs are known before the first one begins, each in a folder called by its number.
    """

    is_laid_out: bool

    @property
    @abstractmethod
    def swept(self) -> frozenset[str]:
        """The keys that tell the jobs from each other."""

    @abstractmethod
    def jobs(self) -> list[SweepJob]:
        """All jobs, in the order of their numbers."""

    def label(self, job: SweepJob) -> str:
        """What tells a job from the others: `hooks.tame.norm=0.1 seed=1`."""
        written = (override.lstrip("+") for override in job.overrides)
        return " ".join(override for override in written if re.split("[=@]", override)[0] in self.swept)


class Sweep(Jobs):
    """A sweep, as it is found in its folder.

    Args:
        folder: That of the sweep.

    Raises:
        ConfigError: It is not one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.record = read_sweep(folder)
        self.hydra: DictConfig = self.record.hydra
        self.is_laid_out = is_laid_out(self.hydra)

    @property
    def address(self) -> str | None:
        """Where its jobs are sent to, each to a folder below; None where they are not sent, or each says where."""
        try:
            remote = OmegaConf.select(self.record, REMOTE)
        except OmegaConfBaseException:
            return None
        return None if remote is None or REMOTE in self.swept else place_of(self.folder, str(remote))

    @cached_property
    def swept(self) -> frozenset[str]:
        """The keys that tell the jobs from each other."""
        return keys_of(self._swept)

    @cached_property
    def _swept(self) -> list[Override]:
        return swept_in(self.hydra)

    def jobs(self) -> list[SweepJob]:
        """All jobs, in the order of their numbers; those that are there alone where they are not laid out."""
        there = {str(folder.relative_to(self.folder)): _recorded(folder) for folder in _jobs_below(self.folder)}
        planned = self._planned(there) if self.is_laid_out else {}
        names = sorted({**there, **planned}, key=natural)
        with unwarned():
            return [self._job(name, there.get(name) or planned.get(name, ())) for name in names]

    def _planned(self, there: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        shuffled = any(getattr(override.value(), "shuffle", False) for override in self._swept)
        return _planned(composed(self.hydra), there, shuffled=shuffled)

    def _job(self, name: str, overrides: tuple[str, ...]) -> SweepJob:
        from ...analysis.files import RunFiles

        folder = self.folder / name
        if not (folder / "run.json").exists():
            refused = _first_line_of(folder / REFUSED)
            return SweepJob(name, folder, overrides, "failed" if refused else MISSING, refused)
        files = RunFiles(folder)
        info = files.info()
        unreadable = files.problems if info["status"] == UNKNOWN else []
        return SweepJob(name, folder, overrides, info["status"], error_of(info) or "; ".join(unreadable) or None)


@contextmanager
def unwarned() -> Iterator[None]:
    """Inside, nobody is warned of where a run's rows are: none is read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InstrumentWarning)
        yield


def error_of(info: Mapping[str, Any]) -> str | None:
    """What ended a run, in a line; None where nothing did.

    Args:
        info: Its run.json.
    """
    return str(info["error"]).partition("\n")[0].removesuffix(": ") if info.get("error") else None


def read_sweep(folder: Path) -> DictConfig:
    """Hydra's record of a sweep: the configuration that those of its jobs are made of.

    Args:
        folder: That of the sweep, which may be behind an address.

    Raises:
        ConfigError: There is none.
    """
    try:
        with (folder / SWEEP_RECORD).open() as file:
            record = OmegaConf.load(file)
        reason = "" if all(OmegaConf.select(record, key) for key in READ) else "it is not one of Hydra's"
    except (OSError, OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError) as error:
        reason = str(error.strerror if isinstance(error, OSError) else type(error).__name__)
    if reason:
        problem = f"{SWEEP_RECORD} of this folder cannot be read: {reason}"
        raise ConfigError(Mistake("", problem, written=str(folder), allowed="the folder of a sweep"))
    return record  # type: ignore[return-value]


def is_laid_out(hydra: DictConfig) -> bool:
    """Whether all jobs are known before the first one begins, each in a folder called by its number.

    Args:
        hydra: The part `hydra` of the sweep's configuration.
    """
    subdir = OmegaConf.to_container(hydra.sweep, resolve=False)["subdir"]  # type: ignore[call-overload,index]
    return bool(hydra.sweeper["_target_"] == BASIC and subdir == BY_NUMBER)


def composed(hydra: DictConfig) -> list[tuple[str, ...]]:
    """The jobs that Hydra's own sweeper makes of a sweep: the product of the values of all overrides.

    Args:
        hydra: The part `hydra` of the sweep's configuration.

    Raises:
        ConfigError: The values of an override cannot be gone through.
    """
    parser = OverridesParser.create(config_loader=config_loader())
    overrides = [_readable(parser, written) for written in arguments_of(hydra)]
    (jobs,) = BasicSweeper.split_arguments(overrides, max_batch_size=None)
    return [tuple(job) for job in jobs]


def _readable(parser: OverridesParser, written: str) -> Override:
    try:
        (override,) = parser.parse_overrides([written])
        if override.is_sweep_override():
            list(override.sweep_string_iterator())
    except (ValueError, OmegaConfBaseException) as error:
        told = str(error).partition("\n")[0]
        allowed = "values with commas between them, or one of range(...), glob(...), choice(...)"
        problem = f"the values of this override cannot be gone through: {told}"
        raise ConfigError(Mistake("", problem, written=written, allowed=allowed)) from None
    return override


def summary(jobs: Sequence[SweepJob]) -> str:
    """How many jobs there are of each status: `5 done, 1 failed`."""
    if not jobs:
        return "none was begun"
    counts = Counter(job.status for job in jobs)
    return ", ".join(f"{count} {status}" for status, count in sorted(counts.items(), key=lambda item: item[0] != DONE))


def arguments_of(hydra: DictConfig) -> list[str]:
    """A sweep's overrides: those that a file names under `hydra.sweeper.params`, and those of the command line."""
    parameters: Mapping[str, Any] = hydra.sweeper.get("params") or {}
    return [*(f"{key}={value}" for key, value in parameters.items()), *overrides_of(hydra, "task")]


def swept_in(hydra: DictConfig) -> list[Override]:
    """The overrides that have several values."""
    parsed = OverridesParser.create().parse_overrides(arguments_of(hydra))
    return [override for override in parsed if override.is_sweep_override()]


def keys_of(overrides: Sequence[Override]) -> frozenset[str]:
    """The keys that overrides are about, without Hydra's `+` before one, and without the package behind one."""
    return frozenset(override.key_or_group for override in overrides)


def overrides_of(hydra: DictConfig, part: Literal["task", "hydra"]) -> list[str]:
    """What stood on the command line, as it was written: `seed=${hydra:job.num}` means something in a job only."""
    written: Any = OmegaConf.to_container(hydra.overrides[part], resolve=False)
    return [str(override) for override in written]


def natural(name: str) -> list[str | int]:
    """A key that sorts job 10 behind job 9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _jobs_below(sweep: Path) -> Iterator[Path]:
    """The folders of jobs: with a run, or with Hydra's record of one; without a look into them, or into what is put aside."""
    for above, folders, files in os.walk(sweep):
        if "run.json" in files or ".hydra" in folders:
            folders.clear()
            yield Path(above)
        folders[:] = [name for name in folders if not name.startswith(".")]


def _recorded(folder: Path) -> tuple[str, ...]:
    """What Hydra wrote down that a job was composed of; empty where it is not there."""
    try:
        overrides = yaml.load((folder / ".hydra" / "overrides.yaml").read_text(), yaml.CSafeLoader)
    except (OSError, yaml.YAMLError):
        return ()
    return tuple(str(override) for override in overrides or ())


def _planned(
    jobs: Sequence[tuple[str, ...]], there: Mapping[str, tuple[str, ...]], *, shuffled: bool
) -> dict[str, tuple[str, ...]]:
    """The overrides of each number. `shuffle(...)` has another order each time that it is composed: what is left of it goes
    to the numbers that are left."""
    if not shuffled:
        return {str(number): overrides for number, overrides in enumerate(jobs)}
    left = list((Counter(jobs) - Counter(there.values())).elements())
    numbers = [str(number) for number in range(len(jobs)) if not there.get(str(number))]
    return dict(zip(numbers, left, strict=False))


def _first_line_of(file: Path) -> str | None:
    try:
        return file.read_text().partition("\n")[0]
    except OSError:
        return None


def folder_override(key: str, folder: Path) -> str:
    """The override that names a folder, in Hydra's grammar."""
    escaped = str(folder).replace("'", r"\'")
    return f"{key}='{escaped}'"
