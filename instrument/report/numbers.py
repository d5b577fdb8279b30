"""Formatting and compression of the numbers in a report, to limit the size of the page."""

from __future__ import annotations

import base64
import gzip
import json
import math
from typing import Any

import numpy as np

DIGITS = 6


def rounded(values: Any) -> Any:
    """Round a number, an array or nested lists to six digits; non-finite numbers become None."""
    if isinstance(values, np.ndarray):
        values = values.tolist()
    if isinstance(values, list | tuple):
        return [rounded(value) for value in values]
    if values is None or isinstance(values, str | bool | int):
        return values
    return float(f"{values:.{DIGITS}g}") if math.isfinite(values) else None


def packed(text: str) -> str:
    """Return a text compressed with gzip and encoded with base64, as the page expects it."""
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=9, mtime=0)).decode()


def as_json(data: Any) -> str:
    """Return compact JSON; NaN raises an error."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False)
