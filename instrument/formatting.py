"""Human-readable numbers, bytes, seconds, steps, lists of names and paths."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


def format_number(value: float | None, *, sign: bool = False) -> str:
    """Format a number for a table with four digits; None becomes an empty string."""
    if value is None:
        return ""
    return f"{value:+.4g}" if sign and not math.isnan(value) else f"{value:.4g}"


def human_bytes(count: float) -> str:
    """Format a number of bytes with three digits and powers of 1000, such as `1.2 MB`."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while count >= 999.5 and len(units) > 1:
        count /= 1000
        units.pop(0)
    return f"{count:.3g} {units[0]}" if count < 999.5 else f"{count:,.0f} {units[0]}"


def human_seconds(seconds: float) -> str:
    """Format a duration in seconds with three digits, such as `25.3 ms`."""
    return f"{seconds:.3g} s" if seconds >= 0.9995 else f"{seconds * 1e3:.3g} ms"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as `1 step` or `2 steps`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def shorten(names: Sequence[str], limit: int = 12) -> str:
    """Shorten a list of names for display: the first ones, and the total number."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown}, ... ({len(names)} in all)"


def natural_key(name: str | Path) -> list[list[tuple[bool, int, str]]]:
    """Return a sort key of a name or a path that puts `layer10` after `layer9`."""
    parts = (re.split(r"(\d+)", part) for part in str(name).split("/"))
    return [[(not piece.isdigit(), int(piece) if piece.isdigit() else 0, piece) for piece in part] for part in parts]


def shown_path(path: Path) -> Path:
    """Return a path in the working directory relative to it, and any other path unchanged."""
    with suppress(OSError):  # the working directory may not exist any more
        path = path.relative_to(here) if (here := Path.cwd()) in path.parents else path
    return path


def steps_text(steps: range) -> str:
    """Return a text such as `step 48` or `steps 48 to 52`."""
    return f"step {steps.start}" if len(steps) == 1 else f"steps {steps.start} to {steps.stop - 1}"
