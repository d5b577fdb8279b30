"""Printed lines that describe tensors. The tensors are not changed."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..config.hook_specs import PrintSpec
from ..tables.statistics import COUNTS
from ..values.nested import shape_of
from .base import Action, Context, Rows
from .measurement import Measurement


class Print(Action):
    """The print action of a spec."""

    def __init__(self, spec: PrintSpec, rows: Rows) -> None:
        self.measurement = Measurement(spec)
        self.rows = rows

    def __call__(self, tensor: Tensor, context: Context) -> None:
        dtype = str(tensor.dtype).removeprefix("torch.")
        text = f"{_location(context)}  {list(shape_of(tensor))} {dtype} {tensor.device}"
        measured = self.measurement(tensor, context, self.rows.memory(tensor.device))
        measured.holds = context.holds
        custom = self.measurement.custom_numbers(tensor, context)
        self.rows.add_line(context, text, self.measurement.names, measured, custom)


def _location(context: Context) -> str:
    """Describe a call: hook, step, layer and role, and what differs from the usual first call."""
    moment = context.moment
    indices = {
        "micro-step": moment.micro_step,
        "rank": context.rank,
        "call": context.call,
        "gradient": context.backward,
    }
    phase = "" if moment.phase == "train" else f"{moment.phase} "
    others = "".join(f" {name} {index}" for name, index in indices.items() if index)
    role = f"{context.role} {context.path}".rstrip()
    return f"{context.hook}  {phase}step {moment.step}{others}  {context.layer or '.'}  {role}"


def line_of(text: str, names: Sequence[str], values: Sequence[float | None]) -> str:
    """Return the line for a tensor. Counts of NaN and infinities are omitted if they are zero."""
    cells = dict(zip(names, values, strict=True))
    shown = [
        f"{name} {'-' if value is None else value if name == 'fingerprint' else f'{value:.4g}'}"
        for name, value in cells.items()
        if name not in COUNTS
    ]
    shown += [
        f"{cells[name]:,.0f} {text}" for name, text in (("nan_count", "NaN"), ("inf_count", "Inf")) if cells.get(name)
    ]
    return "  ".join([text, *shown])
