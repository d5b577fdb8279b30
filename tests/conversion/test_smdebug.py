"""Conversion of SageMaker Debugger: the examples of its documentation, with other names and fewer steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from converted_runs import Converter, record

BLOCKS = range(3)
RELUS = tuple(f"layers.{i}.mlp.relu" for i in BLOCKS)


@pytest.fixture
def convert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Converter:
    return Converter(tmp_path, "smdebug", capsys)


def hook(collections: dict[str, Any], **parameters: Any) -> dict[str, Any]:
    named = [{"CollectionName": name, "CollectionParameters": given} for name, given in collections.items()]
    return {
        "S3OutputPath": "s3://bucket/prefix",
        "LocalPath": "/tmp/test",
        "HookParameters": parameters,
        "CollectionConfigurations": named,
    }


def job(rules: list[dict[str, Any]], collections: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a training job of the API. Each rule has its name and its parameters."""
    return {
        "TrainingJobName": "mine",
        "DebugHookConfig": hook(collections or {}),
        "DebugRuleConfigurations": [
            {
                "RuleConfigurationName": f"rule{i}",
                "RuleEvaluatorImage": "image",
                "RuleParameters": {"rule_to_invoke": rule.pop("name"), **rule},
            }
            for i, rule in enumerate(rules)
        ],
        "ProfilerConfig": {"ProfilingIntervalInMilliseconds": 500},
    }


def test_built_in_collections_are_recorded(convert: Converter) -> None:
    result = convert(
        hook(
            {"weights": {}, "biases": {}, "gradients": None, "losses": None},
            save_interval="2",
            reductions="max, l2, variance",
        )
    )
    fired = record(result.file)
    weights = [name for name in fired["gradients"] if name.endswith(".weight")]
    assert fired["weights"] == tuple(weights)
    assert fired["biases"] == tuple(name.replace(".weight", ".bias") for name in weights)
    assert len(fired["gradients"]) == 2 * len(weights) == 26
    assert {(spec["every"], *spec["stats"]) for spec in result.hooks.values()} == {(2, "max", "l2", "std")}
    assert result.has_note("losses", "metrics")
    assert result.has_note("reductions", "square of std")
    assert result.has_note("S3OutputPath", "sink.remote")


def test_custom_collections_have_their_own_schedule_and_reductions(convert: Converter) -> None:
    relu = {"include_regex": "relu*", "save_steps": "1, 2", "reductions": "min,abs_max,median"}
    result = convert(
        hook({"activations": relu, "default": None}, save_all=False, save_interval=2, start_step=1, end_step="3")
    )
    base = {"layers": "re:.*relu*.*", "kind": "forward", "action": "record"}
    assert result.hooks == {
        "activations_outputs": {**base, "every": 2, "start": 2, "stop": 3, "stats": ["min", "abs_max"]},
        "activations_outputs_2": {**base, "steps": [1], "stats": ["min", "abs_max"]},
        "activations_inputs": {**base, "role": "input", "every": 2, "start": 2, "stop": 3, "stats": ["min", "abs_max"]},
        "activations_inputs_2": {**base, "role": "input", "steps": [1], "stats": ["min", "abs_max"]},
    }
    assert record(result.file) == dict.fromkeys(result.hooks, RELUS)
    assert result.has_note("reductions", "'median'", "quantiles")
    assert result.has_note("default", "without include_regex")
    assert result.has_note("include_regex", "parameters of these layers")


def test_full_tensors_are_recorded_without_reductions(convert: Converter) -> None:
    result = convert(hook({}, save_all="True", save_steps="0,1", export_tensorboard="true"))
    fired = record(result.file, steps=1)
    assert [*fired] == ["all_outputs", "all_inputs", "all_parameters", "all_gradients"]
    assert "" in fired["all_outputs"]
    assert all(spec["tensors"] and spec["histogram"] and spec["steps"] == [0, 1] for spec in result.hooks.values())
    assert result.content["sink"] == {"tensorboard": True}
    assert result.has_note("save_steps", "500")


@pytest.mark.parametrize(
    ("regex", "hooks"),
    [
        (".*relu_output", {"_outputs": ("re:.*relu.*", "forward", None)}),
        (".*tanh_input_0", {"_inputs": ("re:.*tanh.*", "forward", "input")}),
        ("^gradient/Net_fc1.weight", {"_gradients": ("re:.*fc1.*", "parameter_grad", None)}),
        ("^gradient", {"_gradients": ("**", "parameter_grad", None)}),
        ("^(?!gradient).*weight", {"_parameters": ("**", "step_pre", "param")}),
        (
            "fc1_output|fc2_input",
            {"_outputs": ("re:.*fc1.*", "forward", None), "_2_inputs": ("re:.*fc2.*", "forward", "input")},
        ),
        (
            "relu|tanh",
            {
                "_outputs": ("re:.*(?:relu|tanh).*", "forward", None),
                "_inputs": ("re:.*(?:relu|tanh).*", "forward", "input"),
            },
        ),
    ],
)
def test_regular_expressions_on_tensor_names(
    convert: Converter, regex: str, hooks: dict[str, tuple[str, str, str | None]]
) -> None:
    result = convert(hook({"mine": {"include_regex": regex, "save_interval": "1"}}))
    found = {name: (spec["layers"], spec["kind"], spec.get("role")) for name, spec in result.hooks.items()}
    assert found == {f"mine{suffix}": spec for suffix, spec in hooks.items()}
    assert record(result.file, steps=1).keys() == found.keys()


def test_regex_of_the_hook_is_the_default_collection(convert: Converter) -> None:
    result = convert(
        hook({"default": {"reductions": "mean"}}, include_regex=".*tanh_output,.*relu_output", save_interval=1)
    )
    assert record(result.file, steps=1) == {"default_outputs": ("tanh",), "default_outputs_2": RELUS}
    assert {tuple(spec["stats"]) for spec in result.hooks.values()} == {("mean",)}
    result = convert(hook({}, include_regex=".*tanh_output", save_interval=1))
    assert [*result.hooks] == ["default_outputs"]


def test_modes_become_phases(convert: Converter) -> None:
    given = {
        "include_regex": "head_output",
        "train.save_interval": 3,
        "eval.save_interval": 4,
        "predict.save_interval": 1,
    }
    result = convert(hook({"heads": given, "gradients": {"eval.save_interval": 2}}, save_interval=2))
    assert result.hooks["heads_outputs"]["every"] == 3
    assert result.hooks["heads_outputs_eval"]["phase"] == "eval"
    assert result.hooks["gradients"]["every"] == 2
    assert "gradients_eval" not in result.hooks
    assert result.has_note("gradients", "no counterpart in evaluations")
    assert result.has_note("heads.predict", "no counterpart")


def test_disabled_and_unknown_collections_are_named(convert: Converter) -> None:
    result = convert(hook({"weights": {"end_step": 0}, "feature_importance": {}}, include_workers="one", dry_run=True))
    assert result.hooks == {}
    assert result.has_note("weights", "disabled")
    assert result.has_note("feature_importance", "no counterpart")
    assert result.has_note("include_workers", "rank")
    assert result.has_note("dry_run", "plan=true")


def test_rules_read_the_hooks_of_their_collections(convert: Converter) -> None:
    rules: list[dict[str, Any]] = [
        {"name": "VanishingGradient", "threshold": "20.0"},
        {"name": "ExplodingTensor", "collection_names": "gradients,losses", "only_nan": "True"},
        {"name": "AllZero", "collection_names": "gradients", "threshold": "90"},
        {"name": "DeadRelu", "tensor_regex": ".*relu_output", "threshold_layer": "40", "threshold_inactivity": "2"},
    ]
    result = convert(job(rules, {"gradients": {"save_interval": "1", "reductions": "max"}, "losses": {}}))
    assert result.rules == {
        "rule0": {"rule": "vanishing_gradient", "for": 1, "below": 20.0, "hook": ["gradients"]},
        "rule1": {"rule": "non_finite", "hook": ["gradients"]},
        "rule2": {"watch": ["gradients"], "stat": "zero_fraction", "above": 0.9},
        "rule3": {"rule": "dead_units", "for": 1, "above": 0.4, "hook": ["for_dead_units_outputs"]},
    }
    assert result.hooks["gradients"]["stats"] == ["max", "rms", "zero_fraction"]
    assert result.hooks["for_dead_units_outputs"]["stats"] == ["dead_fraction"]
    assert result.hooks["for_dead_units_outputs"]["every"] == 500
    assert record(result.file, steps=1)["for_dead_units_outputs"] == RELUS
    assert result.has_note("only_nan", "no counterpart")
    assert result.has_note("threshold_inactivity", "no counterpart")
    assert result.has_note("ProfilerConfig", "no counterpart")
    assert result.has_note("TrainingJobName", "SageMaker job")


def test_every_rule_with_a_counterpart_records_what_it_reads(convert: Converter) -> None:
    names = (
        *("VanishingGradient", "ExplodingTensor", "PoorWeightInitialization", "SaturatedActivation", "DeadRelu"),
        *("WeightUpdateRatio", "AllZero", "UnchangedTensor", "TensorVariance", "LossNotDecreasing", "Overfit"),
        *("Overtraining", "ClassImbalance", "StalledTrainingRule", "CheckInputImages"),
    )
    result = convert(job([{"name": name} for name in names]))
    assert [spec["rule"] for spec in result.rules.values()] == [
        *("vanishing_gradient", "non_finite", "poor_initialization", "saturated_activation", "dead_units"),
        *("update_ratio", "all_zero", "unchanged_parameter", "tensor_variance", "loss_not_decreasing", "overfit"),
        *("overtraining", "class_imbalance", "stalled", "input_not_normalized"),
    ]
    assert result.content["data"] == {"ids": "all"}
    fired = record(result.file, steps=1)
    read = {name for spec in result.rules.values() for name in spec.get("hook", ())}
    assert read == fired.keys() == result.hooks.keys()
    assert fired["for_dead_units"] == RELUS
    assert result.hooks["for_poor_initialization"]["stats"] == [
        "mean",
        "std",
        "zero_fraction",
    ]  # one hook serves three rules


def test_parameters_of_rules_are_converted(convert: Converter) -> None:
    rules: list[dict[str, Any]] = [
        {"name": "LossNotDecreasing", "num_steps": "10", "diff_percent": "0.1", "use_losses_collection": "True"},
        {"name": "PoorWeightInitialization", "threshold": "100", "patience": 5},
        {"name": "TensorVariance", "collection_names": "weights", "max_threshold": "4", "min_threshold": "0.01"},
        {"name": "TensorVariance", "max_threshold": "10"},
        {
            "name": "StalledTrainingRule",
            "threshold": "60",
            "stop_training_on_fire": "True",
            "training_job_name_prefix": "p",
        },
        {
            "name": "WeightUpdateRatio",
            "large_threshold": 5,
            "action_json": json.dumps([{"name": "stoptraining"}, {"name": "sms"}]),
        },
        {"name": "DeadRelu", "threshold_layer": 100},
    ]
    result = convert(job(rules, {"weights": {}}))
    assert {name: {**spec, "hook": None} for name, spec in result.rules.items()} == {
        "rule0": {"rule": "loss_not_decreasing", "by": pytest.approx(0.001), "window": 20, "hook": None},
        "rule1": {"rule": "poor_initialization", "factor": 10.0, "hook": None},
        "rule2": {"watch": ["weights"], "stat": "std", "above": 2.0, "hook": None},
        "rule2_2": {"watch": ["weights"], "stat": "std", "below": 0.1, "hook": None},
        "rule3": {"rule": "tensor_variance", "for": 1, "above": 10.0, "hook": None},
        "rule4": {"rule": "stalled", "above": 60.0, "then": ["warn", "stop"], "hook": None},
        "rule5": {"rule": "update_ratio", "for": 1, "above": 5.0, "then": ["warn", "stop"], "hook": None},
        "rule6": {"rule": "dead_units", "for": 1, "hook": None},
    }
    assert result.has_note("patience", "no counterpart")
    assert result.has_note("action_json", "'sms'")
    assert result.has_note("threshold_layer of 100")


def test_rules_without_counterpart_are_named(convert: Converter) -> None:
    custom = {"name": "ImproperActivation", "source_s3_uri": "s3://bucket/custom_rules.py", "collection_names": "a"}
    result = convert(job([{"name": "TreeDepth"}, {"name": "SimilarAcrossRuns", "other_trial": "b"}, custom]))
    assert "rules" not in result.content
    assert result.has_note("TreeDepth", "XGBoost")
    assert result.has_note("SimilarAcrossRuns", "instrument.load")
    assert result.has_note("ImproperActivation", "_target_")


def test_base_configuration_of_a_rule(convert: Converter) -> None:
    rule = {"RuleConfigurationName": "WeightUpdateRatio", "RuleParameters": {"rule_to_invoke": "WeightUpdateRatio"}}
    weights = {"CollectionName": "weights", "CollectionParameters": {"save_interval": "500"}}
    result = convert({"DebugRuleConfiguration": rule, "CollectionConfigurations": [weights]})
    assert [*record(result.file, steps=1)] == ["weights", "for_update_ratio"]
