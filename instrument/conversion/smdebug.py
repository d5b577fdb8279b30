"""Conversion of configurations of SageMaker Debugger: the hook, its collections, and the rules.

The file is the hook configuration (`debughookconfig.json`), a training job of the SageMaker API with `DebugHookConfig` and
`DebugRuleConfigurations`, or a rule of the package smdebug_rulesconfig. Formats:
https://github.com/awslabs/sagemaker-debugger/blob/master/docs/api.md and
https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_DebugHookConfig.html
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError, Problem
from .experiment import Experiment
from .smdebug_collections import DEFAULT_INTERVAL, SCHEDULE, convert_collection
from .smdebug_rules import convert_rules
from .source import Fields, reading

HOOK_KEYS = ("HookParameters", "CollectionConfigurations")
RULE_KEYS = ("DebugRuleConfigurations", "DebugRulesConfigurations", "DebugRuleConfiguration")
ELSEWHERE = {
    "S3OutputPath": "set sink.remote=s3://... to send the files during the run",
    "S3Path": "set sink.remote=s3://... to send the files during the run",
    "LocalPath": "pass hydra.run.dir=FOLDER to the run, or out= to instrument.attach",
}


def convert_smdebug(source: Any) -> Experiment:
    """Convert the content of a configuration file.

    Args:
        source: The mapping in the file.

    Raises:
        ConfigError: It does not have this form, or a value is invalid.
    """
    experiment = Experiment("SageMaker Debugger")
    if not isinstance(source, Mapping) or not {*HOOK_KEYS, *RULE_KEYS, "DebugHookConfig", "LocalPath"} & {*source}:
        message = "is not a configuration of SageMaker Debugger: it has neither a hook, collections nor rules"
        raise ConfigError(Problem("FILE", message, fix="set --from to the tool that the file belongs to"))
    is_job = bool({"DebugHookConfig", *RULE_KEYS} & {*source})
    with reading(source, "", experiment) as fields:
        if is_job and "CollectionConfigurations" not in fields.left:
            hook = Fields(fields.take("DebugHookConfig"), "DebugHookConfig")
        else:
            hook = Fields({name: fields.take(name) for name in (*HOOK_KEYS, *ELSEWHERE)}, "")
        collections, every = _convert_hook(hook, experiment)
        if fields.take("TensorBoardOutputConfig"):
            _to_tensorboard(experiment)
            experiment.note("TensorBoardOutputConfig", "written to the folder 'tensorboard' of the run")
        rules = [(key, rule) for name in RULE_KEYS for key, rule in _rules(fields, name)]
        convert_rules(rules, collections, every, experiment)
        if is_job:
            fields.left = _without_profiler(fields.left, experiment)
    return experiment


def _rules(fields: Fields, name: str) -> list[tuple[str, Any]]:
    value = fields.take(name, [])
    if isinstance(value, Mapping):
        return [(name, value)]
    if not isinstance(value, list):
        raise ConfigError(Problem(name, "must be a list of rules", given=value))
    return [(f"{name}[{index}]", rule) for index, rule in enumerate(value)]


def _without_profiler(left: Mapping[str, Any], experiment: Experiment) -> dict[str, Any]:
    """Return an empty mapping, with one note for the profiler and one for the other fields of a training job."""
    profiler = [name for name in left if name.startswith("Profiler")]
    for name in profiler:
        experiment.note(name, "no counterpart: system metrics and time profiles are not recorded")
    if others := [name for name in left if name not in profiler]:
        experiment.note(
            ", ".join(others),
            "describes the SageMaker job; the model, the data and the training are in your experiment",
        )
    return {}


def _to_tensorboard(experiment: Experiment) -> None:
    experiment.settings.setdefault("sink", {})["tensorboard"] = True


def _convert_hook(hook: Fields, experiment: Experiment) -> tuple[dict[str, list[str]], int]:
    """Add the hooks of all collections.

    Returns:
        The names of the hooks of each collection, and the interval of collections that set none.
    """
    made: dict[str, list[str]] = {}
    with reading(hook.left, hook.where, experiment) as fields:
        for name, message in ELSEWHERE.items():
            if fields.take(name):
                experiment.note(fields.key(name), message)
        with reading(fields.take("HookParameters"), fields.key("HookParameters"), experiment) as parameters:
            shared = {key: parameters.take(key) for key in [*parameters.left] if _is_shared(key)}
            collections: list[tuple[str, Mapping[str, Any], str]] = []
            if parameters.flag("save_all"):
                collections.append(("all", {}, parameters.key("save_all")))
            default = {name: parameters.take(name) for name in ["include_regex"] if name in parameters.left}
            if parameters.flag("export_tensorboard") or parameters.left.get("tensorboard_dir"):
                _to_tensorboard(experiment)
            if parameters.take("tensorboard_dir"):
                experiment.note(parameters.key("tensorboard_dir"), "written to the folder 'tensorboard' of the run")
            if (workers := parameters.take("include_workers")) is not None and workers != "all":
                experiment.note(
                    parameters.key("include_workers"), "each process is recorded; select rows by the column 'rank'"
                )
            if parameters.flag("dry_run"):
                experiment.note(parameters.key("dry_run"), "pass plan=true to the run")
        for index, item in enumerate(fields.mappings("CollectionConfigurations")):
            with reading(item, fields.key(f"CollectionConfigurations[{index}]"), experiment) as collection:
                name = str(collection.take("CollectionName", ""))
                if not name:
                    raise ConfigError(Problem(collection.key("CollectionName"), "is missing"))
                given = Fields(collection.take("CollectionParameters"), collection.key("CollectionParameters"))
                is_default = name == "default"
                collections.append((name, {**(default if is_default else {}), **given.left}, fields.key(name)))
        if default and all(name != "default" for name, _, _ in collections):
            collections.append(("default", default, fields.key("HookParameters")))
    tensorboard = "sink" in experiment.settings
    for name, own, where in collections:
        with reading({**shared, **own}, where, experiment) as parameters:
            made.setdefault(name, []).extend(convert_collection(name, parameters, tensorboard, experiment))
    return made, Fields(shared, "HookParameters").number("save_interval") or DEFAULT_INTERVAL


def _is_shared(key: str) -> bool:
    """Return whether a parameter of the hook is the default of all collections."""
    return key.rpartition(".")[2] in (*SCHEDULE, "reductions", "save_raw_tensor", "save_shape")
