"""Recorded tensors as data sets of PyTorch: `run.dataset`.

An item is an entry of dimension 0 of the recorded tensors, or with `flatten="tokens"` a position of dimensions 0 and 1. Items are
numbered in the order in which they were recorded. In memory are an index, and the windows of an iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial, reduce
from math import prod
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from ..config.base import parse_slice
from ..errors import ConfigError, Problem, similar_names
from ..storage.parts import ROW_GROUP_BYTES
from ..storage.run_files import RunFiles
from .features import (
    INDEX,
    Array,
    FeatureSelection,
    TensorOfBatch,
    batches_of,
    common_shape,
    ids_of,
    samples_of,
    select,
    settings_of,
    shown,
    squeezed,
    targets_of,
)
from .frames import plain_labels
from .raw_tensors import RawTensors

Given: TypeAlias = str | Array | Tensor | None
Batch: TypeAlias = dict[str, Any]
MASK, TOKENS = "attention_mask", "input_ids"
WINDOW_BYTES = 256 * 2**20
CHUNKS = 64  # of a window
SEQUENTIAL_BYTES = 32 * 2**20  # of a window without shuffling


_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


@dataclass(frozen=True)
class Items:
    """What the items of a data set are; see `instrument.Run.dataset`."""

    flatten: Literal["tokens"] | None = None
    mask: Given | Callable[[Tensor], Any] = MASK
    tokens: Given = TOKENS
    special_tokens: Collection[int] = ()
    with_targets: bool | str = False

    def check(self) -> None:
        """Raise a `ConfigError` if the fields do not fit each other."""
        if self.flatten not in (None, "tokens"):
            raise ConfigError(Problem("flatten", "unknown value", self.flatten, "'tokens', None"))
        if self.flatten is None and (callable(self.mask) or self.special_tokens):
            name = "special_tokens" if self.special_tokens else "mask"
            message = "positions are left out only if each position is an item"
            raise ConfigError(Problem(name, message, fix="pass flatten='tokens'"))
        if self.tokens is None and (callable(self.mask) or self.special_tokens):
            raise ConfigError(Problem("tokens", "special_tokens and a function as mask need the tokens", "None"))


class _Recorded(NamedTuple):
    """One tensor for each batch. `entries`: the indices in dimension 0 of the samples of a batch; None if these are all, in order."""

    tensors: RawTensors
    which: list[int]
    batches: list[TensorOfBatch]
    entries: list[Array | None]

    def read(self, batch: int, start: int, stop: int) -> Tensor:
        """Return the entries of the samples from `start` to `stop` of a batch."""
        entries = self.entries[batch]
        if entries is None:
            return self.tensors.tensor(self.which[batch], start, stop)
        return self.tensors.tensor(self.which[batch])[torch.from_numpy(entries[start:stop])]


class _ById(NamedTuple):
    """One row of an array for each sample. `rows`: the ids of the samples of each batch."""

    values: Tensor
    rows: list[Array]

    def read(self, batch: int, start: int, stop: int) -> Tensor:
        """Return the rows of the samples from `start` to `stop` of a batch."""
        return self.values[torch.from_numpy(self.rows[batch][start:stop])]


class _Run:
    """The batches of one run: the tensors of each layer, and what belongs to their samples and positions.

    Attributes:
        layers: The tensors of each layer.
        tokens: The token ids; None without.
        mask: The mask of samples that are items; None without.
        target: The recorded targets; None if they are not recorded tensors.
        kept: For each batch the numbers of its items among its positions, int32; None if all are items.
        ids: The ids of all samples.
        targets: The targets of all samples; None without.
    """

    def __init__(self, files: RunFiles, selections: Sequence[FeatureSelection], items: Items) -> None:
        self.files, self.items, self.first = files, items, selections[0].layer
        names = pa.array(
            [each for each in (items.mask, items.tokens, items.with_targets) if isinstance(each, str)], "string"
        )
        condition = ds.field("layer").isin(["" if each.layer == "." else each.layer for each in selections])
        condition |= ds.field("path").isin(names) & (ds.field("role") == "input")
        self.tensors = RawTensors.of(files, [*INDEX, "layer", "recompute", "backward"], condition)
        index: pd.DataFrame = plain_labels(self.tensors.index).to_pandas()
        index["tensor"] = np.arange(len(index))
        self._index = index[~index["recompute"] & (index["backward"] == 0)]
        rows = select(files, selections[0], self._index)
        self._samples = samples_of(files, rows)
        recorded = self._recorded(selections[0], rows)
        self.batches = recorded.batches
        calls = rows["call"].unique().tolist()
        self._like = {"phase": rows["phase"].iloc[0], "call": calls if selections[0].joins_calls else calls[0]}
        self.layers = {self.first: recorded}
        self.layers |= {each.layer: self._aligned(each, "layer", f"layer {each.layer!r}") for each in selections[1:]}
        flat = items.flatten is not None
        self.shapes = {
            each.layer: squeezed((0, *common_shape(self.layers[each.layer].batches, each, 1 + flat)))[1:]
            for each in selections
        }
        self.dtypes = {name: _common_dtype(index["dtype"].iloc[source.which]) for name, source in self.layers.items()}
        self.in_row_groups: Array = index["block"].isna().to_numpy()[recorded.which]
        read = np.concatenate([batch.samples for batch in self.batches])
        samples = self._samples.iloc[read]
        self.ids: Array = ids_of(samples).to_numpy()
        self.targets = targets_of(samples) if items.with_targets is True else None
        self.ends = np.cumsum([len(batch.samples) for batch in self.batches])
        self.columns = self._positions(settings_of(files, rows["hook"].iloc[0])) if flat else None
        self.tokens = self._given("tokens", items.tokens, TOKENS)
        mask = None if callable(items.mask) else self._given("mask", items.mask, "" if flat else MASK)
        self.target = (
            self._given("with_targets", items.with_targets, "") if isinstance(items.with_targets, str) else None
        )
        if items.with_targets is True and self.targets is None:
            fix = "call probe.batch(ids=ids, targets=targets), or pass the name of a recorded input"
            raise ConfigError(Problem("with_targets", "no targets were recorded", fix=fix))
        self.mask = None if flat else mask
        self.kept = [self._kept(batch, mask) for batch in range(len(self.batches))] if flat else None
        del self._index, self._samples, self.items  # for workers, which may not be able to import a function

    def _recorded(self, selection: FeatureSelection, rows: pd.DataFrame) -> _Recorded:
        batches = list(batches_of(self.files, rows, self._samples, selection))
        tensor_of = dict(
            zip(rows[selection.key].itertuples(index=False, name=None), rows["tensor"].tolist(), strict=True)
        )
        return _Recorded(self.tensors, [tensor_of[batch.key] for batch in batches], batches, [None] * len(batches))

    def _aligned(self, selection: FeatureSelection, where: str, what: str) -> _Recorded:
        """Return the tensors of another selection for the same samples of the same batches."""
        rows = select(self.files, selection, self._index)
        own = [batch.key for batch in self.batches]
        rows = rows[pd.MultiIndex.from_frame(rows[selection.key]).isin(own)]
        recorded = self._recorded(selection, rows) if len(rows) else _Recorded(self.tensors, [], [], [])
        number_of = {batch.key: i for i, batch in enumerate(recorded.batches)}
        which: list[int] = []
        entries: list[Array | None] = []
        for batch in self.batches:
            number = number_of.get(batch.key, -1)
            other = recorded.batches[number].samples if number >= 0 else np.empty(0, np.int64)
            order = pd.Index(other).get_indexer(pd.Index(batch.samples))
            if (order < 0).any():
                moment = ", ".join(f"{name} {value}" for name, value in zip(selection.key, batch.key, strict=True))
                lacks = "no tensor" if number < 0 else "not all samples"
                message = f"{what} has {lacks} at {moment}, at which layer {self.first!r} was recorded"
                fix = "record both with the same schedule and 'samples', or select other steps with step="
                raise ConfigError(Problem(where, message, fix=fix))
            which.append(number)
            entries.append(None if np.array_equal(order, np.arange(len(other))) else order)
        batches = [recorded.batches[number] for number in which]
        return _Recorded(self.tensors, [recorded.which[number] for number in which], batches, entries)

    def _given(self, where: str, value: Any, optional: str) -> _Recorded | _ById | None:
        """Return a recorded input by its name, or an array by the ids; None if there is no input of the name `optional`."""
        if value is None:
            return None
        if not isinstance(value, str):
            return self._by_id(where, torch.as_tensor(value).cpu())
        of_inputs = self._index[(self._index["role"] == "input") & (self._index["phase"] == self._like["phase"])]
        rows = of_inputs[of_inputs["path"] == value]
        if rows.empty and value == optional:
            return None
        if rows.empty:
            names = sorted(
                self.files.read("tensors", ["path"], ds.field("role") == "input")["path"].unique().to_pylist()
            )
            hook = f"{{layers: '.', kind: forward_pre, path: {value}, action: record, stats: none, tensors: true}}"
            fix = f"record it with a hook {hook}" + (", or pass mask=None to keep all positions" * (where == "mask"))
            message = "no input of this name was recorded"
            raise ConfigError(Problem(where, message, value, shown(names), similar_names(value, names), fix))
        rows = rows[rows["layer"] == ""] if (rows["layer"] == "").any() else rows
        layers = sorted(rows["layer"].unique())
        if len(layers) > 1:
            message = f"several layers have a recorded input {value!r}"
            raise ConfigError(
                Problem(where, message, value, shown(layers), fix="record the inputs of the model: layers: '.'")
            )
        rows = rows[rows["hook"] == rows["hook"].mode()[0]]
        call = self._like["call"] if rows["call"].isin(np.atleast_1d(self._like["call"])).any() else None
        like = FeatureSelection(
            layers[0] or ".", rows["hook"].iloc[0], "input", self._like["phase"], path=value, call=call
        )
        recorded = self._aligned(like, where, f"the input {value!r}")
        shapes = {batch.shape[1:]: None for batch in recorded.batches}
        if self.columns is None and len(shapes) > 1:
            message = f"the input {value!r} differs in shape between batches"
            fix = f"pass {where}=None, or record a part of equal shape with 'slice'"
            raise ConfigError(Problem(where, message, shown([["samples", *shape] for shape in shapes]), fix=fix))
        return recorded

    def _by_id(self, where: str, values: Tensor) -> _ById:
        first, last = self.ids.min(), self.ids.max()
        if self.ids.dtype.kind not in "iu" or not 0 <= first <= last < len(values):
            message = "an array has one row for each sample, at the index of its id"
            raise ConfigError(
                Problem(where, message, f"shape {list(values.shape)}", f"rows for the ids {first} to {last}")
            )
        return _ById(values, np.split(self.ids.astype(np.int64), self.ends[:-1]))

    def _positions(self, spec: Mapping[str, Any]) -> list[Tensor]:
        """Return, for each batch, the index in the model of each entry of dimension 1."""
        parts = () if spec.get("slice") is None else parse_slice(spec["slice"])
        part = parts[1] if len(parts) > 1 else slice(None)
        for name, source in self.layers.items():
            for own, batch in zip(self.batches, source.batches, strict=True):
                if isinstance(part, int) or len(batch.shape) < 2 or batch.shape[1] != own.shape[1]:
                    message = f"the tensors of layer {name!r} have no positions in dimension 1, or others than layer {self.first!r}"
                    fix = "pass flatten=None, or record without a 'slice' that removes dimension 1"
                    raise ConfigError(Problem("flatten", message, f"shape {list(batch.shape)}", fix=fix))
        positions = cache(lambda source: torch.arange(source)[part])
        whole = cache(torch.arange)
        chosen = ((positions(batch.source[1]), batch.shape[1]) for batch in self.batches)
        return [each if len(each) == count else whole(count) for each, count in chosen]

    def by_position(self, where: str, batch: int, values: Tensor) -> Tensor:
        """Return values [samples, positions, ...] at the recorded positions of a batch."""
        assert self.columns is not None
        columns, source = self.columns[batch], self.batches[batch].source[1]
        if values.ndim > 1 and values.shape[1] == len(columns):
            return values
        if values.ndim > 1 and values.shape[1] == source:
            return values[:, columns]
        message = f"the shape differs from the samples and positions of layer {self.first!r}"
        fix = f"pass {where}=None, or record it with a 'slice' of these positions"
        raise ConfigError(Problem(where, message, str(list(values.shape)), f"[{len(values)}, {source}]", fix=fix))

    def _kept(self, number: int, mask: _Recorded | _ById | None) -> Tensor | None:
        batch, function, special = self.batches[number], self.items.mask, list(self.items.special_tokens)
        shape = len(batch.samples), batch.shape[1]
        masks = [] if mask is None else [self.by_position("mask", number, mask.read(number, 0, shape[0])) != 0]
        if callable(function) or special:
            if self.tokens is None:
                message = (
                    "special_tokens and a function as mask need recorded tokens, and no input of this name was recorded"
                )
                raise ConfigError(Problem("tokens", message, self.items.tokens))
            tokens = self.by_position("tokens", number, self.tokens.read(number, 0, shape[0]))
            masks += [torch.as_tensor(function(tokens)) != 0] if callable(function) else []
            masks.append(~torch.isin(tokens, torch.tensor(special, dtype=tokens.dtype)))
        for each in masks:
            if each.shape != shape:
                message = f"must have the shape of the samples and positions of layer {self.first!r}"
                raise ConfigError(Problem("mask", message, str(list(each.shape)), str(list(shape))))
        keep = torch.stack(masks).all(0) if masks else torch.ones(())
        return None if keep.all() else keep.flatten().nonzero()[:, 0].int()


def _common_dtype(names: pd.Series) -> torch.dtype:
    """Return the dtype to which all tensors can be converted; tensors stored with a scale are float32."""
    dtypes = [getattr(torch, name, torch.float32) for name in names.unique()]
    return reduce(torch.promote_types, dtypes)


class ActivationDataset(Dataset[Batch]):
    """A map-style data set of recorded tensors; see `instrument.Run.dataset`.

    `data[i]` is an item. `data[[3, 1]]`, `data[10:20]` and an index array give a batch: the same entries with one more dimension.
    The index needs 24 bytes for each sample and 8 for each further layer, 4 for each position that is an item if a mask leaves out
    others, and about 1.5 kB for each recorded tensor.

    Attributes:
        layers: The names of the layers.
        item_bytes: The size of the tensors of an item, without ids and tokens.
    """

    def __init__(
        self, files: Sequence[RunFiles], selections: Sequence[FeatureSelection], items: Items, single: bool
    ) -> None:
        items.check()
        self.layers = [each.layer for each in selections]
        self._single = single
        self._runs = list(_runs(files, selections, items))
        first = self._runs[0]
        for run in self._runs[1:]:
            if run.shapes != first.shapes or (run.targets is None) != (first.targets is None):
                allowed = ", ".join(str(list(shape)) for shape in first.shapes.values())
                given = f"{', '.join(str(list(shape)) for shape in run.shapes.values())} in {run.files.folder}"
                raise ConfigError(Problem("layer", "the items of the runs differ in shape", given, allowed))
        self._shapes = first.shapes
        self._dtypes = {
            name: reduce(torch.promote_types, [run.dtypes[name] for run in self._runs]) for name in self.layers
        }
        self.item_bytes = sum(prod(self._shapes[name]) * self._dtypes[name].itemsize for name in self.layers)
        self._run_of = np.repeat(np.arange(len(self._runs)), [len(run.batches) for run in self._runs])
        self._number = np.concatenate([np.arange(len(run.batches)) for run in self._runs])
        self._step = np.array([batch.key[0] for run in self._runs for batch in run.batches])
        self._call = (
            np.array([batch.key[3] for run in self._runs for batch in run.batches])
            if selections[0].joins_calls
            else None
        )
        self._ids = np.concatenate([run.ids for run in self._runs])
        targets = [torch.from_numpy(run.targets) for run in self._runs if run.targets is not None]
        self._targets = torch.cat(targets) if targets else None
        counts = [len(batch.samples) for run in self._runs for batch in run.batches]
        self._first_sample = np.cumsum([0, *counts])
        self._starts = np.cumsum([0, *(self._count(g) for g in range(len(counts)))])
        if not len(self):
            raise ConfigError(Problem("mask", "no position is an item: the mask is 0 at all positions"))

    def _count(self, g: int) -> int:
        """Return the number of items of a batch."""
        run, number = self._runs[self._run_of[g]], self._number[g]
        kept = run.kept[number] if run.kept is not None else None
        return len(run.batches[number].samples) * self._width(g) if kept is None else len(kept)

    def items_before(self, sample: int) -> int:
        """Return the number of items of the first samples."""
        g = int(np.searchsorted(self._first_sample, sample, side="right")) - 1
        if g == len(self._number):
            return len(self)
        run, number = self._runs[self._run_of[g]], self._number[g]
        position = (sample - int(self._first_sample[g])) * self._width(g)
        kept = run.kept[number] if run.kept is not None else None
        return int(self._starts[g]) + (position if kept is None else int(torch.searchsorted(kept, position)))

    def _width(self, g: int) -> int:
        """Return the number of positions of a sample; 1 if the samples are the items."""
        run = self._runs[self._run_of[g]]
        return 1 if run.columns is None else len(run.columns[self._number[g]])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __repr__(self) -> str:
        shapes = ", ".join(
            f"{name} {list(self._shapes[name])} {self._dtypes[name]}".replace("torch.", "") for name in self.layers
        )
        return f"<{type(self).__name__}: {len(self):,} items of {shapes}>"

    def __getitem__(self, index: int | slice | Sequence[int] | Array | Tensor) -> Batch:
        if isinstance(index, slice):
            return self.read(np.arange(len(self))[index])
        numbers = np.asarray(index)
        numbers = np.where(numbers < 0, numbers + len(self), numbers).astype(np.int64)
        if numbers.size and not 0 <= numbers.min() <= numbers.max() < len(self):
            raise IndexError(f"index out of range: the data set has {len(self)} items")
        if numbers.ndim:
            return self.read(numbers)
        return _part(self.read(numbers[None]), 0)

    def __getitems__(self, indices: list[int]) -> list[Batch]:
        """Return several items, read together. A `DataLoader` with `batch_size` calls it."""
        batch = self[indices]
        return [_part(batch, i) for i in range(len(indices))]

    def read(self, indices: Array) -> Batch:
        """Return the items of some indices, int64 [n], as a batch."""
        if not len(indices):
            return _part(self.read(np.zeros(1, np.int64)), slice(0))
        order = np.argsort(indices, kind="stable")
        ordered = indices[order]
        batches, firsts = np.unique(np.searchsorted(self._starts, ordered, side="right") - 1, return_index=True)
        ends = [*firsts[1:].tolist(), len(order)]
        pieces = [
            (g, torch.from_numpy(ordered[first:end] - self._starts[g]))
            for g, first, end in zip(batches.tolist(), firsts.tolist(), ends, strict=True)
        ]
        return self.join(pieces, torch.from_numpy(order))

    def empty(self, count: int) -> dict[str, Tensor]:
        """Return memory for the tensors of some items, by layer."""
        return {name: torch.empty(count, *self._shapes[name], dtype=self._dtypes[name]) for name in self.layers}

    def release(self) -> None:
        """Remove what was read of the mapped files from the memory of this process."""
        for run in self._runs:
            run.tensors.release()

    def join(
        self,
        pieces: Sequence[tuple[int, slice | Tensor]],
        to: Tensor | None,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> Batch:
        """Read items into one batch.

        Args:
            pieces: Batches of the run, and the numbers of the items among those of the batch.
            to: The index in the result of each item in the order of the pieces; None for this order.
            buffers: Memory for the tensors of the layers. Default: new memory.
        """
        sizes = [where.stop - where.start if isinstance(where, slice) else len(where) for _, where in pieces]
        count = sum(sizes)
        values = self.empty(count) if buffers is None else {name: each[:count] for name, each in buffers.items()}
        others: dict[str, list[Tensor]] = {}
        end = 0
        for (g, where), size in zip(pieces, sizes, strict=True):
            begin, end = end, end + size
            self._copy(g, where, values, slice(begin, end) if to is None else to[begin:end], others)
        joined = {name: torch.cat(parts) for name, parts in others.items()}
        if to is not None:
            joined = {name: torch.empty_like(part).index_copy_(0, to, part) for name, part in joined.items()}
        sample, of = joined.pop("sample").numpy(), joined.pop("batch").numpy()
        batch: Batch = {"x": values[self.layers[0]] if self._single else values}
        ids = self._ids[sample]
        batch["id"] = torch.from_numpy(ids.astype(np.int64)) if ids.dtype.kind in "iu" else ids.tolist()
        batch["run"], batch["step"] = torch.from_numpy(self._run_of[of]), torch.from_numpy(self._step[of])
        if self._call is not None:
            batch["call"] = torch.from_numpy(self._call[of])
        if self._targets is not None:
            batch["target"] = self._targets[torch.from_numpy(sample)]
        return {**batch, **joined}

    def _copy(
        self,
        g: int,
        where: slice | Tensor,
        values: Mapping[str, Tensor],
        to: slice | Tensor,
        others: dict[str, list[Tensor]],
    ) -> None:
        """Copy the items `where` of a batch to the indices `to` of `values`; add what belongs to them to `others`."""
        run, number, width = self._runs[self._run_of[g]], int(self._number[g]), self._width(g)
        kept = run.kept[number] if run.kept is not None else None
        numbers = torch.arange(where.start, where.stop) if isinstance(where, slice) else where
        numbers = numbers if kept is None else kept[numbers].long()
        first, last = int(numbers[0]), int(numbers[-1])
        start, stop = first // width, last // width + 1
        inside = numbers - start * width
        is_range = isinstance(where, slice) and last - first == len(numbers) - 1
        for name, out in values.items():
            source = run.layers[name].read(number, start, stop).reshape(-1, *self._shapes[name])
            raw = _RAW[out.itemsize]  # NumPy copies rows faster than PyTorch, but does not know all types
            target, source = out.view(raw).numpy(), source.to(out.dtype).view(raw).numpy()
            source = source[int(inside[0]) : int(inside[-1]) + 1] if is_range else source[inside.numpy()]
            target[to if isinstance(to, slice) else to.numpy()] = source
        sample = numbers.div(width, rounding_mode="floor")
        found = {"batch": torch.full_like(numbers, g), "sample": sample + int(self._first_sample[g])}
        if run.columns is not None:
            found["position"] = run.columns[number][numbers % width]
        for name, given in {"token": run.tokens, "mask": run.mask, "target": run.target}.items():
            if given is None:
                continue
            part = given.read(number, start, stop)
            per_position = run.columns is not None and (name != "target" or part.ndim > 1)
            found[name] = (
                run.by_position(name, number, part).flatten(0, 1)[inside] if per_position else part[sample - start]
            )
        for name, part in found.items():
            others.setdefault(name, []).append(part)

    def segments(self, window: int) -> tuple[Array, Array]:
        """Return all items in order as segments, int64 [n, 3] (batch, first, end), and the chunk of each, int64 [n].

        A chunk is a range of items of a tensor, of `window` / 64 bytes at most. Tensors in Parquet files, of which a row group is read at
        a time, form chunks of up to 16 MB.
        """
        sizes = np.diff(self._starts)
        in_groups = np.concatenate([run.in_row_groups for run in self._runs])
        most = np.where(in_groups, np.maximum(sizes, 1), max(1, window // CHUNKS // max(self.item_bytes, 1)))
        parts = -(-sizes // most)
        g = np.repeat(np.arange(len(sizes)), parts)
        first = (np.arange(len(g)) - np.repeat(np.cumsum(parts) - parts, parts)) * most[g]
        group = self._starts[g] * self.item_bytes // ROW_GROUP_BYTES
        is_next = ~in_groups[g] | np.diff(group, prepend=-1).astype(bool)
        return np.stack([g, first, np.minimum(first + most[g], sizes[g])], axis=1), np.cumsum(is_next) - 1

    def batches(
        self,
        batch_size: int = 256,
        *,
        shuffle: int | None = None,
        window: int | None = WINDOW_BYTES,
        drop_last: bool = False,
        rank: int | None = None,
        ranks: int | None = None,
    ) -> ActivationBatches:
        """Return an iterable data set of batches.

        Args:
            batch_size: The number of items of a batch. The last batch of an epoch has fewer if the number of items is no multiple.
            shuffle: The seed of the order. Default: None, in the order of the data set.
            window: The size in bytes of a window of a shuffled iteration. Chunks of 1/64 of it (a part of a recorded tensor; 16 MB of
                tensors in Parquet files) are brought into random order. Consecutive chunks fill a window; its items are permuted. Both
                permutations are uniform. Two windows, of one batch at least, are in memory. None: a uniform permutation of all items,
                8 bytes for each.
            drop_last: Whether an incomplete last batch is left out.
            rank: The number of this process. Default: that of `torch.distributed`; 0 if it is not initialized.
            ranks: The number of processes. Default: that of `torch.distributed`. Each process gets other items, and equally many: up to
                `ranks` - 1 items of an epoch are left out.

        Raises:
            ConfigError: An argument has a wrong value.
        """
        initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
        ranks = ranks if ranks is not None else torch.distributed.get_world_size() if initialized else 1
        rank = rank if rank is not None else torch.distributed.get_rank() if initialized else 0
        for name, value in {
            "batch_size": batch_size,
            "window": 1 if window is None else window,
            "ranks": ranks,
        }.items():
            if not isinstance(value, int) or value < 1:
                raise ConfigError(Problem(name, "must be a positive integer", value, "1, 2, ..."))
        if not 0 <= rank < ranks:
            raise ConfigError(Problem("rank", "no process has this number", rank, f"0 to {ranks - 1}"))
        if shuffle is not None and shuffle < 0:
            raise ConfigError(Problem("shuffle", "must be a seed", shuffle, "0, 1, 2, ..., or None"))
        return ActivationBatches(self, Order(batch_size, shuffle, window, drop_last, ranks), rank)


def _runs(files: Sequence[RunFiles], selections: Sequence[FeatureSelection], items: Items) -> Iterator[_Run]:
    """Yield the runs. If there are several, errors name the folder."""
    for each in files:
        try:
            yield _Run(each, selections, items)
        except ConfigError as error:
            where = f" in {each.folder}" if len(files) > 1 else ""
            problems = (replace(problem, message=problem.message + where) for problem in error.problems)
            raise ConfigError(*problems) from None


class Order(NamedTuple):
    """What the sequence of batches depends on, besides the data set, the epoch, the rank and the number of workers."""

    batch_size: int
    shuffle: int | None
    window: int | None
    drop_last: bool
    ranks: int


class ActivationBatches(IterableDataset[Batch]):
    """Batches of a data set of recorded tensors; see `ActivationDataset.batches`.

    Use it in a loop, or in `DataLoader(batches, batch_size=None, num_workers=...)`: each worker reads other batches. The next window is
    read by a thread. Each iteration has the same order until `set_epoch` is called.
    """

    def __init__(self, data: ActivationDataset, order: Order, rank: int) -> None:
        self.data, self.order, self.rank = data, order, rank
        # Of all workers: epoch, batches delivered before a resumed iteration, number of workers, and a number of the iteration.
        self._shared = torch.zeros(4, dtype=torch.int64).share_memory_()
        self._resumed: int | None = None  # batches of this worker
        self._position = 0
        self._iterations = 0

    def __len__(self) -> int:
        items = len(self.data) // self.order.ranks
        return items // self.order.batch_size if self.order.drop_last else -(-items // self.order.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, from 0, which changes the order of a shuffled iteration. It begins with the first batch."""
        self._shared[:] = torch.tensor([epoch, 0, 0, 0])
        self._position = 0

    def state_dict(self, batches: int | None = None) -> Batch:
        """Return the position in the sequence.

        Args:
            batches: The number of batches of this epoch that were used. Default: those that were yielded here. Required if workers of
                a `DataLoader` yield them.
        """
        epoch, _, workers, _ = self._shared.tolist()
        info = get_worker_info()
        if info is None and workers > 0 and batches is None:
            fix = "pass state_dict(batches=N), N batches received in this epoch; torchdata's StatefulDataLoader does it by itself"
            raise ConfigError(Problem("batches", "workers yield the batches, so their number is unknown here", fix=fix))
        position = self._position if batches is None else batches
        state = {"epoch": epoch, "batches": position, "workers": workers, "worker": None if info is None else info.id}
        return {**state, "items": len(self.data), **self.order._asdict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the batch after a position. Needs the same data set, arguments, number of processes and of workers.

        Raises:
            ConfigError: The state belongs to another data set or to other arguments.
        """
        for name, value in {"items": len(self.data), **self.order._asdict()}.items():
            if state.get(name) != value:
                message = "the state belongs to other batches"
                raise ConfigError(
                    Problem(name, message, value, str(state.get(name)), fix="use the arguments and runs of the state")
                )
        self._position = state["batches"]
        if state["worker"] is not None:
            self._shared[0], self._resumed = state["epoch"], state["batches"]
        else:
            self._shared[:] = torch.tensor([state["epoch"], state["batches"], state["workers"], 0])

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        shard, start = self._begin(worker, workers, 0 if info is None else info.seed - info.id)
        size, epoch = self.order.batch_size, int(self._shared[0])
        length = len(self)
        first = shard * (length // workers) + min(shard, length % workers)
        count = length // workers + (shard < length % workers)
        self._position = start
        begin, end = first * size + start * size, min((first + count) * size, len(self.data) // self.order.ranks)
        for batch in self._read(epoch, first * size, begin, end):
            self._position += 1
            yield batch

    def _begin(self, worker: int, workers: int, iteration: int) -> tuple[int, int]:
        """Return the shard of a worker, and the number of its batches that were yielded before a resumption.

        A `DataLoader` takes batches from its workers in turn. After n batches, worker n modulo `workers` follows; a new loader begins with
        worker 0, which therefore takes the shard of that worker.
        """
        self._iterations += 1
        if self._resumed is not None:
            start, self._resumed = self._resumed, None
            return worker, start
        _, done, known, of = self._shared.tolist()
        if done and known != (workers if iteration else 0):
            raise ConfigError(
                Problem("num_workers", "the state belongs to another number of workers", workers, str(known))
            )
        if iteration == 0:
            self._shared[1:] = 0  # the next iteration begins with the first batch
            return 0, done
        if of not in (0, iteration) or self._iterations > 1:
            self._shared[1] = done = 0  # another iteration than the resumed one
        self._shared[2:] = torch.tensor([workers, iteration])
        shard = (worker + done) % workers
        return shard, done // workers + (shard < done % workers)

    def _read(self, epoch: int, first: int, begin: int, end: int) -> Iterator[Batch]:
        """Yield the batches with the items from `begin` to `end` of this process, in windows that begin at `first`."""
        size, shuffle, data = self.order.batch_size, self.order.shuffle, self.data
        offset = self.rank * (len(data) // self.order.ranks)
        if begin >= end:
            return
        if shuffle is not None and self.order.window is None:
            order = _permutation(len(data), shuffle, epoch)[offset + first : offset + end].numpy()
            length, buffers = size, None
            load: Callable[..., Batch] = partial(_read_in_order, data, order)
        else:
            most = SEQUENTIAL_BYTES if shuffle is None or self.order.window is None else self.order.window
            segments, chunks = data.segments(most)
            if shuffle is not None:
                places = _permutation(int(chunks[-1]) + 1, shuffle, epoch).numpy()
                segments = segments[np.argsort(places[chunks], kind="stable")]
            segments = np.column_stack([segments, np.cumsum(segments[:, 2] - segments[:, 1])])
            batches = -(-(end - first) // size)
            windows = -(-batches // max(1, most // max(data.item_bytes, 1) // size))
            length = -(-batches // windows) * size  # windows of equal size
            load = partial(self._window, segments, epoch, offset + first)
            buffers = [data.empty(min(length, end - first)) for _ in range(min(windows, 2))]
        starts = [
            (at, min(at + length, end - first)) for at in range((begin - first) // length * length, end - first, length)
        ]
        with ThreadPoolExecutor(1) as reader:
            following = reader.submit(load, starts[0], buffers and buffers[0])
            for number, (at, stop) in enumerate(starts, 1):
                window = following.result()
                if number < len(starts):
                    following = reader.submit(load, starts[number], buffers and buffers[number % 2])
                for i in range(max(at, begin - first), stop, size):
                    yield window if buffers is None else _part(window, slice(i - at, min(i + size, stop) - at))

    def _window(
        self, segments: Array, epoch: int, offset: int, items: tuple[int, int], buffers: Mapping[str, Tensor]
    ) -> Batch:
        """Read a range of the items of the segments into buffers."""
        begin, end = offset + items[0], offset + items[1]
        g, first, last, ends = segments.T
        of = slice(np.searchsorted(ends, begin, side="right"), np.searchsorted(ends, end - 1, side="right") + 1)
        first = np.maximum(first[of], last[of] - (ends[of] - begin))
        last = np.minimum(last[of], last[of] - (ends[of] - end))
        pieces = [(i, slice(a, b)) for i, a, b in zip(g[of].tolist(), first.tolist(), last.tolist(), strict=True)]
        shuffle = self.order.shuffle
        to = None if shuffle is None else _permutation(end - begin, shuffle, epoch, 1 + begin)
        batch = self.data.join(pieces, to, buffers)
        self.data.release()
        return batch


def _permutation(size: int, *seed: int) -> Tensor:
    """Return a uniformly random permutation of the integers below `size`, which depends on the seed only."""
    state = np.random.SeedSequence(seed).generate_state(1, np.uint64)[0]
    return torch.randperm(size, generator=torch.Generator().manual_seed(int(state >> np.uint64(1))))


def _read_in_order(data: ActivationDataset, order: Array, items: tuple[int, int], _: None) -> Batch:
    return data.read(order[slice(*items)])


def _part(batch: Batch, where: int | slice) -> Batch:
    """Return a copy of an item, or of some items: the memory of a window is used again."""

    def copied(value: Any) -> Any:
        return value[where].clone() if isinstance(value, Tensor) else value[where]

    return {
        name: {layer: copied(each) for layer, each in value.items()} if isinstance(value, dict) else copied(value)
        for name, value in batch.items()
    }
