"""The base classes of rules."""

from __future__ import annotations

import base64
import copyreg
import math
import sys
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar, get_args

import numpy as np
from pydantic import create_model

from ..config.rules import RULES, PersistentRule, RuleBase
from .step_rows import BoolArray, Chosen, FloatArray, IndexArray, Location, RowLayout, StepRows

Stage = Literal[
    "setup", "targets", "updates", "divergence", "units", "gradients", "non_finite", "learning", "reference"
]
"""Where a problem arises: in the data or the configuration, in the targets, in the size of updates, ..., in what is learned, or in any
of these, as the difference from a reference."""

Part = Literal["forward", "loss", "backward", "update"]
"""A part of a training step. They are in the order of the step."""

_BEHAVIOR: tuple[Stage, ...] = ("setup", "targets", "updates", "divergence", "units", "gradients", "reference")
CAUSES: Mapping[Stage, tuple[Stage, ...]] = {
    "setup": (),
    "targets": (),
    **dict.fromkeys(("updates", "units", "gradients", "reference"), _BEHAVIOR),
    "divergence": ("setup", "updates", "divergence", "reference"),
    "non_finite": ("setup", "updates", "divergence", "non_finite", "reference"),
    "learning": (*_BEHAVIOR, "non_finite", "learning"),
}
"""The stages whose problems can cause a problem of each stage."""

TARGETS, RELATIONS = "targets", "relations"
"""The names of the numbers of targets and of rows of relations of a step, next to the metrics."""


@dataclass(frozen=True)
class Firing:
    """A rule's condition begins to hold.

    Attributes:
        text: The value in words, such as `62.0% of its units are zero for a whole batch`.
        value: The value as a number. None for a note, which is expected and has no consequences.
        threshold: The threshold; None if the rule has none.
        location: Where; None for the run as a whole, or a layer as a whole.
        what: A short description; empty for that of the rule.
        layer: The name of the layer if there is no location. Default: None, the run as a whole.
    """

    text: str
    value: float | None
    threshold: float | None = None
    location: Location | None = None
    what: str = ""
    layer: str | None = None


class Rule(ABC):
    """A condition on the rows of a run. A custom rule is a subclass, or any class with the same methods.

        class LossBelowZero(instrument.Rule):
            what = "negative loss"
            advice = "Check the sign of the loss function."

            def update(self, rows):
                loss = rows.metric("loss")
                if loss is not None and loss < 0:
                    yield instrument.Firing(f"{loss:.4g}", value=loss, threshold=0.0)

    Its arguments are those of the entry in the configuration. Its decisions must depend on the rows only, and its state must
    not grow with the number of steps.

    Attributes:
        what: A short description of the problem.
        advice: What to do next, in one sentence.
    """

    what: str = "custom rule"
    advice: str = ""

    @abstractmethod
    def update(self, rows: StepRows) -> Iterable[Firing]:
        """Read the rows of one step and phase, and return what begins to hold. It is called once for each, in order."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: numbers, strings, lists and dictionaries. Default: no state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - optional
        """Restore the state. Default: nothing."""


class Bounds(NamedTuple):
    """Bounds of a statistic or of a metric within which a rule does not fire."""

    name: str  # the name of the statistic, only for a `LocatedRule`, or of the metric
    # The smallest value: one number, or that of each location in the order of the rule, float64 [slots].
    low: float | FloatArray = -math.inf
    high: float | FloatArray = math.inf  # the largest value
    steps: int = sys.maxsize  # for how many steps this is certain
    last: int = sys.maxsize  # the last step for which this is certain


class QuietSteps(NamedTuple):
    """Successive steps within the bounds of the rules that have not read them.

    They are the losses of training steps, and for successive steps with rows of the same layout, a function that returns a statistic by
    name, float64 [steps, rows], NaN for no value, and the loss of each step.
    """

    losses: Sequence[float]
    tables: Sequence[tuple[RowLayout, Callable[[str], FloatArray], Sequence[float | None]]]


SpecT = TypeVar("SpecT", bound=RuleBase)
PersistentT = TypeVar("PersistentT", bound=PersistentRule)


def _new_spec(rule: str) -> RuleBase:
    fields: type[RuleBase] = RULES[rule].fields
    return fields.__new__(fields)


class CatalogueRule(Rule, Generic[SpecT]):
    """A rule of the catalogue. With the argument `name` of the class, it is registered, and `name` is the field `rule` of its entry.

    The docstring of its fields describes it in the reference and the JSON Schema, or that of the rule, if it has one.
    """

    fields: ClassVar[type[RuleBase]]
    """The model of its entry in the configuration: the argument of the base class."""

    requires: ClassVar[str] = ""
    """What a hook has to record, for the error message if none does."""

    statistics: tuple[str, ...] = ()
    """The statistics that a hook has to record."""

    further_statistics: ClassVar[tuple[str, ...]] = ()
    """The statistics that it also reads if a hook records them."""

    relation: ClassVar[str] = ""
    """The relation whose rows it reads, in `instrument/relations/`; empty if it reads none."""

    source: ClassVar[Literal["steps", "targets", "evaluations"]] = "steps"
    """What it reads: rows of steps, the targets of samples, or evaluations."""

    stage: ClassVar[Stage | None] = None
    """Where its problem arises, from which its causes follow; None for a problem that neither is nor has a cause."""

    evidence: ClassVar[str] = ""
    """The statistic or the metric that shows its problem. Default: the first one of `statistics`, to which its threshold refers."""

    advice_in: ClassVar[Mapping[Part, str]] = {}
    """What to do next, by the part of a training step in which its first problem is. Default: `advice`."""

    saved: ClassVar[tuple[str, ...]] = ()
    """The attributes that a checkpoint keeps, without the underscore."""

    frozen_layers: Container[str] = ()
    """The layers whose parameters are all frozen. Their parameters, gradients and updates do not count."""

    def __init_subclass__(cls, name: str = "", **options: Any) -> None:
        """Read `fields` from the base class: `CatalogueRule[MyRule]`."""
        super().__init_subclass__(**options)
        for specification, *_ in filter(None, map(get_args, vars(cls).get("__orig_bases__", ()))):
            if isinstance(specification, type):
                cls.fields = specification
        if name:
            kind: Any = Literal.__getitem__(name)
            text = cls.__doc__ or cls.fields.__doc__
            cls.fields = create_model(f"{cls.__name__}Rule", __base__=cls.fields, __doc__=text, rule=(kind, ...))
            # No module has this class, so pickle finds it by the name of the rule.
            copyreg.pickle(cls.fields, lambda spec: (_new_spec, (name,), spec.__getstate__()))
            RULES.register(name, place=f"{cls.__module__}.{cls.__qualname__}")(cls)

    def __init__(self, spec: SpecT) -> None:
        self.spec = spec

    def reads(self, location: Location) -> bool:
        """Return whether the rule reads a location, according to its field `hook`."""
        return not self.spec.hook or location.hook in self.spec.hook

    def selects(self, location: Location) -> bool:  # noqa: ARG002
        """Return whether the rule concerns tensors of a location. Default: all."""
        return True

    def state_dict(self) -> dict[str, Any]:
        return {name: _packed(getattr(self, f"_{name}")) for name in self.saved}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in self.saved:
            if name in state:  # a checkpoint of an earlier version lacks newer attributes
                setattr(self, f"_{name}", _unpacked(state[name], getattr(self, f"_{name}")))

    def bounds(self) -> Bounds | list[Bounds] | None:
        """Return bounds within which the rule does not fire in the next training steps; None (default) to read each step.

        A rule of several statistics or metrics returns a list. These steps also have no NaN, no infinity and a finite loss. The rule
        does not read them; see `remember`.
        """
        return None

    def unread(self) -> str:
        """Return why the rule could never fire in the steps that it read; empty if it could."""
        return ""

    def remembered(self) -> Sequence[str]:
        """Return the statistics of steps within the bounds that `remember` reads. Default: none."""
        return ()

    def remember(self, steps: QuietSteps) -> None:
        """Change the state as by reading steps within the bounds, with only `remembered` of their rows. Default: no change."""


class LocatedRule(CatalogueRule[SpecT]):
    """A rule on statistics with one state for each location. `merge` combines several values of a location in one step."""

    merge: np.ufunc = np.fmax

    def __init__(self, spec: SpecT) -> None:
        super().__init__(spec)
        self._slots: dict[Location, int] = {}
        self._slot_of_number = np.zeros(0, np.int64)  # by the number of the location; -1 if the rule does not read it

    @abstractmethod
    def check(self, rows: StepRows, chosen: Chosen) -> Iterable[Firing]:
        """Check the rows of a step at the locations of the rule."""

    def update(self, rows: StepRows) -> Iterable[Firing]:
        chosen = self.choose(rows.layout)
        return () if chosen is None else self.check(rows, chosen)

    def choose(self, layout: RowLayout) -> Chosen | None:
        """Return the rows of a layout that the rule reads; None if there are none."""
        return layout.choose(self, self.slots_of)

    def slots_of(self, locations: Sequence[Location]) -> IndexArray:
        """Return the index of the state of each location, int64 [locations]; -1 for a location that the rule does not read."""
        new = locations[len(self._slot_of_number) :]
        if new:
            read = ((each, self.reads(each) and self.selects(each)) for each in new)
            slots = [self._slots.setdefault(each, len(self._slots)) if is_read else -1 for each, is_read in read]
            self._slot_of_number = np.concatenate([self._slot_of_number, np.array(slots, np.int64)])
            self.grow(len(self._slots))
        return self._slot_of_number

    def grow(self, count: int) -> None:
        """Extend the state to a number of locations."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "locations": [list(location) for location in self._slots]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._slots = {Location(*location): slot for slot, location in enumerate(state["locations"])}


class PersistentLocatedRule(LocatedRule[PersistentT]):
    """A rule whose condition has to hold several times in succession at a location."""

    def __init__(self, spec: PersistentT) -> None:
        super().__init__(spec)
        self._counts = np.zeros(0, np.int64)  # how often in succession the condition held
        self._any = False

    saved: ClassVar[tuple[str, ...]] = ("counts",)
    notes_unused: ClassVar[bool] = False
    """Whether a part to which the loss gives gradients of zero is only noted: it may be used later."""

    @abstractmethod
    def holds(self, rows: StepRows, chosen: Chosen) -> BoolArray:
        """Return whether the condition holds; [chosen locations]."""

    @abstractmethod
    def firing(self, rows: StepRows, chosen: Chosen, at: int) -> Firing:
        """Describe the location with an index in `chosen.locations`."""

    def check(self, rows: StepRows, chosen: Chosen) -> Iterator[Firing]:
        holds = self.holds(rows, chosen)
        if not (self._any or holds.any()):
            return
        for at in np.flatnonzero(holds):  # a layer may have been frozen since `selects`
            holds[at] = not self.is_frozen(chosen.locations[at])
        counts = np.where(holds, self._counts[chosen.slots] + 1, 0)
        self._counts[chosen.slots] = counts
        self._any = bool(self._counts.any())
        for at in np.flatnonzero(counts == self.times_needed(chosen.slots)):
            location = chosen.locations[at]
            is_of_training = self.notes_unused and (location.is_gradient or location.is_of_parameter)
            is_note = is_of_training and rows.has_no_weight(location.layer)
            yield Firing(NO_WEIGHT, None, location=location) if is_note else self.firing(rows, chosen, int(at))

    def is_frozen(self, location: Location) -> bool:
        return location.is_of_parameter and location.layer in self.frozen_layers

    def times_needed(self, slots: IndexArray) -> int | IndexArray:  # noqa: ARG002
        """Return how often in succession the condition has to hold: one number, or one for each location."""
        return self.spec.for_

    def grow(self, count: int) -> None:
        self._counts = extended(self._counts, count)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._any = bool(self._counts.any())


class BoundsRule(PersistentLocatedRule[PersistentT]):
    """A statistic that may not exceed `above` or be below `below`; None for no bound.

    `too_large` and `too_small` are what it reports then. Default: `what`.
    """

    too_large: ClassVar[str] = ""
    too_small: ClassVar[str] = ""

    def __init__(self, spec: PersistentT) -> None:
        super().__init__(spec)
        self.above: float | None = getattr(spec, "above", None)
        self.below: float | None = getattr(spec, "below", None)

    def describe(self, value: float) -> str:
        """Return the value in words."""
        return f"{self.statistics[0]} {value:.4g}"

    def values(self, rows: StepRows, chosen: Chosen) -> FloatArray:
        """Return the value of each location."""
        return chosen.values(rows.column(self.statistics[0]), self.merge)

    def holds(self, rows: StepRows, chosen: Chosen) -> BoolArray:
        values = self.values(rows, chosen)
        if self.above is None:
            return values < (np.nan if self.below is None else self.below)
        return values > self.above if self.below is None else (values > self.above) | (values < self.below)

    def bounds(self) -> Bounds | None:
        low = -np.inf if self.below is None else self.below
        high = np.inf if self.above is None else self.above
        return None if self._any else Bounds(self.statistics[0], low, high)

    def firing(self, rows: StepRows, chosen: Chosen, at: int) -> Firing:
        value = float(self.values(rows, chosen)[at])
        bound = self.above if self.above is not None and value > self.above else self.below
        times = f", {self.spec.for_} times in succession" if self.spec.for_ > 1 else ""
        side = "above" if bound == self.above else "below"
        text = f"{self.describe(value)}, {side} {bound:g}{times}"
        what = self.too_large if side == "above" else self.too_small
        return Firing(text, value, bound, chosen.locations[at], what)


class BoundsFromZeroRule(BoundsRule[PersistentT]):
    """A `BoundsRule` that does not count small values at a location whose first value is 0, unless they are 0 too.

    Weights that start at zero, as in LoRA, ControlNet, DiT and many residual networks, make outputs and gradients zero in the
    first step. They are tiny until these weights have grown.
    """

    saved = (*BoundsRule.saved, "first")

    def __init__(self, spec: PersistentT) -> None:
        super().__init__(spec)
        self._first = np.zeros(0)  # whether the first value is above 0; NaN before it

    def grow(self, count: int) -> None:
        super().grow(count)
        self._first = extended(self._first, count, np.nan)

    def check(self, rows: StepRows, chosen: Chosen) -> Iterator[Firing]:
        self._note_first(self.values(rows, chosen), chosen)
        return super().check(rows, chosen)

    def holds(self, rows: StepRows, chosen: Chosen) -> BoolArray:
        values, from_zero = self.values(rows, chosen), self._first[chosen.slots] == 0
        is_growing: BoolArray = from_zero & (values > 0) & (values < (np.nan if self.below is None else self.below))
        return super().holds(rows, chosen) & ~is_growing

    def remembered(self) -> Sequence[str]:
        return self.statistics[:1] if np.isnan(self._first).any() else ()

    def remember(self, steps: QuietSteps) -> None:
        for layout, column, _ in steps.tables if self.remembered() else ():
            chosen = self.choose(layout)
            if chosen is not None:  # no value within the bounds is 0
                values = chosen.values(column(self.statistics[0]), self.merge)
                self._note_first(np.fmax.reduce(values), chosen)

    def _note_first(self, values: FloatArray, chosen: Chosen) -> None:
        first = self._first[chosen.slots]
        self._first[chosen.slots] = np.where(np.isnan(first), np.sign(values), first)


def extended(array: np.ndarray[Any, Any], count: int, fill: float = 0) -> np.ndarray[Any, Any]:
    """Return an array with at least `count` rows; the new ones have the value `fill`."""
    if len(array) >= count:
        return array
    more = np.full((count - len(array), *array.shape[1:]), fill, array.dtype)
    return np.concatenate([array, more])


def _packed(value: Any) -> Any:
    """Return a copy of a value that JSON can represent."""
    if isinstance(value, np.ndarray):
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {"dtype": str(value.dtype), "shape": list(value.shape), "data": data}
    if isinstance(value, set):
        return sorted(list(each) if isinstance(each, Location) else each for each in value)
    if isinstance(value, Counter):
        return [list(item) for item in value.items()]
    return list(value) if isinstance(value, deque) else copy(value)


def _unpacked(packed: Any, like: Any) -> Any:
    if isinstance(like, np.ndarray):
        return np.frombuffer(base64.b64decode(packed["data"]), packed["dtype"]).reshape(packed["shape"]).copy()
    if isinstance(like, set):
        return {Location(*each) if isinstance(each, list) else each for each in packed}
    if isinstance(like, Counter):
        return Counter(dict(packed))
    return deque(packed, like.maxlen) if isinstance(like, deque) else copy(packed)


NO_WEIGHT = "the loss gives its part gradients of zero, as a term with a factor of 0, but not other parts"

WEIGHTED = frozenset([
    "Linear", "Bilinear", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d",
    "RNN", "LSTM", "GRU", "RNNCell", "LSTMCell", "GRUCell", "MultiheadAttention", "Conv1D",
])  # fmt: skip
"""Classes of layers with weight matrices."""
