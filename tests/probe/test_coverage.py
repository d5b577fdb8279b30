"""Coverage rows, and the warnings derived from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import instrument
from instrument.probe.coverage import NEVER_DUE, coverage_warnings
from instrument.tables.reasons import FROZEN, NO_INPUT_GRAPH


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


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:FutureWarning", "ignore::instrument.InstrumentWarning")
@pytest.mark.parametrize("kind", ["forward", "full_backward", "parameter_grad_micro"])
def test_torchscript_modules_have_a_reason_and_parameter_hooks(kind: str) -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    model = nn.Sequential(scripted, nn.Linear(4, 2))
    hooks = {"r": {"layers": "**", "kind": kind, "action": "record"}}
    with instrument.attach(model, hooks, rules=None) as probe:
        model(torch.ones(2, 4)).sum().backward()
        probe.end_step()
    if kind == "parameter_grad_micro":
        found = {f"{row.layer}.{row.path}": row.l2 for row in probe.stats.itertuples()}
        assert found == pytest.approx({name: p.grad.norm().item() for name, p in model.named_parameters()}, rel=1e-5)
        return
    causes = {row["layer"]: row["cause"] for row in probe.coverage()}
    assert [layer for layer, cause in causes.items() if "TorchScript" in cause] == ["0", "0.0", "0.1"]
    assert "1" in set(probe.stats["layer"])
