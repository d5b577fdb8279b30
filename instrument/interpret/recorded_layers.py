"""The recorded tensors of several layers, one array per layer, with the ids of the samples; recorded attention maps; and saved weights."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from ..analysis.config_comparison import hooks_of
from ..analysis.features import BATCH, Array, Features, FeatureSelection, recorded_positions, settings_of
from ..analysis.load import Run
from ..analysis.plot_data import Batch, PlottedTensor, forward_order, rank_in, recorded_tensors
from ..analysis.run_tables import RunTables
from ..config.base import HookBase, parse_slice
from ..config.selection import SelectionError, selected_indices
from ..errors import InstrumentError, Problem, similar_names
from ..formatting import shorten
from ..plot.plot_function import check_type
from ..storage.run_record import WEIGHTS
from ..tables.kinds import KINDS

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]
TOLERANCE = 0.02  # of the sum of a row of probabilities, which may be float16 or bfloat16
TOKENS = "input_ids"  # name of the argument of Hugging Face models for token ids
_FLOATS = ("float", "bfloat")
_INTEGERS = ("int", "uint")


class AttentionMaps(NamedTuple):
    """The attention maps of one sample, with the indices of the heads, and the positions of the queries and keys, in the model."""

    values: Array  # [heads, queries, keys]; without heads, [1, queries, keys]
    heads: list[int]  # empty if the tensor has no dimension of heads
    queries: list[int]
    keys: list[int]


@dataclass(frozen=True)
class AttentionTensor(PlottedTensor):
    """A recorded tensor of which a block was recorded. It may hold attention maps."""

    indices: tuple[tuple[int, ...], ...]  # the recorded ones, for each dimension of `source_shape`

    def read(self, run: RunTables | pd.DataFrame) -> Array:
        """Return the recorded values, with one dimension for each dimension of `source_shape`."""
        return super().read(run).reshape([len(taken) for taken in self.indices])

    def maps(self, values: Array, position: int) -> AttentionMaps:
        """Return the maps of one sample."""
        of_sample = values[self.indices[0].index(position)]
        heads = list(self.indices[1]) if len(self.source_shape) == 4 else []
        of_sample = of_sample if heads else of_sample[None]
        return AttentionMaps(of_sample, heads, list(self.indices[-2]), list(self.indices[-1]))

    def are_probabilities(self, values: Array) -> bool:
        """Return whether recorded values are probabilities over the keys.

        They are not negative, and the sum of each row is 1. Rows without finite values, and rows of zeros, belong to masked
        queries. If only some of the keys were recorded, a sum may be smaller than 1. A softmax over classes or a vocabulary has
        the shape [N, positions, classes]: a result of this shape that is not square is not attention, unless the module returns
        it next to another output.
        """
        is_result = KINDS[self.series.kind].of_functions or not self.path
        if is_result and len(self.source_shape) == 3 and self.source_shape[1] != self.source_shape[2]:
            return False
        finite = values[np.isfinite(values).all(-1)].astype(np.float64)
        if not finite.size or finite.min() < 0:
            return False
        sums = finite.sum(-1)
        sums = sums[sums > 0]
        is_complete = len(self.indices[-1]) == self.source_shape[-1]
        return bool(sums.size and (sums < 1 + TOLERANCE).all() and (not is_complete or (sums > 1 - TOLERANCE).all()))


def attention_tensors(run: RunTables | pd.DataFrame) -> list[AttentionTensor]:
    """Return all recorded tensors whose shape in the model is [N, heads, queries, keys] or [N, queries, keys].

    Whether they hold probabilities is known only from their values.
    """
    return [*_blocks(run, (3, 4), _FLOATS)]


def _blocks(run: RunTables | pd.DataFrame, dims: Collection[int], dtypes: tuple[str, ...]) -> Iterator[AttentionTensor]:
    """Yield the tensors of modules with these numbers of dimensions and dtypes of which a block was recorded."""
    specs = recorded_specs(run)
    for tensor in recorded_tensors(run):
        is_of_module = KINDS[tensor.series.kind].family == "module" and tensor.backward == 0
        if is_of_module and len(tensor.source_shape) in dims and tensor.dtype.startswith(dtypes):
            indices = recorded_indices(specs.get(tensor.series.hook), tensor.shape, tensor.source_shape)
            if indices is not None:
                yield AttentionTensor(**vars(tensor), indices=indices)


def sample_ids(run: RunTables, batches: Collection[Batch]) -> dict[int | str, list[tuple[Batch, int]]]:
    """Return the batches and the positions in them of each sample, by its id, in the order of the steps; empty without ids."""
    columns = [*Batch._fields, "position", "sample", "id"]
    samples = run.read("samples", columns).sort_values(columns[:-2], kind="stable")
    places: dict[int | str, list[tuple[Batch, int]]] = {}
    for *moment, position, number, name in samples.itertuples(index=False, name=None):
        if (batch := Batch(*moment)) in batches:
            places.setdefault(name if pd.isna(number) else int(number), []).append((batch, int(position)))
    return places


def token_ids(run: RunTables | pd.DataFrame, batch: Batch, position: int, length: int) -> list[int] | None:
    """Return the token ids of a sample, if the input of the model or of its embedding was recorded.

    This is the first recorded input of a module that consists of integers [N, length]. `input_ids` is preferred to inputs with
    other names, such as a mask.
    """
    for tensor in sorted(_blocks(run, (2,), _INTEGERS), key=lambda tensor: tensor.path != TOKENS):
        samples, positions = tensor.indices
        is_complete = tensor.source_shape[1] == len(positions) == length
        if tensor.series.role == "input" and tensor.batch == batch and is_complete and position in samples:
            return [int(token) for token in tensor.read(run)[samples.index(position)]]
    return None


def recorded_specs(run: RunTables | pd.DataFrame) -> Mapping[str, HookBase]:
    """Return the hooks of a run by name; empty for a DataFrame, or if this version cannot parse them."""
    return (hooks_of(run.info) or {}) if isinstance(run, RunTables) else {}


def recorded_indices(spec: HookBase | None, shape: Shape, source: Shape) -> tuple[tuple[int, ...], ...] | None:
    """Return the recorded indices along each dimension of a tensor; None if they do not form a block, or are unknown."""
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
    return tuple(map(tuple, taken)) if np.prod([len(each) for each in taken]) == np.prod(shape) else None


@dataclass(frozen=True)
class Recorded(FeatureSelection):
    """Which recorded tensors of a layer are read; the layer is an argument of the methods."""

    layer: str = "."

    def preferring_outputs(self, run: Run) -> Recorded:
        """Return the same selection with the hook of kind `forward`, if no hook is selected and there is only one.

        Hooks on functions may have recorded other tensors of the same layers.
        """
        check_type(run, only_run=True)
        if self.hook is not None:
            return self
        rows = run.read("tensors", ["hook", "kind", "role"])
        hooks = rows[(rows["kind"] == "forward") & (rows["role"] == self.role)]["hook"].unique()
        return replace(self, hook=hooks[0]) if len(hooks) == 1 else self

    def rows(self, run: Run, columns: Sequence[str], layer: str | None = None) -> pd.DataFrame:
        """Return columns of the selected tensors, of one layer or of all."""
        conditions = self.given if layer is None else {**self.given, "layer": "" if layer == "." else layer}
        rows = run.read("tensors", list(dict.fromkeys([*columns, *conditions])))
        for name, value in conditions.items():
            known, rows = rows[name].unique(), rows[rows[name] == value]
            if rows.empty and len(known):
                allowed = shorten([repr(each) if isinstance(each, str) else str(each) for each in known])
                message = "none of the selected tensors has this value"
                raise InstrumentError(Problem(name, message, repr(value), allowed))
        return rows

    def layers(self, run: Run, layers: Sequence[str] | None, size: int | None = None) -> list[str]:
        """Return the names of recorded layers: the given ones, or in forward order all with floating-point tensors.

        Without given layers, `size` is that of the last dimension in the model. Raise an InstrumentError if a layer has no tensors.
        """
        if isinstance(layers, str) or (layers is not None and not len(layers)):
            fix = f"pass [{layers!r}]" if isinstance(layers, str) else "leave it out for all recorded layers"
            raise InstrumentError(Problem("layers", "must be a list of names", layers, fix=fix))
        run.check_single()
        rows = self.rows(run, ["layer", "kind", "dtype", "source_shape"])
        is_float = rows["dtype"].str.startswith(_FLOATS)
        rows = rows[is_float & rows["kind"].map(lambda kind: KINDS[kind].family == "module").astype(bool)]
        cells = zip(rows["layer"], rows["source_shape"], strict=True)
        shapes = {name or ".": list(map(int, shape)) for name, shape in cells}
        allowed = shorten([f"{name} {shape}" for name, shape in shapes.items()]) or "none"
        fix = "record these layers with {kind: forward, action: record, tensors: true}"
        for layer in layers or ():
            if layer not in shapes:
                message, near = "no tensors of this layer were recorded", similar_names(layer, shapes)
                raise InstrumentError(Problem("layers", message, layer, allowed, near, fix))
        if layers is not None:
            return list(layers)
        names = [name for name, shape in shapes.items() if size is None or (shape and shape[-1] == size)]
        if not names:
            message = "no layer was recorded" + ("" if size is None else f" with {size} features in the last dimension")
            raise InstrumentError(Problem("layers", message, allowed=allowed, fix=fix))
        return sorted(names, key=rank_in([name or "." for name in forward_order(run)]))

    def positions(self, run: Run, layer: str, count: int) -> tuple[list[int], int]:
        """Return the recorded positions of the tensors [N, length, features] of a layer, and the length in the model."""
        rows = self.rows(run, ["hook", "shape", "source_shape"], layer)
        hook, shape, source = rows[["hook", "shape", "source_shape"]].iloc[0]
        source = tuple(map(int, source))
        indices = recorded_indices(recorded_specs(run).get(hook), tuple(map(int, shape)), source)
        if len(source) == 3 and indices is not None and len(indices[1]) == count:
            return list(indices[1]), source[1]
        return list(range(count)), count

    def read(self, run: Run, layer: str, *, numbered_as: Run | None = None) -> Features:
        """Return the tensors of a layer in the order of the ids. Raise an InstrumentError if the selection is ambiguous.

        If the run has no ids, the samples of all recorded batches of this run, or of `numbered_as`, are numbered from 0, in the order of
        the batches.
        """
        if run.count("samples"):
            return run.features(layer, **self.given)
        found = run.tensors(layer=layer, recompute=False, backward=0, **self.given)
        rows = replace(self, layer=layer).select(run.files[0], found)
        if len({values.shape[1:] for values in rows["values"]}) > 1:
            raise InstrumentError(Problem("layers", "the tensors of this layer differ in shape between batches", layer))
        joined: Array = np.concatenate([*rows["values"]])
        first = _first_numbers(numbered_as or run, rows["phase"].iloc[0])
        spec, ids = settings_of(run.files[0], rows["hook"].iloc[0]), []
        for *batch, values, source in rows[[*BATCH, "values", "source_shape"]].itertuples(index=False, name=None):
            positions = recorded_positions(values.shape, tuple(map(int, source)), spec)
            ids.append(first[*batch] + (np.arange(len(values)) if positions is None else positions))
        return Features(joined, None, np.concatenate(ids))


def _first_numbers(run: RunTables, phase: str) -> pd.Series:
    """Return the number of the first sample of each batch of a phase, whichever layers and samples were recorded of it."""
    rows = run.read("tensors", [*BATCH, "phase", "kind", "source_shape"])
    rows = rows[(rows["phase"] == phase) & rows["kind"].map(lambda kind: KINDS[kind].family == "module").astype(bool)]
    sizes = rows["source_shape"].map(lambda shape: int(shape[0]) if len(shape) else 1)
    sizes = sizes.groupby([rows[name] for name in BATCH]).max()
    return sizes.cumsum() - sizes


def positions_of(ids: Array, common: Array) -> Array:
    """Return the position of each common id in `ids`."""
    return pd.Index(ids).get_indexer(pd.Index(common))


def saved_weights(run: RunTables) -> dict[str, Tensor]:
    """Return the final weights of a run by name, in CPU memory.

    A run that trained nothing, with `init_from`, has those of the run that it loaded.
    """
    import torch

    source = (run.info.get("init_from") or {}).get("path")
    for folder in (run.path, *([] if source is None else [Path(source)])):
        if (folder / WEIGHTS).is_file():
            with (folder / WEIGHTS).open("rb") as file:
                weights: dict[str, Tensor] = torch.load(file, weights_only=True, map_location="cpu")
            return weights
    message = f"the run saved no weights: it has no {WEIGHTS}"
    fix = "train with train.save=true, or pass the module or its weight"
    raise InstrumentError(Problem("run", message, str(run.path), fix=fix))


def linear_layer(run: RunTables, given: Any, where: str) -> tuple[Tensor, Tensor | None]:
    """Return the weight and the bias of a linear layer in CPU memory; the bias is None if it is not known.

    `given`: the layer, its weight, or the name of the layer or of its weight in the saved weights.
    """
    import torch

    if isinstance(given, torch.nn.Linear):
        return given.weight.detach().cpu(), None if given.bias is None else given.bias.detach().cpu()
    if isinstance(given, torch.nn.Module):
        raise InstrumentError(Problem(where, "must be a linear layer", type(given).__name__, fix="pass its weight"))
    if not isinstance(given, str):
        return torch.as_tensor(given).detach().cpu(), None
    weights, name = saved_weights(run), given.removesuffix(".weight")
    return weight_named(weights, given if given in weights else f"{name}.weight", where), weights.get(f"{name}.bias")


def weight_named(weights: dict[str, Tensor], name: str, where: str) -> Tensor:
    """Return one of the saved weights."""
    if name not in weights:
        similar, fix = similar_names(name, weights), "pass the module or its weight"
        raise InstrumentError(Problem(where, "the saved weights have no such name", name, [*weights], similar, fix))
    return weights[name]
