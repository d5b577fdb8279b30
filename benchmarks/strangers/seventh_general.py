"""Programs of further kinds, with faults that are known from collections, issue trackers and forums."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.distributed as dist
from data import batches, digits, shapes
from registry import Fault, attach, in_two_processes, program
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR

TAXONOMY = "Humbatova et al., Taxonomy of real faults in deep learning systems, 2020"
ISLAM = "Islam et al., A comprehensive study on deep learning bug characteristics, 2019"
ZHANG = "Zhang et al., An empirical study on TensorFlow program bugs, 2018"
FORUM = "Questions at discuss.pytorch.org and Stack Overflow, 2018 to 2025"
ISSUES = "Issues of libraries for training and of examples at GitHub, 2018 to 2026"


def _perceptron(*sizes: int, activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1])


def _train_compressed(rank: int, fault: str, final: Tensor) -> None:
    images, classes = digits()
    pixels, order = images.flatten(1) * 2 - 1, torch.randperm(len(images))
    model = _perceptron(64, 96, 96, 10)
    optimizer = SGD(model.parameters(), lr=0.1)
    memory = [torch.zeros_like(parameter) for parameter in model.parameters()]
    here = order[:1400][rank::2]
    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(280), batches(pixels[here], classes[here], size=32), strict=False):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), wanted)
            loss.backward()
            for parameter, rest in zip(model.parameters(), memory, strict=True):
                rest.add_(parameter.grad)
                least = rest.abs().flatten().topk(max(1, rest.numel() // 20)).values[-1]
                is_sent = rest.abs() >= least
                parameter.grad = rest * is_sent
                if fault != "sent_values_stay_in_the_memory":
                    rest.mul_(~is_sent)
                dist.all_reduce(parameter.grad)
                parameter.grad /= 2
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        loss = F.cross_entropy(model(pixels[order[1400:]]), classes[order[1400:]])
    if rank == 0:
        final.copy_(loss)


@program(
    "silent errors",
    "Lin et al., Deep gradient compression, 2018: each rank sends the largest 5 percent of the gradient and keeps the rest",
    Fault(
        "sent_values_stay_in_the_memory",
        "gradients",
        ISSUES,
        ("gradients_zeroed", "update_ratio", "loss_spike", "exploding_gradient"),
        since=1,
    ),
)
def compressed_gradients(fault: str = "") -> Tensor:
    final = torch.zeros(()).share_memory_()
    in_two_processes(_train_compressed, fault, final)
    return final


class TokenPolicy(nn.Module):
    """Return the scores of the next of 8 tokens, for prompts, the tokens before and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _perceptron(8 + 8 + 6, 64, 64, 8)

    def forward(self, prompts: Tensor, before: Tensor) -> Tensor:
        """Return the scores [samples, length, 8] for prompts [samples] and the tokens before [samples, length]."""
        length = before.shape[1]
        places = torch.eye(6)[:length].expand(len(before), -1, -1)
        prompt = F.one_hot(prompts, 8)[:, None].expand(-1, length, -1)
        return self.net(torch.cat([prompt, F.one_hot(before, 8), places], 2))


@torch.no_grad()
def _answers(engine: TokenPolicy, prompts: Tensor) -> Tensor:
    """Draw answers [samples, 6]; the token before the first one is the prompt."""
    tokens = prompts[:, None]
    for _ in range(6):
        scores = engine(prompts, tokens)[:, -1]
        tokens = torch.cat([tokens, torch.multinomial(scores.softmax(1), 1)], 1)
    return tokens[:, 1:]


def _rewards(prompts: Tensor, answers: Tensor) -> Tensor:
    """Return the share of right tokens before the first wrong one: each is 3 times the one before, plus the prompt and 1, modulo 8."""
    before = torch.cat([prompts[:, None], answers[:, :-1]], 1)
    is_right = answers == (3 * before + prompts[:, None] + 1) % 8
    return is_right.float().cumprod(1).mean(1)


def _train_policy(rank: int, fault: str, final: Tensor) -> None:
    policy, engine = TokenPolicy(), TokenPolicy()
    engine.load_state_dict(policy.state_dict())
    optimizer = AdamW(policy.parameters(), lr=4e-3, weight_decay=0.01)
    torch.manual_seed(torch.initial_seed() + rank)
    with attach(nn.ModuleDict({"policy": policy, "engine": engine}), optimizer) as probe:
        for _ in range(240):
            prompts = torch.arange(8).repeat_interleave(16)  # groups of 16 answers
            answers = _answers(engine, prompts)
            rewards = _rewards(prompts, answers)
            groups = rewards.view(-1, 16)
            advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()
            scores = policy(prompts, torch.cat([prompts[:, None], answers[:, :-1]], 1))
            logs = -F.cross_entropy(scores.transpose(1, 2), answers, reduction="none")
            loss = -(advantages[:, None] * (logs - logs.detach()).exp()).mean()
            optimizer.zero_grad()
            loss.backward()
            for parameter in policy.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= 2
            nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            if rank == 0 or fault != "engine_of_the_main_process_updated":
                engine.load_state_dict(policy.state_dict())
            probe.end_step(loss=loss)
    prompts = torch.arange(8).repeat(50)
    if rank == 0:
        final.copy_(1 - _rewards(prompts, _answers(policy, prompts)).mean())


@program(
    "silent errors",
    "TRL's GRPOTrainer with an engine for the generation in each process",
    Fault(
        "engine_of_the_main_process_updated",
        "replicas",
        ISSUES,
        (
            "replicas_equal",
            "weights_loaded",
            "unchanged_parameter@engine*",
            "parameters_follow_gradients@engine*",
            "@engine*",
        ),
        since=1,
    ),
)
def generating_engines(fault: str = "") -> Tensor:
    final = torch.zeros(()).share_memory_()
    in_two_processes(_train_policy, fault, final)
    return final


@program(
    "silent errors",
    "Andrychowicz et al., Hindsight experience replay, 2017, for bits that are flipped",
    Fault(
        "rewards_of_the_first_goals",
        "labels",
        ISSUES,
        ("labels_of_other_positions", "labels_shifted", "class_imbalance", "wrong_loss", "loss_not_decreasing"),
    ),
)
def hindsight_replay(fault: str = "") -> Tensor:
    bits = 8
    online, target = (_perceptron(2 * bits, 128, bits) for _ in range(2))
    target.load_state_dict(online.state_dict())
    target.requires_grad_(False)
    optimizer = Adam(online.parameters(), lr=2e-3)
    memory: list[list[Tensor]] = []

    def explore(count: int, share_of_chance: float) -> list[Tensor]:
        """Return the states [count, bits + 1, bits], the actions [count, bits] and the goals of episodes."""
        states = [torch.randint(2, (count, bits)).float()]
        goals, actions = torch.randint(2, (count, bits)).float(), list[Tensor]()
        for _ in range(bits):
            with torch.no_grad():
                best = online(torch.cat([states[-1], goals], 1)).argmax(1)
            action = torch.where(torch.rand(count) < share_of_chance, torch.randint(bits, (count,)), best)
            actions.append(action)
            states.append((states[-1] - F.one_hot(action, bits)).abs())
        return [torch.stack(states, 1), torch.stack(actions, 1), goals]

    with attach(nn.ModuleDict({"online": online, "target": target}), optimizer) as probe:
        for _ in range(300):
            memory.append(explore(16, 0.2))
            states, actions, goals = (torch.cat(column) for column in zip(*memory[-150:], strict=True))
            row, place = torch.randint(len(goals), (256,)), torch.randint(bits, (256,))
            before, action, after, goal = states[row, place], actions[row, place], states[row, place + 1], goals[row]
            is_reached = (after == goal).all(1)
            later = place + 1 + (torch.rand(256) * (bits - place)).long()
            is_relabeled = torch.rand(256) < 0.8
            goal = torch.where(is_relabeled[:, None], states[row, later], goal)
            if fault != "rewards_of_the_first_goals":
                is_reached = (after == goal).all(1)
            following = target(torch.cat([after, goal], 1)).amax(1)
            wanted = torch.where(is_reached, 0.0, -1 + 0.95 * following)
            loss = F.smooth_l1_loss(online(torch.cat([before, goal], 1))[torch.arange(256), action], wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
                    slow.lerp_(fast, 0.05)
            probe.end_step(loss=loss)
    states, _, goals = explore(500, 0.0)
    return 1 - (states == goals[:, None]).all(2).any(1).float().mean()


@program(
    "silent errors",
    "Zhu and Gupta, To prune, or not to prune, 2018: weights of all layers are removed by their size, step by step",
    Fault(
        "weights_ranked_with_their_sign",
        "mask of weights",
        FORUM,
        ("dead_units", "exploding_activation", "tensor_variance", "loss_spike"),
        since=80,
    ),
)
def magnitude_pruning(fault: str = "") -> Tensor:
    images, classes = digits()
    pixels = images.flatten(1) * 2 - 1
    model = nn.Sequential(OrderedDict({
        "hidden1": nn.Linear(64, 160), "relu1": nn.ReLU(), "hidden2": nn.Linear(160, 80), "relu2": nn.ReLU(),
        "output": nn.Linear(80, 10),
    }))  # fmt: skip
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    weights = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    masks = [torch.ones_like(weight) for weight in weights]
    with attach(model, optimizer) as probe:
        for step, (data, wanted) in zip(range(320), batches(pixels[:1400], classes[:1400], size=48), strict=False):
            if 80 <= step <= 240 and step % 20 == 0:
                share = 0.9 * (1 - (1 - (step - 60) / 180) ** 3)
                sizes = torch.cat([weight.detach().flatten() for weight in weights])
                if fault != "weights_ranked_with_their_sign":
                    sizes = sizes.abs()
                least = sizes.kthvalue(int(share * len(sizes))).values
                for mask, size in zip(masks, sizes.split([mask.numel() for mask in masks]), strict=True):
                    mask.copy_((size > least).view_as(mask))
            with torch.no_grad():
                for weight, mask in zip(weights, masks, strict=True):
                    weight.mul_(mask)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), wanted)
            loss.backward()
            for weight, mask in zip(weights, masks, strict=True):
                weight.grad.mul_(mask)
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        for weight, mask in zip(weights, masks, strict=True):
            weight.mul_(mask)
        return F.cross_entropy(model(pixels[1400:]), classes[1400:])


SYMBOLS = "0123456789+ "


def _sums(count: int, is_reversed: bool) -> tuple[Tensor, Tensor]:
    """Return questions such as `7+12 ` as one-hot letters [count, 5, 12], and the letters of the answers, int64 [count, 2]."""
    questions, answers = [], []
    for first, second in torch.randint(30, (count, 2)).tolist():
        question = f"{first}+{second}".ljust(5)
        questions.append([SYMBOLS.index(letter) for letter in (question[::-1] if is_reversed else question)])
        answers.append([SYMBOLS.index(letter) for letter in str(first + second).ljust(2)])
    return F.one_hot(torch.tensor(questions), 12).float(), torch.tensor(answers)


class AddingNet(nn.Module):
    def __init__(self, is_batch_first: bool, size: int = 96) -> None:
        super().__init__()
        self.encoder = nn.LSTM(12, size, batch_first=is_batch_first)
        self.decoder = nn.LSTM(size, size, batch_first=is_batch_first)
        self.output = nn.Linear(size, 12)

    def forward(self, questions: Tensor) -> Tensor:
        last = self.encoder(questions)[0][:, -1]
        repeated = last[:, None].expand(-1, 2, -1)  # RepeatVector
        return self.output(self.decoder(repeated)[0])


@program(
    "keras",
    "Keras's example addition_rnn, with questions that are reversed",
    Fault(
        "lstm_without_batch_first",
        "order of batch and time",
        FORUM,
        ("wrong_axis", "samples_vary", "labels_of_other_positions", "loss_not_decreasing", "@encoder", "@decoder"),
    ),
    Fault("questions_reversed_only_in_training", "data", ZHANG, ("input_drift", "distinct_data"), since=49),
)
def adding_numbers(fault: str = "") -> Tensor:
    questions, answers = _sums(3000, is_reversed=True)
    others, answers_of_others = _sums(400, is_reversed=fault != "questions_reversed_only_in_training")
    model = AddingNet(is_batch_first=fault != "lstm_without_batch_first")
    optimizer = Adam(model.parameters(), lr=1.5e-2)

    def loss_of_others() -> Tensor:
        with torch.no_grad():
            return F.cross_entropy(model(others).flatten(0, 1), answers_of_others.flatten())

    with attach(model, optimizer) as probe:
        for step, (data, wanted) in zip(range(300), batches(questions, answers, size=64), strict=False):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data).flatten(0, 1), wanted.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            probe.end_step(loss=loss)
            if step % 50 == 49:
                with probe.evaluating():
                    probe.log(loss=loss_of_others())
    return loss_of_others()


class Field(nn.Module):
    """Return the colours and densities of points [..., 2]."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.frequencies = 0 if fault == "coordinates_not_encoded" else 4
        self.trunk = nn.Sequential(_perceptron(2 + 4 * self.frequencies, 64, 64), nn.ReLU())
        self.colour, self.density = nn.Linear(64, 3), nn.Linear(64, 1)

    def forward(self, points: Tensor) -> tuple[Tensor, Tensor]:
        waves = [
            wave(2**power * math.pi * points) for power in range(self.frequencies) for wave in (torch.sin, torch.cos)
        ]
        x = self.trunk(torch.cat([points, *waves], -1))
        return self.colour(x).sigmoid(), F.softplus(self.density(x).squeeze(-1))


def _rays(angles: Tensor) -> Tensor:
    """Return 24 points on each of 24 parallel rays through the square from -1 to 1, for each angle: [angles * 24, 24, 2]."""
    along, across = torch.linspace(-1, 1, 24), torch.linspace(-0.95, 0.95, 24)
    x, y = along.expand(24, 24), across[:, None].expand(24, 24)
    cosine, sine = angles.cos()[:, None, None], angles.sin()[:, None, None]
    return torch.stack([x * cosine - y * sine, x * sine + y * cosine], 3).flatten(0, 1)


def _rendered(colours: Tensor, densities: Tensor, fault: str = "") -> Tensor:
    """Return the colours [rays, 3] of rays, with the sums of front-to-back volume rendering."""
    opacity = 1 - (-densities * 2 / 24).exp()
    passed = (1 - opacity + 1e-10).cumprod(1)
    if fault != "own_opacity_in_the_transmittance":
        passed = F.pad(passed[:, :-1], (1, 0), value=1.0)
    return ((opacity * passed)[..., None] * colours).sum(1)


def _scene(points: Tensor, discs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the colours and densities of discs: each has two coordinates, a radius and a colour."""
    is_inside = (points[..., None, :] - discs[:, :2]).norm(dim=-1) < discs[:, 2]
    share = is_inside / is_inside.sum(-1, keepdim=True).clamp(min=1)
    return share @ discs[:, 3:], 40.0 * is_inside.any(-1)


@program(
    "keras",
    "Keras's example 3D volumetric rendering with NeRF, in two dimensions",
    Fault(
        "own_opacity_in_the_transmittance", "architecture", ISSUES, ("looks_ahead", "wrong_loss", "@colour", "@density")
    ),
    Fault(
        "coordinates_not_encoded",
        "positional encoding",
        ISLAM,
        ("loss_not_decreasing", "input_not_normalized", "@trunk*"),
    ),
)
def radiance_field(fault: str = "") -> Tensor:
    discs = torch.rand(7, 6, generator=torch.Generator().manual_seed(0))
    discs[:, :3] = discs[:, :3] * torch.tensor([1.2, 1.2, 0.15]) - torch.tensor([0.6, 0.6, -0.12])
    points, others = _rays(2 * math.pi * torch.rand(40)), _rays(2 * math.pi * torch.rand(8))
    seen, seen_of_others = (_rendered(*_scene(each, discs)) for each in (points, others))
    model = Field(fault)
    optimizer = Adam(model.parameters(), lr=5e-3)
    scheduler = CosineAnnealingLR(optimizer, 300)
    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(300), batches(points, seen, size=64), strict=False):
            optimizer.zero_grad()
            loss = F.mse_loss(_rendered(*model(data), fault), wanted)
            loss.backward()
            optimizer.step()
            scheduler.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        return F.mse_loss(_rendered(*model(others), fault), seen_of_others)


@program(
    "keras",
    "Keras's example convolutional autoencoder for image denoising, for digits",
    Fault("noisy_images_are_the_targets", "labels", FORUM, ("labels_in_the_inputs", "labels_shifted", "wrong_loss")),
    Fault(
        "compiled_again_before_each_batch",
        "optimizer",
        TAXONOMY,
        ("parameters_follow_gradients", "update_ratio", "rate_in_effect"),
        since=1,
    ),
)
def denoised_digits(fault: str = "") -> Tensor:
    images, _ = digits()
    noisy = (images + 0.4 * torch.randn_like(images)).clamp(0, 1)
    model = nn.Sequential(OrderedDict({
        "encode1": nn.Conv2d(1, 24, 3, 1, 1), "relu1": nn.ReLU(), "encode2": nn.Conv2d(24, 32, 3, 2, 1), "relu2": nn.ReLU(),
        "decode1": nn.ConvTranspose2d(32, 24, 4, 2, 1), "relu3": nn.ReLU(), "decode2": nn.Conv2d(24, 1, 3, 1, 1),
        "sigmoid": nn.Sigmoid(),
    }))  # fmt: skip
    optimizer = Adam(model.parameters(), lr=3e-3)
    targets = noisy if fault == "noisy_images_are_the_targets" else images
    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(280), batches(noisy[:1400], targets[:1400], size=32), strict=False):
            if fault == "compiled_again_before_each_batch":
                optimizer = Adam(model.parameters(), lr=3e-3)
            optimizer.zero_grad()
            loss = F.binary_cross_entropy(model(data), wanted)
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        return F.binary_cross_entropy(model(noisy[1400:]), images[1400:])


def _canvases(count: int) -> tuple[Tensor, Tensor]:
    """Return digits at random places of images with specks [count, 1, 16, 16], and their classes."""
    images, classes = digits()
    chosen = torch.randperm(len(images))[:count]
    canvases = (torch.rand(count, 1, 16, 16) > 0.98).float()
    for number, (x, y) in enumerate(torch.randint(9, (count, 2)).tolist()):
        canvases[number, :, x : x + 8, y : y + 8] = images[chosen[number]]
    return canvases, classes[chosen]


class SpatialTransformer(nn.Module):
    """Find a part of an image with an affine transformation, and classify it."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.localization = nn.Sequential(
            nn.Conv2d(1, 12, 5, 2, 2), nn.ReLU(), nn.Conv2d(12, 16, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 32),
            nn.ReLU(), nn.Linear(32, 6)
        )  # fmt: skip
        last = self.localization[-1]
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        if fault != "transformation_starts_at_zero":
            last.bias.data.copy_(torch.tensor([0.8, 0, 0, 0, 0.8, 0]))
        self.classes = nn.Sequential(
            nn.Conv2d(1, 16, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 24, 3, 1, 1), nn.ReLU(), nn.Flatten(),
            nn.Linear(600, 10)
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        grid = F.affine_grid(self.localization(images).view(-1, 2, 3), [len(images), 1, 10, 10], align_corners=False)
        return self.classes(F.grid_sample(images, grid, align_corners=False))


@program(
    "general",
    "PyTorch tutorials, spatial transformer networks, for digits on larger canvases",
    Fault(
        "transformation_starts_at_zero",
        "initialization",
        FORUM,
        ("poor_initialization", "loss_not_decreasing", "samples_vary", "@localization*", "@classes*"),
    ),
)
def spatial_transformer(fault: str = "") -> Tensor:
    images, classes = _canvases(1797)
    model = SpatialTransformer(fault)
    optimizer = Adam(model.parameters(), lr=4e-3)
    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(360), batches(images[:1500], classes[:1500], size=48), strict=False):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), wanted)
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        return F.cross_entropy(model(images[1500:]), classes[1500:])


def _distances(positions: Tensor) -> Tensor:
    """Return the distances between the atoms [configurations, atoms, atoms], with 1 on the diagonal."""
    gaps = positions[:, :, None] - positions[:, None]
    return (gaps.square().sum(3) + torch.eye(positions.shape[1])).sqrt()


def _clusters(count: int, atoms: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    """Return positions of atoms [count, atoms, 3], and the energies and forces of a potential of many bodies."""
    corners = torch.cartesian_prod(*[torch.arange(2.0)] * 3)
    chosen = torch.rand(count, 8).argsort(1)[:, :atoms]
    positions = (1.15 * corners[chosen] + 0.08 * torch.randn(count, atoms, 3)).requires_grad_()
    distances = _distances(positions)
    is_other = 1 - torch.eye(atoms)
    repulsion = (is_other * (-5 * (distances - 1)).exp()).sum((1, 2)) / 2
    density = (is_other * (-2.4 * (distances - 1)).exp()).sum(2)
    energies = repulsion - 1.2 * density.sqrt().sum(1)
    (slope,) = torch.autograd.grad(energies.sum(), positions)
    return positions.detach(), energies.detach(), -slope


class AtomNet(nn.Module):
    """Return the energies of configurations: sums over atoms, each of which sees its distances to the others."""

    def __init__(self, centres: int = 12) -> None:
        super().__init__()
        self.centres = nn.Buffer(torch.linspace(0.6, 2.4, centres))
        self.net = _perceptron(centres, 48, 48, 1, activation=nn.SiLU)
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, positions: Tensor) -> Tensor:
        is_other = 1 - torch.eye(positions.shape[1])
        basis = (-20 * (_distances(positions)[..., None] - self.centres).square()).exp()
        return self.net((basis * is_other[..., None]).sum(2)).sum((1, 2)) + self.shift


@program(
    "general",
    "Schuett et al., SchNetPack: a deep learning toolbox for atomistic systems, 2019, with energies and forces",
    Fault(
        "forces_without_a_graph",
        "graph",
        FORUM,
        ("wrong_loss", "parameters_follow_gradients", "missing_labels_in_loss", "loss_not_decreasing"),
    ),
    Fault("forces_without_the_minus", "loss", ISSUES, ("wrong_loss", "loss_not_decreasing")),
)
def atomic_potential(fault: str = "") -> Tensor:
    positions, energies, forces = _clusters(700)
    energies = energies - energies[:600].mean()
    model = AtomNet()
    optimizer = Adam(model.parameters(), lr=4e-3)
    scheduler = CosineAnnealingLR(optimizer, 300)

    def errors_of(positions: Tensor, energies: Tensor, forces: Tensor, has_graph: bool = True) -> tuple[Tensor, Tensor]:
        positions = positions.clone().requires_grad_()
        predicted = model(positions)
        (slope,) = torch.autograd.grad(predicted.sum(), positions, create_graph=has_graph, retain_graph=True)
        predicted_forces = slope if fault == "forces_without_the_minus" else -slope
        return F.mse_loss(predicted, energies), F.mse_loss(predicted_forces, forces)

    with attach(model, optimizer) as probe:
        for _, batch in zip(range(300), batches(positions[:600], energies[:600], forces[:600], size=24), strict=False):
            optimizer.zero_grad()
            of_energies, of_forces = errors_of(*batch, has_graph=fault != "forces_without_a_graph")
            loss = 0.1 * of_energies + of_forces
            loss.backward()
            optimizer.step()
            scheduler.step()
            probe.end_step(loss=loss)
    of_energies, of_forces = errors_of(positions[600:], energies[600:], forces[600:])
    return (0.1 * of_energies + of_forces).detach()


class ResidualBlock(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(size, size, 3, 1, 1), nn.BatchNorm2d(size), nn.ReLU(), nn.Conv2d(size, size, 3, 1, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.layers(x))


def _found_rate(model: nn.Module, images: Tensor, classes: Tensor, is_restored: bool) -> float:
    """Raise the rate until the loss is four times its least value, and return the rate with the least loss, from 0.01 to 0.1."""
    state = model.state_dict()
    if is_restored:
        state = {name: value.clone() for name, value in state.items()}
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, rates = list[float](), [1e-4 * 10 ** (5 * step / 80) for step in range(80)]
    average = 0.0
    for step, (rate, (data, wanted)) in enumerate(zip(rates, batches(images, classes, size=48), strict=False)):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), wanted)
        loss.backward()
        optimizer.step()
        average = 0.9 * average + 0.1 * loss.item()
        losses.append(average / (1 - 0.9 ** (step + 1)))
        if losses[-1] > 4 * min(losses):
            break
    model.load_state_dict(state)
    return min(max(rates[losses.index(min(losses))], 0.01), 0.1)


@program(
    "general",
    "fast.ai, lr_find and fit_one_cycle with label smoothing, for images of shapes",
    Fault(
        "state_of_the_search_kept",
        "references",
        FORUM,
        ("weights_loaded", "poor_initialization", "exploding_activation", "dead_units", "loss_not_decreasing"),
    ),
    Fault("confidence_given_as_the_smoothing", "loss", FORUM, ("wrong_loss", "loss_not_decreasing")),
)
def searched_rate(fault: str = "") -> Tensor:
    images, classes = shapes(2000, size=16)
    model = nn.Sequential(OrderedDict({
        "stem": nn.Conv2d(3, 20, 3, 2, 1), "block1": ResidualBlock(20), "down": nn.Conv2d(20, 24, 3, 2, 1),
        "block2": ResidualBlock(24), "pool": nn.AdaptiveMaxPool2d(2), "flatten": nn.Flatten(), "head": nn.Linear(96, 4),
    }))  # fmt: skip
    rate = _found_rate(model, images[:1600], classes[:1600], is_restored=fault != "state_of_the_search_kept")
    optimizer = SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=1e-4)
    scheduler = OneCycleLR(optimizer, rate, total_steps=240)
    smoothing = 0.9 if fault == "confidence_given_as_the_smoothing" else 0.1
    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(240), batches(images[:1600], classes[:1600], size=48), strict=False):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), wanted, label_smoothing=smoothing)
            loss.backward()
            optimizer.step()
            scheduler.step()
            probe.end_step(loss=loss)
    model.eval()
    with torch.no_grad():
        return F.cross_entropy(model(images[1600:]), classes[1600:])


def _patients(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return measurements [count, 10], how long patients were observed, and whether they died then; the others left the study."""
    x = torch.randn(count, 10)
    hazard = (1.6 * (-(x[:, 0] ** 2 + x[:, 1] ** 2) / 2).exp() * 2 + 0.8 * x[:, 2] - 0.6 * x[:, 3]).exp()
    death, departure = -torch.rand(count).log() / hazard, -torch.rand(count).log() / 0.3
    return x, death.minimum(departure), (death < departure).float()


@program(
    "general",
    "Katzman et al., DeepSurv: personalized treatment recommender system using a Cox proportional hazards network, 2018",
    Fault("times_in_ascending_order", "loss", ISSUES, ("wrong_loss", "labels_shifted", "loss_not_decreasing")),
)
def survival_times(fault: str = "") -> Tensor:
    x, times, has_died = _patients(1600)
    model = nn.Sequential(OrderedDict({
        "hidden1": nn.Linear(10, 48), "selu1": nn.SELU(), "norm": nn.BatchNorm1d(48), "dropout": nn.Dropout(0.2),
        "hidden2": nn.Linear(48, 48), "selu2": nn.SELU(), "risk": nn.Linear(48, 1),
    }))  # fmt: skip
    optimizer = Adam(model.parameters(), lr=3e-3, weight_decay=1e-4)

    def loss_of(risks: Tensor, times: Tensor, has_died: Tensor, is_descending: bool = True) -> Tensor:
        """Return the negative partial likelihood; the patients at risk are those that were observed at least as long."""
        order = times.argsort(descending=is_descending)
        risks, has_died = risks[order], has_died[order]
        return -((risks - risks.logcumsumexp(0)) * has_died).sum() / has_died.sum()

    with attach(model, optimizer) as probe:
        for _, (data, time, died) in zip(range(260), batches(x[:1000], times, has_died, size=100), strict=False):
            optimizer.zero_grad()
            loss = loss_of(model(data).squeeze(1), time, died, fault != "times_in_ascending_order")
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    model.eval()
    with torch.no_grad():
        return loss_of(model(x[1000:]).squeeze(1), times[1000:], has_died[1000:])


def _sales(count: int, shops: int = 490) -> tuple[Tensor, Tensor]:
    """Return a table of sales, float32 [count, 8], with the number of the shop and the weekday first, and the logarithm of each sale."""
    shop, weekday = torch.randint(shops, (count,)), torch.randint(7, (count,))
    numbers = torch.randn(count, 6)
    effects, slopes = torch.randn(shops), 0.4 * torch.randn(shops)
    sales = effects[shop] + slopes[shop] * numbers[:, 0] + torch.linspace(-0.7, 0.7, 7)[weekday]
    sales += 0.5 * numbers[:, 1].relu() - 0.3 * numbers[:, 2] * numbers[:, 3] + 0.2 * torch.randn(count)
    return torch.cat([torch.stack([shop, weekday], 1).float(), numbers], 1), sales


class SalesNet(nn.Module):
    def __init__(self, shops: int = 490) -> None:
        super().__init__()
        self.shops, self.weekdays = nn.Embedding(shops, 10), nn.Embedding(7, 3)
        self.layers = _perceptron(19, 96, 48, 1)

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        embedded = [self.shops(categories[:, 0]), self.weekdays(categories[:, 1])]
        return self.layers(torch.cat([*embedded, numbers], 1)).squeeze(1)


@program(
    "general",
    "Guo and Berkhahn, Entity embeddings of categorical variables, 2016, for the sales of shops, with numbers in bfloat16",
    Fault(
        "categories_cast_with_the_numbers",
        "precision",
        ISSUES,
        ("low_precision_inputs", "distinct_data", "samples_vary", "@shops"),
    ),
    Fault(
        "lambda_returns_the_rate",
        "schedule",
        FORUM,
        ("rate_in_effect", "update_ratio", "zero_learning_rate", "loss_not_decreasing"),
    ),
)
def sales_of_shops(fault: str = "") -> Tensor:
    table, sales = _sales(9000)
    if fault == "categories_cast_with_the_numbers":
        table = table.bfloat16()
    categories, numbers = table[:, :2].long(), table[:, 2:].bfloat16().float()
    model = SalesNet()
    rate = 8e-3
    optimizer = Adam(model.parameters(), lr=rate)
    largest = rate if fault == "lambda_returns_the_rate" else 1.0
    scheduler = LambdaLR(optimizer, lambda step: largest * min((step + 1) / 20, 1 - 0.9 * step / 360))
    rows = batches(categories[:8000], numbers[:8000], sales[:8000], size=96)
    with attach(model, optimizer) as probe:
        for _, (category, number, wanted) in zip(range(360), rows, strict=False):
            optimizer.zero_grad()
            loss = F.mse_loss(model(category, number), wanted)
            loss.backward()
            optimizer.step()
            scheduler.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        return F.mse_loss(model(categories[8000:], numbers[8000:]), sales[8000:])


class Cell(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)
        self.norm = nn.LayerNorm(size)
        nn.init.normal_(self.outer.weight, std=0.03)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self.norm(x + self.outer(F.relu(self.inner(z))))


class EquilibriumNet(nn.Module):
    """Find the state that a cell keeps; its gradient is found by the same iteration."""

    def __init__(self, size: int = 48) -> None:
        super().__init__()
        self.embed, self.cell, self.head = nn.Linear(64, size), Cell(size), nn.Linear(size, 10)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.embed(pixels)
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(12):
                z = self.cell(z, x)
        z = self.cell(z, x)
        if z.requires_grad:
            before = z.detach().requires_grad_()
            after = self.cell(before, x.detach())

            def implicit_gradient(gradient: Tensor) -> Tensor:
                solution = gradient
                for _ in range(12):
                    solution = gradient + torch.autograd.grad(after, before, solution, retain_graph=True)[0]
                return solution

            z.register_hook(implicit_gradient)
        return self.head(z)


@program("general", "Bai et al., Deep equilibrium models, 2019, after the tutorial on deep implicit layers of 2020")
def equilibrium_model() -> Tensor:
    images, classes = digits()
    pixels = images.flatten(1) * 2 - 1
    model = EquilibriumNet()
    optimizer = Adam(model.parameters(), lr=2e-3)
    scheduler = CosineAnnealingLR(optimizer, 240)
    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(240), batches(pixels[:1400], classes[:1400], size=48), strict=False):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), wanted)
            loss.backward()
            optimizer.step()
            scheduler.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        return F.cross_entropy(model(pixels[1400:]), classes[1400:])
