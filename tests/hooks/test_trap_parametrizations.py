"""Trap: a parametrization moves the weight of a layer into a submodule, or under other names. Hooks of the layer reach it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hook_runs import Calls, run_steps, scale, tensors_by
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm
from torch.nn.utils.parametrize import register_parametrization

import instrument
from instrument.config.parse import parse_hooks
from instrument.plan.hook_plan import make_plan
from instrument.plan.modules import Layers

RECORD = {"action": "record", "stats": "none", "tensors": True}


symmetric = functools.partial(Calls, lambda weight: weight.triu() + weight.triu(1).T)


class LowRank(nn.Module):
    """A parametrization with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Parameter(torch.randn(1, 4)), nn.Parameter(torch.randn(4, 1))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


def several(layer: nn.Module) -> nn.Module:
    for parametrization in (symmetric(), LowRank()):
        register_parametrization(layer, "weight", parametrization)
    return register_parametrization(layer, "bias", nn.Softplus())


def older_weight_norm(layer: nn.Module) -> nn.Module:
    with pytest.warns(FutureWarning, match="weight_norm"):
        return weight_norm(layer)


# The parameters of the layer by the names of PyTorch, and those of its weight.
PARAMETRIZED: dict[str, tuple[Callable[[nn.Module], nn.Module], set[str]]] = {
    "weight_norm": (parametrizations.weight_norm, {f"parametrizations.weight.original{i}" for i in (0, 1)}),
    "spectral_norm": (parametrizations.spectral_norm, {"parametrizations.weight.original"}),
    "orthogonal": (parametrizations.orthogonal, {"parametrizations.weight.original"}),
    "several": (
        several,
        {"parametrizations.weight.original", "parametrizations.weight.1.down", "parametrizations.weight.1.up"},
    ),
    "older weight_norm": (older_weight_norm, {"weight_g", "weight_v"}),
    "older spectral_norm": (spectral_norm, {"weight_orig"}),
    "prune": (lambda layer: prune.l1_unstructured(layer, "weight", amount=0.5), {"weight_orig"}),
}
CASES = pytest.mark.parametrize("name", PARAMETRIZED)


@pytest.fixture
def model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(PARAMETRIZED[name][0](nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 2))


def train(model: nn.Module, hooks: dict[str, Any]) -> tuple[instrument.Probe, torch.optim.Optimizer]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    batch = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    with instrument.attach(model, hooks, optimizer=optimizer, rules=None) as probe:
        model(batch).square().mean().backward()
        optimizer.step()
        probe.end_step()
    return probe, optimizer


@pytest.mark.spread(3)
@CASES
def test_clip_of_a_layer_includes_its_parametrized_weight(model: nn.Module) -> None:
    try:
        reference = copy.deepcopy(model)
    except RuntimeError:  # the older weight_norm and prune: PyTorch cannot copy the computed weight
        reference = None
    clip = {"layers": "0", "types": "Linear", "kind": "parameter_grad", "action": "clip", "norm": 1e-3}
    probe, _ = train(model, {"clip": clip})
    norms = [parameter.grad.norm() for parameter in model[0].parameters() if parameter.grad is not None]
    assert torch.stack(norms).norm().item() == pytest.approx(1e-3, rel=1e-4)
    assert {row["path"] for row in probe.sink.records("effects")} == dict(model[0].named_parameters()).keys()
    if reference is not None:
        train(reference, {"seen": {"layers": "2", "kind": "forward", "action": "record"}})
        nn.utils.clip_grad_norm_(reference[0].parameters(), 1e-3)
        for parameter, wanted in zip(model[0].parameters(), reference[0].parameters(), strict=True):
            assert torch.equal(parameter.grad, wanted.grad)


@pytest.mark.spread(3)
@CASES
def test_each_role_has_the_tensors_of_the_layer(model: nn.Module) -> None:
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    roles = ["param", "param_grad", "update", "state.exp_avg"]
    hooks = {
        role.removeprefix("state."): {"layers": "**", "kind": "step_post", "role": role, **RECORD} for role in roles
    }
    hooks |= {kind: {"layers": "**", "kind": kind, **RECORD} for kind in ("parameter_grad_micro", "parameter_grad")}
    if list(model.buffers()):
        hooks["buffer"] = {"layers": "0", "kind": "step_post", "role": "buffer", **RECORD}
    probe, optimizer = train(model, hooks)
    found: dict[str, dict[str, Tensor]] = {hook: {} for hook in hooks}
    for row in probe.sink.records("tensors"):
        found[row["hook"]][f"{row['layer']}.{row['path']}"] = row["values"]
        assert row["layer"] in ("0", "2")
        assert row["module_type"] == "Linear"
    parameters = {name: value for name, value in model.named_parameters() if value.grad is not None}
    wanted = {
        "param": {name: value.detach() for name, value in parameters.items()},
        "param_grad": {name: value.grad for name, value in parameters.items()},
        "update": {name: value.detach() - before[name] for name, value in parameters.items()},
        "exp_avg": {name: optimizer.state[value]["exp_avg"] for name, value in parameters.items()},
        "buffer": {name: value for name, value in model.named_buffers() if name.startswith("0.")},
    }
    wanted |= dict.fromkeys(("parameter_grad_micro", "parameter_grad"), wanted["param_grad"])
    for hook, tensors in found.items():
        assert tensors.keys() == wanted[hook].keys()
        assert all(torch.equal(tensor, wanted[hook][name]) for name, tensor in tensors.items()), hook
    assert all(row["fired"] == row["expected"] for row in probe.coverage())


@CASES
def test_params_weight_selects_what_determines_the_weight(model: nn.Module, name: str) -> None:
    hook = {"layers": "**", "exclude": "2", "kind": "parameter_grad", "params": "weight", "action": "record"}
    sites = make_plan(parse_hooks({"seen": hook}), model).sites
    assert {(site.layer.name, site.own_name) for site in sites} == {("0", own) for own in PARAMETRIZED[name][1]}


@pytest.mark.parametrize("name", ["weight_norm"])
@pytest.mark.parametrize(
    "fields",
    [
        {"layers": "0", "params": "weight.original0"},
        {"layers": "0", "params": "parametrizations.weight.original0"},
        {"layers": "0.parametrizations.**", "params": "original0"},
    ],
)
def test_one_part_of_a_parametrized_weight_has_several_names(model: nn.Module, fields: dict[str, str]) -> None:
    hooks = parse_hooks({"seen": {**fields, "kind": "parameter_grad", "action": "record"}})
    (site,) = make_plan(hooks, model).sites
    assert site.label == "0.parametrizations.weight.original0"
    assert site.parameter is model[0].parametrizations.weight.original0


@pytest.mark.spread(6)
@CASES
@pytest.mark.parametrize("kind", ["state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"])
def test_state_dict_hooks_of_a_layer_have_its_entries(model: nn.Module, kind: str) -> None:
    hook = {"layers": "0", "kind": kind, **RECORD}
    probe = run_steps(model, {"seen": hook}, lambda: model.load_state_dict(model.state_dict()), rules=None)
    found = {f"0.{path}": values for path, values in tensors_by(probe, "path").items()}
    wanted = {key: value for key, value in model.state_dict().items() if key.startswith("0.")}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], value) for key, value in wanted.items())


@pytest.mark.parametrize("name", ["weight_norm"])
def test_state_dict_intervention_changes_a_parametrized_entry(model: nn.Module) -> None:
    before = model[0].parametrizations.weight.original0.detach().clone()
    hook = scale("load_state_dict_pre", 2, "0", params="weight.original0")
    run_steps(model, {"scale": hook}, lambda: model.load_state_dict(model.state_dict()), rules=None)
    assert torch.equal(model[0].parametrizations.weight.original0, 2 * before)


@pytest.mark.spread(4)
@CASES
def test_parameters_are_counted_at_the_parametrized_layer(model: nn.Module) -> None:
    hook = {"layers": "0", "kind": "forward", "action": "record"}
    probe, _ = train(model, {"seen": hook})
    rows = {row["layer"]: row for row in probe.sink.records("layers")}
    assert rows["0"]["module_type"] == "Linear"
    assert rows["0"]["parameters"] == sum(value.numel() for value in model[0].parameters())
    assert sum(row["parameters"] for row in rows.values()) == sum(value.numel() for value in model.parameters())


@pytest.mark.parametrize("name", ["several"])
def test_frozen_part_of_a_parametrized_weight_is_reported(model: nn.Module) -> None:
    model[0].parametrizations.weight.original.requires_grad_(False)
    hook = {"layers": "0", "params": "weight", "kind": "parameter_grad", "action": "record"}
    probe, _ = train(model, {"seen": hook})
    causes = {row["path"]: row["cause"] for row in probe.coverage()}
    assert "frozen" in causes.pop("parametrizations.weight.original")
    assert list(causes.values()) == ["", ""]


def test_parametrized_buffer_belongs_to_its_layer() -> None:
    norm = nn.BatchNorm1d(4)
    register_parametrization(norm, "running_mean", nn.Identity())
    model = nn.Sequential(nn.Linear(4, 4), norm)
    hook = {"layers": "1", "params": "running_mean", "kind": "step_post", "role": "buffer", **RECORD}
    probe, _ = train(model, {"seen": hook})
    ((path, values),) = [(row["path"], row["values"]) for row in probe.sink.records("tensors")]
    assert path == "parametrizations.running_mean.original"
    assert torch.equal(values, norm.parametrizations.running_mean.original)


def test_layer_of_a_shared_parametrization_is_the_first_one() -> None:
    part = LowRank()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        register_parametrization(layer, "weight", part)
    sites = make_plan(parse_hooks({"a": {"layers": "**", "kind": "parameter_grad", "action": "record"}}), model).sites
    assert [site.label for site in sites if "original" not in site.label and "bias" not in site.label] == [
        "0.parametrizations.weight.0.down",
        "0.parametrizations.weight.0.up",
    ]
    assert {layer.owner.name for layer in Layers.of(model)} == {"", "0", "1"}
