"""The plan: each spec held against a model, as the sites where it will act."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from instrument.errors import ConfigError, Mistake
from instrument.plan.sites import HookPlan, make_plan, refuse_frozen
from instrument.spec.parse import parse_hooks


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


def plan_of(model: nn.Module, **hooks: dict[str, Any]) -> HookPlan:
    return make_plan(parse_hooks({name: {"action": "record", **spec} for name, spec in hooks.items()}), model)


def labels(model: nn.Module, **spec: Any) -> list[str]:
    return [site.label for site in plan_of(model, mine=spec).sites]


def mistakes(model: nn.Module, **hooks: dict[str, Any]) -> tuple[Mistake, ...]:
    with pytest.raises(ConfigError) as caught:
        refuse_frozen(plan_of(model, **hooks))
    return caught.value.mistakes


def mistake(model: nn.Module, **spec: Any) -> Mistake:
    (found,) = mistakes(model, mine=spec)
    return found


@pytest.mark.parametrize(
    ("spec", "found"),
    [
        ({"layers": "**", "kind": "forward"}, [".", "embed", "norm", "head"]),
        ({"layers": "again", "kind": "forward"}, ["head"]),
        ({"layers": ["head", "again"], "kind": "full_backward"}, ["head"]),
        (
            {"layers": "**", "kind": "parameter_grad"},
            ["embed.weight", "norm.weight", "norm.bias", "head.bias"],
        ),
        ({"layers": "head", "kind": "parameter_grad"}, ["head.weight", "head.bias"]),
        ({"layers": "**", "kind": "parameter_grad", "params": "weight"}, ["embed.weight", "norm.weight"]),
        ({"layers": "**", "kind": "post_accumulate_grad", "params": "b*"}, ["norm.bias", "head.bias"]),
        ({"types": "Linear", "kind": "step_post", "role": "update"}, ["head.weight", "head.bias"]),
        (
            {"layers": "**", "kind": "step_post", "role": "buffer"},
            ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"],
        ),
        (
            {"layers": "norm", "kind": "step_post", "role": "buffer", "params": "running_*"},
            ["norm.running_mean", "norm.running_var"],
        ),
        ({"layers": "**", "exclude": "head", "kind": "parameter_grad", "params": "bias"}, ["norm.bias"]),
    ],
)
def test_a_spec_has_one_site_at_each_module_or_parameter(spec: dict[str, Any], found: list[str]) -> None:
    assert labels(Tied(), **spec) == found


def test_a_site_at_a_parameter_holds_it() -> None:
    model = Tied()
    (site,) = plan_of(model, mine={"layers": "head", "kind": "parameter_grad", "params": "bias"}).sites
    assert (site.parameter, site.own_name, site.layer.name, site.note) == (model.head.bias, "bias", "head", "")


def test_tied_parameters_are_hooked_once_whichever_name_is_meant() -> None:
    model = Tied()
    for layers in ("embed", "head", "again", "**", ["embed", "head"]):
        sites = plan_of(model, mine={"layers": layers, "kind": "parameter_grad", "params": "weight"}).sites
        assert [site for site in sites if site.parameter is model.head.weight] == [sites[0]]


def test_a_tied_parameter_answers_to_the_own_name_that_it_has_elsewhere() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Module())
    model[1].register_parameter("kernel", model[0].weight)
    assert labels(model, layers="0", kind="parameter_grad", params="kernel") == ["0.weight"]


def test_specs_stay_in_the_order_written_and_sites_in_the_models() -> None:
    plan = plan_of(
        Tied(),
        second={"layers": "head", "kind": "forward"},
        first={"layers": ["norm", "embed", "head"], "kind": "forward"},
    )
    assert list(plan.specs) == ["second", "first"]
    assert [(site.spec.name, site.label) for site in plan.sites] == [
        ("second", "head"),
        ("first", "embed"),
        ("first", "norm"),
        ("first", "head"),
    ]
    assert [site.label for site in plan.of("first")] == ["embed", "norm", "head"]
    head = plan.of("second")[0].layer
    assert [site.spec.name for site in plan.at(head)] == ["second", "first"]


def test_a_plan_touches_nothing() -> None:
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
        ({"layers": ".", "kind": "parameter_grad"}, "layers", "has a parameter of its own", "**"),
        (
            {"layers": "**", "kind": "parameter_grad", "params": "wieght"},
            "params",
            "this pattern matches no parameter",
            "weight",
        ),
        (
            {"layers": "**", "kind": "parameter_grad", "params": ["weight", "bais"]},
            "params",
            "this pattern matches no parameter",
            "bias",
        ),
        (
            {"layers": "**", "kind": "step_post", "role": "buffer", "params": ["runing_mean"]},
            "params",
            "this pattern matches no buffer",
            "running_mean",
        ),
        ({"layers": "head", "kind": "step_post", "role": "buffer"}, "layers", "has a buffer of its own", ""),
        ({"layers": "**", "types": "Lienar", "kind": "forward"}, "types", "none of the 4 modules", "Linear"),
    ],
)
def test_an_empty_match_is_told_with_the_nearest(spec: dict[str, Any], where: str, problem: str, near: str) -> None:
    found = mistake(Tied(), **spec)
    assert found.where == f"hooks.mine.{where}"
    assert problem in found.problem
    assert list(found.nearest[:1]) == ([near] if near else [])


def test_the_nearest_to_a_container_without_parameters_is_what_lies_below_it() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.ReLU())
    found = mistake(model, layers="0", kind="parameter_grad")
    assert list(found.nearest) == ["0.**"]


def test_all_empty_matches_are_told_at_once() -> None:
    found = mistakes(
        Tied(),
        a={"layers": "hed", "kind": "forward"},
        b={"layers": "**", "kind": "forward"},
        c={"layers": "**", "kind": "parameter_grad", "params": "w"},
    )
    assert [one.where for one in found] == ["hooks.a.layers", "hooks.c.params"]


# ------------------------------------------------------------------------------------------------ frozen parameters


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
def test_a_parameter_kind_on_frozen_parameters_alone_is_refused(kind: str, role: str | None) -> None:
    model = Tied()
    model.norm.requires_grad_(False)
    found = mistake(model, layers="norm", kind=kind, role=role)
    assert found.where == "hooks.mine.layers"
    assert "is frozen" in found.problem
    assert found.written == "norm"
    assert "norm.weight, norm.bias" in found.allowed


@pytest.mark.parametrize(("layers", "written"), [(["head", "norm"], "norm"), (["norm.**", "head"], "norm.**")])
def test_each_pattern_has_to_find_something_that_trains(layers: list[str], written: str) -> None:
    model = Tied()
    model.norm.requires_grad_(False)
    assert mistake(model, layers=layers, kind="parameter_grad").written == written


def test_frozen_parameters_among_others_are_noted() -> None:
    model = Tied()
    model.norm.requires_grad_(False)
    notes = {site.label: site.note for site in plan_of(model, mine={"layers": "**", "kind": "parameter_grad"}).sites}
    assert notes == {
        "embed.weight": "",
        "norm.weight": "the parameter is frozen",
        "norm.bias": "the parameter is frozen",
        "head.bias": "",
    }


@pytest.mark.parametrize(("kind", "role"), [("step_post", "param"), ("step_post", "buffer"), ("forward", None)])
def test_what_needs_no_gradient_can_be_seen_in_frozen_modules(kind: str, role: str | None) -> None:
    model = Tied().requires_grad_(False)
    assert plan_of(model, mine={"layers": "norm", "kind": kind, "role": role}).sites


def test_a_frozen_parameter_is_no_obstacle_where_params_leaves_it_out() -> None:
    model = Tied()
    model.norm.weight.requires_grad_(False)
    assert labels(model, layers="norm", kind="parameter_grad", params="bias") == ["norm.bias"]
    assert "is frozen" in mistake(model, layers="norm", kind="parameter_grad", params="weight").problem


class Holding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(2, 2)])
        self.named = nn.ModuleDict({"one": nn.Linear(2, 2)})
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(2))])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.named["one"](self.blocks[0](inputs)) * self.scales[0]


def test_what_only_holds_others_is_no_site_of_kinds_that_wait_for_a_call() -> None:
    hook = {"layers": "**", "kind": "forward", "action": "record"}
    plan = make_plan(parse_hooks({"seen": hook}), Holding())
    assert [site.label for site in plan.sites] == [".", "blocks.0", "named.one"]
    parameters = make_plan(parse_hooks({"seen": {**hook, "kind": "parameter_grad"}}), Holding())
    assert "scales.0" in [site.label for site in parameters.sites]


def test_a_pattern_that_means_nothing_but_holders_is_told_what_to_write() -> None:
    with pytest.raises(ConfigError) as caught:
        make_plan(parse_hooks({"seen": {"layers": "blocks", "kind": "forward", "action": "record"}}), Holding())
    (mistake,) = caught.value.mistakes
    assert mistake.where == "hooks.seen.layers"
    assert "only hold others" in mistake.problem
    assert list(mistake.nearest) == ["blocks.*"]
