"""Summary of a run in a few numbers per hook, read in batches and with the needed columns only."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pandas as pd
import pyarrow as pa

from ..tables.schemas import TABLES
from .frames import plain_labels
from .run_tables import RunTables


def recorded(run: RunTables) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Return what each record hook recorded.

    Returns:
        The numbers of firings, of rows (of statistics and further tables) and of tensors, by hook.
    """
    firings: Counter[str] = Counter()
    for batch in run.scan("coverage", ["hook", "fired"]):
        for row in batch.to_pylist():
            firings[row["hook"]] += row["fired"]
    of_rows = sum((_count(run, name) for name, table in TABLES.items() if table.fields), _count(run, "stats"))
    return firings, of_rows, _count(run, "tensors")


@dataclass(frozen=True)
class InterventionSummary:
    """The effect of one intervention.

    Attributes:
        locations: Number of locations, which are pairs of layer and path.
        held: Number of firings in which the condition of `when` held.
        conditional: Number of firings with a condition.
        elements: Number of elements of all modified tensors.
        before: Sum of the L2 norms before, over firings with both norms.
        after: Sum of the L2 norms after, over the same firings.
        normed: Number of firings with both norms.
    """

    locations: int
    firings: int
    held: int
    conditional: int
    elements: int
    changed: int
    before: float
    after: float
    normed: int

    @property
    def changed_fraction(self) -> float:
        """Fraction of the elements that were changed."""
        return self.changed / max(1, self.elements)

    @property
    def norms(self) -> tuple[float, float] | None:
        """Mean norm before and after; None if no firing has both."""
        return (self.before / self.normed, self.after / self.normed) if self.normed else None


def changed(run: RunTables) -> dict[str, InterventionSummary]:
    """Return the effect of each intervention by hook, in the order in which they first fired."""
    location = ["hook", "layer", "path"]
    parts = []
    for batch in run.scan("effects", [*location, "numel", "changed", "norm_before", "norm_after", "held"]):
        rows = plain_labels(pa.Table.from_batches([batch])).to_pandas()
        normed = rows["norm_before"].notna() & rows["norm_after"].notna()
        numbers = {
            "firings": 1,
            "held": rows["held"].eq(True),
            "conditional": rows["held"].notna(),
            "elements": rows["numel"],
            "changed": rows["changed"],
            "before": rows["norm_before"].where(normed),
            "after": rows["norm_after"].where(normed),
            "normed": normed,
        }
        parts.append(rows[location].assign(**numbers).groupby(location, sort=False).sum())
    if not parts:
        return {}
    sums = pd.concat(parts).groupby(location, sort=False).sum().assign(locations=1)
    totals = sums.groupby("hook", sort=False).sum().astype({"elements": int, "changed": int})
    return {str(hook): InterventionSummary(**numbers) for hook, numbers in totals.to_dict("index").items()}


def _count(run: RunTables, table: str) -> Counter[str]:
    """Count the rows of a table by hook."""
    counts: Counter[str] = Counter()
    for batch in run.scan(table, ["hook"]):
        for cell in batch["hook"].cast(pa.string()).value_counts().to_pylist():
            counts[cell["values"]] += cell["counts"]
    return counts
