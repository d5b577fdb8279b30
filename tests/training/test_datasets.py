"""The datasets of scikit-learn, read without importing scikit-learn."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch

from instrument.training import datasets
from instrument.training.datasets import DatasetMissingError, digits, english, mnist


def test_digits_equal_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    train, test = digits("train"), digits("test")
    images = torch.from_numpy(bunch.images).float().div(16).unsqueeze(1)
    assert torch.equal(torch.cat([train.images, test.images]), images)
    assert train.targets + test.targets == bunch.target.tolist()
    assert (len(train), len(test)) == (1437, 360)


def test_english_has_the_descriptions_of_scikit_learn() -> None:
    from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_iris, load_wine

    text = "".join(load().DESCR for load in (load_breast_cancer, load_diabetes, load_digits, load_iris, load_wine))
    tokens = text.encode("ascii", "ignore")
    windows = english("train", length=8).windows.flatten().tolist()
    assert windows == list(tokens[: len(windows)])
    assert len(windows) == len(tokens) * 9 // 10 // 8 * 8


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
        raise RuntimeError("Error downloading images.gz:\nno route to host")


def test_failed_download_leaves_no_folder_and_names_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchvision.datasets.MNIST", FailingDownload)
    for root in (tmp_path / "data", tmp_path):
        with pytest.raises(
            DatasetMissingError, match=r"download failed: Error downloading images.gz: no route to host$"
        ):
            mnist("train", str(root))
        assert list(tmp_path.iterdir()) == []
