"""A matplotlib figure that is independent of pyplot: it has no global state and selects no backend."""

from __future__ import annotations

from io import BytesIO
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from .look import TRUETYPE


class Picture(Figure):
    """A matplotlib figure that is displayed in notebooks, and that embeds fonts as Type 42 in PDF and PostScript files."""

    def savefig(self, *args: Any, **kwargs: Any) -> None:
        with rc_context(TRUETYPE):
            super().savefig(*args, **kwargs)

    def _repr_png_(self) -> bytes:
        file = BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()
