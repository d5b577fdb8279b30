"""Files with the items of a dataset of recorded tensors, written batch by batch: safetensors, and folders of Hugging Face `datasets`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from instrument.analysis.dataset import ActivationDataset
from instrument.errors import ConfigError, Problem

BATCH_BYTES = 16 * 2**20
SAFETENSORS_DTYPES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{
        torch.int64: "I64",
        torch.int32: "I32",
        torch.int16: "I16",
        torch.int8: "I8",
        torch.uint8: "U8",
        torch.bool: "BOOL",
    },
    **{torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64"},
}


def write_safetensors(data: ActivationDataset, folder: Path) -> None:
    """Write one tensor for each layer, named as the layer, and one for each other entry of the items, to `activations.safetensors`.

    Format: https://github.com/huggingface/safetensors#format. Ids that are strings are in the metadata, as a JSON list.
    """
    first = next(_batches(data, 1))
    columns = {name: part for name, part in first.items() if isinstance(part, Tensor)}
    header: dict[str, Any] = {}
    if isinstance(first["id"], list):
        header["__metadata__"] = {"id": json.dumps([name for batch in _batches(data) for name in batch["id"]])}
    end = 0
    for name, part in sorted(columns.items(), key=lambda item: -item[1].itemsize):  # so that all are aligned
        if part.dtype not in SAFETENSORS_DTYPES:
            message = f"safetensors has no dtype {str(part.dtype).removeprefix('torch.')}"
            raise ConfigError(Problem("--to", message, name, fix="record with 'dtype: float32'"))
        start, end = end, end + len(data) * part[0].nbytes
        entry = {"dtype": SAFETENSORS_DTYPES[part.dtype], "shape": [len(data), *part.shape[1:]]}
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


def write_hf(data: ActivationDataset, folder: Path) -> None:
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
    none = dict.fromkeys(("_format_columns", "_format_type", "_split"))
    state = {
        "_data_files": [{"filename": name}],
        "_fingerprint": "",
        "_format_kwargs": {},
        "_output_all_columns": False,
    }
    (folder / "state.json").write_text(json.dumps({**state, **none}))
    (folder / "dataset_info.json").write_text("{}")  # the features are those of the Arrow schema


def _batches(data: ActivationDataset, size: int | None = None) -> Iterator[dict[str, Any]]:
    for batch in data.batches(size or max(1, BATCH_BYTES // max(data.item_bytes, 1))):
        yield {**batch.pop("x"), **batch}


def _cells(part: Tensor | list[str]) -> pa.Array:
    """Return an Arrow array with lists of fixed size."""
    if isinstance(part, list):
        return pa.array(part)
    part = part if part.dtype not in _WITHOUT_ARROW else part.float()
    cells = pa.array(part.reshape(-1).numpy())
    for size in reversed(part.shape[1:]):
        cells = pa.FixedSizeListArray.from_arrays(cells, size)
    return cells


_WITHOUT_ARROW = {dtype for dtype in SAFETENSORS_DTYPES if dtype == torch.bfloat16 or "float8" in str(dtype)}
