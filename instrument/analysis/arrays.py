"""A cell of the tensors table as an array."""

from __future__ import annotations

from typing import Any

import numpy as np


def array_of(values: Any, data: Any, shape: Any, dtype: str) -> np.ndarray[Any, Any]:
    """The recorded tensor in its shape; bfloat16, which NumPy does not have, as float32.

    Args:
        values: The elements as numbers, flat; None where `data` has them.
        data: Their bytes, little-endian; None where `values` has them.
        shape: The tensor's.
        dtype: What PyTorch calls its type.

    Raises:
        TypeError: NumPy has no such type.
    """
    if data is None:
        array = np.asarray(values, dtype=np.float32)
        exact = {"float16": np.float16, "bool": np.bool_, "uint8": np.uint8, "int8": np.int8, "int16": np.int16}
        return array.astype(exact.get(dtype, np.float32)).reshape(shape)
    if dtype == "bfloat16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape)
    return np.frombuffer(data, np.dtype(dtype)).reshape(shape)
