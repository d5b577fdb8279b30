"""Layers that a selection matches; an empty match is an error."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from instrument.errors import ConfigError, Problem
from instrument.fields.field_types import Selection
from instrument.plan.hook_plan import select_layers
from instrument.plan.modules import Layers


class MyConv(nn.Conv2d):
    pass


def model() -> nn.Module:
    encoder = nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU()),
        nn.Sequential(MyConv(2, 2, 3), nn.BatchNorm2d(2), nn.ReLU()),
    )
    net = nn.Sequential()
    net.add_module("encoder", encoder)
    net.add_module("decoder", nn.Sequential(nn.Linear(4, 4), encoder[0][2]))
    return net


def chosen(**fields: Any) -> list[str]:
    return [layer.label for layer in select_layers(Selection(**fields), Layers.of(model()), "hooks.mine")]


def problem_of(**fields: Any) -> Problem:
    with pytest.raises(ConfigError) as caught:
        chosen(**fields)
    (found,) = caught.value.problems
    return found


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"layers": "."}, ["."]),
        ({"layers": "encoder.*"}, ["encoder.0", "encoder.1"]),
        ({"layers": "encoder.0.**"}, ["encoder.0", "encoder.0.0", "encoder.0.1", "encoder.0.2"]),
        ({"layers": ["decoder.0", "encoder.1.1"]}, ["encoder.1.1", "decoder.0"]),
        ({"layers": ["encoder.0", "encoder.*"]}, ["encoder.0", "encoder.1"]),
        ({"layers": "decoder.1"}, ["encoder.0.2"]),
        ({"layers": "*coder.*.2", "exclude": "encoder.1.*"}, ["encoder.0.2"]),
        ({"layers": "**", "types": "Conv2d"}, ["encoder.0.0", "encoder.1.0"]),
        ({"types": ["MyConv", "Linear"]}, ["encoder.1.0", "decoder.0"]),
        ({"types": "Conv?d"}, ["encoder.0.0", "encoder.1.0"]),
        ({"types": "*Conv"}, ["encoder.1.0"]),
        ({"types": "M*"}, ["encoder.1.0"]),
        ({"types": ["torch.nn.Con*", "Line[a-b]r"]}, ["encoder.0.0", "encoder.1.0", "decoder.0"]),
        ({"types": "torch.nn.modules.conv.Conv2d"}, ["encoder.0.0", "encoder.1.0"]),
        ({"layers": "encoder.1.**", "types": "Conv2d"}, ["encoder.1.0"]),
        ({"types": "Conv2d", "exclude": "encoder.0.**"}, ["encoder.1.0"]),
        ({"types": "ReLU", "exclude": "decoder.1"}, ["encoder.1.2"]),
        ({"layers": r"re:encoder\.\d\.0"}, ["encoder.0.0", "encoder.1.0"]),
        ({"types": ["ReLU", "*LlamaMLP"]}, ["encoder.0.2", "encoder.1.2"]),
        ({"types": ["ReLU", "GELU"]}, ["encoder.0.2", "encoder.1.2"]),
    ],
)
def test_selection_lists_layers_once_in_model_order(fields: dict[str, Any], names: list[str]) -> None:
    assert chosen(**fields) == names


@pytest.mark.parametrize(
    ("fields", "where", "problem", "near"),
    [
        ({"layers": "encodr.*"}, "hooks.mine.layers", "this pattern matches no module", "encoder"),
        ({"layers": ["**", "decoder.2"]}, "hooks.mine.layers", "this pattern matches no module", "decoder.1"),
        ({"layers": "Encoder"}, "hooks.mine.layers", "this pattern matches no module", "encoder"),
        ({"layers": "re:encodr"}, "hooks.mine.layers", "this pattern matches no module", "encoder"),
        ({"layers": "**", "exclude": "decodr"}, "hooks.mine.exclude", "this pattern matches no module", "decoder"),
        ({"types": ["Lin?r", "*Attn*"]}, "hooks.mine.types", "none of the 12 modules", "Linear"),
        ({"types": "Conv2D"}, "hooks.mine.types", "neither the model nor", "Conv2d"),
        ({"types": "Liner"}, "hooks.mine.types", "neither the model nor", "Linear"),
        ({"types": ["Linear", "Conv2D"]}, "hooks.mine.types", "neither the model nor", "Conv2d"),
        ({"types": ["Linear", "MyCnv"]}, "hooks.mine.types", "neither the model nor", "MyConv"),
        ({"layers": "decoder.*", "types": "Conv2d"}, "hooks.mine.types", "none of the 2 modules", ""),
        ({"layers": "encoder.*", "exclude": "encoder.**"}, "hooks.mine.exclude", "excludes all 2 modules", ""),
    ],
)
def test_empty_selection_is_reported_with_the_nearest(
    fields: dict[str, Any], where: str, problem: str, near: str
) -> None:
    found = problem_of(**fields)
    assert found.where == where
    assert found.message.startswith(problem)
    assert list(found.similar[:1]) == [near] if near else True
    assert str(found.given).strip("[]'") in str(fields)
    if problem == "this pattern matches no module":
        assert "encoder.0.0" in found.allowed
        assert "(12 in all)" in found.allowed or "decoder.1" in found.allowed


def test_pattern_on_a_model_without_submodules_names_the_model() -> None:
    with pytest.raises(ConfigError, match=r"matches no module\n +given +\*\n +allowed +\.$"):
        select_layers(Selection(layers="*"), Layers.of(nn.ReLU()), "hooks.mine")


def test_the_name_of_a_class_as_layers_suggests_types() -> None:
    for pattern in ("conv2d.*", "nn.Conv2d"):
        fix = problem_of(layers=pattern).fix
        assert fix == "'layers' are names; to select by class, write 'types: Conv2d' instead"
