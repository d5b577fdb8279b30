"""Datasets of a run: the training slice, the evaluation slice, and their batches."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from operator import index
from typing import Any

import torch
from torch.utils.data import Dataset, DistributedSampler

from ..config.experiment import DataConfig, SliceSpec, TrainConfig
from ..errors import ConfigError, InstrumentError, Problem, user_code_location
from ..fields.field_types import Target
from ..fields.targets import build, build_callable
from .dataset_slices import is_iterable, load_split, slice_indices
from .datasets import DatasetMissingError
from .distributed.batch_sharding import FULL_BATCH, BatchShard, StepBatches
from .loader import (
    DEFAULT_OPTIONS,
    LoadedBatch,
    Loader,
    LoaderOptions,
    Slice,
    Stream,
    preserved_random_states,
    seed_random_states,
)

DIGITS_AS_MNIST = Target.model_validate({"_target_": "instrument.training.datasets.digits", "size": 28})


@dataclass(frozen=True)
class Data:
    """The slices of a dataset and their origin.

    Attributes:
        train: The slice `data.slice`.
        test: The evaluation slice; None in `mode: forward`, which has no evaluations.
        probe: The samples of the probe batch; None without one.
        source: The entry `data` of run.json: the target of the dataset, its root, the number of samples of the slices
            (None for an iterable dataset), their splits (None for a dataset that takes none), and the reason for the
            fallback (None if the requested dataset is used).
        overlap: The warning that samples of a dataset without splits are used for training and for evaluation; None if
            there are no such samples.
    """

    train: Dataset[Any]
    test: Dataset[Any] | None
    probe: Dataset[Any] | None
    source: dict[str, Any]
    overlap: str | None = None


def load_data(config: DataConfig, *, evaluates: bool = True) -> Data:
    """Load the slices.

    Args:
        config: The `data` section.
        evaluates: Whether the run has evaluations, and requires the evaluation slice. Default: True.

    Raises:
        ConfigError: The dataset is missing and no fallback is configured; its target does not exist or raises an
            exception; a slice is empty; the probe batch is larger than the evaluation slice; or an iterable dataset is
            combined with options that require a length.
    """
    target, fallback = config.dataset, None
    slices = {"data.slice": config.slice} | ({"data.eval_slice": config.eval_slice} if evaluates else {})
    try:
        loaded = [load_split(target, which.split, where) for where, which in slices.items()]
    except DatasetMissingError as missing:
        if config.fallback is None:
            raise ConfigError(_missing_dataset_problem(config, missing)) from None
        fallback = f"{target.target} is missing ({missing}); using the digits of scikit-learn instead, resized to 28x28"
        target = DIGITS_AS_MNIST
        loaded = [load_split(target, which.split, where) for where, which in slices.items()]
    chosen, *evaluated = (
        _slice(dataset, which, where) for (dataset, _), (where, which) in zip(loaded, slices.items(), strict=True)
    )
    test = evaluated[0] if evaluated else None
    if isinstance(chosen, Stream) or isinstance(test, Stream):
        _check_stream_options(config, trains_on_stream=isinstance(chosen, Stream))
    probe = None
    if test is not None and config.probe_batch is not None:
        if isinstance(test, Stream):
            message = "the evaluation samples come from an iterable dataset, which has no index"
            raise ConfigError(Problem("data.probe_batch", message, fix="use a dataset with a length"))
        if (stop := config.probe_batch.stop) is not None and stop > len(test):
            message = f"the probe batch ends at sample {stop}, but data.eval_slice has {len(test)} samples"
            raise ConfigError(Problem("data.probe_batch", message, stop, f"at most {len(test)}"))
        probe = Slice(test, slice_indices(test, config.probe_batch, "data.probe_batch"))
    source = {
        "dataset": target.target,
        "root": config.root,
        "train_samples": None if isinstance(chosen, Stream) else len(chosen),
        "eval_samples": None if isinstance(test, Stream) else 0 if test is None else len(test),
        "train_split": loaded[0][1],
        "eval_split": loaded[-1][1] if evaluates else None,
        "fallback": fallback,
    }
    has_splits = source["train_split"] is not None
    return Data(chosen, test, probe, source, overlap=None if has_splits else _overlap(target, chosen, test))


def _overlap(target: Target, chosen: Slice | Stream, test: Slice | Stream | None) -> str | None:
    """Return a warning if a dataset without splits gives the same samples for training and for evaluation."""
    if test is None:
        return None
    if isinstance(chosen, Slice) and isinstance(test, Slice):
        shared = len({*chosen.indices} & {*test.indices})
        which = f"{shared:,} of {len(test):,} evaluation samples"
    else:
        streams = [part for part in (chosen, test) if isinstance(part, Stream)]
        start = max(stream.start for stream in streams)
        shared = all(stream.stop is None or start < stream.stop for stream in streams)
        which = "evaluation samples"
    if not shared:
        return None
    return (
        f"{which} are training samples too, because both slices are of the same split of {target.target}; "
        "to evaluate other samples, set data.slice and data.eval_slice"
    )


def _slice(dataset: Dataset[Any], which: SliceSpec, where: str) -> Slice | Stream:
    """Return a slice of a dataset."""
    if not is_iterable(dataset):
        return Slice(dataset, slice_indices(dataset, which, where))
    if fields := which.model_dump(exclude_defaults=True).keys() - {"split", "start", "stop"}:
        message = f"the dataset is iterable and has no length, so {', '.join(sorted(fields))} cannot be applied"
        raise ConfigError(Problem(where, message, allowed="split, start, stop"))
    return Stream(dataset, which.start, which.stop)  # type: ignore[arg-type]


def _check_stream_options(config: DataConfig, *, trains_on_stream: bool) -> None:
    """Check the loader options for an iterable dataset."""
    if config.num_workers > 1:
        message = "the order of an iterable dataset defines its batches, so one worker at most reads it"
        raise ConfigError(Problem("data.num_workers", message, given=config.num_workers, allowed="0, 1"))
    if config.sampler is not None and trains_on_stream:
        message = "a sampler requires a dataset with a length, but this dataset is iterable"
        raise ConfigError(Problem("data.sampler", message, given=config.sampler.target, allowed="null"))


def loader_options(config: DataConfig, seed: int, *, pins_memory: bool) -> LoaderOptions:
    """Return how batches are loaded.

    Args:
        config: The `data` section.
        pins_memory: Whether the device reads pinned memory.

    Raises:
        ConfigError: `collate_fn` does not exist or cannot be built.
    """
    options = LoaderOptions(num_workers=config.num_workers, pin_memory=config.pin_memory and pins_memory, seed=seed)
    if config.collate_fn is None:
        return options
    return replace(options, collate_fn=build_callable(config.collate_fn, "data.collate_fn"))


def build_sampler(target: Target, dataset: Dataset[Any]) -> Iterable[int]:
    """Build a sampler from its target, which is called with the dataset slice.

    Raises:
        ConfigError: The target does not exist or raises an exception, or its result is not a sampler of indices.
    """
    with preserved_random_states():
        sampler = build(target, "data.sampler", dataset)
    message = ""
    if not hasattr(sampler, "__iter__") or not hasattr(sampler, "__len__"):
        message = f"must have a length and be iterable, but {target.target} returned {type(sampler).__name__}"
    elif not len(sampler):
        message = f"must give indices, but {target.target} returned an empty {type(sampler).__name__}"
    elif isinstance(sampler, DistributedSampler):
        message = "the samples are distributed over the processes by this package, so a sampler must return all indices"
    if message:
        allowed = "a torch.utils.data.Sampler with a length, such as RandomSampler"
        raise ConfigError(Problem("data.sampler", message, given=target.target, allowed=allowed))
    return sampler  # type: ignore[no-any-return]


def _missing_dataset_problem(config: DataConfig, missing: DatasetMissingError) -> Problem:
    """Return the error for a missing dataset, with the ways to fix it."""
    return Problem(
        "data.dataset",
        f"{config.dataset.target} is missing: {missing}. Do one of the following:\n"
        "    1. store it in the layout of torchvision, and set data.root=FOLDER or the environment variable INSTRUMENT_DATA=FOLDER\n"
        "    2. run once with a network connection and data.dataset.download=true\n"
        "    3. use a dataset that requires no download: data=digits, or data.fallback=digits as a fallback",
    )


class Batches:
    """An iterator over the steps of a run.

    In each epoch of a training, the samples are shuffled again, or the sampler gives a new order. A stream starts from the
    beginning.

    Args:
        dataset: The slice `data.slice`.
        config: The `train` section: batch size, micro-batches per step, and the number of steps or epochs.
        shard: The part of each batch that this process gets. Default: the full batch.
        sampler: Gives the indices of the samples in each epoch, over all processes. Its random numbers depend only on
            the seed and the epoch. Default: None, all samples in random order.
        passes: The number of passes over the samples in order, instead of steps or epochs over shuffled samples. Default:
            None, a training.

    Attributes:
        length: The number of samples per epoch. The length of a stream is unknown: in a training, its samples are assumed to
            last for all steps, and in `mode: forward` up to the end of the slice.
        micro_batches_per_epoch: The number of micro-batches per epoch.
        steps: The number of steps of the run.
        stop: The step at which the iteration ends. Default: `steps`. A replay ends earlier.

    Raises:
        ConfigError: The length of the run does not follow from that of a stream, or the sampler gives invalid indices.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        config: TrainConfig,
        seed: int,
        shard: BatchShard = FULL_BATCH,
        *,
        options: LoaderOptions = DEFAULT_OPTIONS,
        sampler: Iterable[int] | None = None,
        passes: int | None = None,
    ) -> None:
        self.dataset = dataset
        self.sampler = sampler
        self.passes = passes
        self.batch_size = config.batch_size
        self.accumulate = config.accumulate
        self._loader = Loader(dataset, config.batch_size, shard, options)
        self._generator = torch.Generator().manual_seed(seed)
        self._before_epoch = self._generator.get_state()
        self._done = self._epoch = self._taken = 0  # Steps, epochs, and micro-batches of this epoch.
        self.length = self._length_of_epoch(config)
        self.micro_batches_per_epoch = -(-self.length // config.batch_size)
        per_epoch = -(-self.micro_batches_per_epoch // config.accumulate)
        epochs = config.epochs if passes is None else passes
        self.steps = config.steps if config.steps is not None and passes is None else per_epoch * (epochs or 1)
        self.stop = self.steps
        if sampler is not None:
            self._order_of_epoch()
            self._generator.set_state(self._before_epoch)

    def _length_of_epoch(self, config: TrainConfig) -> int:
        """Return the number of samples per epoch; of a stream, the largest number that the run can use."""
        if not isinstance(self.dataset, Stream):
            return len(self.dataset if self.sampler is None else self.sampler)  # type: ignore[arg-type]
        message = "the dataset is iterable and has no length, so the number of steps per epoch is unknown"
        if self.passes is not None:
            if self.dataset.stop is None:
                raise ConfigError(Problem("data.slice.stop", message, given=None, fix="set data.slice.stop=N"))
            return self.dataset.stop - self.dataset.start
        if config.steps is None:
            fix = "set train.steps=N and train.epochs=null"
            raise ConfigError(Problem("train.epochs", message, given=config.epochs, fix=fix))
        return config.steps * config.accumulate * config.batch_size

    def __iter__(self) -> Iterator[tuple[int, StepBatches]]:
        """Yield the epoch and the micro-batches of each remaining step.

        The last step of an epoch may have fewer micro-batches.
        """
        while self._done < self.stop and (self.passes is None or self._epoch < self.passes):
            for group in self._groups_of_epoch():
                self._taken += len(group)
                self._done += 1
                yield self._epoch, group
                if self._done == self.stop:
                    return
            if not self._taken:
                raise InstrumentError(f"the dataset has no samples for step {self._done}, in epoch {self._epoch}")
            self._epoch, self._taken = self._epoch + 1, 0

    def _order_of_epoch(self) -> list[int] | None:
        """Return the indices of the samples in this epoch; None for a stream."""
        if isinstance(self.dataset, Stream):
            return None
        size = len(self.dataset)  # type: ignore[arg-type]
        if self.sampler is None:
            is_shuffled = self.passes is None
            return torch.randperm(size, generator=self._generator).tolist() if is_shuffled else list(range(size))
        seed = int(torch.randint(2**32, (), generator=self._generator))
        with preserved_random_states():
            seed_random_states(seed)
            if hasattr(self.sampler, "set_epoch"):
                self.sampler.set_epoch(self._epoch)
            order = list(self.sampler)
        invalid = [i for i in order if not (hasattr(i, "__index__") and 0 <= i < size)]
        if invalid or len(order) != self.length:
            given = f"index {invalid[0]!r}" if invalid else f"{len(order)} indices"
            allowed = f"{self.length} integers from 0 to {size - 1}, according to the lengths of sampler and slice"
            message = f"the sampler returned invalid indices in epoch {self._epoch}"
            raise ConfigError(Problem("data.sampler", message, given, allowed))
        return [*map(index, order)]

    def _groups_of_epoch(self) -> Iterator[StepBatches]:
        """Yield the micro-batches of each remaining step in this epoch."""
        self._before_epoch = self._generator.get_state()
        group = StepBatches()
        for loaded in self._loader.load(f"epoch {self._epoch}", self._order_of_epoch(), self._taken):
            group.add(*loaded)
            if len(group) == self.accumulate:
                yield group
                group = StepBatches()
        if group:
            yield group

    def sizes(self, step: int) -> list[int]:
        """Return the number of samples in each micro-batch of a step, summed over all processes."""
        first = step % -(-self.micro_batches_per_epoch // self.accumulate) * self.accumulate
        return batch_sizes(self.length, self.batch_size, first, first + self.accumulate)

    def samples_at(self, steps: Collection[int]) -> set[int] | None:
        """Return the dataset indices of the samples of some steps, over all processes; None for a stream."""
        dataset = self.dataset
        if not isinstance(dataset, Slice):
            return None
        per_epoch = -(-self.micro_batches_per_epoch // self.accumulate)
        size = self.batch_size * self.accumulate
        epoch, state = self._epoch, self._generator.get_state()
        indices: set[int] = set()
        for self._epoch in range(max(steps, default=-1) // per_epoch + 1):
            order = self._order_of_epoch() or []
            first = self._epoch * per_epoch
            for step in steps if len(indices) < len(dataset) else ():
                if first <= step < first + per_epoch:
                    indices.update(order[(step - first) * size : (step - first + 1) * size])
        self._epoch = epoch
        self._generator.set_state(state)
        return {dataset.index_in_dataset(index) for index in indices}

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data. It is valid between two steps."""
        return {"done": self._done, "epoch": self._epoch, "taken": self._taken, "generator": self._before_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position that `state_dict` returned."""
        self._done, self._epoch, self._taken = state["done"], state["epoch"], state["taken"]
        self._generator.set_state(state["generator"])


def batch_sizes(length: int, batch_size: int, first: int = 0, stop: int | None = None) -> list[int]:
    """Return the number of samples in each batch of a dataset, summed over all processes.

    Args:
        batch_size: The number of samples per batch. The last batch may be smaller.
        first: The index of the first batch in the result. Default: 0.
        stop: The index after the last batch in the result. Default: None, all remaining batches.
    """
    return [min(batch_size, length - start) for start in range(0, length, batch_size)[first:stop]]


def first_batch(
    dataset: Dataset[Any],
    batch_size: int,
    shard: BatchShard = FULL_BATCH,
    options: LoaderOptions = DEFAULT_OPTIONS,
    where: str = "data.slice",
) -> LoadedBatch:
    """Load a batch of the first samples of the dataset, for shape inference. No worker process is started.

    Args:
        batch_size: The number of samples per batch, over all processes.
        shard: The part of the batch that this process gets. Default: the full batch.
        where: The configuration key of the slice, for error messages. Default: `data.slice`.

    Raises:
        ConfigError: The samples cannot be loaded or collated, or a stream has no samples.
    """
    loader = Loader(dataset, batch_size, shard, replace(options, num_workers=0))
    try:
        loaded = next(loader.load("first batch"), None)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        default = options.collate_fn is DEFAULT_OPTIONS.collate_fn
        location = user_code_location(error) or user_code_location(error.__cause__ or error)
        message, allowed, fix = f"its items cannot be collated into a batch{location}", "", ""
        if default and location:  # PyTorch's own function collates, so the error is one of the dataset
            message = f"its samples cannot be loaded{location}"
        elif default:
            allowed = "tuples, dicts and lists of tensors of equal shape, arrays and numbers"
            fix = "set data.collate_fn to a function that joins a list of items"
        key = "data.dataset" if default else "data.collate_fn"
        raise ConfigError(Problem(key, message, reason, allowed, fix=fix)) from error
    if loaded is None:
        message = f"the slice of the iterable dataset has fewer samples than there are processes ({shard.size})"
        raise ConfigError(Problem(where, message if shard.size > 1 else "the slice is empty"))
    return loaded


def samples_of(dataset: Dataset[Any] | None) -> set[int] | None:
    """Return the dataset indices of all samples of a slice; None for a stream."""
    return {*map(dataset.index_in_dataset, range(len(dataset)))} if isinstance(dataset, Slice) else None
