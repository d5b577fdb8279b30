"""The coverage table: which hooks fired as often as expected, and why others did not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ..kinds.attached import LiveSite
from ..kinds.reasons import NOT_CALLED, NOT_CALLED_COPIED, around, in_another_phase, never_entered
from ..plan.modules import Layer, Layers
from .recorder import at_site
from .tables import NEVER_DUE, is_silent


def coverage_rows(
    lives: Sequence[LiveSite], layers: Layers, dropped: Mapping[tuple[str, str, str], int], *, running: bool
) -> list[dict[str, Any]]:
    """Return one row per site, with the columns of the coverage table.

    Args:
        lives: The sites.
        layers: The modules of the model.
        dropped: The number of dropped tensors, by hook, layer and path.
        running: Whether a step is incomplete. Its scheduled hooks are not counted as missed.
    """
    return [
        {
            "hook": live.site.spec.name,
            "layer": live.site.layer.name,
            "module_type": live.site.layer.type,
            "kind": live.site.spec.kind,
            "role": live.site.spec.tensor_role,
            "path": live.site.own_name,
            "rank": live.clock.rank,
            "expected": live.expected,
            "fired": live.fired,
            "dropped": at_site(dropped, live),
            "cause": "" if running and live.due and not live.expected else _cause(live, layers),
        }
        for live in lives
    ]


def _cause(live: LiveSite, layers: Layers) -> str:
    """Return why a site fired less often than expected, or was not expected to fire. Empty if it fired as expected.

    The most frequent reason comes first.
    """
    if live.expected:
        silent = live.fired < live.expected
        return "; ".join(dict.fromkeys(_known(cause, live, layers) for cause, _ in live.causes.most_common() if silent))
    if live.excuses:
        return "; ".join(cause for cause, _ in live.excuses.most_common())
    phase = live.site.spec.phase
    return NEVER_DUE if live.ever_due or phase in live.clock.phases else never_entered(phase)


def _known(cause: str, live: LiveSite, layers: Layers) -> str:
    """Refine a reason by what is known at the end of the run."""
    if (elsewhere := in_another_phase(cause, live.site.spec.phase, live.elsewhere)) is not None:
        return elsewhere
    if cause != NOT_CALLED:
        return cause
    layer = live.site.layer
    return around(layer.module, _parents(layer, layers)) or (NOT_CALLED_COPIED if live.copied else cause)


def _parents(layer: Layer, layers: Layers) -> list[nn.Module]:
    """Return the modules that contain a layer, innermost first."""
    names = [name.split(".") for name in layer.names if name]
    paths = {".".join(parts[:depth]) for parts in names for depth in range(len(parts))}
    inside = [other for other in layers if not paths.isdisjoint(other.names)]
    return [other.module for other in sorted(inside, key=lambda other: -other.depth)]


def coverage_warnings(rows: Sequence[dict[str, Any]]) -> list[tuple[str, str | None]]:
    """Return one warning per hook and reason with the affected layers, and the layer if it is only one."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if is_silent(row):
            groups.setdefault((row["hook"], row["kind"], row["cause"]), []).append(row)
    warnings: list[tuple[str, str | None]] = []
    for (hook, kind, cause), found in groups.items():
        places = [".".join(part for part in (row["layer"], row["path"]) if part) or "." for row in found]
        shown = ", ".join(places[:5]) + (f" and {len(places) - 5} more" if len(places) > 5 else "")
        fired, expected = sum(row["fired"] for row in found), sum(row["expected"] for row in found)
        told = f"fired {fired} of {expected} times" if expected else "did not fire"
        layer = found[0]["layer"] if len(found) == 1 else None
        warnings.append((f"hook '{hook}' ({kind}) {told} on {shown}: {cause}", layer))
    return warnings


def drop_warnings(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return one warning per hook with dropped tensors."""
    dropped: Counter[str] = Counter()
    for row in rows:
        dropped[row["hook"]] += row["dropped"]
    return [
        f"hook '{hook}': {count} recorded tensors were dropped, since they came faster than they could be written "
        "(sink.when_full: wait waits for the disk)"
        for hook, count in dropped.items()
        if count
    ]
