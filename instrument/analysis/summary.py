"""Summary of a run in a few numbers per hook, read in batches and with the needed columns only."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from ..spec.tables import TABLES
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


@dataclass
class InterventionSummary:
    """The effect of one intervention.

    Attributes:
        firings: Number of firings.
        held: Number of firings in which the condition of `when` held.
        conditional: Number of firings with a condition.
        elements: Number of elements of all modified tensors.
        changed: Number of changed elements.
        before: Sum of the L2 norms before, over firings with a norm.
        after: Sum of the L2 norms after, over the same firings.
        normed: Number of firings with a norm.
        locations: The locations, as pairs of layer and path.
    """

    firings: int = 0
    held: int = 0
    conditional: int = 0
    elements: int = 0
    changed: int = 0
    before: float = 0.0
    after: float = 0.0
    normed: int = 0
    locations: set[tuple[str, str]] = field(default_factory=set)

    @property
    def changed_fraction(self) -> float:
        """Fraction of the elements that were changed."""
        return self.changed / max(1, self.elements)

    @property
    def norms(self) -> tuple[float, float] | None:
        """Mean norm before and after; None if no firing has a norm."""
        return (self.before / self.normed, self.after / self.normed) if self.normed else None

    def add(self, rows: pa.RecordBatch) -> None:
        """Add rows of effects."""
        normed = rows.filter(pc.and_(pc.is_valid(rows["norm_before"]), pc.is_valid(rows["norm_after"])))
        self.firings += rows.num_rows
        self.held += pc.sum(rows["held"]).as_py() or 0
        self.conditional += pc.count(rows["held"]).as_py()
        self.elements += pc.sum(rows["numel"]).as_py() or 0
        self.changed += pc.sum(rows["changed"]).as_py() or 0
        self.before += pc.sum(normed["norm_before"]).as_py() or 0.0
        self.after += pc.sum(normed["norm_after"]).as_py() or 0.0
        self.normed += normed.num_rows
        locations = pa.Table.from_batches([rows]).group_by(["layer", "path"]).aggregate([])
        self.locations.update(zip(locations["layer"].to_pylist(), locations["path"].to_pylist(), strict=True))


def changed(run: RunTables) -> dict[str, InterventionSummary]:
    """Return the effect of each intervention by hook, in the order in which they first fired."""
    summaries: dict[str, InterventionSummary] = {}
    columns = ["hook", "layer", "path", "numel", "changed", "norm_before", "norm_after", "held"]
    for batch in run.scan("effects", columns):
        hooks = batch["hook"].cast(pa.string())
        for hook in hooks.unique().to_pylist():
            summaries.setdefault(hook, InterventionSummary()).add(batch.filter(pc.equal(hooks, hook)))
    return summaries


def _count(run: RunTables, table: str) -> Counter[str]:
    """Count the rows of a table by hook."""
    counts: Counter[str] = Counter()
    for batch in run.scan(table, ["hook"]):
        for cell in batch["hook"].cast(pa.string()).value_counts().to_pylist():
            counts[cell["values"]] += cell["counts"]
    return counts
