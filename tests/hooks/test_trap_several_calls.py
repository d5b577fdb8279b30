"""Trap: one module, several calls in a step: in sequence, under two names, or recursively."""

from __future__ import annotations

import pytest
import torch
from hook_locations import LOCATIONS, record_hooks
from hook_runs import counts, record, run_step, scale, tensors_by
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
    _, probe = run_step(
        model,
        record_hooks(LOCATIONS, "."),
        torch.randn(2, 3, requires_grad=True),
        loss=lambda output: output.square().sum(),
    )
    rows = tensors_by(probe, "hook", "call")
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
    assert counts(probe) == [(4, 4)] * len(LOCATIONS)
    assert not probe.warnings


@pytest.mark.parametrize("kind", ["full_backward", "full_backward_pre", "tensor"])
def test_intervention_on_a_recursive_module_applies_to_every_call(kind: str) -> None:
    torch.manual_seed(0)
    model = Nested()
    batch = torch.randn(2, 3, requires_grad=True)
    specs = {"double": scale(kind, 2.0)}
    baseline = torch.autograd.grad(model(batch).sum(), batch)[0]
    _, probe = run_step(model, specs, batch, loss=torch.sum)
    assert torch.equal(batch.grad, baseline * 2.0**4)
    assert sorted(row["call"] for row in probe.sink.records("effects")) == [0, 1, 2, 3]


def test_module_with_two_names_is_hooked_once() -> None:
    shared = nn.Linear(3, 3)
    model = nn.Sequential(shared, nn.Tanh(), shared)
    x = torch.randn(2, 3, requires_grad=True)
    _, probe = run_step(model, record_hooks(LOCATIONS, "2"), x, loss=torch.sum)
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
    specs = {kind: record(kind, "2") for kind in ("parameter_grad", "parameter_grad_micro", "post_accumulate_grad")}
    half = {"half": scale("parameter_grad", 0.5, ["0", "2"])}
    with instrument.attach(model, specs | half, optimizer=optimizer) as probe:
        model(torch.randn(2, 3)).sum().backward()
        gradient = model[0].weight.grad.clone()
        optimizer.step()
        probe.end_step()
    assert torch.equal(model[0].weight.grad, gradient * 0.5)
    assert probe.sink.frame("stats").groupby("hook").size().to_dict() == dict.fromkeys(specs, 1)
