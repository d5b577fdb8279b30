"""The certificate: record hooks change nothing, on architectures of every make; and a change is found."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import CLASSES, TIMM, TORCHVISION, Architecture, of_timm, of_torchvision
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


def of_library(architecture: Architecture) -> dict[str, Any]:
    target = f"torchvision.models.{architecture.name}"
    named = {"_target_": target, "weights": None}
    if architecture.library == "timm":
        named = {"_target_": "timm.create_model", "model_name": architecture.name}
    return {**named, "num_classes": CLASSES, **architecture.arguments}


def hugging_face(name: str, **config: Any) -> dict[str, Any]:
    tiny = {"vocab_size": 128, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0, **config}
    config_class = getattr(transformers, name).config_class.__name__
    return {"_target_": f"transformers.{name}", "config": {"_target_": f"transformers.{config_class}", **tiny}}


WIDE = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
LANGUAGE: dict[str, dict[str, Any]] = {
    "BertLMHeadModel": {"is_decoder": True, **WIDE},
    "BioGptForCausalLM": WIDE,
    "BloomForCausalLM": {"hidden_size": 16, "n_layer": 2, "n_head": 2},
    "CodeGenForCausalLM": {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, "rotary_dim": 4},
    "ElectraForCausalLM": {"is_decoder": True, "embedding_size": 16, **WIDE},
    "FalconForCausalLM": WIDE,
    "GPT2LMHeadModel": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32},
    "GPTJForCausalLM": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "rotary_dim": 4},
    "GPTNeoXForCausalLM": WIDE,
    "Gemma2ForCausalLM": {**WIDE, "num_key_value_heads": 2, "head_dim": 8},
    "LlamaForCausalLM": WIDE,
    "MistralForCausalLM": {**WIDE, "num_key_value_heads": 1},
    "MixtralForCausalLM": {**WIDE, "num_key_value_heads": 1, "num_local_experts": 2},
    "OPTForCausalLM": {"ffn_dim": 32, "max_position_embeddings": 32, "word_embed_proj_dim": 16, **WIDE},
    "PhiForCausalLM": WIDE,
    "Qwen2ForCausalLM": {**WIDE, "num_key_value_heads": 1},
    "Qwen3ForCausalLM": {**WIDE, "num_key_value_heads": 1, "head_dim": 8},
    "RobertaForCausalLM": {"is_decoder": True, "max_position_embeddings": 40, **WIDE},
    "StableLmForCausalLM": {**WIDE, "num_key_value_heads": 2},
    "XLNetLMHeadModel": {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32},
}
UNFIT = frozenset({"googlenet", "deit_tiny_distilled_patch16_224"})  # they give several outputs to train on
VISION = [each for each in map(of_torchvision, TORCHVISION) if each.name not in UNFIT and each.size == 64]
VISION += [each for each in map(of_timm, TIMM) if each.name not in UNFIT and each.size == 64]
MODELS: dict[str, Callable[[], dict[str, Any]]] = {
    **{str(each): partial(of_library, each) for each in VISION},
    **{f"transformers {name}": partial(hugging_face, name, **sizes) for name, sizes in LANGUAGE.items()},
}
QUICK = """
    densenet121 mnasnet0_5 mobilenet_v3_small resnet18 shufflenet_v2_x0_5 squeezenet1_1 swin_t

    convnext_atto dla46_c edgenext_xx_small ghostnet_050 hgnetv2_b0 lcnet_050 mambaout_femto regnetx_002 resnet10t
    resnetv2_18 starnet_s050 test_efficientnet test_nfnet test_resnet tinynet_e
"""
QUICK_ONES = [name for name in MODELS if name.split()[1] in QUICK.split() or name.startswith("transformers")]


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


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK_ONES else pytest.mark.slow) for name in MODELS]
)
def test_recording_everything_changes_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    certificate = verify(parse_config(config_of(MODELS[name]())))
    assert certificate.holds, str(certificate.difference)
    assert certificate.steps == 2
    assert certificate.tensors > 10
    assert certificate.rows > 100


def test_so_many_architectures_are_certified(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\nverify: {len(MODELS)} architectures, of which quick: {len(QUICK_ONES)}")
    assert len(QUICK_ONES) >= 40
    assert {name.split()[0] for name in QUICK_ONES} == {"torchvision", "timm", "transformers"}


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
    assert kept["hooks"] == ["activations", "digit", "digit_maps", "gradients", "updates"]


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
