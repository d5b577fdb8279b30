"""Helpers for tests of trackers: rows, and readers for the files of TensorBoard and Weights & Biases."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import wait_until

from instrument.tables.schemas import TABLES

TEXT = "/text_summary"


def key(step: int = 0, **cells: Any) -> tuple[Any, ...]:
    """Return the values of the identity columns of a row."""
    defaults = {
        "micro_step": 0, "epoch": 0, "phase": "train", "rank": 0, "hook": "seen", "layer": "a.0", "module_type": "Linear",
        "kind": "forward", "role": "output", "path": "", "call": 0, "backward": 0, "recompute": False, "mesh": "",
        "placement": "", "scope": "global",
    }  # fmt: skip
    assert cells.keys() <= defaults.keys()
    return (step, *{**defaults, **cells}.values())


def row(table: str, *front: Any, **cells: Any) -> tuple[Any, ...]:
    """Return a row of a table, from the values of its first columns and others by name. Columns without a value are null."""
    names = TABLES[table].names
    assert cells.keys() <= set(names)
    return (*front, *(cells.get(name) for name in names[len(front) :]))


def metrics(step: int, phase: str = "train", **cells: Any) -> tuple[Any, ...]:
    """Return a row of the table `metrics`."""
    return row("metrics", step, 0, phase, 0, **cells)


def keep_data_local(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Set environment variables so that Weights & Biases and MLflow send nothing, and MLflow writes below a folder.

    A run of Weights & Biases looks for inputs of its launcher, whose import takes longer than all other imports.
    """
    for name, value in {
        "WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false", "WANDB_DIR": "",
        "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_TRACKING_URI": (folder / "mlruns").as_uri(),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    no_inputs = SimpleNamespace(StagedLaunchInputs=lambda: SimpleNamespace(apply=lambda run: None))
    monkeypatch.setitem(sys.modules, "wandb.sdk.launch.inputs.internal", no_inputs)


def read_tensorboard(folder: Path) -> dict[str, dict[str, list[tuple[int, Any]]]]:
    """Read the events of TensorBoard in a folder.

    Returns:
        The groups `scalars`, `histograms` and `texts`. Each maps a tag to a list of (step, value).
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    kinds = ("scalars", "histograms", "tensors", "compressedHistograms")
    events = EventAccumulator(str(folder), size_guidance=dict.fromkeys(kinds, 0))
    events.Reload()
    tags = events.Tags()
    return {
        "scalars": {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in tags["scalars"]},
        "histograms": {
            tag: [(e.step, e.histogram_value) for e in events.Histograms(tag)] for tag in tags["histograms"]
        },
        "texts": {
            tag.removesuffix(TEXT): [(e.step, e.tensor_proto.string_val[0].decode()) for e in events.Tensors(tag)]
            for tag in tags["tensors"]
        },
    }


def make_older(folder: Path) -> None:
    """Rename the event files in a folder, so that TensorBoard reads them before new files.

    TensorBoard reads files in the order of their names, which contain the start time in seconds.
    """
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(folder / f"events.out.tfevents.{number:010d}.earlier")


def read_wandb(folder: Path) -> list[Any]:
    """Wait until W&B has written the only offline run below a folder, and return its records."""
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    records: list[Any] = []

    def is_complete() -> bool:
        records[:] = _records(path.read_bytes())
        return bool(records) and records[-1].WhichOneof("record_type") == "exit"

    wait_until(is_complete)
    return records


def history(records: list[Any]) -> dict[int, dict[str, Any]]:
    """Return the logged values by step and key. Nested keys are joined with `/` below the first."""
    steps: dict[int, dict[str, Any]] = {}
    for record in records:
        if record.WhichOneof("record_type") == "history":
            cells = steps[record.history.step.num] = {}
            for item in record.history.item:
                first, *inner = [item.key] if item.key else item.nested_key
                value = json.loads(item.value_json)
                if inner:
                    cells.setdefault(first, {})["/".join(inner)] = value
                elif not first.startswith("_"):
                    cells[first] = value
    return steps


def _records(content: bytes) -> Iterator[Any]:
    """Parse the records of a W&B file.

    The file has the LevelDB log format: blocks of 32 KiB, with chunks that each have a header of 7 bytes (checksum,
    length and type).
    """
    from wandb.proto import wandb_internal_pb2

    offset, content_of_record = 7, b""  # The file starts with a header of 7 bytes.
    while offset + 7 <= len(content):
        rest = 32_768 - offset % 32_768
        if rest < 7:
            offset += rest
            continue
        _, size, kind = struct.unpack("<IHB", content[offset : offset + 7])
        if offset + 7 + size > len(content):
            return  # The last chunk is not completely written yet.
        content_of_record += content[offset + 7 : offset + 7 + size]
        offset += 7 + size
        if kind in (1, 4):  # a full record, or the last chunk of a record
            record = wandb_internal_pb2.Record()
            record.ParseFromString(content_of_record)
            yield record
            content_of_record = b""
