"""A matplotlib figure that is independent of pyplot: it has no global state and selects no backend."""

from __future__ import annotations

from io import BytesIO

from matplotlib.figure import Figure


class Picture(Figure):
    """A matplotlib figure that is displayed in notebooks."""

    def _repr_png_(self) -> bytes:
        file = BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()
