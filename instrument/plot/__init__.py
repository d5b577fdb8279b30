"""The report's pictures as matplotlib figures, for notebooks, PNG and SVG: `instrument.plot.heatmap(run, "l2")`.

Each takes a run or a DataFrame, returns the figure and leaves pyplot alone; `figure.savefig("picture.svg")` keeps it.
matplotlib comes with the extra `[report]`; it is imported when the first picture is drawn.
"""

from .compare import compare
from .feature_maps import feature_maps
from .gradient_flow import gradient_flow
from .heatmap import heatmap
from .histogram_over_time import histogram_over_time

__all__ = ["compare", "feature_maps", "gradient_flow", "heatmap", "histogram_over_time"]
