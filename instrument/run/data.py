"""From the data section to the slices that are trained and evaluated on, and the batches of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset, Subset

from ..errors import ConfigError, Mistake, own_frame
from ..nested import number_of_samples, shapes
from ..spec.config import DataConfig, SliceSpec, TrainConfig
from ..spec.fields import Target
from ..targets import build, takes
from .datasets import DatasetMissingError
from .ranks.shares import WHOLE, Group, Share, in_order

DIGITS_AS_MNIST = Target.model_validate({"_target_": "instrument.run.datasets.digits", "size": 28})


@dataclass(frozen=True)
class Data:
    """The two slices, and where they came from.

    Attributes:
        train: What is trained on.
        test: What is evaluated on.
        source: For run.json: the dataset's target, sizes, and the fallback with its reason where one was used.
    """

    train: Dataset[Any]
    test: Dataset[Any]
    source: dict[str, Any]

    @property
    def fallback(self) -> str | None:
        """What was used in place of the dataset asked for, and why; None where nothing was."""
        reason: str | None = self.source["fallback"]
        return reason


def load_data(config: DataConfig) -> Data:
    """Load both slices.

    Raises:
        ConfigError: The dataset is missing and there is no fallback; its target is not there or fails; a slice is empty.
    """
    target, fallback = config.dataset, None
    try:
        train, test = (_load(target, which) for which in (config.slice, config.eval_slice))
    except DatasetMissingError as missing:
        if config.fallback is None:
            raise ConfigError(_ways_out(config, missing)) from None
        fallback = f"{target.target} is missing ({missing}); scikit-learn's digits, resized to 28x28, stand in for it"
        target = DIGITS_AS_MNIST
        train, test = (_load(target, which) for which in (config.slice, config.eval_slice))
    chosen = Subset(train, choose(train, config.slice, "data.slice"))
    evaluated = Subset(test, choose(test, config.eval_slice, "data.eval_slice"))
    source = {
        "dataset": target.target,
        "root": config.root,
        "train_samples": len(chosen),
        "eval_samples": len(evaluated),
        "fallback": fallback,
    }
    return Data(chosen, evaluated, source)


def _load(target: Target, which: SliceSpec) -> Dataset[Any]:
    """Call the dataset's target, with the split in the way that it takes it: `split=`, or torchvision's `train=`."""
    parameters = takes(target.target, "data.dataset")
    given: dict[str, Any] = {}
    if "split" in parameters:
        given["split"] = which.split
    elif "train" in parameters:
        given["train"] = which.split == "train"
    try:
        dataset = build(target, "data.dataset", **given)
    except ConfigError as error:
        if (missing := _missing(error)) is not None:
            raise missing from None
        raise
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        mistake = Mistake(
            "data.dataset",
            f"{target.target} gave a {type(dataset).__name__}",
            allowed="a dataset with a length and items (input, target)",
        )
        raise ConfigError(mistake)
    return dataset  # type: ignore[no-any-return]


def _missing(error: BaseException | None) -> DatasetMissingError | None:
    while error is not None:
        if isinstance(error, DatasetMissingError):
            return error
        error = error.__cause__
    return None


def _ways_out(config: DataConfig, missing: DatasetMissingError) -> Mistake:
    return Mistake(
        "data.dataset",
        f"{config.dataset.target} is missing: {missing}. Three ways out:\n"
        "    1. have it on disk in torchvision's layout, and set data.root=FOLDER, or INSTRUMENT_DATA=FOLDER in the environment\n"
        "    2. run once where there is a network, with data.dataset.download=true\n"
        "    3. use what is always there: data=digits, or data.fallback=digits to have it stand in",
    )


def choose(dataset: Dataset[Any], which: SliceSpec, where: str) -> list[int]:
    """The indices that a slice means: classes, order, indices or start/stop/stride, then per_class.

    Raises:
        ConfigError: None are left, or an index is out of range.
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
        beyond = [i for i in which.indices if i >= len(indices)]
        if beyond:
            raise ConfigError(
                Mistake(f"{where}.indices", "out of range", written=beyond, allowed=f"0 to {len(indices) - 1}")
            )
        indices = [indices[i] for i in which.indices]
    else:
        indices = indices[which.start : which.stop : which.stride]
    if which.per_class is not None:
        targets, counts = _targets(dataset, f"{where}.per_class"), dict[Any, int]()
        kept = []
        for i in indices:
            counts[targets[i]] = counts.get(targets[i], 0) + 1
            if counts[targets[i]] <= which.per_class:
                kept.append(i)
        indices = kept
    if not indices:
        written = which.model_dump(exclude_defaults=True)
        raise ConfigError(
            Mistake(where, f"the slice is empty: the {which.split} split has {size} samples", written=written)
        )
    return indices


def _targets(dataset: Dataset[Any], where: str) -> list[int]:
    """The class of every sample: torchvision's `targets`, or the second item of each.

    Raises:
        ConfigError: They are no classes.
    """
    known = getattr(dataset, "targets", None)
    try:
        if known is None:
            known = [dataset[i][1] for i in range(len(dataset))]  # type: ignore[arg-type]
        return [int(target) for target in known]
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        raise ConfigError(
            Mistake(where, f"the targets of this dataset are no classes: {type(error).__name__}: {error}")
        ) from None


class Batches:
    """The batches of a training: `accumulate` of them a step, the data in a new random order each epoch."""

    def __init__(self, dataset: Dataset[Any], config: TrainConfig, seed: int, share: Share = WHOLE) -> None:
        self.dataset = dataset
        self.share = share
        self.batch_size = config.batch_size
        self.accumulate = config.accumulate
        self.in_epoch = -(-len(dataset) // config.batch_size)  # type: ignore[arg-type]
        per_epoch = -(-self.in_epoch // config.accumulate)
        self.steps = config.steps if config.steps is not None else per_epoch * (config.epochs or 1)
        self._generator = torch.Generator().manual_seed(seed)
        self._before_epoch = self._generator.get_state()
        self._done = self._epoch = self._taken = 0  # steps; the epoch, and the batches taken of it

    def __iter__(self) -> Iterator[tuple[int, Group]]:
        """The epoch and the micro-batches of each step that is left; the last step of an epoch may have fewer."""
        while self._done < self.steps:
            for group in self._groups_of_epoch():
                self._taken += len(group)
                self._done += 1
                yield self._epoch, group
                if self._done == self.steps:
                    return
            self._epoch, self._taken = self._epoch + 1, 0

    def _groups_of_epoch(self) -> Iterator[Group]:
        """The micro-batches of the steps that are left in this epoch."""
        self._before_epoch = self._generator.get_state()
        order = torch.randperm(len(self.dataset), generator=self._generator).tolist()  # type: ignore[arg-type]
        rest = Subset(self.dataset, order[self._taken * self.batch_size :])
        group = Group()
        for place, batch in enumerate(in_order(rest, self.batch_size, self.share) if len(rest) else ()):
            group.append(batch)
            group.samples += min(self.batch_size, len(rest) - place * self.batch_size)
            if len(group) == self.accumulate:
                yield group
                group = Group()
        if group:
            yield group

    def sizes(self, step: int) -> list[int]:
        """The samples in each micro-batch of a step, over all processes."""
        first = step % -(-self.in_epoch // self.accumulate) * self.accumulate
        length = len(self.dataset)  # type: ignore[arg-type]
        return batch_sizes(length, self.batch_size, first, first + self.accumulate)

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, between two steps."""
        return {
            "done": self._done,
            "epoch": self._epoch,
            "taken": self._taken,
            "generator": self._before_epoch,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position."""
        self._done, self._epoch, self._taken = state["done"], state["epoch"], state["taken"]
        self._generator.set_state(state["generator"])


def batch_sizes(length: int, batch_size: int, first: int = 0, stop: int | None = None) -> list[int]:
    """The samples in each batch of so many in order, over all processes: of all batches, or of `[first, stop)`."""
    return [min(batch_size, length - start) for start in range(0, length, batch_size)[first:stop]]


def first_batch(dataset: Dataset[Any], batch_size: int, share: Share = WHOLE) -> Any:
    """A batch to try the model on, of the dataset's first items: this process's share of it.

    Raises:
        ConfigError: No batch can be made of the dataset's items, or not one sample is made of each.
    """
    size = len(share.of(range(min(batch_size, len(dataset)))))  # type: ignore[arg-type]
    try:
        batch = next(iter(in_order(Subset(dataset, range(size)), size)))
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        raise ConfigError(
            Mistake(
                "data.dataset",
                f"no batch can be made of its items{own_frame(error)}",
                written=reason,
                allowed="items (input, target) of tensors, arrays and numbers, the inputs all of one shape",
            )
        ) from error
    if (samples := number_of_samples(batch)) != size:
        problem = f"the tensors of a batch of {size} items have {samples} samples in dimension 0"
        raise ConfigError(
            Mistake("data.dataset", problem, shapes(batch), "tensors [samples, ...]: one sample of each item")
        )
    return batch
