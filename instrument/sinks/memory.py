"""Rows kept in memory: for tests, notebooks, and runs too short to be written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..capture.sink import Row
from ..capture.tables import TABLES

if TYPE_CHECKING:
    import pandas as pd


class MemorySink:
    """Keeps every row, in the order in which it came."""

    def __init__(self) -> None:
        self.rows: dict[str, list[Row]] = {name: [] for name in TABLES}
        self.steps = 0
        self.closed = False

    def write(self, table: str, rows: Sequence[Row]) -> None:
        """Keep the rows."""
        self.rows[table].extend(rows)

    def end_step(self) -> None:
        """Count the step."""
        self.steps += 1

    def close(self) -> None:
        """Nothing to be done; it is noted for tests."""
        self.closed = True

    def records(self, table: str) -> list[dict[str, Any]]:
        """The rows of a table as mappings from the columns' names."""
        return [dict(zip(TABLES[table].names, row, strict=True)) for row in self.rows[table]]

    def frame(self, table: str) -> pd.DataFrame:
        """The rows of a table as a DataFrame with all of its columns."""
        import pandas as pd

        return pd.DataFrame(self.rows[table], columns=list(TABLES[table].names))
