"""The `apply` section: changes to modules before step 0."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.parametrize import register_parametrization

from instrument import ConfigError
from instrument.config.parse import parse_apply
from instrument.training.apply import apply_specs

CALLS: list[tuple[str, str]] = []


class Net(nn.Module):
    """A shared activation under three names, and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        act = nn.ReLU()
        self.block = nn.Sequential(OrderedDict(conv=nn.Conv2d(1, 2, 3), act=nn.ReLU(inplace=True)))
        self.one = nn.Sequential(nn.Linear(4, 4), act)
        self.two = nn.Sequential(nn.Linear(4, 4), act)
        self.last = act


def apply(model: nn.Module, **specs: dict[str, Any]) -> nn.Module:
    apply_specs(parse_apply(specs), model)
    return model


def record_call(module: nn.Module, name: str, mark: str = "") -> None:
    CALLS.append((name, mark))


def raise_error(module: nn.Module, name: str) -> None:
    raise RuntimeError("no")


@pytest.fixture
def model() -> Net:
    torch.manual_seed(0)
    return Net()


def test_init_fills_weights_by_a_function_of_torch_nn_init(model: Net) -> None:
    bias = model.one[0].bias.clone()
    torch.manual_seed(7)
    apply(model, a={"types": ["Linear"], "action": "init", "fn": "kaiming_normal_", "nonlinearity": "relu"})
    torch.manual_seed(7)
    expected = [nn.init.kaiming_normal_(torch.empty(4, 4), nonlinearity="relu") for _ in range(2)]
    assert torch.equal(model.one[0].weight, expected[0])
    assert torch.equal(model.two[0].weight, expected[1])
    assert torch.equal(model.one[0].bias, bias)


def test_init_uses_the_parameters_selected_by_params(model: Net) -> None:
    apply(model, a={"layers": "one.0", "params": "bias", "action": "init", "fn": "constant_", "val": 3.0})
    assert (model.one[0].bias == 3).all()
    assert not (model.one[0].weight == 3).any()
    assert not (model.two[0].bias == 3).any()


def test_fill_sets_every_element(model: Net) -> None:
    apply(model, a={"layers": "two.0", "action": "fill", "value": -2.5})
    assert all((parameter == -2.5).all() for parameter in model.two[0].parameters())
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in model.parameters())
    assert not any((parameter == -2.5).any() for parameter in model.one.parameters())


def test_freeze_disables_the_gradient(model: Net) -> None:
    apply(model, a={"layers": "**", "exclude": "one.**", "params": "weight", "action": "freeze"})
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {"block.conv.weight", "two.0.weight"}


def test_replace_creates_a_new_module_for_every_match(model: Net) -> None:
    apply(model, a={"types": ["ReLU"], "action": "replace", "module": {"_target_": "torch.nn.GELU"}})
    replaced = {name for name, module in model.named_modules(remove_duplicate=False) if isinstance(module, nn.GELU)}
    assert replaced == {"block.act", "one.1", "two.1", "last"}
    assert model.one[1] is model.two[1] is model.last  # one module under three names
    assert model.last is not model.block.act


def test_replace_of_a_shared_module_applies_to_all_names(model: Net) -> None:
    apply(model, a={"layers": "two.1", "action": "replace", "module": {"_target_": "torch.nn.GELU"}})
    assert isinstance(model.last, nn.GELU)
    assert model.one[1] is model.last
    assert isinstance(model.block.act, nn.ReLU)


def test_set_changes_an_existing_attribute(model: Net) -> None:
    apply(model, a={"types": ["ReLU"], "action": "set", "attribute": "inplace", "value": False})
    assert not model.block.act.inplace


def test_add_parameter_adds_a_trainable_parameter(model: Net) -> None:
    spec = {"types": ["Linear"], "action": "add_parameter", "parameter": "gain", "shape": [4], "value": 0.5}
    apply(model, a=spec)
    gain = model.one[0].gain
    assert dict(model.named_parameters())["one.0.gain"] is gain
    assert torch.equal(gain.detach(), torch.full((4,), 0.5))
    assert gain.requires_grad
    assert apply(model, b={**spec, "parameter": "scalar", "shape": []}).two[0].scalar.shape == ()
    bias = {**spec, "parameter": "bias", "shape": [2], "value": 4}
    layer = apply(nn.Linear(3, 2, bias=False), a=bias)
    assert torch.equal(layer(torch.zeros(1, 3)).detach(), torch.full((1, 2), 4.0))


def test_call_passes_the_module_its_name_and_the_arguments(model: Net) -> None:
    CALLS.clear()
    apply(model, a={"layers": "one.*", "action": "call", "fn": {"_target_": f"{__name__}.record_call", "mark": "x"}})
    assert CALLS == [("one.0", "x"), ("one.1", "x")]


def test_children_come_before_parents_and_shared_modules_once(model: Net) -> None:
    CALLS.clear()
    apply(model, a={"layers": "**", "action": "call", "fn": {"_target_": f"{__name__}.record_call"}})
    order = [name for name, _ in CALLS]
    assert order == ["block.conv", "block.act", "block", "one.0", "one.1", "one", "two.0", "two", ""]


def test_specs_are_applied_in_order(model: Net) -> None:
    module = {"_target_": "torch.nn.Bilinear", "in1_features": 2, "in2_features": 2, "out_features": 1}
    first = {"layers": "one", "action": "replace", "module": module}
    apply(model, first=first, second={"types": ["Bilinear"], "action": "fill", "value": 1})
    assert (model.one.weight == 1).all()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"layers": "onee", "action": "freeze"}, r"a\.layers: this pattern matches no module\n.*onee\n.*\n.*similar  one"),
        ({"layers": "one.1", "action": "freeze"}, r"a\.layers: no matched module has such a parameter"),
        ({"layers": "one", "action": "fill", "value": 1}, r"a\.(.*\n)*.*similar  one\.\*\*"),
        ({"types": "Linear", "params": "wieght", "action": "freeze"},
         r"a\.params: this pattern matches no parameter\n(.*\n)*.*similar  weight"),
        ({"types": "Linear", "action": "init", "fn": "dirac_"}, r"a: init failed at layer 'one\.0' \(Linear\): ValueError"),
        ({"types": "Linear", "action": "init", "fn": "ones_", "val": 3}, r"a: init failed .* unexpected keyword argument 'val'"),
        ({"layers": ".", "action": "replace", "module": {"_target_": "torch.nn.Identity"}}, r"a.*: .*root module cannot be replaced"),
        ({"layers": "one", "action": "replace", "module": {"_target_": "builtins.dict"}},
         r"a\.module: must be a torch\.nn\.Module, but builtins\.dict returned dict"),
        ({"layers": "one", "action": "replace", "module": {"_target_": "torch.nn.Lineer"}}, r"a\.module: torch\.nn has no 'Lineer'"),
        ({"types": "ReLU", "action": "set", "attribute": "inplce", "value": 1},
         r"a\.attribute: layer .* no such attribute\n.*inplce\n.*similar  inplace"),
        ({"types": "Linear", "action": "add_parameter", "parameter": "weight"}, r"a\.parameter: .* already has this attribute"),
        ({"layers": "one.0", "action": "call", "fn": {"_target_": f"{__name__}.raise_error"}},
         r"a: call failed at layer 'one\.0' \(Linear\): RuntimeError: no \(in .*raise_error\)"),
    ],
    ids=lambda value: value["action"] if isinstance(value, dict) else None,
)  # fmt: skip
def test_apply_error_has_its_key_and_layer(model: Net, spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"apply\.{message}"):
        apply(model, a=spec)


class Doubled(nn.Module):
    def __init__(self, inner: nn.Module, factor: float = 2.0) -> None:
        super().__init__()
        self.inner, self.factor = inner, factor

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.factor * self.inner(inputs)


def test_wrap_wraps_a_module_under_all_of_its_names(model: Net) -> None:
    act = model.one[1]
    apply(model, w={"layers": "one.1", "action": "wrap", "module": {"_target_": f"{__name__}.Doubled", "factor": 3.0}})
    assert isinstance(model.one[1], Doubled)
    assert model.one[1].inner is act
    assert model.one[1].factor == 3.0
    assert all(module is not act for module in (model.one[1], model.two[1]))


class Twice(nn.Module):
    """A parametrization without `right_inverse`."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


class Logarithm(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.exp()

    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.log()


INVERTIBLE: dict[str, Any] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "custom": lambda layer: register_parametrization(layer, "weight", Logarithm()),
    "several": lambda layer: register_parametrization(parametrizations.weight_norm(layer), "weight", Logarithm()),
}


def parametrized(name: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), INVERTIBLE[name](nn.utils.skip_init(nn.Linear, 4, 4).apply(positive)))


def positive(layer: nn.Module) -> None:
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, 0.1, 1.0)


@pytest.mark.parametrize("layers", ["1", "**"])
@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm", "custom", "several"])
def test_init_assigns_a_parametrized_weight(name: str, layers: str) -> None:
    model, plain = parametrized(name), parametrized(name)
    torch.manual_seed(7)
    apply(model, a={"layers": layers, "action": "init", "fn": "uniform_", "a": 0.1, "b": 2.0})
    torch.manual_seed(7)
    if layers == "**":
        nn.init.uniform_(plain[0].weight, 0.1, 2.0)
    plain[1].weight = nn.init.uniform_(torch.empty(4, 4), 0.1, 2.0)
    assert state_of(model) == state_of(plain)


def state_of(model: nn.Module) -> dict[str, list[Any]]:
    return {name: value.tolist() for name, value in model.state_dict().items()}


def test_init_draws_an_orthogonal_weight() -> None:
    model = parametrized("orthogonal")
    apply(model, a={"layers": "1", "action": "init", "fn": "eye_"})
    torch.testing.assert_close(model[1].weight, torch.eye(4))


@pytest.mark.parametrize("params", ["weight", None])
def test_fill_sets_every_element_of_a_parametrized_weight(params: str | None) -> None:
    model = parametrized("weight_norm")
    bias = model[1].bias.clone()
    apply(model, a={"layers": "1", "action": "fill", "value": 0.5} | ({"params": params} if params else {}))
    torch.testing.assert_close(model[1].weight, torch.full((4, 4), 0.5))
    assert torch.equal(model[1].bias, torch.full((4,), 0.5) if params is None else bias)


def test_fill_sets_one_part_of_a_parametrized_weight() -> None:
    model, plain = parametrized("weight_norm"), parametrized("weight_norm")
    apply(model, a={"layers": "1", "params": "weight.original0", "action": "fill", "value": 3.0})
    assert (model[1].parametrizations.weight.original0 == 3).all()
    assert torch.equal(model[1].parametrizations.weight.original1, plain[1].parametrizations.weight.original1)


@pytest.mark.spread(12)
@pytest.mark.parametrize("name", INVERTIBLE)
@pytest.mark.parametrize("fields", [{"layers": "1"}, {"layers": "**", "exclude": "0"}, {"types": "Linear"}])
def test_freeze_freezes_a_parametrized_weight(name: str, fields: dict[str, str]) -> None:
    model = parametrized(name)
    apply(model, a={**fields, "action": "freeze"})
    assert not any(parameter.requires_grad for parameter in model[1].parameters())
    assert any(parameter.requires_grad for parameter in model[0].parameters()) == ("types" not in fields)


def test_init_of_a_weight_without_inverse_is_refused() -> None:
    model = nn.Sequential(register_parametrization(nn.Linear(4, 4), "weight", Twice()))
    with pytest.raises(ConfigError, match=r"layer '0' \(Linear\).*Twice does not implement right_inverse"):
        apply(model, a={"layers": "0", "action": "init", "fn": "zeros_"})
    with pytest.warns(FutureWarning, match="weight_norm"):
        model = nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)))
    with pytest.raises(ConfigError, match=r"'weight' of layer '0' \(Linear\).*weight_norm, which has no inverse"):
        apply(model, a={"layers": "0", "action": "init", "fn": "zeros_"})
    apply(model, a={"layers": "0", "params": "weight_g", "action": "fill", "value": 2.0})
    assert (model[0].weight_g == 2).all()


@pytest.mark.parametrize("wrap", [nn.utils.spectral_norm, prune.identity])
def test_init_of_a_weight_with_one_original_changes_it(wrap: Any) -> None:
    options = ("weight",) if wrap is prune.identity else ()
    model = nn.Sequential(wrap(nn.Linear(4, 4), *options))
    apply(model, a={"layers": "0", "action": "init", "fn": "constant_", "val": 2.0})
    assert (model[0].weight_orig == 2).all()
