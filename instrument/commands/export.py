"""`python -m instrument.export RUN --to tensorboard|wandb|mlflow|trackio|csv|safetensors|hf [--out FOLDER]`: export a run to other tools.

TensorBoard, Weights & Biases, MLflow and Trackio receive the same data as from `sink.tensorboard=true` and its counterparts
during training. Existing files are not overwritten.

Exit codes: 0, everything was exported; 1, something could not be read or written; 2, the arguments are invalid.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.dataset as ds

from instrument.analysis.frames import with_custom_columns
from instrument.analysis.load import Run, load
from instrument.analysis.replay import replay
from instrument.analysis.run_tables import RunTables
from instrument.commands.verbs import parser_of, with_arguments
from instrument.config.experiment import TRACKERS
from instrument.errors import ConfigError, InstrumentError, InstrumentWarning, Problem
from instrument.storage.remote_folder import check_is_local
from instrument.storage.run_files import RunFiles
from instrument.tables.schemas import TABLES
from instrument.trackers.tracking import TRACKER_FOLDERS, Outcome, TrackedRun, open_tracker, require

if TYPE_CHECKING:
    from torch import Tensor

    from instrument.analysis.dataset import ActivationDataset

TENSOR_FILES = ("safetensors", "hf")
FILES = ("csv", *TENSOR_FILES)
FOLDERS = {"tensorboard": TRACKER_FOLDERS["tensorboard"], **{name: name for name in FILES}}  # without --out
SELECTABLE = ("hook", "role", "phase", "step", "epoch", "call", "path")
# And the variable that says where they write.
WITHOUT_FOLDER = {"mlflow": "MLFLOW_TRACKING_URI", "trackio": "TRACKIO_DIR"}
BATCH_BYTES = 16 * 2**20
SAFETENSORS_DTYPES = {
    **{"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "complex64": "C64"},
    **{"int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL"},
    **{"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"},
}
OUTCOMES: dict[str, Outcome] = {"failed": "failed", "interrupted": "killed", "killed": "killed"}  # by status of the run


def command_line() -> argparse.ArgumentParser:
    parser = parser_of("export")
    text = "the folder of a run, a folder that contains several runs, or a remote address"
    parser.add_argument("run", metavar="RUN", help=text)
    parser.add_argument("--to", required=True, choices=(*TRACKERS, *FILES), help="the format or tool to export to")
    parser.add_argument("--out", metavar="FOLDER", type=Path, help="the output folder (default: the folder of the run)")
    tensors = parser.add_argument_group("recorded tensors (--to safetensors, hf), see Run.dataset")
    tensors.add_argument("--layer", metavar="NAME", action="append", help="a layer; can be repeated (default: all)")
    tensors.add_argument("--flatten", choices=("tokens",), help="one item for each position of a sequence")
    text = "a recorded input; positions where it is 0 are left out ('none': keep all positions)"
    tensors.add_argument("--mask", metavar="NAME", help=text)
    text = "such as phase=eval or step=10; can be repeated"
    tensors.add_argument("--select", metavar="COLUMN=VALUE", action="append", help=text)
    return parser


@with_arguments(command_line)
def main(args: argparse.Namespace) -> int:
    run = load(args.run)
    if args.to in TRACKERS:
        require({args.to: "--to"})
    for name in ("layer", "flatten", "mask", "select"):
        if args.to not in TENSOR_FILES and getattr(args, name):
            allowed = f"with --to {' or '.join(TENSOR_FILES)}"
            raise ConfigError(Problem(f"--{name}", f"not supported for {args.to}", allowed=allowed))
    if args.out is not None and args.to in WITHOUT_FOLDER:
        message = f"not supported for {args.to}, which is configured by its environment variables"
        raise ConfigError(Problem("--out", message, fix=f"set {WITHOUT_FOLDER[args.to]}"))
    if args.out is None and args.to not in WITHOUT_FOLDER:
        problem = "is required: exports are written to a local folder, not to a remote address"
        check_is_local(args.run, "--out", problem, fix="pass --out FOLDER")
    several = run.folders != [run.path]
    code = 0
    for folder in run.folders:
        out = args.out / str(folder.relative_to(run.path)) if several and args.out is not None else args.out
        code = max(code, _export(folder, args, out))
    return code


def _export(folder: Path, args: argparse.Namespace, out: Path | None) -> int:
    to: str = args.to
    output = out or folder / FOLDERS.get(to, ".")
    with warnings.catch_warnings(action="ignore", category=InstrumentWarning):  # problems are printed below
        files = RunFiles(folder)
        try:
            summary = _write(files, output, args) if to in FILES else _track(files, to, output)
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


def _write(files: RunFiles, output: Path, args: argparse.Namespace) -> str:
    """Write the files of an export to a temporary folder, and rename it."""
    _check_empty(output)
    temporary = output.with_name(f".{output.name}.tmp")
    rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        summary = _write_csv(files, temporary) if args.to == "csv" else _write_tensors(files, temporary, args)
        if output.exists():
            output.rmdir()
        temporary.rename(output)
    finally:
        rmtree(temporary, ignore_errors=True)
    return summary.format(output)


def _write_tensors(files: RunFiles, folder: Path, args: argparse.Namespace) -> str:
    """Write recorded tensors as items of a dataset into an existing folder."""
    from instrument.analysis.dataset import MASK  # imported here, because it imports torch

    selected: dict[str, Any] = {}
    for text in args.select or ():
        column, _, value = text.partition("=")
        if column not in SELECTABLE or not value:
            raise ConfigError(Problem("--select", "is COLUMN=VALUE", text, ", ".join(SELECTABLE)))
        selected[column] = int(value) if value.isdigit() else value
    layers = args.layer
    if layers is None:
        role = selected.get("role", "output")
        recorded = files.read("tensors", ["layer"], ds.field("role") == role)["layer"].unique().to_pylist()
        layers = [name or "." for name in recorded] or ["."]  # the dataset reports that there are none
    mask = {None: MASK, "none": None}.get(args.mask, args.mask)
    run = Run(files.folder, [files.folder], [files])
    data = run.dataset(layers=layers, flatten=args.flatten, mask=mask, **selected)
    (_write_hf if args.to == "hf" else _write_safetensors)(data, folder)
    return f"{len(data):,} items of {', '.join(layers)} exported to {{}}"


def _write_safetensors(data: ActivationDataset, folder: Path) -> None:
    """Write one tensor for each layer, named as the layer, and one for each other entry of the items, to `activations.safetensors`.

    Format: https://github.com/huggingface/safetensors#format. Ids that are strings are in the metadata, as a JSON list.
    """
    import torch

    first = next(_batches(data, 1))
    columns = {name: part for name, part in first.items() if not isinstance(part, list)}
    header: dict[str, Any] = {}
    if isinstance(first["id"], list):
        header["__metadata__"] = {"id": json.dumps([name for batch in _batches(data) for name in batch["id"]])}
    end = 0
    for name, part in sorted(columns.items(), key=lambda item: -item[1].itemsize):  # so that all are aligned
        dtype = str(part.dtype).removeprefix("torch.")
        if dtype not in SAFETENSORS_DTYPES:
            fix = "record with 'dtype: float32'"
            raise ConfigError(Problem("--to", f"safetensors has no dtype {dtype}", name, fix=fix))
        start, end = end, end + len(data) * part[0].nbytes
        entry = {"dtype": SAFETENSORS_DTYPES[dtype], "shape": [len(data), *part.shape[1:]]}
        header[name] = {**entry, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    at = 0
    with (folder / "activations.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for batch in _batches(data):
            for name in columns:
                file.seek(8 + len(text) + header[name]["data_offsets"][0] + at * columns[name][0].nbytes)
                file.write(batch[name].contiguous().view(-1).view(torch.uint8).numpy())
            at += len(batch["run"])


def _write_hf(data: ActivationDataset, folder: Path) -> None:
    """Write a folder that `datasets.load_from_disk` reads: one column for each layer and each other entry of the items.

    bfloat16 and float8, which Arrow lacks, are converted to float32.
    """
    name = "data-00000-of-00001.arrow"
    writer = None
    with (folder / name).open("wb") as file:
        for batch in _batches(data):
            rows = pa.RecordBatch.from_pydict({key: _cells(part) for key, part in batch.items()})
            writer = writer or pa.ipc.new_stream(file, rows.schema)
            writer.write_batch(rows)
        if writer is not None:
            writer.close()
    state: dict[str, Any] = dict.fromkeys(("_format_columns", "_format_type", "_split"))
    state |= {"_data_files": [{"filename": name}], "_fingerprint": "", "_format_kwargs": {}}
    state["_output_all_columns"] = False
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")  # the features are those of the Arrow schema


def _batches(data: ActivationDataset, size: int | None = None) -> Iterator[dict[str, Any]]:
    for batch in data.batches(size or max(1, BATCH_BYTES // max(data.item_bytes, 1))):
        layers = batch.pop("x")
        if taken := layers.keys() & batch.keys():
            message = "a column of the export has the name of this layer"
            fix = "export the other layers; run.dataset reads this one"
            raise ConfigError(Problem("--layer", message, min(taken), fix=fix))
        yield {**layers, **batch}


def _cells(part: Tensor | list[str]) -> pa.Array:
    """Return an Arrow array with lists of fixed size."""
    if isinstance(part, list):
        return pa.array(part)
    part = part.float() if str(part.dtype).startswith(("torch.bfloat16", "torch.float8")) else part
    cells = pa.array(part.reshape(-1).numpy())
    for size in reversed(part.shape[1:]):
        cells = pa.FixedSizeListArray.from_arrays(cells, size)
    return cells


def _write_csv(files: RunFiles, folder: Path) -> str:
    """Write all tables except `tensors` into an existing folder; lists and maps are written as JSON."""
    run = RunTables(files.folder, [files.folder], [files])
    for name, table in TABLES.items():
        if name == "tensors":
            continue
        columns = with_custom_columns(table.schema.empty_table(), run.custom_columns(name)).schema
        texts = (pa.types.is_list, pa.types.is_map, pa.types.is_dictionary)
        fields = (each.with_type(pa.string()) if any(is_(each.type) for is_ in texts) else each for each in columns)
        schema = pa.schema(fields)
        with pyarrow.csv.CSVWriter(folder / f"{name}.csv", schema) as writer:
            for batch in run.scan(name, columns.names):
                cells = [_csv_cells(values, field.type) for values, field in zip(batch.columns, schema, strict=True)]
                writer.write_batch(pa.RecordBatch.from_arrays(cells, schema=schema))
    return "tables exported as CSV to {}; recorded tensors are not included: instrument.load(RUN).tensors() reads them"


def _csv_cells(values: pa.Array, kind: pa.DataType) -> pa.Array:
    if pa.types.is_nested(values.type):
        as_plain = dict if pa.types.is_map(values.type) else list
        texts = [None if each is None else json.dumps(as_plain(each)) for each in values.to_pylist()]
        return pa.array(texts, pa.string())
    return values.cast(kind)


def _check_empty(output: Path) -> None:
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        message = "already exists, and existing files are not overwritten"
        raise ConfigError(Problem("--out", message, given=str(output), allowed="an empty or new folder"))


if __name__ == "__main__":
    sys.exit(main())
