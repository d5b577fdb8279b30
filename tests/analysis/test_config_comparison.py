"""The part of the configuration that defines a training, for comparisons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from run_folders import CLIP, RECORD, write_run

import instrument
from instrument.analysis.config_comparison import IGNORED_KEYS, RunSetup, differing_overrides, trainings
from instrument.analysis.config_fields import canonical_json, to_yaml
from instrument.report.sweep_page import pairs

QUIET = {"layers": "b", "kind": "full_backward", "action": "scale", "factor": 0.5}


def training_of(folder: Path, config: dict[str, Any], seed: int = 0) -> RunSetup:
    (found,), left_out = trainings(instrument.load(write_run(folder, config=config, seed=seed)))
    assert left_out == {}
    return found


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"optimizer": {"lr": 1}}, {"optimizer": {"lr": 1.0}}),
        ({"optimizer": {"lr": 1, "momentum": 0}}, {"optimizer": {"momentum": 0, "lr": 1}}),
        ({"hooks": {"tame": CLIP, "seen": RECORD}}, {"hooks": {"tame": CLIP}}),
        ({"hooks": {"tame": CLIP, "quiet": None}}, {"hooks": {"tame": CLIP}}),
        ({"hooks": {"tame": CLIP}}, {"hooks": {"calm": {**CLIP, "norm": 1}}}),
        ({"hooks": [{**CLIP, "name": "tame"}]}, {"hooks": {"tame": CLIP}}),
        *[({key: "this"}, {key: "that"}) for key in IGNORED_KEYS],
    ],
)
def test_equivalent_configs_are_the_same_training(tmp_path: Path, one: dict[str, Any], other: dict[str, Any]) -> None:
    assert training_of(tmp_path / "one", one).identity == training_of(tmp_path / "other", other).identity


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"optimizer": {"lr": 0.1}}, {"optimizer": {"lr": 0.2}}),
        ({"deterministic": True}, {"deterministic": 1}),
        ({"hooks": {"tame": CLIP}}, {"hooks": {"tame": {**CLIP, "norm": 2.0}}}),
        ({"hooks": {"tame": CLIP, "quiet": QUIET}}, {"hooks": {"quiet": QUIET, "tame": CLIP}}),
        ({"train": {"steps": 1}}, {}),
    ],
)
def test_different_configs_are_different_trainings(tmp_path: Path, one: dict[str, Any], other: dict[str, Any]) -> None:
    assert training_of(tmp_path / "one", one).identity != training_of(tmp_path / "other", other).identity
    assert (
        training_of(tmp_path / "seed", one, seed=1).identity != training_of(tmp_path / "seed 2", one, seed=2).identity
    )


def test_resolved_values_replace_automatic_settings(tmp_path: Path) -> None:
    config = {"device": "auto", "data": {"dataset": {"_target_": "MNIST"}, "fallback": "digits"}}
    source = {"dataset": "MNIST", "fallback": None}
    same = [{"device": "cuda:0", "data": source}, {"device": "cuda:1", "data": source, "ranks": 1}]
    other = [
        {"device": "cpu", "data": source},
        {"device": "cuda:0", "data": {"dataset": "digits", "fallback": "MNIST is missing"}},
        {"device": "cuda:0", "data": source, "ranks": 4},
    ]
    for i, used in enumerate([*same, *other]):
        write_run(tmp_path / str(i), config=config, used=used)
    words = [training.identity for training in trainings(instrument.load(tmp_path))[0]]
    assert words[0] == words[1]
    assert len(set(words)) == 4


def test_value_at_a_path_can_be_read_and_removed(tmp_path: Path) -> None:
    config = {"optimizer": {"lr": 0.1, "momentum": 0.9}, "hooks": {"tame": CLIP, "seen": RECORD, "none": None}}
    found = training_of(tmp_path / "one", config)
    assert found.at(["optimizer", "lr"]) == 0.1
    assert found.at(["hooks", "tame", "norm"]) == 1.0
    assert found.at(["hooks", "seen", "kind"]) == "forward"
    assert found.at(["hooks", "none"]) is None
    assert found.at(["optimizer", "lr", "deeper"]) is None
    other = training_of(tmp_path / "other", {**config, "optimizer": {"lr": 0.2, "momentum": 0.9}})
    assert found.without(["optimizer", "lr"]) == other.without(["optimizer", "lr"])
    assert found.without(["optimizer"]) == other.without(["optimizer"])
    assert found.without(["optimizer", "momentum"]) != other.without(["optimizer", "momentum"])
    clipped = training_of(tmp_path / "clipped", {**config, "hooks": {"tame": {**CLIP, "norm": 3}}})
    assert found.without(["hooks", "tame", "norm"]) == clipped.without(["hooks", "tame", "norm"])
    without_hooks = training_of(tmp_path / "bare", {**config, "hooks": {}})
    assert found.without(["hooks", "tame"]) == without_hooks.without(["hooks", "tame"]) == found.without(["hooks"])


def test_run_that_cannot_be_compared_has_a_reason(tmp_path: Path) -> None:
    write_run(tmp_path / "0", status="failed")
    write_run(tmp_path / "1", config={"hooks": {"tame": {**CLIP, "of_another_version": 1}}})
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / "run.json").write_text('{"status": "done"}')
    write_run(tmp_path / "3")
    write_run(tmp_path / "4", seed=None)
    found, left_out = trainings(instrument.load(tmp_path))
    assert [training.index for training in found] == [3]
    assert left_out == {
        0: "its status is failed",
        1: "its hooks cannot be parsed by this version",
        2: "its run.json has no configuration",
        4: "its run.json has no seed",
    }


def test_differing_overrides_are_listed(tmp_path: Path) -> None:
    for i in range(3):
        write_run(tmp_path / str(i), overrides={"a": 1, "b": i, "name": f"n{i}", **({"c": None} if i else {})})
    assert differing_overrides(instrument.load(tmp_path)) == ["b"]


def test_values_have_canonical_texts() -> None:
    assert canonical_json(1) == canonical_json(1.0) != canonical_json(True)
    assert canonical_json({"a": [1.0, 2]}) == canonical_json({"a": [1, 2.0]})
    assert canonical_json(2.0**60) != canonical_json(2.0**60 + 2**10)
    assert [to_yaml(value) for value in (None, 0.1, "größe", {"kind": "forward", "norm": 0.1})] == [
        "null", "0.1", "größe", "{kind: forward, norm: 0.1}",
    ]  # fmt: skip


def test_pairs_of_a_custom_loop_have_the_same_seed(tmp_path: Path) -> None:
    for i, (seed, hooks) in enumerate([(1, {"tame": CLIP}), (1, {}), (2, {"tame": CLIP}), (3, {})]):
        folder = write_run(tmp_path / str(i), config={"hooks": hooks}, seed=seed)
        text = (folder / "run.json").read_text()
        (folder / "run.json").write_text(text.replace(f', "seed": {seed}}}, "overrides"', '}, "overrides"'))
    run = instrument.load(tmp_path)
    assert "seed" not in run.infos[0]["config"]
    assert [(pair.index, pair.baseline, pair.seed) for _, pair in pairs(run)] == [(0, 1, 1)]
