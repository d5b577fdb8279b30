"""The JSON Schema of an experiment file, for completion and validation in an editor.

`python -m instrument.config.schema` writes it to `conf/schema.json`. YAML files name it in a comment for the YAML
language server: `# yaml-language-server: $schema=../schema.json`.
"""

from __future__ import annotations

import json
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

from pydantic import create_model

from .base import ACTIONS
from .experiment import RunConfig
from .hook_specs import FUNCTIONS, FunctionSpec
from .rules import RULES, CustomRule, WatchRule

HYDRA_KEYS: dict[str, Any] = {
    "defaults": {"type": "array", "description": "Hydra's defaults list: the files that are composed with this one."},
    "hydra": {"type": "object", "description": "The settings of Hydra."},
}


def experiment_schema() -> dict[str, Any]:
    """Return the schema of a partial configuration.

    No root key is required, and no key of a section that a config group may set.
    """
    actions: set[Any] = {*ACTIONS.values(), *FUNCTIONS.values(), FunctionSpec} - {ACTIONS["modify"]}
    models: list[Any] = [*(rule.fields for _, rule in sorted(RULES.items())), WatchRule, CustomRule]
    unions: dict[str, Any] = {
        "hooks": reduce(or_, sorted(actions, key=lambda spec: spec.__name__)),
        "rules": reduce(or_, models),
    }
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
        schema["properties"][section] = {
            "description": schema["properties"][section]["description"],
            "anyOf": [
                {
                    "type": "object",
                    "properties": {name: {"anyOf": [rule, entry, null]} for name, rule in by_name.items()},
                    "additionalProperties": {"anyOf": [entry, null]},
                },
                {"type": "array", "items": item},
            ],
        }
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
