"""Folders of tensors that other programs wrote, read in the same way as the files of a run.

Formats: safetensors, `.pt` (a tensor, or nested dictionaries of tensors), `.npz` and `.npy`. The names are read by the first of these
that applies: `names.yaml` in the folder, those of msprobe (`dump.json` and `dump_tensor_data/*.pt`, https://gitcode.com/Ascend/msprobe),
those of `instrument.dump`, and otherwise the name itself is the layer, and the tensor its output.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import torch
from pydantic import Field
from torch import Tensor

from ..config.parse import build
from ..errors import ConfigError, Problem, first_line
from ..fields.field_types import Spec
from ..formatting import natural_key, shorten
from ..importers.conversion import read_source
from ..storage.row_batches import as_table
from ..storage.run_files import RunFiles
from ..storage.tensors import rows_of
from ..tables.schemas import TABLES

SUFFIXES = (".safetensors", ".pt", ".npz", ".npy")
NAMES_FILE = "names.yaml"
REPORT = "dump.json"
"""The file in which msprobe describes the tensors of a step."""
FLOAT64 = "float64"
"""The subfolder with the same tensors in float64; see `float64` of `instrument.dump`."""
KIND_OF_ROLE = {"output": "forward", "input": "forward_pre", "param": "step_pre", "param_grad": "parameter_grad"}
KIND_OF_ROLE |= {"grad_input": "full_backward", "grad_output": "full_backward"}
Load = Callable[[], Tensor]
Meaning = Callable[[str], dict[str, Any] | None]
"""Returns the fields of `Entry` by the name of a tensor, with `position` where it orders the tensors; None if it is left out.
The ids of a batch have the role `batch`."""
_STEP = re.compile(r"(?:step|iter|pass)[-_]?(\d+)")
_PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)\}")
_OF_DUMP = re.compile(r"(?P<layer>[^:]*):(?P<role>[a-z_]+)(?:\.(?P<path>[^#]*))?(?:#(?P<call>\d+))?")
_OF_MSPROBE = re.compile(
    r"(?:(?:Module|Cell)\.(?:module\.)*(?P<layer>.+?)\.(?P<type>\w+)|(?P<api>[A-Z]\w+\.\w+)\.(?P<number>\d+))"
    r"\.(?P<pass>forward|backward|parameters_grad)(?:\.(?P<call>\d+))?\.?(?P<what>input|output|parameters)?\.?(?P<path>.*)"
)
_ROLE_OF_MSPROBE = {"forward input": "input", "forward output": "output", "forward parameters": "param"}
_ROLE_OF_MSPROBE |= {"parameters_grad None": "param_grad"}
_ROLE_OF_MSPROBE |= {"backward input": "grad_output", "backward output": "grad_input"}  # of the backward pass


class Reader:
    """Reads a tensor. Its shape and dtype are known after it was read once."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._like: Tensor | None = None

    def __call__(self) -> Tensor:
        tensor = self._load()
        self._like = tensor.new_empty(tensor.shape, device="meta")
        return tensor

    @property
    def like(self) -> Tensor:
        """A tensor of device `meta` with its shape and dtype."""
        return self().to("meta") if self._like is None else self._like


class Entry(NamedTuple):
    """One tensor of a folder: where it was computed, and how it is read."""

    layer: str
    role: str
    path: str
    load: Reader
    step: int = 0
    call: int = 0
    module_type: str = ""
    dims: tuple[str, ...] = ()  # the names of its first dimensions, if they are known

    @property
    def name(self) -> tuple[str, str, str, int]:
        """What identifies the tensor in its step."""
        return self.layer, self.role, self.path, self.call

    @property
    def label(self) -> str:
        """The tensor as it is named in expressions: `LAYER` for an output without a path, or `LAYER:ROLE.PATH`."""
        path = f".{self.path}" if self.path else ""
        return self.layer or "." if self.role == "output" and not path else f"{self.layer or '.'}:{self.role}{path}"


class ForeignFolder(RunFiles):
    """The tensors of a folder as rows of the table `tensors`, which are read when they are needed."""

    def __init__(self, path: Path, entries: Sequence[Entry] = ()) -> None:
        super().__init__(path)
        self.path, self.entries = path, [*entries]  # by step, in the order of execution as far as it is known
        self.ids: dict[int, dict[str, Tensor]] = {}  # those of the batch of each step, such as `input_ids`
        self.skipped: dict[str, str] = {}  # the tensors that the writer could not write, each with the reason
        self.torch: str | None = None  # the version of PyTorch of the writer, if it is known
        self.phase = "forward"

    def info(self) -> dict[str, Any]:
        """Return the content that run.json would have."""
        return {"status": "tensors", "seed": None, "overrides": {}, "metrics": {}, "versions": {"torch": self.torch}}

    def scan(
        self, name: str, columns: Sequence[str], condition: ds.Expression | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Read the rows of a table; only `tensors` has any."""
        entries = self.entries if name == "tensors" else []
        places = pa.table({key: [getattr(entry, key) for entry in entries] for key in ("step", "layer")})
        places = places.append_column("index", pa.array(range(len(entries)), pa.int64()))
        for index in ds.dataset(places).to_table(filter=condition)["index"].to_pylist() if entries else []:
            entry = entries[index]
            try:
                tensor = entry.load().contiguous() if "data" in columns else entry.load.like
            except (RuntimeError, ValueError, IndexError) as error:
                where, message = f"{self.path}: {entry.label}", f"cannot be read: {first_line(error)}"
                fix = f"leave it out with null, or correct its dims, in {NAMES_FILE}"
                raise ConfigError(Problem(where, message, fix=fix)) from error
            about = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": [*tensor.shape]}
            known = self._row(entry) | about | {"source_shape": about["shape"]}
            row = tuple(known.get(key) for key in TABLES[name].plain_schema.names[:-2])  # all columns before the values
            flat = tensor.reshape(-1) if "data" in columns else tensor.new_empty(0, device="cpu")
            yield from as_table(TABLES[name], rows_of([(row, flat, False)])).select(list(columns)).to_batches()

    def _row(self, entry: Entry) -> dict[str, Any]:
        place = {name: getattr(entry, name) for name in ("step", "layer", "module_type", "role", "path", "call")}
        place |= {"kind": KIND_OF_ROLE[entry.role], "phase": self.phase, "hook": "dump", "scope": "global"}
        zeros = dict.fromkeys(("micro_step", "epoch", "rank", "backward"), 0)
        return place | zeros | {"recompute": False, "mesh": "", "placement": ""}


class TensorMeaning(Spec):
    """The meaning of the tensors whose names match a pattern; the placeholders of the pattern can be used in `layer` and `path`."""

    layer: str | None = None
    role: Literal["output", "input", "grad_input", "grad_output", "param", "param_grad"] = "output"
    path: str = ""
    dims: tuple[Literal["batch", "tokens", "heads"], ...] = ()


class NamesFile(Spec):
    """The content of `names.yaml`; tensors whose pattern is null, and those that match no pattern, are left out."""

    tensors: dict[str, dict[str, Any] | None]
    ids: dict[Literal["input_ids", "position_ids", "attention_mask", "samples"], str] = Field(default_factory=dict)


def is_foreign(path: str | Path) -> bool:
    """Return whether a folder contains files with tensors."""
    return Path(path).is_dir() and next(_files(Path(path)), None) is not None


def read_folder(path: str | Path) -> ForeignFolder:
    """Read which tensors a folder contains.

    Raise a ConfigError if it contains none, a file or `names.yaml` is invalid, or two tensors have the same name.
    """
    folder = Path(path)
    if not is_foreign(folder):
        message = "the folder contains no tensors" if folder.is_dir() else "folder not found"
        raise ConfigError(Problem(str(path), message, allowed=f"a folder with {', '.join(SUFFIXES)} files"))
    meaning: Meaning | None = None
    if (names := folder / NAMES_FILE).exists():
        meaning = _of_names_file(names)
    elif reports := sorted(folder.rglob(REPORT), key=lambda report: natural_key(str(report))):
        calls = [call for report in reports for call in read_source(report).get("data") or {}]
        meaning = partial(_of_msprobe, {call: index for index, call in reversed([*enumerate(calls)])})
    result = ForeignFolder(folder)
    found: dict[tuple[Any, ...], tuple[Any, Entry, str]] = {}
    for number, file in enumerate(sorted(_files(folder), key=lambda file: natural_key(str(file)))):
        about, tensors = _contents(file, folder)
        result.torch = about.get("torch")
        result.skipped |= about.get("skipped", {})
        source = str(file.relative_to(folder))
        steps = _STEP.findall(source)
        for index, name in enumerate(about.get("order", tensors)):
            fields = meaning(name) if meaning else _of_dump(name, about["types"]) if about else _of_plain_name(name)
            if fields is None:
                continue
            order = (*([fields.pop("position")] if "position" in fields else []), number, index)
            step = int(fields.pop("step", steps[-1] if steps else 0))
            if fields["role"] == "batch":
                result.ids.setdefault(step, {})[fields["path"]] = tensors[name]()
                continue
            entry = Entry(load=Reader(tensors[name]), step=step, **fields)
            if (key := (*entry.name, step)) in found:
                twice = f"{entry.label} in {found[key][2]} and {source}"
                fix = f"pass a folder with one of them, or write {NAMES_FILE}"
                raise ConfigError(Problem(str(folder), "two tensors have the same name", twice, fix=fix))
            found[key] = ((step, order), entry, source)
    if not found:
        message = f"no name is matched by {NAMES_FILE}" if meaning else "no tensor can be compared"
        raise ConfigError(Problem(str(folder), message, shorten(list(tensors)), fix=f"write {NAMES_FILE}"))
    result.entries += [entry for _, entry, _ in sorted(found.values(), key=lambda each: each[0])]
    return result


def _files(folder: Path) -> Iterator[Path]:
    for file in folder.rglob("*"):
        parts = file.relative_to(folder).parts
        if file.suffix in SUFFIXES and FLOAT64 not in parts and not any(part.startswith(".") for part in parts):
            yield file


def _contents(file: Path, folder: Path) -> tuple[dict[str, Any], dict[str, Load]]:
    """Return what `instrument.dump` says about a file (empty for other writers), and how each of its tensors is read."""
    stem = ".".join(file.relative_to(folder).with_suffix("").parts)
    metadata: Any = {}
    tensors: dict[str, Load]
    try:
        if file.suffix == ".safetensors":
            from safetensors import safe_open

            opened: Any = safe_open(file, framework="pt")
            metadata = opened.metadata()
            tensors = {name: partial(opened.get_tensor, name) for name in sorted(opened.keys(), key=natural_key)}
        elif file.suffix == ".npz":
            arrays = np.load(file)
            tensors = {name: partial(lambda key, of: torch.from_numpy(of[key]), name, arrays) for name in arrays}
        elif file.suffix == ".npy":
            tensors = {stem: lambda: torch.from_numpy(np.load(file))}
        elif isinstance(content := _torch_load(file), Tensor):
            tensors = {file.stem if "dump_tensor_data" in file.parts else stem: partial(_torch_load, file)}
        else:
            metadata = content.get("metadata") if isinstance(content, dict) else None
            is_dump = isinstance(metadata, dict) and "instrument" in metadata
            tensors = dict(_leaves(content["tensors"] if is_dump else content, ""))
    except ImportError:
        raise ConfigError(Problem(str(file), "requires safetensors", fix="pip install safetensors")) from None
    except Exception as error:
        message = f"cannot be read: {first_line(error)}"
        raise ConfigError(Problem(str(file), message, allowed=", ".join(SUFFIXES))) from error
    return json.loads(metadata.get("instrument", "{}")) if isinstance(metadata, dict) else {}, tensors


def _torch_load(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError:  # an old format, which cannot be mapped
        return torch.load(file, map_location="cpu", weights_only=True)


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Load]]:
    """Yield the tensors of nested dictionaries and lists, by the keys and indices that lead to each, joined by dots."""
    if isinstance(value, Tensor):
        yield name, lambda: value
    elif isinstance(value, Mapping | list | tuple):
        for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _leaves(each, f"{name}.{key}" if name else str(key))


def _of_dump(name: str, types: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the fields of a tensor of `instrument.dump`; None for masks, which have many forms: their effect is in the attention."""
    match = _OF_DUMP.fullmatch(name)
    if not match or (match["role"] == "input" and "mask" in (match["path"] or "").rpartition(".")[2]):
        return None
    fields = {**match.groupdict(default=""), "call": int(match["call"] or 0)}
    return {**fields, "module_type": types.get(match["layer"], "")}


def _of_plain_name(name: str) -> dict[str, Any]:
    """Return the fields of a tensor without further information: a parameter, or the output of a layer."""
    layer, _, last = name.rpartition(".")
    place = (layer, "param", last) if last in ("weight", "bias") else (name, "output", "")
    return dict(zip(("layer", "role", "path"), place, strict=True))


def _of_msprobe(order: Mapping[str, int], name: str) -> dict[str, Any] | None:
    """Return the fields of a tensor of msprobe. `order` is the index of each call in `dump.json`; inputs precede outputs."""
    match = _OF_MSPROBE.fullmatch(name)
    role = _ROLE_OF_MSPROBE.get(f"{match['pass']} {match['what']}") if match else None
    if not match or not role:
        return None
    call = name[: match.start("what" if match["what"] else "path") - 1]
    position = (order.get(call, len(order)), role in ("output", "grad_input"), natural_key(match["path"]))
    place = {"layer": match["layer"] or match["api"], "role": role, "path": match["path"].removeprefix("kwargs.")}
    number = int(match["number"] or match["call"] or 0)
    return {**place, "call": number, "module_type": match["type"] or "", "position": position}


def _of_names_file(file: Path) -> Meaning:
    """Return the meaning of names according to `names.yaml`. The tensors are in the order of its entries; consecutive entries with
    the same placeholders form a block, which is repeated for each of their values.
    """
    content = read_source(file)
    if not isinstance(content, dict):
        raise ConfigError(Problem(str(file), "must be a mapping", content, "tensors, ids"))
    names = build(NamesFile, content, str(file))
    entries = [(_pattern(text), TensorMeaning(layer="", path=name), "batch") for name, text in names.ids.items()]
    for text, given in names.tensors.items():
        where, pattern = f"{file}: tensors.{text}", _pattern(text)
        meaning = TensorMeaning() if given is None else build(TensorMeaning, given, where)
        known = [*pattern.groupindex]
        if unknown := [each for each in _PLACEHOLDER.findall(f"{meaning.layer}{meaning.path}") if each not in known]:
            message = f"the pattern has no placeholder {{{unknown[0]}}}"
            raise ConfigError(Problem(where, message, allowed=known or "no placeholders"))
        entries.append((pattern, meaning, "" if given is None else meaning.role))

    def fields(name: str) -> dict[str, Any] | None:
        block = 0
        for index, (pattern, meaning, role) in enumerate(entries):
            block = block if index and pattern.groupindex.keys() == entries[index - 1][0].groupindex.keys() else index
            if match := pattern.fullmatch(name):
                values = match.groupdict()
                texts = {"layer": name if meaning.layer is None else meaning.layer, "path": meaning.path}
                place = {key: _filled(text, values) for key, text in texts.items()}
                numbers = {key: int(text) for key, text in values.items() if key in ("step", "call")}
                position = (block, [natural_key(text) for key, text in values.items() if key != "step"], index)
                return {**place, "role": role, "dims": meaning.dims, **numbers, "position": position} if role else None
        return None

    return fields


def _filled(template: str, values: Mapping[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda part: values.get(part[1], part[0]), template)


def _pattern(text: str) -> re.Pattern[str]:
    """Return the regular expression of a pattern with placeholders. `{step}` and `{call}` are numbers."""
    given, parts = _PLACEHOLDER.split(text), []
    for index, part in enumerate(given):
        values = r"\d+" if part in ("step", "call") else ".+?"
        group = f"(?P={part})" if part in given[1:index:2] else f"(?P<{part}>{values})"
        parts.append(group if index % 2 else re.escape(part))
    return re.compile("".join(parts))
