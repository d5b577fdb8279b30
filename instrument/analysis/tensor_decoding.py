"""Conversion of cells of the tensors table to NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

_Array = np.ndarray[Any, Any]


def array_of(values: Any, data: Any, shape: Any, dtype: str, *, copy: bool = True) -> _Array:
    """Return a recorded tensor as an array; types that NumPy does not support are converted to a wider type.

    Args:
        values: The elements as a flat sequence of numbers; None if they are in `data`.
        data: The elements as little-endian bytes; None if they are in `values`.
        dtype: PyTorch name of the dtype. bfloat16 and float8 are converted to float32, complex32 to complex64.
        copy: Whether float32 elements in `values` are copied. Default: True.

    Raises:
        TypeError: The dtype is not supported; see `is_known`.
    """
    if data is None:
        array = np.asarray(values, dtype=np.float32)
        exact = {"float16": np.float16, "bool": np.bool_, "uint8": np.uint8, "int8": np.int8, "int16": np.int16}
        return array.astype(exact.get(dtype, np.float32), copy=copy).reshape(shape)
    return _from_bytes(data, dtype).reshape(shape)


def is_known(dtype: str) -> bool:
    """Return whether tensors of this dtype can be converted to arrays."""
    try:
        _from_bytes(b"", dtype)
    except TypeError:
        return False
    return True


def _from_bytes(data: Any, dtype: str) -> _Array:
    if dtype == "bfloat16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    if dtype == "complex32":
        return np.frombuffer(data, np.float16).astype(np.float32).view(np.complex64)
    if dtype.startswith("float8_"):
        import torch  # imported here, because other types do not need it

        if (float8 := getattr(torch, dtype, None)) is not None:
            values: _Array = torch.from_numpy(np.frombuffer(data, np.uint8).copy()).view(float8).float().numpy()
            return values
    return np.frombuffer(data, np.dtype(dtype))
