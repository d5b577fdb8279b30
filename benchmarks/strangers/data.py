"""The data of the programs: made here, without a download."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import TensorDataset

SENTENCES = (
    "the {n} {v} the {n}",
    "a {a} {n} {v} the {a} {n}",
    "the {n} {i} near the {p}",
    "when the {n} {i} the {n} {v} it",
    "the {a} {n} {i} behind a {p} and it {i}",
)
KINDS = {
    "n": "cat dog bird child teacher farmer",
    "v": "sees likes follows helps finds",
    "a": "small big old young red",
    "i": "sleeps runs sings waits",
    "p": "house tree river garden",
}
WORDS = sorted({word for words in (*KINDS.values(), *SENTENCES) for word in words.split() if "{" not in word})
PAD, MASK, FIRST_WORD = 0, 1, 2
VOCABULARY = FIRST_WORD + len(WORDS)


@cache
def _digits() -> tuple[Tensor, Tensor]:
    images, classes = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(classes)


def digits(count: int = 1797) -> tuple[Tensor, Tensor]:
    """Return images [samples, 1, 8, 8] with values from 0 to 1, and their classes, int64 [samples]."""
    images, classes = _digits()
    return images[:count].clone(), classes[:count].clone()


def normalized_digits() -> tuple[TensorDataset, TensorDataset]:
    """Return 1,400 digits for the training and the others for the evaluation, normalized with the mean and deviation of all."""
    images, classes = digits()
    images = (images - images.mean()) / images.std()
    return TensorDataset(images[:1400], classes[:1400]), TensorDataset(images[1400:], classes[1400:])


def shapes(count: int, size: int = 32) -> tuple[Tensor, Tensor]:
    """Return colour images of four kinds of shapes, float32 [samples, 3, size, size] from 0 to 1, and their kinds."""
    kinds = torch.randint(4, (count,))
    centre = torch.rand(count, 2, 1, 1) * 0.4 + 0.3
    radius = torch.rand(count, 1, 1) * 0.12 + 0.12
    grid = torch.linspace(0, 1, size)
    x, y = (grid[None, None, :] - centre[:, 0]).abs(), (grid[None, :, None] - centre[:, 1]).abs()
    masks = torch.stack([x**2 + y**2 < radius**2, x.maximum(y) < radius, x + y < radius, x.minimum(y) < radius / 3])
    mask = masks[kinds, torch.arange(count)][:, None].float()
    colours, ground = torch.rand(count, 3, 1, 1), torch.rand(count, 3, 1, 1)
    images = mask * colours + (1 - mask) * ground
    return (images + 0.05 * torch.randn_like(images)).clamp(0, 1), kinds


def sentences(count: int) -> list[list[str]]:
    """Return random sentences of a small grammar, as lists of words."""

    def choose(words: str) -> str:
        options = words.split()
        return options[int(torch.randint(len(options), ()))]

    made = []
    for _ in range(count):
        pattern = SENTENCES[int(torch.randint(len(SENTENCES), ()))].split()
        made.append([choose(KINDS[word[1]]) if word[0] == "{" else word for word in pattern])
    return made


def tokens(words: list[str]) -> list[int]:
    """Return the token ids of words."""
    return [FIRST_WORD + WORDS.index(word) for word in words]


def stream(length: int) -> Tensor:
    """Return the token ids of sentences in a row, int64 [length]."""
    ids = [token for sentence in sentences(length // 4) for token in tokens(sentence)]
    return torch.tensor(ids[:length])


def padded(count: int, length: int = 12) -> Tensor:
    """Return the token ids of sentences, filled up with `PAD`, int64 [count, length]."""
    rows = [tokens(sentence) for sentence in sentences(count)]
    return torch.tensor([row + [PAD] * (length - len(row)) for row in rows])


def batches(*tensors: Tensor, size: int) -> Iterator[tuple[Tensor, ...]]:
    """Yield shuffled batches, epoch after epoch."""
    while True:
        order = torch.randperm(len(tensors[0]))
        for start in range(0, len(order) - size + 1, size):
            yield tuple(tensor[order[start : start + size]] for tensor in tensors)


class CartPole:
    """A pole on a cart, with the equations and limits of Gymnasium's CartPole-v1."""

    def reset(self) -> Tensor:
        """Start an episode, and return the state: position, speed, angle and angular speed."""
        self.state = (torch.rand(4) * 0.1 - 0.05).tolist()
        self.steps = 0
        return torch.tensor(self.state)

    def step(self, action: int) -> tuple[Tensor, float, bool]:
        """Push the cart to the left (0) or the right (1), and return the state, the reward and whether the episode ended."""
        x, speed, angle, turning = self.state
        push = (10.0 if action else -10.0) + 0.05 * turning**2 * math.sin(angle)
        acceleration = (9.8 * math.sin(angle) - math.cos(angle) * push / 1.1) / (
            0.5 * (4 / 3 - 0.1 * math.cos(angle) ** 2 / 1.1)
        )
        sideways = push / 1.1 - 0.05 * acceleration * math.cos(angle) / 1.1
        self.state = [x + 0.02 * speed, speed + 0.02 * sideways, angle + 0.02 * turning, turning + 0.02 * acceleration]
        self.steps += 1
        done = abs(self.state[0]) > 2.4 or abs(self.state[2]) > 0.2095 or self.steps >= 200
        return torch.tensor(self.state), 1.0, done
