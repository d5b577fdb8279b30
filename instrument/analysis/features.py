"""The recorded tensors of a layer as one array, in the order of the dataset, with the ids and targets of the samples.

Each tensor is read in the order of the files and copied to its final place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds
from numpy.lib.format import open_memmap

from ..config.base import parse_slice
from ..config.parse import named_specs
from ..errors import ConfigError, InstrumentError, Problem, similar_names
from ..formatting import shorten
from ..storage.blocks import READING_THREADS, read_in_threads
from ..storage.run_files import RunFiles
from ..tables.kinds import KINDS
from .frames import array_of, is_known, plain_labels
from .raw_tensors import RawTensors

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]
Numbers = int | Collection[int] | None
RELEASE_BYTES = 32 * 2**20  # read values after which Arrow gives unused memory back; it then has to allocate it again
BATCH = ["step", "micro_step", "rank"]
_CHOICES = ("hook", "phase", "path", "call")  # columns in which the tensors of one selection must not differ
INDEX = [*BATCH, "epoch", "hook", "kind", "role", "phase", "path", "call"]
INDEX += ["scope", "placement", "dtype", "shape", "source_shape"]
_SAMPLES = [*BATCH, "position", "sample", "id", "target", "target_dtype"]


class Features(NamedTuple):
    """The recorded tensors of a layer. It can be unpacked: `X, y, ids = run.features("avgpool")`.

    Attributes:
        X: One entry per sample, [samples, ...], in the order of the dataset.
        y: The target of each sample, [samples]; None if no targets were recorded. If some are missing, float64 with NaN.
        ids: The dataset index of each sample, int64 [samples]; or the strings that the loop passed as ids.
    """

    X: Array
    y: Array | None
    ids: Array

    def __repr__(self) -> str:
        parts = {name: None if part is None else f"{part.dtype} {part.shape}" for name, part in self._asdict().items()}
        return f"Features({', '.join(f'{name}: {part}' for name, part in parts.items())})"

    @property
    def flat(self) -> Array:
        """`X` as a matrix, [samples, features]: the features of a sample in C order."""
        return self.X.reshape(len(self.X), prod(self.X.shape[1:]))

    def to_frame(self) -> pd.DataFrame:
        """Return a DataFrame with one row per sample.

        Returns:
            The index `sample` has the ids. The column `target` exists if there are targets. The columns `f0`, `f1`, ...
            have the features; those of more than one dimension are flattened in C order.
        """
        flat = self.flat
        index = pd.Index(self.ids, name="sample")
        frame = pd.DataFrame(flat, columns=[f"f{i}" for i in range(flat.shape[1])], index=index)
        if self.y is not None:
            frame.insert(0, "target", self.y)
        return frame


@dataclass(frozen=True)
class FeatureSelection:
    """The tensors that `features_of` joins; see `instrument.Run.features`."""

    layer: str
    hook: str | None = None
    role: str = "output"
    phase: str | None = None
    step: Numbers = None
    epoch: Numbers = None
    call: Numbers = None
    path: str | None = None

    @property
    def layer_name(self) -> str:
        """The name of the layer in the table `tensors`. A ConfigError refuses other types."""
        if not isinstance(self.layer, str):
            raise ConfigError(Problem("layer", "must be the name of one layer", repr(self.layer)))
        return "" if self.layer == "." else self.layer

    @property
    def joins_calls(self) -> bool:
        """Whether the array has a dimension of calls."""
        return isinstance(self.call, Collection)

    @property
    def key(self) -> list[str]:
        """The columns that identify a tensor."""
        return [*BATCH, "call"] if self.joins_calls else BATCH

    @property
    def given(self) -> dict[str, Any]:
        """The conditions on columns other than the layer."""
        names = ("hook", "role", "phase", "step", "epoch", "path", "call")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def select(self, files: RunFiles, index: pd.DataFrame) -> pd.DataFrame:
        """Return the rows of the tensors of a selection, without their values, in the order of the batches, as `features_of` reads them.

        `index`: the original calls in the table `tensors`.
        """
        rows = index[index["layer"] == self.layer_name]
        if rows.empty:
            layers = sorted(str(name) or "." for name in files.read("tensors", ["layer"])["layer"].unique().to_pylist())
            similar = similar_names(self.layer, layers)
            fix = "set 'tensors: true' in a record hook of this layer"
            message = "no tensors of this layer were recorded"
            raise ConfigError(Problem("layer", message, self.layer, shown(layers), similar, fix))
        for name, value in self.given.items():
            allowed = [value] if isinstance(value, str) or np.ndim(value) == 0 else list(value)
            known = sorted(rows[name].unique().tolist())
            rows = rows[rows[name].isin(allowed)]
            missing = [] if isinstance(value, range) else [each for each in allowed if each not in known]
            if rows.empty or missing:
                given = missing[0] if missing else value
                message = f"no recorded tensor of layer {self.layer!r} has this {name}"
                similar = similar_names(given, known) if isinstance(given, str) and isinstance(known[0], str) else []
                raise ConfigError(Problem(name, message, given, shown(known), similar))
        for name in _CHOICES[:-1] if self.joins_calls else _CHOICES:
            values = sorted(rows[name].unique().tolist())
            if len(values) > 1:
                message = f"layer {self.layer!r} has tensors of several {name}s"
                raise ConfigError(Problem(name, message, allowed=shown(values), fix=f"pass {name}={values[0]!r}"))
        kind = KINDS.get(rows["kind"].iloc[0])
        if kind is not None and kind.family != "module":
            message = f"tensors of kind {kind.name} have no samples"
            raise ConfigError(Problem("hook", message, self.hook, "a hook on the outputs or inputs of a module"))
        if len(shards := rows[rows["scope"] == "shard"]):
            message = f"each process recorded a shard of the tensors, placed {shards['placement'].iloc[0]!r}, not complete samples"
            fix = "record a layer whose output is complete, or all of its units: 'units' in the hook; run.tensors() reads the shards"
            raise ConfigError(Problem("layer", message, self.layer, fix=fix))
        if rows.duplicated(self.key).any():
            message = f"layer {self.layer!r} has several tensors of the same batch: a phase began twice in a step"
            raise ConfigError(Problem("step", message, self.step, fix="select other steps"))
        return rows.sort_values(self.key, kind="stable", ignore_index=True)

    def batches(self, files: RunFiles, rows: pd.DataFrame, samples: pd.DataFrame) -> Iterator[TensorOfBatch]:
        """Yield the batches whose samples are known. The others are reported: the last one of a killed run, for example."""
        groups: Any = samples.groupby(BATCH, sort=False).indices
        spec = settings_of(files, rows["hook"].iloc[0])
        positions_of = cache(lambda shape, source: recorded_positions(shape, source, spec))
        unknown = []
        for cells in rows[[*self.key, "shape", "source_shape"]].itertuples(index=False, name=None):
            key, shape, source = cells[:-2], tuple(map(int, cells[-2])), tuple(map(int, cells[-1]))
            group = groups.get(key[:3])
            if group is None:
                unknown.append(key)
                continue
            positions = positions_of(shape, source)
            if positions is None or not shape or len(positions) != shape[0] or source[0] != len(group):
                of = f" of {list(source)}" if shape != source else ""
                tensor = f"shape {list(shape)}{of} in a batch of {len(group)} samples"
                message = f"the tensors of layer {self.layer!r} have no samples in dimension 0: {tensor}"
                fix = "run.tensors() reads them; for features, record without 'max_elements' and with a 'slice' that keeps dimension 0"
                raise ConfigError(Problem("layer", message, self.layer, fix=fix))
            yield TensorOfBatch(key, shape, source, group[positions])
        if len(unknown) == len(rows):
            fix = "call probe.batch(ids=ids, targets=targets) before each forward pass"
            raise ConfigError(Problem("samples", "the ids of the samples of these tensors are unknown", fix=fix))
        if unknown:
            first = ", ".join(f"{name} {value}" for name, value in zip(self.key, unknown[0], strict=True))
            which = first if len(unknown) == 1 else f"the first at {first}"
            files.report_skipped(f"the samples of {len(unknown)} of {len(rows)} tensors are unknown ({which})")

    def common_shape(self, batches: Sequence[TensorOfBatch], first: int = 1) -> Shape:
        """Return the shape of the tensors from dimension `first`, which must be the same in all batches."""
        shapes = list(dict.fromkeys(batch.shape[first:] for batch in batches))
        if len(shapes) > 1:
            message = f"the tensors of layer {self.layer!r} differ in shape between batches"
            fix = "record a part of equal shape with 'slice'; run.tensors() reads tensors of any shape"
            given = ", ".join(str(["samples", *shape]) for shape in shapes[:3])
            raise ConfigError(Problem("layer", message, given, fix=fix))
        return shapes[0]

    def in_dataset_order(self, samples: pd.DataFrame) -> tuple[Array, Array]:
        """Return the ids in the order of the result, integers sorted, and the position in `samples` of each."""
        samples = samples.reset_index(drop=True)
        ids = ids_of(samples)
        are_names = ids.dtype == "string"
        is_repeated = ids.duplicated()
        if is_repeated.any():
            counts = samples["step"].groupby(ids, sort=not are_names).nunique()
            for name in counts.index[counts > 1][:1].tolist():
                steps = sorted(samples["step"][ids == name].unique().tolist())
                message = f"the samples occur in several steps: sample {name!r} in steps {shown(steps)}"
                known = sorted(samples["step"].unique().tolist())
                fix = f"pass step={steps[-1]}, several steps as a list or a range, or epoch="
                raise ConfigError(Problem("step", message, self.step, shown(known), fix=fix))
        first = ids[~is_repeated]
        first = first if are_names else first.astype(np.int64).iloc[np.argsort(first.to_numpy(np.int64))]
        return np.array(first, np.str_ if are_names else np.int64), first.index.to_numpy()


class TensorOfBatch(NamedTuple):
    """The tensor of one batch. `key`: see `FeatureSelection.key`. `samples`: for each entry, the index among all samples read."""

    key: tuple[int, ...]
    shape: Shape
    source: Shape
    samples: Array


def features_of(files: RunFiles, selection: FeatureSelection, out: Path | None = None) -> Features:
    """Join the tensors of one run; see `Run.features`, which also lists the errors."""
    # Without repeated calls and further gradients.
    original = (ds.field("layer") == selection.layer_name) & ~ds.field("recompute") & (ds.field("backward") == 0)
    raw = RawTensors.of(files, [*INDEX, "layer"], original)
    index = plain_labels(raw.index).to_pandas()
    index["tensor"] = np.arange(len(index))
    rows = selection.select(files, index)
    samples = samples_of(files, rows)
    tensors = list(selection.batches(files, rows, samples))
    shape, names = selection.common_shape(tensors), rows["dtype"].unique().tolist()
    while len(shape) > 1 and shape[-1] == 1:  # dimensions of size 1 at the end of a sample
        shape = shape[:-1]
    if unknown := [name for name in names if not is_known(name)]:
        raise InstrumentError(f"NumPy does not support {', '.join(unknown)}; record with 'dtype: float32'")
    dtype = np.result_type(*map(_numpy_dtype, names))
    batches = [*{batch.key[:3]: batch for batch in tensors}.values()]  # those of several calls have the same samples
    read = np.concatenate([batch.samples for batch in batches])
    ids, first = selection.in_dataset_order(samples.iloc[read])
    destinations = np.full(len(read), -1)
    destinations[first] = np.arange(len(first))
    calls = sorted(rows["call"].unique().tolist())
    size = (len(first), len(calls), *shape) if selection.joins_calls else (len(first), *shape)
    features: Array = np.empty(size, dtype) if out is None else open_memmap(out, "w+", dtype, size)
    destinations_of = {}
    end = 0
    for batch in batches:
        start, end = end, end + len(batch.samples)
        destinations_of[batch.key[:3]] = destinations[start:end]
    if len(tensors) < len(batches) * len(calls):
        features[...] = 0 if dtype.kind in "iub" else np.nan
    parts = dict(zip(calls, features.swapaxes(0, 1) if selection.joins_calls else [features], strict=True))
    _copy_values(files, raw, rows, destinations_of, parts)
    return Features(features, targets_of(samples.iloc[read[first]]), ids)


def shown(values: Sequence[Any]) -> str:
    """Return values as text for a message; the first ones if there are many."""
    return shorten([repr(value) if value == "" else str(value) for value in values])


def samples_of(files: RunFiles, rows: pd.DataFrame) -> pd.DataFrame:
    """Return the samples of the steps of these tensors, in the order of the batches."""
    condition = ds.field("step").isin(pa.array(rows["step"].unique())) & (ds.field("phase") == rows["phase"].iloc[0])
    samples: pd.DataFrame = plain_labels(files.read("samples", _SAMPLES, condition)).to_pandas()
    if samples.empty:
        message = "the ids of the samples are unknown: the table 'samples' has no rows for these tensors"
        fix = (
            "in your own loop, call probe.batch(ids=ids, targets=targets) before each forward pass; repeat a run of an earlier "
            "version; run.tensors() reads the tensors without ids"
        )
        raise ConfigError(Problem("samples", message, fix=fix))
    return samples.sort_values([*BATCH, "position"], kind="stable", ignore_index=True)


def settings_of(files: RunFiles, hook: str) -> Mapping[str, Any]:
    """Return the settings of a hook; empty if the run has no configuration."""
    hooks: dict[str, Mapping[str, Any]] = dict(named_specs("hooks", (files.info().get("config") or {}).get("hooks")))
    return hooks.get(hook, {})


def recorded_positions(recorded: Shape, shape: Shape, spec: Mapping[str, Any]) -> Array | None:
    """Return the index in the batch of each entry of dimension 0 of a recorded tensor; None if these are not samples."""
    if not shape:
        return None
    chosen, part, most = (spec.get(name) for name in ("samples", "slice", "max_elements"))
    samples = np.arange(shape[0])
    samples = samples[list(chosen)] if isinstance(chosen, list | tuple) else samples[:chosen]
    parts = () if part is None else parse_slice(part)
    if parts and isinstance(parts[0], int):
        return None
    samples = samples[parts[0]] if parts else samples
    if len(shape) - sum(isinstance(each, int) for each in parts) == 1:
        return samples[:most]
    return None if len(recorded) == 1 else samples  # `max_elements` has flattened it


def ids_of(samples: pd.DataFrame) -> pd.Series:
    """Return the id of each sample: integers, or strings if any id is a string."""
    ids: pd.Series = samples["sample"]
    if samples["id"].notna().any():  # other batches may have integers
        ids = samples["id"].astype("string").fillna(ids.astype("Int64").astype("string"))
    return ids


def targets_of(samples: pd.DataFrame) -> Array | None:
    """Return the targets in their dtype; float64 with NaN if some are missing, None if all are."""
    values: Array = samples["target"].to_numpy(np.float64)
    known = samples["target_dtype"].dropna().unique().tolist()
    if not known:
        return None
    dtypes = [_numpy_dtype(name) for name in known]
    if samples["target_dtype"].isna().any():
        return values
    return values.astype(np.result_type(*dtypes))


def _numpy_dtype(name: str) -> np.dtype[Any]:
    dtype: np.dtype[Any] = array_of(None, b"", (0,), name).dtype
    return dtype


def _copy_values(
    files: RunFiles,
    raw: RawTensors,
    rows: pd.DataFrame,
    destinations: Mapping[tuple[int, ...], Array],
    parts: Mapping[int, Array],
) -> None:
    """Copy each tensor to the part of its call, to the indices of its batch in `destinations`; entries with index -1 are left out."""
    rows = rows.sort_values("tensor")  # as they are in the files
    known = [
        (i, parts[call], destination)
        for *batch, call, i in rows[[*BATCH, "call", "tensor"]].itertuples(index=False, name=None)
        if (destination := destinations.get(tuple(batch))) is not None
    ]

    def copy(i: int, part: Array, destination: Array) -> bool:
        with files.errors_reported(raw.file(i)):
            raw.copy(i, part, destination)
            return True
        return False

    largest = max((len(destination) * part[:1].nbytes for _, part, destination in known), default=0)
    size, copied = max(RELEASE_BYTES // max(largest, 1), 1), 0
    threads = 1 if raw.index["block"].null_count else READING_THREADS  # of block files
    for start in range(0, len(known), size):
        copied += sum(read_in_threads(copy, known[start : start + size], threads))
        pa.default_memory_pool().release_unused()
        raw.release()
    if copied < len(known):
        problems = "; ".join(files.problems) or "the files were removed"
        raise InstrumentError(f"{len(known) - copied} of {len(known)} tensors cannot be read: {problems}")
