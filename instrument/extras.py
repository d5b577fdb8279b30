"""The packages that only some need: what an extra of `pyproject.toml` is made of, and the command that installs it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires


def pip_command(extra: str) -> str:
    """`pip install` with the requirements of an extra: the packages themselves, whatever else may be called `instrument`."""
    try:
        return " ".join(["pip install", *(f"'{requirement}'" for requirement in _requirements(extra))])
    except PackageNotFoundError:  # a checkout that is not installed
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
