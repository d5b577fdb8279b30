"""`python -m instrument.export RUN --to tensorboard|wandb|mlflow|csv [--out FOLDER]`: export a run to other tools.

TensorBoard, Weights & Biases and MLflow receive the same data as from `sink.tensorboard=true` and its counterparts
during training. Existing files are not overwritten.

With `--features LAYER [--select KEY=VALUE ...]`, the features of a layer are exported with the ids and targets of their
samples: `--to csv|npz|zarr`. The keys are the arguments of `Run.features`.

Exit codes: 0, everything was exported; 1, something could not be read or written; 2, the arguments are invalid.
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from typing import Any

from instrument.analysis.exports import FEATURE_WRITERS, write_csv
from instrument.analysis.features import FeatureSelection, features_of
from instrument.analysis.load import load
from instrument.analysis.replay import replay
from instrument.commands.verbs import parser_of, with_exit_codes
from instrument.config.experiment import TRACKERS
from instrument.errors import ConfigError, InstrumentError, InstrumentWarning, Problem, similar_names
from instrument.storage.remote_folder import check_is_local
from instrument.storage.run_files import RunFiles
from instrument.trackers.tags import segment
from instrument.trackers.tracking import TRACKER_FOLDERS, Outcome, TrackedRun, open_tracker, require

FOLDERS = {"tensorboard": TRACKER_FOLDERS["tensorboard"], "csv": "csv"}  # without --out
FEATURE_FORMATS = tuple(FEATURE_WRITERS)
SELECTABLE = ("hook", "role", "phase", "step", "epoch", "call", "path")
ALREADY_EXISTS = "already exists, and existing files are not overwritten"
MAX_LETTERS = 200  # of a file name
NOT_FOR_MLFLOW = "not supported for MLflow, which is configured by its environment variables"
LOCAL_ONLY = "is required: exports are written to a local folder, not to a remote address"
OUTCOMES: dict[str, Outcome] = {"failed": "failed", "interrupted": "killed", "killed": "killed"}  # by status of the run


def command_line() -> argparse.ArgumentParser:
    """Return the parser of the arguments."""
    parser = parser_of("export")
    parser.add_argument(
        "run", metavar="RUN", help="the folder of a run, a folder that contains several runs, or a remote address"
    )
    parser.add_argument(
        "--to", required=True, choices=(*TRACKERS, *FEATURE_FORMATS), help="the format or tool to export to"
    )
    parser.add_argument("--out", metavar="FOLDER", type=Path, help="the output folder (default: the folder of the run)")
    parser.add_argument("--features", metavar="LAYER", help="export the features of this layer, to csv, npz or zarr")
    parser.add_argument(
        "--select",
        metavar="KEY=VALUE",
        nargs="+",
        default=[],
        help=f"which features: {', '.join(SELECTABLE)}; for steps and epochs also a range, as in step=0:100",
    )
    return parser


@with_exit_codes
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    args = command_line().parse_args(arguments)
    _check_format(args.to, args.features)
    if args.features is None and args.select:
        message, fix = "selects features, but no layer is given", "pass --features LAYER"
        raise ConfigError(Problem("--select", message, " ".join(args.select), fix=fix))
    selection = None if args.features is None else _selection(args.features, args.select)
    run = load(args.run)
    if args.to in TRACKERS:
        require({args.to: "--to"})
    if args.out is not None and args.to == "mlflow":
        raise ConfigError(Problem("--out", NOT_FOR_MLFLOW, fix="set MLFLOW_TRACKING_URI"))
    if args.out is None and args.to != "mlflow":
        check_is_local(args.run, "--out", LOCAL_ONLY, fix="pass --out FOLDER")
    several = run.folders != [run.path]
    code = 0
    for folder in run.folders:
        out = args.out / str(folder.relative_to(run.path)) if several and args.out is not None else args.out
        code = max(code, _export(folder, args.to, out, selection))
    return code


def _check_format(to: str, features: str | None) -> None:
    """Check that the format fits what is exported."""
    if features is not None and to not in FEATURE_FORMATS:
        raise ConfigError(Problem("--to", "this format does not support features", to, FEATURE_FORMATS))
    if features is None and to in FEATURE_FORMATS and to != "csv":
        raise ConfigError(Problem("--to", f"{to} is a format of features", to, fix="pass --features LAYER"))


def _selection(layer: str, conditions: Sequence[str]) -> FeatureSelection:
    """Return the features that the arguments select."""
    values: dict[str, Any] = {}
    for condition in conditions:
        key, _, text = condition.partition("=")
        if key in SELECTABLE and not text:
            raise ConfigError(Problem("--select", "must be KEY=VALUE", condition))
        if key not in SELECTABLE:
            raise ConfigError(Problem("--select", "unknown key", key, SELECTABLE, similar_names(key, SELECTABLE)))
        if key not in ("step", "epoch", "call"):
            values[key] = text
        elif bounds := re.fullmatch(r"(\d+)(?::(\d+))?", text):
            values[key] = int(bounds[1]) if bounds[2] is None else range(int(bounds[1]), int(bounds[2]))
        else:
            raise ConfigError(Problem(f"--select {key}", "must be a number, or a range such as 0:100", text))
    return FeatureSelection(layer, **values)


def _export(folder: Path, to: str, out: Path | None, selection: FeatureSelection | None) -> int:
    output = out or folder / (FOLDERS.get(to, ".") if selection is None else "features")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InstrumentWarning)  # problems are printed below
        files = RunFiles(folder)
        try:
            if selection is not None:
                summary = _features(files, selection, to, output)
            else:
                summary = _csv(files, output) if to == "csv" else _track(files, to, output)
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
    _check_empty(output)
    with _temporary_path(output) as temporary:
        temporary.mkdir(parents=True)
        write_csv(files, temporary)
        if output.exists():
            output.rmdir()
    return f"tables exported as CSV to {output}; recorded tensors are not included: instrument.load(RUN).tensors() reads them"


def _features(files: RunFiles, selection: FeatureSelection, to: str, output: Path) -> str:
    layer = "" if selection.layer == "." else selection.layer
    file = output / f"{segment(layer)[:MAX_LETTERS]}.{to}"
    if file.exists():
        raise ConfigError(Problem("--out", ALREADY_EXISTS, str(file), "a folder without this file"))
    try:
        features = features_of(files, selection)
    except ConfigError as error:  # Its advice is about the arguments of Python.
        raise ConfigError(
            *(replace(each, fix=re.sub(r"^pass (?=\w+=)", "pass --select ", each.fix)) for each in error.problems)
        ) from None
    output.mkdir(parents=True, exist_ok=True)
    with _temporary_path(file) as temporary:
        FEATURE_WRITERS[to](features, temporary)
    return f"features of {len(features.ids):,} samples, shape {list(features.X.shape)}, exported to {file}"


@contextmanager
def _temporary_path(output: Path) -> Iterator[Path]:
    """Yield a temporary path. It is renamed to `output` when the block ends, and deleted if the block raises an error."""
    temporary = output.with_name(f".{output.name}.tmp")

    def remove() -> None:
        temporary.unlink() if temporary.is_file() else rmtree(temporary, ignore_errors=True)

    remove()
    try:
        yield temporary
        temporary.rename(output)
    except BaseException:
        remove()
        raise


def _check_empty(output: Path) -> None:
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(Problem("--out", ALREADY_EXISTS, given=str(output), allowed="an empty or new folder"))


if __name__ == "__main__":
    sys.exit(main())
