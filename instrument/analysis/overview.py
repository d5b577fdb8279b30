"""The metrics, the layers that changed most and the coverage of a run as rows of text: in the terminal, a notebook and a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..config.schedule import STEP_PHASES
from ..formatting import format_number
from ..rules.step_rows import location_name
from .plot_data import short_names, shown_first
from .run_history import METRICS, RunHistory

LEVELS = "▁▂▃▄▅▆▇█"
NOT_FINITE = "!"
MISSING = "\N{NO-BREAK SPACE}"  # HTML merges other spaces
SPARKLINE_WIDTH = 24
WIDE = 100.0  # ratio of the largest to the smallest value from which an axis is logarithmic
LONGEST = 40  # maximum length of the name of a location, in characters
ROUNDING = 1e-9  # relative difference up to which values are shown as equal
SHOWN_METRICS = [name for name in METRICS if name != "seconds"]
MAX_PLACES = 6  # maximum number of locations listed for a hook that did not fire
METRIC_COLUMNS = ("metric", "over the steps", "last")
LAYER_COLUMNS = ("hook", "layer", "statistic", "over the steps", "last", "last/median")


class Row(NamedTuple):
    """A row of a table, and whether it shows a value that is not finite."""

    cells: tuple[str, ...]
    is_problem: bool


def metric_rows(history: RunHistory) -> list[Row]:
    """Return one row per metric, with `METRIC_COLUMNS`."""
    rows = []
    for phase, metrics in history.metrics.items():
        custom = (name for name in metrics.statistics if name not in METRICS)
        for name in (*SHOWN_METRICS, *custom):
            if name not in metrics.statistics or (phase not in STEP_PHASES and name == "samples_per_second"):
                continue
            line = sparkline(metrics.values(name, metrics.groups())[0])
            rows.append(Row((_in_phase(name, phase), line, format_number(float(metrics.last(name)[0]))), False))
    for (phase, name), steps in history.not_finite.items():
        rows.append(Row((_in_phase(name, phase), f"not finite from step {min(steps):,}", ""), True))
    return rows


def _in_phase(name: str, phase: str) -> str:
    return name if phase in STEP_PHASES else f"{phase} {name}"


def layer_rows(history: RunHistory, most: int | None = None) -> tuple[list[Row], int]:
    """Return rows of locations with `LAYER_COLUMNS`, those that changed most first, and the number of all locations.

    Args:
        most: The maximum number of rows. Default: None, all.
    """
    found = []
    for series, each in history.series.items():
        statistics = each.statistics
        if not statistics:
            continue
        is_of_values = not (series.is_of_parameters or series.is_gradient)
        statistic = shown_first(statistics, ("std", "rms", "mean") if is_of_values else ("l2", "rms", "abs_max"))
        groups = each.groups()
        values, last = each.values(statistic, groups), each.last(statistic)
        bad = np.zeros(values.shape, bool)
        for name in series.problem_counts:
            if name in statistics:
                bad |= each.values(name, groups) > 0
        for row, location in enumerate(each.locations):
            known = np.abs(values[row][~np.isnan(values[row])])
            median = float(np.median(known)) if len(known) else 0.0
            ratio = abs(float(last[row])) / median if median else float("nan")
            change = 0.0 if np.isnan(ratio) else np.inf if ratio == 0 else abs(np.log(ratio))
            # Locations with non-finite elements come first, then those whose last value differs most from the median.
            urgency = not bad[row].any(), -change
            found.append((urgency, series, location, statistic, values[row], bad[row], float(last[row]), ratio))
    shown = sorted(found, key=lambda each: each[0])[:most]
    names = short_names([location for _, _, location, *_ in shown], LONGEST)
    rows = []
    for _, series, location, statistic, numbers, not_finite, end, ratio in shown:
        hook = series.hook + ("" if series.phase in STEP_PHASES else f" ({series.phase})")
        cells = (hook, names[location], statistic, sparkline(numbers, not_finite))
        ends = "" if np.isnan(end) else format_number(end), "" if np.isnan(ratio) else f"{ratio:.3g}"
        rows.append(Row((*cells, *ends), bool(not_finite.any())))
    return rows, len(found)


def sparkline(values: np.ndarray, not_finite: np.ndarray | None = None, width: int = SPARKLINE_WIDTH) -> str:
    """Return numbers as a line of small bars. Missing values are spaces, which do not break.

    Args:
        values: The numbers; NaN for missing ones; shape [n].
        not_finite: Which of them are marked as not finite; bool, shape [n]. Default: none.
        width: The maximum number of characters. Several numbers share one: their mean is shown.
    """
    bad = np.zeros(len(values), bool) if not_finite is None else not_finite
    pieces = np.array_split(np.arange(len(values)), min(width, max(1, len(values))))
    known = [values[piece][~np.isnan(values[piece])] for piece in pieces]
    means = np.array([piece.mean() if len(piece) else np.nan for piece in known])
    finite = means[np.isfinite(means)]
    if len(finite) and finite.min() > 0 and finite.max() / finite.min() > WIDE:
        means, finite = np.log(np.where(means > 0, means, np.nan)), np.log(finite)
    low, high = (finite.min(), finite.max()) if len(finite) else (0.0, 0.0)
    is_constant = high - low <= ROUNDING * max(abs(low), abs(high))
    marks = []
    for mean, piece in zip(means, pieces, strict=True):
        if bad[piece].any() or np.isinf(mean):
            marks.append(NOT_FINITE)
        elif np.isnan(mean):
            marks.append(MISSING)
        else:
            level = 0.5 if is_constant else (mean - low) / (high - low)
            marks.append(LEVELS[min(len(LEVELS) - 1, int(level * len(LEVELS)))])
    return "".join(marks)


def coverage_rows(coverage: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per hook: expected and actual firings over all ranks, and reasons for missing firings."""
    hooks: dict[str, list[Mapping[str, Any]]] = {}
    for site in coverage:
        hooks.setdefault(site["hook"], []).append(site)
    rows = []
    for hook, sites in hooks.items():
        causes: dict[str, dict[str, None]] = {}
        for site in sites:
            if site["cause"] and (site["fired"] < site["expected"] or not site["expected"]):
                causes.setdefault(site["cause"], {})[location_name(site["layer"], site["path"], site["kind"])] = None
        rows.append(
            {
                "hook": hook,
                "kind": sites[0]["kind"],
                "role": sites[0]["role"],
                "locations": len({(site["layer"], site["path"]) for site in sites}),
                "expected": sum(site["expected"] for site in sites),
                "fired": sum(site["fired"] for site in sites),
                "causes": [(cause, _join_first([*locations])) for cause, locations in causes.items()],
            }
        )
    return rows


def _join_first(locations: list[str]) -> str:
    rest = len(locations) - MAX_PLACES
    return ", ".join(locations[:MAX_PLACES]) + (f" and {rest} more" if rest > 0 else "")
