"""The budget for recording: hooks over budget are sampled less often.

Time is the relative overhead of steps with record hooks. A stopwatch inside the hooks measures the distribution over
sites. But hooks also evict data from caches and keep memory from being reused, which this stopwatch cannot measure. So
steps with record hooks are first compared with steps without. If there are none without, record hooks are paused in
every second block of four steps. Hooks that run less often cost more each time, so the comparison is repeated while
there are steps of both types.

The time is summed since the last change and checked after a while. If it exceeds the budget, the most expensive sites
are sampled half as often, one after the other, until their expected cost is within the budget. Sites that already have
the lowest rate lose parts of their recording: first tensors, then the histogram, quantiles and l1.

Bytes are limited so that they last until the end of the run if its length is known. Otherwise they have to last for
several times the number of steps so far. Interventions always run.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..actions.record import Record
from ..kinds.attached import LiveSite
from ..kinds.hook_timer import MOST_FACTOR, Meter
from ..spec.budget import BudgetConfig
from ..spec.record import RecordSpec
from .calibration import BLOCK, Calibration
from .overhead import Overhead
from .recorder import Recorder

WARM_UP = 3  # steps that are not counted, since the first ones allocate memory
LEAST_STEPS, LEAST_SECONDS = 20, 0.5  # the minimum between two checks
# After how many steps, below which part of the budget, and how often at most sites are sampled more often again.
CALM_STEPS, MARGIN, MOST_LOOKED_AGAIN = 60, 0.8, 4
SELDOM = 1024  # the maximum subsampling of a site, relative to its schedule
# Bytes have to last for this multiple of the steps so far if the length of the run is unknown.
HORIZON = 4
ROW_BYTES = 70  # of a row of statistics on disk
# The maximum standard error of a measured overhead that is used, relative to the budget.
PRECISE = 0.25

Tell = Callable[[str, LiveSite | None], None]


class Budget:
    """Measures the cost of recording and reduces it if necessary.

    Args:
        config: The limits.
        lives: All sites.
        recorder: Provides the recorded bytes.
        steps: The number of steps of the run; None if unknown.
        tell: Called with a message about each change, and its site; None for all sites.
    """

    def __init__(
        self, config: BudgetConfig, lives: Sequence[LiveSite], recorder: Recorder, steps: int | None, tell: Tell
    ) -> None:
        self.config = config
        self.records = [live for live in lives if isinstance(live.site.spec, RecordSpec)]
        self.recorder = recorder
        self.steps = steps
        self.tell = tell
        self.meter = Meter()
        self.measured: float | None = None  # the overhead at the last check
        # Of steps with record hooks since the last change. Earlier steps may have been faster.
        self.overhead = Overhead()
        self._interventions: tuple[str, ...] = ()  # scheduled hooks
        self._records: tuple[tuple[str, int], ...] = ()  # scheduled hooks and their numbers of sites
        self._firings: Counter[LiveSite] = Counter()  # of the complete run
        self._warm_up = WARM_UP
        self._calibration = None if config.time is None else Calibration(self.records)
        self._looked_away = False
        self._looked_again = 0
        self._steady, self._factor = 0.0, 1.0
        self._left_out: Counter[LiveSite] = Counter()  # how many parts each site has lost
        self._began = time.perf_counter()
        self._counted = 0  # steps since the last change

    def see_due(self, due: Iterable[LiveSite]) -> None:
        """Update the scheduled sites."""
        sites = list(due)
        names = Counter(live.site.spec.name for live in sites if live.records)
        others = dict.fromkeys(live.site.spec.name for live in sites if not live.records)
        self._interventions, self._records = tuple(others), tuple(names.items())

    def leave_out(self, seconds: float) -> None:
        """Exclude a duration that is not part of any step."""
        self._began += seconds

    def end_step(self, done: int, seconds: float, *, late: bool = False) -> None:
        """End a step.

        Args:
            done: The number of completed steps.
            seconds: The duration of the step.
            late: Whether it wrote rows of the previous step.
        """
        self.meter.lap()
        due = (*self._records, ("rows of the step before", 1)) if late else self._records
        self.overhead.add(due, seconds, self._interventions)
        if self.config.bytes is not None and (done <= LEAST_STEPS or done % LEAST_STEPS == 0):
            self._keep_bytes(self.config.bytes, done)
        if self._warm_up:
            self._warm_up -= 1
            self._start_anew()
            return
        if self._calibration is not None:
            self._calibrate(self._calibration)
            return
        self._counted += 1
        elapsed = time.perf_counter() - self._began
        if self._counted < LEAST_STEPS or elapsed < LEAST_SECONDS:
            return
        changed = self.config.time is not None and self._keep_time(self.config.time, elapsed)
        if changed:
            self.overhead = Overhead()
        if changed or self._counted >= 10 * LEAST_STEPS:
            self._start_anew()

    def _start_anew(self) -> None:
        self._firings.update(self.meter.firings)
        self.meter.reset()
        self._began = time.perf_counter()
        self._counted = 0

    def _calibrate(self, calibration: Calibration) -> None:
        """End a step of the initial comparison of steps with and without record hooks."""
        was_away = calibration.is_away
        calibration.add(time.perf_counter() - self._began, self.meter)
        if calibration.is_over:
            calibration.look_away(False)
            self._steady, self._factor = calibration.steady, calibration.factor
            self._calibration, self.overhead = None, Overhead()
            self.tell(f"recording costs {self._factor:.1f} times what is seen from within hooks", None)
        elif calibration.is_away and not was_away and not self._looked_away:
            self._looked_away = True
            self.tell(
                f"in every other {BLOCK} of the first steps what is due in every step is not recorded, to measure what "
                "recording costs",
                None,
            )
        self._start_anew()

    def state_dict(self) -> dict[str, Any]:
        """Return the state that another budget for the same sites requires to continue: numbers and lists."""
        return {
            "measured": self.measured,
            "known": None if self._calibration is not None else [self._steady, self._factor],
            "firings": [self._firings[live] + self.meter.firings[live] for live in self.records],
            "left_out": [self._left_out[live] for live in self.records],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of an earlier budget."""
        self.measured = state["measured"]
        if state["known"] is not None:
            self._steady, self._factor = state["known"]
            self._calibration = None
        for live, firings, left_out in zip(self.records, state["firings"], state["left_out"], strict=True):
            self._firings[live] = firings
            for _ in range(left_out):
                self._lighten(live)

    def _keep_time(self, allowed: float, elapsed: float) -> bool:
        steady = min(self._steady * self._counted, self.meter.seconds)
        found, told = self.overhead.measured(), self.meter.seconds - steady
        if found is not None and found.error <= PRECISE * allowed and told > 0.0:
            self._factor = min(max(found.share * found.bare * self._counted / told, 1.0), MOST_FACTOR)
        spent = steady + self._factor * (self.meter.seconds - steady)
        bare = max(elapsed - spent, 1e-9)
        self.measured = spent / bare
        if self.measured <= allowed:
            return self._look_again(allowed)
        # The time outside of actions is divided among all firings.
        around = (spent - self._factor * sum(self.meter.at.values())) / max(1, sum(self.meter.firings.values()))
        costs = {live: self._factor * self.meter.at[live] + around * self.meter.firings[live] for live in self.records}
        return self._thin_out(costs, spent - allowed * bare, self._told(allowed))

    def _told(self, allowed: float) -> str:
        return f"hooks took {self.measured:.1%} of a step's time, {allowed:.1%} are allowed"

    def _look_again(self, allowed: float) -> bool:
        """Sample reduced sites more often if twice their cost has been well within the budget for a while."""
        assert self.measured is not None, "it was measured"
        thinned = [live for live in self.records if live.thin > 1]
        calm = self._counted >= CALM_STEPS and 2.0 * self.measured <= MARGIN * allowed
        if not thinned or not calm or self._looked_again == MOST_LOOKED_AGAIN or self.config.bytes is not None:
            return False
        self._looked_again += 1
        for live in thinned:
            live.thin //= 2
            self.tell(f"{self._told(allowed)}: {_name(live)} is looked at {_often(live.thin)} again", live)
        return True

    def _keep_bytes(self, allowed: int, done: int) -> bool:
        total = sum(self._bytes_of(live) for live in self.records)
        ahead = HORIZON * done if self.steps is None else max(0, self.steps - done)
        coming = {live: self._bytes_a_step(live, done) * ahead for live in self.records}
        told = f"{total:,.0f} bytes are recorded, and {allowed:,} are allowed in all"
        return self._thin_out(coming, sum(coming.values()) - (allowed - total), told)

    def _bytes_of(self, live: LiveSite) -> float:
        """Return the approximate number of bytes that a site has recorded."""
        rows = self._firings[live] + self.meter.firings[live] if live.has_statistics else 0
        return rows * ROW_BYTES + self.recorder.bytes_of(live)

    def _bytes_a_step(self, live: LiveSite, done: int) -> float:
        """Return the number of bytes that a site records per step at its current rate."""
        firings = self._firings[live] + self.meter.firings[live]
        return self._bytes_of(live) / max(1, firings) * live.dues / max(1, done) / live.thin

    def _thin_out(self, costs: dict[LiveSite, float], excess: float, told: str) -> bool:
        """Reduce the rate of the most expensive sites until the excess is gone. Return whether anything changed."""
        before = {live: live.thin for live in self.records}
        costs = dict(costs)
        while excess > 0:
            able = [live for live in self.records if live.thin < SELDOM and costs[live] > 0]
            if not able:
                break
            costliest = max(able, key=lambda live: costs[live])
            costliest.thin *= 2
            costs[costliest] /= 2
            excess -= costs[costliest]
        thinned = [live for live in self.records if live.thin != before[live]]
        for live in thinned:
            self.tell(f"{told}: {_name(live)} is looked at {_often(live.thin)}", live)
        if excess > 0:
            return self._do_without(costs, told) or bool(thinned)
        return bool(thinned)

    def _do_without(self, costs: dict[LiveSite, float], told: str) -> bool:
        """Drop a part of the recording of the most expensive site that has one. No rate can be reduced further."""
        for live in sorted(self.records, key=lambda live: -costs[live]):
            if left_out := self._lighten(live):
                self.tell(f"{told}: {_name(live)} goes on without {left_out}", live)
                return True
        return False

    def _lighten(self, live: LiveSite) -> str | None:
        """Drop the most expensive part of the recording of a site.

        Return its name; None if no expensive part is left.
        """
        assert isinstance(live.action, Record), "a site that records"
        lighter = live.action.without_the_dearest()
        if lighter is None:
            return None
        live.action, left_out = lighter
        self._left_out[live] += 1
        return left_out

    def summary(self) -> list[str]:
        """Return one line for each hook that was sampled less often."""
        lines = []
        for name in dict.fromkeys(live.site.spec.name for live in self.records):
            thinned = [live for live in self.records if live.site.spec.name == name and live.thin > 1]
            if thinned:
                most = max(live.thin for live in thinned)
                share = "" if self.measured is None else f"; hooks took {self.measured:.1%} of a step's time in the end"
                lines.append(
                    f"budget: hook '{name}' was looked at less often at {len(thinned)} places, down to "
                    f"{_often(most)}{share}"
                )
        return lines


def _name(live: LiveSite) -> str:
    return f"hook '{live.site.spec.name}' on {live.site.label}"


def _often(thin: int) -> str:
    return f"once in {thin} times that it is due" if thin > 1 else "each time that it is due"
