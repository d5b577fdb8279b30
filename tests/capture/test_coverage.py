"""Coverage rows, and the warnings derived from them."""

from __future__ import annotations

from typing import Any

from instrument.capture.coverage import NEVER_DUE, coverage_warnings
from instrument.kinds.reasons import FROZEN, NO_INPUT_GRAPH


def row(layer: str, fired: int, expected: int = 4, cause: str = "", path: str = "", hook: str = "h") -> dict[str, Any]:
    return {
        "hook": hook,
        "layer": layer,
        "kind": "forward",
        "path": path,
        "expected": expected,
        "fired": fired,
        "cause": cause,
    }


def test_full_coverage_gives_no_warning() -> None:
    assert coverage_warnings([row("a", 4), row("b", 0, expected=0, cause=NO_INPUT_GRAPH)]) == []


def test_hook_not_expected_to_fire_is_reported() -> None:
    (warning,) = coverage_warnings([row("b", 0, expected=0, cause=FROZEN)])
    assert warning == (f"hook 'h' (forward) did not fire on b: {FROZEN}", "b")


def test_each_hook_and_cause_has_one_warning() -> None:
    warnings = coverage_warnings(
        [
            row("a", 4),
            row("b", 1, cause="this"),
            row("c", 0, cause="this", path="bias"),
            row("d", 0, cause="that"),
            row("b", 0, cause="this", hook="k"),
        ]
    )
    assert warnings == [
        ("hook 'h' (forward) fired 1 of 8 times on b, c.bias: this", None),
        ("hook 'h' (forward) fired 0 of 4 times on d: that", "d"),
        ("hook 'k' (forward) fired 0 of 4 times on b: this", "b"),
    ]


def test_root_is_a_dot_and_unscheduled_hooks_are_reported() -> None:
    assert coverage_warnings([row("", 0, expected=0, cause=NEVER_DUE)]) == [
        (f"hook 'h' (forward) did not fire on .: {NEVER_DUE}", "")
    ]
