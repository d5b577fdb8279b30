"""Grouping of sites: the sites at one location form one hook group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pkgutil import resolve_name
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..tables.statistics import NOISE
from .attached_hook import AttachedHook
from .clock import Clock
from .collectives import CollectiveHooks
from .functions import FunctionHooks, FunctionPauses, FunctionThreads
from .hook_group import HookGroup
from .loss import LossHooks
from .module_calls import Calls
from .module_hooks import ModuleHooks
from .optimizer import StepHooks
from .parameter_gradients import BoundaryHooks, GradientHooks
from .state_dict import OptimizerStateDictHooks, StateDictHooks

GroupType = type[Any]
"""A class of a `HookGroup`. Each has another constructor."""

Location = tuple[GroupType, int, bool, bool, bool]
_ON_MODULES = (ModuleHooks, FunctionHooks, StateDictHooks)  # TorchScript does not support them


def group_sites(
    attached_hooks: Sequence[AttachedHook],
    optimizers: Sequence[Optimizer],
    clock: Clock,
    *,
    steps_by_loop: bool = False,
    never_suspended: Collection[nn.Module] = (),
) -> Iterator[HookGroup]:
    """Yield the hook groups of all sites. They are not attached yet.

    Args:
        steps_by_loop: Whether the loop announces optimizer steps itself, because a hook on the optimizer would run too
            early.
        never_suspended: The modules whose hooks stay registered in steps without a scheduled site.
    """
    specs = {attached.site.spec.name: attached.site.spec for attached in attached_hooks}
    threads = FunctionThreads([spec for spec in specs.values() if spec.definition.of_functions], clock, {})
    early = _early_sites(attached_hooks)
    groups: dict[Location, list[AttachedHook]] = {}
    calls: defaultdict[nn.Module, Calls] = defaultdict(partial(Calls, clock))
    for attached in attached_hooks:
        groups.setdefault((*_location(attached), attached in early), []).append(attached)
        if attached.needs(NOISE):  # also of the gradients of micro-batches
            groups.setdefault((GradientHooks, id(attached.site.parameter), False, False, False), []).append(attached)
    # parameter_grad acts before step_pre, also if it is written after it. Early hooks are registered in the order in which hooks run,
    # from which suspended ones find their place.
    ordered = sorted(groups.items(), key=lambda group: (group[0][0] is StepHooks, not group[0][-1]))
    for (group_type, _, prepend, always_call, is_early), sites in ordered:
        layer = sites[0].site.layer
        module = layer.module
        if layer.is_script and group_type in _ON_MODULES:
            continue
        suspend = module not in never_suspended
        if group_type is ModuleHooks:
            options = {"prepend": prepend, "always_call": always_call, "early": is_early}
            yield ModuleHooks(sites, calls[module], suspend=suspend, **options)
        elif group_type is FunctionHooks:
            yield FunctionHooks(sites, calls[module], threads, suspend=suspend)
        elif group_type in (BoundaryHooks, StepHooks, OptimizerStateDictHooks):
            for optimizer in optimizers:
                yield group_type(optimizer, optimizers, sites, clock, steps_by_loop=steps_by_loop)
        elif group_type in (GradientHooks, LossHooks, StateDictHooks, CollectiveHooks):
            yield group_type(sites, clock)
        else:
            yield group_type(module, sites, clock)
    modules = [sites[0].site.layer.module for (group_type, *_), sites in groups.items() if group_type is FunctionHooks]
    if modules:  # after the hooks that activate the modes
        yield FunctionPauses(modules, clock, threads)


def _early_sites(attached_hooks: Sequence[AttachedHook]) -> set[AttachedHook]:
    """Return the sites that act on outputs before other code's hooks, which may collect them for the output of the model.

    These are the interventions on outputs, and the sites on the same outputs that precede them in the configuration.
    """
    early: set[AttachedHook] = set()
    changed: set[tuple[nn.Module, bool]] = set()
    for attached in reversed(attached_hooks):
        spec, key = attached.site.spec, (attached.site.layer.module, attached.site.spec.always_call)
        if (spec.kind, spec.tensor_role) != ("forward", "output") or "prepend" in spec.model_fields_set:
            continue
        if not attached.is_record_hook:
            changed.add(key)
        if key in changed:
            early.add(attached)
    return early


def _location(attached: AttachedHook) -> tuple[GroupType, int, bool, bool]:
    """Return the type of the hook group for a site, and the properties that its sites have in common."""
    spec, site = attached.site.spec, attached.site
    module = id(site.layer.module)
    if spec.definition.hooks is not None:
        return resolve_name(spec.definition.hooks), module, False, False
    match spec.definition.family:
        case "module" if spec.definition.of_functions:
            return FunctionHooks, module, False, False
        case "module":
            return ModuleHooks, module, spec.prepend, spec.always_call
        case "parameter" if spec.kind == "parameter_grad":
            return BoundaryHooks, 0, False, False
        case "parameter":
            return GradientHooks, id(site.parameter), False, False
        case "optimizer":
            return StepHooks, 0, False, False
        case "state_dict" if spec.tensor_role == "entry":
            return StateDictHooks, module, False, False
        case "state_dict":
            return OptimizerStateDictHooks, 0, False, False
        case "collective":
            return CollectiveHooks, 0, False, False
        case _:
            return LossHooks, 0, False, False
