"""The recorded tensors of several layers, one array per layer, with the ids of the samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..analysis.features import Array, Features
from ..analysis.load import Run
from ..analysis.plot_data import forward_order, rank_in
from ..errors import InstrumentError, Problem, similar_names
from ..formatting import shorten
from ..tables.kinds import KINDS
from .attention_maps import recorded_indices, recorded_specs


@dataclass(frozen=True)
class Recorded:
    """Which recorded tensors of a layer are read; see `instrument.Run.features`."""

    hook: str | None = None
    role: str = "output"
    phase: str | None = None
    step: int | None = None
    path: str | None = None

    @property
    def conditions(self) -> dict[str, Any]:
        """The conditions on columns of the tensors table."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def preferring_outputs(self, run: Run) -> Recorded:
        """Return the same selection with the hook of kind `forward`, if no hook is selected and there is only one.

        Hooks on functions may have recorded other tensors of the same layers.
        """
        if self.hook is not None:
            return self
        rows = run.read("tensors", ["hook", "kind", "role"])
        hooks = rows[(rows["kind"] == "forward") & (rows["role"] == self.role)]["hook"].unique()
        return replace(self, hook=hooks[0]) if len(hooks) == 1 else self

    def rows(self, run: Run, columns: Sequence[str], layer: str | None = None) -> pd.DataFrame:
        """Return columns of the selected tensors, of one layer or of all."""
        conditions = self.conditions if layer is None else {**self.conditions, "layer": "" if layer == "." else layer}
        rows = run.read("tensors", list(dict.fromkeys([*columns, *conditions])))
        for name, value in conditions.items():
            rows = rows[rows[name] == value]
        return rows

    def layers(self, run: Run, layers: Sequence[str] | None, size: int | None = None) -> list[str]:
        """Return the names of recorded layers, in forward order.

        Args:
            layers: The layers; None for all with floating-point tensors.
            size: The size of the last dimension in the model, without `layers`; None for any.

        Raises:
            InstrumentError: A layer has no tensors, or there are none.
        """
        if run.folders != [run.path]:
            raise InstrumentError(
                Problem("run", f"the folder contains {len(run.folders)} runs", fix="load one of them")
            )
        rows = self.rows(run, ["layer", "kind", "dtype", "source_shape"])
        is_float = rows["dtype"].str.startswith(("float", "bfloat"))
        rows = rows[is_float & rows["kind"].map(lambda kind: KINDS[kind].family == "module").astype(bool)]
        shapes = {
            name or ".": list(map(int, shape)) for name, shape in zip(rows["layer"], rows["source_shape"], strict=True)
        }
        known = [f"{name} {shape}" for name, shape in shapes.items()]
        allowed = shorten(known) or "none"
        fix = "record these layers with {kind: forward, action: record, tensors: true}"
        for layer in layers or ():
            if layer not in shapes:
                message, near = "no tensors of this layer were recorded", similar_names(layer, shapes)
                raise InstrumentError(Problem("layers", message, layer, allowed, near, fix))
        names = [name for name, shape in shapes.items() if size is None or (shape and shape[-1] == size)]
        if layers is None and not names:
            message = "no layer was recorded" + ("" if size is None else f" with {size} features in the last dimension")
            raise InstrumentError(Problem("layers", message, allowed=allowed, fix=fix))
        return (
            sorted(names, key=rank_in([name or "." for name in forward_order(run)])) if layers is None else list(layers)
        )

    def positions(self, run: Run, layer: str, count: int) -> tuple[list[int], int]:
        """Return the recorded positions of the tensors [N, length, features] of a layer, and the length in the model."""
        rows = self.rows(run, ["hook", "shape", "source_shape"], layer)
        hook, shape, source = rows[["hook", "shape", "source_shape"]].iloc[0]
        source = tuple(map(int, source))
        indices = recorded_indices(recorded_specs(run).get(hook), tuple(map(int, shape)), source)
        if len(source) == 3 and indices is not None and len(indices[1]) == count:
            return list(indices[1]), source[1]
        return list(range(count)), count

    def read(self, run: Run, layer: str, out: Path | None = None) -> Features:
        """Return the tensors of a layer in the order of the ids.

        If the run has no ids, the samples have the order in which they were recorded, and are numbered from 0.

        Args:
            out: A `.npy` file to which the values are written, if the run has ids; the array is mapped from it.

        Raises:
            InstrumentError: The selection is ambiguous, or the tensors cannot be read.
        """
        if run.count("samples"):
            return run.features(layer, **self.conditions, out=out)
        rows = run.tensors(layer="" if layer == "." else layer, recompute=False, backward=0, **self.conditions)
        for name in ("hook", "phase", "path", "call"):
            if rows[name].nunique() > 1:
                values = ", ".join(map(repr, rows[name].unique()))
                raise InstrumentError(
                    Problem(name, f"layer {layer!r} has tensors of several values", values, fix=f"pass {name}=")
                )
        rows = rows.sort_values(["step", "micro_step", "rank"], kind="stable")
        if len({values.shape[1:] for values in rows["values"]}) > 1:
            raise InstrumentError(Problem("layers", "the tensors of this layer differ in shape between batches", layer))
        joined: Array = np.concatenate([*rows["values"]])
        return Features(joined, None, np.arange(len(joined)))


def positions_of(ids: Array, common: Array) -> Array:
    """Return the position of each common id in `ids`."""
    return pd.Index(ids).get_indexer(pd.Index(common))
