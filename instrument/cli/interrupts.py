"""Ctrl-C in a command, also while its modules are imported, which takes a noticeable time."""

from __future__ import annotations

import sys
from types import TracebackType


def end_with_one_line() -> None:
    """From now on, an interrupt that no code handles ends the process with exit code 130 and one line instead of a traceback."""
    sys.excepthook = _end


def _end(exc_type: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if not issubclass(exc_type, KeyboardInterrupt):
        sys.__excepthook__(exc_type, error, traceback)
        return
    print("\ninterrupted", file=sys.stderr)
    sys.exit(130)
