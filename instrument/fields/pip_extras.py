"""Requirements of the extras in `pyproject.toml`, and the command that installs them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires


def pip_command(extra: str) -> str:
    """Return a `pip install` command with the requirements of an extra.

    The command lists the packages instead of `instrument[extra]`, since another package on PyPI may have the name
    `instrument`.
    """
    try:
        return " ".join(["pip install", *(f"'{requirement}'" for requirement in _requirements(extra))])
    except PackageNotFoundError:  # the package is used from a checkout without being installed
        return f"pip install -e '.[{extra}]'"


def _requirements(extra: str) -> Iterator[str]:
    for line in requires("instrument") or ():
        requirement, _, marker = (part.strip() for part in line.partition(";"))
        if re.search(rf"extra == ['\"]{extra}['\"]", marker):
            if others := re.fullmatch(r"instrument\[(.+)\]", requirement):
                for other in others[1].split(","):
                    yield from _requirements(other)
            else:
                yield requirement
