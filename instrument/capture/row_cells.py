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
    held = bool(next(fetched)[0]) if isinstance(effect.held, Tensor) else effect.held
    changed, before, after = measures
    assert changed is not None, "a count always has a value"
    return changes(effect.numel, int(changed), before, after, factor, held)


def changes(
    numel: int, changed: int, before: float | None, after: float | None, factor: float | None, held: bool | None
) -> Row:
    """Return the columns of an effect. A NaN norm becomes None, and so does the factor if the condition did not hold."""
    before = None if before is None or math.isnan(before) else before
    after = None if after is None or math.isnan(after) else after
    factor = None if held is False else factor
    return (numel, changed, changed / numel if numel else 0.0, before, after, factor, held)


def has_lazy_parameters(model: nn.Module) -> bool:
    """Return whether some parameters have no shape yet, because their module has not run."""
    return any(is_lazy(parameter) for parameter in model.parameters())


def frozen_layers(plan: HookPlan) -> frozenset[str]:
    """Return the names of the modules whose own parameters are all frozen."""
    parameters = {layer.name: [parameter for _, parameter in layer.own_parameters()] for layer in plan.layers}
    return frozenset(
        name for name, own in parameters.items() if own and not any(parameter.requires_grad for parameter in own)
    )


def layer_rows(plan: HookPlan) -> list[Row]:
    """Return the rows of the `layers` table: one per module of the model."""
    rows: list[Row] = []
    for layer in plan.layers:
        parameters = layer.counted_parameters()
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        hooks = list(dict.fromkeys(site.spec.name for site in plan.at(layer)))
        sizes = (
            None if any(is_lazy(parameter) for parameter in group) else sum(parameter.numel() for parameter in group)
            for group in (parameters, trainable)
        )
        rows.append((layer.name, list(layer.aliases), layer.type, layer.depth, *sizes, hooks))
    return rows
