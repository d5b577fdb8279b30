"""Rule: a step took very long."""

from __future__ import annotations

from collections.abc import Iterator

from ..spec.rules import StalledRule
from .rule import Bounds, CatalogueRule, Firing
from .step_rows import StepRows


class Stalled(CatalogueRule[StalledRule]):
    """See `StalledRule`: half an hour (SageMaker Debugger). The rule fires when the step ends."""

    what = "stalled step"
    advice = "Check the data loader, the file system and the other processes at this time."
    requires = "the duration of steps, which is always recorded"

    def update(self, rows: StepRows) -> Iterator[Firing]:
        seconds = rows.metric("seconds")
        if seconds is not None and seconds > self.spec.above:
            yield Firing(f"{seconds:,.0f} seconds, above {self.spec.above:g}", seconds, self.spec.above)

    def bounds(self) -> Bounds | None:
        return Bounds("seconds", high=self.spec.above)
