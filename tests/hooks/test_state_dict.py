"""Kinds around saving and loading: what they record and change, while live weights stay unchanged."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hook_runs import record, run_steps, scale
from torch import nn

import instrument
from instrument import Probe


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def stats(probe: Probe, hook: str = "seen") -> dict[str, float]:
    rows = [row for row in probe.sink.records("stats") if row["hook"] == hook]
    return {".".join([row["layer"], row["path"]]): row["mean"] for row in rows}


@pytest.mark.spread(2)
@pytest.mark.parametrize("kind", ["state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"])
def test_every_state_dict_entry_is_recorded(kind: str) -> None:
    model, _ = make()
    seen = stats(run_steps(model, {"seen": record(kind, "**")}, lambda: model.load_state_dict(model.state_dict())))
    assert seen == pytest.approx({name: value.double().mean().item() for name, value in model.state_dict().items()})


def scaled(kind: str, **more: Any) -> dict[str, Any]:
    return {"s": scale(kind, 2.0, "0", params="weight", **more)}


def test_saved_state_is_changed_and_live_weights_are_not() -> None:
    model, _ = make()
    before = copy.deepcopy(model.state_dict())
    with instrument.attach(model, scaled("state_dict_post")) as probe:
        state = model.state_dict()
        probe.end_step()
    assert torch.equal(state["0.weight"], 2 * before["0.weight"])
    assert torch.equal(state["0.bias"], before["0.bias"])
    assert torch.equal(model[0].weight, before["0.weight"])
    assert [row["factor"] for row in probe.sink.records("effects")] == [2.0]


def test_loaded_state_is_changed_and_the_argument_is_not() -> None:
    model, _ = make()
    state = copy.deepcopy(model.state_dict())
    passed = dict(state)
    run_steps(model, scaled("load_state_dict_pre"), lambda: model.load_state_dict(passed))
    assert torch.equal(model[0].weight, 2 * state["0.weight"])
    assert passed["0.weight"] is state["0.weight"]


def test_optimizer_state_is_recorded_when_saved_and_loaded() -> None:
    model, optimizer = make()
    live = optimizer.state[model[0].weight]["exp_avg"].clone()
    hooks = {
        "seen": record("state_dict_pre", "**", role="state.exp_avg"),
        **scaled("state_dict_post", role="state.exp_avg"),
    }
    with instrument.attach(model, hooks, optimizer=optimizer) as probe:
        saved = optimizer.state_dict()
        probe.end_step()
    assert set(stats(probe)) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert torch.equal(saved["state"][0]["exp_avg"], 2 * live)
    assert torch.equal(optimizer.state[model[0].weight]["exp_avg"], live)
    loading = scaled("load_state_dict_pre", role="state.exp_avg")
    run_steps(model, loading, lambda: optimizer.load_state_dict(saved), optimizer=optimizer)
    assert torch.equal(optimizer.state[model[0].weight]["exp_avg"], 4 * live)
    assert torch.equal(saved["state"][0]["exp_avg"], 2 * live)


def test_missing_state_dict_call_is_reported() -> None:
    model, _ = make()
    (row,) = run_steps(model, scaled("state_dict_post"), lambda: None).coverage()
    assert (row["expected"], row["fired"]) == (1, 0)
    assert row["cause"] == "no state dict was created while the hook was scheduled"


def test_copy_of_the_model_saves_its_own_weights() -> None:
    model, _ = make()
    with instrument.attach(model, scaled("state_dict_post")):
        other = copy.deepcopy(model)
        assert torch.equal(other.state_dict()["0.weight"], model[0].weight)


def test_state_dict_hooks_are_removed() -> None:
    model, optimizer = make()
    hooks = {kind: record(kind, "**") for kind in ("state_dict_post", "load_state_dict_pre")}
    with instrument.attach(model, hooks, optimizer=optimizer):
        pass
    for module in model.modules():
        assert not module._state_dict_hooks
        assert not module._load_state_dict_pre_hooks
