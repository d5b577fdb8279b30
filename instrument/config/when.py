"""The condition of a hook: a statistic of its tensor, and a bound."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from ..fields.field_types import Count, Number, Spec
from ..tables.statistics import ALL, REGISTERED, statistic_of, unreachable_bound
from .messages import UnknownNameError

MAX_WINDOW = 10_000
USABLE = tuple(name for name in ALL if name != "numel")
"""The statistics of conditions. The number of elements is known without a condition."""


class Condition(Spec):
    """Act only where a statistic of the tensor is above or below a bound."""

    stat: str = Field(description="The statistic of the tensor, over its finite values: l2, abs_max, nan_count, ...")
    above: Number | None = Field(None, description="The statistic exceeds this number.")
    below: Number | None = Field(None, description="The statistic is below this number.")
    times: Literal["median", "mean", "std"] | None = Field(
        None,
        description="Multiply the bound by the median, mean or standard deviation of the statistic in the previous firings at the same "
        "tensor.",
    )
    window: Annotated[Count, Field(le=MAX_WINDOW)] = Field(
        50, description="With 'times': the number of previous firings."
    )
    after: Count = Field(10, description="With 'times': the number of earlier values that are required first.")

    @model_validator(mode="after")
    def _validate_bounds(self) -> Condition:
        if self.stat not in USABLE and self.stat not in REGISTERED:
            if self.stat in ALL:
                raise ValueError(f"stat {self.stat} is the size of the tensor, which needs no condition")
            raise UnknownNameError("statistic", self.stat, (*USABLE, *REGISTERED))
        if (self.above is None) == (self.below is None):
            raise ValueError("requires either 'above' or 'below'")
        if self.times is None:
            if given := sorted({"window", "after"} & self.model_fields_set):
                raise ValueError(f"{' and '.join(map(repr, given))} require 'times': median, mean or std")
            if problem := unreachable_bound(self.stat, self.above, self.below):
                raise ValueError(problem)
        elif (self.above if self.below is None else self.below) <= 0:  # type: ignore[operator]
            raise ValueError(f"the factor of the {self.times} must be positive")
        elif self.times == "std" and self.window < 2:
            raise ValueError("'times: std' requires a window of at least 2: the std of one value is 0")
        return self

    @property
    def bound(self) -> float:
        bound = self.above if self.below is None else self.below
        assert bound is not None, "checked by the validator"
        return bound

    def fits(self, kind: str, role: str) -> bool:
        """Return whether the tensors of a kind and role have the statistic."""
        only = statistic_of(self.stat).only
        return not only or (kind, role) in only

    def __str__(self) -> str:
        times = "" if self.times is None else f" x {self.times}"
        return f"{self.stat} {'above' if self.below is None else 'below'} {self.bound:g}{times}"


# The brackets exclude the tags from the keys in messages.
When = Annotated[
    Annotated[str, Tag("[rule]")] | Annotated[Condition, Tag("[condition]")],
    Discriminator(lambda value: "[rule]" if isinstance(value, str) else "[condition]"),
]
"""The name of a rule, or a condition."""
