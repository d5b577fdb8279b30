"""Long names of layers made short enough for an axis, each still unlike every other."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence

ELLIPSIS = "…"


def short_names(names: Sequence[str], most: int) -> dict[str, str]:
    """A short name for each, as unlike as the names themselves.

    What all have in common at their beginning is left out first; then words lose letters from their ends, numbers none; then
    the beginning is cut. A name that would be like another one is kept longer than `most` instead.

    Args:
        names: Any; each once.
        most: Letters.
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
    """How many segments all names with several of them begin with; the last of each is never one."""
    split = [name.split(".")[:-1] for name in names if "." in name.strip(".")]
    shared = 0
    while (
        len(split) > 1 and all(len(parts) > shared for parts in split) and len({parts[shared] for parts in split}) == 1
    ):
        shared += 1
    return shared


def _abbreviated(name: str, letters: int) -> str:
    """All words but those of the last segment, with so many letters: `enc.lay_11.self_att.in_proj_weight`."""
    *above, last = name.split(".")
    return ".".join([*(re.sub(r"[^\W\d_]+", lambda word: word[0][:letters], part) for part in above), last])


def _cut(name: str, most: int) -> str:
    return name if len(name) <= most else ELLIPSIS + name[1 - most :]
