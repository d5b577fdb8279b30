"""The plan: each spec matched with a model, as the sites where it acts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from instrument.config.parse import parse_hooks
from instrument.errors import ConfigError, Problem
from instrument.plan.hook_plan import HookPlan, check_not_frozen, make_plan


class Tied(nn.Module):
    """Two dense layers around a shared weight, and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embed.weight
        self.again = self.head

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.again(self.norm(self.embed(tokens)))


GRADIENTS = {"layers": "**", "kind": "parameter_grad"}
BUFFERS = {"kind": "step_post", "role": "buffer"}


def plan_of(model: nn.Module, **hooks: dict[str, Any]) -> HookPlan:
    return make_plan(parse_hooks({name: {"action": "record", **spec} for name, spec in hooks.items()}), model)


def labels(model: nn.Module, **spec: Any) -> list[str]:
    return [site.label for site in plan_of(model, mine=spec).sites]


def problems_of(model: nn.Module, **hooks: dict[str, Any]) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        check_not_frozen(plan_of(model, **hooks))
    return caught.value.problems


def problem_of(model: nn.Module, **spec: Any) -> Problem:
    (found,) = problems_of(model, mine=spec)
    return found


@pytest.mark.parametrize(
    ("spec", "found"),
    [
        ({"layers": "**", "kind": "forward"}, [".", "embed", "norm", "head"]),
        ({"layers": "again", "kind": "forward"}, ["head"]),
        ({"layers": ["head", "again"], "kind": "full_backward"}, ["head"]),
        ({"layers": "**", "kind": "parameter_grad"}, ["embed.weight", "norm.weight", "norm.bias", "head.bias"]),
        ({"layers": "head", "kind": "parameter_grad"}, ["head.weight", "head.bias"]),
        ({"layers": "**", "kind": "parameter_grad", "params": "weight"}, ["embed.weight", "norm.weight"]),
        ({"layers": "**", "kind": "post_accumulate_grad", "params": "b*"}, ["norm.bias", "head.bias"]),
        ({"types": "Linear", "kind": "step_post", "role": "update"}, ["head.weight", "head.bias"]),
        ({"layers": "**", **BUFFERS}, ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]),
        ({"layers": "norm", **BUFFERS, "params": "running_*"}, ["norm.running_mean", "norm.running_var"]),
        ({"layers": "**", "exclude": "head", "kind": "parameter_grad", "params": "bias"}, ["norm.bias"]),
    ],
)
def test_spec_has_one_site_per_module_or_parameter(spec: dict[str, Any], found: list[str]) -> None:
    model = Tied()
    assert labels(model, **spec) == found
    for site in plan_of(model, mine=spec).sites:
        if site.parameter is not None:
            assert site.parameter is model.get_parameter(site.label)
            assert (f"{site.layer.name}.{site.own_name}", site.note) == (site.label, "")


def test_tied_parameters_are_hooked_once() -> None:
    model = Tied()
    for layers in ("embed", "head", "again", "**", ["embed", "head"]):
        sites = plan_of(model, mine={"layers": layers, "kind": "parameter_grad", "params": "weight"}).sites
        assert [site for site in sites if site.parameter is model.head.weight] == [sites[0]]
    other = nn.Sequential(nn.Linear(2, 2), nn.Module())
    other[1].register_parameter("kernel", other[0].weight)
    assert labels(other, layers="0", kind="parameter_grad", params="kernel") == [
        "0.weight"
    ]  # its name in another module


def test_specs_keep_written_order_and_sites_model_order() -> None:
    plan = plan_of(
        Tied(),
        second={"layers": "head", "kind": "forward"},
        first={"layers": ["norm", "embed", "head"], "kind": "forward"},
    )
    assert list(plan.specs) == ["second", "first"]
    firsts = [("first", name) for name in ("embed", "norm", "head")]
    assert [(site.spec.name, site.label) for site in plan.sites] == [("second", "head"), *firsts]
    assert [site.label for site in plan.of("first")] == ["embed", "norm", "head"]
    head = plan.of("second")[0].layer
    assert [site.spec.name for site in plan.at(head)] == ["second", "first"]


def test_plan_does_not_change_the_model() -> None:
    model = Tied()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = torch.get_rng_state()
    plan_of(model, a={"layers": "**", "kind": "forward"}, b={"layers": "**", "kind": "parameter_grad"})
    assert all(value.equal(before[key]) for key, value in model.state_dict().items())
    assert torch.get_rng_state().equal(state)
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert all(not parameter._backward_hooks for parameter in model.parameters())


@pytest.mark.parametrize(
    ("spec", "where", "problem", "near"),
    [
        ({"layers": "hed", "kind": "forward"}, "layers", "this pattern matches no module", "head"),
        ({"layers": ".", "kind": "parameter_grad"}, "layers", "directly contains a parameter", "**"),
        ({**GRADIENTS, "params": "wieght"}, "params", "this pattern matches no parameter", "weight"),
        ({**GRADIENTS, "params": ["weight", "bais"]}, "params", "this pattern matches no parameter", "bias"),
        (
            {"layers": "**", **BUFFERS, "params": ["runing_mean"]},
            "params",
            "this pattern matches no buffer",
            "running_mean",
        ),
        ({"layers": "head", **BUFFERS}, "layers", "directly contains a buffer", ""),
        ({"layers": ".", "kind": "state_dict_pre"}, "layers", "directly contains an entry", "**"),
        (
            {"layers": "**", "types": "Lienar", "kind": "forward"},
            "types",
            "neither the model nor torch.nn has this class",
            "Linear",
        ),
    ],
)
def test_empty_match_is_reported_with_the_nearest(spec: dict[str, Any], where: str, problem: str, near: str) -> None:
    found = problem_of(Tied(), **spec)
    assert found.where == f"hooks.mine.{where}"
    assert problem in found.message
    assert list(found.similar[:1]) == ([near] if near else [])


def test_modules_without_parameters_are_named_with_those_that_have_some() -> None:
    found = problem_of(Tied(), layers=".", kind="parameter_grad")
    assert found.message == "none of the matched modules directly contains a parameter: ."
    assert found.allowed == "embed, norm, head"


def test_all_empty_matches_are_reported_at_once() -> None:
    found = problems_of(
        Tied(),
        a={"layers": "hed", "kind": "forward"},
        b={"layers": "**", "kind": "forward"},
        c={"layers": "**", "kind": "parameter_grad", "params": "w"},
    )
    assert [one.where for one in found] == ["hooks.a.layers", "hooks.c.params"]


@pytest.mark.parametrize(
    ("kind", "role"),
    [
        ("parameter_grad", None),
        ("post_accumulate_grad", None),
        ("step_post", "param_grad"),
        ("step_post", "update"),
        ("step_post", "state.exp_avg"),
    ],
)
def test_parameter_kind_on_frozen_parameters_is_refused(kind: str, role: str | None) -> None:
    model = Tied()
    model.norm.requires_grad_(False)
    found = problem_of(model, layers="norm", kind=kind, role=role)
    assert found.where == "hooks.mine.layers"
    assert "is frozen" in found.message
    assert found.given == "norm"
    assert "norm.weight, norm.bias" in found.allowed


@pytest.mark.parametrize(("layers", "written"), [(["head", "norm"], "norm"), (["norm.**", "head"], "norm.**")])
def test_each_pattern_has_to_match_a_trainable_parameter(layers: list[str], written: str) -> None:
    model = Tied()
    model.norm.requires_grad_(False)
    assert problem_of(model, layers=layers, kind="parameter_grad").given == written


def test_frozen_parameters_among_trainable_ones_are_noted() -> None:
    model = Tied()
    model.norm.requires_grad_(False)
    notes = {site.label: site.note for site in plan_of(model, mine={"layers": "**", "kind": "parameter_grad"}).sites}
    frozen = dict.fromkeys(("norm.weight", "norm.bias"), "the parameter is frozen")
    assert notes == {"embed.weight": "", **frozen, "head.bias": ""}


@pytest.mark.parametrize(("kind", "role"), [("step_post", "param"), ("step_post", "buffer"), ("forward", None)])
def test_kind_without_gradients_is_allowed_on_frozen_modules(kind: str, role: str | None) -> None:
    model = Tied().requires_grad_(False)
    assert plan_of(model, mine={"layers": "norm", "kind": kind, "role": role}).sites


def test_params_may_exclude_the_frozen_parameter() -> None:
    model = Tied()
    model.norm.weight.requires_grad_(False)
    assert labels(model, layers="norm", kind="parameter_grad", params="bias") == ["norm.bias"]
    assert "is frozen" in problem_of(model, layers="norm", kind="parameter_grad", params="weight").message


class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(2, 2)])
        self.named = nn.ModuleDict({"one": nn.Linear(2, 2)})
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(2))])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.named["one"](self.blocks[0](inputs)) * self.scales[0]


def test_container_is_no_site_of_forward_kinds() -> None:
    assert labels(Containers(), layers="**", kind="forward") == [".", "blocks.0", "named.one"]
    assert "scales.0" in labels(Containers(), **GRADIENTS)


def test_pattern_of_containers_only_suggests_their_children() -> None:
    problem = problem_of(Containers(), layers="blocks", kind="forward")
    assert problem.where == "hooks.mine.layers"
    assert "are containers, which are never called: " in problem.message
    assert not problem.allowed
    assert list(problem.similar) == ["blocks.*"]
    assert list(problem_of(Containers(), layers="blocks", kind="parameter_grad").similar) == ["blocks.**"]
