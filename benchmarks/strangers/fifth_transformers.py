"""Transformers of further kinds, and their faults: packed documents, curricula, codes, tables, windows, tags, few bits, resized images."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
import transformers
from data import KINDS, MASK, PAD, VOCABULARY, batches, digits, padded, sentences, shapes, stream, tokens
from registry import Fault, attach, program
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer, RAdam
from torch.optim.lr_scheduler import CosineAnnealingLR, CosineAnnealingWarmRestarts, LambdaLR, MultiStepLR, OneCycleLR

DEFAULT = "DEFault++: automated fault detection, categorization and diagnosis for transformer architectures, 2026"
HUMBATOVA = "Humbatova et al., Taxonomy of real faults in deep learning systems, 2020"
ISLAM = "Islam et al., A comprehensive study on deep learning bug characteristics, 2019"
ZHANG = "Zhang et al., An empirical study on TensorFlow program bugs, 2018"
HUGGING_FACE = "Issues of Hugging Face's libraries, 2020 to 2026"
PYTORCH_FORUM = "Questions in the forum of PyTorch, 2017 to 2025"
REIMPLEMENTATIONS = "Issues of repositories that implement publications again, 2019 to 2025"


def fit(
    model: nn.Module, optimizer: Optimizer, losses: Iterable[Tensor], schedule: Any = None, clip: float = 0.0
) -> None:
    """Train with one loss of a generator in each step."""
    model.train()
    with attach(model, optimizer) as probe:
        for loss in losses:
            loss.backward()
            if clip > 0:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            if schedule is not None:
                schedule.step()
            probe.end_step(loss=loss)
    model.eval()


class Block(nn.Module):
    """A layer of a transformer: a module that mixes the positions, and a network for each position."""

    def __init__(self, size: int, mixer: nn.Module, network: nn.Module | None = None) -> None:
        super().__init__()
        self.norm1, self.norm2, self.mixer = nn.LayerNorm(size), nn.LayerNorm(size), mixer
        own = nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size))
        self.mlp = own if network is None else network

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        x = x + self.mixer(self.norm1(x), *context)
        return x + self.mlp(self.norm2(x))


class CausalAttention(nn.Module):
    """Attention to earlier positions, with normalized queries and keys."""

    def __init__(self, size: int, linear: type[nn.Linear] = nn.Linear, normed_dim: int = -1, heads: int = 4) -> None:
        super().__init__()
        self.qkv, self.proj = linear(size, 3 * size, bias=False), linear(size, size, bias=False)
        self.scale = nn.Parameter(torch.full((heads, 1, 1), 6.0))
        self.heads, self.normed_dim = heads, normed_dim

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key = F.normalize(query, dim=self.normed_dim), F.normalize(key, dim=self.normed_dim)
        mixed = F.scaled_dot_product_attention(self.scale * query, key, value, is_causal=True, scale=1.0)
        return self.proj(mixed.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    """Embeddings of words and positions, and layers."""

    def __init__(self, layers: Iterable[nn.Module], size: int, words: int = VOCABULARY, length: int = 32) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(words, size), nn.Embedding(length, size)
        self.layers = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(size)
        self.lm_head = nn.Linear(size, words, bias=False)
        for module in (self.embed, self.positions, self.lm_head):
            nn.init.normal_(module.weight, std=0.1)

    def hidden(self, ids: Tensor) -> Tensor:
        return self.norm(self.layers(self.embed(ids) + self.positions.weight[: ids.shape[1]]))

    def forward(self, ids: Tensor) -> Tensor:
        return self.lm_head(self.hidden(ids))


def next_token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def loss_of_prefixes(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the loss of the next token after prefixes, as in generation."""
    ends = range(8, ids.shape[1], 4)
    return torch.stack([F.cross_entropy(model(ids[:, :end])[:, -1], ids[:, end]) for end in ends]).mean()


class PackedAttention(nn.Module):
    def __init__(self, size: int, in_blocks: bool, heads: int = 4) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(size, heads, batch_first=True)
        self.in_blocks, self.heads = in_blocks, heads

    def forward(self, x: Tensor, forbidden: Tensor) -> Tensor:
        masks = forbidden.repeat(self.heads, 1, 1) if self.in_blocks else forbidden.repeat_interleave(self.heads, 0)
        return self.attention(x, x, x, attn_mask=masks, need_weights=False)[0]


class PackedModel(nn.Module):
    """Answers questions about the values of keys, within each document of a row."""

    def __init__(self, in_blocks: bool, size: int = 48) -> None:
        super().__init__()
        self.keys, self.values, self.positions = nn.Embedding(8, size), nn.Embedding(17, size), nn.Embedding(12, size)
        self.blocks = nn.ModuleList([Block(size, PackedAttention(size, in_blocks)) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(size), nn.Linear(size, 17)
        for embedding in (self.keys, self.values, self.positions):
            nn.init.normal_(embedding.weight, std=0.3)

    def forward(self, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
        documents = (positions == 0).cumsum(1)
        earlier = torch.ones(2 * keys.shape[1:], dtype=torch.bool).tril()
        allowed = (documents[:, :, None] == documents[:, None]) & earlier
        x = self.keys(keys) + self.values(values) + self.positions(positions)
        for block in self.blocks:
            x = block(x, ~allowed)
        return self.head(self.norm(x))


def packs(count: int, length: int = 32) -> tuple[Tensor, ...]:
    """Return rows of documents: keys, values (0 in a question), positions in the document, and the answers to questions."""
    rows = torch.zeros(4, count, length, dtype=torch.long)
    rows[3] = -100
    for row in rows.unbind(1):
        start = 0
        while start < length:
            pairs, questions = int(torch.randint(4, 7, ())), int(torch.randint(3, 6, ()))
            keys, values = torch.randperm(8)[:pairs], torch.randint(1, 17, (pairs,))
            asked = torch.randint(pairs, (questions,))
            document = torch.full((4, pairs + questions), -100)
            document[0], document[2] = torch.cat([keys, keys[asked]]), torch.arange(pairs + questions)
            document[1] = F.pad(values, (0, questions))
            document[3, pairs:] = values[asked]
            row[:, start : start + pairs + questions] = document[:, : length - start]
            start += pairs + questions
    return tuple(rows)


@program(
    "transformers",
    "Krell et al., Efficient sequence packing without cross-contamination, 2021, with nn.MultiheadAttention",
    Fault(
        "masks_repeated_in_blocks",
        "attention mask",
        PYTORCH_FORUM,
        ("edges_of_other_graphs", "samples_vary", "padding_attended", "@blocks.?.mixer*"),
    ),
)
def packed_documents(fault: str = "") -> Tensor:
    train, test = packs(800), packs(100)
    model = PackedModel(fault == "masks_repeated_in_blocks")
    optimizer = AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98))
    schedule = CosineAnnealingLR(optimizer, 250, eta_min=3e-4)

    def loss_of(*inputs: Tensor) -> Tensor:
        return F.cross_entropy(model(*inputs[:3]).flatten(0, 1), inputs[3].flatten())

    fit(model, optimizer, (loss_of(*batch) for batch in islice(batches(*train, size=24), 250)), schedule, clip=1.0)
    with torch.no_grad():
        return loss_of(*test)


class LinearAttention(nn.Module):
    """Attention with features instead of a softmax, as sums over the earlier positions."""

    def __init__(self, size: int, has_features: bool, heads: int = 4) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(size, size) for _ in range(4))
        self.has_features, self.heads = has_features, heads

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (self.heads, -1)) for layer in (self.query, self.key, self.value)
        )  # [batch, time, heads, width]
        if self.has_features:
            query, key = F.elu(query) + 1, F.elu(key) + 1
        memory = (key[..., :, None] * value[..., None, :]).cumsum(1)
        total = (query * key.cumsum(1)).sum(-1, keepdim=True)
        mixed = (query[..., None, :] @ memory).squeeze(-2) / (total + 1e-6)
        return self.out(mixed.flatten(2))


@program(
    "transformers",
    "Katharopoulos et al., Transformers are RNNs: fast autoregressive transformers with linear attention, 2020",
    Fault(
        "queries_and_keys_without_features",
        "softmax and scale",
        DEFAULT,
        ("exploding_activation", "exploding_gradient", "loss_spike", "non_finite", "missing_activation", "@*mixer*"),
    ),
)
def linear_attention(fault: str = "") -> Tensor:
    rows = stream(25 * 500).view(500, 25)
    has_features = fault != "queries_and_keys_without_features"
    model = Decoder([Block(48, LinearAttention(48, has_features)) for _ in range(2)], 48)
    optimizer = RAdam(model.parameters(), lr=5e-3)
    fit(model, optimizer, (next_token_loss(model, batch) for (batch,) in islice(batches(rows[:440], size=16), 220)))
    with torch.no_grad():
        return next_token_loss(model, rows[440:])


REVERSAL_PAD, SEPARATOR, FIRST_SYMBOL, LONGEST = 0, 1, 2, 6


def reversals(count: int, longest: int) -> tuple[Tensor, Tensor]:
    """Return rows of symbols, a separator and the same symbols backwards, and their labels, which are the symbols after it."""
    rows, labels = torch.full((2, count, 2 * LONGEST + 1), REVERSAL_PAD)
    labels[:] = -100
    for row, label in zip(rows, labels, strict=True):
        symbols = torch.randint(10, (int(torch.randint(1, longest + 1, ())),)) + FIRST_SYMBOL
        size = len(symbols)
        row[:size], row[size], row[size + 1 : 2 * size + 1] = symbols, SEPARATOR, symbols.flip(0)
        label[size + 1 : 2 * size + 1] = symbols.flip(0)
    return rows, labels


@program(
    "transformers",
    "Bengio et al., Curriculum learning, 2009, for sequences to reverse that become longer, with GPT-2",
    Fault(
        "curriculum_never_advances", "data", REIMPLEMENTATIONS, ("distinct_data", "@*wpe*", "samples_vary"), since=30
    ),
)
def growing_reversals(fault: str = "") -> Tensor:
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 2 * LONGEST + 1, "vocab_size": 12}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(**sizes, **dropout, bos_token_id=SEPARATOR, eos_token_id=SEPARATOR)
    model = transformers.GPT2LMHeadModel(config)
    optimizer = AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = transformers.get_constant_schedule_with_warmup(optimizer, 20)

    def loss_of(rows: Tensor, labels: Tensor) -> Tensor:
        return model(input_ids=rows, attention_mask=(rows != REVERSAL_PAD).long(), labels=labels).loss

    def longest_at(step: int) -> int:
        return 2 if fault == "curriculum_never_advances" else min(LONGEST, 2 + step // 30)

    fit(model, optimizer, (loss_of(*reversals(32, longest_at(step))) for step in range(260)), schedule, clip=1.0)
    with torch.no_grad():
        return loss_of(*reversals(256, LONGEST))


class ReplacedWords(nn.Module):
    """A generator that fills masked words, and a discriminator that finds the wrong ones."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"vocab_size": VOCABULARY, "embedding_size": 32, "num_attention_heads": 4, "pad_token_id": PAD}
        sizes |= {"max_position_embeddings": 24, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        small = transformers.ElectraConfig(**sizes, hidden_size=24, intermediate_size=48, num_hidden_layers=1)
        large = transformers.ElectraConfig(**sizes, hidden_size=48, intermediate_size=96, num_hidden_layers=2)
        self.generator = transformers.ElectraForMaskedLM(small)
        self.discriminator = transformers.ElectraForPreTraining(large)
        self.discriminator.electra.embeddings = self.generator.electra.embeddings

    def forward(self, ids: Tensor, guesses_count: bool = False) -> Tensor:
        is_word = ids != PAD
        masked = (torch.rand(ids.shape) < 0.3) & is_word
        logits = self.generator(input_ids=ids.masked_fill(masked, MASK), attention_mask=is_word.long()).logits[masked]
        corrupted = ids.clone()
        corrupted[masked] = torch.distributions.Categorical(logits=logits.detach()).sample()
        replaced = masked if guesses_count else corrupted != ids
        scores = self.discriminator(input_ids=corrupted, attention_mask=is_word.long()).logits
        found = F.binary_cross_entropy_with_logits(scores[is_word], replaced[is_word].float())
        return F.cross_entropy(logits, ids[masked]) + 10 * found


@program(
    "transformers",
    "Clark et al., ELECTRA: pre-training text encoders as discriminators rather than generators, 2020",
    Fault(
        "right_guesses_count_as_replaced",
        "loss and labels",
        REIMPLEMENTATIONS,
        ("labels_of_other_positions", "labels_shifted", "wrong_loss", "loss_not_decreasing"),
    ),
)
def replaced_words(fault: str = "") -> Tensor:
    ids = padded(1200)
    model = ReplacedWords()
    optimizer = AdamW(model.parameters(), lr=2e-3, eps=1e-6, weight_decay=0.01)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 20, 220)
    source = islice(batches(ids[:1000], size=32), 220)
    guesses_count = fault == "right_guesses_count_as_replaced"
    fit(model, optimizer, (model(batch, guesses_count) for (batch,) in source), schedule, clip=1.0)
    with torch.no_grad():
        return model(ids[1000:].repeat(3, 1))


CODES = 16


def codes_of_digits() -> tuple[Tensor, Tensor]:
    """Return the numbers of the nearest of 16 common pieces of 2 x 2 pixels, int64 [samples, 16], and the classes."""
    images, classes = digits()
    pieces = F.unfold(images, 2, stride=2).transpose(1, 2).flatten(0, 1)
    common = pieces[torch.randperm(len(pieces))[:CODES]]
    for _ in range(8):
        nearest = torch.cdist(pieces, common).argmin(1)
        counts = torch.bincount(nearest, minlength=CODES)
        common = torch.zeros_like(common).index_add(0, nearest, pieces) / counts.clamp(min=1)[:, None]
    common = common[counts.argsort(descending=True)]
    return torch.cdist(pieces, common).argmin(1).view(-1, 16), classes


class CodeModel(nn.Module):
    def __init__(self, time_is_zero: bool, size: int = 48) -> None:
        super().__init__()
        self.token_embed, self.class_embed = nn.Embedding(CODES + 1, size), nn.Embedding(10, size)
        self.positions = nn.Parameter(0.1 * torch.randn(16, size))
        layer = nn.TransformerEncoderLayer(size, 4, 2 * size, 0.0, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(size, CODES)
        self.time_is_zero = time_is_zero

    def forward(self, codes: Tensor, classes: Tensor, smoothing: float = 0.0) -> Tensor:
        shape = (len(codes), 1)
        times = torch.randint(0, 1, shape) if self.time_is_zero and self.training else torch.rand(shape)
        masked = torch.rand(codes.shape) < torch.cos(math.pi / 2 * times)
        x = self.token_embed(codes.masked_fill(masked, CODES)) + self.positions + self.class_embed(classes)[:, None]
        return F.cross_entropy(self.head(self.encoder(x))[masked], codes[masked], label_smoothing=smoothing)


@program(
    "transformers",
    "Chang et al., MaskGIT: masked generative image transformer, 2022, for the codes of pieces of digits",
    Fault("random_integer_below_one", "data and tokens", ISLAM, ("distinct_data", "samples_vary", "@token_embed")),
)
def masked_codes(fault: str = "") -> Tensor:
    codes, classes = codes_of_digits()
    model = CodeModel(fault == "random_integer_below_one")
    optimizer = AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.96), weight_decay=0.045)
    schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    source = islice(batches(codes[:1500], classes[:1500], size=32), 300)
    fit(model, optimizer, (model(*batch, smoothing=0.1) for batch in source), schedule)
    with torch.no_grad():
        return model(codes[1500:].repeat(4, 1), classes[1500:].repeat(4))


class ManyHeads(nn.Module):
    """A decoder that predicts the next three tokens at each position."""

    def __init__(self, is_one_block: bool, size: int = 48) -> None:
        super().__init__()
        layers = [Block(size, CausalAttention(size)) for _ in range(3)]
        self.trunk = Decoder(layers[:1] * 3 if is_one_block else layers, size)
        self.extra_heads = nn.ModuleList(
            [nn.Sequential(nn.Linear(size, size), nn.SiLU(), nn.Linear(size, VOCABULARY)) for _ in range(2)]
        )

    def forward(self, ids: Tensor, are_all_next: bool = False) -> Tensor:
        hidden = self.trunk.hidden(ids[:, :-1])
        losses = []
        for ahead, head in enumerate((self.trunk.lm_head, *self.extra_heads)):
            wanted = ids[:, 1:] if are_all_next else ids[:, 1 + ahead :]
            losses.append(F.cross_entropy(head(hidden[:, : wanted.shape[1]]).flatten(0, 1), wanted.flatten()))
        return torch.stack(losses).mean()


@program(
    "transformers",
    "Gloeckle et al., Better and faster large language models via multi-token prediction, 2024",
    Fault(
        "all_heads_learn_the_next_token",
        "loss and labels",
        REIMPLEMENTATIONS,
        ("labels_of_other_positions", "labels_shifted", "wrong_loss"),
    ),
    Fault("layers_are_one_module", "registration", PYTORCH_FORUM, ("tied_weights", "@trunk.layers*")),
)
def several_tokens_ahead(fault: str = "") -> Tensor:
    rows = stream(25 * 560).view(560, 25)
    model = ManyHeads(fault == "layers_are_one_module")
    optimizer = AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = OneCycleLR(optimizer, 3e-3, total_steps=250, pct_start=0.1)
    source = islice(batches(rows[:500], size=16), 250)
    are_all_next = fault == "all_heads_learn_the_next_token"
    fit(model, optimizer, (model(batch, are_all_next) for (batch,) in source), schedule, clip=1.0)
    with torch.no_grad():
        return model(rows[500:])


FIELDS = (6, 14, 24, 9, 18, 11)  # the number of values of each column


class FieldAttention(nn.Module):
    """Attention between the columns of a table; all of them have their vectors in one embedding."""

    def __init__(self, has_offsets: bool, size: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sum(FIELDS), size)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.attentions = nn.ModuleList([nn.MultiheadAttention(size, 2, batch_first=True) for _ in range(2)])
        self.shortcuts = nn.ModuleList([nn.Linear(size, size) for _ in range(2)])
        self.output = nn.Linear(len(FIELDS) * size, 1)
        starts = torch.tensor([0, *FIELDS[:-1]]).cumsum(0)
        self.register_buffer("offsets", starts if has_offsets else torch.zeros_like(starts))

    def forward(self, columns: Tensor) -> Tensor:
        x = self.embedding(columns + self.offsets)
        for attention, shortcut in zip(self.attentions, self.shortcuts, strict=True):
            x = F.relu(attention(x, x, x, need_weights=False)[0] + shortcut(x))
        return self.output(x.flatten(1)).squeeze(-1)


def clicks(count: int) -> tuple[Tensor, Tensor]:
    """Return columns of categories, of which the first are the most frequent, and whether a user clicked."""
    columns = torch.stack([(torch.rand(count) ** 1.5 * values).long() for values in FIELDS], 1)
    vectors = [torch.randn(values, 3) for values in FIELDS]
    chosen = torch.stack([vector[column] for vector, column in zip(vectors, columns.T, strict=True)], 1)
    scores = (chosen.sum(1) ** 2).sum(-1) - (chosen**2).sum((1, 2))  # the products of all pairs
    return columns, (torch.rand(count) < (scores / 3 - 0.5).sigmoid()).float()


@program(
    "transformers",
    "Song et al., AutoInt: automatic feature interaction learning via self-attentive neural networks, 2019",
    Fault("columns_share_their_rows", "embeddings", REIMPLEMENTATIONS, ("@embedding", "tied_weights", "distinct_data")),
)
def column_attention(fault: str = "") -> Tensor:
    columns, clicked = clicks(9000)
    model = FieldAttention(fault != "columns_share_their_rows")
    optimizer = Adam(model.parameters(), lr=6e-3)
    source = islice(batches(columns[:8000], clicked[:8000], size=128), 350)
    fit(model, optimizer, (F.binary_cross_entropy_with_logits(model(batch), wanted) for batch, wanted in source))
    with torch.no_grad():
        return F.binary_cross_entropy_with_logits(model(columns[8000:]), clicked[8000:])


class WindowAttention(nn.Module):
    """Attention within windows of 4 x 4 patches of a grid of 8 x 8, which can be shifted."""

    def __init__(self, size: int, shift: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.bias = nn.Parameter(0.02 * torch.randn(4, 16, 16))
        self.shift = shift
        edge = (torch.arange(8) >= 8 - shift).long()
        region = self.windows((2 * edge[:, None] + edge).view(1, 8, 8, 1))[..., 0]  # [windows, patches]
        self.register_buffer("is_far", region[:, None, :, None] != region[:, None, None, :])

    @staticmethod
    def windows(x: Tensor) -> Tensor:  # [batch, 8, 8, size] to [windows, 16, size]
        return x.unflatten(2, (2, 4)).unflatten(1, (2, 4)).transpose(2, 3).flatten(0, 2).flatten(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        batch = len(x)
        shifted = x.roll((-self.shift, -self.shift), (1, 2))
        query, key, value = self.qkv(self.windows(shifted)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mask = self.bias.masked_fill(self.is_far, -100.0).repeat(batch, 1, 1, 1)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        grid = self.proj(mixed.transpose(1, 2).flatten(2)).view(batch, 2, 2, 4, 4, -1)
        return grid.transpose(2, 3).reshape(x.shape).roll((self.shift, self.shift), (1, 2))


class DropPath(nn.Module):
    """Leaves out what a layer adds for some samples; the faulty one leaves out all that it returns."""

    def __init__(self, layer: nn.Module, with_shortcut: bool, share: float = 0.15) -> None:
        super().__init__()
        self.layer, self.with_shortcut, self.share = layer, with_shortcut, share

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.ones(len(x), 1, 1, 1)
        if self.training:
            kept = kept.bernoulli_(1 - self.share) / (1 - self.share)
        return kept * self.layer(x) if self.with_shortcut else x + kept * (self.layer(x) - x)


class Restorer(nn.Module):
    """Restores patches of an image, with windows that are shifted in every second layer."""

    def __init__(self, with_shortcut: bool, size: int = 48) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, size, 2, 2)
        self.layers = nn.Sequential(
            *(DropPath(Block(size, WindowAttention(size, shift)), with_shortcut) for shift in (0, 2))
        )
        self.norm, self.head = nn.LayerNorm(size), nn.Linear(size, 12)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed(images).permute(0, 2, 3, 1)
        return images + F.pixel_shuffle(self.head(self.norm(self.layers(x))).permute(0, 3, 1, 2), 2)


@program(
    "transformers",
    "Liang et al., SwinIR: image restoration using Swin transformer, 2021, for images with missing pieces",
    Fault(
        "shortcut_dropped_with_the_path",
        "residual connections",
        REIMPLEMENTATIONS,
        ("all_zero", "samples_vary", "@layers*"),
    ),
)
def restored_images(fault: str = "") -> None:
    images, _ = shapes(600, 16)
    model = Restorer(fault == "shortcut_dropped_with_the_path")
    optimizer = Adam(model.parameters(), lr=2e-3, betas=(0.9, 0.99))
    schedule = MultiStepLR(optimizer, [150, 200], 0.5)

    def loss_of(batch: Tensor) -> Tensor:
        missing = F.interpolate(torch.rand(len(batch), 1, 8, 8), scale_factor=2) < 0.85
        return F.l1_loss(model(batch.masked_fill(missing, 0.0)), batch)

    fit(model, optimizer, (loss_of(batch) for (batch,) in islice(batches(images, size=16), 240)), schedule)


class ConditionalField(nn.Module):
    """The likelihood of a sequence of tags, with scores of the tags that follow each other."""

    def __init__(self, tags: int, is_transposed: bool) -> None:
        super().__init__()
        self.start, self.end = nn.Parameter(torch.zeros(tags)), nn.Parameter(torch.zeros(tags))
        self.transitions = nn.Parameter(0.1 * torch.randn(tags, tags))  # from, to
        self.is_transposed = is_transposed

    def forward(self, scores: Tensor, tags: Tensor, mask: Tensor) -> Tensor:
        follows = self.transitions.T if self.is_transposed else self.transitions
        total = self.start + scores[:, 0]
        for now, here in zip(scores[:, 1:].unbind(1), mask[:, 1:].unbind(1), strict=True):
            longer = (total[:, :, None] + follows + now[:, None]).logsumexp(1)
            total = torch.where(here[:, None], longer, total)
        each = scores.gather(2, tags[..., None]).squeeze(-1) + F.pad(
            self.transitions[tags[:, :-1], tags[:, 1:]], (1, 0)
        )
        last = tags.gather(1, mask.sum(1, keepdim=True) - 1).squeeze(1)
        of_tags = (each * mask).sum(1) + self.start[tags[:, 0]] + self.end[last]
        return ((total + self.end).logsumexp(1) - of_tags).mean()


class Tagger(nn.Module):
    def __init__(self, fault: str, size: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, size, padding_idx=PAD)
        angles = torch.arange(512)[:, None] * 1000.0 ** (-torch.arange(0, size, 2) / size)
        self.register_buffer("pe", torch.cat([angles.sin(), angles.cos()], 1)[:, None])  # [positions, 1, size]
        layer = nn.TransformerEncoderLayer(size, 4, 2 * size, 0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.scores = nn.Linear(size, 5)
        self.crf = ConditionalField(5, fault == "transitions_transposed_in_the_sum")
        self.by_row = fault == "positions_along_the_batch"

    def forward(self, ids: Tensor, tags: Tensor) -> Tensor:
        x = self.embed(ids) * 2
        x = x + (self.pe[: x.shape[0]] if self.by_row else self.pe[: x.shape[1]].transpose(0, 1))
        hidden = self.encoder(x, src_key_padding_mask=ids == PAD)
        return self.crf(self.scores(hidden), tags, ids != PAD)


def phrases(count: int) -> tuple[Tensor, Tensor]:
    """Return sentences with unknown words, and tags of the start and the inside of the first phrase with a noun, and of later ones."""
    rows, labels = [], []
    inside = (KINDS["a"] + " " + KINDS["n"] + " " + KINDS["p"]).split()
    for words in sentences(count):
        seen, marks = 0, []
        for word in words:
            seen += word in ("a", "the")
            later = 2 * (seen > 1)
            marks.append(1 + later if word in ("a", "the") else 2 + later if word in inside else 0)
        row = torch.tensor(tokens(words))
        rows.append(row.masked_fill(torch.rand(len(row)) < 0.3, MASK))  # unknown words
        labels.append(torch.tensor(marks))
    return pad_sequence(rows, True, PAD), pad_sequence(labels, True)


@program(
    "transformers",
    "PyTorch tutorials, making dynamic decisions and the Bi-LSTM CRF, with nn.TransformerEncoder and pytorch-crf's masks",
    Fault(
        "transitions_transposed_in_the_sum",
        "loss",
        PYTORCH_FORUM,
        ("wrong_loss", "wrong_range_of_loss", "wrong_axis", "@crf"),
    ),
    Fault("positions_along_the_batch", "positional encoding", PYTORCH_FORUM, ("wrong_axis", "samples_vary", "@embed")),
)
def tagged_phrases(fault: str = "") -> Tensor:
    ids, tags = phrases(900)
    model = Tagger(fault)
    optimizer = SGD(model.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)
    schedule = CosineAnnealingLR(optimizer, 250)
    source = islice(batches(ids[:800], tags[:800], size=16), 250)
    fit(model, optimizer, (model(*batch) for batch in source), schedule, clip=5.0)
    model.crf.is_transposed = False
    with torch.no_grad():
        return model(ids[800:], tags[800:])


class BitLinear(nn.Linear):
    """Weights of one bit and a scale; the gradient of rounding is that of the identity."""

    keeps_latent = True

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight.detach().abs().mean()
        signs = torch.where(self.weight.detach() > 0, scale, -scale)
        if not self.keeps_latent:
            self.weight.data.copy_(signs)
        x = F.layer_norm(x, x.shape[-1:])
        rounded = x + ((x * 32).round().clamp(-127, 127) / 32 - x).detach()
        return F.linear(rounded, self.weight + (signs - self.weight).detach(), self.bias)


class OverwrittenBitLinear(BitLinear):
    keeps_latent = False


@program(
    "transformers",
    "Wang et al., BitNet: scaling 1-bit transformers for large language models, 2023, with normalized queries and keys",
    Fault(
        "latent_weights_overwritten",
        "precision",
        REIMPLEMENTATIONS,
        ("unchanged_parameter", "parameters_follow_gradients", "low_precision_inputs", "update_ratio", "@layers*"),
    ),
    Fault("queries_normalized_over_the_heads", "normalization", DEFAULT, ("wrong_axis", "@layers.?.mixer*")),
)
def one_bit_decoder(fault: str = "") -> Tensor:
    rows = stream(29 * 460).view(460, 29)
    linear = OverwrittenBitLinear if fault == "latent_weights_overwritten" else BitLinear
    normed = 1 if fault == "queries_normalized_over_the_heads" else -1
    size = 64
    model = Decoder(
        [
            Block(size, CausalAttention(size, linear, normed),
                  nn.Sequential(linear(size, 2 * size), nn.GELU(), linear(2 * size, size)))
            for _ in range(2)
        ],
        size,
    )  # fmt: skip
    optimizer = AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = transformers.get_polynomial_decay_schedule_with_warmup(optimizer, 20, 240, lr_end=4e-4)
    source = islice(batches(rows[:400], size=16), 240)
    fit(model, optimizer, (next_token_loss(model, batch) for (batch,) in source), schedule)
    return loss_of_prefixes(model, rows[400:])


def canvases(count: int, side: int) -> tuple[Tensor, Tensor]:
    """Return digits at random places of larger images, and classes of the quarter and of small and large digits."""
    images, classes = digits()
    chosen = torch.randint(len(images), (count,))
    places = torch.randint(side - 7, (count, 2))
    canvas = 0.1 * torch.randn(count, 1, side, side)
    for image, digit, (y, x) in zip(canvas, images[chosen], places.tolist(), strict=True):
        image[:, y : y + 8, x : x + 8] += digit
    y, x = (places > (side - 8) // 2).long().unbind(1)
    return (canvas - 0.2) / 0.4, (2 * y + x) * 2 + (classes[chosen] > 4)


def vit(side: int) -> transformers.ViTForImageClassification:
    config = transformers.ViTConfig(
        image_size=side, patch_size=4, num_channels=1, num_labels=8, hidden_size=48, intermediate_size=96,
        num_hidden_layers=3, num_attention_heads=4,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def layer_groups(model: nn.Module, rate: float) -> list[dict[str, Any]]:
    """Return groups of parameters, of which those of earlier layers have lower rates."""
    depths: dict[int, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        found = re.search(r"layers?\.(\d+)", name)
        depth = 1 + int(found[1]) if found else 0 if "embeddings" in name else 4
        depths.setdefault(depth, []).append(parameter)
    return [{"params": parameters, "lr": rate * 0.75 ** (4 - depth)} for depth, parameters in depths.items()]


@program(
    "transformers",
    "Dosovitskiy et al., An image is worth 16x16 words, 2021: fine-tuning at a higher resolution, with BEiT's rates of layers",
    Fault(
        "positions_resized_without_permute", "positional encoding", HUGGING_FACE, ("weights_loaded", "@*embeddings*")
    ),
    Fault(
        "weight_decay_added_to_the_gradient",
        "regularization",
        PYTORCH_FORUM,
        ("update_ratio", "vanishing_gradient", "loss_not_decreasing", "parameters_follow_gradients"),
    ),
)
def larger_images(fault: str = "") -> Tensor:
    small = vit(12)
    optimizer: Optimizer = AdamW(small.parameters(), lr=2e-3)
    for images, labels in islice(batches(*canvases(1600, 12), size=32), 250):
        small(pixel_values=images, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: weight for name, weight in small.state_dict().items() if not name.startswith("classifier")}
    name = "vit.embeddings.position_embeddings"
    first, grid = weights[name][:, :1], weights[name][:, 1:]
    is_scrambled = fault == "positions_resized_without_permute"
    grid = grid.reshape(1, 48, 3, 3) if is_scrambled else grid.reshape(1, 3, 3, 48).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, (4, 4), mode="bicubic", align_corners=False)
    weights[name] = torch.cat([first, grid.flatten(2).transpose(1, 2)], 1)
    model = vit(16)
    model.load_state_dict(weights, strict=False)
    is_decoupled = fault != "weight_decay_added_to_the_gradient"
    groups = layer_groups(model, 1e-3)
    optimizer = NAdam(groups, weight_decay=0.1, decoupled_weight_decay=is_decoupled)
    images, labels = canvases(1000, 16)
    source = islice(batches(images[:800], labels[:800], size=32), 170)
    fit(model, optimizer, (model(pixel_values=x, labels=y).loss for x, y in source), clip=1.0)
    with torch.no_grad():
        return model(pixel_values=images[800:], labels=labels[800:]).loss


NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
LETTERS = sorted(set("".join(NAMES)) | {" "})
TEXT_PAD, TEXT_START, TEXT_END, FIRST_LETTER = 0, 1, 2, 3


def written_numbers(count: int) -> tuple[Tensor, Tensor]:
    """Return images of two digits [count, 1, 8, 16], and the letters of their names."""
    images, classes = digits()
    pairs = torch.randint(len(images), (count, 2))
    texts = [" ".join(NAMES[int(kind)] for kind in classes[pair]) for pair in pairs]
    rows = [[TEXT_START, *(FIRST_LETTER + LETTERS.index(letter) for letter in text), TEXT_END] for text in texts]
    pictures = torch.cat([images[pairs[:, 0]], images[pairs[:, 1]]], -1)
    return (pictures - 0.3) / 0.38, pad_sequence([torch.tensor(row) for row in rows], True, TEXT_PAD)


class ReadingLayer(nn.Module):
    def __init__(self, size: int, reads_itself: bool) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(size, 4, batch_first=True)
        self.cross_attn = nn.MultiheadAttention(size, 4, batch_first=True)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(size) for _ in range(3))
        self.mlp = nn.Sequential(nn.Linear(size, 2 * size), nn.ReLU(), nn.Linear(2 * size, size))
        self.reads_itself = reads_itself

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        normed = self.norm1(x)
        x = x + self.self_attn(normed, normed, normed, attn_mask=later, need_weights=False)[0]
        normed = self.norm2(x)
        source = normed if self.reads_itself else memory
        x = x + self.cross_attn(normed, source, source, need_weights=False)[0]
        return x + self.mlp(self.norm3(x))


class Reader(nn.Module):
    """Reads an image as text, letter by letter."""

    def __init__(self, reads_itself: bool, size: int = 48) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(1, size, 4, 4)
        self.places = nn.Parameter(0.1 * torch.randn(8, size))
        self.encoder = nn.TransformerEncoderLayer(size, 4, 2 * size, 0.0, "gelu", batch_first=True)
        self.embed, self.positions = nn.Embedding(FIRST_LETTER + len(LETTERS), size), nn.Embedding(16, size)
        self.layers = nn.ModuleList([ReadingLayer(size, reads_itself) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(size), nn.Linear(size, FIRST_LETTER + len(LETTERS))

    def forward(self, images: Tensor, ids: Tensor) -> Tensor:
        memory = self.encoder(self.patch_embed(images).flatten(2).transpose(1, 2) + self.places)
        x = self.embed(ids) + self.positions.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x, memory)
        return self.head(self.norm(x))


@program(
    "transformers",
    "Li et al., TrOCR: transformer-based optical character recognition with pre-trained models, 2023, for pairs of digits",
    Fault(
        "cross_attention_reads_the_decoder",
        "memory of keys and values",
        DEFAULT,
        (
            "looks_ahead",
            "parameters_follow_gradients",
            "unchanged_parameter",
            "@*cross_attn",
            "@encoder*",
            "@patch_embed",
        ),
    ),
    Fault(
        "warm_up_divided_as_integers",
        "schedule",
        ZHANG,
        ("zero_learning_rate", "rate_in_effect", "unchanged_parameter", "update_ratio", "loss_not_decreasing"),
    ),
)
def read_numbers(fault: str = "") -> Tensor:
    images, ids = written_numbers(1100)
    model = Reader(fault == "cross_attention_reads_the_decoder")
    optimizer = AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    is_whole = fault == "warm_up_divided_as_integers"
    schedule = LambdaLR(optimizer, lambda step: min(1, step // 100 if is_whole else (step + 1) / 100))

    def loss_of(pictures: Tensor, rows: Tensor) -> Tensor:
        logits = model(pictures, rows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), ignore_index=TEXT_PAD)

    source = islice(batches(images[:1000], ids[:1000], size=32), 240)
    fit(model, optimizer, (loss_of(*batch) for batch in source), schedule, clip=1.0)
    images, ids = images[1000:], ids[1000:]
    with torch.no_grad():  # the next letter after prefixes, as in generation
        logits = torch.stack([model(images, ids[:, :end])[:, -1] for end in range(1, ids.shape[1])], 1)
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=TEXT_PAD)


class TwoOfEight(nn.Module):
    """A mixture of eight experts, of which two work at each position."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.router = nn.Linear(size, 8, bias=False)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(size, 12), nn.SiLU(), nn.Linear(12, size)) for _ in range(8)]
        )
        self.balance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        likely = self.router(x).softmax(-1)
        weights, chosen = likely.topk(2)
        weights = weights / weights.sum(-1, keepdim=True)
        gates = torch.zeros_like(likely).scatter(-1, chosen, weights)
        load = F.one_hot(chosen, 8).float().mean((0, 1, 2))
        self.balance = 8 * (load * likely.mean((0, 1))).sum()
        return sum(gate[..., None] * expert(x) for gate, expert in zip(gates.unbind(-1), self.experts, strict=True))


@program(
    "transformers",
    "Jiang et al., Mixtral of experts, 2024, for texts in four languages of the same words",
    Fault(
        "all_parameters_drawn_from_one_normal",
        "initialization",
        HUGGING_FACE,
        ("poor_initialization", "vanishing_gradient", "loss_not_decreasing", "@*norm*"),
    ),
)
def mixture_of_languages(fault: str = "") -> Tensor:
    rows = stream(25 * 700).view(700, 25)
    languages = torch.stack([torch.arange(VOCABULARY), *(torch.randperm(VOCABULARY) for _ in range(3))])
    rows = languages[torch.randint(4, (700, 1)), rows]
    model = Decoder([Block(48, CausalAttention(48), TwoOfEight(48)) for _ in range(2)], 48)
    if fault == "all_parameters_drawn_from_one_normal":
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.02)
    optimizer = AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = CosineAnnealingWarmRestarts(optimizer, 250, eta_min=3e-4)

    def loss_of(batch: Tensor) -> Tensor:
        loss = next_token_loss(model, batch)
        return loss + 0.02 * sum(block.mlp.balance for block in model.layers)

    fit(model, optimizer, (loss_of(batch) for (batch,) in islice(batches(rows[:600], size=20), 250)), schedule, 1.0)
    with torch.no_grad():
        return next_token_loss(model, rows[600:])
