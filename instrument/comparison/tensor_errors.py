"""Differences between two tensors, element by element."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .precision import PRECISIONS, coarsest

_Array = np.ndarray[Any, Any]
ULP_BINS = ("0", "1", "2", *(f"{2**k + 1}-{2 ** (k + 1)}" for k in range(1, 10)), "> 1024")
"""The bins of the histogram of distances, in units in the last place."""
_BITS = {"float64": 64, "float32": 32, "float16": 16, "bfloat16": 16}


class TensorErrors(NamedTuple):
    """The differences between two tensors a and b of the same shape.

    Attributes:
        l2: The relative error |a - b| / max(|a|, |b|) with L2 norms; infinite if the non-finite elements of a and b differ.
            Two NaN are equal, and so are -0.0 and 0.0.
        cosine: The cosine of the angle between a and b; 1 if both are zero, 0 if only one is.
        max_abs: The largest |a_i - b_i|.
        max_rel: The largest |a_i - b_i| / max(|a_i|, |b_i|), from 0 to 2.
        ulp: The number of elements whose distance is in each bin of `ULP_BINS`, in units in the last place of the
            coarser type; int64, shape [13]. Zeros for types that are not floating-point types of 16 to 64 bits.
        equal_bits: Whether the dtypes and all bits are equal.
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
