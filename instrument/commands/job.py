"""One job: a single run or a job of a sweep, which a launcher may start again, with its error reporting."""

from __future__ import annotations

import atexit
import gc
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from itertools import count
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException

from ..config.experiment import RunConfig
from ..config.hydra_internals import BASIC_SWEEPER
from ..config.parse import parse_config
from ..config.spec_file import conf_folder
from ..errors import ConfigError, InstrumentError, Problem, user_code_location
from ..formatting import shown_path
from ..rules.requirements import check_rules
from ..storage.folder_snapshot import REFUSED
from ..storage.lock import is_written
from ..storage.run_record import PREVIOUS_ATTEMPTS, checkpoint_steps, read_record
from ..training.distributed.torchrun import is_rank_zero
from ..training.sweep_jobs import DONE, RUNNING, STOPPED, UNKNOWN, Sweep, SweepJob, recorded_overrides
from ..training.sweep_objective import is_search, read_objective, score_job, worst_score
from .hydra_errors import NO_PACKAGE_LINE, composition_problem
from .verbs import print_json

STOPPED_CODE = 3
"""The exit code of a run that a rule stopped."""
ALLOWED_WITH_RESUME = ("resume", "quiet", "plan", "report")
LOCK_SECONDS = 30.0  # seconds until the previous process of the job has ended
OPENED = (".hydra", "instrument.log")  # written by Hydra before the job begins


class JobFailedError(Exception):
    """A job failed and its error was printed. In a sweep, Hydra raises it after all jobs have ended."""

    def __init__(self, exit_code: int, folder: Path) -> None:
        super().__init__(f"the job in {folder} failed")
        self.exit_code = exit_code
        self.folder = folder

    def __reduce__(self) -> tuple[type[JobFailedError], tuple[int, Path]]:
        return type(self), (self.exit_code, self.folder)  # Exceptions from launcher processes are pickled.


def job(config: DictConfig) -> float | None:
    """Run one job: a single run, or a job of a sweep.

    Returns:
        The objective value, for the sweeper; None for a single run, for a plan, or if the value is missing or not
        finite.

    Raises:
        JobFailedError: The job of a sweep failed, or a rule stopped it. The other jobs continue.
        SystemExit: A single run failed, a rule stopped it, or the job was interrupted.
    """
    score = None
    with report_errors() as (folder, sweep):
        if sweep is not None and config.get("resume") is not None:
            raise ConfigError(Problem("resume", "only single runs can be resumed", config.resume, fix="remove -m"))
        parsed, raw = read_config(config)
        objective = read_objective(parsed.objective, raw.get("hooks"))
        if parsed.plan:
            show_plan(parsed, None)
            return None
        with importing():
            from ..training.runner import Result, run
            from ..training.terminal import Terminal

        hydra: Any = HydraConfig.get()
        searched = sweep is not None and hydra.sweeper["_target_"] != BASIC_SWEEPER
        overrides = read_overrides()
        earlier = None if sweep is None else previous_attempt(folder, overrides)
        if earlier is not None and earlier["status"] in ((DONE,) if searched else (DONE, STOPPED)):
            result = Result(folder, earlier["metrics"], earlier["error"])  # only its result was lost
        else:
            if earlier is not None:
                parsed, raw = restarted(parsed, raw, earlier["config"], folder)
            label = "" if sweep is None else _label(Sweep(sweep), folder)
            terminal = Terminal(quiet=parsed.quiet, brief=sweep is not None, job=label)
            make_report = report_writer(parsed, folder)
            result = run(parsed, folder, terminal, raw=raw, overrides=overrides, make_report=make_report)
        if result.is_pruned and is_search(hydra):
            score = worst_score(hydra)
        elif sweep is not None:
            score = score_job(objective, folder, result.metrics, searched=searched)
    if result.stopped is None or searched:  # a search continues with the score
        return score
    raise JobFailedError(STOPPED_CODE, folder) if sweep is not None else SystemExit(STOPPED_CODE)


def numbered_job(config: DictConfig) -> float | None:
    """Run one job again, with the number of its folder: Hydra would use its position among the jobs that are run again."""
    hydra = HydraConfig.get()
    with flag_override(hydra, "readonly", False):  # type: ignore[arg-type]
        hydra.job.num = int(hydra.sweep.subdir)
    return job(config)


def previous_attempt(folder: Path, overrides: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the run.json of the previous attempt of a job; None without one that has ended and has these overrides.

    A damaged run.json, as after a failure of the machine, has no configuration.
    """
    if not (folder / "run.json").exists():
        return None
    given = json.loads(json.dumps(overrides, default=str))
    try:
        record = read_record(folder, "hydra.sweep.dir")
    except ConfigError:
        record = {"status": UNKNOWN, "config": {}, "overrides": given}
    if record.get("overrides") != given:
        return None
    deadline = time.monotonic() + LOCK_SECONDS
    while is_written(folder):
        if time.monotonic() > deadline:
            return None
        time.sleep(0.1)
    return record


def restarted(
    config: RunConfig, raw: dict[str, Any], recorded: dict[str, Any], folder: Path
) -> tuple[RunConfig, dict[str, Any]]:
    """Return the configuration with which a job starts again: that of its checkpoint, or else its files are archived.

    They are moved to `.aside/3.1`, ..., where they are not read as a run.
    """
    if recorded and checkpoint_steps(folder):
        raw = resumed(recorded, {**raw, "resume": str(folder)})
        return parse_config(raw), raw
    attempts = (folder.parent / PREVIOUS_ATTEMPTS / f"{folder.name}.{attempt}" for attempt in count(1))
    target = next(path for path in attempts if not path.exists())
    target.mkdir(parents=True)
    for path in [path for path in folder.iterdir() if path.name not in OPENED]:
        path.rename(target / path.name)
    return config, raw


def resumed(recorded: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with which a recorded run is resumed. Raise a ConfigError if the training loop is unknown."""
    if "train" not in recorded:
        message = "the run was started with instrument.attach, so its training loop is unknown"
        fix = "continue your loop with attach(..., step=STEP) and a new folder out"
        raise ConfigError(Problem("resume", message, given["resume"], allowed="a run of python -m instrument", fix=fix))
    return {**recorded, **{key: given[key] for key in ALLOWED_WITH_RESUME}}


def report_writer(config: RunConfig, folder: Path) -> Callable[[Path], Path] | None:
    """Check the packages of reports. Return what writes the report of a run, given its readable folder; None if none is requested."""
    if not config.report:
        return None
    from .. import report

    try:
        report.check_packages()
    except InstrumentError as error:
        raise ConfigError(Problem("report", str(error), given=True)) from None
    return lambda readable: report.make(readable).save(folder / report.FILE)


def _label(sweep: Sweep, folder: Path) -> str:
    overrides = recorded_overrides(folder) or tuple(HydraConfig.get().overrides.task)
    return sweep.label(SweepJob(folder.name, folder, overrides, RUNNING, None))


@contextmanager
def importing() -> Iterator[None]:
    """Disable garbage collection during the `with` block, for imports of PyTorch and packages that depend on it.

    Garbage collection takes a fifth of the import time. Later collections skip the frozen objects, which live until the process ends.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        if "duckdb" in sys.modules:
            # At the end of the process, it prints the names of its objects that were not collected.
            atexit.register(gc.unfreeze)


class Terminated(KeyboardInterrupt):
    """The process received SIGTERM, for example from a batch system before it kills the job."""


@contextmanager
def raise_on_sigterm() -> Iterator[None]:
    """Raise `Terminated` on SIGTERM during the `with` block, so that files are closed and the interruption is reported."""

    def stop(number: int, frame: object) -> None:  # noqa: ARG001
        raise Terminated("terminated by SIGTERM")

    if threading.current_thread() is not threading.main_thread():  # Python allows no signal handlers there
        yield
        return
    previous_handler = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


@contextmanager
def report_errors() -> Iterator[tuple[Path, Path | None]]:
    """Print errors of the `with` block, and the location of the recorded data. Yield the folders of the job and of its sweep, or None.

    Raises:
        JobFailedError: The job of a sweep failed. The other jobs continue.
        SystemExit: A single run failed (exit code of the error), or the job was interrupted (130) or terminated (1).
    """
    folder = Path(HydraConfig.get().runtime.output_dir)  # absolute: custom code may change the working directory
    shown = shown_path(folder)
    swept = HydraConfig.get().mode == RunMode.MULTIRUN
    process = os.getpid()
    sweep = Path(HydraConfig.get().sweep.dir) if swept else None
    if sweep is not None:
        (folder / REFUSED).unlink(missing_ok=True)  # of an earlier attempt
    try:
        with raise_on_sigterm():
            yield folder, sweep
    except KeyboardInterrupt as interrupt:
        terminated = isinstance(interrupt, Terminated)
        reason = "terminated by SIGTERM" if terminated else "interrupted"
        if is_rank_zero():
            print(f"\n{reason}: {_saved_data_message(folder, shown)}", file=sys.stderr)
        raise SystemExit(1 if terminated else 130) from None
    except (Exception, SystemExit) as raised:
        if os.getpid() != process:  # custom code has forked this process
            raise
        error = raised
        if isinstance(error, SystemExit):
            if not (location := user_code_location(error)):
                raise
            error = InstrumentError(f"sys.exit({error.code!r}) was called{location}")
        code = print_error(error)
        if code == 1:
            print(_saved_data_message(folder, shown), file=sys.stderr)
        if sweep is not None:
            has_started = (folder / "run.json").exists()
            if not has_started:
                (folder / REFUSED).write_text(f"{str(error) or type(error).__name__}\n")
            is_refused = not has_started and code == ConfigError.exit_code
            result = "was refused" if is_refused else "failed; the other jobs continue"
            print(f"job {shown} {result}", file=sys.stderr)
            raise JobFailedError(code, folder) from error
        raise SystemExit(code) from None


def _saved_data_message(folder: Path, shown: Path) -> str:
    """Describe the data in the folder of a job that ended early. `shown` is its name in the message."""
    try:
        (folder / "run.json").stat()
    except (FileNotFoundError, NotADirectoryError):
        return f"nothing was recorded in {shown}" if folder.is_dir() else f"nothing is saved: {shown} no longer exists"
    except OSError as error:
        return f"the recorded data in {shown} cannot be accessed: {error.strerror}"
    resume = "; to continue from its last checkpoint, pass this folder to resume" * bool(checkpoint_steps(folder))
    return f"the data recorded so far is in {shown}{resume}"


def as_instrument_error(error: Exception, arguments: Sequence[str]) -> InstrumentError:
    """Convert an error of Hydra, or of a launcher or sweeper plugin, to an `InstrumentError`. A `ConfigError` is kept."""
    if isinstance(error, ConfigError):
        return error
    frames = traceback.extract_tb(error.__traceback__)
    plugins = [match[1] for frame in frames if (match := re.search(r"hydra_plugins[\\/](\w+)", frame.filename))]
    if not isinstance(error, HydraException | OmegaConfBaseException) and plugins:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = f"{type(error).__name__}: {lines[0] if lines else 'no error message'}"
        return InstrumentError(f"{plugins[-1]} failed: {reason}")
    overrides = [argument for argument in arguments if not argument.startswith("-")]
    return ConfigError(composition_problem(error, overrides, [conf_folder(), Path.cwd() / "conf"]))


def show_plan(config: RunConfig, folder: Path | None) -> None:
    """Print the plan of a run: matching hooks, recorded data, estimated cost, and the output folder; None for no folder."""
    with importing():
        from ..plan.display import plan_data
        from ..training.dry_run import dry_run
        from ..training.environment import process_state
        from ..training.experiment import Experiment
        from ..training.terminal import Terminal

    with process_state(seed=config.seed, deterministic=config.deterministic):
        with redirect_stdout(sys.stderr if config.plan == "json" else sys.stdout):  # of the model
            experiment = Experiment(config)
            forecast = dry_run(experiment)
        if config.plan == "json":
            print_json(plan_data(experiment.plan, experiment.inferred_by_phase, forecast, experiment.steps))
        else:
            Terminal().plan(experiment, forecast, folder)


def print_error(error: Exception) -> int:
    """Print an error to stderr, with a traceback unless it is an `InstrumentError`, and return its exit code."""
    if isinstance(error, InstrumentError):
        print(f"\n{error}\n", file=sys.stderr)
        return error.exit_code
    traceback.print_exception(error)
    return InstrumentError.exit_code


def read_config(config: DictConfig) -> tuple[RunConfig, dict[str, Any]]:
    """Validate a composed configuration; with `resume`, that of the recorded run. Also return the dictionary from which it was created."""
    if "exp" in config:
        raise ConfigError(NO_PACKAGE_LINE)
    try:
        raw = {str(key): _resolved(config[key]) for key in config if key != "hydra"}
    except OmegaConfBaseException as error:
        raise ConfigError(Problem(str(getattr(error, "full_key", "") or ""), str(error).splitlines()[0])) from None
    if raw.get("resume") is not None:
        keys = [key for key in read_overrides(config.get("hydra")) if not key.startswith("hydra.")]
        if others := [key for key in keys if key not in ALLOWED_WITH_RESUME]:
            message = "a run is resumed with its original configuration; these keys cannot be overridden"
            raise ConfigError(Problem(others[0], message, given=others, allowed=ALLOWED_WITH_RESUME))
        raw = resumed(read_record(Path(str(raw["resume"])), "resume")["config"], raw)
    parsed = parse_config(raw)
    check_rules(parsed.rules, parsed.hooks)
    return parsed, raw


def _resolved(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True, throw_on_missing=True) if OmegaConf.is_config(value) else value


def read_overrides(hydra: DictConfig | None = None) -> dict[str, Any]:
    """Return the overrides of the running job, or in a section `hydra`, by key, parsed to Python types; None for a deleted key."""
    overrides = (HydraConfig.get() if hydra is None else hydra).overrides.task
    parsed = OverridesParser.create().parse_overrides(overrides)
    return {each.key_or_group: None if each.is_delete() else each.value() for each in parsed}
