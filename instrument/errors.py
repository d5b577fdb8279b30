"""Exceptions and warnings of this package, and the exit code of each exception.

InstrumentError                     exit code 1
├── ConfigError                     exit code 2: the configuration is invalid
├── HookError                       a hook failed at a layer and a step
│   └── HookResultError             a hook returned a value that cannot replace the original one
├── SinkError                   rows can no longer be written
├── RankError                       another process of the run failed
├── AlreadyAttachedError            a probe was attached twice
├── FingerprintError                exit code 4: a training differs from the expected one
├── UploadError                     the remote folder contains other files (in instrument.storage.remote_folder)
└── NoRunError                      exit code 2: the folder contains no run (in instrument.storage.run_search)
"""

from __future__ import annotations

import difflib
import os
import re
import sysconfig
import traceback
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

__all__ = [
    "AlreadyAttachedError",
    "ConfigError",
    "FingerprintError",
    "HookError",
    "HookResultError",
    "InstrumentError",
    "InstrumentWarning",
    "Problem",
    "RankError",
    "SinkError",
    "first_line",
    "raise_problems",
    "similar_names",
    "user_code_location",
]


def similar_names(word: str, options: Iterable[str], *, limit: int = 3) -> list[str]:
    """Return the options that are most similar to `word`, best first. Those that differ only in case come first."""
    names = list(dict.fromkeys(options))
    folded = [name for name in names if name.lower() == word.lower()]
    close = difflib.get_close_matches(word, names, n=limit, cutoff=0.5)
    return list(dict.fromkeys([*folded, *close]))[:limit]


def first_line(error: BaseException) -> str:
    """Return the first line of the message of an error; empty without a message."""
    return str(error).strip().partition("\n")[0]


# Path prefixes of code that the user did not write: this package, the standard library, and code without a file.
_NOT_USER_CODE = (os.path.dirname(os.path.abspath(__file__)) + os.sep, sysconfig.get_path("stdlib") + os.sep, "<")


def user_code_location(error: BaseException) -> str:
    """Return where in the user's code an error was raised, such as ` (in model.py:12, forward)`; empty if it was elsewhere."""
    user_frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not (
            frame.filename.startswith(_NOT_USER_CODE) or re.search(r"[\\/](site|dist)-packages[\\/]", frame.filename)
        )
    ]
    return f" (in {user_frames[-1].filename}:{user_frames[-1].lineno}, {user_frames[-1].name})" if user_frames else ""


_UNNAMED = re.compile(r"^(\w+)\.\1_(\d+)(?=\.|$)")
"""The key of an entry of a list that has no name: `hooks.hooks_0`."""


@dataclass(frozen=True)
class Problem:
    """One problem in the configuration.

    Attributes:
        where: The configuration key or the argument, such as `hooks.tame.layers`.
        message: What is wrong.
        given: The value that was given; None if there is no such value.
        allowed: The allowed values, or a description of them.
        similar: The allowed values that are most similar to the given one.
        fix: How to fix the problem, such as a command or a setting.
    """

    where: str
    message: str
    given: object = None
    allowed: Sequence[str] | str = ()
    similar: Sequence[str] = field(default=())
    fix: str = ""

    def __str__(self) -> str:
        where = _UNNAMED.sub(r"\1[\2]", self.where)
        lines = [f"{where}: {self.message}" if where else self.message]
        if self.given is not None:
            lines.append(f"    given    {_short(self.given)}")
        if self.allowed:
            allowed = self.allowed if isinstance(self.allowed, str) else ", ".join(self.allowed)
            lines.append(f"    allowed  {allowed}")
        if self.similar:
            lines.append(f"    similar  {', '.join(self.similar)}")
        if self.fix:
            lines.append(f"    fix      {self.fix}")
        return "\n".join(lines)


def _short(value: object, limit: int = 200) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


class InstrumentError(Exception):
    """Base class of all exceptions of this package.

    Attributes:
        exit_code: The exit code of the process if the exception is not caught.
    """

    exit_code = 1


class FingerprintError(InstrumentError):
    """The fingerprint of a complete training differs from `train.fingerprint`."""

    exit_code = 4


class ConfigError(InstrumentError):
    """The configuration is invalid. Raised before training starts.

    Attributes:
        problems: The problems, each a `Problem`.
    """

    exit_code = 2

    def __init__(self, *problems: Problem) -> None:
        self.problems = problems
        super().__init__("\n".join(str(problem) for problem in problems))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[Problem, ...]]:
        return type(self), self.problems


def raise_problems(problems: Collection[Problem]) -> None:
    """Raise a ConfigError with all of these problems, if there are any."""
    if problems:
        raise ConfigError(*problems)


class HookError(InstrumentError):
    """A hook failed. The message names the hook, its kind, the layer and the step."""


class HookResultError(HookError):
    """A hook returned a value whose type, shape, dtype, device or autograd graph does not match the original tensor."""


class SinkError(InstrumentError):
    """Rows can no longer be written, for example because the disk is full. The message says which steps were written."""


class RankError(InstrumentError):
    """Another process of a distributed run failed.

    Attributes:
        rank: The rank of the process that failed.
        exit_code: The exit code of that process.
    """

    def __init__(self, message: str, rank: int, exit_code: int = 1) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code


class InstrumentWarning(UserWarning):
    """A problem that does not stop training, such as a hook that fired less often than expected, and the reason."""


class AlreadyAttachedError(InstrumentError):
    """A probe was attached a second time. Create a new probe for each attachment."""
