"""The datasets that conf/data names. Each takes `split` ('train' or 'test') and gives (input, target) pairs."""

from __future__ import annotations

import gzip
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

DOWNLOAD_TIMEOUT = 20.0  # seconds without an answer

# Mean and standard deviation of each channel of the training images, as pixels from 0 to 1.
MNIST_STATS = ((0.1307,), (0.3081,))
FASHION_MNIST_STATS = ((0.2860,), (0.3530,))
CIFAR10_STATS = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
DIGITS_STATS = ((0.3053,), (0.3760,))


class DatasetMissingError(Exception):
    """A dataset is neither on disk nor to be had by download."""


class Images(Dataset[tuple[Tensor, int]]):
    """Images in memory, normalised as they are taken.

    Args:
        images: uint8 from 0 to 255, or float32 from 0 to 1; [N, C, H, W].
        targets: Classes, [N].
        stats: Mean and standard deviation of each channel.
    """

    def __init__(self, images: Tensor, targets: Tensor, stats: tuple[Sequence[float], Sequence[float]]) -> None:
        self.images = images
        self.targets = targets.tolist()
        self.mean, self.std = (torch.tensor(list(values)).view(-1, 1, 1) for values in stats)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index]
        pixels = image.float() / 255 if image.dtype == torch.uint8 else image
        return (pixels - self.mean) / self.std, self.targets[index]


def mnist(split: str, root: str, download: bool = True) -> Images:
    """MNIST: 60,000 and 10,000 images of handwritten digits, [1, 28, 28]."""
    found = _torchvision("MNIST", split, root, download)
    return Images(found.data.unsqueeze(1), found.targets, MNIST_STATS)


def fashion_mnist(split: str, root: str, download: bool = True) -> Images:
    """Fashion-MNIST: 60,000 and 10,000 images of clothing, [1, 28, 28]."""
    found = _torchvision("FashionMNIST", split, root, download)
    return Images(found.data.unsqueeze(1), found.targets, FASHION_MNIST_STATS)


def cifar10(split: str, root: str, download: bool = True) -> Images:
    """CIFAR-10: 50,000 and 10,000 colour photographs, [3, 32, 32]."""
    found = _torchvision("CIFAR10", split, root, download)
    return Images(torch.from_numpy(found.data).permute(0, 3, 1, 2), torch.tensor(found.targets), CIFAR10_STATS)


def digits(split: str, size: int = 8) -> Images:
    """Scikit-learn's real handwritten digits, which are always there: 1,437 and 360 images, [1, size, size].

    They are 8x8; another size is interpolated bilinearly. The last 360, by writers of their own, are the test split.
    """
    table = _digits_table()
    images = table[:, :-1].float().div(16).view(-1, 1, 8, 8)
    targets = table[:, -1]
    part = slice(0, 1437) if split == "train" else slice(1437, None)
    images = images[part]
    if size != 8:
        images = F.interpolate(images, size=(size, size), mode="bilinear", align_corners=False)
    return Images(images, targets[part], DIGITS_STATS)


def random_tensors(
    split: str, shape: Sequence[int] = (1, 28, 28), classes: int = 10, samples: int = 1024, seed: int = 0
) -> TensorDataset:
    """Gaussian noise of any shape with random classes: nothing to learn, for trying out shapes and speed."""
    generator = torch.Generator().manual_seed(2 * seed + (split == "test"))
    inputs = torch.randn(samples, *shape, generator=generator)
    return TensorDataset(inputs, torch.randint(classes, (samples,), generator=generator))


class Sequences(Dataset[Tensor]):
    """Windows of a long row of tokens, each `length` tokens, next to each other.

    Args:
        tokens: int64, [T].
        length: Tokens in a window.
    """

    def __init__(self, tokens: Tensor, length: int) -> None:
        self.windows = tokens[: len(tokens) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Tensor:
        return self.windows[index]


def english(split: str, length: int = 64) -> Sequences:
    """English text that is always there: the descriptions that come with scikit-learn's datasets, in ASCII codes.

    About 30,000 characters; the last tenth is the test split. Tokens are from 0 to 127.
    """
    names = ("breast_cancer", "diabetes", "digits", "iris", "wine_data")
    text = "".join(_scikit_learn(f"descr/{name}.rst").read_text(encoding="utf-8") for name in names)
    tokens = torch.tensor(list(text.encode("ascii", "ignore")))
    border = len(tokens) * 9 // 10
    return Sequences(tokens[:border] if split == "train" else tokens[border:], length)


@cache
def _digits_table() -> Tensor:
    """Integers [1797, 65]: 64 pixels from 0 to 16, and the target."""
    with gzip.open(_scikit_learn("data/digits.csv.gz")) as file:
        return torch.from_numpy(np.loadtxt(file, dtype=np.int64, delimiter=","))


def _scikit_learn(name: str) -> Path:
    """A file of those in `sklearn.datasets`, which is not imported: that takes half as long as to import torch.

    Raises:
        DatasetMissingError: scikit-learn is not installed, or has no such file.
    """
    spec = find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise DatasetMissingError("scikit-learn is not installed")
    file = Path(spec.origin).parent / "datasets" / name
    if not file.exists():
        raise DatasetMissingError(f"scikit-learn has no file {file}")
    return file


def _torchvision(name: str, split: str, root: str, download: bool) -> Any:
    import torchvision

    dataset = getattr(torchvision.datasets, name)
    folder = Path(root).expanduser()
    reason = f"not below {folder}"
    try:
        return dataset(folder, train=split == "train", download=False)
    except RuntimeError:
        if not download:
            raise DatasetMissingError(f"{reason}, and download is false") from None
    try:
        with _timeout(DOWNLOAD_TIMEOUT):
            return dataset(folder, train=split == "train", download=True)
    except (OSError, RuntimeError) as error:
        raise DatasetMissingError(f"{reason}, and the download failed: {str(error).splitlines()[0]}") from None


@contextmanager
def _timeout(seconds: float) -> Iterator[None]:
    """Connections that are opened inside give up when nothing is heard for so long."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
