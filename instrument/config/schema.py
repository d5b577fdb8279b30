"""The keys that a configuration can contain, and the JSON Schema of an experiment file, for completion and validation in an editor.

`python -m instrument.config.schema` writes it to `conf/schema.json`. YAML files name it in a comment for the YAML
language server: `# yaml-language-server: $schema=../schema.json`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, reduce
from operator import or_
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, create_model

from ..fields.field_types import Target
from . import apply
from .base import ACTIONS, HookBase
from .experiment import TRACKERS, RunConfig
from .hook_specs import FUNCTIONS, FunctionSpec
from .rules import RULES, CustomRule, WatchRule

HYDRA_KEYS: dict[str, Any] = {
    "defaults": {"type": "array", "description": "Hydra's defaults list: the files that are composed with this one."},
    "hydra": {"type": "object", "description": "The settings of Hydra."},
}


def fields_of(model: type[BaseModel]) -> list[str]:
    """Return the fields of a section or spec as they are written in YAML, for specs without `name`, which is their key."""
    return [field.alias or name for name, field in model.model_fields.items() if name != "name" or model is RunConfig]


def fields_below(path: Sequence[str]) -> tuple[str, ...]:
    """Return the fields that are allowed below a key of a run's configuration; for a spec, those of every action.

    Empty if the key is not a section or allows any argument.
    """
    if len(path) == 2 and path[0] in ("hooks", "apply", "rules"):
        return fields_of_specs(path[0])
    model = model_at(HookBase, path[2:]) if len(path) > 2 and path[0] == "hooks" else model_at(RunConfig, path)
    installed = TRACKERS if [*path] == ["sink"] else ()
    return () if model is None or issubclass(model, Target) else tuple(dict.fromkeys([*fields_of(model), *installed]))


@cache
def fields_of_specs(name: str) -> tuple[str, ...]:
    """Return the fields of all specs of `hooks`, `apply` or `rules`, for all actions."""
    if name == "rules":
        return _unique_fields([*(rule.fields for rule in RULES.values()), WatchRule, CustomRule], [])
    if name == "apply":
        arguments = [argument for names in apply.INIT_FUNCTIONS.values() for argument in names]
        return _unique_fields(apply.ACTIONS.values(), arguments)
    return _unique_fields([*ACTIONS.values(), *FUNCTIONS.values(), FunctionSpec], ["fn"])


def _unique_fields(models: Iterable[type[BaseModel]], more: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys([name for model in models for name in fields_of(model)] + [*more]))


def model_at(model: type[BaseModel], path: Sequence[str]) -> type[BaseModel] | None:
    """Return the model of a nested section or of a mapping's value, starting from another model; None if it does not exist."""
    parts = iter(path)
    for part in parts:
        field = model.model_fields.get(part)
        annotation = None if field is None else field.annotation
        if get_origin(annotation) is dict and next(parts, None) is not None:
            annotation = get_args(annotation)[1]
        inner = next(models_in(annotation), None)
        if inner is None:
            return None
        model = inner
    return model


def models_in(annotation: object) -> Iterator[type[BaseModel]]:
    """Yield the models in the type of a field, without those of a mapping's values."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) is not dict:
        for part in get_args(annotation):
            yield from models_in(part)


def experiment_schema() -> dict[str, Any]:
    """Return the schema of a partial configuration.

    No root key is required, and no key of a section that a config group may set.
    """
    actions: set[Any] = {*ACTIONS.values(), *FUNCTIONS.values(), FunctionSpec} - {ACTIONS["modify"]}
    models: list[Any] = [*(rule.fields for _, rule in sorted(RULES.items())), WatchRule, CustomRule]
    specs = sorted(actions, key=lambda spec: spec.__name__)
    unions: dict[str, Any] = {"hooks": reduce(or_, specs), "rules": reduce(or_, models)}
    mapping: Any = dict
    fields: Any = {name: (mapping[str, union], RunConfig.model_fields[name]) for name, union in unions.items()}
    config = create_model("RunConfig", __base__=RunConfig, **fields)
    schema: dict[str, Any] = config.model_json_schema(by_alias=True)
    schema["title"] = "Experiment of instrument"
    schema["properties"] |= HYDRA_KEYS
    schema.pop("required", None)
    for section in ("DataConfig", "TrainConfig", "SliceSpec", "SinkConfig", "Target"):
        schema["$defs"][section].pop("required", None)
    null = {"type": "null"}
    for section in ("hooks", "apply", "rules"):
        entry = item = schema["properties"][section]["additionalProperties"]
        by_name: dict[str, Any] = {}
        if section == "rules":
            by_name = _rules_by_name(schema["$defs"])
            item = _with_any(entry, "rule", "watch", "_target_", "name")
            schema["$defs"]["rule_entry"] = _with_any(entry, "rule", "watch", "_target_")
            entry = {"$ref": "#/$defs/rule_entry"}
        named = {name: {"anyOf": [rule, entry, null]} for name, rule in by_name.items()}
        mapping = {"type": "object", "properties": named, "additionalProperties": {"anyOf": [entry, null]}}
        about = schema["properties"][section]["description"]
        schema["properties"][section] = {"description": about, "anyOf": [mapping, {"type": "array", "items": item}]}
    return schema


def _rules_by_name(models: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of each rule, whose entry needs no `rule` if it has this name."""
    named = {}
    for key, model in models.items():
        rule = model.get("properties", {}).get("rule", {})
        for name in rule.get("enum", [rule["const"]] if "const" in rule else []):
            named[name] = {"$ref": f"#/$defs/{key}"}
            model["required"] = [field for field in model.get("required", []) if field != "rule"]
    return named


def _with_any(entry: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {"allOf": [entry, {"anyOf": [{"required": [key]} for key in keys]}]}


def render() -> str:
    return json.dumps(experiment_schema(), indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    Path("conf/schema.json").write_text(render())
