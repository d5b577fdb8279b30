"""Importing what a job needs."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Import PyTorch and all that uses it inside, without collecting garbage.

    An import makes hundreds of thousands of objects that stay until the process ends. The garbage collector would visit
    them over and over while they are made, which is a fifth of the import's time, and again during the training. They are
    frozen: later collections leave them out.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
