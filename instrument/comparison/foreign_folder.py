"""Folders of tensors that other programs wrote, read in the same way as the files of a run.

Formats: safetensors, `.pt` (a tensor, or nested dictionaries of tensors), `.npz` and `.npy`. The names are read by the first of these
that applies: `names.yaml` in the folder, those of msprobe (`dump.json` and `dump_tensor_data/*.pt`, https://gitcode.com/Ascend/msprobe),
those of `instrument.dump`, and otherwise the name itself is the layer, and the tensor its output.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import torch
from torch import Tensor

from ..analysis.load import Run
from ..errors import ConfigError, Problem
from ..formatting import shorten
from ..storage.row_batches import as_table
from ..storage.run_files import RunFiles
from ..storage.tensors import rows_of
from ..tables.schemas import TABLES
from ..tables.sink_interface import Row
from .tensor_names import BATCH, KIND_OF_ROLE, NAMES_FILE, meaning_of, natural, of_dump, of_plain_name

SUFFIXES = (".safetensors", ".pt", ".pth", ".npz", ".npy")
FLOAT64 = "float64"
"""The subfolder with the same tensors in float64; see `float64` of `instrument.dump`."""
_STEP = re.compile(r"(?:step|iter|pass)[-_]?(\d+)")


class Entry(NamedTuple):
    """One tensor of a folder: where it was computed, and how it is read. `dims` are the names of its first dimensions, if known."""

    layer: str
    role: str
    path: str
    load: Callable[[], Tensor]
    step: int = 0
    call: int = 0
    module_type: str = ""
    dims: tuple[str, ...] = ()

    @property
    def name(self) -> tuple[str, str, str, int]:
        """What identifies the tensor in its step."""
        return self.layer, self.role, self.path, self.call

    @property
    def label(self) -> str:
        """The tensor as it is named in expressions: `LAYER` for an output without a path, or `LAYER:ROLE.PATH`."""
        path = f".{self.path}" if self.path else ""
        return self.layer or "." if self.role == "output" and not path else f"{self.layer or '.'}:{self.role}{path}"


@dataclass(frozen=True)
class ForeignFolder:
    """The tensors of a folder.

    Attributes:
        entries: The tensors, by step in the order of execution as far as it is known.
        ids: The ids of the batch of each step, such as `input_ids`.
        skipped: The tensors that the writer could not write, each with the reason.
        torch: The version of PyTorch of the writer; None if it is unknown.
    """

    path: Path
    entries: list[Entry]
    ids: dict[int, dict[str, Tensor]]
    skipped: dict[str, str]
    torch: str | None

    def run(self, phase: str) -> Run:
        """Return the tensors as a run whose steps have a phase."""
        return Run(self.path, [self.path], [_ForeignFiles(self, phase)])


class _ForeignFiles(RunFiles):
    """The tensors of a folder as rows of the table `tensors`, which are read when they are needed."""

    def __init__(self, folder: ForeignFolder, phase: str) -> None:
        super().__init__(folder.path)
        self._folder, self._phase = folder, phase

    def info(self) -> dict[str, Any]:
        """Return the content that run.json would have."""
        versions = {"torch": self._folder.torch}
        return {"status": "tensors", "seed": None, "overrides": {}, "metrics": {}, "versions": versions}

    def scan(
        self, name: str, columns: Sequence[str], condition: ds.Expression | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Read the rows of a table; only `tensors` has any."""
        entries = self._folder.entries if name == "tensors" else []
        places = pa.table({key: [getattr(entry, key) for entry in entries] for key in ("step", "layer")})
        places = places.append_column("index", pa.array(range(len(entries)), pa.int64()))
        chosen = ds.dataset(places).to_table(filter=condition)["index"].to_pylist() if entries else []
        for index in chosen:
            tensor = entries[index].load().contiguous()
            flat = tensor.reshape(-1) if "data" in columns else tensor.new_empty(0)
            rows = as_table(TABLES[name], rows_of([(self._row(entries[index], tensor), flat, False)]))
            yield from rows.select(list(columns)).to_batches()

    def _row(self, entry: Entry, tensor: Tensor) -> Row:
        """Return the columns of a row before the values."""
        moment = (entry.step, 0, 0, self._phase, 0)
        place = ("dump", entry.layer, entry.module_type, KIND_OF_ROLE[entry.role], entry.role, entry.path)
        shape = [*tensor.shape]
        return (*moment, *place, entry.call, 0, False, "global", str(tensor.dtype)[len("torch.") :], shape, shape)


def is_foreign(path: str | Path) -> bool:
    """Return whether a folder contains files with tensors."""
    return Path(path).is_dir() and next(_files(Path(path)), None) is not None


def read_folder(path: str | Path) -> ForeignFolder:
    """Read which tensors a folder contains.

    Raises:
        ConfigError: The folder contains no tensors, a file cannot be read, or two tensors have the same name.
    """
    folder = Path(path)
    if not is_foreign(folder):
        message = "the folder contains no tensors" if folder.is_dir() else "folder not found"
        raise ConfigError(Problem(str(path), message, allowed=f"a folder with {', '.join(SUFFIXES)} files"))
    meaning = meaning_of(folder)
    result = ForeignFolder(folder, [], {}, {}, None)
    found: dict[tuple[Any, ...], tuple[Any, Entry, str]] = {}
    names: list[str] = []
    about: dict[str, Any] = {}
    for number, file in enumerate(sorted(_files(folder), key=lambda file: natural(str(file)))):
        about, tensors = _contents(file, folder)
        result.skipped.update(about.get("skipped", {}))
        source = str(file.relative_to(folder))
        steps = _STEP.findall(source)
        for index, name in enumerate(about.get("order", tensors)):
            names.append(name)
            fields = meaning(name) if meaning else of_dump(name, about["types"]) if about else of_plain_name(name)
            if fields is None:
                continue
            position = (number, index) if (given := fields.pop("position", None)) is None else (given, number, index)
            step = int(fields.pop("step", steps[-1] if steps else 0))
            if fields["role"] == BATCH:
                result.ids.setdefault(step, {})[fields["path"]] = tensors[name]()
                continue
            entry = Entry(load=tensors[name], step=step, **fields)
            _, _, other = found.setdefault((*entry.name, step), ((step, position), entry, source))
            if found[*entry.name, step][1] is not entry:
                fix = f"pass a folder with one of them, or write {NAMES_FILE}"
                twice = f"{entry.label} in {other} and {source}"
                raise ConfigError(Problem(str(folder), "two tensors have the same name", twice, fix=fix))
    if not found:
        message = f"no name is matched by {NAMES_FILE}" if meaning else "no tensor can be compared"
        raise ConfigError(Problem(str(folder), message, shorten(names), fix=f"write {NAMES_FILE}"))
    result.entries.extend(entry for _, entry, _ in sorted(found.values(), key=lambda each: each[0]))
    return replace(result, torch=about.get("torch"))


def _files(folder: Path) -> Iterator[Path]:
    for file in folder.rglob("*"):
        parts = file.relative_to(folder).parts
        if file.suffix in SUFFIXES and FLOAT64 not in parts and not any(part.startswith(".") for part in parts):
            yield file


def _contents(file: Path, folder: Path) -> tuple[dict[str, Any], dict[str, Callable[[], Tensor]]]:
    """Return what `instrument.dump` says about a file (empty for other writers), and how each of its tensors is read."""
    stem = ".".join(file.relative_to(folder).with_suffix("").parts)
    metadata: Any = {}
    tensors: dict[str, Callable[[], Tensor]]
    try:
        if file.suffix == ".safetensors":
            from safetensors import safe_open

            opened: Any = safe_open(file, framework="pt")
            metadata = opened.metadata()
            tensors = {name: partial(opened.get_tensor, name) for name in sorted(opened.keys(), key=natural)}
        elif file.suffix == ".npz":
            arrays = np.load(file)
            tensors = {name: partial(lambda key, of: torch.from_numpy(of[key]), name, arrays) for name in arrays}
        elif file.suffix == ".npy":
            tensors = {stem: lambda: torch.from_numpy(np.load(file))}
        elif isinstance(content := _torch_load(file), Tensor):
            tensors = {file.stem if "dump_tensor_data" in file.parts else stem: partial(_torch_load, file)}
        else:
            metadata = content.get("metadata")
            is_dump = isinstance(metadata, dict) and "instrument" in metadata
            tensors = dict(_leaves(content["tensors"] if is_dump else content, ""))
    except ImportError:
        message = "reading it requires safetensors"
        raise ConfigError(Problem(str(file), message, fix="pip install safetensors")) from None
    except Exception as error:
        text = str(error).strip().partition("\n")[0]
        raise ConfigError(Problem(str(file), f"cannot be read: {text}", allowed=", ".join(SUFFIXES))) from error
    return json.loads(metadata.get("instrument", "{}")) if isinstance(metadata, dict) else {}, tensors


def _torch_load(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError:  # an old format, which cannot be mapped
        return torch.load(file, map_location="cpu", weights_only=True)


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield the tensors of nested dictionaries and lists, by the keys and indices that lead to each, joined by dots."""
    if isinstance(value, Tensor):
        yield name, lambda: value
    elif isinstance(value, Mapping | list | tuple):
        for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _leaves(each, f"{name}.{key}" if name else str(key))
