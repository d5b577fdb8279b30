"""Transformers of other kinds, and their faults: pairs, pieces, sensors, units, caches, rewards, quantiles, functions, melodies, gates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
import transformers
from data import KINDS, PAD, VOCABULARY, WORDS, batches, digits, padded, sentences, stream, tokens
from registry import Fault, attach, program
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.optim import Adam, AdamW, NAdam, Optimizer, RAdam
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR, LinearLR, OneCycleLR

DEFAULT = "DEFault++: automated fault detection, categorization and diagnosis for transformer architectures, 2026"
HUMBATOVA = "Humbatova et al., Taxonomy of real faults in deep learning systems, 2020"
ISLAM = "Islam et al., A comprehensive study on deep learning bug characteristics, 2019"
HUGGING_FACE = "Issues of Hugging Face's libraries, 2020 to 2026"
PYTORCH_FORUM = "Questions in the forum of PyTorch, 2017 to 2025"
PYTORCH_ISSUES = "Issues of PyTorch, 2018 to 2026"
REIMPLEMENTATIONS = "Issues of repositories that implement publications again, 2019 to 2025"


def fit(
    model: nn.Module, optimizer: Optimizer, losses: Iterable[Tensor], schedule: Any = None, clip: float = 0.0
) -> None:
    """Train with one loss of a generator in each step."""
    model.train()
    with attach(model, optimizer) as probe:
        for loss in losses:
            optimizer.zero_grad()
            loss.backward()
            if clip > 0:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            if schedule is not None:
                schedule.step()
            probe.end_step(loss=loss)
    model.eval()


def pretrain(model: nn.Module, rate: float, losses: Iterable[Tensor]) -> None:
    """Train without instrumentation."""
    optimizer = Adam(model.parameters(), lr=rate)
    for loss in losses:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


class Attention(nn.Module):
    """Attention of several heads to the allowed positions of a context, which is the input unless one is given."""

    def __init__(self, size: int, heads: int = 4) -> None:
        super().__init__()
        self.to_q, self.to_kv = nn.Linear(size, size, bias=False), nn.Linear(size, 2 * size, bias=False)
        self.to_out = nn.Linear(size, size)
        self.heads = heads

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor, allowed: Tensor | None = None, context: Tensor | None = None) -> Tensor:
        key, value = self.to_kv(x if context is None else context).chunk(2, -1)
        return self.to_out(self.mix(*(self.split(each) for each in (self.to_q(x), key, value)), allowed))

    def mix(self, query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=allowed).transpose(1, 2).flatten(2)


def network(size: int, activation: nn.Module | None = None) -> nn.Sequential:
    activation = nn.GELU() if activation is None else activation
    return nn.Sequential(nn.Linear(size, 2 * size), activation, nn.Linear(2 * size, size))


class Block(nn.Module):
    """Normalized attention and a normalized network, which are added to the input."""

    def __init__(self, size: int, attn: nn.Module | None = None, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(size), Attention(size) if attn is None else attn
        self.ln_2, self.mlp = nn.LayerNorm(size), network(size) if mlp is None else mlp

    def forward(self, x: Tensor, allowed: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.ln_1(x), allowed)
        return x + self.mlp(self.ln_2(x))


class Decoder(nn.Module):
    """Embeddings of words and positions, blocks, and a head that may share its weights with the embedding."""

    def __init__(
        self, words: int, size: int, blocks: Iterable[nn.Module], is_tied: bool = False, spread: float = 0.1
    ) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(words, size), nn.Embedding(24, size)
        self.blocks = nn.ModuleList(blocks)
        self.ln_f, self.lm_head = nn.LayerNorm(size), nn.Linear(size, words, bias=False)
        nn.init.normal_(self.wpe.weight, std=0.1)
        nn.init.normal_(self.wte.weight, std=spread)
        if is_tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, ids: Tensor, start: int = 0) -> Tensor:
        x, allowed = self.wte(ids) + self.wpe.weight[start : start + ids.shape[1]], causal(ids.shape[1])
        for block in self.blocks:
            x = block(x, allowed)
        return self.lm_head(self.ln_f(x))


def next_token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def loss_of_prefixes(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the loss of the next token after prefixes, as in generation."""
    ends = range(9, ids.shape[1], 3)
    return torch.stack([F.cross_entropy(model(ids[:, :end])[:, -1], ids[:, end]) for end in ends]).mean()


def similar_pairs(count: int, length: int = 24) -> tuple[Tensor, Tensor, Tensor]:
    """Return pairs of sentences, int64 [count, length] with 1 as padding, and how many of the content words agree, from 0 to 5."""
    kinds = {word: words.split() for words in KINDS.values() for word in words.split()}
    first, second, scores = [], [], []
    for words, changed in zip(sentences(count), torch.rand(count).tolist(), strict=True):
        others = [kinds[w][int(torch.randint(len(kinds[w]), ()))] if w in kinds else w for w in words]
        other = [b if torch.rand(()) < changed else a for a, b in zip(words, others, strict=True)]
        same = [a == b for a, b in zip(words, other, strict=True) if a in kinds]
        for rows, row in ((first, words), (second, other)):
            rows.append(tokens(row) + [1] * (length - len(row)))
        scores.append(5.0 * sum(same) / len(same))
    return torch.tensor(first), torch.tensor(second), torch.tensor(scores)


class SentenceEncoder(nn.Module):
    """The mean of the last states of MPNet."""

    def __init__(self, counts_padding: bool) -> None:
        super().__init__()
        config = transformers.MPNetConfig(
            vocab_size=VOCABULARY, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=32, hidden_dropout_prob=0.05, attention_probs_dropout_prob=0.0, initializer_range=0.1,
        )  # fmt: skip
        self.encoder = transformers.MPNetModel(config, add_pooling_layer=False)
        self.counts_padding = counts_padding

    def forward(self, ids: Tensor) -> Tensor:
        mask = (ids != 1).long()
        states = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        if self.counts_padding:
            return states.mean(1)
        return (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


@program(
    "transformers",
    "Reimers and Gurevych, Sentence-BERT, 2019: the similarity of sentences as a cosine, with MPNet",
    Fault("scores_up_to_five", "labels", HUGGING_FACE,
          ("wrong_range_of_loss", "loss_scale", "loss_not_decreasing", "wrong_loss")),
    Fault("padding_in_the_mean", "padding", REIMPLEMENTATIONS, ("padding_attended", "padding_in_loss")),
)  # fmt: skip
def sentence_similarity(fault: str = "") -> Tensor:
    first, second, scores = similar_pairs(1000)
    model = SentenceEncoder(fault == "padding_in_the_mean")
    optimizer = AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 20, 220)
    labels = scores if fault == "scores_up_to_five" else scores / 5

    def loss_of(one: Tensor, other: Tensor, wanted: Tensor) -> Tensor:
        return F.mse_loss(F.cosine_similarity(*model(torch.cat([one, other])).chunk(2)), wanted)

    source = islice(batches(first[:800], second[:800], labels[:800], size=16), 220)
    fit(model, optimizer, (loss_of(*batch) for batch in source), schedule)
    with torch.no_grad():  # with less padding than in the training
        return loss_of(first[800:, :12], second[800:, :12], scores[800:] / 5)


PIECES = VOCABULARY  # the first of eight pieces that continue a word


def pieces(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return sentences in pieces of words, their tags at the first pieces, and the tags of the words in a row; -100 is padding."""
    rows, aligned, of_words = [], [], []
    for words in sentences(count):
        ids, labels, tags, verb_seen = [1], [-100], [-100], False  # the first token is that of the sentence
        for word, token in zip(words, tokens(words), strict=True):
            kind = next((kind for kind, group in KINDS.items() if word in group.split()), "")
            verb_seen |= kind in ("v", "i")
            tag = 6 if kind == "n" and verb_seen else " nvaip".index(kind or " ")
            more = [PIECES + token % 8, PIECES + token % 5][: WORDS.index(word) % 3]
            ids += [token, *more]
            labels += [tag, *[-100] * len(more)]
            tags.append(tag)
        rows.append(torch.tensor(ids))
        aligned.append(torch.tensor(labels))
        of_words.append(torch.tensor(tags + [-100] * (len(ids) - len(tags))))
    return pad_sequence(rows, True, PAD), pad_sequence(aligned, True, -100), pad_sequence(of_words, True, -100)


@program(
    "transformers",
    "Hugging Face's course, token classification, with ModernBERT and words of several pieces",
    Fault("labels_of_words_given_to_pieces", "loss and labels", HUGGING_FACE,
          ("labels_of_other_positions", "labels_shifted", "missing_labels_in_loss", "wrong_loss")),
)  # fmt: skip
def tags_of_pieces(fault: str = "") -> Tensor:
    ids, labels, of_words = pieces(1000)
    mask = (ids != PAD).long()
    learned = of_words if fault == "labels_of_words_given_to_pieces" else labels
    config = transformers.ModernBertConfig(
        vocab_size=PIECES + 8, hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=48, local_attention=8, pad_token_id=PAD, bos_token_id=1, eos_token_id=1, cls_token_id=1,
        sep_token_id=1, num_labels=7, classifier_dropout=0.05, initializer_range=0.1,
    )  # fmt: skip
    model = transformers.ModernBertForTokenClassification(config)
    optimizer = AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = LambdaLR(optimizer, lambda step: min((step + 1) / 20, (220 - step) / 200))
    source = islice(batches(ids[:800], mask[:800], learned[:800], size=16), 220)
    fit(model, optimizer, (model(input_ids=x, attention_mask=m, labels=y).loss for x, m, y in source), schedule)
    with torch.no_grad():
        return model(input_ids=ids[800:], attention_mask=mask[800:], labels=labels[800:]).loss


def activities(count: int, length: int = 24) -> tuple[Tensor, Tensor]:
    """Return windows of three sensors, float32 [count, length, 3], and which of two moves is first and its sign."""
    places = torch.rand(count, length - 4).argsort(1)[:, :2] + 2
    signs = 2.0 * torch.randint(2, (count, 2)) - 1
    distances = (torch.arange(length)[:, None] - places[:, None]).float()
    moves = 2 * signs[:, None] * (-(distances**2) / 2).exp()
    windows = F.pad(moves, (0, 1)) + 0.2 * torch.randn(count, length, 3)
    first = (places[:, 1] < places[:, 0]).long()
    return windows, 2 * first + (signs.gather(1, first[:, None])[:, 0] > 0).long()


class ActivityModel(nn.Module):
    def __init__(self, batch_first: bool, size: int = 32) -> None:
        super().__init__()
        self.embed = nn.Linear(3, size)
        self.positions = nn.Parameter(0.3 * torch.randn(24, size))
        layer = nn.TransformerEncoderLayer(size, 4, 2 * size, 0.05, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.classifier = nn.Linear(size, 4)

    def forward(self, windows: Tensor) -> Tensor:
        return self.classifier(self.encoder(self.embed(windows) + self.positions).mean(1))


@program(
    "transformers",
    "Keras examples, time series classification with a transformer, for the activities of persons, with nn.TransformerEncoder",
    Fault("windows_attend_to_other_windows", "tensor layout", PYTORCH_FORUM,
          ("edges_of_other_graphs", "wrong_axis", "@*self_attn", "@encoder.layers.?")),
)  # fmt: skip
def activity_windows(fault: str = "") -> Tensor:
    windows, kinds = activities(4000)
    model = ActivityModel(fault != "windows_attend_to_other_windows")
    optimizer = NAdam(model.parameters(), lr=2e-3)
    schedule = CosineAnnealingLR(optimizer, 260, eta_min=1e-5)
    source = islice(batches(windows[:3600], kinds[:3600], size=24), 260)
    fit(model, optimizer, (F.cross_entropy(model(x), y) for x, y in source), schedule)
    with torch.no_grad():
        return F.cross_entropy(model(windows[3600:]), kinds[3600:])


def utterances(count: int, length: int = 24) -> tuple[Tensor, Tensor]:
    """Return frames of sounds, float32 [count, length, 12], and the units to which they belong, int64 [count, length]."""
    centres, followers = torch.randn(10, 12), torch.stack([torch.randperm(10), torch.randperm(10)], 1)
    unit, units = torch.randint(10, (count,)), []
    for time in range(length):
        if time % 2 == 0:
            unit = followers[unit, (torch.rand(count) < 0.2).long()]
        units.append(unit)
    units = torch.stack(units, 1)
    return centres[units] + 0.6 * torch.randn(count, length, 12), units


class UnitModel(nn.Module):
    """Predicts the units of hidden frames; a convolution of groups gives the positions."""

    def __init__(self, size: int = 48) -> None:
        super().__init__()
        self.projection = nn.Linear(12, size)
        self.masked = nn.Parameter(torch.empty(size).uniform_())
        self.pos_conv = nn.Conv1d(size, size, 7, padding=3, groups=4)
        self.layer_norm = nn.LayerNorm(size)
        self.layers = nn.Sequential(*(Block(size) for _ in range(2)))
        self.final_norm, self.units = nn.LayerNorm(size), nn.Linear(size, 10)

    def forward(self, frames: Tensor, hidden: Tensor) -> Tensor:
        x = torch.where(hidden[..., None], self.masked, self.projection(frames))
        x = self.layer_norm(x + F.gelu(self.pos_conv(x.transpose(1, 2)).transpose(1, 2)))
        return self.units(self.final_norm(self.layers(x)))


@program(
    "transformers",
    "Hsu et al., HuBERT: self-supervised speech representation learning by masked prediction of hidden units, 2021",
    Fault("loss_of_the_visible_frames", "loss and labels", REIMPLEMENTATIONS,
          ("labels_in_the_inputs", "missing_labels_in_loss", "wrong_loss", "labels_of_other_positions")),
)  # fmt: skip
def hidden_units(fault: str = "") -> Tensor:
    frames, units = utterances(1000)
    model = UnitModel()
    optimizer = Adam(model.parameters(), lr=2e-3, betas=(0.9, 0.98))
    schedule = OneCycleLR(optimizer, 2e-3, total_steps=260, pct_start=0.1)

    def loss_of(batch: Tensor, wanted: Tensor, of_visible: bool) -> Tensor:
        starts = torch.rand(wanted.shape) < 0.12
        hidden = starts | starts.roll(1, 1) | starts.roll(2, 1)
        ignored = hidden if of_visible else ~hidden
        return F.cross_entropy(model(batch, hidden).flatten(0, 1), wanted.masked_fill(ignored, -100).flatten())

    source = islice(batches(frames[:800], units[:800], size=16), 260)
    fit(model, optimizer, (loss_of(x, y, fault == "loss_of_the_visible_frames") for x, y in source), schedule)
    with torch.no_grad():
        return loss_of(frames[800:], units[800:], False)


class CachedAttention(Attention):
    """Attention that keeps the keys and values of a context, and continues from them in the next call."""

    def __init__(self, size: int, fault: str) -> None:
        super().__init__(size)
        self.cache: list[Tensor] = []
        self.fault = fault

    def mix(self, query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None) -> Tensor:
        cache, self.cache = self.cache, [] if self.cache else [key, value]
        is_aligned_first = self.fault == "mask_aligned_at_the_first_key"
        if cache:
            key, value = (torch.cat(pair, 2) for pair in zip(cache, (key, value), strict=True))
            allowed = F.pad(causal(query.shape[2]), (cache[0].shape[2], 0), value=True)
        mask = None if is_aligned_first else allowed
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=is_aligned_first)
        if self.fault == "heads_merged_without_transposing":
            return mixed.reshape(len(mixed), query.shape[2], -1)
        return mixed.transpose(1, 2).flatten(2)


@program(
    "transformers",
    "Hugging Face transformers, the documentation of caches: answers continue from the keys and values of their context",
    Fault("mask_aligned_at_the_first_key", "memory of keys and values", PYTORCH_ISSUES,
          ("@blocks.?.attn*",)),
    Fault("heads_merged_without_transposing", "heads", PYTORCH_FORUM,
          ("wrong_axis", "looks_ahead", "@blocks.?.attn*", "@*to_out")),
)  # fmt: skip
def cached_context(fault: str = "") -> Tensor:
    contexts = padded(1200)
    answers = F.pad(torch.randperm(VOCABULARY)[contexts].flip(1), (1, 0), value=VOCABULARY)  # starts with its own token
    model = Decoder(VOCABULARY + 1, 48, [Block(48, CachedAttention(48, fault)) for _ in range(2)])
    optimizer = AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.05)
    schedule = CosineAnnealingLR(optimizer, 220, eta_min=3e-4)

    def logits_of(context: Tensor, answer: Tensor) -> Tensor:
        model(context)
        return model(answer, start=12)

    def loss_of(context: Tensor, answer: Tensor) -> Tensor:
        return F.cross_entropy(logits_of(context, answer[:, :-1]).flatten(0, 1), answer[:, 1:].flatten())

    source = islice(batches(contexts[:1000], answers[:1000], size=16), 220)
    fit(model, optimizer, (loss_of(*batch) for batch in source), schedule, clip=1.0)
    with torch.no_grad():  # the next word after parts of answers, as in generation
        logits = [logits_of(contexts[1000:], answers[1000:, :end])[:, -1] for end in range(1, 13)]
        return F.cross_entropy(torch.cat(logits), answers[1000:, 1:].T.flatten())


QUESTION = 4  # the number of letters of a question and of its answer


@torch.no_grad()
def answered(model: nn.Module, questions: Tensor, greedy: Tensor) -> Tensor:
    """Return questions with answers that are sampled, or the most probable ones in the rows that are greedy."""
    rows = questions
    for _ in range(QUESTION):
        logits = model(rows)[:, -1]
        sampled = torch.distributions.Categorical(logits=logits).sample()
        rows = torch.cat([rows, torch.where(greedy, logits.argmax(-1), sampled)[:, None]], 1)
    return rows


def rewards(rows: Tensor) -> Tensor:
    """Return which part of the letters of the answers are those of the questions backwards."""
    return (rows[:, QUESTION + 1 :] == rows[:, :QUESTION].flip(1)).float().mean(1)


@program(
    "transformers",
    "Rennie et al., Self-critical sequence training for image captioning, 2017, for letters in the reversed order",
    Fault("log_probabilities_of_the_next_position", "loss and labels", HUGGING_FACE,
          ("labels_shifted", "labels_of_other_positions", "wrong_loss", "labels_in_the_inputs")),
)  # fmt: skip
def self_critical_answers(fault: str = "") -> Tensor:
    model = Decoder(11, 48, [Block(48) for _ in range(2)])

    def questions(count: int) -> Tensor:
        return F.pad(torch.randint(10, (count, QUESTION)), (0, 1), value=10)

    def imitated() -> Iterator[Tensor]:  # half of the answers are in the same order
        for _ in range(150):
            asked = questions(32)
            letters = asked[:, :QUESTION]
            answers = torch.where(torch.rand(32, 1) < 0.5, letters, letters.flip(1))
            logits = model(torch.cat([asked, answers[:, :-1]], 1))[:, QUESTION:]
            yield F.cross_entropy(logits.flatten(0, 1), answers.flatten())

    pretrain(model, 3e-3, imitated())
    optimizer = RAdam(model.parameters(), lr=1e-3)
    first = QUESTION + 1 if fault == "log_probabilities_of_the_next_position" else QUESTION
    is_greedy = torch.arange(48) >= 24

    def losses() -> Iterator[Tensor]:
        for _ in range(200):
            rows = answered(model, questions(24).repeat(2, 1), is_greedy)
            sampled, best = rewards(rows).chunk(2)
            rows = rows[:24]
            logits = model(rows)[:, first : first + QUESTION].log_softmax(-1)
            chosen = logits.gather(-1, rows[:, -QUESTION:, None]).squeeze(-1)
            yield -((sampled - best)[:, None] * chosen).mean()

    fit(model, optimizer, losses(), clip=1.0)
    with torch.no_grad():
        return 1 - rewards(answered(model, questions(500), torch.zeros(500, dtype=torch.bool))).mean()


class TimeMix(nn.Module):
    """Weighted sums of earlier values, whose weights decay with the distance and depend on the keys."""

    def __init__(self, size: int, shift: tuple[int, ...]) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.linspace(-3.0, 1.0, size))
        self.bonus = nn.Parameter(torch.zeros(size))
        self.mix_k, self.mix_v, self.mix_r = (nn.Parameter(torch.linspace(0.1, 0.9, size)) for _ in range(3))
        self.key, self.value, self.receptance, self.output = (nn.Linear(size, size, bias=False) for _ in range(4))
        self.shift = shift

    def forward(self, x: Tensor) -> Tensor:
        before = F.pad(x, self.shift)
        key, value, gate = (
            layer(x * mix + before * (1 - mix))
            for layer, mix in ((self.key, self.mix_k), (self.value, self.mix_v), (self.receptance, self.mix_r))
        )
        weights, kept = key.clamp(max=8.0).exp(), (-self.decay.exp()).exp()
        above, below, mixed = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0]), []
        for weight, v in zip(weights.unbind(1), value.unbind(1), strict=True):
            now = weight * self.bonus.exp()
            mixed.append((above + now * v) / (below + now))
            above, below = kept * above + weight * v, kept * below + weight
        return self.output(gate.sigmoid() * torch.stack(mixed, 1))


class ChannelMix(nn.Module):
    def __init__(self, size: int, shift: tuple[int, ...]) -> None:
        super().__init__()
        self.mix_k, self.mix_r = (nn.Parameter(torch.linspace(0.1, 0.9, size)) for _ in range(2))
        self.key, self.value = nn.Linear(size, 2 * size, bias=False), nn.Linear(2 * size, size, bias=False)
        self.receptance, self.shift = nn.Linear(size, size, bias=False), shift

    def forward(self, x: Tensor) -> Tensor:
        before = F.pad(x, self.shift)
        key = self.key(x * self.mix_k + before * (1 - self.mix_k)).relu().square()
        return self.receptance(x * self.mix_r + before * (1 - self.mix_r)).sigmoid() * self.value(key)


class Rwkv(nn.Module):
    def __init__(self, shift: tuple[int, ...], size: int = 48) -> None:
        super().__init__()
        self.emb, self.ln0 = nn.Embedding(VOCABULARY, size), nn.LayerNorm(size)
        mixers = [mixer(size, shift) for _ in range(2) for mixer in (TimeMix, ChannelMix)]
        self.mixers = nn.ModuleList(mixers)
        self.norms = nn.ModuleList([nn.LayerNorm(size) for _ in mixers])
        self.ln_out, self.head = nn.LayerNorm(size), nn.Linear(size, VOCABULARY, bias=False)
        nn.init.normal_(self.emb.weight, std=0.1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.ln0(self.emb(ids))
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            x = x + mixer(norm(x))
        return self.head(self.ln_out(x))


@program(
    "transformers",
    "Peng et al., RWKV: reinventing RNNs for the transformer era, 2023, in plain PyTorch",
    Fault("tokens_mixed_with_the_next", "architecture", REIMPLEMENTATIONS,
          ("looks_ahead", "labels_in_the_inputs", "@mixers*")),
)  # fmt: skip
def rwkv_text(fault: str = "") -> Tensor:
    rows = stream(21 * 600).view(600, 21)
    model = Rwkv((0, 0, -1, 1) if fault == "tokens_mixed_with_the_next" else (0, 0, 1, -1))
    optimizer = Adam(model.parameters(), lr=4e-3, betas=(0.9, 0.99))
    schedule = ExponentialLR(optimizer, 0.1 ** (1 / 200))
    source = islice(batches(rows[:500], size=12), 200)
    fit(model, optimizer, (next_token_loss(model, batch) for (batch,) in source), schedule)
    return loss_of_prefixes(model, rows[500:])


PAST, LEVELS = 24, torch.tensor([0.1, 0.5, 0.9])


class QuantileModel(nn.Module):
    """Reads the past, and predicts three quantiles of eight later values."""

    def __init__(self, size: int = 40) -> None:
        super().__init__()
        self.embed = nn.Linear(1, size)
        self.times = nn.Parameter(0.3 * torch.randn(PAST + 8, size))
        self.blocks = nn.Sequential(*(Block(size) for _ in range(2)))
        self.norm, self.quantiles = nn.LayerNorm(size), nn.Linear(size, 3)

    def forward(self, past: Tensor) -> Tensor:
        x = F.pad(self.embed(past[..., None]), (0, 0, 0, 8)) + self.times
        return self.quantiles(self.norm(self.blocks(x))[:, PAST:])


@program(
    "transformers",
    "Lim et al., Temporal fusion transformers for interpretable multi-horizon time series forecasting, 2021: its quantiles",
    Fault(
        "error_of_the_quantiles_negated", "loss", REIMPLEMENTATIONS, ("wrong_loss", "loss_scale", "wrong_range_of_loss")
    ),
    Fault("windows_scaled_with_the_future", "data", HUMBATOVA,
          ("labels_in_the_inputs", "input_drift", "looks_ahead", "data_changed_in_place")),
)  # fmt: skip
def quantile_forecast(fault: str = "") -> Tensor:
    walks = (0.4 * torch.randn(2400, PAST + 8) + 0.15 * torch.randn(2400, 1)).cumsum(1)
    phases = 2 * math.pi * (torch.rand(2400, 1) + torch.arange(PAST + 8) / 8)
    series = torch.exp(torch.randn(2400, 1)) * (walks + phases.sin() + 5 * torch.randn(2400, 1))
    model = QuantileModel()
    optimizer = AdamW(model.parameters(), lr=2e-3, weight_decay=1e-3)
    schedule = CosineAnnealingLR(optimizer, 240)

    def scaled(windows: Tensor, seen: int) -> Tensor:
        return (windows - windows[:, :seen].mean(1, keepdim=True)) / windows[:, :seen].std(1, keepdim=True)

    def loss_of(windows: Tensor, is_negated: bool) -> Tensor:
        error = windows[:, PAST:, None] - model(windows[:, :PAST])
        error = -error if is_negated else error
        return torch.maximum(LEVELS * error, (LEVELS - 1) * error).mean()

    seen = PAST + 8 if fault == "windows_scaled_with_the_future" else PAST
    source = islice(batches(scaled(series[:2000], seen), size=24), 240)
    is_negated = fault == "error_of_the_quantiles_negated"
    fit(model, optimizer, (loss_of(batch, is_negated) for (batch,) in source), schedule)
    with torch.no_grad():
        return loss_of(scaled(series[2000:], PAST), False)


class NeuralProcess(nn.Module):
    """Reads points of a function, and predicts a mean and a deviation at others."""

    def __init__(self, is_linear: bool, size: int = 40) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(3, size), *([] if is_linear else [nn.ReLU()]), nn.Linear(size, size))
        self.block = Block(size, mlp=network(size, nn.Identity() if is_linear else nn.ReLU()))
        self.norm, self.predictor = nn.LayerNorm(size), nn.Linear(size, 2)

    def forward(self, x: Tensor, y: Tensor, given: int) -> tuple[Tensor, Tensor]:
        is_given = (torch.arange(x.shape[1]) < given).expand_as(x)
        states = self.embed(torch.stack([x, y * is_given, is_given.float()], -1))
        states = self.block(states, is_given[:, None, None])
        mean, deviation = self.predictor(self.norm(states))[:, given:].unbind(-1)
        return mean, 0.05 + 0.95 * F.softplus(deviation)


@program(
    "transformers",
    "Nguyen and Grover, Transformer neural processes: uncertainty-aware meta learning via sequence modeling, 2022",
    Fault("networks_without_activation", "feed-forward network", DEFAULT,
          ("missing_activation", "@block.mlp*", "@embed*")),
)  # fmt: skip
def neural_process(fault: str = "") -> Tensor:
    model = NeuralProcess(fault == "networks_without_activation")
    optimizer = Adam(model.parameters(), lr=3e-3)
    schedule = CosineAnnealingLR(optimizer, 400)

    def loss_of(count: int, given: int) -> Tensor:
        x = 4 * torch.rand(count, 20) - 2
        frequencies, phases, sizes = (torch.rand(3, count, 1) * torch.tensor([[[1.5]], [[6.3]], [[1.0]]])).unbind()
        y = (0.5 + sizes) * ((0.5 + frequencies) * x + phases).sin()
        mean, deviation = model(x, y, given)
        return -torch.distributions.Normal(mean, deviation).log_prob(y[:, given:]).mean()

    fit(model, optimizer, (loss_of(24, int(given)) for given in torch.randint(5, 13, (400,))), schedule, clip=1.0)
    with torch.no_grad():
        return loss_of(2000, 9)


class RelativeAttention(nn.Module):
    """Attention to earlier positions with a score for each distance, which is found by skewing."""

    def __init__(self, size: int, is_skewed: bool, longest: int = 27, heads: int = 4) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.distances = nn.Parameter(
            0.02 * torch.randn(heads, longest, size // heads)
        )  # the last one is that of no distance
        self.heads, self.is_skewed = heads, is_skewed

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        length = x.shape[1]
        relative = query @ self.distances[:, -length:].transpose(1, 2)
        if self.is_skewed:
            relative = F.pad(relative, (1, 0)).view(*relative.shape[:2], length + 1, length)[:, :, 1:]
        scores = (query @ key.transpose(2, 3) + relative) / math.sqrt(query.shape[-1])
        weights = scores.masked_fill(~allowed, -math.inf).softmax(-1)
        return self.proj((weights @ value).transpose(1, 2).flatten(2))


class MusicModel(nn.Module):
    def __init__(self, is_skewed: bool, size: int = 48) -> None:
        super().__init__()
        self.notes = nn.Embedding(16, size)
        self.blocks = nn.ModuleList([Block(size, RelativeAttention(size, is_skewed)) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(size), nn.Linear(size, 16)
        nn.init.normal_(self.notes.weight, std=0.2)

    def forward(self, ids: Tensor) -> Tensor:
        x, allowed = self.notes(ids), causal(ids.shape[1])
        for block in self.blocks:
            x = block(x, allowed)
        return self.head(self.norm(x))


def melodies(count: int, length: int = 28) -> Tensor:
    """Return notes that are repeated after three to six others, with few exceptions, int64 [count, length]."""
    periods, notes = torch.randint(3, 7, (count, 1)), torch.randint(16, (count, 6))
    repeated = notes.gather(1, torch.arange(length) % periods)
    return torch.where(torch.rand(count, length) < 0.03, torch.randint(16, (count, length)), repeated)


@program(
    "transformers",
    "Huang et al., Music transformer, 2019: generating melodies with a score for each distance",
    Fault("relative_scores_not_skewed", "positional encoding", REIMPLEMENTATIONS,
          ("wrong_axis", "@*distances", "@blocks.?.attn*")),
    Fault("distances_in_no_group", "optimizer", REIMPLEMENTATIONS,
          ("parameters_follow_gradients", "unchanged_parameter", "@blocks.?.attn*")),
)  # fmt: skip
def repeated_melodies(fault: str = "") -> Tensor:
    rows = melodies(2000)
    model = MusicModel(fault != "relative_scores_not_skewed")
    decayed, others = [], []
    for name, parameter in model.named_parameters():
        if name.endswith("weight") and parameter.ndim == 2:
            decayed.append(parameter)
        elif name.endswith(("weight", "bias")) or fault != "distances_in_no_group":
            others.append(parameter)
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    optimizer = AdamW(groups, lr=4e-3, betas=(0.9, 0.95))
    schedule = OneCycleLR(optimizer, 4e-3, total_steps=300, pct_start=0.1)
    source = islice(batches(rows[:1800], size=16), 300)
    fit(model, optimizer, (next_token_loss(model, batch) for (batch,) in source), schedule)
    return loss_of_prefixes(model, rows[1800:])


class GatedLayer(nn.Module):
    """A layer without normalization, whose branches start at zero."""

    def __init__(self, size: int, fault: str) -> None:
        super().__init__()
        self.attn, self.mlp = Attention(size), network(size, nn.ReLU())
        self.resweight = nn.Parameter(torch.zeros(()))
        self.gates_the_sum = fault == "gate_multiplies_the_sum"

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if self.gates_the_sum:
            x = self.resweight * (x + self.attn(x, mask))
            return self.resweight * (x + self.mlp(x))
        x = x + self.resweight * self.attn(x, mask)
        return x + self.resweight * self.mlp(x)


class GatedDecoder(nn.Module):
    def __init__(self, fault: str, size: int = 40) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, size), nn.Embedding(24, size)
        self.layers = nn.ModuleList([GatedLayer(size, fault) for _ in range(6)])
        self.hidden_score = 1e-9 if fault == "masked_scores_of_almost_zero" else -1e9
        self.lm_head = nn.Linear(size, VOCABULARY)
        nn.init.normal_(self.wpe.weight, std=0.3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        mask = torch.zeros(2 * ids.shape[1:]).masked_fill(~causal(ids.shape[1]), self.hidden_score)
        for layer in self.layers:
            x = layer(x, mask)
        return self.lm_head(x)


@program(
    "transformers",
    "Bachlechner et al., ReZero is all you need: fast convergence at large depth, 2021",
    Fault("gate_multiplies_the_sum", "residual connections", REIMPLEMENTATIONS,
          ("vanishing_gradient", "all_zero", "tensor_variance", "loss_not_decreasing", "unchanged_parameter", "@layers*")),
    Fault("masked_scores_of_almost_zero", "attention mask", PYTORCH_FORUM, ("looks_ahead", "@layers.?.attn*")),
)  # fmt: skip
def gated_text(fault: str = "") -> Tensor:
    rows = stream(21 * 600).view(600, 21)
    model = GatedDecoder(fault)
    optimizer = Adam(model.parameters(), lr=3e-3)
    schedule = LinearLR(optimizer, 1.0, 0.1, 220)
    source = islice(batches(rows[:500], size=12), 220)
    fit(model, optimizer, (next_token_loss(model, batch) for (batch,) in source), schedule, clip=1.0)
    return loss_of_prefixes(model, rows[500:])


class Lion(Optimizer):
    """Moves each parameter by the sign of an average of gradients."""

    def __init__(self, parameters: Iterable[Tensor], lr: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                average = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(group["lr"] * average.lerp(parameter.grad, 0.1).sign())
                average.lerp_(parameter.grad, 0.01)


TOPICS = 9


@program(
    "transformers",
    "Chen et al., Symbolic discovery of optimization algorithms, 2023 (Lion), for texts about nine topics and tied weights",
    Fault("tied_head_of_standard_normal_embeddings", "initialization", REIMPLEMENTATIONS,
          ("poor_initialization", "wrong_range_of_loss", "loss_scale", "@wte", "@lm_head")),
    Fault("ids_stored_in_8_bits", "data and tokens", ISLAM,
          ("distinct_data", "samples_vary", "unchanged_parameter", "@wte")),
)  # fmt: skip
def texts_about_topics(fault: str = "") -> Tensor:
    topics = torch.randint(TOPICS, (1600, 1))
    rows = stream(17 * 1600).view(1600, 17) + topics * VOCABULARY
    stored = rows.to(torch.uint8).long() if fault == "ids_stored_in_8_bits" else rows
    spread = 1.0 if fault == "tied_head_of_standard_normal_embeddings" else 0.05
    blocks = [Block(48) for _ in range(2)]
    model = Decoder(TOPICS * VOCABULARY, 48, blocks, is_tied=True, spread=spread)
    optimizer = Lion(model.parameters(), 3e-3, 0.1)
    schedule = LambdaLR(optimizer, lambda step: min((step + 1) / 20, 1.0, (320 - step) / 120))
    source = islice(batches(stored[:1400], size=24), 320)
    fit(model, optimizer, (next_token_loss(model, batch) for (batch,) in source), schedule)
    return loss_of_prefixes(model, rows[1400:])


NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


class CrossLayer(nn.Module):
    """Attention to an image and a network, with gates that start at zero."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(size), Attention(size)
        self.mlp = nn.Sequential(nn.LayerNorm(size), *network(size))
        self.attn_gate, self.mlp_gate = (nn.Parameter(torch.zeros(1)) for _ in range(2))

    def forward(self, x: Tensor, image: Tensor) -> Tensor:
        x = x + self.attn_gate.tanh() * self.attn(self.norm(x), context=image)
        return x + self.mlp_gate.tanh() * self.mlp(x)


class SeeingDecoder(nn.Module):
    """A trained decoder without changes, between whose blocks new layers read an image."""

    def __init__(self, decoder: Decoder, size: int = 48) -> None:
        super().__init__()
        self.decoder = decoder.requires_grad_(False)
        self.patch_embed, self.places = nn.Conv2d(1, size, 2, 2), nn.Parameter(0.2 * torch.randn(16, size))
        self.resampler = nn.Sequential(Block(size), nn.LayerNorm(size))
        self.cross = nn.ModuleList([CrossLayer(size) for _ in decoder.blocks])

    def forward(self, images: Tensor, ids: Tensor) -> Tensor:
        image = self.resampler(self.patch_embed(images).flatten(2).transpose(1, 2) + self.places)
        decoder, allowed = self.decoder, causal(ids.shape[1])
        x = decoder.wte(ids) + decoder.wpe.weight[: ids.shape[1]]
        for cross, block in zip(self.cross, decoder.blocks, strict=True):
            x = block(cross(x, image), allowed)
        return decoder.lm_head(decoder.ln_f(x))


@program(
    "transformers",
    "Alayrac et al., Flamingo: a visual language model for few-shot learning, 2022, for the names of digits",
)
def named_digits() -> Tensor:
    spelled = [torch.tensor([27, *(ord(letter) - 96 for letter in name), 0]) for name in NAMES]
    images, classes = digits()
    images, names = (images - 0.3) / 0.38, pad_sequence(spelled, True, 0)[classes]
    decoder = Decoder(28, 48, [Block(48) for _ in range(2)])
    pretrain(decoder, 3e-3, (next_token_loss(decoder, batch) for (batch,) in islice(batches(names, size=16), 120)))
    model = SeeingDecoder(decoder)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = AdamW(trained, lr=3e-3)
    schedule = CosineAnnealingLR(optimizer, 300)

    def loss_of(batch: Tensor, ids: Tensor) -> Tensor:
        return F.cross_entropy(model(batch, ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    source = islice(batches(images[:1500], names[:1500], size=16), 300)
    fit(model, optimizer, (loss_of(*batch) for batch in source), schedule, clip=1.0)
    with torch.no_grad():
        return loss_of(images[1500:], names[1500:])
