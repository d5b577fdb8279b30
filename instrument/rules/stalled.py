"""Rule: a step took very long."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from ..config.rules import RULES, RuleBase
from .rule import Bounds, CatalogueRule, Firing
from .step_rows import StepRows


class StalledRule(RuleBase):
    """A step or an evaluation took very long (SageMaker Debugger: StalledTrainingRule, half an hour)."""

    rule: Literal["stalled"]
    above: Annotated[float, Field(gt=0)] = Field(1800.0, description="Seconds of a step.")


@RULES.register("stalled")
class Stalled(CatalogueRule[StalledRule]):
    fields = StalledRule
    what = "stalled step"
    evidence = "seconds"
    advice = "Check the data loader, the file system and the other processes at this time."
    requires = "the duration of steps, which is always recorded"

    def update(self, rows: StepRows) -> Iterator[Firing]:
        seconds = rows.metric("seconds")
        if seconds is not None and seconds > self.spec.above:
            yield Firing(f"{seconds:,.0f} seconds, above {self.spec.above:g}", seconds, self.spec.above)

    def bounds(self) -> Bounds | None:
        return Bounds("seconds", high=self.spec.above)
