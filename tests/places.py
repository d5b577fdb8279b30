"""Where hooks on modules can be: what suites go through."""

from __future__ import annotations

from typing import Any

PLACES = [
    ("forward_pre", "input"),
    ("forward", "output"),
    ("full_backward_pre", "grad_output"),
    ("full_backward", "grad_input"),
    ("full_backward", "grad_output"),
    ("tensor", "output"),
    ("tensor", "input"),
]
GRADIENTS = PLACES[2:]
CHANGES = [place for place in GRADIENTS if place != ("full_backward", "grad_output")]  # where an intervention can be


def records(places: list[tuple[str, str]], layers: str = "**") -> dict[str, Any]:
    """A hook at each place, named `kind_role`, that keeps whole tensors."""
    keep = {"layers": layers, "action": "record", "stats": "none", "tensors": True}
    return {f"{kind}_{role}": {"kind": kind, "role": role, **keep} for kind, role in places}
