"""Between Hydra and a run: one job, and how the user is told what went wrong in it."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from ...errors import ConfigError, InstrumentError, Mistake
from ...spec.config import RunConfig
from ..folder import read_record
from ..ranks.torchrun import leads
from ..sweep.jobs import BASIC, REFUSED, Sweep
from ..sweep.objective import read_objective
from .composition import composition_mistake
from .imports import importing
from .reading import read_config, read_overrides, swept_overrides
from .search_path import conf_folder


class JobFailedError(Exception):
    """A job of a sweep failed, and the user was told; Hydra raises it when all jobs have been tried."""

    def __init__(self, exit_code: int, folder: Path) -> None:
        super().__init__(f"the job in {folder} failed")
        self.exit_code = exit_code
        self.folder = folder

    def __reduce__(self) -> tuple[type[JobFailedError], tuple[int, Path]]:
        return type(self), (self.exit_code, self.folder)  # on its way from a launcher's process


def job(config: DictConfig) -> float | None:
    """One job: the whole of a single run, or one of a sweep.

    Returns:
        The number that `objective` names, for a sweeper; None where there is none, or where it is not finite.

    Raises:
        JobFailedError: In a sweep, where the other jobs go on; a single run ends the process.
    """
    with told() as place:
        if place.swept and config.get("resume") is not None and not _is_own(config.resume, place):
            raise ConfigError(Mistake("resume", "runs are resumed one at a time, without -m", written=config.resume))
        parsed, raw = read_config(config)
        objective = read_objective(parsed.objective)
        if parsed.plan:
            show_plan(parsed, None)
            return None
        with importing():
            from ..runner import run
            from ..sweep.judgement import judge
            from ..terminal import Terminal

        overrides = read_overrides()
        label = swept_overrides(Sweep(place.sweep).swept, _begun_with(parsed, overrides)) if place.sweep else ""
        terminal = Terminal(quiet=parsed.quiet, brief=place.swept, job=label)
        result = run(parsed, place.folder, terminal, raw=raw, overrides=overrides)
        searched = HydraConfig.get().sweeper["_target_"] != BASIC
        return judge(objective, place.folder, result.metrics, searched=searched) if place.swept else None


def _begun_with(config: RunConfig, overrides: Mapping[str, Any]) -> Mapping[str, Any]:
    """The overrides that a job was begun with, also where it goes on."""
    return overrides if config.resume is None else read_record(Path(config.resume), "resume").get("overrides", {})


def _is_own(resume: str, place: Place) -> bool:
    """Whether a job of a sweep goes on with what it left itself."""
    return Path(resume).resolve() == place.folder.resolve()


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
    """Where a job works: its folder, and that of the sweep that it is one of."""

    folder: Path
    sweep: Path | None

    @property
    def swept(self) -> bool:
        """Whether it is one of a sweep."""
        return self.sweep is not None


@contextmanager
def told() -> Iterator[Place]:
    """Tell the user, in words, about what goes wrong inside, and where what was recorded is.

    Raises:
        JobFailedError: In a sweep, where the other jobs go on; a single run ends the process.
    """
    folder = Path(HydraConfig.get().runtime.output_dir)
    if Path.cwd() in folder.parents:
        folder = Path(os.path.relpath(folder))
    swept = HydraConfig.get().mode == RunMode.MULTIRUN
    place = Place(folder, Path(HydraConfig.get().sweep.dir) if swept else None)
    try:
        with termination_raised():
            yield place
    except KeyboardInterrupt as interrupt:
        terminated = isinstance(interrupt, Terminated)
        how = "terminated by SIGTERM" if terminated else "interrupted"
        if leads():
            print(f"\n{how}: {_left_in(folder)}", file=sys.stderr)
        raise SystemExit(1 if terminated else 130) from None
    except Exception as error:
        code = complain(error)
        if code == 1:
            print(_left_in(folder), file=sys.stderr)
        if place.swept:
            if not (folder / "run.json").exists():
                (folder / REFUSED).write_text(f"{str(error) or type(error).__name__}\n")
            print(f"this was the job in {folder}; the other jobs go on", file=sys.stderr)
            raise JobFailedError(code, folder) from error
        raise SystemExit(code) from None


def _left_in(folder: Path) -> str:
    """What a job that ended early has left, in words."""
    try:
        (folder / "run.json").stat()
    except (FileNotFoundError, NotADirectoryError):
        return f"nothing was recorded in {folder}" if folder.is_dir() else f"nothing is saved: {folder} is gone"
    except OSError as error:
        return f"what was recorded in {folder} cannot be seen: {error.strerror}"
    return f"what was recorded so far is in {folder}"


def refused(error: Exception, arguments: Sequence[str]) -> InstrumentError:
    """An error of Hydra's while it composed a configuration, or of a launcher or sweeper, as ours."""
    if not isinstance(error, HydraException | OmegaConfBaseException) and (plugin := _plugin_of(error)):
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return InstrumentError(f"{plugin} failed: {type(error).__name__}: {lines[0] if lines else 'it says no more'}")
    overrides = [argument for argument in arguments if not argument.startswith("-")]
    return ConfigError(composition_mistake(error, overrides, [conf_folder(), Path.cwd() / "conf"]))


def _plugin_of(error: Exception) -> str | None:
    """The plugin of Hydra's that an error came through: `hydra_ray_launcher`."""
    frames = traceback.extract_tb(error.__traceback__)
    found = [match[1] for frame in frames if (match := re.search(r"hydra_plugins[\\/](\w+)", frame.filename))]
    return found[-1] if found else None


def show_plan(config: RunConfig, folder: Path | None) -> None:
    """Print what would be hooked, recorded and spent, and the folder that a run would be in."""
    with importing():
        from ..device import process_state
        from ..experiment import prepare
        from ..rehearsal import rehearse
        from ..terminal import Terminal

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
