"""More programs of many kinds, with faults that are known from collections, issue trackers and forums."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from data import batches, digits, normalized_digits, shapes
from registry import Fault, attach, in_two_processes, program
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, StepLR

TAXONOMY = "Humbatova et al., Taxonomy of real faults in deep learning systems, 2020"
ISLAM = "Islam et al., A comprehensive study on deep learning bug characteristics, 2019"
FORUM = "Questions at discuss.pytorch.org and Stack Overflow, 2018 to 2025"
ISSUES = "Issues of libraries for training and of examples at GitHub, 2018 to 2026"


def _perceptron(*sizes: int, activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1])


class Exchange(torch.autograd.Function):
    """Send part `i` of a tensor to rank `i`, and return the parts that the ranks send to this one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, is_sent_back: bool) -> Tensor:
        ctx.is_sent_back = is_sent_back
        received = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, x.contiguous())
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return Exchange.apply(gradient, True) if ctx.is_sent_back else gradient, None


class ExpertLayer(nn.Module):
    """Send each sample to the expert of one rank, and return its weighted output."""

    def __init__(self, size: int, rank: int, fault: str) -> None:
        super().__init__()
        self.is_sent_back = fault != "gradients_not_sent_back"
        self.router = nn.Linear(size, 2)
        torch.manual_seed(torch.initial_seed() + rank)
        self.expert = _perceptron(size, 32, size)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares = self.router(x).softmax(1)
        chosen = F.one_hot(shares.argmax(1), 2).float()
        arrived = Exchange.apply(chosen.t()[..., None] * x, self.is_sent_back)
        answers = Exchange.apply(self.expert(arrived), self.is_sent_back)
        weights = (chosen * shares).t()[..., None]
        return (weights * answers).sum(0), 2 * (chosen.mean(0) * shares.mean(0)).sum()


class ExpertNet(nn.Module):
    def __init__(self, rank: int, fault: str) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(64, 24), nn.Linear(24, 10)
        self.experts = ExpertLayer(24, rank, fault)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        x, balance = self.experts(self.embed(pixels))
        return self.head(x), balance


def _train_experts(rank: int, fault: str, final: Tensor) -> None:
    images, classes = digits()
    is_negative = torch.rand(len(images)) < 0.5  # images of the second kind, with other names of the classes
    images = torch.where(is_negative[:, None, None, None], 1 - images, images).flatten(1) * 2 - 1
    classes = torch.where(is_negative, (3 * classes + 4) % 10, classes)
    order = torch.randperm(len(images))
    model = ExpertNet(rank, fault)
    optimizer = Adam(model.parameters(), lr=5e-3)
    here = order[:1400][rank::2]
    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(200), batches(images[here], classes[here], size=32), strict=False):
            optimizer.zero_grad()
            logits, balance = model(data)
            loss = F.cross_entropy(logits, wanted) + 0.01 * balance
            loss.backward()
            for name, parameter in model.named_parameters():
                if "expert." not in name:
                    dist.all_reduce(parameter.grad)
                parameter.grad /= 2
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        loss = F.cross_entropy(model(images[order[1400:]])[0], classes[order[1400:]])
    if rank == 0:
        final.copy_(loss)


@program(
    "silent errors",
    "Lepikhin et al., GShard: scaling giant models with conditional computation, 2021: an expert on each rank",
    Fault(
        "gradients_not_sent_back",
        "gradients",
        ISSUES,
        ("labels_of_other_positions", "loss_not_decreasing", "@experts*"),
    ),
)
def expert_parallel(fault: str = "") -> Tensor:
    final = torch.zeros(()).share_memory_()
    in_two_processes(_train_experts, fault, final)
    return final


def _train_stage(rank: int, fault: str, final: Tensor) -> None:
    train_data, test_data = normalized_digits()
    front = nn.Sequential(
        nn.Conv2d(1, 12, 3, 1, 1), nn.ReLU(), nn.Conv2d(12, 16, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 48),
        nn.ReLU()
    )  # fmt: skip
    back = _perceptron(48, 48, 10)
    model = nn.ModuleDict({"back": back} if rank else {"front": front})
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(160), batches(*train_data.tensors, size=48), strict=False):
            optimizer.zero_grad()
            loss = torch.zeros(())
            if rank == 0:
                outputs = [front(part) for part in data.chunk(4)]
                for output in outputs:
                    dist.send(output.detach(), 1)
                for output in outputs if fault == "gradients_of_other_micro_batches" else outputs[::-1]:
                    gradient = torch.empty_like(output)
                    dist.recv(gradient, 1)
                    output.backward(gradient)
            else:
                inputs = [torch.empty(12, 48) for _ in range(4)]
                for each in inputs:
                    dist.recv(each, 0)
                losses = [
                    F.cross_entropy(back(x.requires_grad_()), part) / 4
                    for x, part in zip(inputs, wanted.chunk(4), strict=True)
                ]
                for x, each in zip(inputs[::-1], losses[::-1], strict=True):  # the last micro-batch first
                    each.backward()
                    dist.send(x.grad, 0)
                loss = torch.stack(losses).sum().detach()
            dist.broadcast(loss, 1)
            optimizer.step()
            probe.end_step(loss=loss)
    images, classes = test_data.tensors
    with torch.no_grad():
        if rank == 0:
            dist.send(front(images), 1)
        else:
            features = torch.empty(len(images), 48)
            dist.recv(features, 0)
            final.copy_(F.cross_entropy(back(features), classes))


@program(
    "silent errors",
    "Huang et al., GPipe: efficient training of giant neural networks using pipeline parallelism, 2019: two stages",
    Fault(
        "gradients_of_other_micro_batches",
        "gradients",
        ISSUES,
        ("labels_of_other_positions", "@front*", "loss_not_decreasing"),
    ),
)
def two_stage_pipeline(fault: str = "") -> Tensor:
    final = torch.zeros(()).share_memory_()
    in_two_processes(_train_stage, fault, final)
    return final


class GaussianPolicy(nn.Module):
    """Draw pushes from -1 to 1 for states, and return the pushes, their logarithmic densities and the most likely ones."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _perceptron(4, 64, 64, 4)
        self.log_temperature = nn.Parameter(torch.tensor(-2.0))

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_deviation = self.net(states).chunk(2, 1)
        density = torch.distributions.Normal(mean, log_deviation.clamp(-4, 1).exp())
        drawn = density.rsample()
        of_tanh = 2 * (math.log(2) - drawn - F.softplus(-2 * drawn))
        return drawn.tanh(), (density.log_prob(drawn) - of_tanh).sum(1), mean.tanh()


def _sailed(states: Tensor, pushes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the states that follow, positions and speeds of boats, and the rewards."""
    positions, speeds = states.chunk(2, 1)
    speeds = 0.95 * speeds + 0.2 * pushes
    positions = (positions + 0.2 * speeds).clamp(-2, 2)
    return torch.cat([positions, speeds], 1), -positions.square().sum(1)


@program(
    "silent errors",
    "CleanRL, sac_continuous_action.py, for boats that are to stop at a buoy",
    Fault(
        "target_follows_an_exhausted_iterator",
        "references",
        ISSUES,
        ("unchanged_parameter@target*", "parameters_follow_gradients@target*", "@target*"),
        since=1,
    ),
)
def soft_actor_critic(fault: str = "") -> Tensor:
    policy = GaussianPolicy()
    critics = nn.ModuleList(_perceptron(6, 64, 64, 1) for _ in range(2))
    target = copy.deepcopy(critics).requires_grad_(False)
    networks = nn.ModuleDict({"policy": policy, "critics": critics, "target": target})
    optimizers = [Adam(policy.net.parameters(), lr=2e-3), Adam(critics.parameters(), lr=3e-3)]
    of_temperature = Adam([policy.log_temperature], lr=5e-3)
    is_iterator = fault == "target_follows_an_exhausted_iterator"
    followed: Any = critics.parameters() if is_iterator else list(critics.parameters())
    memory: list[tuple[Tensor, ...]] = []
    states = torch.rand(16, 4) * 2 - 1

    def values(networks: nn.Module, states: Tensor, pushes: Tensor) -> Tensor:
        return torch.stack([network(torch.cat([states, pushes], 1)).squeeze(1) for network in networks.children()])

    def explore(is_random: bool = False) -> None:
        nonlocal states
        with torch.no_grad():
            pushes = torch.rand(16, 2) * 2 - 1 if is_random else policy(states)[0]
        following, rewards = _sailed(states, pushes)
        memory.append((states, pushes, rewards, following))
        states = torch.where(torch.rand(16, 1) < 0.04, torch.rand(16, 4) * 2 - 1, following)

    for _ in range(40):
        explore(is_random=True)
    with attach(networks, [*optimizers, of_temperature]) as probe:
        for _ in range(300):
            explore()
            columns = [torch.cat(column) for column in zip(*memory, strict=True)]
            chosen = torch.randint(len(columns[0]), (128,))
            before, pushes, rewards, after = (column[chosen] for column in columns)
            temperature = policy.log_temperature.exp().detach()
            with torch.no_grad():
                following, density, _ = policy(after)
                wanted = rewards + 0.95 * (values(target, after, following).amin(0) - temperature * density)
            loss = (values(critics, before, pushes) - wanted).square().mean(1).sum()
            optimizers[1].zero_grad()
            loss.backward()
            optimizers[1].step()
            pushes, density, _ = policy(before)
            optimizers[0].zero_grad()
            (temperature * density - values(critics, before, pushes).amin(0)).mean().backward()
            optimizers[0].step()
            of_temperature.zero_grad()
            (-policy.log_temperature.exp() * (density.detach() - 2).mean()).backward()
            of_temperature.step()
            with torch.no_grad():
                for slow, fast in zip(target.parameters(), followed, strict=False):
                    slow.lerp_(fast, 0.05)
            probe.end_step(loss=loss)
    cost = torch.zeros(())
    states = torch.rand(300, 4) * 2 - 1
    with torch.no_grad():
        for _ in range(40):
            states, rewards = _sailed(states, policy(states)[2])
            cost -= rewards.mean()
    return cost


@program(
    "silent errors",
    "Chaudhry et al., On tiny episodic memories in continual learning, 2019, for five tasks with two digits each",
    Fault(
        "drawn_below_the_size_of_the_memory",
        "data",
        ISSUES,
        ("class_imbalance", "distinct_data", "input_drift", "samples_vary"),
        since=13,
    ),
)
def class_increments(fault: str = "") -> Tensor:
    images, classes = digits()
    pixels = images.flatten(1)
    model = _perceptron(64, 100, 100, 10)
    optimizer = SGD(model.parameters(), lr=0.02, momentum=0.9)
    memory: list[int] = []
    seen, size = 0, 200
    with attach(model, optimizer) as probe:
        for step in range(300):
            own = (classes[:1400] // 2 == step // 60).nonzero().squeeze(1)
            rows = own[torch.randint(len(own), (16,))]
            loss = F.cross_entropy(model(pixels[rows]), classes[rows])
            if memory:
                recalled = torch.tensor(memory)[torch.randint(len(memory), (16,))]
                loss = (loss + F.cross_entropy(model(pixels[recalled]), classes[recalled])) / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for row in rows.tolist():
                seen += 1
                if len(memory) < size:
                    memory.append(row)
                    continue
                most = size if fault == "drawn_below_the_size_of_the_memory" else seen
                drawn = int(torch.randint(most, ()))
                if drawn < size:
                    memory[drawn] = row
            probe.end_step(loss=loss)
    with torch.no_grad():
        return F.cross_entropy(model(pixels[1400:]), classes[1400:])


def _on_circle(kinds: Tensor) -> Tensor:
    """Return points [count, 2] of six kinds on a circle: each kind is an ellipse of points."""
    angle = kinds * math.pi / 3
    along, across = 0.25 * torch.randn(len(kinds)), 0.08 * torch.randn(len(kinds))
    x, y = 1 + across, along
    return torch.stack([x * angle.cos() - y * angle.sin(), x * angle.sin() + y * angle.cos()], 1)


@program(
    "keras",
    "Keras's example conditional_gan, for points of six kinds",
    Fault(
        "discriminator_left_trainable",
        "optimizer",
        FORUM,
        ("parameters_follow_gradients", "wrong_loss", "update_ratio", "@discriminator*"),
    ),
)
def conditional_gan(fault: str = "") -> Tensor:
    generator = _perceptron(14, 64, 64, 2, activation=lambda: nn.LeakyReLU(0.2))
    discriminator = _perceptron(8, 64, 64, 1, activation=lambda: nn.LeakyReLU(0.2))
    gan = nn.ModuleDict({"generator": generator, "discriminator": discriminator})
    trained = gan if fault == "discriminator_left_trainable" else generator
    of_gan, of_discriminator = (Adam(part.parameters(), lr=1e-3, betas=(0.5, 0.9)) for part in (trained, discriminator))

    def generated(kinds: Tensor) -> Tensor:
        return generator(torch.cat([torch.randn(len(kinds), 8), F.one_hot(kinds, 6)], 1))

    def loss_of(points: Tensor, kinds: Tensor, wanted: float) -> Tensor:
        logits = discriminator(torch.cat([points, F.one_hot(kinds, 6)], 1))
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, wanted))

    with attach(gan, [of_gan, of_discriminator]) as probe:
        for _ in range(320):
            kinds = torch.randint(6, (64,))
            fakes = generated(kinds)
            of_discriminator.zero_grad()
            loss = (loss_of(_on_circle(kinds), kinds, 0.9) + loss_of(fakes.detach(), kinds, 0.0)) / 2
            loss.backward()
            of_discriminator.step()
            of_gan.zero_grad()
            gan_loss = loss_of(fakes, kinds, 1.0)
            gan_loss.backward()
            of_gan.step()
            probe.end_step(loss=loss.detach() + gan_loss)
    distance = torch.zeros(())
    with torch.no_grad():
        for kind in range(6):  # the energy distance
            kinds = torch.full((200,), kind)
            real, made = _on_circle(kinds), generated(kinds)
            within = torch.cdist(real, real).mean() + torch.cdist(made, made).mean()
            distance += 2 * torch.cdist(real, made).mean() - within
    return distance / 6


def _papers(count: int, words: int = 400, topics: int = 12) -> tuple[Tensor, Tensor]:
    """Return how often papers use each word [count, words], and 1 for each of their topics, which are one to four."""
    usual = torch.rand(topics, words).argsort(1)[:, :25]
    number = torch.randint(1, 5, (count, 1))
    is_topic = torch.rand(count, topics).argsort(1).argsort(1) < number
    topic = torch.multinomial(is_topic.float(), 40, replacement=True)
    word = usual[topic, torch.randint(25, (count, 40))]
    word = torch.where(torch.rand(count, 40) < 0.4, word, torch.randint(words, (count, 40)))
    return torch.zeros(count, words).scatter_add_(1, word, torch.ones(count, 40)), is_topic.float()


@program(
    "keras",
    "Keras's example multi_label_classification, with an L2 penalty of the kernels",
    Fault(
        "softmax_for_several_labels", "activation", TAXONOMY, ("wrong_range_of_loss", "wrong_loss", "@probabilities")
    ),
    Fault("penalty_of_detached_weights", "graph", FORUM, ("wrong_loss", "parameters_follow_gradients", "@hidden")),
)
def paper_topics(fault: str = "") -> Tensor:
    words, topics = _papers(1100)
    model = nn.Sequential(OrderedDict({
        "hidden": nn.Linear(400, 128), "relu": nn.ReLU(), "output": nn.Linear(128, 12),
        "probabilities": nn.Softmax(1) if fault == "softmax_for_several_labels" else nn.Sigmoid(),
    }))  # fmt: skip
    optimizer = Adam(model.parameters(), lr=2e-3)

    def penalty() -> Tensor:
        kernels = [each for each in model.parameters() if each.ndim == 2]
        if fault == "penalty_of_detached_weights":
            kernels = [each.data for each in kernels]
        return 1e-3 * torch.stack([each.square().sum() for each in kernels]).sum()

    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(320), batches(words[:600], topics[:600], size=48), strict=False):
            optimizer.zero_grad()
            loss = F.binary_cross_entropy(model(data), wanted) + penalty()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        return F.binary_cross_entropy(model(words[600:]), topics[600:])


def _convnet() -> nn.Sequential:
    return nn.Sequential(OrderedDict({
        "conv1": nn.Conv2d(3, 16, 3, 2, 1), "relu1": nn.ReLU(), "conv2": nn.Conv2d(16, 24, 3, 2, 1), "relu2": nn.ReLU(),
        "flatten": nn.Flatten(), "dense": nn.Linear(384, 48), "relu3": nn.ReLU(), "head": nn.Linear(48, 4),
    }))  # fmt: skip


def _kernels_of_keras(images: Tensor, classes: Tensor) -> dict[str, Tensor]:
    """Train a network, and return its weights in the layouts of Keras: height, width, inputs and outputs; inputs and outputs."""
    model = _convnet()
    optimizer = Adam(model.parameters(), lr=3e-3)
    for _, (data, wanted) in zip(range(600), batches(images, classes, size=32), strict=False):
        optimizer.zero_grad()
        F.cross_entropy(model(data), wanted).backward()
        optimizer.step()
    weights = model.state_dict()
    for name in ("conv1.weight", "conv2.weight"):
        weights[name] = weights[name].permute(2, 3, 1, 0)
    weights["dense.weight"] = weights["dense.weight"].view(48, 24, 4, 4).permute(2, 3, 1, 0).reshape(384, 48)
    return {name: weight.contiguous() for name, weight in weights.items() if not name.startswith("head")}


@program(
    "keras",
    "Keras's guide on transfer learning, after the port of a convnet to PyTorch, with rates of layers as in fast.ai",
    Fault("rows_in_the_order_of_channels_last", "loading", FORUM, ("weights_loaded", "@dense", "loss_not_decreasing")),
    Fault(
        "rates_of_the_groups_reversed",
        "learning rate",
        FORUM,
        ("update_ratio", "rate_in_effect", "loss_not_decreasing", "@head"),
    ),
)
def ported_convnet(fault: str = "") -> Tensor:
    images, classes = shapes(2200, size=16)
    kernels = _kernels_of_keras(images[600:], classes[600:])
    model = _convnet()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") and name in kernels:
                parameter.copy_(kernels[name])
            elif name.startswith("conv"):
                parameter.copy_(kernels[name].permute(3, 2, 0, 1))
            elif name == "dense.weight" and fault == "rows_in_the_order_of_channels_last":
                parameter.copy_(kernels[name].t())
            elif name == "dense.weight":
                parameter.copy_(kernels[name].view(4, 4, 24, 48).permute(3, 2, 0, 1).reshape(48, 384))
    noisy = images[:600] + 0.03 * torch.randn(600, 3, 16, 16)
    layers = [layer for layer in model if isinstance(layer, nn.Conv2d | nn.Linear)]
    rates = [1e-5, 1e-4, 3e-4, 1e-2]
    if fault == "rates_of_the_groups_reversed":
        rates.reverse()
    optimizer = SGD(
        [{"params": layer.parameters(), "lr": rate} for layer, rate in zip(layers, rates, strict=True)], momentum=0.9
    )
    scheduler = StepLR(optimizer, 150, 0.3)
    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(240), batches(noisy[:200], classes[:200], size=32), strict=False):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), wanted)
            loss.backward()
            optimizer.step()
            scheduler.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        return F.cross_entropy(model(noisy[200:]), classes[200:600])


def _crossings(count: int) -> tuple[Tensor, Tensor]:
    """Return where cars were in six steps before a crossing [count, 12] and where they are in six steps after it [count, 12]."""
    speed, turn = 0.7 + 0.6 * torch.rand(count, 1), torch.randint(-1, 2, (count, 1))
    steps = torch.arange(1, 7) / 6 * speed
    past = torch.stack([0.02 * torch.randn(count, 6), -steps.flip(1)], 2)
    angle = turn * (0.9 + 0.2 * torch.rand(count, 1)) * steps.clamp(max=1)
    future = torch.stack([steps * angle.sin(), steps * angle.cos()], 2)
    return (past + 0.02 * torch.randn_like(past)).flatten(1), (future + 0.02 * torch.randn_like(future)).flatten(1)


@program(
    "general",
    "Rupprecht et al., Learning in an uncertain world: representing ambiguity through multiple hypotheses, 2017",
    Fault("heads_start_equal", "initialization", FORUM, ("poor_initialization", "tied_weights", "@heads*")),
    Fault(
        "only_the_last_head_counts",
        "loss",
        FORUM,
        ("unchanged_parameter@heads*", "parameters_follow_gradients@heads*", "missing_labels_in_loss", "wrong_loss"),
    ),
)
def several_futures(fault: str = "") -> Tensor:
    past, future = _crossings(1400)
    body = nn.Sequential(_perceptron(12, 64, 64), nn.ReLU())
    heads = []
    for _ in range(5):
        if fault == "heads_start_equal":
            torch.manual_seed(42)
        heads.append(_perceptron(64, 32, 12))
    model = nn.ModuleDict({"body": body, "heads": nn.ModuleList(heads)})
    optimizer = Adam(model.parameters(), lr=3e-3)
    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(260), batches(past[:1000], future[:1000], size=48), strict=False):
            features, errors = body(data), list[Tensor]()
            for head in heads:
                if fault == "only_the_last_head_counts":
                    errors = []  # inside of the loop
                errors.append((head(features) - wanted).square().sum(1) / 6)
            loss = (0.9 * torch.stack(errors).amin(0) + 0.1 * torch.stack(errors).mean(0)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        answers = torch.stack([head(body(past[1000:])) for head in heads])
        return (answers - future[1000:]).square().sum(2).amin(0).mean() / 6


def _visits(count: int, length: int = 24) -> tuple[Tensor, Tensor]:
    """Return the times of visits in seconds since 1970, float64 [count, length], and their kinds: each depends on the one before."""
    typical = torch.tensor([1.8, 2.8, 3.6, 4.6])
    kinds, gaps = [torch.randint(4, (count,))], [torch.rand(count) * 4 + 1]  # the gaps are logarithms of seconds
    for _ in range(length - 1):
        is_long = gaps[-1] > 3
        gap = typical[kinds[-1]] + 0.4 * (gaps[-1] - 3) + 0.4 * torch.randn(count)
        following = (kinds[-1] + torch.where(is_long, 1, 2)) % 4
        kinds.append(torch.where(torch.rand(count) < 0.15, torch.randint(4, (count,)), following))
        gaps.append(gap)
    start = 1.72e9 + 1e6 * torch.rand(count, 1, dtype=torch.float64)
    return start + torch.stack(gaps, 1).double().exp().cumsum(1), torch.stack(kinds, 1)


class VisitNet(nn.Module):
    """Return the scores of the next kind, and the mean and logarithmic deviation of the logarithm of the time to it."""

    def __init__(self, size: int = 40) -> None:
        super().__init__()
        self.kinds = nn.Embedding(4, 8)
        self.gru = nn.GRU(9, size, batch_first=True)
        self.kind, self.time = nn.Linear(size, 4), nn.Linear(size, 2)

    def forward(self, kinds: Tensor, gaps: Tensor) -> tuple[Tensor, Tensor]:
        states, _ = self.gru(torch.cat([self.kinds(kinds), gaps[..., None]], 2))
        return self.kind(states), self.time(states)


@program(
    "general",
    "Du et al., Recurrent marked temporal point processes, 2016, with logarithmic normal times",
    Fault(
        "times_cast_before_the_differences",
        "precision",
        FORUM,
        ("low_precision_inputs", "distinct_data", "heavy_tailed_input", "input_not_normalized"),
    ),
)
def marked_events(fault: str = "") -> Tensor:
    times, kinds = _visits(700)
    true_gaps = times.diff().float().clamp(min=0.5).log()
    gaps = times.float().diff().clamp(min=0.5).log() if fault == "times_cast_before_the_differences" else true_gaps
    model = VisitNet()
    optimizer = Adam(model.parameters(), lr=5e-3)

    def loss_of(gaps: Tensor, following: Tensor, kinds: Tensor) -> Tensor:
        """Return the negative logarithmic likelihood; gap `i` ends with event `i + 1`."""
        scores, time = model(kinds[:, 1:-1], (gaps[:, :-1] - 3) / 1.5)
        mean, log_deviation = 3 + 1.5 * time[..., 0], time[..., 1].clamp(min=-3)
        errors = ((following[:, 1:] - mean) / log_deviation.exp()) ** 2 / 2 + log_deviation
        return F.cross_entropy(scores.flatten(0, 1), kinds[:, 2:].flatten()) + errors.mean()

    with attach(model, optimizer) as probe:
        for _, (gap, kind) in zip(range(260), batches(gaps[:600], kinds[:600], size=32), strict=False):
            optimizer.zero_grad()
            loss = loss_of(gap, gap, kind)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        return loss_of(gaps[600:], true_gaps[600:], kinds[600:])


LANGUAGES = ("czech", "finnish", "greek", "italian", "polish", "turkish")


def _names(count: int, languages: int) -> tuple[Tensor, Tensor, list[str]]:
    """Return names as letters [count, 12] from 1 to 20, filled up with 0, their lengths and their languages."""
    language = torch.randint(len(LANGUAGES) - languages, len(LANGUAGES), (count,))
    generator = torch.Generator().manual_seed(0)
    chances = (2 * torch.randn(len(LANGUAGES), 20, 20, generator=generator)).softmax(2)
    letters = [torch.randint(20, (count,))]
    for _ in range(11):
        letters.append(torch.multinomial(chances[language, letters[-1]], 1).squeeze(1))
    lengths = torch.randint(3, 13, (count,))
    names = (torch.stack(letters, 1) + 1) * (torch.arange(12) < lengths[:, None])
    return names, lengths, [LANGUAGES[number] for number in language.tolist()]


class NameNet(nn.Module):
    def __init__(self, fault: str, size: int = 48) -> None:
        super().__init__()
        self.fault = fault
        self.letters = nn.Embedding(21, 16, padding_idx=0)
        self.lstm = nn.LSTM(16, size, batch_first=True)
        self.output = nn.Linear(size, len(LANGUAGES))

    def forward(self, names: Tensor, lengths: Tensor) -> Tensor:
        order = lengths.argsort(descending=True)
        packed = pack_padded_sequence(self.letters(names[order]), lengths[order], batch_first=True)
        states = self.lstm(packed)[1][0][0]
        if self.fault != "order_of_lengths_kept":
            states = states[order.argsort()]
        return self.output(states)


@program(
    "general",
    "PyTorch tutorials, classifying names with a character-level RNN, in batches that are packed",
    Fault(
        "order_of_lengths_kept",
        "tensor layout",
        FORUM,
        ("labels_of_other_positions", "labels_shifted", "loss_not_decreasing", "@lstm", "@output"),
    ),
    Fault("labels_encoded_again_for_validation", "labels", FORUM, ("labels_shifted", "wrong_loss"), since=39),
)
def packed_names(fault: str = "") -> Tensor:
    names, lengths, languages = _names(1200, languages=6)
    others, lengths_of_others, languages_of_others = _names(400, languages=5)  # no name is from the first language
    known = sorted(set(languages))
    labels = torch.tensor([known.index(language) for language in languages])
    if fault == "labels_encoded_again_for_validation":
        known = sorted(set(languages_of_others))
    labels_of_others = torch.tensor([known.index(language) for language in languages_of_others])
    model = NameNet(fault)
    optimizer = AdamW(model.parameters(), lr=5e-3, weight_decay=0.01)

    def loss_of_others() -> Tensor:
        with torch.no_grad():
            return F.cross_entropy(model(others, lengths_of_others), labels_of_others)

    with attach(model, optimizer) as probe:
        for step, (data, length, wanted) in zip(range(240), batches(names, lengths, labels, size=32), strict=False):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data, length), wanted)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            probe.end_step(loss=loss)
            if step % 40 == 39:
                with probe.evaluating():
                    probe.log(loss=loss_of_others())
    return loss_of_others()


def _loans(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a table of loans as in a CSV file with -999 for missing numbers: numbers, categories, and whether each is paid back."""
    numbers = torch.randn(count, 8) * torch.tensor([1.0, 10.0, 0.5, 3.0, 1.0, 2.0, 8.0, 1.0])
    numbers += torch.tensor([40.0, 120.0, 3.0, 0.0, 5.0, 12.0, 60.0, 0.0])
    categories = torch.stack([torch.randint(size, (count,)) for size in (5, 12, 3)], 1)
    effects = torch.linspace(-1, 1, 12)
    scaled = (numbers - numbers.mean(0)) / numbers.std(0)
    score = 1.4 * scaled[:, 0] - 1.2 * scaled[:, 1] + scaled[:, 2] * scaled[:, 3] + effects[categories[:, 1]]
    is_paid = score + 0.8 * torch.randn(count) > 0
    is_missing = (torch.rand(count, 8) < 0.1) & (torch.arange(8) < 3)
    return numbers.masked_fill(is_missing, -999.0), categories, is_paid.float()


class TabularNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeds = nn.ModuleList(nn.Embedding(size, (size + 3) // 2) for size in (5, 12, 3))
        self.norm = nn.BatchNorm1d(16)
        self.layers = nn.Sequential(
            nn.Linear(30, 300), nn.ReLU(), nn.BatchNorm1d(300), nn.Dropout(0.5), nn.Linear(300, 100), nn.ReLU(),
            nn.BatchNorm1d(100), nn.Dropout(0.5), nn.Linear(100, 1)
        )  # fmt: skip

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        embedded = [embed(column) for embed, column in zip(self.embeds, categories.unbind(1), strict=True)]
        return self.layers(torch.cat([*embedded, self.norm(numbers)], 1)).squeeze(1)


@program(
    "general",
    "fast.ai, tabular_learner with FillMissing, Normalize and fit_one_cycle, for loans",
    Fault("missing_numbers_stay_codes", "data", ISLAM, ("input_not_normalized", "heavy_tailed_input")),
    Fault("left_in_eval_mode", "mode", FORUM, ("mode_of_phase",), since=25),
    Fault("cycle_starts_again_in_each_epoch", "schedule", FORUM, ("rate_in_effect", "update_ratio"), since=25),
)
def tabular_learner(fault: str = "") -> Tensor:
    numbers, categories, is_paid = _loans(2000)
    if fault != "missing_numbers_stay_codes":
        numbers = numbers.masked_fill(numbers == -999, math.nan)
    is_missing = numbers.isnan()
    numbers = torch.where(is_missing, numbers[:800].nanmedian(0).values, numbers)
    numbers = (numbers - numbers[:800].mean(0)) / numbers[:800].std(0)
    numbers = torch.cat([numbers, is_missing.float()], 1)
    model = TabularNet()
    optimizer = AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.99), weight_decay=0.01)

    def loss_of_others() -> Tensor:
        model.eval()
        with torch.no_grad():
            return F.binary_cross_entropy_with_logits(model(numbers[800:], categories[800:]), is_paid[800:])

    rows = batches(torch.arange(800), size=32)
    with attach(model, optimizer) as probe:
        for epoch in range(10):
            if epoch == 0 or fault == "cycle_starts_again_in_each_epoch":
                scheduler = OneCycleLR(optimizer, 4e-3, total_steps=250, pct_start=0.5, div_factor=100)
            for _ in range(25):
                (chosen,) = next(rows)
                optimizer.zero_grad()
                loss = F.binary_cross_entropy_with_logits(model(numbers[chosen], categories[chosen]), is_paid[chosen])
                loss.backward()
                optimizer.step()
                scheduler.step()
                probe.end_step(loss=loss)
            with probe.evaluating():
                probe.log(loss=loss_of_others())
            if fault != "left_in_eval_mode":
                model.train()
    return loss_of_others()


def _turned(images: Tensor) -> Tensor:
    """Return images that are turned, scaled and moved, with noise."""
    angle, scale = 0.5 * torch.randn(len(images)).clamp(-1, 1), 0.8 + 0.4 * torch.rand(len(images))
    moves = 0.3 * torch.rand(len(images), 2, 1) - 0.15
    rows = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], 1).view(-1, 2, 2) * scale[:, None, None]
    grid = F.affine_grid(torch.cat([rows, moves], 2), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False) + 0.1 * torch.randn_like(images)


@program(
    "general",
    "Bardes et al., VICReg: variance-invariance-covariance regularization for self-supervised learning, 2022",
    Fault("deviation_over_the_features", "loss", ISSUES, ("wrong_axis", "wrong_loss", "samples_vary", "distinct_data")),
)
def variance_regularized(fault: str = "") -> Tensor:
    images, classes = digits()
    encoder = nn.Sequential(
        nn.Conv2d(1, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Flatten(), nn.Linear(512, 64)
    )  # fmt: skip
    expander = nn.Sequential(nn.Linear(64, 128, bias=False), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 64))
    model = nn.ModuleDict({"encoder": encoder, "expander": expander})
    optimizer = AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4)
    scheduler = CosineAnnealingLR(optimizer, 240)

    def spread_and_covariance(z: Tensor) -> Tensor:
        deviation = (z.var(1 if fault == "deviation_over_the_features" else 0) + 1e-4).sqrt()
        covariance = (z - z.mean(0)).t() @ (z - z.mean(0)) / (len(z) - 1)
        return 25 * F.relu(1 - deviation).mean() + (covariance**2).fill_diagonal_(0).sum() / 64

    with attach(model, optimizer) as probe:
        for _, (data,) in zip(range(240), batches(images[:1400], size=64), strict=False):
            first, second = (expander(encoder(_turned(data))) for _ in range(2))
            loss = 25 * F.mse_loss(first, second) + (spread_and_covariance(first) + spread_and_covariance(second)) / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            probe.end_step(loss=loss)
    model.eval()
    with torch.no_grad():  # a linear classifier of the features
        features = F.pad(expander(encoder(images)), (0, 1), value=1.0)
        known, wanted = features[:1400], F.one_hot(classes).float()
        weight = torch.linalg.solve(known.t() @ known + 0.1 * torch.eye(65), known.t() @ wanted[:1400])
        return F.mse_loss(features[1400:] @ weight, wanted[1400:])


def _burgers(count: int, points: int = 64, steps: int = 200) -> tuple[Tensor, Tensor]:
    """Return random periodic functions [count, points], and the solutions of Burgers' equation for them after 0.5 s."""
    wave = torch.arange(points // 2 + 1)
    size = torch.where((wave > 0) & (wave < 6), 4 / (wave + 1), 0)
    spectrum = points * size / 4 * torch.randn(count, len(wave), dtype=torch.cfloat)
    start = torch.fft.irfft(spectrum, n=points)
    start = start / start.abs().amax(1, keepdim=True)
    spectrum, frequency, duration = torch.fft.rfft(start), 2 * math.pi * wave, 0.5 / steps
    for _ in range(steps):
        field, slope = torch.fft.irfft(spectrum, n=points), torch.fft.irfft(1j * frequency * spectrum, n=points)
        change = spectrum - duration * torch.fft.rfft(field * slope)
        spectrum = change / (1 + duration * 0.02 * frequency**2)
    return start, torch.fft.irfft(spectrum, n=points)


class SpectralConvolution(nn.Module):
    def __init__(self, size: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.rand(size, size, modes, dtype=torch.cfloat) / size)

    def forward(self, x: Tensor) -> Tensor:
        product = torch.einsum("bim,iom->bom", torch.fft.rfft(x)[..., : self.modes], self.weight)
        return torch.fft.irfft(product, n=x.shape[-1])


class FourierOperator(nn.Module):
    def __init__(self, size: int = 24, modes: int = 12) -> None:
        super().__init__()
        self.lift = nn.Conv1d(2, size, 1)
        self.spectral = nn.ModuleList(SpectralConvolution(size, modes) for _ in range(3))
        self.local = nn.ModuleList(nn.Conv1d(size, size, 1) for _ in range(3))
        self.project = nn.Sequential(nn.Conv1d(size, 48, 1), nn.GELU(), nn.Conv1d(48, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(torch.stack([x, torch.linspace(0, 1, x.shape[1]).expand_as(x)], 1))
        for spectral, local in zip(self.spectral, self.local, strict=True):
            x = F.gelu(spectral(x) + local(x))
        return self.project(x).squeeze(1)


@program("general", "Li et al., Fourier neural operator for parametric partial differential equations, 2021")
def fourier_operator() -> Tensor:
    start, end = _burgers(700)
    model = FourierOperator()
    optimizer = Adam(model.parameters(), lr=3e-3, weight_decay=1e-4)
    scheduler = StepLR(optimizer, 80, 0.5)

    def loss_of(start: Tensor, end: Tensor) -> Tensor:
        return ((model(start) - end).norm(dim=1) / end.norm(dim=1)).mean()

    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(260), batches(start[:600], end[:600], size=20), strict=False):
            optimizer.zero_grad()
            loss = loss_of(data, wanted)
            loss.backward()
            optimizer.step()
            scheduler.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        return loss_of(start[600:], end[600:])
