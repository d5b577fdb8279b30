"""Plots of recorded data as matplotlib figures, for notebooks and for PNG, SVG and PDF files.

Each function takes a run or a sweep, or a DataFrame with rows of one table, and returns a figure:

    figure = instrument.plot.heatmap(run, "l2")
    figure.savefig("heatmap.svg")

The functions do not use or change the state of pyplot. matplotlib is part of the extra `[report]`. It is imported when
the first figure is drawn; without it, they raise an InstrumentError.
"""

from typing import Any

from ..errors import ConfigError
from .compare import compare, importance
from .diff import diff, replay
from .feature_maps import feature_maps
from .gradient_flow import gradient_flow
from .heatmap import casts, heatmap
from .histogram_over_time import histogram_over_time
from .look import Look
from .plot_function import PLOTS

__all__ = [
    "Look",
    "attention",
    "casts",
    "class_activation_map",
    "compare",
    "diff",
    "feature_maps",
    "gradient_flow",
    "heatmap",
    "histogram_over_time",
    "importance",
    "layer_similarity",
    "logit_lens",
    "patching",
    "replay",
]


def __getattr__(name: str) -> Any:
    """Return a plot of the registry: one of this package that few users need, or one of an installed package."""
    if name.startswith("_"):
        raise AttributeError(name)
    try:
        return PLOTS.find(name, __name__)
    except ConfigError as error:
        raise AttributeError(str(error)) from error


def __dir__() -> list[str]:
    return sorted({*__all__, *PLOTS})
