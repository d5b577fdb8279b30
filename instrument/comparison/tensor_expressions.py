"""Expressions that compute a tensor of one implementation from those of another, such as `cat(attn.q, attn.k, attn.v)`."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError, Problem, first_line, similar_names
from ..formatting import shorten
from .alignment import pattern_of, replaced
from .foreign_folder import KIND_OF_ROLE, Entry, Reader

ALLOWED = "names, +, -, [slices], .T, cat(a, b, dim=-1), split(a, index, parts, dim=-1), heads(a, number), merge(a), transpose(a, dim, dim)"
_NAME = re.compile(
    r"(?<![\w.*])(?:[A-Za-z_*][\w*]*(?:\.[\w*]+)*|\d+(?:\.[\w*]+)+)(?::[a-z_]+(?:\.[\w.]+)?)?(?![\w.*(:])"
)
"""The name of a tensor, such as `h.*.attn:input`; the second form begins with a number."""
_NODES = (
    *(ast.Expression, ast.Name, ast.Load, ast.Call, ast.keyword, ast.Constant, ast.UnaryOp, ast.USub),
    *(ast.BinOp, ast.Add, ast.Sub, ast.Subscript, ast.Slice, ast.Tuple),
)
"""What expressions consist of. All functions and names in them are known, so that no other code can run."""
_FUNCTIONS: dict[str, Any] = {
    "cat": lambda *tensors, dim=-1: torch.cat(tensors, dim),
    "split": lambda tensor, index, parts, dim=-1: tensor.tensor_split(parts, dim)[index],
    "heads": lambda tensor, number: tensor.unflatten(-1, (number, -1)).transpose(-3, -2),
    "merge": lambda tensor: tensor.transpose(-3, -2).flatten(-2),
    "transpose": torch.transpose,
}


def with_derived(
    entries: Sequence[Entry], others: Sequence[Entry], expressions: Mapping[str, str], names: Mapping[str, str]
) -> list[Entry]:
    """Return the tensors of B with those that expressions compute for tensors of A.

    Args:
        entries: The tensors of B.
        others: The tensors of A.
        expressions: The expression of each name of A, `LAYER` or `LAYER:ROLE.PATH`. The default is the first output. Each
            `*` of a name in an expression is what the wildcard with the same number matches in the name of A.
        names: The name of each layer of A in B, which the computed tensors get.

    Returns:
        The tensors, without those that expressions use, unless A has a layer of their name.

    Raises:
        ConfigError: An expression is invalid, or a name matches no tensor.
    """
    moments: dict[tuple[str, str, str | None], dict[tuple[int, int], Entry]] = {}  # of each name, by step and call
    for entry in entries:
        for path in (None, entry.path):
            moments.setdefault((entry.layer, entry.role, path), {}).setdefault((entry.step, entry.call), entry)
    derived: list[Entry] = []
    used: set[tuple[Any, ...]] = set()
    for old, text in expressions.items():
        where = f"rename {old}={text}"
        given, code = _parsed(text, where)
        layer, role, path = _place(old, where)
        pattern = pattern_of(layer, layer)
        matching: dict[str, tuple[Entry, re.Match[str]]] = {}
        for entry in others:
            match = pattern.fullmatch(f"{entry.layer}." if entry.layer else "")
            if match and not match.groups()[-1] and entry.role == role and path in (None, entry.path):
                matching.setdefault(entry.layer, (entry, match))
        if not matching:
            raise ConfigError(_unknown(where, "matches no recorded tensor of A", old, others))
        for entry, match in matching.values():
            sources: dict[str, dict[tuple[int, int], Entry]] = {}
            for name, source in given.items():
                wanted, *rest = _place(source, where)
                if wanted.count("*") > layer.count("*"):
                    message = "a name has more wildcards than the name of A"
                    raise ConfigError(Problem(where, message, source, f"as many as in {layer}"))
                key: Any = (replaced(wanted, match), *rest)
                if key not in moments:
                    raise ConfigError(_unknown(where, f"B has no tensor {key[0]}:{key[1]}", source, entries))
                sources[name] = moments[key]
            for step, call in set.intersection(*({*each} for each in sources.values())):
                at = {name: each[step, call] for name, each in sources.items()}
                used |= {(*each.name, each.step) for each in at.values() if each.layer not in names.values()}
                load, dims = partial(_evaluated, code, at, where), next(iter(at.values())).dims
                derived.append(Entry(names[entry.layer], role, entry.path, Reader(load), step, call, dims=dims))
    used |= {(*entry.name, entry.step) for entry in derived}
    return [*(entry for entry in entries if (*entry.name, entry.step) not in used), *derived]


def _unknown(where: str, message: str, name: str, entries: Sequence[Entry]) -> Problem:
    known = list(dict.fromkeys(entry.label for entry in entries))
    return Problem(where, message, name, shorten(known), similar_names(name, known))


def _place(name: str, where: str) -> tuple[str, str, str | None]:
    """Return layer, role and path of a name; the path is None if any is meant."""
    layer, _, rest = name.partition(":")
    role, _, path = rest.partition(".")
    if role and role not in KIND_OF_ROLE:
        raise ConfigError(Problem(where, "unknown role", role, [*KIND_OF_ROLE], similar_names(role, KIND_OF_ROLE)))
    return layer, role or "output", path or None


def _parsed(text: str, where: str) -> tuple[dict[str, str], CodeType]:
    """Return the names in an expression, by their placeholders in the code, and the code."""
    keys: dict[str, str] = {}

    def placeholder(match: re.Match[str]) -> str:
        if match[0] == "dim":
            return "dim"
        name = re.sub(r"(\.T)+$", "", match[0])
        return keys.setdefault(name, f"t{len(keys)}_") + match[0][len(name) :]

    plain = _NAME.sub(placeholder, text).strip()
    names = {key: name for name, key in keys.items()}
    try:
        tree = ast.parse(plain, mode="eval")
    except SyntaxError as error:
        raise ConfigError(Problem(where, f"invalid expression: {error.msg}", text, ALLOWED)) from None
    if not names:
        raise ConfigError(Problem(where, "names no tensor", text, ALLOWED))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "T":
            node.attr = "mT"  # the transpose of the last two dimensions
            continue
        is_allowed = isinstance(node, _NODES) and isinstance(getattr(node, "op", ast.Add()), _NODES)
        if not is_allowed or (isinstance(node, ast.Name) and node.id not in {*names, *_FUNCTIONS}):
            source = re.sub(r"t\d+_", lambda key: names[key[0]], ast.get_source_segment(plain, node) or "")
            message = f"not allowed at character {max(text.find(source), 0)}: {source}"
            raise ConfigError(Problem(where, message, text, ALLOWED))
    return names, compile(tree, where, "eval")


def _evaluated(code: CodeType, sources: dict[str, Entry], where: str) -> Tensor:
    """Return the value of an expression.

    Raises:
        ConfigError: The arguments of a function or the shapes of the tensors do not fit.
    """
    tensors = {name: entry.load() for name, entry in sources.items()}
    try:
        value: Tensor = eval(code, {"__builtins__": {}, **_FUNCTIONS, **tensors})[...]  # an error if it is not a tensor
        return value
    except (RuntimeError, IndexError, AttributeError, TypeError, ValueError) as error:
        shapes = ", ".join(f"{entry.label} {[*tensors[name].shape]}" for name, entry in sources.items())
        message = f"cannot be computed: {first_line(error)}"
        raise ConfigError(Problem(where, message, shapes, ALLOWED)) from error
