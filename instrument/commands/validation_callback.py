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

from ..config.hydra_internals import BASIC_SWEEPER
from ..errors import ConfigError, InstrumentError, Problem
from ..storage.folder_snapshot import Snapshot
from ..storage.lock import FolderLock
from ..storage.remote_folder import (
    REMOTE_KEY,
    SWEEP_RECORD,
    RemoteFolder,
    check_is_local,
    check_no_secret,
    check_remote,
    safe_message,
)
from ..storage.run_folder import check_writable, create_free_folder
from ..training.distributed.torchrun import check_processes, process_group, synced_errors
from ..training.sweep_jobs import (
    DONE,
    STOPPED,
    Sweep,
    expand_sweep,
    folder_override,
    job_lines,
    outcome_lines,
    overrides_of,
    sweep_overrides,
    values_of,
)
from ..training.sweep_objective import OBJECTIVE_KEY, check_search, is_search, read_objective
from .job import as_instrument_error, print_error, read_config, show_plan


class HydraCallback(Callback):
    """Hydra callback that stops an invalid configuration, or a command with `plan`, before a folder is created."""

    sweep_folder: ClassVar[Path | None] = None
    """Folder of the sweep that runs in this process; its summary is printed at the end. None if no sweep runs."""
    lock: ClassVar[FolderLock | None] = None
    """Lock of the sweep folder, held while the sweep runs."""
    snapshot: ClassVar[Snapshot | None] = None
    """Snapshot of the folder of the run or sweep, taken before it was used."""
    plan_folder: ClassVar[TemporaryDirectory[str] | None] = None
    """Temporary folder of a sweep whose plans are printed."""

    def __init__(self) -> None:
        self.arguments = sys.argv

    @classmethod
    def release_lock(cls) -> None:
        if cls.lock is not None:
            cls.lock.release()
        cls.sweep_folder = cls.lock = cls.snapshot = cls.plan_folder = None

    @classmethod
    def restore_folder(cls) -> bool:
        """Restore the folder of the run or sweep if no run was started in it. Return whether it was restored."""
        if cls.snapshot is None or cls.snapshot.has_new_run():
            return False
        if cls.sweep_folder is not None:
            if (address := Sweep(cls.sweep_folder).address) is not None:
                with suppress(Exception):  # The failed upload has already been reported.
                    RemoteFolder(address, REMOTE_KEY).remove(SWEEP_RECORD)
            print(f"no job was started; nothing is kept in {cls.sweep_folder}", file=sys.stderr)
        snapshot = cls.snapshot
        cls.release_lock()
        snapshot.restore()
        return True

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:  # noqa: ARG002
        """Check the configuration and reserve the folder of a single run, or print its plan and exit.

        In a distributed run, rank 0 chooses the folder for all processes.
        """
        processes = process_group()
        with _exit_on_error():
            folder = Path(config.hydra.run.dir)
            with synced_errors(processes):
                parsed, raw = read_config(config)
                read_objective(parsed.objective, raw.get("hooks"))
                check_remote(parsed.sink.remote)
                check_processes(parsed, processes)
                if parsed.plan:
                    show_plan(parsed, Path(parsed.resume) if parsed.resume else folder)
                    raise SystemExit(0)
                is_rank_zero = processes is None or processes.is_rank_zero
                if parsed.resume is not None and is_rank_zero:
                    check_writable(Path(parsed.resume), "resume")  # before Hydra opens its log there
                elif is_rank_zero:
                    check_is_local(folder, "hydra.run.dir")
                    HydraCallback.snapshot = Snapshot(folder)
                    create_free_folder(folder, "hydra.run.dir")
        with flag_override(config, "readonly", False):
            config.hydra.run.dir = parsed.resume or str(folder)
            if parsed.resume is not None:
                config.hydra.output_subdir = None  # keeps the record that Hydra wrote when the run started
            if processes is not None:
                config.hydra.run.dir = processes.exchange(config.hydra.run.dir)[0]
            if processes is not None and not processes.is_rank_zero:
                # Only rank 0 writes the record and the log.
                config.hydra.output_subdir = config.hydra.job_logging.root = None

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:  # noqa: ARG002
        """Check the configuration and reserve the folder of a sweep. If only the plans are requested, Hydra writes to a temporary one."""
        with _exit_on_error():
            check_sweep(config)
            check_no_secrets(config)
            check_objective(config)
            if is_search(config.hydra):
                check_search(config.hydra)
            prepare_launcher(config)
            if config.get("plan"):
                HydraCallback.plan_folder = TemporaryDirectory(prefix="instrument-plan-")
                set_sweep_folder(config, Path(HydraCallback.plan_folder.name))
            else:
                HydraCallback.sweep_folder = self._begin(config)

    def _begin(self, config: DictConfig) -> Path:
        folder = Path(config.hydra.sweep.dir)
        check_is_local(folder, "hydra.sweep.dir")
        snapshot = Snapshot(folder)
        create_free_folder(folder, "hydra.sweep.dir")
        set_sweep_folder(config, folder.absolute())
        try:
            with open(folder / SWEEP_RECORD, "x") as record:  # creating the file reserves the folder
                OmegaConf.save(config, record)
        except FileExistsError:
            message = "the folder already contains a sweep, and sweeps are never overwritten"
            fix = f"choose another folder, or run its unfinished jobs: python -m instrument.sweep {folder} --rerun"
            raise ConfigError(Problem("hydra.sweep.dir", message, given=str(folder), fix=fix)) from None
        HydraCallback.snapshot = snapshot
        upload_record(folder, Sweep(folder).address)
        HydraCallback.lock = FolderLock(folder)
        HydraCallback.lock.acquire()
        return folder

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:  # noqa: ARG002
        """Print the summary of a finished sweep, or remove the temporary folder of its plans."""
        if HydraCallback.plan_folder is not None:
            HydraCallback.plan_folder.cleanup()
            return
        if HydraCallback.sweep_folder is None:
            return
        sweep = Sweep(HydraCallback.sweep_folder)
        jobs = sweep.jobs()
        if config.hydra.sweeper["_target_"] != BASIC_SWEEPER and any(job.status not in (DONE, STOPPED) for job in jobs):
            has_started = HydraCallback.snapshot is None or HydraCallback.snapshot.has_new_run()
            raise SystemExit(1 if has_started else ConfigError.exit_code)
        print("", *job_lines(sweep, jobs), *outcome_lines(sweep, jobs), sep="\n")
        print(f"in Python   instrument.load({str(HydraCallback.sweep_folder)!r}).runs")
        from .. import report
        from ..storage.run_search import report_command

        with _exit_on_error():
            folder, makes_report = HydraCallback.sweep_folder, config.get("report")
            page = report.make(folder).save(folder / report.FILE) if makes_report else report_command(folder)
            print(f"report      {page}")

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:  # noqa: ARG002
        """Prepare the process of a job, which a launcher may have started in another folder."""
        sys.argv = self.arguments  # `run.json` records the command of the sweep.
        here = config.hydra.runtime.cwd
        if here not in sys.path:
            sys.path.insert(0, here)
        if not config.hydra.job.chdir and os.getcwd() != here:
            os.chdir(here)


@contextmanager
def _exit_on_error() -> Iterator[None]:
    """Print an error of the `with` block and exit. Hydra would turn an error of a callback into a warning and continue."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise SystemExit(print_error(as_instrument_error(error, sys.argv[1:]))) from None
    except OSError as error:
        raise SystemExit(print_error(InstrumentError(f"{error.filename}: {error.strerror}"))) from None
    except Exception as error:
        raise SystemExit(print_error(error)) from None


def set_sweep_folder(config: DictConfig, folder: Path) -> None:
    """Set the sweep folder in the configuration and in the overrides of all jobs, whose processes may run elsewhere."""
    with flag_override(config, "readonly", False):
        config.hydra.sweep.dir = str(folder)
        config.hydra.overrides.hydra.append(folder_override("hydra.sweep.dir", folder))


def upload_record(folder: Path, address: str | None) -> None:
    """Upload the record of a sweep to the remote folder of its jobs, so that missing jobs are known there.

    Raise a ConfigError if the remote folder already contains a sweep. Any other error is printed as a warning.
    """
    if address is None:
        return
    try:
        remote = RemoteFolder(address, REMOTE_KEY)
        if remote.read(SWEEP_RECORD) is not None:
            message = "the folder already contains a sweep, and sweeps are never overwritten"
            raise ConfigError(Problem(REMOTE_KEY, message, given=address))
        remote.put(folder / SWEEP_RECORD, SWEEP_RECORD)
    except ConfigError:
        raise
    except Exception as error:  # Each storage client raises its own types. Each job tries again.
        print(f"warning: {SWEEP_RECORD} was not uploaded to {address}: {safe_message(error)}", file=sys.stderr)


SLURM, SLURM_LOCAL = "SlurmLauncher", "LocalLauncher"
THREADS = "OMP_NUM_THREADS"
RUN_DIR, SWEEP_DIR = "hydra.run.dir", "hydra.sweep.dir"


def check_sweep(config: DictConfig) -> None:
    """Check the launcher, the folder and the jobs of a sweep, and that torchrun did not start this process."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        if os.environ.get("RANK", "0") != "0":
            raise SystemExit(ConfigError.exit_code)  # Only rank 0 prints the error.
        message = "each process of torchrun would start its own sweep"
        fix = "run the sweep with one process per job, or run one torchrun command per job (docs/sweeps.md)"
        raise ConfigError(Problem("--multirun", message, given="torchrun ... -m instrument -m", fix=fix))
    folders = {override.partition("=")[0].lstrip("+"): override for override in overrides_of(config.hydra, "hydra")}
    if RUN_DIR in folders and not folders.keys() & {SWEEP_DIR, "hydra.sweep.subdir"}:
        message = "a sweep does not use this folder; its jobs are in subfolders of hydra.sweep.dir"
        written = folders[RUN_DIR]
        raise ConfigError(Problem(RUN_DIR, message, given=written, fix=f"set {SWEEP_DIR}={written.partition('=')[2]}"))
    launcher = config.hydra.launcher["_target_"].rpartition(".")[2]
    if launcher == SLURM and shutil.which("srun") is None:
        message = "Slurm is not available: its command srun is not on the PATH"
        fix = "use a machine that can submit Slurm jobs; or slurm_local, which starts local processes instead"
        given = config.hydra.runtime.choices["hydra/launcher"]
        raise ConfigError(Problem("hydra/launcher", message, given=given, fix=fix))
    if config.hydra.sweeper["_target_"] == BASIC_SWEEPER and not expand_sweep(config.hydra):
        message = "the sweep has no jobs: one of its overrides has no values"
        raise ConfigError(Problem("", message, given=overrides_of(config.hydra, "task")))


def check_no_secrets(config: DictConfig) -> None:
    """Check that `sink.remote` contains no credentials, in the configuration or in an override, before it is saved."""
    check_remote(OmegaConf.select(config, REMOTE_KEY))
    for override in overrides_of(config.hydra, "task"):
        if REMOTE_KEY in override:
            check_no_secret(override.replace("\\", ""), REMOTE_KEY)


def check_objective(config: DictConfig) -> None:
    """Validate an objective that is the same for all jobs. An objective that differs is validated by each job."""
    plain: Any = OmegaConf.to_container(config, resolve=False)
    written = plain.get(OBJECTIVE_KEY)
    is_swept = OBJECTIVE_KEY in values_of(sweep_overrides(config.hydra))
    if isinstance(written, str) and not is_swept and "${" not in written and written != "???":
        read_objective(written, plain.get("hooks"))


def prepare_launcher(config: DictConfig) -> None:
    """Set the threads per job, which a launcher leaves open."""
    launcher = config.hydra.launcher["_target_"].rpartition(".")[2]
    if launcher == SLURM_LOCAL and config.hydra.sweeper["_target_"] == BASIC_SWEEPER and THREADS not in os.environ:
        share = max((os.cpu_count() or 1) // len(expand_sweep(config.hydra)), 1)  # All jobs run concurrently.
        config.hydra.overrides.hydra.append(f"++hydra.job.env_set.{THREADS}='{share}'")
