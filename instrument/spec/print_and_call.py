"""Specs of `action: print` and `action: call`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .base import ObservationSpec
from .field_types import Target
from .record import Statistics, StatisticsSpec


class PrintSpec(StatisticsSpec):
    """Print one line per tensor: hook, layer, step, shape, dtype, device and statistics."""

    action: Literal["print"]
    stats: Statistics = Field(
        ("mean", "std", "min", "max"),
        description="The printed statistics, as for record. NaN and infinities are always reported.",
    )


class CallSpec(ObservationSpec):
    """Call a custom function with a copy of the tensor. It returns nothing. An operation of PyTorch that changes the copy is an error."""

    action: Literal["call"]
    fn: Target = Field(
        description="A custom function, called as `fn(tensor, context)` with the additional arguments of the target."
    )
