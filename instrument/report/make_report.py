"""Creation of a report: fills the template and embeds all scripts, so that the file works offline."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from ..analysis.load import Run, load
from ..analysis.plot_data import short_names
from ..analysis.run_history import METRICS
from ..fields.pip_extras import DISTRIBUTION, installed_version, packages_of
from ..plot.look import CATEGORIES, axis_name
from ..storage.run_record import write_atomically
from ..tables.statistics import STATISTICS, USUAL_UPDATE_RATIOS, statistic_of
from . import run_page, sweep_page
from .panels import Panel

LETTERS = (44, 18)  # maximum length of axis labels on wide and narrow pages
TEMPLATES = Path(__file__).parent / "template"
SCRIPTS = ("drawing", "training", "heatmap", "layer", "flow", "units", "maps", "effects", "sweep")
FRAME = '<iframe srcdoc="{}" style="width: 100%; height: 900px; border: 1px solid #8884; border-radius: 8px"></iframe>'


@dataclass(frozen=True)
class Report:
    """A report as an HTML page. Notebooks display it in a frame."""

    html: str = field(repr=False)

    def save(self, path: str | Path) -> Path:
        """Write the page to a file, and return its path. An existing file is overwritten.

        Raises:
            OSError: The file cannot be written.
        """
        file = Path(path)
        write_atomically(file, self.html.encode())
        return file

    def _repr_html_(self) -> str:
        return FRAME.format(escape(self.html, quote=True))


def make(run: Run | str | Path) -> Report:
    """Create the report of a run, or of several runs if the folder contains several.

    Args:
        run: A run from `instrument.load`, or the folder of a run.

    Returns:
        The report; call its method `save` to write it to a file.

    Raises:
        NoRunError: The folder does not exist or contains no run.
        InstrumentError: Plotly or Jinja2 is not installed.
    """
    opened = run if isinstance(run, Run) else load(run)
    several = opened.folders != [opened.path]
    words, numbers = (sweep_page if several else run_page).content(opened)
    return Report(render("sweep.html" if several else "run.html", words, numbers, opened.path))


def render(
    template: str, words: Mapping[str, Any], numbers: Mapping[str, Any], path: Path | str, *, live: bool = False
) -> str:
    """Return a page from the values of a template (`words`) and the data of its charts. A `live` page is updated while it is served."""
    panels: Mapping[str, Panel] = words["panels"]
    names = (*SCRIPTS, "live") if live else SCRIPTS
    scripts = [(TEMPLATES / f"{name}.js").read_text() for name in (*names, "main")]
    scripts[-1:-1] = [panel.script for panel in panels.values()]
    data = {**with_vocabulary(numbers), "panels": {name: panel.data for name, panel in panels.items()}}
    page = _templates().get_template(template)
    return str(
        page.render(
            **words,
            live=live,
            path=str(path),
            script="\n".join(scripts),
            plotly=_plotly(),
            data=packed(as_json(data)),
            style=(TEMPLATES / "style.css").read_text(),
            version=installed_version(DISTRIBUTION),
        )
    )


def render_blocks(template: str, words: Mapping[str, Any], names: Sequence[str]) -> dict[str, str]:
    """Return some blocks of the template of a served page as HTML, by name."""
    page = _templates().get_template(template)
    context = page.new_context({**words, "live": True})
    return {name: "".join(page.blocks[name](context)) for name in names}


def with_vocabulary(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data of the charts with the names of locations, and the properties of statistics, metrics and colors.

    A location has axis labels for wide and narrow pages.
    """
    series = numbers.get("series", [])
    every = [*series, *numbers.get("effects", [])]
    locations = list(dict.fromkeys(location for one in every for location in one["locations"]))
    wide, narrow = (short_names(locations, letters) for letters in LETTERS)
    recorded = (name for one in series for name in one["statistics"])
    statistics = {
        name: {
            "axis": axis_name(name),
            "formula": statistic.meaning,
            "merged": statistic.merged,
            "bounds": [0, 1] if statistic.unit in ("fraction", "units") else None,
        }
        for name, statistic in ((name, statistic_of(name)) for name in dict.fromkeys((*STATISTICS, *recorded)))
    }
    median = {"axis": "median", "formula": "quantile at 0.5", "merged": "mean", "bounds": None}
    return {
        **numbers,
        "names": {location: [wide[location], narrow[location]] for location in locations},
        "statistics": {**statistics, "median": median},
        "metricNames": list(METRICS),
        "metricUnits": METRICS,
        "colours": CATEGORIES,
        "usualUpdates": USUAL_UPDATE_RATIOS,
    }


def check_packages() -> None:
    """Raise an InstrumentError if Plotly or Jinja2, which a report needs, is not installed."""
    _templates()
    _plotly_script()


@cache
def _templates() -> Any:
    with packages_of("report", "a report"):
        import jinja2
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )


@cache
def _plotly() -> str:
    return packed(_plotly_script().read_text(encoding="utf-8"))


def _plotly_script() -> Path:
    with packages_of("report", "a report"):
        import plotly
    return Path(plotly.__file__).parent / "package_data" / "plotly.min.js"


def packed(text: str) -> str:
    """Return a text compressed with gzip and encoded with base64, as the page expects it."""
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=9, mtime=0)).decode()


def as_json(data: Any) -> str:
    """Return compact JSON; NaN raises an error."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False)
