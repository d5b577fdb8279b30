"""Folders of tensors opened as runs for a comparison: with computed tensors, aligned tokens, and their rounding noise.

Expressions such as `cat(attn.q, attn.k, attn.v)` compute a tensor of one implementation from those of another.
Two folders have the same tokens of the same samples in the same order, without padding.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from ..analysis.load import Run
from ..errors import ConfigError, Problem, first_line, similar_names
from ..formatting import shorten
from .alignment import pattern_of, renamed_layers, replaced
from .differences import tensor_errors
from .foreign_folder import FLOAT64, KIND_OF_ROLE, Entry, ForeignFolder, Reader, is_foreign, read_folder

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

    The tensors that expressions use are left out, unless A has a layer of their name. Raise a ConfigError if an expression is invalid, or
    a name matches no tensor.

    Args:
        expressions: The expression of each name of A, `LAYER` or `LAYER:ROLE.PATH`. The default is the first output. Each
            `*` of a name in an expression is what the wildcard with the same number matches in the name of A.
        names: The name of each layer of A in B, which the computed tensors get.
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
    """Return the value of an expression. Raise a ConfigError if its arguments or the shapes of the tensors do not fit."""
    tensors = {name: entry.load() for name, entry in sources.items()}
    try:
        value: Tensor = eval(code, {"__builtins__": {}, **_FUNCTIONS, **tensors})[...]  # an error if it is not a tensor
        return value
    except (RuntimeError, IndexError, AttributeError, TypeError, ValueError) as error:
        shapes = ", ".join(f"{entry.label} {[*tensors[name].shape]}" for name, entry in sources.items())
        raise ConfigError(Problem(where, f"cannot be computed: {first_line(error)}", shapes, ALLOWED)) from error


MAX_NAMES = 4  # maximum number of tokens or layers in a message


@dataclass(frozen=True)
class Noise:
    """The rounding noise of tensors: their largest relative L2 errors against the same tensors in float64."""

    # Of each measured side, `a` or `b`, by layer, role and path.
    errors: Mapping[str, Mapping[tuple[str, str, str], float]]
    source: str  # how the noise is known
    order: Mapping[tuple[str, str, str, int, int], int]  # of execution of A, by layer, role, path, call and step

    def of(self, locations: pd.DataFrame) -> np.ndarray:
        """Return the noise of each location, the larger one of both sides; float64, shape [locations], NaN where it is unknown."""
        noise = np.full(len(locations), np.nan)
        for side, errors in self.errors.items():
            columns = ["layer", "role", "path"] if side == "a" else ["layer_b", "role", "path_b"]
            keys = locations[columns].itertuples(index=False, name=None)
            noise = np.fmax(noise, [errors.get(key, np.nan) for key in keys])
        return noise


def opened_folders(
    paths: Sequence[Run | str | Path],
    opened: Sequence[Run | None],
    rename: Mapping[str, str],
    expressions: Mapping[str, str],
) -> tuple[tuple[Run, Run], Noise, str]:
    """Open two folders, of which at least one contains tensors of another program (None in `opened`).

    Return the runs, the rounding noise, and a description of the alignment. Raise a ConfigError if a folder cannot be read, an expression
    is invalid, or the folders have no token in common.
    """
    given = zip(paths, opened, strict=True)
    a, b = (read_folder(str(path)) if run is None else ForeignFolder(run.path, _entries_of(run)) for path, run in given)
    if expressions and opened[1] is not None:
        old, new = next(iter(expressions.items()))
        fix = "exchange A and B, or write B with instrument.dump"
        raise ConfigError(Problem(f"rename {old}={new}", "an expression requires a folder of tensors as B", fix=fix))
    names = renamed_layers(rename, *(list(dict.fromkeys(entry.layer for entry in each.entries)) for each in (a, b)))

    def aligned(one: ForeignFolder, other: ForeignFolder) -> tuple[list[Entry], list[Entry], str]:
        derived = with_derived(other.entries, a.entries, expressions, names)
        tokens = (_tokens_of(one), _tokens_of(other)) if list(opened) == [None, None] else (None, None)
        return _aligned(one.entries, derived, *tokens)

    of_a, of_b, alignment = aligned(a, b)
    exact_a, exact_b = (
        read_folder(each.path / FLOAT64) if run is None and is_foreign(each.path / FLOAT64) else None
        for each, run in zip((a, b), opened, strict=True)
    )
    errors = {"a": _errors(of_a, aligned(exact_a, b)[0])} if exact_a else {}
    errors |= {"b": _errors(of_b, aligned(a, exact_b)[1])} if exact_b else {}
    measured = " and ".join(str(each.path) for each in (exact_a, exact_b) if each)
    source = f"measured against {measured}" if measured else "estimated from dtype, depth and length of sums"
    a.entries, b.entries, a.phase, b.phase = of_a, of_b, _phase(opened[1]), _phase(opened[0])
    one, other = (run or Run(each.path, [each.path], [each]) for each, run in zip((a, b), opened, strict=True))
    lines = [alignment] if alignment else []
    for side, folder in (("A", a), ("B", b)):
        lines += [f"not written by {side}: {name} ({text})" for name, text in folder.skipped.items()]
    order = {(*entry.name, entry.step): index for index, entry in enumerate(of_a)}
    return (one, other), Noise(errors, source, order), "\n".join(lines)


def _errors(entries: Sequence[Entry], exact: Sequence[Entry]) -> dict[tuple[str, str, str], float]:
    """Return the largest relative L2 error of each tensor, by layer, role and path."""
    pairs = {(*entry.name, entry.step): entry for entry in exact}
    errors: dict[tuple[str, str, str], float] = {}
    for entry in entries:
        if reference := pairs.get((*entry.name, entry.step)):
            one, other = entry.load(), reference.load()
            if one.shape == other.shape and one.is_floating_point() and other.dtype == torch.float64:
                l2 = tensor_errors(one.double().numpy(), other.numpy(), ("float64", "float64")).l2
                errors[entry.name[:3]] = max(errors.get(entry.name[:3], 0.0), l2)
    return errors


def _phase(run: Run | None) -> str:
    batches = () if run is None else run.scan("tensors", ["phase"])
    return next((str(batch["phase"][0]) for batch in batches if batch.num_rows), "forward")


def _entries_of(run: Run) -> list[Entry]:
    """Return the recorded tensors of a run, without their values, which the comparison reads."""
    columns = ["layer", "role", "path", "step", "call", "module_type"]
    return [Entry(load=Reader(Tensor), **row) for batch in run.scan("tensors", columns) for row in batch.to_pylist()]


@dataclass(frozen=True)
class Tokens:
    """The tokens of a folder."""

    # One row per token that is not padding: `index` (among all ids of all steps), `sample`, `position`, and `token` (its id, or -1).
    table: pd.DataFrame
    # Of the ids of each step: [batch, tokens]; [tokens] if samples are packed; [batch] if only samples are known.
    shapes: dict[int, tuple[int, ...]]
    is_named: bool  # whether the samples have ids that both folders can share


def _aligned(
    one: list[Entry], other: list[Entry], a: Tokens | None, b: Tokens | None
) -> tuple[list[Entry], list[Entry], str]:
    """Return the tensors of two folders with the tokens that both have, and a description of the alignment.

    Tokens correspond if their sample and their position are equal. Without ids of samples, samples correspond whose token ids
    are equal at the positions that both have. The tokens of all steps are joined into step 0. Tensors without a dimension of tokens
    are left out. If both folders have the same tokens in the same order without padding, the tensors are returned unchanged. Raise a
    ConfigError if the folders have no token in common, or the token ids of the same sample differ.
    """
    if a is None or b is None:
        side = "A" if a is None else "B"
        text = f"not aligned: {side} contains no ids of tokens or samples; pass ids= to instrument.dump"
        return one, other, "" if a is b else text
    is_complete = len(a.table) == sum(int(np.prod(shape)) for shape in a.shapes.values())
    if a.shapes == b.shapes and is_complete and a.table.equals(b.table):
        return one, other, "aligned: the same tokens in the same order, without padding"
    pairs = _pairs(a, b)
    chosen_a, rest_a = _with_tokens(one, a, pairs["index_a"])
    chosen_b, rest_b = _with_tokens(other, b, pairs["index_b"])
    text = f"aligned: {len(pairs):,} of {len(a.table):,} tokens of A and {len(b.table):,} of B, by sample and position"
    listed = shorten(list(dict.fromkeys([*rest_a, *rest_b])), MAX_NAMES)
    return chosen_a, chosen_b, f"{text}; without a dimension of tokens, not compared: {listed}" if listed else text


def _tokens_of(folder: ForeignFolder) -> Tokens | None:
    tables, shapes, offset, is_named = [], {}, 0, True
    for step, tensors in sorted(folder.ids.items()):
        ids = {name: tensor.numpy() for name, tensor in tensors.items()}
        known = [ids[name] for name in ("input_ids", "position_ids", "samples") if name in ids]
        if not known:
            continue
        shape = max(known, key=np.size).shape
        try:
            table, mask = _table_of(ids, shape)
        except ValueError:
            given = ", ".join(f"{name} {[*each.shape]}" for name, each in ids.items())
            where = f"{folder.path}: step {step}"
            raise ConfigError(Problem(where, "the shapes of the ids do not fit", given)) from None
        table = table.assign(step=step, index=np.arange(len(table)) + offset)[mask]
        if "samples" not in ids:  # a sample ends with its row, and where the positions do not continue
            is_named = False
            table["sample"] = ((table["row"].diff() != 0) | (table["position"].diff() != 1)).cumsum()
        tables.append(table)
        shapes[step], offset = shape, offset + len(mask)
    if not tables:
        return None
    table = pd.concat(tables, ignore_index=True)
    if table.duplicated(["sample", "position"]).any():  # several batches, whose samples have no ids
        table["sample"], is_named = table.groupby(["step", "sample"], sort=False).ngroup(), False
    if table.duplicated(["sample", "position"]).any():
        fix = "pass ids of samples and positions that differ for each token"
        raise ConfigError(Problem(str(folder.path), "two tokens have the same sample and position", fix=fix))
    return Tokens(table[["index", "sample", "position", "token"]], shapes, is_named)


def _table_of(ids: dict[str, np.ndarray], shape: tuple[int, ...]) -> tuple[pd.DataFrame, np.ndarray]:
    """Return row, sample, position and id of each token of a step, and which tokens are not padding."""
    mask = ids["attention_mask"].astype(bool) if "attention_mask" in ids else np.ones(shape, bool)
    positions = mask.cumsum(-1) - 1 if "input_ids" in ids else np.zeros(shape, np.int64)
    columns = {
        "row": np.indices(shape)[0] if len(shape) == 2 else np.zeros(shape, np.int64),
        "sample": ids["samples"].reshape(-1, *[1] * (len(shape) - 1)) if "samples" in ids else np.array(0),
        "position": ids.get("position_ids", positions)[..., -shape[-1] :],  # with a cache, the mask has earlier tokens
        "token": ids.get("input_ids", np.array(-1)),
    }
    table = pd.DataFrame({name: np.broadcast_to(each, shape).ravel() for name, each in columns.items()})
    return table, np.broadcast_to(mask[..., -shape[-1] :], shape).ravel()


def _pairs(a: Tokens, b: Tokens) -> pd.DataFrame:
    """Return the tokens that both have, in the order of A: `sample`, `position`, and `index` and `token` of each side."""
    other = b.table
    if not (a.is_named and b.is_named):
        other = other.assign(sample=other["sample"].map(_same_samples(a.table, b.table))).dropna(subset="sample")
    pairs = a.table.merge(other.astype({"sample": np.int64}), on=["sample", "position"], suffixes=("_a", "_b"))
    if pairs.empty:
        firsts = [each.table[each.table["sample"] == each.table["sample"].iloc[0]]["token"] for each in (a, b)]
        texts = [shorten([*map(str, each)], MAX_NAMES) for each in firsts]
        given = f"A: {texts[0]}; B: {texts[1]}"
        fix = "run both with the same samples and tokens, or pass the ids of the samples"
        raise ConfigError(Problem("", "no sample has the same tokens in both folders", given, fix=fix))
    are_known = (pairs["token_a"] >= 0) & (pairs["token_b"] >= 0)
    for wrong in pairs[are_known & (pairs["token_a"] != pairs["token_b"])].itertuples():
        where, given = f"sample {wrong.sample}, position {wrong.position}", f"A: {wrong.token_a}; B: {wrong.token_b}"
        raise ConfigError(Problem(where, "the token ids differ", given, fix="run both with the same tokens"))
    return pairs


def _same_samples(a: pd.DataFrame, b: pd.DataFrame) -> dict[Any, Any]:
    """Return the sample of A for each sample of B that has one: that with the most tokens in common, and none that differs."""
    one, other = (each.pivot(index="sample", columns="position", values="token") for each in (a, b))
    one, other = one.align(other, join="outer", axis=1)
    left, pairs = one.to_numpy(np.float64, copy=True), {}
    for sample in other.count(axis=1).sort_values(ascending=False, kind="stable").index:  # parts of samples come last
        text = other.loc[sample].to_numpy(np.float64)
        in_both, in_one = ~np.isnan(left) & ~np.isnan(text), ~np.isnan(left) | ~np.isnan(text)
        shared = np.where(((left == text) | ~in_both).all(1), in_both.sum(1) / in_one.sum(1), 0.0)
        if shared[best := int(shared.argmax())] > 0.0:
            pairs[sample] = one.index[best]
            left[best] = np.nan
    return pairs


def _with_tokens(entries: Sequence[Entry], tokens: Tokens, index: pd.Series) -> tuple[list[Entry], list[str]]:
    """Return the tensors with the tokens of an index, and the labels of those that have no dimension of tokens in every step."""
    groups: dict[tuple[Any, ...], dict[int, Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.name, {})[entry.step] = entry
    chosen, rest = [], []
    for parts in groups.values():
        entry = next(iter(parts.values()))
        if parts.keys() == tokens.shapes.keys() and all(_dims(parts[step], tokens.shapes[step]) for step in parts):
            load = partial(_gathered, parts, tokens, torch.tensor(index.to_numpy()))
            chosen.append(entry._replace(step=0, load=Reader(load), dims=()))
        else:
            rest.append(entry.label)
    return chosen, rest


def _dims(entry: Entry, shape: tuple[int, ...]) -> tuple[str, ...]:
    """Return the names of the first dimensions of a tensor, up to that of its tokens; empty if it has none."""
    if entry.dims:
        return entry.dims if "tokens" in entry.dims or len(shape) == 1 else ()
    found = tuple(entry.load.like.shape)
    if found[: len(shape)] == shape or (len(shape) == 2 and found[:2] == (1, shape[1])):
        return ("batch", "tokens")[-len(shape) :]
    if len(shape) == 1:
        return ()
    batch, tokens = shape
    if len(found) == 4 and (found[0], found[2]) == shape and found[3] != tokens:  # otherwise attention weights
        return "batch", "heads", "tokens"
    return ("tokens", "batch") if found[:2] == (tokens, batch) else ("tokens",) * (found[:1] == (batch * tokens,))


def _gathered(parts: dict[int, Entry], tokens: Tokens, index: Tensor) -> Tensor:
    """Return the tokens of an index: [tokens, ...]."""
    rows = []
    for step, shape in tokens.shapes.items():
        dims = _dims(parts[step], shape)
        first = [dims.index(name) for name in ("batch", "tokens") if name in dims]
        tensor = parts[step].load().movedim(first, [*range(len(first))])
        if len(first) == 2:  # positions are often the same for all samples
            tensor = tensor.expand(*shape, *tensor.shape[2:]).flatten(0, 1)
        rows.append(tensor)
    return torch.cat(rows)[index]
