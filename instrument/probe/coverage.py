"""The tables `layers` and `coverage`: the modules of a model; which hooks fired as often as expected, and why others did not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ..hooks.attached_hook import AttachedHook
from ..plan.hook_plan import HookPlan
from ..plan.modules import Layers
from ..tables import reasons
from ..tables.kinds import ATTENTION_ROLES
from ..tables.sink_interface import EventWriter, Row
from .program_settings import module_settings
from .recorder import Recorder, count_at_site


class FrozenLayers(Container[str]):
    """The names of the modules whose own parameters are all frozen at the time of a test. A program may freeze them during the run."""

    def __init__(self, plan: HookPlan) -> None:
        self._layers = {layer.name: layer for layer in plan.layers}

    def __contains__(self, name: object) -> bool:
        layer = self._layers.get(name) if isinstance(name, str) else None
        own = [parameter for _, parameter in layer.own_parameters()] if layer is not None else []
        return bool(own) and not any(parameter.requires_grad for parameter in own)


def layer_rows(plan: HookPlan, optimizers: Sequence[Optimizer], graph: Mapping[str, Mapping[str, str]]) -> list[Row]:
    """Return the rows of the `layers` table: one per module of the model.

    Args:
        graph: The operators of the backward graphs of losses by layer; see `LossOperators`.
    """
    rows: list[Row] = []
    settings = module_settings(plan.layers, optimizers)
    for layer in plan.layers:
        parameters = layer.counted_parameters()
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        hooks = list(dict.fromkeys(site.spec.name for site in plan.at(layer)))
        sizes = (
            None if any(is_lazy(parameter) for parameter in group) else sum(parameter.numel() for parameter in group)
            for group in (parameters, trainable)
        )
        name = layer.name
        own = {**settings[name], **graph.get(name, {})}
        rows.append((name, list(layer.aliases), layer.type, layer.depth, *sizes, hooks, own))
    return rows


def coverage_rows(
    attached_hooks: Sequence[AttachedHook],
    layers: Layers,
    dropped: Mapping[tuple[str, str, str], int],
    *,
    running: bool,
    never_turned_on: Collection[str] = (),
) -> list[dict[str, Any]]:
    """Return one row per site, with the columns of the coverage table.

    Args:
        dropped: The number of dropped tensors, by hook, layer and path.
        running: Whether a step is incomplete. Its scheduled hooks are not counted as missed.
        never_turned_on: The hooks that wait for a rule that did not fire.
    """
    firing = {attached.site.spec.name for attached in attached_hooks if attached.fired}
    complete: dict[str, set[int]] = {}  # the modules at which each hook fired as often as expected
    complete_kinds = {attached.site.spec.kind for attached in attached_hooks if attached.fired >= attached.expected > 0}
    for attached in attached_hooks:
        if attached.fired >= attached.expected:
            complete.setdefault(attached.site.spec.name, set()).add(id(attached.site.layer.module))
    fired_now = [min(attached.opportunities, attached.firings) for attached in attached_hooks]  # in an incomplete step
    return [
        {
            "hook": attached.site.spec.name,
            "layer": attached.site.layer.name,
            "module_type": attached.site.layer.type,
            "kind": attached.site.spec.kind,
            "role": attached.site.spec.tensor_role,
            "path": attached.site.own_name,
            "rank": attached.clock.rank,
            "expected": attached.expected + more,
            "fired": attached.fired + more,
            "dropped": count_at_site(dropped, attached),
            "cause": ""
            if running and attached.is_scheduled and not attached.expected and (more or not attached.exemptions)
            else reasons.NOT_TURNED_ON
            if attached.site.spec.name in never_turned_on
            else _reason(attached, layers, firing, complete.get(attached.site.spec.name, ()), complete_kinds),
        }
        for attached, more in zip(attached_hooks, fired_now, strict=True)
    ]


def _reason(
    attached: AttachedHook,
    layers: Layers,
    firing: Collection[str],
    complete: Collection[int],
    complete_kinds: Collection[str],
) -> str:
    """Return why a site fired less often than expected, or was not expected to fire. Empty if it fired as expected.

    The most frequent reason comes first.

    Args:
        firing: The names of the hooks that fired.
        complete: The ids of the modules at which this hook fired as often as expected.
        complete_kinds: The kinds of which a hook fired as often as expected. Without one, the loss of a whole forward pass may be unused.
    """
    if attached.role in ATTENTION_ROLES and attached.site.spec.name in firing and _has_no_attention(attached):
        return reasons.ATTENTION_ELSEWHERE
    if attached.expected:
        reported = attached.reasons.most_common() if attached.fired < attached.expected else ()
        found = dict.fromkeys(_refined_reason(reason, attached, layers, complete) for reason, _ in reported)
        if [*found] == [reasons.NO_GRADIENT_OF_CALL] and attached.site.spec.kind not in complete_kinds:
            return reasons.NO_GRADIENT
        return "; ".join(found)
    if attached.exemptions:
        spec = attached.site.spec
        if attached.exemptions.keys() <= {reasons.NO_FUNCTION, reasons.NO_VISIBLE_FUNCTION, reasons.NO_ATTENTION}:
            if spec.name in firing:
                return reasons.ONLY_IN_OTHER_MODULES
            if spec.optional:
                return reasons.NO_OPTIONAL_FUNCTION
        return "; ".join(reason for reason, _ in attached.exemptions.most_common())
    phase = attached.site.spec.phase
    is_entered = attached.was_ever_scheduled or phase in attached.clock.phases
    return reasons.NEVER_DUE if is_entered else reasons.phase_never_entered(phase)


def _has_no_attention(attached: AttachedHook) -> bool:
    """Return whether a module computes no attention: it calls no function of it, or has no submodules and is not called."""
    is_leaf = next(attached.site.layer.module.children(), None) is None
    if attached.expected:
        return is_leaf and not attached.fired and attached.reasons.keys() <= {reasons.NOT_CALLED}
    no_attention = {reasons.NO_ATTENTION, reasons.NOT_ATTENTION}
    return bool(attached.exemptions) and attached.exemptions.keys() <= no_attention


def _refined_reason(reason: str, attached: AttachedHook, layers: Layers, complete: Collection[int]) -> str:
    """Refine a reason by what is known at the end of the run; see `_reason`."""
    if (elsewhere := reasons.in_another_phase(reason, attached.site.spec.phase, attached.other_phases)) is not None:
        return elsewhere
    if attached.site.layer.is_script and reason == reasons.default_reason(attached.site.spec.definition):
        return reasons.SCRIPT if attached.site.parameter is None else reason
    if reason != reasons.NOT_CALLED:
        return reason
    layer = attached.site.layer
    if layers.is_inlined(layer):
        return reasons.INLINED
    if type(layer.module).__call__ is not nn.Module.__call__:
        return reasons.OWN_CALL
    parents = layers.parents(layer)
    found = reasons.fused_attention_reason(layer.module, parents)
    if found == reasons.PROJECTION and id(parents[0]) in complete and layer.name not in attached.site.spec.globs:
        return reasons.PROJECTION_OF_MATCHED_ATTENTION
    if found is None and attached.fired and not attached.copied:
        return reasons.NOT_ALWAYS_CALLED
    return found or (reasons.NOT_CALLED_COPIED if attached.copied else reason)


def write_coverage(rows: Sequence[dict[str, Any]], recorder: Recorder, event: EventWriter) -> None:
    """Write the coverage table, and the events about hooks that fired too rarely and about dropped tensors."""
    recorder.write("coverage", [(*row.values(),) for row in rows])
    for message, layer in coverage_warnings(rows):
        event("coverage", message, layer=layer)
    dropped: Counter[str] = Counter()
    for row in rows:
        dropped[row["hook"]] += row["dropped"]
    for hook, count in (+dropped).items():
        event(
            "dropped",
            f"hook '{hook}': {count} recorded tensors were dropped, because they arrived faster than they could be written, or "
            "because a custom sink refused them; set sink.when_full: wait to wait for the disk",
        )


def coverage_warnings(rows: Sequence[dict[str, Any]]) -> list[tuple[str, str | None]]:
    """Return one warning per hook and reason with the affected layers, and the layer if it is only one."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if reasons.is_incomplete(row):
            groups.setdefault((row["hook"], row["kind"], row["cause"]), []).append(row)
    warnings: list[tuple[str, str | None]] = []
    for (hook, kind, reason), group in groups.items():
        locations = [".".join(part for part in (row["layer"], row["path"]) if part) or "." for row in group]
        shown = ", ".join(locations[:5]) + (f" and {len(locations) - 5} more" if len(locations) > 5 else "")
        fired, expected = sum(row["fired"] for row in group), sum(row["expected"] for row in group)
        summary = f"fired {fired} of {expected} times" if expected else "did not fire"
        layer = group[0]["layer"] if len(group) == 1 else None
        warnings.append((f"hook '{hook}' ({kind}) {summary} on {shown}: {reason}", layer))
    return warnings
