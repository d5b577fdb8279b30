"""Ctrl-C in a command, also while its modules are imported, missing packages, warnings, and output whose reader has ended."""

from __future__ import annotations

import atexit
import os
import sys
import warnings
from types import TracebackType
from typing import Any

_usual_format = warnings.formatwarning


def handle_interrupts() -> None:
    """Make an interrupt that no code handles end the process with exit code 130 and one line instead of a traceback.

    A command whose reader ends, as that of `instrument findings RUN | head`, ends without a message. A command that requires
    the extra `run`, which is not installed, ends with exit code 1 and the command that installs it. Warnings of this package are one
    line, without the line of code.
    """
    sys.excepthook = _end
    warnings.formatwarning = _format_warning
    atexit.register(_loses_output)


def _end(exc_type: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if issubclass(exc_type, BrokenPipeError) and _loses_output("\n"):
        sys.exit(141)  # 128 + SIGPIPE, which the shell reports for other programs
    if isinstance(error, ModuleNotFoundError):
        from ..fields.pip_extras import PACKAGES_OF_RUN, missing_package

        if str(error.name).partition(".")[0] in PACKAGES_OF_RUN:
            print(missing_package(error, "run", "this command"), file=sys.stderr)
            sys.exit(1)
    if not issubclass(exc_type, KeyboardInterrupt):
        sys.__excepthook__(exc_type, error, traceback)
        return
    print("\ninterrupted", file=sys.stderr)
    sys.exit(130)


def _format_warning(message: Warning | str, category: type[Warning], *args: Any, **options: Any) -> str:
    from ..errors import InstrumentWarning  # imported here, because an interrupt of each import is handled

    if issubclass(category, InstrumentWarning):
        return f"warning {message}\n"
    return _usual_format(message, category, *args, **options)


def _loses_output(text: str = "") -> bool:
    """Write text and the rest of the output. Return whether its reader has ended: all output is then discarded."""
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False
