"""The result of an attribution, and the cells of its grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from ..analysis.features import Array
from ..analysis.plot_data import rank_in
from ..errors import InstrumentError, Problem
from ..rules.step_rows import location_name

GRADIENT, INTEGRATED, PATCHING = METHODS = ("gradient_x_input", "integrated_gradients", "attribution_patching")


class TensorLocation(NamedTuple):
    """A tensor of a layer: the name of the module, the path in a nested value, and the index of the call."""

    layer: str
    path: str
    call: int


@dataclass(frozen=True)
class Attribution:
    """The attributions of the tensors of some layers.

    Attributes:
        method: The method.
        of: The number to which they contribute: a part of the model's output, `loss`, or the name of a function.
        values: The attribution of each element, float64 [samples, ...], for each location: the name of a layer, with the
            path of the tensor and the index of the call if there are several.
        grid: Their sums, in the unit of the number: one row per location, one column per position or head. Summed over the
            samples of a batch and averaged over the batches.
        change: The number at the inputs minus that at the baseline, which integrated gradients of the inputs add up to. None
            without a baseline, and for a run.
        exact: The exact effects of the same cells; None if they were not computed.
    """

    method: str
    of: str
    values: Mapping[str, Array]
    grid: pd.DataFrame
    change: float | None = None
    exact: pd.DataFrame | None = None

    def rank_correlation(self, exact: pd.DataFrame | None = None) -> float:
        """Return the rank correlation (Spearman) of the grid with exact effects, over the cells that both have.

        Values that differ by less than 1e-6 of the largest one share a rank: rounding errors decide their order.

        Args:
            exact: A grid, such as the result of `instrument.interpret.patch_grid`. Default: `self.exact`.

        Returns:
            -1 to 1; NaN if all values of one of the grids are equal.

        Raises:
            InstrumentError: There are no exact effects, or fewer than two common cells.
        """
        exact = self.exact if exact is None else exact
        if exact is None:
            fix = "pass patch_grid(sweep), or compute the attribution of a model with exact=True"
            raise InstrumentError(Problem("exact", "there are no exact effects", fix=fix))
        both = pd.DataFrame({"own": self.grid.stack(), "exact": exact.stack()}).dropna()
        if len(both) < 2:
            cells = [f"{[*each.index]} x {[*each.columns]}" for each in (exact, self.grid)]
            raise InstrumentError(Problem("exact", "fewer than two cells are in both grids", *cells))
        ranks = (both / both.abs().max()).round(6).rank()
        return float(ranks["own"].corr(ranks["exact"]))


def parts_of(heads: int | None, shape: Sequence[int], taken: Sequence[Any] | None = None) -> dict[str, Any]:
    """Return the index of each column of the grid in a tensor [samples, ...], by its name, from the recorded indices (default: all)."""
    if heads is not None:
        if not shape or heads < 1 or shape[-1] % heads:
            message = f"the last dimension of a tensor of shape {[*shape]} has no such number of equal parts"
            raise InstrumentError(Problem("heads", message, heads))
        size = shape[-1] // heads
        return {str(at): (..., slice(at * size, (at + 1) * size)) for at in range(heads)}
    if len(shape) != 3:
        return {"": ()}
    names = range(shape[1]) if taken is None or len(taken[1]) != shape[1] else taken[1]
    return {str(name): (slice(None), at) for at, name in enumerate(names)}


def make_attribution(
    method: str,
    of: str,
    found: Mapping[TensorLocation, Sequence[Array]],
    order: Sequence[str],
    heads: int | None,
    *,
    batches: int = 1,
    taken: Mapping[TensorLocation, Any],
    change: float | None = None,
    exact: Mapping[TensorLocation, Mapping[str, float]] | None = None,
) -> Attribution:
    """Return the result for the attributions of each location, one array [samples, ...] per batch.

    `order` has the names of the layers, `taken` the recorded indices of each location, and `exact` the exact effects by column.
    """
    values, cells, effects = {}, {}, {}
    for at in sorted(found, key=lambda each: rank_in(order)(each.layer)):
        paths, calls = ({other[field] for other in found if other.layer == at.layer} for field in (1, 2))
        label = location_name(at.layer, at.path if len(paths) > 1 else "", "forward")
        label += f" call {at.call}" if len(calls) > 1 else ""
        if len({each.shape[1:] for each in found[at]}) > 1:
            message = "the tensors of this layer differ in shape between batches"
            raise InstrumentError(Problem("layers", message, label, fix="pass step="))
        values[label] = joined = np.concatenate([*map(np.atleast_1d, found[at])])
        parts = parts_of(heads, joined.shape, taken.get(at))
        cells[label] = {name: float(joined[part].sum()) / batches for name, part in parts.items()}
        effects[label] = {} if exact is None else exact[at]
    name = "positions" if heads is None else "heads"
    tables = (pd.DataFrame([*each.values()], [*each], dtype="float64") for each in (cells, effects))
    grid, of_exact = (each.rename_axis("layers").rename_axis(name, axis=1) for each in tables)
    return Attribution(method, of, values, grid, change, None if exact is None else of_exact)
