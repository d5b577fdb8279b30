"""What tests of trackers share: rows, and what TensorBoard and Weights & Biases have written, read back."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from waiting import until

from instrument.capture.tables import TABLES

TEXT = "/text_summary"


def key(step: int = 0, **cells: Any) -> tuple[Any, ...]:
    """The columns of identity."""
    usual = {
        "micro_step": 0, "epoch": 0, "phase": "train", "rank": 0, "hook": "seen", "layer": "a.0", "module_type": "Linear",
        "kind": "forward", "role": "output", "path": "", "call": 0, "backward": 0, "recompute": False, "scope": "global",
    }  # fmt: skip
    assert cells.keys() <= usual.keys()
    return (step, *{**usual, **cells}.values())


def row(table: str, *front: Any, **cells: Any) -> tuple[Any, ...]:
    """A row: its first columns, and others by name; null where nothing is said."""
    names = TABLES[table].names
    assert cells.keys() <= set(names)
    return (*front, *(cells.get(name) for name in names[len(front) :]))


def metrics(step: int, phase: str = "train", **cells: Any) -> tuple[Any, ...]:
    """A row of metrics."""
    return row("metrics", step, 0, phase, 0, **cells)


def read_tensorboard(folder: Path) -> dict[str, dict[str, list[tuple[int, Any]]]]:
    """Scalars, histograms, images and texts by tag, each as steps with what TensorBoard shows there."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    kinds = ("scalars", "histograms", "images", "tensors", "compressedHistograms")
    events = EventAccumulator(str(folder), size_guidance=dict.fromkeys(kinds, 0))
    events.Reload()
    tags = events.Tags()
    return {
        "scalars": {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in tags["scalars"]},
        "histograms": {
            tag: [(e.step, e.histogram_value) for e in events.Histograms(tag)] for tag in tags["histograms"]
        },
        "images": {tag: [(e.step, e.encoded_image_string) for e in events.Images(tag)] for tag in tags["images"]},
        "texts": {
            tag.removesuffix(TEXT): [(e.step, e.tensor_proto.string_val[0].decode()) for e in events.Tensors(tag)]
            for tag in tags["tensors"]
        },
    }


def make_older(folder: Path) -> None:
    """TensorBoard reads its files in the order of their names, which tell the second in which each was begun."""
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(folder / f"events.out.tfevents.{number:010d}.earlier")


def read_wandb(folder: Path) -> list[Any]:
    """The records of the one offline run below a folder, when the service of W&B has written the last of them."""
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    records: list[Any] = []

    def is_whole() -> bool:
        records[:] = _records(path.read_bytes())
        return bool(records) and records[-1].WhichOneof("record_type") == "exit"

    until(is_whole)
    return records


def history(records: list[Any]) -> dict[int, dict[str, Any]]:
    """What was logged at each step."""
    found: dict[int, dict[str, Any]] = {}
    for record in records:
        if record.WhichOneof("record_type") == "history":
            cells = found[record.history.step.num] = {}
            for item in record.history.item:
                first, *inner = [item.key] if item.key else item.nested_key
                value = json.loads(item.value_json)
                if inner:
                    cells.setdefault(first, {})["/".join(inner)] = value
                elif not first.startswith("_"):
                    cells[first] = value
    return found


def _records(content: bytes) -> Iterator[Any]:
    """As LevelDB's log has them: blocks of 32 KiB, pieces with a checksum, a length and a kind."""
    from wandb.proto import wandb_internal_pb2

    at, whole = 7, b""  # behind the file's own mark
    while at + 7 <= len(content):
        left = 32_768 - at % 32_768
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", content[at : at + 7])
        if at + 7 + size > len(content):
            return  # it is being written
        whole += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last piece of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""
