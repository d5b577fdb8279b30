"""Rows that are known before the first step."""

from __future__ import annotations

from ..plan.sites import HookPlan
from .sink import Row


def layer_rows(plan: HookPlan) -> list[Row]:
    """The layers table: one row a module of the model."""
    rows: list[Row] = []
    for layer in plan.layers:
        parameters = [parameter for _, parameter in layer.own_parameters()]
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        hooks = list(dict.fromkeys(site.spec.name for site in plan.at(layer)))
        sizes = (sum(parameter.numel() for parameter in group) for group in (parameters, trainable))
        rows.append((layer.name, list(layer.aliases), layer.type, layer.depth, *sizes, hooks))
    return rows
