"""Coverage rows, and the warnings derived from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import instrument
from instrument.probe.coverage import coverage_warnings
from instrument.tables.reasons import (
    FROZEN,
    NEVER_DUE,
    NO_ARGUMENTS,
    NO_GRADIENT,
    NO_GRADIENT_OF_CALL,
    NO_INPUT_GRAPH,
    NO_OUTPUT_GRAPH,
)


def row(layer: str, fired: int, cause: str = "", **cells: Any) -> dict[str, Any]:
    given = {"hook": "h", "layer": layer, "kind": "forward", "path": "", "expected": 4, "fired": fired, "cause": cause}
    return {**given, **cells}


def test_each_hook_and_cause_has_one_warning() -> None:
    rows = [
        row("a", 4),
        row("excused", 0, NO_INPUT_GRAPH, expected=0),
        row("b", 1, "this"),
        row("c", 0, "this", path="bias"),
        row("d", 0, "that"),
        row("b", 0, "this", hook="k"),
        row("frozen", 0, FROZEN, expected=0),
        row("", 0, NEVER_DUE, expected=0),
    ]
    assert coverage_warnings(rows) == [
        ("hook 'h' (forward) fired 1 of 8 times on b, c.bias: this", None),
        ("hook 'h' (forward) fired 0 of 4 times on d: that", "d"),
        ("hook 'k' (forward) fired 0 of 4 times on b: this", "b"),
        (f"hook 'h' (forward) did not fire on frozen: {FROZEN}", "frozen"),
        (f"hook 'h' (forward) did not fire on .: {NEVER_DUE}", ""),
    ]


@pytest.mark.spread(2)
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


def test_module_whose_output_requires_no_gradient_is_the_reason() -> None:
    """Rotary embeddings, metrics and codebooks get hidden states, and return tensors without a graph."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.angles, self.unused = nn.Linear(4, 4), nn.Softmax(dim=1), nn.Linear(4, 4)
            self.angles.forward = torch.no_grad()(self.angles.forward)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            hidden = self.first(inputs)
            self.unused(hidden)
            return hidden * self.angles(hidden)

    model = Model()
    spec = {"layers": ["angles", "unused"], "kind": "full_backward", "action": "record"}
    with pytest.warns(instrument.InstrumentWarning), instrument.attach(model, {"r": spec}, rules=None) as probe:
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            probe.end_step()
    causes = {row["layer"]: (row["expected"], row["fired"], row["cause"]) for row in probe.coverage()}
    assert causes == {"angles": (2, 0, NO_OUTPUT_GRAPH), "unused": (2, 0, NO_GRADIENT)}


@pytest.mark.parametrize("kind", ["forward_pre", "forward", "full_backward", "tensor"])
def test_module_that_is_called_without_arguments_has_no_input(kind: str) -> None:
    model = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    role = "grad_input" if kind == "full_backward" else "input"
    spec = {"layers": "**", "kind": kind, "role": role, "action": "record"}
    with instrument.attach(model, {"r": spec}, rules=None) as probe:
        model(torch.ones(2, 3, requires_grad=True)).sum().backward()
        probe.end_step()
    causes = {row["layer"]: (row["expected"], row["fired"], row["cause"]) for row in probe.coverage()}
    assert causes.pop("parametrizations.weight") == (0, 0, NO_ARGUMENTS)
    assert all(cells == (1, 1, "") for cells in causes.values())
    assert not probe.warnings


@pytest.mark.parametrize("layers", [["adapter"], [".", "adapter"]])
@pytest.mark.parametrize("is_unused", [False, True])
def test_further_call_without_a_gradient_has_no_warning(
    is_unused: bool, layers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """DoRA calls its adapters a second time to compute the norm of the weight, which it detaches.

    If no other module has all gradients, the loss of a forward pass may be missing in the backward pass.
    """
    monkeypatch.setattr(
        "instrument.hooks.hook_coverage.has_compiled", lambda: False
    )  # an earlier test may have compiled code

    class Model(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            first = self.adapter(inputs)
            return first + self.adapter(inputs).detach() if is_unused else first + self.adapter(inputs)

    model = Model(2, 2)
    model.adapter = nn.Linear(2, 2)
    specs = {kind: {"layers": layers, "kind": kind, "action": "record"} for kind in ("tensor", "full_backward")}
    with instrument.attach(model, specs, rules=None) as probe:
        for _ in range(2):
            model(torch.ones(3, 2, requires_grad=True)).sum().backward()
            probe.end_step()
    is_alone = is_unused and layers == ["adapter"]
    expected = (4, 2, NO_GRADIENT if is_alone else NO_GRADIENT_OF_CALL) if is_unused else (4, 4, "")
    rows = [row for row in probe.coverage() if row["layer"] == "adapter"]
    assert [(row["expected"], row["fired"], row["cause"]) for row in rows] == [expected] * 2
    assert len(probe.warnings) == (2 if is_alone else 0)


def test_reason_of_earlier_steps_is_kept_in_an_incomplete_step() -> None:
    model = nn.Sequential(nn.Linear(4, 2))
    spec = {"layers": "0", "kind": "full_backward", "role": "grad_input", "action": "record"}
    with instrument.attach(model, {"r": spec}, rules=None) as probe:
        model(torch.ones(2, 4)).sum().backward()  # the input is data
        probe.end_step()
        model(torch.ones(2, 4))
    (coverage,) = probe.coverage()
    assert (coverage["expected"], coverage["fired"], coverage["cause"]) == (0, 0, NO_INPUT_GRAPH)
