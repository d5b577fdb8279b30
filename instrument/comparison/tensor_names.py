"""What the names of tensors that other programs wrote mean: those of `instrument.dump`, of msprobe, and of a file `names.yaml`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from ..config.parse import build
from ..errors import ConfigError, Problem
from ..fields.field_types import Spec
from ..importers.source import read_source

NAMES_FILE = "names.yaml"
Role = Literal["output", "input", "grad_input", "grad_output", "param", "param_grad"]
KIND_OF_ROLE: dict[str, str] = {
    "output": "forward",
    "input": "forward_pre",
    "grad_input": "full_backward",
    "grad_output": "full_backward",
    "param": "step_pre",
    "param_grad": "parameter_grad",
}
BATCH = "batch"
"""The role of the ids of a batch."""
Meaning = Callable[[str], dict[str, Any] | None]
"""Returns the fields of `Entry` by the name of a tensor, with `position` where it orders the tensors; None if it is left out."""
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


class TensorMeaning(Spec):
    """The meaning of the tensors whose names match a pattern; the placeholders of the pattern can be used in `layer` and `path`."""

    layer: str | None = None
    role: Role = "output"
    path: str = ""
    dims: tuple[Literal["batch", "tokens", "heads"], ...] = ()


class NamesFile(Spec):
    """The content of `names.yaml`; tensors whose pattern is null, and those that match no pattern, are left out."""

    tensors: dict[str, dict[str, Any] | None]
    ids: dict[Literal["input_ids", "position_ids", "attention_mask", "samples"], str] = Field(default_factory=dict)


def natural(text: str) -> list[tuple[bool, int, str]]:
    """Return a sort key that puts layer 10 after layer 9."""
    return [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", text)]


def of_dump(name: str, types: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the fields of a tensor of `instrument.dump`; None for masks, which have many forms: their effect is in the attention."""
    match = _OF_DUMP.fullmatch(name)
    if not match or (match["role"] == "input" and "mask" in (match["path"] or "").rpartition(".")[2]):
        return None
    fields = {**match.groupdict(default=""), "call": int(match["call"] or 0)}
    return {**fields, "module_type": types.get(match["layer"], "")}


def of_plain_name(name: str) -> dict[str, Any]:
    """Return the fields of a tensor without further information: a parameter, or the output of a layer."""
    layer, _, last = name.rpartition(".")
    is_parameter = last in ("weight", "bias")
    place = (layer, "param", last) if is_parameter else (name, "output", "")
    return dict(zip(("layer", "role", "path"), place, strict=True))


def meaning_of(folder: Path) -> Meaning | None:
    """Return what the names in a folder mean; None if neither `names.yaml` nor msprobe determines it.

    Raises:
        ConfigError: `names.yaml` is invalid.
    """
    if (file := folder / NAMES_FILE).exists():
        return _of_file(file)
    if reports := sorted(folder.rglob("dump.json"), key=lambda report: natural(str(report))):
        calls = [call for report in reports for call in json.loads(report.read_text()).get("data") or {}]
        return _of_msprobe({call: index for index, call in reversed([*enumerate(calls)])})
    return None


def _of_msprobe(order: Mapping[str, int]) -> Meaning:
    """Return the meaning of names of msprobe. `order` is the index of each call in `dump.json`; inputs precede outputs."""

    def fields(name: str) -> dict[str, Any] | None:
        match = _OF_MSPROBE.fullmatch(name)
        role = match and _ROLE_OF_MSPROBE.get((match["pass"], match["what"]))
        if not match or not role:
            return None
        end = match.start("what" if match["what"] else "path") - 1
        is_result = role in ("output", "grad_input")
        position = (order.get(name[:end], len(order)), is_result, natural(match["path"]))
        path, call = match["path"].removeprefix("kwargs."), int(match["number"] or match["call"] or 0)
        place = {"layer": match["layer"] or match["api"], "role": role, "path": path, "call": call}
        return {**place, "module_type": match["type"] or "", "position": position}

    return fields


def _of_file(file: Path) -> Meaning:
    """Return the meaning of names according to `names.yaml`. The tensors are in the order of its entries; consecutive entries with
    the same placeholders form a block, which is repeated for each of their values.
    """
    content = read_source(file)
    if not isinstance(content, dict):
        raise ConfigError(Problem(str(file), "must be a mapping", content, "tensors, ids"))
    names = build(NamesFile, content, str(file))
    entries = [(_pattern(text), TensorMeaning(layer="", path=name), BATCH) for name, text in names.ids.items()]
    for text, given in names.tensors.items():
        where, pattern = f"{file}: tensors.{text}", _pattern(text)
        meaning = TensorMeaning() if given is None else build(TensorMeaning, given, where)
        known = [*pattern.groupindex]
        if unknown := [each for each in _PLACEHOLDER.findall(f"{meaning.layer}{meaning.path}") if each not in known]:
            message = f"the pattern has no placeholder {{{unknown[0]}}}"
            raise ConfigError(Problem(where, message, allowed=known or "no placeholders"))
        entries.append((pattern, meaning, "" if given is None else meaning.role))

    def fields(name: str) -> dict[str, Any] | None:
        block, before = 0, None
        for index, (pattern, meaning, role) in enumerate(entries):
            block, before = (block, before) if {*pattern.groupindex} == before else (index, {*pattern.groupindex})
            if not (match := pattern.fullmatch(name)):
                continue
            if not role:
                return None
            values = match.groupdict()
            layer = name if meaning.layer is None else _filled(meaning.layer, values)
            place = {"layer": layer, "role": role, "path": _filled(meaning.path, values), "dims": meaning.dims}
            numbers = {key: int(text) for key, text in values.items() if key in ("step", "call")}
            position = (block, [natural(text) for key, text in values.items() if key != "step"], index)
            return {**place, **numbers, "position": position}
        return None

    return fields


def _filled(template: str, values: Mapping[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda match: values[match[1]], template)


def _pattern(text: str) -> re.Pattern[str]:
    """Return the regular expression of a pattern with placeholders. `{step}` and `{call}` are numbers."""
    given, parts = _PLACEHOLDER.split(text), []
    for index, part in enumerate(given):
        values = r"\d+" if part in ("step", "call") else ".+?"
        group = f"(?P={part})" if part in given[1:index:2] else f"(?P<{part}>{values})"
        parts.append(group if index % 2 else re.escape(part))
    return re.compile("".join(parts))
