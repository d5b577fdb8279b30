"""Programs of the collection `second` with errors of pipelines that raise no exception.

The causes were written before any measurement: they are the rules that would name what is wrong, also those that do not exist yet.
"""

from __future__ import annotations

import copy
import io
import math

import torch
import torch.distributed as dist
from data import batches, digits, normalized_digits, shapes
from healthy import small_resnet
from registry import Fault, attach, in_two_processes, program
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR

TRAINCHECK = "Jiang et al., Training with confidence: catching silent errors in deep learning training, 2025"
RECIPE = "Karpathy, A recipe for training neural networks, 2019"
TAXONOMY = "Humbatova et al., Taxonomy of real faults in deep learning systems, 2020"
FORUM = "Questions at discuss.pytorch.org and Stack Overflow on trainings that do not improve, 2024"


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1 = self.block(3, 8)
        self.down2 = self.block(8, 16)
        self.middle = self.block(16, 32)
        self.up2 = nn.ConvTranspose2d(32, 16, 2, 2)
        self.merge2 = self.block(32, 16)
        self.up1 = nn.ConvTranspose2d(16, 8, 2, 2)
        self.merge1 = self.block(16, 8)
        self.out = nn.Conv2d(8, 1, 1)
        self.pool = nn.MaxPool2d(2)

    @staticmethod
    def block(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(self.pool(first))
        x = self.up2(self.middle(self.pool(second)))
        x = self.up1(self.merge2(torch.cat([second, x], 1)))
        return self.out(self.merge1(torch.cat([first, x], 1)))


def masked_discs(count: int, size: int = 16) -> tuple[Tensor, Tensor]:
    """Return images with a disc each, uint8 [count, 3, size, size], and the masks of the discs, float32 [count, 1, size, size]."""
    grid = torch.linspace(0, 1, size)
    centre, radius = torch.rand(count, 2, 1, 1) * 0.7 + 0.15, torch.rand(count, 1, 1) * 0.15 + 0.12
    mask = ((grid - centre[:, 0]) ** 2 + (grid[:, None] - centre[:, 1]) ** 2 < radius**2).float()[:, None]
    images = mask * torch.rand(count, 3, 1, 1) + (1 - mask) * torch.rand(count, 3, 1, 1)
    return ((images + 0.1 * torch.randn_like(images)).clamp(0, 1) * 255).to(torch.uint8), mask


@program(
    "silent errors",
    "Ronneberger et al., U-Net: convolutional networks for biomedical image segmentation, 2015",
    Fault("mask_not_flipped", "labels", TAXONOMY, ("labels_shifted", "loss_not_decreasing")),
    Fault(
        "pixels_divided_as_integers",
        "data",
        FORUM,
        ("input_not_normalized", "samples_vary", "all_zero@down1*", "@down1*"),
    ),
)
def segmentation(fault: str = "") -> Tensor:
    images, masks = masked_discs(500)
    images = images // 255 if fault == "pixels_divided_as_integers" else images / 255
    images = (images - 0.5) / 0.25
    model = UNet()
    optimizer = RMSprop(model.parameters(), lr=2e-3, momentum=0.5)

    def loss_of(data: Tensor, wanted: Tensor) -> Tensor:
        logits = model(data)
        share = logits.sigmoid()
        overlap = (2 * (share * wanted).sum((1, 2, 3)) + 1) / (share.sum((1, 2, 3)) + wanted.sum((1, 2, 3)) + 1)
        return F.binary_cross_entropy_with_logits(logits, wanted) + (1 - overlap).mean()

    model.train()
    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(120), batches(images[:400], masks[:400], size=16), strict=False):
            flipped = bool(torch.rand(()) < 0.5)
            mask = wanted.flip(3) if flipped and fault != "mask_not_flipped" else wanted
            loss = loss_of(data.flip(3) if flipped else data, mask)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    model.eval()
    with torch.no_grad():
        return loss_of(images[400:], masks[400:])


@torch.no_grad()
def linear_probe(features: Tensor, classes: Tensor) -> Tensor:
    """Return the squared error of a ridge regression of the classes; the second half of the rows is for the evaluation."""
    features = torch.cat([features, torch.ones(len(features), 1)], 1).double()
    wanted = F.one_hot(classes).double()
    half = len(features) // 2
    gram = features[:half].t() @ features[:half] + 1e-2 * torch.eye(features.shape[1], dtype=torch.float64)
    weights = torch.linalg.solve(gram, features[:half].t() @ wanted[:half])
    return F.mse_loss(features[half:] @ weights, wanted[half:])


@program(
    "silent errors",
    "Grill et al., Bootstrap your own latent: a new approach to self-supervised learning, 2020",
    Fault("target_network_not_copied", "references", FORUM, ("tied_weights", "@target*")),
    Fault("both_views_equal", "data", TRAINCHECK, ("distinct_data", "samples_vary")),
)
def bootstrapped_latents(fault: str = "") -> Tensor:
    images, kinds = shapes(500, 16)
    images = images - 0.5
    online = nn.Sequential(*list(small_resnet())[:-1], nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU())
    online.append(nn.Linear(32, 16))
    target = online if fault == "target_network_not_copied" else copy.deepcopy(online)
    predictor = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
    networks = nn.ModuleDict({"online": online, "predictor": predictor, "target": target})
    optimizer = AdamW([*online.parameters(), *predictor.parameters()], lr=2e-3)

    def augment(batch: Tensor) -> Tensor:
        batch = batch * (0.6 + 0.8 * torch.rand(len(batch), 3, 1, 1)) + 0.05 * torch.randn_like(batch)
        return batch.roll(tuple(torch.randint(-3, 4, (2,)).tolist()), (2, 3))

    with attach(networks, optimizer) as probe:
        for _, (batch,) in zip(range(100), batches(images, size=32), strict=False):
            first = augment(batch)
            second = first if fault == "both_views_equal" else augment(batch)
            with torch.no_grad():
                wanted = target(second)
            loss = 2 - 2 * F.cosine_similarity(predictor(online(first)), wanted).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
                    slow.copy_(0.95 * slow + 0.05 * fast)
            probe.end_step(loss=loss)
    online.eval()
    with torch.no_grad():
        return linear_probe(online[:-4](images), kinds)


@program(
    "silent errors",
    "Miyato et al., Spectral normalization for generative adversarial networks, 2018, with the hinge loss",
    Fault(
        "samples_detached_for_the_generator",
        "graph",
        FORUM,
        ("unchanged_parameter@generator*", "parameters_follow_gradients@generator*", "all_zero@generator*"),
    ),
    Fault("noise_drawn_once", "data", FORUM, ("samples_vary", "distinct_data"), since=1),
)
def hinge_adversary(fault: str = "") -> None:
    images, _ = digits()
    generator = nn.Sequential(
        nn.Linear(16, 128), nn.Unflatten(1, (32, 2, 2)), nn.BatchNorm2d(32), nn.ReLU(), nn.Upsample(scale_factor=2),
        nn.Conv2d(32, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Upsample(scale_factor=2),
        nn.Conv2d(16, 1, 3, padding=1), nn.Tanh()
    )  # fmt: skip
    discriminator = nn.Sequential(
        spectral_norm(nn.Conv2d(1, 16, 3, padding=1)), nn.LeakyReLU(0.1), spectral_norm(nn.Conv2d(16, 32, 4, 2, 1)),
        nn.LeakyReLU(0.1), nn.Flatten(), spectral_norm(nn.Linear(512, 1))
    )  # fmt: skip
    optimizer_d = Adam(discriminator.parameters(), lr=1e-3, betas=(0.0, 0.9))
    optimizer_g = Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.9))
    networks = nn.ModuleDict({"generator": generator, "discriminator": discriminator})
    noise = torch.randn(32, 16)
    with attach(networks, [optimizer_d, optimizer_g]) as probe:
        for _, (real,) in zip(range(120), batches(images * 2 - 1, size=32), strict=False):
            if fault != "noise_drawn_once":
                noise = torch.randn(32, 16)
            fake = generator(noise)
            loss = F.relu(1 - discriminator(real)).mean() + F.relu(1 + discriminator(fake.detach())).mean()
            optimizer_d.zero_grad()
            loss.backward()
            optimizer_d.step()
            if fault == "samples_detached_for_the_generator":
                fake = fake.detach()
            optimizer_g.zero_grad()
            (-discriminator(fake).mean()).backward()
            optimizer_g.step()
            probe.end_step(loss=loss)


@program(
    "silent errors",
    "Lightning's guide on checkpoints, in plain PyTorch: a training that is resumed after 100 steps",
    Fault("scheduler_state_not_loaded", "loading", TRAINCHECK, ("rate_in_effect",)),
    Fault("normalization_buffers_not_loaded", "loading", TRAINCHECK, ("weights_loaded",)),
)
def resumed_training(fault: str = "") -> Tensor:
    train_data, test_data = normalized_digits()

    def build() -> tuple[nn.Sequential, SGD, CosineAnnealingLR]:
        model = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16, momentum=0.01), nn.ReLU(), nn.Conv2d(16, 16, 3, 2, 1),
            nn.BatchNorm2d(16, momentum=0.01), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10)
        )  # fmt: skip
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
        return model, optimizer, CosineAnnealingLR(optimizer, 200)

    def step_of(data: Tensor, wanted: Tensor) -> Tensor:
        loss = F.cross_entropy(model(data), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.detach()

    model, optimizer, scheduler = build()
    loader = batches(*train_data.tensors, size=32)
    for _ in range(100):
        step_of(*next(loader))
    file = io.BytesIO()
    states = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    torch.save({name: part.state_dict() for name, part in states.items()}, file)
    file.seek(0)
    checkpoint = torch.load(file)
    model, optimizer, scheduler = build()
    weights = checkpoint["model"]
    if fault == "normalization_buffers_not_loaded":  # only the parameters were written
        weights = {name: weights[name] for name, _ in model.named_parameters()}
    model.load_state_dict(weights, strict=False)
    optimizer.load_state_dict(checkpoint["optimizer"])
    if fault != "scheduler_state_not_loaded":
        scheduler.load_state_dict(checkpoint["scheduler"])
    with attach(model, optimizer) as probe:
        for _ in range(100):
            probe.end_step(loss=step_of(*next(loader)))
    model.eval()
    images, target = test_data.tensors
    with torch.no_grad():
        return F.cross_entropy(model(images), target)


class TwoTowers(nn.Module):
    def __init__(self, in_list: bool, size: int = 16) -> None:
        super().__init__()
        self.users = nn.Embedding(60, size)
        self.items = nn.Embedding(40, size)
        towers = [nn.Sequential(nn.Linear(size, 32), nn.ReLU(), nn.Linear(32, size)) for _ in range(2)]
        self.towers = towers if in_list else nn.ModuleList(towers)
        self.bias = nn.Parameter(torch.zeros(()))
        for embedding in (self.users, self.items):
            nn.init.normal_(embedding.weight, std=0.1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        return (self.towers[0](self.users(users)) * self.towers[1](self.items(items))).sum(1) + self.bias


@program(
    "silent errors",
    "Covington et al., Deep neural networks for YouTube recommendations, 2016, as two towers",
    Fault(
        "layers_in_python_list",
        "registration",
        FORUM,
        ("unchanged_parameter", "parameters_follow_gradients", "loss_not_decreasing"),
    ),
    Fault("item_ids_hashed_together", "data", TAXONOMY, ("@items", "samples_vary")),
)
def two_towers(fault: str = "") -> Tensor:
    tastes, topics = torch.randn(60, 4), torch.randn(40, 4)
    users, items = torch.cartesian_prod(torch.arange(60), torch.arange(40)).unbind(1)
    order = torch.randperm(2400)
    users, items = users[order], items[order]
    liked = ((tastes[users] * topics[items]).sum(1) > 0).float()
    if fault == "item_ids_hashed_together":
        items = items % 4
    model = TwoTowers(fault == "layers_in_python_list")
    optimizer = Adagrad(model.parameters(), lr=0.05)
    rows = [tensor[:2000] for tensor in (users, items, liked)]
    with attach(model, optimizer) as probe:
        for _, (user, item, wanted) in zip(range(200), batches(*rows, size=64), strict=False):
            loss = F.binary_cross_entropy_with_logits(model(user, item), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        return F.binary_cross_entropy_with_logits(model(users[2000:], items[2000:]), liked[2000:])


class SpeechReader(nn.Module):
    def __init__(self, mixed: bool) -> None:
        super().__init__()
        self.mixed = mixed
        self.conv = nn.Conv1d(8, 32, 3, padding=1)
        self.gru = nn.GRU(32, 24, batch_first=True, bidirectional=True)
        self.head = nn.Linear(48, 6)

    def forward(self, sound: Tensor) -> Tensor:
        output = self.head(self.gru(F.relu(self.conv(sound)).transpose(1, 2))[0]).log_softmax(-1)
        count, time, letters = output.shape
        return output.reshape(time, count, letters) if self.mixed else output.transpose(0, 1)


@program(
    "silent errors",
    "torchaudio, speech recognition with the CTC loss",
    Fault("reshaped_instead_of_transposed", "tensor layout", RECIPE, ("labels_shifted", "loss_not_decreasing")),
    Fault("blank_is_a_letter", "loss", FORUM, ("wrong_loss", "labels_shifted")),
)
def speech_with_ctc(fault: str = "") -> Tensor:
    sounds = torch.randn(5, 8)
    spoken = torch.randint(5, (400, 4))
    durations = torch.randint(2, 5, (400, 4))
    frames = torch.zeros(400, 18, 8)
    for frame, letters, duration in zip(frames, spoken, durations, strict=True):
        frame[1 : 1 + int(duration.sum())] = sounds[letters].repeat_interleave(duration, 0)
    frames = (frames + 0.3 * torch.randn_like(frames)).transpose(1, 2)
    model = SpeechReader(fault == "reshaped_instead_of_transposed")
    optimizer = Adam(model.parameters(), lr=5e-3)
    blank = 4 if fault == "blank_is_a_letter" else 5

    def loss_of(sound: Tensor, letters: Tensor, blank: int) -> Tensor:
        output = model(sound)
        lengths = torch.full((len(sound),), len(output)), torch.full((len(sound),), 4)
        return F.ctc_loss(output, letters, *lengths, blank=blank, zero_infinity=True)

    with attach(model, optimizer) as probe:
        for _, (sound, letters) in zip(range(120), batches(frames[:336], spoken[:336], size=16), strict=False):
            loss = loss_of(sound, letters, blank)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            probe.end_step(loss=loss)
    model.mixed = False
    with torch.no_grad():
        return loss_of(frames[336:], spoken[336:], 5)


def _clipping_replica(rank: int, fault: str) -> None:
    images, classes = (tensor[rank::2] for tensor in normalized_digits()[0].tensors)
    model = nn.Sequential(nn.Flatten(), nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))
    torch.manual_seed(torch.initial_seed() + rank)  # until here, both ranks have the same state
    optimizer = AdamW(model.parameters(), lr=3e-3)
    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(100), batches(images, classes, size=32), strict=False):
            loss = F.cross_entropy(model(data), wanted)
            optimizer.zero_grad()
            loss.backward()
            flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
            dist.all_reduce(flat)
            flat /= 2
            if rank == 0 or fault != "clipped_on_one_rank":
                flat *= min(1.0, 0.3 / float(flat.norm()))
            sizes = [parameter.numel() for parameter in model.parameters()]
            for parameter, gradient in zip(model.parameters(), flat.split(sizes), strict=True):
                parameter.grad.copy_(gradient.view_as(parameter))
            optimizer.step()
            probe.end_step(loss=loss)


@program(
    "silent errors",
    "Megatron-LM, gradients of all replicas that are reduced and clipped in one flat buffer",
    Fault("clipped_on_one_rank", "replicas", TRAINCHECK, ("replicas_equal",)),
)
def flat_gradients(fault: str = "") -> None:
    in_two_processes(_clipping_replica, fault)


@program(
    "silent errors",
    "Foret et al., Sharpness-aware minimization for efficiently improving generalization, 2021",
    Fault("weights_left_perturbed", "optimizer", TAXONOMY, ("parameters_follow_gradients", "update_ratio")),
    Fault("first_gradient_not_zeroed", "gradients", TRAINCHECK, ("gradients_zeroed",)),
)
def sharpness_aware(fault: str = "") -> Tensor:
    train_data, test_data = normalized_digits()
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.GroupNorm(3, 12), nn.SiLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(192, 48),
        nn.SiLU(), nn.Linear(48, 10)
    )  # fmt: skip
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(140), batches(*train_data.tensors, size=32), strict=False):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), wanted)
            loss.backward()
            with torch.no_grad():
                scale = 0.05 / (torch.stack([p.grad.norm() for p in model.parameters()]).norm() + 1e-12)
                moves = [p.grad * scale for p in model.parameters()]
                for parameter, move in zip(model.parameters(), moves, strict=True):
                    parameter.add_(move)
            if fault != "first_gradient_not_zeroed":
                optimizer.zero_grad()
            F.cross_entropy(model(data), wanted).backward()
            if fault != "weights_left_perturbed":
                with torch.no_grad():
                    for parameter, move in zip(model.parameters(), moves, strict=True):
                        parameter.sub_(move)
            optimizer.step()
            probe.end_step(loss=loss)
    images, target = test_data.tensors
    with torch.no_grad():
        return F.cross_entropy(model(images), target)


@program(
    "silent errors",
    "Newell et al., Stacked hourglass networks for human pose estimation, 2016, with two points",
    Fault(
        "loss_made_into_a_new_tensor",
        "graph",
        FORUM,
        ("unchanged_parameter", "parameters_follow_gradients", "loss_not_decreasing"),
    ),
    Fault(
        "zeroed_after_backward",
        "gradients",
        FORUM,
        ("gradients_zeroed", "unchanged_parameter", "parameters_follow_gradients", "all_zero", "loss_not_decreasing"),
    ),
)
def key_points(fault: str = "") -> None:
    points = torch.rand(400, 2, 2) * 0.8 + 0.1
    grid = torch.linspace(0, 1, 16)
    distance = (grid - points[..., :1, None]) ** 2 + (grid[:, None] - points[..., 1:, None]) ** 2
    heat = torch.exp(-distance / (2 * 0.08**2))
    images = heat[:, :1] * torch.sin(8 * math.pi * grid) - heat[:, 1:] + 0.1 * torch.randn(400, 1, 16, 16)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2), nn.BatchNorm2d(16), nn.PReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 24, 3, padding=1),
        nn.BatchNorm2d(24), nn.PReLU(), nn.Upsample(scale_factor=2), nn.Conv2d(24, 2, 3, padding=1)
    )  # fmt: skip
    optimizer = Adam(model.parameters(), lr=3e-3)
    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(120), batches(images, heat, size=16), strict=False):
            optimizer.zero_grad()
            loss = F.mse_loss(model(data), wanted)
            if fault == "loss_made_into_a_new_tensor":
                loss = torch.tensor(loss.item(), requires_grad=True)
            loss.backward()
            if fault == "zeroed_after_backward":
                optimizer.zero_grad()
            optimizer.step()
            probe.end_step(loss=loss)
