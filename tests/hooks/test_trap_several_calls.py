"""Trap: one module, several calls in a step: in sequence, under two names, or recursively."""

from __future__ import annotations

import pytest
import torch
from hook_locations import LOCATIONS, record_hooks
from torch import Tensor, nn

import instrument


class Nested(nn.Module):
    """A module that calls itself `depth` times, and keeps inputs and outputs by call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.call_inputs: list[Tensor] = []
        self.call_outputs: dict[int, Tensor] = {}

    def forward(self, x: Tensor, depth: int = 3) -> Tensor:
        call = len(self.call_inputs)
        x.retain_grad()
        self.call_inputs.append(x)
        out = self.linear(x).tanh()
        if depth:
            out = self(out, depth - 1) * 1.5
        out.retain_grad()
        self.call_outputs[call] = out
        return out


def test_recursive_module_has_rows_of_every_call() -> None:
    torch.manual_seed(0)
    model = Nested()
    with instrument.attach(model, record_hooks(LOCATIONS, ".")) as probe:
        model(torch.randn(2, 3, requires_grad=True)).square().sum().backward()
        probe.end_step()
    rows = {(row["hook"], row["call"]): row["values"] for row in probe.sink.records("tensors")}
    wanted = {}
    for call, call_input in enumerate(model.call_inputs):
        result = model.call_outputs[call]
        wanted |= {
            ("forward_pre_input", call): call_input,
            ("forward_output", call): result,
            ("full_backward_pre_grad_output", call): result.grad,
            ("full_backward_grad_output", call): result.grad,
            ("tensor_output", call): result.grad,
            ("full_backward_grad_input", call): call_input.grad,
            ("tensor_input", call): call_input.grad,
        }
    assert rows.keys() == wanted.keys()
    assert len(rows) == 7 * 4
    assert all(torch.equal(rows[key], wanted[key]) for key in wanted)
    assert all((row["fired"], row["expected"]) == (4, 4) for row in probe.coverage())
    assert not probe.warnings


@pytest.mark.parametrize("kind", ["full_backward", "full_backward_pre", "tensor"])
def test_intervention_on_a_recursive_module_applies_to_every_call(kind: str) -> None:
    torch.manual_seed(0)
    model = Nested()
    batch = torch.randn(2, 3, requires_grad=True)
    specs = {"double": {"layers": ".", "kind": kind, "action": "scale", "factor": 2.0}}
    baseline = torch.autograd.grad(model(batch).sum(), batch)[0]
    with instrument.attach(model, specs) as probe:
        model(batch).sum().backward()
        probe.end_step()
    assert torch.equal(batch.grad, baseline * 2.0**4)
    assert sorted(row["call"] for row in probe.sink.records("effects")) == [0, 1, 2, 3]


def test_module_with_two_names_is_hooked_once() -> None:
    shared = nn.Linear(3, 3)
    model = nn.Sequential(shared, nn.Tanh(), shared)
    with instrument.attach(model, record_hooks(LOCATIONS, "2")) as probe:
        model(torch.randn(2, 3, requires_grad=True)).sum().backward()
        probe.end_step()
    table = probe.sink.frame("tensors")
    assert (table.groupby(["hook", "call"]).size() == 1).all()
    assert table.groupby("hook").call.apply(sorted).tolist() == [[0, 1]] * len(LOCATIONS)
    assert set(table.layer) == {"0"}  # the first of its names; `layers` has both
    (row,) = [row for row in probe.sink.records("layers") if row["layer"] == "0"]
    assert list(row["aliases"]) == ["2"]


def test_tied_weights_match_all_their_names() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh(), nn.Linear(3, 3, bias=False))
    model[2].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    specs = {
        kind: {"layers": "2", "kind": kind, "action": "record"}
        for kind in ("parameter_grad", "parameter_grad_micro", "post_accumulate_grad")
    }
    with instrument.attach(
        model,
        {**specs, "half": {"layers": ["0", "2"], "kind": "parameter_grad", "action": "scale", "factor": 0.5}},
        optimizer=optimizer,
    ) as probe:
        model(torch.randn(2, 3)).sum().backward()
        gradient = model[0].weight.grad.clone()
        optimizer.step()
        probe.end_step()
    assert torch.equal(model[0].weight.grad, gradient * 0.5)
    assert probe.sink.frame("stats").groupby("hook").size().to_dict() == dict.fromkeys(specs, 1)
