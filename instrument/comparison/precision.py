"""The floating-point precision of a run, and the tolerance that follows from it for a comparison of two runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd


@dataclass(frozen=True)
class Precision:
    """A floating-point type.

    Attributes:
        digits: The number of binary digits of its significand, including the hidden one.
        tolerance: The largest relative difference of two runs with this type that rounding errors explain.
    """

    dtype: str
    digits: int
    tolerance: float

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
    precision.dtype: precision
    for precision in (
        Precision("float64", 53, 1e-10),
        Precision("float32", 24, _ROUNDINGS * _TERMS * 2.0**-24),
        Precision("float16", 11, _ROUNDINGS * 2.0**-11),
        Precision("bfloat16", 8, _ROUNDINGS * 2.0**-8),
    )
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
    never need more binary digits than a type has, the elements were rounded to this type.

    Args:
        extremes: Rows of statistics, with the columns `location`, `min`, `max` and `abs_max`.
        dtypes: The dtypes of the recorded tensors, which may be rounded. They count if there are no extremes.
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
    sum in float32 and float64 (Higham and Mary, as above).

    Args:
        depth: The number of layers up to and including this one.
        terms: The number of terms of the longest sum so far.
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
