"""Programs of more kinds, with faults that are known from collections, issue trackers and forums."""

from __future__ import annotations

import copy
import io
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import count, islice, pairwise

import torch
import torch.distributed as dist
from data import VOCABULARY, batches, digits, shapes, stream
from registry import Fault, attach, in_two_processes, program
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import LambdaLR

TAXONOMY = "Humbatova et al., Taxonomy of real faults in deep learning systems, 2020"
FORUM = "Questions at discuss.pytorch.org and Stack Overflow, 2018 to 2026"
ISSUES = "Issues of libraries for training and of examples at GitHub, 2018 to 2026"
SESSION = 20  # the steps after which a job is stopped and resumed
WAIT = 30  # the length of the sequences of symbols


def _perceptron(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _average(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor.div_(2)


class Tagger(nn.Module):
    """Return the scores of five tags [documents, tokens, 5]."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.tags = nn.GRU(16, 48, batch_first=True), nn.Linear(48, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.tags(self.gru(x)[0])


def _documents(size: int) -> tuple[Tensor, Tensor]:
    """Return documents [2, size, 12, 16] and their tags; those of the second kind have one tag, after other guidelines."""
    x = torch.randn(2, size, 12, 16)
    guidelines = torch.randn(16, 5) + torch.stack([torch.zeros(16, 5), 1.5 * torch.randn(16, 5)])
    tags = ((x + 0.7 * F.pad(x, (0, 0, 1, 0))[:, :, :-1]) @ guidelines[:, None]).argmax(3)
    is_tagged = torch.arange(12) == torch.randint(12, (size, 1))
    return x, torch.stack([tags[0], tags[1].where(is_tagged, -100)])


def _train_tags(rank: int, fault: str, final: Tensor) -> None:
    x, tags = _documents(1600)
    model = Tagger()
    optimizer = Adam(model.parameters(), lr=3e-3)
    scheduler = LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 240))
    rows = batches(x[rank, :1200], tags[rank, :1200], size=16)
    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(240), rows, strict=False):
            optimizer.zero_grad()
            total = F.cross_entropy(model(data).flatten(0, 1), wanted.flatten(), reduction="sum")
            labels = (wanted >= 0).sum().float()
            if fault != "means_of_unequal_ranks_averaged":
                _average([labels])
            loss = total / labels
            loss.backward()
            _average([parameter.grad for parameter in model.parameters()])
            optimizer.step()
            for _ in range(2 if fault == "schedule_stepped_for_each_rank" else 1):
                scheduler.step()
            probe.end_step(loss=loss)
    if rank == 0:
        with torch.no_grad():
            final.copy_(F.cross_entropy(model(x[:, 1200:].flatten(0, 1)).flatten(0, 1), tags[:, 1200:].flatten()))


@program(
    "silent errors",
    "Hugging Face, Accelerate, examples by feature: tags of tokens, with documents of a kind on each rank",
    Fault(
        "means_of_unequal_ranks_averaged",
        "loss",
        ISSUES,
        ("wrong_loss", "loss_scale", "accumulation_divides", "missing_labels_in_loss", "padding_in_loss"),
    ),
    Fault(
        "schedule_stepped_for_each_rank",
        "schedule",
        ISSUES,
        ("rate_in_effect", "zero_learning_rate", "update_ratio"),
        since=1,
    ),
)
def tagged_documents(fault: str = "") -> Tensor:
    final = torch.zeros(()).share_memory_()
    in_two_processes(_train_tags, fault, final)
    return final


class RanksNorm(nn.Module):
    """Normalize the channels of images with the statistics of all ranks."""

    def __init__(self, channels: int, is_shared: bool) -> None:
        super().__init__()
        self.is_shared = is_shared
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.moments = nn.Buffer(torch.stack([torch.zeros(channels), torch.ones(channels)]))

    def forward(self, x: Tensor) -> Tensor:
        moments = self.moments
        if self.training:
            moments = torch.stack([x.mean((0, 2, 3)), x.square().mean((0, 2, 3))])
            if self.is_shared:
                moments = all_reduce(moments) / 2
            self.moments.lerp_(moments.detach(), 0.1)
        variance = moments[1] - moments[0].square()
        scale = self.weight / (variance + 1e-5).sqrt()
        return (x - moments[0][:, None, None]) * scale[:, None, None] + self.bias[:, None, None]


def _train_sites(rank: int, fault: str, final: Tensor) -> None:
    images, classes = digits()
    images = torch.stack([images, 0.5 * (1 - images) + 0.8])  # the scanner of the second site inverts
    is_shared = fault != "statistics_of_each_rank"
    model = nn.Sequential(
        OrderedDict({
            "conv1": nn.Conv2d(1, 12, 3, 1, 1), "norm1": RanksNorm(12, is_shared), "relu1": nn.ReLU(),
            "conv2": nn.Conv2d(12, 24, 3, 2, 1), "norm2": RanksNorm(24, is_shared), "relu2": nn.ReLU(),
            "flatten": nn.Flatten(), "head": nn.Linear(384, 10),
        })
    )  # fmt: skip
    optimizer = SGD(model.parameters(), lr=0.03, momentum=0.9)
    rows = batches(images[rank, rank:1400:2], classes[rank:1400:2], size=20)
    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(240), rows, strict=False):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), wanted)
            loss.backward()
            _average([parameter.grad for parameter in model.parameters()])
            optimizer.step()
            probe.end_step(loss=loss)
    if rank == 0:
        model.eval()
        with torch.no_grad():
            final.copy_(F.cross_entropy(model(images[:, 1400:].flatten(0, 1)), classes[1400:].repeat(2)))


@program(
    "silent errors",
    "Detectron2, plain_train_net.py with synchronized normalization, for digits from the scanners of two sites",
    Fault("statistics_of_each_rank", "replicas", ISSUES, ("replicas_equal", "batch_too_small", "@norm*")),
)
def scanners_of_sites(fault: str = "") -> Tensor:
    final = torch.zeros(()).share_memory_()
    in_two_processes(_train_sites, fault, final)
    return final


def _passes(images: Tensor, classes: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of one pass after the other; the number of a pass is the seed of its order."""
    for number in count():
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(number))
        for rows in order.split(20):
            yield images[rows], classes[rows]


@program(
    "silent errors",
    "MosaicML Streaming, a stream whose position is in the checkpoint, for digits on machines that are taken away",
    Fault(
        "stream_starts_again_in_each_session",
        "data",
        ISSUES,
        ("distinct_data", "weights_loaded", "samples_vary", "input_drift"),
        since=SESSION,
    ),
)
def streamed_digits(fault: str = "") -> Tensor:
    images, classes = digits()
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, 1, 1), nn.ReLU(), nn.Conv2d(16, 24, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(384, 64),
        nn.ReLU(), nn.Linear(64, 10)
    )  # fmt: skip
    optimizer = AdamW(model.parameters(), lr=4e-3)
    stream, position, file = _passes(images[:1400], classes[:1400]), 0, io.BytesIO()
    with attach(model, optimizer) as probe:
        for step in range(280):
            if step and step % SESSION == 0:
                file.seek(0)
                state = torch.load(file)
                model.load_state_dict(state["model"])
                optimizer.load_state_dict(state["optimizer"])
                position = 0 if fault == "stream_starts_again_in_each_session" else state["position"]
                stream = islice(_passes(images[:1400], classes[:1400]), position, None)
            data, wanted = next(stream)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), wanted)
            loss.backward()
            optimizer.step()
            position += 1
            probe.end_step(loss=loss)
            if step % SESSION == SESSION - 1:
                file = io.BytesIO()
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "position": position}
                torch.save(state, file)
    with torch.no_grad():
        return F.cross_entropy(model(images[1400:]), classes[1400:])


def _figures(size: int) -> tuple[Tensor, Tensor]:
    """Return images of persons [size, 1, 16, 16], and the places of head, left and right hand [size, 3, 2] from 0 to 1."""
    centre = torch.rand(size, 2) * torch.tensor([0.3, 0.2]) + torch.tensor([0.35, 0.5])
    arms, heights = 0.12 + 0.16 * torch.rand(size, 2), 0.5 * torch.rand(size, 2) - 0.25
    head = centre + torch.tensor([0.0, -0.3])
    left = centre + torch.stack([arms[:, 0], heights[:, 0]], 1)  # the persons face the viewer
    right = centre + torch.stack([-arms[:, 1], heights[:, 1]], 1)
    grid = torch.stack(torch.meshgrid(torch.linspace(0, 1, 16), torch.linspace(0, 1, 16), indexing="xy"), 2)
    joints = torch.stack([head, left, right, centre], 1)
    blobs = (-(grid - joints[:, :, None, None]).square().sum(4) / 0.005).exp()
    images = (blobs * torch.tensor([1.0, 0.7, 0.7, 0.5])[:, None, None]).sum(1, keepdim=True)
    return images + 0.05 * torch.randn_like(images), joints[:, :3]


@program(
    "general",
    "Sun et al., HRNet, and torchvision's key points of persons, with places that are regressed and flips",
    Fault(
        "left_and_right_not_exchanged",
        "labels",
        ISSUES,
        ("labels_shifted", "labels_of_other_positions", "wrong_loss", "loss_not_decreasing"),
    ),
)
def hands_of_persons(fault: str = "") -> Tensor:
    images, joints = _figures(1800)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Flatten(),
        nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 6), nn.Unflatten(1, (3, 2))
    )  # fmt: skip
    optimizer = Adam(model.parameters(), lr=2e-3)
    with attach(model, optimizer) as probe:
        for _, (data, places) in zip(range(300), batches(images[:1500], joints[:1500], size=32), strict=False):
            flipped = torch.stack([1 - places[..., 0], places[..., 1]], 2)
            if fault != "left_and_right_not_exchanged":
                flipped = flipped[:, [0, 2, 1]]
            is_flipped = torch.rand(32) < 0.5
            inputs = data.flip(3).where(is_flipped[:, None, None, None], data)
            wanted = flipped.where(is_flipped[:, None, None], places)
            optimizer.zero_grad()
            loss = F.smooth_l1_loss(10 * model(inputs), 10 * wanted)
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        return (model(images[1500:]) - joints[1500:]).norm(dim=2).mean()


def _binary_crossentropy(wanted: Tensor, found: Tensor, from_logits: bool = False) -> Tensor:
    """Return the mean loss as Keras computes it."""
    if from_logits:
        return F.binary_cross_entropy_with_logits(found, wanted)
    return F.binary_cross_entropy(found.clamp(1e-7, 1 - 1e-7), wanted)


@program(
    "keras",
    "Keras, code examples, structured data: customers of a bank who leave, with a layer of one unit without activation",
    Fault(
        "logits_taken_as_probabilities",
        "loss",
        TAXONOMY,
        ("wrong_range_of_loss", "wrong_loss", "loss_not_decreasing", "vanishing_gradient", "@logit"),
    ),
    Fault(
        "rate_of_a_larger_batch",
        "learning rate",
        TAXONOMY,
        (
            "update_ratio", "rate_in_effect", "exploding_gradient", "exploding_activation", "loss_spike", "dead_units",
            "loss_not_decreasing", "non_finite",
        ),
    ),
)  # fmt: skip
def leaving_customers(fault: str = "") -> Tensor:
    x = torch.randn(3400, 14)
    hidden, shares = torch.randn(15, 6, generator=torch.Generator().manual_seed(0)).split([14, 1])
    score = (x @ hidden).relu() @ shares[0] / 3
    leaves = (score - score.median() > 0.3 * torch.randn(3400)).float()
    model = nn.Sequential(
        OrderedDict({
            "dense1": nn.Linear(14, 48), "relu1": nn.ReLU(), "dense2": nn.Linear(48, 32), "relu2": nn.ReLU(),
            "logit": nn.Linear(32, 1),
        })
    )  # fmt: skip
    for layer in (model.dense1, model.dense2, model.logit):
        nn.init.xavier_uniform_(layer.weight)
        nn.init.zeros_(layer.bias)
    rate = 0.02 * (4096 / 64 if fault == "rate_of_a_larger_batch" else 1)  # the linear rule, for the published batch
    optimizer = SGD(model.parameters(), lr=rate, momentum=0.9)
    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(300), batches(x[:2800], leaves[:2800], size=64), strict=False):
            optimizer.zero_grad()
            has_logits = fault != "logits_taken_as_probabilities"
            loss = _binary_crossentropy(wanted, model(data).squeeze(1), from_logits=has_logits)
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        return F.binary_cross_entropy_with_logits(model(x[2800:]).squeeze(1), leaves[2800:])


class PastConv(nn.Module):
    """Convolve a series with three values of the past at a distance."""

    def __init__(self, distance: int, is_past: bool) -> None:
        super().__init__()
        self.padding = (2 * distance, 0) if is_past else (distance, distance)
        self.conv = nn.Conv1d(32, 32, 3, dilation=distance)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.conv(F.pad(x, self.padding)))


class PastNet(nn.Module):
    """Return the next value at each time of a series [samples, times]."""

    def __init__(self, is_past: bool) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, 32, 1)
        self.layers = nn.ModuleList(PastConv(distance, is_past) for distance in (1, 2, 4, 8))
        self.last = nn.Conv1d(32, 1, 1)

    def forward(self, series: Tensor) -> Tensor:
        x = self.first(series[:, None])
        for layer in self.layers:
            x = layer(x)
        return self.last(x).squeeze(1)


@program(
    "general",
    "Bai et al., An empirical evaluation of generic convolutional networks for sequence modeling, 2018, for tides",
    Fault(
        "padded_on_both_sides",
        "architecture",
        ISSUES,
        ("looks_ahead", "labels_in_the_inputs", "@layers*"),
    ),
)
def next_tides(fault: str = "") -> Tensor:
    time, phases = torch.arange(49), 6.3 * torch.rand(2, 1200, 1)
    periods = 6 + 6 * torch.rand(1200, 1)
    series = (6.28 * time / periods + phases[0]).sin() * (1 + 0.4 * (0.21 * time + phases[1]).cos())
    series = series + 0.1 * torch.randn(1200, 49)
    model = PastNet(fault != "padded_on_both_sides")
    optimizer = Adam(model.parameters(), lr=3e-3)
    with attach(model, optimizer) as probe:
        for _, (data,) in zip(range(240), batches(series[:1000], size=24), strict=False):
            optimizer.zero_grad()
            loss = F.mse_loss(model(data[:, :-1]), data[:, 1:])
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():  # the value after each part of a series that ends there
        errors = [F.mse_loss(model(series[1000:, :end])[:, -1], series[1000:, end]) for end in range(24, 49, 4)]
    return torch.stack(errors).mean()


def _standardizers(columns: Tensor, fault: str) -> list[Callable[[Tensor], Tensor]]:
    """Return a function for each station that standardizes its columns [rows, columns]."""
    means, deviations = columns.mean(1), columns.std(1)
    if fault == "deviation_from_the_mean_of_squares":
        deviations = (columns.square().mean(1) - means.square()).clamp(min=1e-7).sqrt()
    if fault == "standardizers_of_the_last_station":
        return [lambda x: (x - means[station]) / deviations[station] for station in range(len(means))]  # noqa: B023
    return [
        lambda x, mean=mean, deviation=deviation: (x - mean) / deviation
        for mean, deviation in zip(means, deviations, strict=True)
    ]


@program(
    "keras",
    "Keras's guide on preprocessing layers, a layer of normalization for each station, for yields of fields",
    Fault(
        "deviation_from_the_mean_of_squares",
        "precision",
        ISSUES,
        ("input_not_normalized", "heavy_tailed_input", "low_precision_inputs", "exploding_activation"),
    ),
    Fault(
        "standardizers_of_the_last_station",
        "data",
        FORUM,
        ("input_not_normalized", "heavy_tailed_input", "input_drift", "exploding_activation"),
    ),
)
def yields_of_fields(fault: str = "") -> Tensor:
    standard = torch.randn(4, 700, 8)
    hidden, shares = torch.randn(9, 5, generator=torch.Generator().manual_seed(0)).split([8, 1])
    yields = (standard @ hidden / 2).tanh() @ shares[0] / 3
    offsets = 1013 + 30 * torch.randn(4, 1, 8)  # such as pressures
    columns = offsets + (0.1 + 0.5 * torch.rand(4, 1, 8)) * standard
    functions = _standardizers(columns, fault)
    x = torch.stack([function(each) for function, each in zip(functions, columns, strict=True)])
    model = _perceptron(8, 48, 48, 1)
    optimizer = Adam(model.parameters(), lr=3e-3)
    rows = batches(x[:, :600].flatten(0, 1), yields[:, :600].flatten(), size=32)
    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(300), rows, strict=False):
            optimizer.zero_grad()
            loss = F.mse_loss(model(data).squeeze(1), wanted)
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        return F.mse_loss(model(x[:, 600:]).squeeze(2), yields[:, 600:])


class NextWords(nn.Module):
    """Return the states after each word [samples, words, 48]."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.gru = nn.Embedding(VOCABULARY, 32), nn.GRU(32, 48, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.gru(self.words(ids))[0]


@program(
    "general",
    "Grave et al., Efficient softmax approximation for GPUs, 2017: a text whose next words are in clusters",
    Fault(
        "parameters_of_the_loss_not_in_the_optimizer",
        "optimizer",
        ISSUES,
        ("unchanged_parameter", "parameters_follow_gradients", "@loss*"),
    ),
)
def words_in_clusters(fault: str = "") -> Tensor:
    text = stream(6000).view(-1, 12)
    net, clusters = NextWords(), nn.AdaptiveLogSoftmaxWithLoss(48, VOCABULARY, cutoffs=[12, 24], div_value=2.0)
    model = nn.ModuleDict({"net": net, "loss": clusters})
    trained = net if fault == "parameters_of_the_loss_not_in_the_optimizer" else model
    optimizer = Adam(trained.parameters(), lr=4e-3)

    def loss_of(ids: Tensor) -> Tensor:
        return clusters(net(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).loss

    with attach(model, optimizer) as probe:
        for _, (data,) in zip(range(240), batches(text[:420], size=16), strict=False):
            optimizer.zero_grad()
            loss = loss_of(data)
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        return loss_of(text[420:])


def _lit_shapes(size: int) -> tuple[Tensor, Tensor]:
    """Return images of shapes [size, 3, 16, 16] in red, green or blue light, and one of six classes of shape and light."""
    images, kinds = shapes(size, 16)
    lights = torch.tensor([[1.0, 0.5, 0.4], [0.5, 1.0, 0.4], [0.4, 0.5, 1.0]])
    light = torch.randint(3, (size,))
    return images * lights[light][:, :, None, None], 3 * (kinds % 2) + light


@program(
    "general",
    "Kornblith et al., Big transfer, and timm's ModelEma: a pretrained network that is tuned, with averaged weights",
    Fault(
        "training_images_in_the_order_of_opencv",
        "data",
        FORUM,
        ("input_drift", "input_not_normalized", "wrong_axis", "@*conv1"),
    ),
    Fault(
        "average_without_the_buffers",
        "normalization",
        FORUM,
        ("weights_loaded", "mode_of_phase", "unchanged_parameter", "@average*"),
    ),
)
def tuned_with_average(fault: str = "") -> Tensor:
    net = nn.Sequential(
        OrderedDict({
            "conv1": nn.Conv2d(3, 16, 3, 1, 1), "norm1": nn.BatchNorm2d(16), "relu1": nn.ReLU(), "pool1": nn.MaxPool2d(2),
            "conv2": nn.Conv2d(16, 24, 3, 1, 1), "norm2": nn.BatchNorm2d(24), "relu2": nn.ReLU(), "pool2": nn.MaxPool2d(2),
            "flatten": nn.Flatten(), "head": nn.Linear(384, 4),
        })
    )  # fmt: skip
    before = Adam(net.parameters(), lr=3e-3)
    for _, (data, wanted) in zip(range(100), batches(*shapes(1200, 16), size=32), strict=False):
        before.zero_grad()
        F.cross_entropy(net(data), wanted).backward()
        before.step()
    net.head = nn.Linear(384, 6)
    images, classes = _lit_shapes(1500)
    model = nn.ModuleDict({"net": net, "average": copy.deepcopy(net).requires_grad_(False).eval()})
    optimizer = Adam(net.parameters(), lr=2e-3)
    pairs = list(zip(model["average"].parameters(), net.parameters(), strict=True))
    if fault != "average_without_the_buffers":
        pairs += zip(model["average"].buffers(), net.buffers(), strict=True)

    def loss_of_average() -> Tensor:
        with torch.no_grad():
            return F.cross_entropy(model["average"](images[1200:]), classes[1200:])

    with attach(model, optimizer) as probe:
        for step, (data, wanted) in zip(range(250), batches(images[:1200], classes[:1200], size=24), strict=False):
            inputs = data.flip(1) if fault == "training_images_in_the_order_of_opencv" else data
            optimizer.zero_grad()
            loss = F.cross_entropy(net(inputs), wanted)
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for mean, value in pairs:
                    mean.copy_(mean + 0.05 * (value - mean) if mean.is_floating_point() else value)
            probe.end_step(loss=loss)
            if step % 50 == 49:
                with probe.evaluating():
                    probe.log(loss=loss_of_average())
    return loss_of_average()


class Memory(nn.Module):
    """Return the scores of six symbols after a sequence [samples, times, 8]."""

    def __init__(self, quarter: int) -> None:
        super().__init__()
        self.lstm, self.symbols = nn.LSTM(8, 48, batch_first=True), nn.Linear(48, 6)
        # The initialization for waits of Tallec and Ollivier. The gates are input, forget, cell and output.
        with torch.no_grad():
            for bias in (self.lstm.bias_ih_l0, self.lstm.bias_hh_l0):
                bias.zero_()
            waits = torch.empty(48).uniform_(1, WAIT - 1).log()
            parts = self.lstm.bias_hh_l0.view(4, 48)
            parts[0], parts[quarter] = -waits, waits

    def forward(self, x: Tensor) -> Tensor:
        return self.symbols(self.lstm(x)[0][:, -1])


@program(
    "general",
    "Tallec and Ollivier, Can recurrent neural networks warp time?, 2018: a symbol that is asked for after a wait",
    Fault(
        "forget_bias_in_the_quarter_of_tensorflow",
        "initialization",
        FORUM,
        ("poor_initialization", "saturated_activation", "vanishing_gradient", "loss_not_decreasing", "@lstm"),
    ),
)
def awaited_symbols(fault: str = "") -> Tensor:
    model = Memory(2 if fault == "forget_bias_in_the_quarter_of_tensorflow" else 1)
    optimizer = Adam(model.parameters(), lr=1e-2)

    def drawn(size: int) -> tuple[Tensor, Tensor]:
        symbols, others = torch.randint(6, (size, 1)), torch.randint(6, (size, WAIT - 1))
        x = F.one_hot(torch.cat([symbols, others], 1), 8).float()
        x[:, 0, 6] = 1
        return x, symbols[:, 0]

    with attach(model, optimizer) as probe:
        for _ in range(260):
            x, wanted = drawn(32)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), wanted)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        x, wanted = drawn(600)
        return F.cross_entropy(model(x), wanted)


class MeanOfCited(nn.Module):
    """Return a number for each paper; a layer adds the mean over the papers that it cites."""

    def __init__(self, has_keepdim: bool) -> None:
        super().__init__()
        self.has_keepdim = has_keepdim
        self.own, self.cited = nn.Linear(16, 48), nn.Linear(48, 48, bias=False)
        self.last = nn.Linear(96, 1)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """Return the numbers [papers] for features [papers, 16] and edges [2, edges] from a paper to the cited one."""
        adjacency = torch.zeros(len(x), len(x)).index_put_((edges[0], edges[1]), torch.ones(()))
        adjacency = adjacency / adjacency.sum(1, keepdim=self.has_keepdim).clamp(min=1)
        hidden = F.relu(self.own(x))
        return self.last(torch.cat([hidden, F.relu(self.cited(adjacency @ hidden))], 1)).squeeze(1)


def _citations(size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return features [size, 16], impacts [size], and pairs of a citing and a cited paper [pairs, 2]."""
    x, weights = torch.randn(size, 16), torch.randn(16, 2) / 2
    number = (3 * torch.randn(size).exp()).round().clamp(1, 40).long()
    pairs = torch.stack([torch.arange(size).repeat_interleave(number), torch.randint(size, (int(number.sum()),))], 1)
    own, given = (x @ weights).tanh().t()
    mean = torch.zeros(size).index_add_(0, pairs[:, 0], given[pairs[:, 1]]) / number
    return x, own + 2 * mean + 0.1 * torch.randn(size), pairs


@program(
    "general",
    "PyTorch Geometric, sage.py and its introduction by example, for the impact of papers that cite others",
    Fault(
        "pairs_reshaped_instead_of_transposed",
        "tensor layout",
        ISSUES,
        ("edges_of_other_graphs", "wrong_axis", "labels_of_other_positions", "@cited*"),
    ),
    Fault(
        "degrees_without_keepdim",
        "architecture",
        ISSUES,
        ("wrong_axis", "loss_broadcasts", "exploding_activation", "heavy_tailed_input", "@cited*"),
    ),
)
def impact_of_papers(fault: str = "") -> Tensor:
    x, impact, pairs = _citations(900)
    edges = pairs.reshape(2, -1) if fault == "pairs_reshaped_instead_of_transposed" else pairs.t()
    model = MeanOfCited(fault != "degrees_without_keepdim")
    optimizer = Adam(model.parameters(), lr=5e-3, weight_decay=5e-4)
    with attach(model, optimizer) as probe:
        for _ in range(200):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x, edges)[:600], impact[:600])
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        return F.mse_loss(model(x, edges)[600:], impact[600:])


class Boats:
    """Boats that sail to the origin in five directions; the cost of a time is the distance."""

    def __init__(self, size: int) -> None:
        self.places = 2 * torch.rand(size, 2) - 1
        self.moves = 0.2 * torch.tensor([[0.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Move, and return the rewards and which episodes ended."""
        self.places = (self.places + self.moves[actions] + 0.05 * torch.randn_like(self.places)).clamp(-1.5, 1.5)
        rewards, is_done = -self.places.norm(dim=1), torch.rand(len(self.places)) < 0.05
        self.places = torch.where(is_done[:, None], 2 * torch.rand_like(self.places) - 1, self.places)
        return rewards, is_done.float()


@torch.no_grad()
def _sailed(policy: nn.Module, boats: Boats, times: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return states [times + 1, boats, 2], actions, rewards and whether episodes ended [times, boats]."""
    states, actions, results = [boats.places], [], []
    for _ in range(times):
        actions.append(torch.multinomial(policy(boats.places).softmax(1), 1).squeeze(1))
        results.append(boats.step(actions[-1]))
        states.append(boats.places)
    rewards, ends = zip(*results, strict=True)
    return torch.stack(states), torch.stack(actions), torch.stack(rewards), torch.stack(ends)


def _advantages(rewards: Tensor, ends: Tensor, values: Tensor, decay: float, discount: float = 0.9) -> Tensor:
    """Return the generalized advantages [times, boats] for values [times + 1, boats]."""
    errors = rewards + discount * values[1:] * (1 - ends) - values[:-1]
    found = [torch.zeros_like(errors[0])]
    for error, end in zip(errors.flip(0), ends.flip(0), strict=True):
        found.append(error + discount * decay * (1 - end) * found[-1])
    return torch.stack(found[:0:-1])


@program(
    "general",
    "CleanRL, ppo.py with one pass over each rollout, and an actor and a critic for boats that sail home",
    Fault(
        "returns_without_the_advantages",
        "labels",
        ISSUES,
        ("labels_in_the_inputs", "vanishing_gradient@value*", "unchanged_parameter@value*", "wrong_loss", "@value*"),
    ),
    Fault("advantages_not_detached", "graph", FORUM, ("wrong_loss", "parameters_follow_gradients", "@value*")),
)
def boats_that_sail_home(fault: str = "") -> Tensor:
    model = nn.ModuleDict({"policy": _perceptron(2, 32, 32, 5), "value": _perceptron(2, 32, 32, 1)})
    optimizer = Adam(model.parameters(), lr=4e-3)
    boats = Boats(32)
    with attach(model, optimizer) as probe:
        for _ in range(220):
            states, actions, rewards, ends = _sailed(model["policy"], boats, 8)
            values = model["value"](states).squeeze(2)
            advantages = _advantages(rewards, ends, values, 0.95)
            returns = (advantages + values[:-1]).detach()
            if fault == "returns_without_the_advantages":
                returns = values[:-1].detach()
            if fault != "advantages_not_detached":
                advantages = advantages.detach()
            scores = model["policy"](states[:-1]).log_softmax(2)
            chosen = scores.gather(2, actions[..., None]).squeeze(2)
            entropy = -(scores.exp() * scores).sum(2).mean()
            loss = -(chosen * advantages).mean() + 0.5 * F.mse_loss(values[:-1], returns) - 0.01 * entropy
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            probe.end_step(loss=loss)
    states, _, rewards, ends = _sailed(model["policy"], Boats(400), 50)
    returns = _advantages(rewards, ends, torch.zeros(51, 400), 1.0)
    with torch.no_grad():
        return F.mse_loss(model["value"](states[:20]).squeeze(2), returns[:20])


class DeepKernel(nn.Module):
    """A Gaussian process on the features of a network."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))
        self.width, self.scale, self.noise = (nn.Parameter(torch.tensor(value)) for value in (0.0, 0.0, -2.0))

    def kernel(self, first: Tensor, second: Tensor) -> Tensor:
        squares = (first[:, None] - second).square().sum(2)
        return self.scale.exp() * (-squares / (2 * (2 * self.width).exp())).exp()

    def factor(self, features: Tensor) -> Tensor:
        return torch.linalg.cholesky(self.kernel(features, features) + self.noise.exp() * torch.eye(len(features)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the negative log-likelihood of values [samples], for each of them."""
        factor = self.factor(self.net(x))
        residual = torch.linalg.solve_triangular(factor, y[:, None], upper=False)
        return (0.5 * residual.square().sum() + factor.diagonal().log().sum()) / len(y) + 0.5 * math.log(2 * math.pi)

    def mean(self, known: tuple[Tensor, Tensor], x: Tensor) -> Tensor:
        """Return the expected values at other inputs."""
        features = self.net(known[0])
        weights = torch.cholesky_solve(known[1][:, None], self.factor(features))
        return (self.kernel(self.net(x), features) @ weights).squeeze(1)


@program("general", "Wilson et al., Deep kernel learning, 2016, and GPyTorch's example of it, with samples of the rows")
def deep_kernel() -> Tensor:
    x = 2 * torch.rand(900, 4) - 1
    y = (4 * x[:, 0] * x[:, 1] + x[:, 2]).sin() + 0.1 * torch.randn(900)
    model = DeepKernel()
    optimizer = Adam(model.parameters(), lr=5e-3)
    with attach(model, optimizer) as probe:
        for _, (inputs, values) in zip(range(240), batches(x[:600], y[:600], size=64), strict=False):
            optimizer.zero_grad()
            loss = model(inputs, values)
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        return F.mse_loss(model.mean((x[:400], y[:400]), x[600:]), y[600:])
