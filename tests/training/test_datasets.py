"""The datasets of scikit-learn, read without importing scikit-learn."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch

from instrument.training import datasets
from instrument.training.datasets import (
    DatasetMissingError,
    Images,
    cifar10,
    digits,
    english,
    fashion_mnist,
    induction_prompts,
    mnist,
    repeated_tokens,
)


def test_digits_equal_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    train, test = digits("train"), digits("test")
    images = torch.from_numpy(bunch.images).float().div(16).unsqueeze(1)
    assert torch.equal(torch.cat([train.images, test.images]), images)
    assert train.targets + test.targets == bunch.target.tolist()
    assert (len(train), len(test)) == (1437, 360)


def test_digits_have_random_labels_with_a_probability() -> None:
    true, half, other = digits("train"), digits("train", random_labels=0.5), digits("train", random_labels=0.5, seed=1)
    assert torch.equal(half.images, true.images)
    changed = sum(a != b for a, b in zip(true.targets, half.targets, strict=True)) / len(true)
    assert changed == pytest.approx(0.45, abs=0.04)  # a random class is the true one in a tenth of the cases
    assert digits("train", random_labels=0.5).targets == half.targets != other.targets
    assert digits("test", random_labels=1.0).targets == digits("test").targets
    with pytest.raises(ValueError, match=r"random_labels must be from 0 to 1, got 1\.5"):
        digits("train", random_labels=1.5)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_images_of_a_batch_are_normalised_and_equal_single_images(dtype: torch.dtype) -> None:
    pixels = torch.randint(256, (6, 3, 2, 2)).to(dtype) / (1 if dtype == torch.uint8 else 255)
    images, means, stds = pixels.to(dtype), (0.2, 0.4, 0.6), (0.5, 0.25, 0.125)
    before = images.clone()
    dataset = Images(images, torch.arange(6), (means, stds))
    batch = dataset.__getitems__([4, 0, 4])
    expected = (pixels / 255 if dtype == torch.uint8 else pixels) - torch.tensor(means).view(3, 1, 1)
    expected = expected / torch.tensor(stds).view(3, 1, 1)
    assert [target for _, target in batch] == [4, 0, 4]
    assert all(torch.equal(image, expected[index]) for image, index in batch)
    assert all(torch.equal(image, dataset[index][0]) for image, index in batch)
    assert torch.equal(dataset.images, before)


def test_english_has_the_descriptions_of_scikit_learn() -> None:
    from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_iris, load_wine

    text = "".join(load().DESCR for load in (load_breast_cancer, load_diabetes, load_digits, load_iris, load_wine))
    tokens = text.encode("ascii", "ignore")
    windows = english("train", length=8).flatten().tolist()
    assert windows == list(tokens[: len(windows)])
    assert len(windows) == len(tokens) * 9 // 10 // 8 * 8


def test_repeated_tokens_have_periods_and_depend_on_the_seed() -> None:
    tokens, targets = repeated_tokens("train", vocabulary=9, length=12, periods=[3, 5], samples=50).tensors
    assert tokens.shape == targets.shape == (50, 12)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    is_period = {period: (tokens[:, period:] == tokens[:, :-period]).all(1) for period in (3, 5)}
    assert torch.equal(is_period[3], ~is_period[5])
    assert 10 < int(is_period[3].sum()) < 40
    assert all(len(set(row[:3].tolist())) == 3 for row in tokens)
    assert tokens.unique().tolist() == list(range(9))
    first, again = repeated_tokens("train").tensors, repeated_tokens("train").tensors
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    for other in (repeated_tokens("test"), repeated_tokens("train", seed=1)):
        assert not torch.equal(first[0], other.tensors[0])


def test_repeated_only_ignores_targets_that_nothing_predicts() -> None:
    (tokens, targets), (_, complete) = (
        repeated_tokens("test", periods=[4, 6], samples=20, repeated_only=only).tensors for only in (True, False)
    )
    for row, target, expected in zip(tokens.tolist(), targets.tolist(), complete.tolist(), strict=True):
        for position, token in enumerate(row):
            assert target[position] == (expected[position] if token in row[:position] else -100)


def test_induction_prompts_end_with_a_repeated_token_and_have_its_successor_as_answer() -> None:
    for tokens, answer in induction_prompts("train", vocabulary=8, period=5, position=2, samples=20):
        row = tokens.tolist()
        assert (len(set(row[:5])), row[5:]) == (5, row[:3])
        assert int(answer) == row[3]


def test_corrupted_prompt_follows_the_clean_one_and_differs_at_one_position() -> None:
    clean = induction_prompts("test", samples=20)
    pairs = induction_prompts("test", samples=20, corrupted=True)
    assert len(pairs) == 40
    for i, (tokens, answer) in enumerate(clean):
        (same, ignored), (other, expected) = pairs[2 * i], pairs[2 * i + 1]
        assert torch.equal(same, tokens)
        assert (int(ignored), int(expected)) == (-100, int(answer))
        assert (other != tokens).tolist() == [False, True, False, False, False, False]
        assert int(other[1]) not in tokens.tolist()


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: repeated_tokens("train", vocabulary=6, periods=[4, 7]), "periods must be from 1 to 6"),
        (lambda: induction_prompts("train", vocabulary=4), "period must be less than 4"),
        (lambda: induction_prompts("train", position=3), "position must be from 0 to period - 2 = 2, got 3"),
    ],
)
def test_invalid_sequences_are_refused(make: Callable[[], object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        make()


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        (None, "scikit-learn is not installed"),
        (
            ModuleSpec("sklearn", None, origin="/nowhere/sklearn/__init__.py"),
            "scikit-learn has no file /nowhere/sklearn",
        ),
    ],
)
def test_missing_scikit_learn_file_is_a_missing_dataset(
    monkeypatch: pytest.MonkeyPatch, spec: ModuleSpec | None, problem: str
) -> None:
    monkeypatch.setattr(datasets, "find_spec", lambda name: spec)
    with pytest.raises(DatasetMissingError, match=problem):
        english("train")


class FailingDownload:
    """A dataset of torchvision that creates its folder and then fails to download."""

    def __init__(self, root: Path, train: bool, download: bool) -> None:
        if not download:
            raise RuntimeError("Dataset not found")
        (root / "MNIST" / "raw").mkdir(parents=True)
        raise RuntimeError(
            "Error downloading images.gz:\nTried http://a/, got:\ntimeout\nTried http://b/, got:\nno route to host\n"
        )


def test_failed_download_leaves_no_folder_and_names_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchvision.datasets.MNIST", FailingDownload)
    for root in (tmp_path / "data", tmp_path):
        with pytest.raises(DatasetMissingError, match=r"download failed: no route to host$"):
            mnist("train", str(root))
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("function", [mnist, fashion_mnist, cifar10])
def test_functions_of_torchvision_datasets_can_be_pickled(function: Callable[..., Images]) -> None:
    assert pickle.loads(pickle.dumps(function)) is function
    with pytest.raises(TypeError, match=rf"^{function.__name__}\(\) missing .* 'root'"):
        function("train")
