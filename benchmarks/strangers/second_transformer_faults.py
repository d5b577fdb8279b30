"""Mutations of transformers, in the collection `second`: small models in plain PyTorch and of the library transformers.

The categories are parts of a transformer: embeddings, positional encoding, projections of queries, keys and values, mask, scale and
softmax, heads, feed-forward network, residual connections, normalization, output head, memory of keys and values, loss and optimizer,
and the order of batch and time. A cause `@pattern` accepts each rule at a matching layer: the fault is in that layer.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import transformers
from data import MASK, PAD, VOCABULARY, batches, normalized_digits, padded, stream, tokens
from registry import Fault, attach, program
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, RAdam
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

DEFAULT = "DEFault++: automated fault detection, categorization and diagnosis for transformer architectures, 2026"
HUB = "transformers, examples/pytorch, "
LENGTH = 20  # tokens in a block of text
STEPS = 200

EMBEDDING, POSITIONS, PROJECTION = "embeddings", "positional encoding", "projections of queries, keys and values"
MASKING, SCALE, HEADS, FEED_FORWARD = "attention mask", "softmax and scale", "heads", "feed-forward network"
RESIDUAL, NORMALIZATION, OUTPUT = "residual connections", "normalization", "output head"
MEMORY, LOSS, OPTIMIZER = "memory of keys and values", "loss and labels", "optimizer and initialization"
LAYOUT = "order of batch and time"


@torch.no_grad()
def next_word_loss(model: nn.Module, blocks: Tensor) -> Tensor:
    """Return the loss of the next word after prefixes of several lengths, as in generation."""
    ends = (4, 8, 12, 16)
    return torch.stack([F.cross_entropy(model(blocks[:, :end])[:, -1], blocks[:, end]) for end in ends]).mean()


class CausalSelfAttention(nn.Module):
    def __init__(self, size: int, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.c_attn = nn.Linear(size, 3 * size)
        self.c_proj = nn.Linear(size, size)
        self.register_buffer("bias", torch.tril(torch.ones(LENGTH, LENGTH)))

    def forward(self, x: Tensor) -> Tensor:
        count, length, size = x.shape
        if self.fault == "heads_split_without_transpose":
            q, k, v = (part.reshape(count, 4, length, size // 4) for part in self.c_attn(x).split(size, 2))
        else:
            q, k, v = (part.view(count, length, 4, size // 4).transpose(1, 2) for part in self.c_attn(x).split(size, 2))
        scores = q @ k.transpose(-2, -1) / math.sqrt(size // 4)
        mask = self.bias[:length, :length]
        if self.fault == "masked_after_the_softmax":
            attention = F.softmax(scores, dim=-1) * mask
        else:
            attention = F.softmax(scores.masked_fill(mask == 0, -math.inf), dim=-1)
        y = attention @ v
        if self.fault == "heads_split_without_transpose":
            return self.c_proj(y.reshape(count, length, size))
        return self.c_proj(y.transpose(1, 2).contiguous().view(count, length, size))


class Block(nn.Module):
    def __init__(self, size: int, fault: str) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(size)
        self.attn = CausalSelfAttention(size, fault)
        self.ln_2 = nn.LayerNorm(size)
        self.mlp = nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(approximate="tanh"), nn.Linear(4 * size, size))
        if fault == "feed_forward_without_activation":
            self.mlp = nn.Sequential(self.mlp[0], self.mlp[2])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    def __init__(self, fault: str, size: int = 48) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, size)
        self.wpe = nn.Embedding(LENGTH, size)
        self.h = nn.ModuleList([Block(size, fault) for _ in range(2)])
        self.ln_f = nn.LayerNorm(size)
        self.lm_head = nn.Linear(size, VOCABULARY, bias=False)
        self.wte.weight = self.lm_head.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02 / 2 if name.endswith("c_proj.weight") else 0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


@program(
    "transformers",
    "Karpathy's nanoGPT, with tied weights, warm-up and a cosine schedule",
    Fault("heads_split_without_transpose", HEADS, DEFAULT, ("looks_ahead", "@*attn*")),
    Fault("masked_after_the_softmax", MASKING, DEFAULT, ("looks_ahead", "@*attn*")),
    Fault("feed_forward_without_activation", FEED_FORWARD, DEFAULT, ("missing_activation", "@*mlp*")),
)
def nano_gpt(fault: str = "") -> Tensor:
    blocks = stream(LENGTH * 1100)[: LENGTH * 1100].view(-1, LENGTH)
    model = NanoGPT(fault)
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = AdamW(groups, lr=4e-3, betas=(0.9, 0.95))
    rates = [min((i + 1) / 12, 0.1 + 0.45 * (1 + math.cos(math.pi * i / STEPS))) for i in range(STEPS + 1)]
    scheduler = LambdaLR(optimizer, rates.__getitem__)
    with attach(model, optimizer) as probe:
        for _, (ids,) in zip(range(STEPS), batches(blocks[:800], size=16), strict=False):
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
            probe.end_step(loss=loss)
    return next_word_loss(model, blocks[800:])


class PositionalEncoding(nn.Module):
    def __init__(self, size: int, used: bool) -> None:
        super().__init__()
        angles = torch.arange(32)[:, None] / 10000 ** (torch.arange(0, size, 2) / size)
        table = torch.stack([angles.sin(), angles.cos()], -1).flatten(1)
        self.register_buffer("table", table if used else torch.zeros_like(table))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x + self.table[: x.shape[1]])


class Tagger(nn.Module):
    def __init__(self, fault: str, size: int = 32) -> None:
        super().__init__()
        self.scale = size if fault == "embeddings_scaled_by_their_size" else math.sqrt(size)
        self.embedding = nn.Embedding(VOCABULARY, size, padding_idx=PAD)
        self.positions = PositionalEncoding(size, fault != "positions_left_out")
        first = fault != "batch_read_as_time"
        layer = nn.TransformerEncoderLayer(size, 4, 64, 0.1, batch_first=first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(size, 5)

    def forward(self, ids: Tensor) -> Tensor:
        padding = (ids == PAD) if self.encoder.layers[0].self_attn.batch_first else None
        embedded = self.positions(self.embedding(ids) * self.scale)
        return self.head(self.encoder(embedded, src_key_padding_mask=padding))


@program(
    "transformers",
    HUB + "token-classification, with nn.TransformerEncoder; the tags depend on a word and its neighbours",
    Fault("batch_read_as_time", LAYOUT, DEFAULT, ("@*self_attn*",)),
    Fault("positions_left_out", POSITIONS, DEFAULT, ("@positions*",)),
    Fault(
        "embeddings_scaled_by_their_size",
        EMBEDDING,
        DEFAULT,
        ("@embedding", "@positions*", "poor_initialization", "exploding_activation", "tensor_variance"),
    ),
)
def tagger(fault: str = "") -> Tensor:
    ids = padded(1000, 10)
    previous, following = ids.roll(1, 1), ids.roll(-1, 1)
    tags = ((previous % 2) + 2 * (following % 2) + (ids % 3 == 0)).masked_fill(ids == PAD, -100)
    model = Tagger(fault)
    optimizer = RAdam(model.parameters(), lr=5e-3)
    model.train()
    with attach(model, optimizer) as probe:
        for _, (batch, wanted) in zip(range(240), batches(ids[:900], tags[:900], size=32), strict=False):
            loss = F.cross_entropy(model(batch).flatten(0, 1), wanted.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            probe.end_step(loss=loss)
    model.eval()
    with torch.no_grad():
        return F.cross_entropy(model(ids[900:]).flatten(0, 1), tags[900:].flatten())


@program(
    "transformers",
    HUB + "speech-recognition/run_speech_recognition_seq2seq.py, with a tiny Whisper",
    Fault("decoder_reads_the_labels", LOSS, DEFAULT, ("labels_shifted",)),
    Fault(
        "encoder_output_of_the_first_batch",
        MEMORY,
        DEFAULT,
        ("unchanged_parameter@*encoder*", "parameters_follow_gradients@*encoder*", "samples_vary", "@*encoder*"),
        since=1,
    ),
)
def whisper_speech(fault: str = "") -> Tensor:
    sounds = torch.randn(8, 16)
    spoken = torch.randint(8, (500, 6))
    features = sounds[spoken].repeat_interleave(4, 1) + 0.3 * torch.randn(500, 24, 16)
    labels = torch.cat([spoken + 2, torch.ones(500, 1, dtype=torch.int64)], 1)
    config = transformers.WhisperConfig(
        vocab_size=10, num_mel_bins=16, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_source_positions=12,
        max_target_positions=16, pad_token_id=0, bos_token_id=0, eos_token_id=1, decoder_start_token_id=0,
        suppress_tokens=None, begin_suppress_tokens=None
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config)
    encoded: Any = None
    optimizer = AdamW(model.parameters(), lr=5e-3)
    model.train()
    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(130), batches(features[:440], labels[:440], size=16), strict=False):
            inputs = {"input_features": data.transpose(1, 2), "labels": wanted}
            if fault == "decoder_reads_the_labels":
                inputs["decoder_input_ids"] = wanted
            output = model(**inputs, encoder_outputs=encoded)
            if fault == "encoder_output_of_the_first_batch" and encoded is None:
                encoded = (output.encoder_last_hidden_state.detach(),)
            loss = output.loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            probe.end_step(loss=loss)
    model.eval()
    with torch.no_grad():
        return model(input_features=features[440:].transpose(1, 2), labels=labels[440:]).loss


class RootNorm(nn.Module):
    def __init__(self, size: int, fault: str) -> None:
        super().__init__()
        self.power = -1.0 if fault == "norm_without_root" else -0.5
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).pow(self.power) * self.weight


class RotaryAttention(nn.Module):
    """Attention with rotated queries and keys; two queries share a key."""

    def __init__(self, size: int, fault: str) -> None:
        super().__init__()
        self.q_proj = nn.Linear(size, size, bias=False)
        self.k_proj = nn.Linear(size, size // 2, bias=False)
        self.v_proj = nn.Linear(size, size // 2, bias=False)
        self.o_proj = nn.Linear(size, size, bias=False)
        if fault == "values_projected_with_the_keys":
            self.v_proj = self.k_proj
        self.size = size // 4
        angles = torch.arange(32)[:, None] / 1000 ** (torch.arange(self.size // 2) / (self.size // 2))
        self.register_buffer("cosine", angles.cos())
        self.register_buffer("sine", angles.sin())

    def rotate(self, x: Tensor) -> Tensor:
        cosine, sine = self.cosine[: x.shape[2]], self.sine[: x.shape[2]]
        left, right = x.chunk(2, -1)
        return torch.cat([left * cosine - right * sine, left * sine + right * cosine], -1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        y = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class GatedBlock(nn.Module):
    def __init__(self, size: int, fault: str) -> None:
        super().__init__()
        self.residual = 0.0 if fault == "residual_of_the_feed_forward_missing" else 1.0
        self.attention_norm = RootNorm(size, fault)
        self.attention = RotaryAttention(size, fault)
        self.ffn_norm = RootNorm(size, fault)
        self.gate_proj = nn.Linear(size, 2 * size, bias=False)
        self.up_proj = nn.Linear(size, 2 * size, bias=False)
        self.down_proj = nn.Linear(2 * size, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        hidden = self.ffn_norm(x)
        return self.residual * x + self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


@program(
    "transformers",
    "Touvron et al., Llama 2: open foundation and fine-tuned chat models, 2023, in plain PyTorch",
    Fault("values_projected_with_the_keys", PROJECTION, DEFAULT, ("tied_weights", "@*k_proj", "@*v_proj")),
    Fault(
        "residual_of_the_feed_forward_missing",
        RESIDUAL,
        DEFAULT,
        ("poor_initialization", "vanishing_gradient@layers*", "tensor_variance@layers*", "@*down_proj"),
    ),
    Fault("norm_without_root", NORMALIZATION, DEFAULT, ("@*norm*", "poor_initialization", "exploding_activation")),
)
def gated_decoder(fault: str = "") -> Tensor:
    blocks = stream(LENGTH * 1100)[: LENGTH * 1100].view(-1, LENGTH)
    layers = nn.Sequential(*[GatedBlock(48, fault) for _ in range(2)])
    model = nn.Sequential()
    model.add_module("tok_embeddings", nn.Embedding(VOCABULARY, 48))
    model.add_module("layers", layers)
    model.add_module("norm", RootNorm(48, fault))
    model.add_module("output", nn.Linear(48, VOCABULARY, bias=False))
    optimizer = AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = OneCycleLR(optimizer, max_lr=3e-3, total_steps=STEPS + 1)
    with attach(model, optimizer) as probe:
        for _, (ids,) in zip(range(STEPS), batches(blocks[:800], size=16), strict=False):
            loss = F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            probe.end_step(loss=loss)
    return next_word_loss(model, blocks[800:])


class PatchClassifier(nn.Module):
    def __init__(self, skips: bool) -> None:
        super().__init__()
        self.skips = skips
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
        config = transformers.ViTConfig(**sizes, image_size=8, patch_size=2, num_channels=1)
        self.vit = transformers.ViTModel(config, add_pooling_layer=False)
        self.classifier = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.vit.embeddings(images) if self.skips else self.vit(images).last_hidden_state
        return self.classifier(hidden[:, 1:].mean(1))


@program(
    "transformers",
    HUB + "image-classification, with a small ViT",
    Fault(
        "head_reads_the_embeddings",
        OUTPUT,
        DEFAULT,
        ("unchanged_parameter@*vit*", "parameters_follow_gradients@*vit*", "vanishing_gradient@*vit*", "@*layer*"),
    ),
)
def vit_digits(fault: str = "") -> Tensor:
    train_data, test_data = normalized_digits()
    model = PatchClassifier(fault == "head_reads_the_embeddings")
    optimizer = AdamW(model.parameters(), lr=3e-3)
    scheduler = transformers.get_cosine_schedule_with_warmup(optimizer, 10, 150)
    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(150), batches(*train_data.tensors, size=32), strict=False):
            loss = F.cross_entropy(model(data), wanted)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            probe.end_step(loss=loss)
    model.eval()
    images, target = test_data.tensors
    with torch.no_grad():
        return F.cross_entropy(model(images), target)


class MemoryAttention(nn.Module):
    """Attention to the segment and to the states of the previous segment."""

    def __init__(self, size: int, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.query, self.key, self.value = (nn.Linear(size, size, bias=False) for _ in range(3))
        self.output = nn.Linear(size, size)
        self.distance = nn.Embedding(2 * LENGTH, 4)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        length, total = x.shape[1], x.shape[1] + memory.shape[1]
        keys, values = self.key(torch.cat([memory, x], 1)), self.value(torch.cat([memory, x], 1))
        if self.fault == "values_in_another_order_than_keys":
            values = self.value(torch.cat([x, memory], 1))
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in (self.query(x), keys, values))
        distances = torch.arange(total - length, total)[:, None] - torch.arange(total)
        bias = self.distance(distances.clamp(min=0)).permute(2, 0, 1).masked_fill(distances < 0, -1e9)
        return self.output(F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2))


class SegmentModel(nn.Module):
    def __init__(self, fault: str, size: int = 40) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, size)
        self.attention = nn.ModuleList([MemoryAttention(size, fault) for _ in range(2)])
        self.norms = nn.ModuleList([nn.LayerNorm(size) for _ in range(2)])
        self.mlp = nn.Sequential(nn.LayerNorm(size), nn.Linear(size, 80), nn.ReLU(), nn.Linear(80, size))
        self.head = nn.Linear(size, VOCABULARY)

    def forward(self, ids: Tensor, memories: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        x, states = self.embedding(ids), []
        for attention, norm, memory in zip(self.attention, self.norms, memories, strict=True):
            states.append(x.detach())
            x = norm(x + attention(x, memory))
        return self.head(x + self.mlp(x)), states


@program(
    "transformers",
    "Dai et al., Transformer-XL: attentive language models beyond a fixed-length context, 2019",
    Fault("values_in_another_order_than_keys", MEMORY, DEFAULT, ("@attention*", "looks_ahead")),
)
def segment_memory(fault: str = "") -> None:
    segment = LENGTH // 2
    ids = stream(16 * (segment * STEPS + 1) + 64)[: 16 * (segment * STEPS + 1)].view(16, -1)
    model = SegmentModel(fault)
    optimizer = AdamW(model.parameters(), lr=3e-3)
    memories = [torch.zeros(16, segment, 40) for _ in range(2)]
    with attach(model, optimizer) as probe:
        for start in range(0, segment * STEPS, segment):
            logits, memories = model(ids[:, start : start + segment], memories)
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, start + 1 : start + segment + 1].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            probe.end_step(loss=loss)


class AdaptedProjection(nn.Module):
    def __init__(self, base: nn.Module, outputs: int, fault: str) -> None:
        super().__init__()
        self.base = base
        self.lora_a = nn.Linear(48, 4, bias=False)
        self.lora_b = nn.Linear(4, outputs, bias=False)
        nn.init.zeros_(self.lora_b.weight)
        if fault == "both_factors_start_at_zero":
            nn.init.zeros_(self.lora_a.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 4.0 * self.lora_b(self.lora_a(x))


@program(
    "transformers",
    "peft, examples/causal_language_modeling, with a small GPT-2 and without the library",
    Fault(
        "both_factors_start_at_zero",
        OPTIMIZER,
        DEFAULT,
        (
            "all_zero@*lora*",
            "poor_initialization",
            "unchanged_parameter@*lora*",
            "vanishing_gradient@*lora*",
            "@*lora*",
        ),
    ),
    Fault("rate_of_another_optimizer", OPTIMIZER, DEFAULT, ("update_ratio", "loss_not_decreasing")),
)
def adapted_gpt2(fault: str = "") -> None:
    blocks = stream(LENGTH * 500)[: LENGTH * 500].view(-1, LENGTH)
    special = {"bos_token_id": PAD, "eos_token_id": PAD}
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=48, n_layer=1, n_head=4, **special
    )
    model = transformers.GPT2LMHeadModel(config)
    pretraining = AdamW(model.parameters(), lr=5e-3)
    for _, (ids,) in zip(range(60), batches(blocks, size=16), strict=False):
        model(input_ids=ids, labels=ids).loss.backward()
        pretraining.step()
        pretraining.zero_grad()
    model.requires_grad_(False)
    for block in model.transformer.h:
        block.attn.c_attn = AdaptedProjection(block.attn.c_attn, 144, fault)
        block.mlp.c_fc = AdaptedProjection(block.mlp.c_fc, 192, fault)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = AdamW(trained, lr=1e-6 if fault == "rate_of_another_optimizer" else 5e-3)
    other = blocks.flip(1)  # the text to adapt to is in reversed order
    model.train()
    with attach(model, optimizer) as probe:
        for _, (ids,) in zip(range(120), batches(other, size=16), strict=False):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            probe.end_step(loss=loss)


@program(
    "transformers",
    HUB + "translation/run_translation_no_trainer.py, with a small BART",
    Fault("padding_kept_in_the_labels", LOSS, DEFAULT, ("padding_in_loss",)),
    Fault("epsilon_of_adam_too_large", OPTIMIZER, DEFAULT, ("update_ratio", "loss_not_decreasing")),
)
def bart_translation(fault: str = "") -> Tensor:
    source = padded(900, 14)
    labels = torch.empty_like(source)
    for row, ids in enumerate(source):  # the translation is the reversed sentence
        words = ids[ids != PAD]
        labels[row] = F.pad(torch.cat([words.flip(0), torch.tensor([MASK])]), (0, 13 - len(words)), value=PAD)
    fields: dict[str, Any] = {"vocab_size": VOCABULARY, "d_model": 32, "max_position_embeddings": 20}
    for side in ("encoder", "decoder"):
        fields |= {f"{side}_layers": 1, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 64}
    special = {"pad_token_id": PAD, "bos_token_id": PAD, "eos_token_id": MASK, "decoder_start_token_id": MASK}
    model = transformers.BartForConditionalGeneration(
        transformers.BartConfig(**fields, **special, forced_eos_token_id=None)
    )
    optimizer = AdamW(model.parameters(), lr=4e-3, eps=1.0 if fault == "epsilon_of_adam_too_large" else 1e-8)

    def loss_of(batch: Tensor, wanted: Tensor) -> Tensor:
        return model(input_ids=batch, attention_mask=(batch != PAD).long(), labels=wanted).loss

    model.train()
    with attach(model, optimizer) as probe:
        for _, (batch, wanted) in zip(range(100), batches(source[:800], labels[:800], size=16), strict=False):
            kept = fault == "padding_kept_in_the_labels"
            loss = loss_of(batch, wanted if kept else wanted.masked_fill(wanted == PAD, -100))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            probe.end_step(loss=loss)
    model.eval()
    with torch.no_grad():
        return loss_of(source[800:], labels[800:].masked_fill(labels[800:] == PAD, -100))


class PairModel(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.image = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 24))
        self.words = nn.Embedding(VOCABULARY, 24)
        layer = nn.TransformerEncoderLayer(24, 4, 48, 0.0, "gelu", batch_first=True, norm_first=True)
        self.text = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.1)))

    def forward(self, images: Tensor, captions: Tensor) -> Tensor:
        first = F.normalize(self.image(images), dim=-1)
        second = F.normalize(self.text(self.words(captions)).mean(1), dim=-1)
        scale = self.logit_scale.exp()
        return first @ second.t() / scale if self.fault == "divided_by_the_scale" else scale * first @ second.t()


@program(
    "transformers",
    "Radford et al., Learning transferable visual models from natural language supervision, 2021",
    Fault("divided_by_the_scale", SCALE, DEFAULT, ("loss_not_decreasing", "vanishing_gradient", "wrong_loss")),
)
def image_captions(fault: str = "") -> None:
    images, classes = normalized_digits()[0].tensors
    names = torch.tensor([[*tokens(["the", adjective, noun])] for noun in ("cat", "dog") for adjective in
                          ("small", "big", "old", "young", "red")])  # fmt: skip
    model = PairModel(fault)
    optimizer = AdamW(model.parameters(), lr=3e-3, weight_decay=0.2, betas=(0.9, 0.98), eps=1e-6)
    rows = [torch.nonzero(classes == number).flatten() for number in range(10)]
    with attach(model, optimizer) as probe:
        for _ in range(STEPS):
            chosen = torch.stack([row[torch.randint(len(row), ())] for row in rows])  # one image of each caption
            logits = model(images[chosen], names)
            wanted = torch.arange(10)
            loss = (F.cross_entropy(logits, wanted) + F.cross_entropy(logits.t(), wanted)) / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                model.logit_scale.clamp_(0, math.log(100))
            probe.end_step(loss=loss)
