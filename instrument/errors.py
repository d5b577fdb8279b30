"""Every error that this package raises on purpose, and the exit code that each one means.

InstrumentError                     exit code 1
├── ConfigError                     exit code 2: what was written cannot be meant
├── HookError                       a hook failed at a layer and a step
│   └── HookResultError             a hook returned a value that does not fit in the place of the old one
├── SinkError                   rows cannot be written any more
├── RankError                       another process of the run failed
├── AlreadyAttachedError            one probe, entered twice
├── UploadError                     a remote folder holds something else (in instrument.sinks.remote)
└── NoRunError                      nothing to load (in instrument.analysis.load)
"""

from __future__ import annotations

import difflib
import os
import re
import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

__all__ = [
    "AlreadyAttachedError",
    "ConfigError",
    "HookError",
    "HookResultError",
    "InstrumentError",
    "InstrumentWarning",
    "Mistake",
    "RankError",
    "SinkError",
    "nearest",
    "own_frame",
]


def nearest(word: str, options: Iterable[str], *, most: int = 3) -> list[str]:
    """The options most like `word`, best first; those that differ by letter case alone come first."""
    names = list(dict.fromkeys(options))
    folded = [name for name in names if name.lower() == word.lower()]
    close = difflib.get_close_matches(word, names, n=most, cutoff=0.5)
    return list(dict.fromkeys([*folded, *close]))[:most]


# This package, the standard library, and code that is in no file.
_NOBODYS = (os.path.dirname(os.path.abspath(__file__)) + os.sep, sysconfig.get_path("stdlib") + os.sep, "<")


def own_frame(error: BaseException) -> str:
    """Where in the user's own code an error arose, as ` (in model.py:12, forward)`; empty where it was in nobody's."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not (frame.filename.startswith(_NOBODYS) or re.search(r"[\\/](site|dist)-packages[\\/]", frame.filename))
    ]
    return f" (in {frames[-1].filename}:{frames[-1].lineno}, {frames[-1].name})" if frames else ""


@dataclass(frozen=True)
class Mistake:
    """One thing that the user wrote and cannot have meant: where, what, what is allowed, what is nearest."""

    where: str
    problem: str
    written: object = None
    allowed: Sequence[str] | str = ()
    nearest: Sequence[str] = field(default=())

    def __str__(self) -> str:
        lines = [f"{self.where}: {self.problem}" if self.where else self.problem]
        if self.written is not None:
            lines.append(f"    written  {_short(self.written)}")
        if self.allowed:
            allowed = self.allowed if isinstance(self.allowed, str) else ", ".join(self.allowed)
            lines.append(f"    allowed  {allowed}")
        if self.nearest:
            lines.append(f"    nearest  {', '.join(self.nearest)}")
        return "\n".join(lines)


def _short(value: object, most: int = 200) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= most else text[: most - 3] + "..."


class InstrumentError(Exception):
    """The root of the tree; `exit_code` is what the process ends with when nobody catches it."""

    exit_code = 1


class ConfigError(InstrumentError):
    """One or more mistakes in what the user wrote, found before a step was spent on them."""

    exit_code = 2

    def __init__(self, *mistakes: Mistake) -> None:
        self.mistakes = mistakes
        super().__init__("\n".join(str(mistake) for mistake in mistakes))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[Mistake, ...]]:
        return type(self), self.mistakes


class HookError(InstrumentError):
    """A hook failed; the message names the hook, its kind, the layer and the step."""


class HookResultError(HookError):
    """A hook returned something of another type, shape, dtype, device or graph than the tensor that it was given."""


class SinkError(InstrumentError):
    """Rows cannot be written any more: the disk is full, the folder is gone; the message says what is saved."""


class RankError(InstrumentError):
    """Another process of a distributed run failed; `rank` says which one."""

    def __init__(self, message: str, rank: int, exit_code: int = 1) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code


class InstrumentWarning(UserWarning):
    """Something that a probe has to say when it is detached: a hook that did not fire as often as it should, and why."""


class AlreadyAttachedError(InstrumentError):
    """The same probe was attached a second time; a probe is used once."""
