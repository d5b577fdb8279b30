"""Alignment of the tokens of two folders: the same tokens of the same samples in the same order, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from ..errors import ConfigError, Problem
from ..formatting import shorten
from .foreign_folder import Entry, ForeignFolder

MAX_NAMES = 4  # maximum number of samples or layers in a message


@dataclass(frozen=True)
class Tokens:
    """The tokens of a folder.

    Attributes:
        table: One row per token that is not padding: `step`, `row` and `column` (its indices in the ids of the step), `index`
            (its flat index among all ids of all steps), `sample`, `position`, and `token` (its id; -1 if unknown).
        shapes: The shape of the ids of each step: [batch, tokens]; [tokens] if samples are packed; [batch] if only samples
            are known.
        has_samples: Whether the samples have ids that both folders can share.
    """

    table: pd.DataFrame
    shapes: dict[int, tuple[int, ...]]
    has_samples: bool

    @property
    def is_complete(self) -> bool:
        """Whether no id is padding."""
        return len(self.table) == sum(int(np.prod(shape)) for shape in self.shapes.values())


def aligned_folders(one: ForeignFolder, other: ForeignFolder) -> tuple[list[Entry], list[Entry], str]:
    """Return the tensors of two folders with the tokens that both have, and a description of the alignment.

    Tokens correspond if their sample and their position are equal. Without ids of samples, samples correspond whose
    token ids are equal at the positions that both have. The tokens of all steps are joined into step 0. Tensors
    without a dimension of tokens are left out. If both folders have the same tokens in the same order without padding, the tensors are
    returned unchanged.

    Raises:
        ConfigError: The folders have no token in common, or the token ids of the same sample differ.
    """
    a, b = tokens_of(one), tokens_of(other)
    if a is None or b is None:
        text = "" if a is b else f"not aligned: {'A' if a is None else 'B'} contains no ids of tokens or samples"
        return one.entries, other.entries, text
    keys = ["step", "sample", "position", "token"]
    if a.shapes == b.shapes and a.is_complete and b.is_complete and a.table[keys].equals(b.table[keys]):
        return one.entries, other.entries, "aligned: the same tokens in the same order, without padding"
    pairs = _pairs(a, b)
    width = int(pairs.groupby("sample")["position"].count().max())
    sides, left_out = [], dict[str, None]()
    for folder, each, side in ((one, a, "a"), (other, b, "b")):
        chosen, rest = _aligned(folder.entries, each, pairs[f"index_{side}"].to_numpy(), width)
        sides.append(chosen)
        left_out |= dict.fromkeys(entry.label for entry in rest)
    text = f"aligned: {len(pairs):,} of {len(a.table):,} tokens of A and {len(b.table):,} of B, by sample and position"
    listed = shorten([*left_out], MAX_NAMES)
    return sides[0], sides[1], f"{text}; without a dimension of tokens, not compared: {listed}" if left_out else text


def tokens_of(folder: ForeignFolder) -> Tokens | None:
    """Return the tokens of a folder; None if its steps have no ids."""
    tables, shapes, offset, named = [], {}, 0, True
    for step, ids in sorted(folder.ids.items()):
        known = [ids[name] for name in ("input_ids", "position_ids", "samples") if name in ids]
        if not known:
            continue
        shape = tuple(max(known, key=lambda each: each.numel()).shape)
        arrays = {name: ids[name].numpy() for name in ids}
        rows, columns = np.indices(shape if len(shape) == 2 else (1, *shape)).reshape(2, -1)
        try:
            mask, position = _positions(arrays, shape)
        except ValueError:
            shapes_of = ", ".join(f"{name} {[*each.shape]}" for name, each in arrays.items())
            raise ConfigError(
                Problem(f"{folder.path}: step {step}", "the shapes of the ids do not fit", shapes_of)
            ) from None
        named &= "samples" in arrays
        if "samples" in arrays:
            samples = arrays["samples"].reshape(len(arrays["samples"]), -1)
            sample = np.broadcast_to(samples, shape) if len(shape) == 2 else samples[:, 0]
        elif len(shape) == 2:
            sample = rows
        else:  # a sample ends where the positions do not continue
            sample = np.cumsum(np.diff(position, prepend=position[0] - 1) != 1)
        token = np.broadcast_to(arrays["input_ids"], shape) if "input_ids" in arrays else np.full(shape, -1)
        columns_of = {"step": step, "row": rows, "column": columns, "sample": np.ravel(sample)}
        table = pd.DataFrame({**columns_of, "position": np.ravel(position), "token": np.ravel(token)})
        tables.append(table.assign(index=np.arange(len(table)) + offset)[np.ravel(mask)])
        shapes[step], offset = shape, offset + len(table)
    if not tables:
        return None
    table = pd.concat(tables, ignore_index=True)
    if table.duplicated(["sample", "position"]).any():  # several batches, whose samples have no ids
        table["sample"], named = table.groupby(["step", "sample"], sort=False).ngroup(), False
    return Tokens(table, shapes, named)


def _positions(ids: dict[str, np.ndarray], shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return which ids are not padding, and the position of each in its sample, with the shape of the ids."""
    if "input_ids" not in ids and "position_ids" not in ids:
        return np.ones(shape, bool), np.zeros(shape, np.int64)
    given = ids["attention_mask"].astype(bool) if "attention_mask" in ids else np.ones(shape, bool)
    mask = given[..., -shape[-1] :]  # with a cache, the mask also covers earlier tokens
    if "position_ids" in ids:
        return np.broadcast_to(mask, shape), np.broadcast_to(ids["position_ids"], shape)
    return np.broadcast_to(mask, shape), np.broadcast_to((given.cumsum(-1) - 1)[..., -shape[-1] :], shape)


def _pairs(a: Tokens, b: Tokens) -> pd.DataFrame:
    """Return the tokens that both have, in the order of A: `sample`, `position`, and `index` and `token` of each side."""
    columns = ["sample", "position", "index", "token"]
    other = b.table[columns].assign(sample=b.table["sample"].map(_same_samples(a, b))).dropna(subset="sample")
    pairs = a.table[columns].merge(other.astype({"sample": np.int64}), on=["sample", "position"], suffixes=("_a", "_b"))
    if pairs.empty:
        given = [f"{name}: {_first_tokens(each)}" for name, each in zip("AB", (a, b), strict=True)]
        fix = "run both with the same samples and tokens, or pass the ids of the samples"
        raise ConfigError(Problem("", "no sample has the same tokens in both folders", "; ".join(given), fix=fix))
    known = (pairs["token_a"] >= 0) & (pairs["token_b"] >= 0)
    if len(wrong := pairs[known & (pairs["token_a"] != pairs["token_b"])]):
        first = wrong.iloc[0]
        ids = f"A: {first['token_a']}; B: {first['token_b']}"
        where = f"sample {first['sample']}, position {first['position']}"
        raise ConfigError(Problem(where, "the token ids differ", ids, fix="run both with the same tokens"))
    return pairs


def _same_samples(a: Tokens, b: Tokens) -> dict[int, int]:
    """Return the sample of A for each sample of B that has one."""
    if a.has_samples and b.has_samples:
        return {int(sample): int(sample) for sample in b.table["sample"].unique()}
    left, texts = (
        {
            sample: dict(zip(rows["position"], rows["token"], strict=True))
            for sample, rows in each.table.groupby("sample", sort=False)
        }
        for each in (a, b)
    )
    equal: dict[tuple[Any, ...], list[Any]] = {}
    for sample, text in left.items():
        equal.setdefault(tuple(sorted(text.items())), []).append(sample)
    pairs: dict[Any, Any] = {}
    for sample, text in texts.items():
        if same := equal.get(tuple(sorted(text.items()))):
            pairs[sample] = same.pop(0)
            del left[pairs[sample]]
    for sample in texts.keys() - pairs.keys():  # those of which one folder has only some tokens
        text = texts[sample]
        shared = {key: text.keys() & other.keys() for key, other in left.items()}
        same = [key for key, both in shared.items() if both and all(text[at] == left[key][at] for at in both)]
        if same:
            pairs[sample] = max(same, key=lambda key: len(shared[key]))
            del left[pairs[sample]]
    return pairs


def _first_tokens(tokens: Tokens) -> str:
    rows = tokens.table[tokens.table["sample"] == tokens.table["sample"].iloc[0]]
    return shorten([str(token) for token in rows["token"]], MAX_NAMES)


def _aligned(
    entries: Sequence[Entry], tokens: Tokens, index: np.ndarray, width: int
) -> tuple[list[Entry], list[Entry]]:
    """Return the tensors with the tokens of an index, and those that have no dimension of tokens in every step.

    Args:
        index: The flat indices of the tokens among all ids of all steps.
        width: The size of a dimension of keys.
    """
    ordered = sorted(entries, key=lambda entry: entry.name)
    groups = {name: list(group) for name, group in groupby(ordered, key=lambda entry: entry.name)}
    chosen, rest = [], []
    for name in dict.fromkeys(entry.name for entry in entries):
        parts = {entry.step: entry for entry in groups[name]}
        if parts.keys() != tokens.shapes.keys() or any(
            _dims(parts[step], shape) is None for step, shape in tokens.shapes.items()
        ):
            rest += groups[name][:1]
            continue
        load = partial(_gathered, parts, tokens, torch.from_numpy(index.copy()), width)
        chosen.append(groups[name][0]._replace(step=0, load=load, dims=()))
    return chosen, rest


def _dims(entry: Entry, shape: tuple[int, ...]) -> tuple[str, ...] | None:
    """Return the names of the first dimensions of a tensor, with those of its tokens; None if it has none."""
    if entry.dims:
        return entry.dims if "tokens" in entry.dims or len(shape) == 1 else None
    found = tuple(entry.load().shape)
    if len(shape) == 1:
        return ("tokens",) if found[:1] == shape else ("other", "tokens") if found[:2] == (1, *shape) else None
    batch, tokens = shape
    if found[:2] == shape:
        return "batch", "tokens"
    if len(found) == 4 and (found[0], found[2]) == shape:
        return ("batch", "heads", "tokens", *(["keys"] if found[3] == tokens else []))
    if found[:2] == (tokens, batch):
        return "tokens", "batch"
    return ("tokens",) if found[:1] == (batch * tokens,) else None


def _gathered(parts: dict[int, Entry], tokens: Tokens, index: Tensor, width: int) -> Tensor:
    """Return the tokens of an index: [tokens, ...]."""
    rows = [_rows(parts[step], tokens, step, width) for step in tokens.shapes]
    return (torch.cat(rows) if len(rows) > 1 else rows[0])[index]


def _rows(entry: Entry, tokens: Tokens, step: int, width: int) -> Tensor:
    """Return a tensor of a step with one row per id: [ids, ...]."""
    shape, tensor = tokens.shapes[step], entry.load()
    dims = _dims(entry, shape) or ()
    if "keys" in dims:
        tensor = tensor.movedim(dims.index("keys"), -1)
        tensor = torch.stack([_keys(each, tokens, step, row, width) for row, each in enumerate(tensor)])
    first = [dims.index(name) for name in ("batch", "tokens") if name in dims]
    tensor = tensor.movedim(first, [*range(len(first))])
    if "other" in dims and dims[0] == "other":  # packed tokens with a batch of one
        tensor = tensor.squeeze(1)
    return tensor.flatten(0, len(first) - 1) if len(first) == 2 else tensor


def _keys(values: Tensor, tokens: Tokens, step: int, row: int, width: int) -> Tensor:
    """Return attention weights of a sample whose keys are in the order of the positions, without padding, and then zeros."""
    table = tokens.table
    own = table[(table["step"] == step) & (table["row"] == row)].sort_values("position")["column"].to_numpy()[:width]
    return torch.nn.functional.pad(values[..., torch.from_numpy(own.copy())], (0, width - len(own)))
