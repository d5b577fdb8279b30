"""Similarity of the representations of layers: linear centered kernel alignment (CKA)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import reduce
from itertools import product

import numpy as np
import pandas as pd

from ..analysis.features import BATCH, Array, Features
from ..analysis.load import Run
from ..errors import InstrumentError, InstrumentWarning, Problem
from .recorded_layers import Recorded, positions_of


def layer_similarity(
    run: Run,
    other: Run | None = None,
    *,
    layers: Sequence[str] | None = None,
    other_layers: Sequence[str] | None = None,
    hook: str | None = None,
    role: str = "output",
    phase: str | None = None,
    step: int | None = None,
    path: str | None = None,
    call: int | None = None,
) -> pd.DataFrame:
    """Return the linear CKA of each pair of layers (Kornblith et al. 2019, https://arxiv.org/abs/1905.00414).

    With the centered features X [samples, p] and Y [samples, q] of two layers, it is

        ||YᵀX||² / (||XᵀX|| ||YᵀY||)

    with Frobenius norms: 1 for features that differ only by a rotation and a scale, 0 for uncorrelated ones. The features of
    one sample are the recorded values of one layer, flattened. Computed in float64, in memory.

    Args:
        run: A run with recorded tensors; for a probe, `probe.run`.
        other: Another run, such as one with another seed. Samples are matched by id, or by batch if neither run has ids. Default: the
            same run.
        layers: The layers of `run`. Default: all recorded ones, in forward order.
        other_layers: The layers of `other`. Default: all recorded ones; `layers`, if `other` is not given.
        hook: Name of the hook that recorded the tensors; required if several hooks recorded a layer. One of kind
            `forward` is preferred.
        role: Role of the tensors.
        phase: Phase of the tensors; required if a layer was recorded in several.
        step: The recorded step; required if the samples occur in several steps.
        path: The path of the tensor in a nested output; required if there are several.
        call: The call of the layer in its step, from 0; required if it was called several times.

    Returns:
        float64: one row per layer of `run`, one column per layer of `other`. NaN for a layer whose features are constant or not
        finite. `attrs["samples"]` is the number of samples.

    Raises:
        InstrumentError: A layer was not recorded, the selection is ambiguous, fewer than two samples are common to all layers, or two
            runs without ids recorded different batches.

    Warns:
        InstrumentWarning: Samples that some layers lack are left out.
    """
    selection = Recorded(hook=hook, role=role, phase=phase, step=step, path=path, call=call)
    of_rows, of_columns = (selection.preferring_outputs(each) for each in (run, other or run))
    rows = of_rows.layers(run, layers)
    columns = rows if other is None and other_layers is None else of_columns.layers(other or run, other_layers)
    has_ids = [bool(each.count("samples")) for each in (run, other or run)]
    if has_ids[0] != has_ids[1]:
        message = "the samples of only one of the runs have ids"
        raise InstrumentError(Problem("other", message, fix="record both with probe.batch(ids=ids), or none"))
    if other is not None and not has_ids[0]:
        pairs = ((of_rows, run), (of_columns, other))
        batches = [set(each.rows(data, BATCH)[BATCH].itertuples(index=False, name=None)) for each, data in pairs]
        if batches[0] != batches[1]:
            message = "the samples have no ids, and the runs recorded different batches"
            raise InstrumentError(Problem("other", message, fix="record with probe.batch(ids=ids), or the same steps"))
    is_symmetric = other is None and columns == rows
    left = [of_rows.read(run, layer) for layer in rows]
    right = left if is_symmetric else [of_columns.read(other or run, layer, numbered_as=run) for layer in columns]
    all_ids = [features.ids for features in (*left, *right)]
    common: Array = reduce(np.intersect1d, all_ids)
    most = max(map(len, all_ids))
    if len(common) < 2:
        message = f"{len(common)} of up to {most} samples are common to all layers; at least 2 are required"
        raise InstrumentError(Problem("run", message, fix="record the same samples, with ids, at all layers"))
    if len(common) < most:
        message = f"{most - len(common)} of {most} samples are left out: some layers were recorded without them"
        warnings.warn(message, InstrumentWarning, stacklevel=2)
    left_values = [_centered(features, common) for features in left]
    right_values = left_values if is_symmetric else [_centered(features, common) for features in right]
    sizes = [[_product_norm(each, each) for each in side] for side in (left_values, right_values)]
    values = np.empty((len(rows), len(columns)))
    for (i, one), (j, two) in product(enumerate(left_values), enumerate(right_values)):
        if is_symmetric and j < i:
            values[i, j] = values[j, i]
        else:
            norm = sizes[0][i] * sizes[1][j]
            values[i, j] = _product_norm(one, two) ** 2 / norm if norm > 0 else np.nan
    table = pd.DataFrame(values, index=pd.Index(rows, name="layer"), columns=pd.Index(columns, name="layer"))
    table.attrs["samples"] = len(common)
    return table


def _centered(features: Features, samples: Array) -> Array:
    """Return the features of some samples minus their means, float64 [samples, features]."""
    values = features.flat[positions_of(features.ids, samples)].astype(np.float64)
    with np.errstate(invalid="ignore"):  # features that are not finite have no similarity
        centered: Array = values - values.mean(0)
    centered[:, (values == values[0]).all(0)] = 0.0  # the mean of equal numbers can differ from them by rounding
    return centered


def _product_norm(x: Array, y: Array) -> float:
    """Return the Frobenius norm of XᵀY, from p x q products of features or n x n products of samples, whichever are fewer."""
    if x.shape[1] * y.shape[1] <= len(x) * (x.shape[1] + y.shape[1]):
        return float(np.linalg.norm(x.T @ y))
    return float(np.sqrt(max(((x @ x.T) * (y @ y.T)).sum(), 0.0)))
