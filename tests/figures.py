"""Runs for tests of figures, and functions that read values and labels from figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from attached_runs import train_steps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure
from matplotlib.text import Text
from torch import nn

import instrument

TENSORS = {"layers": "0", "tensors": True, "stats": "none"}
HOOKS: dict[str, dict[str, Any]] = {
    "acts": {"kind": "forward", "histogram": 8, "quantiles": [0.25, 0.5, 0.75]},
    "grads": {"kind": "parameter_grad"},
    "updates": {"kind": "step_post", "role": "update", "stats": ["l2", "update_ratio"]},
    "image": {**TENSORS, "layers": ".", "kind": "forward_pre", "samples": 2},
    "maps": {**TENSORS, "kind": "forward", "samples": 2},
    "filters": {**TENSORS, "kind": "step_post", "role": "param", "params": "weight"},
}


def make_run(
    folder: Path,
    *,
    hooks: dict[str, dict[str, Any]] | None = None,
    steps: int = 4,
    seed: int = 0,
    with_nan: bool = False,
    overrides: dict[str, Any] | None = None,
) -> instrument.Run:
    """Train a small network on noise. With `with_nan`, the inputs are NaN in the second half of the steps."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))
    specs = {name: {"layers": "**", "action": "record", **spec} for name, spec in (hooks or HOOKS).items()}
    factors = [np.nan if with_nan and step >= steps // 2 else 1.0 for step in range(steps)]
    train_steps(model, specs, (torch.randn(5, 1, 8, 8) * factor for factor in factors), out=folder)
    info = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(info | {"overrides": overrides or {}, "seed": seed}))
    return instrument.load(folder)


def stats_of(values: dict[str, list[float]], **columns: Any) -> pd.DataFrame:
    """Return a `stats` table with the `l2` of each layer at steps 0, 1, ..."""
    rows = [(layer, step, l2) for layer, line in values.items() for step, l2 in enumerate(line)]
    frame = pd.DataFrame(rows, columns=["layer", "step", "l2"])
    same = {"hook": "h", "kind": "parameter_grad", "role": "param_grad", "phase": "train", "path": "weight"}
    return frame.assign(recompute=False, nan_count=0, inf_count=0, **{**same, **columns})


def mesh_of(axes: Axes) -> QuadMesh:
    """Return the only mesh of a chart."""
    (mesh,) = (artist for artist in axes.collections if isinstance(artist, QuadMesh))
    return mesh


def axis_labels(axes: Axes) -> list[str]:
    """Return the labels of the vertical axis from top to bottom."""
    texts = axes.yaxis.get_major_formatter().format_ticks(sorted(axes.get_yticks().tolist()))
    return texts if axes.yaxis_inverted() else texts[::-1]


def overlaps(figure: Figure) -> list[tuple[str, str]]:
    """Return pairs of neighboring axis labels that overlap in the drawn figure."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    found = []
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            labels = [*axis.get_ticklabels(), *axis.get_ticklabels(minor=True)]
            shown: list[Text] = [label for label in labels if label.get_text() and label.get_visible()]
            shown.sort(key=lambda label: label.get_window_extent(renderer).min.sum())
            boxes = [label.get_window_extent(renderer) for label in shown]
            pairs = zip(shown, shown[1:], boxes, boxes[1:], strict=False)
            found += [(one.get_text(), two.get_text()) for one, two, a, b in pairs if a.overlaps(b)]
    return found


def legend_of(figure: Figure) -> list[str]:
    """Return the texts of the legends."""
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def faults_of(figure: Figure, smallest: float = 0.3) -> list[str]:
    """Return what is wrong in the drawn figure: texts that overlap, or leave the figure, and charts below a size in inches."""
    FigureCanvasAgg(figure).draw()
    charts = [one for axes in figure.axes for one in (axes, *axes.child_axes)]
    shown = [axes for axes in charts if axes.axison]
    inner, outer = [], []
    for axes in shown:
        inner += axes.texts
        outer += [axes.title, *(part for axis in (axes.xaxis, axes.yaxis) for part in _texts_of(axis))]
        outer += [] if axes.legend_ is None else axes.legend_.get_texts()
    for place in (figure, *figure.subfigs):
        outer += [*place.texts, *(text for legend in place.legends for text in legend.get_texts())]
    boxes = [
        (text.get_text(), text.get_window_extent(), text in outer)
        for text in (*inner, *outer)
        if text.get_text().strip()
    ]
    faults = []
    for at, (name, box, is_outer) in enumerate(boxes):
        if box.x0 < 0 or box.y0 < 0 or box.x1 > figure.bbox.x1 or box.y1 > figure.bbox.y1:
            faults.append(f"{name!r} leaves the figure")
        faults += [f"{name!r} overlaps {other!r}" for other, second, _ in boxes[at + 1 :] if _overlap(box, second)]
        if is_outer:
            faults += [f"{name!r} is on the chart {axes.get_title()!r}" for axes in shown if _overlap(box, axes.bbox)]
    for axes in shown:
        width, height = axes.bbox.width / figure.dpi, axes.bbox.height / figure.dpi
        is_bar = axes.get_label() == "<colorbar>" or axes not in figure.axes
        if height < smallest or width < (0.02 if is_bar else smallest):
            faults.append(f"the chart {axes.get_title()!r} has {width:.2f} x {height:.2f} inches")
    return faults


def _texts_of(axis: Any) -> list[Text]:
    labels = [label for tick in axis._update_ticks() for label in (tick.label1, tick.label2) if label.get_visible()]
    return [axis.label, axis.offsetText, *labels]


def _overlap(one: Any, two: Any) -> bool:
    """Return whether two boxes overlap by more than half a pixel in both directions."""
    across = min(one.x1, two.x1) - max(one.x0, two.x0)
    along = min(one.y1, two.y1) - max(one.y0, two.y0)
    return bool(across > 0.5 and along > 0.5)
