"""Programs of many kinds, with faults that are known from collections, issue trackers and forums."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from data import batches, digits, normalized_digits
from registry import Fault, attach, in_two_processes, program
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pack_padded_sequence
from torch.optim import SGD, Adam, AdamW, NAdam, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, PolynomialLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

TRAINCHECK = "Jiang et al., Training with confidence: catching silent errors in deep learning training, 2025"
TAXONOMY = "Humbatova et al., Taxonomy of real faults in deep learning systems, 2020"
ISLAM = "Islam et al., A comprehensive study on deep learning bug characteristics, 2019"
FORUM = "Questions at discuss.pytorch.org and Stack Overflow, 2018 to 2025"
ISSUES = "Issues of libraries for training at GitHub, 2019 to 2025"


class HalfEncoders(nn.Module):
    """Encoders for the upper and the lower halves of images."""

    def __init__(self) -> None:
        super().__init__()
        self.upper, self.lower = (
            nn.Sequential(
                nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.GELU(), nn.Flatten(), nn.Linear(512, 64),
                nn.GELU(), nn.Linear(64, 24)
            )
            for _ in range(2)
        )  # fmt: skip

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.upper(images[:, :, :4]), dim=1), F.normalize(self.lower(images[:, :, 4:]), dim=1)


def _train_on_gathered(rank: int, fault: str, final: Tensor) -> None:
    train_data, test_data = normalized_digits()
    images, size, temperature = train_data.tensors[0][rank::2], 32, 0.15
    encoders = HalfEncoders()
    model = DistributedDataParallel(encoders)
    optimizer = AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    torch.manual_seed(torch.initial_seed() + rank)

    def of_all_ranks(features: Tensor) -> Tensor:
        gathered = [torch.empty_like(features) for _ in range(2)]
        dist.all_gather(gathered, features.detach())
        gathered[rank] = features  # all_gather has no gradient
        return torch.cat(gathered)

    with attach(model, optimizer) as probe:
        for _, (data,) in zip(range(150), batches(images, size=size), strict=False):
            upper, lower = model(data)
            wanted = torch.arange(size) + (0 if fault == "labels_without_offset_of_the_rank" else rank * size)
            loss = F.cross_entropy(upper @ of_all_ranks(lower).t() / temperature, wanted)
            loss = (loss + F.cross_entropy(lower @ of_all_ranks(upper).t() / temperature, wanted)) / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        if rank == 0:
            upper, lower = encoders(test_data.tensors[0][:64])
            final.copy_(F.cross_entropy(upper @ lower.t() / temperature, torch.arange(64)))


@program(
    "silent errors",
    "OpenCLIP, the contrastive loss with the features of all ranks, for the two halves of images",
    Fault(
        "labels_without_offset_of_the_rank",
        "labels",
        ISSUES,
        ("labels_of_other_positions", "labels_shifted", "loss_not_decreasing"),
    ),
)
def gathered_negatives(fault: str = "") -> Tensor:
    final = torch.zeros(()).share_memory_()
    in_two_processes(_train_on_gathered, fault, final)
    return final


class CopyToRanks(torch.autograd.Function):
    """The identity, whose gradient is the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, is_reduced: bool) -> Tensor:
        ctx.is_reduced = is_reduced
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone()
        if ctx.is_reduced:
            dist.all_reduce(gradient)
        return gradient, None


class SumOverRanks(torch.autograd.Function):
    """The sum over the ranks, whose gradient is the identity."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient


class ParallelBlock(nn.Module):
    def __init__(self, size: int, hidden: int, rank: int, is_reduced: bool) -> None:
        super().__init__()
        self.is_reduced = is_reduced
        self.norm = nn.LayerNorm(size)
        self.column = nn.Linear(size, hidden // 2)
        self.row = nn.Linear(hidden // 2, size, bias=False)
        self.bias = nn.Parameter(torch.zeros(size))
        weights = nn.Linear(size, hidden).weight, nn.Linear(hidden, size).weight.t()
        with torch.no_grad():  # the half of this rank
            self.column.weight.copy_(weights[0].chunk(2)[rank])
            self.row.weight.copy_(weights[1].chunk(2)[rank].t())

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.column(CopyToRanks.apply(self.norm(x), self.is_reduced)))
        return x + SumOverRanks.apply(self.row(hidden)) + self.bias


def _train_in_parallel(rank: int, fault: str, final: Tensor) -> None:
    images, classes = normalized_digits()[0].tensors
    is_reduced = fault != "gradient_of_the_copy_not_reduced"
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 32), *(ParallelBlock(32, 128, rank, is_reduced) for _ in range(3)), nn.LayerNorm(32),
        nn.Linear(32, 10)
    )  # fmt: skip
    optimizer = Adam(model.parameters(), lr=5e-3)
    scheduler = PolynomialLR(optimizer, 250, power=1.0)
    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(200), batches(images, classes, size=32), strict=False):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), wanted)
            loss.backward()
            optimizer.step()
            scheduler.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".column." not in name and ".row." not in name:
                dist.broadcast(parameter, 0)  # a checkpoint has them once
        loss = F.cross_entropy(model(images), classes)
        if rank == 0:
            final.copy_(loss)


@program(
    "silent errors",
    "Shoeybi et al., Megatron-LM: training multi-billion parameter language models using model parallelism, 2019",
    Fault("gradient_of_the_copy_not_reduced", "replicas", TRAINCHECK, ("replicas_equal",)),
)
def split_layers(fault: str = "") -> Tensor:
    final = torch.zeros(()).share_memory_()
    in_two_processes(_train_in_parallel, fault, final)
    return final


def _train_locally(rank: int) -> None:
    images, classes = (tensor[rank::2] for tensor in normalized_digits()[0].tensors)
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(192, 48), nn.ReLU(),
        nn.Linear(48, 10)
    )  # fmt: skip
    inner = AdamW(model.parameters(), lr=2e-3)
    outer = SGD(model.parameters(), lr=0.7, momentum=0.6, nesterov=True)
    common = [parameter.detach().clone() for parameter in model.parameters()]
    torch.manual_seed(torch.initial_seed() + rank)
    with attach(model, [inner, outer]) as probe:
        for step, (data, wanted) in zip(range(200), batches(images, classes, size=32), strict=False):
            inner.zero_grad()
            loss = F.cross_entropy(model(data), wanted)
            loss.backward()
            inner.step()
            if step % 10 == 9:
                for parameter, start in zip(model.parameters(), common, strict=True):
                    move = start - parameter.detach()
                    dist.all_reduce(move)
                    parameter.data.copy_(start)
                    parameter.grad = move / 2
                outer.step()
                common = [parameter.detach().clone() for parameter in model.parameters()]
            probe.end_step(loss=loss)


@program("silent errors", "Douillard et al., DiLoCo: distributed low-communication training of language models, 2023")
def local_steps() -> None:
    in_two_processes(_train_locally)


@program(
    "silent errors",
    "Kirkpatrick et al., Overcoming catastrophic forgetting in neural networks, 2017, on permuted digits",
    Fault("anchors_are_references", "references", FORUM, ("tied_weights", "wrong_loss"), since=120),
)
def elastic_weights(fault: str = "") -> Tensor:
    train_data, test_data = normalized_digits()
    orders = [torch.arange(64), torch.randperm(64)]
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.5)
    images, classes = train_data.tensors
    importance: list[Tensor] = []
    anchors: list[Tensor] = []
    with attach(model, optimizer) as probe:
        for order in orders:
            pixels = images.flatten(1)[:, order]
            for _, (data, wanted) in zip(range(120), batches(pixels, classes, size=32), strict=False):
                loss = F.cross_entropy(model(data), wanted)
                for parameter, weight, anchor in zip(model.parameters(), importance, anchors, strict=False):
                    loss = loss + 30 * (weight * (parameter - anchor) ** 2).sum()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                probe.end_step(loss=loss)
            importance = [torch.zeros_like(parameter) for parameter in model.parameters()]
            for row in range(200):
                with torch.no_grad():
                    drawn = torch.distributions.Categorical(logits=model(pixels[row : row + 1])).sample()
                loss = F.cross_entropy(model(pixels[row : row + 1]), drawn)
                gradients = torch.autograd.grad(loss, [*model.parameters()])
                importance = [old + new**2 / 200 for old, new in zip(importance, gradients, strict=True)]
            anchors = [parameter.detach() for parameter in model.parameters()]
            if fault != "anchors_are_references":
                anchors = [anchor.clone() for anchor in anchors]
    images, classes = test_data.tensors
    with torch.no_grad():
        return sum(F.cross_entropy(model(images.flatten(1)[:, order]), classes) for order in orders) / 2


class FakeQuantize(nn.Module):
    """Round to a few bits; the scale follows the largest absolute value."""

    def __init__(self, lowest: int, highest: int, is_straight: bool = True) -> None:
        super().__init__()
        self.lowest, self.highest, self.is_straight = lowest, highest, is_straight
        self.observes = True
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("seen", torch.zeros((), dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.observes:
            scale = x.detach().abs().amax() / self.highest
            self.scale.lerp_(scale, 0.1 if self.seen else 1.0)
            self.seen.fill_(True)
        rounded = (x / self.scale).round().clamp(self.lowest, self.highest) * self.scale
        if self.is_straight:
            inside = x.clamp(self.lowest * float(self.scale), self.highest * float(self.scale))
            rounded = inside + (rounded - inside).detach()
        return rounded


class QuantizedConv2d(nn.Conv2d):
    def __init__(self, inputs: int, outputs: int, size: int, stride: int, is_straight: bool) -> None:
        super().__init__(inputs, outputs, size, stride, size // 2)
        self.weight_quantizer = FakeQuantize(-8, 7, is_straight)

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.weight_quantizer(self.weight), self.bias)


@program(
    "silent errors",
    "Jacob et al., Quantization and training of neural networks for integer-arithmetic-only inference, 2018",
    Fault(
        "rounding_without_straight_gradient",
        "graph",
        FORUM,
        ("unchanged_parameter", "parameters_follow_gradients", "vanishing_gradient", "all_zero"),
    ),
    Fault("observers_off_from_the_start", "precision", ISSUES, ("low_precision_inputs", "@*quantizer")),
)
def quantized_convolutions(fault: str = "") -> Tensor:
    train_data, test_data = normalized_digits()
    is_straight = fault != "rounding_without_straight_gradient"
    model = nn.Sequential()
    for at, (inputs, outputs, size, stride) in enumerate(
        ((1, 12, 3, 1), (12, 24, 3, 2), (24, 32, 3, 2), (32, 10, 1, 1))
    ):
        model.add_module(f"conv{at}", QuantizedConv2d(inputs, outputs, size, stride, is_straight))
        if at < 3:
            model.add_module(f"relu{at}", nn.ReLU6())
            model.add_module(f"quantizer{at}", FakeQuantize(0, 15))
    model.add_module("pool", nn.AdaptiveAvgPool2d(1))
    model.add_module("flatten", nn.Flatten())
    if fault == "observers_off_from_the_start":  # before the first batch, instead of near the end
        for module in model.modules():
            if isinstance(module, FakeQuantize):
                module.observes = False
    optimizer = NAdam(model.parameters(), lr=3e-3)
    model.train()
    with attach(model, optimizer) as probe:
        for step, (data, wanted) in zip(range(220), batches(*train_data.tensors, size=32), strict=False):
            if step == 180:
                for module in model.modules():
                    if isinstance(module, FakeQuantize):
                        module.observes = False
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), wanted)
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    model.eval()
    images, classes = test_data.tensors
    with torch.no_grad():
        return F.cross_entropy(model(images), classes)


@program(
    "silent errors",
    "PyTorch documentation, WeightedRandomSampler, with timm's average of the weights",
    Fault(
        "weights_of_classes_given_to_the_sampler", "data", FORUM, ("distinct_data", "samples_vary", "class_imbalance")
    ),
    Fault("statistics_of_another_scale", "data", ISLAM, ("input_not_normalized", "samples_vary")),
    Fault(
        "average_left_in_the_model",
        "references",
        ISSUES,
        ("parameters_follow_gradients", "weights_loaded", "tied_weights"),
        since=15,
    ),
)
def long_tailed_digits(fault: str = "") -> Tensor:
    images, classes = digits()
    kept = torch.rand(1400) < 0.75 ** classes[:1400]  # of the digit 9, there are few
    mean, deviation = images[:1400].mean(), images[:1400].std()
    if fault == "statistics_of_another_scale":
        mean, deviation = mean * 255, deviation * 255
    images = (images - mean) / deviation
    dataset = TensorDataset(images[:1400][kept], classes[:1400][kept])
    labels = dataset.tensors[1]
    weights = 1 / labels.bincount(minlength=10)
    if fault != "weights_of_classes_given_to_the_sampler":
        weights = weights[labels]
    loader = DataLoader(dataset, 32, sampler=WeightedRandomSampler(weights.tolist(), 32 * 240))
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 24, 3, 2, 1), nn.BatchNorm2d(24),
        nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(384, 10)
    )  # fmt: skip
    average = copy.deepcopy(model.state_dict())
    optimizer = SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)

    @contextmanager
    def averaged() -> Iterator[None]:
        own = copy.deepcopy(model.state_dict())
        model.load_state_dict(average)
        model.eval()
        yield
        model.train()
        if fault != "average_left_in_the_model":
            model.load_state_dict(own)

    def loss_of_average() -> Tensor:
        with averaged(), torch.no_grad():
            return F.cross_entropy(model(images[1400:]), classes[1400:])

    model.train()
    with attach(model, optimizer) as probe:
        for step, (data, wanted) in enumerate(loader):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), wanted)
            loss.backward()
            optimizer.step()
            for name, value in model.state_dict().items():
                average[name] = average[name].lerp(value, 0.02) if value.is_floating_point() else value.clone()
            probe.end_step(loss=loss)
            if step % 15 == 14:
                with probe.evaluating():
                    probe.log(loss=loss_of_average())
    return loss_of_average()


class BackcastBlock(nn.Module):
    def __init__(self, past: int, future: int, size: int = 64) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(past, size), nn.ReLU(), nn.Linear(size, size), nn.ReLU())
        self.backcast = nn.Linear(size, past)
        self.forecast = nn.Linear(size, future)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x)
        return x - self.backcast(hidden), self.forecast(hidden)


class NBeats(nn.Module):
    def __init__(self, past: int, future: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(BackcastBlock(past, future) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        forecasts = []
        for block in self.blocks:
            x, forecast = block(x)
            forecasts.append(forecast)
        return torch.stack(forecasts).sum(0)


@program(
    "keras",
    "Keras's example timeseries_weather_forecasting, with the blocks of N-BEATS",
    Fault(
        "percentage_error_of_scaled_values",
        "loss",
        TAXONOMY,
        ("wrong_loss", "wrong_range_of_loss", "loss_spike", "exploding_gradient"),
    ),
    Fault(
        "plateau_of_a_maximum",
        "schedule",
        FORUM,
        ("rate_in_effect", "update_ratio", "zero_learning_rate"),
        since=40,
    ),
    Fault(
        "model_halved_for_adam",  # in float16, its epsilon is zero
        "precision",
        FORUM,
        ("non_finite", "update_ratio", "exploding_activation"),
    ),
)
def weather_forecast(fault: str = "") -> Tensor:
    past, future, hours = 48, 12, torch.arange(3000.0)
    drift = torch.zeros(3000)
    noise = 0.12 * torch.randn(3000)
    for hour in range(1, 3000):
        drift[hour] = 0.97 * drift[hour - 1] + noise[hour]
    daily, yearly = 2 * math.pi * hours / 24, 2 * math.pi * hours / 2400
    warmth = (1 + 0.6 * torch.sin(yearly)) * torch.sin(daily) + 0.4 * torch.sin(2 * daily + yearly) + drift
    warmth = (warmth - warmth[:2400].mean()) / warmth[:2400].std()
    windows = warmth.unfold(0, past + future, 1)
    train, test = windows[: 2400 - past - future], windows[2400:]
    model = NBeats(past, future)
    if fault == "model_halved_for_adam":
        model, train, test = model.half(), train.half(), test.half()
    optimizer = Adam(model.parameters(), lr=7e-4)
    mode = "max" if fault == "plateau_of_a_maximum" else "min"
    scheduler = ReduceLROnPlateau(optimizer, mode, factor=0.1, patience=2, threshold=0.0)
    with attach(model, optimizer) as probe:
        for step, (rows,) in zip(range(260), batches(train, size=64), strict=False):
            wanted = rows[:, past:]
            errors = (model(rows[:, :past]) - wanted).abs()
            if fault == "percentage_error_of_scaled_values":
                errors = 100 * errors / wanted.abs().clamp(min=1e-7)
            loss = errors.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
            if step % 10 == 9:
                with probe.evaluating(), torch.no_grad():
                    loss = F.l1_loss(model(test[::7, :past]), test[::7, past:])
                    probe.log(loss=loss)
                scheduler.step(loss)
    with torch.no_grad():
        return F.l1_loss(model(test[:, :past]), test[:, past:])


def _reviews(count: int, longest: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    """Return words [count, longest] with zeros after the end, the lengths, and whether good words outweigh bad ones, float32 [count].

    The words 1 to 8 are good, 9 to 16 are bad, 17 negates the next word, and all others say nothing.
    """
    lengths = torch.randint(3, 12, (count,))
    lengths[0] = longest
    words = torch.where(torch.rand(count, longest) < 0.5, torch.randint(1, 17, (count, longest)), 18)
    words[torch.rand(count, longest) < 0.08] = 17
    words = torch.where(words == 18, torch.randint(18, 60, (count, longest)), words)
    words *= torch.arange(longest) < lengths[:, None]
    value = ((words > 0) & (words <= 8)).float() - ((words > 8) & (words <= 16)).float()
    value[:, 1:] *= 1 - 2 * (words[:, :-1] == 17).float()
    return words, lengths, (value.sum(1) > 0).float()


class ReviewReader(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.words = nn.Embedding(60, 24, padding_idx=0)
        self.gru = nn.GRU(24, 40, batch_first=True)
        self.hidden = nn.Linear(40, 32)
        self.output = nn.Linear(32, 1)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        is_active = self.training or self.fault == "functional_dropout_always_active"
        x = F.dropout(self.words(words), 0.2, is_active)
        if self.fault == "last_step_is_padding":
            x = self.gru(x)[0][:, -1]
        else:
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            x = self.gru(packed)[1][0]
        x = F.dropout(F.relu(self.hidden(x)), 0.5, is_active)
        return self.output(x).squeeze(1)


@program(
    "keras",
    "Keras's example text_classification_from_scratch, with a GRU over padded reviews",
    Fault("last_step_is_padding", "padding", FORUM, ("padding_attended", "@gru")),
    Fault("functional_dropout_always_active", "mode", FORUM, ("mode_of_phase",), since=49),
)
def padded_reviews(fault: str = "") -> Tensor:
    words, lengths, liked = _reviews(3400)
    model = ReviewReader(fault)
    optimizer = RMSprop(model.parameters(), lr=4e-3)

    def loss_of_others() -> Tensor:
        model.eval()
        with torch.no_grad():
            loss = F.binary_cross_entropy_with_logits(model(words[3000:], lengths[3000:]), liked[3000:])
        model.train()
        return loss

    model.train()
    rows = (words[:3000], lengths[:3000], liked[:3000])
    with attach(model, optimizer) as probe:
        for step, (text, length, wanted) in zip(range(300), batches(*rows, size=32), strict=False):
            optimizer.zero_grad()
            loss = F.binary_cross_entropy_with_logits(model(text, length), wanted)
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
            if step % 50 == 49:
                with probe.evaluating():
                    probe.log(loss=loss_of_others())
    return loss_of_others()


CELLS, STRIDE = 6, 4


def _scenes(count: int) -> tuple[Tensor, Tensor]:
    """Return images [count, 1, 24, 24] with two objects each, and the objects [count, 2, 5]: x, y, width, height and kind."""
    size = CELLS * STRIDE
    objects = torch.cat([torch.rand(count, 2, 2) * 16 + 4, torch.rand(count, 2, 2) * 5 + 4], 2)
    kinds = torch.randint(2, (count, 2, 1)).float()
    grid = torch.arange(size) + 0.5
    x = ((grid - objects[..., 0, None]) / objects[..., 2, None] * 2).abs()[..., None, :]
    y = ((grid - objects[..., 1, None]) / objects[..., 3, None] * 2).abs()[..., None]
    inside = torch.where(kinds[..., None] == 1, x**2 + y**2 < 1, x.maximum(y) < 0.9)
    brightness = 0.5 + torch.rand(count, 2, 1, 1)
    images = (inside * brightness).amax(1, keepdim=True) + 0.1 * torch.randn(count, 1, size, size)
    return images, torch.cat([objects, kinds], 2)


def _cells_of(objects: Tensor, is_x_first: bool = False) -> tuple[Tensor, Tensor]:
    """Return which cells have a centre [count, CELLS, CELLS], and the box and kind in them [count, CELLS, CELLS, 5]."""
    sample = torch.arange(len(objects))[:, None]
    column, row = (objects[..., :2] / STRIDE).long().unbind(2)
    centre, boxes = torch.zeros(len(objects), CELLS, CELLS), torch.zeros(len(objects), CELLS, CELLS, 5)
    place = (sample, column, row) if is_x_first else (sample, row, column)
    centre[place] = 1
    offset = objects[..., :2] / STRIDE % 1
    boxes[place] = torch.cat([offset, (objects[..., 2:4] / STRIDE).log(), objects[..., 4:]], 2)
    return centre, boxes


@program(
    "general",
    "Zhou et al., Objects as points, 2019: boxes and kinds at the centres of objects",
    Fault(
        "cells_indexed_x_first", "labels", FORUM, ("labels_of_other_positions", "labels_shifted", "loss_not_decreasing")
    ),
    Fault("betas_in_the_wrong_order", "optimizer", TAXONOMY, ("update_ratio", "loss_spike", "loss_not_decreasing")),
)
def centre_detector(fault: str = "") -> Tensor:
    images, objects = _scenes(1000)
    centre, boxes = _cells_of(objects[:850], fault == "cells_indexed_x_first")
    layers: list[nn.Module] = []
    for inputs, outputs, stride in ((1, 12, 2), (12, 24, 2), (24, 32, 1)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride, 1), nn.GroupNorm(4, outputs), nn.SiLU()]
    model = nn.Sequential(*layers, nn.Conv2d(32, 32, 3, padding=1), nn.SiLU(), nn.Conv2d(32, 6, 1))
    nn.init.constant_(model[-1].bias[:1].detach(), -2.5)  # few cells have an object
    betas = (0.999, 0.9) if fault == "betas_in_the_wrong_order" else (0.9, 0.999)
    optimizer = AdamW(model.parameters(), lr=5e-3, betas=betas, weight_decay=1e-2)
    scheduler = CosineAnnealingLR(optimizer, 260)

    def loss_of(output: Tensor, centre: Tensor, boxes: Tensor) -> Tensor:
        output, has_object = output.float().movedim(1, 3), centre > 0
        share = output[..., 0].sigmoid()
        entropy = F.binary_cross_entropy_with_logits(output[..., 0], centre, reduction="none")
        focal = ((centre - share) ** 2 * entropy).sum() / centre.sum()
        box = F.l1_loss(output[has_object][:, 1:5], boxes[has_object][:, :4])
        kind = F.binary_cross_entropy_with_logits(output[has_object][:, 5], boxes[has_object][:, 4])
        return focal + box + kind

    with attach(model, optimizer) as probe:
        for _, rows in zip(range(220), batches(images[:850], centre, boxes, size=32), strict=False):
            with torch.autocast("cpu", torch.bfloat16):
                output = model(rows[0])
            optimizer.zero_grad()
            loss = loss_of(output, *rows[1:])
            loss.backward()
            optimizer.step()
            scheduler.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        return loss_of(model(images[850:]), *_cells_of(objects[850:]))


class RowReader(nn.Module):
    def __init__(self, has_normal_weights: bool, size: int = 64) -> None:
        super().__init__()
        self.rnn = nn.RNN(4, size, nonlinearity="relu", batch_first=True)
        self.head = nn.Linear(size, 10)
        nn.init.normal_(self.rnn.weight_ih_l0, std=0.1)
        nn.init.eye_(self.rnn.weight_hh_l0)
        if has_normal_weights:
            nn.init.normal_(self.rnn.weight_hh_l0)
        nn.init.zeros_(self.rnn.bias_ih_l0)
        nn.init.zeros_(self.rnn.bias_hh_l0)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.rnn(images.reshape(len(images), 16, 4))[1][0])


@program(
    "general",
    "Le et al., A simple way to initialize recurrent networks of rectified linear units, 2015",
    Fault(
        "recurrent_weights_standard_normal",
        "initialization",
        TAXONOMY,
        ("poor_initialization", "exploding_activation", "exploding_gradient", "loss_spike", "@rnn"),
    ),
    Fault("clipped_before_backward", "gradients", FORUM, ("exploding_gradient", "loss_spike", "update_ratio")),
)
def identity_recurrence(fault: str = "") -> Tensor:
    train_data, test_data = normalized_digits()
    model = RowReader(fault == "recurrent_weights_standard_normal")
    optimizer = SGD(model.parameters(), lr=0.02, momentum=0.9)
    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(250), batches(*train_data.tensors, size=32), strict=False):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), wanted)
            if fault != "clipped_before_backward":
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if fault == "clipped_before_backward":
                loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    images, classes = test_data.tensors
    with torch.no_grad():
        return F.cross_entropy(model(images), classes)


def _scans(count: int, size: int = 8) -> tuple[Tensor, Tensor]:
    """Return scans [count, 1, size, size, size] with a vessel and an organ, and their classes: 0 elsewhere, 1 and 2."""
    grid = torch.stack(torch.meshgrid(*[torch.arange(size) + 0.5] * 3, indexing="ij"))
    centre = torch.rand(count, 3, 1, 1, 1) * size * 0.5 + size * 0.25
    organ = ((grid - centre) ** 2).sum(1) < (0.22 * size + torch.rand(count, 1, 1, 1) * 0.12 * size) ** 2
    along = torch.rand(count, 2, 1, 1, 1) * size
    vessel = ((grid[1:] - along) ** 2).sum(1) < (0.13 * size) ** 2
    labels = torch.where(organ, 2, vessel.long())[:, None]
    images = torch.tensor([0.0, 1.2, 0.7])[labels] + 0.25 * torch.randn(count, 1, size, size, size)
    return images, labels


class VolumeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fine = self.block(1, 8, 1)
        self.coarse = nn.Sequential(self.block(8, 16, 2), self.block(16, 16, 1))
        self.up = nn.ConvTranspose3d(16, 8, 2, 2)
        self.merge = self.block(16, 8, 1)
        self.head = nn.Conv3d(8, 3, 1)

    @staticmethod
    def block(inputs: int, outputs: int, stride: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv3d(inputs, outputs, 3, stride, 1), nn.InstanceNorm3d(outputs, affine=True), nn.LeakyReLU(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        fine = self.fine(x)
        return self.head(self.merge(torch.cat([fine, self.up(self.coarse(fine))], 1)))


@program(
    "general",
    "MONAI's tutorial spleen_segmentation_3d, with scans that are resampled to the same spacing",
    Fault("labels_interpolated_linearly", "labels", ISSUES, ("labels_of_other_positions", "labels_shifted")),
)
def resampled_scans(fault: str = "") -> Tensor:
    images, labels = _scans(110)
    images = F.interpolate(images, scale_factor=1.5, mode="trilinear")
    exact = F.interpolate(labels.float(), scale_factor=1.5).long().squeeze(1)
    given = exact
    if fault == "labels_interpolated_linearly":
        given = F.interpolate(labels.float(), scale_factor=1.5, mode="trilinear").round().long().squeeze(1)
    model = VolumeNet()
    optimizer = AdamW(model.parameters(), lr=5e-3, weight_decay=1e-5)
    scheduler = OneCycleLR(optimizer, max_lr=8e-3, total_steps=150)

    def loss_of(data: Tensor, classes: Tensor) -> Tensor:
        logits = model(data)
        share, wanted = logits.softmax(1), F.one_hot(classes, 3).movedim(4, 1).float()
        overlap = 2 * (share * wanted).sum((2, 3, 4)) / ((share + wanted).sum((2, 3, 4)) + 1e-5)
        return F.cross_entropy(logits, classes) + 1 - overlap[:, 1:].mean()

    with attach(model, optimizer) as probe:
        for _, (data, classes) in zip(range(150), batches(images[:90], given[:90], size=4), strict=False):
            is_flipped = torch.rand(()) < 0.5
            loss = loss_of(data.flip(4), classes.flip(3)) if is_flipped else loss_of(data, classes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        return loss_of(images[90:], exact[90:])


def _moved(states: Tensor, forces: Tensor) -> tuple[Tensor, Tensor]:
    """Return the places and speeds of masses after a force [masses, 1], and the rewards."""
    place, speed = states.unbind(1)
    speed = 0.95 * speed + 0.2 * forces[:, 0]
    place = (place + 0.2 * speed).clamp(-2, 2)
    return torch.stack([place, speed], 1), -(place**2) - 0.1 * speed**2 - 0.01 * forces[:, 0] ** 2


@program("general", "CleanRL, td3_continuous_action.py, for masses that are pushed to the middle")
def pushed_masses() -> Tensor:
    discount, count = 0.95, 16
    actor = nn.Sequential(nn.Linear(2, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1), nn.Tanh())
    critics = nn.ModuleList(
        nn.Sequential(nn.Linear(3, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1)) for _ in range(2)
    )
    networks = nn.ModuleDict({"actor": actor, "critics": critics})
    targets = copy.deepcopy(networks).requires_grad_(False)
    actor_optimizer, critic_optimizer = (Adam(part.parameters(), lr=2e-3) for part in (actor, critics))
    memory: list[tuple[Tensor, ...]] = []
    states = torch.rand(count, 2) * 2 - 1

    def act(noise: float) -> None:
        nonlocal states
        with torch.no_grad():
            forces = (actor(states) + noise * torch.randn(count, 1)).clamp(-1, 1)
        following, rewards = _moved(states, forces)
        memory.append((states, forces, rewards, following))
        is_new = torch.rand(count, 1) < 0.04
        states = torch.where(is_new, torch.rand(count, 2) * 2 - 1, following)

    for _ in range(40):
        act(1.0)
    with attach(
        nn.ModuleDict({"networks": networks, "targets": targets}), [actor_optimizer, critic_optimizer]
    ) as probe:
        for step in range(240):
            act(0.2)
            columns = [torch.cat(column) for column in zip(*memory, strict=True)]
            chosen = torch.randint(len(columns[0]), (96,))
            before, forces, rewards, after = (column[chosen] for column in columns)
            with torch.no_grad():
                following = targets["actor"](after) + (0.2 * torch.randn(96, 1)).clamp(-0.5, 0.5)
                pairs = torch.cat([after, following.clamp(-1, 1)], 1)
                least = torch.stack([critic(pairs) for critic in targets["critics"]]).amin(0).squeeze(1)
                wanted = rewards + discount * least
            pairs = torch.cat([before, forces], 1)
            loss = sum(F.mse_loss(critic(pairs).squeeze(1), wanted) for critic in critics)
            critic_optimizer.zero_grad()
            loss.backward()
            critic_optimizer.step()
            if step % 2 == 1:
                actor_optimizer.zero_grad()
                (-critics[0](torch.cat([before, actor(before)], 1)).mean()).backward()
                actor_optimizer.step()
                with torch.no_grad():
                    for slow, fast in zip(targets.parameters(), networks.parameters(), strict=True):
                        slow.lerp_(fast, 0.05)
            probe.end_step(loss=loss)
    states, cost = torch.cartesian_prod(torch.linspace(-1, 1, 5), torch.linspace(-1, 1, 5)), torch.zeros(())
    with torch.no_grad():
        for _ in range(30):
            states, rewards = _moved(states, actor(states))
            cost -= rewards.mean()
    return cost


@program("general", "He et al., LightGCN: simplifying and powering graph convolution network for recommendation, 2020")
def light_graph() -> Tensor:
    users, items = 120, 80
    tastes, topics = torch.randn(users, 4), torch.randn(items, 4)
    likes = (tastes @ topics.t() + 0.5 * torch.randn(users, items)) > 2.2
    shown = torch.rand(users, items) < 0.8
    edges, others = (likes & shown).nonzero(), (likes & ~shown).nonzero()
    degrees = [(likes & shown).sum(axis).clamp(min=1).float() for axis in (1, 0)]
    spread = (likes & shown) / (degrees[0][:, None] * degrees[1]).sqrt()
    tables = nn.ModuleDict({"of_users": nn.Embedding(users, 24), "of_items": nn.Embedding(items, 24)})
    for table in tables.values():
        nn.init.normal_(table.weight, std=0.1)
    optimizer = Adam(tables.parameters(), lr=1e-2)

    def vectors() -> tuple[Tensor, Tensor]:
        user, item = tables["of_users"](torch.arange(users)), tables["of_items"](torch.arange(items))
        of_users, of_items = [user], [item]
        for _ in range(2):
            user, item = spread @ item, spread.t() @ user
            of_users.append(user)
            of_items.append(item)
        return torch.stack(of_users).mean(0), torch.stack(of_items).mean(0)

    def loss_of(pairs: Tensor) -> Tensor:
        user, item = vectors()
        unliked = torch.rand(len(pairs), items).masked_fill(likes[pairs[:, 0]], -1).argmax(1)
        better = (user[pairs[:, 0]] * (item[pairs[:, 1]] - item[unliked])).sum(1)
        return -F.logsigmoid(better).mean()

    with attach(tables, optimizer) as probe:
        for _, (pairs,) in zip(range(250), batches(edges, size=128), strict=False):
            chosen = tables["of_users"].weight[pairs[:, 0]], tables["of_items"].weight[pairs[:, 1]]
            loss = loss_of(pairs) + 1e-3 * sum(rows.pow(2).sum() for rows in chosen) / len(pairs)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        return loss_of(others)
