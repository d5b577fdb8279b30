"""Selection of one series and one location by the arguments of a plot."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from ..errors import InstrumentError, Mistake, nearest
from .series import KEYS, Series, place_of, series_in

MOST_NAMES = 12  # maximum number of names in an error message


def seen_in(frame: pd.DataFrame, does_fit: Callable[[pd.DataFrame], bool]) -> list[Series]:
    """Return the series of a table whose rows fulfill a condition, in order of first appearance."""
    return [series for series in series_in(frame) if does_fit(series.of(frame))]


def choose(
    candidates: Sequence[Series],
    *,
    hook: str | None = None,
    kind: str | None = None,
    role: str | None = None,
    phase: str | None = None,
) -> Series:
    """Return the one series that matches the arguments.

    Args:
        candidates: The available series; at least one.
        hook: Name of the hook; None for any.
        kind: Kind of the hook; None for any.
        role: Role of the tensor; None for any.
        phase: `train` or `eval`; None for any.

    Raises:
        InstrumentError: No series or several series match. The message lists the candidates.
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
    """Return a series as the keyword arguments that select it."""
    return ", ".join(f"{key}={getattr(series, key)!r}" for key in KEYS)


def refuse_unless(word: str, options: Sequence[str], where: str, problem: str) -> None:
    """Check that a word is one of the options.

    Args:
        word: The given word.
        options: The allowed words.
        where: Name of the argument, for the message.
        problem: What is wrong, for the message.

    Raises:
        InstrumentError: The word is not an option. The message lists the options and the nearest ones.
    """
    known = list(dict.fromkeys(options))
    if word not in known:
        more = f", ... ({len(known)} in all)" if len(known) > MOST_NAMES else ""
        allowed = ", ".join(name or "''" for name in known[:MOST_NAMES]) + more
        raise InstrumentError(str(Mistake(where, problem, repr(word), allowed, nearest(word, known))))


def places_of(rows: pd.DataFrame) -> dict[tuple[str, str, str], str]:
    """Return the names of the locations in a table, as shown in plots, by layer, path and kind."""
    known = rows[["layer", "path", "kind"]].drop_duplicates()
    triples = zip(known["layer"], known["path"], known["kind"], strict=True)
    return {triple: place_of(*triple) for triple in triples}


def at_place(rows: pd.DataFrame, name: str) -> pd.DataFrame:
    """Return the rows of a location, or of all locations of a layer.

    Examples are `encoder.0.weight`, `encoder.0`, and `.` for the root module.
    """
    mine = pd.Series(False, index=rows.index)
    for (layer, path, kind), place in places_of(rows).items():
        if place == name:
            mine |= (rows["layer"] == layer) & (rows["path"] == path) & (rows["kind"] == kind)
    return rows[mine if mine.any() else rows["layer"] == ("" if name == "." else name)]


def choose_place(frame: pd.DataFrame, name: str, **wanted: str | None) -> tuple[Series, str, pd.DataFrame]:
    """Return the one series that matches and has rows at a location.

    Args:
        frame: Rows of a table.
        name: A location, or a layer with a single location.
        wanted: Arguments of `choose`.

    Returns:
        The series, the name of the location, and the rows of both.

    Raises:
        InstrumentError: The location has no rows, several series match, or the layer has several locations.
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
    """Return up to `most` evenly spaced indices of `count` items, including the first and the last."""
    return sorted(set(np.linspace(0, count - 1, min(count, most)).round().astype(int).tolist()))
