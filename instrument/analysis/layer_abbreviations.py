"""Abbreviation of layer names for axis labels; the short names stay unique."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence

ELLIPSIS = "…"


def short_names(names: Sequence[str], most: int) -> dict[str, str]:
    """Return a unique short name for each name.

    First the common prefix is removed. Then words are abbreviated, but numbers are kept. Then the beginning is cut. A
    name whose short form is not unique stays longer than `most`.
    """
    shared = _shared_segments(names)
    rests = {name: ".".join(name.split(".")[shared:]) for name in names}
    steps: list[Callable[[str], str]] = [lambda name: name, lambda name: rests[name]]
    steps += [lambda name, letters=letters: _abbreviated(rests[name], letters) for letters in (4, 3, 2, 1)]  # type: ignore[misc]
    steps += [lambda name: _cut(_abbreviated(rests[name], 1), most)]
    chosen = dict(zip(names, names, strict=True))
    for step in steps:
        long = [name for name in names if len(chosen[name]) > most]
        tried = {**chosen, **{name: step(name) for name in long}}
        counts = Counter(tried.values())
        chosen |= {name: tried[name] for name in long if counts[tried[name]] == 1}
    return chosen


def _shared_segments(names: Sequence[str]) -> int:
    """Return how many leading segments all dotted names share, not counting the last segment of a name."""
    split = [name.split(".")[:-1] for name in names if "." in name.strip(".")]
    shared = 0
    while (
        len(split) > 1 and all(len(parts) > shared for parts in split) and len({parts[shared] for parts in split}) == 1
    ):
        shared += 1
    return shared


def _abbreviated(name: str, letters: int) -> str:
    """Abbreviate the words of all segments except the last: `enc.lay_11.self_att.in_proj_weight`."""
    *above, last = name.split(".")
    return ".".join([*(re.sub(r"[^\W\d_]+", lambda word: word[0][:letters], part) for part in above), last])


def _cut(name: str, most: int) -> str:
    return name if len(name) <= most else ELLIPSIS + name[1 - most :]
