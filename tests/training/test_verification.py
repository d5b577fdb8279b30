"""Verification: record hooks leave training bit-identical on many architectures, and changes are detected."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import TIMM, TORCHVISION, Architecture, of_timm, of_torchvision
from conftest import Answer
from device_statistics import use_general_path
from tiers import tiered
from torch import Tensor, nn

import instrument
from instrument.actions.record import Record
from instrument.config.parse import parse_config
from instrument.tasks import NextToken
from instrument.training.verification import trace, verify

HOOKS = {
    "outputs": {"layers": "**", "kind": "forward", "action": "record"},
    "inputs": {"layers": "**", "kind": "forward_pre", "action": "record", "stats": ["mean"]},
    "own": {"layers": "**", "kind": "full_backward", "action": "record"},
    "flow": {"layers": "**", "kind": "full_backward", "role": "grad_output", "action": "record"},
    "total": {"layers": "**", "kind": "tensor", "role": "input", "action": "record", "stats": ["l2"]},
    "functions": {"layers": "**", "kind": "function", "functions": "*", "action": "record", "stats": ["mean"]},
    "results": {"layers": "**", "kind": "function_grad", "functions": "*", "action": "record", "stats": ["l2"]},
    "sums": {"layers": "**", "kind": "post_accumulate_grad", "action": "record"},
    "gradients": {"layers": "**", "kind": "parameter_grad", "action": "record"},
    "updates": {"layers": "**", "kind": "step_post", "role": "update", "action": "record"},
}
IMAGES = {"_target_": "instrument.training.datasets.random_tensors", "shape": [3, 64, 64], "samples": 8}
TEXT = {"_target_": "instrument.training.datasets.english", "length": 12}


def of_library(architecture: Architecture) -> dict[str, Any]:
    named = {"library": architecture.library, "name": architecture.name}
    return {"_target_": "architectures.create", **named, **architecture.arguments}


def hugging_face(name: str, **config: Any) -> dict[str, Any]:
    tiny = {"vocab_size": 128, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0, **config}
    import transformers

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
VISION = [each for each in (*map(of_torchvision, TORCHVISION), *map(of_timm, TIMM[::2])) if each.size == 64]
VISION = [each for each in VISION if each.name != "googlenet"]  # which returns several outputs for training
MODELS: dict[str, Callable[[], dict[str, Any]]] = {
    "small": lambda: {"_target_": "architectures.small_network"},
    **{str(each): partial(of_library, each) for each in VISION},
    **{f"transformers {name}": partial(hugging_face, name, **sizes) for name, sizes in LANGUAGE.items()},
}
QUICK = ("small", "transformers MixtralForCausalLM")


def config_of(model: dict[str, Any], hooks: dict[str, Any] = HOOKS, steps: int = 2) -> dict[str, Any]:
    is_text = model["_target_"].startswith("transformers.")
    task = {"_target_": "instrument.tasks.NextToken"}
    if not is_text:
        task = {"_target_": "instrument.tasks.Supervised", "loss": {"_target_": "torch.nn.CrossEntropyLoss"}}
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


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", tiered(MODELS, QUICK))
def test_recording_is_bit_identical_on_every_architecture(name: str) -> None:
    certificate = verify(parse_config(config_of(MODELS[name]())))
    assert certificate.holds, str(certificate.difference)
    assert certificate.steps == 2
    assert certificate.tensors > 10
    assert certificate.rows > 100


MLP = {"_target_": "instrument.training.models.MLP", "sizes": [3 * 64 * 64, 8, 10]}


def test_changing_hook_is_found_with_step_and_location(monkeypatch: pytest.MonkeyPatch) -> None:
    original_call = Record.__call__

    def moves_the_random_state(self: Record, tensor: Any, context: Any) -> None:
        original_call(self, tensor, context)
        if context.hook == "sums" and context.step == 1:
            torch.rand(1)

    hooks = {name: HOOKS[name] for name in ("outputs", "sums", "gradients")}
    use_general_path(monkeypatch)
    monkeypatch.setattr(Record, "__call__", moves_the_random_state)
    difference = verify(parse_config(config_of(MLP, hooks))).difference
    assert difference is not None
    assert (difference.step, difference.what, difference.hook) == (1, "the random state", "sums")

    def writes_in_place(self: Record, tensor: Any, context: Any) -> None:
        if context.hook == "gradients" and context.layer == "layers.1" and context.path == "bias":
            tensor.mul_(1.5)

    monkeypatch.setattr(Record, "__call__", writes_in_place)
    certificate = verify(parse_config(config_of(MLP, hooks, steps=1)))
    assert str(certificate.difference) == "step 0: the gradient differs at layers.1.bias, with hook 'gradients'"
    assert certificate.largest is not None
    assert certificate.largest[0] > 0.0
    assert certificate.largest[1] == "layers.1.bias"


class Drifting(nn.Module):
    """A model that adds a number from an external source to its output."""

    counter = itertools.count(1)

    def __init__(self, source: str) -> None:
        super().__init__()
        self.fc = nn.Linear(3 * 64 * 64, 10)
        self.source = source
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        numbers: dict[str, Callable[[], float]] = {
            "time": lambda: time.time_ns() % 2**20 + 1.0,
            "os.urandom": lambda: 1.0 + int.from_bytes(os.urandom(3)),
            "a global counter": lambda: float(next(self.counter)),
            "nothing": lambda: 0.0,
        }
        scores: Tensor = self.fc(images.flatten(1)) * self.scale
        return scores + torch.arange(10.0) * numbers[self.source]() / 2**10


def drifting_config(source: str) -> dict[str, Any]:
    return {"_target_": f"{__name__}.Drifting", "source": source}


@pytest.mark.parametrize("source", tiered(["time", "os.urandom", "a global counter"], ["a global counter"]))
def test_nondeterministic_model_is_not_blamed_on_a_hook(source: str) -> None:
    certificate = verify(parse_config(config_of(drifting_config(source), steps=1)))
    assert not certificate.holds
    assert certificate.difference is None
    assert str(certificate.unrepeated) == "step 0: the loss differs"


def test_hook_that_changes_an_evaluation_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook scales the outputs, which changes neither the accuracy nor later training steps, but the loss."""

    def doubles(self: Record, tensor: Any, context: Any) -> None:
        if context.moment.phase == "eval":
            tensor.mul_(2.0)

    use_general_path(monkeypatch)
    monkeypatch.setattr(Record, "__call__", doubles)
    hooks = {"seen": {"layers": "fc", "kind": "forward", "action": "record", "phase": "eval"}}
    config = config_of(drifting_config("nothing"), hooks) | {"train": {"steps": 4, "batch_size": 4, "eval_every": 2}}
    difference = verify(parse_config(config)).difference
    assert str(difference) == "evaluation after 2 steps: the loss differs, with hook 'seen'"


def test_verification_weights_batches_like_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []
    count = NextToken.number_of_terms
    monkeypatch.setattr(NextToken, "number_of_terms", lambda task, batch: counted.append(1) or count(task, batch))
    config = config_of(MODELS["transformers GPT2LMHeadModel"](), {}, steps=1)
    trace(parse_config(config), {})
    assert len(counted) == 2, "expected one training batch and one evaluation batch"


def test_state_of_every_optimizer_is_compared() -> None:
    part = {"_target_": "torch.optim.Adam", "_partial_": True}
    config = config_of(MLP, {}, steps=1)
    sizes = []
    several: dict[str, Any] = {"_target_": "instrument.training.per_module_optimizers.PerModule"}
    several["optimizers"] = {"layers.0": part, "layers.1": part}
    for optimizer in ({"_target_": "torch.optim.Adam"}, several):
        fingerprints = trace(parse_config(config | {"optimizer": optimizer}), {}, 1).fingerprints
        sizes.append([what for what, _ in fingerprints[0].bits].count("the optimizer state"))
    assert sizes[0] == sizes[1] > 0


@pytest.mark.slow
def test_non_persistent_buffer_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def scales_buffer(self: Record, tensor: Any, context: Any) -> None:
        if context.moment.step == 1:
            model.scale.mul_(1.0 + 2**-20)

    model: Any = None
    original_init = Drifting.__init__

    def keeps_model(self: Drifting, source: str) -> None:
        nonlocal model
        original_init(self, source)
        model = self

    monkeypatch.setattr(Drifting, "__init__", keeps_model)
    use_general_path(monkeypatch)
    monkeypatch.setattr(Record, "__call__", scales_buffer)
    hooks = {"seen": {"layers": "fc", "kind": "step_post", "action": "record"}}
    difference = verify(parse_config(config_of(drifting_config("nothing"), hooks, steps=2))).difference
    assert str(difference) == "step 1: the buffer differs at scale, with hook 'seen'"


@pytest.mark.slow
def test_search_for_the_hook_keeps_the_schedule_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainings with one hook at a time are stopped early; they are not configured with fewer steps."""

    def draws_late(self: Record, tensor: Any, context: Any) -> None:
        if context.hook == "second" and context.moment.step == 1:
            torch.rand(1)

    use_general_path(monkeypatch)
    monkeypatch.setattr(Record, "__call__", draws_late)
    record = {"layers": "fc", "kind": "forward", "action": "record"}
    config = config_of(drifting_config("nothing"), {"first": record, "second": record}, steps=4)
    config["scheduler"] = {"_target_": f"{__name__}.decay"}
    difference = verify(parse_config(config)).difference
    assert str(difference) == "step 1: the random state differs, with hook 'second'"


def decay(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - step / steps)


SMALL = [
    *("model=mlp", "model.sizes=[64,8,10]", "data=digits", "data.slice.stop=8", "data.eval_slice.stop=8"),
    *("train.steps=1", "hooks=activations"),
    "+hooks.tame={layers: '**', kind: parameter_grad, action: clip, norm: 1.0}",
]


@pytest.fixture
def verify_command(cli: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Answer]:
    """Function that runs `python -m instrument.verify` with overrides, in this process."""
    from instrument.commands import verify as command

    monkeypatch.setattr("instrument.commands.hydra_main.command", lambda job: command.main())
    return lambda *overrides: cli(*SMALL, *overrides, "hydra.run.dir=out")


def test_verify_command_prints_and_writes_the_certificate(verify_command: Callable[..., Answer]) -> None:
    answer = verify_command().expect(0)
    assert "EQUAL BITS: all compared values are equal" in answer.out
    assert "not verified, since they change values by design: tame" in answer.out
    kept = json.loads(Path("out/certificate.json").read_text())
    assert kept["holds"] is True
    assert kept["hooks"] == ["activations"]
    with pytest.raises(
        instrument.NoRunError, match=r"no run\.json in or below out: verify wrote it, and keeps no rows"
    ):
        instrument.load("out")


def test_verify_command_fails_if_the_trainings_differ(
    verify_command: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def draws_random_number(self: Record, tensor: Any, context: Any) -> None:
        torch.rand(1)

    use_general_path(monkeypatch)
    monkeypatch.setattr(Record, "__call__", draws_random_number)
    answer = verify_command().expect(1)
    assert "NOT EQUAL: step 0: the random state differs, with hook 'activations'" in answer.out
    assert "at the end, parameters differ by at most 0 (" in answer.out


@pytest.mark.slow
def test_verify_command_exits_with_3_if_not_repeatable(
    verify_command: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = itertools.count(1)
    plain = torch.nn.Linear.forward
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, x: plain(self, x) * next(counter))
    answer = verify_command().expect(3)
    text = answer.out.replace("\n", " ")
    assert "NOT REPEATABLE: two trainings without hooks differ at step 0: the loss differs" in text
    kept = json.loads(Path("out/certificate.json").read_text())
    assert (kept["holds"], kept["difference"], kept["unrepeated"]["step"]) == (False, None, 0)


def test_verify_command_reports_configuration_errors(verify_command: Callable[..., Answer]) -> None:
    assert "hooks.tame.norm" in verify_command("hooks.tame.norm=-1").expect(2).err


@pytest.mark.slow
def test_verification_includes_hooks_that_print_and_call(capsys: pytest.CaptureFixture[str]) -> None:
    hook = {"layers": "**", "kind": "forward"}
    hooks = {
        "printed": {**hook, "action": "print"},
        "called": {**hook, "action": "call", "fn": lambda tensor, context: None},
        "custom": {**hook, "action": "record", "stats": [torch.amax]},
    }
    certificate = verify(parse_config(config_of(MLP, hooks)))
    assert certificate.hooks == tuple(hooks)
    assert certificate.left_out == ()
    assert certificate.holds
    assert capsys.readouterr().out == ""
