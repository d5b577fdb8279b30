"""Names that two configuration files define: an error, unless a file lists the one that it changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hydra.types import RunMode
from omegaconf import OmegaConf

from instrument import ConfigError
from instrument.config.hydra_internals import config_loader

RECORD = "{layers: layers.0, kind: forward, action: record}"
FILES = {
    "exp/own": f"hooks: {{activations: {RECORD}}}",
    "exp/other": f"hooks: {{activations: {RECORD}, more: {RECORD}}}",
    "exp/lists": "defaults: [{override /hooks: activations}, _self_]\nhooks: {activations: {every: 1}}",
    "exp/child": "defaults: [lists, _self_]\nhooks: {activations: {every: 2}}",
    "exp/kaiming": "apply: {kaiming: {types: [Linear], action: freeze}}",
    "exp/strict": "rules: {dead_units: {above: 0.3}, mine: {rule: non_finite, then: stop}}",
    "hooks/mine": f"activations: {RECORD}",
    "rules/mine": "mine: {rule: overtraining}",
}


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in FILES.items():
        file = tmp_path / "conf" / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"# @package _global_\n{text}\n" if name.startswith("exp/") else f"{text}\n")
    monkeypatch.chdir(tmp_path)


def composed(*overrides: str) -> dict[str, Any]:
    config = config_loader().load_configuration("config", [*overrides], RunMode.RUN)
    plain: Any = OmegaConf.to_container(config)
    return dict(plain)


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("overrides", "where", "files"),
    [
        (["+exp=own", "hooks=activations"], "hooks.activations", ["hooks/activations.yaml", "exp/own.yaml"]),
        (["+exp=own", "hooks=mine"], "hooks.activations", ["hooks/mine.yaml", "exp/own.yaml"]),
        (["+exp=[own,other]"], "hooks.activations", ["exp/own.yaml", "exp/other.yaml"]),
        (["hooks=[activations,mine]"], "hooks.activations", ["hooks/activations.yaml", "hooks/mine.yaml"]),
        (["+exp=kaiming", "apply=kaiming"], "apply.kaiming", ["apply/kaiming.yaml", "exp/kaiming.yaml"]),
        (["+exp=strict", "rules=mine"], "rules.mine", ["rules/mine.yaml", "exp/strict.yaml"]),
    ],
)
def test_name_in_two_files_is_refused(overrides: list[str], where: str, files: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        composed(*overrides)
    (problem,) = caught.value.problems
    assert problem.where == where
    assert all(file in problem.message for file in files)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("overrides", "every"),
    [
        (["+exp=lists"], 1),
        (["+exp=child"], 2),
        (["hooks=activations"], 10),
        (["hooks=activations", "hooks.activations.every=5"], 5),
        (["+exp=lists", "hooks.activations.every=5"], 5),
    ],
)
def test_listed_file_and_command_line_change_fields(overrides: list[str], every: int) -> None:
    hook = {"layers": "**", "kind": "forward", "action": "record", "every": every}
    assert composed(*overrides)["hooks"] == {"activations": hook}


@pytest.mark.slow
def test_experiment_changes_the_default_rules_and_adds_hooks() -> None:
    rules = composed("+exp=strict")["rules"]
    assert rules["dead_units"] == {"rule": "dead_units", "optional": True, "above": 0.3}
    assert rules["mine"] == {"rule": "non_finite", "then": "stop"}
    assert [*composed("+exp=own", "hooks=dead_relu")["hooks"]] == ["dead_relu", "activations"]
