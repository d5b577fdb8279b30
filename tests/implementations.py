"""Two implementations of two small language models: by transformers, and a port with other names, with faults on request."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIDDEN, HEADS, KV_HEADS, INNER, LAYERS, VOCABULARY = 32, 4, 2, 48, 2, 61
HEAD = HIDDEN // HEADS

LLAMA_NAMES = {
    "model.norm": "norm",
    "lm_head": "head",
    "model.embed_tokens": "embed",
    "model.layers": "blocks",
    "model.layers.*.self_attn": "blocks.*.attn",
    "model.layers.*.self_attn.o_proj": "blocks.*.attn.out",
    "model.layers.*.self_attn.q_proj": f"blocks.*.attn.qkv[..., :{HIDDEN}]",
    "model.layers.*.self_attn.k_proj": f"blocks.*.attn.qkv[..., {HIDDEN}:{HIDDEN + KV_HEADS * HEAD}]",
    "model.layers.*.self_attn.v_proj": f"blocks.*.attn.qkv[..., {HIDDEN + KV_HEADS * HEAD}:]",
    "model.layers.*.input_layernorm": "blocks.*.norm1",
    "model.layers.*.post_attention_layernorm": "blocks.*.norm2",
    "model.layers.*.mlp.gate_proj": "blocks.*.mlp.w1",
    "model.layers.*.mlp.up_proj": "blocks.*.mlp.w3",
    "model.layers.*.mlp.down_proj": "blocks.*.mlp.w2",
}
GPT2_NAMES = {
    "transformer.wte": "embed",
    "transformer.h": "blocks",
    "transformer.h.*.ln_1": "blocks.*.norm1",
    "transformer.h.*.ln_2": "blocks.*.norm2",
    "transformer.h.*.attn.c_attn": "cat(blocks.*.attn.q, blocks.*.attn.k, blocks.*.attn.v)",
    "transformer.h.*.attn.c_proj": "blocks.*.attn.out",
    "transformer.h.*.mlp.c_fc": "blocks.*.mlp.up",
    "transformer.h.*.mlp.c_proj": "blocks.*.mlp.down",
    "transformer.ln_f": "norm",
    "lm_head": "head",
}


@dataclass(frozen=True)
class Fault:
    """Faults of a port; the default has none."""

    epsilon: float = 1e-6
    cast_in_block: int = -1
    rope_base: float = 10_000.0
    is_interleaved: bool = False
    gelu: str = "tanh"
    swaps_keys_and_values: bool = False
    stale_block: int = -1
    no_bias_in_block: int = -1
    is_causal: bool = True
    scale: float = 1.0
    untied_head: bool = False
    chunks: int = 1  # of each sum in the MLP: not a fault, but another order of sums


def llama(**changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=64,
        initializer_range=0.2,
        **changes,
    )
    model = LlamaForCausalLM(config).eval()
    return cast(nn.Module, model)


def gpt2(**changes: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS}
    model = GPT2LMHeadModel(GPT2Config(**sizes, initializer_range=0.2, **changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    return cast(nn.Module, model)


class Norm(nn.Module):
    def __init__(self, epsilon: float, to_bfloat16: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))
        self.epsilon, self.to_bfloat16 = epsilon, to_bfloat16

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(torch.bfloat16) if self.to_bfloat16 else x.float()
        return self.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.epsilon)).to(x.dtype)


class LlamaAttention(nn.Module):
    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, HIDDEN + 2 * KV_HEADS * HEAD, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.fault = fault

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        frequency = self.fault.rope_base ** (-torch.arange(0, HEAD, 2, device=x.device) / HEAD)
        angle = positions[..., None, :, None] * frequency
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        one, two = (x[..., ::2], x[..., 1::2]) if self.fault.is_interleaved else x.chunk(2, -1)
        parts = one * cos - two * sin, two * cos + one * sin
        return torch.stack(parts, -1).flatten(-2) if self.fault.is_interleaved else torch.cat(parts, -1)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split([HIDDEN, KV_HEADS * HEAD, KV_HEADS * HEAD], -1)
        q, k, v = (each.unflatten(-1, (-1, HEAD)).transpose(-3, -2) for each in (q, k, v))
        q, k = self.rotate(q, positions), self.rotate(k, positions)
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, -3) for each in (k, v))
        scores = q @ k.transpose(-2, -1) * self.fault.scale / math.sqrt(HEAD)
        weights = scores.masked_fill(~mask, -math.inf).float().softmax(-1).to(x.dtype)
        return cast(Tensor, self.out((weights @ v).transpose(-3, -2).flatten(-2)))


class LlamaMlp(nn.Module):
    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(HIDDEN, INNER, bias=False), nn.Linear(HIDDEN, INNER, bias=False)
        self.w2 = ChunkedLinear(INNER, HIDDEN, fault.chunks)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.w2(F.silu(self.w1(x)) * self.w3(x)))


class ChunkedLinear(nn.Linear):
    """A linear layer without bias that adds the terms in another order."""

    def __init__(self, inputs: int, outputs: int, chunks: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.chunks = chunks

    def forward(self, x: Tensor) -> Tensor:
        parts = zip(x.chunk(self.chunks, -1), self.weight.chunk(self.chunks, 1), strict=True)
        return cast(Tensor, sum(F.linear(*part) for part in parts))


class LlamaBlock(nn.Module):
    def __init__(self, fault: Fault, index: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = (Norm(fault.epsilon, fault.cast_in_block == index) for _ in range(2))
        self.attn, self.mlp = LlamaAttention(fault), LlamaMlp(fault)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), positions, mask)
        return cast(Tensor, x + self.mlp(self.norm2(x)))


class LlamaPort(nn.Module):
    """A port of `llama` with fused queries, keys and values. Its arguments can be packed: of shape [tokens]."""

    def __init__(self, original: nn.Module, fault: Fault | None = None) -> None:
        super().__init__()
        self.fault = fault = fault or Fault()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(LlamaBlock(fault, index) for index in range(LAYERS))
        self.norm = Norm(fault.epsilon, to_bfloat16=False)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.load(original.state_dict())
        self.to(next(original.parameters()).dtype).eval()

    def load(self, state: dict[str, Tensor]) -> None:
        names = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
        own = {f"{name}.weight": state[f"{other}.weight"] for name, other in names.items()}
        for index in range(LAYERS):
            block = f"model.layers.{index}"
            order = "qvk" if self.fault.swaps_keys_and_values else "qkv"
            parts = [state[f"{block}.self_attn.{name}_proj.weight"] for name in order]
            layers = {
                "attn.qkv": torch.cat(parts),
                "attn.out": state[f"{block}.self_attn.o_proj.weight"],
                "norm1": state[f"{block}.input_layernorm.weight"],
                "norm2": state[f"{block}.post_attention_layernorm.weight"],
                "mlp.w1": state[f"{block}.mlp.gate_proj.weight"],
                "mlp.w2": state[f"{block}.mlp.down_proj.weight"],
                "mlp.w3": state[f"{block}.mlp.up_proj.weight"] * (0.999 if index == self.fault.stale_block else 1.0),
            }
            own |= {f"blocks.{index}.{name}.weight": weight for name, weight in layers.items()}
        if self.fault.untied_head:
            own["head.weight"] = own["head.weight"].roll(1, 0)
        self.load_state_dict(own)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        positions = torch.arange(tokens.shape[-1]).expand(tokens.shape) if positions is None else positions
        size = tokens.shape[-1]
        allowed = torch.ones(size, size, dtype=torch.bool)
        allowed = allowed.tril() if self.fault.is_causal else allowed
        if tokens.dim() == 1:  # packed: a sample ends where the positions do not continue
            sample = torch.cumsum(positions == 0, 0)
            allowed = allowed & (sample[:, None] == sample[None])
        elif mask is not None:
            allowed = allowed & mask[:, None, None, :].bool()
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, positions, allowed)
        return cast(Tensor, self.head(self.norm(x)))


class Gpt2Attention(nn.Module):
    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.fault = fault

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scale = self.fault.scale / math.sqrt(HEAD)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.fault.is_causal, scale=scale)
        return cast(Tensor, self.out(y.transpose(1, 2).flatten(2)))


class Gpt2Mlp(nn.Module):
    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.gelu = fault.gelu

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down(F.gelu(self.up(x), approximate=self.gelu)))


class Gpt2Block(nn.Module):
    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attn, self.mlp = Gpt2Attention(fault), Gpt2Mlp(fault)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return cast(Tensor, x + self.mlp(self.norm2(x)))


class Gpt2Port(nn.Module):
    """A port of `gpt2` with linear layers, whose weights are transposed, and separate queries, keys and values."""

    def __init__(self, original: nn.Module, fault: Fault | None = None) -> None:
        super().__init__()
        fault = fault or Fault()
        self.embed, self.positions = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(64, HIDDEN)
        self.blocks = nn.Sequential(*(Gpt2Block(fault) for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)
        state = original.state_dict()
        own = {"embed.weight": state["transformer.wte.weight"], "positions.weight": state["transformer.wpe.weight"]}
        own |= {f"norm.{name}": state[f"transformer.ln_f.{name}"] for name in ("weight", "bias")}
        own["head.weight"] = state["lm_head.weight"].roll(1, 0) if fault.untied_head else state["lm_head.weight"]
        names = {
            "norm1": "ln_1",
            "norm2": "ln_2",
            "attn.out": "attn.c_proj",
            "mlp.up": "mlp.c_fc",
            "mlp.down": "mlp.c_proj",
        }
        for index in range(LAYERS):
            for name, other in names.items():
                weight = state[f"transformer.h.{index}.{other}.weight"]
                own[f"blocks.{index}.{name}.weight"] = weight.T if weight.dim() == 2 else weight
                own[f"blocks.{index}.{name}.bias"] = state[f"transformer.h.{index}.{other}.bias"]
            if index == fault.no_bias_in_block:
                own[f"blocks.{index}.mlp.up.bias"] = torch.zeros(4 * HIDDEN)
            for kind in ("weight", "bias"):
                parts = state[f"transformer.h.{index}.attn.c_attn.{kind}"].chunk(3, -1)
                for name, part in zip("qvk" if fault.swaps_keys_and_values else "qkv", parts, strict=True):
                    own[f"blocks.{index}.attn.{name}.{kind}"] = part.T if part.dim() == 2 else part
        self.load_state_dict(own)
        self.eval()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1]))
        return cast(Tensor, self.head(self.norm(self.blocks(x))))
