"""Programs of further kinds, with faults that are known from collections, issue trackers and forums."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.distributed as dist
from data import batches, digits
from registry import Fault, attach, in_two_processes, program
from torch import Tensor, nn
from torch.distributed.nn import functional as dist_functional
from torch.nn import functional as F
from torch.optim import SGD, Adagrad, Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, CyclicLR

TAXONOMY = "Humbatova et al., Taxonomy of real faults in deep learning systems, 2020"
ISLAM = "Islam et al., A comprehensive study on deep learning bug characteristics, 2019"
FORUM = "Questions at discuss.pytorch.org and Stack Overflow, 2018 to 2025"
ISSUES = "Issues of libraries for training and of examples at GitHub, 2018 to 2026"
THIRD_PARTIES = "Hidasi and Czapp, The effect of third party implementations on reproducibility, 2023"


def _perceptron(*sizes: int, activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1])


def _faces(count: int) -> tuple[Tensor, Tensor]:
    """Return features of faces [count, 32] and the persons, from 0 to 39."""
    persons, directions = torch.randn(2, 40, 8, generator=torch.Generator().manual_seed(0))
    person = torch.randint(40, (count,))
    faces = persons[person] + 0.25 * torch.randn(count, 8)
    return (0.5 * faces @ directions[:32].t()).sin() + 0.2 * torch.randn(count, 32), person


class ShardedMargin(nn.Module):
    """Return the loss of cosines with a margin; each rank has the directions of 20 of the 40 persons."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.first = 20 * rank
        self.weight = nn.Parameter(torch.randn(20, 32))

    def forward(self, features: Tensor, persons: Tensor, margin: float = 0.0, is_highest_shared: bool = True) -> Tensor:
        """Return the mean loss of the features [samples, 32] of all ranks; it is the same in each rank."""
        features = torch.cat(dist_functional.all_gather(F.normalize(features)))
        everybody = [torch.empty_like(persons) for _ in range(2)]
        dist.all_gather(everybody, persons)
        persons = torch.cat(everybody) - self.first
        is_here = (persons >= 0) & (persons < 20)
        wanted = F.one_hot(persons.clamp(0, 19), 20) * is_here[:, None]
        scores = 20 * (features @ F.normalize(self.weight).t() - margin * wanted)
        highest = scores.detach().amax(1)
        if is_highest_shared:
            dist.all_reduce(highest, dist.ReduceOp.MAX)
        scores = scores - highest[:, None]
        total = dist_functional.all_reduce(scores.exp().sum(1))
        return (total.log() - dist_functional.all_reduce((scores * wanted).sum(1))).mean()


def _train_persons(rank: int, fault: str, final: Tensor) -> None:
    faces, persons = _faces(2400)
    backbone = _perceptron(32, 96, 32)
    torch.manual_seed(torch.initial_seed() + rank)
    head = ShardedMargin(rank)
    optimizer = SGD([*backbone.parameters(), *head.parameters()], lr=0.1, momentum=0.9)
    scheduler = CosineAnnealingLR(optimizer, 240)
    rows = batches(faces[rank:2000:2], persons[rank:2000:2], size=32)
    is_shared = fault != "each_shard_subtracts_its_own_maximum"
    with attach(nn.ModuleDict({"backbone": backbone, "head": head}), optimizer) as probe:
        for _, (data, person) in zip(range(240), rows, strict=False):
            optimizer.zero_grad()
            loss = head(backbone(data), person, 0.2, is_shared)
            (loss / 2).backward()  # each rank contributes the same loss
            for parameter in backbone.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            scheduler.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        loss = head(backbone(faces[2000 + rank :: 2]), persons[2000 + rank :: 2])
    if rank == 0:
        final.copy_(loss)


@program(
    "silent errors",
    "An et al., Partial FC: training 10 million identities on a single machine, 2021, with the margin of CosFace",
    Fault(
        "each_shard_subtracts_its_own_maximum",
        "loss",
        ISSUES,
        ("wrong_loss", "loss_scale", "wrong_range_of_loss", "replicas_equal", "loss_not_decreasing", "@head"),
    ),
)
def sharded_persons(fault: str = "") -> Tensor:
    final = torch.zeros(()).share_memory_()
    in_two_processes(_train_persons, fault, final)
    return final


class ShardedTable(nn.Module):
    """Look up the vectors of ids; each rank has the rows of the even or of the odd ids."""

    def __init__(self, rank: int, ids: int) -> None:
        super().__init__()
        self.rank = rank
        self.rows = nn.Embedding(ids // 2, 8)
        nn.init.normal_(self.rows.weight, std=0.5)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the vectors [samples, columns, 8] of ids [samples, columns]."""
        gathered = [torch.empty_like(ids) for _ in range(2)]
        dist.all_gather(gathered, ids)
        asked = torch.cat(gathered)
        vectors = self.rows(asked // 2) * (asked % 2 == self.rank)[..., None]
        return dist_functional.all_reduce(vectors).chunk(2)[self.rank]


class ClickNet(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.bottom, self.top = _perceptron(6, 32, 8), _perceptron(8 + 3, 48, 1)
        self.table = ShardedTable(rank, 100)

    def forward(self, numbers: Tensor, ids: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        vectors = torch.cat([dense[:, None], self.table(ids)], 1)
        products = (vectors @ vectors.transpose(1, 2))[:, [0, 0, 1], [1, 2, 2]]
        return self.top(torch.cat([dense, products], 1)).squeeze(1)


def _train_clicks(rank: int, fault: str, final: Tensor) -> None:
    users, films = torch.randn(100, 3, generator=torch.Generator().manual_seed(0)).split([60, 40])
    user, film, numbers = torch.randint(60, (9000,)), torch.randint(40, (9000,)), torch.randn(9000, 6)
    score = 3 * (users[user, :2] * films[film, :2]).sum(1) + 2 * users[user, 2] + 2 * films[film, 2] + numbers[:, 1]
    ids, clicked = torch.stack([user, 60 + film], 1), (torch.rand(9000) < score.sigmoid()).float()
    model = ClickNet(rank)
    optimizer = Adagrad(model.parameters(), lr=0.12)
    rows = batches(*(column[rank:8000:2] for column in (numbers, ids, clicked)), size=64)
    with attach(model, optimizer) as probe:
        for _, (number, each, wanted) in zip(range(300), rows, strict=False):
            optimizer.zero_grad()
            loss = F.binary_cross_entropy_with_logits(model(number, each), wanted)
            loss.backward()
            for name, parameter in model.named_parameters():
                if fault == "sharded_rows_reduced_as_replicas" or not name.startswith("table"):
                    dist.all_reduce(parameter.grad)
                parameter.grad /= 2
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        loss = F.binary_cross_entropy_with_logits(model(numbers[8000:], ids[8000:]), clicked[8000:])
    if rank == 0:
        final.copy_(loss)


@program(
    "silent errors",
    "Naumov et al., Deep learning recommendation model, 2019, with the rows of the table divided among the ranks",
    Fault(
        "sharded_rows_reduced_as_replicas",
        "replicas",
        ISSUES,
        ("replicas_equal", "parameters_follow_gradients", "@table*"),
    ),
)
def sharded_table(fault: str = "") -> Tensor:
    final = torch.zeros(()).share_memory_()
    in_two_processes(_train_clicks, fault, final)
    return final


@program(
    "silent errors",
    "Han et al., Co-teaching: robust training of deep neural networks with extremely noisy labels, 2018",
    Fault(
        "largest_losses_kept",
        "loss",
        FORUM,
        ("wrong_loss", "loss_not_decreasing", "labels_of_other_positions", "loss_spike"),
        since=1,
    ),
)
def taught_by_a_peer(fault: str = "") -> Tensor:
    images, classes = digits()
    pixels = images.flatten(1) * 2 - 1
    labels = torch.where(torch.rand(1400) < 0.3, torch.randint(10, (1400,)), classes[:1400])
    nets = [_perceptron(64, 96, 10) for _ in range(2)]
    optimizers = [Adam(net.parameters(), lr=1.5e-3) for net in nets]
    with attach(nn.ModuleDict(zip(("first", "second"), nets, strict=True)), optimizers) as probe:
        for step, (data, wanted) in zip(range(260), batches(pixels[:1400], labels, size=64), strict=False):
            kept = int(64 * (1 - 0.3 * min(step / 80, 1)))
            losses = [F.cross_entropy(net(data), wanted, reduction="none") for net in nets]
            orders = [each.argsort(descending=fault == "largest_losses_kept")[:kept] for each in losses]
            means = [each[order].mean() for each, order in zip(losses, reversed(orders), strict=True)]
            for optimizer, mean in zip(optimizers, means, strict=True):
                optimizer.zero_grad()
                mean.backward()
                optimizer.step()
            probe.end_step(loss=sum(means) / 2)
    with torch.no_grad():
        return sum(F.cross_entropy(net(pixels[1400:]), classes[1400:]) for net in nets) / 2


class EightBitLinear(nn.Linear):
    """Multiply inputs and weights that are rounded to 8 bits, with ranges from the last 8 steps."""

    def __init__(self, inputs: int, outputs: int, is_first_range_kept: bool) -> None:
        super().__init__(inputs, outputs)
        self.is_first_range_kept = is_first_range_kept
        self.ranges = nn.Buffer(torch.zeros(2, 8))

    def _rounded(self, x: Tensor, ranges: Tensor) -> Tensor:
        largest = x.detach().abs().max()
        is_first = not ranges.any()
        scale = 448 / (largest if is_first else ranges.max())
        if self.training and (is_first or not self.is_first_range_kept):
            ranges.copy_(torch.cat([largest[None], ranges[:-1]]))
        rounded = (x.detach() * scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() / scale
        return x + (rounded - x.detach())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self._rounded(x, self.ranges[0]), self._rounded(self.weight, self.ranges[1]), self.bias)


@program(
    "silent errors",
    "Micikevicius et al., FP8 formats for deep learning, 2022, with the delayed scales of the Transformer Engine",
    Fault(
        "range_of_the_first_batch_kept",
        "precision",
        ISSUES,
        ("saturated_activation", "low_precision_inputs", "weights_loaded", "loss_not_decreasing", "@hidden*"),
        since=2,
    ),
)
def eight_bit_layers(fault: str = "") -> Tensor:
    images, classes = digits()
    pixels = images.flatten(1)
    sizes = pairwise((64, 96, 96, 96))
    is_kept = fault == "range_of_the_first_batch_kept"
    hidden = [(f"hidden{at}", EightBitLinear(*each, is_kept)) for at, each in enumerate(sizes)]
    layers = [(name, nn.Sequential(layer, nn.ReLU())) for name, layer in hidden]
    model = nn.Sequential(OrderedDict([*layers, ("output", nn.Linear(96, 10))]))
    optimizer = AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(240), batches(pixels[:1400], classes[:1400], size=48), strict=False):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), wanted)
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    model.eval()
    with torch.no_grad():
        return F.cross_entropy(model(pixels[1400:]), classes[1400:])


def _rooms(count: int, size: int = 16) -> tuple[Tensor, Tensor]:
    """Return images of boxes in fog [count, 3, size, size], and their depths in metres [count, size, size], 0 where they are unknown."""
    rows = torch.linspace(0, 1, size)
    depth = (3 + 5 * torch.rand(count, 1, 1) - 2 * rows[:, None]).expand(-1, -1, size).clone()
    colour = torch.rand(count, 3, 1, 1).expand(-1, -1, size, size).clone()
    for _ in range(3):
        left, top, right, bottom = _corners_of_any(count)
        is_box = (rows > left) & (rows < right) & (rows[:, None] > top) & (rows[:, None] < bottom)
        near = (0.8 + 4 * torch.rand(count, 1, 1)).expand_as(depth)
        is_box &= near < depth
        depth = torch.where(is_box, near, depth)
        colour = torch.where(is_box[:, None], torch.rand(count, 3, 1, 1), colour)
    clear = (-depth / 4)[:, None].exp()
    images = clear * colour + (1 - clear) * 0.9 + 0.02 * torch.randn(count, 3, size, size)
    left, top, right, bottom = _corners_of_any(count)
    is_hole = (rows > left) & (rows < right) & (rows[:, None] > top) & (rows[:, None] < bottom)
    return images, depth.masked_fill(is_hole, 0)


def _corners_of_any(count: int) -> Tensor:
    """Return the edges of random boxes: left, top, right and bottom [4, count, 1, 1]."""
    start = 0.7 * torch.rand(2, count, 1, 1)
    return torch.cat([start, start + 0.2 + 0.3 * torch.rand(2, count, 1, 1)])


class DepthNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU())
        self.middle = nn.Sequential(
            nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, 1, 1), nn.ReLU()
        )
        self.decoder = nn.Sequential(nn.Conv2d(48, 24, 3, 1, 1), nn.ReLU(), nn.Conv2d(24, 1, 3, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        fine = self.encoder(images)
        coarse = F.interpolate(self.middle(fine), scale_factor=2)
        return self.decoder(torch.cat([fine, coarse], 1)).squeeze(1)


def _depth_loss(predicted: Tensor, depth: Tensor, is_known: Tensor) -> Tensor:
    """Return the loss of logarithms of depths that ignores a part of the error of the scale."""
    count = is_known.sum((1, 2))
    errors = (predicted - depth.clamp(min=0.1).log()) * is_known
    return (errors.square().sum((1, 2)) / count - 0.5 * (errors.sum((1, 2)) / count) ** 2).mean()


@program(
    "keras",
    "Keras's example monocular depth estimation, with holes in the maps and the loss of Eigen et al., 2014",
    Fault(
        "holes_in_the_loss",
        "loss and labels",
        ISSUES,
        ("missing_labels_in_loss", "padding_in_loss", "wrong_loss", "heavy_tailed_input"),
    ),
    Fault(
        "cycle_of_the_default_length",
        "schedule",
        FORUM,
        ("rate_in_effect", "update_ratio", "zero_learning_rate", "loss_not_decreasing"),
        since=1,
    ),
)
def depth_of_rooms(fault: str = "") -> Tensor:
    images, depth = _rooms(1000)
    model = DepthNet()
    optimizer = SGD(model.parameters(), lr=2e-4, momentum=0.9)
    length = {} if fault == "cycle_of_the_default_length" else {"step_size_up": 40, "step_size_down": 160}
    scheduler = CyclicLR(optimizer, 2e-4, 0.08, **length)
    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(200), batches(images[:850], depth[:850], size=20), strict=False):
            is_known = torch.ones_like(wanted) if fault == "holes_in_the_loss" else wanted > 0
            optimizer.zero_grad()
            loss = _depth_loss(model(data), wanted, is_known)
            loss.backward()
            optimizer.step()
            scheduler.step()
            probe.end_step(loss=loss)
    model.eval()
    with torch.no_grad():
        return _depth_loss(model(images[850:]), depth[850:], depth[850:] > 0)


@program(
    "keras",
    "Gao et al., Deep label distribution learning with label ambiguity, 2017, for ages, ported from Keras's KLDivergence",
    Fault(
        "probabilities_given_to_the_divergence",
        "loss",
        FORUM,
        ("wrong_range_of_loss", "wrong_loss", "loss_not_decreasing", "saturated_activation"),
    ),
)
def distributions_of_ages(fault: str = "") -> Tensor:
    ages = 60 * torch.rand(2200)
    basis = torch.stack([(ages / 60 * math.pi * k).cos() for k in range(1, 5)], 1)
    faces = (basis @ torch.randn(4, 32)).tanh() + 0.4 * torch.randn(2200, 32)
    distributions = (-((torch.arange(60) - ages[:, None]) ** 2) / 32).softmax(1)
    model = nn.Sequential(OrderedDict({
        "hidden1": nn.Linear(32, 96), "relu1": nn.ReLU(), "hidden2": nn.Linear(96, 96), "relu2": nn.ReLU(),
        "ages": nn.Linear(96, 60), "softmax": nn.Softmax(1),
    }))  # fmt: skip
    optimizer = Adam(model.parameters(), lr=2e-3)

    def divergence(probabilities: Tensor, wanted: Tensor, has_logarithm: bool = True) -> Tensor:
        scores = probabilities.clamp(min=1e-7)
        return F.kl_div(scores.log() if has_logarithm else scores, wanted, reduction="batchmean")

    has_logarithm = fault != "probabilities_given_to_the_divergence"
    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(260), batches(faces[:1800], distributions[:1800], size=48), strict=False):
            optimizer.zero_grad()
            loss = divergence(model(data), wanted, has_logarithm)
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        return divergence(model(faces[1800:]), distributions[1800:])


def _animals(count: int, size: int = 16) -> tuple[Tensor, Tensor]:
    """Return images of ellipses, channels last [count, size, size, 3], and their boxes: left, top, width and height."""
    extent = 0.25 + 0.35 * torch.rand(count, 2)
    start = (1 - extent) * torch.rand(count, 2)
    grid = torch.linspace(0, 1, size)
    centre = start + extent / 2
    across = ((grid - centre[:, :1]) / extent[:, :1] * 2) ** 2
    down = ((grid - centre[:, 1:]) / extent[:, 1:] * 2) ** 2
    is_animal = (across[:, None] + down[..., None] < 1)[..., None]
    images = torch.where(is_animal, torch.rand(count, 1, 1, 3), torch.rand(count, size, size, 3))
    return images, torch.cat([start, extent], 1)


def _corners(boxes: Tensor, format: str) -> Tensor:
    """Return the left, top, right and bottom edges of boxes in the format `xywh` or `center_xywh`."""
    place, extent = boxes.chunk(2, 1)
    start = place - extent / 2 if format == "center_xywh" else place
    return torch.cat([start, start + extent], 1)


def _box_loss(found: Tensor, wanted: Tensor) -> Tensor:
    """Return the generalized loss of the overlap of corners [boxes, 4], and the errors of the corners."""

    def area(start: Tensor, end: Tensor) -> Tensor:
        return (end - start).clamp(min=0).prod(1)

    (start, end), (start_wanted, end_wanted) = found.chunk(2, 1), wanted.chunk(2, 1)
    overlap = area(start.maximum(start_wanted), end.minimum(end_wanted))
    union = area(start, end) + area(start_wanted, end_wanted) - overlap
    hull = area(start.minimum(start_wanted), end.maximum(end_wanted))
    return (1 - overlap / union + (hull - union) / hull).mean() + 2 * F.l1_loss(found, wanted)


@program(
    "keras",
    "KerasCV's guide on object detection, with formats of boxes and images with the channels last",
    Fault(
        "boxes_declared_in_another_format",
        "labels",
        ISSUES,
        ("labels_shifted", "labels_of_other_positions", "wrong_loss", "loss_not_decreasing"),
    ),
    Fault(
        "images_reshaped_to_channels_first",
        "tensor layout",
        ISLAM,
        ("wrong_axis", "labels_of_other_positions", "samples_vary", "loss_not_decreasing", "@conv1"),
    ),
)
def boxes_of_animals(fault: str = "") -> Tensor:
    images, boxes = _animals(1600)
    is_reshaped = fault == "images_reshaped_to_channels_first"
    images = images.reshape(-1, 3, 16, 16) if is_reshaped else images.permute(0, 3, 1, 2)
    declared = _corners(boxes, "center_xywh" if fault == "boxes_declared_in_another_format" else "xywh")
    model = nn.Sequential(OrderedDict({
        "conv1": nn.Conv2d(3, 24, 3, 1, 1), "relu1": nn.ReLU(), "pool1": nn.MaxPool2d(2),
        "conv2": nn.Conv2d(24, 32, 3, 1, 1), "relu2": nn.ReLU(), "pool2": nn.MaxPool2d(2),
        "conv3": nn.Conv2d(32, 32, 3, 1, 1), "relu3": nn.ReLU(), "flatten": nn.Flatten(), "box": nn.Linear(512, 4),
        "sigmoid": nn.Sigmoid(),
    }))  # fmt: skip
    optimizer = Adam(model.parameters(), lr=3e-3)
    scheduler = CosineAnnealingLR(optimizer, 280)
    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(280), batches(images[:1300], declared[:1300], size=32), strict=False):
            optimizer.zero_grad()
            loss = _box_loss(_corners(model(data), "center_xywh"), wanted)
            loss.backward()
            optimizer.step()
            scheduler.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        return _box_loss(_corners(model(images[1300:]), "center_xywh"), _corners(boxes[1300:], "xywh"))


def _clicks(sessions: int, has_times: bool) -> tuple[Tensor, Tensor]:
    """Return the clicks of a log, by session and time: the numbers of the sessions and the items, from 0 to 49."""
    generator = torch.Generator().manual_seed(0)
    jumps = torch.randint(50, (5, 8), generator=generator)
    first, lengths = torch.randint(50, (sessions, 1)), torch.randint(4, 9, (sessions, 1))
    places = torch.arange(8).expand(sessions, -1)
    items = torch.where(places == 0, first, (first + jumps[first[:, 0] % 5]) % 50)
    is_clicked = places < lengths
    log = torch.stack([torch.arange(sessions)[:, None].expand(-1, 8), places, items], 2)[is_clicked]
    log = log[torch.randperm(len(log))]  # servers write into it in any order
    order = (8 * log[:, 0] + log[:, 1]).argsort() if has_times else log[:, 0].argsort(stable=True)
    return log[order, 0], log[order, 2]


class SessionNet(nn.Module):
    def __init__(self, is_reset: bool, size: int = 64) -> None:
        super().__init__()
        self.is_reset = is_reset
        self.items = nn.Embedding(50, 32)
        self.cell = nn.GRUCell(32, size)
        self.scores = nn.Linear(size, 50)

    def forward(self, items: Tensor, is_start: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores of the next items [slots, steps, 50] and the last state, for items [slots, steps]."""
        states = []
        for step in range(items.shape[1]):
            if self.is_reset:
                state = state * ~is_start[:, step, None]
            state = self.cell(self.items(items[:, step]), state)
            states.append(state)
        return self.scores(torch.stack(states, 1)), state


@program(
    "general",
    "Hidasi et al., Session-based recommendations with recurrent neural networks, 2016, with sessions in parallel slots",
    Fault(
        "state_of_the_ended_session_kept",
        "memory of states",
        THIRD_PARTIES,
        ("looks_ahead", "samples_vary", "edges_of_other_graphs", "loss_not_decreasing", "@cell"),
    ),
    Fault(
        "clicks_not_sorted_by_time",
        "data",
        THIRD_PARTIES,
        ("labels_of_other_positions", "labels_shifted", "input_drift", "loss_not_decreasing"),
    ),
)
def clicks_of_sessions(fault: str = "") -> Tensor:
    sessions, items = _clicks(5200, has_times=fault != "clicks_not_sorted_by_time")
    slots, length = 40, 8
    steps = (len(items) - 1) // slots
    is_start = torch.cat([torch.ones(1, dtype=torch.bool), sessions[1:] != sessions[:-1]])
    following = items[1:].masked_fill(is_start[1:], -100)  # the last item of a session has no next one
    inputs, starts, wanted = (each[: slots * steps].view(slots, steps) for each in (items, is_start, following))
    model = SessionNet(is_reset=fault != "state_of_the_ended_session_kept")
    optimizer = Adam(model.parameters(), lr=6e-3)
    held_out = steps - 10 * length
    with attach(model, optimizer) as probe:
        state = torch.zeros(slots, 64)
        for step in range(280):
            at = step * length % (held_out - length + 1)
            part = slice(at, at + length)
            scores, state = model(inputs[:, part], starts[:, part], state.detach())
            loss = F.cross_entropy(scores.flatten(0, 1), wanted[:, part].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        state, losses = torch.zeros(slots, 64), []
        for at in range(held_out, steps - length + 1, length):
            part = slice(at, at + length)
            scores, state = model(inputs[:, part], starts[:, part], state)
            losses.append(F.cross_entropy(scores.flatten(0, 1), wanted[:, part].flatten()))
    return torch.stack(losses[1:]).mean()


class Hypernetwork(nn.Module):
    """Return the values of functions; the weights of their networks are outputs for the numbers of the functions."""

    sizes = (32, 32, 1024, 32, 32, 1)

    def __init__(self, fault: str, functions: int = 24) -> None:
        super().__init__()
        self.functions, self.hidden = nn.Embedding(functions, 16), nn.Linear(16, 48)
        self.weights = nn.Linear(48, sum(self.sizes))
        if fault == "weights_as_large_as_activations":
            nn.init.kaiming_normal_(self.weights.weight)
        else:
            nn.init.normal_(self.weights.weight, std=0.02)
        scales = [1.5, 1.5, 0.18, 0.0, 0.18, 0.0]
        parts = [scale * torch.randn(size) for scale, size in zip(scales, self.sizes, strict=True)]
        self.weights.bias.data.copy_(torch.cat(parts))

    def forward(self, x: Tensor) -> Tensor:
        """Return the values of all functions at their points [functions, points]."""
        code = F.relu(self.hidden(self.functions.weight))
        first, shift, second, shift2, last, shift3 = self.weights(code)[:, None].split(self.sizes, 2)
        h = (x[..., None] * first + shift).tanh()
        h = (h @ second.view(-1, 32, 32) + shift2).tanh()
        return (h @ last.mT + shift3).squeeze(2)


@program(
    "general",
    "Ha et al., HyperNetworks, 2017, with the initialization of Chang et al., 2020, for the curves of devices",
    Fault(
        "weights_as_large_as_activations",
        "initialization",
        TAXONOMY,
        ("poor_initialization", "saturated_activation", "exploding_activation", "exploding_gradient", "@weights"),
    ),
    Fault(
        "decay_given_as_the_momentum",
        "optimizer",
        FORUM,
        ("update_ratio", "rate_in_effect", "parameters_follow_gradients", "loss_not_decreasing"),
        since=1,
    ),
)
def curves_of_devices(fault: str = "") -> Tensor:
    height, speed, phase = 0.5 + torch.rand(24, 1), 1 + torch.rand(24, 1), 6.3 * torch.rand(24, 1)

    def curves(x: Tensor) -> Tensor:
        return height * (speed * 2 * x + phase).sin()

    model = Hypernetwork(fault)
    optimizer = SGD(model.parameters(), lr=0.04, momentum=0.9, weight_decay=1e-5)
    if fault == "decay_given_as_the_momentum":
        optimizer = SGD(model.parameters(), 0.04, 1e-5)
    with attach(model, optimizer) as probe:
        for _ in range(360):
            x = 4 * torch.rand(24, 16) - 2
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), curves(x) + 0.05 * torch.randn(24, 16))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            probe.end_step(loss=loss)
    x = torch.linspace(-2, 2, 100).expand(24, -1)
    with torch.no_grad():
        return F.mse_loss(model(x), curves(x))


class MixtureNet(nn.Module):
    """Return logarithmic shares [samples, parts], means [samples, parts, 2] and logarithmic deviations [samples, parts]."""

    def __init__(self, parts: int = 6) -> None:
        super().__init__()
        self.trunk = nn.Sequential(_perceptron(2, 64, 64, activation=nn.Tanh), nn.Tanh())
        self.shares, self.means, self.deviations = nn.Linear(64, parts), nn.Linear(64, 2 * parts), nn.Linear(64, parts)
        nn.init.normal_(self.means.bias, std=4.0)

    def forward(self, distances: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.trunk(distances)
        return self.shares(h).log_softmax(1), self.means(h).unflatten(1, (-1, 2)), self.deviations(h)


@program(
    "general",
    "Bishop, Mixture density networks, 1994, for ships whose distances to two beacons on a coast are measured",
    Fault(
        "deviation_counted_for_one_coordinate",
        "loss",
        ISSUES,
        ("wrong_loss", "wrong_range_of_loss", "loss_scale", "loss_not_decreasing", "@deviations"),
    ),
)
def positions_of_ships(fault: str = "") -> Tensor:
    positions = 16 * torch.rand(2600, 2) - 8
    distances = torch.cdist(positions, torch.tensor([[-4.0, 0.0], [4.0, 0.0]])) + 0.2 * torch.randn(2600, 2)
    model = MixtureNet()
    optimizer = Adam(model.parameters(), lr=5e-3)
    scheduler = CosineAnnealingLR(optimizer, 280)

    def loss_of(distances: Tensor, positions: Tensor, coordinates: int = 2) -> Tensor:
        shares, means, deviations = model((distances - 7) / 3)
        squares = (positions[:, None] - means).square().sum(2)
        logs = shares - squares / (2 * deviations.exp() ** 2) - coordinates * deviations - math.log(2 * math.pi)
        return -logs.logsumexp(1).mean()

    coordinates = 1 if fault == "deviation_counted_for_one_coordinate" else 2
    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(280), batches(distances[:2000], positions[:2000], size=64), strict=False):
            optimizer.zero_grad()
            loss = loss_of(data, wanted, coordinates)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            scheduler.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        return loss_of(distances[2000:], positions[2000:])


class SearchingDecoder(nn.Module):
    """Write letters one by one; each step searches the states of the encoder with additive attention."""

    def __init__(self, axis: int, size: int = 48) -> None:
        super().__init__()
        self.axis = axis
        self.letters = nn.Embedding(17, 24)
        self.query, self.key, self.score = nn.Linear(size, 32), nn.Linear(size, 32), nn.Linear(32, 1)
        self.cell = nn.GRUCell(24 + size, size)
        self.output = nn.Linear(size, 16)

    def forward(self, states: Tensor, letters: Tensor) -> Tensor:
        """Return scores [samples, steps, 16] from the states of the encoder and the letters before [samples, steps]."""
        state, keys, scores = states[:, -1], self.key(states), []
        for step in range(letters.shape[1]):
            fits = self.score((self.query(state)[:, None] + keys).tanh())
            context = (fits.softmax(self.axis) * states).sum(1)
            state = self.cell(torch.cat([self.letters(letters[:, step]), context], 1), state)
            scores.append(self.output(state))
        return torch.stack(scores, 1)


class ReadingEncoder(nn.Module):
    def __init__(self, size: int = 48) -> None:
        super().__init__()
        self.letters = nn.Embedding(16, 24)
        self.gru = nn.GRU(24, size, batch_first=True)

    def forward(self, letters: Tensor) -> Tensor:
        return self.gru(self.letters(letters))[0]


@program(
    "general",
    "PyTorch tutorials, translation with a sequence to sequence network and attention, with two optimizers",
    Fault(
        "softmax_over_the_batch",
        "softmax and scale",
        FORUM,
        ("wrong_axis", "samples_vary", "looks_ahead", "loss_not_decreasing", "@decoder*"),
    ),
    Fault(
        "gradients_of_the_encoder_kept",
        "gradients",
        FORUM,
        ("gradients_zeroed", "exploding_gradient@encoder*", "update_ratio@encoder*", "loss_spike"),
        since=1,
    ),
)
def searched_letters(fault: str = "") -> Tensor:
    source = torch.randint(16, (3000, 7))
    wanted = (source.flip(1) + 3) % 16
    before = F.pad(wanted[:, :-1], (1, 0), value=16)
    encoder = ReadingEncoder()
    decoder = SearchingDecoder(axis=0 if fault == "softmax_over_the_batch" else 1)
    optimizers = [Adam(part.parameters(), lr=8e-3) for part in (encoder, decoder)]

    def loss_of(source: Tensor, before: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(decoder(encoder(source), before).flatten(0, 1), wanted.flatten())

    with attach(nn.ModuleDict({"encoder": encoder, "decoder": decoder}), optimizers) as probe:
        for _, batch in zip(range(300), batches(source[:2500], before[:2500], wanted[:2500], size=48), strict=False):
            loss = loss_of(*batch)
            for optimizer in optimizers[fault == "gradients_of_the_encoder_kept" :]:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        return loss_of(source[2500:], before[2500:], wanted[2500:])


def _backbone() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 24, 3, 2, 1, bias=False),
        nn.BatchNorm2d(24), nn.ReLU(), nn.Flatten(), nn.Linear(384, 24), nn.BatchNorm1d(24), nn.ReLU()
    )  # fmt: skip


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")


@program(
    "general",
    "torchvision, references/detection with a frozen backbone, for scans of patients in small batches",
    Fault(
        "frozen_layers_in_training_mode",
        "mode",
        ISSUES,
        ("mode_of_phase", "samples_vary", "batch_too_small", "@backbone*"),
    ),
    Fault(
        "initialized_after_loading",
        "loading",
        ISSUES,
        ("weights_loaded", "poor_initialization", "loss_not_decreasing", "@backbone*"),
    ),
)
def scans_of_patients(fault: str = "") -> Tensor:
    images, classes = digits()
    pretrained = _backbone()
    whole = nn.Sequential(pretrained, nn.Linear(24, 10))
    optimizer = Adam(whole.parameters(), lr=3e-3)
    for _, (data, wanted) in zip(range(120), batches(images[:1000], classes[:1000], size=64), strict=False):
        optimizer.zero_grad()
        F.cross_entropy(whole(data), wanted).backward()
        optimizer.step()

    model = nn.Sequential(OrderedDict({"backbone": _backbone(), "head": nn.Linear(24, 4)}))
    model.apply(_initialize)
    model[0].load_state_dict(pretrained.state_dict())
    if fault == "initialized_after_loading":
        model.apply(_initialize)
    model[0].requires_grad_(False)
    optimizer = Adam(model[1].parameters(), lr=1e-2)
    kinds = classes % 2 + 2 * (classes > 4)
    with attach(model, optimizer) as probe:
        for _ in range(260):
            model.train()
            if fault != "frozen_layers_in_training_mode":
                model[0].eval()
            patient = torch.randint(10, (2,))  # the scans of a patient are similar
            scans = (classes[:1000, None] == patient).any(1).nonzero().squeeze(1)
            chosen = scans[torch.randint(len(scans), (12,))]
            loss = F.cross_entropy(model(images[chosen]), kinds[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    model.eval()
    with torch.no_grad():
        return F.cross_entropy(model(images[1000:]), kinds[1000:])


class TracedPerceptron(nn.Module):
    """Return the scores, and the inputs and outputs of the linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*sizes) for sizes in pairwise((64, 80, 10)))

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        inputs, outputs = list[Tensor](), list[Tensor]()
        for layer in self.layers:
            inputs.append(x)
            outputs.append(layer(x))
            x = outputs[-1].tanh()
        return outputs[-1], inputs, outputs


@program(
    "general", "Abadi et al., Deep learning with differential privacy, 2016, with the ghost clipping of Li et al., 2022"
)
def private_gradients() -> Tensor:
    images, classes = digits()
    pixels = images.flatten(1) * 2 - 1
    model = TracedPerceptron()
    optimizer = SGD(model.parameters(), lr=0.3, momentum=0.9)
    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(240), batches(pixels[:1400], classes[:1400], size=128), strict=False):
            scores, inputs, outputs = model(data)
            losses = F.cross_entropy(scores, wanted, reduction="none")
            slopes = torch.autograd.grad(losses.sum(), outputs, retain_graph=True)
            squares = [slope.square().sum(1) * (x.square().sum(1) + 1) for slope, x in zip(slopes, inputs, strict=True)]
            shares = (1 / torch.stack(squares).sum(0).sqrt()).clamp(max=1).detach()
            optimizer.zero_grad()
            (shares * losses).mean().backward()
            for parameter in model.parameters():
                parameter.grad += 0.5 * torch.randn_like(parameter) / len(data)
            optimizer.step()
            probe.end_step(loss=losses.mean())
    with torch.no_grad():
        return F.cross_entropy(model(pixels[1400:])[0], classes[1400:])
