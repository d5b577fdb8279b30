"""`instrument.diff` of folders of tensors: seeded faults of ports are found at the right layer, and correct ports do not differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from implementations import GPT2_NAMES, LLAMA_NAMES, Fault, Gpt2Port, LlamaPort, gpt2, llama
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


@pytest.mark.parametrize("name", FAULTS)
def test_fault_of_a_llama_port_is_named(name: str, tmp_path: Path) -> None:
    fault, layer = FAULTS[name]
    original = llama(tie_word_embeddings=name == "tied head")
    found = compare(tmp_path, original, LlamaPort(original, fault), LLAMA_NAMES)
    assert found.suspect == layer, str(found)


@pytest.mark.parametrize("name", GPT2_FAULTS)
def test_fault_of_a_gpt2_port_is_named(name: str, tmp_path: Path) -> None:
    fault, layer = GPT2_FAULTS[name]
    original = gpt2()
    found = compare(tmp_path, original, Gpt2Port(original, fault), GPT2_NAMES)
    assert found.suspect == layer, str(found)


@pytest.mark.parametrize("float64", [True, False])
def test_correct_ports_do_not_differ(tmp_path: Path, float64: bool) -> None:
    for name, original, port, names in (
        ("llama", llama(), LlamaPort, LLAMA_NAMES),
        ("gpt2", gpt2(), Gpt2Port, GPT2_NAMES),
    ):
        found = compare(tmp_path / name, original, port(original), names, float64=float64)
        assert found.is_within_tolerance, str(found)
        assert not found.is_identical
        assert len(found.tensors) > 30
        print(found)
