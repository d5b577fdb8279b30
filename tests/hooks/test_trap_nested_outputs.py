"""Trap: modules that return more than a tensor (tuples, dicts, dataclasses, None), or take only keyword arguments.

What is recorded at each path is bit-identical to plain PyTorch: values from plain hooks, gradients from
`retain_grad` on an uninstrumented copy of the model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hook_runs import Calls, keep, run_steps, tensors_by
from tiers import tiered
from torch import Tensor, nn

import instrument

HOOKS = {
    "output": keep("forward", "**"),
    "input": keep("forward_pre", "**"),
    "grad_output": keep("tensor", "**"),
    "grad_input": keep("tensor", "**", role="input"),
    "own_grad_output": keep("full_backward_pre", "**"),
}
Key = tuple[str, str, str, int]  # hook, layer, path, call
Parts = Iterator[tuple[str, Tensor]]


@dataclass
class Pair:
    """A custom dataclass with a nested value and an empty field."""

    mean: Tensor
    rest: dict[str, Any]
    nothing: None = None


def mixed() -> nn.Module:
    """Return a model with a mix of nested values; its submodule takes only keyword arguments."""

    def inner(linear: nn.Module, *, values: dict[str, Tensor], scale: float) -> Pair:
        hidden = linear(values["x"]) * scale
        return Pair(hidden.mean(0), {"deep": [hidden.sin(), None, (hidden.cos(),)], "count": 3})

    def outer(part: nn.Module, x: Tensor) -> tuple[Tensor, None, dict[str, Tensor]]:
        pair = part(values={"x": x, "unused": torch.ones(2)}, scale=2.0)
        deep = pair.rest["deep"]
        return pair.mean + deep[0].sum(0), None, {"cos": deep[2][0] * 3}

    return Calls(outer, part=Calls(inner, linear=nn.Linear(4, 4)))


def attention() -> nn.Module:
    def forward(linear: nn.Module, attention: nn.Module, x: Tensor, memory: Tensor) -> Any:
        memory = linear(memory)
        return attention(x, memory, value=memory * 2, need_weights=True)

    return Calls(forward, linear=nn.Linear(8, 8), attention=nn.MultiheadAttention(8, 2, batch_first=True))


def transformers_model(name: str, **more: Any) -> Callable[[], nn.Module]:
    """Return a factory of a tiny transformers model, built from its configuration."""

    def make() -> nn.Module:
        import transformers

        sizes = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0, "decoder_start_token_id": 0}
        model_class = getattr(transformers, name)
        return model_class(model_class.config_class(**sizes, **more))

    return make


WIDE = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TOKENS = torch.arange(12).view(2, 6) + 2
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]]]] = {
    "LSTM": (lambda: nn.LSTM(5, 6, 2, bidirectional=True), lambda: {"input": torch.randn(7, 2, 5)}),
    "GRU": (lambda: nn.GRU(5, 6), lambda: {"input": torch.randn(7, 2, 5), "hx": torch.randn(1, 2, 6)}),
    "LSTMCell": (lambda: nn.LSTMCell(5, 6), lambda: {"input": torch.randn(2, 5)}),
    "MultiheadAttention": (attention, lambda: {"x": torch.randn(2, 3, 8), "memory": torch.randn(2, 5, 8)}),
    "dataclass": (mixed, lambda: {"x": torch.randn(3, 4)}),
    "GPT-2": (
        transformers_model("GPT2LMHeadModel", n_embd=16, n_layer=2, n_head=2, n_positions=16),
        lambda: {"input_ids": TOKENS, "labels": TOKENS, "output_hidden_states": True, "use_cache": False},
    ),
    "Llama": (
        transformers_model("LlamaForCausalLM", **WIDE),
        lambda: {"input_ids": TOKENS, "labels": TOKENS, "use_cache": False},
    ),
    "BERT": (
        transformers_model("BertForSequenceClassification", attn_implementation="eager", **WIDE),
        lambda: {"input_ids": TOKENS, "labels": torch.tensor([0, 1]), "output_attentions": True},
    ),
    "T5": (
        transformers_model("T5ForConditionalGeneration", d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2),
        lambda: {"input_ids": TOKENS, "labels": TOKENS, "use_cache": False},
    ),
}
PATHS = {  # some that have to exist: hook, layer, path
    "LSTM": [("output", "", "1.0"), ("output", "", "1.1"), ("grad_output", "", "1.1")],
    "GRU": [("output", "", "1"), ("input", "", "hx")],
    "LSTMCell": [("output", "", "0"), ("grad_output", "", "1")],
    "MultiheadAttention": [("output", "attention", "1"), *[(f, "attention", "value") for f in ("input", "grad_input")]],
    "dataclass": [
        ("output", "part", "rest.deep.2.0"),
        ("input", "part", "values.unused"),
        ("grad_output", "part", "mean"),
    ],
    "GPT-2": [("output", "", "logits"), ("output", "", "hidden_states.2"), ("grad_output", "transformer.h.0", "")],
    "Llama": [("output", "", "logits"), ("grad_input", "model.layers.1.self_attn", "hidden_states")],
    "BERT": [("output", "", "attentions.1"), ("grad_output", "bert", "pooler_output")],
    "T5": [("output", "", "encoder_last_hidden_state"), ("grad_output", "encoder", "last_hidden_state")],
}


def parts(value: Any, path: str = "") -> Parts:
    """Yield the tensors of a value; an independent implementation of the traversal under test."""
    if isinstance(value, Tensor):
        yield path, value
        return
    if isinstance(value, dict):
        children = value.items()
    elif isinstance(value, tuple | list):
        children = {str(i): item for i, item in enumerate(value)}.items()
    elif isinstance(value, Pair):
        children = vars(value).items()
    else:
        children = {}.items()
    for key, child in children:
        yield from parts(child, f"{path}.{key}" if path else key)


def step(model: nn.Module, given: dict[str, Any]) -> None:
    """Run a forward pass, and a backward pass from all outputs."""
    torch.manual_seed(1)
    output = model(**given)
    sum(part.float().square().sum() for _, part in parts(output) if part.requires_grad).backward()


def reference(model: nn.Module, given: dict[str, Any]) -> tuple[dict[Key, Tensor], dict[Key, Tensor]]:
    """Return what plain hooks see, and the gradients of the same tensors."""
    values: dict[Key, Tensor] = {}
    kept: dict[Key, Tensor] = {}
    calls: dict[str, int] = {}

    def keep(hook: str, name: str, value: Any, call: int) -> None:
        visited: set[int] = set()  # one tensor at two paths has one gradient, recorded at the first path
        for path, part in parts(value):
            values[hook, name, path, call] = part.detach().clone()
            if part.requires_grad and id(part) not in visited:
                visited.add(id(part))
                part.retain_grad()
                kept[f"grad_{hook}", name, path, call] = part

    def before(name: str) -> Callable[..., None]:
        return lambda module, args, kwargs: keep(
            "input", name, {**{str(i): arg for i, arg in enumerate(args)}, **kwargs}, calls.get(name, 0)
        )

    def after(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            keep("output", name, output, calls.get(name, 0))
            calls[name] = calls.get(name, 0) + 1

        return hook

    for name, module in model.named_modules():
        module.register_forward_pre_hook(before(name), with_kwargs=True)
        module.register_forward_hook(after(name))
    step(model, given)
    return values, {key: part.grad.clone() for key, part in kept.items() if part.grad is not None}


@pytest.mark.parametrize("name", tiered(MODELS, MODELS.keys() - {"Llama", "T5"}))
def test_every_nested_tensor_is_recorded_with_its_gradient(name: str) -> None:
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    model = make().train()
    given = inputs()
    values, gradients = reference(copy.deepcopy(model), given)
    seen = tensors_by(run_steps(model, HOOKS, lambda: step(model, given)), "hook", "layer", "path", "call")
    own = {key: seen.pop(key) for key in list(seen) if key[0] == "own_grad_output"}
    assert seen.keys() == values.keys() | gradients.keys()
    for key, wanted in (values | gradients).items():
        assert torch.equal(seen[key], wanted), key
    # The output of a module has one gradient, whichever kind records it.
    assert own.keys() == {("own_grad_output", *key[1:]) for key in gradients if key[0] == "grad_output"}
    assert all(torch.equal(value, gradients["grad_output", *key[1:]]) for key, value in own.items())
    for hook, layer, path in PATHS[name]:
        assert (hook, layer, path, 0) in seen


VISION = {"image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 3}


@pytest.mark.spread(2)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM", "ViTForImageClassification"])
def test_attention_functions_of_transformers_are_recorded(name: str, implementation: str) -> None:
    """The recorded softmax equals the attentions that the model returns; the context equals the argument of its next step."""
    import transformers

    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": 64} if "GPT2" in name else WIDE
    is_vision = name.startswith("ViT")
    config_class = getattr(transformers, name).config_class
    config = config_class(**sizes, **(VISION if is_vision else {"bos_token_id": 0, "eos_token_id": 1}))
    model = getattr(transformers, name)._from_config(config, attn_implementation=implementation).eval()
    given = {"pixel_values": torch.randn(2, 1, 8, 8)} if is_vision else {"input_ids": TOKENS, "use_cache": False}
    function = "softmax" if implementation == "eager" else "scaled_dot_product_attention"
    spec = keep("function", "**", types="*Attention", functions=function)
    inputs = {**spec, "role": "input"}
    with instrument.attach(model, {"results": spec, "arguments": inputs}) as probe, torch.no_grad():
        attentions = model(**given, output_attentions=implementation == "eager").attentions
        probe.end_step()
    rows = [row for row in probe.sink.records("tensors") if row["hook"] == "results"]
    assert [row["path"] for row in rows] == [f"{function}.0"] * 2
    if implementation == "eager":
        assert all(torch.equal(row["values"], each) for row, each in zip(rows, attentions, strict=True))
        return
    arguments = {
        row["path"]: row["values"] for row in probe.sink.records("tensors") if row["layer"] == rows[0]["layer"]
    }
    query, key, value = (arguments[f"{function}.0.{i}"] for i in range(3))
    causal = not is_vision
    result = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
    assert torch.allclose(rows[0]["values"], result, atol=1e-6)
