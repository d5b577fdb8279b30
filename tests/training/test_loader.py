"""Loading of batches: workers, samplers, custom collate functions, iterable datasets, ranks and resume."""

from __future__ import annotations

import multiprocessing
import random
import re
from collections.abc import Iterator
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    WeightedRandomSampler,
    default_collate,
)
from training_runs import compose, resume_here, train_here

import instrument
from instrument import ConfigError, InstrumentError
from instrument.config.experiment import DataConfig, TrainConfig
from instrument.fields.field_types import Target
from instrument.training.data import build_sampler, load_data, loader_options
from instrument.training.experiment import Experiment
from instrument.training.loader import Batches, BatchShard, Loader, LoaderOptions, Slice, Stream, first_batch, lists

SAMPLES = 11


def noise() -> Tensor:
    """Return three random numbers, each from another global generator."""
    return torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()])


class Augmented(Dataset[Any]):
    """A dataset whose items contain random numbers."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, noise()


class Endless(IterableDataset[Any]):
    """An iterable dataset with random numbers. It ends after `size` samples."""

    def __init__(self, size: int = SAMPLES) -> None:
        self.size = size

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        for index in range(self.size):
            yield index, noise()


def noisy_collate(items: list[Any]) -> Any:
    return [*default_collate(items), noise()]


def batches_of(stream: bool, workers: int = 0, rank: int = 0, ranks: int = 1, **fields: Any) -> Batches:
    config = TrainConfig(**{"steps": 7, "batch_size": 4, "accumulate": 2, **fields})
    options = LoaderOptions(noisy_collate, num_workers=workers, seed=3, shard=BatchShard(rank, ranks))
    dataset: Dataset[Any] = Stream(Endless(), 0, None) if stream else Augmented()
    return Batches(dataset, config, options)


def contents(batches: Batches, stop: int | None = None) -> list[Any]:
    """Return the epoch, the numbers and the sizes of each step."""
    found = []
    for epoch, group in batches:
        values = [
            (numbers.tolist(), augmented.tolist(), added.tolist())
            for numbers, augmented, added in (each.batch for each in group)
        ]
        sizes, total = [each.samples for each in group], sum(each.total for each in group)
        found.append((epoch, sizes, total, values))
        if len(found) == stop:
            break
    return found


def random_states() -> str:
    return repr((random.getstate(), np.random.get_state(), torch.get_rng_state().tolist()))


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True], ids=["items", "stream"])
def test_workers_give_identical_batches(stream: bool) -> None:
    before = random_states()
    expected = contents(batches_of(stream))
    assert len(expected) == 7
    assert [epoch for epoch, *_ in expected] == [0, 0, 1, 1, 2, 2, 3]
    assert [sizes for _, sizes, *_ in expected] == [[4, 4], [3]] * 3 + [[4, 4]]
    torch.rand(3)  # The batches do not depend on the state of the training.
    between = random_states()
    assert contents(batches_of(stream, workers=1 if stream else 2)) == expected
    assert random_states() == between != before
    augmented = [row for *_, values in expected for _, rows, added in values for row in [*rows, added]]
    assert len({tuple(row) for row in augmented}) == len(augmented)


@pytest.mark.spread(6)
@pytest.mark.parametrize("stream", [False, True], ids=["items", "stream"])
@pytest.mark.parametrize("done", [1, 2, 3, 6])
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_resumed_batches_equal_uninterrupted_ones(stream: bool, done: int, workers: int) -> None:
    expected = contents(batches_of(stream))
    interrupted = batches_of(stream, workers)
    assert contents(interrupted, stop=done) == expected[:done]
    resumed = batches_of(stream, workers)
    resumed.load_state_dict(interrupted.state_dict())
    assert contents(resumed) == expected[done:]


@pytest.mark.parametrize("stream", [False, True], ids=["items", "stream"])
def test_ranks_share_each_batch(stream: bool) -> None:
    expected = contents(batches_of(stream))
    parts = [contents(batches_of(stream, rank=rank, ranks=3)) for rank in range(3)]
    for (_, _, samples, values), *shares in zip(expected, *parts, strict=True):
        assert [share[2] for share in shares] == [samples] * 3
        for number, (indices, *_) in enumerate(values):
            assert [*chain(*(share[3][number][0] for share in shares))] == indices
        assert all(sum(share[1][number] for share in shares) == len(values[number][0]) for number in range(len(values)))


def test_incomplete_batch_of_a_stream_is_left_out_if_a_rank_gets_no_sample() -> None:
    half = LoaderOptions(shard=BatchShard(0, 2))
    loader = Loader(Stream(Endless(9), 0, None), 4, half)
    assert [loaded.total for loaded in loader] == [4, 4]
    assert [loaded.total for loaded in Loader(Stream(Endless(10), 0, None), 4, half)] == [4, 4, 2]


@pytest.mark.parametrize(("start", "stop", "expected"), [(0, None, 11), (3, 8, 5), (3, 99, 8)])
def test_stream_is_sliced(start: int, stop: int | None, expected: int) -> None:
    loader = Loader(Stream(Endless(), start, stop), 2)
    numbers = [number for loaded in loader for number in loaded.batch[0].tolist()]
    assert numbers == list(range(start, start + expected))
    assert [loaded.batch[0].tolist() for loaded in loader] == [loaded.batch[0].tolist() for loaded in loader]


class Failing(Augmented):
    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        if index == 6:
            raise ValueError("item 6 is damaged")
        return super().__getitem__(index)


@pytest.mark.slow
def test_workers_end_with_the_iteration() -> None:
    options = LoaderOptions(num_workers=2)
    with closing(iter(Loader(Augmented(), 2, options=options))) as batches:  # type: ignore[type-var]
        next(batches)
        assert len(multiprocessing.active_children()) == 2
    assert not multiprocessing.active_children()
    with pytest.raises(ValueError, match="item 6 is damaged") as caught:  # keeps its traceback, with all frames
        list(Loader(Failing(), 2, options=options))
    assert caught.value.__traceback__ is not None
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_error_in_a_step_ends_the_workers() -> None:
    def failing_loop() -> None:
        for _ in batches_of(stream=False, workers=2):
            assert len(multiprocessing.active_children()) == 2
            raise RuntimeError("the step failed")

    with pytest.raises(RuntimeError, match="the step failed") as caught:
        failing_loop()
    assert caught.value.__traceback__ is not None
    assert not multiprocessing.active_children()


def test_first_batch_starts_no_worker_and_keeps_random_states() -> None:
    before = random_states()
    loaded = first_batch(Augmented(), 4, options=LoaderOptions(num_workers=2))
    assert (loaded.batch[0].tolist(), loaded.samples) == ([0, 1, 2, 3], 4)
    assert random_states() == before
    loaded = first_batch(Stream(Endless(), 2, None), 4, LoaderOptions(shard=BatchShard(1, 2)))
    assert (loaded.batch[0].tolist(), loaded.samples, loaded.total) == ([4, 5], 2, 4)


class EveryOther(Sampler[int]):
    """Every other index, starting at the number of the epoch."""

    def __init__(self, dataset: Any) -> None:
        self.size, self.epoch = len(dataset), 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[int]:
        return iter([(self.epoch + 2 * i) % self.size for i in range(4)])


def heavy(dataset: Any, samples: int = 20) -> WeightedRandomSampler:
    """Draw the first samples more often."""
    return WeightedRandomSampler([1.0 / (i + 1) for i in range(len(dataset))], samples)


def sampled(target: str, rank: int = 0, ranks: int = 1, epochs: int = 3, **arguments: Any) -> Batches:
    sampler = build_sampler(Target.model_validate({"_target_": target, **arguments}), Augmented())
    config = TrainConfig(steps=None, epochs=epochs, batch_size=4)
    return Batches(Augmented(), config, LoaderOptions(seed=3, shard=BatchShard(rank, ranks)), sampler=sampler)


def orders(batches: Batches) -> list[list[int]]:
    """Return the indices of each epoch."""
    found: dict[int, list[int]] = {}
    for epoch, group in batches:
        found.setdefault(epoch, []).extend(chain(*(each.batch[0].tolist() for each in group)))
    return list(found.values())


@pytest.mark.parametrize(
    ("target", "arguments", "length"),
    [
        ("torch.utils.data.RandomSampler", {"replacement": True, "num_samples": 20}, 20),
        ("torch.utils.data.RandomSampler", {}, SAMPLES),
        (f"{__name__}.heavy", {"samples": 9}, 9),
    ],
)
def test_sampler_gives_a_new_order_in_each_epoch(target: str, arguments: dict[str, Any], length: int) -> None:
    before = random_states()
    found = orders(sampled(target, **arguments))
    assert [len(order) for order in found] == [length] * 3
    assert len({tuple(order) for order in found}) == 3
    assert random_states() == before
    torch.rand(1)
    assert orders(sampled(target, **arguments)) == found
    batches = sampled(target, **arguments)
    assert [batches.sizes(step) for step in range(batches.steps)] == [
        [each.samples for each in group] for _, group in batches
    ]


def test_sampler_can_use_the_epoch_or_keep_the_order() -> None:
    assert orders(sampled(f"{__name__}.EveryOther")) == [[0, 2, 4, 6], [1, 3, 5, 7], [2, 4, 6, 8]]
    assert orders(sampled("torch.utils.data.SequentialSampler", epochs=2)) == [list(range(SAMPLES))] * 2


@pytest.mark.parametrize("target", [f"{__name__}.heavy", f"{__name__}.EveryOther"])
def test_sampler_is_the_same_with_ranks_and_after_a_resume(target: str) -> None:
    expected = [[*chain(*(each.batch[0].tolist() for each in group))] for _, group in sampled(target)]
    shares = [list(sampled(target, rank, 2)) for rank in range(2)]
    joined = [[*chain(*(group[0].batch[0].tolist() for _, group in parts))] for parts in zip(*shares, strict=True)]
    assert joined == expected
    interrupted = sampled(target)
    with closing(iter(interrupted)) as steps:  # type: ignore[type-var]
        for _ in range(2):
            next(steps)
    resumed = sampled(target)
    resumed.load_state_dict(interrupted.state_dict())
    assert [[*chain(*(each.batch[0].tolist() for each in group))] for _, group in resumed] == expected[2:]


def out_of_range(dataset: Any) -> list[int]:
    return [0, SAMPLES]


def batch_lists(dataset: Any) -> list[list[int]]:
    return [[0, 1], [2, 3]]


def distributed(dataset: Any) -> DistributedSampler[int]:
    return DistributedSampler(dataset, 2, 0)


def without_length(dataset: Any) -> Iterator[int]:
    yield 0


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (f"{__name__}.out_of_range", r"invalid indices in epoch 0\n    given    index 11\n    allowed  2 integers from 0 to 10"),
        (f"{__name__}.batch_lists", r"invalid indices in epoch 0\n    given    index \[0, 1\]"),
        (f"{__name__}.without_length", r"must have a length and be iterable, but .* returned generator"),
        (f"{__name__}.Failing", r"data.sampler: .*could not be built"),
        (f"{__name__}.distributed", "the samples are distributed over the processes by this package"),
    ],
)  # fmt: skip
def test_invalid_sampler_is_refused(target: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sampled(target)


def padded(items: list[Any], value: float = 0.0) -> Any:
    return torch.nn.utils.rnn.pad_sequence([item[0] for item in items], batch_first=True, padding_value=value)


class Padding:
    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, items: list[Any]) -> Any:
        return padded(items, self.value)


@pytest.mark.spread(1)
@pytest.mark.parametrize("target", ["padded", "Padding"])
def test_collate_fn_is_a_function_or_an_instance(target: str) -> None:
    collate = {"_target_": f"{__name__}.{target}", "value": 7.0}
    config = DataConfig.model_validate({"dataset": {"_target_": "x"}, "collate_fn": collate})
    dataset: Any = [(torch.ones(2),), (torch.ones(3),)]
    options = loader_options(config, 0, pins_memory=False)
    for workers in (0, 1):
        loaded = next(iter(Loader(dataset, 2, options=LoaderOptions(options.collate_fn, workers))))
        assert loaded.batch.tolist() == [[1.0, 1.0, 7.0], [1.0, 1.0, 1.0]]


def test_collate_fn_that_is_no_function_is_refused() -> None:
    collate = {"_target_": f"{__name__}.Augmented"}
    config = DataConfig.model_validate({"dataset": {"_target_": "x"}, "collate_fn": collate})
    with pytest.raises(ConfigError, match=r"data\.collate_fn: instances of .*Augmented cannot be called"):
        loader_options(config, 0, pins_memory=False)


def test_memory_is_pinned_only_for_a_gpu() -> None:
    config = DataConfig.model_validate({"dataset": {"_target_": "x"}, "pin_memory": True})
    assert not loader_options(config, 0, pins_memory=False).pin_memory
    assert loader_options(config, 0, pins_memory=True).pin_memory


def test_fields_of_samples_become_lists() -> None:
    assert lists([(1, "a"), (2, "b")]) == ([1, 2], ["a", "b"])


class Stopping(Augmented):
    """A dataset that raises StopIteration for its last sample."""

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return next(iter(())) if index == SAMPLES - 1 else super().__getitem__(index)


class StoppingBatches(Stopping):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def stopping_collate(items: list[Any]) -> Any:
    return next(iter(())) if items[-1][0] == SAMPLES - 1 else items


@pytest.mark.spread(3)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("dataset", "collate", "samples"),
    [
        (Stopping(), default_collate, "[10]"),
        (StoppingBatches(), default_collate, "[8, 9, 10]"),
        (Augmented(), stopping_collate, "[8, 9, 10]"),
    ],
)
def test_stop_iteration_does_not_end_a_pass(dataset: Any, collate: Any, samples: str, workers: int) -> None:
    options = LoaderOptions(collate, num_workers=workers)
    batches = Loader(Slice(dataset, range(SAMPLES)), 4, options=options).load("eval")
    assert [len(next(batches).indices) for _ in range(2)] == [4, 4]
    with pytest.raises(RuntimeError, match=re.escape(f"raised StopIteration for samples {samples}")):
        next(batches)


class Rows(Augmented):
    """A dataset that gets the items of a batch as one array."""

    def __getitems__(self, indices: list[int]) -> Any:
        return np.arange(float(SAMPLES)).reshape(SAMPLES, 1)[indices]


@pytest.mark.parametrize("dataset", [Rows(), Slice(Rows(), range(SAMPLES))], ids=["dataset", "slice"])
def test_items_of_a_batch_can_be_an_array(dataset: Any) -> None:
    batches = [loaded.batch for loaded in Loader(dataset, 4)]
    assert torch.equal(torch.cat(batches), torch.arange(float(SAMPLES), dtype=torch.float64).reshape(SAMPLES, 1))


class MissingColumn(Augmented):
    """A dataset that reads a missing column. pandas raises the error from another one, which it has caught itself."""

    def __getitem__(self, index: int) -> Any:
        return pd.DataFrame({"image": range(SAMPLES)})["label"][index]


def test_error_that_a_library_chains_is_reported_with_the_line_of_the_dataset() -> None:
    with pytest.raises(ConfigError, match=r"its samples cannot be loaded \(in .*test_loader.py.*__getitem__\)"):
        first_batch(MissingColumn(), 2)


def test_stop_iteration_in_the_first_batch_names_its_line() -> None:
    with pytest.raises(
        ConfigError, match=r"its samples cannot be loaded \(in .*test_loader.py.*__getitem__\)"
    ) as error:
        first_batch(Stopping(), SAMPLES)
    assert "StopIteration for samples [10]" in str(error.value)


def test_items_that_cannot_be_collated_are_reported() -> None:
    dataset: Any = [torch.ones(2), torch.ones(3)]
    with pytest.raises(ConfigError, match=r"data\.dataset: its items cannot be collated[\s\S]*set data\.collate_fn"):
        first_batch(dataset, 2)
    with pytest.raises(ConfigError, match=r"data\.collate_fn: its items cannot be collated[\s\S]*KeyError"):
        first_batch(dataset, 2, options=LoaderOptions(lambda items: {}[0]))


def endless(split: str, size: int = SAMPLES) -> Endless:
    return Endless(size)


def iterator(split: str) -> Iterator[Any]:
    return iter(Endless())


class WithoutLength:
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"slice": {"classes": [1], "stride": 2}}, r"data\.slice: the dataset is iterable .* so classes, stride cannot be"),
        ({"eval_slice": {"shuffle": True}}, r"data\.eval_slice: the dataset is iterable"),
        ({"num_workers": 2}, r"data\.num_workers: .* one worker at most reads it\n    given    2\n    allowed  0, 1"),
        ({"sampler": {"_target_": f"{__name__}.heavy"}}, r"data\.sampler: a sampler requires a dataset with a length"),
        ({"dataset": {"_target_": f"{__name__}.iterator"}}, r"data\.dataset: .* an iterator, which can be read only once"),
        ({"dataset": {"_target_": f"{__name__}.WithoutLength"}}, r"data\.dataset: must be a dataset, but[\s\S]*__iter__"),
    ],
)  # fmt: skip
def test_options_that_need_a_length_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_data(DataConfig.model_validate({"dataset": {"_target_": f"{__name__}.endless"}, **fields}))


def test_epochs_of_a_stream_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.epochs: .*steps per epoch is unknown[\s\S]*train\.steps=N"):
        Batches(Stream(Endless(), 0, None), TrainConfig(epochs=2))


def test_empty_stream_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.slice: the slice is empty"):
        first_batch(Stream(Endless(), 50, None), 4)
    with pytest.raises(InstrumentError, match="no samples for step 0, in epoch 0"):
        next(iter(Batches(Stream(Endless(), 50, None), TrainConfig(steps=1))))


SOURCE = """
from pathlib import Path

import torch
from torch.utils.data import IterableDataset

from instrument.training.datasets import digits


class Digits(IterableDataset):
    def __init__(self, split):
        self.items = digits(split)
        self.passes = 0

    def __iter__(self):
        self.passes += 1
        for index in range(100):
            if self.passes == 3 and index == 45 and Path("damaged").exists():  # in epoch 1, after the first batch
                raise OSError("the stream ended")
            image, label = self.items[index]
            yield image + 0.1 * torch.rand(image.shape), label
"""
RUN = (
    *("model=mlp", "model.sizes=[64,10]", "data={dataset: {_target_: streamed.Digits}}"),
    "train={steps: 6, batch_size: 30, eval_every: 3, eval_batch_size: 40, checkpoint: {every: 5}}",
    "+hooks.seen={layers: '**', kind: forward, action: record}",
    "+hooks.tested={layers: '**', kind: forward, action: record, phase: eval}",
)


@pytest.mark.slow
def test_run_on_a_stream_evaluates_until_its_end_and_resumes(cli: Any, workdir: Any) -> None:
    (workdir / "streamed.py").write_text(SOURCE)
    assert "a stream of training samples" in cli(*RUN, "hydra.run.dir=whole").expect(0).out
    run = instrument.load("whole")
    assert run.metrics.query("phase == 'train'").epoch.tolist() == [0, 0, 0, 0, 1, 1]  # batches of 30, 30, 30, 10
    assert run.stats.query("hook == 'tested' and layer == '' and step == 3")["numel"].tolist() == [400, 400, 200]
    assert not run.coverage.query("fired < expected").size
    loaded = train_here(workdir / "loaded", *RUN, "+data.num_workers=1")
    assert loaded.metrics.loss.tolist() == run.metrics.loss.tolist()
    assert not multiprocessing.active_children()
    cli(*RUN, "plan=true").expect(0)
    (workdir / "damaged").touch()
    with pytest.raises(OSError, match="the stream ended"):
        train_here(workdir / "interrupted", *RUN)
    (workdir / "damaged").unlink()
    resumed = resume_here(workdir / "interrupted")
    assert (resumed.metrics.loss.tolist(), resumed.info["status"]) == (run.metrics.loss.tolist(), "done")
    assert resumed.stats.drop(columns="rank").equals(run.stats.drop(columns="rank"))


def test_configuration_of_a_stream_is_checked(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (workdir / "streamed.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(workdir)
    with pytest.raises(ConfigError, match=r"train\.epochs: the dataset is iterable and has no length"):
        Experiment(compose(*RUN, "train.steps=null", "train.epochs=1")[0])
