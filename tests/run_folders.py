"""Sweep folders created without training: a `run.json` and the rows that a test defines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

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


def stats_row(step: int, mean: float, **cells: Any) -> tuple[Any, ...]:
    """Return a row of statistics of a tensor with 8 elements."""
    zeros = dict.fromkeys(("std", "rms", "min", "max", "abs_max", "l1", "l2", "zero_fraction"), 0.0)
    counts = {"numel": 8, "nan_count": 0, "inf_count": 0}
    return row("stats", step=step, scope="global", mean=mean, shape=[8], **zeros, **counts, **cells)


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
    """Write the folder of a finished run.

    Args:
        folder: Folder to create.
        config: Configuration without the seed. Default: empty.
        seed: Seed of the run. Default: 0.
        overrides: Overrides of the command line, by key. Default: none.
        status: Status of the run. Default: `done`.
        metrics: Metrics of the last evaluation. Default: none.
        used: Other entries of `run.json`, such as `device` and `data`. Default: none.
        rows: Rows by table, each as values by column. Default: none.

    Returns:
        The folder.
    """
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
