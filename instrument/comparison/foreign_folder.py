"""Folders of tensors that other programs wrote, read in the same way as the files of a run.

Formats: safetensors, `.pt` (a tensor, or nested dictionaries of tensors), `.npz` and `.npy`. Names are read by the first of these
that applies: `names.yaml` in the folder, those of `instrument.dump`, those of msprobe (a folder with `dump.json` and
`dump_tensor_data/*.pt`, https://gitcode.com/Ascend/msprobe), and otherwise the name itself is the layer, and its tensor the output.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import torch
import yaml
from torch import Tensor

from ..analysis.load import Run
from ..errors import ConfigError, Problem, similar_names
from ..formatting import shorten
from ..storage.parts import ROW_GROUP_BYTES
from ..storage.row_batches import as_table
from ..storage.run_files import RunFiles
from ..storage.tensors import rows_of
from ..tables.schemas import TABLES
from ..tables.sink_interface import Row

SUFFIXES = (".safetensors", ".pt", ".pth", ".npz", ".npy")
NAMES_FILE = "names.yaml"
FLOAT64 = "float64"
"""The subfolder with the same tensors in float64; see `float64` of `instrument.dump`."""
KIND_OF_ROLE = {
    "output": "forward",
    "input": "forward_pre",
    "grad_input": "full_backward",
    "grad_output": "full_backward",
    "param": "step_pre",
    "param_grad": "parameter_grad",
}
IDS = ("input_ids", "position_ids", "attention_mask", "samples")
FIELDS = ("layer", "role", "path", "dims")  # of an entry in the file of names
DIMENSIONS = ("batch", "tokens", "heads", "keys", "other")
MAX_ROWS = 256  # of a batch of rows
_BATCH = "batch"  # the role of ids
_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_OF_DUMP = re.compile(r"(?P<layer>[^:]*):(?P<role>[a-z_]+)(?:\.(?P<path>[^#]*))?(?:#(?P<call>\d+))?")
_OF_MSPROBE = re.compile(
    r"(?:(?:Module|Cell)\.(?:module\.)*(?P<layer>.+?)\.(?P<type>\w+)|(?P<api>[A-Z]\w+\.\w+)\.(?P<number>\d+))"
    r"\.(?P<pass>forward|backward|parameters_grad)(?:\.(?P<call>\d+))?\.?(?P<what>input|output|parameters)?\.?(?P<path>.*)"
)
_ROLE_OF_MSPROBE = {  # what enters a backward pass is the gradient of the output
    ("forward", "input"): "input",
    ("forward", "output"): "output",
    ("forward", "parameters"): "param",
    ("backward", "input"): "grad_output",
    ("backward", "output"): "grad_input",
    ("parameters_grad", None): "param_grad",
}
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
        ids: The ids of the batch of each step: those of `IDS` that are known.
        about: What the first file says about its writer; empty if nothing is known.
    """

    path: Path
    entries: list[Entry]
    ids: dict[int, dict[str, Tensor]]
    about: dict[str, Any]

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
        versions = {"torch": self._folder.about["torch"]} if "torch" in self._folder.about else {}
        return {"status": "tensors", "seed": None, "overrides": {}, "metrics": {}, "versions": versions}

    def scan(
        self, name: str, columns: Sequence[str], condition: ds.Expression | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Read the rows of a table; only `tensors` has any."""
        entries = self._folder.entries if name == "tensors" else []
        places = pa.table({"step": [entry.step for entry in entries], "layer": [entry.layer for entry in entries]})
        places = places.append_column("index", pa.array(range(len(entries)), pa.int64()))
        chosen = ds.dataset(places).to_table(filter=condition) if entries else places
        has_values = "data" in columns
        pending: list[tuple[Row, Tensor, bool]] = []
        size = 0
        for index in chosen["index"].to_pylist():
            tensor = entries[index].load().contiguous()
            flat = tensor.reshape(-1) if has_values else tensor.new_empty(0)
            pending.append((self._row(entries[index], tensor), flat, False))
            size += flat.nbytes
            if len(pending) >= MAX_ROWS or size >= ROW_GROUP_BYTES:
                yield from as_table(TABLES[name], rows_of(pending)).select(list(columns)).to_batches()
                pending, size = [], 0
        if pending:
            yield from as_table(TABLES[name], rows_of(pending)).select(list(columns)).to_batches()

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
    names_file, order = _names_of(folder), _msprobe_order(folder)
    entries: dict[tuple[Any, ...], tuple[Any, Entry, str]] = {}
    ids: dict[int, dict[str, Tensor]] = {}
    first: dict[str, Any] = {}
    for file in sorted(_files(folder), key=lambda file: _natural(str(file))):
        about, tensors = _contents(file, folder)
        first = first or about
        source = str(file.relative_to(folder))
        steps = _STEP.findall(source)
        for index, (name, load) in enumerate(tensors.items()):
            fields = names_file.fields(name) if names_file else _fields(name, about, is_msprobe=bool(order))
            if fields is None:
                continue
            position = fields.pop("position", None) or (
                order.get(name.rpartition(".")[0], len(order)) if order else index
            )
            step = int(fields.pop("step", steps[-1] if steps else 0))
            if fields["role"] == _BATCH:
                ids.setdefault(step, {})[fields["path"]] = load()
                continue
            entry = Entry(load=load, step=step, **fields)
            if (key := (*entry.name, step)) in entries:
                fix = f"pass a folder with one of them, or write {NAMES_FILE}"
                given = f"{entries[key][2]} and {source}: {name}"
                raise ConfigError(Problem(str(folder), "two tensors have the same name", given, fix=fix))
            entries[key] = ((step, position), entry, source)
    if not entries:
        fix = f"the entries of {NAMES_FILE} must match the names of tensors, such as {name}"
        raise ConfigError(Problem(str(folder), "no tensor has a layer", fix=fix))
    ordered = sorted(entries.values(), key=lambda each: each[0])
    return ForeignFolder(folder, [entry for _, entry, _ in ordered], ids, first)


def _files(folder: Path) -> Iterator[Path]:
    return (
        file
        for file in folder.rglob("*")
        if file.suffix in SUFFIXES
        and not any(part in (FLOAT64,) or part[0] == "." for part in file.relative_to(folder).parts)
    )


def _natural(text: str) -> list[tuple[bool, int, str]]:
    """Return a sort key that puts layer 10 after layer 9."""
    return [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", text)]


def _contents(file: Path, folder: Path) -> tuple[dict[str, Any], dict[str, Callable[[], Tensor]]]:
    """Return what a file says about its writer, and its tensors in the order of execution as far as it is known."""
    stem = ".".join(file.relative_to(folder).with_suffix("").parts)
    metadata: Mapping[str, str] = {}
    tensors: dict[str, Callable[[], Tensor]]
    try:
        if file.suffix == ".safetensors":
            from safetensors import safe_open

            opened: Any = safe_open(file, framework="pt")
            metadata = opened.metadata() or {}
            tensors = {name: partial(opened.get_tensor, name) for name in sorted(opened.keys(), key=_natural)}
        elif file.suffix in (".npz", ".npy"):
            arrays = np.load(file, mmap_mode="r" if file.suffix == ".npy" else None)
            names = [*arrays] if file.suffix == ".npz" else []
            tensors = {name: partial(_of_array, arrays, name) for name in names} or {stem: partial(_of_array, arrays)}
        else:
            content = _torch_load(file)
            if isinstance(content, Tensor):
                name = file.stem if "dump_tensor_data" in file.parts else stem
                return {}, {name: partial(_torch_load, file)}
            metadata = content.get("metadata", {}) if isinstance(content.get("metadata"), dict) else {}
            tensors = dict(_leaves(content["tensors"] if "instrument" in metadata else content, ""))
    except ImportError:
        raise ConfigError(
            Problem(str(file), "reading it requires safetensors", fix="pip install safetensors")
        ) from None
    except Exception as error:
        text = str(error).strip().partition("\n")[0]
        raise ConfigError(Problem(str(file), f"cannot be read: {text}", allowed=f"{', '.join(SUFFIXES)}")) from error
    about = json.loads(metadata.get("instrument", "{}"))
    same = about.get("same", {})
    # A tensor with the bytes of an earlier one can refer to another file of the pass.
    return about, {
        name: tensors.get(same.get(name, name)) or _elsewhere(file, same[name]) for name in about.get("order", tensors)
    }


def _elsewhere(file: Path, name: str) -> Callable[[], Tensor]:
    """Return how a tensor is read that an earlier file of the pass contains."""
    first = file.with_name(re.sub(r"(pass-\d+)-\d+", r"\1", file.name))
    for other in sorted(file.parent.glob(f"{first.stem}*{file.suffix}")):
        about, tensors = _contents(other, file.parent) if other < file else ({}, {})
        if name in tensors and name not in about.get("same", {}):
            return tensors[name]
    raise ConfigError(Problem(str(file), f"the tensor {name} is in an earlier file of the pass, which does not exist"))


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
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, each in items:
            yield from _leaves(each, f"{name}.{key}" if name else str(key))


def _of_array(arrays: Any, name: str | None = None) -> Tensor:
    return torch.from_numpy(np.array(arrays if name is None else arrays[name]))


def _fields(name: str, about: Mapping[str, Any], *, is_msprobe: bool) -> dict[str, Any] | None:
    """Return the fields of an entry by the name of its tensor; None if it is not compared."""
    if about and (match := _OF_DUMP.fullmatch(name)):
        if match["role"] == "input" and "mask" in (match["path"] or "").rpartition(".")[2]:
            return None  # masks have many forms; what they do is visible in the attention
        layer, call = match["layer"], int(match["call"] or 0)
        module_type = about["types"].get(layer, "")
        return {
            "layer": layer,
            "role": match["role"],
            "path": match["path"] or "",
            "call": call,
            "module_type": module_type,
        }
    if is_msprobe:
        match = _OF_MSPROBE.fullmatch(name)
        role = match and _ROLE_OF_MSPROBE.get((match["pass"], match["what"]))
        if not match or not role:
            return None
        layer, call = match["layer"] or match["api"], int(match["number"] or match["call"] or 0)
        path = match["path"] if role.startswith("param") else match["path"].removeprefix("kwargs.")
        return {"layer": layer, "role": role, "path": path, "call": call, "module_type": match["type"] or ""}
    layer, _, last = name.rpartition(".")
    if last in ("weight", "bias"):
        return {"layer": layer, "role": "param", "path": last}
    return {"layer": name, "role": "output", "path": ""}


def _msprobe_order(folder: Path) -> dict[str, int]:
    """Return the index of each call in the files of msprobe; empty for other folders."""
    calls: dict[str, int] = {}
    for file in sorted(folder.rglob("dump.json"), key=lambda file: _natural(str(file))):
        content = json.loads(file.read_text())
        for call, arguments in (content.get("data") or {}).items():
            calls.setdefault(call, len(calls))
            for group in ("input", "output", "parameters"):
                calls.setdefault(f"{call}.{group}", calls[call])
            for group in arguments if isinstance(arguments, Mapping) else ():
                calls.setdefault(f"{call}.{group}", calls[call])
    return calls


class _Names:
    """The file that says what the names of tensors mean."""

    def __init__(self, file: Path, content: Any) -> None:
        self.file = str(file)
        if not isinstance(content, dict) or not isinstance(content.get("tensors"), dict):
            raise ConfigError(Problem(self.file, "must be a mapping with the key tensors", allowed="tensors, ids"))
        problems = [
            self._unknown("", [*content], ("tensors", "ids")),
            self._unknown("ids", [*content.get("ids", {})], IDS),
        ]
        for pattern, fields in content["tensors"].items():
            if not isinstance(fields, dict | None):
                problems.append(
                    Problem(f"{file}: tensors.{pattern}", "must be a mapping, or null to leave it out", fields)
                )
                continue
            given = fields or {}
            problems.append(self._unknown(f"tensors.{pattern}", [*given], FIELDS))
            problems.append(self._unknown(f"tensors.{pattern}.role", [given.get("role", "output")], [*KIND_OF_ROLE]))
            problems.append(self._unknown(f"tensors.{pattern}.dims", given.get("dims", []), DIMENSIONS))
        if found := [problem for problem in problems if problem]:
            raise ConfigError(*found)
        ids: dict[str, Any] = {
            pattern: {"role": _BATCH, "layer": "", "path": name} for name, pattern in content.get("ids", {}).items()
        }
        self._entries = [(self._pattern(name), name, fields) for name, fields in (ids | content["tensors"]).items()]

    def fields(self, name: str) -> dict[str, Any] | None:
        """Return the fields of an entry by the name of its tensor; None if no pattern matches, or it is null."""
        group, before = 0, None
        for index, (pattern, text, fields) in enumerate(self._entries):
            # Consecutive patterns with the same placeholders are one block, which is repeated for each of their values.
            group, before = (group, before) if {*pattern.groupindex} == before else (index, {*pattern.groupindex})
            if match := pattern.fullmatch(name):
                if fields is None:
                    return None
                values = match.groupdict()
                given = {key: self._filled(fields[key], values) for key in ("layer", "path") if key in fields}
                numbers = {key: int(values[key]) for key in ("step", "call") if key in values}
                rest = [_natural(value) for key, value in values.items() if key != "step"]
                position = (group, rest, index, _natural(name))
                place = {"layer": text if not values else name, "path": "", **given, **numbers, "position": position}
                return {**place, "role": fields.get("role", "output"), "dims": tuple(fields.get("dims", ()))}
        return None

    def _filled(self, text: str, values: Mapping[str, str]) -> str:
        unknown = [each for each in _PLACEHOLDER.findall(text) if each not in values]
        if unknown:
            raise ConfigError(
                Problem(self.file, f"the pattern has no placeholder {{{unknown[0]}}}", text, shorten([*values]))
            )
        return _PLACEHOLDER.sub(lambda match: values[match[1]], text)

    def _pattern(self, text: str) -> re.Pattern[str]:
        parts = _PLACEHOLDER.split(text)
        seen: set[str] = set()
        for index, name in enumerate(parts):
            if index % 2 == 0:
                parts[index] = re.escape(name)
                continue
            values = r"\d+" if name in ("step", "call") else ".+?"
            parts[index] = f"(?P={name})" if name in seen else f"(?P<{name}>{values})"
            seen.add(name)
        return re.compile("".join(parts))

    def _unknown(self, where: str, given: Sequence[str], allowed: Sequence[str]) -> Problem | None:
        """Return the problem that one of the given words is not allowed."""
        wrong = [word for word in given if word not in allowed]
        place = f"{self.file}: {where}" if where else self.file
        return (
            Problem(place, "unknown name", wrong[0], allowed, similar_names(str(wrong[0]), allowed)) if wrong else None
        )


def _names_of(folder: Path) -> _Names | None:
    file = folder / NAMES_FILE
    if not file.exists():
        return None
    try:
        return _Names(file, yaml.safe_load(file.read_text()))
    except yaml.YAMLError as error:
        raise ConfigError(Problem(str(file), f"is not valid YAML: {error}")) from error
