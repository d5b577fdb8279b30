"""A figure without pyplot: nothing is left behind in a global state, and no backend is chosen for anybody."""

from __future__ import annotations

from io import BytesIO

from matplotlib.figure import Figure


class Picture(Figure):
    """A matplotlib figure that shows itself in a notebook."""

    def _repr_png_(self) -> bytes:
        """What a notebook shows."""
        file = BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()
