"""`python -m instrument.report`. Its module is in the package of this name, which hides it in `instrument.commands`."""

from __future__ import annotations

import sys

from ..commands.report import main

if __name__ == "__main__":
    sys.exit(main())
