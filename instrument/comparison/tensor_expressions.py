"""Expressions that compute a tensor of one implementation from those of another, such as `cat(attn.q, attn.k, attn.v)`."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError, Problem, similar_names
from ..formatting import shorten
from .foreign_folder import Entry
from .layer_renaming import pattern_of, replaced
from .tensor_names import KIND_OF_ROLE

ALLOWED = "names, +, -, [slices], .T, cat(a, b, dim=-1), split(a, index, parts, dim=-1), heads(a, number), transpose(a, dim, dim)"
_NAME = re.compile(
    r"(?<![\w.*])(?:[A-Za-z_*][\w*]*(?:\.[\w*]+)*|\d+(?:\.[\w*]+)+)(?::[a-z_]+(?:\.[\w.]+)?)?(?![\w.*(:])"
)
"""The name of a tensor, such as `h.*.attn:input`; the second form begins with a number."""


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
        The tensors, without those that expressions use.

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
        given, tree = _parsed(text, where)
        layer, role, path = _split(old, where)
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
                wanted, source_role, source_path = _split(source, where)
                if wanted.count("*") > layer.count("*"):
                    message = "a name has more wildcards than the name of A"
                    raise ConfigError(Problem(where, message, source, f"as many as in {layer}"))
                key = (replaced(wanted, match), source_role, source_path)
                if key not in moments:
                    raise ConfigError(_unknown(where, f"B has no tensor {key[0]}:{source_role}", source, entries))
                sources[name] = moments[key]
            for moment in set.intersection(*({*each} for each in sources.values())):
                at = {name: each[moment] for name, each in sources.items()}
                used |= {(*each.name, each.step) for each in at.values()}
                load, dims = partial(_evaluated, tree.body, at, where), next(iter(at.values())).dims
                step, call = moment
                derived.append(Entry(names[entry.layer], entry.role, entry.path, load, step, call, dims=dims))
    used |= {(*entry.name, entry.step) for entry in derived}
    return [*(entry for entry in entries if (*entry.name, entry.step) not in used), *derived]


def _unknown(where: str, message: str, name: str, entries: Sequence[Entry]) -> Problem:
    known = list(dict.fromkeys(entry.label for entry in entries))
    return Problem(where, message, name, shorten(known), similar_names(name, known))


def _split(name: str, where: str) -> tuple[str, str, str | None]:
    """Return layer, role and path of a name; the path is None if any is meant."""
    layer, _, rest = name.partition(":")
    role, _, path = rest.partition(".")
    if role and role not in KIND_OF_ROLE:
        raise ConfigError(Problem(where, "unknown role", role, [*KIND_OF_ROLE], similar_names(role, KIND_OF_ROLE)))
    return layer, role or "output", path or None


def _parsed(text: str, where: str) -> tuple[dict[str, str], ast.Expression]:
    """Return the names in an expression, by their placeholders in the tree, and the tree."""
    names: dict[str, str] = {}

    def placeholder(match: re.Match[str]) -> str:
        name, suffix = match[0], ""
        if name == "dim":
            return name
        while name.endswith(".T"):
            name, suffix = name[:-2], f"{suffix}.T"
        key = next((key for key, known in names.items() if known == name), f"t{len(names)}_")
        names[key] = name
        return key + suffix

    replaced_text = _NAME.sub(placeholder, text)
    try:
        tree = ast.parse(replaced_text.strip(), mode="eval")
    except SyntaxError as error:
        raise ConfigError(Problem(where, f"invalid expression: {error.msg}", text, ALLOWED)) from None
    for node in ast.walk(tree):
        if problem := _problem_of(node, names):
            source = ast.get_source_segment(replaced_text.strip(), node) or ""
            for key, name in names.items():
                source = source.replace(key, name)
            position = text.find(source)
            raise ConfigError(Problem(where, f"{problem} at character {max(position, 0)}: {source}", text, ALLOWED))
    return names, tree


_FUNCTIONS: dict[str, tuple[int, Callable[..., Tensor]]] = {
    "cat": (-1, lambda *tensors, dim=-1: torch.cat(tensors, dim)),
    "split": (2, lambda tensor, index, parts, dim=-1: tensor.tensor_split(parts, dim)[index]),
    "heads": (1, lambda tensor, number: tensor.unflatten(-1, (number, -1)).transpose(-3, -2)),
    "transpose": (2, lambda tensor, one, other: tensor.transpose(one, other)),
}
"""The functions of expressions: the number of integers after the first tensor (-1: only tensors), and the computation."""


def _problem_of(node: ast.AST, names: dict[str, str]) -> str | None:
    """Return what is wrong with a part of an expression; None if it is allowed."""
    if isinstance(node, ast.Call):
        if not isinstance(node.func, ast.Name) or node.func.id not in _FUNCTIONS:
            return "unknown function"
        count, _ = _FUNCTIONS[node.func.id]
        if (len(node.args) < 2) if count < 0 else (len(node.args) != 1 + count):
            return "wrong number of arguments"
        wrong = [each for each in node.keywords if each.arg != "dim" or node.func.id not in ("cat", "split")]
        return "unknown argument" if wrong else None
    if isinstance(node, ast.Attribute):
        return None if node.attr == "T" else "unknown attribute"
    if isinstance(node, ast.Name):
        return None if node.id in names or node.id in _FUNCTIONS else "unknown name"
    if isinstance(node, ast.Constant):
        return None if node.value is ... or type(node.value) is int else "only integers are allowed,"
    allowed = (ast.Expression, ast.BinOp, ast.Add, ast.Sub, ast.UnaryOp, ast.USub, ast.Subscript, ast.Slice, ast.Tuple)
    return None if isinstance(node, (*allowed, ast.Load, ast.keyword)) else "not allowed"


def _evaluated(tree: ast.AST, sources: dict[str, Entry], where: str) -> Tensor:
    """Return the value of an expression.

    Raises:
        ConfigError: The shapes of the tensors do not fit.
    """
    tensors = {name: entry.load() for name, entry in sources.items()}
    try:
        value = _value(tree, tensors)
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        shapes = ", ".join(f"{entry.label} {[*tensors[name].shape]}" for name, entry in sources.items())
        raise ConfigError(Problem(where, f"cannot be computed: {str(error).partition(chr(10))[0]}", shapes)) from error
    if not isinstance(value, Tensor):
        raise ConfigError(Problem(where, "must be a tensor", value, ALLOWED))
    return value


def _value(node: Any, tensors: dict[str, Tensor]) -> Any:
    of = partial(_value, tensors=tensors)
    match node:
        case ast.Name():
            return tensors[node.id]
        case ast.Constant():
            return node.value
        case ast.UnaryOp():
            return -of(node.operand)
        case ast.BinOp():
            return of(node.left) + of(node.right) if isinstance(node.op, ast.Add) else of(node.left) - of(node.right)
        case ast.Attribute():
            return of(node.value).transpose(-2, -1)
        case ast.Subscript():
            return of(node.value)[of(node.slice)]
        case ast.Slice():
            return slice(*(None if each is None else of(each) for each in (node.lower, node.upper, node.step)))
        case ast.Tuple():
            return tuple(map(of, node.elts))
    return _FUNCTIONS[node.func.id][1](*map(of, node.args), **{each.arg: of(each.value) for each in node.keywords})
