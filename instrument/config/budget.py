"""Limits for the cost of recording."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from ..fields.field_types import Spec

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def _parse_fraction(value: Any) -> Any:
    """Convert `5%` to 0.05."""
    if isinstance(value, str) and (match := re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*%\s*", value)):
        return float(match[1]) / 100
    if isinstance(value, bool | str):
        raise ValueError("must be a fraction of the step time, such as 5% or 0.05")
    return value


def _parse_size(value: Any) -> Any:
    """Convert `2GB` to 2,000,000,000 and `2GiB` to 2 * 2^30."""
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([A-Za-z]*)\s*", value)
        if match is None or match[2].upper() not in _UNITS:
            raise ValueError("must be a size, such as 500MB, 2GB or 1GiB")
        return round(float(match[1]) * _UNITS[match[2].upper()])
    if isinstance(value, bool):
        raise ValueError("must be a size, such as 500MB, 2GB or 1GiB")
    return value


TimeLimit = Annotated[float, Field(gt=0, le=10), BeforeValidator(_parse_fraction, json_schema_input_type=float | str)]
SizeLimit = Annotated[int, Field(ge=1), BeforeValidator(_parse_size, json_schema_input_type=int | str)]


class BudgetConfig(Spec):
    """Limits for the cost of record hooks. Hooks over budget are sampled less often. Interventions always run."""

    time: TimeLimit | None = Field(
        None,
        description="Maximum overhead, relative to a step without hooks: 5% or 0.05. It is measured during the run.",
    )
    bytes: SizeLimit | None = Field(
        None, description="Approximate maximum size of all recorded data on disk: 500MB, 2GB."
    )
