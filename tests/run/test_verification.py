"""The certificate: record hooks change nothing, on architectures of every make; and a change is found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Answer

from instrument.actions.record import Record
from instrument.run.verification import verify
from instrument.spec.parse import parse_config

HOOKS = {
    "outputs": {"layers": "**", "kind": "forward", "action": "record"},
    "inputs": {"layers": "**", "kind": "forward_pre", "action": "record", "stats": ["mean"]},
    "own": {"layers": "**", "kind": "full_backward", "action": "record"},
    "flow": {"layers": "**", "kind": "full_backward", "role": "grad_output", "action": "record"},
    "total": {"layers": "**", "kind": "tensor", "role": "input", "action": "record", "stats": ["l2"]},
    "sums": {"layers": "**", "kind": "post_accumulate_grad", "action": "record"},
    "gradients": {"layers": "**", "kind": "parameter_grad", "action": "record"},
    "updates": {"layers": "**", "kind": "step_post", "role": "update", "action": "record"},
}
IMAGES = {"_target_": "instrument.run.datasets.random_tensors", "shape": [3, 64, 64], "samples": 8}
TEXT = {"_target_": "instrument.run.datasets.english", "length": 12}


def torchvision(name: str, **more: Any) -> dict[str, Any]:
    return {"_target_": f"torchvision.models.{name}", "weights": None, "num_classes": 10, **more}


def timm(name: str, **more: Any) -> dict[str, Any]:
    return {"_target_": "timm.create_model", "model_name": name, "num_classes": 10, **more}


def hugging_face(name: str, **config: Any) -> dict[str, Any]:
    tiny = {"vocab_size": 128, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0, **config}
    kind = f"transformers.{name}"
    return {
        "_target_": kind,
        "config": {"_target_": kind.replace("ForCausalLM", "Config").replace("LMHeadModel", "Config"), **tiny},
    }


WIDE = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "resnet18": torchvision("resnet18"),
    "mobilenet_v3_small": torchvision("mobilenet_v3_small"),
    "squeezenet1_1": torchvision("squeezenet1_1"),
    "shufflenet_v2_x0_5": torchvision("shufflenet_v2_x0_5"),
    "mnasnet0_5": torchvision("mnasnet0_5"),
    "densenet": {
        "_target_": "torchvision.models.DenseNet",
        "growth_rate": 8,
        "block_config": [2, 2],
        "num_classes": 10,
    },
    "vit": {
        "_target_": "torchvision.models.VisionTransformer",
        **{
            "image_size": 64,
            "patch_size": 16,
            "num_layers": 2,
            "num_heads": 2,
            "hidden_dim": 16,
            "mlp_dim": 32,
            "num_classes": 10,
        },
    },
    "timm resnet10t": timm("resnet10t"),
    "timm efficientnet_lite0": timm("tf_efficientnet_lite0"),
    "timm regnetx_002": timm("regnetx_002"),
    "timm convnext_atto": timm("convnext_atto"),
    "timm vit": timm("vit_tiny_patch16_224", img_size=64, depth=2),
    "timm ghostnet_050": timm("ghostnet_050"),
    "timm resnetv2": timm("resnetv2_18"),
    "timm lcnet_050": timm("lcnet_050"),
    "gpt2": hugging_face("GPT2LMHeadModel", n_embd=16, n_layer=2, n_head=2, n_positions=32),
    "llama": hugging_face("LlamaForCausalLM", **WIDE),
    "gpt_neox": hugging_face("GPTNeoXForCausalLM", **WIDE),
    "gptj (parallel)": hugging_face("GPTJForCausalLM", n_embd=16, n_layer=2, n_head=2, n_positions=32, rotary_dim=4),
    "bert": hugging_face("BertLMHeadModel", is_decoder=True, **WIDE),
}


def config_of(model: dict[str, Any], hooks: dict[str, Any] = HOOKS, steps: int = 2) -> dict[str, Any]:
    is_text = model["_target_"].startswith("transformers.")
    task = {"_target_": "instrument.run.tasks.NextToken"}
    if not is_text:
        task = {"_target_": "instrument.run.tasks.Supervised", "loss": {"_target_": "torch.nn.CrossEntropyLoss"}}
    return {
        "model": model,
        "data": {
            "dataset": TEXT if is_text else IMAGES,
            "slice": {"stop": 8},
            "eval_slice": {"split": "test", "stop": 2},
        },
        "task": task,
        "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.01, "momentum": 0.9},
        "train": {"steps": steps, "batch_size": 4},
        "hooks": hooks,
    }


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_recording_everything_changes_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    certificate = verify(parse_config(config_of(ARCHITECTURES[name])))
    assert certificate.holds, str(certificate.difference)
    assert certificate.steps == 2
    assert certificate.tensors > 10
    assert certificate.rows > 100


def test_so_many_architectures_are_certified() -> None:
    print(f"{len(ARCHITECTURES)} architectures")
    assert len(ARCHITECTURES) >= 20


MLP = {"_target_": "instrument.run.models.MLP", "sizes": [3 * 64 * 64, 8, 10]}


def test_a_hook_that_changes_something_is_found_with_its_step_and_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Record.__call__

    def moves_the_random_state(self: Record, tensor: Any, context: Any) -> None:
        honest(self, tensor, context)
        if context.hook == "sums" and context.step == 1:
            torch.rand(1)

    monkeypatch.setattr(Record, "__call__", moves_the_random_state)
    difference = verify(parse_config(config_of(MLP, steps=3))).difference
    assert difference is not None
    assert (difference.step, difference.what, difference.hook) == (1, "the random state", "sums")

    def writes_in_place(self: Record, tensor: Any, context: Any) -> None:
        if context.hook == "gradients" and context.layer == "layers.1" and context.path == "bias":
            tensor.mul_(1.5)

    monkeypatch.setattr(Record, "__call__", writes_in_place)
    difference = verify(parse_config(config_of(MLP))).difference
    assert difference is not None
    assert str(difference) == "step 0: gradients differs at layers.1.bias, with hook 'gradients'"


def verify_command(cli: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch, *overrides: str) -> Answer:
    import instrument.__main__
    from instrument import verify as command

    monkeypatch.setattr(instrument.__main__, "command", lambda job: command.main())
    return cli(*overrides, "hydra.run.dir=out")


SMALL = ["+exp=mnist_hooks", "data=digits", "data.dataset.size=28", "train.steps=3"]


def test_the_command_prints_and_keeps_the_certificate(
    cli: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = verify_command(cli, monkeypatch, *SMALL)
    assert answer.code == 0, answer.err
    assert "EQUAL to the last bit" in answer.out
    assert "left out, since they change values by design: tame, quiet, noisy" in answer.out
    kept = json.loads(Path("out/certificate.json").read_text())
    assert kept["holds"] is True
    assert kept["hooks"] == ["activations", "digit_maps", "gradients"]


def test_the_command_fails_where_the_trainings_differ(
    cli: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Record, "__call__", draws)
    answer = verify_command(cli, monkeypatch, *SMALL)
    assert answer.code == 1
    assert "NOT EQUAL: step 0: the random state differs, with hook 'activations'" in answer.out


def draws(self: Record, tensor: Any, context: Any) -> None:
    torch.rand(1)


def test_a_mistake_is_told_as_ever(cli: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch) -> None:
    answer = verify_command(cli, monkeypatch, *SMALL, "hooks.tame.norm=-1")
    assert answer.code == 2
    assert "hooks.tame.norm" in answer.err
