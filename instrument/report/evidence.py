"""The evidence of a finding as a small picture: a statistic over the steps, its threshold, and the step of the finding."""

from __future__ import annotations

from html import escape

import numpy as np

from ..analysis.diagnosis import Finding
from ..analysis.overview import WIDE
from ..analysis.run_history import RunHistory
from ..analysis.step_history import StepHistory
from ..formatting import format_number
from ..rules.step_rows import location_label

WIDTH, HEIGHT, MARGIN = 320, 72, 14  # pixels


def evidence(history: RunHistory, finding: Finding) -> str:
    """Return an SVG picture; an empty string if fewer than two steps have a value.

    Missing values, such as those of a tensor that is not finite, are gaps.
    """
    curve = curve_of(history, finding)
    if curve is None or finding.step is None:
        return ""
    steps, values = curve
    known = np.isfinite(values)
    if known.sum() < 2:
        return ""
    shown = np.append(values[known], [] if finding.threshold is None else finding.threshold)
    is_log = shown.min() > 0 and shown.max() / shown.min() > WIDE
    heights = np.log(np.where(values > 0, values, np.nan)) if is_log else values
    low, high = (np.log(shown.min()), np.log(shown.max())) if is_log else (shown.min(), shown.max())
    first, last = int(steps[0]), max(int(steps[-1]), finding.step)

    def x(step: float) -> float:
        return MARGIN + (WIDTH - 2 * MARGIN) * (step - first) / max(1, last - first)

    def y(height: float) -> float:
        return HEIGHT / 2 if high == low else HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * (height - low) / (high - low)

    parts = [f'<line class="step" x1="{x(finding.step):.1f}" x2="{x(finding.step):.1f}" y1="2" y2="{HEIGHT - 2}"/>']
    bound = ""
    if finding.threshold is not None:
        level = y(np.log(finding.threshold) if is_log else finding.threshold)
        parts.append(f'<line class="bound" x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{level:.1f}" y2="{level:.1f}"/>')
        bound = f"; dashed: threshold {format_number(finding.threshold)}"
    for piece in np.split(np.arange(len(steps)), np.flatnonzero(~known)):
        inside = piece[known[piece]]
        points = " ".join(f"{x(steps[at]):.1f},{y(heights[at]):.1f}" for at in inside)
        parts.append(f'<polyline points="{points}"/>' if len(inside) > 1 else "")
        parts += [
            f'<circle cx="{x(steps[at]):.1f}" cy="{y(heights[at]):.1f}" r="2"/>' for at in inside[: len(inside) == 1]
        ]
    numbers = [format_number(float(bound_)) for bound_ in (values[known].min(), values[known].max())]
    scale = ", logarithmic" if is_log else ""
    text = f"{finding.statistic}{scale}, {numbers[0]} to {numbers[1]}, steps {first:,} to {last:,}; marked: step {finding.step:,}{bound}"
    return (
        f'<figure class="evidence"><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(text)}">{"".join(parts)}</svg>'
        f"<figcaption>{escape(text)}</figcaption></figure>"
    )


def curve_of(history: RunHistory, finding: Finding) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the first step of each group, int64 [groups], and the values, float64 [groups]; None if they were not recorded."""
    metrics = history.metrics.get("train")
    if metrics is not None and finding.statistic in metrics.statistics:
        return _values(metrics, finding.statistic, 0)
    for series, each in history.series.items():
        for row, location in enumerate(each.locations):
            if (
                location_label(location, series.role, series.hook, series.phase) == finding.where
                and finding.statistic in each.statistics
            ):
                return _values(each, finding.statistic, row)
    return None


def _values(history: StepHistory, statistic: str, row: int) -> tuple[np.ndarray, np.ndarray]:
    groups = history.groups()
    return history.steps(groups)[0], history.values(statistic, groups)[row]
