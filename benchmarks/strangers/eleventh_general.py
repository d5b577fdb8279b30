"""Programs of further kinds, with faults that are known from collections, issue trackers and forums."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from data import batches, digits
from registry import Fault, attach, in_two_processes, program
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW

TAXONOMY = "Humbatova et al., Taxonomy of real faults in deep learning systems, 2020"
MUTATIONS = "Humbatova et al., DeepCrime: mutation testing of deep learning systems based on real faults, 2021"
FORUM = "Questions at discuss.pytorch.org and Stack Overflow, 2018 to 2026"
ISSUES = "Issues of libraries for training and of examples at GitHub, 2018 to 2026"


def _perceptron(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _average(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor.div_(2)


class Muon(torch.optim.Optimizer):
    """Momentum whose updates are made orthogonal; each rank computes a part of them and sends it to the others."""

    def __init__(self, matrices: list[Tensor], lr: float, world: int, number: int) -> None:
        super().__init__(matrices, {"lr": lr})
        self.world, self.number = world, number

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        group = self.param_groups[0]
        for at, matrix in enumerate(group["params"][: self.number]):
            owner = at % self.world
            if owner == dist.get_rank():
                state = self.state[matrix]
                momentum = state.setdefault("momentum", torch.zeros_like(matrix))
                momentum.lerp_(matrix.grad, 0.05)
                x = matrix.grad.lerp(momentum, 0.95)
                x = x / (x.norm() + 1e-7)
                for _ in range(5):
                    square = x @ x.mT
                    x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
                matrix.sub_(x, alpha=group["lr"] * max(1, matrix.size(0) / matrix.size(1)) ** 0.5)
            dist.broadcast(matrix, owner)


def _nested_rings(size: int) -> tuple[Tensor, Tensor]:
    """Return rows [size, 12], and one of six classes: the signs of two distances from rings in planes of the rows, and a third."""
    x = torch.randn(size, 12)
    weights = torch.randn(12, 6, generator=torch.Generator().manual_seed(0)) / 12**0.5
    first, second, third = (x @ weights).unflatten(1, (3, 2)).norm(dim=2).t()
    return x, 2 * ((first > 0.9).long() + (second > 1.2).long()) + (third > 1.1).long()


def _train_orthogonally(rank: int, fault: str, final: Tensor) -> None:
    x, classes = _nested_rings(4800)
    model = nn.Sequential(
        OrderedDict({
            "fc1": nn.Linear(12, 24, bias=False), "norm1": nn.LayerNorm(24), "relu1": nn.ReLU(),
            "fc2": nn.Linear(24, 48, bias=False), "norm2": nn.LayerNorm(48), "relu2": nn.ReLU(),
            "fc3": nn.Linear(48, 16, bias=False), "norm3": nn.LayerNorm(16), "relu3": nn.ReLU(),
            "head": nn.Linear(16, 6),
        })
    )  # fmt: skip
    matrices = [model.fc2.weight, model.fc3.weight, model.fc1.weight]  # the largest first, as in the published code
    others = [parameter for parameter in model.parameters() if all(parameter is not each for each in matrices)]
    number = len(matrices) // 2 * 2 if fault == "remainder_without_an_owner" else len(matrices)
    optimizers = [Muon(matrices, 0.02, 2, number), Adam(others, lr=3e-3)]
    rows = batches(x[rank:4000:2], classes[rank:4000:2], size=32)
    with attach(model, optimizers) as probe:
        for _, (data, wanted) in zip(range(220), rows, strict=False):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = F.cross_entropy(model(data), wanted)
            loss.backward()
            _average([parameter.grad for parameter in model.parameters()])
            for optimizer in optimizers:
                optimizer.step()
            probe.end_step(loss=loss)
    if rank == 0:
        with torch.no_grad():
            final.copy_(F.cross_entropy(model(x[4000:]), classes[4000:]))


@program(
    "silent errors",
    "Jordan et al., Muon: an optimizer for hidden layers in neural networks, 2024, with the matrices divided among two ranks",
    Fault(
        "remainder_without_an_owner",
        "optimizer",
        ISSUES,
        ("unchanged_parameter", "parameters_follow_gradients", "zero_learning_rate", "update_ratio", "@fc1"),
    ),
)
def orthogonal_updates(fault: str = "") -> Tensor:
    final = torch.zeros(()).share_memory_()
    in_two_processes(_train_orthogonally, fault, final)
    return final


class EdgesOfNeighbour(torch.autograd.Function):
    """Exchange edges [2, ...] with the other rank, and their gradients."""

    @staticmethod
    def forward(_: Any, edges: Tensor) -> Tensor:
        found = [torch.empty_like(edges) for _ in range(2)]
        dist.all_gather(found, edges.contiguous())
        return found[1 - dist.get_rank()]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return EdgesOfNeighbour.forward(ctx, gradient)


class HaloConv(nn.Module):
    """Convolve a half of the globe, with two columns of the other half at each side."""

    def __init__(self, inputs: int, outputs: int, is_swapped: bool) -> None:
        super().__init__()
        self.is_swapped = is_swapped
        self.conv = nn.Conv2d(inputs, outputs, 5, padding=(2, 0))

    def forward(self, x: Tensor) -> Tensor:
        first, last = EdgesOfNeighbour.apply(torch.stack([x[..., :2], x[..., -2:]]))
        west, east = (first, last) if self.is_swapped else (last, first)
        return self.conv(torch.cat([west, x, east], 3))


def _weather(size: int) -> tuple[Tensor, Tensor]:
    """Return temperature, humidity and pressure [size, 3, 12, 16] of a globe, and the values after a day of west wind."""
    waves = torch.randn(size, 3, 12, 3, 2)
    angles = 2 * math.pi * torch.arange(16) / 16 * torch.arange(1, 4)[:, None]
    fields = torch.einsum("nvlwk,wkx->nvlx", waves, torch.stack([angles.sin(), angles.cos()], 1)) / 3**0.5
    fields = (fields + fields.roll(1, 2)) / 2**0.5
    later = fields.roll(2, 3)
    later = torch.stack([later[:, 0] + 0.7 * later[:, 1], later[:, 1] * (1 - 0.3 * later[:, 2].tanh()), later[:, 2]], 1)
    scales, means = torch.tensor([12.0, 0.003, 8.0]), torch.tensor([280.0, 0.01, 1010.0])
    return fields * scales[:, None, None] + means[:, None, None], later


def _train_halves(rank: int, fault: str, final: Tensor) -> None:
    fields, later = _weather(700)
    if fault == "one_deviation_for_all_variables":
        x = (fields - fields.mean()) / fields.std()
    else:
        x = (fields - fields.mean((0, 2, 3), keepdim=True)) / fields.std((0, 2, 3), keepdim=True)
    x, later = x[..., 8 * rank : 8 * rank + 8], later[..., 8 * rank : 8 * rank + 8]
    is_swapped = fault == "edges_in_the_order_of_their_arrival"
    model = nn.Sequential(
        OrderedDict({
            "conv1": HaloConv(3, 20, is_swapped), "relu1": nn.ReLU(), "conv2": HaloConv(20, 20, is_swapped),
            "relu2": nn.ReLU(), "head": nn.Conv2d(20, 3, 1),
        })
    )  # fmt: skip
    optimizer = Adam(model.parameters(), lr=4e-3)
    order = torch.Generator().manual_seed(0)
    with attach(model, optimizer) as probe:
        for _ in range(240):
            rows = torch.randint(600, (12,), generator=order)
            optimizer.zero_grad()
            loss = F.mse_loss(model(x[rows]), later[rows])
            loss.backward()
            _average([parameter.grad for parameter in model.parameters()])
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        loss = F.mse_loss(model(x[600:]), later[600:])
    _average([loss])
    if rank == 0:
        final.copy_(loss)


@program(
    "silent errors",
    "Dryden et al., Improving strong-scaling of CNN training by exploiting finer-grained parallelism, 2019, and PhysicsNeMo",
    Fault(
        "edges_in_the_order_of_their_arrival",
        "padding",
        ISSUES,
        ("labels_of_other_positions", "wrong_axis", "replicas_equal", "@conv*"),
    ),
    Fault(
        "one_deviation_for_all_variables",
        "data",
        TAXONOMY,
        ("input_not_normalized", "heavy_tailed_input", "input_drift", "@conv1*"),
    ),
)
def halves_of_the_globe(fault: str = "") -> Tensor:
    final = torch.zeros(()).share_memory_()
    in_two_processes(_train_halves, fault, final)
    return final


def _cut_out(images: Tensor) -> Tensor:
    """Return noisy images [samples, 1, 8, 8], each without a square of 3 by 3 pixels."""
    rows, columns = torch.randint(6, (2, len(images), 1, 1))
    grid = torch.arange(8)
    is_cut = ((grid[:, None] - rows - 1).abs() <= 1) & ((grid - columns - 1).abs() <= 1)
    noisy = images + 0.25 * torch.randn_like(images)
    return noisy.masked_fill(is_cut[:, None], 0.0)


@program(
    "silent errors",
    "Sohn et al., FixMatch: simplifying semi-supervised learning with consistency and confidence, 2020, for digits",
    Fault(
        "strong_views_inside_no_grad",
        "graph",
        FORUM,
        ("wrong_loss", "parameters_follow_gradients", "loss_scale", "gradients_zeroed"),
    ),
    Fault(
        "views_shuffled_separately",
        "labels",
        ISSUES,
        ("labels_shifted", "labels_of_other_positions", "distinct_data", "loss_not_decreasing"),
    ),
)
def digits_with_few_labels(fault: str = "") -> Tensor:
    images, classes = digits()
    order = torch.randperm(len(images))
    images, classes = (images[order] - images.mean()) / images.std(), classes[order]
    model = nn.Sequential(
        OrderedDict({
            "conv1": nn.Conv2d(1, 16, 3, 1, 1), "norm1": nn.BatchNorm2d(16), "relu1": nn.ReLU(),
            "conv2": nn.Conv2d(16, 24, 3, 2, 1), "norm2": nn.BatchNorm2d(24), "relu2": nn.ReLU(),
            "flatten": nn.Flatten(), "head": nn.Linear(384, 10),
        })
    )  # fmt: skip
    optimizer = SGD(model.parameters(), lr=0.03, momentum=0.9, nesterov=True, weight_decay=5e-4)
    known, others = batches(images[:100], classes[:100], size=10), batches(images[100:1400], size=40)
    of_strong_views = batches(images[100:1400], size=40)
    with attach(model, optimizer) as probe:
        for _, (data, wanted), (free,) in zip(range(260), known, others, strict=False):
            with torch.no_grad():
                sureness, guesses = model(free + 0.05 * torch.randn_like(free)).softmax(1).max(1)
                is_sure = (sureness > 0.95).float()
            strong = next(of_strong_views)[0] if fault == "views_shuffled_separately" else free
            with torch.set_grad_enabled(fault != "strong_views_inside_no_grad"):
                of_guesses = (F.cross_entropy(model(_cut_out(strong)), guesses, reduction="none") * is_sure).mean()
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data + 0.05 * torch.randn_like(data)), wanted) + of_guesses
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    model.eval()
    with torch.no_grad():
        return F.cross_entropy(model(images[1400:]), classes[1400:])


def _validate(model: nn.ModuleDict, images: Tensor, classes: Tensor, is_restored: bool) -> Tensor:
    """Return the loss; the model is frozen for this, to save memory, and then trained again."""
    model.eval().requires_grad_(False)
    loss = F.cross_entropy(model["head"](model["backbone"](images)), classes)
    model.train().requires_grad_(True)
    if not is_restored:
        model["backbone"].requires_grad_(False)
    return loss


@program(
    "silent errors",
    "PyTorch Lightning's transfer learning, and torchvision's references, with a schedule by hand for a backbone and a head",
    Fault(
        "backbone_left_frozen_by_the_validation",
        "frozen parameters",
        FORUM,
        ("unchanged_parameter", "gradients_zeroed", "vanishing_gradient", "parameters_follow_gradients", "@backbone*"),
        since=20,
    ),
    Fault(
        "only_the_first_group_is_scheduled",
        "schedule",
        ISSUES,
        ("rate_in_effect", "update_ratio", "zero_learning_rate", "loss_spike", "@head*"),
    ),
)
def tuned_for_other_digits(fault: str = "") -> Tensor:
    images, classes = digits()
    is_old = classes < 5
    backbone = nn.Sequential(
        OrderedDict({
            "conv1": nn.Conv2d(1, 16, 3, 1, 1), "norm1": nn.BatchNorm2d(16), "relu1": nn.ReLU(),
            "conv2": nn.Conv2d(16, 24, 3, 2, 1), "norm2": nn.BatchNorm2d(24), "relu2": nn.ReLU(),
            "pool": nn.AvgPool2d(2), "flatten": nn.Flatten(),
        })
    )  # fmt: skip
    before = nn.Sequential(backbone, nn.Linear(96, 5))
    optimizer: torch.optim.Optimizer = Adam(before.parameters(), lr=2e-3)
    for _, (data, wanted) in zip(range(60), batches(images[is_old], classes[is_old], size=20), strict=False):
        optimizer.zero_grad()
        F.cross_entropy(before(data), wanted).backward()
        optimizer.step()
    order = torch.randperm(len(images))
    order = order[~is_old[order]]
    images, classes = 1 - images[order], classes[order] - 5
    model = nn.ModuleDict({"backbone": backbone, "head": _perceptron(96, 48, 5)})
    rates = (0.02, 0.2)
    groups = [{"params": model[name].parameters(), "lr": rate} for name, rate in zip(model, rates, strict=True)]
    optimizer = SGD(groups, momentum=0.9, weight_decay=1e-4)
    is_restored = fault != "backbone_left_frozen_by_the_validation"
    with attach(model, optimizer) as probe:
        for step, (data, wanted) in zip(range(280), batches(images[:600], classes[:600], size=16), strict=False):
            factor = min((step + 1) / 20, 0.5 + 0.5 * math.cos(math.pi * step / 280))
            count = 1 if fault == "only_the_first_group_is_scheduled" else 2
            for group, rate in list(zip(optimizer.param_groups, rates, strict=True))[:count]:
                group["lr"] = rate * factor
            optimizer.zero_grad()
            loss = F.cross_entropy(model["head"](model["backbone"](data + 0.3 * torch.randn_like(data))), wanted)
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
            if step % 20 == 19:
                with probe.evaluating():
                    probe.log(loss=_validate(model, images[600:], classes[600:], is_restored))
    return _validate(model, images[600:], classes[600:], is_restored)


class Lars(torch.optim.Optimizer):
    """Momentum with a rate for each parameter, in proportion to the norm of its values over that of its gradient."""

    def __init__(self, parameters: Iterator[Tensor], lr: float, has_guard: bool) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": 1e-4, "trust": 0.02})
        self.has_guard = has_guard

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        for group in self.param_groups:
            for parameter in group["params"]:
                size, change = parameter.norm(), parameter.grad.norm()
                ratio = group["trust"] * size / (change + group["weight_decay"] * size + 1e-8)
                if self.has_guard and (size == 0 or change == 0):
                    ratio = torch.ones(())
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                momentum.mul_(0.9).add_(ratio * (parameter.grad + group["weight_decay"] * parameter))
                parameter.sub_(momentum, alpha=group["lr"])


class ZeroBlock(nn.Module):
    """A block of a residual network, whose last normalization starts at zero."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.norm2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False), nn.BatchNorm2d(channels)
        nn.init.zeros_(self.norm2.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


@program(
    "general",
    "You et al., Large batch training of convolutional networks, 2017 (LARS), and Lightning Bolts, with blocks that start at zero",
    Fault(
        "norm_of_zero_gets_no_rate",
        "optimizer",
        ISSUES,
        (
            "unchanged_parameter", "all_zero", "vanishing_gradient", "parameters_follow_gradients", "update_ratio",
            "zero_learning_rate", "@block*",
        ),
    ),
)  # fmt: skip
def layerwise_rates(fault: str = "") -> Tensor:
    images, classes = digits()
    images = (images - images.mean()) / images.std()
    model = nn.Sequential(
        OrderedDict({
            "stem": nn.Conv2d(1, 12, 3, 2, 1, bias=False), "norm": nn.BatchNorm2d(12), "relu": nn.ReLU(),
            "block1": ZeroBlock(12), "block2": ZeroBlock(12), "pool": nn.AvgPool2d(4), "flatten": nn.Flatten(),
            "head": nn.Linear(12, 10),
        })
    )  # fmt: skip
    optimizer = Lars(model.parameters(), 0.3, fault != "norm_of_zero_gets_no_rate")
    with attach(model, optimizer) as probe:
        for step, (data, wanted) in zip(range(220), batches(images[:1400], classes[:1400], size=100), strict=False):
            optimizer.param_groups[0]["lr"] = 0.3 * min((step + 1) / 20, 0.5 + 0.5 * math.cos(math.pi * step / 220))
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), wanted)
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    model.eval()
    with torch.no_grad():
        return F.cross_entropy(model(images[1400:]), classes[1400:])


def _augmented(images: Tensor) -> Tensor:
    """Return images [samples, 1, 8, 8] that are moved by up to one pixel, with another contrast and noise."""
    rows, columns = torch.randint(3, (2,)).tolist()
    moved = F.pad(images, (1, 1, 1, 1))[:, :, rows : rows + 8, columns : columns + 8]
    return moved * (0.7 + 0.6 * torch.rand(len(images), 1, 1, 1)) + 0.15 * torch.randn_like(images)


def _pipeline(images: Tensor, classes: Tensor, is_cached_last: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield epochs of batches of 16; what was read is kept in memory, with the augmentation or without."""
    read = [(images[at : at + 16], classes[at : at + 16]) for at in range(0, len(images), 16)]
    if is_cached_last:
        read = [(_augmented(data), wanted) for data, wanted in read]
    while True:
        for at in torch.randperm(len(read)).tolist():
            data, wanted = read[at]
            yield (data if is_cached_last else _augmented(data)), wanted


@program(
    "keras",
    "Keras's guide on data augmentation, and TensorFlow's on tf.data, for few digits with a cache",
    Fault(
        "cached_after_the_augmentation",
        "data",
        ISSUES,
        ("distinct_data", "samples_vary", "overfit", "overtraining"),
        since=12,
    ),
    Fault(
        "classes_that_look_alike_relabelled",
        "labels",
        MUTATIONS,
        ("labels_shifted", "class_imbalance", "wrong_loss", "loss_not_decreasing"),
    ),
)
def few_augmented_digits(fault: str = "") -> Tensor:
    images, classes = digits()
    known, labels = images[:192], classes[:192].clone()
    if fault == "classes_that_look_alike_relabelled":
        labels[(labels == 8) & (torch.arange(192) % 2 == 0)] = 3
        labels[(labels == 9) & (torch.arange(192) % 2 == 0)] = 4
    model = nn.Sequential(
        OrderedDict({
            "conv1": nn.Conv2d(1, 24, 3, 1, 1), "relu1": nn.ReLU(), "conv2": nn.Conv2d(24, 32, 3, 2, 1),
            "relu2": nn.ReLU(), "flatten": nn.Flatten(), "dense1": nn.Linear(512, 64), "relu3": nn.ReLU(),
            "dense2": nn.Linear(64, 10),
        })
    )  # fmt: skip
    for layer in (model.conv1, model.conv2, model.dense1, model.dense2):
        nn.init.xavier_uniform_(layer.weight)
        nn.init.zeros_(layer.bias)
    optimizer = Adam(model.parameters(), lr=2e-3)
    rows = _pipeline(known, labels, fault == "cached_after_the_augmentation")
    with attach(model, optimizer) as probe:
        for step, (data, wanted) in zip(range(300), rows, strict=False):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), wanted)
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
            if step % 60 == 59:
                with probe.evaluating(), torch.no_grad():
                    probe.log(loss=F.cross_entropy(model(images[192:700]), classes[192:700]))
    with torch.no_grad():
        return F.cross_entropy(model(images[700:]), classes[700:])


def _at(images: Tensor, places: Tensor) -> Tensor:
    """Return the values of images [samples, channels, rows, columns] at places [samples, 2, rows, columns], x and then y."""
    size = torch.tensor([images.size(3) - 1, images.size(2) - 1])
    grid = 2 * places.permute(0, 2, 3, 1) / size - 1
    return F.grid_sample(images, grid, padding_mode="border", align_corners=True)


def _grid(size: int) -> Tensor:
    """Return the places of pixels [2, size, size], x and then y."""
    return torch.stack(torch.meshgrid(torch.arange(size), torch.arange(size), indexing="xy")).float()


class Flow(nn.Module):
    """Return the flow between two images at a half of their size, after each of three steps."""

    def __init__(self, is_transposed: bool) -> None:
        super().__init__()
        self.is_transposed = is_transposed
        self.features = nn.Sequential(nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, 1, 1))
        self.update = nn.Sequential(
            nn.Conv2d(34, 32, 3, 1, 1), nn.ReLU(), nn.Conv2d(32, 32, 3, 1, 1), nn.ReLU(), nn.Conv2d(32, 2, 3, 1, 1)
        )

    def forward(self, first: Tensor, second: Tensor) -> list[Tensor]:
        first, second = self.features(first), self.features(second)
        grid = _grid(first.size(2))
        if self.is_transposed:
            grid = grid.flip(0)
        flow, flows = torch.zeros(len(first), 2, *first.shape[2:]), []
        for _ in range(3):
            flow = flow.detach()
            flow = flow + self.update(torch.cat([first, _at(second, grid + flow), flow], 1))
            flows.append(flow)
        return flows


def _moved(size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return two images [size, 1, 16, 16] of a texture, and the flow from the first to the second [size, 2, 16, 16]."""
    second = F.interpolate(torch.randn(size, 1, 7, 7), size=16, mode="bicubic")
    centred = _grid(16) - 7.5
    flow = 1.5 * torch.randn(size, 2, 1, 1).clamp(-2, 2) + 0.1 * torch.randn(size, 1, 1, 1) * centred
    return _at(second, _grid(16) + flow), second, flow


@program(
    "general",
    "Teed and Deng, RAFT: recurrent all-pairs field transforms for optical flow, 2020, with warped features at a half of the size",
    Fault(
        "flow_made_smaller_without_its_values",
        "labels",
        ISSUES,
        ("wrong_loss", "labels_of_other_positions", "loss_not_decreasing"),
    ),
    Fault(
        "grid_in_the_order_of_rows",
        "tensor layout",
        FORUM,
        ("wrong_axis", "labels_of_other_positions", "@update*"),
    ),
)
def moved_textures(fault: str = "") -> Tensor:
    first, second, flow = _moved(900)
    model = Flow(fault == "grid_in_the_order_of_rows")
    optimizer = AdamW(model.parameters(), lr=2e-3)
    factor = 1.0 if fault == "flow_made_smaller_without_its_values" else 0.5
    with attach(model, optimizer) as probe:
        rows = batches(first[:800], second[:800], flow[:800], size=12)
        for _, (before, after, wanted) in zip(range(260), rows, strict=False):
            optimizer.zero_grad()
            small = factor * F.interpolate(wanted, scale_factor=0.5, mode="bilinear")
            loss = torch.stack(
                [0.8 ** (2 - at) * F.l1_loss(f, small) for at, f in enumerate(model(before, after))]
            ).sum()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        found = 2 * F.interpolate(model(first[800:], second[800:])[-1], scale_factor=2.0, mode="bilinear")
        return (found - flow[800:]).norm(dim=1).mean()


class SageConv(nn.Module):
    """Add to the features of nodes those of their neighbours, as a mean."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.own, self.neighbours = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs, bias=False)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """Return features [nodes, outputs] for edges [2, edges] from a neighbour to a node."""
        sums = torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])
        degrees = torch.bincount(edges[1], minlength=len(x)).clamp(min=1)
        return self.own(x) + self.neighbours(sums / degrees[:, None])


class Sage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = SageConv(16, 48), SageConv(48, 5)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.conv2(F.dropout(F.relu(self.conv1(x, edges)), 0.3, self.training), edges)


def _sampled(seeds: Tensor, neighbours: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nodes of a batch, seeds first, and its edges [2, edges] among them, for two hops with four neighbours each."""
    reached, pairs = seeds, []
    for _ in range(2):
        found = neighbours[reached][:, torch.randperm(neighbours.size(1))[:4]]
        pairs.append(torch.stack([found.flatten(), reached.repeat_interleave(4)]))
        reached = found.flatten().unique()
    edges = torch.cat(pairs, 1)
    is_seed = torch.zeros(len(neighbours), dtype=torch.bool).index_fill_(0, seeds, True)
    others = edges.unique()
    nodes = torch.cat([seeds, others[~is_seed[others]]])
    place = torch.empty(len(neighbours), dtype=torch.long)
    place[nodes] = torch.arange(len(nodes))
    return nodes, place[edges]


@program(
    "general",
    "PyTorch Geometric, reddit.py with NeighborLoader, for topics of posts",
    Fault(
        "neighbours_counted_in_the_loss",
        "loss and labels",
        ISSUES,
        ("wrong_loss", "labels_in_the_inputs", "padding_in_loss", "missing_labels_in_loss", "edges_of_other_graphs"),
    ),
)
def topics_of_posts(fault: str = "") -> Tensor:
    topics = torch.randint(5, (1200,))
    x = 1.5 * torch.eye(5, 16)[topics] + torch.randn(1200, 16)
    is_near = (topics[:, None] == topics).float() * 12 + 1
    neighbours = torch.multinomial(is_near.fill_diagonal_(0), 8)
    model = Sage()
    optimizer = Adam(model.parameters(), lr=5e-3, weight_decay=5e-4)
    with attach(model, optimizer) as probe:
        for _, (seeds,) in zip(range(240), batches(torch.arange(120), size=24), strict=False):
            nodes, edges = _sampled(seeds, neighbours)
            count = len(nodes) if fault == "neighbours_counted_in_the_loss" else len(seeds)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[nodes], edges)[:count], topics[nodes[:count]])
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    model.eval()
    edges = torch.stack([neighbours.flatten(), torch.arange(1200).repeat_interleave(8)])
    with torch.no_grad():
        return F.cross_entropy(model(x, edges)[120:], topics[120:])


class Retrieval(nn.Module):
    """Return vectors for viewers, from the films that they saw, and for films."""

    def __init__(self, films: int) -> None:
        super().__init__()
        self.seen, self.films = nn.EmbeddingBag(films, 24, mode="mean"), nn.Embedding(films, 24)
        self.viewer, self.film = _perceptron(24, 48, 24), nn.Linear(24, 24)
        for table in (self.seen, self.films):
            nn.init.normal_(table.weight, std=0.3)

    def forward(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        return self.viewer(self.seen(seen)), self.film(self.films.weight)


@program(
    "keras",
    "Keras RS, retrieval with the correction of sampling probabilities and without accidental hits, for films",
    Fault(
        "logarithm_of_the_popularity_added",
        "loss",
        ISSUES,
        ("wrong_loss", "wrong_range_of_loss", "loss_not_decreasing", "class_imbalance"),
    ),
)
def retrieved_films(fault: str = "") -> Tensor:
    popularity = 1 / (1 + torch.arange(200.0)).sqrt()
    tastes, kinds = torch.randn(8500, 4), torch.randn(200, 4)
    views = torch.multinomial((0.8 * tastes @ kinds.t()).exp() * popularity, 9)
    seen, films = views[:, :8], views[:, 8]
    share = torch.bincount(views[:8000].flatten(), minlength=200).clamp(min=1) / views[:8000].numel()
    model = Retrieval(200)
    optimizer = Adam(model.parameters(), lr=4e-3)
    sign = 1 if fault == "logarithm_of_the_popularity_added" else -1
    with attach(model, optimizer) as probe:
        for _, (before, film) in zip(range(300), batches(seen[:8000], films[:8000], size=64), strict=False):
            viewers, vectors = model(before)
            scores = viewers @ vectors[film].t() + sign * share[film].log()
            is_hit = (film[:, None] == film) & ~torch.eye(64, dtype=torch.bool)
            optimizer.zero_grad()
            loss = F.cross_entropy(scores.masked_fill(is_hit, -1e9), torch.arange(64))
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        viewers, vectors = model(seen[8000:])
        return F.cross_entropy(viewers @ vectors.t(), films[8000:])


class Reversible(nn.Module):
    """Standardize each series with its own moments for a network, and give its output the scale of the series again."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.weight, self.bias = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))
        self.trend, self.season = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        """Return the next 24 values of series [samples, 24, 4]."""
        mean = x.mean(self.dim, keepdim=True).detach()
        deviation = (x.var(self.dim, keepdim=True, unbiased=False) + 1e-5).sqrt().detach()
        x = ((x - mean) / deviation * self.weight + self.bias).mT
        trend = F.avg_pool1d(F.pad(x, (2, 2), mode="replicate"), 5, 1)
        x = (self.trend(trend) + self.season(x - trend)).mT
        return (x - self.bias) / (self.weight + 1e-8) * deviation + mean


@program(
    "general",
    "Kim et al., Reversible instance normalization for accurate time-series forecasting, 2022, with the layers of DLinear",
    Fault(
        "moments_over_the_channels",
        "normalization",
        ISSUES,
        ("wrong_axis", "input_not_normalized", "input_drift", "heavy_tailed_input", "loss_not_decreasing", "@*"),
    ),
)
def reversed_moments(fault: str = "") -> Tensor:
    time, phases = torch.arange(48.0)[:, None], 6.3 * torch.rand(1600, 1, 4)
    periods = torch.tensor([6.0, 8.0, 12.0, 24.0])
    levels, scales = torch.tensor([20.0, 5.0, -3.0, 60.0]), torch.tensor([3.0, 1.0, 0.5, 8.0])
    series = (
        (6.28 * time / periods + phases).sin() + 0.02 * torch.randn(1600, 1, 4) * time + 0.1 * torch.randn(1600, 48, 4)
    )
    series = (series + torch.randn(1600, 1, 4)) * scales + levels
    series = (series - series[:1300].mean((0, 1))) / series[:1300].std((0, 1))
    model = Reversible(2 if fault == "moments_over_the_channels" else 1)
    optimizer = Adam(model.parameters(), lr=3e-3)
    with attach(model, optimizer) as probe:
        for _, (data,) in zip(range(300), batches(series[:1300], size=32), strict=False):
            optimizer.zero_grad()
            loss = F.mse_loss(model(data[:, :24]), data[:, 24:])
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        return F.mse_loss(model(series[1300:, :24]), series[1300:, 24:])


MOVES = 0.25 * torch.tensor([[0.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])


def _driven(places: Tensor, moves: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the next places of carts [carts, 2], the rewards, and whether the episodes end at the station in the middle."""
    after = (places + MOVES[moves] + 0.05 * torch.randn_like(places)).clamp(-1.5, 1.5)
    return after, -after.norm(dim=1), (after.norm(dim=1) < 0.2).float()


@program(
    "general",
    "Kostrikov et al., Offline reinforcement learning with implicit Q-learning, 2022, and CORL, iql.py, for carts",
    Fault(
        "expectile_of_the_other_side",
        "loss",
        ISSUES,
        ("wrong_loss", "loss_not_decreasing", "@value*"),
    ),
    Fault(
        "shares_of_the_target_swapped",
        "references",
        FORUM,
        ("weights_loaded", "parameters_follow_gradients", "update_ratio", "wrong_loss", "@target*"),
    ),
)
def carts_to_the_station(fault: str = "") -> Tensor:
    places = 3 * torch.rand(4000, 2) - 1.5
    home = (places[:, None] + MOVES).norm(dim=2).argmin(1)
    moves = home.where(torch.rand(4000) < 0.4, torch.randint(5, (4000,)))
    after, rewards, ends = _driven(places, moves)
    model = nn.ModuleDict(
        {name: _perceptron(2, 48, 48, size) for name, size in (("q", 5), ("value", 1), ("policy", 5))}
    )
    model["target"] = _perceptron(2, 48, 48, 5).requires_grad_(False)
    model["target"].load_state_dict(model["q"].state_dict())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = Adam(trained, lr=3e-3)
    side = 0.2 if fault == "expectile_of_the_other_side" else 0.8
    share = 0.98 if fault == "shares_of_the_target_swapped" else 0.02
    with attach(model, optimizer) as probe:
        rows = batches(places, moves, rewards, after, ends, size=64)
        for _, (before, move, reward, later, end) in zip(range(320), rows, strict=False):
            with torch.no_grad():
                wanted = reward + 0.9 * (1 - end) * model["value"](later).squeeze(1)
                of_target = model["target"](before).gather(1, move[:, None]).squeeze(1)
            error = of_target - model["value"](before).squeeze(1)
            of_value = ((side - (error < 0).float()).abs() * error.square()).mean()
            of_q = F.mse_loss(model["q"](before).gather(1, move[:, None]).squeeze(1), wanted)
            weight = (3 * error.detach()).exp().clamp(max=100)
            of_policy = (weight * F.cross_entropy(model["policy"](before), move, reduction="none")).mean()
            optimizer.zero_grad()
            loss = of_value + of_q + of_policy
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for old, new in zip(model["target"].parameters(), model["q"].parameters(), strict=True):
                    old.lerp_(new, share)
            probe.end_step(loss=loss)
    starts = carts = 3 * torch.rand(1000, 2) - 1.5
    returns, weight = torch.zeros(1000), torch.ones(1000)
    with torch.no_grad():
        for _ in range(40):
            carts, reward, end = _driven(carts, model["policy"](carts).argmax(1))
            returns, weight = returns + weight * reward, 0.9 * weight * (1 - end)
        return F.mse_loss(model["value"](starts).squeeze(1), returns)


class Speaker(nn.Module):
    """Return a vector of the length 1 for each utterance [utterances, frames, bands]."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.last = nn.GRU(33, 48, batch_first=True), nn.Linear(48, 24)
        self.scale, self.bias = nn.Parameter(torch.tensor(10.0)), nn.Parameter(torch.tensor(-5.0))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.last(self.gru(x)[1][0]), dim=1)

    def loss(self, x: Tensor) -> Tensor:
        """Return the loss for utterances [speakers, 4, frames, bands]; each is compared with the means of the others."""
        speakers = len(x)
        vectors = self(x.flatten(0, 1)).view(speakers, 4, -1)
        sums = vectors.sum(1)
        scores = vectors @ F.normalize(sums, dim=1).t()
        own = (vectors * F.normalize(sums[:, None] - vectors, dim=2)).sum(2)
        scores = own[..., None].where(torch.eye(speakers, dtype=torch.bool)[:, None], scores)
        scores = self.scale.clamp(min=1e-6) * scores + self.bias
        return F.cross_entropy(scores.flatten(0, 1), torch.arange(speakers).repeat_interleave(4))


def _voices(speakers: int, are_rates_ignored: bool) -> Tensor:
    """Return the logarithmic spectra [speakers, 12, frames, 33] of utterances at 4 kHz; a half was recorded at 8 kHz."""
    pitch = 90 + 120 * torch.rand(speakers, 1, 1)
    timbre = torch.randn(speakers, 12)
    harmonics = torch.arange(1, 13)
    spectra = []
    for utterance in range(12):
        rate = 8000 if utterance % 2 else 4000
        time = torch.arange(rate // 8) / rate
        height = pitch * (1 + 0.1 * torch.randn(speakers, 1, 1))
        vowel = (timbre + 0.7 * torch.randn(speakers, 12)).exp() / harmonics
        phases = 2 * math.pi * (height * time[:, None] * harmonics + torch.rand(speakers, 1, 12))
        sound = (phases.sin() * vowel[:, None]).sum(2) + 0.3 * torch.randn(speakers, len(time))
        if rate == 8000 and not are_rates_ignored:
            sound = F.avg_pool1d(sound[:, None], 2)[:, 0]
        spectrum = torch.stft(sound[:, :500], 64, 32, window=torch.hann_window(64), return_complex=True)
        spectra.append((spectrum.abs().square() + 1e-3).log().mT)
    return torch.stack(spectra, 1)


@program(
    "general",
    "Wan et al., Generalized end-to-end loss for speaker verification, 2018, for recordings with two sampling rates",
    Fault(
        "sampling_rates_ignored",
        "data",
        ISSUES,
        ("input_drift", "input_not_normalized", "heavy_tailed_input", "distinct_data", "@gru"),
    ),
)
def voices_of_speakers(fault: str = "") -> Tensor:
    state = torch.get_rng_state()
    spectra = _voices(200, False)
    mean, deviation = spectra[:180].mean((0, 1, 2)), spectra[:180].std((0, 1, 2))
    known = spectra[:180]
    if fault == "sampling_rates_ignored":
        torch.set_rng_state(state)
        known = _voices(200, True)[:180]
        mean, deviation = known.mean((0, 1, 2)), known.std((0, 1, 2))
    known, others = (known - mean) / deviation, (spectra[180:] - mean) / deviation
    model = Speaker()
    optimizer = Adam(model.parameters(), lr=3e-3)
    with attach(model, optimizer) as probe:
        for _ in range(220):
            speakers = torch.randperm(180)[:10]
            utterances = torch.stack([torch.randperm(12)[:4] for _ in range(10)])
            optimizer.zero_grad()
            loss = model.loss(known[speakers[:, None], utterances])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 3.0)
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        return torch.stack([model.loss(others[:, at::3]) for at in range(3)]).mean()


class LevelBlock(nn.Module):
    """A block of a residual network that also reads the level of the noise."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.level, self.last = nn.Linear(96, 96), nn.Linear(16, 96), nn.Linear(96, 96)

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        hidden = self.first(F.relu(x)) + self.level(level)
        return x + self.last(F.relu(hidden))


class Denoiser(nn.Module):
    """Return the expected clean images for noisy ones [samples, 64], with the scales of Karras et al."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 96), nn.Linear(96, 64)
        self.blocks = nn.ModuleList(LevelBlock() for _ in range(3))

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        squares = sigma.square() + 0.25
        angles = sigma.log() / 4 * 2.0 ** torch.arange(8)
        level = torch.cat([angles.sin(), angles.cos()], 1)
        hidden = self.first(x / squares.sqrt())
        for block in self.blocks:
            hidden = block(hidden, level)
        return 0.25 / squares * x + 0.5 * sigma / squares.sqrt() * self.last(hidden)


@program(
    "general",
    "Karras et al., Elucidating the design space of diffusion-based generative models, 2022, for digits",
    Fault(
        "uniform_noise",
        "data",
        FORUM,
        ("input_not_normalized", "input_drift", "samples_vary", "wrong_loss", "@first"),
    ),
)
def denoised_at_levels(fault: str = "") -> Tensor:
    images = digits()[0].flatten(1)
    images = 0.5 * (images - images.mean()) / images.std()
    model = Denoiser()
    drawn = torch.rand_like if fault == "uniform_noise" else torch.randn_like
    optimizer = Adam(model.parameters(), lr=2e-3)

    def loss_of(data: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
        found = model(data + sigma * noise, sigma)
        return ((sigma.square() + 0.25) / (0.5 * sigma).square() * (found - data).square()).mean()

    with attach(model, optimizer) as probe:
        for _, (data,) in zip(range(300), batches(images[:1400], size=64), strict=False):
            optimizer.zero_grad()
            loss = loss_of(data, drawn(data), (-1.2 + 1.2 * torch.randn(64, 1)).exp())
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        levels = (-1.2 + 1.2 * torch.linspace(-2, 2, 9)).exp()
        noise = torch.randn(397, 64)
        return torch.stack([loss_of(images[1400:], noise, level.expand(397, 1)) for level in levels]).mean()


@program("general", "Greydanus et al., Hamiltonian neural networks, 2019, for a pendulum")
def energy_of_a_pendulum() -> Tensor:
    states = torch.stack([5 * torch.rand(1500) - 2.5, 3 * torch.rand(1500) - 1.5], 1)
    changes = torch.stack([states[:, 1], -states[:, 0].sin()], 1) + 0.05 * torch.randn(1500, 2)
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = Adam(model.parameters(), lr=3e-3, weight_decay=1e-4)

    def loss_of(state: Tensor, change: Tensor) -> Tensor:
        state = state.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(state).sum(), state, create_graph=True)
        return F.mse_loss(torch.stack([slope[:, 1], -slope[:, 0]], 1), change)

    with attach(model, optimizer) as probe:
        for _, (state, change) in zip(range(260), batches(states[:1200], changes[:1200], size=48), strict=False):
            optimizer.zero_grad()
            loss = loss_of(state, change)
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    return loss_of(states[1200:], changes[1200:]).detach()
