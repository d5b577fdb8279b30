"""Panels of a report: attention probabilities of a sample, attributions, effects of an intervention, importance of overrides."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ..analysis.load import Run
from ..analysis.plot_data import forward_order, rank_in
from ..analysis.tensor_images import smaller
from ..errors import InstrumentError
from ..plot.compare import final_values, importance
from ..report.charts import rounded
from ..report.panels import Panel, as_svg
from ..report.sweep_page import METRICS
from .attribution import attribute
from .patching import intervention_grid, patching
from .recorded_layers import AttentionMaps, AttentionTensor, attention_tensors, sample_ids, token_ids

MAX_VALUES = 200_000  # maximum number of values in all maps together
PIXELS, FEWEST_PIXELS = 96, 8  # limits of the side of a map
MAX_HEADS = 32
MAX_ELEMENTS = 100_000_000  # maximum number of recorded values that a page reads for attributions
PANEL_WIDTH = 3.6  # width of the figures of importance, in inches
LOCATIONS = ("layers", "positions", "heads.take", "units", "samples", "slice")
HTML = """
  <p class="lead">Recorded attention probabilities of one sample at the last recorded step.</p>
  <div class="controls"><label>layer<select id="attention-layer"></select></label></div>
  <div id="attention-charts" class="tiles"></div>
  <p class="note" id="attention-note"></p>"""


def attention(run: Run) -> Panel | None:
    """Return the maps of the first recorded sample of each location; None if no attention was recorded.

    The number of values on the page is limited: maps are averaged over squares if they have too many.
    """
    layers = _layers(run)
    if not layers:
        return None
    heads = sum(min(MAX_HEADS, len(maps.values)) for _, maps in layers)
    pixels = int(np.clip((MAX_VALUES / heads) ** 0.5, FEWEST_PIXELS, PIXELS))
    drawn = layers[: MAX_VALUES // FEWEST_PIXELS**2 // MAX_HEADS]
    return Panel(
        HTML,
        script=Path(__file__).with_suffix(".js").read_text(),
        data=[_picture(run, tensor, maps, pixels) for tensor, maps in drawn],
        shown=frozenset((tensor.series, tensor.location) for tensor, _ in layers),
    )


def _layers(run: Run) -> list[tuple[AttentionTensor, AttentionMaps]]:
    """Return the last attention probabilities of each location, and the maps of a sample, in forward order."""
    last: dict[tuple[str, str], AttentionTensor] = {}
    for tensor in attention_tensors(run):
        at = (tensor.series.label, tensor.location)
        is_output = tensor.series.role in ("output", "attention") and not tensor.series.is_gradient
        if is_output and (at not in last or tensor.batch.step > last[at].batch.step):
            last[at] = tensor
    layers = []
    for tensor in last.values():
        values = tensor.read(run)
        if tensor.are_probabilities(values):
            layers.append((tensor, tensor.maps(values[:1].copy(), tensor.indices[0][0])))
    rank = rank_in(forward_order(run) if layers else [])
    return sorted(layers, key=lambda each: rank(each[0].layer))


def _picture(run: Run, tensor: AttentionTensor, maps: AttentionMaps, pixels: int) -> dict[str, Any]:
    position = tensor.indices[0][0]
    small = smaller(maps.values[:MAX_HEADS], pixels)
    known = {places: name for name, all_places in sample_ids(run, [tensor.batch]).items() for places in all_places}
    ids = token_ids(run, tensor.batch, position, tensor.source_shape[-1])
    is_square = tensor.source_shape[-1] == tensor.source_shape[-2]
    return {
        "location": tensor.location,
        "label": tensor.series.label,
        "step": tensor.batch.step,
        "sample": str(known.get((tensor.batch, position), position)),
        "heads": maps.heads[:MAX_HEADS],
        "total": len(maps.heads),
        "z": rounded(small),
        "high": rounded(float(np.nanmax(np.where(np.isfinite(maps.values), maps.values, 0.0)))),
        "queries": [[at, ids[at] if ids and is_square else None] for at in maps.queries],
        "keys": [[at, ids[at] if ids else None] for at in maps.keys],
        "shape": list(tensor.source_shape),
    }


def by_location(run: Run) -> Panel | None:
    """Return the effect of an intervention by location; None if the runs differ in something else."""
    figures = []
    for name in METRICS:
        with suppress(InstrumentError):  # another sweep, or no finite value
            grid = intervention_grid(run)
            if {grid.row_key, grid.column_key} <= {f"hooks.{grid.hook}.{each}" for each in LOCATIONS}:
                figures.append(as_svg(patching(run, name)))
    return Panel("".join(figures), title="Effect of an intervention by location") if figures else None


def attribution(run: Run) -> Panel | None:
    """Return the attributions of the layers of a run in `mode: forward` that recorded their values and gradients, otherwise None."""
    if not ((run.info.get("config") or {}).get("forward") or {}).get("grad"):
        return None
    if sum(np.prod(shape, dtype=np.int64) for shape in run.read("tensors", ["shape"])["shape"]) > MAX_ELEMENTS:
        return Panel("<p>The run has too many recorded values for this page. Call <code>attribute(run)</code>.</p>")
    with suppress(InstrumentError):  # no such tensors, or their shapes differ
        return Panel(as_svg(patching(attribute(run))))
    return None


def importance_of_overrides(run: Run) -> Panel | None:
    """Return the importance of the overrides of a sweep; None for too few runs, or a single override."""
    figures = []
    for name in METRICS:
        with suppress(InstrumentError):  # too few runs, or no different values
            _, factors, _ = final_values(run, name)
            if len(factors.columns) > 1:
                figures.append(as_svg(importance(run, name, width=PANEL_WIDTH)))
    return Panel("".join(figures), title="Importance of overrides") if figures else None
