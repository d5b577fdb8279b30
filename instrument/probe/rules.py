"""The rules of a probe: the rows of the recorder become those that rules read, and a rule that fires is followed by actions: a stop, a
checkpoint, hooks that are turned on or off, and calls of functions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from ..config.hook_specs import HookSpec
from ..config.rules import CallAction, DisableAction, EnableAction
from ..config.schedule import STEP_PHASES
from ..errors import HookError, user_code_location
from ..fields.targets import build_callable
from ..rules.requirements import turned_on_by_rules, writes_kept_tensors
from ..rules.rule_set import RuleEvent, RuleSet
from ..rules.step_rows import FloatArray, Numbers, RelationRow, RowLayout, RowSite, StepRows, time_order
from ..tables.schemas import IDENTITY, MOMENT
from ..tables.sink_interface import Row
from .collectives import Ranks
from .recorder import MetricsRow
from .samples import SampleRows
from .slab_rows import StatisticsRows

_Moment = tuple[int, str]
_SITE_COLUMNS = [column.name for column in IDENTITY[len(MOMENT) - 1 :]]  # the rank is not part of the moment of a row
_Statistics = tuple[Sequence[Row], Callable[[str], FloatArray], Numbers]
_NO_STATISTICS: _Statistics = ([], lambda name: np.empty(0), ((), np.empty((0, 0))))
_HOOK, _RECOMPUTE = _SITE_COLUMNS.index("hook"), _SITE_COLUMNS.index("recompute")


class _Part(NamedTuple):
    """The rows of a step and phase: all of them, or those before or after an evaluation that interrupts the step."""

    sites: Sequence[Row]
    statistic: Callable[[str], FloatArray]
    numbers: Numbers | None
    targets: FloatArray | None

    def followed_by(self, other: _Part) -> _Part:
        targets = [each.targets for each in (self, other) if each.targets is not None]
        return _Part(
            [*self.sites, *other.sites],
            lambda name: np.concatenate([self.statistic(name), other.statistic(name)]),
            None,
            np.concatenate(targets) if targets else None,
        )


class RuleRows:
    """Passes the rows of each step and phase to the rules, in order."""

    def __init__(self, rules: RuleSet) -> None:
        self._rules = rules
        self._begun: dict[_Moment, _Part] = {}  # the steps that are not complete
        self._layouts: dict[str, RowLayout] = {}  # of steps without rows, by phase

    def add(
        self,
        stats: StatisticsRows | None,
        metrics: Sequence[MetricsRow],
        samples: Sequence[SampleRows],
        relations: Mapping[_Moment, Sequence[RelationRow]],
        is_complete: bool,
    ) -> None:
        """Pass rows to the rules. Keep those of a step that is not complete until it is."""
        if is_complete and len(metrics) == 1 and not (samples or relations or self._begun):
            step, phase, row = metrics[0]
            layout = numbers = None
            if stats is None:
                layout = self._layouts.get(phase)
            elif (at := stats.moment) is not None and at.step == step and at.phase == phase:
                known = stats.layout
                layout, numbers = known.of_rules.get(phase), (known.built_in, stats.values)
            if layout is not None:  # one complete step, with the rows of an earlier one
                bounds = self._rules.bounds
                if bounds.active or not bounds.contain(step, phase, row, layout, numbers):
                    statistic = _NO_STATISTICS[1] if stats is None else stats.column
                    self._rules.update(StepRows(step, phase, layout, statistic, row, numbers=numbers))
                return
        metrics_by_step: dict[_Moment, Mapping[str, Any]] = {(step, phase): row for step, phase, row in metrics}
        targets = _targets(samples) if samples else {}
        indices = {} if stats is None else _indices(stats)
        moments = {**self._begun, **metrics_by_step, **indices, **targets, **relations}
        for moment in moments if len(moments) == 1 else sorted(moments, key=time_order):
            step, phase = moment
            of_moment = _statistics(stats, indices[moment]) if stats and moment in indices else _NO_STATISTICS
            part = _Part(*of_moment, targets.get(moment))
            if moment in self._begun:
                part = self._begun.pop(moment).followed_by(part)
            if not is_complete and phase in STEP_PHASES:
                self._begun[moment] = part
                continue
            layout, of_step = self._rules.layout(part.sites, phase, _site), relations.get(moment, ())
            if not len(layout):
                self._layouts[phase] = layout
            elif stats is not None and part.sites is stats.sites:
                stats.layout.of_rules[phase] = layout
            given = part.statistic, metrics_by_step.get(moment), part.targets
            self._rules.update(StepRows(step, phase, layout, *given, numbers=part.numbers, relations=of_step))


def _targets(samples: Sequence[SampleRows]) -> dict[_Moment, FloatArray]:
    targets: dict[_Moment, list[FloatArray]] = {}
    for batch in samples:
        if len(batch.targets):
            targets.setdefault((batch.moment.step, batch.moment.phase), []).append(batch.targets)
    return {moment: np.concatenate(parts) for moment, parts in targets.items()}


def _indices(stats: StatisticsRows) -> dict[_Moment, list[int] | None]:
    """Return the rows of each step and phase; None for all rows."""
    if stats.moment is not None:
        return {(stats.moment.step, stats.moment.phase): None}
    groups: dict[_Moment, list[int] | None] = {}
    for row, moment in enumerate(stats.taken.moments_of_rows):
        groups.setdefault((moment.step, moment.phase), []).append(row)  # type: ignore[union-attr]
    return groups


def _statistics(stats: StatisticsRows, rows: list[int] | None) -> _Statistics:
    """Return the sites and the statistics of some rows. None selects all rows."""
    statistics, numbers = stats.layout.built_in, stats.values
    if rows is None:
        return stats.sites, stats.column, (statistics, numbers)
    sites, of_rows = [stats.sites[row] for row in rows], (statistics, numbers.take(rows, 1))
    return sites, lambda name: stats.column(name)[rows], of_rows


def _site(row: Row) -> RowSite:
    hook, layer, module_type, kind, role, path = row[_HOOK : _HOOK + 6]
    return RowSite(hook, layer, module_type, kind, role, path, row[_RECOMPUTE])


class RuleActions:
    """Carries out the actions of the rules that fired, in all processes alike.

    Args:
        write_kept: Writes the tensors that a hook keeps: called with the hook and the reason.

    Attributes:
        fired: The rules that fired in the last step or evaluation, by name: in this process, and those with actions in any process.

    Raises:
        ConfigError: A function to call cannot be imported.
    """

    def __init__(
        self, rules: RuleSet, hooks: Mapping[str, HookSpec], ranks: Ranks | None, write_kept: Callable[[str, str], None]
    ) -> None:
        self.rules = rules
        self.ranks = ranks
        self.fired: frozenset[str] = frozenset()
        self.stop_reason: str | None = None
        self.is_pruned = False
        self.should_checkpoint = False
        self._write_kept = write_kept
        self._followers: defaultdict[str, list[str]] = defaultdict(list)  # hooks by rule
        self._keeping: defaultdict[str, list[str]] = defaultdict(list)
        for rule, (hook, spec) in product(rules.specs, hooks.items()):
            if spec.follows == rule:
                self._followers[rule].append(hook)
            if writes_kept_tensors(rule, rules.specs, spec):
                self._keeping[rule].append(hook)
        acting = {name for name, spec in rules.specs.items() if spec.actions}
        self._names = sorted(acting | self._followers.keys() | self._keeping.keys())
        self._functions = {
            name: [
                action.call.function or build_callable(action.call, f"rules.{name}.then.call")
                for action in spec.actions
                if isinstance(action, CallAction)
            ]
            for name, spec in rules.specs.items()
        }
        self._off = turned_on_by_rules(rules.specs, hooks)
        self._has_stopped: set[str] = set()  # rules that stopped the run before it was resumed
        self._switches: dict[str, tuple[bool, int | None]] = {}  # by hook: on, and the step after the last one

    def off_at(self, step: int) -> frozenset[str]:
        """Return the hooks that the rules turn off at a step."""
        if not self._switches:
            return self._off
        valid = {hook: is_on for hook, (is_on, stop) in self._switches.items() if stop is None or step < stop}
        return (self._off - valid.keys()).union(hook for hook, is_on in valid.items() if not is_on)

    @property
    def never_turned_on(self) -> frozenset[str]:
        """The hooks that are off until a rule fires, and were never turned on."""
        return self._off - self._switches.keys()

    def act(self, step: int) -> None:
        """Carry out the actions of the rules that fired since the last call, before a step. Call it in all processes at once.

        Raises:
            HookError: A function of `call` failed.
        """
        self.should_checkpoint = False
        events = self.rules.take_fired()
        if self.ranks is None and not (events or self.fired):
            return
        to_act = [name for name in self._names if name in events]
        if self.ranks is not None and self._names:
            flags = self.ranks.any_rank([name in events for name in self._names])
            to_act = [name for name, any_fired in zip(self._names, flags, strict=True) if any_fired]
        self.fired = frozenset([*events, *to_act])
        for name in to_act:
            self._carry_out(name, events.get(name), step)

    def _carry_out(self, name: str, event: RuleEvent | None, step: int) -> None:
        """Carry out the actions of one rule. `event` is None if it fired in another process only."""
        for hook in self._keeping.get(name, ()):
            self._write_kept(hook, f"rule {name} fired")
        for hook in self._followers.get(name, ()):
            self._turn_on(hook, step + 1)
        for action in self.rules.specs[name].actions:
            if action in ("stop", "prune") and self.stop_reason is None and name not in self._has_stopped:
                self._has_stopped.add(name)
                self.is_pruned = action == "prune"
                self.stop_reason = f"rule {name}: {'it fired in another process' if event is None else event.message}"
            elif action == "checkpoint":
                self.should_checkpoint = True
            elif isinstance(action, EnableAction):
                self._turn_on(action.enable, None if action.steps is None else step + action.steps)
            elif isinstance(action, DisableAction):
                self._switches[action.disable] = (False, None if action.steps is None else step + action.steps)
            elif isinstance(action, CallAction) and event is not None:
                self._call(name, event)

    def _turn_on(self, hook: str, stop: int | None) -> None:
        """Turn a hook on until a step, or longer if it is on for longer already."""
        is_on, known = self._switches.get(hook, (False, 0))
        if is_on and stop is not None:
            stop = None if known is None else max(stop, known)
        self._switches[hook] = (True, stop)

    def _call(self, name: str, event: RuleEvent) -> None:
        for function in self._functions[name]:
            try:
                function(event)
            except Exception as error:
                at = f"at step {event.step}{user_code_location(error)}"
                reason = f"{type(error).__name__}: {error}"
                raise HookError(f"rules.{name}.then: the function failed {at}: {reason}") from error

    def state_dict(self) -> dict[str, Any]:
        switches = {hook: list(switch) for hook, switch in self._switches.items()}
        return {"switches": switches, "has_stopped": sorted(self._has_stopped)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state. A rule that has stopped the run does not stop it again."""
        self._switches = {hook: (on, stop) for hook, (on, stop) in state["switches"].items()}
        self._has_stopped = set(state["has_stopped"])
