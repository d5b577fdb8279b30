"""A hash of the content of a dataset, from some of its samples, to notice that the data of a run has changed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from .data import Data
from .loader import Slice, preserved_random_states, seed_random_states

SAMPLES = 16  # of each slice, evenly spaced from the first to the last


def dataset_hashes(data: Data) -> dict[str, str | None]:
    """Return the hash of each slice of a run: `train` and `eval`.

    Args:
        data: The slices.

    Returns:
        The hashes; None for a slice that is iterable or missing, or whose samples cannot be hashed.
    """
    return {"train": content_hash(data.train), "eval": content_hash(data.test)}


def content_hash(dataset: Dataset[Any] | None) -> str | None:
    """Return the first 16 hexadecimal digits of the SHA-256 of some samples of a slice.

    Random numbers of a transform are the same in each call, and the random states are restored.

    Args:
        dataset: The slice.
    """
    if not isinstance(dataset, Slice):
        return None
    size = len(dataset)
    digest = hashlib.sha256(repr(size).encode())
    with preserved_random_states():
        for index in sorted({i * (size - 1) // (SAMPLES - 1) for i in range(SAMPLES)}):
            seed_random_states(index)
            try:
                _add(digest, dataset[index])
            except Exception:  # The error of a broken sample is reported when its batch is loaded.
                return None
    return digest.hexdigest()[:16]


def _add(digest: hashlib._Hash, value: Any) -> None:
    """Add a value of a sample, and its type, to a hash.

    Raises:
        TypeError: The bytes of the value are unknown.
    """
    digest.update(f"{type(value).__qualname__}(".encode())
    if isinstance(value, Tensor):
        plain = value.detach().cpu().contiguous()
        digest.update(
            f"{plain.dtype}{tuple(plain.shape)}".encode() + plain.view(-1).view(torch.uint8).numpy().tobytes()
        )
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        digest.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    elif isinstance(value, str | int | float | complex | bool | np.generic | None):
        digest.update(repr(value).encode())
    elif isinstance(value, bytes):
        digest.update(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _add(digest, key)
            _add(digest, item)
    elif isinstance(value, list | tuple):
        for item in value:
            _add(digest, item)
    elif is_dataclass(value):
        for field in fields(value):
            _add(digest, getattr(value, field.name))
    elif type(value).__module__.startswith("PIL."):
        digest.update(repr((value.mode, value.size)).encode() + value.tobytes())
    else:
        raise TypeError(f"unknown type {type(value).__qualname__}")
    digest.update(b")")
