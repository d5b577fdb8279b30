"""The ledger of what should have fired and what did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..kinds.live import LiveSite
from .recorder import at_site
from .tables import NEVER_DUE


def coverage_rows(
    lives: Sequence[LiveSite], dropped: Mapping[tuple[str, str, str], int], *, running: bool
) -> list[dict[str, Any]]:
    """One row a site, in the order of the columns of the coverage table.

    Args:
        lives: The sites.
        dropped: How many tensors there was no room for, by hook, layer and path.
        running: Whether a step has begun that is not over; what is due in it is not held against anyone yet.
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
            "cause": live.cause or ("" if live.expected or (running and live.due) else NEVER_DUE),
        }
        for live in lives
    ]


def coverage_warnings(rows: Sequence[dict[str, Any]]) -> list[tuple[str, str | None]]:
    """One warning for each hook and cause, with the layers that it is about; and the layer, where it is just one."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if row["cause"] == NEVER_DUE or row["fired"] < row["expected"]:
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
    """One warning for each hook some of whose tensors were dropped."""
    dropped: Counter[str] = Counter()
    for row in rows:
        dropped[row["hook"]] += row["dropped"]
    return [
        f"hook '{hook}': {count} recorded tensors were dropped, since they came faster than they could be written "
        "(sink.when_full: wait waits for the disk)"
        for hook, count in dropped.items()
        if count
    ]
