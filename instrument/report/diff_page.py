"""Texts, tables and the picture of the page of a comparison of two runs."""

from __future__ import annotations

import base64
from io import BytesIO
from typing import Any

from ..comparison.result import Diff, number_text, place_cells, records, summary, ulp_text
from ..plot.diff import diff as plot_diff

DPI = 110
TENSOR_COLUMNS = ("tensors", "elements", "l2", "cosine", "max_abs", "max_rel")


def content(difference: Diff) -> dict[str, Any]:
    """Return the values of the template."""
    return {
        "title": " and ".join(path.name for path in difference.paths) + ": differences",
        "path": " and ".join(map(str, difference.paths)),
        "summary": "\n".join(summary(difference)),
        "statistics": difference.statistics,
        "rows": records(difference.layers),
        "tensor_columns": TENSOR_COLUMNS,
        "tensors": records(difference.tensors.reset_index()),
        "unmatched": [row | {"layer_b": row["layer"]} for row in records(difference.unmatched)],
        "picture": _picture(difference),
        "place_cells": place_cells,
        "number_text": number_text,
        "ulp_text": ulp_text,
    }


def _picture(difference: Diff) -> str:
    """Return the chart as base64; empty if only operators are compared."""
    if difference.layers.empty:
        return ""
    file = BytesIO()
    plot_diff(difference).savefig(file, format="png", dpi=DPI)
    return base64.b64encode(file.getvalue()).decode()
