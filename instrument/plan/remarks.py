"""Remarks about a model and a plan that are not errors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import nn

from ..formatting import shorten
from ..tables.statistics import MAGNITUDES, statistic_of
from .hook_plan import HookPlan


@dataclass(frozen=True)
class Remark:
    """One remark. It is printed with the plan and written to `events`.

    Attributes:
        rule: The topic: hidden_module, structure, fast_path, statistics.
        layer: The layer; None for several.
    """

    rule: str
    layer: str | None
    message: str
    severity: Literal["info", "warning"]


def remarks(plan: HookPlan) -> Iterator[Remark]:
    """Yield remarks about modules that PyTorch cannot find, optional specs that are left out, fast paths that hooks disable, and
    statistics that no kernel computes.
    """
    for location, message in plan.layers.hidden_messages():
        yield Remark("hidden_module", location, message, "warning")
    for name, spec in plan.specs.items():
        if spec.optional and not plan.of(name):
            kind = "" if spec.definition.family == "module" else " with parameters"
            message = f"hook {name!r} is left out: the model has no {' or '.join(spec.structure)}{kind}"
            yield Remark("structure", None, message, "info")
    affected = fast_paths(plan)
    if affected:
        message = (
            f"hooks inside {shorten(affected, 4)} disable PyTorch's fast path for evaluations without gradients; the values "
            "are the same up to rounding"
        )
        yield Remark("fast_path", affected[0] if len(affected) == 1 else None, message, "info")
    statistics = dict.fromkeys(name for spec in plan.specs.values() for name in getattr(spec, "statistics", ()))
    needs = {name: statistic_of(name).needs for name in statistics}  # some are sums that no kernel forms
    if again := [
        name for name in needs if any(need.term is not None and need is not MAGNITUDES for need in needs[name])
    ]:
        message = (
            f"PyTorch operations compute {', '.join(again)} in addition to the kernel; they read each tensor again"
        )
        yield Remark("statistics", None, message, "info")


def fast_paths(plan: HookPlan) -> list[str]:
    """Return the transformer encoder layers whose fast path PyTorch does not use, because modules inside them have hooks.

    Hooks on the functions of a module need hooks on all attention modules inside it; see `instrument.plan.mode_pauses`.
    """
    sites = [site for site in plan.sites if site.spec.definition.family == "module"]
    hooked = {id(site.layer.module) for site in sites}
    of_functions = [site.layer.module for site in sites if site.spec.definition.of_functions]
    hooked |= {id(part) for module in of_functions for part in module.modules()}
    return [
        layer.label
        for layer in plan.layers
        if isinstance(layer.module, nn.TransformerEncoderLayer)
        and any(id(module) in hooked for module in layer.module.modules())
    ]
