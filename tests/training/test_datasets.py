"""The datasets that come with scikit-learn, read without importing it."""

from __future__ import annotations

from importlib.machinery import ModuleSpec

import pytest
import torch

from instrument.training import datasets
from instrument.training.datasets import DatasetMissingError, digits, english


def test_digits_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    found = load_digits()
    train, test = digits("train"), digits("test")
    images = torch.from_numpy(found.images).float().div(16).unsqueeze(1)
    assert torch.equal(torch.cat([train.images, test.images]), images)
    assert train.targets + test.targets == found.target.tolist()
    assert (len(train), len(test)) == (1437, 360)


def test_english_is_the_descriptions_of_scikit_learn() -> None:
    from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_iris, load_wine

    text = "".join(load().DESCR for load in (load_breast_cancer, load_diabetes, load_digits, load_iris, load_wine))
    tokens = text.encode("ascii", "ignore")
    found = english("train", length=8).windows.flatten().tolist()
    assert found == list(tokens[: len(found)])
    assert len(found) == len(tokens) * 9 // 10 // 8 * 8


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
def test_what_scikit_learn_does_not_have_is_a_missing_dataset(
    monkeypatch: pytest.MonkeyPatch, spec: ModuleSpec | None, problem: str
) -> None:
    monkeypatch.setattr(datasets, "find_spec", lambda name: spec)
    with pytest.raises(DatasetMissingError, match=problem):
        english("train")
