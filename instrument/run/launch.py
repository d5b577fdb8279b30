"""Between Hydra and a run: where configurations are found, what is checked before a folder is made, one job."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, flag_override

from ..errors import ConfigError, InstrumentError, Mistake
from ..spec.config import RunConfig
from .composition import composition_mistake
from .folder import refuse_taken
from .reading import read_config, read_overrides, swept_overrides


class JobFailedError(Exception):
    """A job of a sweep failed, and the user was told; Hydra raises it when all jobs have been tried."""

    def __init__(self, exit_code: int, folder: Path) -> None:
        super().__init__(f"the job in {folder} failed")
        self.exit_code = exit_code


def conf_folder() -> Path:
    """The folder of the package's own configurations: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).parents[1]
    return next(folder for folder in (package / "conf", package.parent / "conf") if (folder / "config.yaml").exists())


class OwnConf(SearchPathPlugin):
    """Finds experiments in a folder `conf` of the working directory, behind those of the package."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Hydra's entry point."""
        own, packaged = Path.cwd() / "conf", conf_folder()
        if not own.is_dir() or own.samefile(packaged):
            return
        search_path.append("working directory", f"file://{own}")
        for file in sorted(own.rglob("*.yaml")):
            same = packaged / file.relative_to(own)
            if same.exists() and same.read_bytes() != file.read_bytes():
                name = f"conf/{file.relative_to(own)}"
                print(f"warning: {name} is not used: the package has one of this name; choose another", file=sys.stderr)


class Guard(Callback):
    """Stops before Hydra makes a folder: at a mistake in the configuration, or when only the plan is asked for."""

    scratch: TemporaryDirectory[str] | None = None

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:  # noqa: ARG002
        """A single run is about to start."""
        try:
            parsed, _ = read_config(config)
            if parsed.plan:
                show_plan(parsed, Path(parsed.resume or config.hydra.run.dir))
                raise SystemExit(0)
            if parsed.resume is None:
                refuse_taken(Path(config.hydra.run.dir), "hydra.run.dir")
            else:
                with flag_override(config, "readonly", False):
                    config.hydra.run.dir = parsed.resume
                    config.hydra.output_subdir = None  # Hydra's record of the run's beginning stays as it is
        except InstrumentError as error:
            raise SystemExit(complain(error)) from None

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:  # noqa: ARG002
        """A sweep is about to start; where only the plans are asked for, Hydra gets a folder that will not stay."""
        if config.get("plan"):
            self.scratch = TemporaryDirectory(prefix="instrument-plan-")
            with flag_override(config, "readonly", False):
                config.hydra.sweep.dir = self.scratch.name
                config.hydra.overrides.hydra.append(f"hydra.sweep.dir={self.scratch.name}")
            return
        try:
            folder = Path(config.hydra.sweep.dir)
            if (folder / "multirun.yaml").exists():
                raise ConfigError(
                    Mistake(
                        "hydra.sweep.dir",
                        "there is a sweep in this folder already, and none is ever overwritten",
                        written=str(folder),
                    )
                )
            refuse_taken(folder, "hydra.sweep.dir")
        except InstrumentError as error:
            raise SystemExit(complain(error)) from None

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:  # noqa: ARG002
        """All jobs of a sweep are over."""
        if self.scratch is not None:
            self.scratch.cleanup()
            return
        folder = Path(config.hydra.sweep.dir)
        jobs = len(list(folder.glob("*/run.json")))
        if not jobs:
            raise SystemExit(
                complain(
                    ConfigError(
                        Mistake(
                            "",
                            "the sweep has no jobs: one of its overrides has no values",
                            written=list(config.hydra.overrides.task),
                        )
                    )
                )
            )
        if jobs:
            print(f"\n{jobs} jobs in {folder}")
            print(f"in Python   instrument.load({str(folder)!r}).runs")
            print(f"report      {_sweep_report(config, folder)}")


def _sweep_report(config: DictConfig, folder: Path) -> str:
    """The file of a sweep's report where one is asked for, else the command that makes it."""
    from ..report import FILE, command_for, make

    return str(make(folder).save(folder / FILE)) if config.get("report") else command_for(folder)


def job(config: DictConfig) -> float | None:
    """One job: the whole of a single run, or one of a sweep.

    Returns:
        The loss of the last evaluation, which a sweeper may minimise.

    Raises:
        JobFailedError: In a sweep, where the other jobs go on; a single run ends the process.
    """
    with told() as place:
        if place.swept and config.get("resume") is not None:
            raise ConfigError(Mistake("resume", "runs are resumed one at a time, without -m", written=config.resume))
        parsed, raw = read_config(config)
        if parsed.plan:
            show_plan(parsed, None)
            return None
        from .runner import run
        from .terminal import Terminal

        terminal = Terminal(quiet=parsed.quiet, brief=place.swept, job=swept_overrides(sys.argv[1:], read_overrides()))
        return run(parsed, place.folder, terminal, raw=raw, overrides=read_overrides()).metrics.get("loss")


class Terminated(KeyboardInterrupt):
    """SIGTERM, as a batch system sends it before it kills."""


@contextmanager
def termination_raised() -> Iterator[None]:
    """SIGTERM is raised as an error inside, so that files are closed and the user is told."""

    def stop(number: int, frame: object) -> None:  # noqa: ARG001
        raise Terminated("terminated by SIGTERM")

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may say what a signal does
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@dataclass(frozen=True)
class Place:
    """Where a job works: its folder, and whether it is one of a sweep."""

    folder: Path
    swept: bool


@contextmanager
def told() -> Iterator[Place]:
    """Tell the user, in words, about what goes wrong inside, and where what was recorded is.

    Raises:
        JobFailedError: In a sweep, where the other jobs go on; a single run ends the process.
    """
    folder = Path(HydraConfig.get().runtime.output_dir)
    folder = Path(os.path.relpath(folder)) if folder.is_relative_to(Path.cwd()) else folder
    place = Place(folder, HydraConfig.get().mode == RunMode.MULTIRUN)
    try:
        with termination_raised():
            yield place
    except KeyboardInterrupt as interrupt:
        terminated = isinstance(interrupt, Terminated)
        how = "terminated by SIGTERM" if terminated else "interrupted"
        print(f"\n{how}: what was recorded so far is in {folder}", file=sys.stderr)
        raise SystemExit(1 if terminated else 130) from None
    except Exception as error:
        code = complain(error)
        if code == 1:
            print(f"what was recorded so far is in {folder}", file=sys.stderr)
        if place.swept:
            print(f"this was the job in {folder}; the other jobs go on", file=sys.stderr)
            raise JobFailedError(code, folder) from error
        raise SystemExit(code) from None


def refused(error: Exception, arguments: Sequence[str]) -> ConfigError:
    """An error of Hydra's while it composed a configuration, as ours."""
    overrides = [argument for argument in arguments if not argument.startswith("-")]
    return ConfigError(composition_mistake(error, overrides, [conf_folder(), Path.cwd() / "conf"]))


def show_plan(config: RunConfig, folder: Path | None) -> None:
    """Print what would be hooked, recorded and spent, and the folder that a run would be in."""
    from .device import process_state
    from .experiment import prepare
    from .rehearsal import rehearse
    from .terminal import Terminal

    with process_state(seed=config.seed, deterministic=config.deterministic):
        experiment = prepare(config)
        Terminal().plan(experiment, rehearse(experiment), folder)


def complain(error: Exception) -> int:
    """Tell the user about an error; gives the exit code. Only what no hook and no check has put into words has a traceback."""
    if isinstance(error, InstrumentError):
        print(f"\n{error}\n", file=sys.stderr)
        return error.exit_code
    traceback.print_exception(error)
    return InstrumentError.exit_code
