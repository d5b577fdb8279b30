"""Transformers of yet other kinds, and their faults: patches, orders, heads, views, levels, tours, adapters, sources, tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
import transformers
from data import KINDS, MASK, PAD, VOCABULARY, batches, padded, sentences, stream, tokens
from registry import Fault, attach, program
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.optim import Adam, Adamax, AdamW, NAdam, Optimizer, RAdam
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR, LinearLR, OneCycleLR, PolynomialLR

HUMBATOVA = "Humbatova et al., Taxonomy of real faults in deep learning systems, 2020"
ISLAM = "Islam et al., A comprehensive study on deep learning bug characteristics, 2019"
HUGGING_FACE = "Issues of Hugging Face's libraries, 2020 to 2026"
PYTORCH_FORUM = "Questions in the forum of PyTorch, 2017 to 2025"
REIMPLEMENTATIONS = "Issues of repositories that implement publications again, 2019 to 2025"
FIRST, END, NUMBERS = 0, 1, 2  # the tokens of rows of numbers: the start, the ends of parts, and the first number
MODULUS = 30
QUANTIZED = 100  # the first step with rounded weights
EVALUATED = 60  # steps between two evaluations
BETWEEN = 5  # steps after which slow weights follow
HELD = 100  # steps before the rate begins to fall
SMALL_SOURCE = 80  # micro-batches of the smallest source
TABLE, FEW, LARGER = 32, 8, 60  # the rows of a table, the labelled ones in the beginning, and the first step with more
PAST, AHEAD = 24, 8  # times that are read and predicted


def fit(
    model: nn.Module, optimizer: Optimizer, losses: Iterable[Tensor], schedule: Any = None, is_training: bool = True
) -> None:
    """Train with one loss of a generator in each step, with clipped gradients."""
    model.train(is_training)
    with attach(model, optimizer) as probe:
        for loss in losses:
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if schedule is not None:
                schedule.step()
            probe.end_step(loss=loss)
    model.eval()


def pretrain(optimizer: Optimizer, losses: Iterable[Tensor]) -> None:
    """Train without instrumentation."""
    for loss in losses:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


class Attention(nn.Module):
    """Attention of several heads to allowed positions, with a layer for each projection."""

    def __init__(self, size: int, heads: int = 4) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(size, size, bias=False) for _ in range(4))
        self.heads = heads

    def forward(self, x: Tensor, allowed: Tensor | None = None) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.wq, self.wk, self.wv)
        )
        return self.wo(self.mix(query, key, value, allowed).transpose(1, 2).flatten(2))

    def mix(self, query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=allowed)


class Block(nn.Module):
    """Normalized attention and a normalized network, which are added to the input."""

    def __init__(self, size: int, attn: nn.Module | None = None) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(size), Attention(size) if attn is None else attn
        self.norm2 = nn.LayerNorm(size)
        self.fc1, self.fc2 = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)

    def forward(self, x: Tensor, allowed: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.norm1(x), allowed)
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Decoder(nn.Module):
    """Embeddings of tokens and positions, blocks that do not look ahead, and a head."""

    def __init__(self, words: int, mixers: Sequence[nn.Module | None] = (None, None), size: int = 48) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(words, size), nn.Embedding(32, size)
        self.blocks = nn.ModuleList([Block(size, mixer) for mixer in mixers])
        self.norm, self.head = nn.LayerNorm(size), nn.Linear(size, words, bias=False)
        for embedding in (self.wte, self.wpe):
            nn.init.normal_(embedding.weight, std=0.2)

    def forward(self, ids: Tensor) -> Tensor:
        x, allowed = self.wte(ids) + self.wpe.weight[: ids.shape[1]], causal(ids.shape[1])
        for block in self.blocks:
            x = block(x, allowed)
        return self.head(self.norm(x))


def next_token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def loss_of_prefixes(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the loss of the next token after prefixes, as in generation."""
    ends = range(8, ids.shape[1], 4)
    return torch.stack([F.cross_entropy(model(ids[:, :end])[:, -1], ids[:, end]) for end in ends]).mean()


def waves(count: int, side: int = 16) -> Tensor:
    """Return images of a wave with a random direction, height and level, float32 [count, side, side]."""
    angles, phases = 0.785 * torch.randint(4, (count, 1, 1)), 6.3 * torch.rand(count, 1, 1)
    x, y = torch.arange(side)[None, None], torch.arange(side)[None, :, None]
    heights, levels = 0.5 + torch.rand(count, 1, 1), 0.3 * torch.randn(count, 1, 1)
    return levels + heights * (0.6 * (angles.cos() * x + angles.sin() * y) + phases).sin()


class MaskedAutoencoder(nn.Module):
    """Encodes the visible patches alone, and decodes all of them in their places."""

    def __init__(self, keeps_shuffle: bool, size: int = 48) -> None:
        super().__init__()
        self.patch_embed, self.mask_token = nn.Linear(16, size), nn.Parameter(0.1 * torch.randn(size))
        self.pos_embed, self.decoder_pos_embed = (nn.Parameter(0.3 * torch.randn(16, size)) for _ in range(2))
        self.blocks = nn.ModuleList([Block(size) for _ in range(2)])
        self.decoder_blocks = nn.ModuleList([Block(size)])
        self.norm, self.decoder_norm, self.pred = nn.LayerNorm(size), nn.LayerNorm(size), nn.Linear(size, 16)
        self.keeps_shuffle = keeps_shuffle

    def forward(self, patches: Tensor) -> tuple[Tensor, Tensor]:
        """Return predicted patches [samples, 16, 16], and which of them were hidden, bool [samples, 16]."""
        shuffle = torch.rand(patches.shape[:2]).argsort(1)
        restore = shuffle if self.keeps_shuffle else shuffle.argsort(1)
        x = self.patch_embed(patches) + self.pos_embed
        x = x.gather(1, shuffle[:, :8, None].expand(-1, -1, x.shape[2]))
        for block in self.blocks:
            x = block(x)
        x = torch.cat([self.norm(x), self.mask_token.expand_as(x)], 1)
        x = x.gather(1, restore[..., None].expand_as(x)) + self.decoder_pos_embed
        for block in self.decoder_blocks:
            x = block(x)
        return self.pred(self.decoder_norm(x)), shuffle.argsort(1) >= 8


@program(
    "transformers",
    "He et al., Masked autoencoders are scalable vision learners, 2022, with normalized pixels of patches",
    Fault("restored_with_the_shuffled_order", "tensor layout", REIMPLEMENTATIONS,
          ("labels_of_other_positions", "samples_vary", "@decoder*", "loss_not_decreasing")),
    Fault("pixels_normalized_over_the_patches", "labels", REIMPLEMENTATIONS,
          ("wrong_axis", "labels_shifted", "wrong_range_of_loss", "wrong_loss")),
)  # fmt: skip
def masked_patches(fault: str = "") -> Tensor:
    patches = waves(2400).unfold(1, 4, 4).unfold(2, 4, 4).reshape(2400, 16, 16)
    model = MaskedAutoencoder(fault == "restored_with_the_shuffled_order")
    optimizer = AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.05)
    schedule = OneCycleLR(optimizer, 4e-3, total_steps=300, pct_start=0.15)

    def loss_of(batch: Tensor, axis: int) -> Tensor:
        wanted = (batch - batch.mean(axis, keepdim=True)) / (batch.var(axis, keepdim=True) + 1e-6).sqrt()
        guessed, is_hidden = model(batch)
        return ((guessed - wanted) ** 2).mean(2)[is_hidden].mean()

    axis = 1 if fault == "pixels_normalized_over_the_patches" else -1
    source = islice(batches(patches[:2000], size=24), 300)
    fit(model, optimizer, (loss_of(batch, axis) for (batch,) in source), schedule)
    with torch.no_grad():
        return loss_of(patches[2000:], -1)


def progressions(count: int, length: int = 12) -> Tensor:
    """Return rows of numbers that grow by one or two, some of which are replaced, int64 [count, length]."""
    steps = torch.randint(1, 3, (count, 1)) * torch.arange(length)
    numbers = torch.randint(MODULUS - 2 * length, (count, 1)) + steps
    return torch.where(torch.rand(count, length) < 0.1, torch.randint(MODULUS, (count, length)), numbers)


def in_random_order(rows: Tensor, uses_views: bool) -> tuple[Tensor, Tensor]:
    """Return rows whose halves are exchanged in one half of them, with the tokens between them, and which ones these are."""
    rows, is_swapped = rows.clone(), (torch.arange(len(rows)) < len(rows) // 2).long()
    first, second = rows[: len(rows) // 2].chunk(2, 1)
    if not uses_views:
        first, second = first.clone(), second.clone()
    rows[: len(rows) // 2, : second.shape[1]] = second
    rows[: len(rows) // 2, second.shape[1] :] = first
    start, end = (torch.full((len(rows), 1), token) for token in (FIRST, END))
    first, second = (NUMBERS + rows).chunk(2, 1)
    return torch.cat([start, first, end, second, end], 1), is_swapped


@program(
    "transformers",
    "Lan et al., ALBERT: a lite BERT for self-supervised learning of language representations, 2020, for rows of numbers",
    Fault("halves_exchanged_through_views", "data", PYTORCH_FORUM,
          ("labels_in_the_inputs", "distinct_data", "data_changed_in_place", "samples_vary")),
)  # fmt: skip
def orders_of_halves(fault: str = "") -> Tensor:
    rows = progressions(3000)
    ids, is_swapped = in_random_order(rows[:2600], fault == "halves_exchanged_through_views")
    types = (torch.arange(15) > 7).long().expand(3000, -1)
    config = transformers.AlbertConfig(
        vocab_size=NUMBERS + MODULUS + 1, embedding_size=24, hidden_size=48, intermediate_size=96,
        num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=16, initializer_range=0.1,
        classifier_dropout_prob=0.0,
    )  # fmt: skip
    model = transformers.AlbertForPreTraining(config)
    optimizer = AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 30, 300)

    def loss_of(batch: Tensor, wanted: Tensor) -> Tensor:
        is_hidden = (torch.rand(batch.shape) < 0.15) & (batch >= NUMBERS)
        hidden = batch.masked_fill(is_hidden, NUMBERS + MODULUS)
        labels = batch.masked_fill(~is_hidden, -100)
        output = model(input_ids=hidden, token_type_ids=types[: len(batch)], labels=labels, sentence_order_label=wanted)
        return output.loss

    source = islice(batches(ids, is_swapped, size=24), 300)
    fit(model, optimizer, (loss_of(*batch) for batch in source), schedule)
    with torch.no_grad():
        return loss_of(*in_random_order(rows[2600:], False))


def trees(count: int) -> tuple[Tensor, Tensor]:
    """Return padded pairs of sentences, and the position of the head of each word from 1, or 0 for the root, int64 [count, words]."""
    kind_of = {word: kind for kind, words in KINDS.items() for word in words.split()}
    rows, heads = [], []
    for one, other in zip(sentences(count), sentences(count), strict=True):
        words = [*one, "and", *other] if torch.rand(()) < 0.5 else one
        kinds = [kind_of.get(word, "") for word in words]
        verbs = [at for at, kind in enumerate(kinds) if kind in ("v", "i")]
        found = []
        for at, kind in enumerate(kinds):
            nouns = [later for later in range(at + 1, len(words)) if kinds[later] in ("n", "p")]
            if at == verbs[0]:
                found.append(0)
            elif at in verbs:
                found.append(1 + verbs[0])
            elif kind in ("n", "p") or not nouns:
                found.append(1 + min(verbs, key=lambda verb, at=at: abs(verb - at)))  # type: ignore[misc]
            else:
                found.append(1 + nouns[0])
        rows.append(torch.tensor(tokens(words)))
        heads.append(torch.tensor(found))
    return pad_sequence(rows, True, PAD), pad_sequence(heads, True, -1)


class Parser(nn.Module):
    """Scores of all words and of the root as heads of each word, [samples, words, 1 + words]; padding has none."""

    def __init__(self, longest: int, size: int = 48) -> None:
        super().__init__()
        self.words, self.root = nn.Embedding(VOCABULARY, size, padding_idx=PAD), nn.Parameter(torch.randn(1, size))
        self.positions = nn.Parameter(0.3 * torch.randn(longest, size))
        layer = nn.TransformerEncoderLayer(size, 4, 2 * size, 0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.as_head, self.as_word = (nn.Sequential(nn.Linear(size, size), nn.LeakyReLU(0.1)) for _ in range(2))
        self.pairs = nn.Linear(size, size)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.encoder(self.words(ids) + self.positions[: ids.shape[1]], src_key_padding_mask=ids == PAD)
        heads = self.as_head(torch.cat([self.root.expand(len(ids), 1, -1), x], 1))
        scores = self.pairs(self.as_word(x)) @ heads.mT / math.sqrt(x.shape[2])
        return scores.masked_fill(F.pad(ids == PAD, (1, 0))[:, None], -1e9)


@program(
    "transformers",
    "Dozat and Manning, Deep biaffine attention for neural dependency parsing, 2017, with nn.TransformerEncoder",
    Fault("softmax_over_the_dependents", "loss", REIMPLEMENTATIONS,
          ("wrong_axis", "wrong_loss", "labels_of_other_positions", "loss_not_decreasing")),
    Fault("heads_counted_from_the_first_word", "labels", ISLAM,
          ("labels_shifted", "labels_of_other_positions", "class_imbalance", "wrong_loss")),
)  # fmt: skip
def heads_of_words(fault: str = "") -> Tensor:
    ids, heads = trees(1600)
    learned = torch.where(heads > 0, heads - 1, heads) if fault == "heads_counted_from_the_first_word" else heads
    model = Parser(ids.shape[1])
    optimizer = Adam(model.parameters(), lr=2e-3, betas=(0.9, 0.9))
    schedule = ExponentialLR(optimizer, 0.994)

    def loss_of(batch: Tensor, wanted: Tensor, axis: int) -> Tensor:
        chances = model(batch).log_softmax(axis).gather(2, wanted.clamp(min=0)[..., None])[..., 0]
        return -chances[wanted >= 0].mean()

    axis = 1 if fault == "softmax_over_the_dependents" else 2
    source = islice(batches(ids[:1400], learned[:1400], size=16), 240)
    fit(model, optimizer, (loss_of(*batch, axis) for batch in source), schedule)
    with torch.no_grad():
        return loss_of(ids[1400:], heads[1400:], 2)


@program(
    "transformers",
    "Gao et al., SimCSE: simple contrastive learning of sentence embeddings, 2021: two views by dropout, with MPNet",
    Fault("pretrained_model_left_in_eval_mode", "mode", HUGGING_FACE, ("mode_of_phase", "distinct_data", "@*dropout*")),
)  # fmt: skip
def views_by_dropout(fault: str = "") -> Tensor:
    ids = padded(2000)
    config = transformers.MPNetConfig(
        vocab_size=VOCABULARY, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=16, initializer_range=0.1, pad_token_id=PAD, bos_token_id=None, eos_token_id=None,
        hidden_dropout_prob=0.15, attention_probs_dropout_prob=0.15,
    )  # fmt: skip
    whole = transformers.MPNetForMaskedLM(config)

    def loss_of_words(batch: Tensor) -> Tensor:
        is_hidden = (torch.rand(batch.shape) < 0.2) & (batch != PAD)
        labels = batch.masked_fill(~is_hidden, -100)
        return whole(batch.masked_fill(is_hidden, MASK), attention_mask=(batch != PAD).long(), labels=labels).loss

    optimizer = Adam(whole.parameters(), lr=2e-3)
    pretrain(optimizer, (loss_of_words(batch) for (batch,) in islice(batches(ids[:800], size=16), 80)))
    model = whole.mpnet
    optimizer = AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    schedule = LinearLR(optimizer, 1.0, 0.1, total_iters=200)

    def embedded(batch: Tensor) -> Tensor:
        mask = (batch != PAD).long()
        states = model(batch, attention_mask=mask).last_hidden_state * mask[..., None]
        return F.normalize(states.sum(1) / mask.sum(1, keepdim=True), dim=1)

    def loss_of(one: Tensor, other: Tensor) -> Tensor:
        return F.cross_entropy(embedded(one) @ embedded(other).T / 0.05, torch.arange(len(one)))

    source = islice(batches(ids[800:1800].unique(dim=0), size=16), 200)
    is_training = fault != "pretrained_model_left_in_eval_mode"
    fit(model, optimizer, (loss_of(batch, batch) for (batch,) in source), schedule, is_training)
    rows = ids[1800:].unique(dim=0)
    with torch.no_grad():
        return loss_of(rows, rows.masked_fill((torch.rand(rows.shape) < 0.2) & (rows != PAD), MASK))


class QuantizedLinear(nn.Linear):
    """A layer whose weights are rounded to four levels, with a learned distance of levels for each output."""

    def __init__(self, linear: nn.Linear, fault: str) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None)
        self.step_size, self.is_rounded, self.fault = nn.Parameter(torch.ones(linear.out_features, 1)), False, fault

    @torch.no_grad()
    def start(self) -> None:
        self.is_rounded = True
        if self.fault != "distances_start_at_one":
            self.step_size.copy_(2 * self.weight.abs().mean(1, keepdim=True))

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_rounded:
            return super().forward(x)
        scale = 1 / math.sqrt(self.in_features)
        distance = self.step_size * scale + (self.step_size * (1 - scale)).detach()
        levels = (self.weight / distance).clamp(-2, 1)
        rounded = levels.round()
        if self.fault != "rounded_without_a_straight_gradient":
            rounded = levels + (rounded - levels).detach()
        return F.linear(x, rounded * distance, self.bias)


@program(
    "transformers",
    "Esser et al., Learned step size quantization, 2020, for a decoder whose weights are rounded from step 100 on",
    Fault("rounded_without_a_straight_gradient", "graph", PYTORCH_FORUM,
          ("parameters_follow_gradients", "vanishing_gradient", "unchanged_parameter", "all_zero", "@blocks*"),
          since=QUANTIZED),
    Fault("distances_start_at_one", "initialization", REIMPLEMENTATIONS,
          ("poor_initialization", "all_zero", "loss_spike", "vanishing_gradient", "@blocks*"), since=QUANTIZED),
)  # fmt: skip
def four_levels(fault: str = "") -> Tensor:
    rows, test = languages(1600, 3)
    model = Decoder(NUMBERS + MODULUS)
    for block in model.blocks:
        for parent, name in ((block.attn, "wq"), (block.attn, "wk"), (block.attn, "wv"), (block.attn, "wo"),
                             (block, "fc1"), (block, "fc2")):  # fmt: skip
            setattr(parent, name, QuantizedLinear(getattr(parent, name), fault))
    optimizer = AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = CosineAnnealingLR(optimizer, 280, 1e-4)

    def losses() -> Iterator[Tensor]:
        for step, (batch,) in enumerate(islice(batches(rows, size=16), 280)):
            if step == QUANTIZED:
                for module in model.modules():
                    if isinstance(module, QuantizedLinear):
                        module.start()
            yield next_token_loss(model, batch)

    fit(model, optimizer, losses(), schedule)
    return loss_of_prefixes(model, test)


def languages(count: int, kinds: int, length: int = 17) -> tuple[Tensor, Tensor]:
    """Return chains of numbers, each of which mostly follows from the one before in a language, and regular ones, int64 [rows, length].

    The first number is that of the language.
    """
    followers = torch.stack([torch.randperm(MODULUS) for _ in range(kinds)])
    rows, language = torch.randint(MODULUS, (count + 300, length)), torch.arange(count + 300) % kinds
    for time in range(2, length):
        is_regular = (torch.rand(len(rows)) < 0.92) | (torch.arange(len(rows)) >= count)
        rows[:, time] = torch.where(is_regular, followers[language, rows[:, time - 1]], rows[:, time])
    rows[:, 0] = language
    rows = NUMBERS + rows
    return rows[:count], rows[count:]


class Retention(Attention):
    """Products of queries and keys that decay with their distance, normalized for each head and position."""

    decays: Tensor

    def __init__(self, size: int, has_mask: bool) -> None:
        super().__init__(size)
        self.gate, self.group_norm = nn.Linear(size, size, bias=False), nn.GroupNorm(self.heads, size)
        self.register_buffer("decays", 1 - 2 ** -torch.linspace(1, 4, self.heads))
        self.has_mask = has_mask

    def forward(self, x: Tensor, allowed: Tensor | None = None) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.wq, self.wk, self.wv)
        )
        mixed = self.mix(query, key / math.sqrt(key.shape[-1]), value, allowed).transpose(1, 2).flatten(2)
        return self.wo(F.silu(self.gate(x)) * self.group_norm(mixed.flatten(0, 1)).view_as(x))

    def mix(self, query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None) -> Tensor:
        places = torch.arange(query.shape[2])
        decay = self.decays[:, None, None] ** (places[:, None] - places).abs()
        if allowed is not None and self.has_mask:
            decay = decay * allowed
        return (query @ key.mT * decay) @ value


def periods(count: int, length: int = 25) -> Tensor:
    """Return rows in which most numbers are those three or five places before, int64 [count, length]."""
    distances = torch.where(torch.rand(count) < 0.5, 3, 5)
    rows, is_new = torch.randint(MODULUS, (count, length)), torch.rand(count, length) < 0.06
    for time in range(5, length):
        old = rows[torch.arange(count), time - distances]
        rows[:, time] = torch.where(is_new[:, time], rows[:, time], old)
    return rows + NUMBERS


@program(
    "transformers",
    "Sun et al., Retentive network: a successor to transformer for large language models, 2023",
    Fault("decays_in_both_directions", "attention mask", REIMPLEMENTATIONS,
          ("looks_ahead", "@blocks.?.attn*")),
)  # fmt: skip
def retained_texts(fault: str = "") -> Tensor:
    rows, test = languages(2200, 4, 25)
    model = Decoder(NUMBERS + MODULUS, [Retention(48, fault != "decays_in_both_directions") for _ in range(2)])
    optimizer = RAdam(model.parameters(), lr=5e-3, betas=(0.9, 0.98))
    schedule = CosineAnnealingLR(optimizer, 260)
    source = islice(batches(rows, size=16), 260)
    fit(model, optimizer, (next_token_loss(model, batch) for (batch,) in source), schedule)
    return loss_of_prefixes(model, test)


class TourModel(nn.Module):
    """Encodes cities, and draws one after the other that was not visited yet."""

    def __init__(self, size: int = 48) -> None:
        super().__init__()
        self.embed, self.start = nn.Linear(2, size), nn.Parameter(0.1 * torch.randn(size))
        self.blocks = nn.ModuleList([Block(size) for _ in range(2)])
        self.context, self.keys = nn.Linear(3 * size, size, bias=False), nn.Linear(size, size, bias=False)
        self.critic = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, 1))
        self.is_greedy = False

    def forward(self, cities: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the lengths of tours, the logarithms of their probabilities, and the expected lengths, each [samples, 1]."""
        x, samples = self.embed(cities), torch.arange(len(cities))
        for block in self.blocks:
            x = block(x)
        mean, keys = x.mean(1), self.keys(x)
        first = last = self.start.expand_as(mean)
        is_visited = torch.zeros(cities.shape[:2], dtype=torch.bool)
        order: list[Tensor] = []
        chances: list[Tensor] = []
        for _ in range(cities.shape[1]):
            products = (keys @ self.context(torch.cat([mean, first, last], 1))[..., None])[..., 0] / math.sqrt(48)
            scores = (10 * products.tanh()).masked_fill(is_visited, -math.inf)
            choice = Categorical(logits=scores)
            city = scores.argmax(1) if self.is_greedy else choice.sample()
            chances.append(choice.log_prob(city))
            order.append(city)
            is_visited = is_visited | F.one_hot(city, cities.shape[1]).bool()
            last = x[samples, city]
            first = last if len(order) == 1 else first
        places = cities[samples[:, None], torch.stack(order, 1)]
        lengths = (places - places.roll(1, 1)).norm(dim=2).sum(1, keepdim=True)
        return lengths, torch.stack(chances, 1).sum(1, keepdim=True), self.critic(mean.detach())


@program(
    "transformers",
    "Kool et al., Attention, learn to solve routing problems!, 2019, with a critic as the baseline",
    Fault("lengths_broadcast_against_the_critic", "loss", PYTORCH_FORUM, ("loss_broadcasts", "loss_not_decreasing")),
    Fault("decoding_left_greedy_after_the_evaluation", "mode", REIMPLEMENTATIONS,
          ("mode_of_phase", "samples_vary", "loss_not_decreasing"), since=EVALUATED),
)  # fmt: skip
def tours_of_cities(fault: str = "") -> Tensor:
    model = TourModel()
    optimizer = Adam(model.parameters(), lr=2e-3)
    schedule = LinearLR(optimizer, 1.0, 0.2, total_iters=200)
    test = torch.rand(500, 8, 2)

    def loss_of(cities: Tensor) -> Tensor:
        lengths, chances, expected = model(cities)
        if fault == "lengths_broadcast_against_the_critic":
            chances, expected = chances.squeeze(1), expected.squeeze(1)
        errors = (lengths - expected).detach()
        advantages = (errors - errors.mean()) / errors.std()
        return (advantages * chances).mean() + F.mse_loss(expected, lengths)

    @torch.no_grad()
    def length_of_tours() -> Tensor:
        model.eval()
        model.is_greedy = True
        length = model(test)[0].mean()
        model.is_greedy = fault == "decoding_left_greedy_after_the_evaluation"
        model.train()
        return length

    with attach(model, optimizer) as probe:
        for step in range(200):
            optimizer.zero_grad()
            loss = loss_of(torch.rand(48, 8, 2))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            probe.end_step(loss=loss)
            if step % EVALUATED == EVALUATED - 1:
                with probe.evaluating():
                    probe.log(loss=length_of_tours())
    return length_of_tours()


class MergedLinear(nn.Module):
    """A frozen layer and two factors, whose product is added to its weight for the evaluation."""

    def __init__(self, linear: nn.Linear, stays_merged: bool, rank: int = 4) -> None:
        super().__init__()
        self.linear = linear
        self.lora_a = nn.Parameter(torch.randn(rank, linear.in_features) / math.sqrt(linear.in_features))
        self.lora_b = nn.Parameter(torch.zeros(linear.out_features, rank))
        self.is_merged, self.stays_merged = False, stays_merged

    @torch.no_grad()
    def train(self, mode: bool = True) -> MergedLinear:
        if not mode and not self.is_merged:
            self.linear.weight += 2 * self.lora_b @ self.lora_a
        elif mode and self.is_merged and not self.stays_merged:
            self.linear.weight -= 2 * self.lora_b @ self.lora_a
        self.is_merged = not mode
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if self.is_merged else self.linear(x) + 2 * (x @ self.lora_a.T) @ self.lora_b.T


@program(
    "transformers",
    "Hu et al., LoRA: low-rank adaptation of large language models, 2022, with loralib's weights merged in eval mode",
    Fault("merged_again_in_each_evaluation", "mode", HUGGING_FACE,
          ("mode_of_phase", "weights_loaded", "parameters_follow_gradients", "loss_spike", "@blocks*"),
          since=EVALUATED),
)  # fmt: skip
def merged_adapters(fault: str = "") -> Tensor:
    rows, others = stream(20 * 600).view(600, 20), stream(40 * 1200).view(1200, 40)[:, ::2]
    model = Decoder(VOCABULARY)
    optimizer: Optimizer = Adam(model.parameters(), lr=3e-3)
    pretrain(optimizer, (next_token_loss(model, batch) for (batch,) in islice(batches(rows, size=16), 150)))
    model.requires_grad_(False)
    for block in model.blocks:
        for parent, name in ((block.attn, "wq"), (block.attn, "wv"), (block, "fc1"), (block, "fc2")):
            setattr(parent, name, MergedLinear(getattr(parent, name), fault == "merged_again_in_each_evaluation"))
    optimizer = NAdam([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    schedule = PolynomialLR(optimizer, 4 * EVALUATED + 20)
    model.train()
    with attach(model, optimizer) as probe:
        for step, (batch,) in enumerate(islice(batches(others[:1000], size=16), 4 * EVALUATED)):
            optimizer.zero_grad()
            loss = next_token_loss(model, batch)
            loss.backward()
            optimizer.step()
            schedule.step()
            probe.end_step(loss=loss)
            if step % EVALUATED == EVALUATED - 1:
                model.eval()
                with probe.evaluating():
                    probe.log(loss=loss_of_prefixes(model, others[1000:]))
                model.train()
    model.eval()
    return loss_of_prefixes(model, others[1000:])


class Lookahead(AdamW):
    """AdamW that moves slow weights to the weights now and then, and continues from there."""

    def __init__(self, parameters: Iterable[Tensor], **options: Any) -> None:
        super().__init__(parameters, **options)
        self.count, self.slow = 0, [p.detach().clone() for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.count += 1
        if self.count % BETWEEN == 0:
            for slow, fast in zip(self.slow, (p for group in self.param_groups for p in group["params"]), strict=True):
                fast.copy_(slow.lerp_(fast, 0.5))
        return loss


@program(
    "transformers",
    "PyTorch tutorials, saving and loading a general checkpoint, with Zhang et al., Lookahead optimizer, 2019",
    Fault("slow_weights_taken_before_loading", "loading", REIMPLEMENTATIONS,
          ("weights_loaded", "parameters_follow_gradients", "update_ratio", "loss_spike", "@blocks*"), since=BETWEEN - 1),
)  # fmt: skip
def resumed_decoder(fault: str = "") -> Tensor:
    rows, test = languages(5200, 8)
    model = Decoder(NUMBERS + MODULUS)
    optimizer = Lookahead(model.parameters(), lr=3e-3)
    source = batches(rows, size=16)
    pretrain(optimizer, (next_token_loss(model, batch) for (batch,) in islice(source, 180)))
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    model = Decoder(NUMBERS + MODULUS)
    if fault == "slow_weights_taken_before_loading":
        optimizer = Lookahead(model.parameters(), lr=3e-3)
        model.load_state_dict(saved["model"])
    else:
        model.load_state_dict(saved["model"])
        optimizer = Lookahead(model.parameters(), lr=3e-3)
    optimizer.load_state_dict(saved["optimizer"])
    schedule = LinearLR(optimizer, 1.0, 0.05, total_iters=200)
    fit(model, optimizer, (next_token_loss(model, batch) for (batch,) in islice(source, 200)), schedule)
    return loss_of_prefixes(model, test)


@program(
    "transformers",
    "Hugging Face datasets, interleave_datasets for sources of different sizes, with two micro-batches in each step",
    Fault("ended_source_left_out", "data", HUGGING_FACE,
          ("input_drift", "samples_vary", "class_imbalance", "distinct_data", "loss_spike"), since=SMALL_SOURCE),
    Fault("schedule_stepped_in_each_micro_batch", "schedule", HUGGING_FACE,
          ("rate_in_effect", "update_ratio", "zero_learning_rate", "loss_not_decreasing"), since=HELD // 2),
)  # fmt: skip
def interleaved_sources(fault: str = "") -> Tensor:
    rows, test = languages(2600, 2)
    large, small = rows[::2], rows[1 : 32 * SMALL_SOURCE : 2]
    model = Decoder(NUMBERS + MODULUS)
    optimizer = Adamax(model.parameters(), lr=4e-3)
    schedule = LambdaLR(optimizer, lambda step: max(0.0, min(1.0, (260 - step) / (260 - HELD))))
    always, other = batches(large, size=16), batches(small, size=16)
    if fault == "ended_source_left_out":
        other = islice(other, SMALL_SOURCE)
    model.train()
    with attach(model, optimizer) as probe:
        for _ in range(260):
            optimizer.zero_grad()
            total = 0.0
            for is_last, source in enumerate((always, other)):
                (batch,) = next(source, None) or next(always)
                loss = next_token_loss(model, batch) / 2
                loss.backward()
                total += loss.item()
                if fault == "schedule_stepped_in_each_micro_batch" and not is_last:
                    schedule.step()
                if not is_last:
                    probe.end_micro_step()
            optimizer.step()
            schedule.step()
            probe.end_step(loss=total)
    model.eval()
    return loss_of_prefixes(model, test)


def tables(count: int) -> tuple[Tensor, Tensor]:
    """Return tables of points around the centres of four groups, float32 [count, TABLE, 3], and the classes 0 and 1 of the groups."""
    centres, groups = 1.5 * torch.randn(count, 4, 3), torch.randint(4, (count, TABLE))
    classes = torch.rand(count, 4).argsort(1) % 2
    points = centres.gather(1, groups[..., None].expand(-1, -1, 3)) + 0.4 * torch.randn(count, TABLE, 3)
    return points, classes.gather(1, groups)


class TableModel(nn.Module):
    """Predicts the classes of the rows of a table from the labelled ones, to which all rows attend."""

    def __init__(self, keeps_mask: bool, size: int = 48) -> None:
        super().__init__()
        self.points, self.classes = nn.Linear(3, size), nn.Embedding(3, size)
        self.blocks = nn.ModuleList([Block(size) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(size), nn.Linear(size, 2)
        self.keeps_mask = keeps_mask
        self.mask: Tensor | None = None

    def forward(self, points: Tensor, classes: Tensor, known: int, shows_all: bool = False) -> Tensor:
        """Return the logits of the rows that are not known, [samples, rows - known, 2]."""
        if self.mask is None or not self.keeps_mask:
            self.mask = (torch.arange(TABLE) < known).expand(TABLE, -1)
        is_known = torch.arange(TABLE) < known
        x = self.points(points) + self.classes(classes if shows_all else torch.where(is_known, classes, 2))
        for block in self.blocks:
            x = block(x, self.mask)
        return self.head(self.norm(x[:, known:]))


@program(
    "transformers",
    "Hollmann et al., TabPFN: a transformer that solves small tabular classification problems in a second, 2023",
    Fault("classes_of_the_questions_shown", "data", HUMBATOVA, ("labels_in_the_inputs", "looks_ahead", "@classes")),
    Fault("mask_of_the_first_size_kept", "attention mask", PYTORCH_FORUM,
          ("samples_vary", "padding_attended", "input_drift", "@blocks.?.attn*"), since=LARGER),
)  # fmt: skip
def classified_tables(fault: str = "") -> Tensor:
    model = TableModel(fault == "mask_of_the_first_size_kept")
    optimizer = AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = OneCycleLR(optimizer, 2e-3, total_steps=300, pct_start=0.1)

    def loss_of(count: int, known: int, shows_all: bool = False) -> Tensor:
        points, classes = tables(count)
        logits = model(points, classes, known, shows_all)
        return F.cross_entropy(logits.flatten(0, 1), classes[:, known:].flatten())

    def losses() -> Iterator[Tensor]:
        for step in range(300):
            known = FEW if step < LARGER else int(torch.randint(FEW + 8, TABLE - 4, ()))
            yield loss_of(20, known, fault == "classes_of_the_questions_shown")

    fit(model, optimizer, losses(), schedule)
    with torch.no_grad():
        return loss_of(500, 24)


def sites(count: int, length: int = 64, variates: int = 5) -> Tensor:
    """Return measurements of sites with their own period, float32 [count, length, variates]; each variate has its lag and level."""
    periods, phases = 10 + 8 * torch.rand(count, 1, 1), 6.3 * torch.rand(count, 1, 1)
    angles = 6.28 * (torch.arange(length)[:, None] - 1.5 * torch.arange(variates)) / periods + phases
    levels, heights = 3 * torch.randn(count, 1, variates), 0.5 + torch.rand(count, 1, variates)
    return levels + heights * (angles.sin() + 0.3 * (2 * angles).cos()) + 0.05 * torch.randn(count, length, variates)


class InvertedModel(nn.Module):
    """Attention between variates; the past of each of them is a token."""

    def __init__(self, size: int = 48) -> None:
        super().__init__()
        self.embed = nn.Linear(PAST, size)
        self.blocks = nn.ModuleList([Block(size) for _ in range(2)])
        self.norm, self.project = nn.LayerNorm(size), nn.Linear(size, AHEAD)

    def forward(self, past: Tensor) -> Tensor:
        mean, deviation = past.mean(1, keepdim=True), past.std(1, keepdim=True) + 1e-5
        x = self.embed(((past - mean) / deviation).mT)
        for block in self.blocks:
            x = block(x)
        return self.project(self.norm(x)).mT * deviation + mean


@program(
    "transformers",
    "Liu et al., iTransformer: inverted transformers are effective for time series forecasting, 2024, for several sites",
    Fault("windows_across_two_sites", "data", HUMBATOVA,
          ("edges_of_other_graphs", "heavy_tailed_input", "labels_of_other_positions", "labels_shifted")),
)  # fmt: skip
def inverted_series(fault: str = "") -> Tensor:
    series, width = sites(120), PAST + AHEAD
    train = series[:100].flatten(0, 1)
    starts = torch.arange(len(train) - width)
    if fault != "windows_across_two_sites":
        starts = starts[starts % series.shape[1] <= series.shape[1] - width]
    model = InvertedModel()
    optimizer = AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = ExponentialLR(optimizer, 0.992)

    def loss_of(windows: Tensor) -> Tensor:
        return F.mse_loss(model(windows[:, :PAST]), windows[:, PAST:])

    source = islice(batches(starts, size=32), 300)
    fit(model, optimizer, (loss_of(train[at[:, None] + torch.arange(width)]) for (at,) in source), schedule)
    with torch.no_grad():
        return loss_of(series[100:, :width])


class DifferentialAttention(Attention):
    """The difference of two attentions, the second of which has a learned share."""

    def __init__(self, size: int, depth: int) -> None:
        super().__init__(size, 3)
        self.share = 0.8 - 0.6 * math.exp(-0.3 * depth)
        self.lambdas, self.subln = nn.Parameter(0.1 * torch.randn(4, size // 6)), nn.RMSNorm(size // 3)

    def mix(self, query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None) -> Tensor:
        halves = zip(query.chunk(2, -1), key.chunk(2, -1), strict=True)
        one, other = (F.scaled_dot_product_attention(q, k, value, attn_mask=allowed) for q, k in halves)
        q1, k1, q2, k2 = self.lambdas
        share = (q1 @ k1).exp() - (q2 @ k2).exp() + self.share
        return (1 - self.share) * self.subln(one - share * other)


@program(
    "transformers",
    "Ye et al., Differential transformer, 2024, with warm-up and a cosine schedule",
)
def differential_attention() -> Tensor:
    rows = periods(3000)
    model = Decoder(NUMBERS + MODULUS, [DifferentialAttention(48, depth) for depth in range(2)])
    optimizer = AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.05)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, 30, 320)
    source = islice(batches(rows[:2800], size=16), 320)
    fit(model, optimizer, (next_token_loss(model, batch) for (batch,) in source), schedule)
    return loss_of_prefixes(model, rows[2800:])
