"""The modules of a model: each once, with all its names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hook_runs import Calls
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from instrument.plan.modules import Layer, Layers


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.fc(x))


class Shared(nn.Module):
    """One block under three names, one activation under two."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.again = self.first
        self.list = nn.ModuleList([self.first, nn.ReLU()])
        self.act = self.list[1]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Module()
        self.embed.table = nn.Parameter(torch.ones(5, 4))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.table
        self.scale = nn.Parameter(torch.ones(()))


def keeper() -> nn.Module:
    """Return a model with its own attribute called `module`, which is not a wrapper."""
    return Calls(lambda module, x: module(x), module=Block())


class Hider(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Linear(4, 4)
        self.blocks = [nn.Linear(4, 4), nn.Linear(4, 4)]
        self.heads = {"a": nn.ReLU()}
        self.pair = (nn.Tanh(), 3)
        self.also_seen = [self.seen]
        self.inner = nn.Sequential()
        self.inner.extra = [nn.Sigmoid()]  # type: ignore[assignment]
        self.numbers = [1, 2]
        self.deep = [[nn.Linear(4, 4)]]
        self.dicts = {"x": {"y": nn.ReLU()}}


def names(model: nn.Module) -> list[str]:
    return [layer.name for layer in Layers.of(model)]


def layer_of(model: nn.Module, name: str) -> Layer:
    (found,) = [layer for layer in Layers.of(model) if layer.name == name]
    return found


@pytest.mark.parametrize("model", [Block(), Shared(), Tied(), nn.TransformerEncoderLayer(4, 2), nn.LSTM(4, 4)])
def test_layers_are_in_the_order_of_named_modules(model: nn.Module) -> None:
    assert [(layer.name, layer.module) for layer in Layers.of(model)] == list(model.named_modules())


def test_shared_module_has_all_its_names() -> None:
    model = Shared()
    block, fc = layer_of(model, "first"), layer_of(model, "first.fc")
    assert block.names == ("first", "again", "list.0")
    assert block.aliases == ("again", "list.0")
    assert fc.names == ("first.fc", "again.fc", "list.0.fc")
    assert layer_of(model, "list.1").aliases == ("act",)
    assert Layers.of(model).by_module[id(model.again)].name == "first"
    every = dict(model.named_modules(remove_duplicate=False))
    assert {name: layer.module for layer in Layers.of(model) for name in layer.names} == every


@pytest.mark.parametrize(
    ("name", "depth", "type_name", "label"),
    [("", 0, "Shared", "."), ("first", 1, "Block", "first"), ("first.fc", 2, "Linear", "first.fc")],
)
def test_layer_has_depth_type_and_label(name: str, depth: int, type_name: str, label: str) -> None:
    layer = layer_of(Shared(), name)
    assert (layer.depth, layer.type, layer.label) == (depth, type_name, label)


def test_tied_parameters_have_all_their_names() -> None:
    model = Tied()
    own = {name: [own for own, _ in layer_of(model, name).own_parameters()] for name in ("", "head")}
    assert own == {"": ["scale"], "head": ["weight"]}  # without those of the children, and without a bias that is None
    found = Layers.of(model).parameter_names
    assert found[id(model.embed.table)] == ("table", "weight")
    assert found[id(model.scale)] == ("scale",)
    linear = nn.Linear(3, 3)
    linear.register_parameter("twin", linear.weight)
    assert Layers.of(linear).parameter_names[id(linear.weight)] == ("weight", "twin")


def wrappers(model: nn.Module) -> dict[str, nn.Module]:
    return {
        "DataParallel": nn.DataParallel(model),
        "torch.compile": torch.compile(model, backend="eager"),  # type: ignore[dict-item]
        "checkpoint_wrapper": checkpoint_wrapper(model),
        "subclass": type("MyParallel", (nn.DataParallel,), {})(model),
        "several": nn.DataParallel(checkpoint_wrapper(torch.compile(model, backend="eager"))),  # type: ignore[arg-type]
    }


@pytest.mark.parametrize("wrapper", wrappers(Block()))
def test_wrapper_is_replaced_by_the_wrapped_module(wrapper: str) -> None:
    block = Block()
    layers = list(Layers.of(wrappers(block)[wrapper]))
    assert [layer.name for layer in layers] == ["", "fc", "act"]
    assert (layers[0].module, layers[0].type) == (block, "Block")
    inner = Block()
    model = nn.Sequential(nn.Linear(4, 4), wrappers(inner)[wrapper])
    assert names(model) == ["", "0", "1", "1.fc", "1.act"]
    assert layer_of(model, "1").module is inner
    assert [name for name, _ in layer_of(model, "1.fc").own_parameters()] == ["weight", "bias"]


def test_custom_attribute_called_module_keeps_its_name() -> None:
    assert names(keeper()) == ["", "module", "module.fc", "module.act"]
    assert names(nn.DataParallel(keeper())) == ["", "module", "module.fc", "module.act"]


def test_cyclic_module_ends_the_traversal() -> None:
    model = Block()
    model.fc._modules["parent"] = model
    found = Layers.of(model)
    assert {layer.name for layer in found} == {"", "fc", "act"}
    assert layer_of(model, "").aliases == ("fc.parent",)


def test_modules_in_plain_lists_and_dicts_are_reported() -> None:
    model = Hider()
    hidden = Layers.of(model).hidden_messages()
    assert [message.partition(" is in")[0] for _, message in hidden] == [
        "blocks[0] (Linear)",
        "blocks[1] (Linear)",
        "heads['a'] (ReLU)",
        "pair[0] (Tanh)",
        "deep[0][0] (Linear)",
        "dicts['x']['y'] (ReLU)",
        "inner.extra[0] (Sigmoid)",
    ]
    assert [location for location, _ in hidden][:3] == ["blocks[0]", "blocks[1]", "heads['a']"]
    model.held = nn.ParameterList(model.blocks[0].parameters())  # as Keras registers them
    hidden = Layers.of(model).hidden_messages()
    assert ["not trained" in message for _, message in hidden[:3]] == [False, True, False]
    model.inner.extra.append(nn.Module.__new__(nn.Linear))  # without parameters until its initialization
    assert "not trained" in Layers.of(model).hidden_messages()[-1][1]


@pytest.mark.parametrize("model", [Block(), Shared(), keeper(), nn.DataParallel(Block()), checkpoint_wrapper(Block())])
def test_ordinary_model_has_no_hidden_modules(model: nn.Module) -> None:
    assert Layers.of(model).hidden_messages() == []


@pytest.mark.parametrize(
    ("module", "type_name", "is_one"),
    [
        (nn.Conv2d(1, 1, 1), "Conv2d", True),
        (nn.Conv2d(1, 1, 1), "torch.nn.modules.conv.Conv2d", True),
        (nn.Conv2d(1, 1, 1), "_ConvNd", True),
        (nn.Conv2d(1, 1, 1), "Module", True),
        (nn.Conv2d(1, 1, 1), "Conv1d", False),
        (nn.Conv2d(1, 1, 1), "conv2d", False),
        (nn.Conv2d(1, 1, 1), "other.Conv2d", False),
        (nn.ReLU6(), "ReLU", False),
        (nn.ReLU6(), "Hardtanh", True),
        (nn.Conv2d(1, 1, 1), "torch.nn.Conv2d", True),
    ],
)
def test_type_matches_by_short_or_full_name_and_subclass(module: nn.Module, type_name: str, is_one: Any) -> None:
    (layer,) = Layers.of(module)
    assert layer.is_a(type_name) is is_one
