"""The result of an attribution, and the cells of its grid."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pandas as pd

from ..analysis.features import Array
from ..analysis.plot_data import rank_in
from ..errors import InstrumentError, Problem
from ..rules.step_rows import location_name

GRADIENT, INTEGRATED, PATCHING = METHODS = ("gradient_x_input", "integrated_gradients", "attribution_patching")
Parts = partial[dict[str, Any]]  # of `parts_of`


class Location(NamedTuple):
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
        grid: Their sums, in the unit of the number: one row per location, one column per position, head or unit. Summed
            over the samples of a batch and averaged over the batches.
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


def parts_of(
    columns: str, heads: int | None, shape: Sequence[int], taken: Sequence[Any] | None = None
) -> dict[str, Any]:
    """Return the index of each column of the grid in a tensor [samples, ...], by its name.

    Args:
        taken: The recorded indices along each dimension. Default: all.
    """
    if heads is not None:
        if not shape or heads < 1 or shape[-1] % heads:
            message = f"the last dimension of a tensor of shape {[*shape]} has no such number of equal parts"
            raise InstrumentError(Problem("heads", message, heads))
        size = shape[-1] // heads
        return {str(at): (..., slice(at * size, (at + 1) * size)) for at in range(heads)}
    if len(shape) < 2 or (columns == "positions" and len(shape) != 3):
        return {"": ()}
    dim = 1 if columns == "positions" or len(shape) == 4 else len(shape) - 1
    names = range(shape[dim]) if taken is None or len(taken[dim]) != shape[dim] else taken[dim]
    return {str(name): (*[slice(None)] * dim, at) for at, name in enumerate(names)}


def labels_of(locations: Iterable[Location], order: Sequence[str]) -> dict[Location, str]:
    """Return the label of each location, in the order of the layers."""
    known, labels = list(locations), {}
    for each in sorted(known, key=lambda each: rank_in(order)(each.layer)):
        paths, calls = ({other[at] for other in known if other.layer == each.layer} for at in (1, 2))
        name = location_name(each.layer, each.path if len(paths) > 1 else "", "forward")
        labels[each] = name + (f" call {each.call}" if len(calls) > 1 else "")
    return labels


def grid_of(
    cells: Mapping[Location, Mapping[str, float]], labels: Mapping[Location, str], columns: str
) -> pd.DataFrame:
    """Return the numbers of the cells of each location as a grid."""
    grid = pd.DataFrame([cells[at] for at in labels], [*labels.values()], dtype="float64")
    return grid.rename_axis("layers").rename_axis(columns, axis=1)
