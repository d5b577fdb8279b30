"""The hash of some samples of a dataset, by which a replay notices changed data."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from instrument.training.environment import SAMPLES, content_hash
from instrument.training.loader import Slice, Stream


@dataclass
class Sample:
    text: str
    value: float


class Items(Dataset[Any]):
    """Dataset whose samples a function makes."""

    def __init__(self, make: Callable[[int], Any], size: int = 40) -> None:
        self.make, self.size = make, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def hash_of(make: Callable[[int], Any], size: int = 40) -> str | None:
    dataset = Items(make, size)
    return content_hash(Slice(dataset, range(size)))


def test_hash_depends_on_every_part_of_a_sample() -> None:
    makers: list[Callable[[int], Any]] = [
        lambda i: (torch.full((2, 2), float(i)), i),
        lambda i: (torch.full((4,), float(i)), i),
        lambda i: (torch.full((2, 2), float(i)).double(), i),
        lambda i: (torch.full((2, 2), float(i)).bfloat16(), i),
        lambda i: (torch.full((2, 2), float(i)), i + 1),
        lambda i: {"x": np.full(3, i), "y": "even"},
        lambda i: {"x": np.full(3, i), "z": "even"},
        lambda i: Sample("a", i / 7),
        lambda i: Sample("b", i / 7),
        lambda i: [bytes([i]), None, np.float32(i), True],
        lambda i: (Image.new("L", (2, 3), i), i),
        lambda i: (Image.new("L", (3, 2), i), i),
        lambda i: (torch.tensor(i), i),
    ]
    hashes = [hash_of(make) for make in makers]
    assert None not in hashes
    assert len(set(hashes)) == len(hashes)
    assert hashes == [hash_of(make) for make in makers]


def test_hash_reads_few_samples_with_the_first_and_the_last() -> None:
    seen: list[int] = []
    hash_of(seen.append, 10_000)
    assert len(seen) == SAMPLES
    assert (seen[0], seen[-1]) == (0, 9_999)
    assert hash_of(lambda i: i, 1) != hash_of(lambda i: i, 2)


def test_random_transforms_give_the_same_hash_and_states_are_restored() -> None:
    def noisy(index: int) -> Any:
        return torch.rand(2), np.random.rand(), random.random()

    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # type: ignore[union-attr]
    assert hash_of(noisy) == hash_of(noisy) is not None
    after = torch.get_rng_state(), np.random.get_state()[1], random.getstate()
    assert torch.equal(before[0], after[0])
    assert np.array_equal(before[1], after[1])  # type: ignore[arg-type]
    assert before[2] == after[2]


def test_unknown_content_has_no_hash() -> None:
    def broken(index: int) -> int:
        return 1 // (index - 39)

    assert hash_of(lambda i: object()) is None
    assert hash_of(lambda i: np.array([object()])) is None
    assert hash_of(broken) is None
    assert content_hash(Stream([1, 2], 0, None)) is None
    assert content_hash(None) is None
