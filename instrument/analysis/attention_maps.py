"""Recorded attention maps: which tensors hold them, their heads and positions, and the tokens of their samples."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from ..errors import ConfigError
from ..rules.step_rows import location_name
from ..spec.base import HookBase, parse_slice
from ..spec.kinds import KINDS
from ..spec.parse import parse_hooks
from ..spec.selection import SelectionError, selected_indices
from .plot_data import KEYS, RecordedSeries
from .run_tables import RunTables
from .tensor_decoding import is_known

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]
TOLERANCE = 0.02  # of the sum of a row of probabilities, which may be float16 or bfloat16
TOKENS = "input_ids"  # name of the argument of Hugging Face models for token ids
_FLOATS = ("float", "bfloat")
_INTEGERS = ("int", "uint")


class Batch(NamedTuple):
    """The batch of a recorded tensor."""

    phase: str
    step: int
    micro_step: int
    rank: int


_IDENTITY = dict.fromkeys(
    (*KEYS, "layer", "path", "call", *Batch._fields, "dtype", "shape", "source_shape", "recompute", "backward")
)


class Maps(NamedTuple):
    """The attention maps of one sample.

    Attributes:
        values: [heads, queries, keys]; without heads, [1, queries, keys].
        heads: The index of each head in the model; empty if the tensor has no dimension of heads.
        queries: The position of each query in the model.
        keys: The position of each key in the model.
    """

    values: Array
    heads: list[int]
    queries: list[int]
    keys: list[int]


@dataclass(frozen=True)
class AttentionTensor:
    """The identity of a recorded tensor that may hold attention maps.

    Attributes:
        series: The series that recorded it.
        layer: Name of the module.
        path: Path of the tensor in the value of the module, such as `softmax.0`.
        call: Index of the call of the module.
        batch: The batch that it belongs to.
        shape: Its shape in the model: [N, heads, queries, keys], or [N, queries, keys].
        indices: For each dimension of `shape`, the recorded indices.
    """

    series: RecordedSeries
    layer: str
    path: str
    call: int
    batch: Batch
    shape: Shape
    indices: tuple[tuple[int, ...], ...]

    @property
    def location(self) -> str:
        """The name of the location, as in other plots."""
        return location_name(self.layer, self.path, self.series.kind)

    def read(self, run: RunTables | pd.DataFrame) -> Array:
        """Return the recorded values, with one dimension for each dimension of `shape`.

        Args:
            run: The run, or rows of its `tensors()`.
        """
        where = {"layer": self.layer, "path": self.path, "call": self.call, "backward": 0}
        values = self.series.values(run, **where, **self.batch._asdict())
        return values.reshape([len(taken) for taken in self.indices])

    def maps(self, values: Array, position: int) -> Maps:
        """Return the maps of one sample.

        Args:
            values: The recorded values, from `read`.
            position: Index of the sample in the batch.
        """
        of_sample = values[self.indices[0].index(position)]
        heads = list(self.indices[1]) if len(self.shape) == 4 else []
        of_sample = of_sample if heads else of_sample[None]
        return Maps(of_sample, heads, list(self.indices[-2]), list(self.indices[-1]))

    def are_probabilities(self, values: Array) -> bool:
        """Return whether recorded values are probabilities over the keys.

        They are not negative, and the sum of each row is 1. Rows without finite values, and rows of zeros, belong to masked
        queries. If only some of the keys were recorded, a sum may be smaller than 1. A softmax over classes or a vocabulary has
        the shape [N, positions, classes]: a result of this shape that is not square is no attention, unless the module returns
        it next to another output.
        """
        is_result = KINDS[self.series.kind].of_functions or not self.path
        if is_result and len(self.shape) == 3 and self.shape[1] != self.shape[2]:
            return False
        finite = values[np.isfinite(values).all(-1)].astype(np.float64)
        if not finite.size or finite.min() < 0:
            return False
        sums = finite.sum(-1)
        sums = sums[sums > 0]
        is_complete = len(self.indices[-1]) == self.shape[-1]
        return bool(sums.size and (sums < 1 + TOLERANCE).all() and (not is_complete or (sums > 1 - TOLERANCE).all()))


def attention_tensors(run: RunTables | pd.DataFrame) -> list[AttentionTensor]:
    """Return all recorded tensors whose shape in the model is [N, heads, queries, keys] or [N, queries, keys].

    Whether they hold probabilities is known only from their values.

    Args:
        run: A run, whose values are not read here, or rows of its `tensors()`.
    """
    specs = recorded_specs(run)
    found = []
    for row in _rows(run):
        source = tuple(map(int, row["source_shape"]))
        if len(source) not in (3, 4) or KINDS[row["kind"]].family != "module" or not row["dtype"].startswith(_FLOATS):
            continue
        indices = recorded_indices(specs.get(row["hook"]), tuple(map(int, row["shape"])), source)
        if indices is not None:
            series = RecordedSeries(*(row[key] for key in KEYS))
            found.append(AttentionTensor(series, row["layer"], row["path"], row["call"], _batch(row), source, indices))
    return found


def sample_ids(run: RunTables, batches: Collection[Batch]) -> dict[int | str, list[tuple[Batch, int]]]:
    """Return where the samples of some batches are, by the id of the sample.

    Returns:
        For each id, the batches and the positions in them, in the order of the steps. Empty if the ids are unknown.
    """
    columns = [*Batch._fields, "position", "sample", "id"]
    samples = run.read("samples", columns).sort_values(columns[:-2], kind="stable")
    found: dict[int | str, list[tuple[Batch, int]]] = {}
    for *moment, position, number, name in samples.itertuples(index=False, name=None):
        if (batch := Batch(*moment)) in batches:
            found.setdefault(name if pd.isna(number) else int(number), []).append((batch, int(position)))
    return found


def token_ids(run: RunTables | pd.DataFrame, batch: Batch, position: int, length: int) -> list[int] | None:
    """Return the token ids of a sample, if the input of the model or of its embedding was recorded.

    This is the first recorded input of a module that consists of integers [N, length]. `input_ids` is preferred to inputs with
    other names, such as a mask.

    Args:
        run: The run, or rows of its `tensors()`.
        batch: The batch of the sample.
        position: Index of the sample in the batch.
        length: Number of tokens.
    """
    specs = recorded_specs(run)
    for row in sorted(_rows(run), key=lambda row: row["path"] != TOKENS):
        source = tuple(map(int, row["source_shape"]))
        is_input = row["role"] == "input" and row["dtype"].startswith(_INTEGERS)
        if not is_input or len(source) != 2 or source[1] != length or _batch(row) != batch:
            continue
        indices = recorded_indices(specs.get(row["hook"]), tuple(map(int, row["shape"])), source)
        if indices is not None and position in indices[0] and len(indices[1]) == length:
            series = RecordedSeries(*(row[key] for key in KEYS))
            tensor = AttentionTensor(series, row["layer"], row["path"], row["call"], batch, source, indices)
            return [int(token) for token in tensor.read(run)[indices[0].index(position)]]
    return None


def _batch(row: Mapping[str, Any]) -> Batch:
    return Batch(*(row[name] for name in Batch._fields))


def _rows(run: RunTables | pd.DataFrame) -> list[dict[str, Any]]:
    """Return the identity of all recorded tensors, without repeated calls and further gradients."""
    frame = run.read("tensors", [*_IDENTITY]) if isinstance(run, RunTables) else run[[*_IDENTITY]]
    frame = frame[
        ~frame["recompute"].astype(bool) & (frame["backward"] == 0) & frame["dtype"].map(is_known).astype(bool)
    ]
    return [{str(name): cell for name, cell in row.items()} for row in frame.to_dict("records")]


def recorded_specs(run: RunTables | pd.DataFrame) -> Mapping[str, HookBase]:
    """Return the hooks of a run by name; empty for a DataFrame, or if this version cannot parse them."""
    if not isinstance(run, RunTables):
        return {}
    try:
        return parse_hooks((run.info.get("config") or {}).get("hooks") or {})
    except ConfigError:
        return {}


def recorded_indices(spec: HookBase | None, shape: Shape, source: Shape) -> tuple[tuple[int, ...], ...] | None:
    """Return the recorded indices along each dimension of a tensor.

    Args:
        spec: The record hook; None if it is unknown.
        shape: The recorded shape.
        source: The shape in the model.

    Returns:
        The indices; None if the recorded elements do not form a block, or are unknown.
    """
    taken: list[Sequence[int]] = [range(size) for size in source]
    if spec is None:  # a DataFrame does not contain the selections of the hooks
        taken[0] = range(*shape[:1])
        return tuple(map(tuple, taken)) if shape[1:] == source[1:] else None
    first = getattr(spec, "samples", None)
    if spec.slice is not None:
        taken[0] = taken[0][: first if isinstance(first, int) else None]
        for dim, part in enumerate(parse_slice(spec.slice)):
            taken[dim] = (taken[dim][part],) if isinstance(part, int) else taken[dim][part]
    else:
        try:
            selected = selected_indices(spec, source, 1 if len(source) == 4 else len(source) - 1)
        except SelectionError:  # units are in another dimension, as in Conv1d
            return None
        for dim, of_dim in selected.items():
            taken[dim] = of_dim
        taken[0] = taken[0][: first if isinstance(first, int) else None]
    is_block = np.prod([len(each) for each in taken]) == np.prod(shape)
    return tuple(map(tuple, taken)) if is_block else None
