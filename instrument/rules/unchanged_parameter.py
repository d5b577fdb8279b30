"""Rule: a parameter does not change."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import Field

from ..config.rules import PersistentRule
from ..fields.field_types import Count
from .rule import Bounds, Firing, PersistentLocatedRule, QuietSteps, extended
from .step_rows import BoolArray, Chosen, IndexArray, Location, StepRows


class UnchangedParameterRule(PersistentRule):
    """A parameter has the same statistics in several recorded steps, or its update is zero, while the learning rate is not.

    It is unchanged if its mean and its l2 are bit-identical to those of the previous recorded step: three steps with equal values are two
    comparisons. A loss of exactly 0, such as that of a margin, has no gradient, and does not count. The number of steps is that of
    SageMaker Debugger (UnchangedTensor). Biases do not count: a normalization layer after them makes their gradient zero. Frozen layers
    (`requires_grad` is False) do not count either, from the step in which they are frozen; those in a group of the optimizer whose own
    rate is 0 do. If the run records updates, parameters without an update do not count, such as those of a target network: no optimizer
    holds them, and they have no gradient. An update of zero does not count if the recorded parameter has changed since the previous
    recorded step: its layer was skipped, as by stochastic depth. Neither does a step in which no parameter changes, with exactly the loss
    of the previous recorded step, below the first loss: an optimizer such as LBFGS has converged. What the program does not use may be used
    later, and is only noted: a parameter other than a weight without a gradient in a layer that has one, a layer that is not called, if
    gradients and the calls of the model and its layers are recorded, and, if gradients of outputs are recorded, a layer without a gradient
    between layers with one, as the pooler of an encoder whose tokens are classified.
    """

    for_: Count = Field(3, alias="for", description="How often in succession the condition has to hold.")


class UnchangedParameter(PersistentLocatedRule[UnchangedParameterRule], name="unchanged_parameter"):
    saved = ("counts", "previous", "first", "loss")
    what = "unchanged parameter"
    notes_unused = True
    stage = "gradients"
    advice = "Check that the optimizer holds it with a rate that is not 0, that the loss uses it, and that its gradient is not zero."
    requires = "parameters or updates (kind: step_post) with the statistics mean and l2, such as hooks=parameters"
    statistics = ("mean", "l2")
    further_statistics = ("zero_fraction",)

    def __init__(self, spec: UnchangedParameterRule) -> None:
        super().__init__(spec)
        self._previous = np.zeros((0, 2))
        self._is_update = self._is_trained = np.zeros(0, np.bool_)
        self._parameter = np.zeros(0, np.int64)  # the slot of the parameter of an update; the own one without it
        self._first: float | None = None  # the first loss
        self._loss: float | None = None  # that of the previous recorded step

    def selects(self, location: Location) -> bool:
        is_parameter = location.kind == "step_post" and location.role in ("param", "update")
        return is_parameter and not location.is_of_bias and location.layer not in self.frozen_layers

    def grow(self, count: int) -> None:
        super().grow(count)
        self._previous = extended(self._previous, count, np.nan)
        self._is_update = np.array([location.role == "update" for location in self._slots])
        slots = reversed(self._slots.items())  # of several hooks, the first one counts
        parameters = {(each.layer, each.path): slot for each, slot in slots if each.role == "param"}
        self._parameter = np.array([parameters.get((each.layer, each.path), at) for each, at in self._slots.items()])
        of_updates = {(location.layer, location.path) for location in self._slots if location.role == "update"}
        has_update = [not of_updates or (location.layer, location.path) in of_updates for location in self._slots]
        self._is_trained = np.array(has_update, np.bool_)

    def holds(self, rows: StepRows, chosen: Chosen) -> BoolArray:
        values = np.stack([chosen.values(rows.column(name), self.merge) for name in self.statistics], axis=1)
        previous, loss = self._previous[chosen.slots], rows.metric("loss")
        same = (values == previous).all(axis=1)
        has_changed = np.zeros(len(self._slots), np.bool_)
        changed = ~same & ~np.isnan(previous).any(axis=1) & ~self._is_update[chosen.slots]
        has_changed[self._parameter[chosen.slots[changed]]] = True
        self._previous[chosen.slots] = values
        is_update = self._is_update[chosen.slots]
        unchanged: BoolArray = np.where(is_update, values[:, 1] == 0, same)
        self._first = loss if self._first is None else self._first
        is_below_first = loss is not None and self._first is not None and loss < self._first
        has_converged = is_below_first and loss == self._loss and bool(unchanged.all())
        self._loss = loss
        rests = rows.metric("lr") == 0 or bool(rows.metric("skipped")) or loss == 0 or has_converged
        return unchanged & self._is_trained[chosen.slots] & ~has_changed[self._parameter[chosen.slots]] & (not rests)

    def times_needed(self, slots: IndexArray) -> IndexArray:
        return np.where(self._is_update[slots], self.spec.for_, max(1, self.spec.for_ - 1))

    def bounds(self) -> Bounds | None:
        if self._any or not self._is_update.all():
            return None
        return Bounds("l2", low=np.nextafter(0.0, 1.0))

    def remembered(self) -> Sequence[str]:
        return self.statistics

    def remember(self, steps: QuietSteps) -> None:
        for layout, column, losses in steps.tables:
            chosen = self.choose(layout)
            if chosen is not None:
                values = [chosen.values(column(name)[-1], self.merge) for name in self.statistics]
                self._previous[chosen.slots] = np.stack(values, axis=1)
                known = (loss for loss in losses if loss is not None)
                self._first, self._loss = next(known, None) if self._first is None else self._first, losses[-1]

    def firing(self, rows: StepRows, chosen: Chosen, at: int) -> Firing:
        location = chosen.locations[at]
        gradients = [each for each in rows.layout.locations if each.is_gradient]
        has_none = location.layer not in {each.layer for each in gradients}
        of_outputs = {each.layer for each in gradients if each.role == "grad_output"}
        of_parameters = {(each.layer, each.path) for each in gradients if each.role == "param_grad"}
        called = {f"{each.layer}." for each in rows.layout.locations if each.kind == "forward"}
        own = f"{location.layer}.".lstrip(".")
        layers = list(dict.fromkeys(each.layer for each in chosen.locations))
        index = layers.index(location.layer)
        near = {*layers[max(0, index - 1) : index + 2]} - {location.layer}
        note = ""
        is_further = location.layer in {layer for layer, _ in of_parameters} and location[1::4] not in of_parameters
        if is_further and "weight" not in location.path:
            note = "another parameter of its layer does: it is not used in these steps"
        elif gradients and has_none and {"."} < called and not any(each.startswith(own) for each in called):
            note = "others do: its layer is not called in these steps"
        elif has_none and index and near <= of_outputs:
            note = "the layers next to it do: its output is not used, or is detached"
        if note:
            return Firing(f"it has no gradient, but {note}", None, None, location)
        return Firing(f"unchanged for {self.spec.for_} recorded steps", 0.0, None, location)
