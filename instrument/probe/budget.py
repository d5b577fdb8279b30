"""The budget for recording: hooks over budget are sampled less often.

Time is the relative overhead of steps with record hooks. A hook timer measures the distribution over
sites. But hooks also evict data from caches and keep memory from being reused, which this timer cannot measure. So
steps with record hooks are first compared with steps without. If there are none without, record hooks are paused in
every second block of four steps. Hooks that run less often cost more each time, so the comparison is repeated while
there are steps of both types.

The time is summed since the last change and checked after a while. If it exceeds the budget, the most expensive sites
are sampled half as often, one after the other, until their expected cost is within the budget or all have the lowest rate. If
that does not suffice, one event says so.

Bytes are limited so that they last until the end of the run if its length is known. Otherwise they have to last for
several times the number of steps so far. Interventions always run.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from ..config.experiment import BudgetConfig
from ..hooks.attached_hook import AttachedHook
from ..hooks.clock import MAX_FACTOR, HookTimer
from ..tables.sink_interface import EventWriter
from .overhead import BLOCK, WARM_UP, Calibration, Overhead
from .recorder import Recorder

MIN_STEPS, MIN_SECONDS = 20, 0.5  # the minimum between two checks
# After how many steps, below which part of the budget, and how often at most sites are sampled more often again.
STABLE_STEPS, MARGIN, MAX_INCREASES = 60, 0.8, 4
MAX_SUBSAMPLING = 1024  # the maximum subsampling of a site, relative to its schedule
# Bytes have to last for this multiple of the steps so far if the length of the run is unknown.
HORIZON = 4
ROW_BYTES = 70  # of a row of statistics on disk
# The maximum standard error of a measured overhead that is used, relative to the budget.
MAX_ERROR = 0.25


class Budget:
    """Measures the cost of recording and reduces it if necessary. `steps`: the number of steps of the run; None if unknown."""

    def __init__(
        self,
        config: BudgetConfig,
        attached_hooks: Sequence[AttachedHook],
        recorder: Recorder,
        steps: int | None,
        event: EventWriter,
    ) -> None:
        self.config = config
        self.record_hooks = [each for each in attached_hooks if each.is_record_hook and each.site.spec.keep_as is None]
        self.recorder = recorder
        self.steps = steps
        self.event = event
        self.timer: HookTimer = HookTimer()
        self.measured: float | None = None  # the overhead at the last check, including the end of each step
        self.estimated: float | None = None  # without the end of each step; None after a change
        # Of steps with record hooks since the last change. Earlier steps may have been faster.
        self.overhead = Overhead()
        self._interventions: tuple[str, ...] = ()  # scheduled hooks
        self._records: tuple[tuple[str, int], ...] = ()  # scheduled hooks and their numbers of sites
        self._firings: Counter[AttachedHook] = Counter()  # of the complete run
        self._warm_up = WARM_UP
        self._calibration = None if config.time is None else Calibration(self.record_hooks)
        self._reported_pause = self._reported_excess = False
        self._increases = 0
        self._baseline_seconds, self._factor = 0.0, 1.0
        self._started_at = time.perf_counter()
        self._counted = 0  # steps since the last change

    def set_scheduled(self, attached_hooks: Iterable[AttachedHook]) -> None:
        sites = list(attached_hooks)
        names = Counter(attached.site.spec.name for attached in sites if attached.is_record_hook)
        others = dict.fromkeys(attached.site.spec.name for attached in sites if not attached.is_record_hook)
        self._interventions, self._records = tuple(others), tuple(names.items())

    def exclude(self, seconds: float) -> None:
        """Exclude a duration that is not part of any step."""
        self._started_at += seconds

    def end_step(self, done: int, seconds: float, *, has_pending_rows: bool = False) -> None:
        """End a step: `done` are completed, it took some seconds, and it wrote rows of the previous step if `has_pending_rows`."""
        self.timer.lap()
        self.overhead.add(self._records, seconds, self._interventions, has_pending_rows=has_pending_rows)
        if self.config.bytes is not None and (done <= MIN_STEPS or done % MIN_STEPS == 0):
            self._keep_bytes(self.config.bytes, done)
        if self._warm_up:
            self._warm_up -= 1
            self._restart()
            return
        if self._calibration is not None:
            self._calibrate(self._calibration)
            return
        self._counted += 1
        elapsed = time.perf_counter() - self._started_at
        if self._counted < MIN_STEPS or elapsed < MIN_SECONDS:
            return
        changed = self.config.time is not None and self._keep_time(self.config.time, elapsed)
        if changed:
            self.overhead, self.estimated = Overhead(), None
        if changed or self._counted >= 10 * MIN_STEPS:
            self._restart()

    @property
    def relative_overhead(self) -> float | None:
        """The relative overhead of steps with record hooks since the last change; None if it is not measured yet.

        If there are too few steps with or without record hooks, it is estimated from the time in the hooks.
        """
        relative = None if self._calibration is not None else self.overhead.relative
        return self.estimated if relative is None else relative

    def _report(self, message: str, attached: AttachedHook | None = None) -> None:
        """Write an event about one site, or about all (None)."""
        self.event("budget", message, severity="info", layer=None if attached is None else attached.site.layer.name)

    def _restart(self) -> None:
        self._firings.update(self.timer.firings)
        self.timer.reset()
        self._started_at = time.perf_counter()
        self._counted = 0

    def _calibrate(self, calibration: Calibration) -> None:
        """End a step of the initial comparison of steps with and without record hooks."""
        was_paused = calibration.is_paused
        calibration.add(time.perf_counter() - self._started_at, self.timer)
        if calibration.is_complete:
            calibration.set_paused(False)
            self._baseline_seconds, self._factor = calibration.baseline_seconds, calibration.factor
            self._calibration, self.overhead = None, Overhead()
            self._report(f"recording costs {self._factor:.1f} times the time measured inside the hooks")
        elif calibration.is_paused and not was_paused and not self._reported_pause:
            self._reported_pause = True
            self._report(
                f"in every second block of {BLOCK} of the first steps, hooks that are scheduled in every step are paused, to "
                "measure the cost of recording"
            )
        self._restart()

    def state_dict(self) -> dict[str, Any]:
        """Return the state that another budget for the same sites requires to continue: numbers and lists."""
        return {
            "estimated": self.estimated,
            "calibration": None if self._calibration is not None else [self._baseline_seconds, self._factor],
            "firings": [self._firings[attached] + self.timer.firings[attached] for attached in self.record_hooks],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.estimated = state["estimated"]
        if state["calibration"] is not None:
            self._baseline_seconds, self._factor = state["calibration"]
            self._calibration = None
        self._firings = Counter(dict(zip(self.record_hooks, state["firings"], strict=True)))

    def _keep_time(self, allowed: float, elapsed: float) -> bool:
        baseline_seconds = min(self._baseline_seconds * self._counted, self.timer.seconds)
        overhead, measured = self.overhead.measured(), self.timer.seconds - baseline_seconds
        if overhead is not None and overhead.error <= MAX_ERROR * allowed and measured > 0.0:
            self._factor = min(max(overhead.relative * overhead.baseline * self._counted / measured, 1.0), MAX_FACTOR)
        record_seconds = self._factor * (self.timer.seconds - baseline_seconds)
        hook_seconds = baseline_seconds + record_seconds
        baseline = max(elapsed - hook_seconds, 1e-9)
        self.estimated = record_seconds / (baseline + baseline_seconds)
        self.measured = hook_seconds / baseline
        if self.measured <= allowed:
            return self._sample_more_often(allowed)
        # The time outside of actions is divided among all firings.
        actions, firings = self.timer.action_seconds, self.timer.firings
        seconds_per_firing = (hook_seconds - self._factor * sum(actions.values())) / max(1, sum(firings.values()))
        costs = {each: self._factor * actions[each] + seconds_per_firing * firings[each] for each in self.record_hooks}
        return self._subsample(costs, hook_seconds - allowed * baseline, self._time_message(allowed))

    def _time_message(self, allowed: float) -> str:
        return f"hooks and the end of each step add {self.measured:.1%} to the step time, the budget is {allowed:.1%}"

    def _sample_more_often(self, allowed: float) -> bool:
        """Sample reduced sites more often if twice their cost has been well within the budget for a while."""
        assert self.measured is not None, "it was measured"
        subsampled = [attached for attached in self.record_hooks if attached.subsampling > 1]
        is_stable = self._counted >= STABLE_STEPS and 2.0 * self.measured <= MARGIN * allowed
        if not subsampled or not is_stable or self._increases == MAX_INCREASES or self.config.bytes is not None:
            return False
        self._increases += 1
        for attached in subsampled:
            attached.subsampling //= 2
            self._report(
                f"{self._time_message(allowed)}: {_name(attached)} is sampled more often again, {_rate_text(attached.subsampling)}",
                attached,
            )
        return True

    def _keep_bytes(self, allowed: int, done: int) -> bool:
        total = sum(self._bytes_of(attached) for attached in self.record_hooks)
        remaining_steps = HORIZON * done if self.steps is None else max(0, self.steps - done)
        expected_bytes = {}
        for each in self.record_hooks:  # at their current rate
            a_firing = self._bytes_of(each) / max(1, self._firings[each] + self.timer.firings[each])
            expected_bytes[each] = a_firing * each.scheduled_count / max(1, done) / each.subsampling * remaining_steps
        reason = f"{total:,.0f} bytes are recorded, the budget is {allowed:,}"
        return self._subsample(expected_bytes, sum(expected_bytes.values()) - (allowed - total), reason)

    def _bytes_of(self, attached: AttachedHook) -> float:
        """Return the approximate number of bytes that a site has recorded."""
        rows = self._firings[attached] + self.timer.firings[attached] if attached.has_statistics else 0
        return rows * ROW_BYTES + self.recorder.bytes_of(attached)

    def _subsample(self, costs: dict[AttachedHook, float], excess: float, reason: str) -> bool:
        """Reduce the rate of the most expensive sites until the excess is gone. Return whether anything changed."""
        previous_rates = {attached: attached.subsampling for attached in self.record_hooks}
        while excess > 0:
            candidates = [each for each in self.record_hooks if each.subsampling < MAX_SUBSAMPLING and costs[each] > 0]
            if not candidates:
                if any(costs.values()) and not self._reported_excess:
                    self._reported_excess = True
                    fix = "remove hooks, record fewer layers or steps, or set a larger budget"
                    self.event("budget", f"{reason}: all sites have the lowest rate, which does not suffice; {fix}")
                break
            most_expensive = max(candidates, key=lambda attached: costs[attached])
            most_expensive.subsampling *= 2
            costs[most_expensive] /= 2
            excess -= costs[most_expensive]
        changed = [attached for attached in self.record_hooks if attached.subsampling != previous_rates[attached]]
        for attached in changed:
            self._report(f"{reason}: {_name(attached)} is sampled {_rate_text(attached.subsampling)}", attached)
        return bool(changed)

    def summary(self) -> list[str]:
        """Return one line for each hook that was sampled less often."""
        relative, lines = self.relative_overhead, []
        overhead = "" if relative is None else f"; since the last change, the overhead was {relative:.1%}"
        for name in dict.fromkeys(attached.site.spec.name for attached in self.record_hooks):
            subsampled = [each for each in self.record_hooks if each.site.spec.name == name and each.subsampling > 1]
            if subsampled:
                most = max(attached.subsampling for attached in subsampled)
                lines.append(
                    f"budget: hook '{name}' was sampled less often at {len(subsampled)} sites, down to "
                    f"{_rate_text(most)}{overhead}"
                )
        return lines


def _name(attached: AttachedHook) -> str:
    return f"hook '{attached.site.spec.name}' on {attached.site.label}"


def _rate_text(subsampling: int) -> str:
    return f"once in {subsampling} scheduled steps" if subsampling > 1 else "in every scheduled step"
