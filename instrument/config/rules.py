"""The fields that rules share, and the registry of rules. The fields of each rule are in its file in `instrument/rules/`.

Sources of the thresholds: "SageMaker Debugger" is the list of its built-in rules,
https://docs.aws.amazon.com/sagemaker/latest/dg/debugger-built-in-rules.html. "CS231n" is
https://cs231n.github.io/neural-networks-3/. A threshold without a source is a decision of this package; it is wider than the
values of the other sources, so that a healthy training does not reach it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from ..fields.field_types import Count, Names, NonNegative, Number, Spec, Target, UnknownNameError, is_misspelled
from ..fields.registry import Registry
from ..tables.statistics import STATISTICS, unreachable_bound

SIMPLE_ACTIONS = ("warn", "stop", "prune", "checkpoint")
METRIC_NAMES = ("loss", "accuracy", "lr", "grad_norm", "seconds")
NONNEGATIVE_METRICS = ("accuracy", "lr", "grad_norm", "seconds")


class EnableAction(Spec):
    """Turn a hook on from the next step on. Until then it is off."""

    enable: str = Field(description="The name of the hook.")
    steps: Count | None = Field(None, description="The number of steps; null: until the end of the run.")


class DisableAction(Spec):
    """Turn a hook off from the next step on."""

    disable: str = Field(description="The name of the hook.")
    steps: Count | None = Field(None, description="The number of steps; null: until the end of the run.")


class CallAction(Spec):
    """Call a function with the event, an `instrument.RuleEvent`."""

    call: Target = Field(
        description="The function, {_target_: package.function, ...}, or in Python the function itself."
    )


Action = Literal["warn", "stop", "prune", "checkpoint"] | EnableAction | DisableAction | CallAction
_MAPPINGS: dict[str, type[Spec]] = {"enable": EnableAction, "disable": DisableAction, "call": CallAction}


def _parse_action(value: Any) -> Any:
    if isinstance(value, Spec) or value in SIMPLE_ACTIONS:
        return value
    if isinstance(value, str):
        raise UnknownNameError("action", value, (*SIMPLE_ACTIONS, *(f"{{{name}: ...}}" for name in _MAPPINGS)))
    names = [name for name in _MAPPINGS if isinstance(value, Mapping) and name in value]
    if len(names) != 1:
        actions = "warn, stop, prune, checkpoint, {enable: HOOK}, {disable: HOOK} or {call: {_target_: ...}}"
        raise ValueError(f"an action is {actions}")
    return _MAPPINGS[names[0]].model_validate(value)


Actions = Annotated[
    tuple[Action, ...],
    Field(min_length=1),
    BeforeValidator(
        lambda value: tuple(map(_parse_action, value if isinstance(value, list | tuple) else [value])),
        json_schema_input_type=Action | list[Action],
    ),
]


class RuleBase(Spec):
    """The fields that all rules share."""

    name: str = Field("", description="The name of the rule: its key in the mapping.")
    hook: Names = Field((), description="Only the rows of these hooks: a name, or a list. The default is every hook.")
    optional: bool = Field(
        False,
        description="Inactive, instead of an error, if no hook records what the rule requires and `then` is `warn`.",
    )
    then: Actions = Field(
        ("warn",),
        description="What happens: warn, stop (the run ends with exit code 3), prune (stop, and the worst result in a search), "
        "checkpoint, {enable: HOOK, steps: N}, {disable: HOOK, steps: N}, {call: {_target_: ...}}, or a list.",
    )

    @model_validator(mode="before")
    @classmethod
    def _rule_of_name(cls, value: Any) -> Any:
        """Set `rule` of an entry without it to its name; see `parse_rules`."""
        return {"rule": value["name"], **value} if "rule" in cls.model_fields and "name" in value else value

    @property
    def actions(self) -> tuple[Action, ...]:
        """What happens in addition to the event."""
        return tuple(action for action in self.then if action != "warn")

    @property
    def is_optional(self) -> bool:
        return self.optional and not self.actions


class PersistentRule(RuleBase):
    """A rule whose condition has to hold several times in succession."""

    for_: Count = Field(1, alias="for", description="How often in succession the condition has to hold.")


class RangeRule(PersistentRule):
    """A rule on a value that has to stay between two numbers."""

    below: NonNegative
    above: NonNegative

    @model_validator(mode="after")
    def _validate_bounds(self) -> RangeRule:
        if self.below >= self.above:
            raise ValueError(f"below ({self.below:g}) must be less than above ({self.above:g})")
        return self


class WindowRule(RuleBase):
    """A rule that compares a value with the median of previous ones."""

    factor: Annotated[float, Field(gt=1)]
    window: Annotated[int, Field(ge=2, le=10_000)] = Field(
        50, description="The number of previous values in the median."
    )
    after: Count

    @model_validator(mode="after")
    def _validate_after(self) -> WindowRule:
        if self.after > self.window:
            raise ValueError(f"after ({self.after}) cannot be reached: the window keeps {self.window} previous values")
        return self


class FractionRule(PersistentRule):
    """A rule on a fraction."""

    above: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.5, description="The fraction exceeds this number, which is at least 0 and below 1."
    )
    for_: Count = Field(5, alias="for", description="How often in succession the condition has to hold.")


class WatchRule(PersistentRule):
    """A statistic of a hook, or a metric, is above or below a number."""

    watch: Names = Field(min_length=1, description="The names of hooks; `metrics` for a column of the table `metrics`.")
    stat: str = Field(
        description="The statistic, also a custom one; with `watch: metrics`, the metric: loss, grad_norm, ..., or a custom one"
    )
    above: Number | None = Field(None, description="The value exceeds this number.")
    below: Number | None = Field(None, description="The value is below this number.")

    @model_validator(mode="after")
    def _validate_bounds(self) -> WatchRule:
        if (self.above is None) == (self.below is None):
            raise ValueError("requires either 'above' or 'below'; write a second rule for the other bound")
        if self.hook:
            raise ValueError("'hook' cannot be combined with 'watch', which names the hooks")
        if self.is_of_metrics and is_misspelled(self.stat, METRIC_NAMES):
            raise UnknownNameError("metric", self.stat, METRIC_NAMES)
        if self.is_of_metrics and self.stat in NONNEGATIVE_METRICS and self.below is not None and self.below <= 0:
            raise ValueError(f"below ({self.below:g}) cannot be reached: {self.stat} is at least 0")
        if not self.is_of_metrics and self.stat in STATISTICS:
            problem = unreachable_bound(self.stat, self.above, self.below)
            if problem:
                raise ValueError(problem)
        return self

    @property
    def is_of_metrics(self) -> bool:
        """Whether the rule watches a column of the table `metrics`."""
        return self.watch == ("metrics",)


class CustomRule(RuleBase):
    """Your own rule: a class with the method `update` of `instrument.Rule`. Further keys are its arguments."""

    # The schema allows the arguments of the rule next to the other fields.
    model_config = ConfigDict(json_schema_extra=lambda schema: schema.pop("additionalProperties", None))

    target: Annotated[Target, WithJsonSchema({"type": "string"})] = Field(
        alias="_target_", description="The dotted path of the class."
    )

    @model_validator(mode="before")
    @classmethod
    def _collect_arguments(cls, value: Any) -> Any:
        if not isinstance(value, Mapping) or isinstance(value.get("_target_"), Target):
            return value
        arguments = {key: item for key, item in value.items() if key not in RuleBase.model_fields}
        return {**{key: item for key, item in value.items() if key not in arguments}, "_target_": arguments}


def _problem_of(rule: Any) -> str | None:
    is_rule = isinstance(getattr(rule, "fields", None), type) and callable(getattr(rule, "update", None))
    return None if is_rule else "is not a subclass of CatalogueRule with 'fields'"


RULES: Registry[Any] = Registry("rules", "rule", folder="instrument.rules", check=_problem_of)
"""The classes of rules by name. `fields` of a class is the model of its entry in the configuration."""

RESERVED = frozenset([
    "budget", "compiled", "control", "coverage", "data", "device_statistics", "dropped", "error", "fallback",
    "fast_path", "flight_recorder", "graph_break", "hidden_module", "init_from", "interrupted",
    "no_end_step", "optimizer", "output", "ranks", "recording", "remote", "replaced", "resumed", "statistics", "tracking",
])  # fmt: skip
"""Names of other events, which no rule can have."""


def default_rules() -> dict[str, dict[str, Any]]:
    """Return the entries of `conf/rules/default.yaml`: every rule of this package without required fields.

    A rule is inactive without its statistics.
    """
    own = [
        name
        for name in sorted(RULES)
        if name in RULES.places
        and RULES[name].__module__.startswith("instrument.rules.")
        and not any(field.is_required() for key, field in RULES[name].fields.model_fields.items() if key != "rule")
    ]
    return {name: {"rule": name, "optional": True} for name in own}
