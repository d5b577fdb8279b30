"""Workloads of the benchmarks: models with batches of fixed sizes, three for a CPU and three for a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class MnistCNN(nn.Module):
    """The network of PyTorch's MNIST example, with a module for each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
            nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)  # type: ignore[no-any-return]


class Block(nn.Module):
    """A transformer block with pre-layer normalization: attention and a two-layer perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).split(width, 2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + self.project(mixed)
        return x + self.down(self.act(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """A decoder-only transformer."""

    def __init__(
        self, layers: int = 6, width: int = 256, heads: int = 8, length: int = 128, vocabulary: int = 1024
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]


class LlamaBlock(nn.Module):
    """A block as in Llama: RMSNorm, rotary positions, and a gated perceptron."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.project = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.act, self.down = nn.SiLU(), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        batch, length, width = x.shape
        y = self.norm1(x)
        q, k, v = (layer(y).view(batch, length, self.heads, -1).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = (
            torch.view_as_real(torch.view_as_complex(each.float().unflatten(-1, (-1, 2))) * rotation).flatten(-2)
            for each in (q, k)
        )
        mixed = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        y = self.norm2(x)
        return x + self.down(self.act(self.gate(y)) * self.up(y))  # type: ignore[no-any-return]


class Llama(nn.Module):
    """A decoder-only transformer with the layers of Llama."""

    def __init__(self, layers: int, width: int, heads: int, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, hidden) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.frequencies = 10_000.0 ** -torch.linspace(0, 1, width // heads // 2 + 1)[:-1]

    def forward(self, tokens: Tensor) -> Tensor:
        x, positions = self.tokens(tokens), torch.arange(tokens.shape[1], device=tokens.device)
        angles = torch.outer(positions, self.frequencies.to(tokens.device))
        rotation = torch.polar(torch.ones_like(angles), angles)
        for block in self.blocks:
            x = block(x, rotation)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Workload:
    """A model and its training step.

    Attributes:
        name: The label in the tables.
        model: Function that creates the model.
        batch: Function that creates inputs and targets on a device.
    """

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[str], tuple[Tensor, Tensor]]

    def training(self, device: str = "cpu", precision: torch.dtype | None = None) -> Training:
        """Create a new model with its optimizer and a batch.

        Args:
            device: The device of the model and the batch.
            precision: The dtype of autocast; none by default.
        """
        torch.manual_seed(0)
        with torch.device(device):
            return Training(self.model().train(), *self.batch(device), precision)


class Training:
    """A model with its optimizer. `step` makes a training step on the same batch and returns the loss."""

    def __init__(self, model: nn.Module, inputs: Tensor, targets: Tensor, precision: torch.dtype | None) -> None:
        self.model, self.inputs, self.targets, self.precision = model, inputs, targets, precision
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step(self) -> Tensor:
        self.optimizer.zero_grad()
        with torch.autocast(self.inputs.device.type, self.precision, enabled=self.precision is not None):
            loss = F.cross_entropy(self.model(self.inputs).flatten(0, -2), self.targets.flatten())
        loss.backward()
        self.optimizer.step()
        return loss

    def leaves(self) -> list[str]:
        """Return the names of the modules without submodules."""
        return [name for name, module in self.model.named_modules() if not list(module.children())]


def _images(shape: tuple[int, ...], classes: int) -> Callable[[str], tuple[Tensor, Tensor]]:
    return lambda device: (torch.randn(shape, device=device), torch.randint(classes, shape[:1], device=device))


def _tokens(batch: int, length: int, vocabulary: int) -> Callable[[str], tuple[Tensor, Tensor]]:
    def make(device: str) -> tuple[Tensor, Tensor]:
        text = torch.randint(vocabulary, (batch, length + 1), device=device)
        return text[:, :-1], text[:, 1:]

    return make


def _resnet(name: str, classes: int) -> nn.Module:
    from torchvision import models

    return models.get_model(name, num_classes=classes)  # type: ignore[no-any-return]


WORKLOADS = {
    "mnist_cnn": Workload("MNIST CNN, batch 64", MnistCNN, _images((64, 1, 28, 28), 10)),
    "gpt": Workload("GPT 6x256, batch 8 x 128", GPT, _tokens(8, 128, 1024)),
    "resnet18": Workload(
        "ResNet-18, 64x64, batch 32",
        lambda: _resnet("resnet18", 100),
        _images((32, 3, 64, 64), 100),
    ),
}
GPU_WORKLOADS = {
    "resnet50": Workload(
        "ResNet-50, 224x224, batch 64",
        lambda: _resnet("resnet50", 1000),
        _images((64, 3, 224, 224), 1000),
    ),
    "gpt2_small": Workload(
        "GPT-2-small, batch 8 x 1024",
        lambda: GPT(layers=12, width=768, heads=12, length=1024, vocabulary=50_304),
        _tokens(8, 1024, 50_304),
    ),
    "llama_300m": Workload(
        "Llama-like, 322 million parameters, batch 4 x 1024",
        lambda: Llama(layers=20, width=1024, heads=16, hidden=2816, vocabulary=32_000),
        _tokens(4, 1024, 32_000),
    ),
}
