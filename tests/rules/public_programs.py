"""Healthy trainings in the form of public examples of PyTorch, in small.

The defaults of the rules were checked with them; `held_out_programs` has others. Each function returns a model, its optimizers, and a
function that makes one step and returns its loss.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from sklearn.datasets import load_digits, make_moons
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import LBFGS, SGD, Adadelta, Adam, Optimizer
from torch.optim.lr_scheduler import StepLR

import instrument
from instrument.config.rules import default_rules

HOOK_SETS = ("inputs", "activations", "gradients", "parameters", "dead_relu")
ARGUMENTS = {"layers": "**", "kind": "forward_pre", "action": "record", "every": 10}
Step = Callable[[int], Tensor]
Program = Callable[[], tuple[nn.Module, Sequence[Optimizer], Step]]


def warnings_of(program: Program, steps: int) -> list[str]:
    """Run a training with the default rules, and return the warnings of the rules.

    Args:
        program: The training.
        steps: The number of steps.
    """
    torch.manual_seed(0)
    model, optimizers, step = program()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with instrument.attach(model, {**hooks(model), "arguments": ARGUMENTS}, optimizer=optimizers) as probe:
            for number in range(steps):
                probe.end_step(loss=step(number))
    events = probe.run.events
    return list(events.message[(events.severity == "warning") & events.rule.isin([*default_rules()])])


def hooks(model: nn.Module) -> dict[str, Any]:
    """Return the hook specs of the ready-made sets, without those of which the model has no layers."""
    folder = Path(__file__).parents[2] / "conf" / "hooks"
    types = {type(module).__name__ for module in model.modules()}
    sets = [yaml.safe_load((folder / f"{name}.yaml").read_text()) for name in HOOK_SETS]
    return {n: spec for each in sets for n, spec in each.items() if not types.isdisjoint(spec.get("types", types))}


def batches(*tensors: Tensor, size: int) -> Iterator[tuple[Tensor, ...]]:
    """Yield random batches forever."""
    while True:
        order = torch.randperm(len(tensors[0]))
        for start in range(0, len(order) - size + 1, size):
            yield tuple(tensor[order[start : start + size]] for tensor in tensors)


def digits(scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return images [samples, 1, 8, 8] from 0 to `scale`, and classes [samples]."""
    images, classes = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) * (scale / 16), torch.tensor(classes)


def update(loss: Tensor, optimizer: Optimizer, clipped: nn.Module | None = None, norm: float = 1.0) -> Tensor:
    """Make a step of the optimizer, and return the loss without its graph."""
    optimizer.zero_grad()
    loss.backward()
    if clipped is not None:
        nn.utils.clip_grad_norm_(clipped.parameters(), norm)
    optimizer.step()
    return loss.detach()


def classifier() -> tuple[nn.Module, Sequence[Optimizer], Step]:
    """Return a CNN with dropout, Adadelta with a learning rate of 1 and a step schedule (examples/mnist)."""
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25), nn.Flatten(),
        nn.Linear(128, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 10), nn.LogSoftmax(dim=1),
    )  # fmt: skip
    optimizer = Adadelta(model.parameters(), lr=1.0)
    schedule, data = StepLR(optimizer, 1, gamma=0.7), batches(*digits(), size=64)

    def step(number: int) -> Tensor:
        images, classes = next(data)
        loss = update(F.nll_loss(model((images - 0.3) / 0.38), classes), optimizer)
        if number % 28 == 27:
            schedule.step()
        return loss

    return model, [optimizer], step


class Autoencoder(nn.Module):
    """A variational autoencoder with linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.mean, self.log_variance = nn.Linear(64, 48), nn.Linear(48, 8), nn.Linear(48, 8)
        self.fc3, self.fc4 = nn.Linear(8, 48), nn.Linear(48, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = F.relu(self.fc1(x))
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return torch.sigmoid(self.fc4(F.relu(self.fc3(code)))), mean, log_variance


def variational_autoencoder(scale: float = 1.0) -> tuple[nn.Module, Sequence[Optimizer], Step]:
    """Return a variational autoencoder whose loss is a sum over all pixels and samples (examples/vae)."""
    model = Autoencoder()
    optimizer, data = Adam(model.parameters(), lr=1e-3), batches(*digits(), size=128)

    def step(_: int) -> Tensor:
        x = next(data)[0].flatten(1)
        made, mean, log_variance = model(x)
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum()
        return update(scale * (F.binary_cross_entropy(made, x, reduction="sum") + divergence), optimizer)

    return model, [optimizer], step


def adversarial() -> tuple[nn.Module, Sequence[Optimizer], Step]:
    """Return a convolutional GAN, with the loss of the generator as the loss (examples/dcgan)."""
    generator = nn.Sequential(
        nn.ConvTranspose2d(16, 32, 2, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.ConvTranspose2d(16, 1, 4, 2, 1, bias=False), nn.Tanh(),
    )  # fmt: skip
    discriminator = nn.Sequential(
        nn.Conv2d(1, 16, 4, 2, 1, bias=False), nn.LeakyReLU(0.2), nn.Conv2d(16, 32, 4, 2, 1, bias=False),
        nn.BatchNorm2d(32), nn.LeakyReLU(0.2), nn.Conv2d(32, 1, 2, bias=False), nn.Sigmoid(), nn.Flatten(0),
    )  # fmt: skip
    model = nn.ModuleDict({"generator": generator, "discriminator": discriminator})
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            nn.init.normal_(weight, 0.0, 0.02)
        elif name.endswith("weight"):
            nn.init.normal_(weight, 1.0, 0.02)
    optimizers = [Adam(part.parameters(), lr=2e-4, betas=(0.5, 0.999)) for part in (generator, discriminator)]
    data, loss_of = batches(*digits(2.0), size=64), nn.BCELoss()

    def step(_: int) -> Tensor:
        real = next(data)[0] - 1
        fake = generator(torch.randn(len(real), 16, 1, 1))
        ones, zeros = torch.ones(len(real)), torch.zeros(len(real))
        update(loss_of(discriminator(real), ones) + loss_of(discriminator(fake.detach()), zeros), optimizers[1])
        return update(loss_of(discriminator(fake), ones), optimizers[0])

    return model, optimizers, step


class LanguageModel(nn.Module):
    """A Transformer encoder with a causal mask of -inf."""

    def __init__(self, words: int = 40, width: int = 32) -> None:
        super().__init__()
        self.embedding, self.width = nn.Embedding(words, width), width
        layer = nn.TransformerEncoderLayer(width, 2, 64, dropout=0.2, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(width, words)
        self.register_buffer("position", torch.randn(64, width) * 0.5)
        for weight in (self.embedding.weight, self.head.weight):
            nn.init.uniform_(weight, -0.1, 0.1)
        nn.init.zeros_(self.head.bias)

    def forward(self, words: Tensor) -> Tensor:
        length = words.shape[1]
        mask = torch.full((length, length), -math.inf).triu(1)
        x = self.embedding(words) * math.sqrt(self.width) + self.position[:length]
        return F.log_softmax(self.head(self.encoder(x, mask=mask)), dim=-1)


def text(length: int = 8192) -> Tensor:
    """Return words of a language in which each word has four possible successors, int64 [length]."""
    random = torch.Generator().manual_seed(1)
    successors = torch.randint(40, (40, 4), generator=random)
    words = [0]
    for choice in torch.randint(4, (length - 1,), generator=random).tolist():
        words.append(int(successors[words[-1], choice]))
    return torch.tensor(words)


def language_model() -> tuple[nn.Module, Sequence[Optimizer], Step]:
    """Return a language model with SGD, a large learning rate and clipped gradients (examples/word_language_model)."""
    model = LanguageModel()
    optimizer, words = SGD(model.parameters(), lr=5.0), text().view(16, -1)

    def step(number: int) -> Tensor:
        start = number * 24 % (words.shape[1] - 25)
        predicted = model(words[:, start : start + 24])
        loss = F.nll_loss(predicted.flatten(0, 1), words[:, start + 1 : start + 25].flatten())
        return update(loss, optimizer, model, 0.25)

    return model, [optimizer], step


class CartPole:
    """A pole on a cart (Barto, Sutton and Anderson 1983), with the constants of Gym."""

    def reset(self) -> Tensor:
        self.x, self.v, self.angle, self.turn = (torch.rand(4) * 0.1 - 0.05).tolist()
        return self.state()

    def state(self) -> Tensor:
        return torch.tensor([self.x, self.v, self.angle, self.turn])

    def step(self, action: int) -> tuple[Tensor, bool]:
        sin, cos = math.sin(self.angle), math.cos(self.angle)
        common = ((10.0 if action else -10.0) + 0.05 * self.turn**2 * sin) / 1.1
        turned = (9.8 * sin - cos * common) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        moved = common - 0.05 * turned * cos / 1.1
        self.x, self.v = self.x + 0.02 * self.v, self.v + 0.02 * moved
        self.angle, self.turn = self.angle + 0.02 * self.turn, self.turn + 0.02 * turned
        return self.state(), abs(self.x) > 2.4 or abs(self.angle) > 0.209


def returns_of(rewards: Sequence[float], discount: float = 0.99) -> Tensor:
    """Return the normalized discounted returns of an episode."""
    returns: list[float] = []
    for reward in reversed(rewards):
        returns.insert(0, reward + discount * (returns[0] if returns else 0.0))
    found = torch.tensor(returns)
    return (found - found.mean()) / (found.std() + 1e-6)


def reinforce() -> tuple[nn.Module, Sequence[Optimizer], Step]:
    """Return a policy gradient, whose loss is a sum over an episode (examples/reinforcement_learning)."""
    model = nn.Sequential(nn.Linear(4, 128), nn.Dropout(0.6), nn.ReLU(), nn.Linear(128, 2), nn.Softmax(dim=-1))
    optimizer, pole = Adam(model.parameters(), lr=1e-2), CartPole()

    def step(_: int) -> Tensor:
        state, done, chances = pole.reset(), False, []
        while not done and len(chances) < 200:
            policy = torch.distributions.Categorical(model(state))
            action = policy.sample()
            chances.append(policy.log_prob(action))
            state, done = pole.step(int(action))
        return update(-(torch.stack(chances) * returns_of([1.0] * len(chances))).sum(), optimizer)

    return model, [optimizer], step


class Sequence2(nn.Module):
    """Two LSTM cells and a linear layer, called for each element of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm1, self.lstm2, self.linear = nn.LSTMCell(1, 24), nn.LSTMCell(24, 24), nn.Linear(24, 1)

    def forward(self, series: Tensor) -> Tensor:
        first = second = (torch.zeros(len(series), 24, dtype=series.dtype),) * 2
        outputs = []
        for value in series.split(1, dim=1):
            first = self.lstm1(value, first)
            second = self.lstm2(first[0], second)
            outputs.append(self.linear(second[0]))
        return torch.cat(outputs, dim=1)


def sine_waves() -> tuple[nn.Module, Sequence[Optimizer], Step]:
    """Return the prediction of sine waves in float64 with L-BFGS (examples/time_sequence_prediction)."""
    model = Sequence2().double()
    optimizer = LBFGS(model.parameters(), lr=0.8, max_iter=4)
    waves = torch.sin((torch.arange(40) + torch.randint(-80, 80, (24, 1))) / 5.0).double()

    def step(_: int) -> Tensor:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(waves[:, :-1]), waves[:, 1:])
            loss.backward()
            return loss

        return optimizer.step(closure).detach()  # type: ignore[union-attr]

    return model, [optimizer], step


def siamese() -> tuple[nn.Module, Sequence[Optimizer], Step]:
    """Return a network that embeds digits with a triplet margin loss, which becomes exactly 0 (examples/siamese_network)."""
    model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(576, 32), nn.ReLU(), nn.Linear(32, 8))
    optimizer = Adam(model.parameters(), lr=1e-3)
    images, classes = digits()

    def step(_: int) -> Tensor:
        anchor = torch.randint(len(images), (16,))
        others = [torch.stack([_other(classes, int(at), same=same) for at in anchor]) for same in (True, False)]
        embedded = [model(images[index]) for index in (anchor, *others)]
        return update(F.triplet_margin_loss(*embedded, margin=0.2), optimizer)

    return model, [optimizer], step


def _other(classes: Tensor, at: int, *, same: bool) -> Tensor:
    """Return the index of a random image of the same class, or of another one."""
    found = torch.nonzero((classes == classes[at]) == same).flatten()
    return found[torch.randint(len(found), ())]


class Coupling(nn.Module):
    """An affine coupling of two numbers."""

    def __init__(self, *, swap: bool) -> None:
        super().__init__()
        self.swap = swap
        self.net = nn.Sequential(nn.Linear(1, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept, changed = x.flip(1).split(1, 1) if self.swap else x.split(1, 1)
        scale, shift = self.net(kept).split(1, 1)
        scale = torch.tanh(scale)
        return torch.cat([kept, changed * scale.exp() + shift], 1), scale.sum(1)


def flow() -> tuple[nn.Module, Sequence[Optimizer], Step]:
    """Return a normalizing flow, whose negative log-likelihood becomes negative."""
    model = nn.Sequential(*(Coupling(swap=layer % 2 == 1) for layer in range(6)))
    optimizer = Adam(model.parameters(), lr=2e-3)
    points = torch.tensor(make_moons(2000, noise=0.03, random_state=0)[0], dtype=torch.float32)
    data = batches((points - points.mean(0)) * 0.3, size=128)

    def step(_: int) -> Tensor:
        (x,) = next(data)
        change = torch.zeros(len(x))
        for coupling in model:
            x, log_det = coupling(x)
            change = change + log_det
        density = -0.5 * (x**2).sum(1) - math.log(2 * math.pi)
        return update(-(density + change).mean(), optimizer)

    return model, [optimizer], step


DEVELOPMENT: dict[str, tuple[Program, int]] = {
    "mnist": (classifier, 260),
    "vae": (variational_autoencoder, 260),
    "dcgan": (adversarial, 260),
    "word_language_model": (language_model, 260),
    "reinforce": (reinforce, 300),
    "time_sequence_prediction": (sine_waves, 40),
    "siamese_network": (siamese, 260),
    "normalizing_flow": (flow, 400),
}
