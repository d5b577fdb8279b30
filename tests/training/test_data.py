"""Dataset slices and batches."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset
from training_runs import DIGITS

from instrument import ConfigError
from instrument.config.experiment import DataConfig, SliceSpec, TrainConfig
from instrument.fields.pip_extras import pip_command
from instrument.training import datasets
from instrument.training.data import load_data, slice_indices
from instrument.training.datasets import digits, random_tensors
from instrument.training.loader import Batches, LoaderOptions, first_batch

CLASSES = [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]


class Numbers(Dataset[tuple[Tensor, int]]):
    """Dataset whose item i is the number i and its class."""

    def __init__(self, classes: list[int] = CLASSES) -> None:
        self.classes = classes

    def __len__(self) -> int:
        return len(self.classes)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.tensor(float(i)), self.classes[i]


class Vectors(Numbers):
    def __getitem__(self, i: int) -> tuple[Tensor, Any]:  # type: ignore[override]
        return torch.tensor(float(i)), torch.ones(3)


def choose_indices(dataset: Dataset[Any] | None = None, **slice_fields: Any) -> list[int]:
    return slice_indices(dataset or Numbers(), SliceSpec(**slice_fields), "data.slice")


@pytest.mark.parametrize(
    ("slice_fields", "indices"),
    [
        ({}, list(range(10))),
        ({"stop": 3}, [0, 1, 2]),
        ({"start": 7}, [7, 8, 9]),
        ({"start": 2, "stop": 8, "stride": 3}, [2, 5]),
        ({"stop": 99}, list(range(10))),
        ({"indices": [9, 0, 4]}, [9, 0, 4]),
        ({"classes": [2]}, [2, 5, 8]),
        ({"classes": [0, 2], "start": 1, "stop": 4}, [2, 3, 5]),  # indices count after the selection of classes
        ({"classes": [1], "indices": [2, 0]}, [7, 1]),
        ({"per_class": 2}, [0, 1, 2, 3, 4, 5]),
        ({"per_class": 1, "start": 3}, [3, 4, 5]),
        ({"per_class": 1, "stop": 2}, [0, 1]),
        ({"classes": [0, 1], "stride": 3, "per_class": 1}, [0, 4]),
    ],
)
def test_slice_selects_classes_then_range_then_per_class(slice_fields: dict[str, Any], indices: list[int]) -> None:
    assert choose_indices(**slice_fields) == indices


def test_shuffle_precedes_the_range_and_depends_on_the_seed() -> None:
    order = choose_indices(shuffle=True, seed=3)
    assert sorted(order) == list(range(10))
    assert order not in (list(range(10)), choose_indices(shuffle=True, seed=4))
    state = torch.get_rng_state()
    assert choose_indices(shuffle=True, seed=3, start=2, stop=8, stride=2) == order[2:8:2]
    assert torch.equal(torch.get_rng_state(), state)
    assert (
        choose_indices(shuffle=True, seed=3, classes=[0], per_class=2)
        == choose_indices(shuffle=True, seed=3, classes=[0])[:2]
    )


@given(
    start=st.integers(0, 12),
    stop=st.one_of(st.none(), st.integers(1, 14)),
    stride=st.integers(1, 5),
    classes=st.one_of(st.none(), st.sets(st.integers(0, 2), min_size=1)),
    per_class=st.one_of(st.none(), st.integers(1, 4)),
    shuffle=st.booleans(),
)
def test_random_slices_match_their_definition(
    start: int, stop: int | None, stride: int, classes: set[int] | None, per_class: int | None, shuffle: bool
) -> None:
    if stop is not None and stop <= start:
        stop = None
    slice_fields = {"start": start, "stop": stop, "stride": stride, "classes": classes, "per_class": per_class}
    everything = [i for i in range(10) if classes is None or CLASSES[i] in classes]
    order = choose_indices(shuffle=shuffle, classes=classes) if shuffle else everything
    expected: list[int] = []
    for i in order[start:stop:stride]:
        if per_class is None or sum(CLASSES[j] == CLASSES[i] for j in expected) < per_class:
            expected.append(i)
    if expected:
        assert choose_indices(shuffle=shuffle, **slice_fields) == expected
    else:
        with pytest.raises(ConfigError, match="the slice is empty"):
            choose_indices(shuffle=shuffle, **slice_fields)


@pytest.mark.parametrize(
    ("dataset", "slice_fields", "message"),
    [
        (Numbers(), {"start": 10}, r"data\.slice: the slice is empty: the split has 10 samples"),
        (Numbers(), {"classes": [7]}, r"data\.slice: the slice is empty"),
        (Numbers(), {"indices": [3, 10, 11]}, r"indices: out of range\n    given    \[10, 11\]\n    allowed  0 to 9"),
        (Vectors(), {"classes": [1]}, "targets of this dataset are not integer classes"),
        (Vectors(), {"per_class": 1}, "targets of this dataset are not integer classes"),
    ],
)
def test_invalid_slice_is_refused(dataset: Numbers, slice_fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_indices(dataset, **slice_fields)


def test_split_is_passed_as_the_dataset_expects_it() -> None:
    data = load_data(DataConfig.model_validate({"dataset": DIGITS, "eval_slice": {"split": "test", "stop": 5}}))
    assert (len(data.train), len(data.test)) == (1437, 5)  # type: ignore[arg-type]
    assert torch.equal(data.test[0][0], digits("test")[0][0])
    assert data.source["train_samples"] == 1437
    assert data.source["fallback"] is None

    given = {"dataset": {"_target_": f"{__name__}.TrainFlag"}, "eval_slice": {"split": "train"}}
    config = DataConfig.model_validate(given)
    assert [len(part) for part in (load_data(config).train, load_data(config).test)] == [10, 10]  # type: ignore[arg-type]


class TrainFlag(Numbers):
    """A dataset with a boolean split, like those of torchvision."""

    def __init__(self, train: bool = True) -> None:
        super().__init__(CLASSES if train else [0])


class Letters(TrainFlag):
    """A dataset like EMNIST: `split` selects one of several datasets, and its base class takes `train`."""

    def __init__(self, split: str, **more: bool) -> None:
        _check_split(split, ("byclass", "letters"))
        super().__init__(**more)


def photos(split: str = "train") -> Numbers:
    """Return a dataset like ImageNet, whose evaluation split is `val`."""
    _check_split(split, ("train", "val"))
    return Numbers(CLASSES if split == "train" else [0])


def pets(split: str = "trainval") -> Numbers:
    """Return a dataset like OxfordIIITPet."""
    _check_split(split, ("trainval", "test"))
    return Numbers(CLASSES if split == "trainval" else [0])


def parts(split: str) -> Numbers:
    """Return a dataset with splits of other names, which are keys."""
    return Numbers({"first": CLASSES, "second": [0]}[split])


def _check_split(split: str, known: tuple[str, ...]) -> None:
    if split not in known:
        raise ValueError(f"Unknown value '{split}' for argument split. Valid values are {known}.")


@pytest.mark.parametrize(
    ("dataset", "slices", "splits"),
    [
        ({"_target_": "Letters", "split": "letters"}, {}, ("train", "test")),
        ({"_target_": "photos"}, {}, ("train", "val")),
        ({"_target_": "photos"}, {"eval_slice": {"split": "val"}}, ("train", "val")),
        ({"_target_": "pets"}, {}, ("trainval", "test")),
        ({"_target_": "parts"}, {"slice": {"split": "first"}, "eval_slice": {"split": "second"}}, ("first", "second")),
    ],
)
def test_splits_of_any_name_are_loaded(
    dataset: dict[str, str], slices: dict[str, Any], splits: tuple[str, str]
) -> None:
    dataset = {**dataset, "_target_": f"{__name__}.{dataset['_target_']}"}
    data = load_data(DataConfig.model_validate({"dataset": dataset, **slices}))
    assert [len(part) for part in (data.train, data.test)] == [10, 1]  # type: ignore[arg-type]
    assert (data.source["train_split"], data.source["eval_split"]) == splits
    assert data.overlap is None


def test_a_split_in_the_configuration_of_the_dataset_is_kept() -> None:
    """Both slices have it, and a warning names the samples that they share."""
    target = {"_target_": f"{__name__}.photos", "split": "val"}
    data = load_data(DataConfig.model_validate({"dataset": target}))
    assert [len(part) for part in (data.train, data.test)] == [1, 1]  # type: ignore[arg-type]
    assert data.overlap is not None
    assert "1 of 1 evaluation samples are training samples too" in data.overlap


@pytest.mark.parametrize(
    ("dataset", "slices", "message"),
    [
        ({"_target_": "photos", "split": "train"}, {"eval_slice": {"split": "val"}}, r"data\.eval_slice\.split: data\.dataset\.split"),
        ({"_target_": "photos"}, {"slice": {"split": "tain"}}, r"data\.slice\.split: .* the split 'tain' \(ValueError: .*Valid values"),
        ({"_target_": "parts"}, {}, r"data\.slice\.split: .* a split 'train' or 'trainval' \(KeyError: 'train'\)"),
        ({"_target_": "Letters", "split": "letters"}, {"slice": {"split": "letters"}}, r"data\.slice\.split: .*takes train=True or False"),
        ({"_target_": "Numbers"}, {"slice": {"split": "val"}}, r"data\.slice\.split: .*takes neither 'split' nor 'train'"),
        ({"_target_": "Letters"}, {}, r"data\.dataset: .*missing 1 required positional argument: 'split'"),
    ],
)  # fmt: skip
def test_unknown_split_is_refused(dataset: dict[str, str], slices: dict[str, Any], message: str) -> None:
    dataset = {**dataset, "_target_": f"{__name__}.{dataset['_target_']}"}
    with pytest.raises(ConfigError, match=message):
        load_data(DataConfig.model_validate({"dataset": dataset, **slices}))


@pytest.mark.parametrize(
    ("target", "slices", "words"),
    [
        ("Numbers", {}, "10 of 10 evaluation samples are training samples too, because"),
        ("Numbers", {"slice": {"stop": 8}, "eval_slice": {"start": 5}}, "3 of 5 evaluation samples"),
        ("Numbers", {"slice": {"stop": 8}, "eval_slice": {"start": 8}}, None),
        ("TrainFlag", {"eval_slice": {"split": "train"}}, None),
        ("Counted", {"eval_slice": {"stop": 9}}, "evaluation samples are training samples too"),
        ("Counted", {"slice": {"start": 9}, "eval_slice": {"stop": 9}}, None),
    ],
)
def test_samples_for_training_and_evaluation_are_reported(
    target: str, slices: dict[str, Any], words: str | None
) -> None:
    config = DataConfig.model_validate({"dataset": {"_target_": f"{__name__}.{target}"}, **slices})
    overlap = load_data(config).overlap
    assert words in overlap if words and overlap else overlap == words
    assert load_data(config, evaluates=False).overlap is None


class Counted(IterableDataset[int]):
    """An iterable dataset without splits."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(20))


def test_missing_dataset_falls_back_only_if_configured() -> None:
    target = {"_target_": "instrument.training.datasets.mnist", "root": "nowhere", "download": False}
    with pytest.raises(ConfigError, match="Do one of the following"):
        load_data(DataConfig.model_validate({"dataset": target, "root": "nowhere"}))
    data = load_data(DataConfig.model_validate({"dataset": target, "root": "nowhere", "fallback": "digits"}))
    assert data.train[0][0].shape == (1, 28, 28)
    assert data.source["fallback"] is not None
    assert "mnist is missing" in data.source["fallback"]


@pytest.mark.parametrize(("fallback", "package"), [(None, "torchvision"), ("digits", "scikit-learn")])
def test_missing_package_is_reported_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, fallback: str | None, package: str
) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.setattr(datasets, "find_spec", lambda name: None)
    monkeypatch.setattr(datasets, "_digits_table", datasets._digits_table.__wrapped__)  # not cached
    target = {"_target_": "instrument.training.datasets.mnist", "root": "nowhere"}
    with pytest.raises(ConfigError) as refused:
        load_data(DataConfig.model_validate({"dataset": target, "fallback": fallback}))
    (problem,) = refused.value.problems
    assert problem.message.endswith(f"is missing: {package} is not installed")
    assert problem.fix == pip_command("run")


def test_digits_are_normalized_and_can_be_resized() -> None:
    train = digits("train")
    assert train[0][0].shape == (1, 8, 8)
    assert digits("train", size=28)[0][0].shape == (1, 28, 28)
    assert set(Counter(train.targets)) == set(range(10))
    pixels = torch.stack([train[i][0] for i in range(len(train))])
    assert abs(pixels.mean()) < 0.01
    assert abs(pixels.std() - 1) < 0.01


def test_random_tensors_depend_on_split_and_seed() -> None:
    def first(split: str, seed: int) -> Tensor:
        return random_tensors(split, shape=(2, 3), samples=4, seed=seed)[0][0]

    assert torch.equal(first("train", 0), first("train", 0))
    drawn = [first(split, seed) for seed in range(3) for split in ("train", "test")]
    assert len({tuple(tensor.flatten().tolist()) for tensor in drawn}) == 6


@pytest.mark.parametrize("shape", [(), (7,), (5, 7), (3, 8, 8), (2, 3, 4, 5)])
def test_random_tensors_have_any_shape(shape: tuple[int, ...]) -> None:
    dataset = random_tensors("train", shape=shape, classes=4, samples=200)
    assert len(dataset) == 200
    assert {item[0].shape for item in dataset} == {shape}
    assert sorted({int(target) for _, target in dataset}) == [0, 1, 2, 3]
    assert len(choose_indices(dataset, per_class=2)) == 8


def numbers_of(group: list[Any]) -> list[list[int]]:
    return [[int(i) for i in each.batch[0]] for each in group]


def batches(seed: int = 0, **train: Any) -> list[tuple[int, list[list[int]]]]:
    loader = Batches(Numbers(), TrainConfig(**{"steps": None, "epochs": None, **train}), LoaderOptions(seed=seed))
    result = [(epoch, numbers_of(group)) for epoch, group in loader]
    assert loader.steps == len(result)
    return result


def test_epoch_has_every_sample_once_in_a_new_order_of_the_seed() -> None:
    result = batches(epochs=3, batch_size=4)
    assert [epoch for epoch, _ in result] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [[len(batch) for batch in group] for _, group in result] == [[4], [4], [2]] * 3
    orders = [[i for epoch, group in result if epoch == e for batch in group for i in batch] for e in range(3)]
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    assert batches(seed=1, epochs=2, batch_size=4) == batches(seed=1, epochs=2, batch_size=4)
    assert batches(seed=1, epochs=2, batch_size=4) != batches(seed=2, epochs=2, batch_size=4)


def test_last_step_of_an_epoch_can_have_fewer_micro_batches() -> None:
    result = batches(epochs=2, batch_size=2, accumulate=2)  # 5 batches per epoch
    assert [len(group) for _, group in result] == [2, 2, 1, 2, 2, 1]
    assert [epoch for epoch, _ in result] == [0, 0, 0, 1, 1, 1]
    assert sorted(i for epoch, group in result if epoch == 0 for batch in group for i in batch) == list(range(10))


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 7])
def test_number_of_epochs_follows_from_the_steps(steps: int) -> None:
    result = batches(steps=steps, batch_size=4)
    assert [epoch for epoch, _ in result] == [step // 3 for step in range(steps)]


def test_first_batch_does_not_change_the_order() -> None:
    loader = Batches(Numbers(), TrainConfig(steps=3, epochs=None, batch_size=4), LoaderOptions(seed=5))
    state = torch.get_rng_state()
    assert numbers_of([first_batch(Numbers(), 4)]) == [[0, 1, 2, 3]]
    assert numbers_of([first_batch(Numbers(), 64)]) == [[*range(10)]]
    assert torch.equal(torch.get_rng_state(), state)
    assert [(epoch, numbers_of(group)) for epoch, group in loader] == batches(seed=5, steps=3, batch_size=4)


@pytest.mark.parametrize(("batch_size", "accumulate"), [(4, 1), (3, 2), (4, 3), (64, 1), (3, 3)])
def test_sizes_predicts_the_batch_sizes_of_a_step(batch_size: int, accumulate: int) -> None:
    loader = Batches(Numbers(), TrainConfig(steps=7, epochs=None, batch_size=batch_size, accumulate=accumulate))
    for step, (_, group) in enumerate(loader):
        assert [len(each.batch[0]) for each in group] == loader.sizes(step)
