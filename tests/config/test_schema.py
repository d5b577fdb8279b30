"""The JSON Schema that editors use to validate experiment files."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import jsonschema
import pytest
import yaml

from instrument.config.rules import RULES, RuleBase
from instrument.config.schema import experiment_schema, render

REPOSITORY = Path(__file__).parents[2]
CONF = REPOSITORY / "conf"
SCHEMA = json.loads((CONF / "schema.json").read_text())
HOOK = {"layers": "**", "kind": "forward", "action": "record"}


def validation_errors(experiment: Any) -> list[str]:
    return [error.message for error in jsonschema.Draft202012Validator(SCHEMA).iter_errors(experiment)]


def test_schema_file_is_up_to_date() -> None:
    assert (CONF / "schema.json").read_text() == render(), "run: python -m instrument.config.schema"


def test_schema_command_writes_the_file(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (workdir / "conf").mkdir()
    monkeypatch.delitem(sys.modules, "instrument.config.schema")
    runpy.run_module("instrument.config.schema", run_name="__main__")
    assert (workdir / "conf" / "schema.json").read_text() == (CONF / "schema.json").read_text()


@pytest.mark.slow
def test_schema_is_a_valid_json_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.spread(6)
@pytest.mark.parametrize("file", sorted((CONF / "exp").glob("*.yaml")), ids=lambda file: file.stem)
def test_every_experiment_is_valid_and_refers_to_the_schema(file: Path) -> None:
    text = file.read_text()
    assert validation_errors(yaml.safe_load(text)) == []
    (comment,) = [line for line in text.splitlines() if "yaml-language-server" in line]
    assert (file.parent / comment.partition("$schema=")[2]).resolve() == CONF / "schema.json"


@pytest.mark.spread(1)
@pytest.mark.parametrize("section", ["hooks", "apply"])
def test_every_hooks_and_apply_option_is_valid(section: str) -> None:
    files = sorted((CONF / section).glob("*.yaml"))
    assert files
    assert [validation_errors({section: yaml.safe_load(file.read_text())}) for file in files] == [[]] * len(files)


def test_rules_of_packages_are_in_the_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    class NonFiniteRule(RuleBase):
        """The name of the class is that of another one."""

        rule: Literal["mine", "other"] = "mine"

    for name in ("mine", "other"):
        monkeypatch.setitem(RULES._entries, name, SimpleNamespace(fields=NonFiniteRule))
    validator = jsonschema.Draft202012Validator(experiment_schema())
    assert validator.is_valid(
        {"rules": {"mine": {}, "other": {"hook": "a"}, "non_finite": {}, "third": {"rule": "mine"}}}
    )
    assert not validator.is_valid({"rules": {"third": {}}})


@pytest.mark.parametrize(
    "experiment",
    [
        {},
        {"hooks": {"a": HOOK, "gone": None}},
        {"hooks": [HOOK, {**HOOK, "name": "b"}]},
        {"hooks": {"a": {**HOOK, "layers": ["a", "b.*"], "types": "Linear", "exclude": ["c"]}}},
        {"hooks": {"a": {**HOOK, "stats": ["mean"], "steps": [0, 3]}}},
        {"hooks": {"a": {**HOOK, "stats": "mean"}}},
        {"hooks": {"a": {**HOOK, "units": 3, "heads": {"of": 4, "take": [1, 2]}, "samples": [0]}}},
        {"hooks": {"a": {**HOOK, "samples": 3, "tensors": True}}},
        {"hooks": {"a": {**HOOK, "action": "modify", "fn": {"_target_": "mine.shift", "by": 2}}}},
        {"hooks": {"a": {"types": ["ReLU"], "kind": "forward", "action": "record"}}},
        {"apply": {"a": {"types": ["Linear"], "action": "init", "fn": "kaiming_normal_", "nonlinearity": "relu"}}},
        {"rules": {"dead_units": {"above": 0.9}, "reference": {"from": "runs/healthy"}, "mine": {"rule": "all_zero"}}},
        {
            "rules": {
                "reference": {"watch": "a", "stat": "l2", "above": 1},
                "all_zero": {"rule": "non_finite"},
                "gone": None,
            }
        },
        {"rules": [{"name": "dead_units", "above": 0.9}, {"rule": "all_zero"}, {"_target_": "mine.Rule", "limit": 3}]},
        {"train": {"steps": 3}, "data": {"slice": {"stop": 5}}, "model": {"sizes": [1, 2]}, "scheduler": None},
        {"defaults": [{"override /model": "mlp"}, "_self_"], "hydra": {"sweeper": {}}},
    ],
)
def test_valid_config_is_accepted(experiment: Any) -> None:
    assert validation_errors(experiment) == []


@pytest.mark.parametrize(
    "experiment",
    [
        {"hook": {}},
        {"hooks": 3},
        {"hooks": {"a": {**HOOK, "kind": "foward"}}},
        {"hooks": {"a": {**HOOK, "action": "look"}}},
        {"hooks": {"a": {**HOOK, "evry": 2}}},
        {"hooks": {"a": {**HOOK, "every": 0}}},
        {"hooks": {"a": {**HOOK, "heads": {"take": [1]}}}},
        {"hooks": {"a": {**HOOK, "action": "clip", "norm": -1}}},
        {"hooks": {"a": {**HOOK, "action": "modify", "fn": "nose"}}},
        {"hooks": {"a": {**HOOK, "stats": ["avg"]}}},
        {"hooks": {"a": {"kind": "forward", "action": "record"}}},
        {"apply": {"a": {"layers": "**", "action": "init", "fn": "kaiming"}}},
        {"apply": {"a": {"layers": "**", "action": "melt"}}},
        {"rules": {"dead_unit": {"above": 0.9}}},
        {"rules": {"mine": {}}},
        {"rules": {"reference": {}}},
        {"rules": {"update_ratio": {"from": "runs/healthy"}}},
        {"rules": [{"above": 0.9}]},
        {"train": {"step": 3}},
        {"train": {"steps": 0}},
        {"data": {"slice": {"split": ""}}},
        {"device": "gpu"},
        {"name": "a/b"},
    ],
)
def test_invalid_config_is_refused(experiment: Any) -> None:
    assert validation_errors(experiment) != []
