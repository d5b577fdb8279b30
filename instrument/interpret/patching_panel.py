"""The panel of a sweep over the location of an intervention: its effect on each metric as a heat map."""

from __future__ import annotations

from contextlib import suppress

from ..analysis.load import Run
from ..errors import InstrumentError
from ..report.panels import Panel, as_svg
from .intervention_grid import intervention_grid
from .patching_plot import patching

METRICS = ("loss", "accuracy")
LOCATIONS = ("layers", "positions", "heads.take", "units", "samples", "slice")


def by_location(run: Run) -> Panel | None:
    """Return the effect of an intervention by location; None if the runs differ in something else."""
    figures = []
    for name in METRICS:
        with suppress(InstrumentError):  # another sweep, or no finite value
            grid = intervention_grid(run)
            if {grid.row_key, grid.column_key} <= {f"hooks.{grid.hook}.{each}" for each in LOCATIONS}:
                figures.append(as_svg(patching(run, name)))
    return Panel("".join(figures), title="Effect of an intervention by location") if figures else None
