"""Transformers of answers, sounds, graphs, series, moves, genes, images and masks, with errors of their pipelines."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
import transformers
from data import PAD, VOCABULARY, batches, digits, padded
from registry import Fault, attach, in_two_processes, program
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, OneCycleLR

DEEP_CRIME = "Humbatova et al., DeepCrime: mutation testing of deep learning systems based on real faults, 2021"
EXAMPLES = "Issues of libraries for training and of examples at GitHub, 2018 to 2026"
HUGGING_FACE = "Issues of Hugging Face's libraries, 2020 to 2026"
PYTORCH_FORUM = "Questions at discuss.pytorch.org and Stack Overflow, 2018 to 2026"
REIMPLEMENTATIONS = "Issues of repositories that implement publications again, 2019 to 2026"
NUMBERS = 20


def fit(model: nn.Module, optimizer: Any, losses: Iterable[Tensor], schedule: Any = None) -> None:
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
    model.train()
    optimizer = Adam(model.parameters(), lr=3e-3)
    for loss in losses:
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()


def following(tables: Tensor, chosen: Tensor, length: int, lag: int = 1) -> Tensor:
    """Return rows of numbers, each of which mostly follows from an earlier one in the table of its row, int64 [rows, length]."""
    rows = torch.randint(NUMBERS, (len(chosen), length))
    for time in range(lag, length):
        follows = torch.rand(len(chosen)) < 0.94
        rows[:, time] = torch.where(follows, tables[chosen, rows[:, time - lag]], rows[:, time])
    return rows


def encoder_of(size: int, layers: int = 2, dropout: float = 0.0) -> nn.TransformerEncoder:
    """Return layers with a normalization before each branch and after the last one."""
    layer = nn.TransformerEncoderLayer(size, 4, 2 * size, dropout, "gelu", batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, layers, nn.LayerNorm(size), enable_nested_tensor=False)


def patches_of(images: Tensor, side: int) -> Tensor:
    """Return the pixels of square patches, row by row, float32 [samples, patches, pixels]."""
    return F.unfold(images, side, stride=side).mT


ASKED, ANSWERED, SAMPLES = 3, 5, 4  # the tokens of a question and of an answer, and the answers to each question


@program(
    "transformers",
    "TRL, RLOOTrainer, after Ahmadian et al., Back to basics: revisiting REINFORCE-style optimization, 2024, Qwen2 with a head in bfloat16",
    Fault("rewards_grouped_in_another_order", "labels", HUGGING_FACE,
          ("labels_of_other_positions", "wrong_axis", "wrong_loss", "samples_vary", "loss_not_decreasing")),
    Fault("log_probabilities_in_bfloat16", "precision", HUGGING_FACE,
          ("quantization_error", "low_precision_inputs", "underflow", "autocast_in_effect", "@lm_head")),
)  # fmt: skip
def left_out_baselines(fault: str = "") -> Tensor:
    tables = torch.stack([torch.randperm(NUMBERS) for _ in range(4)])
    rows = following(tables, torch.randint(4, (3000,)), ASKED + ANSWERED)
    config = transformers.Qwen2Config(
        vocab_size=NUMBERS, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, initializer_range=0.1, bos_token_id=None,
        eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config)
    texts = islice(batches(rows, size=32), 200)
    pretrain(model, (model(input_ids=batch, labels=batch).loss for (batch,) in texts))
    optimizer = AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    schedule = LinearLR(optimizer, 1.0, 0.1, total_iters=200)

    def answered(asked: Tensor) -> Tensor:
        for _ in range(ANSWERED):
            scores = model(input_ids=asked).logits[:, -1].float()
            asked = torch.cat([asked, scores.softmax(1).multinomial(1)], 1)
        return asked

    def rewards_of(rows: Tensor) -> Tensor:
        """Return the share of the tokens of an answer that have the remainder of the first token of the question."""
        return (rows[:, ASKED:] % 3 == rows[:, :1] % 3).float().mean(1)

    def log_probability(rows: Tensor) -> Tensor:
        states = model.model(input_ids=rows).last_hidden_state[:, ASKED - 1 : -1]
        with torch.autocast("cpu", torch.bfloat16):
            logits = model.lm_head(states)
        logits = logits if fault == "log_probabilities_in_bfloat16" else logits.float()
        return logits.log_softmax(-1).gather(-1, rows[:, ASKED:, None]).sum((1, 2))

    def losses() -> Iterator[Tensor]:
        for (asked,) in islice(batches(rows[:, :ASKED], size=8), 100):
            with torch.no_grad():
                if fault == "rewards_grouped_in_another_order":
                    answers = answered(asked.repeat(SAMPLES, 1))
                else:
                    answers = answered(asked.repeat_interleave(SAMPLES, 0))
                rewards = rewards_of(answers).view(-1, SAMPLES)
                others = (rewards.sum(1, keepdim=True) - rewards) / (SAMPLES - 1)
                advantages = (rewards - others).flatten()
                old = log_probability(answers)
            for _ in range(2):
                ratio = (log_probability(answers) - old).exp().float()
                yield -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()

    fit(model, optimizer, losses(), schedule)
    with torch.no_grad():
        return 1 - rewards_of(answered(rows[:800, :ASKED])).mean()


class MaskedStudent(nn.Module):
    """Encodes patches, some of which are replaced by one vector, and predicts states of a teacher."""

    def __init__(self, size: int = 48) -> None:
        super().__init__()
        self.patches, self.positions = nn.Linear(4, size), nn.Parameter(0.1 * torch.randn(16, size))
        self.hidden, self.head = nn.Parameter(0.1 * torch.randn(size)), nn.Linear(size, size)
        self.layers = nn.ModuleList(encoder_of(size, 3).layers)

    def forward(self, patches: Tensor, is_hidden: Tensor | None) -> list[Tensor]:
        """Return the states behind each layer, float32 [samples, patches, size]."""
        x = self.patches(patches)
        if is_hidden is not None:
            x = torch.where(is_hidden[..., None], self.hidden, x)
        x, states = x + self.positions, []
        for layer in self.layers:
            states.append(x := layer(x))
        return states


@program(
    "transformers",
    "Baevski et al., data2vec: a general framework for self-supervised learning in speech, vision and language, 2022, for digits",
    Fault("teacher_sees_the_masked_image", "data", REIMPLEMENTATIONS,
          ("distinct_data", "samples_vary", "labels_in_the_inputs", "input_drift", "wrong_loss", "@hidden")),
)  # fmt: skip
def states_of_an_average(fault: str = "") -> Tensor:
    images, classes = digits()
    order = torch.randperm(len(images))
    patches, classes = patches_of((images - images.mean()) / images.std(), 2)[order], classes[order]
    model = MaskedStudent()
    teacher = copy.deepcopy(model).requires_grad_(False)
    optimizer = AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = OneCycleLR(optimizer, 2e-3, total_steps=260, pct_start=0.1)

    def losses() -> Iterator[Tensor]:
        for step, (batch,) in enumerate(islice(batches(patches[:1400], size=24), 260)):
            is_hidden = torch.rand(batch.shape[:2]).argsort(1) < 9
            with torch.no_grad():
                seen = is_hidden if fault == "teacher_sees_the_masked_image" else None
                states = [F.layer_norm(state, state.shape[-1:]) for state in teacher(batch, seen)[-2:]]
                targets = torch.stack(states).mean(0)
            yield F.smooth_l1_loss(model.head(model(batch, is_hidden)[-1])[is_hidden], targets[is_hidden], beta=2.0)
            decay = min(0.99 + 0.009 * step / 200, 0.999)
            with torch.no_grad():
                for average, parameter in zip(teacher.parameters(), model.parameters(), strict=True):
                    average.lerp_(parameter, 1 - decay)

    fit(model, optimizer, losses(), schedule)
    with torch.no_grad():
        features = F.pad(model(patches, None)[-1].mean(1), (0, 1), value=1.0).double()
    wanted = F.one_hot(classes, 10).double()
    known = features[:1400]
    solved = torch.linalg.solve(known.mT @ known + 0.1 * torch.eye(known.shape[1]), known.mT @ wanted[:1400])
    return (features[1400:] @ solved - wanted[1400:]).square().sum(1).mean().float()


KINDS = 6  # the kinds of sounds


def recordings(count: int) -> tuple[Tensor, Tensor]:
    """Return logarithmic spectra, float32 [count, 1, 16, 32], and the kinds of sounds that they have, float32 [count, KINDS]."""
    band, time = torch.arange(16)[:, None], torch.arange(32)
    tags = (torch.rand(count, KINDS) < 0.3).float()
    spectra = 0.3 * torch.rand(count, 16, 32)
    for kind in range(KINDS):
        start, pitch = torch.randint(20, (count, 1, 1)), torch.randint(2, 8, (count, 1, 1))
        since = time - start
        rise = (0, 0.6, -0.4)[kind % 3]  # steady, rising and falling
        centre = pitch + rise * since + (4 if kind % 3 == 2 else 0)
        strength = (-(band - centre).square() / 2).exp() * ((since >= 0) & (since < (12 if kind < 3 else 6)))
        if kind > 2:
            strength = strength + 0.7 * (-(band - centre - 5).square() / 2).exp() * ((since >= 0) & (since < 6))
        spectra = spectra + tags[:, kind, None, None] * strength
    return spectra.add(0.05).log()[:, None], tags


class SpectrogramTransformer(nn.Module):
    """Tags sounds by the state of a token before the patches of their spectrum."""

    def __init__(self, size: int = 48) -> None:
        super().__init__()
        self.patches, self.token = nn.Conv2d(1, size, 4, 4), nn.Parameter(0.02 * torch.randn(1, 1, size))
        self.positions, self.encoder = nn.Parameter(0.1 * torch.randn(33, size)), encoder_of(size)
        self.head = nn.Linear(size, KINDS)

    def forward(self, spectra: Tensor) -> Tensor:
        x = self.patches(spectra).flatten(2).mT
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.encoder(x)[:, 0])


@program(
    "transformers",
    "Gong et al., AST: audio spectrogram transformer, 2021, with sounds that are mixed in pairs",
    Fault("mixed_sounds_keep_one_label", "labels", REIMPLEMENTATIONS,
          ("missing_labels_in_loss", "labels_of_other_positions", "wrong_loss", "class_imbalance")),
    Fault("debugging_subset_left", "data", DEEP_CRIME, ("overfit", "overtraining", "distinct_data"), since=6),
)  # fmt: skip
def tagged_sounds(fault: str = "") -> Tensor:
    spectra, tags = recordings(2600)
    spectra = (spectra - spectra[:2200].mean()) / spectra[:2200].std() / 2
    model = SpectrogramTransformer()
    optimizer = Adam(model.parameters(), lr=1.5e-3, betas=(0.95, 0.999), weight_decay=5e-7)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 20, 300)
    count = 96 if fault == "debugging_subset_left" else 2200

    def loss_of(batch: Tensor, wanted: Tensor) -> Tensor:
        if torch.rand(()) < 0.5:
            share = torch.distributions.Beta(10.0, 10.0).sample((len(batch), 1))
            batch = share[..., None, None] * batch + (1 - share[..., None, None]) * batch.roll(1, 0)
            if fault != "mixed_sounds_keep_one_label":
                wanted = share * wanted + (1 - share) * wanted.roll(1, 0)
        return F.binary_cross_entropy_with_logits(model(batch), wanted)

    source = islice(batches(spectra[:count], tags[:count], size=16), 300)
    fit(model, optimizer, (loss_of(*batch) for batch in source), schedule)
    with torch.no_grad():
        return F.binary_cross_entropy_with_logits(model(spectra[2200:]), tags[2200:])


def molecules(count: int, most: int = 14) -> tuple[Tensor, Tensor, Tensor]:
    """Return the kinds of nodes of graphs, from 1 to 5 with `PAD`, int64 [count, most], their edges, and the numbers to predict.

    The number depends on neighbours of the same kind, and on the nodes of the kind of the first node in the whole graph.
    """
    kinds, edges = torch.randint(1, 6, (count, most)), torch.zeros(count, most, most)
    is_node = torch.arange(most) < torch.randint(6, most + 1, (count, 1))
    kinds = kinds.masked_fill(~is_node, PAD)
    for node in range(1, most):
        before = (torch.rand(count) * node).long()
        edges[torch.arange(count), node, before] = 1.0
    ring = torch.rand(count, most, most) < 0.05
    edges = (edges + edges.mT + ring + ring.mT).clamp(max=1) * is_node[:, None] * is_node[..., None]
    edges = edges * (1 - torch.eye(most))
    alike = (kinds[:, None] == kinds[..., None]) & is_node[:, None]
    wanted = 0.4 * alike[:, 0].sum(1) + 0.25 * (edges * alike).sum((1, 2))
    return kinds, edges, wanted


class GlobalLayer(nn.Module):
    """Adds messages of neighbours to attention between all nodes of a graph."""

    def __init__(self, size: int, fault: str) -> None:
        super().__init__()
        self.message = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, size))
        self.attention = nn.MultiheadAttention(size, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(size, 2 * size), nn.ReLU(), nn.Linear(2 * size, size))
        self.norms, self.fault = nn.ModuleList([nn.LayerNorm(size) for _ in range(3)]), fault

    def forward(self, x: Tensor, edges: Tensor, is_node: Tensor) -> Tensor:
        near = self.norms[0](x + self.message(x + edges @ x))
        if self.fault == "attention_across_graphs":  # without the vector that names the graph of each node
            nodes = x[is_node][None]
            attended = torch.zeros_like(x).masked_scatter(is_node[..., None], self.attention(nodes, nodes, nodes)[0])
        else:
            attended = self.attention(x, x, x, key_padding_mask=~is_node)[0]
        x = near + self.norms[1](x + attended)
        return self.norms[2](x + self.mlp(x))


class GraphTransformer(nn.Module):
    """Predicts a number of each graph, with the probabilities that a random walk returns as positions."""

    def __init__(self, fault: str, size: int = 48) -> None:
        super().__init__()
        self.kinds, self.walks, self.first = nn.Embedding(6, size - 8), nn.Linear(4, 8), nn.Parameter(torch.randn(size))
        self.layers = nn.ModuleList([GlobalLayer(size, fault) for _ in range(2)])
        self.head = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, 1))

    def forward(self, kinds: Tensor, edges: Tensor) -> Tensor:
        is_node = kinds != PAD
        step = edges / edges.sum(2, keepdim=True).clamp(min=1)
        walks, returned = step, []
        for _ in range(4):
            walks = walks @ step
            returned.append(walks.diagonal(dim1=1, dim2=2))
        x = torch.cat([self.kinds(kinds), self.walks(torch.stack(returned, 2))], 2)
        x = torch.cat([x[:, :1] + self.first, x[:, 1:]], 1)
        for layer in self.layers:
            x = layer(x, edges, is_node)
        return self.head((x * is_node[..., None]).sum(1) / 8)[:, 0]


@program(
    "transformers",
    "PyTorch Geometric, graph_gps.py, after Rampasek et al., Recipe for a general, powerful, scalable graph transformer, 2022",
    Fault("attention_across_graphs", "attention mask", EXAMPLES,
          ("edges_of_other_graphs", "padding_attended", "samples_vary", "@layers*")),
)  # fmt: skip
def graphs_with_global_attention(fault: str = "") -> Tensor:
    kinds, edges, wanted = molecules(3400)
    wanted = (wanted - wanted[:3000].mean()) / wanted[:3000].std()
    model = GraphTransformer(fault)
    optimizer = AdamW(model.parameters(), lr=1.5e-3, weight_decay=1e-5)
    schedule = CosineAnnealingLR(optimizer, 300, 1e-5)
    source = islice(batches(kinds[:3000], edges[:3000], wanted[:3000], size=24), 300)
    fit(model, optimizer, (F.l1_loss(model(nodes, lines), target) for nodes, lines, target in source), schedule)
    with torch.no_grad():
        parts = zip(*(x[3000:].split(25) for x in (kinds, edges, wanted)), strict=True)
        return torch.stack([F.l1_loss(model(nodes, lines), target) for nodes, lines, target in parts]).mean()


LAGS, LONGEST = (1, 2, 3, 7, 14), 14  # days


def visitors(count: int, days: int = 46) -> Tensor:
    """Return numbers of visitors with a weekly rhythm, and a disturbance that lasts some days, float32 [count, days]."""
    level, week = torch.exp(torch.randn(count, 1)) * 30, 0.4 * torch.randn(count, 7)
    logarithm, disturbance = torch.zeros(count, days), torch.zeros(count)
    for day in range(days):
        disturbance = 0.7 * disturbance + 0.15 * torch.distributions.StudentT(4.0).sample((count,))
        logarithm[:, day] = week[:, day % 7] + disturbance
    return level * logarithm.exp()


class LaggedDecoder(nn.Module):
    """Forecasts the distribution of each value from earlier ones at some lags, with a Llama."""

    def __init__(self, size: int = 48) -> None:
        super().__init__()
        config = transformers.LlamaConfig(
            vocab_size=1, hidden_size=size, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=64, initializer_range=0.1, bos_token_id=None, eos_token_id=None, pad_token_id=None,
        )  # fmt: skip
        self.read, self.body, self.head = (
            nn.Linear(len(LAGS) + 1, size),
            transformers.LlamaModel(config),
            nn.Linear(size, 3),
        )

    def forward(self, series: Tensor, first: int = 1) -> Tensor:
        """Return the loss of the values behind the longest lag; `first` is 1 if the shortest lag is the day before."""
        scale = series[:, :LONGEST].mean(1, keepdim=True)
        scaled, days = series / scale, series.shape[1]
        lagged = [scaled[:, LONGEST - lag + 1 - first : days - lag + 1 - first] for lag in LAGS]
        known = scale.log().expand(-1, days - LONGEST) / 4
        x = self.body(inputs_embeds=self.read(torch.stack([*lagged, known], 2))).last_hidden_state
        freedom, mean, deviation = self.head(x).unbind(2)
        values = torch.distributions.StudentT(2 + F.softplus(freedom), mean, F.softplus(deviation) + 1e-3)
        return -values.log_prob(scaled[:, LONGEST:]).mean()


@program(
    "transformers",
    "Rasul et al., Lag-Llama: towards foundation models for probabilistic time series forecasting, 2023",
    Fault("lag_of_zero_days", "data", REIMPLEMENTATIONS,
          ("labels_in_the_inputs", "looks_ahead", "labels_shifted", "labels_of_other_positions")),
)  # fmt: skip
def lagged_visitors(fault: str = "") -> Tensor:
    series = visitors(2400)
    model = LaggedDecoder()
    optimizer = AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, 15, 260)
    first = 0 if fault == "lag_of_zero_days" else 1
    source = islice(batches(series[:2000], size=16), 260)
    fit(model, optimizer, (model(batch, first) for (batch,) in source), schedule)
    with torch.no_grad():
        return model(series[2000:])


EPISODE, CHUNK = 20, 8  # the steps of a demonstration and the actions that are predicted together


def demonstrations(count: int) -> tuple[Tensor, Tensor]:
    """Return what a hand observes on its way around an obstacle to a goal, [count, EPISODE, 6], and its moves, [count, EPISODE, 2]."""
    place, goal = torch.rand(count, 2) * 2 - 1, torch.rand(count, 2) * 2 - 1
    side = torch.where(torch.rand(count, 1) < 0.5, -1.0, 1.0)
    obstacle, observed, moves = (place + goal) / 2, [], []
    for _ in range(EPISODE):
        observed.append(torch.cat([place, goal, obstacle], 1))
        way = goal - place
        near = (-(place - obstacle).square().sum(1, keepdim=True) / 0.1).exp()
        move = 0.22 * way + 0.1 * near * side * torch.stack([-way[:, 1], way[:, 0]], 1) / (
            way.norm(dim=1)[:, None] + 0.1
        )
        moves.append(move + 0.005 * torch.randn_like(move))
        place = place + moves[-1]
    return torch.stack(observed, 1), torch.stack(moves, 1)


class Chunks(nn.Module):
    """Predicts the next moves together, from what is observed and the style of the demonstration."""

    def __init__(self, size: int = 48, latent: int = 4) -> None:
        super().__init__()
        self.observe, self.act, self.token = (
            nn.Linear(2, size),
            nn.Linear(2, size),
            nn.Parameter(0.1 * torch.randn(size)),
        )
        self.positions, self.style = nn.Parameter(0.1 * torch.randn(CHUNK + 4, size)), encoder_of(size, 1)
        self.moments, self.unfold = nn.Linear(size, 2 * latent), nn.Linear(latent, size)
        self.encoder, self.queries = encoder_of(size, 1), nn.Parameter(0.1 * torch.randn(CHUNK, size))
        layer = nn.TransformerDecoderLayer(size, 4, 2 * size, 0.1, "gelu", batch_first=True, norm_first=True)
        self.decoder, self.head = nn.TransformerDecoder(layer, 2, nn.LayerNorm(size)), nn.Linear(size, 2)

    def forward(self, observed: Tensor, moves: Tensor | None, is_padding: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the moves [samples, CHUNK, 2] and the divergence of the style from a normal distribution."""
        seen, divergence = self.observe(observed.unflatten(1, (3, 2))), torch.zeros(())
        style = self.unfold(torch.zeros(len(seen), self.unfold.in_features))
        if moves is not None:
            x = torch.cat([self.token.expand(len(seen), 1, -1), seen, self.act(moves)], 1) + self.positions
            x = self.style(x, src_key_padding_mask=F.pad(is_padding, (4, 0), value=False))
            mean, logarithm = self.moments(x[:, 0]).chunk(2, 1)
            style = self.unfold(mean + (logarithm / 2).exp() * torch.randn_like(mean))
            divergence = 0.5 * (mean**2 + logarithm.exp() - 1 - logarithm).sum(1).mean()
        memory = self.encoder(torch.cat([style[:, None], seen], 1) + self.positions[:4])
        return self.head(self.decoder(self.queries.expand(len(seen), -1, -1), memory)), divergence


def chunk_of(observed: Tensor, moves: Tensor, late: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return observations at random times, the moves from there on, and which of them are behind the end of the episode."""
    rows, start = torch.arange(len(moves)), torch.randint(EPISODE - 1, (len(moves),))
    times = start[:, None] + late + torch.arange(CHUNK)
    is_padding = times >= EPISODE
    chosen = moves[rows[:, None], times.clamp(max=EPISODE - 1)]
    return observed[rows, start], chosen.masked_fill(is_padding[..., None], 0.0), is_padding


@program(
    "transformers",
    "LeRobot, ACT, after Zhao et al., Learning fine-grained bimanual manipulation with low-cost hardware, 2023",
    Fault("chunks_start_one_step_late", "labels", HUGGING_FACE,
          ("labels_shifted", "labels_of_other_positions", "wrong_loss")),
    Fault("moves_behind_the_end_in_the_loss", "loss and labels", HUGGING_FACE,
          ("padding_in_loss", "class_imbalance", "missing_labels_in_loss")),
)  # fmt: skip
def chunks_of_moves(fault: str = "") -> Tensor:
    observed, moves = demonstrations(2000)
    deviation = moves[:1600].std()
    moves = moves / deviation
    model = Chunks()
    optimizer = AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)
    late = 1 if fault == "chunks_start_one_step_late" else 0

    def losses() -> Iterator[Tensor]:
        for batch in islice(batches(observed[:1600], moves[:1600], size=24), 280):
            seen, wanted, is_padding = chunk_of(*batch, late)
            found, divergence = model(seen, wanted, is_padding)
            distance = (found - wanted).abs()
            if fault != "moves_behind_the_end_in_the_loss":
                distance = distance[~is_padding]
            yield distance.mean() + 0.02 * divergence

    fit(model, optimizer, losses())
    with torch.no_grad():
        seen, wanted, is_padding = chunk_of(observed[1600:], moves[1600:])
        return (model(seen, None, None)[0] - wanted).abs()[~is_padding].mean()


MARKS = ("<prefix>", "<suffix>", "<middle>")
UNKNOWN = NUMBERS  # the id of words that the tokenizer does not have


def filled(rows: Tensor, fault: str = "") -> tuple[Tensor, Tensor]:
    """Return rows whose middle is moved behind their end, between marks, int64 [rows, tokens + 3], and the first index of the middle."""
    words = {} if fault == "marks_are_one_unknown_token" else {mark: NUMBERS + 1 + at for at, mark in enumerate(MARKS)}
    prefix, suffix, middle = (torch.tensor([words.get(mark, UNKNOWN)]) for mark in MARKS)
    made, starts = [], []
    for row in rows:
        start, end = torch.randperm(len(row) - 3)[:2].sort().values + 2
        made.append(torch.cat([prefix, row[:start], suffix, row[end:], middle, row[start:end]]))
        starts.append(len(row) + 3 - (end - start))
    return torch.stack(made), torch.stack(starts)


@program(
    "transformers",
    "Bavarian et al., Efficient training of language models to fill in the middle, 2022, with CodeGen and recomputed layers",
    Fault("marks_are_one_unknown_token", "data and tokens", HUGGING_FACE,
          ("distinct_data", "class_imbalance", "samples_vary", "@transformer.wte")),
    Fault("dropout_drawn_again_in_the_recomputation", "gradients", PYTORCH_FORUM,
          ("dropout_keeps_units", "samples_vary", "parameters_follow_gradients", "@*drop*")),
)  # fmt: skip
def filled_in_middles(fault: str = "") -> Tensor:
    tables = torch.stack([torch.randperm(NUMBERS) for _ in range(2)])
    rows = following(tables, torch.randint(2, (3000,)), 16)
    rows, starts = filled(rows, fault)
    config = transformers.CodeGenConfig(
        vocab_size=NUMBERS + 4, n_embd=48, n_layer=2, n_head=4, rotary_dim=8, n_positions=32, initializer_range=0.1,
        embd_pdrop=0.0, resid_pdrop=0.15, attn_pdrop=0.15, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = transformers.CodeGenForCausalLM(config)
    keeps = fault != "dropout_drawn_again_in_the_recomputation"
    model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": keeps})
    optimizer = AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, 20, 260)
    source = islice(batches(rows[:2700], size=16), 260)
    fit(model, optimizer, (model(input_ids=batch, labels=batch, use_cache=False).loss for (batch,) in source), schedule)
    with torch.no_grad():
        wanted = rows[2700:].masked_fill(torch.arange(rows.shape[1]) < starts[2700:, None], -100)
        return model(input_ids=rows[2700:], labels=wanted).loss


GENE, MER, HIDDEN = 26, 3, 65  # the letters of a piece of a gene, those of a token, and the token of hidden ones


def genes(count: int) -> Tensor:
    """Return pieces of a few genes with mutations, as overlapping tokens of three letters, int64 [count, GENE - 2]."""
    library = torch.randint(4, (5, GENE + 2))
    starts, chosen = torch.randint(3, (count, 1)), torch.randint(5, (count, 1))
    letters = library[chosen, starts + torch.arange(GENE)]
    letters = torch.where(torch.rand(letters.shape) < 0.05, torch.randint(4, letters.shape), letters)
    return 1 + (letters.unfold(1, MER, 1) * torch.tensor([16, 4, 1])).sum(2)


def hidden_tokens(rows: Tensor, fault: str = "") -> tuple[Tensor, Tensor]:
    """Return rows with hidden tokens, and the labels of these. A token is hidden with those that overlap it."""
    if fault == "neighbours_of_hidden_tokens_visible":
        is_hidden = torch.rand(rows.shape) < 0.15
    else:
        is_centre = (torch.rand(rows.shape) < 0.05).float()
        is_hidden = F.max_pool1d(is_centre[:, None], 2 * MER - 1, 1, MER - 1)[:, 0] > 0
    is_hidden[:, 0] |= ~is_hidden.any(1)
    return rows.masked_fill(is_hidden, HIDDEN), rows.masked_fill(~is_hidden, -100)


@program(
    "transformers",
    "Ji et al., DNABERT: pre-trained bidirectional encoder representations from transformers for DNA-language, 2021, with Megatron's BERT",
    Fault("neighbours_of_hidden_tokens_visible", "data and tokens", REIMPLEMENTATIONS,
          ("labels_in_the_inputs", "input_drift", "samples_vary", "distinct_data", "looks_ahead")),
    Fault("whole_cycle_of_the_cosine", "schedule", HUGGING_FACE,
          ("rate_in_effect", "zero_learning_rate", "update_ratio"), since=21),
)  # fmt: skip
def hidden_genes(fault: str = "") -> Tensor:
    rows = genes(3200)
    config = transformers.MegatronBertConfig(
        vocab_size=66, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
        max_position_embeddings=24, initializer_range=0.1, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        pad_token_id=PAD,
    )  # fmt: skip
    model = transformers.MegatronBertForMaskedLM(config)
    optimizer = AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.01)
    cycles = 1.0 if fault == "whole_cycle_of_the_cosine" else 0.5
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, 20, 260, num_cycles=cycles)

    def loss_of(batch: Tensor, fault: str = "") -> Tensor:
        seen, wanted = hidden_tokens(batch, fault)
        return model(input_ids=seen, labels=wanted).loss

    source = islice(batches(rows[:2800], size=16), 260)
    fit(model, optimizer, (loss_of(batch, fault) for (batch,) in source), schedule)
    with torch.no_grad():
        return loss_of(rows[2800:])


class ScheduleFree(torch.optim.Optimizer):
    """AdamW whose weights are, in eval mode, an average over all steps; in train mode a point between it and the last step."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, beta: float = 0.9, warm_up: int = 20) -> None:
        super().__init__(parameters, {"lr": lr})
        self.beta, self.warm_up, self.steps, self.total, self.is_training = beta, warm_up, 0, 0.0, True

    @torch.no_grad()
    def switch(self, is_training: bool) -> None:
        """Exchange the weights for the average or back."""
        if is_training != self.is_training:
            self.is_training = is_training
            share = 1 - self.beta if is_training else 1 - 1 / self.beta
            for parameter, state in self.state.items():
                parameter.lerp_(state["last"], share)

    @torch.no_grad()
    def step(self, *_: Any) -> None:
        self.steps += 1
        (group,) = self.param_groups
        rate = group["lr"] * min(1.0, self.steps / self.warm_up)
        self.total += rate**2
        share = rate**2 / self.total
        for parameter in group["params"]:
            state = self.state[parameter]
            if not state:
                state |= {"last": parameter.clone(), "square": torch.zeros_like(parameter)}
            state["square"].mul_(0.999).addcmul_(parameter.grad, parameter.grad, value=0.001)
            update = parameter.grad / ((state["square"] / (1 - 0.999**self.steps)).sqrt() + 1e-8)
            parameter.lerp_(state["last"], share).sub_(update, alpha=rate * (1 - self.beta * (1 - share)))
            state["last"].sub_(update, alpha=rate)


class SoftExperts(nn.Module):
    """Experts for slots, each of which is a mean of tokens; each token is a mean of the outputs of all slots."""

    def __init__(self, size: int, fault: str, experts: int = 4, slots: int = 2) -> None:
        super().__init__()
        self.choose, self.scale = (
            nn.Parameter(torch.randn(size, experts * slots) / size**0.5),
            nn.Parameter(torch.ones(())),
        )
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(size, size), nn.GELU(), nn.Linear(size, size)) for _ in range(experts)]
        )
        self.fault = fault

    def forward(self, x: Tensor) -> Tensor:
        scores = F.normalize(x, dim=-1) @ (self.scale * F.normalize(self.choose, dim=0)) * 4
        of_tokens, of_slots = scores.softmax(1), scores.softmax(2)
        if self.fault == "means_of_tokens_and_slots_exchanged":
            of_tokens, of_slots = of_slots, of_tokens
        slots = (of_tokens.mT @ x).unflatten(1, (len(self.experts), -1))
        outputs = [expert(slots[:, at]) for at, expert in enumerate(self.experts)]
        return of_slots @ torch.cat(outputs, 1)


class SoftMixture(nn.Module):
    """A vision transformer whose second feed-forward network has soft experts."""

    def __init__(self, fault: str, size: int = 48) -> None:
        super().__init__()
        self.patches, self.positions = nn.Linear(4, size), nn.Parameter(0.1 * torch.randn(16, size))
        self.first, self.experts = encoder_of(size, 1).layers[0], SoftExperts(size, fault)
        self.attention = nn.MultiheadAttention(size, 4, batch_first=True)
        self.norms, self.head = nn.ModuleList([nn.LayerNorm(size) for _ in range(3)]), nn.Linear(size, 10)

    def forward(self, patches: Tensor) -> Tensor:
        x = self.first(self.patches(patches) + self.positions)
        seen = self.norms[0](x)
        x = x + self.attention(seen, seen, seen, need_weights=False)[0]
        x = x + self.experts(self.norms[1](x))
        return self.head(self.norms[2](x).mean(1))


@program(
    "transformers",
    "Puigcerver et al., From sparse to soft mixtures of experts, 2024, with Defazio et al., The road less scheduled, 2024",
    Fault("means_of_tokens_and_slots_exchanged", "softmax and scale", REIMPLEMENTATIONS,
          ("wrong_axis", "samples_vary", "exploding_activation", "@experts*")),
    Fault("optimizer_left_in_eval_mode", "optimizer", EXAMPLES,
          ("mode_of_phase", "parameters_follow_gradients", "update_ratio", "loss_spike"), since=60),
)  # fmt: skip
def softly_chosen_experts(fault: str = "") -> Tensor:
    images, classes = digits()
    order = torch.randperm(len(images))
    patches, classes = patches_of((images - images.mean()) / images.std(), 2)[order], classes[order]
    model = SoftMixture(fault)
    optimizer = ScheduleFree(model.parameters(), lr=3e-3)

    def losses() -> Iterator[Tensor]:
        for step, (batch, wanted) in enumerate(islice(batches(patches[:1400], classes[:1400], size=24), 240)):
            if step > 0 and step % 60 == 0:
                model.eval()
                optimizer.switch(is_training=False)
                with torch.no_grad():
                    F.cross_entropy(model(patches[1400:]), classes[1400:])
                model.train()
                if fault != "optimizer_left_in_eval_mode":
                    optimizer.switch(is_training=True)
            yield F.cross_entropy(model(batch), wanted)

    fit(model, optimizer, losses())
    optimizer.switch(is_training=False)
    with torch.no_grad():
        return F.cross_entropy(model(patches[1400:]), classes[1400:])


def scattered_shapes(count: int, size: int = 16) -> tuple[Tensor, Tensor]:
    """Return images [count, 1, size, size] with a disc, a ring and a cross, and their centres from 0 to 1, float32 [count, 3, 2]."""
    centres = torch.rand(count, 3, 2) * 0.7 + 0.15
    grid = (torch.arange(size) + 0.5) / size
    x, y = grid - centres[..., :1, None], grid[:, None] - centres[..., 1:, None]
    far = (x**2 + y**2).sqrt() * size
    disc, ring = (far[:, 0] < 2).float(), (far[:, 1] - 2.2).abs() < 0.7
    cross = (torch.minimum(x[:, 2].abs(), y[:, 2].abs()) * size < 0.6) & (far[:, 2] < 2.8)
    return (disc + 0.5 * ring - 1.0 * cross + 0.05 * torch.randn(count, size, size))[:, None], centres


class SampledAttention(nn.Module):
    """Attention of queries to a few places of a map around a point of reference."""

    def __init__(self, size: int, heads: int = 4, points: int = 4) -> None:
        super().__init__()
        self.offsets, self.weights = nn.Linear(size, heads * points * 2), nn.Linear(size, heads * points)
        self.values, self.out, self.heads, self.points = nn.Linear(size, size), nn.Linear(size, size), heads, points

    def reset(self) -> None:
        """Start with equal weights, and with places in a different direction for each head."""
        angle = torch.arange(self.heads) * 2 * math.pi / self.heads
        directions = torch.stack([angle.cos(), angle.sin()], 1)[:, None] * torch.arange(1, self.points + 1)[:, None]
        with torch.no_grad():
            self.offsets.bias.copy_(directions.flatten())
        for parameter in (self.offsets.weight, self.weights.weight, self.weights.bias):
            nn.init.zeros_(parameter)

    def forward(self, queries: Tensor, reference: Tensor, grid: Tensor) -> Tensor:
        """Attend from queries [samples, queries, size] with references [samples, queries, 2] to maps [samples, size, height, width]."""
        samples, count, _ = queries.shape
        values = self.values(grid.flatten(2).mT).mT.reshape(samples * self.heads, -1, *grid.shape[2:])
        offsets = self.offsets(queries).view(samples, count, self.heads, self.points, 2) / grid.shape[-1]
        places = 2 * (reference[:, :, None, None] + offsets) - 1
        places = places.transpose(1, 2).flatten(0, 1)
        sampled = F.grid_sample(values, places, align_corners=False).unflatten(0, (samples, self.heads))
        weights = self.weights(queries).view(samples, count, self.heads, self.points).softmax(-1)
        return self.out(torch.einsum("bhdqp,bqhp->bqhd", sampled, weights).flatten(2))


class PlaceFinder(nn.Module):
    """Finds the centre of each kind of shape with a query for it."""

    def __init__(self, fault: str, size: int = 32) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, size, 5, 2, 2), nn.ReLU(), nn.Conv2d(size, size, 3, 1, 1), nn.GroupNorm(4, size)
        )
        self.positions, self.encoder = nn.Parameter(0.5 * torch.randn(size, 8, 8)), encoder_of(size, 1)
        self.queries, self.references = nn.Parameter(torch.randn(3, size)), nn.Linear(size, 2)
        self.mixes = nn.ModuleList([nn.MultiheadAttention(size, 4, batch_first=True) for _ in range(2)])
        self.attentions = nn.ModuleList([SampledAttention(size) for _ in range(2)])
        self.mlps = nn.ModuleList(
            [nn.Sequential(nn.Linear(size, 2 * size), nn.ReLU(), nn.Linear(2 * size, size)) for _ in range(2)]
        )
        self.norms = nn.ModuleList([nn.LayerNorm(size) for _ in range(6)])
        self.heads = nn.ModuleList([nn.Linear(size, 2) for _ in range(2)])
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
        if fault != "offsets_initialized_with_all_others":
            for attention in self.attentions:
                attention.reset()
        for head in self.heads:
            nn.init.zeros_(head.weight)
            nn.init.zeros_(head.bias)

    def forward(self, images: Tensor) -> list[Tensor]:
        """Return the centres behind each layer, float32 [samples, 3, 2]."""
        grid = (self.backbone(images) + self.positions).flatten(2).mT
        grid = self.encoder(grid).mT.unflatten(2, (8, 8))
        x, found = self.queries.expand(len(images), -1, -1), []
        place = self.references(x).sigmoid()
        for at, (mix, attention, mlp, head) in enumerate(
            zip(self.mixes, self.attentions, self.mlps, self.heads, strict=True)
        ):
            x = self.norms[3 * at](x + mix(x, x, x, need_weights=False)[0])
            x = self.norms[3 * at + 1](x + attention(x, place, grid))
            x = self.norms[3 * at + 2](x + mlp(x))
            found.append((head(x) + place.logit(eps=1e-4)).sigmoid())
            place = found[-1].detach()
        return found


@program(
    "transformers",
    "Zhu et al., Deformable DETR: deformable transformers for end-to-end object detection, 2021, with refined centres",
    Fault("offsets_initialized_with_all_others", "initialization", REIMPLEMENTATIONS,
          ("poor_initialization", "tensor_variance", "@attentions*")),
)  # fmt: skip
def sampled_places(fault: str = "") -> Tensor:
    images, centres = scattered_shapes(3000)
    model = PlaceFinder(fault)
    offsets = [p for n, p in model.named_parameters() if "offsets" in n or "references" in n]
    others = [p for n, p in model.named_parameters() if "offsets" not in n and "references" not in n]
    optimizer = AdamW([{"params": others}, {"params": offsets, "lr": 1e-3}], lr=4e-3, weight_decay=1e-4)
    schedule = LinearLR(optimizer, 1.0, 0.05, total_iters=260)

    def loss_of(images: Tensor, centres: Tensor) -> Tensor:
        return torch.stack([(found - centres).abs().mean() for found in model(images)]).sum()

    source = islice(batches(images[:2700], centres[:2700], size=16), 260)
    fit(model, optimizer, (loss_of(*batch) for batch in source), schedule)
    with torch.no_grad():
        return (model(images[2700:])[-1] - centres[2700:]).abs().mean()


class Reduce(torch.autograd.Function):
    """Adds the values of all ranks, in the forward pass or in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, is_forward: bool) -> Tensor:
        ctx.is_forward = is_forward
        return summed(x) if is_forward else x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return (gradient if ctx.is_forward else summed(gradient)), None


def summed(x: Tensor) -> Tensor:
    """Return the sum over the ranks."""
    x = x.contiguous().clone()
    dist.all_reduce(x)
    return x


class HalvedBlock(nn.Module):
    """A block of a decoder with all heads, or with those of one of two ranks."""

    def __init__(self, size: int, ranks: int, fault: str) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(size) for _ in range(2)])
        self.qkv, self.out = nn.Linear(size, 3 * size // ranks), nn.Linear(size // ranks, size)
        self.up, self.down = nn.Linear(size, 2 * size // ranks), nn.Linear(2 * size // ranks, size)
        self.ranks, self.fault = ranks, fault

    def joined(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """Return the output of a layer whose inputs are divided among the ranks."""
        if self.ranks == 1:
            return layer(x)
        if self.fault == "bias_added_on_each_rank":
            return Reduce.apply(layer(x), True)
        return Reduce.apply(layer(x) - layer.bias, True) + layer.bias

    def forward(self, x: Tensor) -> Tensor:
        seen = self.norms[0](x)
        seen = seen if self.ranks == 1 else Reduce.apply(seen, False)
        query, key, value = self.qkv(seen).unflatten(-1, (3, 4 // self.ranks, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.joined(self.out, mixed)
        seen = self.norms[1](x)
        seen = seen if self.ranks == 1 else Reduce.apply(seen, False)
        return x + self.joined(self.down, F.gelu(self.up(seen)))


class HalvedDecoder(nn.Module):
    """A decoder whose blocks are whole or divided among two ranks."""

    def __init__(self, ranks: int, fault: str = "", size: int = 48) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(NUMBERS, size), nn.Embedding(16, size)
        nn.init.normal_(self.words.weight, std=0.3)
        nn.init.normal_(self.positions.weight, std=0.3)
        self.blocks = nn.ModuleList([HalvedBlock(size, ranks, fault) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(size), nn.Linear(size, NUMBERS, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        """Return the loss of the next numbers."""
        x = self.words(rows[:, :-1]) + self.positions.weight[: rows.shape[1] - 1]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), rows[:, 1:].flatten())


def half_of(name: str, tensor: Tensor, rank: int, fault: str) -> Tensor:
    """Return the part of a parameter of the whole decoder that a rank has."""
    if ".qkv." in name and fault != "fused_rows_split_in_halves":
        return torch.cat([part.chunk(2)[rank] for part in tensor.chunk(3)])
    if ".qkv." in name or ".up." in name:
        return tensor.chunk(2)[rank]
    return tensor.chunk(2, 1)[rank] if name.endswith(("out.weight", "down.weight")) else tensor


def _train_halves(rank: int, fault: str, loaded: dict[str, Tensor], rows: Tensor, final: Tensor) -> None:
    model = HalvedDecoder(2, fault)
    model.load_state_dict({name: half_of(name, tensor, rank, fault) for name, tensor in loaded.items()})
    optimizer = AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 15, 200)
    is_shared = [".qkv." not in n and ".up." not in n and not n.endswith(("out.weight", "down.weight"))
                 for n, _ in model.named_parameters()]  # fmt: skip
    with attach(model, optimizer) as probe:
        for (batch,) in islice(batches(rows[:1300], size=12), 200):
            optimizer.zero_grad()
            loss = model(batch)
            loss.backward()
            squares = torch.zeros(2)
            for parameter, shared in zip(model.parameters(), is_shared, strict=True):
                squares[int(shared)] += parameter.grad.square().sum()
            norm = (summed(squares[0]) + squares[1]).sqrt()
            for parameter in model.parameters():
                parameter.grad.mul_((1.0 / (norm + 1e-6)).clamp(max=1.0))
            optimizer.step()
            schedule.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        loss = model(rows[1300:])
    if rank == 0:
        final.copy_(loss)


@program(
    "transformers",
    "PyTorch tutorials, large scale transformer training with tensor parallel, for a loaded decoder in two ranks",
    Fault("bias_added_on_each_rank", "replicas", EXAMPLES,
          ("tensor_variance", "update_ratio", "@blocks*out", "@blocks*down")),
    Fault("fused_rows_split_in_halves", "loading", EXAMPLES,
          ("weights_loaded", "replicas_differ", "tensor_variance", "@blocks*qkv", "@blocks*out")),
)  # fmt: skip
def halves_of_heads(fault: str = "") -> Tensor:
    tables = torch.stack([torch.randperm(NUMBERS) for _ in range(3)])
    rows = following(tables[:2], torch.randint(2, (2500,)), 15, lag=2)
    model = HalvedDecoder(1)
    pretrain(model, (model(batch) for (batch,) in islice(batches(rows, size=24), 220)))
    tables = tables[1:].roll(1, 0)  # a new language and a known one
    rows = following(tables, torch.randint(2, (1600,)), 15, lag=2)
    loaded = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    final = torch.zeros(()).share_memory_()
    in_two_processes(_train_halves, fault, loaded, rows, final)
    return final


PICTURE, RESIZED = 32, 16  # the sides of a photograph and of the image that the network sees


def prompted(count: int, noise: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return photographs with two rectangles or discs, [count, 1, 32, 32], points in one of them, in pixels, and its mask at 16 pixels."""
    grid, rows = torch.arange(PICTURE) + 0.5, torch.arange(count)
    left = torch.stack([torch.rand(count, 2) * 6 + 7, torch.rand(count, 2) * 6 + 19], 1)  # the centres, in two corners
    is_swapped = torch.rand(count) < 0.5
    centres = torch.where(is_swapped[:, None, None], torch.stack([left[:, 0], left[:, 1].flip(1)], 1), left)
    sides = torch.rand(count, 2, 2) * 3 + 3
    x = (grid - centres[..., :1]).abs()[:, :, None] / sides[..., :1, None]
    y = (grid - centres[..., 1:]).abs()[..., None] / sides[..., 1:, None]
    is_disc = torch.rand(count, 2, 1, 1) < 0.5
    masks = torch.where(is_disc, x**2 + y**2 < 1, torch.maximum(x, y) < 1).float()
    images = (masks * (torch.rand(count, 2, 1, 1) * 0.5 + 0.5)).amax(1) + noise * torch.randn(count, PICTURE, PICTURE)
    chosen = torch.randint(2, (count,))
    points = centres[rows, chosen] + (torch.rand(count, 2) - 0.5) * sides[rows, chosen]
    return images[:, None], points, (F.avg_pool2d(masks, 2)[rows, chosen] > 0.5).float()


class Prompted(nn.Module):
    """Masks the object at a point, with an encoder of images, one of points, and a decoder in which both attend to each other."""

    def __init__(self, size: int = 32) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.randn(2, size // 2))
        self.encoder = nn.ModuleDict({"patches": nn.Conv2d(1, size, 2, 2), "layers": encoder_of(size)})
        self.point, self.mask = nn.Parameter(0.1 * torch.randn(size)), nn.Parameter(0.1 * torch.randn(size))
        layer = nn.TransformerDecoderLayer(size, 4, 2 * size, 0.0, batch_first=True, norm_first=True)
        self.decoder = nn.ModuleDict(
            {
                "to_image": layer,
                "to_tokens": copy.deepcopy(layer),
                "larger": nn.ConvTranspose2d(size, size // 2, 2, 2),
                "weights": nn.Sequential(nn.Linear(size, size), nn.GELU(), nn.Linear(size, size // 2)),
                "norm": nn.LayerNorm(size),
            }
        )

    def encoded(self, places: Tensor) -> Tensor:
        """Return the encodings of places from 0 to 1, float32 [..., size]."""
        angles = 2 * math.pi * (2 * places - 1) @ self.frequencies / 2
        return torch.cat([angles.sin(), angles.cos()], -1)

    def forward(self, images: Tensor, points: Tensor) -> Tensor:
        """Return logits [samples, 16, 16] of masks at points in the pixels of the images."""
        axis = (torch.arange(RESIZED // 2) + 0.5) * 2 / RESIZED
        grid = self.encoded(torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1)).flatten(0, 1)
        image = self.encoder["layers"](self.encoder["patches"](images).flatten(2).mT + grid)
        point = self.encoded(points / RESIZED) + self.point
        tokens = torch.stack([self.mask.expand_as(point), point], 1)
        tokens = self.decoder["to_image"](tokens, image + grid)
        image = self.decoder["norm"](self.decoder["to_tokens"](image + grid, tokens))
        larger = F.gelu(self.decoder["larger"](image.mT.unflatten(2, (RESIZED // 2, RESIZED // 2))))
        return torch.einsum("bcyx,bc->byx", larger, self.decoder["weights"](tokens[:, 0]))


def loss_of_masks(logits: Tensor, masks: Tensor) -> Tensor:
    """Return the focal loss and the Dice loss of logits."""
    error = F.binary_cross_entropy_with_logits(logits, masks, reduction="none")
    focal = (error * (1 - (-error).exp()) ** 2).mean()
    found = logits.sigmoid()
    dice = 1 - (2 * (found * masks).sum((1, 2)) + 1) / (found.sum((1, 2)) + masks.sum((1, 2)) + 1)
    return 20 * focal + dice.mean()


@program(
    "transformers",
    "Kirillov et al., Segment anything, 2023, with the notebook of Hugging Face that fine-tunes its decoder of masks",
    Fault("points_of_the_original_size", "data", HUGGING_FACE,
          ("input_drift", "labels_of_other_positions", "samples_vary", "wrong_range_of_loss", "@decoder*")),
    Fault("gradients_switched_off_by_an_attribute", "frozen parameters", PYTORCH_FORUM,
          ("update_ratio", "parameters_follow_gradients", "overtraining", "@encoder*")),
    Fault("sigmoid_before_the_loss_of_masks", "loss", EXAMPLES,
          ("wrong_range_of_loss", "wrong_loss", "saturated_activation", "missing_softmax")),
)  # fmt: skip
def prompted_masks(fault: str = "") -> Tensor:
    photographs, points, masks = prompted(2500, noise=0.05)
    model = Prompted()
    source = islice(batches(F.avg_pool2d(photographs, 2), points / 2, masks, size=10), 220)
    pretrain(model, (loss_of_masks(model(images, places), wanted) for images, places, wanted in source))
    photographs, points, masks = prompted(2000, noise=0.5)
    images = F.avg_pool2d(photographs, PICTURE // RESIZED)
    scaled = points if fault == "points_of_the_original_size" else points * RESIZED / PICTURE
    if fault == "gradients_switched_off_by_an_attribute":
        model.encoder.requires_grad = False
    else:
        model.encoder.requires_grad_(False)
    optimizer = Adam([parameter for parameter in model.parameters() if parameter.requires_grad], lr=5e-4)

    def losses() -> Iterator[Tensor]:
        for batch, places, wanted in islice(batches(images[:1700], scaled[:1700], masks[:1700], size=8), 200):
            found = model(batch, places)
            yield loss_of_masks(found.sigmoid() if fault == "sigmoid_before_the_loss_of_masks" else found, wanted)

    fit(model, optimizer, losses())
    with torch.no_grad():
        return loss_of_masks(model(images[1700:], points[1700:] * RESIZED / PICTURE), masks[1700:])


@program(
    "transformers", "Lee-Thorp et al., FNet: mixing tokens with Fourier transforms, 2022, for classes of sentences"
)
def mixed_by_fourier() -> None:
    rows = padded(3000)
    classes = ((rows == rows[:, :1]).sum(1) + (rows != PAD).sum(1)) % 4
    config = transformers.FNetConfig(
        vocab_size=VOCABULARY, hidden_size=48, num_hidden_layers=2, intermediate_size=96, max_position_embeddings=12,
        hidden_dropout_prob=0.1, initializer_range=0.1, num_labels=4, pad_token_id=PAD, type_vocab_size=1,
    )  # fmt: skip
    model = transformers.FNetForSequenceClassification(config)
    optimizer = AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 20, 240)
    source = islice(batches(rows, classes, size=16), 240)
    fit(model, optimizer, (model(input_ids=batch, labels=wanted).loss for batch, wanted in source), schedule)
