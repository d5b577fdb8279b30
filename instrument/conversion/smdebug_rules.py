"""Conversion of the rules of SageMaker Debugger.

Parameters: https://docs.aws.amazon.com/sagemaker/latest/dg/debugger-built-in-rules.html
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import ConfigError, Problem
from ..spec.statistics import DEFAULT
from .experiment import Experiment
from .smdebug_collections import GRADIENTS, RELU, hooks_for_regex
from .source import Fields, reading

OUTPUTS = {"layers": "**", "kind": "forward"}
PERCENT = 0.01
ALMOST_ALL = 0.999999  # no fraction exceeds 1


@dataclass(frozen=True)
class Counterpart:
    """The rule of this package that corresponds to a built-in rule.

    Attributes:
        rule: Its name in the catalogue.
        numbers: The field for each parameter that is a number, and the factor between them.
        counts: The field for each parameter that is a whole number.
        fields: Fields that every converted rule has.
        hook: The hook that records what it reads; None if it reads no tensors.
        statistics: The statistics that it reads.
        difference: How its condition differs from that of the source.
    """

    rule: str
    numbers: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    counts: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    hook: Mapping[str, Any] | None = None
    statistics: Sequence[str] = ()
    difference: str = ""


EVALUATIONS = "set train.eval_every: the rule compares evaluations"
COUNTERPARTS = {
    "VanishingGradient": Counterpart(
        "vanishing_gradient",
        {"threshold": ("below", 1.0)},
        fields={"for": 1},
        hook=GRADIENTS,
        statistics=("rms",),
        difference="compares the rms of the gradient, not the mean of its magnitudes",
    ),
    "ExplodingTensor": Counterpart("non_finite", hook=OUTPUTS, statistics=("nan_count", "inf_count")),
    "PoorWeightInitialization": Counterpart(
        "poor_initialization",
        hook=OUTPUTS,
        statistics=("mean", "std"),
        difference="compares the std of outputs at the first recorded step, and neither gradients nor the loss",
    ),
    "SaturatedActivation": Counterpart(
        "saturated_activation",
        {"threshold_layer": ("above", PERCENT)},
        fields={"for": 1},
        hook={"types": ["Tanh", "Sigmoid"], "kind": "forward"},
        statistics=("saturated_fraction",),
        difference="an output is saturated within 1.5% of its range from an end",
    ),
    "DeadRelu": Counterpart(
        "dead_units",
        {"threshold_layer": ("above", PERCENT)},
        fields={"for": 1},
        hook={"types": RELU, "kind": "forward"},
        statistics=("dead_fraction",),
        difference="a unit is dead if it is zero for the whole batch",
    ),
    "WeightUpdateRatio": Counterpart(
        "update_ratio",
        {"large_threshold": ("above", 1.0), "small_threshold": ("below", 1.0)},
        fields={"for": 1},
        hook={"layers": "**", "kind": "step_post", "role": "update"},
        statistics=("l2", "update_ratio"),
        difference="compares the update of one step with the parameter",
    ),
    "AllZero": Counterpart("all_zero", fields={"for": 1}, hook=OUTPUTS, statistics=("zero_fraction",)),
    "UnchangedTensor": Counterpart(
        "unchanged_parameter",
        counts={"num_steps": "for"},
        hook={"layers": "**", "kind": "step_post", "role": "param"},
        statistics=("mean", "l2"),
        difference="compares the mean and the norm of parameters at recorded steps",
    ),
    "TensorVariance": Counterpart(
        "tensor_variance",
        {"max_threshold": ("above", 1.0), "min_threshold": ("below", 1.0)},
        fields={"for": 1},
        hook=OUTPUTS,
        statistics=("mean", "std"),
    ),
    "LossNotDecreasing": Counterpart(
        "loss_not_decreasing",
        {"diff_percent": ("by", PERCENT)},
        difference="compares the mean losses of two halves of a window, not two losses",
    ),
    "Overfit": Counterpart(
        "overfit",
        {"ratio_threshold": ("above", 1.0)},
        {"patience": "for"},
        fields={"optional": True},
        difference=EVALUATIONS,
    ),
    "Overtraining": Counterpart(
        "overtraining",
        {"delta": ("above", 1.0)},
        {"patience_validation": "for"},
        fields={"optional": True},
        difference=EVALUATIONS,
    ),
    "ClassImbalance": Counterpart(
        "class_imbalance",
        {"threshold_imbalance": ("above", 1.0)},
        {"samples": "after"},
        difference="counts the targets of samples, and no predictions",
    ),
    "StalledTrainingRule": Counterpart("stalled", {"threshold": ("above", 1.0)}),
    "CheckInputImages": Counterpart(
        "input_not_normalized",
        hook={"layers": "**", "kind": "forward_pre"},
        statistics=("mean", "std"),
        difference="compares the mean of the input of the first layer with its std",
    ),
}
WITHOUT_COUNTERPART = {
    "SimilarAcrossRuns": "no counterpart as a rule: load both runs with instrument.load and compare their statistics",
    "Confusion": "no counterpart: predictions and labels are not compared",
    "NLPSequenceRatio": "no counterpart: tokens of the input are not counted",
    "TreeDepth": "no counterpart: only for XGBoost",
    "FeatureImportanceOverweight": "no counterpart: only for XGBoost",
    "CreateXgboostReport": "no counterpart: only for XGBoost",
}
OF_THE_JOB = ("RuleEvaluatorImage", "InstanceType", "VolumeSizeInGB", "LocalPath", "S3OutputPath")


def convert_rules(
    rules: Iterable[tuple[str, Any]], collections: Mapping[str, list[str]], every: int, experiment: Experiment
) -> None:
    """Add rules, and the hooks that record what they read.

    Args:
        rules: The key and the content of each rule.
        collections: The names of the hooks of each collection.
        every: The interval of hooks that no collection contains.
        experiment: The experiment.

    Raises:
        ConfigError: A value is invalid.
    """
    for where, rule in rules:
        with reading(rule, where, experiment) as fields:
            for name in OF_THE_JOB:
                fields.take(name)
            with reading(fields.take("RuleParameters"), fields.key("RuleParameters"), experiment) as parameters:
                invoked = str(parameters.take("rule_to_invoke", fields.left.get("RuleConfigurationName", "")))
                name = str(fields.take("RuleConfigurationName", invoked))
                known = COUNTERPARTS.get(invoked)
                if known is None:
                    parameters.left.clear()
                    custom = (
                        "no counterpart: a custom rule; write a class with the method update, and name it with _target_"
                    )
                    experiment.note(where, f"{invoked or name}: {WITHOUT_COUNTERPART.get(invoked, custom)}")
                else:
                    _Conversion(name, invoked, known, parameters, collections, every, experiment).convert()


@dataclass
class _Conversion:
    """One rule with a counterpart."""

    name: str
    invoked: str
    known: Counterpart
    parameters: Fields
    collections: Mapping[str, list[str]]
    every: int
    experiment: Experiment

    def convert(self) -> None:
        spec: dict[str, Any] = {"rule": self.known.rule, **self.known.fields}
        for parameter, (name, factor) in self.known.numbers.items():
            if (number := self.parameters.real(parameter)) is not None:
                spec[name] = number * factor
        for parameter, name in self.known.counts.items():
            if (count := self.parameters.number(parameter)) is not None:
                spec[name] = count
        self._special(spec)
        if self.known.difference:
            self._note(self.known.difference)
        actions = self._actions()
        for spec_ in self._on_hooks(spec):
            self.experiment.add_rule(self.name, {**spec_, **({"then": actions} if actions else {})})

    def _note(self, message: str) -> None:
        where = self.parameters.where.removesuffix(".RuleParameters")
        self.experiment.note(where, f"{self.invoked} becomes {self.known.rule}: {message}")

    def _special(self, spec: dict[str, Any]) -> None:
        """Convert the parameters that are not a number with a factor."""
        take = self.parameters
        if self.invoked == "PoorWeightInitialization" and (ratio := take.real("threshold")) is not None:
            spec["factor"] = math.sqrt(ratio)  # of variances in the source
        if self.invoked == "LossNotDecreasing":
            if (steps := take.number("num_steps")) is not None:
                spec["window"] = max(4, 2 * steps)
            take.flag("use_losses_collection")
            take.texts("collection_names")
        if self.invoked == "ClassImbalance":
            self.experiment.settings["data"] = {"ids": "all"}
        if spec["rule"] in ("dead_units", "saturated_activation") and spec.get("above", 0) >= 1:
            self._note("threshold_layer of 100 cannot be exceeded, and is left out")
            del spec["above"]

    def _actions(self) -> list[str]:
        """Return the actions: to stop, if the rule has this action."""
        given = self.parameters.take("action_json", "[]")
        try:
            actions = json.loads(str(given).replace('\\"', '"'))
            names = [str(action["name"]).lower() for action in actions]
        except (ValueError, TypeError, KeyError):
            raise ConfigError(Problem(self.parameters.key("action_json"), "is not valid", given=given)) from None
        stops = self.parameters.flag("stop_training_on_fire") or "stoptraining" in names
        if stops:
            self.parameters.take("training_job_name_prefix")
        for name in names:
            if name != "stoptraining":
                message = f"no counterpart for {name!r}: set then: {{call: {{_target_: mymodule.notify}}}}"
                self.experiment.note(self.parameters.key("action_json"), message)
        return ["warn", "stop"] if stops else []

    def _on_hooks(self, spec: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the rule with the hooks that it reads; rules on a statistic for tensors that it does not read."""
        wanted = self.known.hook
        if wanted is None:
            return [spec]
        hooks, chosen = self.experiment.hooks, self._selected()
        if chosen and self.invoked in ("AllZero", "TensorVariance"):
            return self._watching(chosen, spec)
        if self.known.rule == "non_finite":  # of any tensor
            if not hooks:
                self._add_hook("", wanted)
            return [{**spec, "hook": chosen} if chosen else spec]
        named = [name for name in chosen if _same(hooks[name], wanted, *_TENSOR)]
        if chosen and not named:
            self._note("the selected tensors are not those that the rule reads")
        named = named or [name for name, hook in hooks.items() if _same(hook, wanted, *_TENSOR, "layers", "types")]
        for name in named:
            self._record(name)
        return [{**spec, "hook": named or [self._add_hook("", wanted)]}]

    def _add_hook(self, suffix: str, hook: Mapping[str, Any]) -> str:
        every = {"every": self.every} if self.every > 1 else {}
        recorded = {"action": "record", **every, "stats": [*self.known.statistics]}
        return self.experiment.add_hook(f"for_{self.known.rule}{suffix}", {**hook, **recorded})

    def _selected(self) -> list[str]:
        """Return the hooks of `collection_names` and `tensor_regex`, which are added if necessary."""
        chosen = []
        for name in self.parameters.texts("collection_names"):
            if name in self.collections:
                chosen += self.collections[name]
            else:
                self.experiment.note(
                    self.parameters.key("collection_names"), f"the collection {name!r} is not configured"
                )
        for pattern in self.parameters.texts("tensor_regex"):
            found = hooks_for_regex(pattern, self.parameters.key("tensor_regex"), self.experiment)
            chosen += [self._add_hook(suffix, hook) for suffix, hook in found.items()]
        return chosen

    def _record(self, name: str) -> None:
        """Add the statistics that the rule reads to a hook."""
        hook = self.experiment.hooks[name]
        given = hook.get("stats", ["default"])
        wanted = [each for each in self.known.statistics if each not in given]
        if "default" in given:
            wanted = [each for each in wanted if each not in DEFAULT]
        if wanted:
            hook["stats"] = [*given, *wanted]

    def _watching(self, hooks: list[str], spec: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return rules that watch a statistic of hooks."""
        for name in hooks:
            self._record(name)
        if self.invoked == "AllZero":
            share = self.parameters.real("threshold")
            share = 1.0 if share is None else share * PERCENT
            return [{"watch": hooks, "stat": "zero_fraction", "above": min(share, ALMOST_ALL)}]
        bounds = {name: math.sqrt(spec[name]) for name in ("above", "below") if name in spec}
        if not bounds:
            self._note("requires max_threshold or min_threshold for these tensors")
        return [{"watch": hooks, "stat": "std", name: bound} for name, bound in bounds.items()]


_TENSOR = ("kind", "role", "phase")


def _same(hook: Mapping[str, Any], other: Mapping[str, Any], *fields: str) -> bool:
    return all(hook.get(name) == other.get(name) for name in fields)
