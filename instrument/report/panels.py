"""Panels of installed packages in the report of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from html import escape
from io import StringIO
from typing import Any

from ..analysis.load import Run
from ..errors import user_code_location
from ..registry import Registry

PANELS: Registry[Callable[[Run], Any]] = Registry("panels", "report panel")
"""Functions of a run that return HTML, a matplotlib figure, or None to show nothing."""


def panels(run: Run) -> Iterator[dict[str, str]]:
    """Yield the id, the title and the HTML of each panel. A panel that fails shows its error."""
    for name, panel in PANELS.items():
        try:
            shown = panel(run)
            if hasattr(shown, "savefig"):
                shown = as_svg(shown)
        except Exception as error:
            message = f"{PANELS.places[name]} failed: {type(error).__name__}: {error}{user_code_location(error)}"
            shown = f'<p class="error-text">{escape(message)}</p>'
        if shown is not None:
            yield {"id": f"panel-{name}", "title": name.replace("_", " ").capitalize(), "html": str(shown)}


def as_svg(figure: Any) -> str:
    """Return a matplotlib figure as SVG."""
    file = StringIO()
    figure.savefig(file, format="svg")
    return file.getvalue()
