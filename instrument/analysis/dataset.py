"""Recorded tensors as datasets of PyTorch: `run.dataset`.

An item is an entry of dimension 0 of the recorded tensors, or with `flatten="tokens"` a position of dimensions 0 and 1. Items are
numbered in the order in which they were recorded. In memory are an index, and two windows of an iteration.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, reduce
from math import prod
from numbers import Integral
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
from ..storage.blocks import ALIGNMENT
from ..storage.parts import ROW_GROUP_BYTES
from ..storage.run_files import RunFiles
from .features import INDEX, Array, FeatureSelection, TensorOfBatch, ids_of, samples_of, settings_of, shown, targets_of
from .frames import plain_labels
from .raw_tensors import RawTensors

Batch: TypeAlias = dict[str, Any]
MASK, TOKENS = "attention_mask", "input_ids"
WINDOW_BYTES = 256 * 2**20
CHUNKS = 64  # of a window
SEQUENTIAL_BYTES = 32 * 2**20  # of a window without shuffling

RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class Items(NamedTuple):
    """What the items of a dataset are; see `instrument.Run.dataset`."""

    flatten: Literal["tokens"] | None = None
    mask: str | None = MASK
    tokens: str | None = TOKENS
    special_tokens: Collection[int] = ()
    with_targets: bool | str = False


class _Source(NamedTuple):
    """One tensor for each batch. `entries`: the indices in dimension 0 of the samples of a batch; None if these are all, in order.

    An item has the `shape`, and is a position of dimensions 0 and 1 or an entry of dimension 0. `columns`: for each batch the positions
    of the indices of dimension 1, or None; if positions are the items, later the index of each position of the first layer.
    """

    tensors: RawTensors
    which: list[int]
    batches: list[TensorOfBatch]
    entries: list[Array | None]
    columns: list[Array | None]
    per_position: bool = False
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32

    def read(self, batch: int, start: int, stop: int) -> Tensor:
        """Return the entries of the samples from `start` to `stop` of a batch."""
        entries = self.entries[batch]
        if entries is None:
            return self.tensors.tensor(self.which[batch], start, stop)
        return self.tensors.tensor(self.which[batch])[torch.from_numpy(entries[start:stop])]

    def rows(self, batch: int, length: int, samples: Array, columns: Array) -> Array:
        """Return the indices of items in values of a batch; of dimensions 0 and 1, which has a length, if positions are the items."""
        indices = self.columns[batch]
        return samples * length + indices[columns] if self.per_position and indices is not None else samples


class _Run:
    """The batches of one run: the tensors of each layer, and what belongs to their samples and positions."""

    def __init__(self, files: RunFiles, selections: Sequence[FeatureSelection], items: Items) -> None:
        self.files, self.first, self._flat = files, selections[0].layer, items.flatten is not None
        names = [each for each in (items.mask, items.tokens, items.with_targets) if isinstance(each, str)]
        condition = ds.field("layer").isin([each.layer_name for each in selections])
        condition |= ds.field("path").isin(pa.array(names, "string")) & (ds.field("role") == "input")
        self.tensors = RawTensors.of(files, [*INDEX, "layer", "recompute", "backward"], condition)
        index: pd.DataFrame = plain_labels(self.tensors.index).to_pandas()
        index["tensor"] = np.arange(len(index))
        self._index = index[~index["recompute"] & (index["backward"] == 0)]
        rows = selections[0].select(files, self._index)
        self._samples = samples_of(files, rows)
        recorded = self._recorded(selections[0], rows)
        self.batches = recorded.batches
        calls = rows["call"].unique().tolist()
        self._like = {"phase": rows["phase"].iloc[0], "call": calls if selections[0].joins_calls else calls[0]}
        layers = {self.first: recorded}
        layers |= {each.layer: self._aligned(each, "layer", f"layer {each.layer!r}") for each in selections[1:]}
        shapes = {}
        for each in selections:
            shape = each.common_shape(layers[each.layer].batches, 1 + self._flat)
            while shape and shape[-1] == 1:
                shape = shape[:-1]
            shapes[each.layer] = shape
        dtypes = index["dtype"].map(lambda name: getattr(torch, name, torch.float32))  # those stored with a scale
        self.in_row_groups = bool(index["block"].isna()[recorded.which].any())
        samples = self._samples.iloc[np.concatenate([batch.samples for batch in self.batches])]
        self.ids: Array = ids_of(samples).to_numpy()  # of all samples, like the targets
        self.targets = targets_of(samples) if items.with_targets is True else None
        if items.with_targets is True and self.targets is None:
            fix = "call probe.batch(ids=ids, targets=targets), or pass the name of a recorded input"
            raise ConfigError(Problem("with_targets", "no targets were recorded", fix=fix))
        # For each batch the positions of the indices of dimension 1; None if samples are the items.
        self.columns = recorded.columns if self._flat else None
        if self._flat:
            layers = {name: self._located(each, "flatten", f"layer {name!r}") for name, each in layers.items()}
        inputs = {
            "token": self._input("tokens", items.tokens, TOKENS),
            "mask": self._input("mask", items.mask, "" if self._flat else MASK),
            "target": self._input("with_targets", None if items.with_targets in (True, False) else items.with_targets),
        }
        sources = {f"x.{name}": each._replace(shape=shapes[name]) for name, each in layers.items()}
        sources |= {name: each for name, each in inputs.items() if each is not None}
        mask = sources.pop("mask", None) if self._flat else None
        promoted = {name: reduce(torch.promote_types, dtypes[each.which].unique()) for name, each in sources.items()}
        # The tensors of the layers, and the recorded inputs `token`, `mask` and `target`, by their names in a batch.
        self.sources = {name: each._replace(dtype=promoted[name]) for name, each in sources.items()}
        special = torch.tensor(list(items.special_tokens), dtype=torch.int64)
        if len(special) and "token" not in sources:
            raise ConfigError(Problem("special_tokens", "the tokens were not recorded", fix="pass tokens=NAME"))
        masks = [(mask, torch.zeros(1)), (sources.get("token"), special)]
        # For each batch the numbers of its items among its positions, int32; None if all are items.
        self.kept = [self._kept(number, masks) for number in range(len(self.batches))] if self._flat else None
        del self._index, self._samples

    def _recorded(self, selection: FeatureSelection, rows: pd.DataFrame) -> _Source:
        batches = list(selection.batches(self.files, rows, self._samples))
        tensor_of = dict(zip(rows[selection.key].itertuples(index=False, name=None), rows["tensor"], strict=True))
        hook = settings_of(self.files, rows["hook"].iloc[0])
        parts = () if hook.get("slice") is None else parse_slice(hook["slice"])
        part = parts[1] if len(parts) > 1 else slice(None)
        chosen = part if hook.get("positions") is None else np.atleast_1d(hook["positions"])
        positions_of = cache(lambda length: np.arange(length)[chosen])
        has_positions = not isinstance(part, int)
        columns = [positions_of(each.source[1]) if has_positions and len(each.shape) > 1 else None for each in batches]
        which = [tensor_of[batch.key] for batch in batches]
        return _Source(self.tensors, which, batches, [None] * len(batches), columns)

    def _aligned(self, selection: FeatureSelection, where: str, what: str) -> _Source:
        """Return the tensors of another selection for the same samples of the same batches."""
        rows = selection.select(self.files, self._index)
        rows = rows[pd.MultiIndex.from_frame(rows[selection.key]).isin([batch.key for batch in self.batches])]
        recorded = self._recorded(selection, rows) if len(rows) else _Source(self.tensors, [], [], [], [])
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
        columns = [recorded.columns[number] for number in which]
        return _Source(self.tensors, [recorded.which[number] for number in which], batches, entries, columns)

    def _located(self, source: _Source, where: str, what: str) -> _Source:
        """Return a source with the indices in dimension 1 of the positions at which the first layer was recorded."""
        found: dict[tuple[int, int], Array] = {}
        cells = zip(self.columns or (), source.columns, source.batches, self.batches, strict=True)
        for own, columns, batch, first in cells:
            key = id(own), id(columns)
            if key not in found and own is not None and columns is not None and len(columns) == batch.shape[1]:
                if batch.source[1] == first.source[1]:
                    found[key] = pd.Index(columns).get_indexer(pd.Index(own))
                elif len(columns) == len(own):  # other positions, such as the last ones of a longer sequence
                    found[key] = np.arange(len(own))
            if key not in found or (found[key] < 0).any():
                message = f"{what} has no positions in dimension 1, or not those of layer {self.first!r}"
                argument = where if where in ("mask", "tokens") else "flatten"
                fix = f"pass {argument}=None, or record both with the same 'slice' or 'positions'"
                raise ConfigError(Problem(where, message, f"shape {list(batch.shape)}", fix=fix))
        indices = [found[id(own), id(columns)] for own, columns in zip(self.columns or (), source.columns, strict=True)]
        return source._replace(columns=[*indices], per_position=True)

    def _input(self, where: str, value: Any, optional: str | None = None) -> _Source | None:
        """Return a recorded input by its name; None if `value` is None, or equals `optional` and was not recorded."""
        if value is None:
            return None
        of_inputs = self._index[(self._index["role"] == "input") & (self._index["phase"] == self._like["phase"])]
        rows = of_inputs[of_inputs["path"] == value]
        if rows.empty and value == optional:
            return None
        if rows.empty:
            inputs = self.files.read("tensors", ["path"], ds.field("role") == "input")
            names = sorted(inputs["path"].unique().to_pylist())
            hook = f"{{layers: '.', kind: forward_pre, path: {value}, action: record, stats: none, tensors: true}}"
            fix = f"record it with a hook {hook}" + (", or pass mask=None to keep all positions" * (where == "mask"))
            message = "no input of this name was recorded"
            raise ConfigError(Problem(where, message, value, shown(names), similar_names(value, names), fix))
        rows = rows[rows["layer"] == ""] if (rows["layer"] == "").any() else rows
        layers = sorted(rows["layer"].unique())
        if len(layers) > 1:
            fix, message = "record those of the model: layers: '.'", f"several layers have a recorded input {value!r}"
            raise ConfigError(Problem(where, message, value, shown(layers), fix=fix))
        rows = rows[rows["hook"] == rows["hook"].mode()[0]]
        call = self._like["call"] if rows["call"].isin(np.atleast_1d(self._like["call"])).any() else None
        layer, hook, phase = layers[0] or ".", rows["hook"].iloc[0], self._like["phase"]
        like = FeatureSelection(layer, hook, "input", phase, path=value, call=call)
        source = self._aligned(like, where, f"the input {value!r}")
        per_position = self._flat and (where != "with_targets" or len(source.batches[0].shape) > 1)
        source = self._located(source, where, f"the input {value!r}") if per_position else source
        shapes = list(dict.fromkeys(batch.shape[1 + per_position :] for batch in source.batches))
        if len(shapes) > 1:
            message = f"the input {value!r} differs in shape between batches"
            given = ", ".join(str(["samples", *shape]) for shape in shapes[:3])
            fix = f"pass {where}=None, or record a part of equal shape with 'slice'"
            raise ConfigError(Problem(where, message, given, fix=fix))
        return source._replace(shape=shapes[0])

    def _kept(self, number: int, masks: Sequence[tuple[_Source | None, Tensor]]) -> Tensor | None:
        """Return the items of a batch, at which no mask has one of the values next to it."""
        size = self.batches[number].shape[:2]
        samples, columns = np.divmod(np.arange(prod(size)), size[1])
        keep = torch.ones(prod(size), dtype=torch.bool)
        for source, excluded in masks:
            if source is not None and len(excluded):
                values = source.read(number, 0, size[0])
                values = values.flatten()[source.rows(number, values.shape[1], samples, columns)]
                keep &= (values[:, None] != excluded).all(1)
        return None if keep.all() else keep.nonzero()[:, 0].int()


class ActivationDataset(Dataset[Batch]):
    """A map-style dataset of recorded tensors; see `instrument.Run.dataset`.

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
        if items.flatten not in (None, "tokens"):
            raise ConfigError(Problem("flatten", "unknown value", items.flatten, "'tokens', None"))
        of_input, of_target = (str | None, "a name, or None"), (str | bool | None, "a name, True or False")
        for name, (types, allowed) in {"mask": of_input, "tokens": of_input, "with_targets": of_target}.items():
            if not isinstance(value := getattr(items, name), types):
                raise ConfigError(Problem(name, "must be the name of a recorded input", repr(value), allowed))
        tokens = items.special_tokens
        special = np.asarray(list(tokens) if isinstance(tokens, Iterable) else None)
        if special.size and special.dtype.kind not in "iu":
            fix = "pass a list, such as special_tokens=[tokenizer.pad_token_id]"
            raise ConfigError(Problem("special_tokens", "must be token ids", repr(tokens), fix=fix))
        if items.flatten is None and special.size:
            message = "positions are left out only if each position is an item"
            raise ConfigError(Problem("special_tokens", message, fix="pass flatten='tokens'"))
        self.layers = [each.layer for each in selections]
        self._single = single
        self._runs = list(_runs(files, selections, items))
        self._shapes = _shapes(self._runs[0])
        for run in self._runs[1:]:
            if _shapes(run) != self._shapes or (run.targets is None) != (self._runs[0].targets is None):
                given = f"{_shapes(run)} in {run.files.folder}"
                raise ConfigError(Problem("layer", "the items of the runs differ in shape", given, str(self._shapes)))
        dtypes = {name: [run.sources[name].dtype for run in self._runs] for name in self._shapes}
        self._dtypes = {name: reduce(torch.promote_types, each) for name, each in dtypes.items()}
        sizes = {name: prod(shape) * self._dtypes[name].itemsize for name, shape in self._shapes.items()}
        self.item_bytes = sum(size for name, size in sizes.items() if name.startswith("x."))
        batches = [batch for run in self._runs for batch in run.batches]
        self._run_of = np.repeat(np.arange(len(self._runs)), [len(run.batches) for run in self._runs])
        self._number = np.concatenate([np.arange(len(run.batches)) for run in self._runs])
        self._step = np.array([batch.key[0] for batch in batches])
        self._call = np.array([batch.key[3] for batch in batches]) if selections[0].joins_calls else None
        self._ids = np.concatenate([run.ids for run in self._runs])
        targets = [run.targets for run in self._runs if run.targets is not None]
        self._targets = np.concatenate(targets) if targets else None
        samples = np.array([len(batch.samples) for batch in batches])
        self._first_sample = np.cumsum(samples) - samples
        self._width = np.array([1 if items.flatten is None else batch.shape[1] for batch in batches])
        counts = samples * self._width
        kept = [each for run in self._runs for each in run.kept or [None] * len(run.batches)]
        self._kept: Array | None = None  # the numbers of all items among the positions of their batches
        if any(each is not None for each in kept):
            pairs = zip(kept, counts, strict=True)
            numbers = [np.arange(count, dtype=np.int32) if each is None else each.numpy() for each, count in pairs]
            self._kept, counts = np.concatenate(numbers), np.array([len(each) for each in numbers])
        for run in self._runs:
            run.kept = None
        self._starts = np.cumsum([0, *counts])
        if not len(self):
            raise ConfigError(Problem("mask", "no position is an item: the mask is 0 at all positions"))

    def __len__(self) -> int:
        return int(self._starts[-1])

    def items_before(self, sample: int) -> int:
        """Return the number of items of the first samples."""
        if sample >= len(self._ids):
            return len(self)
        g = int(np.searchsorted(self._first_sample, sample, side="right")) - 1
        position, first = (sample - self._first_sample[g]) * self._width[g], self._starts[g]
        if self._kept is not None:
            position = np.searchsorted(self._kept[first : self._starts[g + 1]], position)
        return int(first + position)

    def __repr__(self) -> str:
        items = [(name, self._shapes[f"x.{name}"], self._dtypes[f"x.{name}"]) for name in self.layers]
        shapes = ", ".join(f"{name} {list(shape)} {dtype}".replace("torch.", "") for name, shape, dtype in items)
        return f"<{type(self).__name__}: {len(self):,} items of {shapes}>"

    def __getitem__(self, index: int | slice | Sequence[int] | Array | Tensor) -> Batch:
        if isinstance(index, slice):
            return self.read(np.arange(len(self))[index])
        numbers = np.asarray(index)
        numbers = np.where(numbers < 0, numbers + len(self), numbers).astype(np.int64)
        if numbers.size and not 0 <= numbers.min() <= numbers.max() < len(self):
            raise IndexError(f"index out of range: the dataset has {len(self)} items")
        return self.read(numbers) if numbers.ndim else _part(self.read(numbers[None]), 0)

    def __getitems__(self, indices: list[int]) -> list[Batch]:
        """Return several items, read together. A `DataLoader` with `batch_size` calls it."""
        batch = self[indices]
        return [_part(batch, i) for i in range(len(indices))]

    def read(self, indices: Array) -> Batch:
        """Return the items of some indices, int64 [n], as a batch."""
        if not len(indices):
            return _part(self.read(np.zeros(1, np.int64)), slice(0))
        order = np.argsort(indices, kind="stable")
        return _part(self.join(indices[order]), _inverse(order))

    def empty(self, count: int) -> dict[str, Tensor]:
        """Return memory for the tensors of some items, by their names."""
        return {name: _empty((count, *shape), self._dtypes[name]) for name, shape in self._shapes.items()}

    def join(self, items: Array, buffers: Mapping[str, Tensor] | None = None) -> Batch:
        """Read items into one batch for `_part`. Strings are an array.

        `items`: their indices, int64 [n], n > 0, in ascending order. `buffers`: memory for the tensors. Default: new memory.
        """
        first, last = np.searchsorted(self._starts, items[[0, -1]], side="right") - 1
        ends = [*np.searchsorted(items, self._starts[first + 1 : last + 1]).tolist(), len(items)]
        batches = np.repeat(np.arange(first, last + 1), np.diff(ends, prepend=0))
        numbers = items - self._starts[batches] if self._kept is None else self._kept[items]
        samples, columns = np.divmod(numbers, self._width[batches])
        values = {name: each[: len(items)] for name, each in (buffers or self.empty(len(items))).items()}
        targets = {name: each.view(RAW[each.itemsize]).numpy() for name, each in values.items()}
        positions = np.empty_like(samples)
        begin = 0
        for g, end in enumerate(ends, first):
            if end > begin:
                run, number = self._runs[self._run_of[g]], int(self._number[g])
                where = slice(begin, end)
                start, stop = int(samples[begin]), int(samples[end - 1]) + 1
                if run.columns is not None and (own := run.columns[number]) is not None:
                    positions[where] = own[columns[where]]
                for name, source in run.sources.items():
                    part = source.read(number, start, stop)
                    length = part.shape[1] if source.per_position else 1
                    rows = source.rows(number, length, samples[where] - start, columns[where])
                    kind = self._dtypes[name]
                    raw = part.to(kind).reshape(len(part) * length, *source.shape).view(RAW[kind.itemsize]).numpy()
                    if rows[-1] - rows[0] == end - begin - 1 and bool((np.diff(rows) == 1).all()):
                        targets[name][where] = raw[rows[0] : rows[-1] + 1]  # faster than in PyTorch
                    else:
                        raw.take(rows, 0, targets[name][where], mode="clip")  # the other mode would copy twice
            begin = end
        samples += self._first_sample[batches]
        x = {name: values.pop(f"x.{name}") for name in self.layers}
        ids = self._ids[samples]
        batch: Batch = {
            "x": x[self.layers[0]] if self._single else x,
            "id": torch.from_numpy(ids.astype(np.int64)) if ids.dtype.kind in "iu" else ids,
            "run": torch.from_numpy(self._run_of[batches]),
            "step": torch.from_numpy(self._step[batches]),
        }
        if self._call is not None:
            batch["call"] = torch.from_numpy(self._call[batches])
        if self._runs[0].columns is not None:
            batch["position"] = torch.from_numpy(positions)
        if self._targets is not None:
            batch["target"] = torch.from_numpy(self._targets[samples])
        for run in self._runs:
            run.tensors.release()
        return {**batch, **values}

    def chunks(self, window: int) -> Array:
        """Return the first items of the chunks of `window` / 64 bytes, and the number of items at the end.

        Tensors in Parquet files are read with their row group of 16 MB, so that chunks have at least its size.
        """
        size = max(window // CHUNKS // max(self.item_bytes, 1), 1)
        if any(run.in_row_groups for run in self._runs):
            size = max(size, ROW_GROUP_BYTES // max(self.item_bytes, 1), int(np.diff(self._starts).max()))
        return np.append(np.arange(0, len(self), size), len(self))

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
        """Return an iterable dataset of batches.

        Args:
            batch_size: The number of items of a batch. The last batch of an epoch has fewer if the number of items is no multiple.
            shuffle: The seed of the order. Default: None, in the order of the dataset.
            window: The size in bytes of a window of a shuffled iteration. Chunks of 1/64 of it (at least 16 MB of tensors in Parquet
                files) are brought into random order. Consecutive chunks fill a window; its items are permuted. Both permutations are
                uniform. Two windows, of one batch at least, are in memory. None: a uniform permutation of all items, 8 bytes for each,
                of which up to 256 MB are read together.
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
        if not _is_integer(batch_size) or batch_size < 1:
            raise ConfigError(Problem("batch_size", "must be a positive integer", repr(batch_size), "1, 2, ..."))
        if shuffle is not None and (not _is_integer(shuffle) or shuffle < 0):
            message, allowed = "must be the seed of the order", "0, 1, ..., or None: no shuffling"
            raise ConfigError(Problem("shuffle", message, repr(shuffle), allowed, fix="shuffle=0"))
        if not 0 <= rank < ranks:
            raise ConfigError(Problem("rank", "no process has this number", rank, f"0 to {ranks - 1}"))
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


def _shapes(run: _Run) -> dict[str, tuple[int, ...]]:
    return {name: source.shape for name, source in run.sources.items()}


class Order(NamedTuple):
    """What the sequence of batches depends on, besides the dataset, the epoch and the rank."""

    batch_size: int
    shuffle: int | None
    window: int | None
    drop_last: bool
    ranks: int


class ActivationBatches(IterableDataset[Batch]):
    """Batches of a dataset of recorded tensors; see `ActivationDataset.batches`.

    Use it in a loop, or in `DataLoader(batches, batch_size=None, num_workers=...)`: the workers yield the same batches in turn. The
    next window is read by a thread. Each iteration has the same order until `set_epoch` is called.
    """

    def __init__(self, data: ActivationDataset, order: Order, rank: int) -> None:
        self.data, self.order, self.rank = data, order, rank
        # Of all workers: epoch, batches before the next iteration begins, and the first iteration of workers since these were set.
        self._shared = torch.zeros(3, dtype=torch.int64).share_memory_()
        self._resumed: int | None = None  # batches before the next iteration of this worker begins
        self._position = self._iterations = 0

    def __len__(self) -> int:
        items = len(self.data) // self.order.ranks
        return items // self.order.batch_size if self.order.drop_last else -(-items // self.order.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, from 0, which changes the order of a shuffled iteration. Another epoch begins with the first batch."""
        if epoch != self._shared[0]:
            self._shared[:] = torch.tensor([epoch, 0, 0])
            self._position = 0

    def state_dict(self, batches: int | None = None) -> Batch:
        """Return the position in the sequence.

        Args:
            batches: The number of batches of this epoch that were used. Default: those that were yielded here. Required if workers of
                a `DataLoader` yield them.
        """
        epoch, _, workers = self._shared.tolist()
        if batches is None and workers and get_worker_info() is None:
            fix = "pass state_dict(batches=N), N batches received in this epoch; torchdata's StatefulDataLoader does it by itself"
            raise ConfigError(Problem("batches", "workers yield the batches, so their number is unknown here", fix=fix))
        position = self._position if batches is None else batches
        return {"epoch": epoch, "batches": position, "items": len(self.data), **self.order._asdict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the batch after a position. Needs the same dataset, arguments and number of processes.

        Raises:
            ConfigError: The state belongs to another dataset or to other arguments.
        """
        for name, value in {"items": len(self.data), **self.order._asdict()}.items():
            if state.get(name) != value:
                message, fix = "the state belongs to other batches", "use the arguments and runs of the state"
                raise ConfigError(Problem(name, message, value, str(state.get(name)), fix=fix))
        self._position = state["batches"]
        if get_worker_info() is None:
            self._shared[:] = torch.tensor([state["epoch"], state["batches"], 0])
        else:  # torchdata passes each worker its own state
            self._shared[0], self._resumed = state["epoch"], state["batches"]

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        worker, workers, seed = (0, 1, 0) if info is None else (info.id, info.num_workers, info.seed - info.id)
        self._iterations += 1
        iteration = seed + self._iterations  # workers that persist keep their seed
        epoch, start, first = self._shared.tolist()
        start = start if first in (0, iteration) else 0  # a DataLoader does not say when its next iteration begins
        if self._resumed is not None:
            start, self._resumed = self._resumed, None
        if info is None:
            self._shared[1:] = 0
        elif first == 0:
            self._shared[2] = iteration
        self._position = start
        for batch in self._read(epoch, np.arange(start + worker, len(self), workers), workers):
            self._position += workers
            yield batch

    def _read(self, epoch: int, numbers: Array, workers: int) -> Iterator[Batch]:
        data, (size, shuffle, window, *_) = self.data, self.order
        share = len(data) // self.order.ranks
        offset = self.rank * share
        most = SEQUENTIAL_BYTES if shuffle is None else window
        if most is None:  # small datasets would take as long to allocate windows as to read
            most = min(WINDOW_BYTES, max(SEQUENTIAL_BYTES, share * data.item_bytes // 4))
        length = max(1, most // max(data.item_bytes, 1) // size)
        count = -(-len(self) // length)
        length = -(-len(self) // max(count, 1))  # windows of equal size, in batches
        exact = _permutation(len(data), shuffle, epoch) if shuffle is not None and window is None else None
        bounds = np.array([0, len(data)]) if shuffle is None or window is None else data.chunks(window)
        chunks = np.arange(len(bounds) - 1) if shuffle is None else _permutation(len(bounds) - 1, shuffle, epoch)
        ends = np.cumsum(np.diff(bounds)[chunks])

        def load(numbers: Array, buffers: Mapping[str, Tensor]) -> tuple[Batch, Array | None]:
            """Read batches of one window. Return their items in the order of the dataset, and the position of each item of the batches."""
            begin = offset + numbers[0] // length * length * size
            end = min(begin + length * size, offset + share)
            places = (numbers[:, None] * size + np.arange(size)).reshape(-1)
            places = places[places < share] + offset - begin  # of the items in the window
            if exact is not None:
                items = exact[begin + places]
                order = np.argsort(items)
                return data.join(items[order], buffers), _inverse(order)
            of = slice(np.searchsorted(ends, begin, side="right"), np.searchsorted(ends, end - 1, side="right") + 1)
            last = bounds[chunks[of] + 1]
            first = np.maximum(bounds[chunks[of]], last - (ends[of] - begin))
            pieces = np.stack([first, np.minimum(last, last - (ends[of] - end))])
            items = np.concatenate([np.arange(*piece) for piece in pieces[:, np.argsort(pieces[0])].T])
            if shuffle is None:
                return data.join(items[places], buffers), None
            to = np.full(len(items), -1)
            to[_permutation(len(items), shuffle, epoch, 1 + begin)[places]] = np.arange(len(places))
            return data.join(items[to >= 0], buffers), _inverse(to[to >= 0])

        windows = np.split(numbers, np.flatnonzero(np.diff(numbers // length)) + 1) if len(numbers) else []
        buffers = [data.empty(-(-length // workers) * size) for _ in windows[:2]]
        with ThreadPoolExecutor(1) as reader:
            following = [reader.submit(load, *each) for each in zip(windows[:1], buffers, strict=False)]
            for i in range(1, len(windows) + 1):
                batch, order = following.pop().result()
                if i < len(windows):
                    following.append(reader.submit(load, windows[i], buffers[i % 2]))
                items = len(batch["run"])
                for at in range(0, items, size):
                    where = slice(at, min(at + size, items))
                    yield _part(batch, where if order is None else order[where])


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _permutation(size: int, *seed: int) -> Array:
    """Return a uniformly random permutation of the integers below `size`, which depends on the seed only."""
    state = np.random.SeedSequence(seed).generate_state(1, np.uint64)[0]
    return torch.randperm(size, generator=torch.Generator().manual_seed(int(state >> np.uint64(1)))).numpy()


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return uninitialized memory, aligned for copies past the cache. NumPy requests huge pages for it, unlike PyTorch."""
    size = prod(shape) * dtype.itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return torch.from_numpy(memory[start : start + size]).view(dtype).view(shape)


def _inverse(order: Array) -> Array:
    inverse = np.empty_like(order)
    inverse[order] = np.arange(len(order))
    return inverse


def _part(batch: Batch, where: int | slice | Array) -> Batch:
    """Return a copy of an item, or of some items: the memory of a window is used again."""

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor):
            part = value[where]
            return part.tolist() if isinstance(value, np.ndarray) and not isinstance(where, int) else part
        raw = value.view(RAW[value.itemsize]).numpy()  # PyTorch would wake its threads for each copy
        copy = raw[where].copy() if isinstance(where, slice) else np.asarray(raw.take(where, 0))
        return torch.from_numpy(copy).view(value.dtype)

    return {
        name: {layer: copied(each) for layer, each in value.items()} if isinstance(value, dict) else copied(value)
        for name, value in batch.items()
    }
