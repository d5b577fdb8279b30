"""Conversion of msprobe: the examples of its documentation, with other names and fewer steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from converted_runs import Converter, record, record_paths

COMMON = {"dump_path": "/home/data_dump", "rank": [], "step": [], "enable_dataloader": False}
ALL_MODULES = 3 * 9 + 4  # blocks with their parts, their list, the activation, the head and the net
PARAMETERS = 3 * 8 + 2


@pytest.fixture
def convert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Converter:
    return Converter(tmp_path, "msprobe", capsys)


def config(task: str, level: str, options: dict[str, Any], **common: Any) -> dict[str, Any]:
    return {"task": task, "level": level, **COMMON, **common, task: options}


def test_modules_are_recorded_in_both_directions(convert: Converter) -> None:
    options = {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"}
    result = convert(config("statistics", "L0", options))
    assert {tuple(spec["stats"]) for spec in result.hooks.values()} == {("max", "min", "mean", "l2")}
    fired = record(result.file, steps=1)
    assert [*fired] == ["inputs", "outputs", "output_gradients", "input_gradients", "parameters", "parameter_gradients"]
    assert len(fired["parameters"]) == len(fired["parameter_gradients"]) == PARAMETERS
    assert "layers.2.mlp.relu" in fired["input_gradients"]
    assert result.has_note("dump_path", "hydra.run.dir")


def test_functions_are_recorded_with_their_tensors(convert: Converter) -> None:
    options = {"list": ["relu"], "tensor_list": ["permute"], "data_mode": ["forward"], "summary_mode": "md5"}
    result = convert(config("statistics", "L1", options, rank=[1, "4-6"]))
    assert record_paths(result.file, "stats") == {
        "function_arguments": tuple(f"relu.{i}.0" for i in range(4)),
        "function_results": tuple(f"relu.{i}" for i in range(4)),
    }
    assert record_paths(result.file, "tensors") == {
        "tensors_function_arguments": ("permute.0.0", "permute.1.0"),
        "tensors_function_results": ("permute.0", "permute.1"),
    }
    assert result.hooks["tensors_function_results"]["tensors"] is True
    assert result.has_note("summary_mode", "md5")
    assert result.has_note("rank", "column 'rank'")


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("modes", "hooks"),
    [
        (["all"], ["inputs", "outputs", "output_gradients", "input_gradients"]),
        (["forward", "input"], ["inputs"]),
        (["backward"], ["output_gradients", "input_gradients"]),
        (["output"], ["outputs", "input_gradients"]),
    ],
)
def test_data_mode_selects_directions_and_sides(convert: Converter, modes: list[str], hooks: list[str]) -> None:
    result = convert(config("statistics", "L0", {"data_mode": modes, "list": ["Module.head.Linear.forward.0"]}))
    assert [*result.hooks] == hooks
    assert result.hooks[hooks[0]]["layers"] == "head"


def test_one_call_of_a_function_is_selected_by_its_number(convert: Converter) -> None:
    result = convert(
        config("tensor", "L1", {"list": ["Tensor.permute.1.forward"], "file_format": "npy"}, step=[0, "2-3"])
    )
    assert record_paths(result.file, "tensors") == {
        "permute_1_function_arguments": ("permute.1.0",),
        "permute_1_function_results": ("permute.1",),
    }
    spec = result.hooks["permute_1_function_results"]
    assert (spec["steps"], spec["tensors"], spec["stats"]) == ([0, 2, 3], True, ["max", "min", "mean", "l2"])


def test_mix_records_modules_and_the_functions_inside(convert: Converter) -> None:
    name = "Module.module.layers.0.mlp.fc1.Linear.forward.0"
    result = convert(config("statistics", "mix", {"scope": [name], "data_mode": ["forward"]}, step=["0-1"]))
    assert result.hooks["outputs"]["stop"] == 2
    fired = record(result.file, steps=1)
    assert fired["outputs"] == ("layers.0.mlp.fc1",)
    assert fired["function_results"] == ("layers.0.mlp.fc1",)
    assert record_paths(result.file, "stats")["function_results"] == ("linear.0",)


def test_scope_of_two_names_is_not_restricted_and_named(convert: Converter) -> None:
    scope = ["Module.layers.0.Block.forward.0", "Module.head.Linear.forward.0"]
    result = convert(config("statistics", "L0", {"scope": scope, "data_mode": ["forward", "output"]}))
    assert result.hooks["outputs"]["layers"] == "**"
    assert result.has_note("statistics.scope", "no counterpart")


def test_overflow_check_counts_non_finite_values(convert: Converter) -> None:
    result = convert(config("overflow_check", "L1", {"overflow_nums": 1}))
    assert {tuple(spec["stats"]) for spec in result.hooks.values()} == {("nan_count", "inf_count")}
    assert "function_gradients" in record(result.file, steps=1)
    assert result.has_note("overflow_check.overflow_nums")


@pytest.mark.parametrize("task", ["grad_probe", "run_ut", "free_benchmark", "structure", "acc_check"])
def test_other_tasks_are_named(convert: Converter, task: str) -> None:
    result = convert(config(task, "L1", {"white_list": ["conv2d"]}, tensor={"list": []}))
    assert result.hooks == {}
    assert result.has_note("task", repr(task))
    assert result.has_note("tensor", f"not used by task {task}")


def test_settings_of_the_run_are_kept(convert: Converter) -> None:
    source = """{
        "task": "statistics", // a comment
        "seed": 1234, "is_deterministic": true, "enable_dataloader": true, "dump_path": "//not/a/comment",
        "level": "L2", "acl_config": "./acl.json", "statistics": {}
    }"""
    result = convert(source)
    assert (result.content["seed"], result.content["deterministic"], result.hooks) == (1234, True, {})
    assert result.has_note("level", "'L2'")
    assert result.has_note("acl_config", "no counterpart")
    assert result.has_note("enable_dataloader", "train.steps")
