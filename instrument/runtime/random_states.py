"""Blocks of code that leave the random numbers of the program as they are."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np


@contextmanager
def preserve_python_and_numpy() -> Iterator[None]:
    """Restore the state of the global random generators of Python and NumPy after a block."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
