"""Rules: conditions on what a run records, and what happens when one of them holds.

Sources of the thresholds: "SageMaker Debugger" is the list of its built-in rules,
https://docs.aws.amazon.com/sagemaker/latest/dg/debugger-built-in-rules.html. "CS231n" is
https://cs231n.github.io/neural-networks-3/. A threshold without a source is a decision of this package; it is wider than the
values of the other sources, so that a healthy training does not reach it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from .field_types import Count, Index, Names, NonNegative, Number, Spec, Target
from .messages import UnknownNameError, is_misspelled
from .statistics import STATISTICS, unreachable_bound

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


def _parse_actions(value: Any) -> Any:
    """Convert one action or a list of actions to a tuple."""
    given = value if isinstance(value, list | tuple) else [value]
    return tuple(_parse_action(item) for item in given)


def _parse_action(value: Any) -> Any:
    if isinstance(value, Spec) or value in SIMPLE_ACTIONS:
        return value
    if isinstance(value, str):
        raise UnknownNameError("action", value, (*SIMPLE_ACTIONS, *(f"{{{name}: ...}}" for name in _MAPPINGS)))
    names = [name for name in _MAPPINGS if isinstance(value, Mapping) and name in value]
    if len(names) != 1:
        raise ValueError(
            "an action is warn, stop, prune, checkpoint, {enable: HOOK}, {disable: HOOK} or {call: {_target_: ...}}"
        )
    return _MAPPINGS[names[0]].model_validate(value)


Actions = Annotated[
    tuple[Action, ...],
    Field(min_length=1),
    BeforeValidator(_parse_actions, json_schema_input_type=Action | list[Action]),
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

    source: ClassVar[Literal["stats", "metrics", "samples"]] = "stats"

    @property
    def actions(self) -> tuple[Action, ...]:
        """What happens in addition to the event."""
        return tuple(action for action in self.then if action != "warn")

    @property
    def is_optional(self) -> bool:
        """Whether the rule may be inactive."""
        return self.optional and not self.actions


class PersistentRule(RuleBase):
    """A rule whose condition has to hold several times in succession."""

    for_: Count = Field(1, alias="for", description="How often in succession the condition has to hold.")


class NonFiniteRule(RuleBase):
    """A recorded tensor contains NaN or infinity, or the loss is not finite.

    Gradients of a step that a gradient scaler skipped are expected, and do not count. Infinities without NaN can be a mask, which
    a softmax turns into zeros: those of an argument count only if the loss of the step is not finite, and those of an output
    do not count if it is finite. The values of layers with weights are no masks.
    """

    rule: Literal["non_finite"]


class _GrowthRule(RuleBase):
    factor: Annotated[float, Field(gt=1)] = Field(
        100.0,
        description="The value exceeds this many times the median of the previous values at the same location; the square of this "
        "number, until `after` previous values exist.",
    )
    window: Annotated[int, Field(ge=2, le=10_000)] = Field(
        50, description="The number of previous values in the median."
    )
    after: Count = Field(10, description="How many previous values have to exist.")
    above: NonNegative | None = Field(
        None,
        description="The value exceeds this number, whatever the previous values are; null: no absolute bound.",
    )

    @model_validator(mode="after")
    def _validate_after(self) -> _GrowthRule:
        if self.after > self.window:
            raise ValueError(f"after ({self.after}) cannot be reached: the window keeps {self.window} previous values")
        return self


class ExplodingGradientRule(_GrowthRule):
    """The `l2` of a gradient is far above the median of its previous values.

    A cliff of the loss increases the norm by orders of magnitude (Pascanu et al. 2013, https://arxiv.org/abs/1211.5063), hence
    `factor: 100`. The norm itself is no reason to fire: it is proportional to the scale of the loss, such as a sum over samples.
    """

    rule: Literal["exploding_gradient"]


class ExplodingActivationRule(_GrowthRule):
    """The `abs_max` of an output is far above the median of its previous values."""

    rule: Literal["exploding_activation"]


class VanishingGradientRule(PersistentRule):
    """The `rms` of the gradient of a weight is tiny, although the loss has not halved since the first step.

    The threshold is that of SageMaker Debugger (VanishingGradient) for a loss of 1. A gradient is proportional to the scale of the
    loss, hence the comparison with the first loss. Without a loss, it is compared with the largest gradient of the step. A training
    that has converged has small gradients too, hence the condition on the loss.
    """

    rule: Literal["vanishing_gradient"]
    below: NonNegative = Field(
        1e-7, gt=0, description="The rms is below this many times the absolute value of the first loss."
    )
    for_: Count = Field(3, alias="for", description="How often in succession the condition has to hold.")


class _FractionRule(PersistentRule):
    above: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.5, description="The fraction exceeds this number, from 0 to below 1, which no fraction exceeds."
    )
    for_: Count = Field(5, alias="for", description="How often in succession the condition has to hold.")


class DeadUnitsRule(_FractionRule):
    """The `dead_fraction` of an output is large: its units are zero for a whole batch.

    The threshold is that of SageMaker Debugger (DeadRelu, `threshold_layer`).
    """

    rule: Literal["dead_units"]


class SaturatedActivationRule(_FractionRule):
    """The `saturated_fraction` of an output is large: Tanh, Sigmoid and similar functions pass no gradient there.

    The threshold is that of SageMaker Debugger (SaturatedActivation, `threshold_layer`). The output of the network does not count:
    confident predictions saturate it.
    """

    rule: Literal["saturated_activation"]


class PoorInitializationRule(RuleBase):
    """At the first step, the `std` of the outputs of layers with weights differs by orders of magnitude, or all weights are equal.

    Units with equal weights have equal gradients, and stay equal (Goodfellow et al. 2016, Deep Learning, section 8.4). The weights
    after the first update are the initial ones plus the update, so that equal ones have the `std` of the update. Weights that are zero
    are a usual start of some layers, but not of more than half of them: they pass no gradient to the layers before.

    A good initialization keeps the variance from layer to layer (He et al. 2015, https://arxiv.org/abs/1502.01852). PyTorch's
    default shrinks it to about a third per layer, so that only a far larger ratio is reported.
    """

    rule: Literal["poor_initialization"]
    factor: Annotated[float, Field(gt=1)] = Field(
        1e4, description="The largest std exceeds this many times the smallest one."
    )


class AllZeroRule(PersistentRule):
    """All elements of an output or of a gradient are zero (SageMaker Debugger: AllZero, 100%).

    Gradients of biases do not count: they cancel out exactly in some healthy trainings, such as that of a Wasserstein critic.
    """

    rule: Literal["all_zero"]
    for_: Count = Field(3, alias="for", description="How often in succession the condition has to hold.")


class UnchangedParameterRule(PersistentRule):
    """A parameter has the same statistics in several recorded steps, or its update is zero, while the learning rate is not.

    The number of steps is that of SageMaker Debugger (UnchangedTensor). Biases do not count: a normalization layer after them
    makes their gradient zero. Frozen layers (`requires_grad` is False) do not count either.
    """

    rule: Literal["unchanged_parameter"]
    for_: Count = Field(3, alias="for", description="How often in succession the condition has to hold.")


class ZeroLearningRateRule(PersistentRule):
    """The learning rate is exactly 0: no parameter of the first group changes.

    A linear warm-up starts with 0 for one step, hence several steps in succession. The default of `for` is that of
    `unchanged_parameter`.
    """

    source: ClassVar[Literal["stats", "metrics", "samples"]] = "metrics"
    rule: Literal["zero_learning_rate"]
    for_: Count = Field(3, alias="for", description="How often in succession the condition has to hold.")


class UpdateRatioRule(PersistentRule):
    """The `update_ratio` of a weight is too large or too small.

    About 1e-3 is usual (CS231n). Above 0.1, ten updates replace a weight completely. 6e-8 is the rounding unit of float32: smaller
    updates do not change a weight. An update of exactly zero is reported by `unchanged_parameter`. It also fires if the first step
    replaces more than half of the weights: their ratio is above 0.5, so that little of the initialization is left.
    """

    rule: Literal["update_ratio"]
    above: NonNegative = Field(0.1, description="The ratio exceeds this number.")
    below: NonNegative = Field(1e-7, description="The ratio is below this number.")
    for_: Count = Field(10, alias="for", description="How often in succession the condition has to hold.")
    start: Index = Field(20, description="Updates before this step do not count: weights that start at zero grow fast.")

    @model_validator(mode="after")
    def _validate_bounds(self) -> UpdateRatioRule:
        if self.below >= self.above:
            raise ValueError(f"below ({self.below:g}) must be less than above ({self.above:g})")
        return self


class LossNotDecreasingRule(RuleBase):
    """The mean loss of the later half of the first steps is not lower than that of the earlier half.

    SageMaker Debugger (LossNotDecreasing) expects 0.1% in 10 steps; here it is 1% in 200 steps, since batches differ, and small
    learning rates need some time to leave the plateau at the beginning. A loss that doubles and then is not finite ends the window.
    A loss that becomes negative, such as that of a Wasserstein critic, is no measure of an error and does not count. Neither does
    one that rises and falls, such as that of a generator whose opponent learns too: the rule fires only if the means of the quarters
    of the window are equal within 5%, or never fall from one quarter to the next.
    """

    source: ClassVar[Literal["stats", "metrics", "samples"]] = "metrics"
    rule: Literal["loss_not_decreasing"]
    window: Annotated[int, Field(ge=4, le=1_000_000)] = Field(200, description="The number of steps that are compared.")
    by: Annotated[float, Field(ge=0, lt=1)] = Field(0.01, description="The relative decrease that is expected.")


class LossSpikeRule(RuleBase):
    """The training loss is far above the median of the previous losses, and undoes half of what was learned.

    It is also above twice the largest of the last `after` losses, since some losses vary a lot, such as those of
    episodes. A ratio of losses with both signs has no meaning. If a loss was negative, `factor` therefore refers to the difference from the
    median and to the range of the window. Before `after` losses exist, a loss above 1000 times the largest previous one (of at
    least two) is reported at once.
    """

    source: ClassVar[Literal["stats", "metrics", "samples"]] = "metrics"
    rule: Literal["loss_spike"]
    factor: Annotated[float, Field(gt=1)] = Field(
        5.0,
        description="The loss exceeds this many times the median; if a loss was negative, it exceeds the median by this many times "
        "the range of the previous losses.",
    )
    window: Annotated[int, Field(ge=2, le=10_000)] = Field(
        50, description="The number of previous losses in the median."
    )
    after: Count = Field(20, description="How many previous losses have to exist.")

    @model_validator(mode="after")
    def _validate_after(self) -> LossSpikeRule:
        if self.after > self.window:
            raise ValueError(f"after ({self.after}) cannot be reached: the window keeps {self.window} previous losses")
        return self


class OverfitRule(PersistentRule):
    """The evaluation loss is far above the training loss since the last evaluation, and above its own minimum.

    The rise above the minimum exceeds 10% of the minimum, and 10% of the decrease from the first training loss to the minimum: the
    loss of a few wrong but confident predictions rises in healthy trainings too. Negative losses do not count: their ratio has no
    meaning.
    SageMaker Debugger (Overfit) has a ratio of 0.1, which most trainings on little data exceed.
    """

    source: ClassVar[Literal["stats", "metrics", "samples"]] = "metrics"
    rule: Literal["overfit"]
    above: NonNegative = Field(
        1.0, description="(evaluation loss - training loss) / training loss exceeds this number."
    )
    for_: Count = Field(3, alias="for", description="In how many evaluations in succession.")


class OvertrainingRule(PersistentRule):
    """The evaluation loss is worse than its minimum in many evaluations in succession.

    Both numbers are those of SageMaker Debugger (Overtraining, `patience_validation` and `delta`). If a loss was negative, the
    fraction is that of the decrease from the first evaluation to the minimum, instead of the minimum.
    """

    source: ClassVar[Literal["stats", "metrics", "samples"]] = "metrics"
    rule: Literal["overtraining"]
    above: NonNegative = Field(0.01, description="The loss is above its minimum by more than this fraction.")
    for_: Count = Field(10, alias="for", description="In how many evaluations in succession.")


class TensorVarianceRule(PersistentRule):
    """The variance of the output of a layer with weights is tiny or huge.

    SageMaker Debugger (TensorVariance) has 1e-5 and 10, which residual streams and small initializations leave.
    """

    rule: Literal["tensor_variance"]
    below: NonNegative = Field(1e-9, description="The variance is below this number.")
    above: NonNegative = Field(1e6, description="The variance exceeds this number.")
    for_: Count = Field(5, alias="for", description="How often in succession the condition has to hold.")

    @model_validator(mode="after")
    def _validate_bounds(self) -> TensorVarianceRule:
        if self.below >= self.above:
            raise ValueError(f"below ({self.below:g}) must be less than above ({self.above:g})")
        return self


class ClassImbalanceRule(RuleBase):
    """The most frequent class has many more samples than the rarest one (SageMaker Debugger: ClassImbalance, 10), or all samples.

    It reads the targets of the table `samples`: those of batches in which a tensor is recorded, without `keep`, or all with
    `data.ids=all`.
    """

    source: ClassVar[Literal["stats", "metrics", "samples"]] = "samples"
    rule: Literal["class_imbalance"]
    above: Annotated[float, Field(ge=1)] = Field(10.0, description="The ratio of both numbers exceeds this number.")
    after: Count = Field(500, description="How many samples are counted first.")


class DoubleSoftmaxRule(PersistentRule):
    """The loss applies a softmax or sigmoid to probabilities: a Softmax followed by CrossEntropyLoss, or a Sigmoid by BCEWithLogitsLoss.

    It compares three numbers with those of such a loss, which probabilities limit. With K classes, the mean cross-entropy is between
    log(1 + (K - 1) / e) and log(1 + (K - 1) e), and the largest gradient of a sample is between 1 - e / (e + K - 1) and 1. The
    gradients of a sample have the sum 0, as a softmax ignores a constant that is added to its input.
    """

    rule: Literal["double_softmax"]
    for_: Count = Field(3, alias="for", description="How often in succession the condition has to hold.")


class StalledRule(RuleBase):
    """A step or an evaluation took very long (SageMaker Debugger: StalledTrainingRule, half an hour)."""

    source: ClassVar[Literal["stats", "metrics", "samples"]] = "metrics"
    rule: Literal["stalled"]
    above: Annotated[float, Field(gt=0)] = Field(1800.0, description="Seconds of a step.")


class InputNotNormalizedRule(RuleBase):
    """The input of the first layer with weights has a mean far from zero, or a large `std`, at the first recorded step.

    SageMaker Debugger (NotNormalizedInput) has 0.2 for the mean, which images with values from 0 to 1 exceed.
    """

    rule: Literal["input_not_normalized"]
    mean: Annotated[float, Field(gt=0)] = Field(3.0, description="|mean| exceeds this many times the std.")
    std: Annotated[float, Field(gt=0)] = Field(10.0, description="The std exceeds this number.")


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


def _custom_rule_schema(schema: dict[str, Any]) -> None:
    """Allow the arguments of a custom rule next to the other fields."""
    schema.pop("additionalProperties", None)


class CustomRule(RuleBase):
    """Your own rule: a class with the method `update` of `instrument.Rule`. Further keys are its arguments."""

    model_config = ConfigDict(json_schema_extra=_custom_rule_schema)

    target: Annotated[Target, WithJsonSchema({"type": "string"})] = Field(
        alias="_target_", description="The dotted path of the class."
    )

    @model_validator(mode="before")
    @classmethod
    def _collect_arguments(cls, value: Any) -> Any:
        """Move the arguments of the rule into its target."""
        if not isinstance(value, Mapping) or isinstance(value.get("_target_"), Target):
            return value
        arguments = {key: item for key, item in value.items() if key not in RuleBase.model_fields}
        return {**{key: item for key, item in value.items() if key not in arguments}, "_target_": arguments}


CatalogueRule = (
    NonFiniteRule
    | ExplodingGradientRule
    | ExplodingActivationRule
    | VanishingGradientRule
    | DeadUnitsRule
    | SaturatedActivationRule
    | PoorInitializationRule
    | AllZeroRule
    | UnchangedParameterRule
    | ZeroLearningRateRule
    | UpdateRatioRule
    | LossNotDecreasingRule
    | LossSpikeRule
    | OverfitRule
    | OvertrainingRule
    | TensorVarianceRule
    | ClassImbalanceRule
    | DoubleSoftmaxRule
    | StalledRule
    | InputNotNormalizedRule
)
RuleSpec = CatalogueRule | WatchRule | CustomRule
RULES: dict[str, type[RuleBase]] = {
    model.model_fields["rule"].annotation.__args__[0]: model for model in CatalogueRule.__args__
}
"""The rules of the catalogue by name."""

RESERVED = frozenset(
    [
        "budget",
        "compiled",
        "control",
        "coverage",
        "data",
        "device_statistics",
        "dropped",
        "error",
        "fallback",
        "fast_path",
        "flight_recorder",
        "graph_break",
        "hidden_module",
        "hook_order",
        "init_from",
        "interrupted",
        "no_end_step",
        "optimizer",
        "output",
        "ranks",
        "recording",
        "remote",
        "replaced",
        "resumed",
        "tracking",
    ]
)
"""Names of other events, which no rule can have."""


def default_rules() -> dict[str, dict[str, Any]]:
    """Return the entries of `conf/rules/default.yaml`: every rule of the catalogue, inactive without its statistics."""
    return {name: {"rule": name, "optional": True} for name in RULES}
