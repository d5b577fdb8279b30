"""Plot of a replay or counterfactual, with the run that it repeats."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ..analysis.load import Run, load
from ..config.schedule import STEP_PHASES
from ..errors import InstrumentError
from ..storage.run_search import NoRunError
from .axes_and_scales import SMALL, add_legend, draw_line, new_figure, plain, scale
from .source import check_single_run
from .style import CATEGORIES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 4.6, 3.2  # size of a chart, in inches
METRICS = {"loss": "loss", "grad_norm": "gradient norm"}
LEAST_MARGIN = 10  # steps of the run that are drawn before and after those of the replay


def replay(run: Run, *, source: str | Path | None = None) -> Figure:
    """Plot loss and gradient norm of a replay and of the run that it repeats, over the steps.

    The steps of the replay are shown, and some recorded ones before and after them. In a counterfactual, a vertical line
    marks the first step at which the interventions differ.

    Args:
        run: The replay, the folder of `python -m instrument.replay`.
        source: The folder of the run. Required if it was moved since the replay. Default: None, its recorded path.

    Returns:
        The matplotlib figure.

    Raises:
        InstrumentError: The run is not a replay, its source does not exist, or matplotlib is not installed.
    """
    check_single_run([folder.name for folder in run.folders])
    entry = run.info.get("replay")
    if not entry:
        raise InstrumentError(f"{run.path} is not a replay: its run.json has no entry 'replay'")
    try:
        original = load(source or entry["source"])
    except NoRunError as error:
        raise InstrumentError(f"the run of this replay is missing: {error}; pass source=FOLDER") from None
    replayed, recorded = (_steps(each) for each in (run, original))
    margin = max(LEAST_MARGIN, len(replayed))
    first = replayed.index.min() - margin
    recorded = recorded[(recorded.index >= first) & (recorded.index <= replayed.index.max() + margin)]
    shown = [name for name in METRICS if replayed[name].notna().any() or recorded[name].notna().any()]
    figure = new_figure(WIDTH * max(1, len(shown)) + 0.6, HEIGHT + 0.7)
    label = "counterfactual" if entry["counterfactual"] else "replay"
    for axes, name in zip(figure.subplots(1, max(1, len(shown)), squeeze=False)[0], shown, strict=False):
        draw_line(axes, recorded[name], "run", CATEGORIES[0], "-")
        draw_line(axes, replayed[name], label, CATEGORIES[5], "--")
        scale(axes, "y", np.concatenate([recorded[name].to_numpy(np.float64), replayed[name].to_numpy(np.float64)]))
        if entry["counterfactual"]:
            where = plain(f"from here on: {', '.join(entry['counterfactual'])}")
            axes.axvline(entry["first_step"], color="#555555", linewidth=0.8, linestyle=":", label=where)
        axes.set_title(METRICS[name], fontsize=10)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.tick_params(labelsize=SMALL)
    add_legend(figure)
    return figure


def _steps(run: Run) -> pd.DataFrame:
    """Return the metrics of the steps of rank 0, indexed by step."""
    rows = run.read("metrics", ["step", "phase", "rank", *METRICS])
    return rows[rows["phase"].isin(STEP_PHASES) & (rows["rank"] == 0)].set_index("step")
