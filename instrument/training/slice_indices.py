"""The samples that a slice of a dataset selects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import Dataset

from ..capture.samples import TARGET_KEYS
from ..errors import ConfigError, Problem
from ..spec.config import SliceSpec
from .loader import preserved_random_states, seed_random_states


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
    """Return the class of each sample.

    The classes are the attribute `targets` of torchvision datasets, or else the second element of each sample.

    Raises:
        ConfigError: The targets cannot be converted to integers.
    """
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
