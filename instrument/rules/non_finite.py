"""Rule: values are not finite."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ..config.rules import RuleBase
from ..tables.kinds import KINDS
from .rule import WEIGHTED, Bounds, Firing, LocatedRule, QuietSteps
from .step_rows import Chosen, Location, StepRows

LOSS_NOT_FINITE = "loss not finite"


class NonFinite(LocatedRule[RuleBase], name="non_finite"):
    """A recorded tensor contains NaN or infinity, or the loss is not finite.

    Gradients of a step that a gradient scaler skipped are expected, and do not count. Infinities without NaN can be a mask, which
    a softmax turns into zeros: those of an argument count only if the loss of the step is not finite, those of an output
    do not count if it is finite. Those of attention scores never count: if they are not a mask, the output of the attention has NaN.
    The values of layers with weights are not masks. NaN in the input of the whole model is a missing number if the loss is finite. It
    fires once for each location, and once for the loss of each phase.
    """

    what = "non-finite value"
    stage = "non_finite"
    evidence = "abs_max"
    advice = (
        "Look at the first location in the order of the step, and check that its inputs and the data are finite; see the guide "
        "Find a NaN, and lower the learning rate if the loss grew before."
    )
    requires = "any tensor with the statistics nan_count and inf_count"
    statistics = ("nan_count", "inf_count")
    saved = ("reported", "phases", "loss", "noted")

    def __init__(self, spec: RuleBase) -> None:
        super().__init__(spec)
        self._reported: set[Location] = set()
        self._phases: set[str] = set()  # phases whose loss was not finite
        self._loss: float | None = None  # the last finite training loss
        self._noted = False  # whether a skipped step was reported

    def update(self, rows: StepRows) -> Iterator[Firing]:
        yield from self._check_loss(rows)
        yield from super().update(rows)

    def _check_loss(self, rows: StepRows) -> Iterator[Firing]:
        loss = rows.metric("loss")
        if loss is None:
            return
        if math.isfinite(loss):
            self._loss = loss if rows.is_training else self._loss
        elif rows.phase not in self._phases and not self.spec.hook:
            self._phases.add(rows.phase)
            before = f", {self._loss:.4g} before" if rows.is_training and self._loss is not None else ""
            yield Firing(f"{loss}{before}", loss, what=LOSS_NOT_FINITE)

    def check(self, rows: StepRows, chosen: Chosen) -> Iterator[Firing]:
        if not rows.has_non_finite:
            return
        counts, nans = rows.non_finite(), rows.counts("nan_count")
        loss = rows.metric("loss")
        skipped = bool(rows.metric("skipped"))
        index = chosen.index if chosen.index is not None else np.arange(len(chosen.rows))
        for row, at in zip(chosen.rows, index, strict=True):
            location = chosen.locations[at]
            if not counts[row] or location in self._reported:
                continue
            is_given = not location.layer and location.role == "input" and loss is not None
            if (is_given or not nans[row] > 0) and _may_be_mask(location, loss):
                continue
            text = _counted(rows, int(row))
            if skipped and KINDS[location.kind].gradient:
                if not self._noted:
                    self._noted = True
                    yield Firing(
                        text, None, location=location, what="non-finite value in a step that the scaler skipped"
                    )
                continue
            what = "further non-finite value" if self._reported else "first recorded non-finite value"
            self._reported.add(location)
            yield Firing(text, float(counts[row]), 0.0, location, what)

    def bounds(self) -> Bounds | None:
        return Bounds("nan_count", high=0.0)

    def remember(self, steps: QuietSteps) -> None:
        self._loss = steps.losses[-1] if steps.losses else self._loss


def _may_be_mask(location: Location, loss: float | None) -> bool:
    """Return whether infinities at a location can be a mask.

    Infinities that are not a mask reach the loss, which then is not finite. Without a loss, those of an argument are taken as a mask.
    Those of scores always are: a softmax turns other infinities into NaN, which the next location has.
    """
    if KINDS[location.kind].family != "module" or location.is_gradient:
        return False
    if location.role == "scores":
        return True
    is_argument = location.role == "input"
    is_of_weights = location.kind != "function" and location.module_type in WEIGHTED
    if is_of_weights and not (is_argument and location.module_type == "MultiheadAttention"):
        return False
    return is_argument if loss is None else math.isfinite(loss)


def _counted(rows: StepRows, row: int) -> str:
    """Return the counts of a row, such as `3 NaN, 0 infinite of 6,400`."""
    numel, nan, inf = (float(rows.counts(name)[row]) for name in ("numel", "nan_count", "inf_count"))
    of = "" if math.isnan(numel) else f" of {numel:,.0f}"
    return f"{np.nan_to_num(nan):,.0f} NaN, {np.nan_to_num(inf):,.0f} infinite{of}"
