"""The parts of transformers that `structure` finds. The expected numbers follow from the configurations of the models."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from architectures import Architecture
from tiers import tiered
from torch import nn
from transformer_zoo import (
    CORRECTED,
    HEADS,
    LENGTH,
    LOOKED_AT,
    SET_ASIDE,
    VOCABULARY,
    D,
    Example,
    MinGPT,
    NanoGPT,
    XTransformer,
)

import instrument
from instrument.config.apply import SetSpec
from instrument.config.parse import parse_hooks
from instrument.errors import ConfigError, Problem
from instrument.fields.field_types import StructureName
from instrument.plan.hook_plan import HookPlan, make_plan, remarks
from instrument.plan.modules import Layers
from instrument.plan.structure import find_structure
from instrument.training.apply import apply_specs

NAMES = get_args(StructureName)
MISSES = {  # what the rules do not find
    "DBRX": {"router": 0, "experts": 0, "mlp": 0},  # the experts are stacked in matrices of two dimensions
    "Jamba": {"mlp": 5},  # the mixers of Mamba layers have the shapes of a gated MLP
}


def plan_of(model: nn.Module, **hooks: dict[str, Any]) -> HookPlan:
    return make_plan(parse_hooks({name: {"action": "record", **spec} for name, spec in hooks.items()}), model)


def labels(model: nn.Module, **spec: Any) -> list[str]:
    return [site.label for site in plan_of(model, mine=spec).sites]


def problem_of(model: nn.Module, **spec: Any) -> Problem:
    with pytest.raises(ConfigError) as caught:
        plan_of(model, mine=spec)
    (found,) = caught.value.problems
    return found


def found_in(model: nn.Module) -> dict[str, list[str]]:
    found = find_structure(Layers.of(model), NAMES)
    return {name: [layer.name for layer in layers] for name, layers in found.items()}


@pytest.mark.spread(8)
@pytest.mark.parametrize(
    "example",
    [
        *(*LOOKED_AT, *CORRECTED, *SET_ASIDE[::3]),
        *(pytest.param(each, id=str(each), marks=pytest.mark.slow) for each in (*SET_ASIDE[1::3], *SET_ASIDE[2::3])),
    ],
    ids=str,
)
def test_structure_of_a_transformer(example: Example) -> None:
    found = {name: len(layers) for name, layers in found_in(example.make()).items()}
    assert found == {**dict.fromkeys(NAMES, 0), "model": 1, **example.parts, **MISSES.get(example.name, {})}


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "name",
    tiered(
        ["resnet18", "densenet121", "efficientnet_b0", "convnext_tiny", "mobilenet_v3_small", "regnet_y_400mf"],
        ["resnet18", "convnext_tiny"],
    ),
)
def test_convolutional_network_has_no_parts_of_a_transformer(name: str) -> None:
    found = found_in(Architecture("torchvision", name).make())
    assert {name for name, layers in found.items() if layers} <= {"norm", "model"}


def test_names_of_the_parts() -> None:
    found = found_in(MinGPT())
    blocks = [f"transformer.h.{index}" for index in range(3)]
    assert found["block"] == blocks
    assert found["attention"] == [f"{block}.attn" for block in blocks]
    assert found["mlp"] == [f"{block}.mlp.c_proj" for block in blocks]  # minGPT never calls its ModuleDict `mlp`
    assert found["embedding"] == ["transformer.wte", "transformer.wpe"]
    assert found["head"] == ["lm_head"]
    assert found["model"] == [""]
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, HEADS, 32, batch_first=True), 2)
    assert found_in(encoder)["mlp"] == ["layers.0.linear2", "layers.1.linear2"]


def test_classes_as_many_as_blocks_are_no_router() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))
            self.classifier = nn.Linear(4, 5)

    found = found_in(Net())
    assert {name for name, layers in found.items() if layers} == {"model"}
    assert found["model"] == [*(f"layers.{at}" for at in range(5)), "classifier"]  # nothing calls the whole


def test_structure_is_restricted_by_the_other_fields() -> None:
    record = {"kind": "forward", "structure": "norm"}
    assert labels(NanoGPT(), layers="transformer.h.0.**", **record) == ["transformer.h.0.ln_1", "transformer.h.0.ln_2"]
    assert labels(NanoGPT(), exclude="transformer.h.**", **record) == ["transformer.ln_f"]
    assert labels(NanoGPT(), kind="forward", structure=["mlp", "head"], types="Linear") == ["lm_head"]


def test_missing_structure_is_an_error_with_a_fix() -> None:
    found = problem_of(nn.Sequential(nn.Linear(2, 2)), kind="forward", structure="attention")
    assert (found.where, found.given) == ("hooks.mine.structure", "attention")
    assert "no attention found (nn.MultiheadAttention, or a module with projections to queries" in found.message
    assert "'layers'" in found.fix
    elsewhere = problem_of(NanoGPT(), kind="forward", structure="head", layers="transformer.**")
    assert (elsewhere.where, elsewhere.given) == ("hooks.mine.layers", ["transformer.**"])
    assert elsewhere.allowed == "lm_head"


def test_optional_structure_is_left_out_with_a_remark() -> None:
    model = nn.Sequential(nn.LayerNorm(2, elementwise_affine=False))
    optional: dict[str, Any] = {"kind": "forward", "optional": True}
    plan = plan_of(
        model,
        heads={**optional, "structure": ["head", "embedding"]},
        gains={**optional, "kind": "step_post", "structure": "norm"},
        norms={"kind": "forward", "structure": "norm"},
    )
    assert [site.label for site in plan.sites] == ["0"]
    assert [remark.message for remark in remarks(plan)] == [
        "hook 'heads' is left out: the model has no head or embedding",
        "hook 'gains' is left out: the model has no norm with parameters",
    ]
    with pytest.raises(ConfigError, match="'optional' requires 'structure'"):
        plan_of(model, mine={"layers": "**", **optional})
    apply_specs({"mine": SetSpec(action="set", structure="head", optional=True, attribute="bias", value=1)}, model)


def test_parts_of_an_unusual_transformer_are_recorded() -> None:
    model = XTransformer()
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH))
    specs = {"attention": {"structure": "attention", "kind": "forward", "action": "record"}}
    with instrument.attach(model, specs) as probe:
        model(tokens)
        probe.end_step()
    assert [*probe.stats["layer"]] == ["layers.0.1", "layers.2.1", "layers.4.1"]
