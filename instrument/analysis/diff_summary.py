"""The summary of the differences between two runs as lines of text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from ..spec.schedule import STEP_PHASES
from .plot_data import location_name
from .tensor_errors import ULP_BINS

if TYPE_CHECKING:
    from .run_comparison import FirstDifference
    from .run_diff import Diff

JUMP = 10.0  # ratio of a difference to the largest one before it from which it is a jump
MOST_LISTED = 8  # settings and unmatched layers that are listed


def summary(diff: Diff) -> list[str]:
    """Return the summary: the two runs, what was compared, the verdict, and what was not compared."""
    return [
        *_runs(diff),
        *_settings(diff),
        "",
        *_compared(diff),
        "",
        *verdict(diff),
        *_metrics(diff),
        *_unmatched(diff),
    ]


def verdict(diff: Diff) -> Iterator[str]:
    """Yield the result of the comparison, and how to read it. Lines after the first one are indented."""
    first = diff.first
    if diff.is_identical:
        yield "IDENTICAL: all compared numbers are equal"
    elif first is None:
        largest = diff.layers.iloc[int(diff.layers["difference"].argmax())]
        yield f"WITHIN THE TOLERANCE: the largest relative difference is {largest['difference']:.2g}"
        yield f"  at {place(largest)}, step {largest['step']}"
    elif diff.cause:
        yield f"DIFFERENT from {_step(first)} on, and no layer is the reason:"
        seeds = [info["seed"] for info in diff.infos]
        yield from (f"  {line.format(*seeds)}" for line in _REASONS[diff.cause])
    else:
        yield f"DIFFERENT: the first difference is at {_step(first)}, {place(diff.layers.loc[first.location], first.call)}"
        yield f"  {_numbers(first)}"
        yield from (f"  {line}" for line in _before(first))


_REASONS = {
    "seed": (
        "The seeds are {} and {}, so the initial weights and the batches differ.",
        "Repeat one of the runs with the seed of the other one.",
    ),
    "batches": (
        "The batches of this step consist of different samples.",
        "Repeat one of the runs with the data and the order of the other one.",
    ),
}


def _numbers(first: FirstDifference) -> str:
    difference = f"relative difference {first.difference:.2g}"
    if math.isnan(first.a) and math.isnan(first.b):
        return f"element by element: {difference}"
    return f"{first.statistic} {first.a:.6g} and {first.b:.6g}: {difference}"


def _before(first: FirstDifference) -> Iterator[str]:
    if first.location == 0 and first.before == 0.0:
        yield "It is the first tensor that both runs recorded, so the weights or the batches may differ too. To exclude them,"
        yield "record the inputs (kind: forward_pre) and the parameters (kind: step_pre, role: param)."
    elif first.before == 0.0:
        yield "All tensors before it are equal."
    elif (ratio := first.difference / first.before) >= JUMP:
        yield f"It is a jump: {ratio:,.0f} times the largest difference before it, {first.before:.2g}."
    else:
        yield f"It is no jump: the largest difference before it is {first.before:.2g}. Rounding errors grow from layer to layer"
        yield "and from step to step."


def place(row: Mapping[str, Any] | pd.Series, call: int = 0) -> str:
    """Return a row of `Diff.layers` as text, such as `encoder.1 (ReLU), forward output`."""
    layer, tensor = place_cells(row)
    return f"{layer} ({row['module_type']}), {tensor}" + (f", call {call}" if call else "")


def place_cells(row: Mapping[str, Any] | pd.Series) -> tuple[str, str]:
    """Return the layer of a row of `Diff.layers`, with its name in the other run, and what was recorded of it."""
    name = location_name(row["layer"], row["path"], row["kind"])
    other = location_name(row["layer_b"], row["path"], row["kind"])
    phase = "" if row["phase"] in STEP_PHASES else f" ({row['phase']})"
    return name if name == other else f"{name} = {other}", f"{row['kind']} {row['role']}{phase}"


def number_text(value: Any) -> str:
    """Return a number of a table with two digits; empty for a missing value."""
    if pd.isna(value):
        return ""
    return f"{value:,}" if isinstance(value, int | np.integer) else "0" if value == 0.0 else f"{value:.2g}"


def ulp_text(counts: Sequence[int]) -> str:
    """Return a histogram of distances as text, such as `0: 81%, 1: 19%`; empty without elements."""
    total = sum(counts)
    return ", ".join(
        f"{name}: {_percent(count / total)}" for name, count in zip(ULP_BINS, counts, strict=True) if count
    )


def _percent(fraction: float) -> str:
    return (
        f"{fraction:.0%}"
        if 0.01 <= fraction <= 0.99 or fraction == 1.0
        else f"{fraction:.1%}"
        if fraction > 0.001
        else "<0.1%"
    )


def _step(first: FirstDifference) -> str:
    return f"step {first.step}" + ("" if first.phase in STEP_PHASES else f" ({first.phase})")


def _runs(diff: Diff) -> Iterator[str]:
    for name, path, info, dtype in zip("AB", diff.paths, diff.infos, diff.dtypes, strict=True):
        version = (info.get("versions") or {}).get("torch")
        facts = [info["status"], f"seed {info['seed']}", dtype, info.get("device"), version and f"torch {version}"]
        yield f"{name}  {path}  ({', '.join(str(fact) for fact in facts if fact)})"


def _settings(diff: Diff) -> Iterator[str]:
    if diff.settings:
        yield "settings that differ:"
    width = max(map(len, diff.settings), default=0)
    for key, (one, other) in list(diff.settings.items())[:MOST_LISTED]:
        yield f"  {key:<{width}}  {one} | {other}"
    if len(diff.settings) > MOST_LISTED:
        yield f"  ... ({len(diff.settings)} in all)"


def _compared(diff: Diff) -> Iterator[str]:
    first, last, count = diff.common_steps
    rows = diff.layers["rows"].sum()
    tensors = f" and {diff.tensors['tensors'].sum():,} complete tensors" if len(diff.tensors) else ""
    yield f"compared: {rows:,} rows{tensors} at {len(diff.layers):,} locations, in {count:,} steps from {first:,} to {last:,}"
    yield f"tolerance: {diff.tolerance:.2g}"


def _metrics(diff: Diff) -> Iterator[str]:
    for metric, rows in diff.metrics.groupby("metric", sort=False):
        above = rows[rows["difference"] > diff.tolerance].sort_values("step")
        if metric == "loss" and len(above):
            row = above.iloc[0]
            yield f"loss: the first difference is at step {row['step']}: {row['a']:.6g} and {row['b']:.6g}"


def _unmatched(diff: Diff) -> Iterator[str]:
    for name, rows in diff.unmatched.groupby("run"):
        places = [location_name(*each) for each in rows[["layer", "path", "kind"]].itertuples(index=False)]
        listed = ", ".join(list(dict.fromkeys(places))[:MOST_LISTED])
        more = f", ... ({len(rows):,} in all)" if len(rows) > MOST_LISTED else ""
        yield f"only in {name.upper()}: {listed}{more}"
    if diff.suggestion is not None:
        yield f"  rename {'='.join(diff.suggestion)} would match more layers"
    for name, count in zip("AB", diff.unmatched_rows, strict=True):
        if count:
            yield f"rows only in {name} at common locations: {count:,} (another number of calls, ranks or micro-steps)"
