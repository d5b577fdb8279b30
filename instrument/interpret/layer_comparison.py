"""Similarity of the representations of layers: linear centered kernel alignment (CKA)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pandas as pd

from ..analysis.features import Array
from ..analysis.load import Run
from ..errors import InstrumentError, InstrumentWarning, Problem
from .recorded_layers import Recorded, positions_of

BLOCK_BYTES = 2**25  # size of a block of samples in float64


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
) -> pd.DataFrame:
    """Return the linear CKA of each pair of layers (Kornblith et al. 2019, https://arxiv.org/abs/1905.00414).

    With the centered features X [samples, p] and Y [samples, q] of two layers, it is

        ||YᵀX||² / (||XᵀX|| ||YᵀY||)

    with Frobenius norms: 1 for features that differ only by a rotation and a scale, 0 for uncorrelated ones. The features of
    one sample are the recorded values of one layer, flattened. Computed in float64, in blocks of samples; features of a
    recorded run are mapped from temporary files.

    Args:
        run: A run with recorded tensors; for a probe, `probe.run`.
        other: Another run, such as one with another seed. Samples are matched by id. Default: the same run.
        layers: The layers of `run`. Default: all recorded ones, in forward order.
        other_layers: The layers of `other`. Default: all recorded ones; `layers`, if `other` is not given.
        hook: Name of the hook that recorded the tensors; required if several hooks recorded a layer. One of kind
            `forward` is preferred.
        role: Role of the tensors.
        phase: Phase of the tensors; required if a layer was recorded in several.
        step: The recorded step; required if the samples occur in several steps.
        path: The path of the tensor in a nested output; required if there are several.

    Returns:
        float64: one row per layer of `run`, one column per layer of `other`. NaN for a layer whose features are constant or not
        finite. `attrs["samples"]` is the number of samples.

    Raises:
        InstrumentError: A layer was not recorded, the selection is ambiguous, or fewer than two samples are common to all layers.

    Warns:
        InstrumentWarning: Samples that some layers lack are left out.
    """
    selection = Recorded(hook, role, phase, step, path)
    of_rows, of_columns = (selection.preferring_outputs(each) for each in (run, other or run))
    rows = of_rows.layers(run, layers)
    columns = rows if other is None and other_layers is None else of_columns.layers(other or run, other_layers)
    with TemporaryDirectory() as folder:
        features, ids = {}, {}
        sides = [("rows", run, of_rows, rows)]
        if other is not None or columns != rows:
            sides.append(("columns", other or run, of_columns, columns))
        for side, source, recorded, names in sides:
            for i, layer in enumerate(names):
                layer_features = recorded.read(source, layer, Path(folder) / f"{side}_{i}.npy")
                features[side, layer], ids[side, layer] = layer_features.flat, layer_features.ids
        common = _common(list(ids.values()))
        centered = {key: _Centered(features[key], positions_of(ids[key], common)) for key in features}
        sizes = {key: _product_norm(each, each) for key, each in centered.items()}
        side = sides[-1][0]
        values = np.empty((len(rows), len(columns)))
        for i, one in enumerate(rows):
            for j, two in enumerate(columns):
                first, second = ("rows", one), (side, two)
                if side == "rows" and j < i:
                    values[i, j] = values[j, i]
                    continue
                norm = sizes[first] * sizes[second]
                product = sizes[first] if first == second else _product_norm(centered[first], centered[second])
                values[i, j] = product**2 / norm if norm > 0 else np.nan
        features.clear()
        centered.clear()
    table = pd.DataFrame(values, index=pd.Index(rows, name="layer"), columns=pd.Index(columns, name="layer"))
    table.attrs["samples"] = len(common)
    return table


def _common(ids: Sequence[Array]) -> Array:
    """Return the ids that all layers have."""
    common: Array = reduce(np.intersect1d, ids)
    most = max(map(len, ids))
    if len(common) < 2:
        message = f"{len(common)} of up to {most} samples are common to all layers; at least 2 are required"
        raise InstrumentError(Problem("run", message, fix="record the same samples, with ids, at all layers"))
    if len(common) < most:
        message = f"{most - len(common)} of {most} samples are left out: some layers were recorded without them"
        warnings.warn(message, InstrumentWarning, stacklevel=3)
    return common


class _Centered:
    """The centered features of a layer, read in blocks of samples."""

    def __init__(self, features: Array, samples: Array) -> None:
        self.features = features
        self.samples = samples
        self.step = max(1, BLOCK_BYTES // (8 * max(1, features.shape[1])))
        self.mean = sum(self._rows(i).sum(0) for i in self.starts) / len(samples)

    @property
    def starts(self) -> range:
        """The first sample of each block."""
        return range(0, len(self.samples), self.step)

    def _rows(self, start: int, step: int | None = None) -> Array:
        return self.features[self.samples[start : start + (step or self.step)]].astype(np.float64)

    def block(self, start: int, step: int) -> Array:
        """Return the features of some samples, float64 [step, features]."""
        with np.errstate(invalid="ignore"):  # features that are not finite have no similarity
            centered: Array = self._rows(start, step) - self.mean
        return centered


def _product_norm(one: _Centered, two: _Centered) -> float:
    """Return the Frobenius norm of XᵀY, from p x q products of features or n x n products of samples, whichever are fewer."""
    n, p, q = len(one.samples), one.features.shape[1], two.features.shape[1]
    step = min(one.step, two.step)
    if p * q <= n * (p + q):
        products = np.zeros((p, q))
        for start in range(0, n, step):
            products += one.block(start, step).T @ two.block(start, step)
        return float(np.linalg.norm(products))
    total = np.float64(0.0)
    for start in range(0, n, step):
        left, right = one.block(start, step), two.block(start, step)
        for other in range(0, n, step):
            total += ((left @ one.block(other, step).T) * (right @ two.block(other, step).T)).sum()
    return float(np.sqrt(max(total, 0.0)))
