"""Programs after published ones, from vision to recommendation, with faults that users of libraries reported."""

from __future__ import annotations

import math
from collections import OrderedDict

import torch
import torch.distributed as dist
from data import batches, digits, shapes
from registry import Fault, attach, in_two_processes, program
from torch import Tensor, nn
from torch.distributions import NegativeBinomial
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import ReduceLROnPlateau

TAXONOMY = "Humbatova et al., Taxonomy of real faults in deep learning systems, 2020"
TRAINCHECK = (
    "Jiang et al., Training with confidence: catching silent errors in deep learning training (TrainCheck), 2025"
)
MUTATIONS = "Jahangirova and Tonella, An empirical evaluation of mutation operators for deep learning systems, 2020"
FORUM = "Questions at discuss.pytorch.org and Stack Overflow, 2018 to 2026"
ISSUES = "Issues of libraries for training and of examples at GitHub, 2018 to 2026"


def _average(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor.div_(2)


def _train_with_plateaus(rank: int, fault: str, final: Tensor) -> None:
    images, classes = digits()
    order = torch.randperm(len(images))
    images, classes = (images[order] - images.mean()) / images.std(), classes[order]
    images[1000:] += 0.6 * torch.randn_like(images[1000:])
    model = nn.Sequential(
        OrderedDict({
            "conv1": nn.Conv2d(1, 12, 3, 1, 1), "relu1": nn.ReLU(), "pool1": nn.MaxPool2d(2),
            "conv2": nn.Conv2d(12, 24, 3, 1, 1), "relu2": nn.ReLU(), "pool2": nn.MaxPool2d(2),
            "flatten": nn.Flatten(), "head": nn.Linear(96, 10),
        })
    )  # fmt: skip
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    schedule = ReduceLROnPlateau(optimizer, factor=0.2, patience=1)
    rows = batches(images[rank:1000:2], classes[rank:1000:2], size=16)
    checked, wanted_there = images[1000 + rank : 1200 : 2], classes[1000 + rank : 1200 : 2]
    with attach(model, optimizer) as probe:
        for step, (data, wanted) in zip(range(220), rows, strict=False):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data + 0.6 * torch.randn_like(data)), wanted)
            loss.backward()
            _average([parameter.grad for parameter in model.parameters()])
            optimizer.step()
            probe.end_step(loss=loss)
            if step % 10 == 9:
                with probe.evaluating(), torch.no_grad():
                    check = F.cross_entropy(model(checked), wanted_there)
                    probe.log(loss=check)
                if fault != "plateau_of_each_rank":
                    _average([check])
                schedule.step(check)
    if rank == 0:
        with torch.no_grad():
            final.copy_(F.cross_entropy(model(images[1200:]), classes[1200:]))


@program(
    "silent errors",
    "PyTorch's ReduceLROnPlateau, and pytorch/examples, imagenet with several processes, for digits",
    Fault(
        "plateau_of_each_rank",
        "schedule",
        ISSUES,
        ("rate_in_effect", "replicas_differ", "replicas_equal", "update_ratio"),
        since=30,
    ),
)
def plateaus_of_digits(fault: str = "") -> Tensor:
    final = torch.zeros(()).share_memory_()
    in_two_processes(_train_with_plateaus, fault, final)
    return final


class FourierFeatures(nn.Module):
    """Return the cosines and sines of random projections of points [points, 2]."""

    def __init__(self, is_buffer: bool) -> None:
        super().__init__()
        frequencies = 1.5 * torch.randn(2, 48)
        if is_buffer:
            self.register_buffer("frequencies", frequencies)
        else:
            self.frequencies = frequencies

    def forward(self, points: Tensor) -> Tensor:
        angles = 2 * math.pi * points @ self.frequencies
        return torch.cat([angles.cos(), angles.sin()], 1)


def _train_picture(rank: int, fault: str, final: Tensor) -> None:
    points = torch.rand(6000, 2)
    waves, phases = 2.0 * torch.randn(2, 6), 2 * math.pi * torch.rand(6)
    colours = ((2 * math.pi * points @ waves + phases).sin() @ (torch.randn(6, 3) / 6**0.5)).sigmoid()
    torch.manual_seed(torch.initial_seed() + rank)  # each rank draws its own batches
    model = nn.Sequential(
        OrderedDict({
            "encoding": FourierFeatures(fault != "frequencies_of_each_rank"), "fc1": nn.Linear(96, 64),
            "relu1": nn.ReLU(), "fc2": nn.Linear(64, 64), "relu2": nn.ReLU(), "fc3": nn.Linear(64, 3),
            "sigmoid": nn.Sigmoid(),
        })
    )  # fmt: skip
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, 0)
    optimizer = Adam(model.parameters(), lr=2e-3)
    with attach(model, optimizer) as probe:
        for _, (places, wanted) in zip(range(250), batches(points[:5000], colours[:5000], size=96), strict=False):
            optimizer.zero_grad()
            loss = F.mse_loss(model(places), wanted)
            loss.backward()
            _average([parameter.grad for parameter in model.parameters()])
            optimizer.step()
            probe.end_step(loss=loss)
    if rank == 0:
        with torch.no_grad():
            final.copy_(F.mse_loss(model(points[5000:]), colours[5000:]))


@program(
    "silent errors",
    "Tancik et al., Fourier features let networks learn high frequency functions in low dimensional domains, 2020, on two ranks",
    Fault(
        "frequencies_of_each_rank",
        "replicas",
        FORUM,
        ("replicas_differ", "replicas_equal", "weights_loaded", "@encoding"),
    ),
)
def picture_of_points(fault: str = "") -> Tensor:
    final = torch.zeros(()).share_memory_()
    in_two_processes(_train_picture, fault, final)
    return final


class Ordinal(nn.Module):
    """Return five logits for each row: that its rating is above each of the five lower ones."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(11, 48), nn.ReLU(), nn.Linear(48, 24), nn.ReLU())
        self.score = nn.Linear(24, 1, bias=False)
        self.thresholds = nn.Parameter(torch.arange(5, 0, -1) / 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.score(self.body(x)) + self.thresholds


@program(
    "keras",
    "Cao et al., Rank consistent ordinal regression for neural networks, 2020, and coral-ordinal for Keras, for the quality of wines",
    Fault(
        "ratings_start_at_one",
        "labels",
        ISSUES,
        ("labels_shifted", "class_imbalance", "missing_labels_in_loss", "wrong_loss", "labels_of_other_positions"),
    ),
)
def quality_of_wines(fault: str = "") -> Tensor:
    x = torch.randn(2400, 11)
    score = x @ torch.randn(11) / 11**0.5 + 0.6 * (x[:, 0] * x[:, 1]).tanh() + 0.2 * torch.randn(2400)
    limits = torch.tensor([-1.5, -0.7, 0.0, 0.7, 1.5])
    ratings = 1 + torch.bucketize(score, limits)  # from 1 to 6
    classes = ratings if fault == "ratings_start_at_one" else ratings - 1
    levels = (classes[:, None] > torch.arange(5)).float()
    model = Ordinal()
    optimizer = Adam(model.parameters(), lr=4e-3)
    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(300), batches(x[:1900], levels[:1900], size=32), strict=False):
            optimizer.zero_grad()
            loss = F.binary_cross_entropy_with_logits(model(data), wanted)
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        above = (ratings[1900:, None] - 1 > torch.arange(5)).float()
        return F.binary_cross_entropy_with_logits(model(x[1900:]), above)


class Demand(nn.Module):
    """Return the means and the dispersions of the next counts, from the counts before and the day of the week."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.mean, self.dispersion = nn.GRU(4, 40, batch_first=True), nn.Linear(40, 1), nn.Linear(40, 1)

    def forward(self, counts: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        day = 2 * math.pi * torch.arange(counts.size(1)).expand_as(counts) / 7
        inputs = torch.stack([counts / scale, scale.log().expand_as(counts), day.sin(), day.cos()], 2)
        hidden, _ = self.gru(inputs)
        mean = F.softplus(self.mean(hidden)).squeeze(2) * scale
        return mean, F.softplus(self.dispersion(hidden)).squeeze(2) / scale.sqrt() + 1e-3

    def loss(self, counts: Tensor, sign: int = 1) -> Tensor:
        scale = 1 + counts[:, :14].mean(1, keepdim=True)
        mean, dispersion = self(counts[:, :-1], scale)
        likelihood = NegativeBinomial(1 / dispersion, logits=sign * (mean * dispersion).log(), validate_args=False)
        return -likelihood.log_prob(counts[:, 1:]).mean()


def _demand(size: int) -> Tensor:
    """Return the daily sales [size, 43] of products, with a week and a trend."""
    days, levels = torch.arange(43.0), (1.5 + 1.0 * torch.randn(size, 1)).exp()
    week = (0.7 * (2 * math.pi * (days + torch.randint(7, (size, 1))) / 7).sin()).exp()
    trend = (0.02 * torch.randn(size, 1) * days).exp()
    shape = torch.full((size, 43), 6.0)
    return torch.poisson(levels * week * trend * torch._standard_gamma(shape) / shape)


@program(
    "general",
    "Salinas et al., DeepAR: probabilistic forecasting with autoregressive recurrent networks, 2020, and GluonTS, for daily sales",
    Fault(
        "probability_of_the_other_outcome",
        "loss",
        FORUM,
        ("wrong_loss", "wrong_range_of_loss", "loss_not_decreasing", "@mean", "@dispersion"),
    ),
)
def sales_of_days(fault: str = "") -> Tensor:
    counts = _demand(1500)
    model = Demand()
    optimizer = Adam(model.parameters(), lr=3e-3)
    sign = -1 if fault == "probability_of_the_other_outcome" else 1
    with attach(model, optimizer) as probe:
        for _, (data,) in zip(range(220), batches(counts[:1200], size=32), strict=False):
            optimizer.zero_grad()
            loss = model.loss(data, sign)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        return model.loss(counts[1200:])


class Listener(nn.Module):
    """An autoencoder of the songs that users heard, with a latent normal variable."""

    def __init__(self, songs: int, is_in_place: bool) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5, inplace=is_in_place)
        self.encoder = nn.Sequential(nn.Linear(songs, 80), nn.Tanh(), nn.Linear(80, 32))
        self.decoder = nn.Sequential(nn.Linear(16, 80), nn.Tanh(), nn.Linear(80, songs))

    def forward(self, heard: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of songs, and the divergence from the prior for each user."""
        mean, log_variance = self.encoder(F.normalize(self.dropout(heard), dim=1)).chunk(2, 1)
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1)
        noise = torch.randn_like(mean) if self.training else torch.zeros_like(mean)
        return self.decoder(mean + noise * (0.5 * log_variance).exp()), divergence


@program(
    "silent errors",
    "Liang et al., Variational autoencoders for collaborative filtering, 2018 (Mult-VAE), and RecBole, for songs",
    Fault(
        "dropout_in_place_changes_the_targets",
        "labels",
        FORUM,
        ("data_changed_in_place", "missing_labels_in_loss", "wrong_loss", "labels_shifted", "@dropout"),
    ),
)
def heard_songs(fault: str = "") -> Tensor:
    tastes, kinds = torch.randn(2300, 5), torch.randn(160, 5)
    popularity = -0.5 * torch.arange(1.0, 161.0).log()
    heard = F.one_hot(torch.multinomial((tastes @ kinds.t() + popularity).exp(), 16), 160).sum(1).float()
    model = Listener(160, fault == "dropout_in_place_changes_the_targets")
    optimizer = Adam(model.parameters(), lr=3e-3)
    with attach(model, optimizer) as probe:
        for step, (songs,) in zip(range(300), batches(heard[:2000], size=64), strict=False):
            optimizer.zero_grad()
            logits, divergence = model(songs)
            share = min(0.2, 0.2 * step / 200)
            loss = (share * divergence - (F.log_softmax(logits, 1) * songs).sum(1)).mean()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    model.eval()
    with torch.no_grad():
        is_known = (torch.rand(300, 160) < 0.75).float()
        logits, _ = model(heard[2000:] * is_known)
        hidden = heard[2000:] * (1 - is_known)
        return -(F.log_softmax(logits, 1) * hidden).sum() / hidden.sum()


class RelationalConv(nn.Module):
    """Add to a linear function of the nodes the means over the neighbours of each relation, with weights of two bases."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.own = nn.Linear(inputs, outputs)
        self.bases = nn.Parameter(torch.randn(2, inputs, outputs) / inputs**0.5)
        self.shares = nn.Parameter(torch.randn(3, 2) / 2**0.5)

    def forward(self, x: Tensor, edges: Tensor, kinds: Tensor) -> Tensor:
        out = self.own(x)
        for kind, weight in enumerate(torch.einsum("kb,bio->kio", self.shares, self.bases)):
            sources, targets = edges[:, kinds == kind]
            degree = torch.bincount(targets, minlength=len(x)).clamp(min=1)[:, None]
            out = out + torch.zeros_like(x).index_add(0, targets, x[sources]) / degree @ weight
        return out


class Entities(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.dropout = RelationalConv(12, 24), RelationalConv(24, 5), nn.Dropout(0.5)

    def forward(self, x: Tensor, edges: Tensor, kinds: Tensor) -> Tensor:
        return self.conv2(self.dropout(self.conv1(x, edges, kinds).relu()), edges, kinds)


@program(
    "general",
    "Schlichtkrull et al., Modeling relational data with graph convolutional networks, 2018, and PyTorch Geometric, rgcn.py",
    Fault(
        "edges_against_their_direction",
        "data",
        ISSUES,
        ("edges_of_other_graphs", "labels_of_other_positions", "looks_ahead", "zero_message", "@conv*"),
    ),
)
def kinds_of_entities(fault: str = "") -> Tensor:
    x = torch.randn(1600, 12)
    edges, kinds = torch.randint(1600, (2, 8000)), torch.randint(3, (8000,))
    score = x @ torch.randn(12, 5) * 0.4
    for kind in range(3):
        sources, targets = edges[:, kinds == kind]
        degree = torch.bincount(targets, minlength=1600).clamp(min=1)[:, None]
        score += torch.zeros_like(x).index_add(0, targets, x[sources]) / degree @ torch.randn(12, 5)
    classes = score.argmax(1)
    if fault == "edges_against_their_direction":
        edges = edges.flip(0)
    model = Entities()
    optimizer = Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    with attach(model, optimizer) as probe:
        for _ in range(200):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x, edges, kinds)[:1100], classes[:1100])
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    model.eval()
    with torch.no_grad():
        return F.cross_entropy(model(x, edges, kinds)[1100:], classes[1100:])


MOVES = 0.3 * torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
FRACTIONS = (torch.arange(16) + 0.5) / 16


def _sailed(places: Tensor, moves: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the next places of boats [boats, 2] in gusts of wind, the rewards, and whether the boats are in the harbour."""
    gusts = torch.tensor([0.5, 0.0]) * (torch.rand(len(places), 1) < 0.2)
    after = (places + MOVES[moves] + 0.05 * torch.randn_like(places) + gusts).clamp(-2, 2)
    ends = (after.norm(dim=1) < 0.35).float()
    return after, ends - 0.1 * after.norm(dim=1), ends


def _voyages(boats: int) -> tuple[Tensor, ...]:
    """Return places, moves, sums of three discounted rewards, the places three steps later, and whether an episode ended before."""
    places, found = 4 * torch.rand(boats, 2) - 2, []
    for _ in range(13):
        best = (places[:, None] + MOVES).norm(dim=2).argmin(1)
        moves = best.where(torch.rand(boats) < 0.5, torch.randint(4, (boats,)))
        after, rewards, ends = _sailed(places, moves)
        found.append((places, moves, rewards, after, ends))
        places = (4 * torch.rand(boats, 2) - 2).where(ends[:, None] > 0, after)
    states, moves, rewards, after, ends = (torch.stack(each) for each in zip(*found, strict=True))
    alive, sums = torch.ones(11, boats), torch.zeros(11, boats)
    for ahead in range(3):
        sums += 0.9**ahead * alive * rewards[ahead : ahead + 11]
        alive = alive * (1 - ends[ahead : ahead + 11])
    return tuple(each.flatten(0, 1) for each in (states[:11], moves[:11], sums, after[2:], alive))


def _quantile_loss(found: Tensor, wanted: Tensor, fractions: Tensor) -> Tensor:
    """Return the Huber loss of quantiles [samples, 16] for targets [samples, targets]."""
    errors = wanted[:, None] - found[:, :, None]
    huber = F.huber_loss(found[:, :, None].expand_as(errors), wanted[:, None].expand_as(errors), reduction="none")
    return ((fractions - (errors.detach() < 0).float()).abs() * huber).mean(2).sum(1).mean()


@program(
    "general",
    "Dabney et al., Distributional reinforcement learning with quantile regression, 2018, with three steps as in Rainbow, for boats",
    Fault(
        "fractions_along_the_targets",
        "loss",
        ISSUES,
        ("wrong_axis", "loss_broadcasts", "wrong_loss"),
    ),
    Fault(
        "discount_of_one_step_for_three",
        "labels",
        ISSUES,
        ("wrong_loss", "labels_shifted", "ends_bootstrapped", "wrong_range_of_loss", "loss_not_decreasing"),
    ),
)
def boats_in_gusts(fault: str = "") -> Tensor:
    voyages = _voyages(400)
    body = (nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Unflatten(1, (4, 16)))
    model = nn.ModuleDict({"q": nn.Sequential(*body)})
    target = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), body[-1])
    target.load_state_dict(model["q"].state_dict())
    model["target"] = target.requires_grad_(False)
    optimizer = Adam(model["q"].parameters(), lr=2e-3)
    fractions = FRACTIONS if fault == "fractions_along_the_targets" else FRACTIONS[:, None]
    discount = 0.9 if fault == "discount_of_one_step_for_three" else 0.9**3
    with attach(model, optimizer) as probe:
        for step, (places, moves, rewards, after, alive) in zip(range(400), batches(*voyages, size=64), strict=False):
            if step % 10 == 0:
                target.load_state_dict(model["q"].state_dict())
            with torch.no_grad():
                later = target(after)
                best = later.mean(2).argmax(1)
                wanted = rewards[:, None] + discount * alive[:, None] * later[torch.arange(64), best]
            optimizer.zero_grad()
            loss = _quantile_loss(model["q"](places)[torch.arange(64), moves], wanted, fractions)
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    starts = boats = 4 * torch.rand(1500, 2) - 2
    returns, weight = torch.zeros(1500), torch.ones(1500)
    with torch.no_grad():
        for _ in range(40):
            boats, rewards, ends = _sailed(boats, model["q"](boats).mean(2).argmax(1))
            returns, weight = returns + weight * rewards, 0.9 * weight * (1 - ends)
        found = model["q"](starts)
        return _quantile_loss(found[torch.arange(1500), found.mean(2).argmax(1)], returns[:, None], FRACTIONS[:, None])


class Proxies(nn.Module):
    """The loss of Kim et al. with one learned vector for each class."""

    def __init__(self, classes: int, size: int) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.empty(classes, size))
        nn.init.kaiming_normal_(self.vectors, mode="fan_out")

    def forward(self, x: Tensor, classes: Tensor) -> Tensor:
        cosines = F.normalize(x, dim=1) @ F.normalize(self.vectors, dim=1).t()
        is_own = F.one_hot(classes, len(self.vectors)).bool()
        own = (-32 * (cosines - 0.1)).masked_fill(~is_own, -torch.inf)
        others = (32 * (cosines + 0.1)).masked_fill(is_own, -torch.inf)
        of_own, of_others = (F.softplus(each.logsumexp(0)) for each in (own, others))
        return of_own.sum() / is_own.any(0).sum() + of_others.mean()


@program(
    "general",
    "Kim et al., Proxy anchor loss for deep metric learning, 2020, and the library PyTorch Metric Learning, for parts of machines",
    Fault(
        "proxies_with_the_rate_of_the_network",
        "learning rate",
        ISSUES,
        ("rate_in_effect", "update_ratio", "zero_learning_rate", "unchanged_parameter@loss*", "@loss*"),
    ),
)
def parts_of_machines(fault: str = "") -> Tensor:
    classes = torch.arange(3000) % 24
    parts = torch.randn(24, 6)[classes] + 0.25 * torch.randn(3000, 6)
    x = (0.7 * parts @ torch.randn(6, 40)).sin() + 0.3 * torch.randn(3000, 40)
    x = (x - x.mean(0)) / x.std(0)
    network = nn.Sequential(
        nn.Linear(40, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Linear(96, 96), nn.BatchNorm1d(96), nn.ReLU(),
        nn.Linear(96, 24),
    )  # fmt: skip
    model = nn.ModuleDict({"network": network, "loss": Proxies(24, 24)})
    rate = 5e-4 if fault == "proxies_with_the_rate_of_the_network" else 5e-2
    groups = [{"params": network.parameters()}, {"params": model["loss"].parameters(), "lr": rate}]
    optimizer = AdamW(groups, lr=5e-4, weight_decay=1e-4)
    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(250), batches(x[:2400], classes[:2400], size=60), strict=False):
            optimizer.zero_grad()
            loss = model["loss"](network(data), wanted)
            loss.backward()
            nn.utils.clip_grad_value_(model.parameters(), 10.0)
            optimizer.step()
            probe.end_step(loss=loss)
    model.eval()
    with torch.no_grad():
        return model["loss"](network(x[2400:]), classes[2400:])


class Painter(nn.Module):
    """Return images from -1 to 1 for outlines [samples, 1, 16, 16]."""

    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(1, 16, 4, 2, 1), nn.LeakyReLU(0.2))
        self.down2 = nn.Sequential(nn.Conv2d(16, 32, 4, 2, 1), nn.BatchNorm2d(32), nn.LeakyReLU(0.2))
        self.down3 = nn.Sequential(nn.Conv2d(32, 32, 4, 2, 1), nn.ReLU())
        self.up3 = nn.Sequential(nn.ConvTranspose2d(32, 32, 4, 2, 1), nn.BatchNorm2d(32), nn.ReLU())
        self.up2 = nn.Sequential(nn.ConvTranspose2d(64, 16, 4, 2, 1), nn.BatchNorm2d(16), nn.ReLU())
        self.up1 = nn.Sequential(nn.ConvTranspose2d(32, 3, 4, 2, 1), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(first)
        third = self.up3(self.down3(second))
        return self.up1(torch.cat([first, self.up2(torch.cat([second, third], 1))], 1))


def _outlines(size: int) -> tuple[Tensor, Tensor]:
    """Return outlines of shapes [size, 1, 16, 16], and images of them from 0 to 1, with a colour for each kind."""
    images, kinds = shapes(size, 16)
    ground = images[:, :, :1, :1].expand_as(images)
    mask = ((images - ground).abs().amax(1, keepdim=True) > 0.25).float()
    colours = torch.tensor([[0.9, 0.2, 0.1], [0.1, 0.7, 0.2], [0.2, 0.3, 0.9], [0.9, 0.8, 0.1]])[kinds]
    light = torch.linspace(0.6, 1.0, 16)[:, None]
    images = mask * colours[:, :, None, None] * light + (1 - mask) * 0.95
    return F.max_pool2d(mask, 3, 1, 1) - mask, images


@program(
    "silent errors",
    "Isola et al., Image-to-image translation with conditional adversarial networks, 2017 (pix2pix), for outlines of shapes",
    Fault(
        "gradients_of_the_painter_left_in_the_critic",
        "gradients",
        FORUM,
        ("gradients_zeroed", "parameters_follow_gradients", "update_ratio@critic*", "@critic*"),
    ),
    Fault(
        "images_from_zero_to_one_for_tanh",
        "data",
        TAXONOMY,
        ("input_not_normalized", "wrong_range_of_loss", "saturated_activation", "@painter.up1*", "@critic.0"),
    ),
)
def painted_shapes(fault: str = "") -> Tensor:
    edges, images = _outlines(1000)
    wanted_range = images if fault == "images_from_zero_to_one_for_tanh" else 2 * images - 1
    critic = nn.Sequential(
        nn.Conv2d(4, 16, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(16, 32, 4, 2, 1), nn.BatchNorm2d(32),
        nn.LeakyReLU(0.2), nn.Conv2d(32, 1, 3, 1, 1),
    )  # fmt: skip
    model = nn.ModuleDict({"painter": Painter(), "critic": critic})
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            nn.init.normal_(module.weight, std=0.05)
    of_painter, of_critic = (Adam(part.parameters(), lr=1e-3, betas=(0.5, 0.999)) for part in model.values())
    with attach(model, [of_painter, of_critic]) as probe:
        for _, (outline, real) in zip(range(220), batches(edges[:800], wanted_range[:800], size=16), strict=False):
            of_painter.zero_grad()
            of_critic.zero_grad()
            painted = model["painter"](outline)
            opinion = critic(torch.cat([outline, painted], 1))
            loss = F.binary_cross_entropy_with_logits(opinion, torch.ones_like(opinion))
            loss = loss + 20 * F.l1_loss(painted, real)
            loss.backward()
            of_painter.step()
            if fault != "gradients_of_the_painter_left_in_the_critic":
                of_critic.zero_grad()
            of_real = critic(torch.cat([outline, real], 1))
            of_painted = critic(torch.cat([outline, painted.detach()], 1))
            of_both = F.binary_cross_entropy_with_logits(of_real, torch.ones_like(of_real))
            of_both = of_both + F.binary_cross_entropy_with_logits(of_painted, torch.zeros_like(of_painted))
            (0.5 * of_both).backward()
            of_critic.step()
            probe.end_step(loss=loss)
    model.eval()
    with torch.no_grad():
        return F.l1_loss(0.5 * model["painter"](edges[800:]) + 0.5, images[800:])


def _decibels(power: Tensor, is_cut_together: bool) -> Tensor:
    """Return spectra [samples, 1, bands, frames] in decibels, at most 60 below the loudest value, with the moments of each sample."""
    decibels = 10 * power.clamp(min=1e-10).log10()
    loudest = decibels.amax() if is_cut_together else decibels.amax((1, 2), keepdim=True)
    decibels = decibels.maximum(loudest - 60)
    decibels = decibels - decibels.mean((1, 2), keepdim=True)
    return (decibels / (decibels.std((1, 2), keepdim=True) + 1e-5))[:, None]


def _calls(size: int) -> tuple[Tensor, Tensor]:
    """Return the powers [size, 33, 32] of the calls of six birds, from near and far, and the kinds of birds."""
    kinds = torch.arange(size) % 6
    time = torch.linspace(0, 1, 1024)
    pitch = 700 + 400 * torch.rand(size, 1)
    rising = torch.tensor([0.6, -0.6, 0.0, 0.0, 0.0, 0.3])[kinds, None]
    trill = torch.tensor([0.0, 0.0, 0.15, 0.0, 0.15, 0.0])[kinds, None]
    pulses = torch.tensor([0.0, 0.0, 0.0, 8.0, 8.0, 4.0])[kinds, None]
    height = pitch * (1 + rising * (time - 0.5) + trill * (2 * math.pi * 9 * time).sin())
    envelope = 0.5 + 0.5 * (2 * math.pi * pulses * time + 6 * torch.rand(size, 1)).cos()
    sound = envelope * (2 * math.pi * height.cumsum(1) / 4096).sin() + 0.3 * torch.randn(size, 1024)
    distance = 10 ** (-3 * torch.rand(size, 1))
    spectrum = torch.stft(distance * sound, 64, 32, window=torch.hann_window(64), return_complex=True)
    return spectrum.abs().square()[:, :, :32] + 1e-12, kinds


@program(
    "silent errors",
    "torchaudio's AmplitudeToDB with a limit, and the baselines of BirdCLEF, for calls of birds that are near or far",
    Fault(
        "cut_below_the_loudest_of_the_batch",
        "data",
        ISSUES,
        ("samples_vary", "distinct_data", "input_not_normalized", "input_drift", "all_zero", "edges_of_other_graphs"),
    ),
)
def calls_of_birds(fault: str = "") -> Tensor:
    power, kinds = _calls(1600)
    model = nn.Sequential(
        OrderedDict({
            "conv1": nn.Conv2d(1, 12, 3, 2, 1, bias=False), "norm1": nn.BatchNorm2d(12), "relu1": nn.ReLU(),
            "conv2": nn.Conv2d(12, 24, 3, 2, 1, bias=False), "norm2": nn.BatchNorm2d(24), "relu2": nn.ReLU(),
            "conv3": nn.Conv2d(24, 32, 3, 2, 1, bias=False), "norm3": nn.BatchNorm2d(32), "relu3": nn.ReLU(),
            "pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "head": nn.Linear(32, 6),
        })
    )  # fmt: skip
    optimizer = AdamW(model.parameters(), lr=1e-2, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 220)
    is_cut_together = fault == "cut_below_the_loudest_of_the_batch"
    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(220), batches(power[:1200], kinds[:1200], size=24), strict=False):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(_decibels(data, is_cut_together)), wanted)
            loss.backward()
            optimizer.step()
            schedule.step()
            probe.end_step(loss=loss)
    model.eval()
    with torch.no_grad():
        return F.cross_entropy(model(_decibels(power[1200:], False)), kinds[1200:])


def _block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, 1), nn.InstanceNorm2d(outputs, affine=True), nn.LeakyReLU(0.01),
        nn.Conv2d(outputs, outputs, 3, 1, 1), nn.InstanceNorm2d(outputs, affine=True), nn.LeakyReLU(0.01),
    )  # fmt: skip


class DeeplySupervised(nn.Module):
    """Return the logits of three classes at the full, the half and a quarter of the size."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([_block(1, 10), _block(10, 16, 2), _block(16, 24, 2), _block(24, 32, 2)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(a, b, 2, 2) for a, b in ((32, 24), (24, 16), (16, 10))])
        self.join = nn.ModuleList([_block(48, 24), _block(32, 16), _block(20, 10)])
        self.heads = nn.ModuleList([nn.Conv2d(channels, 3, 1, bias=False) for channels in (24, 16, 10)])

    def forward(self, x: Tensor) -> list[Tensor]:
        skips, logits = [], []
        for stage in self.down:
            x = stage(x)
            skips.append(x)
        for up, join, head, skip in zip(self.up, self.join, self.heads, skips[-2::-1], strict=True):
            x = join(torch.cat([up(x), skip], 1))
            logits.append(head(x))
        return logits[::-1]


def _scans(size: int) -> tuple[Tensor, Tensor]:
    """Return scans [size, 1, 24, 24] of two organs, and the classes of the pixels [size, 24, 24]."""
    grid = torch.linspace(-1, 1, 24)
    across, down = (0.5 * torch.rand(2, size, 1, 1) - 0.25).unbind()
    x, y = grid - across, grid[:, None] - down
    turn = 0.6 * torch.randn(size, 1, 1)
    wide = 0.35 + 0.25 * torch.rand(size, 1, 1)
    first = ((x * turn.cos() + y * turn.sin()) / wide).square() + ((y * turn.cos() - x * turn.sin()) / 0.3).square() < 1
    second = (x + 0.3 * y - 0.1).square() + (y - 0.1).square() < (0.12 + 0.1 * torch.rand(size, 1, 1)).square()
    labels = torch.where(second & first, 2, first.long())
    light = (
        torch.tensor([0.0, 0.8, 1.6])[labels]
        + 0.4 * F.interpolate(torch.randn(size, 1, 5, 5), size=24, mode="bilinear")[:, 0]
    )
    scans = (light + 0.3 * torch.randn(size, 24, 24))[:, None]
    return (scans - scans.mean((2, 3), keepdim=True)) / scans.std((2, 3), keepdim=True), labels


def _dice_and_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    wanted = F.one_hot(labels, 3).permute(0, 3, 1, 2).float()
    shares = logits.softmax(1)
    both = (shares * wanted).sum((0, 2, 3))[1:]
    dice = (2 * both + 1e-5) / (shares.sum((0, 2, 3)) + wanted.sum((0, 2, 3)) + 1e-5)[1:]
    return F.cross_entropy(logits, labels) - dice.mean()


@program(
    "general", "Isensee et al., nnU-Net: a self-configuring method for biomedical image segmentation, 2021, for organs"
)
def supervised_at_scales() -> Tensor:
    scans, labels = _scans(400)
    model = DeeplySupervised()
    optimizer = SGD(model.parameters(), lr=0.01, momentum=0.99, nesterov=True, weight_decay=3e-5)
    schedule = torch.optim.lr_scheduler.PolynomialLR(optimizer, 220, 0.9)
    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(220), batches(scans[:320], labels[:320], size=6), strict=False):
            optimizer.zero_grad()
            losses = [
                _dice_and_entropy(logits, wanted[:, :: 2**scale, :: 2**scale])
                for scale, logits in enumerate(model(data))
            ]
            loss = sum(0.5**scale * each for scale, each in enumerate(losses)) / 1.75
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 12.0)
            optimizer.step()
            schedule.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        return _dice_and_entropy(model(scans[320:])[0], labels[320:])


class PreActivated(nn.Module):
    """A block of a residual network with the rectifiers before the convolutions."""

    def __init__(self, channels: int, is_in_place: bool) -> None:
        super().__init__()
        self.relu1, self.conv1 = nn.ReLU(inplace=is_in_place), nn.Conv2d(channels, channels, 3, 1, 1)
        self.relu2, self.conv2 = nn.ReLU(), nn.Conv2d(channels, channels, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(self.relu2(self.conv1(self.relu1(x))))


def _rallies(size: int) -> tuple[Tensor, Tensor]:
    """Return two frames of a game [size, 2, 14, 14], uint8, and the best of the moves left, stay and right."""
    grid = torch.arange(14.0)
    place = 13 * torch.rand(size, 2)
    speed = torch.stack([0.7 * torch.randn(size), 0.7 + 0.6 * torch.rand(size)], 1)
    place[:, 1] = 1 + 7 * torch.rand(size)
    before = place - speed
    paddle = 2 + 9 * torch.rand(size)

    def drawn(ball: Tensor) -> Tensor:
        across, down = ((grid - ball[:, at, None]).square().neg().exp() for at in (0, 1))
        board = ((grid - paddle[:, None]).abs() < 1.6).float()
        frame = 60 + 3 * torch.randn(size, 14, 14) + 150 * down[:, :, None] * across[:, None]
        frame[:, 13] += 120 * board
        return frame.clamp(0, 255)

    arrival = place[:, 0] + speed[:, 0] * (13 - place[:, 1]) / speed[:, 1]
    arrival = 13 - ((arrival % 26) - 13).abs()  # it bounces at the walls
    moves = 1 + (arrival - paddle > 1.2).long() - (arrival - paddle < -1.2).long()
    return torch.stack([drawn(before), drawn(place)], 1).to(torch.uint8), moves


def _frames(rally: Tensor, is_difference_of_bytes: bool) -> Tensor:
    """Return the last frame and its difference from the one before, float32 [samples, 2, 14, 14]."""
    before, now = rally.unbind(1)
    change = now - before if is_difference_of_bytes else now.float() - before.float()
    return torch.stack([now.float(), change.float()], 1) / 255


@program(
    "silent errors",
    "Espeholt et al., IMPALA, 2018, and TorchBeast: its residual network, here trained to copy the moves of a player",
    Fault(
        "rectified_in_place_before_the_shortcut",
        "residual connections",
        FORUM,
        ("data_changed_in_place", "dead_units", "vanishing_gradient", "all_zero", "@block*"),
    ),
    Fault(
        "difference_of_bytes",
        "data",
        FORUM,
        ("input_not_normalized", "heavy_tailed_input", "input_drift", "@conv1"),
    ),
)
def copied_player(fault: str = "") -> Tensor:
    rallies, moves = _rallies(4500)
    is_of_bytes = fault == "difference_of_bytes"
    is_in_place = fault == "rectified_in_place_before_the_shortcut"
    model = nn.Sequential(
        OrderedDict({
            "conv1": nn.Conv2d(2, 16, 3, 1, 1), "pool1": nn.MaxPool2d(3, 2, 1), "block1": PreActivated(16, is_in_place),
            "block2": PreActivated(16, is_in_place), "conv2": nn.Conv2d(16, 24, 3, 1, 1),
            "pool2": nn.MaxPool2d(3, 2, 1), "block3": PreActivated(24, is_in_place),
            "block4": PreActivated(24, is_in_place), "relu": nn.ReLU(), "flatten": nn.Flatten(),
            "fc": nn.Linear(384, 64), "relu5": nn.ReLU(), "policy": nn.Linear(64, 3),
        })
    )  # fmt: skip
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1.5e-3, alpha=0.99, eps=1e-4)
    with attach(model, optimizer) as probe:
        for _, (rally, move) in zip(range(340), batches(rallies[:4000], moves[:4000], size=32), strict=False):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(_frames(rally, is_of_bytes)), move)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 40.0)
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        return F.cross_entropy(model(_frames(rallies[4000:], is_of_bytes)), moves[4000:])


class Comments(nn.Module):
    """Return a logit for each comment [samples, words]: that it is kind."""

    def __init__(self, vectors: Tensor, is_trained: bool, has_channels_last: bool) -> None:
        super().__init__()
        self.has_channels_last = has_channels_last
        self.embedding = nn.Embedding.from_pretrained(vectors, freeze=not is_trained)
        self.dropout = nn.Dropout1d(0.3)
        self.conv = nn.Conv1d(24, 32, 3)
        self.lstm = nn.LSTM(32, 32, batch_first=True)
        self.head = nn.Linear(32, 1)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        x = self.dropout(x).mT if self.has_channels_last else self.dropout(x.mT)
        x = F.max_pool1d(self.conv(x).relu(), 3)
        return self.head(self.lstm(x.mT)[1][0][0]).squeeze(1)


def _comments(size: int) -> tuple[Tensor, Tensor]:
    """Return the words of comments [size, 26], and whether they are kind; the word 0 turns the meaning of the next one."""
    words = torch.randint(1, 400, (size, 26))
    words = words.where(torch.rand(size, 26) > 0.12, 0)
    meanings = torch.randn(400, generator=torch.Generator().manual_seed(0))
    meanings[150:] = 0.0
    signs = 1 - 2 * (words[:, :-1] == 0).float()
    score = (meanings[words[:, 1:]] * signs * (words[:, 1:] > 0)).sum(1)
    return words, (score > 0).float()


@program(
    "keras",
    "Keras's examples imdb_cnn_lstm and of SpatialDropout1D, with vectors of words that are tuned, in PyTorch, for comments",
    Fault(
        "words_dropped_instead_of_channels",
        "regularization",
        FORUM,
        ("wrong_axis", "dropout_keeps_units", "mode_of_phase", "samples_vary", "@dropout"),
    ),
    Fault(
        "vectors_frozen_by_default",
        "frozen parameters",
        FORUM,
        ("unchanged_parameter", "parameters_follow_gradients", "gradients_zeroed", "@embedding"),
    ),
)
def kind_comments(fault: str = "") -> Tensor:
    words, kind = _comments(6000)
    vectors = 0.5 * torch.randn(400, 24)
    model = Comments(vectors, fault != "vectors_frozen_by_default", fault == "words_dropped_instead_of_channels")
    optimizer = Adam(model.parameters(), lr=4e-3)
    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(320), batches(words[:5200], kind[:5200], size=48), strict=False):
            optimizer.zero_grad()
            loss = F.binary_cross_entropy_with_logits(model(data), wanted)
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    model.eval()
    with torch.no_grad():
        return F.binary_cross_entropy_with_logits(model(words[5200:]), kind[5200:])


class PeriodicEmbedding(nn.Module):
    """Return vectors [samples, columns, 16] of numbers [samples, columns], from waves with learned frequencies."""

    def __init__(self, columns: int, deviation: float, is_parameter: bool) -> None:
        super().__init__()
        frequencies = nn.Parameter(deviation * torch.randn(columns, 6))
        self.frequencies = frequencies if is_parameter else frequencies.unsqueeze(0)
        self.weight = nn.Parameter(torch.randn(columns, 12, 16) / 12**0.5)
        self.bias = nn.Parameter(torch.zeros(columns, 16))

    def forward(self, x: Tensor) -> Tensor:
        angles = 2 * math.pi * x[..., None] * self.frequencies
        waves = torch.cat([angles.cos(), angles.sin()], 2)
        return (torch.einsum("bcw,cwo->bco", waves, self.weight) + self.bias).relu()


@program(
    "general",
    "Gorishniy et al., On embeddings for numerical features in tabular deep learning, 2022, and rtdl, for prices of houses",
    Fault(
        "frequencies_are_a_view_of_a_parameter",
        "registration",
        FORUM,
        ("unchanged_parameter", "parameters_follow_gradients", "@embedding"),
    ),
    Fault(
        "deviation_of_the_frequencies_of_images",
        "initialization",
        ISSUES,
        ("poor_initialization", "tensor_variance", "overfit", "samples_vary", "loss_not_decreasing", "@embedding"),
    ),
)
def prices_of_houses(fault: str = "") -> Tensor:
    x = torch.randn(4000, 8)
    price = (2.5 * x[:, 0]).sin() + (3.0 * x[:, 1]).cos() * x[:, 2].tanh() + 0.5 * x[:, 3] - 0.3 * x[:, 4].abs()
    price = (price - price.mean()) / price.std() + 0.1 * torch.randn(4000)
    deviation = 10.0 if fault == "deviation_of_the_frequencies_of_images" else 0.3
    model = nn.Sequential(
        OrderedDict({
            "embedding": PeriodicEmbedding(8, deviation, fault != "frequencies_are_a_view_of_a_parameter"),
            "flatten": nn.Flatten(), "fc1": nn.Linear(128, 64), "relu1": nn.ReLU(), "fc2": nn.Linear(64, 32),
            "relu2": nn.ReLU(), "head": nn.Linear(32, 1),
        })
    )  # fmt: skip
    optimizer = AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4)
    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(300), batches(x[:3400], price[:3400], size=64), strict=False):
            optimizer.zero_grad()
            loss = F.mse_loss(model(data).squeeze(1), wanted)
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        return F.mse_loss(model(x[3400:]).squeeze(1), price[3400:])
