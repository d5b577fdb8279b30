"""The slices of a dataset: the split with which its target is called, and the selected samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from ..config.experiment import SliceSpec
from ..errors import ConfigError, Problem
from ..fields.field_types import Target
from ..fields.targets import argument_names, build
from ..probe.samples import TARGET_KEYS
from .datasets import DatasetMissingError
from .loader import preserved_random_states, seed_random_states

USUAL_SPLITS = {"data.slice": ("train", "trainval"), "data.eval_slice": ("test", "val", "validation", "valid")}
"""The splits that are tried in this order if a slice names none. The names are those of torchvision and Hugging Face."""


def load_split(target: Target, split: str | None, where: str) -> tuple[Dataset[Any], str | None]:
    """Build the dataset of a slice.

    The split is passed as `train=True` or `False`, or else as `split=`, if the target has this parameter and its configuration
    does not set it. In a dataset with both parameters, such as EMNIST, `split` is not a part of the samples, but another dataset.

    Args:
        split: The split of the slice; None if the configuration names none.
        where: The key of the slice: `data.slice` or `data.eval_slice`.

    Returns:
        The dataset, and the split that it was built with; None if it was built without one.

    Raises:
        ConfigError: The target does not exist or fails, does not accept the split, or returns something else than a dataset.
        DatasetMissingError: The files of the dataset are missing.
    """
    parameters = argument_names(target.target, "data.dataset")
    parameter = next((name for name in ("train", "split") if name in parameters), None)
    names = (split,) if split is not None else USUAL_SPLITS[where]
    if parameter in (target.model_extra or {}):
        if split is not None:
            message = f"data.dataset.{parameter} selects the same samples for all slices"
            raise ConfigError(Problem(f"{where}.split", message, split, fix=f"remove data.dataset.{parameter}"))
        return _build(target), None
    if parameter is None and split is not None:
        message = f"{target.target} takes neither 'split' nor 'train'"
        raise ConfigError(Problem(f"{where}.split", message, split, fix=f"remove {where}.split"))
    if parameter is None:
        return _build(target), None
    if parameter == "train":
        if names[0] not in ("train", "test"):
            message = f"{target.target} takes train=True or False, not the name of a split"
            raise ConfigError(Problem(f"{where}.split", message, names[0], "train, test"))
        return _build(target, train=names[0] == "train"), names[0]
    return _first_accepted(target, names, where)


def _first_accepted(target: Target, names: Sequence[str], where: str) -> tuple[Dataset[Any], str]:
    """Build the dataset with the first split that it accepts."""
    refusals: list[ConfigError] = []
    for name in names:
        try:
            return _build(target, split=name), name
        except ConfigError as error:
            if not _refuses_split(error, name):
                raise
            refusals.append(error)
    *others, last = map(repr, names)
    listed = f"the split {last}" if not others else f"a split {', '.join(others)} or {last}"
    reason = refusals[0].problems[0].message.partition("could not be built: ")[2]
    message = f"{target.target} does not accept {listed} ({reason})"
    raise ConfigError(Problem(f"{where}.split", message, fix=f"set {where}.split=NAME")) from refusals[0]


def _refuses_split(error: ConfigError, name: str) -> bool:
    """Return whether the target failed because it has no split of this name."""
    failure = next((cause for cause in _causes(error.__cause__) if isinstance(cause, ValueError | KeyError)), None)
    return failure is not None and ("split" in str(failure).lower() or name in str(failure))


def _build(target: Target, **split: Any) -> Dataset[Any]:
    """Build the dataset and check that it is one."""
    try:
        dataset = build(target, "data.dataset", **split)
    except ConfigError as error:
        for cause in _causes(error):
            if isinstance(cause, DatasetMissingError):
                raise cause from None
        raise
    if is_iterable(dataset) and not hasattr(dataset, "__iter__"):
        message = f"must be a dataset, but {target.target} returned {type(dataset).__name__}"
        allowed = "an object with __len__ and __getitem__, or without a length an object with __iter__"
        raise ConfigError(Problem("data.dataset", message, allowed=allowed))
    if is_iterable(dataset) and hasattr(dataset, "__next__"):
        message = f"{target.target} returned {type(dataset).__name__}, an iterator, which can be read only once"
        allowed = "an object whose __iter__ starts from the beginning, such as a torch.utils.data.IterableDataset"
        raise ConfigError(Problem("data.dataset", message, allowed=allowed))
    return dataset  # type: ignore[no-any-return]


def is_iterable(dataset: Any) -> bool:
    """Return whether a dataset gives its samples one after the other, without a length and an index."""
    has_items = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    return isinstance(dataset, IterableDataset) or not has_items


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and the chain of its causes."""
    while error is not None:
        yield error
        error = error.__cause__


def slice_indices(dataset: Dataset[Any], which: SliceSpec, where: str) -> list[int]:
    """Return the indices of the samples in a slice.

    The fields of the slice apply in this order: `classes`, `shuffle`, `indices` or `start`/`stop`/`stride`,
    `per_class`.

    Args:
        dataset: The dataset, with a length.
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
            allowed = f"0 to {len(indices) - 1}"
            raise ConfigError(Problem(f"{where}.indices", "out of range", out_of_range, allowed))
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
        raise ConfigError(Problem(where, f"the slice is empty: the split has {size} samples", given=written))
    return indices


def _targets(dataset: Dataset[Any], where: str) -> list[int]:
    """Return the class of each sample."""
    targets = getattr(dataset, "targets", None)
    try:
        if targets is None:
            with preserved_random_states():
                seed_random_states(0)
                targets = [_target_of(dataset[i]) for i in range(len(dataset))]  # type: ignore[arg-type]
        return [int(target) for target in targets]
    except (TypeError, ValueError, LookupError, RuntimeError) as error:
        message = f"the targets of this dataset are not integer classes: {type(error).__name__}: {error}"
        raise ConfigError(Problem(where, message)) from None


def _target_of(item: Any) -> Any:
    """Return the target of an item: its second part, or the entry of a mapping that is named in `TARGET_KEYS`."""
    return item[next(key for key in TARGET_KEYS if key in item)] if isinstance(item, Mapping) else item[1]
