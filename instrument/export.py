"""`python -m instrument.export RUN --to tensorboard|wandb|mlflow|csv|zarr [--out FOLDER]`: export a run to other tools.

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
from .errors import ConfigError, InstrumentError, InstrumentWarning, Mistake
from .sinks.remote import refuse_address
from .sinks.tracking import PLACES, Outcome, Tracked, open_tracker, require
from .spec.config import TRACKERS

FOLDERS = {"tensorboard": PLACES["tensorboard"], "csv": "csv", "zarr": "tensors.zarr"}  # without --out
OUTCOMES: dict[str, Outcome] = {"failed": "failed", "interrupted": "killed", "killed": "killed"}  # by status of the run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m instrument.export", description="A run's rows for other tools.")
    parser.add_argument("run", metavar="RUN", help="a run's folder, or one above several; or its address")
    parser.add_argument("--to", required=True, choices=(*TRACKERS, "csv", "zarr"))
    parser.add_argument("--out", metavar="FOLDER", type=Path, help="where it goes; without it, into the run's folder")
    asked = parser.parse_args(arguments)
    try:
        run = load(asked.run)
        if asked.to != "csv":
            require({asked.to: "--to"})
        if asked.out is not None and asked.to == "mlflow":
            raise ConfigError(Mistake("--out", "MLflow goes where its environment says", allowed="MLFLOW_TRACKING_URI"))
        if asked.out is None and asked.to != "mlflow":
            refuse_address(asked.run, "--out", "an export is written to this machine", allowed="--out FOLDER")
    except (NoRunError, ConfigError) as error:
        print(error, file=sys.stderr)
        return 2
    except InstrumentError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    several = run.folders != [run.path]
    code = 0
    for folder in run.folders:
        out = asked.out / str(folder.relative_to(run.path)) if several and asked.out is not None else asked.out
        code = max(code, _export(folder, asked.to, out))
    return code


def _export(folder: Path, to: str, out: Path | None) -> int:
    place = out or folder / FOLDERS.get(to, ".")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InstrumentWarning)  # problems are printed below
        files = RunFiles(folder)
        try:
            told = _WRITERS[to](files, place) if to in _WRITERS else _track(files, to, place)
        except (InstrumentError, OSError) as error:
            print(f"{folder}: {error}", file=sys.stderr)
            return error.exit_code if isinstance(error, InstrumentError) else 1
    print(f"{folder}: {told}")
    for problem in files.problems:
        print(f"{folder}: {problem}", file=sys.stderr)
    return 1 if files.problems else 0


def _track(files: RunFiles, name: str, place: Path) -> str:
    if name == "tensorboard":
        _refuse_taken(place)
    info = files.info()
    sink = open_tracker(name, Tracked.of(files.folder, info.get("config") or {}), "--to", place)
    sink.outcome = OUTCOMES.get(info["status"], "done")
    try:
        replay(files, sink, tables=sink.tables)
    finally:
        sink.close()
    return f"shown on {name}" + (f", in {place}" if name == "tensorboard" else "")


def _csv(files: RunFiles, place: Path) -> str:
    from .analysis.csv_export import write_csv

    with _made(place) as aside:
        aside.mkdir(parents=True)
        write_csv(files, aside)
    return f"tables as CSV in {place}; recorded tensors are not among them: --to zarr"


def _zarr(files: RunFiles, place: Path) -> str:
    from .analysis.zarr_export import write_zarr

    if not files.count("tensors"):
        raise InstrumentError("this run kept no tensors: record with 'tensors: true'")
    with _made(place) as aside:
        arrays = write_zarr(files, aside)
    return f"tensors as {arrays} Zarr arrays in {place}"


_WRITERS: dict[str, Callable[[RunFiles, Path], str]] = {"csv": _csv, "zarr": _zarr}


@contextmanager
def _made(place: Path) -> Iterator[Path]:
    """Yield a temporary folder.

    When the block ends, the folder is renamed to `place`. If the block raises an error, the folder is deleted.
    """
    _refuse_taken(place)
    aside = place.with_name(f".{place.name}.tmp")
    rmtree(aside, ignore_errors=True)
    try:
        yield aside
        if place.exists():
            place.rmdir()
        aside.rename(place)
    except BaseException:
        rmtree(aside, ignore_errors=True)
        raise


def _refuse_taken(place: Path) -> None:
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        problem = "there is something already, and nothing is ever overwritten"
        raise ConfigError(
            Mistake("--out", problem, written=str(place), allowed="a folder that is empty, or is not there")
        )


if __name__ == "__main__":
    sys.exit(main())
