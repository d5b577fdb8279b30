"""Selection of one series and one location by the arguments of a plot."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from ..errors import InstrumentError, Problem, similar_names
from ..formatting import shorten
from ..rules.step_rows import location_name
from .plot_data import KEYS, RecordedSeries, series_in


def series_where(frame: pd.DataFrame, does_fit: Callable[[pd.DataFrame], bool]) -> list[RecordedSeries]:
    """Return the series of a table whose rows fulfill a condition, in order of first appearance."""
    return [series for series in series_in(frame) if does_fit(series.of(frame))]


def select_series(
    candidates: Sequence[RecordedSeries],
    *,
    hook: str | None = None,
    kind: str | None = None,
    role: str | None = None,
    phase: str | None = None,
) -> RecordedSeries:
    """Return the one series that matches the arguments.

    Args:
        phase: Phase of the hook; None for any, but `train` if series of several phases match.

    Raises:
        InstrumentError: No series or several series match. The message lists the candidates.
    """
    wanted = {key: word for key, word in zip(KEYS, (hook, kind, role, phase), strict=True) if word is not None}
    for key, word in wanted.items():
        check_choice(word, [getattr(series, key) for series in candidates], key, "no data with this value was recorded")
    fitting = [s for s in candidates if all(getattr(s, key) == word for key, word in wanted.items())]
    if phase is None:
        fitting = [series for series in fitting if series.phase == "train"] or fitting
    if len(fitting) == 1:
        return fitting[0]
    given = ", ".join(f"{key}={word!r}" for key, word in wanted.items())
    problem = f"several series match {given}".rstrip() if fitting else f"no series matches all of {given}"
    arguments = (", ".join(f"{key}={getattr(series, key)!r}" for key in KEYS) for series in fitting or candidates)
    raise InstrumentError("\n    ".join([f"{problem}; select one of", *arguments]))


def check_choice(word: str, options: Sequence[str], where: str, message: str, fix: str = "") -> None:
    """Check that a word is one of the options.

    Raises:
        InstrumentError: The word is not an option. The message lists the options and similar ones.
    """
    choices = list(dict.fromkeys(options))
    if word not in choices:
        allowed = shorten([name or "''" for name in choices])
        raise InstrumentError(Problem(where, message, repr(word), allowed, similar_names(word, choices), fix))


def location_names(rows: pd.DataFrame) -> dict[tuple[str, str, str], str]:
    """Return the names of the locations in a table, as shown in plots, by layer, path and kind."""
    locations = rows[["layer", "path", "kind"]].drop_duplicates()
    triples = zip(locations["layer"], locations["path"], locations["kind"], strict=True)
    return {triple: location_name(*triple) for triple in triples}


def rows_at(rows: pd.DataFrame, name: str) -> pd.DataFrame:
    """Return the rows of a location, or of all locations of a layer.

    Examples are `encoder.0.weight`, `encoder.0`, and `.` for the root module.
    """
    mask = pd.Series(False, index=rows.index)
    for (layer, path, kind), location in location_names(rows).items():
        if location == name:
            mask |= (rows["layer"] == layer) & (rows["path"] == path) & (rows["kind"] == kind)
    return rows[mask if mask.any() else rows["layer"] == ("" if name == "." else name)]


def select_location(frame: pd.DataFrame, name: str, **wanted: str | None) -> tuple[RecordedSeries, str, pd.DataFrame]:
    """Return the one series that matches and has rows at a location.

    Args:
        name: A location, or a layer with a single location.

    Returns:
        The series, the name of the location, and the rows of both.

    Raises:
        InstrumentError: The location has no rows, several series match, or the layer has several locations.
    """
    names = [*location_names(frame).values(), *(layer or "." for layer in frame["layer"].drop_duplicates())]
    check_choice(name, names, "layer", "nothing was recorded for this layer")
    series = select_series(series_where(frame, lambda rows: not rows_at(rows, name).empty), **wanted)
    rows = rows_at(series.of(frame), name)
    locations = list(dict.fromkeys(location_names(rows).values()))
    if len(locations) > 1:
        raise InstrumentError(f"layer: {name} has several tensors; select one of {', '.join(locations)}")
    return series, locations[0], rows


def evenly_spaced(count: int, most: int) -> list[int]:
    """Return up to `most` evenly spaced indices of `count` items, including the first and the last."""
    return sorted(set(np.linspace(0, count - 1, min(count, most)).round().astype(int).tolist()))
