"""Interventions act before the hooks with which libraries collect the outputs of modules; record hooks act after them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hook_runs import run_steps
from torch import Tensor, nn

import instrument

ZERO = {"kind": "forward", "action": "modify", "fn": "zero"}
RECORD = {"kind": "forward", "action": "record", "stats": ["mean"]}


SIZES = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}


def dinov2() -> nn.Module:
    import transformers

    options = {"mlp_ratio": 2, "out_features": ["stage2"], "apply_layernorm": False}
    return transformers.Dinov2Backbone(transformers.Dinov2Config(**SIZES, **options))


def clip() -> nn.Module:
    import transformers

    return transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**SIZES, intermediate_size=16))


def resnet() -> nn.Module:
    import timm

    return timm.create_model(
        "resnet18", pretrained=False, features_only=True, feature_cls="hook", out_indices=[1], num_classes=2
    )


@pytest.mark.slow
@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.parametrize(
    ("make", "layer", "collected"),
    [
        (dinov2, "encoder.layer.1", lambda model, images: model(images).feature_maps[-1]),
        (clip, "**.layers.1", lambda model, images: model(images, output_hidden_states=True).hidden_states[-1]),
        (resnet, "body.layer1", lambda model, images: model(images)[0]),
    ],
    ids=["transformers-backbone", "transformers-hidden-states", "timm-features"],
)
def test_intervention_changes_what_a_library_collects(
    make: Callable[[], nn.Module], layer: str, collected: Callable[[nn.Module, Tensor], Tensor], called_before: bool
) -> None:
    torch.manual_seed(0)
    model, images = make().eval(), torch.randn(1, 3, 28, 28)
    with torch.no_grad():
        if called_before:
            collected(model, images)
        with instrument.attach(model, {"ablate": {**ZERO, "layers": layer}}, rules=None):
            assert not collected(model, images).any()
        assert collected(model, images).any()


def test_record_hooks_see_what_the_next_module_sees() -> None:
    model = nn.Sequential(nn.Identity(), nn.Identity())
    model[0].register_forward_hook(lambda module, args, output: output + 1)
    hooks = {
        "before": {**RECORD, "layers": "0"},
        "double": {"layers": "0", "kind": "forward", "action": "scale", "factor": 2.0},
        "after": {**RECORD, "layers": "0"},
        "next": {**RECORD, "layers": "1", "role": "input"},
    }
    with instrument.attach(model, hooks, rules=None) as probe:
        assert model(torch.full((2, 2), 3.0)).tolist() == [[7.0, 7.0]] * 2
        probe.end_step()
    assert probe.stats[["hook", "mean"]].values.tolist() == [["before", 3.0], ["after", 7.0], ["next", 7.0]]


def test_explicit_prepend_false_acts_after_other_hooks() -> None:
    model = nn.Identity()
    collected: list[Tensor] = []
    model.register_forward_hook(lambda module, args, output: collected.append(output))
    with instrument.attach(model, {"ablate": {**ZERO, "layers": ".", "prepend": False}}, rules=None):
        assert not model(torch.ones(1)).any()
    assert collected[0].all()


def test_interventions_of_several_probes_act_in_the_order_of_attaching() -> None:
    model = nn.Identity()
    scale = {"h": {"layers": ".", "kind": "forward", "action": "scale", "factor": 4.0}}
    clip_value = {"h": {"layers": ".", "kind": "forward", "action": "clip", "value": 1.0}}
    with instrument.attach(model, scale, rules=None), instrument.attach(model, clip_value, rules=None):
        assert model(torch.ones(1)).item() == 1.0


def test_intervention_does_not_reorder_the_hooks_of_others() -> None:
    model, ran = nn.Identity(), []
    for name in "abc":
        model.register_forward_hook(lambda module, args, output, name=name: ran.append(name))
    run_steps(model, {"ablate": {**ZERO, "layers": ".", "every": 2}}, lambda: model(torch.ones(1)), 4, rules=None)
    model(torch.ones(1))
    assert "".join(ran) == "abc" * 5
