"""The rules of the catalogue, and the construction of a rule from its entry in the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError, Problem
from ..spec.rules import CustomRule, RuleBase, WatchRule
from ..targets import build
from .all_zero import AllZero
from .class_imbalance import ClassImbalance
from .dead_units import DeadUnits
from .double_softmax import DoubleSoftmax
from .exploding_activation import ExplodingActivation
from .exploding_gradient import ExplodingGradient
from .input_not_normalized import InputNotNormalized
from .loss_not_decreasing import LossNotDecreasing
from .loss_spike import LossSpike
from .non_finite import NonFinite
from .overfit import Overfit
from .overtraining import Overtraining
from .poor_initialization import PoorInitialization
from .rule import CatalogueRule, Rule
from .saturated_activation import SaturatedActivation
from .stalled import Stalled
from .tensor_variance import TensorVariance
from .unchanged_parameter import UnchangedParameter
from .update_ratio import UpdateRatio
from .vanishing_gradient import VanishingGradient
from .watch import WatchMetric, WatchStatistic
from .zero_learning_rate import ZeroLearningRate

CATALOGUE: Mapping[str, type[CatalogueRule[Any]]] = {
    "non_finite": NonFinite,
    "exploding_gradient": ExplodingGradient,
    "exploding_activation": ExplodingActivation,
    "vanishing_gradient": VanishingGradient,
    "dead_units": DeadUnits,
    "saturated_activation": SaturatedActivation,
    "poor_initialization": PoorInitialization,
    "all_zero": AllZero,
    "unchanged_parameter": UnchangedParameter,
    "zero_learning_rate": ZeroLearningRate,
    "update_ratio": UpdateRatio,
    "loss_not_decreasing": LossNotDecreasing,
    "loss_spike": LossSpike,
    "overfit": Overfit,
    "overtraining": Overtraining,
    "tensor_variance": TensorVariance,
    "class_imbalance": ClassImbalance,
    "double_softmax": DoubleSoftmax,
    "stalled": Stalled,
    "input_not_normalized": InputNotNormalized,
}


def make_rule(spec: RuleBase) -> Rule:
    """Build a rule.

    Args:
        spec: Its entry in the configuration.

    Raises:
        ConfigError: A custom rule cannot be imported or built, or lacks the method `update`.
    """
    if isinstance(spec, CustomRule):
        return _custom_rule(spec)
    if isinstance(spec, WatchRule):
        return WatchMetric(spec) if spec.is_of_metrics else WatchStatistic(spec)
    return CATALOGUE[str(getattr(spec, "rule"))](spec)  # noqa: B009 - the field of every rule of the catalogue


def _custom_rule(spec: CustomRule) -> Rule:
    where = f"rules.{spec.name}"
    function = spec.target.function
    made = build(spec.target, where) if function is None else function(**(spec.target.model_extra or {}))
    if not callable(getattr(made, "update", None)):
        message = "a rule requires the method update(rows); see instrument.Rule"
        raise ConfigError(Problem(where, message, given=type(made).__name__))
    return made  # type: ignore[no-any-return]
