"""The comparison of the operators of two runs with different numbers of processes, such as one process and two.

Each process computes a part of the batch, so the outputs of an operator have other shapes and other values. But they follow one of the
`RELATIONS`, except for rounding. Three sums show whether a relation holds: that of the elements, of their squares, and of the elements
with pseudo-random signs (`projection`). The first two add over parts of a tensor, and the first and the last one are linear. By the
Cauchy-Schwarz and the triangle inequality, the l2 of the difference of two tensors of n elements is at least the difference of
their sums divided by sqrt(n), and the difference of their l2. It is the standard deviation of the difference of their projections
(Alon, Matias and Szegedy, "The space complexity of approximating the frequency moments", STOC 1996).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from ..formatting import shorten
from .alignment import common_subsequence

Array = npt.NDArray[Any]
RELATIONS = (
    "equal in all processes",
    "parts of the batch or of a sharded tensor",
    "parts of the batch, times the number of processes",  # gradients of activations, if the loss is a mean over the samples of a process
    "mean over the processes",
    "sum over the processes",
    "equal in all processes, times their number",  # numbers such as the inverse of the size of a batch
    "integers without a relation, such as positions in a part of the batch",
    "replicas or shards after a division, which can amplify rounding",  # Adam divides rounding errors by their size
)
_KEY = ("part", "layer", "name", "output", "dimensions")
_DIVISIONS = "div|sqrt|reciprocal|sign|_fused_"  # operators of optimizers; `_fused_adamw_` updates everything
_WRAPPER = r"^module(?:\.|$)"  # DistributedDataParallel


class MatchedOutputs:
    """The outputs of operators that all processes of two runs have in one step, in the order in which they were computed.

    They are matched by part of the step, layer, operator, index of the output and number of dimensions, as longest common subsequences.

    Args:
        sides: For each run, the rows of its processes with fingerprints.
        floor: The lower limit of the l2 of a gradient, relative to the largest one, and of the numbers of an optimizer, relative to the
            largest result of this operator. Smaller ones can be rounding alone, such as the gradient of the bias of a key in attention.
    """

    def __init__(self, sides: Sequence[pd.DataFrame], floor: float) -> None:
        # The rows of each process, first those of the first run.
        self.programs = [rows.reset_index(drop=True) for side in sides for _, rows in side.groupby("rank")]
        self._of_runs = np.split(np.arange(len(self.programs)), [sides[0]["rank"].nunique()])
        every = pd.concat(self.programs)
        layers = every["layer"].astype(object).str.replace(_WRAPPER, "", regex=True)
        keyed = every.assign(layer=layers, dimensions=every["shape"].map(len))
        ends = np.cumsum([*map(len, self.programs)])[:-1]
        names, self._calls = (
            np.split(keyed.groupby([*_KEY, *more], dropna=False).ngroup().to_numpy().astype(np.int64), ends)
            for more in ((), ("operator",))
        )
        pairs = [dict(common_subsequence(names[0], each)) for each in names]
        matched = sorted(set.intersection(*map(set, pairs)))
        self.at = np.array([[of[i] for i in matched] for of in pairs], np.int64)  # their indices [processes, outputs]
        rows = [program.iloc[index] for program, index in zip(self.programs, self.at, strict=True)]
        self._numbers = {
            name: np.stack([each[name].to_numpy(np.float64, na_value=np.nan) for each in rows])
            for name in ("mean", "l2", "projection", "nan_count", "inf_count")
        }
        self._numel = np.stack([each["shape"].map(np.prod).to_numpy(np.float64) for each in rows])
        groups = [rows[0]["part"], rows[0]["name"].where(rows[0]["part"] == "optimizer")]
        largest = rows[0].groupby(groups, dropna=False)["l2"].transform("max")
        has_floor = rows[0]["part"].isin(["backward", "optimizer"])
        self._least = floor * largest.where(has_floor, 0.0).fillna(0.0).to_numpy(np.float64)
        self._bits = bits = np.stack([each["fingerprint"].to_numpy(np.int64) for each in rows])
        self._are_replicas = np.logical_and(*((bits[index] == bits[index[0]]).all(0) for index in self._of_runs))
        part = rows[0]["part"].to_numpy()
        self._is_optimizer, self._is_backward = part == "optimizer", part == "backward"
        self._is_integer = rows[0]["dtype"].str.contains("int").to_numpy(bool) & ~self._is_optimizer
        # Which outputs are of an optimizer that divides, bool [outputs].
        self.divides = self._is_optimizer & rows[0]["name"].str.contains(_DIVISIONS).to_numpy(bool)

    def differences(self) -> Array:
        """Return the relative difference from each of the `RELATIONS`, float64 [relations, outputs].

        It is infinite where a relation is impossible: for other numbers of elements, NaN and infinite values, and in the optimizer, for
        other bits in processes that update the same parameters.
        """
        one, other = self._of_runs
        first = one[:1]
        pairs = [self._gap(first, np.array([at]), adds=True, is_linear=True) for at in range(1, len(self.programs))]
        equal = np.where(~self._is_optimizer | self._are_replicas, np.max(pairs, axis=0), np.inf)
        parts, scaled = (self._gap(one, other, adds=True, is_mean=is_mean) for is_mean in (False, True))
        linear = (self._gap(one, other, is_linear=True, is_mean=is_mean) for is_mean in (True, False))
        is_whole = (self._numel == self._numel[0]).all(0)
        mean, total = (np.where(is_whole & ~self._is_optimizer, each, np.inf) for each in linear)
        are_shards = self._numel[one].sum(0) == self._numel[other].sum(0)
        divided = np.where(self.divides & (are_shards | is_whole & self._are_replicas), 0.0, np.inf)
        is_number = (self._numel == 1).all(0) & ~(self._is_optimizer | self._is_backward)
        numbers = self._numbers["mean"] / np.repeat([len(one), len(other)], [len(one), len(other)])[:, None]
        multiplied = np.ptp(numbers, axis=0) / np.fmax(np.abs(numbers).max(0), np.finfo(float).tiny)
        multiplied = np.where(is_number & np.isfinite(multiplied), multiplied, np.inf)
        scaled = np.where(self._is_backward, scaled, np.inf)
        integers = np.where(self._is_integer, 0.0, np.inf)
        return np.stack([equal, parts, scaled, mean, total, multiplied, integers, divided])

    def reason(self, output: int) -> tuple[dict[str, Any], str]:
        """Return the row of the first process with the reason why an output follows no relation, and the reason."""
        for name, index in zip("AB", self._of_runs, strict=True):
            others = np.flatnonzero(self._bits[index, output] != self._bits[index[0], output]).tolist()
            if self._is_optimizer[output] and others:
                text = f"Its bits in rank {shorten([*map(str, others)])} of {name} differ from those in rank 0."
                return {**self.programs[index[others[0]]].iloc[self.at[index[others[0]], output]]}, text
        gaps = self.differences()[:, output]
        text = "No relation is possible: its numbers of elements, of NaN or of infinite values differ."
        if np.isfinite(gaps.min()):
            text = f"The closest relation is: {RELATIONS[gaps.argmin()]}. Its relative difference is {gaps.min():.2g}."
        return {**self.programs[0].iloc[self.at[0, output]]}, text

    def only_in_some(self) -> tuple[int, dict[str, Any], str] | None:
        """Return the number of outputs before the first operator that only some processes of a run have, its row, and their ranks."""
        unmatched = [
            rows.assign(program=at, call=calls, before=np.searchsorted(matched, np.arange(len(rows)))).drop(matched)
            for at, (rows, calls, matched) in enumerate(zip(self.programs, self._calls, self.at, strict=True))
        ]
        for name, index in zip("AB", self._of_runs, strict=True):
            rows = pd.concat([unmatched[at] for at in index]).query("part != 'loop'")  # in which rank 0 reports
            for (before, _), same in rows.sort_values("before", kind="stable").groupby(["before", "call"], sort=False):
                counts = same["program"].value_counts().reindex(index, fill_value=0)
                if counts.nunique() > 1:
                    ranks = [str(at - index[0]) for at in index if counts[at] == counts.max()]
                    row = same[same["program"] == counts.idxmax()].iloc[0]
                    return int(before), {**row}, f"Of the processes of {name}, only rank {shorten(ranks)} has it."
        return None

    def _gap(
        self, one: Array, other: Array, *, adds: bool = False, is_linear: bool = False, is_mean: bool = False
    ) -> Array:
        """Return the difference of two groups of processes, relative to the l2 of their tensors, [outputs].

        Args:
            adds: Whether the tensors are parts, whose squares and numbers of elements add.
            is_linear: Whether the tensors are added or equal, so that their projections add.
            is_mean: Whether the sum is divided by the number of processes of its group.
        """
        merged = [self._merged(index, adds=adds, scale=len(index) if is_mean else 1) for index in (one, other)]
        gaps = [np.abs(a - b) for a, b in zip(*(each[:3] for each in merged), strict=True)]
        counts, counts_of_other = (each[3] for each in merged)
        gaps[0] /= np.sqrt(np.fmax(counts[0], 1))
        found = [gaps[0], *gaps[1:2] * adds, *gaps[2:] * is_linear]
        size = np.fmax(np.fmax(merged[0][1], merged[1][1]), self._least)
        difference = np.fmax.reduce(found) / np.where(size > 0, size, 1.0)
        return np.where((counts == counts_of_other).all(0), difference, np.inf)

    def _merged(self, index: Array, *, adds: bool, scale: int) -> tuple[Array, Array, Array, Array]:
        """Return the sum, the l2 and the projection of a group of processes, and its numbers of elements, NaN and infinite values."""
        mean, l2, projection, nans, infinite = (numbers[index] for numbers in self._numbers.values())
        numel = self._numel[index]
        counts = np.stack([numel, nans, infinite])
        total = np.nansum(mean * (numel - nans - infinite), axis=0)
        norm = np.sqrt(np.nansum(l2**2, axis=0)) if adds else np.nansum(l2, axis=0)
        merged = counts.sum(1) if adds else np.concatenate([counts[:1, 0], counts[1:].any(1)])
        return total / scale, norm / scale, projection.sum(0) / scale, merged
