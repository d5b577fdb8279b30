"""Folders of runs created without training: a `run.json` and the rows that a test defines."""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import instrument
from instrument.storage.parquet import ParquetSink
from instrument.storage.row_batches import as_batch, as_table
from instrument.tables.schemas import TABLES

CLIP = {"layers": "a", "kind": "parameter_grad", "action": "clip", "norm": 1.0}
RECORD = {"layers": "a", "kind": "forward", "action": "record"}
LOCATION = {
    "phase": "train", "hook": "seen", "layer": "a", "module_type": "Linear", "kind": "forward", "role": "output", "path": "",
}  # fmt: skip


def row(table: str, **cells: Any) -> tuple[Any, ...]:
    """Return a row of a table. Identity columns have defaults; other columns are null (empty for label columns)."""
    defaults = {"step": 0, "micro_step": 0, "epoch": 0, "rank": 0, "call": 0, "backward": 0, "recompute": False}
    names = TABLES[table].names
    assert set(cells) <= set(names)
    values = {**defaults, **LOCATION, **cells}
    labels = {column.name for column in TABLES[table].columns if pa.types.is_dictionary(column.type)}
    return tuple(values.get(name, "" if name in labels else None) for name in names)


def write_run(
    folder: Path,
    *,
    config: Mapping[str, Any] | None = None,
    seed: int | None = 0,
    overrides: Mapping[str, Any] | None = None,
    status: str = "done",
    metrics: Mapping[str, Any] | None = None,
    used: Mapping[str, Any] | None = None,
    rows: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
) -> Path:
    """Write the folder of a finished run with rows by table, each as values by column. `used` are other entries of `run.json`."""
    folder.mkdir(parents=True)
    info = {
        "status": status,
        "seed": seed,
        "config": {**(config or {}), "seed": seed},
        "overrides": dict(overrides or {}),
        "metrics": dict(metrics or {}),
        **(used or {}),
    }
    for table, cells in (rows or {}).items():
        (folder / table).mkdir()
        batch = as_batch(TABLES[table], [row(table, **one) for one in cells])
        pq.write_table(as_table(TABLES[table], [batch]), folder / table / "part-0000-000000.parquet")
    (folder / "run.json").write_text(json.dumps(info))  # last, as the status of a finished run
    return folder


def tensor_key(step: int = 0, **cells: Any) -> tuple[Any, ...]:
    """Return the identity columns of a recorded tensor."""
    names = TABLES["tensors"].names
    return row("tensors", step=step, **{"scope": "global", **cells})[: names.index("scope") + 1]


def write_steps(
    folder: Path,
    steps: Iterable[Mapping[str, Sequence[Mapping[str, Any]]]],
    *,
    parts: Collection[int] = (),
    close: bool = True,
    info: Mapping[str, Any] | None = None,
    **options: Any,
) -> Path:
    """Write a run step by step, as a training does, and return its folder.

    Args:
        folder: Folder, created if it is missing.
        steps: Rows of each step by table, each as values by column. The tensor of a row of `tensors` is its `values`.
        parts: Indices of the steps after which the journals become parts.
        close: Whether the run ends. Otherwise, its last rows are in journals.
        info: Other entries of `run.json` than the status `done` and the seed 0.
        options: Options of the sink.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps({"status": "done", "seed": 0, **(info or {})}))
    sink = ParquetSink(folder, **options)
    for index, tables in enumerate(steps):
        for table, rows in tables.items():
            if table == "tensors":
                for cells in rows:
                    identity = {**cells}
                    tensor = identity.pop("values")
                    source_shape = identity.pop("source_shape", tensor.shape)
                    assert sink.keep(tensor_key(**identity), source_shape, tensor) is not None
            else:
                sink.write(table, [row(table, **cells) for cells in rows])
        sink.end_step()
        if index in parts:
            sink.finish_parts()
    if close:
        sink.close()
    return folder


def finished(folder: Path) -> instrument.Run:
    """Load the files in a folder as those of a finished run."""
    (folder / "run.json").write_text(json.dumps({"status": "done", "seed": 0}))
    return instrument.load(folder)


def damage_inside(file: Path) -> None:
    """Overwrite bytes of a file, but not its footer: the file can still be opened."""
    content = bytearray(file.read_bytes())
    content[4 : len(content) // 2] = random.Random(1).randbytes(len(content) // 2 - 4)
    file.write_bytes(content)
