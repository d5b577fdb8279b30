"""How much two tensors, or the statistics of two tensors, differ, and the tolerance that follows from the precision of a run.

The difference of a statistic is divided by the size of the tensor, so that a mean near zero is not a special case. Let
rms be the root mean square of a tensor, and d = rms(a - b) / rms(a) the relative difference of two tensors. Then

    |mean(a) - mean(b)|, |std(a) - std(b)|, |rms(a) - rms(b)| <= rms(a - b)

by the Cauchy-Schwarz and the triangle inequality. So each of these differences, divided by the rms, is a lower bound of
d: if it exceeds a tolerance, the tensors differ by more than that. Extremes, l1 and ratios have no such bound, and
fractions jump if a single element is rounded across zero. These statistics do not decide whether tensors differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from ..tables.statistics import COUNTS, REMAINDERS, statistic_of


@dataclass(frozen=True)
class Precision:
    """A floating-point type."""

    dtype: str
    digits: int  # the number of binary digits of its significand, including the hidden one
    tolerance: float  # the largest relative difference of two runs with this type that rounding errors explain

    @property
    def unit(self) -> float:
        """The unit roundoff: the largest relative error of a rounded number."""
        return float(2.0**-self.digits)


# A value in a network is the result of about 100 roundings. Rounding errors have random signs, so their sum grows with
# the square root of their number (N. J. Higham and T. Mary, SIAM J. Sci. Comput. 41 (2019), A2815-A2835): 10 units.
# In float32, sums are rounded to float32 too. A sum of 10,000 terms contributes another factor of 100. PyTorch computes
# sums of float16 and bfloat16 in float32, so these types do not have this factor. Statistics of float64 tensors are sums in float64
# as well, so the errors of the statistics limit the accuracy.
_ROUNDINGS, _TERMS = 10.0, 100.0
PRECISIONS = {
    "float64": Precision("float64", 53, 1e-10),
    "float32": Precision("float32", 24, _ROUNDINGS * _TERMS * 2.0**-24),
    "float16": Precision("float16", 11, _ROUNDINGS * 2.0**-11),
    "bfloat16": Precision("bfloat16", 8, _ROUNDINGS * 2.0**-8),
}
NOISE_RATIO = 10.0
"""The ratio of an error to the rounding noise of its layer above which rounding does not explain it: one order of magnitude."""
# Of one rounding, in units: errors are uniform in half a unit in the last place, the significand is not.
_RMS_OF_ROUNDING = 0.4
_AUTOCAST = {"fp16": "float16", "bf16": "bfloat16"}
_EXTREMES = ("min", "max", "abs_max")
_FRACTION = 0.25  # of the locations: so many determine the precision of a run
_UNUSED_DIGITS = 1  # last binary digits that can be zero by chance in all extremes of a location


def run_precision(info: Mapping[str, Any], extremes: pd.DataFrame, dtypes: Sequence[str]) -> Precision:
    """Return the precision in which a run computes: the coarsest one of its configuration and its tensors.

    Rows of statistics have no dtype, but the extremes of a tensor are elements of it. If the extremes of a location
    never need more binary digits than a type has, the elements were rounded to this type. The `dtypes` of recorded tensors, which may be
    rounded, count if there are no `extremes`: rows with the columns `location`, `min`, `max` and `abs_max`.
    """
    config = info.get("config")
    train = config.get("train") if isinstance(config, Mapping) else None
    named = _AUTOCAST.get(str(train.get("precision"))) if isinstance(train, Mapping) else None
    types = (_type_of(rows) for _, rows in extremes.groupby("location"))
    known = [PRECISIONS[name] for name in types if name is not None]
    # Those that a quarter of the locations have, or a coarser one; none if all types are unclear.
    enough = [one for one in known if sum(each.digits <= one.digits for each in known) >= _FRACTION * len(known)]
    measured = [coarsest(enough).dtype] if enough else dtypes
    precisions = [PRECISIONS[name] for name in (named, *measured) if name in PRECISIONS]
    return coarsest(precisions) if precisions else PRECISIONS["float32"]


def rounding_noise(precision: Precision, depth: int, terms: int) -> float:
    """Return the expected relative error of a layer after random rounding errors.

    Each layer adds one rounding, of which the errors add up like the square root of their number; so do those of the terms of a
    sum in float32 and float64 (Higham and Mary, as above). `depth` is the number of layers up to and including this one, and
    `terms` that of the terms of the longest sum so far.
    """
    is_summed_in_own_type = precision.digits >= PRECISIONS["float32"].digits
    return _RMS_OF_ROUNDING * precision.unit * math.sqrt(depth * (terms if is_summed_in_own_type else 1))


def coarsest(precisions: Sequence[Precision]) -> Precision:
    """Return the precision with the fewest binary digits."""
    return min(precisions, key=lambda precision: precision.digits)


def _type_of(extremes: pd.DataFrame) -> str | None:
    """Return the coarsest type that represents all extremes of a location; None for integers and other numbers of few digits."""
    values = np.unique(np.abs(extremes[[*_EXTREMES]].to_numpy(np.float64, na_value=np.nan)))
    values = values[np.isfinite(values) & (values != np.rint(values))]
    if not len(values):
        return None
    significands = (np.frexp(values)[0] * 2.0**53).astype(np.int64)
    digits = 53 - int(np.log2((significands & -significands).min()))
    for name in ("bfloat16", "float16", "float32", "float64"):
        if digits <= PRECISIONS[name].digits:
            return name if digits >= PRECISIONS[name].digits - _UNUSED_DIGITS else None
    return None


_Array = np.ndarray[Any, Any]
ULP_BINS = ("0", "1", "2", *(f"{2**k + 1}-{2 ** (k + 1)}" for k in range(1, 10)), "> 1024")
"""The bins of the histogram of distances, in units in the last place."""
_BITS = {"float64": 64, "float32": 32, "float16": 16, "bfloat16": 16}


class TensorErrors(NamedTuple):
    """The differences between two tensors a and b of the same shape, as in `Diff.tensors`.

    `l2` and `max_abs` are infinite if the non-finite elements of a and b differ. Two NaN are equal, and so are -0.0 and 0.0. `cosine` is 1
    if both are zero, and 0 if only one is. `ulp`, int64 [13], is zero for types that are not floating-point types of 16 to 64 bits.
    """

    l2: float
    cosine: float
    max_abs: float
    max_rel: float
    ulp: _Array
    equal_bits: bool


def tensor_errors(one: _Array, other: _Array, dtypes: tuple[str, str]) -> TensorErrors:
    """Compare two tensors."""
    a, b = (_real(each, is_complex=np.iscomplexobj(one) or np.iscomplexobj(other)) for each in (one, other))
    finite = np.isfinite(a) & np.isfinite(b)
    same = finite.all() or np.array_equal(a[~finite], b[~finite], equal_nan=True)
    x, y = a[finite].astype(np.float64), b[finite].astype(np.float64)
    gap = _gap(a[finite], b[finite])
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.where(gap > 0, gap / np.maximum(np.abs(x), np.abs(y)), 0.0)
    largest = max(np.abs(x).max(initial=0.0), np.abs(y).max(initial=0.0)) or 1.0
    x, y = x / largest, y / largest  # their squares are in the range of float64
    sizes = np.linalg.norm(x), np.linalg.norm(y)
    both_zero = float(max(sizes) == 0.0)
    cosine = float(np.clip(x / sizes[0] @ (y / sizes[1]), -1.0, 1.0)) if min(sizes) else both_zero
    l2 = float(np.linalg.norm(gap / largest) / max(sizes)) if max(sizes) else 0.0
    return TensorErrors(
        l2 if same else np.inf,
        cosine,
        float(gap.max(initial=0.0)) if same else np.inf,
        float(relative.max(initial=0.0)),
        _ulp_histogram(a[finite], b[finite], dtypes),
        dtypes[0] == dtypes[1] and np.array_equal(_bytes(one), _bytes(other)),
    )


def _bytes(values: _Array) -> _Array:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def _real(values: _Array, *, is_complex: bool) -> _Array:
    """Return the elements as a flat array of real numbers: float64, or 64-bit integers. Complex numbers are pairs."""
    flat = np.ascontiguousarray(values).reshape(-1)
    if is_complex:
        return flat.astype(np.complex128).view(np.float64)
    return flat if flat.dtype in (np.int64, np.uint64) else flat.astype(np.float64, copy=False)


def _gap(a: _Array, b: _Array) -> _Array:
    """Return |a - b| in float64, limited to the largest finite number. It is 0 only if a = b, also for 64-bit integers."""
    if a.dtype.kind in "iu" and b.dtype.kind in "iu":
        (high_a, low_a), (high_b, low_b) = (np.divmod(each, each.dtype.type(2**32)) for each in (a, b))
        gap = (high_a.astype(np.float64) - high_b) * 2.0**32 + (low_a.astype(np.float64) - low_b)
    else:
        with np.errstate(over="ignore"):
            gap = a.astype(np.float64) - b
    return np.minimum(np.abs(gap), np.finfo(np.float64).max)


def _ulp_histogram(a: _Array, b: _Array, dtypes: tuple[str, str]) -> _Array:
    counts = np.zeros(len(ULP_BINS), np.int64)
    if not all(name in PRECISIONS for name in dtypes):
        return counts
    dtype = coarsest([PRECISIONS[name] for name in dtypes]).dtype
    (size_a, negative_a), (size_b, negative_b) = _patterns(a, dtype), _patterns(b, dtype)
    between = np.where(size_a > size_b, size_a - size_b, size_b - size_a)
    distance = np.where(negative_a == negative_b, between, size_a + size_b)  # -0 and +0 are one number
    bins = np.searchsorted([0, 1, *(2**k for k in range(1, 11))], distance, side="left")
    counts += np.bincount(bins, minlength=len(ULP_BINS))
    return counts


def _patterns(values: _Array, dtype: str) -> tuple[_Array, _Array]:
    """Round values to a type. Return their bits without the sign, which count the numbers from zero, and whether each is negative."""
    bits = _BITS[dtype]
    if dtype == "bfloat16":
        wide = values.astype(np.float32).view(np.uint32)
        pattern = (wide + 0x7FFF + (wide >> 16 & 1)) >> 16  # round to nearest, ties to even
    else:
        with np.errstate(over="ignore"):
            pattern = values.astype(f"f{bits // 8}").view(f"u{bits // 8}")
    pattern = pattern.astype(np.uint64)
    return pattern & np.uint64((1 << bits - 1) - 1), pattern >> np.uint64(bits - 1) > 0


BOUNDS = ("mean", "std", "rms", "l2")
"""The statistics whose relative difference is a lower bound of that of the tensors."""
_FRACTIONS = ("fraction", "units")


def relative_differences(
    rows: pd.DataFrame, names: Sequence[str], floors: pd.Series | None, floor: float
) -> pd.DataFrame:
    """Return the relative difference of each statistic as a column; NaN if one of the runs has no value.

    It is |a - b| / max(size(a), size(b)). The size is the rms for `mean` and `std`, `abs_max` for `min` and `max`, and
    the statistic itself for the others. For fractions, it is |a - b|. It is infinite for fingerprints that differ.

    `floors`: the number of the group of each row, -1 for no group; None if no row has a group. `floor`: the lower limit of the size of a
    row in a group, relative to the largest size of the group.
    """
    differences = {}
    for name in names:
        if statistic_of(name).unit == "bits":
            is_other = (rows[f"{name}_a"] != rows[f"{name}_b"]).astype("boolean")
            differences[name] = is_other.map({True: np.inf, False: 0.0}).to_numpy(np.float64, na_value=np.nan)
            continue
        a, b = (_values(rows, name, side) for side in "ab")
        gap = np.subtract(a, b, where=a != b, out=np.zeros(len(rows)))
        if f"{REMAINDERS.get(name)}_a" in rows:  # 64-bit integers, which float64 rounds
            gap += np.subtract(*(np.nan_to_num(_values(rows, REMAINDERS[name], side)) for side in "ab"))
        gap = np.abs(gap)
        if statistic_of(name).unit in _FRACTIONS:
            differences[name] = gap
            continue
        size = np.fmax(_sizes(rows, names, name, "a"), _sizes(rows, names, name, "b"))
        if floors is not None:
            largest = pd.Series(size, rows.index).groupby(floors).transform("max").to_numpy()
            size = np.where(floors >= 0, np.fmax(size, floor * largest), size)
        with np.errstate(divide="ignore", invalid="ignore"):
            differences[name] = np.where(gap == 0.0, 0.0, np.where(np.isinf(gap), np.inf, gap / size))
    return pd.DataFrame(differences, index=rows.index)


def is_of_values(name: str) -> bool:
    """Return whether a statistic can decide whether the values of two tensors differ: it is not a count and not a fraction."""
    return name not in COUNTS and statistic_of(name).unit not in _FRACTIONS


def decisive(differences: pd.DataFrame, *, all_decide: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Return the decisive difference of each row, float64 [rows], 0 for rows without any value; and the index of its column.

    It is the largest difference of the statistics in `BOUNDS` and of the counts. For rows without these statistics, it is the
    largest difference of all statistics except fractions; with `all_decide`, of all statistics.
    """
    names = [str(name) for name in differences]
    values = differences.to_numpy(np.float64)
    is_bound = np.array([name in BOUNDS for name in names])
    is_count = np.array([name in COUNTS for name in names])
    is_other = np.array([statistic_of(name).unit not in _FRACTIONS for name in names])
    has_bounds = ~np.isnan(values[:, is_bound]).all(axis=1, keepdims=True)
    counted = (np.where(has_bounds, is_bound | is_count, is_other) | all_decide) & ~np.isnan(values)
    deciding = np.where(counted, values, -1.0)
    largest = deciding.argmax(axis=1)
    return np.maximum(deciding[np.arange(len(values)), largest], 0.0), largest


def _values(rows: pd.DataFrame, name: str, side: str) -> np.ndarray:
    return rows[f"{name}_{side}"].to_numpy(np.float64, na_value=np.nan)


def _sizes(rows: pd.DataFrame, names: Sequence[str], name: str, side: str) -> np.ndarray:
    """Return the size to which a statistic of each tensor is compared. `abs_max` replaces a missing rms."""
    own: np.ndarray = np.abs(_values(rows, name, side))
    sizes = []
    if name in ("mean", "std"):
        sizes = [_values(rows, "rms", side)] if "rms" in names else []
        if {"mean", "std"} <= {*names}:
            sizes.append(np.hypot(_values(rows, "mean", side), _values(rows, "std", side)))
    if name in ("mean", "std", "min", "max") and "abs_max" in names:
        sizes.append(_values(rows, "abs_max", side))
    for size in sizes[::-1]:
        own = np.where(np.isnan(size), own, size)
    return own
