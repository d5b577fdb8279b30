"""Globs on module names.

A name is a path of segments between dots, such as ``encoder.0.bn``; the root module's name is empty and is
written ``.`` in a pattern.

    *        any one segment, or any run of characters inside one
    **       any number of segments, none included: `encoder.**` is `encoder` and all below it
    ?        one character of a segment
    [ab]     one of these characters; [!ab] none of them
    re:...   a regular expression that has to match the whole name
"""

from __future__ import annotations

import re
from functools import lru_cache

ROOT = "."


@lru_cache(maxsize=1024)
def compile_glob(pattern: str) -> re.Pattern[str]:
    """The regular expression that a pattern stands for; it is matched against `_spell(name)`.

    Raises:
        ValueError: The pattern is empty, has an empty segment, an open bracket, a `**` that does not stand alone
            between dots, a range that runs backwards, or is not a regular expression after `re:`.
    """
    if pattern.startswith("re:"):
        try:
            return re.compile(pattern[3:])
        except re.error as error:
            raise ValueError(f"{error} in the regular expression {pattern[3:]!r}") from None
    if not pattern:
        raise ValueError("the pattern is empty; '.' is the root module")
    if pattern == ROOT:
        return re.compile("")
    try:
        return re.compile("".join(_segment(segment, pattern) for segment in pattern.split(".")))
    except re.error as error:  # of what stands between brackets, since all else is escaped
        raise ValueError(f"{error.msg} in {pattern!r}") from None


def matches(pattern: str, name: str) -> bool:
    """Whether a module or parameter name (empty for the root module) is one that the pattern means."""
    compiled = compile_glob(pattern)
    if pattern.startswith("re:"):
        return compiled.fullmatch(name) is not None
    return compiled.fullmatch(_spell(name)) is not None


def _spell(name: str) -> str:
    """A name with a dot behind every segment, so that each segment of a pattern can eat its own dot."""
    return f"{name}." if name else ""


def _segment(segment: str, pattern: str) -> str:
    if segment == "**":
        return r"(?:[^.]+\.)*"
    if "**" in segment:
        raise ValueError(f"'**' has to stand alone between dots in {pattern!r}")
    if not segment:
        raise ValueError(f"{pattern!r} has an empty segment")
    return _characters(segment, pattern) + r"\."


def _characters(segment: str, pattern: str) -> str:
    out, i = [], 0
    while i < len(segment):
        char = segment[i]
        if char == "*":
            out.append("[^.]*")
        elif char == "?":
            out.append("[^.]")
        elif char == "[":
            end = segment.find("]", i + 2 + segment.startswith("!", i + 1))
            if end < 0:
                raise ValueError(f"'[' is not closed in {pattern!r}")
            negated = segment[i + 1] == "!"
            inside = segment[i + 1 + negated : end].replace("\\", "\\\\").replace("^", "\\^").replace("[", "\\[")
            out.append(f"(?!\\.)[{'^' if negated else ''}{inside}]")
            i = end
        else:
            out.append(re.escape(char))
        i += 1
    return "".join(out)
