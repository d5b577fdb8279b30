"""Comparison of the states of models, optimizers and random number generators, and of the tables of runs."""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch

import instrument


def identical(one: Any, other: Any) -> bool:
    """Return whether two nested states of dicts, lists, tuples, tensors and other values are bit-identical."""
    if isinstance(one, torch.Tensor):
        return (
            one.dtype == other.dtype and one.shape == other.shape and one.numpy().tobytes() == other.numpy().tobytes()
        )
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(identical(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(identical(*pair) for pair in zip(one, other, strict=True))
    return bool(one == other)


def assert_same_tables(one: instrument.Run, other: instrument.Run, *tables: str) -> None:
    """Assert that tables of two runs are bit-identical, except for measured times."""
    for table in tables:
        left, right = (
            getattr(run, table).drop(columns=["seconds", "samples_per_second"], errors="ignore") for run in (one, other)
        )
        pd.testing.assert_frame_equal(left, right, check_exact=True)
