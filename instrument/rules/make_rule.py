"""The construction of a rule from its entry in the configuration."""

from __future__ import annotations

from ..errors import ConfigError, Problem
from ..spec.rules import RULES, CustomRule, RuleBase, WatchRule
from ..targets import build
from .rule import Rule
from .watch import WatchMetric, WatchStatistic


def make_rule(spec: RuleBase) -> Rule:
    """Build a rule.

    Raises:
        ConfigError: A custom rule cannot be imported or built, or lacks the method `update`.
    """
    if isinstance(spec, CustomRule):
        return _custom_rule(spec)
    if isinstance(spec, WatchRule):
        return WatchMetric(spec) if spec.is_of_metrics else WatchStatistic(spec)
    made: Rule = RULES[str(getattr(spec, "rule"))](spec)  # noqa: B009 - the field of every rule with a name
    return made


def _custom_rule(spec: CustomRule) -> Rule:
    where = f"rules.{spec.name}"
    function = spec.target.function
    made = build(spec.target, where) if function is None else function(**(spec.target.model_extra or {}))
    if not callable(getattr(made, "update", None)):
        message = "a rule requires the method update(rows); see instrument.Rule"
        raise ConfigError(Problem(where, message, given=type(made).__name__))
    return made  # type: ignore[no-any-return]
