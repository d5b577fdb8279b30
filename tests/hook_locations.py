"""The combinations of `kind` and `role` of module hooks, for parametrized tests."""

from __future__ import annotations

from typing import Any

LOCATIONS = [
    ("forward_pre", "input"),
    ("forward", "output"),
    ("full_backward_pre", "grad_output"),
    ("full_backward", "grad_input"),
    ("full_backward", "grad_output"),
    ("tensor", "output"),
    ("tensor", "input"),
]
GRADIENT_LOCATIONS = LOCATIONS[2:]
# The locations that interventions support.
INTERVENTION_LOCATIONS = [location for location in GRADIENT_LOCATIONS if location != ("full_backward", "grad_output")]


def record_hooks(locations: list[tuple[str, str]], layers: str = "**") -> dict[str, Any]:
    """Return hooks that record full tensors at pairs of `kind` and `role`. Their names are `kind_role`."""
    keep = {"layers": layers, "action": "record", "stats": "none", "tensors": True}
    return {f"{kind}_{role}": {"kind": kind, "role": role, **keep} for kind, role in locations}
