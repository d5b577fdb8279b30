"""Conversion of layer names and steps."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..errors import ConfigError, Problem

EVERYTHING = "**"


def layers_containing(pattern: str, where: str) -> str:
    """Return the layer pattern for the names in which a regular expression is found at any position (`re.search`).

    Args:
        pattern: The regular expression.
        where: Its key in the source.

    Raises:
        ConfigError: It is not a valid regular expression.
    """
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(Problem(where, f"is not a regular expression: {error}", given=pattern)) from None
    flags = re.match(r"(?:\(\?[aiLmsux]+\))?", pattern)
    start = flags[0] if flags else ""
    body = pattern[len(start) :]
    if re.fullmatch(r"(?:\^?\.[*+]?\$?)?", body):
        return EVERYTHING
    if "|" in body:  # perhaps between alternatives, to which the rest must not belong
        bare = re.fullmatch(r"(?:\.\*)?(\((?:[^()\\]|\\.)*\))(?:\.\*)?", body)
        body = bare[1] if bare else f"(?:{body})"
    before = "" if body.startswith(".*") else ".*"
    after = "" if body.endswith(".*") and not body.endswith("\\.*") else ".*"
    return f"re:{start}{before}{body}{after}"


def layers_with_text(texts: Iterable[str]) -> str:
    """Return the layer pattern for the names that contain one of several texts."""
    escaped = [re.sub(r"([^\w-])", r"\\\1", text) for text in texts]
    return f"re:.*{escaped[0]}.*" if len(escaped) == 1 else f"re:.*({'|'.join(escaped)}).*"


def multiples(every: int, start: int, stop: int | None, where: str) -> dict[str, int] | None:
    """Return the fields of a hook that acts at the multiples of a number.

    Args:
        every: The number.
        start: The first step that may be scheduled.
        stop: The step after the last one; None: no end.
        where: The key of the schedule in the source.

    Returns:
        The fields `every`, `start` and `stop`, without those that have the default value; None if no step is scheduled.

    Raises:
        ConfigError: `every` is not positive.
    """
    if every < 1:
        raise ConfigError(Problem(where, "the number of steps must be at least 1", given=every))
    first = max(0, -(-start // every) * every)
    if stop is not None and first >= stop:
        return None
    fields = {"every": every if every > 1 else None, "start": first or None, "stop": stop}
    return {name: value for name, value in fields.items() if value is not None}
