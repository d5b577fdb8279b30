"""The rows of the `layers` table."""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import is_lazy

from ..plan.sites import HookPlan
from .sink import Row


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
