"""`python -m instrument.export RUN --to tensorboard|wandb|mlflow|csv [--out FOLDER]`: export a run to other tools.

TensorBoard, Weights & Biases and MLflow receive the same data as from `sink.tensorboard=true` and its counterparts
during training. Existing files are not overwritten.

Exit codes: 0, everything was exported; 1, something could not be read or written; 2, the arguments are invalid.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree

from .analysis.folders import NoRunError
from .analysis.load import load
from .analysis.replay import replay
from .analysis.run_files import RunFiles
from .errors import ConfigError, InstrumentError, InstrumentWarning, Problem
from .sinks.remote_folder import check_is_local
from .sinks.tracking import TRACKER_FOLDERS, Outcome, TrackedRun, open_tracker, require
from .spec.config import TRACKERS

FOLDERS = {"tensorboard": TRACKER_FOLDERS["tensorboard"], "csv": "csv"}  # without --out
NOT_FOR_MLFLOW = "not supported for MLflow, which is configured by its environment variables"
LOCAL_ONLY = "is required: exports are written to a local folder, not to a remote address"
OUTCOMES: dict[str, Outcome] = {"failed": "failed", "interrupted": "killed", "killed": "killed"}  # by status of the run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m instrument.export", description="Export the recorded data of a run to other tools."
    )
    parser.add_argument(
        "run", metavar="RUN", help="the folder of a run, a folder that contains several runs, or a remote address"
    )
    parser.add_argument("--to", required=True, choices=(*TRACKERS, "csv"), help="the format or tool to export to")
    parser.add_argument("--out", metavar="FOLDER", type=Path, help="the output folder (default: the folder of the run)")
    args = parser.parse_args(arguments)
    try:
        run = load(args.run)
        if args.to != "csv":
            require({args.to: "--to"})
        if args.out is not None and args.to == "mlflow":
            raise ConfigError(Problem("--out", NOT_FOR_MLFLOW, fix="set MLFLOW_TRACKING_URI"))
        if args.out is None and args.to != "mlflow":
            check_is_local(args.run, "--out", LOCAL_ONLY, fix="pass --out FOLDER")
    except (NoRunError, ConfigError) as error:
        print(error, file=sys.stderr)
        return 2
    except InstrumentError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    several = run.folders != [run.path]
    code = 0
    for folder in run.folders:
        out = args.out / str(folder.relative_to(run.path)) if several and args.out is not None else args.out
        code = max(code, _export(folder, args.to, out))
    return code


def _export(folder: Path, to: str, out: Path | None) -> int:
    output = out or folder / FOLDERS.get(to, ".")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InstrumentWarning)  # problems are printed below
        files = RunFiles(folder)
        try:
            summary = _WRITERS[to](files, output) if to in _WRITERS else _track(files, to, output)
        except (InstrumentError, OSError) as error:
            print(f"{folder}: {error}", file=sys.stderr)
            return error.exit_code if isinstance(error, InstrumentError) else 1
    print(f"{folder}: {summary}")
    for problem in files.problems:
        print(f"{folder}: {problem}", file=sys.stderr)
    return 1 if files.problems else 0


def _track(files: RunFiles, name: str, output: Path) -> str:
    if name == "tensorboard":
        _check_empty(output)
    info = files.info()
    sink = open_tracker(name, TrackedRun.of(files.folder, info.get("config") or {}), "--to", output)
    sink.outcome = OUTCOMES.get(info["status"], "done")
    try:
        replay(files, sink, tables=sink.tables)
    finally:
        sink.close()
    return f"exported to {name}" + (f" in {output}" if name == "tensorboard" else "")


def _csv(files: RunFiles, output: Path) -> str:
    from .analysis.csv_export import write_csv

    with _temporary_folder(output) as temporary:
        temporary.mkdir(parents=True)
        write_csv(files, temporary)
    return f"tables exported as CSV to {output}; recorded tensors are not included: instrument.load(RUN).tensors() reads them"


_WRITERS: dict[str, Callable[[RunFiles, Path], str]] = {"csv": _csv}


@contextmanager
def _temporary_folder(output: Path) -> Iterator[Path]:
    """Yield a temporary folder.

    When the block ends, the folder is renamed to `output`. If the block raises an error, the folder is deleted.
    """
    _check_empty(output)
    temporary = output.with_name(f".{output.name}.tmp")
    rmtree(temporary, ignore_errors=True)
    try:
        yield temporary
        if output.exists():
            output.rmdir()
        temporary.rename(output)
    except BaseException:
        rmtree(temporary, ignore_errors=True)
        raise


def _check_empty(output: Path) -> None:
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        message = "already exists, and existing files are not overwritten"
        raise ConfigError(Problem("--out", message, given=str(output), allowed="an empty or new folder"))


if __name__ == "__main__":
    sys.exit(main())
