"""Transformers of more kinds, and their faults: translations, utterances, preferences, patches, spans, speech, parts of rows, grids."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from copy import deepcopy
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
import transformers
from data import KINDS, MASK, PAD, VOCABULARY, batches, digits, padded, sentences, tokens
from registry import Fault, attach, in_two_processes, program
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LinearLR, OneCycleLR

DEFAULT = "DEFault++: automated fault detection, categorization and diagnosis for transformer architectures, 2026"
HUGGING_FACE = "Issues of Hugging Face's libraries, 2020 to 2026"
HUMBATOVA = "Humbatova et al., Taxonomy of real faults in deep learning systems, 2020"
PYTORCH_FORUM = "Questions at discuss.pytorch.org and Stack Overflow, 2018 to 2026"
REIMPLEMENTATIONS = "Issues of repositories that implement publications again, 2019 to 2026"
TRAINCHECK = "Jiang et al., Training with confidence: catching silent errors in deep learning training, 2025"
END = 2 * VOCABULARY  # the token behind the words of two languages
NUMBERS = 20
BINS = 16  # of a spectrum
EPOCH, EPOCHS = 80, 3  # the steps of an epoch of translations, and the epochs
SOUNDS, LONGEST = 20, 5  # the kinds of phonemes, and the most frames of one
REFRESHED = 40  # the steps after which the subspaces of gradients are computed again
GRIDS = ((1, 6), (2, 3), (3, 2), (6, 1))  # the rows and columns of images
WORD, NAME, STOP = 0, 12, 22  # the first word for a place, the first name of a digit, and the end of an answer


def fit(model: nn.Module, optimizer: Optimizer, losses: Iterable[Tensor], schedule: Any = None) -> None:
    """Train with one loss of a generator in each step, with clipped gradients."""
    model.train()
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


def pretrain(model: nn.Module, losses: Iterable[Tensor]) -> None:
    """Train without instrumentation."""
    optimizer = Adam(model.parameters(), lr=3e-3)
    for loss in losses:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def chains(count: int, tables: Tensor, length: int, lag: int = 1) -> Tensor:
    """Return rows of numbers, each of which mostly follows from one before in a table, int64 [count, length].

    The first number is that of the table.
    """
    chosen, rows = torch.randint(len(tables), (count,)), torch.randint(NUMBERS, (count, length))
    for time in range(1 + lag, length):
        follows = torch.rand(count) < 0.94
        rows[:, time] = torch.where(follows, tables[chosen, rows[:, time - lag]], rows[:, time])
    rows[:, 0] = chosen
    return rows


def repeats(count: int, length: int, distance: int = 5) -> Tensor:
    """Return rows in which most numbers repeat the one at a distance before, int64 [count, length]."""
    rows, is_new = torch.randint(NUMBERS, (count, length)), torch.rand(count, length) < 0.1
    for time in range(distance, length):
        rows[:, time] = torch.where(is_new[:, time], rows[:, time], rows[:, time - distance])
    return rows


def loss_of_next(logits: Tensor, rows: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())


def translations(count: int, fault: str = "") -> tuple[Tensor, Tensor]:
    """Return padded sentences, and the same ones in a language with adjectives behind their nouns, int64 [count, tokens].

    Nouns are the same in both languages. The other words of the second one have their own tokens.
    """
    nouns, adjectives, rows, wanted = {*tokens(KINDS["n"].split())}, {*tokens(KINDS["a"].split())}, [], []
    for words in sentences(count):
        ids = tokens(words)
        rows.append(torch.tensor([*ids, END]))
        for at in range(len(ids) - 1):
            if ids[at] in adjectives:
                ids[at], ids[at + 1] = ids[at + 1], ids[at]
        other = [MASK if fault == "targets_split_as_sources" else VOCABULARY + token for token in ids]
        ids = [token if token in nouns else new for token, new in zip(ids, other, strict=True)]
        wanted.append(torch.tensor([*ids, END]))
    return pad_sequence(rows, True, PAD), pad_sequence(wanted, True, -100)


@program(
    "transformers",
    "transformers, examples/pytorch/translation/run_translation.py, with a small Marian and three epochs",
    Fault("targets_split_as_sources", "data and tokens", HUGGING_FACE,
          ("class_imbalance", "distinct_data", "samples_vary", "labels_of_other_positions", "@*decoder.embed_tokens")),
    Fault("schedule_of_one_epoch", "schedule", PYTORCH_FORUM,
          ("rate_in_effect", "zero_learning_rate", "update_ratio", "unchanged_parameter", "loss_not_decreasing"), since=21),
)  # fmt: skip
def translated_sentences(fault: str = "") -> Tensor:
    rows, wanted = translations(20 * EPOCH, fault)
    config = transformers.MarianConfig(
        vocab_size=END + 1, d_model=48, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, max_position_embeddings=16, init_std=0.1,
        pad_token_id=PAD, eos_token_id=END, decoder_start_token_id=PAD, forced_eos_token_id=END, dropout=0.1,
        scale_embedding=True,
    )  # fmt: skip
    model = transformers.MarianMTModel(config)
    optimizer = AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    steps = EPOCH if fault == "schedule_of_one_epoch" else EPOCH * EPOCHS
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 20, steps)

    def loss_of(batch: Tensor, labels: Tensor) -> Tensor:
        return model(input_ids=batch, attention_mask=(batch != PAD).long(), labels=labels).loss

    source = islice(batches(rows, wanted, size=20), EPOCH * EPOCHS)
    fit(model, optimizer, (loss_of(*batch) for batch in source), schedule)
    with torch.no_grad():
        return loss_of(*translations(400))


def utterances(count: int) -> tuple[list[Tensor], Tensor]:
    """Return spectra of two tones that rise or fall, each float32 [frames, BINS], and their kinds of eight, int64 [count]."""
    kinds, spectra = torch.randint(8, (count,)), []
    for kind in kinds.tolist():
        frames = int(torch.randint(10, 36, ()))
        time = torch.linspace(0, 1, frames)[:, None]
        spectrum = 0.8 * torch.randn(frames, BINS)
        for low, rises in ((2, kind & 1), (10, kind & 2)):
            way = time if rises else 1 - time
            bend = way**2 if kind & 4 else way.sqrt()
            spectrum += (-((torch.arange(BINS) - low - 4 * bend) ** 2) / 3).exp()
        spectra.append((spectrum - spectrum.mean()) / spectrum.std())
    return spectra, kinds


def masked(spectrum: Tensor, fault: str) -> Tensor:
    """Return a spectrum with some frames and some bins at zero."""
    frames = len(spectrum)
    longest = 24 if fault == "masks_longer_than_short_utterances" else frames // 5
    spectrum, hidden = spectrum.clone(), min(frames, int(torch.randint(longest + 1, ())))
    start, low = int(torch.randint(frames - hidden + 1, ())), int(torch.randint(BINS - 2, ()))
    spectrum[start : start + hidden] = 0
    spectrum[:, low : low + int(torch.randint(3, ()))] = 0
    return spectrum


class ConvolutionModule(nn.Module):
    """A gated convolution over times, with a normalization over the batch."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm, self.enter, self.leave = nn.LayerNorm(size), nn.Linear(size, 2 * size), nn.Linear(size, size)
        self.depthwise, self.batch_norm = nn.Conv1d(size, size, 9, padding=4, groups=size), nn.BatchNorm1d(size)

    def forward(self, x: Tensor, is_padding: Tensor) -> Tensor:
        x = F.glu(self.enter(self.norm(x)), dim=-1).masked_fill(is_padding[..., None], 0)
        return self.leave(F.silu(self.batch_norm(self.depthwise(x.mT))).mT)


class ConformerBlock(nn.Module):
    """Attention and a convolution between two halves of a network."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Sequential(nn.LayerNorm(size), nn.Linear(size, 2 * size), nn.SiLU(), nn.Linear(2 * size, size))
            for _ in range(2)
        )
        self.attention_norm, self.attention = nn.LayerNorm(size), nn.MultiheadAttention(size, 4, batch_first=True)
        self.convolution, self.norm = ConvolutionModule(size), nn.LayerNorm(size)

    def forward(self, x: Tensor, is_padding: Tensor) -> Tensor:
        x = x + self.first(x) / 2
        normalized = self.attention_norm(x)
        x = x + self.attention(normalized, normalized, normalized, key_padding_mask=is_padding, need_weights=False)[0]
        x = x + self.convolution(x, is_padding)
        return self.norm(x + self.second(x) / 2)


class Conformer(nn.Module):
    """Classifies spectra by the mean over their frames."""

    def __init__(self, size: int = 48) -> None:
        super().__init__()
        self.frames, self.head = nn.Linear(BINS, size), nn.Linear(size, 8)
        self.blocks = nn.ModuleList([ConformerBlock(size) for _ in range(2)])

    def forward(self, spectra: Tensor, lengths: Tensor) -> Tensor:
        is_padding = torch.arange(spectra.shape[1]) >= lengths[:, None]
        x = self.frames(spectra)
        for block in self.blocks:
            x = block(x, is_padding)
        return self.head(x.masked_fill(is_padding[..., None], 0).sum(1) / lengths[:, None])


@program(
    "transformers",
    "Gulati et al., Conformer: convolution-augmented transformer for speech recognition, 2020, for commands, with SpecAugment",
    Fault("masks_longer_than_short_utterances", "data", REIMPLEMENTATIONS,
          ("samples_vary", "distinct_data", "input_drift", "all_zero@frames", "loss_not_decreasing")),
)  # fmt: skip
def spoken_commands(fault: str = "") -> Tensor:
    spectra, kinds = utterances(2000)
    model = Conformer()
    optimizer = AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = OneCycleLR(optimizer, 2e-3, total_steps=240, pct_start=0.15)

    def loss_of(chosen: Sequence[int]) -> Tensor:
        batch = pad_sequence([masked(spectra[at], fault) if model.training else spectra[at] for at in chosen], True)
        lengths = torch.tensor([len(spectra[at]) for at in chosen])
        return F.cross_entropy(model(batch, lengths), kinds[list(chosen)])

    source = islice(batches(torch.arange(1700), size=16), 240)
    fit(model, optimizer, (loss_of(chosen.tolist()) for (chosen,) in source), schedule)
    with torch.no_grad():  # without padding
        return torch.stack([loss_of([at]) for at in range(1700, 2000)]).mean()


def preferences(count: int, tables: Tensor) -> tuple[Tensor, Tensor]:
    """Return pairs of rows that continue a start with the first and the second table, and the labels of the continuations.

    Both are int64 [count, 2, tokens]. A row ends with `NUMBERS`, and then labels are -100.
    """
    rows, labels = torch.full((count, 2, 13), NUMBERS), torch.full((count, 2, 13), -100)
    start, lengths = torch.randint(NUMBERS, (count, 4)), torch.randint(3, 9, (count, 2))
    rows[:, :, :4] = start[:, None]
    for at in range(count):
        for which in range(2):
            end = 4 + int(lengths[at, which])
            for time in range(4, end):
                is_noise = torch.rand(()) < 0.05
                last = rows[at, which, time - 1]
                rows[at, which, time] = torch.randint(NUMBERS, ()) if is_noise else tables[which, last]
            labels[at, which, 4 : end + 1] = rows[at, which, 4 : end + 1]
    return rows, labels


def log_probabilities(model: nn.Module, rows: Tensor, labels: Tensor, is_mean: bool) -> Tensor:
    """Return those of the labels, as a mean or a sum over the tokens of each row, float32 [pairs, 2]."""
    logits = model(rows.flatten(0, 1)).logits[:, :-1].unflatten(0, rows.shape[:2])
    is_there = labels[..., 1:] >= 0
    chosen = logits.log_softmax(-1).gather(-1, labels[..., 1:].clamp(min=0)[..., None])[..., 0] * is_there
    return chosen.sum(2) / is_there.sum(2) if is_mean else chosen.sum(2)


@program(
    "transformers",
    "TRL, DPOTrainer with the loss of Azar et al., A general theoretical paradigm to understand learning from preferences, 2023",
    Fault("log_probabilities_summed", "loss", HUGGING_FACE,
          ("wrong_loss", "loss_scale", "wrong_range_of_loss", "loss_spike")),
)  # fmt: skip
def identity_preferences(fault: str = "") -> Tensor:
    rows, labels = preferences(1100, torch.stack([torch.randperm(NUMBERS) for _ in range(2)]))
    config = transformers.PhiConfig(
        vocab_size=NUMBERS + 1, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=16, initializer_range=0.1, partial_rotary_factor=0.5, bos_token_id=None,
        eos_token_id=NUMBERS, pad_token_id=None, resid_pdrop=0.0,
    )  # fmt: skip
    model = transformers.PhiForCausalLM(config)
    both, wanted = rows[:1000].flatten(0, 1), labels[:1000].flatten(0, 1)
    source = islice(batches(both, wanted, size=32), 200)
    pretrain(model, (model(input_ids=batch, labels=answers).loss for batch, answers in source))
    is_mean = fault != "log_probabilities_summed"
    with torch.no_grad():
        reference, mean_reference = (log_probabilities(model, rows, labels, each) for each in (is_mean, True))
    optimizer = AdamW(model.parameters(), lr=5e-4, weight_decay=0.0)
    schedule = LinearLR(optimizer, 1.0, 0.1, total_iters=240)

    def loss_of(batch: Tensor, answers: Tensor, before: Tensor, is_mean: bool) -> Tensor:
        gain = log_probabilities(model, batch, answers, is_mean) - before
        return ((gain[:, 0] - gain[:, 1] - 1 / (2 * 0.5)) ** 2).mean()

    source = islice(batches(rows[:1000], labels[:1000], reference[:1000], size=12), 240)
    fit(model, optimizer, (loss_of(*batch, is_mean) for batch in source), schedule)
    with torch.no_grad():
        return loss_of(rows[1000:], labels[1000:], mean_reference[1000:], True)


def shifted(images: Tensor, fault: str) -> Tensor:
    """Return images moved by up to one pixel, each in its own direction."""
    rows, columns = (torch.arange(8) + torch.randint(3, (len(images), 1)) for _ in range(2))
    moved = F.pad(images[:, 0], (1, 1, 1, 1), value=float(images.min()))
    moved = moved[torch.arange(len(images))[:, None, None], rows[:, :, None], columns[:, None]][:, None]
    if fault == "digits_flipped_as_photographs":
        moved = torch.where(torch.rand(len(images), 1, 1, 1) < 0.5, moved.flip(3), moved)
        moved = torch.where(torch.rand(len(images), 1, 1, 1) < 0.5, moved.flip(2), moved)
    return moved


class TaughtPatches(nn.Module):
    """A vision transformer with a token for the classes and one for the teacher, and a head for each."""

    def __init__(self, size: int = 48) -> None:
        super().__init__()
        self.patches, self.extra = nn.Conv2d(1, size, 2, 2), nn.Parameter(0.02 * torch.randn(2, size))
        self.positions = nn.Parameter(0.1 * torch.randn(18, size))
        layer = nn.TransformerEncoderLayer(size, 4, 96, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(size), enable_nested_tensor=False)
        self.head, self.teacher_head = nn.Linear(size, 10), nn.Linear(size, 10)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        x = self.patches(images).flatten(2).mT
        x = self.encoder(torch.cat([self.extra.expand(len(x), -1, -1), x], 1) + self.positions)
        return self.head(x[:, 0]), self.teacher_head(x[:, 1])


@program(
    "transformers",
    "Touvron et al., Training data-efficient image transformers and distillation through attention, 2021 (DeiT), soft labels",
    Fault("digits_flipped_as_photographs", "data", HUMBATOVA,
          ("input_drift", "samples_vary", "labels_in_the_inputs", "labels_shifted", "distinct_data")),
    Fault("divergence_averaged_over_the_classes", "loss", PYTORCH_FORUM, ("wrong_loss", "loss_scale", "wrong_axis")),
)  # fmt: skip
def taught_patches(fault: str = "") -> Tensor:
    images, classes = digits()
    images, order = (images - images.mean()) / images.std(), torch.randperm(len(images))
    images, classes = images[order], classes[order]
    teacher = nn.Sequential(
        nn.Conv2d(1, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(24, 48, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(192, 10),
    )  # fmt: skip
    source = islice(batches(images[:1400], classes[:1400], size=32), 200)
    pretrain(teacher, (F.cross_entropy(teacher(shifted(batch, "")), wanted) for batch, wanted in source))
    teacher.requires_grad_(False)
    labels = torch.where(torch.rand(1400) < 0.3, torch.randint(10, (1400,)), classes[:1400])  # many are wrong
    model, temperature = TaughtPatches(), 3.0
    optimizer = AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    schedule = OneCycleLR(optimizer, 3e-3, total_steps=300, pct_start=0.15)
    reduction = "mean" if fault == "divergence_averaged_over_the_classes" else "batchmean"

    def loss_of(batch: Tensor, wanted: Tensor) -> Tensor:
        logits, taught = model(batch)
        soft = F.log_softmax(teacher(batch) / temperature, 1)
        divergence = F.kl_div(F.log_softmax(taught / temperature, 1), soft, reduction=reduction, log_target=True)
        return 0.5 * F.cross_entropy(logits, wanted) + 0.5 * temperature**2 * divergence

    source = islice(batches(images[:1400], labels, size=32), 300)
    fit(model, optimizer, (loss_of(shifted(batch, fault), wanted) for batch, wanted in source), schedule)
    with torch.no_grad():
        return F.cross_entropy(sum(model(images[1400:])) / 2, classes[1400:])


class Decomposed(nn.Module):
    """A linear layer whose weight has a learned magnitude, and a direction that changes by the product of two factors."""

    def __init__(self, base: nn.Linear, fault: str, rank: int = 6) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))
        axis = 0 if fault == "magnitudes_of_the_other_axis" else 1
        self.magnitude = nn.Parameter(base.weight.detach().norm(dim=axis))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.base.weight + 2 * self.up @ self.down
        return F.linear(x, weight * (self.magnitude / weight.norm(dim=1).detach())[:, None])


@program(
    "transformers",
    "Liu et al., DoRA: weight-decomposed low-rank adaptation, 2024, with the rates of Hayou et al., LoRA+, 2024, and Granite",
    Fault("magnitudes_of_the_other_axis", "normalization", HUGGING_FACE,
          ("wrong_axis", "weights_loaded", "poor_initialization", "@*_proj")),
    Fault("group_of_a_name_that_matches_nothing", "learning rate", PYTORCH_FORUM,
          ("update_ratio", "rate_in_effect", "loss_not_decreasing")),
)  # fmt: skip
def decomposed_adapters(fault: str = "") -> Tensor:
    tables = torch.stack([torch.randperm(NUMBERS) for _ in range(2)])
    old, rows = chains(2400, tables, 17, lag=2), chains(2400, tables, 17, lag=3)
    config = transformers.GraniteConfig(
        vocab_size=NUMBERS, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=32, initializer_range=0.1, bos_token_id=None,
        eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = transformers.GraniteForCausalLM(config)
    source = islice(batches(old, size=24), 240)
    pretrain(model, (model(input_ids=batch, labels=batch).loss for (batch,) in source))
    model.requires_grad_(False)
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(layer.self_attn, name, Decomposed(getattr(layer.self_attn, name), fault))
    marker = "lora_B" if fault == "group_of_a_name_that_matches_nothing" else ".up"
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    fast = [parameter for name, parameter in trained.items() if marker in name]
    slow = [parameter for name, parameter in trained.items() if marker not in name]
    optimizer = AdamW([{"params": slow}, {"params": fast, "lr": 16 * 4e-4}], lr=4e-4, weight_decay=0.0)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, 15, 220)
    source = islice(batches(rows[:2100], size=20), 220)
    fit(model, optimizer, (model(input_ids=batch, labels=batch).loss for (batch,) in source), schedule)
    with torch.no_grad():
        return model(input_ids=rows[2100:], labels=rows[2100:]).loss


def entities(count: int, fault: str = "") -> tuple[Tensor, Tensor]:
    """Return padded sentences, int64 [count, 12], and the classes of their spans, int64 [count, spans].

    An entity is a noun with the adjective before it: an animal, a person or a place. Its end is behind its last word.
    """
    ids = padded(count)
    nouns, adjectives = KINDS["n"].split(), {*tokens(KINDS["a"].split())}
    classes = dict.fromkeys(tokens(nouns[:3]), 1) | dict.fromkeys(tokens(nouns[3:]), 2)
    classes |= dict.fromkeys(tokens(KINDS["p"].split()), 3)
    wanted = torch.zeros(count, len(SPANS), dtype=torch.int64)
    for row, words in enumerate(ids.tolist()):
        length = sum(word != PAD for word in words)
        found = {}
        for at, word in enumerate(words):
            if word in classes:
                start, end = at - (at > 0 and words[at - 1] in adjectives), at + 1
                found[start, end if fault == "ends_of_spans_are_exclusive" else end - 1] = classes[word]
        for place, (start, last) in enumerate(SPANS):
            wanted[row, place] = found.get((start, last), 0) if last < length else -100
    return ids, wanted


SPANS = [(start, start + more) for start in range(12) for more in range(3) if start + more < 12]


class SpanClassifier(nn.Module):
    """Classifies spans by their first, last and largest states and their width."""

    def __init__(self, size: int = 48) -> None:
        super().__init__()
        config = transformers.DistilBertConfig(
            vocab_size=VOCABULARY, dim=size, hidden_dim=96, n_layers=2, n_heads=4, max_position_embeddings=16,
            initializer_range=0.1, dropout=0.1, pad_token_id=PAD,
        )  # fmt: skip
        self.encoder, self.widths = transformers.DistilBertModel(config), nn.Embedding(3, 16)
        self.classifier = nn.Sequential(nn.Linear(3 * size + 16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))
        first, last = torch.tensor(SPANS).T
        self.register_buffer("first", first)
        self.register_buffer("last", last)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits [sentences, spans, classes]."""
        x = self.encoder(ids, attention_mask=(ids != PAD).long()).last_hidden_state
        middle = (self.first + self.last) // 2
        largest = torch.stack([x[:, self.first], x[:, middle], x[:, self.last]]).amax(0)
        widths = self.widths(self.last - self.first).expand(len(x), -1, -1)
        return self.classifier(torch.cat([x[:, self.first], x[:, self.last], largest, widths], 2))


@program(
    "transformers",
    "Eberts and Ulges, Span-based joint entity and relation extraction with transformer pre-training, 2020 (SpERT), entities",
    Fault("ends_of_spans_are_exclusive", "labels", HUGGING_FACE,
          ("labels_shifted", "labels_of_other_positions", "missing_labels_in_loss", "class_imbalance", "wrong_loss")),
)  # fmt: skip
def classified_spans(fault: str = "") -> Tensor:
    ids, wanted = entities(2000, fault)
    model = SpanClassifier()
    optimizer = AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 25, 260)

    def loss_of(batch: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(batch).flatten(0, 1), labels.flatten(), ignore_index=-100)

    source = islice(batches(ids, wanted, size=16), 260)
    fit(model, optimizer, (loss_of(*batch) for batch in source), schedule)
    with torch.no_grad():
        return loss_of(*entities(300))


class JointBlock(nn.Module):
    """Attention of two streams to each other; a vector scales and shifts their normalized inputs and gates their outputs."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.modulations, self.qkv, self.out, self.mlp = (nn.ModuleList() for _ in range(4))
        for _ in range(2):
            self.modulations.append(nn.Linear(size, 6 * size))
            self.qkv.append(nn.Linear(size, 3 * size))
            self.out.append(nn.Linear(size, size))
            self.mlp.append(nn.Sequential(nn.Linear(size, 2 * size), nn.GELU("tanh"), nn.Linear(2 * size, size)))
        for modulation in self.modulations:
            nn.init.zeros_(modulation.weight)
            nn.init.zeros_(modulation.bias)

    def forward(self, streams: list[Tensor], condition: Tensor) -> list[Tensor]:
        vectors = [layer(F.silu(condition))[:, None].chunk(6, -1) for layer in self.modulations]
        normalized = [F.layer_norm(x, x.shape[-1:]) * (1 + v[0]) + v[1] for x, v in zip(streams, vectors, strict=True)]
        both = torch.cat([layer(x) for layer, x in zip(self.qkv, normalized, strict=True)], 1)
        query, key, value = both.unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        parts = mixed.split([x.shape[1] for x in streams], 1)
        results = []
        for x, part, v, out, mlp in zip(streams, parts, vectors, self.out, self.mlp, strict=True):
            attended = x + v[2] * out(part)
            hidden = F.layer_norm(attended, x.shape[-1:]) * (1 + v[3]) + v[4]
            results.append(attended + v[5] * mlp(hidden))
        return results


class JointTransformer(nn.Module):
    """Predicts the velocity from noise to an image, from patches of the mixture, its time from 0 to 1 and a caption."""

    def __init__(self, size: int = 48) -> None:
        super().__init__()
        self.patches, self.positions = nn.Linear(4, size), nn.Parameter(0.2 * torch.randn(16, size))
        self.words = nn.Embedding(13, size)
        self.time = nn.Sequential(nn.Linear(32, size), nn.SiLU(), nn.Linear(size, size))
        self.blocks, self.velocity = nn.ModuleList([JointBlock(size) for _ in range(2)]), nn.Linear(size, 4)

    def forward(self, images: Tensor, times: Tensor, captions: Tensor) -> Tensor:
        angles = 1000 * times[:, None] * 10000 ** -torch.linspace(0, 1, 16)
        read = self.words(captions)
        condition = self.time(torch.cat([angles.cos(), angles.sin()], 1)) + read.mean(1)
        streams = [self.patches(images) + self.positions, read]
        for block in self.blocks:
            streams = block(streams, condition)
        return self.velocity(F.layer_norm(streams[0], streams[0].shape[-1:]))


@program(
    "transformers",
    "Esser et al., Scaling rectified flow transformers for high-resolution image synthesis, 2024 (Stable Diffusion 3), for digits",
    Fault("steps_given_instead_of_fractions", "embeddings", HUGGING_FACE,
          ("input_not_normalized", "samples_vary", "@time*", "loss_not_decreasing")),
)  # fmt: skip
def captioned_flows(fault: str = "") -> Tensor:
    images, classes = digits()
    images = ((images - images.mean()) / images.std()).unfold(2, 2, 2).unfold(3, 2, 2).reshape(-1, 16, 4)
    is_inverted = torch.rand(len(images)) < 0.5
    images = torch.where(is_inverted[:, None, None], -images, images)
    captions = torch.stack([classes, 10 + is_inverted.long()], 1)
    model = JointTransformer()
    optimizer = AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = LinearLR(optimizer, 0.05, 1.0, total_iters=30)

    def loss_of(batch: Tensor, read: Tensor) -> Tensor:
        noise, times = torch.randn_like(batch), torch.randn(len(batch)).sigmoid()
        mixed = torch.lerp(batch, noise, times[:, None, None])
        given = 1000 * times if fault == "steps_given_instead_of_fractions" else times
        return F.mse_loss(model(mixed, given, read), noise - batch)

    def with_empty_captions(read: Tensor) -> Tensor:
        return read.masked_fill(torch.rand(len(read), 1) < 0.1, 12)

    source = islice(batches(images[:1500], captions[:1500], size=32), 320)
    fit(model, optimizer, (loss_of(batch, with_empty_captions(read)) for batch, read in source), schedule)
    with torch.no_grad():
        return loss_of(images[1500:].repeat(8, 1, 1), captions[1500:].repeat(8, 1))


class Router(nn.Linear):
    """Scores of experts, and how many of them each token takes."""

    top_k = 2


class StackedExperts(nn.Module):
    """A router and experts whose weights are in one tensor; each token takes two experts, if there is still room."""

    def __init__(self, size: int, fault: str, experts: int = 6) -> None:
        super().__init__()
        self.gate, self.fault = Router(size, experts, bias=False), fault
        self.up, self.down = nn.Parameter(torch.empty(experts, size, 64)), nn.Parameter(torch.empty(experts, 64, size))
        self.balance = torch.zeros(())
        nn.init.normal_(self.gate.weight, std=0.4)
        for weights in (self.up, self.down):
            parts = [weights] if fault == "fans_of_the_stack_of_experts" else [weight.T for weight in weights]
            for part in parts:
                nn.init.kaiming_uniform_(part, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).softmax(-1)
        highest, chosen = shares.topk(self.gate.top_k, -1)
        is_chosen = torch.zeros_like(shares).scatter(-1, chosen, 1.0)
        weights = shares * is_chosen / highest.sum(-1, keepdim=True)
        loads = is_chosen.mean((0, 1)) / self.gate.top_k
        room = 1.1 * is_chosen[..., 0].numel() * self.gate.top_k / shares.shape[-1]
        weights = weights * (is_chosen.flatten(0, 1).cumsum(0).view_as(weights) <= room)
        asked = loads if self.fault == "balance_of_the_choices_alone" else shares.mean((0, 1))
        self.balance = shares.shape[-1] * (loads * asked).sum()
        hidden = F.gelu(torch.einsum("btd,edh->bteh", x, self.up)) * weights[..., None]
        return torch.einsum("bteh,ehd->btd", hidden, self.down)


class RoutedBlock(nn.Module):
    """Causal attention and routed experts."""

    def __init__(self, size: int, fault: str) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(size), nn.MultiheadAttention(size, 4, batch_first=True)
        self.experts_norm, self.experts = nn.LayerNorm(size), StackedExperts(size, fault)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        normalized = self.attention_norm(x)
        attended = self.attention(normalized, normalized, normalized, attn_mask=mask, need_weights=False)
        x = x + attended[0]
        return x + self.experts(self.experts_norm(x))


class RoutedDecoder(nn.Module):
    """A decoder with routed experts."""

    def __init__(self, fault: str, size: int = 48) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(NUMBERS, size), nn.Parameter(0.2 * torch.randn(32, size))
        self.blocks = nn.ModuleList([RoutedBlock(size, fault) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(size), nn.Linear(size, NUMBERS)

    def forward(self, rows: Tensor) -> Tensor:
        x = self.words(rows) + self.positions[: rows.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@program(
    "transformers",
    "Lepikhin et al., GShard: scaling giant models with conditional computation and automatic sharding, 2021, as a decoder",
    Fault("balance_of_the_choices_alone", "graph", REIMPLEMENTATIONS,
          ("parameters_follow_gradients", "vanishing_gradient", "wrong_loss", "@*experts*", "@*gate")),
    Fault("fans_of_the_stack_of_experts", "initialization", PYTORCH_FORUM,
          ("poor_initialization", "vanishing_gradient", "tensor_variance", "@*experts*")),
)  # fmt: skip
def stacked_experts(fault: str = "") -> Tensor:
    rows = chains(3000, torch.stack([torch.randperm(NUMBERS) for _ in range(8)]), 17)
    model = RoutedDecoder(fault)
    optimizer = AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.05)
    schedule = OneCycleLR(optimizer, 3e-3, total_steps=320, pct_start=0.1)

    def loss_of(batch: Tensor) -> Tensor:
        loss = loss_of_next(model(batch), batch)
        return loss + 0.02 * sum(block.experts.balance for block in model.blocks)

    fit(model, optimizer, (loss_of(batch) for (batch,) in islice(batches(rows[:2700], size=20), 320)), schedule)
    with torch.no_grad():
        return loss_of(rows[2700:])


class RandomFeatures(nn.Module):
    """Attention of several heads in a time that grows linearly, by positive random features of queries and keys."""

    def __init__(self, size: int, features: int = 32) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(size, 3 * size, bias=False), nn.Linear(size, size)
        directions = torch.cat([torch.linalg.qr(torch.randn(size // 4, size // 4))[0].T for _ in range(4)])
        norms = torch.randn(len(directions), size // 4).norm(dim=1, keepdim=True)
        self.register_buffer("directions", (directions * norms)[:features])

    def features(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        x = x * x.shape[-1] ** -0.25
        scores = x @ self.directions.T
        return (scores - x.square().sum(-1, keepdim=True) / 2 - scores.amax(axes, keepdim=True).detach()).exp() + 1e-4

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        query, key = self.features(query, (-1,)), self.features(key, (-1, -2))
        mixed = query @ (key.mT @ value) / (query @ key.sum(2)[..., None])
        return self.out(mixed.transpose(1, 2).flatten(2))


class Performer(nn.Module):
    """An encoder that classifies by its first token."""

    def __init__(self, words: int, classes: int, size: int = 48) -> None:
        super().__init__()
        self.words = nn.Embedding(words, size)
        nn.init.normal_(self.words.weight, std=0.5)
        self.norms, self.attentions, self.mlps = (nn.ModuleList() for _ in range(3))
        for _ in range(2):
            self.norms.append(nn.LayerNorm(size))
            self.attentions.append(RandomFeatures(size))
            self.mlps.append(
                nn.Sequential(nn.LayerNorm(size), nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size))
            )
        self.head = nn.Sequential(nn.LayerNorm(size), nn.Linear(size, classes))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for norm, attention, mlp in zip(self.norms, self.attentions, self.mlps, strict=True):
            x = x + attention(norm(x))
            x = x + mlp(x)
        return self.head(x[:, 0])


@program(
    "transformers",
    "Choromanski et al., Rethinking attention with performers, 2021: the colour that is most frequent among the asked shapes",
)
def random_features() -> Tensor:
    shapes, colours = torch.randint(4, (3000, 44)), torch.randint(6, (3000, 44))
    favoured, asked = torch.randint(6, (3000, 4, 1)), torch.randint(4, (3000,))
    is_favoured = torch.rand(3000, 44) < 0.5
    colours = torch.where(is_favoured, favoured[..., 0].gather(1, shapes), colours)
    ids = torch.cat([24 + asked[:, None], 6 * shapes + colours], 1)
    hits = F.one_hot(colours, 6) * (shapes == asked[:, None])[..., None]
    classes = hits.sum(1).argmax(1)
    model = Performer(28, 6)
    optimizer = Adam(model.parameters(), lr=2e-3)
    schedule = ExponentialLR(optimizer, 0.996)

    def loss_of(batch: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(model(batch), wanted)

    source = islice(batches(ids[:2700], classes[:2700], size=20), 300)
    fit(model, optimizer, (loss_of(*batch) for batch in source), schedule)
    with torch.no_grad():
        return loss_of(ids[2700:], classes[2700:])


def read_sentences(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return eight phonemes, their numbers of frames, int64 [count, 8], and the padded spectra, float32 [count, frames, 12].

    A phoneme lasts longer before some others and at the end. Its spectrum passes into that of the next one.
    """
    kinds, bins = torch.randint(SOUNDS, (count, 8)), torch.arange(12)
    after = F.pad(kinds[:, 1:], (0, 1), value=0)
    frames = (1 + kinds % 3 + (after % 4 == 0)).clamp(max=LONGEST)
    frames += (torch.rand(count, 8) < 0.1) & (frames < LONGEST)
    peaks = (5 * kinds % 12)[..., None] + torch.where(kinds % 2 == 0, 1.5, -1.5)[..., None]
    spectra = (-((bins - peaks) ** 2) / 4).exp() + 0.5 * (-((bins - kinds[..., None] % 7) ** 2) / 2).exp()
    spread = torch.zeros(count, 8 * LONGEST, 12)
    for row in range(count):
        steps = spectra[row].repeat_interleave(frames[row], 0)
        smooth = (F.pad(steps.T[None], (1, 1), "replicate").unfold(2, 3, 1).mean(3))[0].T
        spread[row, : len(smooth)] = smooth + 0.03 * torch.randn(smooth.shape)
    return kinds, frames, spread


class Speaker(nn.Module):
    """Predicts how long phonemes last, spreads their states over so many frames, and predicts the spectrum of each."""

    def __init__(self, size: int = 48) -> None:
        super().__init__()
        self.phonemes, self.spectrum = nn.Embedding(SOUNDS, size), nn.Linear(size, 12)
        self.places, self.times = (nn.Parameter(0.2 * torch.randn(n, size)) for n in (8, 8 * LONGEST))
        self.encoder, self.decoder = (
            nn.TransformerEncoder(
                nn.TransformerEncoderLayer(size, 4, 96, 0.1, batch_first=True, norm_first=True),
                2,
                nn.LayerNorm(size),
                enable_nested_tensor=False,
            )
            for _ in range(2)
        )
        self.durations = nn.Sequential(nn.Linear(size, 48), nn.ReLU(), nn.LayerNorm(48), nn.Linear(48, 1))

    def forward(self, kinds: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
        """Return spectra [samples, frames, bins] and predicted durations [samples, phonemes]."""
        x = self.encoder(self.phonemes(kinds) + self.places)
        ends = frames.cumsum(1)
        time = torch.arange(8 * LONGEST).expand(len(x), -1).contiguous()
        which = torch.searchsorted(ends, time, right=True).clamp(max=7)
        spread = x.gather(1, which[..., None].expand(-1, -1, x.shape[2])) + self.times
        is_padding = time >= ends[:, -1:]
        return self.spectrum(self.decoder(spread, src_key_padding_mask=is_padding)), self.durations(x)[..., 0]


@program(
    "transformers",
    "Ren et al., FastSpeech 2: fast and high-quality end-to-end text to speech, 2021, without pitch and energy",
    Fault("durations_without_a_logarithm", "labels", REIMPLEMENTATIONS,
          ("wrong_range_of_loss", "loss_scale", "labels_shifted", "wrong_loss")),
)  # fmt: skip
def spoken_phonemes(fault: str = "") -> Tensor:
    kinds, frames, spectra = read_sentences(1700)
    model = Speaker()
    optimizer = Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-9)
    schedule = transformers.get_constant_schedule_with_warmup(optimizer, 20)

    def loss_of(kinds: Tensor, frames: Tensor, spectra: Tensor, fault: str = "") -> Tensor:
        predicted, durations = model(kinds, frames)
        is_there = torch.arange(8 * LONGEST) < frames.sum(1, keepdim=True)
        wanted = frames.float() if fault == "durations_without_a_logarithm" else (frames + 1).log()
        return (predicted - spectra).abs()[is_there].mean() + F.mse_loss(durations, wanted)

    source = islice(batches(kinds[:1500], frames[:1500], spectra[:1500], size=12), 240)
    fit(model, optimizer, (loss_of(*batch, fault) for batch in source), schedule)
    with torch.no_grad():
        return loss_of(kinds[1500:], frames[1500:], spectra[1500:])


class GatheredParts(torch.autograd.Function):
    """The parts of all ranks in a row; the gradients of a part are added over the ranks."""

    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:  # noqa: ARG004
        parts = [torch.empty_like(part) for _ in range(2)]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004
        total = gradient.contiguous()
        dist.all_reduce(total)
        return total.chunk(2, 1)[dist.get_rank()]


class PartialAttention(nn.Module):
    """Causal attention of the queries of a part of a row to the keys of the parts of all ranks, or of a whole row."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.query, self.kv, self.out = nn.Linear(size, size), nn.Linear(size, 2 * size), nn.Linear(size, size)

    def forward(self, x: Tensor, start: int, is_part: bool) -> Tensor:
        both = GatheredParts.apply(self.kv(x)) if is_part else self.kv(x)
        key, value = both.unflatten(-1, (2, 4, -1)).permute(2, 0, 3, 1, 4)
        query = self.query(x).unflatten(-1, (4, -1)).transpose(1, 2)
        mask = torch.arange(key.shape[2]) <= start + torch.arange(query.shape[2])[:, None]
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.out(mixed.transpose(1, 2).flatten(2))


class PartialDecoder(nn.Module):
    """A decoder of a part of a row that starts at a position, or of a whole row."""

    def __init__(self, size: int = 48) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(NUMBERS, size), nn.Embedding(32, size)
        nn.init.normal_(self.words.weight, std=0.3)
        nn.init.normal_(self.positions.weight, std=0.3)
        self.norms = nn.ModuleList([nn.LayerNorm(size) for _ in range(5)])
        self.attentions = nn.ModuleList([PartialAttention(size) for _ in range(2)])
        self.mlps = nn.ModuleList(
            [nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size)) for _ in range(2)]
        )
        self.head = nn.Linear(size, NUMBERS, bias=False)

    def forward(self, rows: Tensor, start: int = 0, is_part: bool = False, first_position: int = 0) -> Tensor:
        x = self.words(rows) + self.positions.weight[first_position : first_position + rows.shape[1]]
        for at, (attention, mlp) in enumerate(zip(self.attentions, self.mlps, strict=True)):
            x = x + attention(self.norms[2 * at](x), start, is_part)
            x = x + mlp(self.norms[2 * at + 1](x))
        return self.head(self.norms[4](x))


def _train_on_parts(rank: int, fault: str, final: Tensor) -> None:
    rows = repeats(2700, 33)
    model = PartialDecoder()
    optimizer = AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.05)
    schedule = CosineAnnealingLR(optimizer, 220, 1e-4)
    start = 16 * rank
    first_position = 0 if fault == "positions_restart_in_each_part" else start
    kinds = nn.Linear | nn.Embedding if fault == "norms_not_among_the_reduced" else nn.Module
    reduced = [p for module in model.modules() if isinstance(module, kinds) for p in module.parameters(recurse=False)]
    with attach(model, optimizer) as probe:
        for (batch,) in islice(batches(rows[:2500], size=16), 220):
            optimizer.zero_grad()
            logits = model(batch[:, start : start + 16], start, True, first_position)
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, start + 1 : start + 17].flatten()) / 2
            loss.backward()
            gradients = [parameter.grad for parameter in reduced]
            bucket = nn.utils.parameters_to_vector(gradients)
            dist.all_reduce(bucket)
            nn.utils.vector_to_parameters(bucket, gradients)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            total = loss.detach().clone()
            dist.all_reduce(total)
            probe.end_step(loss=total)
    with torch.no_grad():
        loss = loss_of_next(model(rows[2500:, :32]), rows[2500:, :32])
    if rank == 0:
        final.copy_(loss)


@program(
    "transformers",
    "Li et al., Sequence parallelism: long sequence training from system perspective, 2023, with gathered keys and values",
    Fault("positions_restart_in_each_part", "positional encoding", HUGGING_FACE,
          ("samples_vary", "replicas_differ", "positions_differ", "unchanged_parameter@positions", "@positions")),
    Fault("norms_not_among_the_reduced", "replicas", TRAINCHECK, ("replicas_equal", "replicas_differ", "@norms*")),
)  # fmt: skip
def parts_of_rows(fault: str = "") -> Tensor:
    final = torch.zeros(()).share_memory_()
    in_two_processes(_train_on_parts, fault, final)
    return final


class ProjectedAdam(Optimizer):
    """Adam in a subspace of the gradients of each matrix, which is computed again from time to time."""

    def __init__(self, parameters: Iterable[Tensor], lr: float, fault: str, rank: int = 6) -> None:
        super().__init__(parameters, {"lr": lr})
        self.rank, self.fault = rank, fault

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.change_of(p), alpha=group["lr"])
        return loss

    def change_of(self, p: Tensor) -> Tensor:
        state, gradient = self.state[p], p.grad
        count = state.setdefault("step", 0)
        is_matrix = p.dim() == 2
        if is_matrix and (count == 0 or (count % REFRESHED == 0 and self.fault != "subspaces_of_the_first_step_kept")):
            state["basis"] = torch.linalg.svd(gradient, full_matrices=False)[0][:, : self.rank]
        if is_matrix:
            gradient = state["basis"].T @ gradient
        if count == 0:
            state |= {"mean": torch.zeros_like(gradient), "square": torch.zeros_like(gradient)}
        state["step"] = count + 1
        mean = state["mean"].mul_(0.9).add_(gradient, alpha=0.1) / (1 - 0.9 ** (count + 1))
        square = state["square"].mul_(0.99).addcmul_(gradient, gradient, value=0.01) / (1 - 0.99 ** (count + 1))
        change = mean / (square.sqrt() + 1e-8)
        return state["basis"] @ change if is_matrix else change


@program(
    "transformers",
    "Zhao et al., GaLore: memory-efficient LLM training by gradient low-rank projection, 2024, with BLOOM",
    Fault("subspaces_of_the_first_step_kept", "optimizer", REIMPLEMENTATIONS,
          ("parameters_follow_gradients", "update_ratio", "loss_not_decreasing"), since=REFRESHED),
)  # fmt: skip
def projected_gradients(fault: str = "") -> Tensor:
    rows = chains(3000, torch.stack([torch.randperm(NUMBERS) for _ in range(3)]), 17)
    config = transformers.BloomConfig(
        vocab_size=NUMBERS, hidden_size=48, n_layer=2, n_head=4, initializer_range=0.1, hidden_dropout=0.0,
        attention_dropout=0.0, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = transformers.BloomForCausalLM(config)
    optimizer = ProjectedAdam(model.parameters(), 4e-3, fault)
    schedule = LinearLR(optimizer, 1.0, 0.1, total_iters=320)
    source = islice(batches(rows[:2700], size=24), 320)
    fit(model, optimizer, (model(input_ids=batch, labels=batch).loss for (batch,) in source), schedule)
    with torch.no_grad():
        return model(input_ids=rows[2700:], labels=rows[2700:]).loss


def asked_grids(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return six digits of grids, float32 [count, 6, 64], the shapes of the grids, and questions with answers, int64 [count, 5].

    The grid has one of the shapes `GRIDS`. A question names a row and a column; the answer is the digit there, a name that follows
    from it, and the end.
    """
    images, classes = digits()
    images = torch.stack([images[classes == kind][0].flatten() for kind in range(10)])
    images = (images - images.mean()) / images.std()
    chosen, shapes = torch.randint(10, (count, 6)), torch.tensor(GRIDS).repeat_interleave(count // 4, 0)
    place = torch.randint(6, (count,))
    found = chosen.gather(1, place[:, None])[:, 0]
    row, column = place // shapes[:, 1], place % shapes[:, 1]
    answer = [NAME + found, NAME + (3 * found + 1) % 10, torch.full((count,), STOP)]
    return (
        images[chosen] + 0.3 * torch.randn(count, 6, 64),
        shapes,
        torch.stack([WORD + row, WORD + 6 + column, *answer], 1),
    )


class GridReader(nn.Module):
    """A decoder of patches and words; patches and the question see each other, an answer sees what is before."""

    def __init__(self, fault: str, size: int = 48) -> None:
        super().__init__()
        self.patches, self.words = nn.Linear(64, size), nn.Embedding(STOP + 1, size)
        self.rows, self.columns = nn.Embedding(6, size), nn.Embedding(6, size)
        self.positions = nn.Parameter(0.3 * torch.randn(5, size))
        for embedding in (self.words, self.rows, self.columns):
            nn.init.normal_(embedding.weight, std=0.5)
        layer = nn.TransformerEncoderLayer(size, 4, 96, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers, self.norm = nn.ModuleList([deepcopy(layer) for _ in range(2)]), nn.LayerNorm(size)
        self.head, self.fault = nn.Linear(size, STOP + 1), fault
        self.places: tuple[Tensor, Tensor] | None = None

    def forward(self, images: Tensor, shape: tuple[int, int], words: Tensor) -> Tensor:
        """Return the logits of the words behind those of a question and its answer, [samples, words, words]."""
        if self.places is None or self.fault != "places_of_the_first_grid_kept":
            self.places = torch.arange(6) // shape[1], torch.arange(6) % shape[1]
        row, column = self.places
        seen = self.patches(images) + self.rows(row) + self.columns(column)
        x = torch.cat([seen, self.words(words) + self.positions[: words.shape[1]]], 1)
        is_hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        is_hidden[:, :8] = False
        if self.training and self.fault == "answers_seen_in_both_directions":
            is_hidden = torch.zeros_like(is_hidden)
        for layer in self.layers:
            x = layer(x, src_mask=is_hidden)
        return self.head(self.norm(x[:, 7:]))


@program(
    "transformers",
    "Beyer et al., PaliGemma: a versatile 3B VLM for transfer, 2024, with Dehghani et al., Patch n' pack: NaViT, 2023",
    Fault("answers_seen_in_both_directions", "attention mask", HUGGING_FACE,
          ("looks_ahead", "labels_in_the_inputs", "@layers*attn*")),
    Fault("places_of_the_first_grid_kept", "positional encoding", DEFAULT,
          ("samples_vary", "positions_differ", "unchanged_parameter@rows", "@rows", "@columns"), since=1),
)  # fmt: skip
def questions_about_grids(fault: str = "") -> Tensor:
    images, shapes, words = asked_grids(4000)
    kinds = [(shapes == torch.tensor(shape)).all(1) for shape in GRIDS]
    parts = [(images[which], words[which]) for which in kinds]
    sources = [batches(*(part[:900] for part in both), size=24) for both in parts]
    model = GridReader(fault)
    optimizer = AdamW(model.parameters(), lr=3e-3, weight_decay=0.02)
    schedule = OneCycleLR(optimizer, 3e-3, total_steps=360, pct_start=0.1)

    def loss_of(kind: int, images: Tensor, words: Tensor) -> Tensor:
        logits = model(images, GRIDS[kind], words[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), words[:, 2:].flatten())

    order = torch.randint(len(GRIDS), (360,)).tolist()
    fit(model, optimizer, (loss_of(kind, *next(sources[kind])) for kind in order), schedule)
    with torch.no_grad():
        return torch.stack([loss_of(at, *(part[900:] for part in both)) for at, both in enumerate(parts)]).mean()
