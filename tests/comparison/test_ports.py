"""`instrument.diff` of folders of tensors: seeded faults of ports are found at the right layer, and correct ports do not differ."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from implementations import GPT2_NAMES, LLAMA_NAMES, Fault, Gpt2Port, LlamaBlock, LlamaPort, gpt2, llama
from torch import Tensor, nn

import instrument
from instrument.comparison.result import Diff

TOKENS = torch.randint(3, 61, (2, 7), generator=torch.Generator().manual_seed(1))
ATTENTION = "model.layers.0.self_attn"

FAULTS: dict[str, tuple[Fault, str]] = {
    "epsilon": (Fault(epsilon=1e-5), "model.layers.0.input_layernorm"),
    "cast inside RMSNorm": (Fault(cast_in_block=1), "model.layers.1.input_layernorm"),
    "base of RoPE": (Fault(rope_base=10_500.0), ATTENTION),
    "interleaved RoPE": (Fault(is_interleaved=True), ATTENTION),
    "order of fused QKV": (Fault(swaps_keys_and_values=True), f"{ATTENTION}.k_proj"),
    "stale weight": (Fault(stale_block=1), "model.layers.1.mlp.up_proj"),
    "mask": (Fault(is_causal=False), ATTENTION),
    "scale of attention": (Fault(scale=1.01), ATTENTION),
    "tied head": (Fault(untied_head=True), "lm_head"),
}
GPT2_FAULTS: dict[str, tuple[Fault, str]] = {
    "variant of GELU": (Fault(gelu="none"), "transformer.h.0.mlp"),
    "missing bias": (Fault(no_bias_in_block=1), "transformer.h.1.mlp.c_fc"),
    "order of fused QKV": (Fault(swaps_keys_and_values=True), "transformer.h.0.attn.c_attn"),
    "tied head": (Fault(untied_head=True), "lm_head"),
}


def compare(
    folder: Path, one: nn.Module, other: nn.Module, names: dict[str, str] | None = None, *, float64: bool = True
) -> Diff:
    instrument.dump(one, {"input_ids": TOKENS}, out=folder / "a", float64=float64)
    instrument.dump(other, (TOKENS,), out=folder / "b")
    return instrument.diff(folder / "a", folder / "b", rename=names or {})


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_fault_of_a_llama_port_is_named(name: str, tmp_path: Path) -> None:
    fault, layer = FAULTS[name]
    original = llama(tie_word_embeddings=name == "tied head")
    found = compare(tmp_path, original, LlamaPort(original, fault), LLAMA_NAMES)
    assert found.suspect == layer, str(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", GPT2_FAULTS)
def test_fault_of_a_gpt2_port_is_named(name: str, tmp_path: Path) -> None:
    fault, layer = GPT2_FAULTS[name]
    original = gpt2()
    found = compare(tmp_path, original, Gpt2Port(original, fault), GPT2_NAMES)
    assert found.suspect == layer, str(found)


MASK = torch.tensor([[1] * 5 + [0] * 2, [1] * 7])


def padded_left(tokens: Tensor) -> dict[str, Tensor]:
    """Return the samples of `TOKENS` and `MASK` in the other order, padded on the left to nine tokens."""
    ids, mask = torch.zeros(2, 9, dtype=torch.long), torch.zeros(2, 9, dtype=torch.long)
    ids[0, 2:], ids[1, 4:], mask[0, 2:], mask[1, 4:] = tokens[1], tokens[0, :5], 1, 1
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def fused_qkv(a: Path, b: Path) -> dict[str, str]:
    original = llama()
    instrument.dump(original, {"input_ids": TOKENS}, out=a, float64=True)
    instrument.dump(LlamaPort(original), (TOKENS,), out=b)
    return LLAMA_NAMES


def estimated_noise(a: Path, b: Path) -> dict[str, str]:
    original = llama()
    instrument.dump(original, {"input_ids": TOKENS}, out=a)
    instrument.dump(LlamaPort(original), (TOKENS,), out=b)
    return LLAMA_NAMES


def transposed_linear(a: Path, b: Path) -> dict[str, str]:
    original = gpt2()
    instrument.dump(original, {"input_ids": TOKENS}, out=a, float64=True)
    instrument.dump(Gpt2Port(original), (TOKENS,), out=b)
    return GPT2_NAMES


def attention_kernels(a: Path, b: Path) -> dict[str, str]:
    for implementation, out in (("sdpa", a), ("eager", b)):
        batch = {"input_ids": TOKENS, "attention_mask": MASK}
        instrument.dump(llama(attn_implementation=implementation), batch, out=out, float64=out == a)
    return {}


def padding_and_order(a: Path, b: Path) -> dict[str, str]:
    model = llama(attn_implementation="eager")
    instrument.dump(model, {"input_ids": TOKENS, "attention_mask": MASK}, out=a, float64=True)
    instrument.dump(model, padded_left(TOKENS), out=b)
    return {}


def packed_tokens(a: Path, b: Path) -> dict[str, str]:
    original = llama()
    instrument.dump(original, {"input_ids": TOKENS, "attention_mask": MASK}, out=a, float64=True)
    tokens, positions = torch.cat([TOKENS[1], TOKENS[0, :5]]), torch.cat([torch.arange(7), torch.arange(5)])
    instrument.dump(LlamaPort(original), (tokens, positions), out=b)
    return LLAMA_NAMES


def packed_row(a: Path, b: Path) -> dict[str, str]:
    """Samples in one row of shape [1, tokens], whose positions begin again at each sample."""
    model = llama(attn_implementation="eager")
    instrument.dump(model, {"input_ids": TOKENS, "attention_mask": MASK}, out=a, float64=True)
    tokens, positions = torch.cat([TOKENS[1], TOKENS[0, :5]]), torch.cat([torch.arange(7), torch.arange(5)])
    sample = torch.cumsum(positions == 0, 0)
    mask = torch.where((sample[:, None] == sample) & torch.ones(12, 12, dtype=torch.bool).tril(), 0.0, -1e9)
    batch = {"input_ids": tokens[None], "position_ids": positions[None], "attention_mask": mask[None, None]}
    instrument.dump(model, batch, out=b)
    return {}


def cached_generation(a: Path, b: Path) -> dict[str, str]:
    model = llama()
    with instrument.Dump(model, out=b):
        text = model.generate(TOKENS, max_new_tokens=3, do_sample=False, pad_token_id=0)  # type: ignore[operator]
    instrument.dump(model, {"input_ids": text}, out=a, float64=True)
    return {}


def cached_generation_with_expressions(a: Path, b: Path) -> dict[str, str]:
    model = llama()
    with instrument.Dump(model, out=b):
        text = model.generate(TOKENS, max_new_tokens=3, do_sample=False, pad_token_id=0)  # type: ignore[operator]
    instrument.dump(LlamaPort(model), (text,), "blocks.**", out=a, float64=True)
    layer = "model.layers.*"
    attention = ", ".join(f"{layer}.self_attn.{name}_proj" for name in "qkv")
    return {
        "blocks.*.attn.qkv": f"cat({attention})",
        "blocks": "model.layers",
        "blocks.*.norm1": f"{layer}.input_layernorm",
    }


def other_order_of_sums(a: Path, b: Path) -> dict[str, str]:
    original = llama().bfloat16()
    instrument.dump(original, {"input_ids": TOKENS}, out=a, float64=True)
    instrument.dump(LlamaPort(original, Fault(chunks=4)), (TOKENS,), out=b)
    return LLAMA_NAMES


def estimated_noise_of_bfloat16(a: Path, b: Path) -> dict[str, str]:
    original = llama().bfloat16()
    instrument.dump(original, {"input_ids": TOKENS}, out=a)
    instrument.dump(LlamaPort(original, Fault(chunks=4)), (TOKENS,), out=b)
    return LLAMA_NAMES


def residual_stream(a: Path, b: Path) -> dict[str, str]:
    """A block that returns the output of its MLP and the residual stream, like the fused norms of inference engines."""

    class Block(LlamaBlock):
        def forward(self, x: Any, positions: Tensor, mask: Tensor) -> Any:
            x = x[0] + x[1] if isinstance(x, tuple) else x
            x = x + self.attn(self.norm1(x), positions, mask)
            return self.mlp(self.norm2(x)), x

    original = llama()
    port = LlamaPort(original)
    for block in port.blocks:
        block.__class__ = Block
    port.norm.register_forward_pre_hook(lambda _, args: args[0][0] + args[0][1])
    instrument.dump(original, {"input_ids": TOKENS}, out=a, float64=True)
    instrument.dump(port, (TOKENS,), out=b)
    return LLAMA_NAMES | {
        "model.layers.*": "blocks.*:output.0 + blocks.*:output.1",
        "model.layers.1:input": "blocks.1:input.x.0 + blocks.1:input.x.1",
    }


def images_by_sample(a: Path, b: Path) -> dict[str, str]:
    from torchvision.models import resnet18

    torch.manual_seed(0)
    model, images = resnet18(num_classes=3).eval(), torch.randn(3, 3, 32, 32)
    instrument.dump(model, images, ["*", "layer?.**"], out=a, ids={"samples": torch.tensor([5, 6, 7])}, float64=True)
    other = images[[2, 0, 1]].contiguous(memory_format=torch.channels_last)
    model = model.to(memory_format=torch.channels_last)
    instrument.dump(model, other, ["*", "layer?.**"], out=b, ids={"samples": torch.tensor([7, 5, 6])})
    return {}


EQUAL: dict[Callable[[Path, Path], dict[str, str]], int] = {
    fused_qkv: 40,
    estimated_noise: 40,
    transposed_linear: 30,
    attention_kernels: 50,
    padding_and_order: 70,
    packed_tokens: 40,
    packed_row: 60,
    cached_generation: 50,
    cached_generation_with_expressions: 8,
    other_order_of_sums: 40,
    estimated_noise_of_bfloat16: 40,
    residual_stream: 35,
    images_by_sample: 20,
}
"""Pairs of correct implementations, and how many tensors of each are compared at least."""


SLOW = (estimated_noise, packed_tokens)  # `estimated_noise_of_bfloat16` and `packed_row` are quick


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    "pair",
    [pytest.param(pair, id=pair.__name__, marks=pytest.mark.slow if pair in SLOW else ()) for pair in EQUAL],
)
def test_correct_implementations_do_not_differ(pair: Callable[[Path, Path], dict[str, str]], tmp_path: Path) -> None:
    found = instrument.diff(tmp_path / "a", tmp_path / "b", rename=pair(tmp_path / "a", tmp_path / "b"))
    assert found.is_within_tolerance, str(found)
    assert len(found.tensors) >= EQUAL[pair]
    print(found)
