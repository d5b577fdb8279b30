"""A run in a few numbers a hook. Only the columns that are needed are read, and tables that may be large in batches."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from .load import Run


def recorded(run: Run) -> pd.DataFrame:
    """What record hooks left.

    Returns:
        Indexed by hook: `firings`, `rows` of statistics and distributions, `tensors` kept.
    """
    firings = run.coverage.groupby("hook").fired.sum()
    rows = pd.Series(_count(run, "stats") + _count(run, "distributions"), dtype="int64")
    tensors = pd.Series(_count(run, "tensors"), dtype="int64")
    table = pd.DataFrame({"firings": firings, "rows": rows, "tensors": tensors})
    return table.fillna(0).astype(int)


@dataclass
class Reach:
    """What one intervention did.

    Attributes:
        firings: How often it acted.
        elements: Of all tensors that it acted on.
        changed: How many of them it changed.
        before: The sum of the L2 norms before, of the firings that have one.
        after: Likewise after.
        normed: How many those are.
        at: The layers, with the paths in them.
    """

    firings: int = 0
    elements: int = 0
    changed: int = 0
    before: float = 0.0
    after: float = 0.0
    normed: int = 0
    at: set[tuple[str, str]] = field(default_factory=set)

    @property
    def places(self) -> int:
        """At how many places it acted."""
        return len(self.at)

    @property
    def share(self) -> float:
        """Of the elements, those that were changed."""
        return self.changed / max(1, self.elements)

    @property
    def norms(self) -> tuple[float, float] | None:
        """The mean norm before and after; None where no tensor had one."""
        return (self.before / self.normed, self.after / self.normed) if self.normed else None

    def add(self, rows: pa.RecordBatch) -> None:
        """Take rows of effects."""
        normed = rows.filter(pc.and_(pc.is_valid(rows["norm_before"]), pc.is_valid(rows["norm_after"])))
        self.firings += rows.num_rows
        self.elements += pc.sum(rows["numel"]).as_py() or 0
        self.changed += pc.sum(rows["changed"]).as_py() or 0
        self.before += pc.sum(normed["norm_before"]).as_py() or 0.0
        self.after += pc.sum(normed["norm_after"]).as_py() or 0.0
        self.normed += normed.num_rows
        places = pa.Table.from_batches([rows]).group_by(["layer", "path"]).aggregate([])
        self.at.update(zip(places["layer"].to_pylist(), places["path"].to_pylist(), strict=True))


def changed(run: Run) -> dict[str, Reach]:
    """What interventions did, by hook, in the order in which they first acted."""
    found: dict[str, Reach] = {}
    columns = ["hook", "layer", "path", "numel", "changed", "norm_before", "norm_after"]
    for batch in run.scan("effects", columns):
        hooks = batch["hook"].cast(pa.string())
        for hook in hooks.unique().to_pylist():
            found.setdefault(hook, Reach()).add(batch.filter(pc.equal(hooks, hook)))
    return found


def _count(run: Run, table: str) -> Counter[str]:
    """Rows of a table by hook."""
    counts: Counter[str] = Counter()
    for batch in run.scan(table, ["hook"]):
        for cell in batch["hook"].cast(pa.string()).value_counts().to_pylist():
            counts[cell["values"]] += cell["counts"]
    return counts
