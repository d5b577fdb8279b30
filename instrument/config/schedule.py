"""When a hook acts: its schedule, and the condition on its tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from ..fields.field_types import Count, Number, Spec, UnknownNameError
from ..tables.statistics import ALL, REGISTERED, unreachable_bound

Phase = Literal["train", "forward", "eval", "probe", "rollout"]

STEP_PHASES = ("train", "forward")
"""The phases that consist of steps. The phases `eval`, `probe` and `rollout` run between two steps."""
MAX_WINDOW = 10_000
USABLE = tuple(name for name in ALL if name != "numel")
"""The statistics of conditions. The number of elements is known without a condition."""


def common(one: range, other: range) -> range:
    """Return the intersection of two ascending ranges, which is a range too (Chinese remainder theorem)."""
    divisor = gcd(one.step, other.step)
    distance = other.start - one.start
    if distance % divisor or not one or not other:
        return range(0)
    step = one.step * (other.step // divisor)
    # one.start + times * one.step is the first number of `one` that is congruent to the numbers of `other`.
    modulus = other.step // divisor
    count = distance // divisor * pow(one.step // divisor, -1, modulus) % modulus if modulus > 1 else 0
    first = one.start + count * one.step
    start = max(one.start, other.start)
    first += -((first - start) // step) * step if first < start else 0
    return range(first, min(one.stop, other.stop), step)


@dataclass(frozen=True)
class Evaluations:
    """The numbers of completed steps after which an evaluation runs: every N (0: none of these), and the last one."""

    steps: int
    every: int

    @property
    def regular(self) -> range:
        return range(self.every, self.steps + 1, self.every) if self.every else range(0)

    def __contains__(self, step: int) -> bool:
        return step == self.steps or step in self.regular

    def steps_in(self, schedule: Schedule) -> Sequence[int]:
        """Return the evaluations at which a schedule with phase `eval` is active."""
        regular = schedule.steps_in(self.regular)
        last = self.steps not in self.regular and schedule.includes(self.steps, "eval")
        return [*regular, self.steps] if last else regular


@dataclass(frozen=True)
class Schedule:
    """Every N-th step of the half-open interval [start, stop), or a list of steps, in one phase.

    A step is an optimizer step, or a batch in `mode: forward`, counted from 0. Evaluations and passes of the probe batch
    have the number of completed steps: the evaluation after 50 steps runs at step 50.
    """

    every: int = 1
    start: int = 0
    stop: int | None = None
    steps: frozenset[int] | None = None
    phase: Phase = "train"

    def includes(self, step: int, phase: str) -> bool:
        if phase != self.phase:
            return False
        if self.steps is not None:
            return step in self.steps
        if step < self.start or (self.stop is not None and step >= self.stop):
            return False
        return (step - self.start) % self.every == 0

    def steps_in(self, steps: range) -> Sequence[int]:
        """Return which of these steps are scheduled, in the phase of the schedule, without iterating over them."""
        if self.steps is not None:
            return [step for step in sorted(self.steps) if step in steps]
        return common(range(self.start, steps.stop if self.stop is None else self.stop, self.every), steps)

    def __str__(self) -> str:
        if self.steps is not None:
            text = "steps " + ", ".join(str(step) for step in sorted(self.steps))
        else:
            text = "every step" if self.every == 1 else f"every {self.every} steps"
            if self.start or self.stop is not None:
                text += f" of [{self.start}, {'end' if self.stop is None else self.stop})"
        return text if self.phase in STEP_PHASES else f"{text}, in {self.phase}"


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

    def __str__(self) -> str:
        times = "" if self.times is None else f" x {self.times}"
        return f"{self.stat} {'above' if self.below is None else 'below'} {self.bound:g}{times}"


# The brackets exclude the tags from the keys in messages.
When = Annotated[
    Annotated[str, Tag("[rule]")] | Annotated[Condition, Tag("[condition]")],
    Discriminator(lambda value: "[rule]" if isinstance(value, str) else "[condition]"),
]
"""The name of a rule, or a condition."""
