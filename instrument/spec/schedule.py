"""When a hook is due."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Phase = Literal["train", "eval"]


@dataclass(frozen=True)
class Schedule:
    """The half-open window `[start, stop)`, every N-th step of it; or a list of steps. In one phase.

    A step is an optimizer step, counted from 0. An evaluation bears the number of the steps that were done
    before it: the one after 50 steps is due at step 50.
    """

    every: int = 1
    start: int = 0
    stop: int | None = None
    steps: frozenset[int] | None = None
    phase: Phase = "train"

    def due(self, step: int, phase: str) -> bool:
        """Whether a hook with this schedule acts in this step."""
        if phase != self.phase:
            return False
        if self.steps is not None:
            return step in self.steps
        if step < self.start or (self.stop is not None and step >= self.stop):
            return False
        return (step - self.start) % self.every == 0

    def among(self, steps: Sequence[int]) -> list[int]:
        """The steps of these at which a hook with this schedule is due, in the phase that it is for."""
        return [step for step in steps if self.due(step, self.phase)]

    def __str__(self) -> str:
        if self.steps is not None:
            words = "steps " + ", ".join(str(step) for step in sorted(self.steps))
        else:
            words = "every step" if self.every == 1 else f"every {self.every} steps"
            if self.start or self.stop is not None:
                words += f" of [{self.start}, {'end' if self.stop is None else self.stop})"
        return words if self.phase == "train" else f"{words}, in eval"
