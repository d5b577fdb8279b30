"""The identity columns of rows, and the rows of the `layers` table."""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import is_lazy

from ..actions.base import Context
from ..plan.hook_plan import HookPlan
from ..tables.sink_interface import Row


def identity_columns(context: Context) -> Row:
    """Return the identity columns of a row: when and where it was recorded."""
    return (*context.moment, *context.site)


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
