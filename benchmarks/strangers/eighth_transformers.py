"""Transformers of further kinds, and their faults: teachers, distances, angles, memories, graphs, sources, items, restarts, preferences."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
import transformers
from data import KINDS, PAD, VOCABULARY, batches, digits, sentences, stream, tokens
from registry import Fault, attach, program
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.optim import Adam, AdamW, NAdam, Optimizer, RAdam
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR, LinearLR, OneCycleLR, PolynomialLR

DEFAULT = "DEFault++: automated fault detection, categorization and diagnosis for transformer architectures, 2026"
HUMBATOVA = "Humbatova et al., Taxonomy of real faults in deep learning systems, 2020"
ISLAM = "Islam et al., A comprehensive study on deep learning bug characteristics, 2019"
HUGGING_FACE = "Issues of Hugging Face's libraries, 2020 to 2026"
PYTORCH_FORUM = "Questions in the forum of PyTorch, 2017 to 2025"
REIMPLEMENTATIONS = "Issues of repositories that implement publications again, 2019 to 2025"
TRAINCHECK = "TrainCheck: training with confidence and its silent errors, OSDI 2025"
NOTES = 12
KEYS, VALUES = 4, 6
FAR = 5  # the distance of atoms that are further apart, too
ITEMS, KINDS_OF_ITEMS = 30, 5
CYCLE = 70  # steps between two restarts
ANSWER = 6  # the number of words of a question and of its answer
OTHERS = VOCABULARY  # the first of the words of another language, which are added to the vocabulary


def fit(
    model: nn.Module,
    optimizer: Optimizer,
    losses: Iterable[Tensor],
    schedules: Sequence[Any] = (),
    after_step: Callable[[Tensor], None] = lambda loss: None,
) -> None:
    """Train with one loss of a generator in each step, with clipped gradients."""
    model.train()
    with attach(model, optimizer) as probe:
        for loss in losses:
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            for schedule in schedules:
                schedule.step()
            after_step(loss)
            probe.end_step(loss=loss)
    model.eval()


def pretrain(model: nn.Module, rate: float, losses: Iterable[Tensor]) -> None:
    """Train without instrumentation."""
    optimizer = Adam(model.parameters(), lr=rate)
    for loss in losses:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def future(length: int) -> Tensor:
    """Return scores that hide later positions, float32 [length, length]."""
    return torch.full((length, length), -math.inf).triu(1)


class Attention(nn.Module):
    """Attention of several heads with further scores, and with angles by which queries and keys are turned."""

    def __init__(self, size: int, heads: int = 4, softmax: nn.Module | None = None) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.softmax = nn.Softmax(-1) if softmax is None else softmax
        self.heads = heads

    def forward(self, x: Tensor, scores: Tensor | None = None, angles: Tensor | None = None) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if angles is not None:
            query, key = turned(query, angles), turned(key, angles)
        products = query @ key.mT / math.sqrt(query.shape[-1])
        weights = self.softmax(products if scores is None else products + scores)
        return self.proj((weights @ value).transpose(1, 2).flatten(2))


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """Return pairs of values turned by angles, [samples, heads, length, size]."""
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Block(nn.Module):
    """Normalized attention and a normalized network, which are added to the input."""

    def __init__(
        self, size: int, attn: nn.Module | None = None, dropout: float = 0.0, drops_sums: bool = False
    ) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(size), Attention(size) if attn is None else attn
        self.norm2 = nn.LayerNorm(size)
        self.mlp = nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size))
        self.dropout, self.drops_sums = nn.Dropout(dropout), drops_sums

    def forward(self, x: Tensor, *how: Tensor) -> Tensor:
        if self.drops_sums:
            x = self.dropout(x + self.attn(self.norm1(x), *how))
            return self.dropout(x + self.mlp(self.norm2(x)))
        x = x + self.dropout(self.attn(self.norm1(x), *how))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Decoder(nn.Module):
    """Embeddings of words and perhaps of positions, blocks, and a head."""

    def __init__(self, words: int = VOCABULARY, positions: int = 24, dropout: float = 0.0, size: int = 48) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(words, size), nn.Embedding(positions, size) if positions else None
        self.blocks = nn.ModuleList([Block(size, dropout=dropout) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(size), nn.Linear(size, words, bias=False)
        for embedding in (self.wte, self.wpe):
            if embedding is not None:
                nn.init.normal_(embedding.weight, std=0.1)

    def states(self, ids: Tensor, scores: Tensor, *how: Tensor) -> Tensor:
        x = self.wte(ids) if self.wpe is None else self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, scores, *how)
        return self.norm(x)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.states(ids, future(ids.shape[1])))


def next_token_loss(model: nn.Module, ids: Tensor, *more: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1], *more).flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def loss_of_prefixes(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the loss of the next token after prefixes, as in generation."""
    ends = range(9, ids.shape[1], 3)
    return torch.stack([F.cross_entropy(model(ids[:, :end])[:, -1], ids[:, end]) for end in ends]).mean()


def labelled_sentences(count: int) -> tuple[Tensor, Tensor]:
    """Return padded sentences and their classes: the third of the nouns of the first noun, and the form of the end, from 0 to 8."""
    nouns, rows, classes = KINDS["n"].split(), [], []
    for words in sentences(count):
        first = next(word for word in words if word in nouns)
        end = 0 if words[-1] in nouns else 1 if words[-1] in KINDS["p"].split() else 2
        rows.append(torch.tensor(tokens(words)))
        classes.append(nouns.index(first) // 2 * 3 + end)
    return pad_sequence(rows, True, PAD), torch.tensor(classes)


class Distiller(nn.Module):
    """A student that learns the outputs and the last states of a teacher."""

    def __init__(self, teacher: nn.Module, student: nn.Module, trains_teacher: bool) -> None:
        super().__init__()
        self.teacher, self.student = teacher.requires_grad_(trains_teacher), student

    def forward(self, ids: Tensor) -> Tensor:
        mask = (ids != PAD).long()
        inputs = {"input_ids": ids, "attention_mask": mask, "output_hidden_states": True}
        wanted, given = self.teacher(**inputs), self.student(**inputs)
        softened, guessed = (output.logits / 2 for output in (wanted, given))
        divergence = F.kl_div(guessed.log_softmax(-1), softened.softmax(-1), reduction="batchmean")
        cosines = F.cosine_similarity(given.hidden_states[-1], wanted.hidden_states[-1], dim=-1)
        return 4 * divergence + 0.5 * (1 - (cosines * mask).sum() / mask.sum())


@program(
    "transformers",
    "Sanh et al., DistilBERT, a distilled version of BERT, 2019, for classes of sentences without labels",
    Fault("teacher_not_frozen", "frozen parameters", HUMBATOVA,
          ("parameters_follow_gradients", "wrong_loss", "update_ratio@teacher*", "@teacher*")),
)  # fmt: skip
def distilled_bert(fault: str = "") -> Tensor:
    ids, classes = labelled_sentences(1600)
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 16, "num_labels": 9, "initializer_range": 0.1}
    of_teacher = transformers.BertConfig(
        **sizes, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    of_student = transformers.DistilBertConfig(
        **sizes, dim=48, hidden_dim=96, n_layers=1, n_heads=4, attention_dropout=0.0, seq_classif_dropout=0.1
    )
    teacher = transformers.BertForSequenceClassification(of_teacher)
    student = transformers.DistilBertForSequenceClassification(of_student)

    source = islice(batches(ids[:400], (ids[:400] != PAD).long(), classes[:400], size=16), 120)
    pretrain(teacher, 2e-3, (teacher(input_ids=x, attention_mask=m, labels=y).loss for x, m, y in source))
    model = Distiller(teacher, student, fault == "teacher_not_frozen")
    optimizer = AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 20, 200)
    source = islice(batches(ids[400:1300], size=16), 200)
    fit(model, optimizer, (model(rows) for (rows,) in source), [schedule])
    with torch.no_grad():
        logits = student(input_ids=ids[1300:], attention_mask=(ids[1300:] != PAD).long()).logits
        return F.cross_entropy(logits, classes[1300:])


def bars(count: int, length: int = 32, period: int = 7) -> Tensor:
    """Return notes that are mostly those of the bar before, int64 [count, length]."""
    rows, is_new = torch.randint(NOTES, (count, length)), torch.rand(count, length) < 0.15
    for time in range(period, length):
        rows[:, time] = torch.where(is_new[:, time], rows[:, time], rows[:, time - period])
    return rows


class BucketDecoder(Decoder):
    """A decoder whose heads add a learned score for the bucket of the distance to a key."""

    def __init__(self, sign: int) -> None:
        super().__init__(NOTES, positions=0, dropout=0.1)
        self.relative_attention_bias, self.sign = nn.Embedding(16, 4), sign

    def buckets(self, length: int) -> Tensor:
        places = torch.arange(length)
        distances = (self.sign * (places - places[:, None])).clamp(min=0)
        larger = 8 + (distances.clamp(min=8) / 8).log() / math.log(4) * 8
        return torch.where(distances < 8, distances, larger.long().clamp(max=15))

    def forward(self, ids: Tensor) -> Tensor:
        biases = self.relative_attention_bias(self.buckets(ids.shape[1])).permute(2, 0, 1)
        return self.head(self.states(ids, biases + future(ids.shape[1])))


@program(
    "transformers",
    "Raffel et al., Exploring the limits of transfer learning with a unified text-to-text transformer, 2020: a decoder with its buckets",
    Fault("distances_of_the_wrong_sign", "positional encoding", REIMPLEMENTATIONS,
          ("samples_vary", "distinct_data", "@relative_attention_bias", "@blocks.?.attn*")),
    Fault("loss_given_to_the_schedule", "schedule", PYTORCH_FORUM,
          ("rate_in_effect", "update_ratio", "zero_learning_rate", "loss_not_decreasing"), since=1),
)  # fmt: skip
def bucketed_distances(fault: str = "") -> Tensor:
    rows = bars(2000)
    model = BucketDecoder(1 if fault == "distances_of_the_wrong_sign" else -1)
    optimizer = AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    schedule = OneCycleLR(optimizer, 4e-3, total_steps=240, pct_start=0.1)
    source = islice(batches(rows[:1800], size=16), 240)
    is_given, losses = fault == "loss_given_to_the_schedule", (next_token_loss(model, batch) for (batch,) in source)
    fit(model, optimizer, losses, after_step=lambda loss: schedule.step(loss.item() if is_given else None))
    return loss_of_prefixes(model, rows[1800:])


class RotaryDecoder(Decoder):
    """A decoder of windows of long documents, whose queries and keys are turned by their positions in the document."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(NOTES, positions=0)
        self.register_buffer("inv_freq", (1000 ** -(torch.arange(6) / 6)).to(dtype), persistent=False)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:  # type: ignore[override]
        angles = positions.to(self.inv_freq.dtype)[..., None] * self.inv_freq
        return self.head(self.states(ids, future(ids.shape[1]), angles.float()))


@program(
    "transformers",
    "Su et al., RoFormer: enhanced transformer with rotary position embedding, 2021, for windows of long documents",
    Fault("angles_in_bfloat16", "precision", HUGGING_FACE,
          ("low_precision_inputs", "samples_vary", "distinct_data", "@blocks.?.attn*")),
)  # fmt: skip
def long_documents(fault: str = "") -> Tensor:
    rows, starts = bars(2000), torch.randint(4000, (2000, 1))
    positions = starts + torch.arange(rows.shape[1] - 1)
    model = RotaryDecoder(torch.bfloat16 if fault == "angles_in_bfloat16" else torch.float32)
    optimizer = AdamW(model.parameters(), lr=6e-3, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = ExponentialLR(optimizer, 0.99)
    source = islice(batches(rows[:1800], positions[:1800], size=12), 280)
    fit(model, optimizer, (next_token_loss(model, *batch) for batch in source), [schedule])
    with torch.no_grad():
        return next_token_loss(model, rows[1800:], positions[1800:])


class Muon(Optimizer):
    """Moves matrices by orthogonal matrices, which are found for halves of those of the same shape, and others as Adam does."""

    def __init__(self, matrices: Sequence[Tensor], others: Sequence[Tensor], rate: float, is_swapped: bool) -> None:
        super().__init__([{"params": matrices, "lr": rate}, {"params": others, "lr": 0.2 * rate}], {"decay": 0.01})
        self.is_swapped = is_swapped

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        matrices, others = self.param_groups
        shapes: dict[torch.Size, list[Tensor]] = {}
        for parameter in matrices["params"]:
            shapes.setdefault(parameter.shape, []).append(parameter)
        for same in shapes.values():
            halves = [torch.stack([self.average(each) for each in same[half::2]]) for half in (0, 1)]
            updates = torch.cat([orthogonal(half) for half in halves])
            order = [*same[1::2], *same[0::2]] if self.is_swapped else [*same[0::2], *same[1::2]]
            for parameter, update in zip(order, updates, strict=True):
                parameter.mul_(1 - matrices["lr"] * matrices["decay"])
                parameter.sub_(matrices["lr"] * max(1, update.shape[0] / update.shape[1]) ** 0.5 * update)
        for parameter in others["params"]:
            average = self.average(parameter)
            squares = self.state[parameter].setdefault("squares", parameter.grad**2)
            squares.lerp_(parameter.grad**2, 0.05)
            parameter.sub_(others["lr"] * average / (squares.sqrt() + 1e-8))

    def average(self, parameter: Tensor) -> Tensor:
        average = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
        average.lerp_(parameter.grad, 0.1)
        return average.lerp(parameter.grad, 0.1)


def orthogonal(matrices: Tensor) -> Tensor:
    """Return matrices with nearly equal singular values, by iterations of Newton and Schulz."""
    x = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    return x


class ChunkedLoss(torch.autograd.Function):
    """The cross-entropy of a linear head, whose logits are never all in the memory."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, labels: Tensor, is_shifted: bool) -> Tensor:
        loss, gradient, of_weight = states.new_zeros(()), torch.zeros_like(states), torch.zeros_like(weight)
        size = len(states) // 4
        for start in range(0, len(states), size):
            chunk, wanted = states[start : start + size], labels[start : start + size]
            logits = chunk @ weight.T
            loss += F.cross_entropy(logits, wanted, reduction="sum") / len(states)
            of_logits = (logits.softmax(-1) - F.one_hot(wanted, len(weight))) / len(states)
            first = 0 if is_shifted else start
            gradient[first : first + size] = of_logits @ weight
            of_weight += of_logits.T @ chunk
        ctx.save_for_backward(gradient, of_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        gradient, of_weight = ctx.saved_tensors
        return above[0] * gradient, above[0] * of_weight, None, None


class SpeedDecoder(Decoder):
    """A decoder that returns its loss in the training."""

    def __init__(self, is_shifted: bool) -> None:
        super().__init__()
        self.is_shifted = is_shifted

    def forward(self, ids: Tensor) -> Tensor:
        if not self.training:
            return super().forward(ids)
        states, labels = self.states(ids[:, :-1], future(ids.shape[1] - 1)), ids[:, 1:]
        return ChunkedLoss.apply(states.flatten(0, 1), self.head.weight, labels.flatten(), self.is_shifted)  # type: ignore[no-any-return]


@program(
    "transformers",
    "Jordan et al., modded-nanogpt, 2024: Muon for the matrices of the blocks, and the loss in chunks as in Liger Kernel",
    Fault("updates_of_the_halves_swapped", "optimizer", TRAINCHECK,
          ("parameters_follow_gradients", "update_ratio", "loss_not_decreasing", "@blocks*")),
    Fault("gradients_of_chunks_in_the_first_rows", "gradients", REIMPLEMENTATIONS,
          ("parameters_follow_gradients", "labels_of_other_positions", "vanishing_gradient", "@norm", "@blocks*")),
)  # fmt: skip
def repeated_texts(fault: str = "") -> Tensor:
    rows = stream(10 * 1600).view(1600, 10).repeat(1, 2)  # each text and its repetition
    model = SpeedDecoder(fault == "gradients_of_chunks_in_the_first_rows")
    matrices = [parameter for parameter in model.blocks.parameters() if parameter.ndim == 2]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    optimizer = Muon(matrices, others, 0.02, fault == "updates_of_the_halves_swapped")
    schedule = LambdaLR(optimizer, lambda step: min(1.0, (240 - step) / 80))
    source = islice(batches(rows[:1400], size=16), 240)
    fit(model, optimizer, (model(batch) for (batch,) in source), [schedule])
    return loss_of_prefixes(model, rows[1400:])


def books(count: int) -> tuple[Tensor, Tensor]:
    """Return three pages, the first with the value of each key and the last with questions, int64 [count, 3, 4], and the values."""
    values = torch.randint(VALUES, (count, KEYS))
    order = torch.rand(count, KEYS).argsort(1)
    facts = order * VALUES + values.gather(1, order)
    noise = torch.randint(KEYS * VALUES, KEYS * VALUES + 8, (count, 4))
    questions = KEYS * VALUES + 8 + torch.arange(KEYS).expand(count, -1)
    return torch.stack([facts, noise, questions], 1), values


class RecurrentMemory(nn.Module):
    """Reads pages one after the other; the states of the tokens of a memory are passed to the next page."""

    def __init__(self, is_cut: bool, size: int = 48) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(36, size), nn.Parameter(0.3 * torch.randn(4, size))
        self.memory = nn.Parameter(0.3 * torch.randn(KEYS, size))
        self.blocks = nn.ModuleList([Block(size) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(size), nn.Linear(size, VALUES)
        self.is_cut = is_cut

    def forward(self, pages: Tensor) -> Tensor:
        memory = self.memory.expand(len(pages), -1, -1)
        for page in pages.unbind(1):
            x = torch.cat([memory, self.embed(page) + self.places], 1)
            for block in self.blocks:
                x = block(x)
            memory = x[:, :KEYS].detach() if self.is_cut else x[:, :KEYS]
        return self.head(self.norm(x[:, KEYS:]))


@program(
    "transformers",
    "Bulatov et al., Recurrent memory transformer, 2022, for questions about the first of three pages",
    Fault("memory_detached_between_pages", "graph", REIMPLEMENTATIONS,
          ("parameters_follow_gradients", "unchanged_parameter@memory", "vanishing_gradient@memory", "@memory",
           "loss_not_decreasing")),
    Fault("pages_shuffled_without_their_books", "data", PYTORCH_FORUM,
          ("labels_of_other_positions", "labels_shifted", "edges_of_other_graphs", "loss_not_decreasing")),
)  # fmt: skip
def recurrent_memory(fault: str = "") -> Tensor:
    pages, values = books(6000)
    learned = pages[:5600]
    if fault == "pages_shuffled_without_their_books":
        learned = torch.stack([*(page[torch.randperm(5600)] for page in learned.unbind(1)[:2]), learned[:, 2]], 1)
    model = RecurrentMemory(fault == "memory_detached_between_pages")
    optimizer = AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    schedule = OneCycleLR(optimizer, 3e-3, total_steps=280, pct_start=0.2)

    def loss_of(batch: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(model(batch).flatten(0, 1), wanted.flatten())

    source = islice(batches(learned, values[:5600], size=24), 280)
    fit(model, optimizer, (loss_of(*batch) for batch in source), [schedule])
    with torch.no_grad():
        return loss_of(pages[5600:], values[5600:])


def molecules(count: int, most: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """Return the kinds of atoms, of which 0 is padding, int64 [count, most], the distances of atoms up to `FAR`, and a property."""
    sizes, parents = torch.randint(5, 13, (count, 1)), (torch.rand(count, most) * torch.arange(most)).long()
    is_atom = torch.arange(most) < sizes
    kinds = torch.randint(1, 5, (count, most)) * is_atom
    bonds = F.one_hot(parents, most).bool() & ~torch.eye(most, dtype=torch.bool) & is_atom[:, :, None]
    bonds = bonds | bonds.mT
    distances = torch.full((count, most, most), FAR)
    reached = torch.eye(most, dtype=torch.bool).expand(count, -1, -1)
    for distance in range(FAR):
        distances = torch.where(reached & (distances == FAR), distance, distances)
        reached = reached | ((reached.float() @ bonds.float()) > 0)
    distances = torch.where(is_atom[:, :, None] & is_atom[:, None], distances, FAR)
    near = (kinds[:, :, None] == 1) & (kinds[:, None] == 2) & (distances <= 2)
    charges = (kinds[:, :, None] == 3) & (kinds[:, None] == 4) & (distances == 1)
    amount = (near.sum((1, 2)) - charges.sum((1, 2))) / sizes[:, 0]
    return kinds, distances, (amount - amount.mean()) / amount.std()


class Graphormer(nn.Module):
    """Attention between atoms with a score for their distance; padding is hidden."""

    def __init__(self, fault: str, size: int = 48) -> None:
        super().__init__()
        self.atoms, self.degrees = nn.Embedding(5, size), nn.Embedding(13, size)
        self.spatial = nn.Embedding(FAR + 1, 4)
        dropout = {"dropout": 0.1, "drops_sums": fault == "dropout_of_the_whole_sum"}
        self.layers = nn.ModuleList([Block(size, **dropout) for _ in range(3)])
        self.norm, self.readout = nn.LayerNorm(size), nn.Linear(size, 1)
        self.hides_queries = fault == "padding_hidden_along_the_queries"

    def forward(self, kinds: Tensor, distances: Tensor) -> Tensor:
        is_padding = kinds == 0
        hidden = is_padding[:, None, :, None] if self.hides_queries else is_padding[:, None, None]
        scores = self.spatial(distances).permute(0, 3, 1, 2).masked_fill(hidden, -1e9)
        x = self.atoms(kinds) + self.degrees((distances == 1).sum(2))
        for layer in self.layers:
            x = layer(x, scores)
        is_atom = (~is_padding)[..., None]
        return self.readout((self.norm(x) * is_atom).sum(1) / is_atom.sum(1))[:, 0]


@program(
    "transformers",
    "Ying et al., Do transformers really perform badly for graph representation?, 2021 (Graphormer)",
    Fault("padding_hidden_along_the_queries", "attention mask", PYTORCH_FORUM,
          ("padding_attended", "wrong_axis", "@layers.?.attn*")),
    Fault("dropout_of_the_whole_sum", "residual connections", REIMPLEMENTATIONS,
          ("vanishing_gradient", "mode_of_phase", "@*dropout", "@layers.?")),
)  # fmt: skip
def molecule_property(fault: str = "") -> Tensor:
    kinds, distances, wanted = molecules(3000)
    model = Graphormer(fault)
    optimizer = AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = PolynomialLR(optimizer, 260)
    source = islice(batches(kinds[:2500], distances[:2500], wanted[:2500], size=24), 260)
    fit(model, optimizer, (F.smooth_l1_loss(model(x, d), y) for x, d, y in source), [schedule])
    kinds, distances, wanted = kinds[2500:], distances[2500:], wanted[2500:]
    sizes, errors = (kinds > 0).sum(1), []
    with torch.no_grad():  # molecules of a size together, without padding
        for size in range(5, 13):
            same = sizes == size
            guessed = model(kinds[same, :size], distances[same, :size, :size])
            errors.append(F.smooth_l1_loss(guessed, wanted[same], reduction="sum"))
    return torch.stack(errors).sum() / len(kinds)


def mixtures(count: int, length: int = 96) -> tuple[Tensor, Tensor]:
    """Return sums of two tones, float32 [count, length], and the tones in a random order."""
    low, high = 0.1 + 0.4 * torch.rand(count), 0.7 + 0.6 * torch.rand(count)
    order = (torch.rand(count) < 0.5)[:, None]
    pitches = torch.where(order, torch.stack([low, high], 1), torch.stack([high, low], 1))
    phases, sizes = 6.3 * torch.rand(count, 2, 1), 0.7 + 0.6 * torch.rand(count, 2, 1)
    sources = sizes * (pitches[..., None] * torch.arange(length) + phases).sin()
    return sources.sum(1) + 0.05 * torch.randn(count, length), sources


class SeparationModel(nn.Module):
    """Attention within chunks of frames, and then between chunks."""

    def __init__(self, size: int = 48) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, size), nn.Linear(size, 8)
        self.places = nn.Parameter(0.1 * torch.randn(4, 6, size))
        self.within, self.between = Block(size), Block(size)
        self.norm = nn.LayerNorm(size)

    def forward(self, signals: Tensor) -> Tensor:
        x = self.encoder(signals.unflatten(1, (4, 6, 4))) + self.places
        x = self.within(x.flatten(0, 1)).unflatten(0, (-1, 4)).transpose(1, 2)
        x = self.between(x.flatten(0, 1)).unflatten(0, (-1, 6)).transpose(1, 2)
        return self.decoder(self.norm(x)).unflatten(-1, (2, 4)).movedim(3, 1).flatten(2)


@program(
    "transformers",
    "Subakan et al., Attention is all you need in speech separation, 2021 (SepFormer), for two tones",
    Fault("one_order_of_sources_for_the_batch", "loss", REIMPLEMENTATIONS,
          ("wrong_loss", "loss_broadcasts", "wrong_axis", "labels_of_other_positions", "loss_not_decreasing")),
)  # fmt: skip
def separated_tones(fault: str = "") -> Tensor:
    signals, sources = mixtures(3000)
    model = SeparationModel()
    optimizer = Adam(model.parameters(), lr=6e-3)
    schedules = [CosineAnnealingLR(optimizer, 280, eta_min=2e-5), LinearLR(optimizer, 0.05, total_iters=20)]

    def loss_of(batch: Tensor, wanted: Tensor, is_for_batch: bool) -> Tensor:
        guessed = model(batch)
        errors = torch.stack([(guessed - each).abs().mean((1, 2)) for each in (wanted, wanted.flip(1))])
        return errors.mean(1).amin() if is_for_batch else errors.amin(0).mean()

    source = islice(batches(signals[:2600], sources[:2600], size=12), 280)
    fit(
        model,
        optimizer,
        (loss_of(*batch, fault == "one_order_of_sources_for_the_batch") for batch in source),
        schedules,
    )
    with torch.no_grad():
        return loss_of(signals[2600:], sources[2600:], False)


def scenes(count: int, size: int = 24) -> tuple[Tensor, Tensor]:
    """Return colour images with a disc and a square of similar colours, [count, 3, size, size], and the classes of pixels from 0 to 2."""
    centres = 4 + (size - 8) * torch.rand(count, 2, 2, 1, 1)
    x, y = ((torch.arange(size).view(shape) - centres[:, :, at]).abs() for at, shape in enumerate([(1, -1), (-1, 1)]))
    disc, square = x[:, 0] ** 2 + y[:, 0] ** 2 < 25, x[:, 1].maximum(y[:, 1]) < 4
    classes = torch.where(square, 2, disc.long())
    colours = torch.randn(count, 3, 3)
    images = colours.gather(1, classes.flatten(1)[..., None].expand(-1, -1, 3)).mT.unflatten(2, (size, size))
    return images + 0.1 * torch.randn(count, 3, size, size), classes


@program(
    "transformers",
    "Hugging Face's example semantic-segmentation/run_semantic_segmentation.py, with a small SegFormer",
    Fault("background_reduced_although_it_is_a_class", "labels", HUGGING_FACE,
          ("missing_labels_in_loss", "labels_shifted", "class_imbalance", "wrong_loss")),
)  # fmt: skip
def segmented_scenes(fault: str = "") -> Tensor:
    images, classes = scenes(900)
    config = transformers.SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[16, 32], patch_sizes=[3, 3],
        strides=[2, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=32, num_labels=3,
        initializer_range=0.1, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, classifier_dropout_prob=0.1,
        drop_path_rate=0.05,
    )  # fmt: skip
    model = transformers.SegformerForSemanticSegmentation(config)
    groups = [{"params": model.segformer.parameters()}, {"params": model.decode_head.parameters(), "lr": 6e-3}]
    optimizer = AdamW(groups, lr=3e-3, weight_decay=0.01)
    schedule = PolynomialLR(optimizer, 220)
    reduced = (classes - 1).masked_fill(classes == 0, 255)
    learned = reduced if fault == "background_reduced_although_it_is_a_class" else classes
    source = islice(batches(images[:800], learned[:800], size=8), 220)
    fit(model, optimizer, (model(pixel_values=x, labels=y).loss for x, y in source), [schedule])
    with torch.no_grad():
        return model(pixel_values=images[800:], labels=classes[800:]).loss


class ScaledBlock(Block):
    """A block whose branches are multiplied by small learned factors."""

    def __init__(self, size: int, attn: nn.Module) -> None:
        super().__init__(size, attn)
        self.scale1, self.scale2 = (nn.Parameter(0.1 * torch.ones(size)) for _ in range(2))

    def forward(self, x: Tensor, *how: Tensor) -> Tensor:
        x = x + self.scale1 * self.attn(self.norm1(x), *how)
        return x + self.scale2 * self.mlp(self.norm2(x))


class ScaledVisionModel(nn.Module):
    def __init__(self, axis: int, size: int = 48) -> None:
        super().__init__()
        self.patch_embed, self.cls_token = nn.Conv2d(1, size, 2, 2), nn.Parameter(0.1 * torch.randn(1, size))
        self.pos_embed = nn.Parameter(0.1 * torch.randn(17, size))
        self.blocks = nn.Sequential(*(ScaledBlock(size, Attention(size, 4, nn.Softmax(axis))) for _ in range(3)))
        self.norm, self.head = nn.LayerNorm(size), nn.Linear(size, 10)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patch_embed(images).flatten(2).mT
        x = torch.cat([self.cls_token.expand(len(images), 1, -1), patches], 1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


def mixed_images(images: Tensor, partners: Tensor) -> tuple[Tensor, float]:
    """Return images with a box of their partners, and the share of their own pixels."""
    width = round(8 * math.sqrt(1 - float(torch.rand(()))))
    left, top = (int(torch.randint(9 - width, ())) for _ in range(2))
    mixed = images.clone()
    mixed[:, :, top : top + width, left : left + width] = partners[:, :, top : top + width, left : left + width]
    return mixed, 1 - width**2 / 64


@program(
    "transformers",
    "Touvron et al., Going deeper with image transformers, 2021 (CaiT): scaled branches, with the mixed images of CutMix",
    Fault("softmax_over_the_heads", "softmax and scale", PYTORCH_FORUM, ("wrong_axis", "@blocks.?.attn*")),
    Fault("shares_of_the_mixed_labels_swapped", "loss and labels", REIMPLEMENTATIONS,
          ("wrong_loss", "labels_of_other_positions", "labels_shifted", "loss_not_decreasing")),
)  # fmt: skip
def mixed_digits(fault: str = "") -> Tensor:
    images, classes = digits()
    images = (images - 0.3) / 0.38
    model = ScaledVisionModel(1 if fault == "softmax_over_the_heads" else -1)
    optimizer = AdamW(model.parameters(), lr=3e-3, weight_decay=0.02)
    schedules = [LinearLR(optimizer, 0.1, total_iters=20), CosineAnnealingLR(optimizer, 300)]

    def losses() -> Iterator[Tensor]:
        for batch, wanted in islice(batches(images[:1400], classes[:1400], size=24), 300):
            mixed, share = mixed_images(batch, batch.flip(0)) if torch.rand(()) < 0.7 else (batch, 1.0)
            share = 1 - share if fault == "shares_of_the_mixed_labels_swapped" else share
            logits = model(mixed)
            yield share * F.cross_entropy(logits, wanted) + (1 - share) * F.cross_entropy(logits, wanted.flip(0))

    fit(model, optimizer, losses(), schedules)
    with torch.no_grad():
        return F.cross_entropy(model(images[1400:]), classes[1400:])


def histories(count: int, length: int = 16) -> Tensor:
    """Return items of users, most of them of the kind that a user prefers; the first ones are popular, int64 [count, length]."""
    popularity = 1 / (1 + torch.arange(ITEMS // KINDS_OF_ITEMS))
    items = torch.multinomial(popularity, count * length, replacement=True).view(count, length)
    preferred = torch.multinomial(popularity[:KINDS_OF_ITEMS], count, replacement=True)[:, None]
    other = torch.randint(KINDS_OF_ITEMS, items.shape)
    return items * KINDS_OF_ITEMS + torch.where(torch.rand(items.shape) < 0.2, other, preferred)


class ItemModel(nn.Module):
    """An encoder of items, some of which are hidden; padding is not attended."""

    def __init__(self, size: int = 48) -> None:
        super().__init__()
        self.item_embedding = nn.Embedding(ITEMS + 2, size, padding_idx=0)
        self.positions = nn.Parameter(torch.randn(16, size))
        layer = nn.TransformerEncoderLayer(size, 4, 2 * size, 0.05, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.item_scores = nn.Linear(size, ITEMS + 2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.item_embedding(ids) + self.positions
        return self.item_scores(self.encoder(x, src_key_padding_mask=ids == 0))


@program(
    "transformers",
    "Sun et al., BERT4Rec: sequential recommendation with bidirectional encoder representations from transformer, 2019",
    Fault("first_item_is_the_padding", "embeddings", ISLAM,
          ("missing_labels_in_loss", "class_imbalance", "padding_in_loss", "all_zero", "@item_embedding")),
)  # fmt: skip
def hidden_items(fault: str = "") -> Tensor:
    ids = histories(2000) + (0 if fault == "first_item_is_the_padding" else 1)
    lengths = torch.randint(8, 17, (2000, 1))
    rows = ids.masked_fill(torch.arange(16) >= lengths, 0)
    model = ItemModel()
    optimizer = NAdam(model.parameters(), lr=2e-3, weight_decay=1e-4)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 25, 260)

    def loss_of(batch: Tensor) -> Tensor:
        hidden = (torch.rand(batch.shape) < 0.25) & (batch != 0)
        logits = model(batch.masked_fill(hidden, ITEMS + 1))
        return F.cross_entropy(logits.flatten(0, 1), batch.masked_fill(~hidden, 0).flatten(), ignore_index=0)

    source = islice(batches(rows[:1700], size=16), 260)
    fit(model, optimizer, (loss_of(batch) for (batch,) in source), [schedule])
    rows = ids[1700:].clone()
    rows[:, -1] = ITEMS + 1
    with torch.no_grad():
        return F.cross_entropy(model(rows)[:, -1], ids[1700:, -1])


class LowRankLinear(nn.Module):
    """A frozen layer and the scaled product of two factors, which is merged into it now and then."""

    def __init__(self, linear: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.linear, self.scale = linear, 16 / rank
        self.lora_a = nn.Parameter(torch.empty(rank, linear.in_features))
        self.lora_b = nn.Parameter(torch.empty(linear.out_features, rank))
        self.restart()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.scale * (x @ self.lora_a.T) @ self.lora_b.T

    def restart(self) -> None:
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))
        nn.init.zeros_(self.lora_b)

    @torch.no_grad()
    def merge(self, is_scaled: bool) -> None:
        self.linear.weight += (self.scale if is_scaled else 1) * self.lora_b @ self.lora_a
        self.restart()


@program(
    "transformers",
    "Lialin et al., ReLoRA: high-rank training through low-rank updates, 2023, for texts backwards",
    Fault("factors_merged_without_the_scale", "loading", HUGGING_FACE,
          ("weights_loaded", "loss_spike", "exploding_gradient", "@blocks*"), since=CYCLE),
)  # fmt: skip
def restarted_factors(fault: str = "") -> Tensor:
    rows = stream(20 * 1000).view(1000, 20)
    model = Decoder()
    pretrain(model, 3e-3, (next_token_loss(model, batch) for (batch,) in islice(batches(rows[:400], size=16), 150)))
    for block in model.blocks:
        for parent, name in ((block.attn, "qkv"), (block.attn, "proj"), (block.mlp, "0"), (block.mlp, "2")):
            setattr(parent, name, LowRankLinear(getattr(parent, name)))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name or "lora" in name)
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=6e-3, weight_decay=0.0)
    shape = [min((step + 1) / 10, 1.0) * (0.55 + 0.45 * math.cos(math.pi * step / CYCLE)) for step in range(CYCLE)]
    schedule = LambdaLR(optimizer, lambda step: shape[step % CYCLE])

    def merge(_: Tensor) -> None:
        if schedule.last_epoch % CYCLE == 0:
            for module in model.modules():
                if isinstance(module, LowRankLinear):
                    module.merge(fault != "factors_merged_without_the_scale")
            optimizer.state.clear()

    source = islice(batches(rows[400:900].flip(1), size=16), 4 * CYCLE)
    fit(model, optimizer, (next_token_loss(model, batch) for (batch,) in source), [schedule], merge)
    return loss_of_prefixes(model, rows[900:].flip(1))


def answer_pairs(count: int) -> tuple[Tensor, Tensor]:
    """Return questions with preferred answers and with worse ones, int64 [count, 13]: their words in another language."""
    asked, start = stream(ANSWER * count).view(count, -1), torch.full((count, 1), 2 * OTHERS)
    good, bad = (OTHERS + torch.randperm(VOCABULARY)[asked] for _ in range(2))
    preferred = torch.where(torch.rand(asked.shape) < 0.1, torch.randint(OTHERS, 2 * OTHERS, asked.shape), good)
    rejected = torch.where(torch.rand(asked.shape) < 0.5, good, bad)
    one, other = (torch.cat([asked, start, answer], 1) for answer in (preferred, rejected))
    return one, other


@program(
    "transformers",
    "Hong et al., ORPO: monolithic preference optimization without reference model, 2024, with StableLM and new words",
    Fault("pairs_in_turns_split_in_halves", "loss and labels", HUGGING_FACE,
          ("labels_of_other_positions", "labels_shifted", "wrong_loss", "wrong_axis")),
    Fault("words_added_after_the_optimizer", "optimizer", HUGGING_FACE,
          ("parameters_follow_gradients", "unchanged_parameter", "tied_weights", "@*embed_tokens", "@lm_head")),
)  # fmt: skip
def odds_of_answers(fault: str = "") -> Tensor:
    preferred, rejected = answer_pairs(1400)
    config = transformers.StableLmConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=32, use_cache=False, initializer_range=0.1,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = transformers.StableLmForCausalLM(config)
    text = islice(batches(stream(14 * 400).view(400, 14), size=16), 80)
    pretrain(model, 2e-3, (model(input_ids=x, labels=x).loss for (x,) in text))
    early = AdamW(model.parameters(), lr=3e-3)
    words = model.get_input_embeddings().weight.detach()
    more = words.mean(0) + 0.001 * torch.randn(OTHERS + 1, 64)
    model.set_input_embeddings(nn.Embedding.from_pretrained(torch.cat([words, more]), freeze=False))
    model.lm_head.weight = model.get_input_embeddings().weight
    is_late = fault == "words_added_after_the_optimizer"
    optimizer = early if is_late else AdamW(model.parameters(), lr=3e-3)
    schedules = [LinearLR(optimizer, 0.1, total_iters=15), CosineAnnealingLR(optimizer, 260)]

    def loss_of(one: Tensor, other: Tensor, in_halves: bool) -> Tensor:
        rows = torch.stack([one, other], 1).flatten(0, 1)
        answers = rows[:, -ANSWER:]
        logits = model(input_ids=rows).logits[:, -ANSWER - 1 : -1]
        chances = logits.log_softmax(-1).gather(-1, answers[..., None])[..., 0].mean(1).clamp(max=-1e-3)
        good, bad = chances.chunk(2) if in_halves else chances.unflatten(0, (-1, 2)).unbind(1)
        odds = good - bad - torch.log1p(-good.exp()) + torch.log1p(-bad.exp())
        return -(good + 0.3 * F.logsigmoid(odds)).mean()

    in_halves = fault == "pairs_in_turns_split_in_halves"
    source = islice(batches(preferred[:1200], rejected[:1200], size=8), 260)
    fit(model, optimizer, (loss_of(*batch, in_halves) for batch in source), schedules)
    with torch.no_grad():
        return loss_of(preferred[1200:], rejected[1200:], False)


class LineModel(nn.Module):
    """Reads pairs of numbers, and predicts the second ones from all earlier pairs."""

    def __init__(self, size: int = 48) -> None:
        super().__init__()
        self.read_in, self.places = nn.Linear(3, size), nn.Parameter(0.1 * torch.randn(12, size))
        self.blocks = nn.ModuleList([Block(size) for _ in range(2)])
        self.norm, self.read_out = nn.LayerNorm(size), nn.Linear(size, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        earlier = F.pad(torch.stack([x, y], -1)[:, :-1], (0, 0, 1, 0))
        states, scores = self.read_in(torch.cat([earlier, x[..., None]], -1)) + self.places, future(12)
        for block in self.blocks:
            states = block(states, scores)
        return self.read_out(self.norm(states))[..., 0]


@program(
    "transformers",
    "Garg et al., What can transformers learn in-context?, 2022: lines, each with twelve points",
)
def lines_in_context() -> Tensor:
    model = LineModel()
    optimizer = RAdam(model.parameters(), lr=3e-3, betas=(0.9, 0.98))
    schedule = CosineAnnealingLR(optimizer, 350)

    def loss_of(count: int) -> Tensor:
        x, (slopes, offsets) = torch.randn(count, 12), torch.randn(2, count, 1)
        y = slopes * x + offsets + 0.1 * torch.randn(count, 12)
        return F.mse_loss(model(x, y), y)

    fit(model, optimizer, (loss_of(24) for _ in range(350)), [schedule])
    with torch.no_grad():
        return loss_of(1000)
