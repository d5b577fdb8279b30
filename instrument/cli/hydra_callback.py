"""Hydra callback that checks a configuration before Hydra creates a folder, and that reserves the folder."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException

from ..distributed.torchrun import agreed, check_processes, joined
from ..errors import ConfigError, InstrumentError, Mistake
from ..folders.run_folder import refuse_taken
from ..folders.snapshot import Snapshot
from ..folders.unique_names import claim, is_named_by_clock
from ..sinks.client_errors import told
from ..sinks.lock import FolderLock
from ..sinks.remote import REMOTE, SWEEP_RECORD, RemoteFolder, check_remote, refuse_address, refuse_secret
from ..sweeps.jobs import BASIC, Sweep, composed, folder_override, keys_of, overrides_of, swept_in
from ..sweeps.objective import KEY, read_objective
from ..sweeps.search import check_search, is_search
from ..sweeps.summary import outcome
from .job import complain, refused, show_plan
from .reading import read_config

SLURM, SLURM_LOCAL = "SlurmLauncher", "LocalLauncher"
RAY = "RayLauncher"
THREADS = "OMP_NUM_THREADS"


class Guard(Callback):
    """Hydra callback that stops an invalid configuration, or a command with `plan`, before a folder is created."""

    sweep: ClassVar[Path | None] = None
    """Folder of the sweep that runs in this process; its summary is printed at the end. None if no sweep runs."""
    lock: ClassVar[FolderLock | None] = None
    """Lock of the sweep folder, held while the sweep runs."""
    before: ClassVar[Snapshot | None] = None
    """Snapshot of the folder of the run or sweep, taken before it was used."""

    def __init__(self) -> None:
        self.scratch: TemporaryDirectory[str] | None = None
        self.arguments = sys.argv

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for the processes of a launcher, which have no scratch folder to remove."""
        return {"scratch": None, "arguments": self.arguments}

    @classmethod
    def let_go(cls) -> None:
        """Release the sweep folder after the sweep has ended or failed."""
        if cls.lock is not None:
            cls.lock.release()
        cls.sweep = cls.lock = cls.before = None

    @classmethod
    def withdraw(cls) -> bool:
        """Restore the folder of the run or sweep if no run was started in it.

        Returns:
            Whether the folder was restored.
        """
        if cls.before is None or cls.before.has_new_run():
            return False
        if cls.sweep is not None:
            _take_back_record(Sweep(cls.sweep).address)
            print(f"no job was begun, and nothing is kept in {cls.sweep}", file=sys.stderr)
        before = cls.before
        cls.let_go()
        before.restore()
        return True

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:  # noqa: ARG002
        """Check the configuration and reserve the folder of a single run, or print its plan and exit.

        In a distributed run, rank 0 chooses the folder for all processes.

        Args:
            config: Composed configuration.

        Raises:
            SystemExit: The configuration is invalid, or only the plan is requested.
        """
        processes = joined()
        with _stopping():
            folder = Path(config.hydra.run.dir)
            with agreed(processes):
                parsed, _ = read_config(config)
                read_objective(parsed.objective)
                check_remote(parsed.sink.remote)
                check_processes(parsed, processes)
                if parsed.plan:
                    show_plan(parsed, Path(parsed.resume) if parsed.resume else folder)
                    raise SystemExit(0)
                if parsed.resume is None and (processes is None or processes.leads):
                    refuse_address(folder, "hydra.run.dir")
                    folder, Guard.before = _take(folder, named_by_clock=is_named_by_clock(config.hydra.run))
                    refuse_taken(folder, "hydra.run.dir")
        with flag_override(config, "readonly", False):
            config.hydra.run.dir = parsed.resume or str(folder)
            if parsed.resume is not None:
                config.hydra.output_subdir = None  # keeps the record that Hydra wrote when the run started
            if processes is not None:
                config.hydra.run.dir = processes.exchange(config.hydra.run.dir)[0]
            if processes is not None and not processes.leads:
                # Only rank 0 writes the record and the log.
                config.hydra.output_subdir = config.hydra.job_logging.root = None

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:  # noqa: ARG002
        """Check the configuration and reserve the folder of a sweep.

        If only the plans are requested, Hydra writes to a temporary folder.

        Args:
            config: Composed configuration of the sweep.

        Raises:
            SystemExit: The configuration is invalid.
        """
        with _stopping():
            _refuse_what_cannot_be_swept(config)
            _refuse_secrets(config)
            _check_objective(config)
            if is_search(config.hydra):
                check_search(config.hydra)
            _prepare_launcher(config)
            if config.get("plan"):
                self.scratch = TemporaryDirectory(prefix="instrument-plan-")
                _put(config, Path(self.scratch.name))
            else:
                Guard.sweep = self._begin(config)

    def _begin(self, config: DictConfig) -> Path:
        """Reserve the folder of the sweep, write and upload the sweep record, and lock the folder.

        Raises:
            ConfigError: The folder cannot be used, or it already contains a sweep.
        """
        folder = Path(config.hydra.sweep.dir)
        refuse_address(folder, "hydra.sweep.dir")
        folder, before = _take(folder, named_by_clock=is_named_by_clock(config.hydra.sweep))
        refuse_taken(folder, "hydra.sweep.dir")
        _put(config, folder.absolute())
        try:
            with open(folder / SWEEP_RECORD, "x") as record:  # creating the file reserves the folder
                OmegaConf.save(config, record)
        except FileExistsError:
            problem = "there is a sweep in this folder already, and none is ever overwritten"
            raise ConfigError(Mistake("hydra.sweep.dir", problem, written=str(folder))) from None
        Guard.before = before
        _send_record(folder, Sweep(folder).address)
        Guard.lock = FolderLock(folder)
        Guard.lock.acquire()
        return folder

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:  # noqa: ARG002
        """Print the summary of a finished sweep, or remove the temporary folder of its plans."""
        if self.scratch is not None:
            self.scratch.cleanup()
            return
        if Guard.sweep is None:
            return
        sweep = Sweep(Guard.sweep)
        jobs = sweep.jobs()
        if config.hydra.sweeper["_target_"] != BASIC and any(job.status != "done" for job in jobs):
            is_begun = Guard.before is None or Guard.before.has_new_run()
            raise SystemExit(1 if is_begun else ConfigError.exit_code)
        print(f"\n{len(jobs)} jobs in {Guard.sweep}")
        for name, text in outcome(sweep, jobs).items():
            print(f"{name:<12}{text}")
        print(f"in Python   instrument.load({str(Guard.sweep)!r}).runs")
        with _stopping():
            print(f"report      {_sweep_report(config, Guard.sweep)}")

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:  # noqa: ARG002
        """Prepare the process of a job, which a launcher may have started in another folder.

        Args:
            config: Composed configuration of the job.
        """
        sys.argv = self.arguments  # `run.json` records the command of the sweep.
        here = config.hydra.runtime.cwd
        if here not in sys.path:
            sys.path.insert(0, here)
        if not config.hydra.job.chdir and os.getcwd() != here:
            os.chdir(here)


def _take(folder: Path, *, named_by_clock: bool) -> tuple[Path, Snapshot]:
    """Reserve a folder.

    Args:
        folder: Requested folder.
        named_by_clock: Whether the name contains the time. If so, and the folder exists, a folder next to it is
            created.

    Returns:
        The reserved folder, and a snapshot of its state before.
    """
    before = Snapshot.take(folder)
    own = claim(folder) if named_by_clock else folder
    if own != folder:
        before = Snapshot(own.absolute(), (own.absolute(),), frozenset(), {})
    return own, before


@contextmanager
def _stopping() -> Iterator[None]:
    """Print an error of the `with` block and exit. Hydra would turn an error of a callback into a warning and continue.

    Raises:
        SystemExit: The block raised an error; with the exit code of that error.
    """
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise SystemExit(complain(refused(error, sys.argv[1:]))) from None
    except OSError as error:
        raise SystemExit(complain(InstrumentError(f"{error.filename}: {error.strerror}"))) from None
    except Exception as error:
        raise SystemExit(complain(error)) from None


def _refuse_what_cannot_be_swept(config: DictConfig) -> None:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        if os.environ.get("RANK", "0") != "0":
            raise SystemExit(ConfigError.exit_code)  # Only rank 0 prints the error.
        raise ConfigError(
            Mistake(
                "--multirun",
                "each of torchrun's processes would make a sweep of its own",
                written="torchrun ... -m instrument -m",
                allowed="a sweep of one process a job, or a torchrun command for each job (docs/sweeps.md)",
            )
        )
    launcher = config.hydra.launcher["_target_"].rpartition(".")[2]
    if launcher == SLURM and shutil.which("srun") is None:
        raise ConfigError(
            Mistake(
                "hydra/launcher",
                "there is no Slurm here: its command srun is not on the PATH",
                written=config.hydra.runtime.choices["hydra/launcher"],
                allowed="on a machine that submits to Slurm; slurm_local tries the same with processes of this one",
            )
        )
    if config.hydra.sweeper["_target_"] == BASIC and not composed(config.hydra):
        raise ConfigError(
            Mistake(
                "",
                "the sweep has no jobs: one of its overrides has no values",
                written=overrides_of(config.hydra, "task"),
            )
        )


def _prepare_launcher(config: DictConfig) -> None:
    """Set defaults that a launcher leaves open: threads per job, and the terminal output of several jobs."""
    launcher = config.hydra.launcher["_target_"].rpartition(".")[2]
    if launcher == RAY:
        os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # keeps similar lines of different jobs
        if not sys.stdout.isatty():
            os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    if launcher == SLURM_LOCAL and config.hydra.sweeper["_target_"] == BASIC and THREADS not in os.environ:
        share = max((os.cpu_count() or 1) // len(composed(config.hydra)), 1)  # All jobs run concurrently.
        config.hydra.overrides.hydra.append(f"++hydra.job.env_set.{THREADS}='{share}'")


def _refuse_secrets(config: DictConfig) -> None:
    """Check that `sink.remote` contains no credentials, in the configuration or in an override, before it is saved.

    Raises:
        ConfigError: An address contains credentials or is invalid.
    """
    check_remote(OmegaConf.select(config, REMOTE))
    for override in overrides_of(config.hydra, "task"):
        if REMOTE in override:
            refuse_secret(override.replace("\\", ""), REMOTE)


def _check_objective(config: DictConfig) -> None:
    """Validate an objective that is the same for all jobs. An objective that differs is validated by each job.

    Raises:
        ConfigError: The objective is invalid.
    """
    plain: Any = OmegaConf.to_container(config, resolve=False)
    written = plain.get(KEY)
    is_swept = KEY in keys_of(swept_in(config.hydra))
    if isinstance(written, str) and not is_swept and "${" not in written and written != "???":
        read_objective(written)


def _put(config: DictConfig, folder: Path) -> None:
    """Set the sweep folder in the configuration and in the overrides of all jobs, whose processes may run elsewhere."""
    with flag_override(config, "readonly", False):
        config.hydra.sweep.dir = str(folder)
        config.hydra.overrides.hydra.append(folder_override("hydra.sweep.dir", folder))


def _send_record(folder: Path, address: str | None) -> None:
    """Upload the record of a sweep to the remote folder of its jobs, so that missing jobs are known there.

    Args:
        folder: Local folder of the sweep.
        address: Remote folder of the sweep; None if nothing is uploaded.

    Raises:
        ConfigError: The remote folder already contains a sweep. Any other error is printed as a warning.
    """
    if address is None:
        return
    try:
        remote = RemoteFolder(address, REMOTE)
        if remote.read(SWEEP_RECORD) is not None:
            problem = "there is a sweep in this folder already, and none is ever overwritten"
            raise ConfigError(Mistake(REMOTE, problem, written=address))
        remote.put(folder / SWEEP_RECORD, SWEEP_RECORD)
    except ConfigError:
        raise
    except Exception as error:  # Each storage client raises its own types. Each job tries again.
        print(f"warning: {SWEEP_RECORD} is not in {address}: {told(error)}", file=sys.stderr)


def _take_back_record(address: str | None) -> None:
    """Remove the uploaded record of a sweep in which no job was started."""
    if address is not None:
        with suppress(Exception):  # The failed upload has already been reported.
            RemoteFolder(address, REMOTE).remove(SWEEP_RECORD)


def _sweep_report(config: DictConfig, folder: Path) -> str:
    """Return the path of the report of a sweep if `report` is set, else the command that creates it."""
    from .. import report

    return str(report.make(folder).save(folder / report.FILE)) if config.get("report") else report.command_for(folder)
