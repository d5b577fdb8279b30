"""Panels in the report of a run or a sweep: those of this package that few runs have, and those of installed packages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from io import StringIO
from typing import Any

from ..analysis.load import Run
from ..analysis.plot_data import RecordedSeries
from ..errors import user_code_location
from ..fields.registry import Registry

RUN_PANELS: Registry[Callable[[Run], Any]] = Registry(
    "panels",
    "report panel",
    builtin={
        "attention": "instrument.interpret.panels:attention",
        "attribution": "instrument.interpret.panels:attribution",
    },
)
"""Functions of a run that return HTML, a matplotlib figure, a `Panel`, or None to show nothing."""
SWEEP_PANELS: Registry[Callable[[Run], Any]] = Registry(
    "sweep_panels",
    "sweep panel",
    builtin={
        "by_location": "instrument.interpret.panels:by_location",
        "importance": "instrument.interpret.panels:importance_of_overrides",
    },
)
"""The same for a sweep: functions of a `Run` that contains several runs."""


@dataclass(frozen=True)
class Panel:
    """A section of a page.

    Attributes:
        html: The content.
        title: The heading. Default: the name of the panel.
        script: JavaScript that draws charts: it adds a function of the data of the page, with those of the panel in
            `report.panels`, to `RUN` or `SWEEP`.
        data: The data of the charts, as JSON.
        shown: The recorded tensors that the panel shows, and the section of maps does not.
    """

    html: str
    title: str = ""
    script: str = ""
    data: Any = None
    shown: frozenset[tuple[RecordedSeries, str]] = frozenset()


def panels(run: Run, registry: Registry[Callable[[Run], Any]]) -> dict[str, Panel]:
    """Return the panels of a run or a sweep by name. A panel that fails shows its error."""
    sections = {}
    for name, function in registry.items():
        try:
            shown = function(run)
            if hasattr(shown, "savefig"):
                shown = as_svg(shown)
        except Exception as error:
            message = f"{registry.places[name]} failed: {type(error).__name__}: {error}{user_code_location(error)}"
            shown = f'<p class="error-text">{escape(message)}</p>'
        if shown is not None:
            sections[name] = shown if isinstance(shown, Panel) else Panel(str(shown))
    return sections


def as_svg(figure: Any) -> str:
    """Return a matplotlib figure as SVG."""
    file = StringIO()
    figure.savefig(file, format="svg")
    return file.getvalue()
