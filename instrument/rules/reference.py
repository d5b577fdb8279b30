"""Rule: a statistic or a metric leaves the range that it had in healthy runs."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pkgutil import resolve_name
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import BeforeValidator, Field

from ..config.rules import PersistentRule
from ..config.schedule import STEP_PHASES
from ..errors import ConfigError, Problem
from ..fields.field_types import Count, Names, NonNegative
from ..formatting import shorten
from .reference_ranges import (
    ABOUT,
    CHANGE_OF_RATE,
    CHANGE_OF_WEIGHTS,
    COUNTS,
    FACTORS,
    FIRST_STEPS,
    MEAN_LOSS,
    METRICS,
    NO_GRAD,
    RATIOS,
    SMALL_RATE,
    STARTS,
    ModuleSettings,
    Reference,
    are_near,
    difference_of_counts,
    has_graph,
    is_of_graph,
    key_of,
    phase_of,
    setting_name,
    steps_of,
)
from .rule import RELATIONS, Bounds, Firing, Part, PersistentLocatedRule, QuietSteps, extended
from .step_rows import BoolArray, Chosen, FloatArray, IndexArray, Location, StepRows


def _as_text(value: Any) -> Any:
    values = value if isinstance(value, list | tuple) else [value]
    return [os.fspath(each) if isinstance(each, os.PathLike) else each for each in values]


class ReferenceRule(PersistentRule):
    """A statistic or a metric leaves the range that it had in healthy runs, at the same location and in the same phase of training.

    A location is a hook, a layer, a kind, a role, a path and a phase of the loop. A phase of training is a range of steps: 0, 1, 2, 3,
    4-5, 6-7, 8-11, 12-15, 16-22, ..., two for each doubling. The range has a margin, which is a factor for statistics that are
    never negative, and a difference for the others. The logarithm of the factor, or the difference, is the larger of a floor and of

        t(1 - 1e-5, 4 (n - 1)) * s * sqrt(1 + 1 / n)

    for n runs: the prediction interval for one further value from a normal distribution (G. J. Hahn and W. Q. Meeker, Statistical
    Intervals, Wiley 1991, chapter 4), counted from the extremes of the runs. s is the standard deviation of their smallest and largest
    values between the runs, in this phase or on average over all phases, whichever is larger. Phases depend on each other, so they
    count as 4 independent ones. For losses, other values that are neither factors nor fractions, and attention, the average is over this
    phase and its two neighbors, with 3 instead of 4: their differences change during a training, and heads specialize late. The floor is
    a factor of 1.25, 0.1 for a fraction, and a quarter of the largest absolute value for the others. The mean loss is a single series,
    and not one of thousands: its floor is a tenth, and it has t(1 - 1e-4, ...). The margins of `abs_max` and of attention are squared:
    the logarithm of the largest of many elements has an exponential tail (E. J. Gumbel, Statistics of Extremes, 1958), not that of a
    normal distribution, and so has that of a softmax, which falls with each difference of scores. One run has no standard deviation: its
    margin is the larger of its own range and a factor of 4, 0.3 for a fraction, and the largest absolute value for the others. The
    numbers are decisions of this package.

    Many locations that are beyond the ranges, but within the margins, are reported too: if the root mean square of the excess of the
    locations of the forward pass, of gradients, or of parameters and updates is above a third of the margin. A location counts with its
    largest excess, at most three margins, and there have to be four of them. This takes at least two runs.

    Metrics are compared in evaluations, and in the training steps in which statistics are: what is outside first within a step is then
    known. The learning rate, which nothing in its step changes, is compared in each step: with that of the same step, if several runs
    have the same in all steps. Its margin is then a factor of 1.25. `mean_loss`, the mean loss of all steps of a
    phase of training, is compared when the phase has ended: it differs less between runs than the loss of one step. NaN and infinities
    are not compared, nor are steps after the last phase in which the runs have values.

    A bias can cross zero, where no factor has a meaning: it is only outside above its range, unless all values of the healthy runs are
    within a factor of 1.25, as those of a bias that starts with 1. A parameter that none of the runs has is outside, if they recorded
    others with the same hook: the model is another one.

    An input is reported if it has equal bits in two successive steps of the first four, and in none of the runs, unless `stats` is given,
    or the inputs of the first module repeat in one of the runs: the others then differ only because of the parameters.
    This reads the statistic `fingerprint`.

    How often values occur in the targets of losses and in the indices of embeddings is added up in each phase of training, and compared
    unless `stats` or `hook` is given: the table `relations` has them as `counts`. A chi-square is reported if it is above its mean by more
    than 12 standard deviations, and than 2 + 6 / (n - 1) times as many as that of a healthy run against the others, for n runs: few runs
    show little of how much they differ, as targets that a network computes do. This takes at least two runs.

    Settings of modules and optimizers that all runs have in common are compared when the first training step ends, unless `stats` or
    `hook` is given; see the column `settings` of the table `layers`. Any difference is reported, without a margin. A learning rate that a
    scheduler of PyTorch changes has a margin of a factor of 1.25: it depends on the length of the schedule. Weights of classes that differ
    between the runs by at most a factor of 2, as if they were computed from other data, have this factor as their margin.
    """

    from_: Annotated[Names, BeforeValidator(_as_text, json_schema_input_type=str | list[str])] = Field(
        alias="from",
        min_length=1,
        description="A file of `python -m instrument.reference make`, or healthy runs: a run, a folder of runs such as a sweep, "
        "a pattern such as `runs/healthy*`, or a list.",
    )
    stats: Names = Field(
        (),
        description="The statistics and metrics. The default is those of the file, or of `python -m instrument.reference make`.",
    )
    margin: NonNegative = Field(
        1.0, description="How many times the margin is used: 0 for the range itself, 2 for twice the margin."
    )
    for_: Count = Field(
        2,
        alias="for",
        description="How often in succession a location has to be outside; a location that the runs recorded at fewer steps, at each.",
    )

    @cached_property
    def reference(self) -> Reference:
        """The ranges.

        Raises:
            ConfigError: `from` is neither a reference nor healthy runs, or lacks a statistic.
        """
        # Runs are read by a folder that imports this one.
        read = resolve_name("instrument.analysis.reference:read_reference")
        where = f"rules.{self.name}"
        reference: Reference = read(self.from_, self.stats, where=f"{where}.from", where_statistics=f"{where}.stats")
        return reference


NEW_PARAMETER, OTHER_SETTING, REPEATED = "new parameter", "other setting", "repeated input"
IN_MANY_PLACES = "outside of the ranges in many places"
OTHER_COUNTS = "other values"
OF_GRADIENTS = f"{OTHER_SETTING} of gradients"
MAX_SETTINGS = 4  # of a module in a message
MAX_MODULES = 10  # that are reported, so that the root and metrics are, too: a rule reports no more than 21 events without a location
FLAT = [f"{name}Backward0" for name in ("Round", "Floor", "Ceil", "Trunc", "Sign")]  # their gradients are zero
FLOOR = 1.25  # a smaller factor is not a difference
# Of the locations of a part of a step, in margins: the root mean square of the excess that is reported, the largest one of a location that
# counts, and how many locations there have to be. With it, 23 of 793 healthy trainings have an event of a location, and 20 without it.
EXCESS, MAX_EXCESS, MANY = 1 / 3, 3.0, 4
# The difference of counts that is reported, in standard deviations of a chi-square, and how many times that of many healthy runs. It is
# 4 times as many of two runs: a third one whose targets are those of another random network is then outside in 3% instead of 27%.
DIFFERENCE, TIMES_OF_HEALTHY = 12.0, 2.0
NOT_IN_REFERENCE = -1  # the index of the limits of a parameter that no healthy run has: each value is outside


class ReferenceRanges(PersistentLocatedRule[ReferenceRule], name="reference"):
    stage = "reference"
    what = "outside of the reference"
    advice = (
        "Compare the run with a healthy one: python -m instrument.diff. What is outside first is the most likely cause."
    )
    advice_in: ClassVar[Mapping[Part, str]] = {
        "forward": "The forward pass differs first: compare the data, the parameters of the model and their initial values, and the "
        "settings, the code and the mode of this layer.",
        "loss": "The loss differs first: compare what the program computes from the outputs of its last layers, the targets, the order of "
        "the samples and the loss function; for a loss that is too low, also which samples there are, and what inputs and masks show of "
        "the targets.",
        "backward": "The gradients differ first, or updates do after the first one, with the usual settings of the optimizer: compare the "
        "targets, the order of the samples, the loss function, and what changes gradients, such as accumulation, clipping, scaling and "
        "detached tensors.",
        "update": "The updates differ first: compare the optimizer, its settings, its learning rate and schedule, and its parameters.",
    }
    requires = "locations of the reference"
    further_statistics = ("fingerprint",)
    saved = ("counts", "times", "phase", "losses", "times_near", "entered")

    def __init__(self, spec: ReferenceRule) -> None:
        super().__init__(spec)
        self.reference = spec.reference
        names = spec.stats or self.reference.statistics
        self.statistics = tuple(name for name in names if name not in METRICS)
        self._is_ratio = np.array([name in RATIOS for name in self.statistics], np.bool_)
        self._low, self._high = self._limits_with(spec.margin)
        self._smallest, self._largest = self._limits_with(0.0)
        self._has_parts = bool(spec.margin) and len(self.reference.about["runs"]) > 1
        # Within these limits, no part of a step has a large excess.
        self._near = self._limits_with(EXCESS * spec.margin) if self._has_parts else (self._low, self._high)
        self._of_slot = np.zeros(0, np.int64)  # the index in the reference of each slot
        self._part_of_slot = np.zeros(0, np.int64)
        self._prints = np.zeros(
            (0, 2)
        )  # the smallest and largest fingerprint of each slot in the last of the first steps
        metrics = [name for name in METRICS if name in names and not spec.hook]
        low, high = self.reference.limits(metrics, spec.margin)
        self._metrics = {  # the limits, float64 [training phases], by phase and name
            (phase, name): (low[at, number], high[at, number])
            for phase, at in self.reference.of_metrics.items()
            for number, name in enumerate(metrics)
        }
        self._times: Counter[str] = Counter()  # how often in succession metrics were outside, by phase and name
        self._times_near: Counter[str] = Counter()  # the same of a large excess, by phase and part of a step
        self._phases = {phase for *_, phase in self.reference.locations if self.statistics}
        self._hooks_of_parameters = {
            (hook, kind, role, phase) for hook, _, kind, role, _, phase in self.reference.locations if role == "param"
        }
        self._step = self._phase = 0
        self._losses: list[float] = [0, 0.0]  # of this phase of training: their number and sum
        self._entered: dict[str, list[Any]] = {}  # by tensor: the phase of training, and the counts of its values
        self._has_read = False
        self.settings: ModuleSettings | None = None  # those of the run, until they are compared

    def _limits_with(self, margin: float) -> tuple[FloatArray, FloatArray]:
        """Return the limits, those of a parameter that no healthy run has last; float64 [locations + 1, statistics, phases + 1]."""
        low, high = self.reference.limits(self.statistics, margin)
        one_more = [(0, 1), (0, 0), (0, 0)]
        smallest, largest = self.reference.ranges(self.statistics)
        is_moving = np.fmax.reduce(largest, axis=2) > FLOOR * np.fmin.reduce(smallest, axis=2)
        is_bias = np.array([key[3] == "param" and "bias" in key[4] for key in self.reference.index], np.bool_)
        low[is_moving & is_bias[:, None]] = -np.inf
        return np.pad(low, one_more, constant_values=np.inf), np.pad(high, one_more, constant_values=-np.inf)

    def selects(self, location: Location) -> bool:
        hook, _, kind, role, _, phase = key = key_of(location)
        is_new_parameter = (hook, kind, role, phase) in self._hooks_of_parameters
        return bool(self.statistics) and (key in self.reference.index or is_new_parameter)

    def times_needed(self, slots: IndexArray) -> IndexArray:
        """A location that the runs recorded at fewer steps has to be outside at each of them."""
        return self._times_in(np.any(np.isfinite(self._high[self._of_slot[slots]]), axis=1))

    def _times_in(self, has_range: BoolArray) -> IndexArray:
        """Return how often in succession the condition has to hold, from whether there is a range; [..., training phases]."""
        steps: IndexArray = np.where(has_range, np.diff(STARTS)[: has_range.shape[-1]], 0).sum(axis=-1)
        return np.clip(steps, 1, self.spec.for_)

    def grow(self, count: int) -> None:
        super().grow(count)
        index = self.reference.index
        self._of_slot = np.array([index.get(key_of(location), NOT_IN_REFERENCE) for location in self._slots], np.int64)
        self._part_of_slot = np.array([*map(_part_of, self._slots)], np.int64)
        self._prints = extended(self._prints, count, math.nan)

    def update(self, rows: StepRows) -> Iterator[Firing]:
        self._step = rows.step
        last, self._phase = self._phase, min(int(phase_of(rows.step)), self._low.shape[2] - 1)
        if self._phase != last:
            yield from self._check_mean_loss(last)
        if rows.is_training and (loss := rows.metric("loss")) is not None:
            self._add_losses([loss])
        if self.settings is not None and rows.phase in STEP_PHASES:
            if not (self.spec.hook or self.spec.stats):
                yield from self._check_settings(self.settings, rows)
            self.settings = None
        if rows.is_training and not (self.spec.hook or self.spec.stats):
            yield from self._check_counts(rows)
        yield from super().update(rows)
        is_recorded = rows.phase not in self._phases or self.choose(rows.layout) is not None
        yield from self._check_metrics(rows, METRICS if is_recorded else ("lr",))

    def remember(self, steps: QuietSteps) -> None:
        self._add_losses(steps.losses)

    def _add_losses(self, losses: Sequence[float]) -> None:
        finite = [loss for loss in losses if math.isfinite(loss)]
        self._losses = [self._losses[0] + len(finite), self._losses[1] + sum(finite)]

    def _check_mean_loss(self, at: int) -> Iterator[Firing]:
        """Compare the mean loss of a phase of training that has ended, if each of its steps has a loss."""
        (count, total), self._losses = self._losses, [0, 0.0]
        limits, steps = self._metrics.get(("train", MEAN_LOSS)), steps_of(at)
        if limits is None or count != len(steps):
            return
        self._has_read |= bool(np.isfinite(limits[1][at]))
        text = f", steps {steps[0]} to {steps[-1]}"
        times = min(self.spec.for_, int(np.isfinite(limits[1]).sum()))
        yield from self._compare("train", MEAN_LOSS, total / count, at, times, text)

    def _check_settings(self, settings: ModuleSettings, rows: StepRows) -> Iterator[Firing]:
        """Yield a firing for each module with other settings, the root last, and then for each with other operators.

        Modules within a missing or a new one are left out. Of more than 10, the number of the others is reported.
        """
        healthy = self.reference.settings
        # A loop that passes no loss with a graph has no operators.
        has_operators = has_graph(settings) and has_graph(healthy)
        is_detached = has_operators and self._is_detached(settings, rows)
        firings: list[Firing] = []
        for compares_graph in (False, True)[: 1 + has_operators]:
            for layer in sorted(dict.fromkeys([*settings, *healthy]), key=lambda layer: not layer):
                parent = layer.rpartition(".")[0]
                own, known = settings.get(layer, {}), healthy.get(layer, {})
                others = [
                    name for name in {**own, **known} if own.get(name) != known.get(name) and known.get(name, "new")
                ]
                ends = ".initial_lr", ".lr"  # a scheduler adds the first one, and changes the second one
                scheduled = {name.replace(*ends) for name in (*own, *known) if name.endswith(ends[0])}
                left = {name for name in scheduled if are_near(own.get(name), known.get(name), FLOOR)}
                about = {name for name, text in known.items() if (text or "").startswith(ABOUT)}
                left.update(name for name in about if are_near(own.get(name), known[name], CHANGE_OF_WEIGHTS))
                if rows.step:  # a continued loop, whose parameters were updated
                    left.update(name for name in others if name.endswith(".equals"))
                names = [name for name in others if is_of_graph(name) == compares_graph and name not in left]
                if names and parent in settings and parent in healthy:
                    here, usual = (texts.get(names[0]) or "missing" for texts in (own, known))
                    also = [
                        f"{name} {own[name]} instead of {known[name]}" if own.get(name) and known.get(name) else name
                        for name in names[1:]
                    ]
                    more = f"; also {shorten(also, MAX_SETTINGS)}" if also else ""
                    text = f"{setting_name(layer, names[0])} {here}; {usual} in {self._healthy_runs}{more}"
                    is_scale = all(name.startswith(FACTORS) for name in names) and self._has_usual_loss(rows)
                    what = OF_GRADIENTS if is_scale or (is_detached and compares_graph) else OTHER_SETTING
                    firings.append(Firing(text, float(len(names)), what=what, layer=layer or None))
        left_out = [firing for firing in firings if firing.layer is not None][MAX_MODULES:]
        for firing in firings:
            if firing not in left_out:
                yield firing
            elif firing is left_out[0]:
                count = len(left_out)
                yield Firing(f"{count} other modules, too", float(count), what=OTHER_SETTING)

    def _check_counts(self, rows: StepRows) -> Iterator[Firing]:
        """Yield a firing for each tensor of targets or indices that has values with other frequencies than in the healthy runs."""
        phase = str(phase_of(rows.step))
        for row in rows.relations:
            if row.relation != COUNTS or (known := self.reference.counts.get(row.path)) is None:
                continue
            last, *before = self._entered.get(row.path, ("",))
            counts = np.array(row.text.split(), np.float64) + (before if phase == last else 0)
            self._entered[row.path] = [phase, *counts.tolist()]
            if phase not in known["counts"]:
                continue
            healthy = np.array(known["counts"][phase], np.float64)
            difference, bucket = difference_of_counts(counts, healthy)
            times = TIMES_OF_HEALTHY * (1 + 3 / (len(self.reference.about["runs"]) - 1))
            limit = max(known["largest"], self.spec.margin * max(DIFFERENCE, times * known["largest"]))
            key = f"{COUNTS} {row.path}"
            if difference <= limit:
                del self._times[key]
                continue
            self._times[key] += 1
            has_range = np.array([str(at) in known["counts"] for at in range(self._low.shape[2])], np.bool_)
            if self._times[key] == self._times_in(has_range):
                share, usual = (f"{each[bucket] / each.sum():.3g}" for each in (counts, healthy))
                text = f"{row.path} has {share} of {counts.sum():.0f} values in bucket {bucket}; {usual} in {self._healthy_runs}"
                yield Firing(text, difference, limit, what=OTHER_COUNTS)

    def _is_detached(self, settings: ModuleSettings, rows: StepRows) -> bool:
        """Return whether graphs differ in what is detached or rounded, and each output that the healthy runs recorded is there.

        A detached tensor is an input without a gradient of the operator that uses it, and what computes it is not in the graph. If this
        operator is not in it either, fewer parameters have a gradient, although the loss and all of the forward pass are usual. So they are
        if there are only more operators, because a tensor is no longer detached.
        """
        healthy = self.reference.settings
        operators: Counter[str] = Counter()  # how many more there are than in the healthy runs
        without_gradient: Counter[tuple[str, str]] = Counter()  # the same at each layer
        for layer in {**settings, **healthy}:
            own, known = settings.get(layer, {}), healthy.get(layer, {})
            for name in {**own, **known}:
                if is_of_graph(name) and (usual := known.get(name, "0")) is not None:
                    change, kind = _count(own.get(name, "0")) - _count(usual), name.rpartition(".")[2]
                    if name.startswith(NO_GRAD):
                        without_gradient[layer, kind] = change
                    else:
                        operators[kind] += change
        signs = {change > 0 for change in operators.values() if change}
        expected = {
            key
            for key, at in self.reference.index.items()
            if key[2:4] == ("forward", "output") and np.isfinite(self._high[at, :, self._phase]).any()
        }
        is_flat = any(operators[kind] > 0 for kind in FLAT)
        is_other_input = len(signs) == 1 and any(
            (change < 0) in signs for change in without_gradient.values() if change
        )
        is_cut = signs == {False} and operators["AccumulateGrad"] < 0
        is_only_of_gradients = (is_cut or signs == {True}) and self._is_usual(rows)
        return (
            (is_flat or is_other_input or is_only_of_gradients)
            and bool(expected)
            and expected <= {*map(key_of, rows.layout.locations)}
        )

    def _is_usual(self, rows: StepRows) -> bool:
        """Return whether the loss and the values of the forward pass are within their ranges."""
        if (chosen := self.choose(rows.layout)) is None or not self._has_usual_loss(rows):
            return False
        outside = np.flatnonzero(self.holds(rows, chosen))
        return not any(chosen.locations[at].kind.startswith("forward") for at in outside)

    def _has_usual_loss(self, rows: StepRows) -> bool:
        """Return whether the loss is within its range."""
        loss, limits = rows.metric("loss"), self._metrics.get(("train", "loss"))
        if loss is None or limits is None:
            return False
        low, high = (float(each[self._phase]) for each in limits)
        return math.isfinite(high) and low <= loss <= high

    def _of_metric(self, phase: str, name: str, at: int) -> tuple[float, float, float | None, int]:
        """Return the limits of a metric in a phase of training, the learning rate if it is that of the step, and the last step of both.

        A schedule has no randomness: if all runs have the same rates, the one of each step is known.
        """
        low, high = (float(each[at]) for each in self._metrics[phase, name])
        last, (steps, rates) = int(STARTS[at + 1]) - 1, self.reference.rates
        change = int(np.searchsorted(steps, self._step, side="right"))
        if name != "lr" or phase != "train" or not (change and math.isfinite(high)):
            return low, high, None, last
        rate, small = float(rates[change - 1]), SMALL_RATE * float(rates.max())
        factor = FLOOR**self.spec.margin * (1 + CHANGE_OF_RATE)
        return rate / factor - small, rate * factor + small, rate, min([last, *steps[change : change + 1] - 1])

    def _check_metrics(self, rows: StepRows, names: Sequence[str]) -> Iterator[Firing]:
        for (phase, name), (_, high) in self._metrics.items():
            value = None if name == MEAN_LOSS else rows.metric(name)
            if phase == rows.phase and name in names and value is not None and math.isfinite(value):
                self._has_read = self._has_read or (not self._phases and bool(np.isfinite(high[self._phase])))
                yield from self._compare(phase, name, value, self._phase, self._times_in(np.isfinite(high)))

    def _compare(self, phase: str, name: str, value: float, at: int, times: Any, when: str = "") -> Iterator[Firing]:
        """Yield a firing if a metric is outside in a phase of training for so many times in succession."""
        low, high, rate, _ = self._of_metric(phase, name, at)
        key, side = f"{phase} {name}", int(value > high)
        limit = (low, high)[side]
        if not (side or value < limit):
            del self._times[key]
            return
        self._times[key] += 1
        if self._times[key] == times:
            label = name if phase == "train" else key
            of_runs = self.reference.of_metrics[phase]
            healthy = self._range(name, of_runs, at) if rate is None else f"{rate:.4g} in {self._healthy_runs}"
            yield Firing(self._text(label, value, limit, side, healthy + when), value, limit)

    def check(self, rows: StepRows, chosen: Chosen) -> Iterator[Firing]:
        yield from super().check(rows, chosen)
        if self._has_parts and self._counts.max() < self.spec.for_:  # no location was reported
            yield from self._check_parts(rows, chosen)
        else:
            self._times_near.clear()
        if rows.step < FIRST_STEPS and not self.spec.stats:
            # Of several calls in a step, one may have the same input in each step.
            prints = np.stack([chosen.values(rows.column("fingerprint"), each) for each in (np.fmin, np.fmax)], axis=1)
            for at in np.flatnonzero((prints == self._prints[chosen.slots]).all(axis=1)):
                if key_of(location := chosen.locations[at]) in self.reference.varied:
                    text = f"it has the bits of the step before; they differ in {self._healthy_runs}"
                    yield Firing(text, 1.0, location=location, what=REPEATED)
            self._prints[chosen.slots] = prints

    def _check_parts(self, rows: StepRows, chosen: Chosen) -> Iterator[Firing]:
        """Yield a firing for each part of a step with a large excess at many locations."""
        excess = self._excess(rows, chosen)
        largest = np.fmax.reduce(abs(excess), axis=1)
        for far in np.flatnonzero(largest > EXCESS):
            if self.is_frozen(chosen.locations[far]):
                largest[far] = np.nan
        parts = np.where(np.isnan(largest), -1, self._part_of_slot[chosen.slots])
        for part in range(3):
            key, of = f"{rows.phase} {part}", np.flatnonzero(parts == part)
            mean = math.sqrt(np.square(largest[of]).mean()) if len(of) >= MANY else 0.0
            if mean <= EXCESS:
                del self._times_near[key]
                continue
            self._times_near[key] += 1
            if self._times_near[key] == self.spec.for_:
                at = int(of[largest[of].argmax()])
                statistic = int(np.nanargmax(abs(excess[at])))
                side, name = int(excess[at, statistic] > 0), self.statistics[statistic]
                value = float(self._values(rows, chosen, (np.fmin, np.fmax)[side])[at, statistic])
                limit = float(self._limits(chosen.slots)[side][at, statistic])
                healthy = self._range(name, int(self._of_slot[chosen.slots[at]]), self._phase)
                text = f"{name} {value:.4g}; {healthy}; {mean:.2g} margins beyond the ranges, the root mean square of {len(of)} locations"
                yield Firing(text, value, limit, chosen.locations[at], IN_MANY_PLACES)

    def _excess(self, rows: StepRows, chosen: Chosen) -> FloatArray:
        """Return by how many margins statistics are above their ranges, negative below, NaN without one; [chosen locations, statistics]."""
        at, sides = self._of_slot[chosen.slots], list[FloatArray]()
        ranges = (self._smallest, self._low), (self._largest, self._high)
        with np.errstate(all="ignore"):  # the logarithm of zero, ranges that are missing
            for merge, limits, outside in zip((np.fmin, np.fmax), ranges, self._outside(rows, chosen), strict=True):
                numbers = self._values(rows, chosen, merge), *(each[at, :, self._phase] for each in limits)
                value, end, limit = (np.where(self._is_ratio, np.log(each), each) for each in numbers)
                excess = np.fmax((value - end) / (limit - end), 0.0)
                sides.append(np.where(outside & (excess == 0), MAX_EXCESS, np.minimum(excess, MAX_EXCESS)))
        below, above = sides
        has_range = np.isfinite(self._largest[at, :, self._phase])
        signed: FloatArray = np.where(has_range, np.where(above > below, above, -below), np.nan)
        return signed

    def holds(self, rows: StepRows, chosen: Chosen) -> BoolArray:
        below, above = self._outside(rows, chosen)
        outside: BoolArray = np.logical_or.reduce(below | above, axis=1)
        return outside

    def _outside(self, rows: StepRows, chosen: Chosen) -> tuple[BoolArray, BoolArray]:
        """Return which statistics are below and above the limits; bool [chosen locations, statistics]."""
        low, high = self._limits(chosen.slots)
        self._has_read = self._has_read or bool(np.isfinite(high).any())
        return self._values(rows, chosen, np.fmin) < low, self._values(rows, chosen, np.fmax) > high

    def _limits(self, slots: Any = slice(None)) -> tuple[FloatArray, FloatArray]:
        at = self._of_slot[slots]
        return self._low[at, :, self._phase], self._high[at, :, self._phase]

    def _values(self, rows: StepRows, chosen: Chosen, merge: np.ufunc) -> FloatArray:
        return np.stack([chosen.values(rows.column(name), merge) for name in self.statistics], axis=1)

    def bounds(self) -> list[Bounds] | None:
        if self._any or self._times_near:
            return None
        if self._phase == self._low.shape[2] - 1:
            return []  # the reference has ended
        if not (self._phases or self._has_read):
            return [Bounds("loss" if name == MEAN_LOSS else name, np.inf) for _, name in self._metrics]
        low, high = (each[self._of_slot, :, self._phase] for each in self._near)
        last = int(STARTS[self._phase + 1]) - 1
        of_statistics = [Bounds(name, low[:, of], high[:, of], last=last) for of, name in enumerate(self.statistics)]
        of_metrics = [
            Bounds(name, np.inf) if f"{phase} {name}" in self._times else Bounds(name, low, high, last=until)
            for phase, name in self._metrics
            if phase in STEP_PHASES and name != MEAN_LOSS
            for low, high, _, until in [self._of_metric(phase, name, self._phase)]
        ]
        return [*of_statistics, *of_metrics, Bounds("loss", last=last), Bounds(RELATIONS, high=0)]

    def firing(self, rows: StepRows, chosen: Chosen, at: int) -> Firing:
        below, above = self._outside(rows, chosen)
        outside = np.flatnonzero(below[at] | above[at])
        first = int(outside[0])
        side = int(above[at, first])
        value = float(self._values(rows, chosen, (np.fmin, np.fmax)[side])[at, first])
        limit = float(self._limits(chosen.slots)[side][at, first])
        if self._of_slot[chosen.slots[at]] == NOT_IN_REFERENCE:
            return Firing("no healthy run has it", value, location=chosen.locations[at], what=NEW_PARAMETER)
        name, others = self.statistics[first], ", ".join(self.statistics[other] for other in outside[1:])
        healthy = self._range(name, int(self._of_slot[chosen.slots[at]]), self._phase)
        text = self._text(name, value, limit, side, f"{healthy}; also {others}" if others else healthy)
        return Firing(text, value, limit, chosen.locations[at])

    def _text(self, name: str, value: float, limit: float, side: int, healthy: str) -> str:
        return f"{name} {value:.4g}, {('below', 'above')[side]} {limit:.4g}; {healthy}"

    def _range(self, name: str, location: int, at: int) -> str:
        low, high = (numbers[location, 0, at] for numbers in self.reference.ranges([name]))
        return f"{low:.4g} to {high:.4g} in {self._healthy_runs}"

    @property
    def _healthy_runs(self) -> str:
        count = len(self.reference.about["runs"])
        return f"{count} healthy run{'s' * (count > 1)}"

    def unread(self) -> str:
        if self._has_read:
            return ""
        what = "statistic at a location and" if self._phases else "metric"
        message = f"the run recorded no {what} in a phase of training of the reference"
        allowed = f"steps 0 to {self.reference.about['last_step']}"
        return str(Problem(f"rules.{self.spec.name}.from", message, list(self.spec.from_), allowed))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "reference": self.reference.digest, "has_read": self._has_read}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["reference"] != self.reference.digest:
            message = "the reference has changed since the run stopped"
            fix = f"restore it from the folder of the run: references/{self.spec.name}.parquet"
            raise ConfigError(Problem(f"rules.{self.spec.name}.from", message, list(self.spec.from_), fix=fix))
        super().load_state_dict(state)
        self._has_read = state["has_read"]


def _part_of(location: Location) -> int:
    """Return 0 for a location of the forward pass, 1 for a gradient, 2 for a parameter, an update or a state."""
    is_of_update = location.role in ("param", "update") or location.role.startswith("state.")
    return 1 if location.is_gradient else 2 * is_of_update


def _count(listed: str) -> int:
    """Return the number of operators, without their arguments, such as 3 of `1, 2 (dim=0)`."""
    return sum(map(int, re.sub(r" \([^)]*\)", "", listed.removeprefix(ABOUT)).split(", ")))
