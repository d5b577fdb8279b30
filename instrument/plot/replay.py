"""Plot of a replay or counterfactual, with the run that it repeats."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import numpy as np
import pandas as pd

from ..analysis.load import Run, load
from ..config.schedule import STEP_PHASES
from ..errors import InstrumentError
from ..storage.run_search import NoRunError
from .axes_and_scales import charts_beside, colour_of, draw_line, finished, height_or, plain, scale
from .look import Look
from .plot_function import plot
from .source import check_single_run, check_type

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 4.6, 3.2  # size of a chart, in inches
METRICS = {"loss": "loss", "grad_norm": "gradient norm"}
LEAST_MARGIN = 10  # steps of the run that are drawn before and after those of the replay


@plot(interval="draws two runs, so there are no means over seeds")
def replay(run: Run, *, source: str | Path | None = None, **look: Unpack[Look]) -> Figure:
    """Plot loss and gradient norm of a replay and of the run that it repeats, over the steps.

    The steps of the replay are shown, and some recorded ones before and after them. In a counterfactual, a vertical line
    marks the first step at which the interventions differ.

    Args:
        run: The replay, the folder of `python -m instrument.replay`.
        source: The folder of the run. Required if it was moved since the replay. Default: None, its recorded path.
        look: Width, labels, scale and axes of the figure; see `instrument.plot.Look`.

    Raises:
        InstrumentError: The run is not a replay or its source does not exist.
    """
    check_type(run, only_run=True)
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
    count = max(1, len(shown))
    charts = charts_beside(WIDTH * count + 0.6, height_or(HEIGHT) + 0.7, count)
    label = "counterfactual" if entry["counterfactual"] else "replay"
    for axes, name in zip(charts.flat, shown, strict=False):
        draw_line(axes, recorded[name], "run", colour_of(0), "-")
        draw_line(axes, replayed[name], label, colour_of(5), "--")
        scale(axes, "y", np.concatenate([recorded[name].to_numpy(np.float64), replayed[name].to_numpy(np.float64)]))
        if entry["counterfactual"]:
            where = plain(f"from here on: {', '.join(entry['counterfactual'])}")
            axes.axvline(entry["first_step"], color="#555555", linewidth=0.8, linestyle=":", label=where)
        axes.set_title(METRICS[name])
        axes.set_xlabel("step")
        axes.grid(True)
    return finished(charts)


def _steps(run: Run) -> pd.DataFrame:
    rows = run.read("metrics", ["step", "phase", "rank", *METRICS])
    return rows[rows["phase"].isin(STEP_PHASES) & (rows["rank"] == 0)].set_index("step")
