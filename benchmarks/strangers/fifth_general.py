"""Programs of many kinds, with faults that are known from collections, issue trackers and forums."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.distributed as dist
from data import KINDS, PAD, VOCABULARY, batches, digits, normalized_digits, padded, tokens
from registry import Fault, attach, in_two_processes, program
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW, RAdam, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

TRAINCHECK = "Jiang et al., Training with confidence: catching silent errors in deep learning training, 2025"
TAXONOMY = "Humbatova et al., Taxonomy of real faults in deep learning systems, 2020"
ISLAM = "Islam et al., A comprehensive study on deep learning bug characteristics, 2019"
FORUM = "Questions at discuss.pytorch.org and Stack Overflow, 2018 to 2025"
ISSUES = "Issues of libraries for training and of examples at GitHub, 2018 to 2025"


def _train_sharded(rank: int, fault: str, final: Tensor) -> None:
    train_data, test_data = normalized_digits()
    images, classes = (tensor[rank::2] for tensor in train_data.tensors)
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.SiLU(), nn.Conv2d(12, 24, 3, 2, 1), nn.SiLU(), nn.Flatten(), nn.Linear(384, 32),
        nn.SiLU(), nn.Linear(32, 10)
    )  # fmt: skip
    owners, sizes = {}, [0, 0]
    for parameter in sorted(model.parameters(), key=torch.numel, reverse=True):  # the next one to the smaller shard
        owners[parameter] = sizes.index(min(sizes))
        sizes[owners[parameter]] += parameter.numel()
    owned = [parameter for parameter, owner in owners.items() if owner == rank]
    optimizer = AdamW(owned, lr=2e-3, weight_decay=0.01)
    torch.manual_seed(torch.initial_seed() + rank)
    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(150), batches(images, classes, size=32), strict=False):
            model.zero_grad()
            loss = F.cross_entropy(model(data), wanted)
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= 2
            optimizer.step()
            for parameter, owner in owners.items():
                dist.broadcast(parameter.detach(), 0 if fault == "all_shards_taken_from_rank_0" else owner)
            probe.end_step(loss=loss)
    if rank == 0:
        images, classes = test_data.tensors
        with torch.no_grad():
            final.copy_(F.cross_entropy(model(images), classes))


@program(
    "silent errors",
    "Rajbhandari et al., ZeRO: memory optimizations toward training trillion parameter models, 2020: states in shards",
    Fault(
        "all_shards_taken_from_rank_0",
        "replicas",
        TRAINCHECK,
        ("unchanged_parameter", "parameters_follow_gradients", "update_ratio"),
    ),
)
def sharded_optimizer(fault: str = "") -> Tensor:
    final = torch.zeros(()).share_memory_()
    in_two_processes(_train_sharded, fault, final)
    return final


def _fine_tune(rank: int, fault: str, final: Tensor) -> None:
    train_data, test_data = normalized_digits()
    images, classes = train_data.tensors
    backbone = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 24, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(384, 32),
        nn.ReLU()
    )  # fmt: skip
    of_turns = nn.Linear(32, 4)
    pretraining = Adam([*backbone.parameters(), *of_turns.parameters()], lr=2e-3)
    for _, (data,) in zip(range(60), batches(images, size=32), strict=False):
        turned = torch.cat([part.rot90(turns, (2, 3)) for turns, part in enumerate(data.chunk(4))])
        pretraining.zero_grad()
        F.cross_entropy(of_turns(backbone(turned)), torch.arange(4).repeat_interleave(8)).backward()
        pretraining.step()
    model = nn.Sequential(backbone, nn.Linear(32, 10))
    backbone.requires_grad_(False)
    optimizer = Adam([{"params": model[1].parameters()}, {"params": backbone.parameters(), "lr": 2e-3}], lr=5e-3)
    replica = DistributedDataParallel(model)
    here = classes.argsort(stable=True).chunk(2)[rank]  # each site has other classes
    torch.manual_seed(torch.initial_seed() + rank)
    with attach(model, optimizer) as probe:
        for step, (data, wanted) in zip(range(220), batches(images[here], classes[here], size=16), strict=False):
            if step == 60:
                backbone.requires_grad_(True)
                if fault != "unfrozen_without_a_new_wrapper":
                    replica = DistributedDataParallel(model)
            optimizer.zero_grad()
            loss = F.cross_entropy(replica(data), wanted)
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    if rank == 0:
        images, classes = test_data.tensors
        with torch.no_grad():
            final.copy_(F.cross_entropy(model(images), classes))


@program(
    "silent errors",
    "Lightning's BackboneFinetuning under DistributedDataParallel, with a backbone that knows how digits are turned",
    Fault("unfrozen_without_a_new_wrapper", "replicas", ISSUES, ("replicas_equal",), since=60),
)
def unfrozen_replicas(fault: str = "") -> Tensor:
    final = torch.zeros(()).share_memory_()
    in_two_processes(_fine_tune, fault, final)
    return final


def _rings(count: int) -> Tensor:
    """Return points [count, 2] of two rings."""
    angle = 2 * math.pi * torch.rand(count)
    radius = torch.where(torch.rand(count) < 0.4, 0.7, 1.6) + 0.1 * torch.randn(count)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1)


@program(
    "silent errors",
    "Du and Mordatch, Implicit generation and modeling with energy based models, 2019, for points of two rings",
    Fault(
        "gradients_of_the_sampler_kept",
        "gradients",
        FORUM,
        ("gradients_zeroed", "exploding_gradient", "update_ratio", "loss_spike"),
    ),
)
def energy_model(fault: str = "") -> Tensor:
    points = _rings(2000)
    model = nn.Sequential(nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))
    optimizer = Adam(model.parameters(), lr=3e-3, betas=(0.5, 0.999))
    scheduler = CosineAnnealingLR(optimizer, 300)
    chains = torch.rand(1000, 2) * 5 - 2.5
    with attach(model, optimizer) as probe:
        for _, (data,) in zip(range(260), batches(points, size=100), strict=False):
            if fault == "gradients_of_the_sampler_kept":
                optimizer.zero_grad()
            chosen = torch.randperm(1000)[:100]
            samples = torch.where(torch.rand(100, 1) < 0.05, torch.rand(100, 2) * 5 - 2.5, chains[chosen])
            for _ in range(15):
                samples.requires_grad_(True)
                model(samples).sum().backward()
                samples = (samples - 0.05 * samples.grad + 0.3 * torch.randn(100, 2)).detach().clamp(-2.5, 2.5)
            chains[chosen] = samples
            if fault != "gradients_of_the_sampler_kept":
                optimizer.zero_grad()
            real, made = model(data), model(samples)
            loss = (real - made).mean() + 0.01 * (real**2 + made**2).mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
            probe.end_step(loss=loss)
    axis = torch.linspace(-2.5, 2.5, 101)
    with torch.no_grad():
        energies = model(torch.cartesian_prod(axis, axis)).squeeze(1)
        return model(_rings(2000)).mean() + torch.logsumexp(-energies, 0) + 2 * math.log(0.05)


class NoiseNet(nn.Module):
    """Predict the noise in images of 64 pixels from the images and the logarithm of the share of the signal."""

    def __init__(self, size: int = 160) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, size), nn.SiLU(), nn.Linear(size, size))
        self.inside = nn.Linear(64, size)
        self.middle = nn.ModuleList(nn.Linear(size, size) for _ in range(2))
        self.outside = nn.Linear(size, 64)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        angles = time[:, None] * 100 ** (-torch.arange(8) / 8)
        time = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        x = self.inside(x)
        for layer in self.middle:
            x = x + layer(F.silu(x + time))
        return self.outside(F.silu(x))


@program(
    "silent errors",
    "Hugging Face diffusers, train_unconditional.py, for digits, with an average of the weights",
    Fault("average_in_bfloat16", "precision", ISSUES, ("unchanged_parameter", "low_precision_inputs", "@average*")),
    Fault(
        "rate_multiplied_in_each_step",
        "schedule",
        FORUM,
        ("rate_in_effect", "zero_learning_rate", "update_ratio", "unchanged_parameter"),
        since=2,
    ),
)
def averaged_denoiser(fault: str = "") -> Tensor:
    images = digits()[0].flatten(1) * 2 - 1
    steps, rate = 320, 2e-3
    signal = (1 - torch.linspace(1e-3, 0.12, 60)).cumprod(0)
    model = NoiseNet()
    average = copy.deepcopy(model).requires_grad_(False)
    if fault == "average_in_bfloat16":
        average.to(torch.bfloat16)
    optimizer = AdamW(model.parameters(), lr=rate, betas=(0.95, 0.999), weight_decay=1e-4)

    def loss_of(network: nn.Module, data: Tensor) -> Tensor:
        time, noise = torch.randint(60, (len(data),)), torch.randn_like(data)
        share = signal[time, None]
        return F.mse_loss(network(share.sqrt() * data + (1 - share).sqrt() * noise, time), noise)

    with attach(nn.ModuleDict({"model": model, "average": average}), optimizer) as probe:
        for step, (data,) in zip(range(steps), batches(images[:1500], size=64), strict=False):
            for group in optimizer.param_groups:
                factor = 1 - step / steps
                group["lr"] = (group["lr"] if fault == "rate_multiplied_in_each_step" else rate) * factor
            optimizer.zero_grad()
            loss = loss_of(model, data)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                    slow.lerp_(fast.to(slow.dtype), 1 - min(0.99, (step + 1) / (step + 4)))
            probe.end_step(loss=loss)
    with torch.no_grad():
        average.float()
        return torch.stack([loss_of(average, images[1500:]) for _ in range(10)]).mean()


@program(
    "silent errors",
    "Chen and He, Exploring simple siamese representation learning, 2021 (SimSiam)",
    Fault(
        "stop_gradient_missing",
        "graph",
        FORUM,
        ("wrong_loss", "distinct_data", "samples_vary", "tensor_variance", "@projector*", "@predictor*"),
    ),
)
def simple_siamese(fault: str = "") -> Tensor:
    images, classes = digits()
    images = F.pad((images - 0.3) / 0.37, (1, 1, 1, 1), value=-0.8)
    encoder = nn.Sequential(
        nn.Conv2d(1, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Flatten()
    )  # fmt: skip
    projector = nn.Sequential(nn.Linear(512, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 48))
    predictor = nn.Sequential(nn.Linear(48, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 48))
    model = nn.ModuleDict({"encoder": encoder, "projector": projector, "predictor": predictor})
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    scheduler = CosineAnnealingLR(optimizer, 200)

    def view_of(batch: Tensor) -> Tensor:
        x, y = torch.randint(0, 3, (2,)).tolist()
        batch = batch[:, :, x : x + 8, y : y + 8] * (0.7 + 0.6 * torch.rand(len(batch), 1, 1, 1))
        return batch + 0.3 * torch.randn_like(batch)

    def distance(predicted: Tensor, projected: Tensor) -> Tensor:
        if fault != "stop_gradient_missing":
            projected = projected.detach()
        return -F.cosine_similarity(predicted, projected).mean()

    with attach(model, optimizer) as probe:
        for _, (batch,) in zip(range(200), batches(images[:1400], size=64), strict=False):
            first, second = (projector(encoder(view_of(batch))) for _ in range(2))
            loss = (distance(predictor(first), second) + distance(predictor(second), first)) / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            probe.end_step(loss=loss)
    model.eval()
    with torch.no_grad():  # a linear classifier of the features
        features = F.normalize(projector(encoder(images[:, :, 1:-1, 1:-1])), dim=1)
        features, wanted = F.pad(features, (0, 1), value=1.0), F.one_hot(classes).float()
        known = features[:1400]
        weight = torch.linalg.solve(known.t() @ known + 0.1 * torch.eye(49), known.t() @ wanted[:1400])
        return F.mse_loss(features[1400:] @ weight, wanted[1400:])


class RatingNet(nn.Module):
    def __init__(self, users: int, movies: int, fault: str, size: int = 24) -> None:
        super().__init__()
        self.fault = fault
        self.users, self.user_bias = nn.Embedding(users, size), nn.Embedding(users, 1)
        self.movies, self.movie_bias = nn.Embedding(movies, size), nn.Embedding(movies, 1)
        for table in (self.users, self.movies, self.user_bias, self.movie_bias):
            if fault == "uniform_of_the_other_library":
                nn.init.uniform_(table.weight)
            else:
                nn.init.uniform_(table.weight, -0.05, 0.05)

    def forward(self, user: Tensor, movie: Tensor) -> Tensor:
        products = self.users(user) * self.movies(movie)
        score = products.sum() if self.fault == "dot_over_the_whole_batch" else products.sum(1)
        return torch.sigmoid(score + self.user_bias(user).squeeze(1) + self.movie_bias(movie).squeeze(1))


@program(
    "keras",
    "Keras's example collaborative_filtering_for_movie_recommendations",
    Fault(
        "dot_over_the_whole_batch",
        "architecture",
        ISSUES,
        ("wrong_axis", "loss_broadcasts", "samples_vary", "loss_not_decreasing"),
    ),
    Fault(
        "uniform_of_the_other_library",
        "initialization",
        FORUM,
        ("poor_initialization", "saturated_activation", "exploding_activation", "@users", "@movies", "@*bias"),
    ),
)
def movie_ratings(fault: str = "") -> Tensor:
    users, movies = 150, 100
    tastes, topics = torch.randn(users, 3), torch.randn(movies, 3)
    means = 0.8 * torch.randn(users, 1) + 0.8 * torch.randn(movies)
    ratings = torch.sigmoid(tastes @ topics.t() + means + 0.4 * torch.randn(users, movies)).mul(9).round() / 9
    pairs = (torch.rand(users, movies) < 0.6).nonzero()
    pairs = pairs[torch.randperm(len(pairs))]
    targets = ratings[pairs[:, 0], pairs[:, 1]]
    model = RatingNet(users, movies, fault)
    decayed = [model.users.weight, model.movies.weight]
    biases = [model.user_bias.weight, model.movie_bias.weight]
    optimizer = Adam([{"params": decayed, "weight_decay": 1e-5}, {"params": biases}], lr=1e-2)
    with attach(model, optimizer) as probe:
        for _, (rows, wanted) in zip(range(350), batches(pairs[:8000], targets[:8000], size=128), strict=False):
            optimizer.zero_grad()
            loss = F.binary_cross_entropy(model(rows[:, 0], rows[:, 1]), wanted)
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        return F.mse_loss(model(pairs[8000:, 0], pairs[8000:, 1]), targets[8000:])


class WordNet(nn.Module):
    def __init__(self, vectors: Tensor, topics: int) -> None:
        super().__init__()
        self.words = nn.Embedding.from_pretrained(vectors, freeze=True)
        self.convolutions = nn.Sequential(
            nn.Conv1d(32, 48, 3, padding=1), nn.ReLU(), nn.MaxPool1d(2), nn.Conv1d(48, 48, 3, padding=1), nn.ReLU(),
            nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Dropout(0.3), nn.Linear(48, topics)
        )  # fmt: skip

    def forward(self, words: Tensor) -> Tensor:
        return self.convolutions(self.words(words).transpose(1, 2))


@program(
    "keras",
    "Keras's example pretrained_word_embeddings: vectors from a file are not trained, with convolutions over the words",
    Fault("rows_of_another_vocabulary", "loading", FORUM, ("weights_loaded", "@words", "loss_not_decreasing")),
)
def pretrained_words(fault: str = "") -> Tensor:
    meanings, topics, count, length = 600, 6, 1500, 14
    centres = torch.randn(topics, 32)
    file = {  # a vector for each word, by its name
        f"word{number:03}": 0.5 * (centres[number % topics] + 1.2 * torch.randn(32)) for number in range(meanings)
    }
    topic = torch.randint(topics, (count,))
    own = topic[:, None] + topics * torch.randint(meanings // topics, (count, length))
    numbers = torch.where(torch.rand(count, length) < 0.3, own, torch.randint(meanings, (count, length)))
    vocabulary = torch.bincount(numbers.flatten(), minlength=meanings).argsort(
        descending=True
    )  # the most frequent first
    texts = vocabulary.argsort()[numbers] + 1
    names = [f"word{number:03}" for number in vocabulary.tolist()]
    rows = list(file.values()) if fault == "rows_of_another_vocabulary" else [file[name] for name in names]
    model = WordNet(torch.stack([torch.zeros(32), *rows]), topics)
    optimizer = RMSprop(model.convolutions.parameters(), lr=1e-3)

    with attach(model, optimizer) as probe:
        for step, (text, wanted) in zip(range(280), batches(texts[:1200], topic[:1200], size=48), strict=False):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(text), wanted)
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
            if step % 40 == 39:
                model.eval()
                with probe.evaluating(), torch.no_grad():
                    probe.log(loss=F.cross_entropy(model(texts[1200:]), topic[1200:]))
                model.train()
    model.eval()
    with torch.no_grad():
        return F.cross_entropy(model(texts[1200:]), topic[1200:])


class SeparableBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, momentum: float) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(inputs, inputs, 3, padding=1, groups=inputs, bias=False)
        self.pointwise = nn.Conv2d(inputs, outputs, 1, bias=False)
        self.norm = nn.BatchNorm2d(outputs, 1e-3, momentum)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.residual = nn.Conv2d(inputs, outputs, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.norm(self.pointwise(self.depthwise(F.relu(x))))) + self.residual(x)


@program(
    "keras",
    "Keras's example image_classification_from_scratch: a small Xception, ported to PyTorch",
    Fault("momentum_of_the_other_convention", "normalization", FORUM, ("@*norm*", "mode_of_phase"), since=42),
    Fault(
        "decoupled_decay_given_to_adam",
        "optimizer",
        FORUM,
        ("update_ratio", "parameters_follow_gradients", "tensor_variance", "loss_not_decreasing"),
    ),
)
def separable_images(fault: str = "") -> Tensor:
    images, classes = digits()
    images = (images - 0.3) / 0.37
    loader = DataLoader(TensorDataset(images[:1347], classes[:1347]), 32, shuffle=True)  # the last batch has 3 images
    momentum = 0.95 if fault == "momentum_of_the_other_convention" else 0.05
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16, 1e-3, momentum), SeparableBlock(16, 24, momentum),
        SeparableBlock(24, 40, momentum), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2),
        nn.Linear(40, 10)
    )  # fmt: skip
    kind = Adam if fault == "decoupled_decay_given_to_adam" else AdamW
    optimizer = kind(model.parameters(), lr=3e-3, weight_decay=0.05)

    def loss_of_others() -> Tensor:
        model.eval()
        with torch.no_grad():
            loss = F.cross_entropy(model(images[1347:]), classes[1347:])
        model.train()
        return loss

    with attach(model, optimizer) as probe:
        for _ in range(7):
            for data, wanted in loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(data), wanted)
                loss.backward()
                optimizer.step()
                probe.end_step(loss=loss)
            with probe.evaluating():
                probe.log(loss=loss_of_others())
    return loss_of_others()


def _commands(count: int, length: int = 640) -> tuple[Tensor, Tensor]:
    """Return recordings [count, 1, length] of six words, as loud as the speakers are, and their words."""
    words, time = torch.randint(6, (count,)), torch.linspace(0, 1, length)
    pitch = 8 + 6 * torch.rand(count, 1)
    glide, overtone = (words % 3 - 1)[:, None] * 0.5, (words // 3)[:, None]
    phase = 2 * math.pi * pitch * (time + glide * time**2)
    sound = phase.sin() + torch.where(overtone == 1, (3 * phase).sin(), 0.3 * (2 * phase).sin())
    start = torch.rand(count, 1) * 0.3
    sound = sound * ((time > start) & (time < start + 0.7)) + 0.5 * torch.randn(count, length)
    return (sound * torch.exp(torch.randn(count, 1)))[:, None], words


def _waveform_net(channels: int, dropout: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs, size, stride in (
        (1, channels, 40, 4), (channels, channels, 3, 1), (channels, 2 * channels, 3, 1)
    ):  # fmt: skip
        layers += [nn.Conv1d(inputs, outputs, size, stride), nn.BatchNorm1d(outputs), nn.ReLU(), nn.MaxPool1d(4)]
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(2 * channels, 6)
    )


@program(
    "general",
    "PyTorch tutorials, speech command classification with torchaudio, and knowledge distillation",
    Fault("loudness_scaled_only_in_training", "data", FORUM, ("input_drift", "input_not_normalized"), since=49),
    Fault("teacher_in_training_mode", "mode", FORUM, ("mode_of_phase", "@teacher*")),
)
def small_footprint_commands(fault: str = "") -> Tensor:
    sounds, words = _commands(900)
    scaled = sounds / sounds.std(2, keepdim=True)
    others = sounds[700:] if fault == "loudness_scaled_only_in_training" else scaled[700:]
    teacher, student = _waveform_net(32, 0.5), _waveform_net(8, 0.0)
    pretraining = AdamW(teacher.parameters(), lr=5e-3)
    for _, (data, wanted) in zip(range(70), batches(scaled[:700], words[:700], size=32), strict=False):
        pretraining.zero_grad()
        F.cross_entropy(teacher(data), wanted).backward()
        pretraining.step()
    teacher.requires_grad_(False)
    if fault != "teacher_in_training_mode":
        teacher.eval()
    optimizer = Adam(student.parameters(), lr=1e-2, weight_decay=1e-4)
    scheduler = StepLR(optimizer, 100, 0.3)
    temperature = 2.0

    def loss_of_others() -> Tensor:
        student.eval()
        with torch.no_grad():
            loss = F.cross_entropy(student(others), words[700:])
        student.train()
        return loss

    with attach(nn.ModuleDict({"student": student, "teacher": teacher}), optimizer) as probe:
        for step, (data, wanted) in zip(range(200), batches(scaled[:700], words[:700], size=16), strict=False):
            with torch.no_grad():
                soft = (teacher(data) / temperature).softmax(1)
            logits = student(data)
            loss = temperature**2 * F.kl_div((logits / temperature).log_softmax(1), soft, reduction="batchmean")
            loss = 0.9 * loss + 0.1 * F.cross_entropy(logits, wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            probe.end_step(loss=loss)
            if step % 50 == 49:
                with probe.evaluating():
                    probe.log(loss=loss_of_others())
    return loss_of_others()


GRID, CELL = 6, 4
ANCHORS = torch.tensor([[5.0, 5.0], [9.0, 5.0], [5.0, 9.0]])  # width and height


def _anchors() -> Tensor:
    """Return the anchors [cells * 3, 4] as x, y, width and height."""
    centres = (torch.cartesian_prod(torch.arange(GRID), torch.arange(GRID)).flip(1) + 0.5) * CELL
    return torch.cat([centres.repeat_interleave(3, 0), ANCHORS.repeat(GRID * GRID, 1)], 1)


def _crates(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return images [count, 1, 24, 24] of a crate, its box [count, 4] as x, y, width and height, and its kind."""
    shape = ANCHORS[torch.randint(3, (count,))] * (0.85 + 0.3 * torch.rand(count, 2))
    centre = 5 + 14 * torch.rand(count, 2)
    kinds = torch.randint(2, (count,))
    grid = torch.arange(GRID * CELL) + 0.5
    x, y = ((grid - centre[:, side, None]).abs() for side in (0, 1))
    inside = (x < shape[:, :1] / 2)[:, None] & (y < shape[:, 1:] / 2)[:, :, None]
    stripes = (grid[:, None] + grid) % 4 < 2
    images = inside * torch.where(kinds[:, None, None] == 1, stripes.float(), 0.6)
    noise = 0.15 * torch.randn(count, 1, GRID * CELL, GRID * CELL)
    return images[:, None] + noise, torch.cat([centre, shape], 1), kinds


def _overlaps(anchors: Tensor, boxes: Tensor) -> Tensor:
    """Return the intersections over the unions [boxes, anchors]."""
    low = torch.maximum(anchors[:, :2] - anchors[:, 2:] / 2, (boxes[:, :2] - boxes[:, 2:] / 2)[:, None])
    high = torch.minimum(anchors[:, :2] + anchors[:, 2:] / 2, (boxes[:, :2] + boxes[:, 2:] / 2)[:, None])
    common = (high - low).clamp(min=0).prod(2)
    return common / (anchors[:, 2:].prod(1) + boxes[:, 2:].prod(1)[:, None] - common)


def _focal_loss(logits: Tensor, wanted: Tensor) -> Tensor:
    share = logits.sigmoid()
    miss = wanted * (1 - share) + (1 - wanted) * share
    weight = 0.25 * wanted + 0.75 * (1 - wanted)
    return weight * miss**2 * F.binary_cross_entropy_with_logits(logits, wanted, reduction="none")


@program(
    "general",
    "Lin et al., Focal loss for dense object detection, 2017 (RetinaNet), for crates in noise",
    Fault(
        "sigmoid_before_focal_loss", "loss", ISSUES, ("double_softmax", "wrong_range_of_loss", "wrong_loss", "@kinds*")
    ),
)
def anchored_crates(fault: str = "") -> Tensor:
    images, boxes, kinds = _crates(1000)
    anchors = _anchors()
    overlaps = _overlaps(anchors, boxes)
    is_best = overlaps == overlaps.amax(1, keepdim=True)
    is_object, is_judged = is_best | (overlaps > 0.5), is_best | (overlaps > 0.5) | (overlaps < 0.4)
    shifts = torch.cat(
        [(boxes[:, None, :2] - anchors[:, :2]) / anchors[:, 2:], (boxes[:, None, 2:] / anchors[:, 2:]).log()], 2
    )
    layers: list[nn.Module] = []
    for inputs, outputs, stride in ((1, 16, 2), (16, 32, 2), (32, 32, 1)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride, 1), nn.GroupNorm(4, outputs), nn.ReLU()]
    model = nn.ModuleDict({
        "body": nn.Sequential(*layers),
        "kinds": nn.Sequential(nn.Conv2d(32, 32, 3, 1, 1), nn.ReLU(), nn.Conv2d(32, 6, 1)),
        "boxes": nn.Sequential(nn.Conv2d(32, 32, 3, 1, 1), nn.ReLU(), nn.Conv2d(32, 12, 1)),
    })  # fmt: skip
    nn.init.constant_(model["kinds"][2].bias, -math.log(99))
    optimizer = SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    scheduler = LambdaLR(optimizer, lambda step: min((step + 1) / 20, 1.0) * (0.1 if step > 210 else 1.0))

    def loss_of(rows: Tensor, is_probability: bool = False) -> Tensor:
        features = model["body"](images[rows])
        scores, moves = (
            model[name](features).movedim(1, 3).reshape(len(rows), len(anchors), size)
            for name, size in (("kinds", 2), ("boxes", 4))
        )
        wanted = F.one_hot(kinds[rows], 2)[:, None] * is_object[rows][..., None].float()
        loss = _focal_loss(scores.sigmoid() if is_probability else scores, wanted)
        box = F.smooth_l1_loss(moves[is_object[rows]], shifts[rows][is_object[rows]], beta=0.1)
        return (loss * is_judged[rows][..., None]).sum() / is_object[rows].sum() + box

    with attach(model, optimizer) as probe:
        for _, (rows,) in zip(range(260), batches(torch.arange(850), size=16), strict=False):
            optimizer.zero_grad()
            loss = loss_of(rows, fault == "sigmoid_before_focal_loss")
            loss.backward()
            optimizer.step()
            scheduler.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        return loss_of(torch.arange(850, 1000))


class ReverseGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.factor * gradient, None


class Reversal(nn.Module):
    factor = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return ReverseGradient.apply(x, self.factor)


@program(
    "general",
    "Ganin and Lempitsky, Unsupervised domain adaptation by backpropagation, 2015, for digits on other grounds",
    Fault("gradient_not_reversed", "gradients", FORUM, ("wrong_loss", "@domain*"), since=1),
)
def domain_adversarial(fault: str = "") -> Tensor:
    images, classes = digits()
    order = torch.randperm(len(images))
    images, classes = images[order], classes[order]
    ground = F.interpolate(torch.rand(len(images), 1, 3, 3), 8, mode="bilinear")
    moved = 0.6 * images + 0.6 * ground
    model = nn.ModuleDict({
        "features": nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 48), nn.ReLU()
        ),
        "digit": nn.Linear(48, 10),
        "domain": nn.Sequential(Reversal(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 1)),
    })  # fmt: skip
    optimizer = SGD(model.parameters(), lr=0.012, momentum=0.9)
    sign = 1 if fault == "gradient_not_reversed" else -1
    sources, targets = batches(images[:900], classes[:900], size=32), batches(moved[900:1500], size=32)
    with attach(model, optimizer) as probe:
        for step in range(280):
            (data, wanted), (other,) = next(sources), next(targets)
            model["domain"][0].factor = sign * 0.3 * (2 / (1 + math.exp(-10 * step / 280)) - 1)
            features = model["features"](torch.cat([data, other]))
            is_source = (torch.arange(64) < 32).float()
            of_domain = F.binary_cross_entropy_with_logits(model["domain"](features).squeeze(1), is_source)
            loss = F.cross_entropy(model["digit"](features[:32]), wanted) + of_domain
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        return F.cross_entropy(model["digit"](model["features"](moved[1500:])), classes[1500:])


class ConditionalVae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(74, 128), nn.ReLU(), nn.Linear(128, 16))
        self.decoder = nn.Sequential(nn.Linear(18, 128), nn.ReLU(), nn.Linear(128, 64))

    def forward(self, pixels: Tensor, digit: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(torch.cat([pixels, digit], 1)).chunk(2, 1)
        code = mean + (log_variance / 2).exp() * torch.randn_like(mean)
        return self.decoder(torch.cat([code, digit], 1)), mean, log_variance


@program(
    "general",
    "Sohn et al., Learning structured output representation using deep conditional generative models, 2015",
    Fault("mean_of_pixels_with_sum_of_divergence", "loss", FORUM, ("wrong_loss", "loss_scale", "@encoder*")),
)
def conditional_vae(fault: str = "") -> Tensor:
    images, classes = digits()
    pixels, labels = images.flatten(1), F.one_hot(classes).float()
    model = ConditionalVae()
    optimizer = RAdam(model.parameters(), lr=4e-3)

    def loss_of(data: Tensor, digit: Tensor, is_mean: bool = False) -> Tensor:
        logits, mean, log_variance = model(data, digit)
        errors = (logits.sigmoid() - data) ** 2 / (2 * 0.2**2)
        errors = errors.mean(1) if is_mean else errors.sum(1)
        divergence = (mean**2 + log_variance.exp() - 1 - log_variance).sum(1) / 2
        return (errors + divergence).mean()

    with attach(model, optimizer) as probe:
        for _, (data, digit) in zip(range(300), batches(pixels[:1500], labels[:1500], size=64), strict=False):
            optimizer.zero_grad()
            loss = loss_of(data, digit, fault == "mean_of_pixels_with_sum_of_divergence")
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        return loss_of(pixels[1500:], labels[1500:])


class SentenceEncoder(nn.Module):
    def __init__(self, fault: str, size: int = 32) -> None:
        super().__init__()
        self.fault = fault
        self.words = nn.Embedding(VOCABULARY, size, padding_idx=PAD)
        self.lstm = nn.LSTM(size, size, batch_first=True, bidirectional=True)
        self.output = nn.Linear(2 * size, 24)

    def forward(self, ids: Tensor) -> Tensor:
        states = self.lstm(self.words(ids))[1][0]  # [directions, sentences, size]
        if self.fault == "states_viewed_instead_of_transposed":
            return self.output(states.view(len(ids), -1))
        return self.output(states.transpose(0, 1).flatten(1))


@program(
    "general",
    "Mueller and Thyagarajan, Siamese recurrent architectures for learning sentence similarity, 2016, with cosines",
    Fault(
        "states_viewed_instead_of_transposed",
        "tensor layout",
        FORUM,
        ("@output", "samples_vary", "labels_of_other_positions", "loss_not_decreasing"),
    ),
    Fault("zero_for_unlike_pairs", "labels", ISLAM, ("wrong_range_of_loss", "missing_labels_in_loss", "wrong_loss")),
)
def similar_sentences(fault: str = "") -> Tensor:
    ids = padded(1400)
    nouns = torch.tensor(tokens(KINDS["n"].split()))
    is_noun = torch.isin(ids, nouns)
    subjects = ids.gather(1, is_noun.float().argmax(1, keepdim=True)).squeeze(1)
    is_misread = (torch.rand(ids.shape) < 0.1) & (ids != PAD)
    ids = torch.where(is_misread, torch.randint(2, VOCABULARY, ids.shape), ids)

    def pairs_of(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return pairs of sentences, of which half have the same subject, and 1 for these and -1 for the others."""
        is_same = torch.rand(len(rows)) < 0.5
        fits = (subjects[rows][:, None] == subjects[rows]) == is_same[:, None]
        fits &= ~torch.eye(len(rows), dtype=torch.bool)
        partner = rows[torch.multinomial(fits.float() + 1e-6, 1).squeeze(1)]
        return ids[rows], ids[partner], torch.where(subjects[rows] == subjects[partner], 1, -1)

    model = SentenceEncoder(fault)
    optimizer = Adam(model.parameters(), lr=3e-3)
    scheduler = OneCycleLR(optimizer, max_lr=1e-2, total_steps=240)
    with attach(model, optimizer) as probe:
        for _, (rows,) in zip(range(240), batches(torch.arange(1200), size=48), strict=False):
            first, second, target = pairs_of(rows)
            if fault == "zero_for_unlike_pairs":
                target = target.clamp(min=0)
            loss = F.cosine_embedding_loss(model(first), model(second), target, margin=0.2)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        first, second, target = pairs_of(torch.arange(1200, 1400))
        return F.cosine_embedding_loss(model(first), model(second), target, margin=0.2)


class Patches(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return F.unfold(images, 2, stride=2).transpose(1, 2)


class SpatialGating(nn.Module):
    def __init__(self, size: int, positions: int) -> None:
        super().__init__()
        self.norm, self.inner, self.gate_norm = nn.LayerNorm(size), nn.Linear(size, 4 * size), nn.LayerNorm(2 * size)
        self.mix, self.outer = nn.Conv1d(positions, positions, 1), nn.Linear(2 * size, size)
        nn.init.normal_(self.mix.weight, std=1e-3)
        nn.init.ones_(self.mix.bias)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = F.gelu(self.inner(self.norm(x))).chunk(2, dim=-1)
        return x + self.outer(value * self.mix(self.gate_norm(gate)))


@program("general", "Liu et al., Pay attention to MLPs, 2021, for patches of digits")
def gated_patches(fault: str = "") -> Tensor:  # noqa: ARG001
    train_data, test_data = normalized_digits()
    model = nn.Sequential(
        Patches(), nn.Linear(4, 32),
        *(SpatialGating(32, 16) for _ in range(3)), nn.LayerNorm(32), nn.Flatten(), nn.Linear(512, 10)
    )  # fmt: skip
    optimizer = AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    scheduler = CosineAnnealingLR(optimizer, 250)
    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(250), batches(*train_data.tensors, size=48), strict=False):
            loss = F.cross_entropy(model(data), wanted, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            probe.end_step(loss=loss)
    images, classes = test_data.tensors
    with torch.no_grad():
        return F.cross_entropy(model(images), classes)
