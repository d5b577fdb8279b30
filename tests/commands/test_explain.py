"""`instrument explain KEY`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from instrument.commands import explain
from instrument.config.parse import parse_config
from instrument.config.rules import RULES
from instrument.config.spec_file import hook_sets
from instrument.tables.kinds import KINDS
from instrument.tables.schemas import TABLES
from instrument.tables.statistics import STATISTICS

TARGET = {"_target_": "mymodule.Any"}
CONFIG: dict[str, Any] = {
    "name": "mine",
    "model": TARGET,
    "task": TARGET,
    "optimizer": TARGET,
    "data": {"dataset": TARGET},
    "train": {},
}


@pytest.fixture(scope="module", autouse=True)
def known() -> Iterator[list[explain.Term]]:
    """Everything that can be explained. It is found once, which takes a second."""
    found = list(explain.entries())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(explain, "entries", lambda: iter(found))
        yield found


def explained(capsys: pytest.CaptureFixture[str], *keys: str) -> str:
    """Return what the verb prints."""
    assert explain.main(keys) == 0
    return capsys.readouterr().out


def test_each_example_is_a_valid_configuration(known: list[explain.Term]) -> None:
    examples = {entry.example: entry for entry in known if entry.what.split()[0] not in ("column", "table", "error,")}
    assert "" not in examples
    for example in examples:
        content = yaml.safe_load(example)
        data = {**CONFIG["data"], **content.get("data", {})}
        train = {**({} if "epochs" in content.get("train", {}) else {"steps": 3}), **content.get("train", {})}
        parse_config({**CONFIG, **content, "data": data, "train": train})


def test_each_example_has_the_key_that_it_explains(known: list[explain.Term]) -> None:
    fields = [entry for entry in known if entry.what.startswith(("configuration key", "field of"))]
    assert len(fields) > 100
    for entry in fields:
        name = entry.key.rpartition(".")[2]
        assert f"{name}:" in entry.example, entry
        assert f"{name}: null" not in entry.example, entry
        assert f"{name}: []" not in entry.example, entry


def test_everything_that_can_be_registered_is_explained(known: list[explain.Term]) -> None:
    of = {what: {entry.key for entry in known if entry.what == what} for what in {entry.what for entry in known}}
    assert of["statistic"] == {*STATISTICS}
    assert of["rule"] == {*RULES}
    assert of["kind of hooks"] == {*KINDS}
    assert {entry.key for entry in known if entry.what == f"hook set, hooks={entry.key}"} == {*hook_sets()}
    assert of["table"] == {*TABLES}
    assert of["column of effects"] == {f"effects.{column.name}" for column in TABLES["effects"].columns}
    assert of["error, exit code 2"] == {"ConfigError"}
    assert {"data.slice.per_class", "train.checkpoint.every", "train.parallel.plan"} <= of["configuration key"]


@pytest.mark.parametrize("name", ["hooks.mine.every", "hooks.NAME.every", "every"])
def test_field_of_a_hook_of_any_name(capsys: pytest.CaptureFixture[str], name: str) -> None:
    text = explained(capsys, name)
    assert "hooks.NAME.every  (field of every hook)\n  meaning  Run at every N-th step" in text
    assert "  type     integer\n  default  1\n" in text


def test_name_with_several_meanings(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(explained(capsys, "l2", "--json"))
    assert [(each["key"], each["what"]) for each in found] == [
        ("l2", "function of action modify"),
        ("l2", "statistic"),
        ("stats.l2", "column of stats"),
        ("operators.l2", "column of operators"),
    ]
    assert found[1]["meaning"] == "sqrt(sum(x^2))"
    assert yaml.safe_load(found[1]["example"])["hooks"]["mine"]["stats"] == ["l2"]


def test_tables_have_an_example_that_reads_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert explained(capsys, "run.stats").endswith("example  instrument.load(RUN).stats\n")
    assert explained(capsys, "run.tensors").endswith("example  instrument.load(RUN).tensors()\n")


def test_python_names_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    found = {key: json.loads(explained(capsys, key, "--json")) for key in ("findings", "sweep.runs", "probe.end_step")}
    assert [each["key"] for (each,) in found.values()] == ["run.findings", "run.runs", "probe.end_step"]
    assert "One row per finding. The columns are `what`, `where`, `step`" in found["findings"][0]["meaning"]
    assert "The metrics, such as `loss`, are those of the last evaluation." in found["sweep.runs"][0]["meaning"]
    assert found["probe.end_step"][0]["type"].startswith("(self, *, loss: ")
    text = explained(capsys, "attach")
    assert "  meaning  Attach hooks to a model for the duration of a `with` block. All hooks are removed" in text
    assert "model: 'nn.Module', specs: 'Specs', *, optimizer" in text
    for of in ("run", "sweep", "probe"):
        assert explained(capsys, f"{of}.stats") == f"{explain.explain('stats', explain.entries())[-1]}\n"


def test_without_a_key_all_names_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    lines = explained(capsys).splitlines()
    assert f"action of hooks: {', '.join(('record', 'print', 'call', 'clip', 'scale'))}" in lines
    assert not any("NAME" in line for line in lines)


def test_field_of_a_hook_is_explained_without_a_name(known: list[explain.Term]) -> None:
    assert explain.explain("hooks.every", known) == explain.explain("hooks.mine.every", known)


def test_unknown_key_is_an_error_with_similar_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert explain.main(["trian.steps"]) == 2
    error = capsys.readouterr().err
    assert "KEY: nothing has this name\n    given    trian.steps\n    similar  train.steps" in error
