"""Healthy programs of the collection `second`, after published ones, in small."""

from __future__ import annotations

import math

import torch
from data import batches, digits, normalized_digits
from registry import attach, program
from sklearn.datasets import load_breast_cancer, make_moons
from timm.models.convnext import ConvNeXt
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.optim import LBFGS, SGD, Adam, AdamW, NAdam
from torch.optim.lr_scheduler import ExponentialLR, LinearLR, PolynomialLR, ReduceLROnPlateau


@program("healthy", "Finn et al., Model-agnostic meta-learning for fast adaptation of deep networks, 2017")
def meta_learning() -> None:
    model = nn.Sequential(nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1))
    optimizer = Adam(model.parameters(), lr=3e-3)
    with attach(model, optimizer) as probe:
        for _ in range(150):
            meta_loss = torch.zeros(())
            for _ in range(4):  # each task is a sine wave
                height, phase = 0.5 + 2 * torch.rand(()), math.pi * torch.rand(())
                x = torch.rand(20, 1) * 10 - 5
                y = height * torch.sin(x + phase)
                weights = dict(model.named_parameters())
                inner = F.mse_loss(functional_call(model, weights, (x[:10],)), y[:10])
                gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
                adapted = {name: w - 0.02 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
                meta_loss = meta_loss + F.mse_loss(functional_call(model, adapted, (x[10:],)), y[10:]) / 4
            optimizer.zero_grad()
            meta_loss.backward()
            optimizer.step()
            probe.end_step(loss=meta_loss)


class Chomp(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :, : -self.size]


class TemporalBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, dilation: int) -> None:
        super().__init__()
        padding = 2 * dilation
        self.conv1 = weight_norm(nn.Conv1d(inputs, outputs, 3, padding=padding, dilation=dilation))
        self.conv2 = weight_norm(nn.Conv1d(outputs, outputs, 3, padding=padding, dilation=dilation))
        self.chomp = Chomp(padding)
        self.dropout = nn.Dropout(0.05)
        self.downsample = nn.Conv1d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out = self.dropout(torch.relu(self.chomp(self.conv1(x))))
        out = self.dropout(torch.relu(self.chomp(self.conv2(out))))
        return torch.relu(out + self.downsample(x))


@program("healthy", "Bai et al., An empirical evaluation of generic convolutional and recurrent networks, 2018")
def dilated_convolutions() -> None:
    body = nn.Sequential(TemporalBlock(2, 16, 1), TemporalBlock(16, 16, 2), TemporalBlock(16, 16, 4))
    model = nn.ModuleDict({"tcn": body, "linear": nn.Linear(16, 1)})
    optimizer = Adam(model.parameters(), lr=1e-2)
    with attach(model, optimizer) as probe:
        for _ in range(200):  # the problem of addition: the sum of the two marked numbers of a sequence
            numbers, marks = torch.rand(32, 12), torch.zeros(32, 12)
            marked = torch.rand(32, 12).topk(2, dim=1).indices
            marks.scatter_(1, marked, 1.0)
            wanted = numbers.gather(1, marked).sum(1)
            loss = F.mse_loss(model["linear"](model["tcn"](torch.stack([numbers, marks], 1))[:, :, -1])[:, 0], wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)


class PointNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(3, 32, 1)
        self.bn1 = nn.BatchNorm1d(32)
        self.conv2 = nn.Conv1d(32, 64, 1)
        self.bn2 = nn.BatchNorm1d(64)
        self.fc1 = nn.Linear(64, 32)
        self.dropout = nn.Dropout(0.3)
        self.fc2 = nn.Linear(32, 3)

    def forward(self, points: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(points)))
        x = self.bn2(self.conv2(x)).amax(2)
        return F.log_softmax(self.fc2(self.dropout(F.relu(self.fc1(x)))), dim=1)


def point_clouds(count: int) -> tuple[Tensor, Tensor]:
    """Return noisy points of spheres, cubes and rings, float32 [count, 3, 64], and their kinds."""
    kinds = torch.randint(3, (count,))
    raw = torch.randn(count, 3, 64)
    sphere, cube = raw / raw.norm(dim=1, keepdim=True), raw / raw.abs().amax(1, keepdim=True)
    ring = torch.cat([raw[:, :2] / raw[:, :2].norm(dim=1, keepdim=True), 0.2 * raw[:, 2:]], 1)
    points = torch.stack([sphere, cube, ring])[kinds, torch.arange(count)]
    return points * (0.7 + 0.6 * torch.rand(count, 1, 1)) + 0.05 * torch.randn_like(points), kinds


@program("healthy", "Qi et al., PointNet: deep learning on point sets for classification and segmentation, 2017")
def point_network() -> None:
    points, kinds = point_clouds(800)
    model = PointNet()
    optimizer = NAdam(model.parameters(), lr=2e-3)
    scheduler = ExponentialLR(optimizer, 0.995)
    with attach(model, optimizer) as probe:
        for _, (batch, wanted) in zip(range(200), batches(points, kinds, size=32), strict=False):
            optimizer.zero_grad(set_to_none=False)
            loss = F.nll_loss(model(batch), wanted)
            loss.backward()
            optimizer.step()
            scheduler.step()
            probe.end_step(loss=loss)


@program("healthy", "timm, train.py, with a small ConvNeXt, stochastic depth and label smoothing")
def convnext_digits() -> None:
    images, classes = digits()
    images = F.interpolate((images - 0.3) / 0.37, 16)
    sizes = {"patch_size": 1, "depths": (1, 1, 1, 1), "dims": (12, 16, 24, 32)}
    model = ConvNeXt(in_chans=1, num_classes=10, drop_path_rate=0.1, **sizes)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=4e-3, weight_decay=0.05)
    scheduler = PolynomialLR(optimizer, 100, power=0.9)
    model.train()
    with attach(model, optimizer) as probe:
        for step, (batch, wanted) in zip(range(100), batches(images[:1400], classes[:1400], size=32), strict=False):
            loss = F.cross_entropy(model(batch), wanted, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            scheduler.step()
            probe.end_step(loss=loss)
            if step % 50 == 49:
                model.eval()
                with probe.evaluating(), torch.inference_mode():
                    probe.log(loss=F.cross_entropy(model(images[1400:]), classes[1400:]))
                model.train()


class MixerBlock(nn.Module):
    def __init__(self, patches: int, size: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.tokens = nn.Sequential(nn.Linear(patches, 32), nn.GELU(), nn.Linear(32, patches))
        self.channels = nn.Sequential(nn.Linear(size, 64), nn.GELU(), nn.Linear(64, size))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


@program("healthy", "Tolstikhin et al., MLP-Mixer: an all-MLP architecture for vision, 2021, in bfloat16")
def mixer() -> None:
    train_data, _ = normalized_digits()
    patches = nn.Conv2d(1, 32, 2, 2)
    blocks = nn.Sequential(MixerBlock(16, 32), MixerBlock(16, 32), nn.LayerNorm(32))
    model = nn.ModuleDict({"patches": patches, "blocks": blocks, "head": nn.Linear(32, 10)})
    nn.init.zeros_(model["head"].weight)
    optimizer = AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    scheduler = LinearLR(optimizer, 0.1, 1.0, total_iters=20)
    with attach(model, optimizer) as probe:
        for _, (batch, wanted) in zip(range(150), batches(*train_data.tensors, size=64), strict=False):
            with torch.autocast("cpu", torch.bfloat16):
                hidden = blocks(patches(batch).flatten(2).transpose(1, 2)).mean(1)
                loss = F.cross_entropy(model["head"](hidden), wanted)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            probe.end_step(loss=loss)


class Perceiver(nn.Module):
    def __init__(self, size: int = 32) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(8, size) * 0.02)
        self.inputs = nn.Linear(1 + 16, size)
        self.cross = nn.MultiheadAttention(size, 1, batch_first=True)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(size) for _ in range(3))
        self.self_attention = nn.MultiheadAttention(size, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(size, 64), nn.GELU(), nn.Linear(64, size))
        self.head = nn.Linear(size, 10)
        angles = torch.arange(64)[:, None] % torch.tensor([8, 64]) / torch.tensor([8, 64]) * math.pi
        waves = [f(angles * 2.0**octave) for octave in range(4) for f in (torch.sin, torch.cos)]
        self.register_buffer("positions", torch.cat(waves, 1))

    def forward(self, images: Tensor) -> Tensor:
        pixels = torch.cat([images.flatten(1)[..., None], self.positions.expand(len(images), -1, -1)], 2)
        x = self.latents.expand(len(images), -1, -1)
        inputs = self.inputs(pixels)
        x = x + self.cross(self.norm1(x), inputs, inputs)[0]
        hidden = self.norm2(x)
        x = x + self.self_attention(hidden, hidden, hidden, need_weights=False)[0]
        x = x + self.mlp(self.norm3(x))
        return self.head(x.mean(1))


@program("healthy", "Jaegle et al., Perceiver: general perception with iterative attention, 2021")
def latent_attention() -> None:
    train_data, _ = normalized_digits()
    model = Perceiver()
    optimizer = Adam(model.parameters(), lr=4e-3)
    with attach(model, optimizer) as probe:
        for _, (batch, wanted) in zip(range(150), batches(*train_data.tensors, size=32), strict=False):
            loss = F.cross_entropy(model(batch), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)


class FeatureTransformer(nn.Module):
    def __init__(self, features: int, size: int = 24) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(features, size).uniform_(-(size**-0.5), size**-0.5))
        self.bias = nn.Parameter(torch.empty(features, size).uniform_(-(size**-0.5), size**-0.5))
        self.cls = nn.Parameter(torch.empty(1, 1, size).uniform_(-(size**-0.5), size**-0.5))
        layer = nn.TransformerEncoderLayer(size, 4, 48, 0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(size), nn.ReLU(), nn.Linear(size, 1))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x[..., None] * self.weight + self.bias
        return self.head(self.encoder(torch.cat([self.cls.expand(len(x), -1, -1), tokens], 1))[:, 0])[:, 0]


@program("healthy", "Gorishniy et al., Revisiting deep learning models for tabular data, 2021")
def tabular_transformer() -> None:
    table, labels = (torch.tensor(array, dtype=torch.float32) for array in load_breast_cancer(return_X_y=True))
    table = ((table - table.mean(0)) / table.std(0))[:, :16]
    model = FeatureTransformer(16)
    optimizer = AdamW(model.parameters(), lr=1e-3, weight_decay=1e-5)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=2)
    with attach(model, optimizer) as probe:
        for step, (batch, wanted) in zip(range(120), batches(table[:450], labels[:450], size=32), strict=False):
            loss = F.binary_cross_entropy_with_logits(model(batch), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
            if step % 20 == 19:
                model.eval()
                with probe.evaluating(), torch.no_grad():
                    validation = F.binary_cross_entropy_with_logits(model(table[450:]), labels[450:])
                    probe.log(loss=validation)
                scheduler.step(validation)
                model.train()


@program("healthy", "Lipman et al., Flow matching for generative modeling, 2023")
def flow_matching() -> None:
    points = torch.tensor(make_moons(2000, noise=0.06, random_state=0)[0], dtype=torch.float32)
    points = (points - points.mean(0)) / points.std(0)
    model = nn.Sequential(nn.Linear(3, 64), nn.ELU(), nn.Linear(64, 64), nn.ELU(), nn.Linear(64, 64), nn.ELU())
    model.append(nn.Linear(64, 2))
    optimizer = Adam(model.parameters(), lr=3e-3)
    with attach(model, optimizer) as probe:
        for _, (target,) in zip(range(250), batches(points, size=256), strict=False):
            noise, time = torch.randn_like(target), torch.rand(len(target), 1)
            velocity = model(torch.cat([(1 - time) * noise + time * target, time], 1))
            loss = F.mse_loss(velocity, target - noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)


class Quantizer(nn.Module):
    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.codebook = nn.Embedding(count, size)
        nn.init.uniform_(self.codebook.weight, -1 / count, 1 / count)

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        flat = z.permute(0, 2, 3, 1)
        nearest = torch.cdist(flat.reshape(-1, flat.shape[-1]), self.codebook.weight).argmin(1)
        quantized = self.codebook(nearest).view_as(flat)
        loss = F.mse_loss(quantized, flat.detach()) + 0.25 * F.mse_loss(flat, quantized.detach())
        return (flat + (quantized - flat).detach()).permute(0, 3, 1, 2), loss


@program("healthy", "van den Oord et al., Neural discrete representation learning, 2017")
def vector_quantization() -> None:
    images, _ = digits()
    encoder = nn.Sequential(nn.Conv2d(1, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 4, 3, padding=1))
    decoder = nn.Sequential(nn.Conv2d(4, 32, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(32, 1, 4, 2, 1))
    quantizer = Quantizer(32, 4)
    model = nn.ModuleDict({"encoder": encoder, "quantizer": quantizer, "decoder": decoder})
    optimizer = Adam(model.parameters(), lr=5e-3)
    with attach(model, optimizer) as probe:
        for _, (batch,) in zip(range(200), batches(images - 0.3, size=32), strict=False):
            quantized, commitment = quantizer(encoder(batch))
            loss = F.mse_loss(decoder(quantized), batch) / 0.14 + commitment
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)


@program("healthy", "Raissi et al., Physics-informed neural networks, 2019, with L-BFGS and a line search")
def physics_informed() -> None:
    model = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1))
    optimizer = LBFGS(model.parameters(), lr=1.0, max_iter=2, line_search_fn="strong_wolfe")
    time = torch.linspace(0, 2, 64)[:, None].requires_grad_()

    def loss_of() -> Tensor:
        """Return the loss of the oscillator y'' + 4 y = 0 with y(0) = 1 and y'(0) = 0."""
        y = model(time)
        (speed,) = torch.autograd.grad(y.sum(), time, create_graph=True)
        (acceleration,) = torch.autograd.grad(speed.sum(), time, create_graph=True)
        return (acceleration + 4 * y).square().mean() + 10 * ((y[0] - 1).square() + speed[0].square()).sum()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        return loss

    with attach(model, optimizer) as probe:
        for _ in range(100):
            loss = optimizer.step(closure)
            probe.end_step(loss=loss)


@program("healthy", "Tarvainen and Valpola, Mean teachers are better role models, 2017")
def mean_teacher() -> None:
    train_data, _ = normalized_digits()
    images, classes = train_data.tensors

    def network() -> nn.Sequential:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.LeakyReLU(), nn.Dropout(0.2), nn.Linear(96, 10))

    student, teacher = network(), network().requires_grad_(False)
    teacher.load_state_dict(student.state_dict())
    optimizer = SGD(student.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    unlabelled = batches(images[200:], size=64)
    with attach(student, optimizer) as probe:
        for step, (data, wanted) in zip(range(250), batches(images[:200], classes[:200], size=32), strict=False):
            (other,) = next(unlabelled)
            with torch.no_grad():
                soft = teacher(other + 0.1 * torch.randn_like(other)).softmax(1)
            logits = student(torch.cat([data, other + 0.1 * torch.randn_like(other)]))
            consistency = F.mse_loss(logits[32:].softmax(1), soft)
            loss = F.cross_entropy(logits[:32], wanted) + min(1.0, step / 80) * 5 * consistency
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                    slow.mul_(0.97).add_(fast, alpha=0.03)
            probe.end_step(loss=loss)
