"""Datasets of a run: the training slice, the evaluation slice, and their batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset, Subset

from ..distributed.batch_sharding import FULL_BATCH, BatchShard, IndexedLoader, StepBatches, sequential_loader
from ..errors import ConfigError, Problem, user_code_location
from ..nested import number_of_samples, shapes
from ..spec.config import DataConfig, SliceSpec, TrainConfig
from ..spec.field_types import Target
from ..targets import argument_names, build
from .datasets import DatasetMissingError

DIGITS_AS_MNIST = Target.model_validate({"_target_": "instrument.training.datasets.digits", "size": 28})


@dataclass(frozen=True)
class Data:
    """The two slices of a dataset and their origin.

    Attributes:
        train: The training slice.
        test: The evaluation slice.
        source: The entry `data` of run.json: the target of the dataset, its root, the number of samples of both slices,
            and the reason for the fallback (None if the requested dataset is used).
    """

    train: Subset[Any]
    test: Subset[Any]
    source: dict[str, Any]

    @property
    def fallback(self) -> str | None:
        """The message about the fallback dataset and its reason; None if the requested dataset is used."""
        reason: str | None = self.source["fallback"]
        return reason


def load_data(config: DataConfig) -> Data:
    """Load both slices.

    Args:
        config: The `data` section.

    Returns:
        The slices and their origin.

    Raises:
        ConfigError: The dataset is missing and no fallback is configured; its target does not exist or raises an
            exception; or a slice is empty.
    """
    target, fallback = config.dataset, None
    try:
        train, test = (_load(target, which) for which in (config.slice, config.eval_slice))
    except DatasetMissingError as missing:
        if config.fallback is None:
            raise ConfigError(_missing_dataset_problem(config, missing)) from None
        fallback = f"{target.target} is missing ({missing}); using the digits of scikit-learn instead, resized to 28x28"
        target = DIGITS_AS_MNIST
        train, test = (_load(target, which) for which in (config.slice, config.eval_slice))
    chosen = Subset(train, slice_indices(train, config.slice, "data.slice"))
    evaluated = Subset(test, slice_indices(test, config.eval_slice, "data.eval_slice"))
    source = {
        "dataset": target.target,
        "root": config.root,
        "train_samples": len(chosen),
        "eval_samples": len(evaluated),
        "fallback": fallback,
    }
    return Data(chosen, evaluated, source)


def _load(target: Target, which: SliceSpec) -> Dataset[Any]:
    """Build the dataset. The split is passed as `split=`, or as `train=` for the datasets of torchvision."""
    parameters = argument_names(target.target, "data.dataset")
    arguments: dict[str, Any] = {}
    if "split" in parameters:
        arguments["split"] = which.split
    elif "train" in parameters:
        arguments["train"] = which.split == "train"
    try:
        dataset = build(target, "data.dataset", **arguments)
    except ConfigError as error:
        if (missing := _missing(error)) is not None:
            raise missing from None
        raise
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        problem = Problem(
            "data.dataset",
            "must be a dataset with a length and items (input, target), "
            f"but {target.target} returned {type(dataset).__name__}",
        )
        raise ConfigError(problem)
    return dataset  # type: ignore[no-any-return]


def _missing(error: BaseException | None) -> DatasetMissingError | None:
    """Return the `DatasetMissingError` in the chain of causes of an error; None if it contains none."""
    while error is not None:
        if isinstance(error, DatasetMissingError):
            return error
        error = error.__cause__
    return None


def _missing_dataset_problem(config: DataConfig, missing: DatasetMissingError) -> Problem:
    """Return the error for a missing dataset, with the ways to fix it."""
    return Problem(
        "data.dataset",
        f"{config.dataset.target} is missing: {missing}. Do one of the following:\n"
        "    1. store it in the layout of torchvision, and set data.root=FOLDER or the environment variable INSTRUMENT_DATA=FOLDER\n"
        "    2. run once with a network connection and data.dataset.download=true\n"
        "    3. use a dataset that requires no download: data=digits, or data.fallback=digits as a fallback",
    )


def slice_indices(dataset: Dataset[Any], which: SliceSpec, where: str) -> list[int]:
    """Return the indices of the samples in a slice.

    The fields of the slice apply in this order: `classes`, `shuffle`, `indices` or `start`/`stop`/`stride`,
    `per_class`.

    Args:
        dataset: The dataset, with a length.
        which: The slice.
        where: The configuration key of the slice, for error messages.

    Returns:
        Indices into the dataset; at least one.

    Raises:
        ConfigError: The slice is empty, an index is out of range, or the dataset has no integer classes.
    """
    size = len(dataset)  # type: ignore[arg-type]
    indices = list(range(size))
    if which.classes is not None:
        targets = _targets(dataset, f"{where}.classes")
        indices = [i for i in indices if targets[i] in which.classes]
    if which.shuffle:
        order = torch.randperm(len(indices), generator=torch.Generator().manual_seed(which.seed)).tolist()
        indices = [indices[i] for i in order]
    if which.indices is not None:
        out_of_range = [i for i in which.indices if i >= len(indices)]
        if out_of_range:
            raise ConfigError(
                Problem(f"{where}.indices", "out of range", given=out_of_range, allowed=f"0 to {len(indices) - 1}")
            )
        indices = [indices[i] for i in which.indices]
    else:
        indices = indices[which.start : which.stop : which.stride]
    if which.per_class is not None:
        targets, counts = _targets(dataset, f"{where}.per_class"), dict[Any, int]()
        selected = []
        for i in indices:
            counts[targets[i]] = counts.get(targets[i], 0) + 1
            if counts[targets[i]] <= which.per_class:
                selected.append(i)
        indices = selected
    if not indices:
        written = which.model_dump(exclude_defaults=True)
        raise ConfigError(
            Problem(where, f"the slice is empty: the {which.split} split has {size} samples", given=written)
        )
    return indices


def _targets(dataset: Dataset[Any], where: str) -> list[int]:
    """Return the class of each sample.

    The classes are the attribute `targets` of torchvision datasets, or else the second element of each sample.

    Raises:
        ConfigError: The targets cannot be converted to integers.
    """
    targets = getattr(dataset, "targets", None)
    try:
        if targets is None:
            targets = [dataset[i][1] for i in range(len(dataset))]  # type: ignore[arg-type]
        return [int(target) for target in targets]
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        raise ConfigError(
            Problem(where, f"the targets of this dataset are not integer classes: {type(error).__name__}: {error}")
        ) from None


class Batches:
    """An iterator over the steps of a training run. The samples are shuffled again in each epoch.

    Args:
        dataset: The training slice.
        config: The `train` section: batch size, micro-batches per step, and the number of steps or epochs.
        seed: The seed of the shuffle.
        shard: The part of each batch that this process gets. Default: the full batch.

    Attributes:
        micro_batches_per_epoch: The number of micro-batches per epoch.
        steps: The number of optimizer steps of the run.
    """

    def __init__(self, dataset: Dataset[Any], config: TrainConfig, seed: int, shard: BatchShard = FULL_BATCH) -> None:
        self.dataset = dataset
        self.shard = shard
        self.batch_size = config.batch_size
        self.accumulate = config.accumulate
        self.micro_batches_per_epoch = -(-len(dataset) // config.batch_size)  # type: ignore[arg-type]
        per_epoch = -(-self.micro_batches_per_epoch // config.accumulate)
        self.steps = config.steps if config.steps is not None else per_epoch * (config.epochs or 1)
        self._generator = torch.Generator().manual_seed(seed)
        self._before_epoch = self._generator.get_state()
        self._done = self._epoch = self._taken = 0  # Steps, epochs, and micro-batches of this epoch.

    def __iter__(self) -> Iterator[tuple[int, StepBatches]]:
        """Yield the epoch and the micro-batches of each remaining step.

        The last step of an epoch may have fewer micro-batches.
        """
        while self._done < self.steps:
            for group in self._groups_of_epoch():
                self._taken += len(group)
                self._done += 1
                yield self._epoch, group
                if self._done == self.steps:
                    return
            self._epoch, self._taken = self._epoch + 1, 0

    def _groups_of_epoch(self) -> Iterator[StepBatches]:
        """Yield the micro-batches of each remaining step in this epoch."""
        self._before_epoch = self._generator.get_state()
        order = torch.randperm(len(self.dataset), generator=self._generator).tolist()  # type: ignore[arg-type]
        remaining = order[self._taken * self.batch_size :]
        rest = Subset(self.dataset, remaining)
        indices = [self.dataset.indices[i] for i in remaining] if isinstance(self.dataset, Subset) else remaining
        loader = IndexedLoader(sequential_loader(rest, self.batch_size, self.shard), indices) if remaining else ()
        group = StepBatches()
        for index, (batch_indices, batch) in enumerate(loader):
            group.append(batch)
            group.indices.append(batch_indices)
            group.samples += min(self.batch_size, len(rest) - index * self.batch_size)
            if len(group) == self.accumulate:
                yield group
                group = StepBatches()
        if group:
            yield group

    def sizes(self, step: int) -> list[int]:
        """Return the number of samples in each micro-batch of a step, summed over all processes."""
        first = step % -(-self.micro_batches_per_epoch // self.accumulate) * self.accumulate
        length = len(self.dataset)  # type: ignore[arg-type]
        return batch_sizes(length, self.batch_size, first, first + self.accumulate)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data. It is valid between two steps."""
        return {
            "done": self._done,
            "epoch": self._epoch,
            "taken": self._taken,
            "generator": self._before_epoch,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position that `state_dict` returned."""
        self._done, self._epoch, self._taken = state["done"], state["epoch"], state["taken"]
        self._generator.set_state(state["generator"])


def batch_sizes(length: int, batch_size: int, first: int = 0, stop: int | None = None) -> list[int]:
    """Return the number of samples in each batch of a dataset, summed over all processes.

    Args:
        length: The number of samples in the dataset.
        batch_size: The number of samples per batch. The last batch may be smaller.
        first: The index of the first batch in the result. Default: 0.
        stop: The index after the last batch in the result. Default: None, all remaining batches.
    """
    return [min(batch_size, length - start) for start in range(0, length, batch_size)[first:stop]]


def first_batch(dataset: Dataset[Any], batch_size: int, shard: BatchShard = FULL_BATCH) -> Any:
    """Return a batch of the first samples of the dataset, for shape inference.

    Args:
        dataset: The dataset.
        batch_size: The number of samples per batch, over all processes.
        shard: The part of the batch that this process gets. Default: the full batch.

    Returns:
        The collated batch.

    Raises:
        ConfigError: The samples cannot be collated, or dimension 0 of the tensors is not the number of samples.
    """
    size = len(shard.indices_of(range(min(batch_size, len(dataset)))))  # type: ignore[arg-type]
    try:
        batch = next(iter(sequential_loader(Subset(dataset, range(size)), size)))
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        raise ConfigError(
            Problem(
                "data.dataset",
                f"its items cannot be collated into a batch{user_code_location(error)}",
                given=reason,
                allowed="items (input, target) of tensors, arrays and numbers, with inputs of equal shape",
            )
        ) from error
    if (samples := number_of_samples(batch)) != size:
        message = f"the tensors of a batch of {size} items have {samples} samples in dimension 0"
        raise ConfigError(
            Problem("data.dataset", message, shapes(batch), "tensors [samples, ...] with one sample per item")
        )
    return batch
