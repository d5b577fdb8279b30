"""The cells of rows: of measured values, of effects, and of the `layers` table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..actions.base import Context, Effect
from ..plan.hook_plan import HookPlan
from ..spec.statistics import ALL, STATISTICS
from ..stats.device_numbers import DeviceNumbers
from ..stats.measure import positions
from .sink_interface import Row

_COUNTS = frozenset(ALL.index(name) for name, statistic in STATISTICS.items() if statistic.unit == "count")


def identity_columns(context: Context) -> Row:
    """Return the identity columns of a row: when and where it was recorded."""
    return (*context.moment, *context.site)


def fetched_statistics(names: tuple[str, ...], values: Sequence[float]) -> list[float | None]:
    """Convert numbers from a tensor, where all are floats and NaN means no value, to the columns of the statistics."""
    row: list[float | None] = [None] * len(ALL)
    for at, value in zip(positions(names), values, strict=True):
        if not math.isnan(value):
            row[at] = int(value) if at in _COUNTS else value
    return row


def effect_cells(effect: Effect, fetched: Iterator[list[float]]) -> Row:
    """Return the columns of an intervention's effect. Numbers from a device come from `fetched`."""
    measures = effect.measures.values(fetched) if isinstance(effect.measures, DeviceNumbers) else effect.measures
    factor = next(fetched)[0] if isinstance(effect.factor, Tensor) else effect.factor
    changed, before, after = measures
    assert changed is not None, "a count always has a value"
    return changes(effect.numel, int(changed), before, after, factor)


def changes(numel: int, changed: int, before: float | None, after: float | None, factor: float | None) -> Row:
    """Return the columns of an effect. A NaN norm becomes None."""
    before = None if before is None or math.isnan(before) else before
    after = None if after is None or math.isnan(after) else after
    return (numel, changed, changed / numel if numel else 0.0, before, after, factor)


def has_lazy_parameters(model: nn.Module) -> bool:
    """Return whether some parameters have no shape yet, because their module has not run."""
    return any(is_lazy(parameter) for parameter in model.parameters())


def layer_rows(plan: HookPlan) -> list[Row]:
    """Return the rows of the `layers` table: one per module of the model."""
    rows: list[Row] = []
    for layer in plan.layers:
        parameters = [parameter for _, parameter in layer.own_parameters()]
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        hooks = list(dict.fromkeys(site.spec.name for site in plan.at(layer)))
        sizes = (
            None if any(is_lazy(parameter) for parameter in group) else sum(parameter.numel() for parameter in group)
            for group in (parameters, trainable)
        )
        rows.append((layer.name, list(layer.aliases), layer.type, layer.depth, *sizes, hooks))
    return rows
