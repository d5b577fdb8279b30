"""Conversion of cells of the tensors table to NumPy arrays."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

_FLOAT8 = {"float8_e4m3fn": (3, 7), "float8_e4m3fnuz": (3, 8), "float8_e5m2": (2, 15), "float8_e5m2fnuz": (2, 16)}
"""Number of mantissa bits and exponent bias of each signed 8-bit floating point type."""

_Array = np.ndarray[Any, Any]


def array_of(values: Any, data: Any, shape: Any, dtype: str, *, copy: bool = True) -> _Array:
    """Return a recorded tensor as an array; types that NumPy does not support are converted to a wider type.

    Args:
        values: The elements as a flat sequence of numbers; None if they are in `data`.
        data: The elements as little-endian bytes; None if they are in `values`.
        shape: Shape of the tensor.
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
    if dtype in _FLOAT8 or dtype == "float8_e8m0fnu":
        values: _Array = _float8_values(dtype)[np.frombuffer(data, np.uint8)]
        return values
    return np.frombuffer(data, np.dtype(dtype))


@cache
def _float8_values(dtype: str) -> _Array:
    """Return the 256 values of an 8-bit type as float32.

    The formats are defined in the "OCP 8-bit Floating Point Specification"; the fnuz variants are those of Graphcore
    and AMD.
    """
    bits = np.arange(256)
    if dtype == "float8_e8m0fnu":
        return np.where(bits == 0xFF, np.nan, np.exp2(bits - 127.0)).astype(np.float32)
    mantissa_bits, bias = _FLOAT8[dtype]
    exponent, mantissa = (bits & 0x7F) >> mantissa_bits, (bits & (1 << mantissa_bits) - 1) / (1 << mantissa_bits)
    is_normal = exponent > 0
    numbers = (is_normal + mantissa) * np.exp2(np.maximum(exponent, 1) - float(bias))
    numbers = np.where(bits & 0x80, -numbers, numbers)
    if dtype.endswith("fnuz"):
        numbers[0x80] = np.nan
    elif dtype == "float8_e4m3fn":
        numbers[[0x7F, 0xFF]] = np.nan
    else:
        numbers[[0x7C, 0xFC]] = np.inf, -np.inf
        numbers[[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]] = np.nan
    values: _Array = numbers.astype(np.float32)
    return values
