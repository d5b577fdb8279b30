"""What a picture is to show, of all that was recorded: one series, one place, by what the user said of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from ..errors import InstrumentError, Mistake, nearest
from .series import KEYS, Series, place_of, series_in

MOST_NAMES = 12  # of what there is, in an error


def seen_in(frame: pd.DataFrame, does_fit: Callable[[pd.DataFrame], bool]) -> list[Series]:
    """The series of a table whose rows are as wanted, in the order in which they first appear."""
    return [series for series in series_in(frame) if does_fit(series.of(frame))]


def choose(
    candidates: Sequence[Series],
    *,
    hook: str | None = None,
    kind: str | None = None,
    role: str | None = None,
    phase: str | None = None,
) -> Series:
    """The one series that fits what is given.

    Args:
        candidates: What there is; at least one.
        hook: Its name; any without.
        kind: As in `kind:`; any without.
        role: Which of the kind's tensors; any without.
        phase: `train` or `eval`; any without.

    Raises:
        InstrumentError: None fits, or several do; it names those there are.
    """
    wanted = {key: word for key, word in zip(KEYS, (hook, kind, role, phase), strict=True) if word is not None}
    for key, word in wanted.items():
        refuse_unless(word, [getattr(series, key) for series in candidates], key, "nothing of this was recorded")
    fitting = [s for s in candidates if all(getattr(s, key) == word for key, word in wanted.items())]
    if len(fitting) == 1:
        return fitting[0]
    given = ", ".join(f"{key}={word!r}" for key, word in wanted.items())
    problem = f"several series fit {given}".rstrip() if fitting else f"no series fits {given} together"
    raise InstrumentError("\n    ".join([f"{problem}: choose one of", *map(_told, fitting or candidates)]))


def _told(series: Series) -> str:
    """A series as the arguments that choose it."""
    return ", ".join(f"{key}={getattr(series, key)!r}" for key in KEYS)


def refuse_unless(word: str, options: Sequence[str], where: str, problem: str) -> None:
    """Let pass what is one of the options.

    Raises:
        InstrumentError: It is none of them: the problem, the options, and the nearest of them.
    """
    known = list(dict.fromkeys(options))
    if word not in known:
        more = f", ... ({len(known)} in all)" if len(known) > MOST_NAMES else ""
        allowed = ", ".join(name or "''" for name in known[:MOST_NAMES]) + more
        raise InstrumentError(str(Mistake(where, problem, repr(word), allowed, nearest(word, known))))


def places_of(rows: pd.DataFrame) -> dict[tuple[str, str, str], str]:
    """The names of the places in a table, as pictures have them, by layer, path and kind."""
    known = rows[["layer", "path", "kind"]].drop_duplicates()
    triples = zip(known["layer"], known["path"], known["kind"], strict=True)
    return {triple: place_of(*triple) for triple in triples}


def at_place(rows: pd.DataFrame, name: str) -> pd.DataFrame:
    """The rows of a place, or of all places of a layer: `encoder.0.weight`, `encoder.0`, `.` for the root."""
    mine = pd.Series(False, index=rows.index)
    for (layer, path, kind), place in places_of(rows).items():
        if place == name:
            mine |= (rows["layer"] == layer) & (rows["path"] == path) & (rows["kind"] == kind)
    return rows[mine if mine.any() else rows["layer"] == ("" if name == "." else name)]


def choose_place(frame: pd.DataFrame, name: str, **wanted: str | None) -> tuple[Series, str, pd.DataFrame]:
    """The one series that fits and saw a place, the place's own name, and the rows of both.

    Args:
        frame: A table.
        name: A place, or a layer that has one only.
        wanted: As in `choose`.

    Raises:
        InstrumentError: Nothing saw it, several series did, or the layer has several places.
    """
    names = [*places_of(frame).values(), *(layer or "." for layer in frame["layer"].drop_duplicates())]
    refuse_unless(name, names, "layer", "nothing of it was recorded")
    series = choose(seen_in(frame, lambda rows: not at_place(rows, name).empty), **wanted)
    rows = at_place(series.of(frame), name)
    places = list(dict.fromkeys(places_of(rows).values()))
    if len(places) > 1:
        raise InstrumentError(f"{name} has several tensors here: choose one of {', '.join(places)}")
    return series, places[0], rows


def spread(count: int, most: int) -> list[int]:
    """Up to so many places out of so many, evenly, the first and the last among them."""
    return sorted(set(np.linspace(0, count - 1, min(count, most)).round().astype(int).tolist()))
