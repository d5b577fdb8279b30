"""Ctrl-C in a command, also while its modules are imported."""

from __future__ import annotations

import sys
from types import TracebackType


def handle_interrupts() -> None:
    """Make an interrupt that no code handles end the process with exit code 130 and one line instead of a traceback."""
    sys.excepthook = _end


def _end(exc_type: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if not issubclass(exc_type, KeyboardInterrupt):
        sys.__excepthook__(exc_type, error, traceback)
        return
    print("\ninterrupted", file=sys.stderr)
    sys.exit(130)
