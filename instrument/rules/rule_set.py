"""The rules of a run: they read every step, write events, and collect the actions that follow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from ..config.rules import RULES, CustomRule, RuleBase, WatchRule
from ..errors import ConfigError, HookError, Problem, user_code_location
from ..fields.targets import build
from .bounds import MAX_LAYOUTS, StepBounds, values_of
from .reference import ReferenceRanges
from .reference_ranges import ModuleSettings
from .rule import CatalogueRule, Firing, Rule
from .step_rows import Locations, RowLayout, RowSite, StepRows
from .watch import WatchMetric, WatchStatistic

MAX_EVENTS = 20  # further events of a rule after the first one


@dataclass(frozen=True)
class RuleEvent:
    """A rule fired.

    Attributes:
        rule: The name of the rule.
        step: The step.
        message: What, when, where, and the value.
        severity: `warning` for the first firing of a rule, otherwise `info`.
        layer: The name of the module; None for the run as a whole.
        location: The tensor in words, such as `encoder.0 output (activations)`; None for the run as a whole.
        value: The value; None for a note without consequences.
        threshold: The threshold; None if the rule has none.
    """

    rule: str
    step: int
    message: str
    severity: str
    layer: str | None
    location: str | None
    value: float | None
    threshold: float | None


class RuleSet:
    """The rules of a run. `write` is called with each event."""

    def __init__(
        self,
        specs: Mapping[str, RuleBase],
        write: Callable[[RuleEvent], None],
        frozen_layers: Container[str] = frozenset(),
    ) -> None:
        self.specs = specs
        self._rules = {name: make_rule(spec) for name, spec in specs.items()}
        for rule in self._rules.values():
            if isinstance(rule, CatalogueRule) and not isinstance(rule, ReferenceRanges):
                rule.frozen_layers = frozen_layers
        self._write = write
        self._written: Counter[str] = Counter()  # events by rule and whether they have a location
        self._fired: dict[str, RuleEvent] = {}
        self._locations = Locations()
        self._layouts: dict[tuple[Any, ...], tuple[Sequence[Any], RowLayout]] = {}
        self.bounds = StepBounds(self._rules, self._locations)

    def set_settings(self, settings: ModuleSettings) -> None:
        """Pass the settings of the modules, by layer, to the rules that compare them in the next training step."""
        for rule in self._rules.values():
            if isinstance(rule, ReferenceRanges):
                rule.settings = settings

    def layout(self, rows: Sequence[Any], phase: str, site_of: Callable[[Any], RowSite]) -> RowLayout:
        """Return the layout of rows, which must not be modified later; that of an earlier step, if it had the same rows."""
        key = (phase, len(rows), rows[0], rows[-1]) if rows else (phase, 0)
        known = self._layouts.get(key)
        if known is None or known[0] != rows:
            if len(self._layouts) >= MAX_LAYOUTS:
                self._layouts.clear()
            known = self._layouts[key] = (rows, self._locations.layout(rows, phase, site_of))
        return known[1]

    def update(self, rows: StepRows) -> None:
        """Pass the rows of a step to every rule that they concern, and write an event for each firing.

        Call it in the order of the steps.

        Raises:
            HookError: A custom rule failed.
        """
        bounds = self.bounds
        if bounds.contain(rows.step, rows.phase, values_of(rows), rows.layout, rows.numbers):
            if bounds.active:
                rows.has_non_finite = False
                self._check(bounds.active, rows)
        else:
            bounds.catch_up()
            self._check(self._rules, rows)
            bounds.renew(rows)

    def _check(self, rules: Mapping[str, Rule], rows: StepRows) -> None:
        for name, rule in rules.items():
            try:
                firings = [*rule.update(rows)]
            except Exception as error:
                location = user_code_location(error)
                reason = f"{type(error).__name__}: {error}"
                raise HookError(f"rules.{name}: it failed at step {rows.step}{location}: {reason}") from error
            for firing in firings:
                self._report(name, firing, rows)

    def take_fired(self) -> dict[str, RuleEvent]:
        """Return the first event of each rule that fired since the last call, by its name."""
        fired, self._fired = self._fired, {}
        return fired

    @property
    def custom_advice(self) -> dict[str, str]:
        """What to do next if a custom rule fires, by its name."""
        custom = {name: rule for name, rule in self._rules.items() if isinstance(self.specs[name], CustomRule)}
        return {name: text for name, rule in custom.items() if (text := getattr(rule, "advice", ""))}

    @property
    def files(self) -> dict[str, bytes]:
        """The files of the run with which `python -m instrument.findings` decides as these rules, by their names in its folder."""
        rules = self._rules.items()
        return {
            reference_file(name): rule.reference.content() for name, rule in rules if isinstance(rule, ReferenceRanges)
        }

    @property
    def rules(self) -> Sequence[Rule]:
        return list(self._rules.values())

    @property
    def relations(self) -> frozenset[str]:
        rules = [rule for rule in self._rules.values() if isinstance(rule, CatalogueRule)]
        return frozenset(rule.relation for rule in rules if rule.relation)

    def _report(self, name: str, firing: Firing, rows: StepRows) -> None:
        is_note, location = firing.value is None, firing.location
        key = f"{name} {location is None}"
        warns = {"warn", "stop", "prune"} & {action for action in self.specs[name].then if isinstance(action, str)}
        severity = "warning" if warns and not is_note and not self._written[key] else "info"
        where = "" if location is None else f" in {location}"
        what = firing.what or getattr(self._rules[name], "what", name)
        event = RuleEvent(
            name,
            rows.step,
            f"{what}: {rows.when}{where}: {firing.text}",
            severity,
            firing.layer if location is None else location.layer,
            None if location is None else str(location),
            firing.value,
            firing.threshold,
        )
        if not is_note:
            self._written[key] += 1
            self._fired.setdefault(name, event)
        if self._written[key] <= MAX_EVENTS + 1:
            self._write(event)
            if not is_note and self._written[key] == MAX_EVENTS + 1:
                message = f"rule {name} fired {MAX_EVENTS + 1} times; further ones are not reported"
                self._write(RuleEvent(name, rows.step, message, "info", None, None, None, None))

    @property
    def unread(self) -> list[str]:
        """Why rules could never fire in the steps that they read; see `CatalogueRule.unread`."""
        return [text for rule in self._rules.values() if isinstance(rule, CatalogueRule) and (text := rule.unread())]

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: numbers, strings, lists and dictionaries."""
        self.bounds.catch_up()
        states = {name: rule.state_dict() if hasattr(rule, "state_dict") else {} for name, rule in self._rules.items()}
        fired = [list(astuple(event)) for event in self._fired.values()]
        return {"written": dict(self._written), "fired": fired, "rules": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._written = Counter(state["written"])
        self._fired = {event.rule: event for event in (RuleEvent(*cells) for cells in state["fired"])}
        for name, rule in self._rules.items():
            if name in state["rules"] and hasattr(rule, "load_state_dict"):
                rule.load_state_dict(state["rules"][name])
        self.bounds = StepBounds(self._rules, self._locations)


def reference_file(rule: str) -> str:
    """Return the name of the file with the reference of a rule in the folder of a run."""
    return f"references/{rule}.parquet"


def make_rule(spec: RuleBase) -> Rule:
    """Build a rule.

    Raises:
        ConfigError: A custom rule cannot be imported or built, or lacks the method `update`.
    """
    if isinstance(spec, CustomRule):
        where = f"rules.{spec.name}"
        function = spec.target.function
        made = build(spec.target, where) if function is None else function(**(spec.target.model_extra or {}))
        if not callable(getattr(made, "update", None)):
            message = "a rule requires the method update(rows); see instrument.Rule"
            raise ConfigError(Problem(where, message, given=type(made).__name__))
        return made  # type: ignore[no-any-return]
    if isinstance(spec, WatchRule):
        return WatchMetric(spec) if spec.is_of_metrics else WatchStatistic(spec)
    named: Rule = RULES[str(getattr(spec, "rule"))](spec)  # noqa: B009 - the field of every rule with a name
    return named
