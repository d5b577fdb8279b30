"""Versions of installed packages, and errors that name the extra of `pyproject.toml` with a missing package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from ..errors import InstrumentError

DISTRIBUTION = "torch-instrument"  # this package on PyPI; `instrument` is another project

PACKAGES_OF_RUN = ("hydra", "omegaconf", "rich", "sklearn", "torchvision")
"""The packages of the extra `run` that commands import, also those of a `_target_`."""


@cache
def installed_version(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def pip_command(extra: str) -> str:
    """Return the command that installs an extra: of the installed package, or of a checkout that is used without installation."""
    return (
        f"pip install '{DISTRIBUTION}[{extra}]'" if installed_version(DISTRIBUTION) else f"pip install -e '.[{extra}]'"
    )


@contextmanager
def packages_of(extra: str, what: str) -> Iterator[None]:
    """Report a missing package of an extra: a context for its imports. `what` is the feature that requires the package.

    Raises:
        InstrumentError: A package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise InstrumentError(missing_package(error, extra, what)) from None


def missing_package(error: ModuleNotFoundError, extra: str, what: str) -> str:
    """Return the message of `packages_of`."""
    return f"{what} requires {str(error.name).partition('.')[0]}: {pip_command(extra)}"
