"""Tests of large networks run in a process of their own, which returns its memory, and one at a time."""

from __future__ import annotations

import fcntl
import multiprocessing
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
LARGE = (
    *("vgg", "regnet_x_32gf", "regnet_y_32gf", "regnet_y_128gf", "convnext_large"),
    *("wide_resnet101", "vit_h", "vit_l"),
)


def run_by_size(name: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function, which can be pickled, in this process; for a large network, in a process of its own.

    Two large networks at once need more than 24 GB.
    """
    if not any(large in name for large in LARGE):
        return function(*args, **kwargs)
    with open(Path(tempfile.gettempdir()) / "large-network.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            return pool.submit(function, *args, **kwargs).result()
