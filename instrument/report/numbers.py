"""Numbers on their way into a page: as many digits as a picture can show, and no more of them than the page has room for."""

from __future__ import annotations

import base64
import gzip
import json
import math
from typing import Any

import numpy as np

DIGITS = 6


def rounded(values: Any) -> Any:
    """Numbers in nested lists, with six digits, and None for what is not finite.

    Args:
        values: A number, an array of any shape, or nested lists.
    """
    if isinstance(values, np.ndarray):
        values = values.tolist()
    if isinstance(values, list | tuple):
        return [rounded(value) for value in values]
    if values is None or isinstance(values, str | bool | int):
        return values
    return float(f"{values:.{DIGITS}g}") if math.isfinite(values) else None


def packed(text: str) -> str:
    """A text as gzip in base64, which a page unpacks."""
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=9, mtime=0)).decode()


def as_json(data: Any) -> str:
    """Compact JSON, in which NaN would be an error."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False)


def told(value: float | None, *, sign: bool = False) -> str:
    """A number in words of a table: four digits; empty where there is none."""
    if value is None:
        return ""
    return f"{value:+.4g}" if sign and not math.isnan(value) else f"{value:.4g}"
