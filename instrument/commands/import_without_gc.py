"""Import of the packages that a job needs."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Disable garbage collection during the `with` block, for imports of PyTorch and packages that depend on it.

    These imports create hundreds of thousands of objects that live until the process ends. Repeated garbage collection
    takes a fifth of the import time, and later collections would visit the objects again during training. They are
    therefore frozen, and later collections skip them.

    Has no effect if PyTorch is already imported or garbage collection is disabled.
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
