"""Programs after published ones, from federated learning to normalizing flows, with errors of pipelines that users reported."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from data import batches, digits, shapes
from registry import Fault, attach, in_two_processes, program
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, PolynomialLR

TAXONOMY = "Humbatova et al., Taxonomy of real faults in deep learning systems, 2020"
TRAINCHECK = (
    "Jiang et al., Training with confidence: catching silent errors in deep learning training (TrainCheck), 2025"
)
PORTS = "Hidasi and Czapp, The effect of third party implementations on reproducibility, 2023"
FORUM = "Questions at discuss.pytorch.org and Stack Overflow, 2018 to 2026"
ISSUES = "Issues of libraries for training and of examples at GitHub, 2018 to 2026"


def _average(tensors: Iterable[Any], share: float = 0.5) -> None:
    """Replace tensors by their sums over the ranks, with a share for this rank."""
    for tensor in tensors:
        tensor.mul_(share)
        dist.all_reduce(tensor)


def _convnet(channels: int, classes: int) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict({
            "conv1": nn.Conv2d(1, channels, 3, 1, 1), "relu1": nn.ReLU(), "pool1": nn.MaxPool2d(2),
            "conv2": nn.Conv2d(channels, 2 * channels, 3, 1, 1), "relu2": nn.ReLU(), "pool2": nn.MaxPool2d(2),
            "flatten": nn.Flatten(), "fc": nn.Linear(8 * channels, 48), "relu3": nn.ReLU(),
            "head": nn.Linear(48, classes),
        })
    )  # fmt: skip


def _train_clients(rank: int, fault: str, final: Tensor) -> None:
    images, classes = digits()
    order = torch.randperm(len(images))
    images, classes = (images[order] - images.mean()) / images.std(), classes[order]
    images[1050:1200] = images[1050:1200].flip(3) + 0.7 * torch.randn(150, 1, 8, 8)  # a small client with a bad scanner
    rows = (slice(0, 1050), slice(1050, 1200))[rank]
    sizes = torch.tensor([1050.0, 150.0])
    share = 0.5 if fault == "averaged_without_the_sizes" else float(sizes[rank] / sizes.sum())
    model = _convnet(10, 10)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    with attach(model, optimizer) as probe:
        for step, (data, wanted) in zip(range(300), batches(images[rows], classes[rows], size=16), strict=False):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), wanted)
            loss.backward()
            optimizer.step()
            if step % 10 == 9:  # the end of a round
                with torch.no_grad():
                    _average(model.parameters(), share)
            probe.end_step(loss=loss)
    if rank == 0:
        with torch.no_grad():
            final.copy_(F.cross_entropy(model(images[1200:]), classes[1200:]))


@program(
    "silent errors",
    "McMahan et al., Communication-efficient learning of deep networks from decentralized data, 2017, and Flower, for two clients",
    Fault(
        "averaged_without_the_sizes",
        "replicas",
        ISSUES,
        ("replicas_differ", "replicas_equal", "parameters_follow_gradients", "update_ratio", "distinct_data"),
        since=9,
    ),
)
def digits_of_clients(fault: str = "") -> Tensor:
    final = torch.zeros(()).share_memory_()
    in_two_processes(_train_clients, fault, final)
    return final


class Gathered(Function):
    """The rows of all ranks, with a gradient for those of this rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        parts = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient)
        return gradient.chunk(2)[dist.get_rank()]


def _two_views(images: Tensor) -> Tensor:
    """Return the first views of images, and then the second ones."""
    views = torch.cat([images, images])
    shift = int(torch.randint(-1, 2, ()))
    views = views.roll(shift, 3) * (0.7 + 0.6 * torch.rand(len(views), 1, 1, 1))
    return views + 0.5 * torch.randn_like(views)


def _contrast(anchors: Tensor, others: Tensor, labels: Tensor, labels_there: Tensor, offset: int) -> Tensor:
    """Return the loss of anchors, which are rows of the others from an offset."""
    logits = anchors @ others.t() / 0.1
    own = torch.arange(len(anchors))
    is_self = torch.zeros_like(logits, dtype=torch.bool)
    is_self[own, own + offset] = True
    shares = F.log_softmax(logits.masked_fill(is_self, -1e9), 1)
    is_positive = ((labels[:, None] == labels_there) & ~is_self).float()
    return -((shares * is_positive).sum(1) / is_positive.sum(1)).mean()


def _train_views(rank: int, fault: str, final: Tensor) -> None:
    images, classes = digits()
    order = torch.randperm(len(images))
    images, classes = (images[order] - images.mean()) / images.std(), classes[order]
    model = _convnet(8, 24)
    optimizer = SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    schedule = CosineAnnealingLR(optimizer, 200)
    rows = batches(images[rank:1400:2], classes[rank:1400:2], size=20)
    torch.manual_seed(torch.initial_seed() + rank)  # each rank draws its own views
    with attach(model, optimizer) as probe:
        for _, (data, classes_of_data) in zip(range(200), rows, strict=False):
            is_interleaved = fault == "labels_repeated_sample_by_sample"
            labels = classes_of_data.repeat_interleave(2) if is_interleaved else classes_of_data.repeat(2)
            optimizer.zero_grad()
            vectors = F.normalize(model(_two_views(data)), dim=1)
            there = Gathered.apply(vectors.detach() if fault == "gathered_without_gradients" else vectors)
            loss = _contrast(vectors, there, labels, Gathered.apply(labels), rank * len(vectors))
            loss.backward()
            _average(parameter.grad for parameter in model.parameters())
            optimizer.step()
            schedule.step()
            probe.end_step(loss=loss)
    if rank == 0:
        with torch.no_grad():
            vectors = F.normalize(model(_two_views(images[1400:])), dim=1)
            labels = classes[1400:].repeat(2)
            final.copy_(_contrast(vectors, vectors, labels, labels, 0))


@program(
    "silent errors",
    "Khosla et al., Supervised contrastive learning, 2020, and its code, with the views of two ranks, for digits",
    Fault(
        "gathered_without_gradients",
        "graph",
        ISSUES,
        ("parameters_follow_gradients", "vanishing_gradient", "replicas_differ", "update_ratio", "@head"),
    ),
    Fault(
        "labels_repeated_sample_by_sample",
        "labels",
        ISSUES,
        ("labels_of_other_positions", "labels_shifted", "wrong_loss", "loss_not_decreasing", "overtraining"),
    ),
)
def views_of_two_ranks(fault: str = "") -> Tensor:
    final = torch.zeros(()).share_memory_()
    in_two_processes(_train_views, fault, final)
    return final


SIZES = (40, 60, 25, 12, 30, 8, 20, 50)  # the values of each field


class DeepFM(nn.Module):
    """A logit from the sums, the products of pairs and a network of the vectors of eight fields."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.register_buffer("offsets", torch.tensor((0, *SIZES[:-1])).cumsum(0))
        self.weights, self.vectors = nn.Embedding(sum(SIZES), 1), nn.Embedding(sum(SIZES), 10)
        nn.init.zeros_(self.weights.weight)
        if fault != "vectors_of_the_default_deviation":
            nn.init.xavier_uniform_(self.vectors.weight)
        is_repeated = fault == "one_layer_repeated"
        hidden = [self._layer(64)] * 3 if is_repeated else [self._layer(64) for _ in range(3)]
        self.deep = nn.Sequential(self._layer(80), *hidden, nn.Linear(64, 1))
        self.bias = nn.Parameter(torch.zeros(1))

    @staticmethod
    def _layer(inputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(inputs, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1))

    def forward(self, fields: Tensor) -> Tensor:
        rows = fields + self.offsets
        vectors = self.vectors(rows)
        pairs = 0.5 * (vectors.sum(1).square() - vectors.square().sum(1)).sum(1)
        return self.bias + self.weights(rows).sum((1, 2)) + pairs + self.deep(vectors.flatten(1)).squeeze(1)


def _impressions(size: int) -> tuple[Tensor, Tensor]:
    """Return the values of eight fields [size, 8], and whether there was a click."""
    fields = torch.stack([(values * torch.rand(size).square()).long() for values in SIZES], 1)
    tastes = [torch.randn(values, 4) for values in SIZES]
    vectors = torch.stack([taste[fields[:, at]] for at, taste in enumerate(tastes)], 1)
    first = vectors[:, :, 0].sum(1)
    pairs = (vectors[:, 0] * vectors[:, 1]).sum(1) + (vectors[:, 2] * vectors[:, 7]).sum(1)
    score = 0.6 * first + 0.7 * pairs + (vectors[:, 3, 1] * vectors[:, 4, 2] * vectors[:, 5, 3]).tanh() - 1.0
    return fields, torch.bernoulli(score.sigmoid())


@program(
    "general",
    "Guo et al., DeepFM: a factorization-machine based neural network for CTR prediction, 2017, and pytorch-fm, for advertisements",
    Fault(
        "vectors_of_the_default_deviation",
        "initialization",
        TAXONOMY,
        ("poor_initialization", "tensor_variance", "overfit", "exploding_activation", "loss_spike", "@vectors"),
    ),
    Fault(
        "one_layer_repeated",
        "registration",
        FORUM,
        ("tied_weights", "parameters_follow_gradients", "@deep.1*", "@deep.2*", "@deep.3*"),
    ),
)
def clicks_on_fields(fault: str = "") -> Tensor:
    fields, clicks = _impressions(16000)
    model = DeepFM(fault)
    optimizer = Adam(model.parameters(), lr=4e-3, weight_decay=1e-6)
    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(350), batches(fields[:14000], clicks[:14000], size=128), strict=False):
            optimizer.zero_grad()
            loss = F.binary_cross_entropy_with_logits(model(data), wanted)
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    model.eval()
    with torch.no_grad():
        return F.binary_cross_entropy_with_logits(model(fields[14000:]), clicks[14000:])


class DenseBlock(nn.Module):
    """Two linear layers, a linear shortcut, and a normalization."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.fc1, self.relu, self.fc2 = nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, outputs)
        self.dropout, self.shortcut = nn.Dropout(0.1), nn.Linear(inputs, outputs)
        self.norm = nn.LayerNorm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.dropout(self.fc2(self.relu(self.fc1(x)))) + self.shortcut(x))


class DenseForecast(nn.Module):
    """Return three quantiles of the sales of seven days, from those of 28 days before and the features of all 35."""

    def __init__(self) -> None:
        super().__init__()
        self.features = DenseBlock(3, 4)
        self.encoder = nn.Sequential(DenseBlock(28 + 4 * 35, 64), DenseBlock(64, 64))
        self.decoder = DenseBlock(64, 7 * 8)
        self.temporal = DenseBlock(8 + 4, 16)
        self.quantiles, self.shortcut = nn.Linear(16, 3), nn.Linear(28, 7)

    def forward(self, windows: Tensor) -> Tensor:
        past, features = windows[:, :28, 0], self.features(windows[:, :, 1:])
        hidden = self.decoder(self.encoder(torch.cat([past, features.flatten(1)], 1)))
        each_day = torch.cat([hidden.view(-1, 7, 8), features[:, 28:]], 2)
        return self.quantiles(self.temporal(each_day)) + self.shortcut(past)[:, :, None]


def _shops(shops: int, days: int) -> Tensor:
    """Return for each shop and day the sales, the phase of the week and whether there is an offer [shops, days, 4]."""
    day = torch.arange(float(days)).expand(shops, days)
    level, growth = 1.5 * torch.randn(shops, 1), 0.01 * torch.randn(shops, 1)
    offers = (torch.rand(shops, days) < 0.15).float()
    week = torch.randn(shops, 7).gather(1, day.long() % 7)
    noise = (0.25 + 0.25 * offers) * torch.randn(shops, days)
    slow = (0.2 * torch.randn(shops, days)).cumsum(1)
    sales = level + growth * day + 0.5 * slow + 0.6 * week + 0.9 * offers + noise
    sales = (sales - sales.mean()) / sales.std()
    phase = 2 * math.pi * day / 7
    return torch.stack([sales, phase.sin(), phase.cos(), offers], 2)


QUANTILES = torch.tensor([0.1, 0.5, 0.9])


def _pinball(found: Tensor, wanted: Tensor) -> Tensor:
    """Return the loss of quantiles [samples, days, 3] for the values of days."""
    errors = wanted[:, :, None] - found
    return torch.maximum(QUANTILES * errors, (QUANTILES - 1) * errors).mean()


@program(
    "keras",
    "Das et al., Long-term forecasting with TiDE: time-series dense encoder, 2023, with the windows of Keras's timeseries_dataset",
    Fault(
        "windows_over_the_ends_of_shops",
        "data",
        FORUM,
        ("edges_of_other_graphs", "input_drift", "heavy_tailed_input", "labels_of_other_positions", "distinct_data"),
    ),
    Fault(
        "errors_of_the_other_sign",
        "loss",
        FORUM,
        ("wrong_loss", "wrong_range_of_loss", "loss_not_decreasing", "@quantiles"),
    ),
)
def sales_of_a_chain(fault: str = "") -> Tensor:
    shops = _shops(60, 90)
    train, test = shops[:, :70], shops[:, 55:]
    if fault == "windows_over_the_ends_of_shops":
        windows = train.flatten(0, 1).unfold(0, 35, 1).mT
    else:
        windows = train.unfold(1, 35, 1).flatten(0, 1).mT
    windows = windows.contiguous()
    model = DenseForecast()
    optimizer = Adam(model.parameters(), lr=2e-3)
    with attach(model, optimizer) as probe:
        for _, (data,) in zip(range(300), batches(windows, size=64), strict=False):
            optimizer.zero_grad()
            found, wanted = model(data), data[:, 28:, 0]
            is_reversed = fault == "errors_of_the_other_sign"
            loss = _pinball(-found, -wanted) if is_reversed else _pinball(found, wanted)
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    model.eval()
    with torch.no_grad():
        return _pinball(model(test), test[:, 28:, 0])


class AudioNet(nn.Module):
    """Features of spectra in decibels, and a head."""

    def __init__(self, kinds: int) -> None:
        super().__init__()
        self.norm0 = nn.BatchNorm2d(1)
        self.body = nn.Sequential(
            nn.Conv2d(1, 12, 3, 2, 1, bias=False), nn.BatchNorm2d(12), nn.ReLU(),
            nn.Conv2d(12, 24, 3, 2, 1, bias=False), nn.BatchNorm2d(24), nn.ReLU(),
            nn.Conv2d(24, 48, 3, 2, 1, bias=False), nn.BatchNorm2d(48), nn.ReLU(),
        )  # fmt: skip
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(48, kinds)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.body(self.norm0(x))).flatten(1))


def _sounds(size: int, first: int, kinds: int) -> tuple[Tensor, Tensor]:
    """Return spectra [size, 1, 32, 32] of sounds in decibels from -80 to 0, and their kinds."""
    labels = torch.arange(size) % kinds
    generator = torch.Generator().manual_seed(0)
    pitch, slope, pulses, width = (torch.rand(16, generator=generator)[labels + first, None, None] for _ in range(4))
    band, time = torch.linspace(0, 1, 32)[:, None], torch.linspace(0, 1, 32)
    start = 0.6 * torch.rand(size, 1, 1)
    height = 0.2 + 0.5 * pitch + (0.6 * slope - 0.3) * time + 0.08 * torch.randn(size, 1, 1)
    line = (-((band - height) / (0.03 + 0.08 * width)).square()).exp()
    line = line + 0.5 * (-((band - 1.5 * height) / (0.03 + 0.08 * width)).square()).exp()
    beat = 0.5 + 0.5 * (2 * math.pi * ((1 + 6 * pulses) * time + torch.rand(size, 1, 1))).cos()
    is_on = ((time > start) & (time < start + 0.4)).float()
    power = line * beat * is_on * 10 ** (-1.5 * torch.rand(size, 1, 1))
    power = power + 0.01 * torch.rand(size, 32, 32).clamp(min=1e-4) * 10 ** (-torch.rand(size, 1, 1))
    return 10 * power[:, None].clamp(1e-8, 1).log10(), labels


def _masked(spectra: Tensor, value: float) -> Tensor:
    """Return spectra of which a group of bands and a group of frames have a value."""
    spectra = spectra.clone()
    for spectrum in spectra[:, 0]:
        band, frame = torch.randint(26, (2,)).tolist()
        spectrum[band : band + int(torch.randint(7, ()))] = value
        spectrum[:, frame : frame + int(torch.randint(7, ()))] = value
    return spectra


def _pretrain_sounds(model: AudioNet) -> None:
    optimizer = Adam(model.parameters(), lr=5e-3)
    for _, (data, wanted) in zip(range(150), batches(*_sounds(1200, 0, 10), size=32), strict=False):
        optimizer.zero_grad()
        F.cross_entropy(model(data), wanted).backward()
        optimizer.step()


@program(
    "silent errors",
    "Kong et al., PANNs, 2020, as frozen features, with the masks of Park et al., SpecAugment, 2019, and of torchaudio, for few sounds",
    Fault(
        "masked_with_the_loudest_value",
        "data",
        ISSUES,
        ("input_drift", "input_not_normalized", "samples_vary", "distinct_data", "@norm0"),
    ),
    Fault(
        "requires_grad_misspelled",
        "frozen parameters",
        FORUM,
        ("parameters_follow_gradients", "update_ratio@body*", "overfit", "@body*", "@norm0"),
    ),
)
def few_sounds(fault: str = "") -> Tensor:
    model = AudioNet(10)
    _pretrain_sounds(model)
    model.head = nn.Linear(48, 6)
    for parameter in (*model.norm0.parameters(), *model.body.parameters()):
        if fault == "requires_grad_misspelled":
            parameter.require_grad = False
        else:
            parameter.requires_grad = False
    spectra, kinds = _sounds(600, 10, 6)
    value = 0.0 if fault == "masked_with_the_loudest_value" else float(spectra.mean())
    model.eval()  # the statistics of the norms stay those of the pretraining
    optimizer = Adam(model.parameters(), lr=1e-2)
    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(250), batches(spectra[:120], kinds[:120], size=20), strict=False):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(_masked(data, value)), wanted)
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        return F.cross_entropy(model(spectra[120:]), kinds[120:])


class GraphConv(nn.Module):
    """A linear function of the means over neighbours, with the normalized adjacency of the first call if it is cached."""

    def __init__(self, inputs: int, outputs: int, is_cached: bool) -> None:
        super().__init__()
        self.is_cached, self.cache = is_cached, None
        self.linear, self.own = nn.Linear(inputs, outputs, bias=False), nn.Linear(inputs, outputs)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        if self.cache is None or not self.is_cached:
            degree = adjacency.sum(2).clamp(min=1e-6).rsqrt()
            self.cache = degree[:, :, None] * adjacency * degree[:, None]
        return self.own(x) + self.cache @ self.linear(x)


class GridNet(nn.Module):
    """Return the voltages of the nodes of grids, from the currents at the nodes and the lines that are on."""

    def __init__(self, is_cached: bool) -> None:
        super().__init__()
        self.first = nn.Linear(3, 32)
        self.convs = nn.ModuleList([GraphConv(32, 32, is_cached) for _ in range(5)])
        self.norms = nn.ModuleList([nn.LayerNorm(32) for _ in range(5)])
        self.head = nn.Linear(32, 1)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        x = self.first(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = x + conv(norm(x), adjacency).relu()
        return self.head(x).squeeze(2)


def _grids(size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the features of nodes [size, 24, 3], the conductances of lines [size, 24, 24], and the voltages [size, 24]."""
    nodes = torch.arange(24)
    ends = torch.cat([torch.stack([nodes, (nodes + 1) % 24]), torch.randint(24, (2, 16))], 1)
    ends = ends[:, ends[0] != ends[1]]
    lines = (0.5 + 2 * torch.rand(ends.size(1))) * (torch.rand(size, ends.size(1)) > 0.25)  # a quarter is out of order
    adjacency = torch.zeros(size, 24, 24)
    adjacency.index_put_((torch.arange(size)[:, None], ends[0], ends[1]), lines, accumulate=True)
    adjacency = adjacency + adjacency.mT
    currents = torch.randn(size, 24)
    ground = 0.3 + 0.4 * torch.rand(size, 24)
    system = torch.diag_embed(adjacency.sum(2) + ground) - adjacency
    voltages = torch.linalg.solve(system, currents)
    return torch.stack([currents, ground, adjacency.sum(2)], 2), adjacency, voltages / voltages.std()


@program(
    "general",
    "Kipf and Welling, GCN, 2017, with PyTorch Geometric's GCNConv, as in Donon et al., Neural networks for power flow, 2020",
    Fault(
        "lines_of_the_first_batch_cached",
        "data",
        ISSUES,
        ("edges_of_other_graphs", "distinct_data", "samples_vary", "zero_message", "@convs*"),
        since=1,
    ),
)
def voltages_of_grids(fault: str = "") -> Tensor:
    x, adjacency, voltages = _grids(2000)
    model = GridNet(fault == "lines_of_the_first_batch_cached")
    optimizer = Adam(model.parameters(), lr=3e-3)
    with attach(model, optimizer) as probe:
        rows = batches(x[:1680], adjacency[:1680], voltages[:1680], size=32)
        for _, (nodes, lines, wanted) in zip(range(260), rows, strict=False):
            optimizer.zero_grad()
            loss = F.mse_loss(model(nodes, lines), wanted)
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        tests = zip(*(each[1680:].split(32) for each in (x, adjacency, voltages)), strict=True)
        return torch.stack([F.mse_loss(model(nodes, lines), wanted) for nodes, lines, wanted in tests]).mean()


class Velocity(nn.Module):
    """Return the velocities of noisy digits at times, for classes of which 10 stands for any."""

    def __init__(self) -> None:
        super().__init__()
        self.times = nn.Sequential(nn.Linear(16, 48), nn.SiLU(), nn.Linear(48, 32))
        self.classes = nn.Embedding(11, 32)
        self.first = nn.Conv2d(1, 32, 3, 1, 1)
        self.norms = nn.ModuleList([nn.GroupNorm(4, 32) for _ in range(3)])
        self.convs = nn.ModuleList([nn.Conv2d(32, 32, 3, 1, 1) for _ in range(3)])
        self.last = nn.Conv2d(32, 1, 3, 1, 1)

    def forward(self, x: Tensor, time: Tensor, classes: Tensor) -> Tensor:
        angles = 1000 * time[:, None] * torch.logspace(0, -4, 8)
        condition = self.times(torch.cat([angles.sin(), angles.cos()], 1)) + self.classes(classes)
        x = self.first(x)
        for norm, conv in zip(self.norms, self.convs, strict=True):
            x = x + conv(F.silu(norm(x + condition[:, :, None, None])))
        return self.last(F.silu(x))


def _velocity_loss(model: Velocity, images: Tensor, classes: Tensor) -> Tensor:
    """Return the loss with the weights of Hang et al. for velocities."""
    time = 0.02 + 0.96 * torch.rand(len(images))
    signal, noise = (
        (0.5 * math.pi * time)[:, None, None, None].cos(),
        (0.5 * math.pi * time)[:, None, None, None].sin(),
    )
    added = torch.randn_like(images)
    found = model(signal * images + noise * added, time, classes)
    ratio = (signal / noise).square().flatten()
    errors = (found - (signal * added - noise * images)).square().mean((1, 2, 3))
    return (ratio.clamp(max=5) / (ratio + 1) * errors).mean()


@program(
    "general",
    "Salimans and Ho, Progressive distillation, 2022, and diffusers: velocities with the weights of Hang et al., 2023, for digits",
)
def velocities_of_digits() -> Tensor:
    images, classes = digits()
    order = torch.randperm(len(images))
    images, classes = 2 * images[order] - 1, classes[order]
    model = Velocity()
    optimizer = AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.99), weight_decay=1e-2)
    schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 30))
    with attach(model, optimizer) as probe:
        for _, (data, labels) in zip(range(260), batches(images[:1400], classes[:1400], size=32), strict=False):
            optimizer.zero_grad()
            loss = _velocity_loss(model, data, labels.where(torch.rand(32) > 0.1, 10))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        return _velocity_loss(model, images[1400:], classes[1400:])


class ActNorm(nn.Module):
    """Scale and move channels; the first batch gets the mean 0 and the deviation 1."""

    def __init__(self, channels: int, is_flag_saved: bool) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(1, channels, 1, 1))
        self.shift = nn.Parameter(torch.zeros(1, channels, 1, 1))
        self.register_buffer("is_initialized", torch.tensor(False), persistent=is_flag_saved)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            with torch.no_grad():
                self.shift.copy_(-x.mean((0, 2, 3), keepdim=True))
                self.log_scale.copy_(-(x.std((0, 2, 3), keepdim=True) + 1e-3).log())
                self.is_initialized.fill_(True)
        return (x + self.shift) * self.log_scale.exp(), x[0, 0].numel() * self.log_scale.sum()


class FlowStep(nn.Module):
    """A normalization, an orthogonal start of a mixing of channels, and an affine coupling."""

    def __init__(self, channels: int, is_flag_saved: bool) -> None:
        super().__init__()
        self.norm = ActNorm(channels, is_flag_saved)
        self.mixing = nn.Parameter(torch.linalg.qr(torch.randn(channels, channels))[0])
        self.net = nn.Sequential(
            nn.Conv2d(channels // 2, 24, 3, 1, 1), nn.ReLU(), nn.Conv2d(24, 24, 1), nn.ReLU(),
            nn.Conv2d(24, channels, 3, 1, 1),
        )  # fmt: skip
        nn.init.zeros_(self.net[4].weight)
        nn.init.zeros_(self.net[4].bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, volume = self.norm(x)
        x = torch.einsum("oc,bchw->bohw", self.mixing, x)
        volume = volume + x[0, 0].numel() * torch.linalg.slogdet(self.mixing)[1]
        kept, moved = x.chunk(2, 1)
        shift, scale = self.net(kept).chunk(2, 1)
        scale = scale.tanh()
        return torch.cat([kept, (moved + shift) * scale.exp()], 1), volume + scale.sum((1, 2, 3))


class Glow(nn.Module):
    """Return the bits per pixel of images [samples, 1, 8, 8] with values from 0 to 1."""

    def __init__(self, is_flag_saved: bool) -> None:
        super().__init__()
        self.squeeze = nn.PixelUnshuffle(2)
        self.fine = nn.ModuleList([FlowStep(4, is_flag_saved) for _ in range(3)])
        self.coarse = nn.ModuleList([FlowStep(16, is_flag_saved) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        volume = torch.zeros(len(x))
        x = x - 0.5
        for steps in (self.fine, self.coarse):
            x = self.squeeze(x)
            for step in steps:
                x, more = step(x)
                volume = volume + more
        likelihood = -0.5 * (x.square() + math.log(2 * math.pi)).sum((1, 2, 3)) + volume
        return math.log2(17) - likelihood.mean() / (64 * math.log(2))


def _train_flow(
    steps: int, model: Glow, optimizer: Adam, rows: Iterator[tuple[Tensor, ...]], noise: float
) -> Iterator[Tensor]:
    for _, (pixels,) in zip(range(steps), rows, strict=False):
        optimizer.zero_grad()
        loss = model((pixels + noise * torch.rand_like(pixels)) / 17)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        yield loss


@program(
    "general",
    "Kingma and Dhariwal, Glow: generative flow with invertible 1x1 convolutions, 2018, and glow-pytorch, after a restart",
    Fault(
        "flag_of_the_initialization_not_saved",
        "loading",
        ISSUES,
        ("weights_loaded", "parameters_follow_gradients", "loss_spike", "update_ratio", "@*.norm"),
    ),
    Fault(
        "pixels_without_noise",
        "data",
        FORUM,
        (
            "distinct_data",
            "samples_vary",
            "wrong_range_of_loss",
            "exploding_activation",
            "exploding_gradient",
            "all_zero",
        ),
    ),
)
def restarted_flow(fault: str = "") -> Tensor:
    pixels = (16 * digits()[0])[torch.randperm(1797)]
    rows = batches(pixels[:1400], size=32)
    noise = 0.0 if fault == "pixels_without_noise" else 1.0
    is_flag_saved = fault != "flag_of_the_initialization_not_saved"
    model = Glow(is_flag_saved)
    optimizer = Adam(model.parameters(), lr=2e-3)
    for _ in _train_flow(60, model, optimizer, rows, noise):
        pass
    saved = model.state_dict(), optimizer.state_dict()
    model = Glow(is_flag_saved)
    optimizer = Adam(model.parameters(), lr=2e-3)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    with attach(model, optimizer) as probe:
        for loss in _train_flow(200, model, optimizer, rows, noise):
            probe.end_step(loss=loss)
    with torch.no_grad():
        return model((pixels[1400:] + torch.rand(397, 1, 8, 8)) / 17)


class Dueling(nn.Module):
    """Return the values of three pushes, from the value of a state and the advantages of the pushes."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.is_mean_of_batch = fault == "advantages_centred_over_the_batch"
        self.body = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.value, self.advantages = nn.Linear(64, 1), nn.Linear(64, 3)

    def forward(self, states: Tensor) -> Tensor:
        hidden = self.body(states)
        advantages = self.advantages(hidden)
        mean = advantages.mean() if self.is_mean_of_batch else advantages.mean(1, keepdim=True)
        return self.value(hidden) + advantages - mean


def _pushed(states: Tensor, pushes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the next places and speeds of poles [poles, 2], the rewards, and whether the poles have fallen."""
    place, speed = states.unbind(1)
    speed = 0.95 * speed + 0.12 * (pushes - 1) + 0.08 * place + 0.03 * torch.randn_like(place)
    place = place + speed
    has_fallen = (place.abs() > 1.5).float()
    return torch.stack([place, speed], 1), (1 - has_fallen) * (-2 * place.square()).exp(), has_fallen


def _poles(count: int) -> tuple[Tensor, ...]:
    """Return states, pushes, rewards, next states, whether the poles have fallen, and whether 12 steps of an episode are over."""
    states = torch.tensor([1.0, 0.2]) * (2 * torch.rand(count, 2) - 1)
    found, age = [], torch.randint(12, (count,))
    for _ in range(30):
        best = (1 - (2 * states.sum(1)).clamp(-1, 1)).round().long()
        pushes = best.where(torch.rand(count) < 0.4, torch.randint(3, (count,)))
        after, rewards, has_fallen = _pushed(states, pushes)
        age = age + 1
        is_late = (age >= 12).float()
        found.append((states, pushes, rewards, after, has_fallen, is_late))
        starts_again = (has_fallen + is_late) > 0
        fresh = torch.tensor([1.0, 0.2]) * (2 * torch.rand(count, 2) - 1)
        states, age = fresh.where(starts_again[:, None], after), age.masked_fill(starts_again, 0)
    return tuple(torch.cat(each) for each in zip(*found, strict=True))


@program(
    "general",
    "Wang et al., Dueling network architectures for deep reinforcement learning, 2016, and Gymnasium's time limits, for poles",
    Fault(
        "time_limit_taken_as_the_end",
        "labels",
        ISSUES,
        ("ends_bootstrapped", "wrong_loss", "labels_shifted", "wrong_range_of_loss"),
    ),
    Fault(
        "advantages_centred_over_the_batch",
        "architecture",
        FORUM,
        ("edges_of_other_graphs", "wrong_axis", "samples_vary", "@advantages", "@value"),
    ),
)
def balanced_poles(fault: str = "") -> Tensor:
    replay = _poles(300)
    model, target = nn.ModuleDict({"q": Dueling(fault)}), Dueling(fault)
    target.load_state_dict(model["q"].state_dict())
    model["target"] = target.requires_grad_(False)
    optimizer = Adam(model["q"].parameters(), lr=2e-3)
    with attach(model, optimizer) as probe:
        for step, (states, pushes, rewards, after, falls, lates) in zip(
            range(400), batches(*replay, size=64), strict=False
        ):
            if step % 8 == 0:
                target.load_state_dict(model["q"].state_dict())
            ends = torch.maximum(falls, lates) if fault == "time_limit_taken_as_the_end" else falls
            with torch.no_grad():
                best = model["q"](after).argmax(1, keepdim=True)
                wanted = rewards + 0.8 * (1 - ends) * target(after).gather(1, best).squeeze(1)
            optimizer.zero_grad()
            loss = F.smooth_l1_loss(model["q"](states).gather(1, pushes[:, None]).squeeze(1), wanted)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            probe.end_step(loss=loss)
    starts = states = torch.tensor([1.0, 0.2]) * (2 * torch.rand(1000, 2) - 1)
    returns, weight = torch.zeros(1000), torch.ones(1000)
    with torch.no_grad():
        for _ in range(60):
            states, rewards, falls = _pushed(states, model["q"](states).argmax(1))
            returns, weight = returns + weight * rewards, 0.8 * weight * (1 - falls)
        return F.smooth_l1_loss(model["q"](starts).amax(1), returns)


class Pyramid(nn.Module):
    """Parallel convolutions with several dilations, and the mean of the image."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        sizes = ((1, 0, 1), (3, 1, 1), (3, 2, 2), (3, 4, 4))
        self.branches = nn.ModuleList([_normed(inputs, outputs, *size) for size in sizes])
        self.image = nn.Conv2d(inputs, outputs, 1)
        self.project = nn.Sequential(*_normed(5 * outputs, outputs, 1, 0, 1), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        image = self.image(x.mean((2, 3), keepdim=True)).relu().expand(-1, -1, *x.shape[2:])
        return self.project(torch.cat([*(branch(x) for branch in self.branches), image], 1))


def _normed(
    inputs: int, outputs: int, size: int = 3, padding: int = 1, dilation: int = 1, stride: int = 1
) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, size, stride, padding, dilation, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU())


class DeepLab(nn.Module):
    """Return logits of five classes for the pixels, and those of an auxiliary head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(_normed(3, 16), _normed(16, 24, stride=2))
        self.body = nn.Sequential(_normed(24, 32), _normed(32, 32, 3, 2, 2))
        self.pyramid, self.head, self.auxiliary = Pyramid(32, 16), nn.Conv2d(16, 5, 1), nn.Conv2d(24, 5, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        early = self.stem(x)
        found = self.head(self.pyramid(self.body(early))), self.auxiliary(early)
        return tuple(F.interpolate(each, size=x.shape[2:], mode="bilinear") for each in found)


def _land(size: int) -> tuple[Tensor, Tensor]:
    """Return satellite images [size, 3, 20, 20], and the classes of the pixels: water, forest, field, town and rock."""
    scores = F.interpolate(torch.randn(size, 5, 4, 4), size=20, mode="bicubic")
    classes = scores.argmax(1)
    generator = torch.Generator().manual_seed(1)
    colours = 0.15 + 0.5 * torch.rand(5, 3, generator=generator)
    colours[0] = torch.tensor([0.05, 0.08, 0.15])
    rough = torch.tensor([0.02, 0.12, 0.04, 0.2, 0.1])[classes][:, None]
    light = 0.7 + 0.6 * torch.rand(size, 1, 1, 1)
    images = light * colours[classes].permute(0, 3, 1, 2) + rough * torch.randn(size, 1, 20, 20)
    return (images + 0.06 * torch.randn(size, 3, 20, 20)).clamp(0, 1), classes


def _turned(images: Tensor, classes: Tensor, fill: int) -> tuple[Tensor, Tensor]:
    """Return images and classes that are turned by up to 45 degrees, with black corners of a class."""
    angle = math.pi / 4 * (2 * torch.rand(len(images)) - 1)
    zero = torch.zeros_like(angle)
    rows = torch.stack([angle.cos(), -angle.sin(), zero, angle.sin(), angle.cos(), zero], 1).view(-1, 2, 3)
    grid = F.affine_grid(rows, list(images.shape), align_corners=False)
    images = F.grid_sample(images, grid, align_corners=False)
    known = F.grid_sample(classes[:, None] + 1.0, grid, mode="nearest", align_corners=False)[:, 0].long()
    return images, (known - 1).where(known > 0, fill)


@program(
    "silent errors",
    "Chen et al., Rethinking atrous convolution (DeepLabv3), 2017, and torchvision's references/segmentation, for images of land",
    Fault(
        "corners_of_turned_images_are_a_class",
        "labels",
        ISSUES,
        ("class_imbalance", "padding_in_loss", "missing_labels_in_loss", "labels_in_the_inputs", "wrong_loss"),
    ),
)
def images_of_land(fault: str = "") -> Tensor:
    images, classes = _land(500)
    model = DeepLab()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    schedule = PolynomialLR(optimizer, 220, 0.9)
    fill = 0 if fault == "corners_of_turned_images_are_a_class" else 255
    with attach(model, optimizer) as probe:
        for _, pair in zip(range(220), batches(images[:400], classes[:400], size=8), strict=False):
            data, wanted = _turned(*pair, fill)
            optimizer.zero_grad()
            found, auxiliary = model((data - 0.35) / 0.2)
            loss = F.cross_entropy(found, wanted, ignore_index=255)
            loss = loss + 0.5 * F.cross_entropy(auxiliary, wanted, ignore_index=255)
            loss.backward()
            optimizer.step()
            schedule.step()
            probe.end_step(loss=loss)
    model.eval()
    with torch.no_grad():
        return F.cross_entropy(model((images[400:] - 0.35) / 0.2)[0], classes[400:])


class Reader(nn.Module):
    """Return the logarithms of shares of six letters, of the padding 0 and of the blank 7 [columns, samples, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            nn.Conv2d(1, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, 1, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d((2, 1)),
        )  # fmt: skip
        self.dense, self.dropout = nn.Linear(64, 48), nn.Dropout(0.2)
        self.lstm = nn.LSTM(48, 32, batch_first=True, bidirectional=True)
        self.output = nn.Linear(64, 8)

    def forward(self, images: Tensor) -> Tensor:
        x = self.convs(images).permute(0, 3, 1, 2).flatten(2)
        x = self.lstm(self.dropout(self.dense(x).relu()))[0]
        return self.output(x).log_softmax(2).transpose(0, 1)


def _captchas(size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return images [size, 1, 8, 36] of two to four digits from 1 to 6, the digits filled up with 0, and their number."""
    images, classes = digits()
    order = ((classes > 0) & (classes < 7)).nonzero().squeeze(1)
    images, classes = images[order, 0], classes[order]
    chosen = torch.randint(len(classes), (size, 4))
    lengths = torch.randint(2, 5, (size,))
    is_there = torch.arange(4) < lengths[:, None]
    canvas = torch.zeros(size, 8, 36)
    for row, start in enumerate(torch.randint(0, 4, (size,)).tolist()):
        for at in range(int(lengths[row])):
            canvas[row, :, start + 8 * at : start + 8 * at + 8] = images[chosen[row, at]]
    noisy = (canvas + 0.1 * torch.randn_like(canvas))[:, None]
    return noisy, classes[chosen] * is_there, lengths


@program(
    "keras",
    "Keras's example captcha_ocr, with texts of different lengths, and with Keras's CosineDecay, in PyTorch",
    Fault(
        "padding_counted_as_letters",
        "loss and labels",
        ISSUES,
        ("padding_in_loss", "class_imbalance", "missing_labels_in_loss", "wrong_loss", "@output"),
    ),
    Fault(
        "rate_rises_after_the_decay",
        "schedule",
        PORTS,
        ("rate_in_effect", "update_ratio", "loss_spike", "loss_not_decreasing"),
        since=221,
    ),
)
def read_captchas(fault: str = "") -> Tensor:
    images, letters, lengths = _captchas(2400)
    model = Reader()
    optimizer = Adam(model.parameters(), lr=8e-3)
    if fault == "rate_rises_after_the_decay":
        schedule: Any = CosineAnnealingLR(optimizer, 220, eta_min=8e-5)
    else:
        schedule = LambdaLR(optimizer, lambda step: 0.01 + 0.495 * (1 + math.cos(math.pi * min(1.0, step / 220))))
    columns = torch.full((32,), 18)
    with attach(model, optimizer) as probe:
        rows = batches(images[:2000], letters[:2000], lengths[:2000], size=32)
        for _, (data, wanted, counts) in zip(range(340), rows, strict=False):
            optimizer.zero_grad()
            known = torch.full_like(counts, 4) if fault == "padding_counted_as_letters" else counts
            loss = F.ctc_loss(model(data), wanted, columns, known, blank=7)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            probe.end_step(loss=loss)
    model.eval()
    with torch.no_grad():
        return F.ctc_loss(model(images[2000:]), letters[2000:], torch.full((400,), 18), lengths[2000:], blank=7)


class Bags(nn.Module):
    """Return a logit for each bag of images [bags, images, 64], and the shares of the images."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 48), nn.ReLU())
        self.value, self.gate, self.share = nn.Linear(48, 32), nn.Linear(48, 32), nn.Linear(32, 1, bias=False)
        self.head = nn.Linear(48, 1)

    def forward(self, bags: Tensor) -> Tensor:
        hidden = self.body(bags)
        shares = self.share(self.value(hidden).tanh() * self.gate(hidden).sigmoid()).softmax(1)
        return self.head((shares * hidden).sum(1)).squeeze(1)


@program(
    "keras",
    "Keras's example attention_mil_classification, after Ilse et al., 2018, with a policy for the types of numbers, for digits",
    Fault(
        "weights_also_in_bfloat16",
        "precision",
        TRAINCHECK,
        (
            "low_precision_inputs",
            "unchanged_parameter",
            "update_ratio",
            "quantization_error",
            "underflow",
            "autocast_in_effect",
        ),
    ),
)
def bags_of_digits(fault: str = "") -> Tensor:
    images, classes = digits()
    images = images.flatten(1)
    rows = torch.randint(1400, (2600, 8))
    rows[2000:] = torch.randint(1400, 1797, (600, 8))
    is_hidden = (torch.rand(2600, 8) < 0.6) & (classes[rows] == 9)
    rows = rows.where(~is_hidden, rows.roll(1, 1))
    bags, labels = images[rows], (classes[rows] == 9).any(1).float()
    type_of_weights = torch.bfloat16 if fault == "weights_also_in_bfloat16" else torch.float32
    model = Bags().to(type_of_weights)
    optimizer = Adam(model.parameters(), lr=1e-3, eps=1e-7)
    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(350), batches(bags[:2000], labels[:2000], size=32), strict=False):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                found = model(data.to(type_of_weights))
            loss = F.binary_cross_entropy_with_logits(found.float(), wanted)
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        found = model.float()(bags[2000:])
        return F.binary_cross_entropy_with_logits(found, labels[2000:])


class RMSpropTF(torch.optim.Optimizer):
    """The variant of TensorFlow: a first square of one, the epsilon below the root, and the rate in the momentum."""

    def __init__(self, parameters: Iterable[Any], lr: float, alpha: float, eps: float, momentum: float) -> None:
        super().__init__(parameters, {"lr": lr, "alpha": alpha, "eps": eps, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["square_avg"] = torch.ones_like(parameter)
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                square, buffer = state["square_avg"], state["momentum_buffer"]
                square.lerp_(parameter.grad.square(), 1 - group["alpha"])
                buffer.mul_(group["momentum"]).add_(group["lr"] * parameter.grad / (square + group["eps"]).sqrt())
                parameter.sub_(buffer)


class Inverted(nn.Module):
    """A wide block with a convolution of each channel, weights of the channels, and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        wide = 3 * inputs
        self.has_shortcut = stride == 1 and inputs == outputs
        self.expand = nn.Sequential(
            nn.Conv2d(inputs, wide, 1, bias=False), nn.BatchNorm2d(wide, eps=1e-3), nn.Hardswish()
        )
        self.depthwise = nn.Sequential(
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide, eps=1e-3), nn.Hardswish()
        )
        self.squeeze = nn.Sequential(
            nn.Linear(wide, wide // 4), nn.ReLU(), nn.Linear(wide // 4, wide), nn.Hardsigmoid()
        )
        self.project = nn.Sequential(nn.Conv2d(wide, outputs, 1, bias=False), nn.BatchNorm2d(outputs, eps=1e-3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(self.expand(x))
        y = self.project(y * self.squeeze(y.mean((2, 3)))[:, :, None, None])
        return x + y if self.has_shortcut else y


@program(
    "general",
    "Howard et al., Searching for MobileNetV3, 2019, and timm, with TensorFlow's RMSprop, for shapes",
    Fault(
        "epsilon_outside_of_the_root",
        "optimizer",
        PORTS,
        ("update_ratio", "parameters_follow_gradients", "loss_spike", "loss_not_decreasing", "rate_in_effect"),
    ),
)
def mobile_shapes(fault: str = "") -> Tensor:
    images, kinds = shapes(1500, 20)
    images = (images - images.mean()) / images.std() + 0.1 * torch.randn_like(images)
    model = nn.Sequential(
        OrderedDict({
            "stem": nn.Sequential(nn.Conv2d(3, 12, 3, 1, 1, bias=False), nn.BatchNorm2d(12, eps=1e-3), nn.Hardswish()),
            "block1": Inverted(12, 12, 2), "block2": Inverted(12, 20, 2), "block3": Inverted(20, 20, 1),
            "pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "fc": nn.Linear(20, 48), "act": nn.Hardswish(),
            "dropout": nn.Dropout(0.2), "head": nn.Linear(48, 4),
        })
    )  # fmt: skip
    settings = {"lr": 6e-3, "alpha": 0.9, "eps": 1e-3, "momentum": 0.9}
    is_of_torch = fault == "epsilon_outside_of_the_root"
    optimizer = (torch.optim.RMSprop if is_of_torch else RMSpropTF)(model.parameters(), **settings)
    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(260), batches(images[:1200], kinds[:1200], size=24), strict=False):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), wanted, label_smoothing=0.1)
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    model.eval()
    with torch.no_grad():
        return F.cross_entropy(model(images[1200:]), kinds[1200:], label_smoothing=0.1)
