"""Transformers of several libraries and styles with small configurations and random weights, and their numbers of parts."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

os.environ.setdefault("HF_HUB_OFFLINE", "1")
D, LAYERS, HEADS, VOCABULARY, LENGTH, EXPERTS = 16, 3, 4, 50, 24, 5


@dataclass(frozen=True)
class Example:
    """A model and the numbers of its parts.

    Attributes:
        name: Its name.
        make: Makes the model.
        parts: How many modules have each role; 0 for others than these.
    """

    name: str
    make: Callable[[], nn.Module]
    parts: dict[str, int]

    def __str__(self) -> str:
        return self.name


# --------------------------------------------------------------------------------------------------- hand-written


class NanoAttention(nn.Module):
    """The attention of nanoGPT: a fused projection `c_attn`."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, -1))
        return self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class NanoBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(D), NanoAttention(), nn.LayerNorm(D)
        self.mlp = NanoMLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.gelu, self.c_proj = nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.gelu(self.c_fc(x)))


class NanoGPT(nn.Module):
    """A model in the style of nanoGPT: a ModuleDict `transformer` and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, D),
                "wpe": nn.Embedding(LENGTH, D),
                "h": nn.ModuleList(NanoBlock() for _ in range(LAYERS)),
                "ln_f": nn.LayerNorm(D),
            }
        )
        self.lm_head = nn.Linear(D, VOCABULARY, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, tokens: Tensor) -> Tensor:
        parts = self.transformer
        x = parts["wte"](tokens) + parts["wpe"](torch.arange(tokens.shape[1]))
        for block in parts["h"]:
            x = block(x)
        return self.lm_head(parts["ln_f"](x))


class MinBlock(nn.Module):
    """A block in the style of minGPT: its MLP is a ModuleDict, which is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(D), NanoAttention(), nn.LayerNorm(D)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(D, 4 * D), "c_proj": nn.Linear(4 * D, D), "act": nn.GELU()})

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp["c_proj"](self.mlp["act"](self.mlp["c_fc"](self.ln_2(x))))


class MinGPT(NanoGPT):
    """A model in the style of minGPT: its head is not tied."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer["h"] = nn.ModuleList(MinBlock() for _ in range(LAYERS))
        self.lm_head = nn.Linear(D, VOCABULARY, bias=False)


class Head(nn.Module):
    """One head of the attention of Karpathy's lecture."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(D, D // HEADS, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(-2, -1)
        return F.softmax(scores, dim=-1) @ self.value(x)


class HeadList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head() for _ in range(HEADS))
        self.proj = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(torch.cat([head(x) for head in self.heads], -1))


class LectureBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sa, self.ln1, self.ln2 = HeadList(), nn.LayerNorm(D), nn.LayerNorm(D)
        self.ffwd = nn.Sequential(nn.Linear(D, 4 * D), nn.ReLU(), nn.Linear(4 * D, D))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.sa(self.ln1(x))
        return x + self.ffwd(self.ln2(x))


class LectureGPT(nn.Module):
    """The model of Karpathy's lecture "Let's build GPT": one module per head, blocks in a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.token_embedding_table, self.position_embedding_table = nn.Embedding(VOCABULARY, D), nn.Embedding(LENGTH, D)
        self.blocks = nn.Sequential(*(LectureBlock() for _ in range(LAYERS)))
        self.ln_f, self.lm_head = nn.LayerNorm(D), nn.Linear(D, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token_embedding_table(tokens) + self.position_embedding_table(torch.arange(tokens.shape[1]))
        return self.lm_head(self.ln_f(self.blocks(x)))


class RMSNorm(nn.Module):
    """A normalization of a user, with a gain `g`."""

    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1) * D**0.5 * self.g


class XAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(D, D, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (to(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for to in (self.to_q, self.to_k, self.to_v))
        weights = (q @ k.transpose(-2, -1)).softmax(-1)
        return self.to_out((weights @ v).transpose(1, 2).flatten(2))


class XTransformer(nn.Module):
    """A model in the style of x-transformers: a list of lists of normalization and attention or MLP, whose calls add residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.token_emb, self.pos_emb = nn.Embedding(VOCABULARY, D), nn.Embedding(LENGTH, D)

        def feed_forward() -> nn.Module:
            return nn.Sequential(nn.Sequential(nn.Linear(D, 4 * D), nn.GELU()), nn.Dropout(0.0), nn.Linear(4 * D, D))

        parts = [make for _ in range(LAYERS) for make in (XAttention, feed_forward)]
        self.layers = nn.ModuleList(nn.ModuleList([RMSNorm(), make()]) for make in parts)
        self.final_norm, self.to_logits = RMSNorm(), nn.Linear(D, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token_emb(tokens) + self.pos_emb(torch.arange(tokens.shape[1]))
        for norm, part in self.layers:
            x = x + part(norm(x))
        return self.to_logits(self.final_norm(x))


class AnnotatedAttention(nn.Module):
    """The attention of The Annotated Transformer: four projections in one list."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for linear in self.linears[:3])
        weights = (q @ k.transpose(-2, -1)).softmax(dim=-1)
        return self.linears[3]((weights @ v).transpose(1, 2).flatten(2))


class Sublayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)

    def forward(self, x: Tensor, part: nn.Module) -> Tensor:
        return x + part(self.norm(x))


class EncoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = AnnotatedAttention()
        self.feed_forward = nn.Sequential(nn.Linear(D, 4 * D), nn.ReLU(), nn.Linear(4 * D, D))
        self.sublayer = nn.ModuleList([Sublayer(), Sublayer()])

    def forward(self, x: Tensor) -> Tensor:
        return self.sublayer[1](self.sublayer[0](x, self.self_attn), self.feed_forward)


class Annotated(nn.Module):
    """An encoder in the style of The Annotated Transformer, with a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, D)
        self.layers = nn.ModuleList(EncoderLayer() for _ in range(LAYERS))
        self.norm, self.generator = nn.LayerNorm(D), nn.Sequential(nn.Linear(D, VOCABULARY), nn.LogSoftmax(-1))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.generator(self.norm(x))


class SwitchLayer(nn.Module):
    """A mixture of experts with a list of experts, each for the tokens of which it has the largest logit."""

    def __init__(self) -> None:
        super().__init__()
        self.switch = nn.Linear(D, EXPERTS)
        self.experts = nn.ModuleList(NanoMLP() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        share, chosen = self.switch(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            out[chosen == index] = expert(x[chosen == index])
        return out * share[..., None]


class FusedExperts(nn.Module):
    """A mixture of experts whose weights are parameters of the layer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(EXPERTS, D, 32)), nn.Parameter(torch.randn(EXPERTS, 32, D))
        self.gate = nn.Linear(D, EXPERTS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.einsum("ntd,edh->nteh", x, self.w1).relu()
        return torch.einsum("nteh,ehd,nte->ntd", hidden, self.w2, self.gate(x).softmax(-1))


def nano_with(mlp: type[nn.Module]) -> nn.Module:
    """Return a nanoGPT with another MLP in each block."""
    model = NanoGPT()
    for block in model.transformer["h"]:
        block.mlp = mlp()
    return model


# --------------------------------------------------------------------------------------------------- libraries


def hugging_face(config: str, head: str = "", **fields: Any) -> Callable[[], nn.Module]:
    """Return a function that makes a model of transformers from the name of its configuration."""

    def make() -> nn.Module:
        import transformers

        torch.manual_seed(0)
        name = config.removesuffix("Config")
        cls = getattr(transformers, f"{name}{head}")
        return cls(getattr(transformers, config)(**fields))

    return make


def timm_model(name: str, **fields: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import timm

        return timm.create_model(name, num_classes=7, **fields)

    return make


def torchvision_model(name: str, **fields: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import torchvision

        with torch.device("meta"):  # a full size
            return torchvision.models.get_model_builder(name)(weights=None, num_classes=7, **fields)

    return make


_SIZES = {"vocab_size": VOCABULARY, "hidden_size": D, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
_BERT = {**_SIZES, "intermediate_size": 32, "max_position_embeddings": LENGTH}
_LLAMA = {**_BERT, "num_key_value_heads": 2, "pad_token_id": 0}
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": D, "n_layer": LAYERS, "n_head": HEADS, "n_positions": LENGTH}
_IMAGES = {"image_size": 32, "patch_size": 8}
_VIT = {**_IMAGES, "hidden_size": D, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": 32}
_BART = {
    "vocab_size": VOCABULARY, "d_model": D, "encoder_layers": 2, "decoder_layers": LAYERS, "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": LENGTH,
}  # fmt: skip
_T5 = {
    "vocab_size": VOCABULARY, "d_model": D, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_decoder_layers": LAYERS,
    "num_heads": HEADS, "decoder_start_token_id": 0,
}  # fmt: skip


def parts(
    blocks: int, norms: int, attentions: int | None = None, mlps: int | None = None, **others: int
) -> dict[str, int]:
    """Return the numbers of parts: one attention and one MLP per block, unless given."""
    attentions = blocks if attentions is None else attentions
    return {"block": blocks, "attention": attentions, "mlp": blocks if mlps is None else mlps, "norm": norms, **others}


_LM = {"embedding": 1, "head": 1}
LOOKED_AT = (  # the rules were written with these models
    Example("GPT-2", hugging_face("GPT2Config", "LMHeadModel", **_GPT2), parts(3, 7, embedding=2, head=1)),
    Example("Llama", hugging_face("LlamaConfig", "ForCausalLM", **_LLAMA), parts(3, 7, **_LM)),
    Example("BERT", hugging_face("BertConfig", "ForMaskedLM", **_BERT), parts(3, 8, embedding=3, head=1)),
    Example("T5", hugging_face("T5Config", "ForConditionalGeneration", **_T5), parts(5, 15, 8, embedding=3, head=1)),
    Example("ViT", hugging_face("ViTConfig", "ForImageClassification", **_VIT), parts(3, 7, head=1)),
    Example(
        "Mixtral",
        hugging_face("MixtralConfig", "ForCausalLM", num_local_experts=EXPERTS, **_LLAMA),
        parts(3, 7, router=3, experts=3, **_LM),
    ),
    Example("timm ViT", timm_model("vit_tiny_patch16_224", depth=3), parts(3, 7, head=1)),
    Example("timm Swin", timm_model("swin_tiny_patch4_window7_224", depths=(2, 2, 2, 2)), parts(8, 21, head=1)),
    Example("torchvision ViT", torchvision_model("vit_b_32"), parts(12, 25, head=1)),
    Example(
        "nn.TransformerEncoder",
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(D, HEADS, 32, batch_first=True), LAYERS),
        parts(3, 6),
    ),
    Example("nanoGPT", NanoGPT, parts(3, 7, embedding=2, head=1)),
    Example("switch layers", lambda: nano_with(SwitchLayer), parts(3, 7, embedding=2, head=1, router=3, experts=15)),
)
_MOE = {"moe_intermediate_size": 8, **_LLAMA}
SET_ASIDE = (  # the rules were first tried on these when they were complete
    Example("GPT-NeoX", hugging_face("GPTNeoXConfig", "ForCausalLM", **_BERT), parts(3, 7, **_LM)),
    Example("Mistral", hugging_face("MistralConfig", "ForCausalLM", **_LLAMA), parts(3, 7, **_LM)),
    Example("Qwen2", hugging_face("Qwen2Config", "ForCausalLM", **_LLAMA), parts(3, 7, **_LM)),
    Example("Qwen3", hugging_face("Qwen3Config", "ForCausalLM", head_dim=4, **_LLAMA), parts(3, 13, **_LM)),
    Example("Gemma", hugging_face("GemmaConfig", "ForCausalLM", head_dim=4, **_LLAMA), parts(3, 7, **_LM)),
    Example("Gemma 2", hugging_face("Gemma2Config", "ForCausalLM", head_dim=4, **_LLAMA), parts(3, 13, **_LM)),
    Example("RoBERTa", hugging_face("RobertaConfig", "ForMaskedLM", **_BERT), parts(3, 8, embedding=3, head=1)),
    Example(
        "DistilBERT",
        hugging_face(
            "DistilBertConfig",
            "ForSequenceClassification",
            vocab_size=VOCABULARY,
            dim=D,
            n_layers=LAYERS,
            n_heads=HEADS,
            hidden_dim=32,
            max_position_embeddings=LENGTH,
        ),
        parts(3, 7, embedding=2, head=1),
    ),
    Example("BERT without a head", hugging_face("BertConfig", "Model", **_BERT), parts(3, 7, embedding=3)),
    Example(
        "ELECTRA",
        hugging_face("ElectraConfig", "ForMaskedLM", embedding_size=8, **_BERT),
        parts(3, 8, embedding=3, head=1),
    ),
    Example(
        "ALBERT",
        hugging_face("AlbertConfig", "ForMaskedLM", embedding_size=8, **_BERT),
        parts(1, 4, embedding=3, head=1),
    ),
    Example("DeBERTa v2", hugging_face("DebertaV2Config", "ForMaskedLM", **_BERT), parts(3, 8, embedding=2, head=1)),
    Example("ModernBERT", hugging_face("ModernBertConfig", "ForMaskedLM", **_BERT, pad_token_id=0), parts(3, 8, **_LM)),
    Example(
        "OPT",
        hugging_face(
            "OPTConfig", "ForCausalLM", ffn_dim=32, word_embed_proj_dim=D, **_SIZES, max_position_embeddings=LENGTH
        ),
        parts(3, 7, embedding=2, head=1),
    ),
    Example(
        "BLOOM",
        hugging_face("BloomConfig", "ForCausalLM", vocab_size=VOCABULARY, hidden_size=D, n_layer=LAYERS, n_head=HEADS),
        parts(3, 8, **_LM),
    ),
    Example("Falcon", hugging_face("FalconConfig", "ForCausalLM", **_SIZES), parts(3, 4, **_LM)),
    Example("GPT-J", hugging_face("GPTJConfig", "ForCausalLM", rotary_dim=4, **_GPT2), parts(3, 4, **_LM)),
    Example("Phi-3", hugging_face("Phi3Config", "ForCausalLM", **_LLAMA), parts(3, 7, **_LM)),
    Example("OLMo", hugging_face("OlmoConfig", "ForCausalLM", **_LLAMA), parts(3, 7, **_LM)),
    Example(
        "MPT",
        hugging_face("MptConfig", "ForCausalLM", vocab_size=VOCABULARY, d_model=D, n_layers=LAYERS, n_heads=HEADS),
        parts(3, 7, **_LM),
    ),
    Example(
        "XLNet",
        hugging_face(
            "XLNetConfig", "LMHeadModel", vocab_size=VOCABULARY, d_model=D, n_layer=LAYERS, n_head=HEADS, d_inner=32
        ),
        parts(3, 6, **_LM),
    ),
    Example(
        "BART", hugging_face("BartConfig", "ForConditionalGeneration", **_BART), parts(5, 15, 8, embedding=5, head=1)
    ),
    Example(
        "Whisper",
        hugging_face(
            "WhisperConfig",
            "ForConditionalGeneration",
            **{**_BART, "max_position_embeddings": LENGTH},
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            max_source_positions=8,
            max_target_positions=LENGTH,
            num_mel_bins=4,
        ),
        parts(5, 15, 8, embedding=3, head=1),
    ),
    Example("CLIP vision", hugging_face("CLIPVisionConfig", "Model", **_VIT), parts(3, 8, embedding=1)),
    Example("DeiT of transformers", hugging_face("DeiTConfig", "ForImageClassification", **_VIT), parts(3, 7, head=1)),
    Example(
        "Swin of transformers",
        hugging_face(
            "SwinConfig",
            "ForImageClassification",
            image_size=32,
            patch_size=4,
            embed_dim=D,
            depths=[2, 2],
            num_heads=[2, 4],
            window_size=4,
        ),
        parts(4, 11, head=1),
    ),
    Example(
        "Qwen2-MoE",
        hugging_face(
            "Qwen2MoeConfig",
            "ForCausalLM",
            num_experts=EXPERTS,
            num_experts_per_tok=2,
            shared_expert_intermediate_size=24,
            **_MOE,
        ),
        parts(3, 7, router=3, experts=3, **_LM),
    ),
    Example(
        "OLMoE",
        hugging_face("OlmoeConfig", "ForCausalLM", num_experts=EXPERTS, num_experts_per_tok=2, **_LLAMA),
        parts(3, 13, router=3, experts=3, **_LM),
    ),
    Example(
        "GPT-OSS",
        hugging_face(
            "GptOssConfig", "ForCausalLM", num_local_experts=EXPERTS, num_experts_per_tok=2, head_dim=4, **_LLAMA
        ),
        parts(3, 7, router=3, experts=3, **_LM),
    ),
    Example(
        "Granite-MoE",
        hugging_face("GraniteMoeConfig", "ForCausalLM", num_local_experts=EXPERTS, num_experts_per_tok=2, **_LLAMA),
        parts(3, 7, router=3, experts=3, **_LM),
    ),
    Example(
        "DeepSeek-V3",
        hugging_face(
            "DeepseekV3Config",
            "ForCausalLM",
            n_routed_experts=6,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            q_lora_rank=8,
            kv_lora_rank=8,
            qk_nope_head_dim=4,
            qk_rope_head_dim=4,
            v_head_dim=4,
            **{**_MOE, "num_key_value_heads": HEADS},
        ),
        parts(3, 13, router=2, experts=2, **_LM),
    ),
    Example(
        "DBRX",
        hugging_face(
            "DbrxConfig",
            "ForCausalLM",
            vocab_size=VOCABULARY,
            d_model=D,
            n_layers=LAYERS,
            n_heads=HEADS,
            max_seq_len=LENGTH,
            attn_config={"kv_n_heads": 2, "rope_theta": 1e4},
            ffn_config={"ffn_hidden_size": 32, "moe_num_experts": EXPERTS, "moe_top_k": 2},
        ),
        parts(3, 7, router=3, experts=3, **_LM),
    ),
    Example(
        "Switch Transformers",
        hugging_face(
            "SwitchTransformersConfig",
            "ForConditionalGeneration",
            num_experts=EXPERTS,
            num_sparse_encoder_layers=1,
            num_sparse_decoder_layers=1,
            **_T5,
        ),
        parts(5, 15, 8, router=2, experts=10, embedding=3, head=1),
    ),
    Example(
        "Jamba",
        hugging_face(
            "JambaConfig",
            "ForCausalLM",
            num_experts=EXPERTS,
            num_experts_per_tok=2,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            use_mamba_kernels=False,
            mamba_d_state=4,
            mamba_dt_rank=4,
            **_LLAMA,
        ),
        parts(3, 7 + 6, 1, 3, router=1, experts=1, **_LM),
    ),
    Example("timm DeiT", timm_model("deit_tiny_distilled_patch16_224", depth=3), parts(3, 7, head=2)),
    Example("timm BEiT", timm_model("beit_base_patch16_224", depth=3), parts(3, 7, head=1)),
    Example("timm EVA-02", timm_model("eva02_tiny_patch14_224", depth=3), parts(3, 7, head=1)),
    Example("timm CaiT", timm_model("cait_xxs24_224", depth=3), parts(5, 11, head=1)),
    Example("timm XCiT", timm_model("xcit_nano_12_p16_224", depth=3), parts(5, 14, head=1)),
    Example("timm Swin v2", timm_model("swinv2_tiny_window8_256", depths=(2, 2, 2, 2)), parts(8, 21, head=1)),
    Example("timm PiT", timm_model("pit_ti_224", depth=(1, 1, 1)), parts(3, 7, head=1)),
    Example("timm SigLIP", timm_model("vit_base_patch16_siglip_224", depth=3), parts(3, 8, 4, head=1)),
    Example("torchvision Swin", torchvision_model("swin_t"), parts(12, 29, head=1)),
    Example("torchvision Swin v2", torchvision_model("swin_v2_t"), parts(12, 29, head=1)),
    Example("torchvision MaxViT", torchvision_model("maxvit_t"), parts(22, 45, head=1)),
    Example("nn.Transformer", lambda: nn.Transformer(D, HEADS, 2, LAYERS, 32, batch_first=True), parts(5, 15, 8)),
    Example("minGPT", MinGPT, parts(3, 7, embedding=2, head=1)),
    Example("x-transformers", XTransformer, parts(0, 7, 3, 0, embedding=2, head=1)),
    Example("lecture", LectureGPT, parts(3, 7, 12, embedding=2, head=1)),
    Example("annotated", Annotated, parts(3, 7, embedding=1, head=1)),
    Example("fused experts", lambda: nano_with(FusedExperts), parts(3, 7, embedding=2, head=1, router=3, experts=3)),
)
CORRECTED = (  # the rules were corrected with these
    Example(
        "ERNIE 4.5 MoE",
        hugging_face(
            "Ernie4_5_MoeConfig", "ForCausalLM", moe_num_experts=EXPERTS, moe_k=2, moe_intermediate_size=8, **_LLAMA
        ),
        parts(3, 7, router=2, experts=2, **_LM),
    ),
    Example(
        "XLM",
        hugging_face(
            "XLMConfig",
            "WithLMHeadModel",
            vocab_size=VOCABULARY,
            emb_dim=D,
            n_layers=LAYERS,
            n_heads=HEADS,
            max_position_embeddings=LENGTH,
        ),
        parts(0, 7, 3, 0, embedding=2, head=1),  # attentions and MLPs are in separate lists
    ),
)
