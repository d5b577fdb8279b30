"""Small trainings of five architectures: the healthy ones from which `benchmarks/rules.py` derives its faults.

The data are the handwritten digits of scikit-learn (8 x 8 pixels, 10 classes), and tokens from a random Markov chain.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

HELD_OUT = 400  # digits for the evaluation
CLASSES, PIXELS, ROWS = 10, 64, 8
VOCABULARY, LENGTH, SEQUENCES = 32, 24, 1024
LATENT = 16
MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAM_OF_GAN = partial(torch.optim.Adam, lr=1e-3, betas=(0.5, 0.999))


@dataclass
class Training:
    """A model with its data and its training step. A case changes some of the fields before the training starts.

    Attributes:
        model: The model.
        inputs: The training inputs, [samples, ...].
        targets: Their targets, [samples] or [samples, positions].
        held_out: Inputs and targets of the evaluation; None for no evaluation.
        loss: Function of the model's output and the targets.
        optimizer: Function that creates the optimizer of some parameters.
        trained: Function that returns the parameters that the optimizer holds.
        schedule: The factor of the learning rate at a step; None for a constant rate.
        clip: The largest norm of the gradient; None for no limit.
        batch_size: The number of samples in a batch.
        micro_batches: The number of batches of which the gradients are accumulated in a step.
        batch: The indices of the samples of the n-th batch; None for random ones.
        zeroes_gradients: Whether the gradients are set to zero before each step.
        gradient_sign: The factor of the loss in the backward pass.
        autocast: The dtype of autocast; None for full precision.
    """

    model: nn.Module
    inputs: Tensor
    targets: Tensor
    held_out: tuple[Tensor, Tensor] | None = None
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    optimizer: Callable[..., Optimizer] = MOMENTUM
    trained: Callable[[nn.Module], Iterable[Any]] = nn.Module.parameters
    schedule: Callable[[int], float] | None = None
    clip: float | None = None
    batch_size: int = 64
    micro_batches: int = 1
    batch: Callable[[int], Tensor] | None = None
    zeroes_gradients: bool = True
    gradient_sign: float = 1.0
    autocast: torch.dtype | None = None

    def start(self) -> Sequence[Optimizer]:
        """Create and return the optimizers. Call it once, before the first step."""
        self._optimizer = self.optimizer(self.trained(self.model))
        self._scheduler = None
        if self.schedule is not None:
            self._scheduler = torch.optim.lr_scheduler.LambdaLR(self._optimizer, self.schedule)
        return [self._optimizer]

    def indices(self, number: int) -> Tensor:
        """Return the indices of the samples of a batch, int64 [batch size]."""
        if self.batch is not None:
            return self.batch(number)
        return torch.randint(len(self.inputs), (self.batch_size,))

    def backward(self, indices: Tensor) -> Tensor:
        """Make the forward and backward pass of a batch, and return its loss."""
        with nullcontext() if self.autocast is None else torch.autocast("cpu", self.autocast):
            loss = self.loss(self.model(self.inputs[indices]), self.targets[indices])
        (self.gradient_sign * loss / self.micro_batches).backward()
        return loss.detach()

    def update(self) -> None:
        """Make a step of the optimizer."""
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self._optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step()
        if self.zeroes_gradients:
            self._optimizer.zero_grad()

    @torch.no_grad()
    def evaluate(self) -> Tensor | None:
        """Return the loss of the held-out samples; None if there are none."""
        if self.held_out is None:
            return None
        self.model.eval()
        inputs, targets = self.held_out
        loss = self.loss(self.model(inputs), targets)
        self.model.train()
        return loss


@cache
def _digits() -> tuple[Tensor, Tensor]:
    """Return the images with values from 0 to 16, float32 [1797, 64], and their classes, int64 [1797]."""
    images, classes = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32), torch.tensor(classes)


def digits(model: nn.Module, shape: tuple[int, ...] = (PIXELS,), **fields: Any) -> Training:
    """Return a training that classifies standardized digits.

    Args:
        model: The model.
        shape: The shape of a sample.
        fields: Other fields of the training.
    """
    images, classes = _digits()
    images = ((images - images.mean()) / images.std()).unflatten(1, shape)
    order = torch.randperm(len(images))
    train, held_out = order[HELD_OUT:], order[:HELD_OUT]
    return Training(model, images[train], classes[train], (images[held_out], classes[held_out]), **fields)


def mlp(
    hidden: int = 3,
    width: int = 64,
    activation: Callable[[], nn.Module] = nn.ReLU,
    norm: Callable[[int], nn.Module] | None = None,
    outputs: int = CLASSES,
    **more: nn.Module,
) -> nn.Sequential:
    """Return a perceptron with the layers `linear0`, `norm0`, `act0`, ..., `head`.

    Args:
        hidden: The number of hidden layers.
        width: Their number of units.
        activation: Creates an activation function.
        norm: Creates a normalization layer; None for none.
        outputs: The number of outputs.
        more: Further layers, after the layer with the number at the end of their name.
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for i in range(hidden):
        layers[f"linear{i}"] = nn.Linear(width if i else PIXELS, width)
        if norm is not None:
            layers[f"norm{i}"] = norm(width)
        layers[f"act{i}"] = activation()
        layers |= {name: layer for name, layer in more.items() if name.endswith(str(i))}
    layers["head"] = nn.Linear(width, outputs)
    return nn.Sequential(layers)


def cnn(norm: Callable[[int], nn.Module] | None = None, activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    """Return a network with the layers `conv0`, `norm0`, `act0`, ..., `conv2`, `norm2`, `act2`, `pool`, `flat`, `head`."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    channels = [1, 16, 32, 32]
    for i in range(3):
        layers[f"conv{i}"] = nn.Conv2d(channels[i], channels[i + 1], 3, padding=1, stride=2 if i else 1)
        if norm is not None:
            layers[f"norm{i}"] = norm(channels[i + 1])
        layers[f"act{i}"] = activation()
    layers |= {"flat": nn.Flatten(), "head": nn.Linear(128, CLASSES)}
    return nn.Sequential(layers)


class ResidualBlock(nn.Module):
    """Two convolutions with batch normalization, and a skip connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.norm2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.act1, self.act2 = nn.ReLU(), nn.ReLU()
        nn.init.zeros_(self.norm2.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.act2(x + self.norm2(self.conv2(self.act1(self.norm1(self.conv1(x))))))  # type: ignore[no-any-return]


class SequenceClassifier(nn.Module):
    """A recurrent network with the layers `rnn` and `head`, which reads the last output.

    Args:
        rnn: The recurrent layer, with `batch_first=True`.
    """

    def __init__(self, rnn: nn.RNNBase) -> None:
        super().__init__()
        self.rnn, self.head = rnn, nn.Linear(rnn.hidden_size, CLASSES)

    def forward(self, sequences: Tensor) -> Tensor:
        return self.head(self.rnn(sequences)[0][:, -1])  # type: ignore[no-any-return]


def rnn(kind: type[nn.RNNBase] = nn.LSTM, inputs: int = ROWS, **fields: Any) -> SequenceClassifier:
    """Return a classifier of digits as sequences of `PIXELS / inputs` steps.

    Args:
        kind: The class of the recurrent layer.
        inputs: The number of pixels of a step.
        fields: Arguments of the recurrent layer.
    """
    return SequenceClassifier(kind(inputs, 48, batch_first=True, **fields))


class Attention(nn.Module):
    """Causal self-attention. `mask` is added to the scores, float32 [length, length]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.mask = heads, torch.full((LENGTH, LENGTH), -math.inf).triu(1)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=2))
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3]) + self.mask
        mixed = scores.softmax(dim=3) @ v
        return self.project(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    """A transformer block.

    Args:
        width: The number of features.
        norm_first: Whether the layers are normalized before (pre-LN) or after (post-LN) attention and perceptron.
        residual: Whether there are skip connections.
    """

    def __init__(self, width: int, *, norm_first: bool, residual: bool) -> None:
        super().__init__()
        self.norm_first, self.residual = norm_first, residual
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads=4)
        self.norm2, self.up, self.act, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self._apply(self.norm1, self.attention, x)
        return self._apply(self.norm2, lambda y: self.down(self.act(self.up(y))), x)

    def _apply(self, norm: nn.Module, layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        y = layer(norm(x)) if self.norm_first else layer(x)
        y = x + y if self.residual else y
        return y if self.norm_first else norm(y)  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """A decoder-only transformer with the layers `embedding`, `positions`, `blocks`, `norm` and `head`."""

    def __init__(
        self, blocks: int = 2, width: int = 32, *, norm_first: bool = True, residual: bool = True, tied: bool = False
    ) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width, norm_first=norm_first, residual=residual) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]


def gpt_init(model: nn.Module, std: float = 0.02) -> nn.Module:
    """Initialize a transformer like GPT-2: weights with a standard deviation of 0.02, biases with zeros."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    return model


def warmup(steps: int, total: int) -> Callable[[int], float]:
    """Return a schedule: a linear warm-up, then a cosine decay to zero."""
    return lambda step: min((step + 1) / steps, 0.5 + 0.5 * math.cos(math.pi * min(1.0, step / total)))


def tokens(model: nn.Module, **fields: Any) -> Training:
    """Return a training that predicts the next token of a Markov chain with three likely successors of each token."""
    likely = torch.stack([torch.randperm(VOCABULARY)[:3] for _ in range(VOCABULARY)])
    text = [torch.randint(VOCABULARY, (SEQUENCES,))]
    for _ in range(LENGTH):
        text.append(likely[text[-1], torch.randint(3, (SEQUENCES,))])
    sequences = torch.stack(text, dim=1)
    settings: dict[str, Any] = {
        "loss": next_token_loss,
        "optimizer": partial(torch.optim.AdamW, lr=3e-3),
        "schedule": warmup(20, 300),
        "batch_size": 32,
    }
    return Training(model, sequences[:, :-1], sequences[:, 1:], **settings | fields)


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of logits [batch, length, vocabulary]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass
class Adversarial(Training):
    """A generative adversarial network: its model has the submodules `generator` and `discriminator`.

    Both have an optimizer, and both make a step for each batch. The losses are those of Goodfellow et al. (2014).

    Attributes:
        discriminator_optimizer: Function that creates the optimizer of the discriminator.
        saturating: Whether the generator minimizes log(1 - D(G(z))) instead of -log D(G(z)).
        detached: Whether the output of the generator is detached in its own step.
    """

    discriminator_optimizer: Callable[..., Optimizer] = ADAM_OF_GAN
    saturating: bool = False
    detached: bool = False

    def start(self) -> Sequence[Optimizer]:
        self._generator_optimizer = self.optimizer(self.model.generator.parameters())
        self._discriminator_optimizer = self.discriminator_optimizer(self.model.discriminator.parameters())
        return [self._generator_optimizer, self._discriminator_optimizer]

    def backward(self, indices: Tensor) -> Tensor:
        generator, discriminator = self.model.generator, self.model.discriminator
        fake = generator(torch.randn(len(indices), LATENT))
        real_score, fake_score = discriminator(self.inputs[indices]), discriminator(fake.detach())
        ones, zeros = torch.ones_like(real_score), torch.zeros_like(real_score)
        loss = self.loss(real_score, ones) + self.loss(fake_score, zeros)
        self._discriminator_optimizer.zero_grad()
        loss.backward()
        self._discriminator_optimizer.step()
        score = discriminator(fake.detach() if self.detached else fake)
        self._generator_optimizer.zero_grad()
        (-self.loss(score, zeros) if self.saturating else self.loss(score, ones)).backward()
        self._generator_optimizer.step()
        return loss.detach()

    def update(self) -> None:
        pass


def gan(scale: float = 1.0, **fields: Any) -> Adversarial:
    """Return a GAN of digits.

    Args:
        scale: The largest absolute value of the real data. The generator ends with Tanh.
        fields: Other fields of the training.
    """
    images, classes = _digits()
    generator = nn.Sequential(
        OrderedDict(
            linear0=nn.Linear(LATENT, 64), act0=nn.ReLU(), linear1=nn.Linear(64, 64), act1=nn.ReLU(),
            linear2=nn.Linear(64, PIXELS), tanh=nn.Tanh(),
        )
    )  # fmt: skip
    discriminator = nn.Sequential(
        OrderedDict(
            linear0=nn.Linear(PIXELS, 64), act0=nn.LeakyReLU(0.2), linear1=nn.Linear(64, 64), act1=nn.LeakyReLU(0.2),
            linear2=nn.Linear(64, 1),
        )
    )  # fmt: skip
    model = nn.Module()
    model.generator, model.discriminator = generator, discriminator
    settings: dict[str, Any] = {
        "loss": F.binary_cross_entropy_with_logits,
        "optimizer": ADAM_OF_GAN,
    }
    return Adversarial(model, scale * (images / 8 - 1), classes, **settings | fields)
