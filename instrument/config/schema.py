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
from .modify import FUNCTIONS, FunctionSpec
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
    for rule in RULES.values():  # an entry with the name of a rule needs no `rule`
        schema["$defs"][rule.fields.__name__]["required"].remove("rule")
    for section in ("hooks", "apply", "rules"):
        entry = schema["properties"][section]["additionalProperties"]
        schema["properties"][section] = {
            "description": schema["properties"][section]["description"],
            "anyOf": [
                {"type": "object", "additionalProperties": {"anyOf": [entry, {"type": "null"}]}},
                {"type": "array", "items": entry},
            ],
        }
    return schema


def render() -> str:
    """Return the content of the schema file."""
    return json.dumps(experiment_schema(), indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    Path("conf/schema.json").write_text(render())
