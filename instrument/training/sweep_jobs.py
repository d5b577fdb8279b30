"""The jobs of a sweep or in a folder, their status, and the summary of a finished sweep."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ..analysis.config_fields import differing_fields, to_yaml
from ..config.hydra_internals import BASIC_SWEEPER, config_loader, plain_value, split_sweep
from ..errors import ConfigError, InstrumentWarning, Problem, first_line
from ..formatting import counted, natural_key
from ..storage.folder_snapshot import REFUSED, SUBMITTED
from ..storage.remote_folder import REMOTE_KEY, SWEEP_RECORD, is_address, remote_address_of
from .sweep_objective import OBJECTIVE_KEY

if TYPE_CHECKING:
    from ..analysis.load import Run


REQUIRED_KEYS = ("hydra.overrides", "hydra.sweep", "hydra.sweeper", "hydra.runtime")
DONE, STOPPED, RUNNING, MISSING, UNKNOWN = "done", "stopped", "running", "missing", "unknown"
KILLED, INTERRUPTED = "killed", "interrupted"
ALLOWED = "the folder of a sweep, or a folder that contains several runs"
RESULTS = "optimization_results.yaml"  # of the Optuna sweeper, in the folder of the sweep
MAX_LISTED = 20  # maximum number of jobs listed one by one; more jobs are grouped by status and error
MAX_NAMES = 8  # maximum number of names in a line


@dataclass(frozen=True)
class SweepJob:
    """One job of a sweep."""

    name: str  # folder of the job, relative to the folder of the sweep; usually the job number
    folder: Path
    overrides: tuple[str, ...]
    status: str  # that in run.json; without this file, `failed` if the job was refused, else `missing`
    error: str | None  # error that ended the job, in one line; None if no error occurred
    warnings: int | None = None  # the number of warnings; None if the job is not complete


class Jobs:
    """The jobs in a folder, and the keys in which they differ."""

    has_known_jobs = False  # before the first one starts, with their numbers as names of their folders
    swept: Mapping[str, Sequence[Any]]  # the keys whose values differ, with these values, except for calculated ones

    def jobs(self) -> list[SweepJob]:
        raise NotImplementedError

    def label(self, job: SweepJob) -> str:
        """Return the overrides in which a job differs from the others, for example `hooks.tame.norm=0.1 seed=1`."""
        return " ".join(f"{key}={value}" for key, value in self.differing(job).items())

    def differing(self, job: SweepJob) -> dict[str, str]:
        """Return the overrides in which a job differs from the others, by key. Of mappings, the fields that differ."""
        texts: dict[str, str] = {}
        for override in job.overrides:
            name, _, value = override.lstrip("+").partition("=")
            key = name.partition("@")[0]
            if key not in self.swept:
                continue
            if value.startswith("{"):
                parsed = OverridesParser.create().parse_override(override)
                fields = differing_fields(key, parsed.value(), self.swept[key])
                texts |= {field: to_yaml(item) for field, item in fields.items()}
            else:
                texts[key] = value
        return texts


class Sweep(Jobs):
    """A sweep with a record, read from its folder. Raises a ConfigError if it has no readable record.

    `uploaded`: the runs of a sweep in remote storage, which have the status of its jobs.
    """

    def __init__(self, folder: Path, uploaded: Run | None = None) -> None:
        self.folder = folder
        self.uploaded = uploaded
        self.record = read_sweep(folder)
        self.hydra = self.record.hydra
        overrides = sweep_overrides(self.hydra)
        self.swept = values_of(overrides)
        subdir = OmegaConf.to_container(self.hydra.sweep, resolve=False)["subdir"]  # type: ignore[call-overload,index]
        is_numbered = self.hydra.sweeper["_target_"] == BASIC_SWEEPER and subdir == "${hydra.job.num}"
        # Each expansion of `shuffle(...)` has another order.
        self.has_known_jobs = is_numbered and not any(getattr(each.value(), "shuffle", False) for each in overrides)

    @property
    def address(self) -> str | None:
        """Remote folder of the sweep; each job is uploaded to a folder below it. None if the jobs have none, or different ones."""
        try:
            remote = OmegaConf.select(self.record, REMOTE_KEY)
        except OmegaConfBaseException:
            return None
        return None if remote is None or REMOTE_KEY in self.swept else remote_address_of(self.folder, str(remote))

    def jobs(self) -> list[SweepJob]:
        """Return all jobs, sorted by number. Missing jobs are included only if `has_known_jobs` is true."""
        with warnings.catch_warnings(action="ignore", category=InstrumentWarning):  # about rows, which are not read
            jobs = self._existing()
        for number, overrides in enumerate(expand_sweep(self.hydra) if self.has_known_jobs else ()):
            name = str(number)
            if name not in jobs:
                jobs[name] = SweepJob(name, self.folder / name, overrides, MISSING, None)
            elif not jobs[name].overrides:
                jobs[name] = replace(jobs[name], overrides=overrides)
        return [jobs[name] for name in sorted(jobs, key=natural_key)]

    def _existing(self) -> dict[str, SweepJob]:
        """Return the jobs with a folder, by name. Jobs and hidden folders are not searched further."""
        jobs = {} if self.uploaded is None else {job.name: job for job in Runs(self.uploaded).jobs()}
        for above, folders, files in os.walk(self.folder) if self.uploaded is None else ():
            if "run.json" in files or ".hydra" in folders:
                folders.clear()
                job = _job(Path(above), self.folder)
                jobs[job.name] = job
            folders[:] = [name for name in folders if not name.startswith(".")]
        return jobs


def _job(folder: Path, sweep: Path) -> SweepJob:
    from ..storage.run_files import RunFiles

    name, overrides = str(folder.relative_to(sweep)), recorded_overrides(folder)
    if not (folder / "run.json").exists():
        refused = (folder / REFUSED).read_text().partition("\n")[0] if (folder / REFUSED).exists() else None
        return SweepJob(name, folder, overrides, "failed" if refused else MISSING, refused)
    files = RunFiles(folder)
    info = files.info()
    unreadable = files.problems if info["status"] == UNKNOWN else []
    error = error_of(info) or "; ".join(unreadable) or None
    return SweepJob(name, folder, overrides, info["status"], error, info.get("warnings"))


class Runs(Jobs):
    """Runs below a folder without a sweep record, such as runs started by a shell loop. Missing runs are not known."""

    def __init__(self, run: Run) -> None:
        from ..analysis.config_comparison import differing_overrides

        self.run = run
        self.swept = {key: [info["overrides"].get(key) for info in run.infos] for key in differing_overrides(run)}

    def jobs(self) -> list[SweepJob]:
        with warnings.catch_warnings(action="ignore", category=InstrumentWarning):  # about rows, which are not read
            infos = self.run.infos
        return [
            SweepJob(
                str(folder.relative_to(self.run.path)),
                folder,
                tuple(f"{key}={to_yaml(value)}" for key, value in info["overrides"].items()),
                info["status"],
                error_of(info),
                info.get("warnings"),
            )
            for folder, info in zip(self.run.folders, infos, strict=True)
        ]


def jobs_in(folder: str) -> Jobs:
    """Find the sweep in a folder, or the runs below it. Raise a ConfigError for another folder, such as that of a single run."""
    if not is_address(folder) and (Path(folder) / SWEEP_RECORD).exists():
        return Sweep(Path(folder))
    from ..analysis.load import load  # Imported late: they import pyarrow.
    from ..storage.run_search import NoRunError

    try:
        run = load(folder)
    except NoRunError as error:
        raise ConfigError(Problem("", f"no sweep found: {error}", given=folder, allowed=ALLOWED)) from None
    if run.folders == [run.path]:
        above = Path(folder).resolve().parent
        is_job = not is_address(folder) and (above / SWEEP_RECORD).exists()
        message = "this is the folder of a single run, not of a sweep"
        raise ConfigError(Problem("", message, folder, ALLOWED, [str(Path(folder).parent)] if is_job else ()))
    if is_address(folder) and (run.path / SWEEP_RECORD).exists():
        return Sweep(run.path, run)
    return Runs(run)


def error_of(info: Mapping[str, Any]) -> str | None:
    """Return the first line of the error that ended a run; None if no error occurred."""
    return str(info["error"]).partition("\n")[0].removesuffix(": ") if info.get("error") else None


def read_sweep(folder: Path) -> DictConfig:
    """Read the sweep record of Hydra, from which the jobs are composed. Raise a ConfigError if Hydra wrote no record."""
    try:
        record = _parsed((folder / SWEEP_RECORD).read_text())
        reason = "" if all(OmegaConf.select(record, key) for key in REQUIRED_KEYS) else "it was not written by Hydra"
    except (OSError, OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError, AssertionError) as error:
        reason = str(error.strerror if isinstance(error, OSError) else type(error).__name__)
    if reason or not isinstance(record, DictConfig):
        message = f"cannot read {SWEEP_RECORD} in this folder: {reason}"
        raise ConfigError(Problem("", message, given=str(folder), allowed="the folder of a sweep"))
    return record


@lru_cache(maxsize=1)
def _parsed(record: str) -> DictConfig | ListConfig:
    """Parse the text of a sweep record once for all jobs of a process, because it takes longer than to read the file."""
    parsed: DictConfig | ListConfig = OmegaConf.create(yaml.load(record, yaml.CSafeLoader))
    OmegaConf.set_readonly(parsed, True)
    return parsed


def expand_sweep(hydra: DictConfig) -> list[tuple[str, ...]]:
    """Return the overrides of each job of a sweep, as the basic sweeper of Hydra does: the product of the values of all overrides.

    Raise a ConfigError if the values of an override cannot be expanded.
    """
    parser = OverridesParser.create(config_loader=config_loader())
    overrides = []
    for written in arguments_of(hydra):
        try:
            overrides += parser.parse_overrides([written])
            if overrides[-1].is_sweep_override():
                list(overrides[-1].sweep_string_iterator())
        except (ValueError, OmegaConfBaseException) as error:
            allowed = "comma-separated values, range(...), glob(...) or choice(...)"
            message = f"cannot expand the values of this sweep override: {first_line(error)}"
            raise ConfigError(Problem("", message, given=written, allowed=allowed)) from None
    return [tuple(job) for job in split_sweep(overrides)]


def count_by_status(jobs: Sequence[SweepJob]) -> str:
    """Return the number of jobs by status, with `done` first: `5 done, 1 failed`."""
    if not jobs:
        return "no job was started"
    counts = Counter(job.status for job in jobs)
    return ", ".join(f"{count} {status}" for status, count in sorted(counts.items(), key=lambda item: item[0] != DONE))


def arguments_of(hydra: DictConfig) -> list[str]:
    """Return the overrides of a sweep: those in `hydra.sweeper.params`, then those of the command line."""
    parameters: Mapping[str, Any] = hydra.sweeper.get("params") or {}
    return [*(f"{key}={value}" for key, value in parameters.items()), *overrides_of(hydra, "task")]


def sweep_overrides(hydra: DictConfig) -> list[Override]:
    parsed = OverridesParser.create().parse_overrides(arguments_of(hydra))
    return [override for override in parsed if override.is_sweep_override()]


def values_of(overrides: Sequence[Override]) -> dict[str, list[Any]]:
    """Return the values of overrides of a sweep by key. Ranges and other calculated values are left out."""
    lists: dict[str, list[Any]] = {}
    for override in overrides:
        choice = override.value()
        values = choice.list if isinstance(choice, ChoiceSweep) else []
        lists[override.key_or_group] = [plain_value(value) for value in values]
    return lists


def overrides_of(hydra: DictConfig, part: Literal["task", "hydra"]) -> list[str]:
    """Return the overrides of the command line as written, unresolved: `seed=${hydra:job.num}`, for example, has a value only in a job."""
    written: Any = OmegaConf.to_container(hydra.overrides[part], resolve=False)
    return [str(override) for override in written]


def recorded_overrides(folder: Path) -> tuple[str, ...]:
    """Return the overrides that Hydra recorded in the folder of a job; empty if the record is missing or unreadable."""
    try:
        overrides = yaml.load((folder / ".hydra" / "overrides.yaml").read_text(), yaml.CSafeLoader)
    except (OSError, yaml.YAMLError):
        return ()
    return tuple(str(override) for override in overrides or ())


def folder_override(key: str, folder: Path) -> str:
    """Return a Hydra override that sets a key to a path, with quotes escaped."""
    escaped = str(folder).replace("'", r"\'")
    return f"{key}='{escaped}'"


def print_summary(folder: Path) -> None:
    """Print the jobs of a sweep that are not done, their errors, and the command that runs them again, to stderr."""
    sweep = Sweep(folder)
    jobs = sweep.jobs()
    if not jobs:
        print(f"no job was started in {folder}", file=sys.stderr)
        return
    print("", *job_lines(sweep, jobs), *outcome_lines(sweep, jobs, width=13), sep="\n", file=sys.stderr)
    if (terminals := folder / SUBMITTED).exists():
        print(f"job output   {terminals}", file=sys.stderr)
    command = f"python -m instrument.sweep {shlex.quote(str(folder))}"
    print(f"all jobs     {command}", file=sys.stderr)
    if any(job.status not in (DONE, STOPPED) for job in jobs) and sweep.has_known_jobs:
        print(f"rerun        {command} --rerun", file=sys.stderr)


def job_lines(sweep: Sweep, jobs: Sequence[SweepJob]) -> list[str]:
    """Return the number of jobs, and one line for each job or group of jobs that is not done."""
    unfinished = [job for job in jobs if job.status != DONE]
    if not unfinished:
        return [f"{counted(len(jobs), 'job')} in {sweep.folder}"]
    parts = [(str(job.folder), job.status, sweep.label(job), job.error) for job in unfinished[:MAX_LISTED]]
    single = ["  ".join(part for part in cells if part) for cells in parts]
    return [
        f"{counted(len(jobs), 'job')} in {sweep.folder}: {count_by_status(jobs)}",
        *(grouped_lines(unfinished) or single),
    ]


def outcome_lines(sweep: Sweep, jobs: Sequence[SweepJob], width: int = 12) -> list[str]:
    """Return lines with the result of a sweep as a whole: its best trial and its remote folder, if it has them."""
    remote = {} if sweep.address is None else {"remote": sweep.address}
    return [f"{name:<{width}}{text}" for name, text in {**best_trial(sweep.folder, jobs), **remote}.items()]


def best_trial(folder: Path, jobs: Sequence[SweepJob]) -> dict[str, str]:
    """Describe the best trial of a search, and its results file of Optuna; empty without such a file, or if every trial was pruned."""
    file = folder / RESULTS
    try:
        results = yaml.safe_load(file.read_text())
        best, value = results["best_params"], float(results["best_value"])
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return {}
    if not math.isfinite(value):  # every trial was pruned
        return {}
    chosen = [f"{name}={setting}" for name, setting in best.items()]
    name, source = OBJECTIVE_KEY, "from an earlier sweep of the study"
    for job in jobs:
        objective = _objective_value(job.folder) if set(chosen) <= set(job.overrides) else None
        if objective is not None and math.isclose(objective[1], value):
            name, source = objective[0], str(job.folder)
            break
    return {"best": "  ".join([source, *chosen, f"{name} = {value:.6g}"]), "written to": str(file)}


def _objective_value(folder: Path) -> tuple[str, float] | None:
    try:
        record = json.loads((folder / "run.json").read_text())
        name = record["config"].get(OBJECTIVE_KEY, "")
        numbers: Mapping[str, Any] = record if OBJECTIVE_KEY in record else {OBJECTIVE_KEY: record["metrics"].get(name)}
        return name, float(numbers[OBJECTIVE_KEY])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def grouped_lines(unfinished: Sequence[SweepJob]) -> list[str]:
    """Return one line for each status and error, the most frequent first; empty for at most `MAX_LISTED` jobs."""
    if len(unfinished) <= MAX_LISTED:
        return []
    jobs_by_cause: dict[tuple[str, str], list[str]] = {}
    for job in unfinished:
        jobs_by_cause.setdefault((job.status, job.error or ""), []).append(job.name)
    groups = sorted(jobs_by_cause.items(), key=lambda group: -len(group[1]))
    lines = []
    for (status, error), names in groups[:MAX_LISTED]:
        listed = ", ".join([*names[:MAX_NAMES], *(["..."] if len(names) > MAX_NAMES else [])])
        lines.append(f"{len(names)} {status}  {listed}  {error}".rstrip())
    more = sum(len(names) for _, names in groups[MAX_LISTED:])
    return [*lines, f"and {more} more"] if more else lines
