"""`python -m instrument.report`. This package hides the module of the command, which has the same name."""

from __future__ import annotations

import sys
from importlib import import_module

if __name__ == "__main__":
    sys.exit(import_module("instrument.commands.report").main())
