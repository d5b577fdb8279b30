"""Transformers of more kinds, and their faults: answers, windows, units, languages, codes, pairs, adapters, fields, streams, scenes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
import transformers
from data import KINDS, MASK, PAD, VOCABULARY, batches, digits, padded, tokens
from registry import Fault, attach, program
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.optim import Adam, AdamW, NAdam, Optimizer, RAdam
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LinearLR, OneCycleLR, PolynomialLR

ATTENTION = "Jahan et al., Taxonomy of faults in attention-based neural networks, 2025"
HUGGING_FACE = "Issues of Hugging Face's libraries, 2020 to 2026"
HUMBATOVA = "Humbatova et al., Taxonomy of real faults in deep learning systems, 2020"
INSTRUCTIONS = "Issues of libraries for instruction tuning, 2023 to 2026"
REIMPLEMENTATIONS = "Issues of repositories that implement publications again, 2019 to 2026"
START, END, REPLY, FIRST = 0, 1, 2, 3  # the tokens of rows of numbers: their parts, and the first number
MODULUS = 24
CHUNK, KEPT = 8, 6  # the tokens of a part of a stream, and those whose keys and values are kept
CODES = 12  # the values of a code of music
END_OF_TEXT = 7  # the last of the words with which the text tower begins
ROOM = 13  # the tokens of the longest rows with answers that fit in the memory of a small accelerator
LATITUDES = torch.linspace(-78.75, 78.75, 8)


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


def before(length: int) -> Tensor:
    """Return which keys are not after a query, bool [length, length]."""
    return torch.ones(length, length, dtype=torch.bool).tril()


class Attention(nn.Module):
    """Attention of several heads."""

    def __init__(self, size: int, heads: int = 4) -> None:
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(size, 3 * size, bias=False), nn.Linear(size, size), heads

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(self.mix(query, key, value, mask).transpose(1, 2).flatten(2))

    def mix(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


class Layer(nn.Module):
    """Attention and a network, each with a normalized input and a shortcut."""

    def __init__(self, size: int, attention: nn.Module | None = None) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(size), Attention(size) if attention is None else attention
        self.mlp_norm = nn.LayerNorm(size)
        self.mlp = nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), mask)
        return x + self.mlp(self.mlp_norm(x))


class Network(nn.Module):
    """Embeddings of tokens and positions, layers, and a head; a decoder if it does not look ahead."""

    def __init__(self, words: int, layers: Iterable[nn.Module], looks_ahead: bool = False, size: int = 48) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(words, size), nn.Embedding(40, size)
        self.layers, self.looks_ahead = nn.ModuleList(layers), looks_ahead
        self.norm, self.head = nn.LayerNorm(size), nn.Linear(size, words, bias=False)
        for embedding in (self.words, self.positions):
            nn.init.normal_(embedding.weight, std=0.2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.positions.weight[: ids.shape[1]]
        mask = None if self.looks_ahead else before(ids.shape[1])
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.norm(x))


def loss_of_next(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def loss_of_starts(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the loss of the next token after the starts of rows, as in generation."""
    lengths = range(8, ids.shape[1], 3)
    return torch.stack([F.cross_entropy(model(ids[:, :n])[:, -1], ids[:, n]) for n in lengths]).mean()


def chains(count: int, tables: Tensor, kinds: Tensor, length: int = 17, lag: int = 1) -> Tensor:
    """Return rows of numbers, each of which mostly follows from one before in the table of a kind, int64 [count, length].

    The first number is the kind.
    """
    rows = torch.randint(MODULUS, (count, length))
    for time in range(1 + lag, length):
        follows = torch.rand(count) < 0.93
        rows[:, time] = torch.where(follows, tables[kinds, rows[:, time - lag]], rows[:, time])
    rows[:, 0] = kinds
    return rows + FIRST


def echoes(count: int, distances: tuple[int, int], length: int) -> Tensor:
    """Return rows in which most numbers repeat those at one of two distances, int64 [count, length]."""
    chosen = torch.tensor(distances)[torch.randint(2, (count,))]
    rows, is_new = torch.randint(MODULUS, (count, length)), torch.rand(count, length) < 0.06
    for time in range(max(distances), length):
        rows[:, time] = torch.where(is_new[:, time], rows[:, time], rows[torch.arange(count), time - chosen])
    return rows + FIRST


def dialogues(count: int, tables: Tensor, fault: str = "") -> tuple[Tensor, Tensor]:
    """Return padded rows of a task, numbers and their answer, and the labels of the answers, int64 [count, tokens]."""
    rows, labels = [], []
    for task in torch.randint(len(tables), (count,)).tolist():
        numbers = torch.randint(MODULUS, (int(torch.randint(4, 10, ())),))
        prompt = torch.cat([torch.tensor([START, FIRST + task]), FIRST + numbers, torch.tensor([REPLY])])
        answer = torch.cat([FIRST + tables[task, numbers[:3]], torch.tensor([END])])
        row = torch.cat([prompt, answer])
        asked = len(prompt) + (fault == "first_token_of_the_answer_not_learned")
        label = torch.cat([torch.full((asked,), -100), row[asked:]])
        longest = ROOM if fault == "rows_cut_behind_long_prompts" else len(row)
        rows.append(row[:longest])
        labels.append(label[:longest])
    return pad_sequence(rows, True, END), pad_sequence(labels, True, -100)


@program(
    "transformers",
    "LMSYS FastChat and LLaMA-Factory, tuning on answers alone, with GPTBigCode",
    Fault("first_token_of_the_answer_not_learned", "loss and labels", INSTRUCTIONS,
          ("missing_labels_in_loss", "labels_shifted", "wrong_loss", "labels_of_other_positions")),
    Fault("rows_cut_behind_long_prompts", "data", INSTRUCTIONS,
          ("missing_labels_in_loss", "distinct_data", "samples_vary", "class_imbalance")),
)  # fmt: skip
def answered_prompts(fault: str = "") -> Tensor:
    tables = torch.stack([torch.randperm(MODULUS) for _ in range(2)])
    ids, labels = dialogues(3200, tables, fault)
    config = transformers.GPTBigCodeConfig(
        vocab_size=FIRST + MODULUS, n_positions=16, n_embd=48, n_layer=2, n_head=4, initializer_range=0.1,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=START, eos_token_id=END,
    )  # fmt: skip
    model = transformers.GPTBigCodeForCausalLM(config)
    optimizer = AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, 20, 320)
    source = islice(batches(ids, labels, size=24), 320)
    fit(model, optimizer, (model(input_ids=rows, labels=wanted).loss for rows, wanted in source), schedule)
    ids, labels = dialogues(400, tables)
    with torch.no_grad():
        return model(input_ids=ids, labels=labels).loss


class SandwichLayer(nn.Module):
    """Attention in a window of the past, or in all of it, and a gated network; inputs and outputs are normalized."""

    def __init__(self, size: int, window: int, fault: str) -> None:
        super().__init__()
        self.input_norm, self.post_attention_norm, self.pre_mlp_norm, self.post_mlp_norm = (
            nn.RMSNorm(size) for _ in range(4)
        )
        self.attention = CappedAttention(size)
        self.gate, self.up, self.down = (
            nn.Linear(a, b, bias=False) for a, b in ((size, 2 * size), (size, 2 * size), (2 * size, size))
        )
        self.window, self.fault = window, fault

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        lowest, is_outside = torch.finfo(x.dtype).min, before(x.shape[1]).tril(-self.window)
        added = torch.zeros(mask.shape).masked_fill(~mask, lowest)
        if self.fault == "mask_multiplied_by_the_window" and self.window:
            added = added * is_outside
        elif self.window:
            added = added.masked_fill(is_outside, lowest)
        normalized = self.input_norm(x)
        if self.fault == "shortcut_of_the_normalized_input":
            x = normalized
        x = x + self.post_attention_norm(self.attention(normalized, added))
        hidden = self.pre_mlp_norm(x)
        return x + self.post_mlp_norm(self.down(F.gelu(self.gate(hidden)) * self.up(hidden)))


class CappedAttention(Attention):
    """Attention whose scores are at most 20; a mask is added to them."""

    def mix(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        scores = 20 * (query @ key.mT / math.sqrt(query.shape[-1]) / 20).tanh()
        return (scores if mask is None else scores + mask).softmax(-1) @ value


@program(
    "transformers",
    "Gemma Team, Gemma 2: improving open language models at a practical size, 2024: windows in every second layer",
    Fault("mask_multiplied_by_the_window", "attention mask", HUGGING_FACE, ("looks_ahead", "@layers*attention*")),
    Fault("shortcut_of_the_normalized_input", "residual connections", REIMPLEMENTATIONS,
          ("vanishing_gradient", "tensor_variance@layers*", "@layers*", "poor_initialization")),
)  # fmt: skip
def windowed_decoder(fault: str = "") -> Tensor:
    rows = echoes(3000, (3, 7), 21)
    model = Network(FIRST + MODULUS, [SandwichLayer(48, 5 * (i % 2 == 0), fault) for i in range(3)])
    optimizer = AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.05)
    schedule = OneCycleLR(optimizer, 4e-3, total_steps=300, pct_start=0.1)
    source = islice(batches(rows[:2700], size=16), 300)
    fit(model, optimizer, (loss_of_next(model, batch) for (batch,) in source), schedule)
    return loss_of_starts(model, rows[2700:])


def battles(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return units, float32 [count, 12, 4], which of them live, and the direction in which an expert goes, float32 [count, 2].

    A dead unit keeps its last place and strength. The expert goes away from strong enemies and towards friends.
    """
    places, strength, lives = torch.randn(count, 12, 2), torch.rand(count, 12, 1), torch.rand(count, 12) < 0.6
    side = torch.where(torch.rand(count, 12, 1) < 0.5, -1.0, 1.0)
    pulls = side * strength * places / (0.5 + places.square().sum(2, keepdim=True))
    return torch.cat([places, strength, side], 2), lives, F.normalize((pulls * lives[..., None]).sum(1), dim=1)


class UnitAttention(Attention):
    """Attention to the units that live."""

    def __init__(self, size: int, fault: str) -> None:
        super().__init__(size)
        self.fault = fault

    def mix(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        scores = query @ key.mT / math.sqrt(query.shape[-1])
        if mask is not None:
            hidden = scores.masked_fill(~mask[:, None, None], -1e9)
            scores = scores if self.fault == "result_of_masked_fill_dropped" else hidden
        return scores.softmax(-1) @ value


class Commander(nn.Module):
    """Attends with a token of its own to the units, and returns a direction."""

    def __init__(self, fault: str, size: int = 48) -> None:
        super().__init__()
        self.units, self.own = nn.Linear(4, size), nn.Parameter(0.3 * torch.randn(size))
        self.layers = nn.ModuleList([Layer(size, UnitAttention(size, fault)) for _ in range(2)])
        self.norm, self.direction = nn.LayerNorm(size), nn.Linear(size, 2)

    def forward(self, units: Tensor, lives: Tensor) -> Tensor:
        x = torch.cat([self.own.expand(len(units), 1, -1), self.units(units)], 1)
        mask = F.pad(lives, (1, 0), value=True)
        for layer in self.layers:
            x = layer(x, mask)
        return self.direction(self.norm(x[:, 0]))


@program(
    "transformers",
    "Vinyals et al., Grandmaster level in StarCraft II, 2019: the encoder of units, for the imitation of an expert",
    Fault("result_of_masked_fill_dropped", "attention mask", REIMPLEMENTATIONS,
          ("padding_attended", "@layers*attention*", "samples_vary")),
)  # fmt: skip
def commanded_units(fault: str = "") -> Tensor:
    battle = battles(6000)
    model = Commander(fault)
    optimizer = NAdam(model.parameters(), lr=2e-3)
    schedule = ExponentialLR(optimizer, 0.993)

    def loss_of(units: Tensor, lives: Tensor, direction: Tensor) -> Tensor:
        return 1 - F.cosine_similarity(model(units, lives), direction).mean()

    source = islice(batches(*(part[:5500] for part in battle), size=48), 300)
    fit(model, optimizer, (loss_of(*batch) for batch in source), schedule)
    with torch.no_grad():
        return loss_of(*(part[5500:] for part in battle))


@program(
    "transformers",
    "Lin et al., Few-shot learning with multilingual generative language models, 2022 (XGLM): languages of different sizes",
    Fault("exponent_of_the_shares_inverted", "data", HUMBATOVA,
          ("class_imbalance", "samples_vary", "distinct_data", "input_drift")),
)  # fmt: skip
def sampled_languages(fault: str = "") -> Tensor:
    sizes = torch.tensor([1800, 900, 450, 220, 110])
    tables = torch.stack([torch.randperm(MODULUS) for _ in sizes])
    rows = chains(int(sizes.sum()), tables, torch.arange(len(sizes)).repeat_interleave(sizes))
    alpha = 1 / 0.3 if fault == "exponent_of_the_shares_inverted" else 0.3
    shares = (sizes / sizes.sum()) ** alpha
    weights = (shares / sizes).repeat_interleave(sizes)
    config = transformers.XGLMConfig(
        vocab_size=FIRST + MODULUS, max_position_embeddings=32, d_model=48, ffn_dim=96, num_layers=2,
        attention_heads=4, init_std=0.1, dropout=0.0, attention_dropout=0.0, layerdrop=0.0, scale_embedding=False,
        bos_token_id=START, eos_token_id=END, pad_token_id=REPLY, decoder_start_token_id=END,
    )  # fmt: skip
    model = transformers.XGLMForCausalLM(config)
    optimizer = AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 20, 320)
    source = (rows[torch.multinomial(weights, 24)] for _ in range(320))
    fit(model, optimizer, (model(input_ids=batch, labels=batch).loss for batch in source), schedule)
    test = chains(400, tables, torch.arange(400) % len(sizes))
    with torch.no_grad():
        return model(input_ids=test, labels=test).loss


class ScheduleFree(Optimizer):
    """Adam whose parameters are between fast weights and their average."""

    def __init__(self, parameters: Iterable[Tensor], lr: float, warm_up: int = 20) -> None:
        super().__init__(parameters, {"lr": lr})
        self.warm_up, self.count, self.total = warm_up, 0, 0.0
        for p in self.param_groups[0]["params"]:
            self.state[p] = {"fast": p.detach().clone(), "square": torch.zeros_like(p)}

    @torch.no_grad()
    def take_average(self) -> None:
        for p, state in self.state.items():
            p.lerp_(state["fast"], 1 - 1 / 0.9)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        self.count += 1
        rate = self.param_groups[0]["lr"] * min(1.0, self.count / self.warm_up)
        self.total += rate**2
        share = rate**2 / self.total
        for p, state in self.state.items():
            state["square"].mul_(0.98).addcmul_(p.grad, p.grad, value=0.02)
            update = p.grad / ((state["square"] / (1 - 0.98**self.count)).sqrt() + 1e-8)
            p.lerp_(state["fast"], share).add_(update, alpha=rate * (0.9 * (1 - share) - 1))
            state["fast"].sub_(update, alpha=rate)
        return loss


@program(
    "transformers",
    "torchtune, full_finetune_single_device.py with accumulated gradients, and Defazio et al., The road less scheduled, 2024",
    Fault("mean_of_the_means_of_micro_batches", "gradients", INSTRUCTIONS,
          ("accumulation_divides", "loss_scale", "gradients_zeroed", "wrong_loss")),
)  # fmt: skip
def grouped_lengths(fault: str = "") -> Tensor:
    tables = torch.stack([torch.randperm(MODULUS) for _ in range(6)])
    rows, short = chains(2400, tables, torch.arange(2400) % 6, 25), chains(4800, tables, torch.arange(4800) % 6, 3)
    model = Network(FIRST + MODULUS, [Layer(48) for _ in range(2)])
    optimizer = ScheduleFree(model.parameters(), lr=5e-3)
    sources = [batches(rows[:2000], size=6), *(batches(short, size=2) for _ in range(5))]
    model.train()
    with attach(model, optimizer) as probe:
        for _ in range(280):
            parts = [next(source)[0] for source in sources]
            tokens_of_step = sum(part[:, 1:].numel() for part in parts)
            optimizer.zero_grad()
            total = 0.0
            for number, part in enumerate(parts):
                share = part[:, 1:].numel() / tokens_of_step
                if fault == "mean_of_the_means_of_micro_batches":
                    share = 1 / len(parts)
                loss = loss_of_next(model, part) * share
                loss.backward()
                total += loss.item()
                if number < len(parts) - 1:
                    probe.end_micro_step()
            optimizer.step()
            probe.end_step(loss=total)
    model.eval()
    optimizer.take_average()
    return loss_of_starts(model, rows[2000:])


@program(
    "transformers",
    "Nie et al., Large language diffusion models, 2025 (LLaDA): each text with its own share of masked tokens",
    Fault("text_given_instead_of_the_masked_one", "data", REIMPLEMENTATIONS,
          ("labels_in_the_inputs", "looks_ahead", "@words")),
)  # fmt: skip
def masked_diffusion(fault: str = "") -> Tensor:
    tables = torch.stack([torch.randperm(MODULUS) for _ in range(2)])
    rows = chains(3000, tables, torch.arange(3000) % 2)
    model = Network(FIRST + MODULUS, [Layer(48) for _ in range(2)], looks_ahead=True)
    optimizer = AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.95), weight_decay=0.05)
    schedule = CosineAnnealingLR(optimizer, 320, 2e-4)

    def loss_of(batch: Tensor, fault: str = "") -> Tensor:
        share = 0.15 + 0.85 * torch.rand(len(batch), 1)
        is_masked = torch.rand(batch.shape) < share
        masked = batch.masked_fill(is_masked, REPLY)
        logits = model(batch if fault == "text_given_instead_of_the_masked_one" else masked)
        losses = F.cross_entropy(logits.mT, batch, reduction="none")
        return (losses * is_masked / share).mean()

    fit(model, optimizer, (loss_of(batch, fault) for (batch,) in islice(batches(rows[:2700], size=24), 320)), schedule)
    with torch.no_grad():
        return loss_of(rows[2700:].repeat(4, 1))


def songs(count: int, length: int = 14) -> Tensor:
    """Return three codes for each time; the second and third follow from the first and the style, int64 [count, 3, length]."""
    style, jumps = torch.randint(3, (count, 1)), torch.tensor([1, 4, 9])[torch.randint(3, (count, length))]
    first = (torch.randint(CODES, (count, 1)) + jumps.cumsum(1)) % CODES
    second = (5 * first + style + (torch.rand(count, length) < 0.05)) % CODES
    return torch.stack([first, second, (first + 7 * second + style) % CODES], 1)


def delayed(codes: Tensor, lead: int = 1) -> Tensor:
    """Return codes each of which is a time later than the one before, [songs, times, codes]; `CODES` without one."""
    rows = [F.pad(codes[:, k], (lead + k, 2 - k), value=CODES) for k in range(3)]
    return torch.stack(rows, 2)


class MusicModel(nn.Module):
    """A decoder that reads the sum of the codes of a time, with a head for each code."""

    def __init__(self, size: int = 48) -> None:
        super().__init__()
        self.codes = nn.ModuleList([nn.Embedding(CODES + 1, size) for _ in range(3)])
        self.positions = nn.Parameter(0.2 * torch.randn(20, size))
        self.layers = nn.ModuleList([Layer(size) for _ in range(2)])
        self.norm, self.heads = nn.LayerNorm(size), nn.ModuleList([nn.Linear(size, CODES) for _ in range(3)])

    def forward(self, codes: Tensor) -> Tensor:
        """Return logits [songs, times, codes, values]."""
        x = sum((embed(codes[..., k]) for k, embed in enumerate(self.codes)), self.positions[: codes.shape[1]])
        for layer in self.layers:
            x = layer(x, before(codes.shape[1]))
        return torch.stack([head(self.norm(x)) for head in self.heads], 2)


@program(
    "transformers",
    "Copet et al., Simple and controllable music generation, 2023 (MusicGen): codes with delays",
    Fault("delays_only_in_the_inputs", "labels", REIMPLEMENTATIONS,
          ("labels_shifted", "labels_of_other_positions", "wrong_loss", "loss_not_decreasing")),
)  # fmt: skip
def codes_of_music(fault: str = "") -> Tensor:
    codes = songs(3000)
    model = MusicModel()
    optimizer = AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    schedule = LinearLR(optimizer, 1.0, 0.05, total_iters=300)

    def loss_of(batch: Tensor, fault: str = "") -> Tensor:
        wanted = delayed(batch, 0)
        if fault == "delays_only_in_the_inputs":
            wanted = F.pad(batch, (0, 2), value=CODES).mT
        logits = model(delayed(batch)[:, :-1])
        return F.cross_entropy(logits.flatten(0, 2), wanted.flatten(), ignore_index=CODES)

    fit(model, optimizer, (loss_of(batch, fault) for (batch,) in islice(batches(codes[:2700], size=24), 300)), schedule)
    with torch.no_grad():
        return loss_of(codes[2700:])


def pairs_of_digits(count: int) -> tuple[Tensor, Tensor]:
    """Return images of two digits, float32 [count, 8, 16], and captions, int64 [count, 7].

    The words for digits were added behind the first words, the last of which is the end.
    """
    images, classes = digits()
    chosen = torch.randint(len(images), (count, 2))
    rows = []
    for one, other in (END_OF_TEXT + 1 + classes[chosen]).tolist():
        start = torch.randint(1, 5, (int(torch.randint(1, 4, ())),)).tolist()
        rows.append(torch.tensor([*start, one, 5, other, END_OF_TEXT]))
    images = ((images - images.mean()) / images.std())[chosen, 0]
    return images.permute(0, 2, 1, 3).flatten(2), pad_sequence(rows, True, 0)


class Tower(nn.Module):
    """Vectors of the patches of images."""

    def __init__(self, places: int, pixels: int, size: int = 48) -> None:
        super().__init__()
        self.patches, self.positions = nn.Linear(pixels, size), nn.Parameter(0.3 * torch.randn(places, size))
        self.layers, self.norm = nn.ModuleList([Layer(size) for _ in range(2)]), nn.LayerNorm(size)

    def forward(self, patches: Tensor) -> Tensor:
        x = self.patches(patches) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class TwoTowers(nn.Module):
    """Vectors of images and of captions, and the scale and the bias of their products."""

    def __init__(self, fault: str, size: int = 48) -> None:
        super().__init__()
        self.image_tower, self.text_norm = Tower(8, 16), nn.LayerNorm(size)
        self.words, self.positions = nn.Embedding(END_OF_TEXT + 11, size), nn.Parameter(0.3 * torch.randn(8, size))
        self.text_layers = nn.ModuleList([Layer(size) for _ in range(2)])
        self.image_projection, self.text_projection = nn.Linear(size, 32), nn.Linear(size, 32)
        self.scale, self.bias = nn.Parameter(torch.tensor(2.3)), nn.Parameter(torch.tensor(-5.0))
        self.fault = fault

    def forward(self, images: Tensor, captions: Tensor) -> Tensor:
        """Return logits [images, captions]."""
        x = self.image_tower(images.unfold(1, 4, 4).unfold(2, 4, 4).reshape(len(images), 8, 16))
        seen = F.normalize(self.image_projection(x.mean(1)), dim=1)
        x = self.words(captions) + self.positions[: captions.shape[1]]
        for layer in self.text_layers:
            x = layer(x, before(captions.shape[1]))
        last = (captions == END_OF_TEXT).int().argmax(1)
        if self.fault == "end_sought_as_the_largest_id":
            last = captions.argmax(1)
        read = F.normalize(self.text_projection(self.text_norm(x)[torch.arange(len(x)), last]), dim=1)
        return seen @ read.T * self.scale.exp() + self.bias


@program(
    "transformers",
    "Zhai et al., Sigmoid loss for language image pre-training, 2023 (SigLIP), with CLIP's text tower and new words",
    Fault("end_sought_as_the_largest_id", "output head", HUGGING_FACE,
          ("labels_of_other_positions", "samples_vary", "distinct_data", "@text_projection", "@text_norm")),
    Fault("other_pairs_labelled_zero", "labels", REIMPLEMENTATIONS,
          ("wrong_range_of_loss", "wrong_loss", "class_imbalance", "vanishing_gradient")),
)  # fmt: skip
def paired_captions(fault: str = "") -> Tensor:
    images, captions = pairs_of_digits(4000)
    model = TwoTowers(fault)
    optimizer = AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = OneCycleLR(optimizer, 2e-3, total_steps=320, pct_start=0.1)

    def loss_of(images: Tensor, captions: Tensor) -> Tensor:
        labels = torch.eye(len(images))
        if fault != "other_pairs_labelled_zero":
            labels = 2 * labels - 1
        return -F.logsigmoid(labels * model(images, captions)).sum(1).mean()

    source = islice(batches(images[:3600], captions[:3600], size=32), 320)
    fit(model, optimizer, (loss_of(*batch) for batch in source), schedule)
    with torch.no_grad():
        parts = zip(images[3600:].split(20), captions[3600:].split(20), strict=True)
        return torch.stack([F.cross_entropy(model(*part), torch.arange(20)) for part in parts]).mean()


class Adapted(nn.Module):
    """A frozen layer, to which the product of two small layers is added."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Linear(base.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2 * self.lora_b(self.lora_a(x))


@program(
    "transformers",
    "Hugging Face PEFT, examples/sequence_classification with LoRA, with ERNIE",
    Fault("head_not_among_the_modules_to_save", "frozen parameters", HUGGING_FACE,
          ("unchanged_parameter", "parameters_follow_gradients", "@classifier", "loss_not_decreasing")),
)  # fmt: skip
def adapted_classifier(fault: str = "") -> Tensor:
    ids = padded(2600)
    nouns = torch.tensor(sorted(tokens(KINDS["n"].split())))
    classes = torch.searchsorted(nouns, ids.gather(1, torch.isin(ids, nouns).int().argmax(1, keepdim=True))[:, 0])
    config = transformers.ErnieConfig(
        vocab_size=VOCABULARY, hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=16, initializer_range=0.1, pad_token_id=PAD, num_labels=6,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    whole = transformers.ErnieForMaskedLM(config)

    def loss_of_words(batch: Tensor) -> Tensor:
        is_hidden = (torch.rand(batch.shape) < 0.2) & (batch != PAD)
        labels = batch.masked_fill(~is_hidden, -100)
        return whole(batch.masked_fill(is_hidden, MASK), attention_mask=(batch != PAD).long(), labels=labels).loss

    pretrain(whole, (loss_of_words(batch) for (batch,) in islice(batches(ids[:1000], size=16), 120)))
    model = transformers.ErnieForSequenceClassification(config)
    model.load_state_dict(whole.state_dict(), strict=False)
    model.requires_grad_(False)
    for layer in model.ernie.encoder.layer:
        layer.attention.self.query = Adapted(layer.attention.self.query)
        layer.attention.self.value = Adapted(layer.attention.self.value)
        layer.output.dense = Adapted(layer.output.dense)
    if fault != "head_not_among_the_modules_to_save":
        model.classifier.requires_grad_(True)
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3, weight_decay=0.01)
    schedule = PolynomialLR(optimizer, 280)

    def loss_of(batch: Tensor, labels: Tensor) -> Tensor:
        return model(batch, attention_mask=(batch != PAD).long(), labels=labels).loss

    source = islice(batches(ids[1000:2300], classes[1000:2300], size=24), 260)
    fit(model, optimizer, (loss_of(*batch) for batch in source), schedule)
    with torch.no_grad():
        return loss_of(ids[2300:], classes[2300:])


def weather(count: int) -> Tensor:
    """Return three times of fields that winds carry around the earth, float32 [count, 3, 8, 16]."""
    waves, phases = torch.randint(1, 4, (count, 1, 4, 1, 1)), 6.3 * torch.rand(count, 1, 4, 1, 1)
    heights, tilts = torch.randn(2, count, 1, 4, 1, 1) / 2
    times, rows, columns = torch.arange(3)[:, None, None, None], torch.arange(8)[:, None], torch.arange(16)
    winds = 1.5 * (2 * LATITUDES.deg2rad()[:, None]).sin()
    angles = math.pi / 8 * waves * (columns - winds * times) + phases + tilts * rows
    return (heights * angles.sin()).sum(2)


class WindowAttention(Attention):
    """Attention in windows of four by four points, which may be shifted."""

    def __init__(self, size: int, shift: int, fault: str) -> None:
        super().__init__(size)
        self.places, self.shift, self.fault = nn.Parameter(0.2 * torch.randn(16, size)), shift, fault

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x.roll((-self.shift, -self.shift), (1, 2)).unflatten(1, (2, 4)).unflatten(3, (4, 4)).transpose(2, 3)
        x = super().forward(x.flatten(3, 4).flatten(0, 2) + self.places, mask).view(x.shape)
        back = -self.shift if self.fault == "windows_shifted_on_instead_of_back" else self.shift
        return x.transpose(2, 3).flatten(3, 4).flatten(1, 2).roll((back, back), (1, 2))


class WeatherModel(nn.Module):
    """Predicts how fields change from two times."""

    def __init__(self, fault: str, size: int = 48) -> None:
        super().__init__()
        self.embed, self.rows = nn.Linear(2, size), nn.Parameter(0.3 * torch.randn(8, 1, size))
        self.layers = nn.ModuleList([Layer(size, WindowAttention(size, 2 * i, fault)) for i in range(2)])
        self.norm, self.change = nn.LayerNorm(size), nn.Linear(size, 1)

    def forward(self, fields: Tensor) -> Tensor:
        x = self.embed(fields.movedim(1, -1)) + self.rows
        for layer in self.layers:
            x = layer(x)
        return fields[:, 1] + self.change(self.norm(x))[..., 0]


@program(
    "transformers",
    "Bi et al., Accurate medium-range global weather forecasting with 3D neural networks, 2023 (Pangu-Weather), on a plane",
    Fault("windows_shifted_on_instead_of_back", "tensor layout", REIMPLEMENTATIONS,
          ("labels_of_other_positions", "@layers*attention*", "loss_not_decreasing")),
    Fault("cosines_of_degrees", "loss", HUMBATOVA,
          ("wrong_loss", "wrong_range_of_loss", "loss_scale", "exploding_gradient", "exploding_activation", "loss_spike")),
)  # fmt: skip
def weather_fields(fault: str = "") -> Tensor:
    fields = weather(1500)
    model = WeatherModel(fault)
    optimizer = Adam(model.parameters(), lr=3e-3)
    schedule = CosineAnnealingLR(optimizer, 260, 1e-4)

    def loss_of(batch: Tensor, latitudes: Tensor) -> Tensor:
        weights = latitudes.cos() / latitudes.cos().mean()
        return ((model(batch[:, :2]) - batch[:, 2]) ** 2 * weights[:, None]).mean()

    latitudes = LATITUDES if fault == "cosines_of_degrees" else LATITUDES.deg2rad()
    source = islice(batches(fields[:1350], size=12), 260)
    fit(model, optimizer, (loss_of(batch, latitudes) for (batch,) in source), schedule)
    with torch.no_grad():
        return loss_of(fields[1350:], LATITUDES.deg2rad())


def rotated(x: Tensor, start: int) -> Tensor:
    """Rotate pairs of features of queries or keys, [samples, heads, tokens, features], by their positions."""
    rates = 100 ** -torch.linspace(0, 1, x.shape[-1] // 2)
    angles = (start + torch.arange(x.shape[2]))[:, None] * rates
    one, other = x.chunk(2, -1)
    return torch.cat([one * angles.cos() - other * angles.sin(), one * angles.sin() + other * angles.cos()], -1)


class StreamAttention(Attention):
    """Attention to the tokens of a part and to the last ones before, whose keys and values are kept."""

    def __init__(self, size: int, fault: str) -> None:
        super().__init__(size)
        self.fault = fault
        self.reset()

    def reset(self) -> None:
        self.seen = 0
        self.cache: tuple[Tensor, Tensor] | None = None

    def mix(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        query, key, length = rotated(query, self.seen), rotated(key, self.seen), query.shape[2]
        self.seen += length
        if self.cache is not None:
            key, value = (torch.cat(both, 2) for both in zip(self.cache, (key, value), strict=True))
        kept = slice(None, KEPT) if self.fault == "oldest_keys_kept" else slice(-KEPT, None)
        self.cache = key[:, :, kept], value[:, :, kept]
        return super().mix(query, key, value, before(key.shape[2])[-length:] if mask is None else mask)


class StreamModel(nn.Module):
    """A decoder that reads a stream part by part."""

    def __init__(self, fault: str = "", size: int = 48) -> None:
        super().__init__()
        self.words = nn.Embedding(FIRST + MODULUS, size)
        self.layers = nn.ModuleList([Layer(size, StreamAttention(size, fault)) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(size), nn.Linear(size, FIRST + MODULUS, bias=False)
        nn.init.normal_(self.words.weight, std=0.3)

    def forward(self, ids: Tensor) -> Tensor:
        for module in self.layers.modules():
            if isinstance(module, StreamAttention):
                module.reset()
        parts = []
        for part in ids.split(CHUNK, 1):
            x = self.words(part)
            for layer in self.layers:
                x = layer(x)
            parts.append(self.head(self.norm(x)))
        return torch.cat(parts, 1)


@program(
    "transformers",
    "Hugging Face transformers, the conversion of a checkpoint with GPT-2's layout: a new head, for streams that are read in parts",
    Fault("oldest_keys_kept", "memory of keys and values", ATTENTION,
          ("samples_vary", "labels_of_other_positions", "@layers*attention*", "loss_not_decreasing")),
    Fault("square_matrices_not_transposed", "loading", HUGGING_FACE,
          ("weights_loaded", "@layers*attention*", "loss_not_decreasing", "poor_initialization")),
)  # fmt: skip
def streamed_numbers(fault: str = "") -> Tensor:
    tables, renamed = torch.stack([torch.randperm(MODULUS) for _ in range(3)]), torch.randperm(MODULUS)
    short = chains(2400, tables, torch.arange(2400) % 3, 2 * CHUNK + 1, lag=3)
    rows = chains(1800, tables, torch.arange(1800) % 3, 4 * CHUNK + 1, lag=3)
    model = StreamModel()
    pretrain(model, (loss_of_next(model, batch) for (batch,) in islice(batches(short, size=24), 260)))
    saved = {name: weight.T if weight.dim() == 2 else weight for name, weight in model.layers.state_dict().items()}
    model.layers = StreamModel(fault).layers
    for name, parameter in model.layers.named_parameters():
        fits = fault == "square_matrices_not_transposed" and saved[name].shape == parameter.shape
        parameter.data.copy_(saved[name] if fits or parameter.dim() == 1 else saved[name].T)
    model.requires_grad_(False)
    model.head = nn.Linear(48, MODULUS)
    optimizer = RAdam(model.head.parameters(), lr=2e-2)
    schedule = LinearLR(optimizer, 1.0, 0.1, total_iters=200)

    def loss_of(batch: Tensor) -> Tensor:
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), renamed[batch[:, 1:] - FIRST].flatten())

    source = islice(batches(rows[:1500], size=10), 200)
    fit(model, optimizer, (loss_of(batch) for (batch,) in source), schedule)
    with torch.no_grad():
        return loss_of(rows[1500:])


def scenes(count: int) -> tuple[Tensor, Tensor]:
    """Return images with one to four digits in quarters, float32 [count, 16, 16], and captions, int64 [count, 10].

    Captions are the quarters and digits in order between the start and the end.
    """
    images, classes = digits()
    quarters, chosen = torch.rand(count, 4) < torch.rand(count, 1), torch.randint(len(images), (count, 4))
    quarters[torch.arange(count), torch.randint(4, (count,))] = True
    rows = []
    for is_there, row in zip(quarters.tolist(), classes[chosen].tolist(), strict=True):
        named = [token for at in range(4) if is_there[at] for token in (FIRST + at, FIRST + 4 + row[at])]
        rows.append(torch.tensor([START, *named, END]))
    parts = images[chosen, 0] * quarters[..., None, None]
    pictures = parts.view(count, 2, 2, 8, 8).transpose(2, 3).reshape(count, 16, 16)
    return (pictures - pictures.mean()) / pictures.std(), pad_sequence(rows, True, REPLY)


class SceneModel(nn.Module):
    """A tower for images, a projector, and a decoder of images and captions."""

    def __init__(self, fault: str, size: int = 48) -> None:
        super().__init__()
        self.tower, self.projector = (
            Tower(4, 64),
            nn.Sequential(nn.Linear(size, size), nn.GELU(), nn.Linear(size, size)),
        )
        self.words, self.positions = nn.Embedding(FIRST + 14, size), nn.Parameter(0.3 * torch.randn(20, size))
        self.layers = nn.ModuleList([Layer(size) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(size), nn.Linear(size, FIRST + 14)
        self.fault = fault

    def forward(self, images: Tensor, captions: Tensor) -> Tensor:
        """Return logits [images, tokens of captions, words]."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.fault != "tower_without_gradient"):
            seen = self.tower(images.unfold(1, 8, 8).unfold(2, 8, 8).reshape(len(images), 4, 64))
        x = torch.cat([self.projector(seen), self.words(captions)], 1)
        is_there = [torch.ones(len(images), 4, dtype=torch.bool), captions != REPLY]
        if self.fault == "mask_of_the_caption_first":
            is_there.reverse()
        mask = torch.cat(is_there, 1)[:, None, None] & before(x.shape[1]) | torch.eye(x.shape[1], dtype=torch.bool)
        x = x + self.positions[: x.shape[1]]
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.norm(x[:, 4:]))


@program(
    "transformers",
    "Liu et al., Visual instruction tuning, 2023 (LLaVA), with a tower that is trained too, for scenes of digits",
    Fault("tower_without_gradient", "graph", REIMPLEMENTATIONS,
          ("unchanged_parameter", "parameters_follow_gradients", "vanishing_gradient", "@tower*")),
    Fault("mask_of_the_caption_first", "attention mask", ATTENTION,
          ("padding_attended", "samples_vary", "@layers*attention*", "labels_of_other_positions")),
)  # fmt: skip
def described_scenes(fault: str = "") -> Tensor:
    images, captions = scenes(3600)
    model = SceneModel(fault)
    optimizer = AdamW(model.parameters(), lr=3e-3, weight_decay=0.02)
    schedule = OneCycleLR(optimizer, 3e-3, total_steps=340, pct_start=0.1)

    def loss_of(images: Tensor, captions: Tensor) -> Tensor:
        logits = model(images, captions[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), captions[:, 1:].flatten(), ignore_index=REPLY)

    source = islice(batches(images[:3300], captions[:3300], size=20), 340)
    fit(model, optimizer, (loss_of(*batch) for batch in source), schedule)
    images, captions = images[3300:], captions[3300:]
    lengths = (captions != REPLY).sum(1)
    with torch.no_grad():  # captions of the same length have no padding, as in generation
        parts = [(lengths == length, length) for length in lengths.unique().tolist()]
        return torch.stack([loss_of(images[which], captions[which, :length]) for which, length in parts]).mean()


class LatentAttention(Attention):
    """Attention whose keys and values come from a small vector of each token; one key of each token is rotated."""

    def __init__(self, size: int, latents: int = 16, turned: int = 8) -> None:
        super().__init__(size)
        self.kv_down, self.kv_norm = nn.Linear(size, latents + turned, bias=False), nn.RMSNorm(latents)
        self.kv_up = nn.Linear(latents, 2 * size, bias=False)
        self.qkv, self.sizes = nn.Linear(size, size + self.heads * turned, bias=False), [latents, turned]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        latent, turned = self.kv_down(x).split(self.sizes, -1)
        query = self.qkv(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        key, value = self.kv_up(self.kv_norm(latent)).unflatten(-1, (self.heads, -1)).transpose(1, 2).chunk(2, -1)
        query = torch.cat([query[..., : key.shape[-1]], rotated(query[..., key.shape[-1] :], 0)], -1)
        key = torch.cat([key, rotated(turned[:, None], 0).expand(-1, self.heads, -1, -1)], -1)
        return self.out(self.mix(query, key, value, mask).transpose(1, 2).flatten(2))


@program(
    "transformers",
    "DeepSeek-AI, DeepSeek-V2: a strong, economical and efficient mixture-of-experts language model, 2024: its attention",
)
def latent_keys() -> Tensor:
    rows = echoes(3000, (4, 7), 25)
    model = Network(FIRST + MODULUS, [Layer(48, LatentAttention(48)) for _ in range(2)])
    optimizer = AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.05)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, 30, 320)
    source = islice(batches(rows[:2700], size=16), 320)
    fit(model, optimizer, (loss_of_next(model, batch) for (batch,) in source), schedule)
    return loss_of_starts(model, rows[2700:])
