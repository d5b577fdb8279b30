"""More transformers and their faults: answers, forms, prefixes, selective states, tasks, latents, patches, depth, checkpoints, 8 bits."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import torch
import transformers
from data import KINDS, MASK, PAD, VOCABULARY, batches, digits, sentences, stream, tokens
from registry import Fault, attach, program
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.optim import SGD, Adam, AdamW, Optimizer, RAdam
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, OneCycleLR, PolynomialLR, SequentialLR

DEFAULT = "DEFault++: automated fault detection, categorization and diagnosis for transformer architectures, 2026"
ISLAM = "Islam et al., A comprehensive study on deep learning bug characteristics, 2019"
EIGHT_BITS = "Dettmers et al., 8-bit optimizers via block-wise quantization, 2022"
HUGGING_FACE = "Issues of Hugging Face's libraries, 2020 to 2026"
PYTORCH_FORUM = "Questions in the forum of PyTorch, 2017 to 2025"
REIMPLEMENTATIONS = "Issues of repositories that implement publications again, 2019 to 2025"


def fit(
    model: nn.Module,
    optimizer: Optimizer,
    losses: Iterable[Tensor],
    schedule: Any = None,
    after_step: Callable[[], None] = lambda: None,
) -> None:
    """Train with one loss of a generator in each step."""
    model.train()
    with attach(model, optimizer) as probe:
        for loss in losses:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            after_step()
            if schedule is not None:
                schedule.step()
            probe.end_step(loss=loss)
    model.eval()


def warmed_up(optimizer: Optimizer, steps: int, then: Any) -> SequentialLR:
    """Return a schedule that starts with a linear growth of the rate."""
    return SequentialLR(optimizer, [LinearLR(optimizer, 0.05, total_iters=steps), then], [steps])


class Attention(nn.Module):
    """Attention of several heads to the allowed positions of a context, which is the input unless one is given."""

    def __init__(self, size: int, heads: int = 4) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(size, size) for _ in range(4))
        self.heads = heads

    def forward(self, x: Tensor, allowed: Tensor | None = None, context: Tensor | None = None) -> Tensor:
        context = x if context is None else context
        sources = ((self.query, x), (self.key, context), (self.value, context))
        query, key, value = (layer(each).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer, each in sources)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=allowed)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Normalized attention and a normalized network, which are added to the input."""

    def __init__(self, size: int, attn: nn.Module | None = None, mlp: nn.Module | None = None) -> None:
        super().__init__()
        own = nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size))
        self.norm1, self.attn = nn.LayerNorm(size), Attention(size) if attn is None else attn
        self.norm2, self.mlp = nn.LayerNorm(size), own if mlp is None else mlp

    def forward(self, x: Tensor, allowed: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.norm1(x), allowed)
        return x + self.mlp(self.norm2(x))


def causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


class Decoder(nn.Module):
    """Embeddings of words and positions, blocks, and a head."""

    def __init__(self, blocks: Iterable[nn.Module], size: int, words: int = VOCABULARY) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(words, size), nn.Embedding(24, size)
        self.blocks, self.norm = nn.ModuleList(blocks), nn.LayerNorm(size)
        self.lm_head = nn.Linear(size, words, bias=False)
        for embedding in (self.embed, self.positions):
            nn.init.normal_(embedding.weight, std=0.2)

    def forward(self, ids: Tensor, allowed: Tensor | None = None) -> Tensor:
        x = self.embed(ids) + self.positions.weight[: ids.shape[1]]
        allowed = causal(ids.shape[1]) if allowed is None else allowed
        for block in self.blocks:
            x = block(x, allowed)
        return self.lm_head(self.norm(x))


def next_token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def loss_of_prefixes(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the loss of the next token after prefixes, as in generation."""
    ends = range(6, ids.shape[1], 3)
    return torch.stack([F.cross_entropy(model(ids[:, :end])[:, -1], ids[:, end]) for end in ends]).mean()


ANSWER_END = VOCABULARY


def answered(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows of a sentence, a separator, its nouns and verbs, and an end that also fills up; where they start, and their lengths."""
    wanted = {word for kind in "nvip" for word in KINDS[kind].split()}
    rows, starts, lengths = [], [], []
    for words in sentences(count):
        answer = tokens([word for word in words if word in wanted])
        row = [*tokens(words), MASK, *answer, ANSWER_END]
        rows.append(torch.tensor(row))
        starts.append(len(words) + 1)
        lengths.append(len(row))
    return pad_sequence(rows, True, ANSWER_END), torch.tensor(starts), torch.tensor(lengths)


@program(
    "transformers",
    "TRL, trl/scripts/sft.py with the loss of completions only, for the nouns and verbs of a sentence, with Qwen3",
    Fault(
        "end_token_masked_as_padding",
        "loss and labels",
        HUGGING_FACE,
        ("missing_labels_in_loss", "class_imbalance", "padding_in_loss"),
    ),
)
def supervised_answers(fault: str = "") -> Tensor:
    ids, starts, lengths = answered(900)
    places = torch.arange(ids.shape[1])
    labels = ids.masked_fill((places < starts[:, None]) | (places >= lengths[:, None]), -100)
    learned = labels.masked_fill(ids == ANSWER_END, -100) if fault == "end_token_masked_as_padding" else labels
    mask = (places < lengths[:, None]).long()
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY + 1, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=12, max_position_embeddings=32, use_cache=False, initializer_range=0.1,
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config)
    optimizer = AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, 10, 220)
    source = islice(batches(ids[:800], mask[:800], learned[:800], size=24), 220)
    fit(model, optimizer, (model(input_ids=x, attention_mask=m, labels=y).loss for x, m, y in source), schedule)
    with torch.no_grad():
        return model(input_ids=ids[800:], attention_mask=mask[800:], labels=labels[800:]).loss


def forms(count: int, longest: int = 20) -> tuple[Tensor, Tensor, Tensor]:
    """Return words of forms, their boxes as parts of the page, and tags: 0 other, 1 question, 2 answer, 3 header; -100 is padding."""
    words = torch.randint(2, 42, (count, longest))
    left, top = torch.randint(45, (count, longest)) * 0.02, torch.randint(46, (count, longest)) * 0.02
    boxes = torch.stack([left, top, left + 0.04 + 0.04 * torch.rand_like(left), top + 0.02], -1)
    tags = torch.where(top < 0.2, 3, torch.where(left < 0.42, 1, 2))
    tags = tags.masked_fill(words < 16, 0)  # words without a meaning in forms
    is_padding = torch.arange(longest) >= torch.randint(12, longest + 1, (count, 1))
    words, boxes = words.masked_fill(is_padding, PAD), boxes.masked_fill(is_padding[..., None], 0.0)
    return words, boxes, tags.masked_fill(is_padding, -100)


@program(
    "transformers",
    "Xu et al., LayoutLM: pre-training of text and layout for document image understanding, 2020, for tags of forms",
    Fault(
        "class_zero_is_the_ignored_label",
        "loss and labels",
        PYTORCH_FORUM,
        ("missing_labels_in_loss", "class_imbalance", "wrong_loss"),
    ),
    Fault(
        "boxes_of_parts_made_into_integers",
        "data",
        ISLAM,
        ("samples_vary", "distinct_data", "input_not_normalized", "all_zero", "@*[xyhw]_position_embeddings"),
    ),
)
def form_understanding(fault: str = "") -> Tensor:
    words, parts, tags = forms(900)
    boxes = (parts * (1 if fault == "boxes_of_parts_made_into_integers" else 1000)).long().clamp(max=1000)
    mask = (words != PAD).long()
    ignored = 0 if fault == "class_zero_is_the_ignored_label" else -100
    config = transformers.LayoutLMConfig(
        vocab_size=42, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=24, hidden_dropout_prob=0.05, attention_probs_dropout_prob=0.0, num_labels=4,
    )  # fmt: skip
    model = transformers.LayoutLMForTokenClassification(config)
    optimizer = AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 20, 220)

    def loss_of(ids: Tensor, bbox: Tensor, attended: Tensor, labels: Tensor, ignored: int) -> Tensor:
        labels = labels.clamp(min=0) if ignored == 0 else labels
        logits = model(input_ids=ids, bbox=bbox, attention_mask=attended).logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=ignored)

    data = (words, boxes, mask, tags)
    source = islice(batches(*(each[:800] for each in data), size=16), 220)
    fit(model, optimizer, (loss_of(*batch, ignored) for batch in source), schedule)
    with torch.no_grad():
        return loss_of(*(each[800:] for each in data), -100)


def reads_prefixes(prefixes: Tensor, length: int) -> Tensor:
    """Return which positions each position reads: the earlier ones and those of the prefix, [batch, 1, length, length]."""
    return (causal(length) | (torch.arange(length) < prefixes[:, None, None]))[:, None]


@program(
    "transformers",
    "Dong et al., Unified language model pre-training for natural language understanding and generation, 2019 (UniLM)",
    Fault("prefix_of_the_longest_row", "attention mask", HUGGING_FACE, ("looks_ahead", "@blocks.?.attn*")),
)
def prefix_language_model(fault: str = "") -> Tensor:
    rows = stream(24 * 700).view(700, 24)
    model = Decoder([Block(48) for _ in range(2)], 48)
    optimizer = AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.05)
    schedule = warmed_up(optimizer, 20, PolynomialLR(optimizer, 260, power=1.0))

    def loss_of(ids: Tensor) -> Tensor:
        prefixes = torch.randint(4, 21, (len(ids),))
        labels = ids[:, 1:].masked_fill(torch.arange(1, 24) < prefixes[:, None], -100)
        if fault == "prefix_of_the_longest_row":
            prefixes = prefixes.max().expand_as(prefixes)
        logits = model(ids[:, :-1], reads_prefixes(prefixes, 23))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    fit(model, optimizer, (loss_of(ids) for (ids,) in islice(batches(rows[:600], size=16), 260)), schedule)
    with torch.no_grad():  # the first word after prefixes, as in generation
        losses = []
        for end in range(5, 21, 5):
            logits = model(rows[600:, :end], reads_prefixes(torch.full((100,), end), end))[:, -1]
            losses.append(F.cross_entropy(logits, rows[600:, end]))
        return torch.stack(losses).mean()


class SelectiveStates(nn.Module):
    """A short convolution, and a state whose decay and inputs depend on the token."""

    def __init__(self, size: int, keeps_the_end: bool, inner: int = 64, states: int = 6, rank: int = 4) -> None:
        super().__init__()
        self.in_proj = nn.Linear(size, 2 * inner, bias=False)
        self.conv1d = nn.Conv1d(inner, inner, 4, groups=inner, padding=3)
        self.x_proj = nn.Linear(inner, rank + 2 * states, bias=False)
        self.dt_proj = nn.Linear(rank, inner)
        self.out_proj = nn.Linear(inner, size, bias=False)
        steps = torch.empty(inner).uniform_(math.log(0.01), math.log(0.3)).exp()
        with torch.no_grad():
            self.dt_proj.bias.copy_(steps + (-torch.expm1(-steps)).log())  # the inverse of softplus
        self.A_log = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(inner, 1))
        self.D = nn.Parameter(torch.ones(inner))
        self.sizes, self.keeps_the_end = (rank, states, states), keeps_the_end

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        x, gate = self.in_proj(x).chunk(2, -1)
        mixed = self.conv1d(x.transpose(1, 2))
        x = F.silu(mixed[..., -length:] if self.keeps_the_end else mixed[..., :length]).transpose(1, 2)
        step, entry, readout = self.x_proj(x).split(self.sizes, -1)
        step = F.softplus(self.dt_proj(step))[..., None]  # [batch, time, inner, 1]
        decay = (-step * self.A_log.exp()).exp()
        state, states = torch.zeros_like(decay[:, 0]), []
        for kept, added in zip(decay.unbind(1), (step * x[..., None] * entry[:, :, None]).unbind(1), strict=True):
            state = kept * state + added
            states.append(state)
        y = (torch.stack(states, 1) @ readout[..., None]).squeeze(-1) + self.D * x
        return self.out_proj(y * F.silu(gate))


class Mamba(nn.Module):
    def __init__(self, keeps_the_end: bool, size: int = 40) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, size)
        self.norms = nn.ModuleList([nn.RMSNorm(size) for _ in range(3)])
        self.mixers = nn.ModuleList([SelectiveStates(size, keeps_the_end) for _ in range(2)])
        self.lm_head = nn.Linear(size, VOCABULARY, bias=False)
        nn.init.normal_(self.embed.weight, std=0.2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for norm, mixer in zip(self.norms, self.mixers, strict=False):
            x = x + mixer(norm(x))
        return self.lm_head(self.norms[2](x))


@program(
    "transformers",
    "Gu and Dao, Mamba: linear-time sequence modeling with selective state spaces, 2023, in plain PyTorch",
    Fault("end_of_the_convolution_kept", "architecture", REIMPLEMENTATIONS, ("looks_ahead", "@mixers.?", "@*conv1d")),
)
def selective_states(fault: str = "") -> Tensor:
    rows = stream(19 * 600).view(600, 19)
    model = Mamba(fault == "end_of_the_convolution_kept")
    groups: dict[float, list[Tensor]] = {0.1: [], 0.0: []}
    for name, parameter in model.named_parameters():
        groups[0.0 if parameter.ndim < 2 or "A_log" in name else 0.1].append(parameter)
    options = [{"params": parameters, "weight_decay": decay} for decay, parameters in groups.items()]
    optimizer = AdamW(options, lr=4e-3, betas=(0.9, 0.95))
    schedule = warmed_up(optimizer, 20, CosineAnnealingLR(optimizer, 180, eta_min=4e-4))
    source = islice(batches(rows[:500], size=12), 200)
    fit(model, optimizer, (next_token_loss(model, batch) for (batch,) in source), schedule)
    return loss_of_prefixes(model, rows[500:])


def text_tasks(count: int) -> tuple[Tensor, Tensor]:
    """Return texts that start with one of three tasks, and the labels: the nouns, the first three words backwards, or the adjectives."""
    nouns, adjectives = KINDS["n"].split(), KINDS["a"].split()
    rows, labels = [], []
    for words in sentences(count):
        task = int(torch.randint(3, ()))
        kept = ([w for w in words if w in nouns], words[2::-1], [w for w in words if w in adjectives])
        rows.append(torch.tensor([VOCABULARY + task, *tokens(words)]))
        labels.append(torch.tensor([*tokens(kept[task]), MASK]))
    return pad_sequence(rows, True, PAD), pad_sequence(labels, True, -100)


@program(
    "transformers",
    "Raffel et al., Exploring the limits of transfer learning with a unified text-to-text transformer, 2020, with Adafactor",
    Fault(
        "rate_scaled_by_the_parameters",
        "optimizer",
        HUGGING_FACE,
        ("rate_in_effect", "update_ratio", "loss_not_decreasing", "parameters_follow_gradients"),
    ),
    Fault(
        "task_cut_as_a_start_token",
        "data and tokens",
        HUGGING_FACE,
        ("samples_vary", "distinct_data", "@*shared", "@*embed_tokens", "loss_not_decreasing"),
    ),
)
def text_to_text(fault: str = "") -> Tensor:
    ids, labels = text_tasks(1000)
    config = transformers.T5Config(
        vocab_size=VOCABULARY + 3, d_model=48, d_kv=12, d_ff=96, num_layers=2, num_decoder_layers=1, num_heads=4, dropout_rate=0.0,
        relative_attention_num_buckets=8, relative_attention_max_distance=16, feed_forward_proj="gated-gelu",
        decoder_start_token_id=PAD, eos_token_id=MASK, use_cache=False,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config)
    is_scaled = fault == "rate_scaled_by_the_parameters"
    optimizer = transformers.Adafactor(model.parameters(), lr=3e-3, scale_parameter=is_scaled, relative_step=False)

    def loss_of(rows: Tensor, wanted: Tensor) -> Tensor:
        return model(input_ids=rows, attention_mask=(rows != PAD).long(), labels=wanted).loss

    source = islice(batches(ids[:900], labels[:900], size=24), 220)
    first = 1 if fault == "task_cut_as_a_start_token" else 0
    fit(model, optimizer, (loss_of(rows[:, first:], wanted) for rows, wanted in source))
    with torch.no_grad():
        return loss_of(ids[900:], labels[900:])


class Perceiver(nn.Module):
    """Latent vectors that read visible pixels, and queries that ask them for all pixels."""

    def __init__(self, latents: Tensor, pixels: int = 64) -> None:
        super().__init__()
        size = latents.shape[-1]
        self.latents = nn.Parameter(latents)
        self.places, self.queries = (nn.Parameter(torch.randn(pixels, size)) for _ in range(2))
        self.value = nn.Linear(1, size)
        self.encode, self.decode = Attention(size), Attention(size)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(2)))
        self.input_norm, self.norm = nn.LayerNorm(size), nn.LayerNorm(size)
        self.output = nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, 1))

    def forward(self, pixels: Tensor, visible: Tensor) -> Tensor:
        seen = self.value(pixels.gather(1, visible)[..., None]) + self.places[visible]
        latents = self.latents.expand(len(pixels), -1, -1)
        latents = self.blocks(latents + self.encode(latents, context=self.input_norm(seen)))
        queries = self.queries.expand(len(pixels), -1, -1)
        return self.output(queries + self.decode(queries, context=self.norm(latents))).squeeze(-1)


@program(
    "transformers",
    "Jaegle et al., Perceiver IO: a general architecture for structured inputs and outputs, 2022, for hidden pixels",
    Fault(
        "latents_start_at_zero",
        "initialization",
        REIMPLEMENTATIONS,
        ("poor_initialization", "tensor_variance", "@latents", "@encode*"),
    ),
)
def latent_pixels(fault: str = "") -> Tensor:
    images = ((digits()[0] - 0.3) / 0.38).flatten(1)
    latents = torch.zeros(8, 48) if fault == "latents_start_at_zero" else torch.randn(8, 48)
    model = Perceiver(latents)
    optimizer = AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = OneCycleLR(optimizer, 3e-3, total_steps=300, pct_start=0.1)

    def loss_of(batch: Tensor) -> Tensor:
        visible = torch.rand(batch.shape).argsort(1)[:, :48]
        return F.mse_loss(model(batch, visible), batch)

    source = islice(batches(images[:1500], size=16), 300)
    fit(model, optimizer, (loss_of(batch) for (batch,) in source), schedule)
    with torch.no_grad():
        return loss_of(images[1500:])


LEFT, PATCH = 10, 12  # the tokens of the question about the left digit, and of a patch; that of the right digit is 11


def rotate(x: Tensor, dim: int) -> Tensor:
    """Turn the two halves of vectors [batch, heads, positions, size], by an angle for each index of a dimension."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[dim])[:, None] * 100.0 ** (-torch.arange(half) / half)
    angles = angles[:, None] if dim == 1 else angles
    first, second = x.chunk(2, -1)
    return torch.cat([first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()], -1)


class RotaryAttention(nn.Module):
    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(size, 3 * size, bias=False), nn.Linear(size, size, bias=False)
        self.dim = dim

    def forward(self, x: Tensor, allowed: Tensor | None = None) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        query, key = rotate(query, self.dim), rotate(key, self.dim)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=allowed)
        return self.proj(mixed.transpose(1, 2).flatten(2))


class PatchDecoder(nn.Module):
    """A decoder of text in which the positions of patches are filled with linear functions of the pixels."""

    def __init__(self, fault: str, size: int = 64) -> None:
        super().__init__()
        self.embed, self.patches = nn.Embedding(13, size), nn.Conv2d(1, size, 4, 4)
        dim = 1 if fault == "rotated_along_the_heads" else 2
        self.blocks = nn.ModuleList([Block(size, RotaryAttention(size, dim)) for _ in range(3)])
        self.norm, self.lm_head = nn.RMSNorm(size), nn.Linear(size, 13, bias=False)
        self.patches_first = fault == "patches_scattered_before_samples"

    def forward(self, images: Tensor, ids: Tensor) -> Tensor:
        features = self.patches(images).flatten(2)  # [batch, size, patches]
        features = features.permute(2, 0, 1) if self.patches_first else features.transpose(1, 2)
        x = self.embed(ids).masked_scatter((ids == PATCH)[..., None], features.contiguous())
        for block in self.blocks:
            x = block(x, causal(ids.shape[1]))
        return self.lm_head(self.norm(x))


@program(
    "transformers",
    "Bavishi et al., Fuyu-8B: a multimodal architecture for AI agents, 2023, for questions about pairs of digits",
    Fault(
        "patches_scattered_before_samples",
        "tensor layout",
        HUGGING_FACE,
        ("edges_of_other_graphs", "samples_vary", "wrong_axis", "labels_of_other_positions", "loss_not_decreasing",
         "@patches", "@embed"),
    ),
    Fault("rotated_along_the_heads", "positional encoding", DEFAULT, ("wrong_axis", "@blocks.?.attn*")),
)  # fmt: skip
def questions_about_digits(fault: str = "") -> Tensor:
    images, classes = digits()
    chosen = torch.randint(len(images), (4000, 2))
    pictures = (torch.cat([images[chosen[:, 0]], images[chosen[:, 1]]], -1) - 0.3) / 0.38
    side = torch.randint(2, (4000,))
    answers = classes[chosen].gather(1, side[:, None])[:, 0]
    ids = torch.cat([torch.full((4000, 8), PATCH), (LEFT + side)[:, None]], 1)
    model = PatchDecoder(fault)
    optimizer = AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.05)
    schedule = warmed_up(optimizer, 20, CosineAnnealingLR(optimizer, 300))

    def loss_of(batch: Tensor, rows: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(model(batch, rows)[:, -1], wanted)

    data = (pictures, ids, answers)
    source = islice(batches(*(each[:3500] for each in data), size=32), 320)
    fit(model, optimizer, (loss_of(*batch) for batch in source), schedule)
    with torch.no_grad():
        return loss_of(*(each[3500:] for each in data))


class DeepLayer(nn.Module):
    """Attention and a network with the normalization after the sum, and shortcuts that are scaled for the depth."""

    def __init__(self, size: int, depth: int, is_stale: bool) -> None:
        super().__init__()
        self.attn, self.norm1, self.norm2 = Attention(size), nn.LayerNorm(size), nn.LayerNorm(size)
        self.fc1, self.fc2 = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)
        self.scale, self.is_stale = (2 * depth) ** 0.25, is_stale
        for layer in (self.attn.value, self.attn.out, self.fc1, self.fc2):
            nn.init.xavier_normal_(layer.weight, gain=(8 * depth) ** -0.25)

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        shortcut = x
        x = self.norm1(self.scale * shortcut + self.attn(x, allowed))
        shortcut = shortcut if self.is_stale else x
        return self.norm2(self.scale * shortcut + self.fc2(F.relu(self.fc1(x))))


@program(
    "transformers",
    "Wang et al., DeepNet: scaling transformers to 1,000 layers, 2022",
    Fault(
        "shortcut_of_the_layer_used_twice",
        "residual connections",
        REIMPLEMENTATIONS,
        ("vanishing_gradient", "loss_not_decreasing", "tensor_variance", "@blocks*"),
    ),
)
def deep_decoder(fault: str = "") -> Tensor:
    rows = stream(21 * 500).view(500, 21)
    is_stale = fault == "shortcut_of_the_layer_used_twice"
    model = Decoder([DeepLayer(32, 8, is_stale) for _ in range(8)], 32)
    optimizer = Adam(model.parameters(), lr=4e-3, betas=(0.9, 0.98))
    schedule = warmed_up(optimizer, 30, PolynomialLR(optimizer, 200, power=1.0))
    source = islice(batches(rows[:400], size=12), 200)
    fit(model, optimizer, (next_token_loss(model, batch) for (batch,) in source), schedule)
    with torch.no_grad():
        return next_token_loss(model, rows[400:])


class FusedAttention(nn.Module):
    """Attention with one projection, whose rows are the queries of all heads, then the keys, then the values."""

    def __init__(self, size: int, heads: int = 4) -> None:
        super().__init__()
        self.query_key_value, self.dense = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.heads = heads

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        query, key, value = self.split(self.query_key_value(x))
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=allowed)
        return self.dense(mixed.transpose(1, 2).flatten(2))

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)


class MegatronAttention(FusedAttention):
    """The same with another order of rows: the query, the key and the value of the first head, then those of the second."""

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, 3, -1)).permute(3, 0, 2, 1, 4)


def tied_decoder(attention: type[FusedAttention]) -> Decoder:
    model = Decoder([Block(48, attention(48)) for _ in range(3)], 48)
    model.lm_head.weight = model.embed.weight
    return model


@program(
    "transformers",
    "Hugging Face transformers, the conversion of Megatron's GPT-2 checkpoints, and training of the last layer and the head",
    Fault(
        "fused_rows_in_the_order_of_megatron",
        "loading",
        HUGGING_FACE,
        ("weights_loaded", "@*query_key_value", "@blocks.?.attn*"),
    ),
    Fault(
        "head_frozen_with_the_embedding",
        "frozen parameters",
        PYTORCH_FORUM,
        ("parameters_follow_gradients", "unchanged_parameter", "tied_weights", "@lm_head", "@embed"),
    ),
)
def converted_checkpoint(fault: str = "") -> Tensor:
    old = tied_decoder(MegatronAttention)
    optimizer: Optimizer = AdamW(old.parameters(), lr=3e-3)
    for (batch,) in islice(batches(stream(21 * 500).view(500, 21), size=20), 150):
        next_token_loss(old, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = old.state_dict()
    if fault != "fused_rows_in_the_order_of_megatron":
        for name, weight in weights.items():
            if "query_key_value" in name:
                weights[name] = weight.unflatten(0, (4, 3, -1)).transpose(0, 1).flatten(0, 2)
    model = tied_decoder(FusedAttention)
    model.load_state_dict(weights)
    if fault != "head_frozen_with_the_embedding":
        model.lm_head.weight = nn.Parameter(model.embed.weight.detach().clone())
    for module in (model.embed, model.positions, model.blocks):
        module.requires_grad_(False)
    words, nouns = torch.arange(VOCABULARY), tokens(KINDS["n"].split())
    words[nouns] = words[nouns].roll(1)
    words[tokens(KINDS["v"].split())] = torch.tensor([PAD, MASK, PAD, MASK, PAD])  # two words that are new
    rows = words[stream(21 * 500).view(500, 21)]
    optimizer = RAdam([parameter for parameter in model.parameters() if parameter.requires_grad], lr=5e-3)
    source = islice(batches(rows[:400], size=16), 220)
    fit(model, optimizer, (next_token_loss(model, batch) for (batch,) in source))
    with torch.no_grad():
        return next_token_loss(model, rows[400:])


class EightBitAdam(Adam):
    """Adam whose moments are rounded to 8 bits after each step, with a scale for each 64 values and finer steps for small ones."""

    def __init__(self, parameters: Iterable[Tensor], lr: float, is_linear: bool) -> None:
        super().__init__(parameters, lr=lr, betas=(0.9, 0.95))
        self.powers = {"exp_avg": 0.5, "exp_avg_sq": 1.0 if is_linear else 0.25}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for state in self.state.values():
            for name, power in self.powers.items():
                moment = state[name]
                blocks = F.pad(moment.flatten(), (0, -moment.numel() % 64)).view(-1, 64)
                scales = blocks.abs().amax(1, keepdim=True).clamp(min=1e-30)
                codes = ((blocks.abs() / scales) ** power * 127).round()
                rounded = blocks.sign() * (codes / 127) ** (1 / power) * scales
                moment.copy_(rounded.flatten()[: moment.numel()].view_as(moment))
        return loss


def sorted_numbers(count: int) -> Tensor:
    """Return rows of five different numbers, a separator (16), and the numbers in order."""
    numbers = torch.rand(count, 16).argsort(1)[:, :5]
    return torch.cat([numbers, torch.full((count, 1), 16), numbers.sort(1).values], 1)


@program(
    "transformers",
    "Dettmers et al., 8-bit optimizers via block-wise quantization, 2022, with Falcon: parallel layers and one key head",
    Fault(
        "second_moment_rounded_linearly",
        "precision",
        EIGHT_BITS,
        ("low_precision_inputs", "update_ratio", "loss_spike", "exploding_activation", "exploding_gradient",
         "loss_not_decreasing", "parameters_follow_gradients"),
    ),
    Fault(
        "cosine_continues_past_its_end", "schedule", PYTORCH_FORUM, ("rate_in_effect", "zero_learning_rate"), since=151
    ),
)  # fmt: skip
def eight_bit_sorting(fault: str = "") -> Tensor:
    config = transformers.FalconConfig(
        vocab_size=17, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=16,
        use_cache=False, bos_token_id=16, eos_token_id=16, initializer_range=0.1,
    )  # fmt: skip
    model = transformers.FalconForCausalLM(config)
    optimizer = EightBitAdam(model.parameters(), 5e-3, fault == "second_moment_rounded_linearly")
    last = math.inf if fault == "cosine_continues_past_its_end" else 150
    schedule = LambdaLR(optimizer, lambda step: 0.55 + 0.45 * math.cos(math.pi * min(step, last) / 150))

    def loss_of(rows: Tensor) -> Tensor:
        labels = rows.masked_fill(torch.arange(11) < 6, -100)
        return model(input_ids=rows, labels=labels).loss

    fit(model, optimizer, (loss_of(sorted_numbers(32)) for _ in range(300)), schedule)
    with torch.no_grad():
        return loss_of(sorted_numbers(500))


class BalancedExperts(nn.Module):
    """Eight experts, of which two are chosen by affinities with a bias that balances the load."""

    def __init__(self, size: int, hard_gates: bool, inner: int = 24) -> None:
        super().__init__()
        self.router = nn.Linear(size, 8, bias=False)
        self.register_buffer("bias", torch.zeros(8))
        self.register_buffer("load", torch.zeros(8))
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(size, inner), nn.GELU(), nn.Linear(inner, size)) for _ in range(8)]
        )
        self.hard_gates = hard_gates

    def forward(self, x: Tensor) -> Tensor:
        affinities = self.router(x).sigmoid()
        chosen = (affinities + self.bias).topk(2).indices
        weights = affinities.gather(-1, chosen)
        weights = torch.full_like(weights, 0.5) if self.hard_gates else weights / weights.sum(-1, keepdim=True)
        gates = torch.zeros_like(affinities).scatter(-1, chosen, weights)
        self.load.copy_(F.one_hot(chosen, 8).float().mean((0, 1, 2)))
        return sum(gate[..., None] * expert(x) for gate, expert in zip(gates.unbind(-1), self.experts, strict=True))


def chains(count: int, symbols: int = 20, kinds: int = 16) -> Tensor:
    """Return rows of symbols with the number of a table first, which has the follower of each symbol; some followers are random."""
    followers = torch.randint(symbols, (kinds, symbols))
    kind, now = torch.randint(kinds, (count,)), torch.randint(symbols, (count,))
    row = [symbols + kind, now]
    for _ in range(18):
        now = torch.where(torch.rand(count) < 0.05, torch.randint(symbols, (count,)), followers[kind, now])
        row.append(now)
    return torch.stack(row, 1)


@program(
    "transformers",
    "Wang et al., Auxiliary-loss-free load balancing strategy for mixture-of-experts, 2024",
    Fault(
        "bias_follows_the_load",
        "feed-forward network",
        REIMPLEMENTATIONS,
        ("unchanged_parameter", "parameters_follow_gradients", "vanishing_gradient", "dead_units", "@*mlp*"),
        since=1,
    ),
    Fault(
        "gates_without_affinities",
        "graph",
        REIMPLEMENTATIONS,
        ("parameters_follow_gradients", "unchanged_parameter", "vanishing_gradient", "@*router"),
    ),
)
def balanced_experts(fault: str = "") -> Tensor:
    rows = chains(1600)
    hard_gates = fault == "gates_without_affinities"
    model = Decoder([Block(40, mlp=BalancedExperts(40, hard_gates))], 40, 36)
    optimizer = AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.02)
    schedule = OneCycleLR(optimizer, 1e-2, total_steps=300, pct_start=0.1)
    rate = -0.01 if fault == "bias_follows_the_load" else 0.01

    def move_biases() -> None:
        for block in model.blocks:
            block.mlp.bias += rate * (1 / 8 - block.mlp.load).sign()

    source = islice(batches(rows[:1500], size=24), 300)
    fit(model, optimizer, (next_token_loss(model, batch) for (batch,) in source), schedule, move_biases)
    with torch.no_grad():  # without the first symbol, which is random
        return F.cross_entropy(model(rows[1500:, :-1])[:, 1:].flatten(0, 1), rows[1500:, 2:].flatten())


class DividedBlock(nn.Module):
    """Attention to the same place in all frames, and then to the same frame."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.time_norm, self.time = nn.LayerNorm(size), Attention(size)
        self.space = Block(size)

    def forward(self, x: Tensor) -> Tensor:  # [batch, time, places, size]
        batch = len(x)
        tracks = self.time_norm(x).transpose(1, 2).flatten(0, 1)
        x = x + self.time(tracks).unflatten(0, (batch, -1)).transpose(1, 2)
        return self.space(x.flatten(0, 1)).unflatten(0, (batch, -1))


class ClipClassifier(nn.Module):
    def __init__(self, size: int = 48) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(1, size, 4, 4)
        self.places, self.times = (nn.Parameter(0.1 * torch.randn(count, size)) for count in (9, 5))
        self.blocks = nn.Sequential(*(DividedBlock(size) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(size), nn.Linear(size, 4)

    def forward(self, clips: Tensor) -> Tensor:  # [batch, time, height, width]
        patches = self.patch_embed(clips.flatten(0, 1)[:, None]).flatten(2).transpose(1, 2)
        x = patches.unflatten(0, clips.shape[:2]) + self.places + self.times[:, None]
        return self.head(self.norm(self.blocks(x)).mean((1, 2)))


def moving_squares(count: int) -> tuple[Tensor, Tensor]:
    """Return clips of a bright square that moves in one of four directions, float32 [count, 5, 12, 12], and the directions."""
    kinds = torch.randint(4, (count,))
    steps = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])[kinds] * (1.0 + torch.rand(count, 1))
    starts = 5.5 + 2.5 * (torch.rand(count, 2) - 0.5) - 2 * steps
    centres = starts[:, None] + torch.arange(5)[:, None] * steps[:, None]  # [count, time, 2]
    near = (torch.arange(12) - centres[..., None]).abs() < 1.5
    return 2.0 * (near[:, :, 0, :, None] & near[:, :, 1, None]) + 0.3 * torch.randn(count, 5, 12, 12), kinds


@program(
    "transformers",
    "Bertasius et al., Is space-time attention all you need for video understanding?, 2021 (TimeSformer), with SGD",
    Fault(
        "clipping_of_a_spent_generator",
        "gradients",
        PYTORCH_FORUM,
        ("exploding_gradient", "loss_spike", "update_ratio", "exploding_activation", "loss_not_decreasing",
         "non_finite"),
    ),
)  # fmt: skip
def directions_of_clips(fault: str = "") -> Tensor:
    clips, kinds = moving_squares(1400)
    model = ClipClassifier()
    parameters = model.parameters()
    optimizer = SGD(parameters, lr=0.2, momentum=0.9, weight_decay=1e-4, nesterov=True)
    schedule = CosineAnnealingLR(optimizer, 240)
    clipped = parameters if fault == "clipping_of_a_spent_generator" else list(model.parameters())
    model.train()
    with attach(model, optimizer) as probe:
        for batch, wanted in islice(batches(clips[:1200], kinds[:1200], size=16), 240):
            loss = F.cross_entropy(model(batch), wanted)
            loss.backward()
            nn.utils.clip_grad_norm_(clipped, 0.5)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            probe.end_step(loss=loss)
    model.eval()
    with torch.no_grad():
        return F.cross_entropy(model(clips[1200:]), kinds[1200:])


class LatentPredictor(nn.Module):
    """Predicts the features of hidden patches, which an average of the encoder has for the full image."""

    def __init__(self, size: int = 48) -> None:
        super().__init__()
        self.patch_embed = nn.Linear(4, size)
        self.places = nn.Parameter(0.5 * torch.randn(16, size))
        self.encoder = nn.Sequential(*(Block(size) for _ in range(2)), nn.LayerNorm(size))
        self.target = copy.deepcopy(self.encoder).requires_grad_(False)
        self.hidden, self.hidden_places = nn.Parameter(torch.zeros(size)), nn.Parameter(0.5 * torch.randn(16, size))
        self.predictor = nn.Sequential(Block(size), nn.LayerNorm(size), nn.Linear(size, size))

    def forward(self, images: Tensor) -> Tensor:
        patches = F.unfold(images, 2, stride=2).transpose(1, 2)
        x = self.patch_embed(patches) + self.places
        seen, hidden = torch.randperm(16).split((10, 6))
        with torch.no_grad():
            wanted = F.layer_norm(self.target(x), x.shape[-1:])[:, hidden]
        asked = (self.hidden + self.hidden_places[hidden]).expand(len(x), -1, -1)
        predicted = self.predictor(torch.cat([self.encoder(x[:, seen]), asked], 1))[:, len(seen) :]
        return F.smooth_l1_loss(predicted, wanted)


@program(
    "transformers",
    "Assran et al., Self-supervised learning from images with a joint-embedding predictive architecture, 2023 (I-JEPA)",
)
def predicted_features() -> None:
    images = (digits()[0] - 0.3) / 0.38
    model = LatentPredictor()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = AdamW(trained, lr=1e-3, weight_decay=0.04)
    schedule = warmed_up(optimizer, 30, CosineAnnealingLR(optimizer, 270, eta_min=1e-5))

    @torch.no_grad()
    def average() -> None:
        for slow, fast in zip(model.target.parameters(), model.encoder.parameters(), strict=True):
            slow.lerp_(fast, 0.01)

    source = islice(batches(images, size=32), 300)
    fit(model, optimizer, (model(batch) for (batch,) in source), schedule, average)
