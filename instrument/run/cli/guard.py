"""What stands between Hydra and its folders: mistakes are told before one is made, and no folder is anybody else's."""

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

from ...errors import ConfigError, InstrumentError, Mistake
from ...sinks.client_errors import told
from ...sinks.lock import FolderLock
from ...sinks.remote import REMOTE, SWEEP_RECORD, RemoteFolder, check_remote, refuse_address, refuse_secret
from ..folder import refuse_taken
from ..ranks.torchrun import agreed, check_processes, joined
from ..snapshot import Snapshot
from ..sweep.claims import claim, is_named_by_clock
from ..sweep.jobs import BASIC, Sweep, composed, folder_override, keys_of, overrides_of, swept_in
from ..sweep.objective import KEY, read_objective
from ..sweep.search import check_search, is_search
from ..sweep.told import outcome
from .launch import complain, refused, show_plan
from .reading import read_config

SLURM, SLURM_LOCAL = "SlurmLauncher", "LocalLauncher"
RAY = "RayLauncher"
THREADS = "OMP_NUM_THREADS"


class Guard(Callback):
    """Stops before Hydra makes a folder: at a mistake in the configuration, or when only the plan is asked for."""

    sweep: ClassVar[Path | None] = None
    """The folder of the sweep that goes on in this process, for whoever has to tell how it ended."""
    lock: ClassVar[FolderLock | None] = None
    """What holds it."""
    before: ClassVar[Snapshot | None] = None
    """What the folder of the run, or of the sweep, was before."""

    def __init__(self) -> None:
        self.scratch: TemporaryDirectory[str] | None = None
        self.arguments = sys.argv

    def __getstate__(self) -> dict[str, Any]:
        """For the processes of a launcher, which have nothing to clean up."""
        return {"scratch": None, "arguments": self.arguments}

    @classmethod
    def let_go(cls) -> None:
        """The sweep of this process is over, however it ended."""
        if cls.lock is not None:
            cls.lock.release()
        cls.sweep = cls.lock = cls.before = None

    @classmethod
    def withdraw(cls) -> bool:
        """Leave the folder as it was, where no run was begun in it; whether that is so."""
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
        """A single run is about to start; it may be one process of several."""
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
                config.hydra.output_subdir = None  # Hydra's record of the run's beginning stays as it is
            if processes is not None:
                config.hydra.run.dir = processes.exchange(config.hydra.run.dir)[0]
            if processes is not None and not processes.leads:
                config.hydra.output_subdir = config.hydra.job_logging.root = None  # one record, one log

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:  # noqa: ARG002
        """A sweep is about to start; where only the plans are asked for, Hydra gets a folder that will not stay."""
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
        """Take a folder for the sweep, and hold it as long as this process lives."""
        folder = Path(config.hydra.sweep.dir)
        refuse_address(folder, "hydra.sweep.dir")
        folder, before = _take(folder, named_by_clock=is_named_by_clock(config.hydra.sweep))
        refuse_taken(folder, "hydra.sweep.dir")
        _put(config, folder.absolute())
        try:
            with open(folder / SWEEP_RECORD, "x") as record:  # whoever makes this file has the folder
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
        """All jobs of a sweep are over."""
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
        """A job is about to start, perhaps in a process that a launcher started in another folder."""
        sys.argv = self.arguments  # what run.json says that it was started by
        here = config.hydra.runtime.cwd
        if here not in sys.path:
            sys.path.insert(0, here)
        if not config.hydra.job.chdir and os.getcwd() != here:
            os.chdir(here)


def _take(folder: Path, *, named_by_clock: bool) -> tuple[Path, Snapshot]:
    """The folder to use, and what it was before: the one asked for, or one next to it where another process has that one."""
    before = Snapshot.take(folder)
    own = claim(folder) if named_by_clock else folder
    if own != folder:
        before = Snapshot(own.absolute(), (own.absolute(),), frozenset(), {})
    return own, before


@contextmanager
def _stopping() -> Iterator[None]:
    """What goes wrong inside is told, and ends the process: Hydra would warn of it, and go on."""
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
            raise SystemExit(ConfigError.exit_code)  # one of them tells
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
    """What a launcher leaves open: who has which cores, and how lines of several jobs look on one terminal."""
    launcher = config.hydra.launcher["_target_"].rpartition(".")[2]
    if launcher == RAY:
        os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # lines of two jobs that are much alike are two lines
        if not sys.stdout.isatty():
            os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    if launcher == SLURM_LOCAL and config.hydra.sweeper["_target_"] == BASIC and THREADS not in os.environ:
        share = max((os.cpu_count() or 1) // len(composed(config.hydra)), 1)  # all jobs run at once
        config.hydra.overrides.hydra.append(f"++hydra.job.env_set.{THREADS}='{share}'")


def _refuse_secrets(config: DictConfig) -> None:
    """Stop at credentials in `sink.remote`, also in one of several that are swept over, before they are written down."""
    check_remote(OmegaConf.select(config, REMOTE))
    for override in overrides_of(config.hydra, "task"):
        if REMOTE in override:
            refuse_secret(override.replace("\\", ""), REMOTE)


def _check_objective(config: DictConfig) -> None:
    """Stop at an objective that cannot be meant, where it is the same for all jobs; each job looks at one that is not."""
    plain: Any = OmegaConf.to_container(config, resolve=False)
    written = plain.get(KEY)
    is_swept = KEY in keys_of(swept_in(config.hydra))
    if isinstance(written, str) and not is_swept and "${" not in written and written != "???":
        read_objective(written)


def _put(config: DictConfig, folder: Path) -> None:
    """Say where the sweep is, once for all jobs, wherever their processes are."""
    with flag_override(config, "readonly", False):
        config.hydra.sweep.dir = str(folder)
        config.hydra.overrides.hydra.append(folder_override("hydra.sweep.dir", folder))


def _send_record(folder: Path, address: str | None) -> None:
    """Send the record of a sweep to where its jobs send theirs, so that it is known there which are missing."""
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
    except Exception as error:  # of many kinds: whatever a client raises; each job tries again, and tells
        print(f"warning: {SWEEP_RECORD} is not in {address}: {told(error)}", file=sys.stderr)


def _take_back_record(address: str | None) -> None:
    """Remove the record of a sweep of which no job was begun from where it was sent."""
    if address is not None:
        with suppress(Exception):  # of many kinds: whatever a client raises; that it could not be sent was told
            RemoteFolder(address, REMOTE).remove(SWEEP_RECORD)


def _sweep_report(config: DictConfig, folder: Path) -> str:
    """The file of a sweep's report where one is asked for, else the command that makes it."""
    from ... import report

    return str(report.make(folder).save(folder / report.FILE)) if config.get("report") else report.command_for(folder)
