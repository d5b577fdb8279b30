"""Recording of a tensor's statistics, distribution and values, and printed lines that describe it. The tensor is not changed."""

from __future__ import annotations

from collections.abc import Sequence
from pkgutil import resolve_name

import torch
from torch import Tensor

from ..config.hook_specs import PrintSpec, RecordSpec
from ..stats.casts import Casts
from ..stats.exact_integers import integer_extremes
from ..stats.table_rows import Measure, measure_of_call
from ..tables.schemas import TABLES
from ..tables.statistics import COUNTS
from ..values.nested import shape_of
from ..values.sparse import first_elements, is_sparse
from .base import Action, Context, Rows
from .intervention import describe
from .measurement import Measurement, to_dense


def select_part(tensor: Tensor, spec: RecordSpec) -> Tensor:
    """Return the part that a spec keeps, as a view: first its number of samples, then `max_elements` of the flattened tensor."""
    part = tensor
    if isinstance(spec.samples, int) and spec.slice is None and part.dim():
        part = part[: spec.samples]
    if spec.max_elements is not None and part.numel() > spec.max_elements:
        part = part.reshape(-1)[: spec.max_elements]
    return part


class Record(Action):
    """The record action of a spec."""

    def __init__(self, spec: RecordSpec, rows: Rows) -> None:
        self.spec = spec
        self.rows = rows
        self.measurement = Measurement(spec)
        requested = ((TABLES[name], values) for name, values in spec.tables.items())
        # By table, the number of dimensions that its rows need, and what computes them.
        self.tables: dict[str, tuple[int, Measure]] = {
            table.name: (table.least_dimensions, resolve_name(table.measured_by)(**values))
            for table, values in requested
        }
        self.dtype: torch.dtype | None = None if spec.dtype is None else getattr(torch, spec.dtype)

    def __call__(self, tensor: Tensor, context: Context) -> None:
        merges = self.rows.merges(context)
        names = self.measurement.names
        if names:
            casts = self.tables.get("casts", (0, None))[1]
            casts = casts.of_call(tensor, context) if isinstance(casts, Casts) else None
            cast_of = None if casts is None else casts.cast_of
            measured = self.measurement(tensor, context, self.rows.memory(tensor.device), cast_of)
            measured.holds = context.holds
            context.measured = measured
            measured.exact_extremes = integer_extremes(tensor, names, measured, is_part=merges)
            if merges:
                self.rows.add_part(context, names, measured, self.measurement.dead_units(tensor, context))
            else:
                custom = self.measurement.custom_numbers(tensor, context)
                self.rows.add_stats(context, shape_of(tensor), names, measured, custom)
        for table, (least_dimensions, measure) in self.tables.items():
            if tensor.dim() >= least_dimensions and (of_call := measure_of_call(measure, tensor, context)) is not None:
                self.rows.add_row(table, context, of_call, tensor)
        if self.spec.tensors:
            limit = None if isinstance(self.spec.samples, int) else self.spec.max_elements
            if limit is not None and is_sparse(tensor) and tensor.numel() > limit:
                source_shape, kept = tuple(tensor.shape), first_elements(tensor.detach(), limit)
            else:
                plain = to_dense(tensor, describe(context))
                source_shape = plain.shape if context.selection is None else context.selection.shape
                kept = select_part(plain, self.spec)
            dtype = self.dtype
            # Converting a complex tensor would keep only the real part, and int8 only the last bits of integers.
            if kept.is_complex() or (dtype == torch.int8 and not kept.is_floating_point()):
                dtype = None
            if dtype is None and not self.spec.statistics:
                dtype = kept.dtype  # it is stored as bytes
            self.rows.add_tensor(context, source_shape, kept, dtype)


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
