"""The datasets that `conf/data` refers to.

Each function takes `split` (`train` or `test`). All datasets return pairs (input, target), except `english`, which
returns tokens, and `Prompts`.
"""

from __future__ import annotations

import gzip
import socket
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from ..fields.pip_extras import pip_command
from ..tasks.base import IGNORED

DOWNLOAD_TIMEOUT = 20.0  # Seconds without a response after which a download fails.


class DatasetMissingError(Exception):
    """A dataset is not on disk and cannot be downloaded. `fix` is the command that installs the package that it requires."""

    def __init__(self, message: str, fix: str = "") -> None:
        super().__init__(message)
        self.fix = fix


class Images(Dataset[tuple[Tensor, int]]):
    """Images in memory. An image is normalised when it is read.

    Args:
        images: uint8 from 0 to 255, or float32 from 0 to 1; shape [N, C, H, W].
        targets: Integer classes; shape [N].
        stats: Mean and standard deviation of each channel, for pixels from 0 to 1.
    """

    def __init__(self, images: Tensor, targets: Tensor, stats: tuple[Sequence[float], Sequence[float]]) -> None:
        self.images = images
        self.targets = targets.tolist()
        self.mean, self.std = (torch.tensor(list(values)).view(-1, 1, 1) for values in stats)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, int]]:
        """Return the samples of a batch. They are normalised together, which takes a fraction of the time."""
        images = self.images[indices]  # a copy
        pixels = images.float().div_(255) if images.dtype == torch.uint8 else images
        return [*zip(pixels.sub_(self.mean).div_(self.std), (self.targets[index] for index in indices), strict=True)]


def mnist(split: str, root: str, download: bool = True) -> Images:
    """Load MNIST: 60,000 training and 10,000 test images of handwritten digits, float32 [1, 28, 28].

    Args:
        split: `train` or `test`.
        root: The folder of the torchvision datasets.
        download: Whether to download the dataset if it is not in `root`. Default: True.

    Raises:
        DatasetMissingError: The dataset is not in `root` and is not downloaded.
    """
    return _images(_torchvision("MNIST", split, root, download), ((0.1307,), (0.3081,)))


def fashion_mnist(split: str, root: str, download: bool = True) -> Images:
    """Load Fashion-MNIST: 60,000 training and 10,000 test images of clothing, float32 [1, 28, 28].

    Args:
        split: `train` or `test`.
        root: The folder of the torchvision datasets.
        download: Whether to download the dataset if it is not in `root`. Default: True.

    Raises:
        DatasetMissingError: The dataset is not in `root` and is not downloaded.
    """
    return _images(_torchvision("FashionMNIST", split, root, download), ((0.2860,), (0.3530,)))


def cifar10(split: str, root: str, download: bool = True) -> Images:
    """Load CIFAR-10: 50,000 training and 10,000 test colour photographs, float32 [3, 32, 32].

    Args:
        split: `train` or `test`.
        root: The folder of the torchvision datasets.
        download: Whether to download the dataset if it is not in `root`. Default: True.

    Raises:
        DatasetMissingError: The dataset is not in `root` and is not downloaded.
    """
    stats = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    return _images(_torchvision("CIFAR10", split, root, download), stats)


def _images(dataset: Any, stats: tuple[Sequence[float], Sequence[float]]) -> Images:
    images, targets = torch.as_tensor(dataset.data), torch.as_tensor(dataset.targets)
    return Images(images.unsqueeze(1) if images.dim() == 3 else images.permute(0, 3, 1, 2), targets, stats)


def digits(split: str, size: int = 8, random_labels: float = 0.0, seed: int = 0) -> Images:
    """Load the handwritten digits of scikit-learn: 1,437 training and 360 test images, float32 [1, size, size].

    The dataset is part of scikit-learn and needs no download. The last 360 images are the test split. They are from
    other writers than the training split.

    Args:
        split: `train` or `test`.
        size: Height and width in pixels. The original size is 8; other sizes are interpolated bilinearly. Default: 8.
        random_labels: The probability with which a training image gets a random class instead of its own, as in Zhang et
            al. 2017, "Understanding deep learning requires rethinking generalization". Default: 0.
        seed: The seed of the random classes. Default: 0.

    Raises:
        DatasetMissingError: scikit-learn is not installed.
        ValueError: `random_labels` is not a probability.
    """
    if not 0 <= random_labels <= 1:
        raise ValueError(f"random_labels must be from 0 to 1, got {random_labels}")
    table = _digits_table()
    images = table[:, :-1].float().div(16).view(-1, 1, 8, 8)
    targets = table[:, -1]
    split_slice = slice(0, 1437) if _is_train(split) else slice(1437, None)
    images, targets = images[split_slice], targets[split_slice]
    if size != 8:
        images = F.interpolate(images, size=(size, size), mode="bilinear", align_corners=False)
    if _is_train(split):
        generator = torch.Generator().manual_seed(seed)
        is_random = torch.rand(len(targets), generator=generator) < random_labels
        targets = torch.where(is_random, torch.randint(10, (len(targets),), generator=generator), targets)
    return Images(images, targets, ((0.3053,), (0.3760,)))


def random_tensors(
    split: str, shape: Sequence[int] = (1, 28, 28), classes: int = 10, samples: int = 1024, seed: int = 0
) -> TensorDataset:
    """Create standard normal noise with random classes, to test shapes and speed.

    Args:
        split: `train` or `test`. The splits contain different noise.
        shape: The shape of one input. Default: (1, 28, 28).
        classes: The number of classes. Default: 10.
        samples: The number of samples. Default: 1024.
        seed: The seed of the noise. Default: 0.

    Returns:
        Pairs of float32 `shape` and an int64 scalar.
    """
    generator = torch.Generator().manual_seed(2 * seed + (not _is_train(split)))
    inputs = torch.randn(samples, *shape, generator=generator)
    return TensorDataset(inputs, torch.randint(classes, (samples,), generator=generator))


def english(split: str, length: int = 64) -> Tensor:
    """Load an English text of about 30,000 ASCII characters: the descriptions of the datasets in scikit-learn.

    The text is part of scikit-learn and needs no download. The last tenth is the test split.

    Args:
        split: `train` or `test`.
        length: The number of tokens per window. Default: 64.

    Returns:
        Adjacent windows of tokens, int64 [windows, length], from 0 to 127. An incomplete last window is left out.

    Raises:
        DatasetMissingError: scikit-learn is not installed.
    """
    names = ("breast_cancer", "diabetes", "digits", "iris", "wine_data")
    text = "".join(_scikit_learn(f"descr/{name}.rst").read_text(encoding="utf-8") for name in names)
    tokens = torch.tensor(list(text.encode("ascii", "ignore")))
    border = len(tokens) * 9 // 10
    chosen = tokens[:border] if _is_train(split) else tokens[border:]
    return chosen[: len(chosen) // length * length].view(-1, length)


def repeated_tokens(
    split: str,
    vocabulary: int = 16,
    length: int = 16,
    periods: Sequence[int] = (4, 5, 6, 7, 8),
    *,
    samples: int = 4096,
    repeated_only: bool = False,
    seed: int = 0,
) -> TensorDataset:
    """Create sequences of random tokens that repeat: only a previous repetition predicts a token.

    Each sequence starts with `period` different tokens, which are repeated until the sequence is full.

    Args:
        split: `train` or `test`. The splits contain different sequences.
        vocabulary: The number of different tokens. Default: 16.
        length: The number of tokens per sequence. Default: 16.
        periods: The possible periods of a sequence. With a single period, a model can copy by position, without reading
            the tokens. Default: (4, 5, 6, 7, 8).
        samples: The number of sequences. Default: 4096.
        repeated_only: Whether a target is only counted if its token followed an earlier occurrence of the input token.
            The other targets are ignored (-100). Default: False.
        seed: The seed of the tokens. Default: 0.

    Returns:
        Pairs of tokens and next tokens, both int64 [length].

    Raises:
        ValueError: A period is less than 1 or larger than the vocabulary.
    """
    if not all(1 <= period <= vocabulary for period in periods):
        raise ValueError(f"periods must be from 1 to {vocabulary}, the size of the vocabulary, got {list(periods)}")
    generator = torch.Generator().manual_seed(2 * seed + (not _is_train(split)))
    firsts = _different_tokens(samples, vocabulary, generator)
    period = torch.tensor(list(periods))[torch.randint(len(periods), (samples, 1), generator=generator)]
    positions = torch.arange(length + 1)
    tokens = firsts.gather(1, positions % period)
    targets = tokens[:, 1:]
    if repeated_only:
        targets = torch.where(positions[:-1] < period, IGNORED, targets)
    return TensorDataset(tokens[:, :-1], targets)


def induction_prompts(
    split: str,
    vocabulary: int = 16,
    period: int = 4,
    position: int = 1,
    *,
    samples: int = 1024,
    corrupted: bool = False,
    seed: int = 0,
) -> TensorDataset:
    """Create prompts with one answer: that of `A B C D A B` is `C`, which followed the first `B`.

    A prompt has `period` different random tokens, followed by the first of them up to `position`. Its answer is the token at
    `position + 1`. In a corrupted prompt, another random token replaces the one at `position`: `A X C D A B`. Its last token
    has no earlier occurrence, so nothing predicts the answer.

    Args:
        split: `train` or `test`. The splits contain different prompts.
        vocabulary: The number of different tokens. Default: 16.
        period: The number of different tokens of a prompt. Default: 4.
        position: The position of the token that the prompt repeats last. Default: 1.
        samples: The number of clean prompts. Default: 1024.
        corrupted: Whether each clean prompt is followed by its corrupted version. The answer of the clean prompt is then
            ignored (-100), so that the loss is that of the corrupted one. Default: False.
        seed: The seed of the tokens. Default: 0.

    Returns:
        Pairs of tokens int64 [period + position + 1] and the answer, an int64 scalar.

    Raises:
        ValueError: `period` is not less than `vocabulary`, or `position` is not from 0 to `period - 2`.
    """
    if not period < vocabulary:
        raise ValueError(f"period must be less than {vocabulary}, the size of the vocabulary, got {period}")
    if not 0 <= position <= period - 2:
        raise ValueError(f"position must be from 0 to period - 2 = {period - 2}, got {position}")
    tokens = _different_tokens(samples, vocabulary, torch.Generator().manual_seed(2 * seed + (not _is_train(split))))
    prompts = torch.cat([tokens[:, :period], tokens[:, : position + 1]], dim=1)
    answers = tokens[:, position + 1]
    if corrupted:
        others = prompts.clone()
        others[:, position] = tokens[:, period]
        prompts = torch.stack([prompts, others], dim=1).flatten(0, 1)
        answers = torch.stack([torch.full_like(answers, IGNORED), answers], dim=1).flatten()
    return TensorDataset(prompts, answers)


def _different_tokens(samples: int, vocabulary: int, generator: torch.Generator) -> Tensor:
    """Return random permutations of the vocabulary, int64 [samples, vocabulary]."""
    return torch.rand(samples, vocabulary, generator=generator).argsort(dim=1)


class Prompts(list[str | Tensor]):
    """Prompts for a language model. Both splits are the same.

    Args:
        prompts: Texts, or lists of token ids. Default: None, the lines of the file.
        file: The path of a UTF-8 text file with one prompt per line. Empty lines are left out. Default: None.

    Raises:
        ValueError: Neither `prompts` nor `file` is given, or both.
    """

    def __init__(self, prompts: Sequence[str | Sequence[int]] | None = None, file: str | None = None) -> None:
        if (prompts is None) == (file is None):
            raise ValueError("exactly one of prompts and file must be set")
        if file is not None:
            prompts = [line for line in Path(file).read_text(encoding="utf-8").splitlines() if line]
        super().__init__(each if isinstance(each, str) else torch.tensor(each) for each in prompts or ())


@cache
def _digits_table() -> Tensor:
    """Return int64 [1797, 65]: 64 pixels from 0 to 16, and the class."""
    with gzip.open(_scikit_learn("data/digits.csv.gz")) as file:
        return torch.from_numpy(np.loadtxt(file, dtype=np.int64, delimiter=","))


def _scikit_learn(name: str) -> Path:
    spec = find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise DatasetMissingError("scikit-learn is not installed", pip_command("run"))
    file = Path(spec.origin).parent / "datasets" / name
    if not file.exists():
        raise DatasetMissingError(f"scikit-learn has no file {file}")
    return file


def _is_train(split: str) -> bool:
    if split not in ("train", "test"):
        raise ValueError(f"there is no split {split!r}; the splits are train and test")
    return split == "train"


def _torchvision(name: str, split: str, root: str, download: bool) -> Any:
    try:
        import torchvision
    except ModuleNotFoundError:
        raise DatasetMissingError("torchvision is not installed", pip_command("run")) from None

    dataset = getattr(torchvision.datasets, name)
    folder = Path(root).expanduser()
    reason = f"not found in {folder}"
    try:
        return dataset(folder, train=_is_train(split), download=False)
    except RuntimeError:
        if not download:
            raise DatasetMissingError(f"{reason}, and download is false") from None
    new_folders = [path for path in (folder / name / "raw", folder / name, folder) if not path.exists()]
    timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(DOWNLOAD_TIMEOUT)
    try:
        return dataset(folder, train=_is_train(split), download=True)
    except (OSError, RuntimeError) as error:
        for path in new_folders:
            with suppress(OSError):  # not created, or not empty
                path.rmdir()
        cause = " ".join(str(error).split()).rpartition("got: ")[2].rstrip(":")  # of the last address
        raise DatasetMissingError(f"{reason}, and the download failed: {cause}") from None
    finally:
        socket.setdefaulttimeout(timeout)
