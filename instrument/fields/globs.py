"""Globs on module names.

A name consists of segments separated by dots, such as `encoder.0.bn`. The name of the root module is empty; its pattern
is `.`.

    *        one complete segment, or any characters within one
    **       any number of segments, including none: `encoder.**` is `encoder` and everything below it
    ?        one character of a segment
    [ab]     one of these characters; [!ab] any other character
    re:...   a regular expression that matches the complete name
"""

from __future__ import annotations

import re
from functools import lru_cache

ROOT = "."
_TOKEN = re.compile(r"\[(?P<negation>!?)(?P<inside>\]?[^\]]*)(?P<end>\]?)|.", re.DOTALL)
"""A set of characters in brackets, of which the first one may be a bracket, or any other character."""


@lru_cache(maxsize=1024)
def compile_glob(pattern: str) -> re.Pattern[str]:
    """Convert a pattern to a regular expression, which is matched against a name with a dot after every segment.

    Raises:
        ValueError: The pattern is empty, contains an empty segment, an unclosed bracket, a reversed range or a `**`
            next to other characters, or is not a valid regular expression after `re:`.
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
    except re.error as error:  # only brackets can fail, since everything else is escaped
        raise ValueError(f"{error.msg} in {pattern!r}") from None


def matches(pattern: str, name: str) -> bool:
    """Return whether a pattern matches the name of a module or parameter. The name of the root module is empty."""
    # Each segment of a pattern matches its own dot.
    text = f"{name}." if name and not pattern.startswith("re:") else name
    return compile_glob(pattern).fullmatch(text) is not None


def _segment(segment: str, pattern: str) -> str:
    if segment == "**":
        return r"(?:[^.]+\.)*"
    if "**" in segment:
        raise ValueError(f"'**' must be a complete segment between dots in {pattern!r}")
    if not segment:
        raise ValueError(f"{pattern!r} has an empty segment")

    def translate(token: re.Match[str]) -> str:
        if token[0] in ("*", "?"):
            return "[^.]*" if token[0] == "*" else "[^.]"
        if token[0][0] != "[":
            return re.escape(token[0])
        if not token["end"]:
            raise ValueError(f"'[' is not closed in {pattern!r}")
        inside = re.sub(r"([\\^\[])", r"\\\1", token["inside"])
        return f"(?!\\.)[{'^' if token['negation'] else ''}{inside}]"

    return _TOKEN.sub(translate, segment) + r"\."
