"""Programs of many kinds, with faults that are known from surveys and forums."""

from __future__ import annotations

import copy
import io
import itertools
import math
from contextlib import nullcontext
from random import Random
from typing import ClassVar

import torch
from data import PAD, VOCABULARY, batches, digits, normalized_digits, padded, shapes, tokens
from registry import Fault, attach, in_two_processes, program
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop, SparseAdam
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    SequentialLR,
)
from torch.utils.data import DataLoader, Dataset

LEAKAGE = "Kaufman et al., Leakage in data mining: formulation, detection, and avoidance, 2012"
TAXONOMY = "Humbatova et al., Taxonomy of real faults in deep learning systems, 2020"
FORUM = "Questions in the PyTorch forum and on Stack Overflow, 2018 to 2024"


def _train_site(rank: int, fault: str, final: Tensor) -> None:
    seed = torch.initial_seed() + rank
    images, classes = digits()
    images = torch.stack([images, images.rot90(1, (2, 3))]) - 0.3  # the scanners of the two sites are turned
    model = DistributedDataParallel(
        nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(12, 24, 3, padding=1), nn.ReLU(),
            nn.Flatten(), nn.Linear(384, 10)
        )
    )  # fmt: skip
    optimizer = SGD(model.parameters(), lr=0.03, momentum=0.9)
    torch.manual_seed(seed)
    loader = batches(images[rank, :1400], classes[:1400], size=16)
    accumulate, ranks = 4, 2
    with attach(model, optimizer) as probe:
        for _ in range(110):
            total = 0.0
            for micro in range(accumulate):
                data, target = next(loader)
                is_last = (micro + 1) % accumulate == 0
                if fault == "gradients_never_synchronized":
                    is_last = micro + 1 % accumulate == 0  # % is evaluated before +
                with nullcontext() if is_last else model.no_sync():
                    loss = F.cross_entropy(model(data), target) / accumulate
                    (loss / ranks if fault == "loss_divided_by_the_ranks" else loss).backward()
                total += loss.item()
                if micro + 1 < accumulate:
                    probe.end_micro_step()
            optimizer.step()
            optimizer.zero_grad()
            probe.end_step(loss=total)
    with torch.no_grad():
        if rank == 0:
            final.fill_(sum(F.cross_entropy(model.module(site[1400:]), classes[1400:]) for site in images) / 2)


@program(
    "silent errors",
    "PyTorch documentation, DistributedDataParallel.no_sync, with the data of a site on each rank",
    Fault("gradients_never_synchronized", "replicas", FORUM, ("replicas_equal",)),
    Fault("loss_divided_by_the_ranks", "gradients", FORUM, ("accumulation_divides", "loss_scale")),
)
def replicas_of_sites(fault: str = "") -> Tensor:
    final = torch.zeros(()).share_memory_()
    in_two_processes(_train_site, fault, final)
    return final


def _domain_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.SiLU(), nn.Conv2d(16, 32, 3, 2, 1, bias=False),
        nn.BatchNorm2d(32), nn.SiLU(), nn.Flatten(), nn.Linear(512, 10)
    )  # fmt: skip


@program(
    "silent errors",
    "timm, train.py --resume: an average of the weights, bfloat16 and another data set than before",
    Fault("average_copied_before_loading", "references", FORUM, ("weights_loaded", "parameters_follow_gradients")),
    Fault("decayed_rate_restored", "learning rate", FORUM, ("rate_in_effect", "update_ratio", "loss_not_decreasing")),
)
def resumed_on_new_domain(fault: str = "") -> Tensor:
    train_data, test_data = normalized_digits()
    images, classes = train_data.tensors
    model = _domain_net()
    optimizer = AdamW(model.parameters(), lr=3e-3)
    scheduler = CosineAnnealingLR(optimizer, 80)
    for _, (data, target) in zip(range(80), batches(images, classes, size=64), strict=False):
        optimizer.zero_grad()
        F.cross_entropy(model(data), target).backward()
        optimizer.step()
        scheduler.step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)

    model = _domain_net()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    average = copy.deepcopy(model)
    checkpoint = torch.load(file)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])  # this also restores the rate
    if fault != "average_copied_before_loading":
        average = copy.deepcopy(model)
    if fault != "decayed_rate_restored":
        optimizer.param_groups[0]["lr"] = 1e-3
    average.requires_grad_(False).eval()
    test_images, test_classes = test_data.tensors

    def loss_of_average() -> Tensor:
        with torch.no_grad():
            return F.cross_entropy(average(test_images.rot90(1, (2, 3))), test_classes)

    with attach(nn.ModuleDict({"model": model, "average": average}), optimizer) as probe:
        for step, (data, target) in zip(range(140), batches(images.rot90(1, (2, 3)), classes, size=64), strict=False):
            with torch.autocast("cpu", torch.bfloat16):
                output = model(data)
            loss = F.cross_entropy(output.float(), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                    slow.lerp_(fast, 0.01)
                for slow, fast in zip(average.buffers(), model.buffers(), strict=True):
                    slow.copy_(fast)
            probe.end_step(loss=loss)
            if step % 35 == 34:
                with probe.evaluating():
                    probe.log(loss=loss_of_average())
    return loss_of_average()


class ClickModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.category = nn.Embedding(12, 4)
        self.hour = nn.Embedding(24, 4)
        self.deep = nn.Sequential(nn.Linear(15, 48), nn.ReLU(), nn.Linear(48, 24), nn.ReLU(), nn.Linear(24, 1))

    def forward(self, numbers: Tensor, categories: Tensor, hours: Tensor) -> Tensor:
        x = torch.cat([numbers, self.category(categories), self.hour(hours)], 1)
        return self.deep(x).squeeze(1)


@program(
    "keras",
    "Keras's example imbalanced_classification, for clicks on advertisements",
    Fault("positive_weight_inverted", "loss", TAXONOMY, ("wrong_loss", "class_imbalance", "loss_scale")),
    Fault("own_label_in_the_rate", "data", LEAKAGE, ("looks_ahead", "labels_in_the_inputs")),
)
def click_prediction(fault: str = "") -> Tensor:
    count, train = 4000, 3200
    ads, categories, hours = torch.randint(700, (count,)), torch.randint(12, (count,)), torch.randint(24, (count,))
    numbers, quality = torch.randn(count, 6), torch.randn(700)
    score = 1.2 * quality[ads] + numbers @ torch.randn(6) * 0.5 + torch.randn(12)[categories] * 0.7
    clicked = (torch.rand(count) < torch.sigmoid(score + torch.cos(hours / 12 * math.pi) - 3.0)).float()
    clicks = torch.zeros(700).index_add_(0, ads[:train], clicked[:train])
    shown = torch.zeros(700).index_add_(0, ads[:train], torch.ones(train))
    own_click, own_row = clicked.clone(), torch.ones(count)
    own_click[train:] = own_row[train:] = 0
    if fault == "own_label_in_the_rate":
        own_click, own_row = torch.zeros(count), torch.zeros(count)
    share = clicked[:train].mean()
    rate = (clicks[ads] - own_click + share) / (shown[ads] - own_row + 1)
    numbers = torch.cat([numbers, (rate[:, None] - share) / 0.1], 1)
    positives = clicked[:train].sum()
    weight = (train - positives) / positives
    model = ClickModel()
    optimizer = Adagrad(model.parameters(), lr=0.03)
    used = 1 / weight if fault == "positive_weight_inverted" else weight
    criterion = nn.BCEWithLogitsLoss(pos_weight=used)
    rows = (numbers[:train], categories[:train], hours[:train], clicked[:train])
    with attach(model, optimizer) as probe:
        for _, (values, category, hour, wanted) in zip(range(180), batches(*rows, size=64), strict=False):
            optimizer.zero_grad()
            loss = criterion(model(values, category, hour), wanted)
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        logits = model(numbers[train:], categories[train:], hours[train:])
        return F.binary_cross_entropy_with_logits(logits, clicked[train:], pos_weight=weight)


class GridWorld:
    """A grid of 5 x 5 fields with a goal and a trap, which end the episode."""

    moves = ((0, 1), (1, 0), (0, -1), (-1, 0))
    rewards: ClassVar = {(4, 4): 1.0, (2, 2): -1.0}

    def __init__(self) -> None:
        self.random = Random(int(torch.randint(2**30, ())))

    def reset(self) -> Tensor:
        fields = [field for field in itertools.product(range(5), range(5)) if field not in self.rewards]
        self.place = torch.tensor(self.random.choice(fields))
        return self.place

    @classmethod
    def after(cls, place: tuple[int, int], action: int) -> tuple[tuple[int, int], float, bool]:
        row, column = (min(4, max(0, at + move)) for at, move in zip(place, cls.moves[action], strict=True))
        return (row, column), cls.rewards.get((row, column), -0.04), (row, column) in cls.rewards

    def step(self, action: int) -> tuple[Tensor, float, bool]:
        (row, column), reward, done = self.after((int(self.place[0]), int(self.place[1])), action)
        self.place[0], self.place[1] = row, column
        return self.place, reward, done

    @classmethod
    def best_values(cls, discount: float) -> tuple[Tensor, Tensor]:
        """Return the fields that do not end an episode, int64 [fields, 2], and the values of their actions, [fields, 4]."""
        fields = [field for field in itertools.product(range(5), range(5)) if field not in cls.rewards]
        values = {field: [0.0] * 4 for field in fields}
        for _ in range(60):
            for field, action in itertools.product(fields, range(4)):
                following, reward, done = cls.after(field, action)
                values[field][action] = reward if done else reward + discount * max(values[following])
        return torch.tensor(fields), torch.tensor([values[field] for field in fields])


def _one_hot_place(places: Tensor) -> Tensor:
    return F.one_hot(places[:, 0] * 5 + places[:, 1], 25).float()


@program(
    "general",
    "van Hasselt et al., Deep reinforcement learning with double Q-learning, 2016, in a grid world",
    Fault("bootstraps_past_the_end", "labels", FORUM, ("ends_bootstrapped", "@net.2")),
    Fault("replay_keeps_one_state", "data", FORUM, ("distinct_data", "samples_vary")),
)
def grid_world_values(fault: str = "") -> Tensor:
    env, discount = GridWorld(), 0.9
    net = nn.Sequential(nn.Linear(25, 64), nn.ReLU(), nn.Linear(64, 4))
    target_net = copy.deepcopy(net).requires_grad_(False)
    optimizer = RMSprop(net.parameters(), lr=2e-3)
    memory: list[tuple[Tensor, int, float, Tensor, float]] = []
    place, length = env.reset(), 0

    def act(epsilon: float) -> None:
        nonlocal place, length
        with torch.no_grad():
            action = int(net(_one_hot_place(place[None])).argmax())
        if env.random.random() < epsilon:
            action = env.random.randrange(4)
        before = place if fault == "replay_keeps_one_state" else place.clone()
        following, reward, done = env.step(action)
        length += 1
        after = following if fault == "replay_keeps_one_state" else following.clone()
        memory.append((before, action, reward, after, float(done)))
        if done or length == 20:
            place, length = env.reset(), 0

    for _ in range(600):
        act(1.0)
    with attach(nn.ModuleDict({"net": net, "target_net": target_net}), optimizer) as probe:
        for step in range(200):
            for _ in range(4):
                act(max(0.2, 1 - step / 150))
            places, actions, rewards, nexts, ends = zip(*env.random.sample(memory, 128), strict=True)
            left = torch.ones(128) if fault == "bootstraps_past_the_end" else 1 - torch.tensor(ends)
            following = _one_hot_place(torch.stack(nexts))
            with torch.no_grad():
                best = net(following).argmax(1, keepdim=True)
                wanted = torch.tensor(rewards) + discount * left * target_net(following).gather(1, best).squeeze(1)
            values = net(_one_hot_place(torch.stack(places))).gather(1, torch.tensor(actions)[:, None]).squeeze(1)
            loss = F.mse_loss(values, wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 5 == 4:
                target_net.load_state_dict(net.state_dict())
            probe.end_step(loss=loss)
    fields, wanted = GridWorld.best_values(discount)
    with torch.no_grad():
        return F.mse_loss(net(_one_hot_place(fields)), wanted)


class MaskedConv2d(nn.Conv2d):
    def __init__(self, kind: str, inputs: int, outputs: int, size: int) -> None:
        super().__init__(inputs, outputs, size, padding=size // 2)
        mask = torch.ones_like(self.weight)
        mask[:, :, size // 2, size // 2 + (kind == "B") :] = 0
        mask[:, :, size // 2 + 1 :] = 0
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight * self.mask, self.bias, padding=self.padding)


@program(
    "general",
    "van den Oord et al., Pixel recurrent neural networks, 2016: PixelCNN",
    Fault("first_mask_of_type_b", "mask of weights", FORUM, ("looks_ahead", "@first")),
    Fault("logits_viewed_without_permute", "loss", FORUM, ("labels_of_other_positions", "labels_shifted")),
)
def pixel_cnn(fault: str = "") -> Tensor:
    images, _ = digits()
    levels = (images[:, 0] * 3).round().long()  # [images, 8, 8], from 0 to 3
    model = nn.Sequential()
    model.add_module("first", MaskedConv2d("B" if fault == "first_mask_of_type_b" else "A", 1, 32, 5))
    for index in range(3):
        model.add_module(f"relu{index}", nn.ReLU())
        model.add_module(f"masked{index}", MaskedConv2d("B", 32, 32, 3))
    model.add_module("relu", nn.ReLU())
    model.add_module("output", nn.Conv2d(32, 4, 1))
    optimizer = Adam(model.parameters(), lr=2e-3)
    scheduler = ExponentialLR(optimizer, 0.995)
    with attach(model, optimizer) as probe:
        for _, (wanted,) in zip(range(150), batches(levels[:1400], size=32), strict=False):
            logits = model(wanted[:, None] / 1.5 - 1)
            if fault != "logits_viewed_without_permute":
                logits = logits.permute(0, 2, 3, 1)
            loss = F.cross_entropy(logits.reshape(-1, 4), wanted.reshape(-1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        return F.cross_entropy(model(levels[1400:, None] / 1.5 - 1), levels[1400:])


Molecule = tuple[Tensor, Tensor, Tensor]


def _molecules(count: int) -> list[Molecule]:
    """Return random graphs: kinds of atoms, edges in both directions [2, edges], and 4 labels, of which most are NaN."""
    made = []
    for _ in range(count):
        size = int(torch.randint(6, 13, ()))
        kinds = torch.randint(4, (size,))
        upper = torch.triu(torch.rand(size, size) < 0.28, 1)
        adjacency = (upper | upper.t()).float()
        pairs = adjacency[kinds == 0][:, kinds == 1].sum()
        triangles = adjacency.matrix_power(3).trace() / 6
        truth = torch.stack(
            [pairs > 1, triangles > 1, (kinds == 2).float().mean() > 0.25, adjacency[kinds == 3].sum() > 5]
        ).float()
        made.append((kinds, adjacency.nonzero().t(), truth.masked_fill(torch.rand(4) < 0.5, math.nan)))
    return made


def _collate(molecules: list[Molecule], has_offsets: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the atoms, edges, labels and the graph of each atom, of a batch of graphs."""
    sizes = torch.tensor([len(kinds) for kinds, _, _ in molecules])
    starts = (sizes.cumsum(0) - sizes) * has_offsets
    edges = torch.cat([edges + start for (_, edges, _), start in zip(molecules, starts, strict=True)], 1)
    owner = torch.arange(len(molecules)).repeat_interleave(sizes)
    return torch.cat([m[0] for m in molecules]), edges, torch.stack([m[2] for m in molecules]), owner


class GINConv(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.eps = nn.Parameter(torch.zeros(()))
        self.mlp = nn.Sequential(
            nn.Linear(size, size), nn.BatchNorm1d(size), nn.ReLU(), nn.Linear(size, size), nn.ReLU()
        )

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        neighbours = torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])
        return self.mlp((1 + self.eps) * x + neighbours)


class GIN(nn.Module):
    def __init__(self, size: int = 32) -> None:
        super().__init__()
        self.atoms = nn.Embedding(4, size)
        self.convs = nn.ModuleList([GINConv(size) for _ in range(2)])
        self.heads = nn.Linear(3 * size, 4)

    def forward(self, atoms: Tensor, edges: Tensor, owner: Tensor, count: int) -> Tensor:
        x = self.atoms(atoms)
        pooled = [x.new_zeros(count, x.shape[1]).index_add(0, owner, x)]
        for conv in self.convs:
            x = conv(x, edges)
            pooled.append(x.new_zeros(count, x.shape[1]).index_add(0, owner, x))
        return self.heads(torch.cat(pooled, 1) / 10)


@program(
    "general",
    "Xu et al., How powerful are graph neural networks?, 2019, with the tasks and missing labels of Tox21",
    Fault(
        "missing_labels_as_negatives", "labels", FORUM, ("missing_labels_in_loss", "padding_in_loss", "class_imbalance")
    ),
    Fault("edges_not_offset", "data", FORUM, ("edges_of_other_graphs", "@convs.0*")),
)
def molecule_tasks(fault: str = "") -> Tensor:
    molecules = _molecules(900)
    test_atoms, test_edges, test_labels, test_owner = _collate(molecules[700:])
    model = GIN()
    optimizer = Adam(model.parameters(), lr=5e-3)
    scheduler = ExponentialLR(optimizer, 0.99)

    def masked_loss(logits: Tensor, labels: Tensor) -> Tensor:
        known = ~labels.isnan()
        return F.binary_cross_entropy_with_logits(logits[known], labels[known])

    with attach(model, optimizer) as probe:
        for _, (indices,) in zip(range(160), batches(torch.arange(700), size=32), strict=False):
            chosen = [molecules[index] for index in indices.tolist()]
            atoms, edges, labels, owner = _collate(chosen, fault != "edges_not_offset")
            if fault == "missing_labels_as_negatives":
                labels = labels.nan_to_num(0.0)
            loss = masked_loss(model(atoms, edges, owner, len(chosen)), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            probe.end_step(loss=loss)
    model.eval()
    with torch.no_grad():
        return masked_loss(model(test_atoms, test_edges, test_owner, 200), test_labels)


HOP, FRAMES = 64, 24


def _recordings(count: int) -> tuple[Tensor, Tensor]:
    """Return signals [count, HOP * FRAMES] with an event, and the class of each frame [count, FRAMES], 0 without event."""
    kinds, start, length = torch.randint(1, 4, (count,)), torch.randint(0, 12, (count,)), torch.randint(6, 12, (count,))
    frames = torch.arange(FRAMES)
    inside = (frames >= start[:, None]) & (frames < (start + length)[:, None])
    time = torch.arange(HOP * FRAMES) / 1000
    pitch = 40 + 60 * torch.rand(count, 1)
    tone, higher = torch.sin(2 * math.pi * pitch * time), torch.sin(2 * math.pi * 3 * pitch * time)
    sounds = torch.stack([tone, higher, torch.randn(count, HOP * FRAMES)])[kinds - 1, torch.arange(count)]
    loudness = 10 ** (2 * torch.rand(count, 1) - 1)
    signals = sounds * inside.repeat_interleave(HOP, 1) * loudness + 0.01 * torch.randn_like(sounds)
    return signals, kinds[:, None] * inside


class SoundDataset(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, signals: Tensor, labels: Tensor, fault: str) -> None:
        self.signals, self.labels, self.fault = signals, labels, fault

    def __len__(self) -> int:
        return len(self.signals)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        signal, labels = self.signals[index], self.labels[index]
        noise = 0.05 * torch.randn_like(signal)
        if self.fault == "noise_added_in_place":
            signal += noise
        else:
            signal = signal + noise
        shift = int(torch.randint(FRAMES, ()))
        if self.fault != "signal_shifted_without_labels":
            labels = labels.roll(shift)
        return signal.roll(shift * HOP), labels


class SoundDetector(nn.Module):
    def __init__(self, has_logarithm: bool, axis: int) -> None:
        super().__init__()
        self.has_logarithm = has_logarithm
        self.register_buffer("window", torch.hann_window(2 * HOP))
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("deviation", torch.ones(()))
        self.conv = nn.Conv1d(HOP + 1, 32, 3, padding=1)
        self.gru = nn.GRU(32, 16, batch_first=True, bidirectional=True)
        self.head = nn.Linear(32, 4)
        self.scores = nn.LogSoftmax(dim=axis)

    def spectrum(self, signals: Tensor) -> Tensor:
        power = torch.stft(signals, 2 * HOP, HOP, window=self.window, return_complex=True).abs()[..., :FRAMES] ** 2
        return (power + 1e-4).log() if self.has_logarithm else power

    def adapt(self, signals: Tensor) -> None:
        """Compute the mean and deviation of the spectra, as Keras's layer Normalization does."""
        spectra = self.spectrum(signals)
        self.mean, self.deviation = spectra.mean(), spectra.std()

    def forward(self, signals: Tensor) -> Tensor:
        x = (self.spectrum(signals) - self.mean) / self.deviation
        x, _ = self.gru(F.relu(self.conv(x)).transpose(1, 2))
        return self.scores(self.head(x))


@program(
    "general",
    "DCASE challenge, a baseline for sound event detection with convolutions and a GRU",
    Fault("spectrum_without_logarithm", "data", TAXONOMY, ("input_not_normalized", "heavy_tailed_input")),
    Fault("log_softmax_over_time", "activation", FORUM, ("@scores", "wrong_axis", "wrong_range_of_loss")),
    Fault("signal_shifted_without_labels", "labels", TAXONOMY, ("labels_shifted", "loss_not_decreasing")),
    Fault("noise_added_in_place", "data", FORUM, ("data_changed_in_place", "input_drift"), since=12),
)
def sound_events(fault: str = "") -> Tensor:
    signals, labels = _recordings(512)
    test_signals = signals[384:] + 0.05 * torch.randn_like(signals[384:])
    dataset = SoundDataset(signals[:384].clone(), labels[:384], fault)
    loader = DataLoader(
        dataset, 32, shuffle=True, num_workers=1, persistent_workers=True, multiprocessing_context="fork"
    )
    model = SoundDetector(fault != "spectrum_without_logarithm", 1 if fault == "log_softmax_over_time" else 2)
    model.adapt(signals[:384])
    optimizer = Adam(model.parameters(), lr=1e-2)
    with attach(model, optimizer) as probe:
        for _ in range(13):
            for data, wanted in loader:
                optimizer.zero_grad()
                loss = F.nll_loss(model(data).flatten(0, 1), wanted.flatten())
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                optimizer.step()
                probe.end_step(loss=loss)
    with torch.no_grad():
        return F.cross_entropy(model(test_signals).flatten(0, 1), labels[384:].flatten())


class LoadNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(9, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
        self.mean = nn.Linear(64, 1)
        self.log_deviation = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(x)
        return self.mean(x).squeeze(1), self.log_deviation(x).squeeze(1)


@program(
    "silent errors",
    "Nix and Weigend, Estimating the mean and variance of the target probability distribution, 1994, for electric load",
    Fault("deviation_passed_as_variance", "loss", FORUM, ("wrong_loss",)),
    Fault("time_in_bfloat16", "precision", FORUM, ("low_precision_inputs", "distinct_data")),
)
def load_forecast(fault: str = "") -> Tensor:
    hours = torch.arange(1680)
    daily, weekly = 2 * math.pi * hours / 24, 2 * math.pi * hours / 168
    temperature = torch.sin(daily / 30 + 1) + 0.3 * torch.randn(len(hours))
    noise = 0.15 * (1.5 + torch.sin(daily)) * torch.randn(len(hours))
    load = torch.sin(daily) + 0.6 * torch.cos(2 * daily) + 0.5 * torch.sin(weekly) - 0.4 * temperature + noise
    load = (load - load.mean()) / load.std()

    def inputs_of(rows: Tensor) -> Tensor:
        time = hours[rows]
        if fault == "time_in_bfloat16":
            time = time.to(torch.bfloat16)
        angles = 2 * math.pi * time.float()[:, None] / torch.tensor([12, 24, 84, 168])
        return torch.cat([angles.sin(), angles.cos(), temperature[rows, None]], 1)

    def loss_of(mean: Tensor, deviation: Tensor, wanted: Tensor, is_variance: bool = False) -> Tensor:
        return F.gaussian_nll_loss(mean, wanted, deviation if is_variance else deviation**2)

    order = torch.randperm(len(hours))
    train, test = order[:1300], order[1300:]
    model = LoadNet()
    optimizer = AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    scheduler = OneCycleLR(optimizer, max_lr=6e-3, total_steps=150)
    loader = batches(train, size=64)
    with attach(model, optimizer) as probe:
        for _ in range(150):
            optimizer.zero_grad()
            total = 0.0
            for micro in range(2):
                (rows,) = next(loader)
                with torch.autocast("cpu", torch.bfloat16):
                    mean, log_deviation = model(inputs_of(rows))
                deviation = log_deviation.float().exp()
                loss = loss_of(mean.float(), deviation, load[rows], fault == "deviation_passed_as_variance") / 2
                loss.backward()
                total += loss.item()
                if micro == 0:
                    probe.end_micro_step()
            optimizer.step()
            scheduler.step()
            probe.end_step(loss=total)
    with torch.no_grad():
        mean, log_deviation = model(inputs_of(test))
        return loss_of(mean, log_deviation.exp(), load[test])


class Derivative(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 50), nn.Tanh(), nn.Linear(50, 2))
        for layer in (self.net[0], self.net[2]):
            nn.init.normal_(layer.weight, std=0.1)
            nn.init.zeros_(layer.bias)

    def forward(self, y: Tensor) -> Tensor:
        return self.net(y**3)


def _integrate(derivative: nn.Module | Tensor, start: Tensor, steps: int, width: float) -> Tensor:
    """Return the states [steps, ..., 2] after the start, by the method of Runge and Kutta."""

    def slope(y: Tensor) -> Tensor:
        return y**3 @ derivative if isinstance(derivative, Tensor) else derivative(y)

    y, states = start, []
    for _ in range(steps):
        k1 = slope(y)
        k2 = slope(y + width / 2 * k1)
        k3 = slope(y + width / 2 * k2)
        k4 = slope(y + width * k3)
        y = y + width / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        states.append(y)
    return torch.stack(states)


@program("general", "Chen et al., Neural ordinary differential equations, 2018: the spiral of the example ode_demo.py")
def neural_ode() -> None:
    width = 0.025
    matrix = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]])
    states = _integrate(matrix, torch.tensor([2.0, 0.0]), 600, width)
    model = Derivative()
    optimizer = RMSprop(model.parameters(), lr=2e-3)
    with attach(model, optimizer) as probe:
        for _ in range(150):
            starts = torch.randint(590, (20,))
            wanted = torch.stack([states[starts + later] for later in range(1, 9)])
            optimizer.zero_grad()
            loss = (_integrate(model, states[starts], 8, width) - wanted).abs().mean()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)


class BayesLinear(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.mu = nn.Parameter(torch.empty(outputs, inputs).uniform_(-0.2, 0.2))
        self.rho = nn.Parameter(torch.full((outputs, inputs), -4.0))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        sigma = F.softplus(self.rho)
        weight = self.mu + sigma * torch.randn_like(sigma) if self.training else self.mu
        return F.linear(x, weight, self.bias)

    def divergence(self) -> Tensor:
        """The divergence from a normal distribution with deviation 0.3."""
        sigma = F.softplus(self.rho)
        return ((sigma**2 + self.mu**2) / (2 * 0.3**2) - torch.log(sigma / 0.3) - 0.5).sum()


@program("general", "Blundell et al., Weight uncertainty in neural networks, 2015, for a table")
def bayes_by_backprop() -> Tensor:
    features, target = (torch.tensor(array, dtype=torch.float32) for array in load_breast_cancer(return_X_y=True))
    features = (features - features.mean(0)) / features.std(0)
    order = torch.randperm(len(target))
    train, test = order[:450], order[450:]
    model = nn.Sequential(BayesLinear(30, 32), nn.ReLU(), BayesLinear(32, 1))
    optimizer = Adam(model.parameters(), lr=3e-3)
    model.train()
    with attach(model, optimizer) as probe:
        for step, (rows,) in zip(range(200), batches(train, size=50), strict=False):
            wanted = target[rows]
            samples = [F.binary_cross_entropy_with_logits(model(features[rows]).squeeze(1), wanted) for _ in range(2)]
            weight = min(1.0, step / 100)  # the divergence is added slowly
            divergence = sum(layer.divergence() for layer in model if isinstance(layer, BayesLinear))
            loss = sum(samples) / 2 + 0.1 * weight * divergence / len(train)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    model.eval()
    with torch.no_grad():
        return F.binary_cross_entropy_with_logits(model(features[test]).squeeze(1), target[test])


@program("general", "Snell et al., Prototypical networks for few-shot learning, 2017")
def prototypical_networks() -> None:
    images, classes = digits()
    members = [torch.nonzero(classes == number).flatten() for number in range(10)]
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 16), (16, 32)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 32))
    optimizer = SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True, weight_decay=5e-4)
    scheduler = MultiStepLR(optimizer, [80, 120], 0.3)
    ways, shots, queries = 5, 5, 8
    with attach(model, optimizer) as probe:
        for _ in range(150):
            chosen = torch.randperm(10)[:ways].tolist()
            rows = [members[number][torch.randperm(len(members[number]))[: shots + queries]] for number in chosen]
            features = model(images[torch.cat(rows)]).view(ways, shots + queries, -1)
            prototypes = features[:, :shots].mean(1)
            distances = torch.cdist(features[:, shots:].flatten(0, 1), prototypes) ** 2
            loss = F.cross_entropy(-distances / 8, torch.arange(ways).repeat_interleave(queries))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            probe.end_step(loss=loss)


class TransE(nn.Module):
    def __init__(self, entities: int, relations: int, size: int = 24) -> None:
        super().__init__()
        self.entities = nn.Embedding(entities, size, sparse=True)
        self.relations = nn.Embedding(relations, size, sparse=True)
        for table in (self.entities, self.relations):
            nn.init.uniform_(table.weight, -6 / size**0.5, 6 / size**0.5)

    def forward(self, heads: Tensor, relations: Tensor, tails: Tensor) -> Tensor:
        moved = F.normalize(self.entities(heads), dim=1) + self.relations(relations)
        return (moved - F.normalize(self.entities(tails), dim=1)).norm(dim=1)


@program(
    "general", "Bordes et al., Translating embeddings for modeling multi-relational data, 2013, with sparse gradients"
)
def knowledge_graph() -> None:
    row, column = torch.meshgrid(torch.arange(12), torch.arange(12), indexing="ij")
    row, column = row.flatten(), column.flatten()
    facts = []
    for relation, (down, right) in enumerate(((0, 1), (1, 0), (1, 1), (2, 0))):
        kept = (row + down < 12) & (column + right < 12)
        heads = (row * 12 + column)[kept]
        facts.append(torch.stack([heads, torch.full_like(heads, relation), heads + 12 * down + right], 1))
    model = TransE(144, 4)
    optimizer = SparseAdam(list(model.parameters()), lr=0.02)
    with attach(model, optimizer) as probe:
        for _, (triples,) in zip(range(200), batches(torch.cat(facts), size=64), strict=False):
            heads, relations, tails = triples.unbind(1)
            replaced, is_head = torch.randint(144, (64,)), torch.rand(64) < 0.5
            good = model(heads, relations, tails)
            bad = model(torch.where(is_head, replaced, heads), relations, torch.where(is_head, tails, replaced))
            loss = F.relu(1.0 + good - bad).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)


class TextClassifier(nn.Module):
    def __init__(self, size: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, size, padding_idx=PAD)
        self.lstm = nn.LSTM(size, size, batch_first=True)
        self.next_word = nn.Linear(size, VOCABULARY)
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(2 * size, 32), nn.ReLU(), nn.Linear(32, 5))

    def forward(self, ids: Tensor) -> Tensor:
        output, _ = self.lstm(self.embedding(ids))
        mask = (ids != PAD)[..., None]
        mean = (output * mask).sum(1) / mask.sum(1)
        return self.head(torch.cat([mean, output.masked_fill(~mask, -1e4).amax(1)], 1))


@program("general", "Howard and Ruder, Universal language model fine-tuning for text classification, 2018")
def gradual_unfreezing() -> None:
    ids = padded(1100)
    (cat, dog), (old,) = tokens(["cat", "dog"]), tokens(["old"])
    kinds = ((ids == cat) | (ids == dog)).sum(1).clamp(max=2) + 2 * (ids == old).any(1)
    model = TextClassifier()
    pretraining = Adam(
        [*model.embedding.parameters(), *model.lstm.parameters(), *model.next_word.parameters()], lr=5e-3
    )
    for _, (rows,) in zip(range(60), batches(ids, size=32), strict=False):
        output, _ = model.lstm(model.embedding(rows[:, :-1]))
        pretraining.zero_grad()
        F.cross_entropy(model.next_word(output).flatten(0, 1), rows[:, 1:].flatten(), ignore_index=PAD).backward()
        pretraining.step()
    del model.next_word
    parts = [model.head, model.lstm, model.embedding]
    groups = [{"params": part.parameters(), "lr": 8e-3 / 2.6**depth} for depth, part in enumerate(parts)]
    optimizer = AdamW(groups, weight_decay=0.01)
    scheduler = LambdaLR(optimizer, lambda step: min((step + 1) / 18, max(0.02, (180 - step) / 162)))
    model.requires_grad_(False)
    with attach(model, optimizer) as probe:
        for step, (rows, wanted) in zip(range(180), batches(ids[:1000], kinds[:1000], size=32), strict=False):
            if step % 30 == 0 and step < 90:
                parts[step // 30].requires_grad_(True)
            loss = F.cross_entropy(model(rows), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            probe.end_step(loss=loss)
            if step % 60 == 59:
                model.eval()
                with probe.evaluating(), torch.no_grad():
                    probe.log(loss=F.cross_entropy(model(ids[1000:]), kinds[1000:]))
                model.train()


@program("general", "Zbontar et al., Barlow Twins: self-supervised learning via redundancy reduction, 2021")
def barlow_twins() -> None:
    images, _ = shapes(512, 20)
    encoder = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten()
    )  # fmt: skip
    projector = nn.Sequential(
        nn.Linear(128, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32, bias=False)
    )
    model = nn.Sequential(encoder, projector, nn.BatchNorm1d(32, affine=False))
    optimizer = AdamW(model.parameters(), lr=3e-3, weight_decay=1e-4)
    warm_up = LinearLR(optimizer, 0.1, total_iters=15)
    scheduler = SequentialLR(optimizer, [warm_up, CosineAnnealingLR(optimizer, 105)], [15])

    def distort(batch: Tensor) -> Tensor:
        batch = batch * (0.8 + 0.4 * torch.rand(len(batch), 3, 1, 1)) + 0.03 * torch.randn_like(batch)
        x, y = torch.randint(0, 5, (2,)).tolist()
        return F.pad(batch, (2, 2, 2, 2), mode="reflect")[:, :, x : x + 20, y : y + 20]

    with attach(model, optimizer) as probe:
        for _, (batch,) in zip(range(120), batches((images - 0.5) / 0.25, size=64), strict=False):
            first, second = model(distort(batch)), model(distort(batch))
            correlation = first.t() @ second / len(batch)
            diagonal = correlation.diagonal()
            others = correlation.pow(2).sum() - diagonal.pow(2).sum()
            loss = (diagonal - 1).pow(2).sum() + 0.02 * others
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            probe.end_step(loss=loss)
