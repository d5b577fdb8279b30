"""`python -m instrument.diff A B`: output, options and exit codes."""

from __future__ import annotations

import math
from importlib import import_module
from pathlib import Path

import pytest
from conftest import Call
from run_folders import write_run

import instrument
from instrument.commands import diff as diff_command
from instrument.commands.diff import main
from instrument.comparison import diff as comparison


def run(folder: Path, rms: float = 1.0, layers: int = 2) -> str:
    rows = [
        {"layer": f"layers.{layer}", "mean": 0.1, "std": 1.0, "rms": rms if layer else 1.0, "step": step}
        for step in (0, 1)
        for layer in range(layers)
    ]
    tensor = {"layer": "layers.1", "hook": "kept", "dtype": "float32", "shape": [2], "source_shape": [2]}
    tables = {"stats": rows, "tensors": [{**tensor, "values": [1.0, rms]}]}
    return str(write_run(folder, rows=tables))


def test_difference_is_printed_with_a_table(tmp_path: Path, call: Call) -> None:
    out = call(main, run(tmp_path / "a"), run(tmp_path / "b", 1.1)).expect(1).out
    assert "DIFFERENT: the first difference is at step 0, layers.1 (Linear), forward output" in out
    assert "rms 1 and 1.1: relative difference 0.091" in out
    lines = [line.split() for line in out.splitlines()]
    assert ["layers.0", "forward", "output", "0", "0", "0", "0", "0"] in lines
    assert ["layers.1", "forward", "output", "0.091", "0", "0", "0", "0", "0.091"] in lines
    assert "0: 50%, > 1024: 50%" in out


@pytest.mark.slow
def test_exit_codes_of_equal_runs_and_of_a_tolerance(tmp_path: Path, call: Call) -> None:
    one, other = run(tmp_path / "a"), run(tmp_path / "b", 1.1)
    assert "EQUAL STATISTICS" in call(main, one, run(tmp_path / "same")).expect(0).out
    answer = call(main, one, other, "--tolerance", "0.2").expect(0)
    assert "WITHIN THE TOLERANCE: the largest decisive difference is 0.091" in answer.out


def test_exit_code_of_another_loss(tmp_path: Path, call: Call) -> None:
    for name, loss in (("a", 1.0), ("b", math.nan)):
        write_run(tmp_path / name, rows={"stats": [{"rms": 1.0}], "metrics": [{"step": 0, "loss": loss}]})
    answer = call(main, tmp_path / "a", tmp_path / "b").expect(1)
    assert "loss: the first difference is at step 0: 1 and nan" in answer.out


@pytest.mark.slow
def test_many_layers_are_listed_if_they_differ(tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diff_command, "MAX_LISTED", 4)
    out = call(main, run(tmp_path / "a", layers=6), run(tmp_path / "b", 1.1, layers=6), "--steps", "0:1").expect(1).out
    assert "layers.3" in out
    assert "layers.0 " not in out.partition("differs from step")[2]
    assert "... and 3 more: --json prints all" in out
    assert "at 7 locations, step 0\n" in out
    out = call(main, tmp_path / "a", tmp_path / "b", "--tolerance", "1").expect(0).out
    assert "layers.3" in out
    assert "... and 3 more: --json prints all" in out


def test_table_fits_a_narrow_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("instrument.commands.verbs.PIPE_WIDTH", 72)
    main([run(tmp_path / "a"), run(tmp_path / "b", 1.1)])
    table = capsys.readouterr().out.partition("in the order of execution:\n")[2].partition("\n\n")[0]
    names, *rows = table.splitlines()
    assert names.endswith("difference  at step  differs from step  mean")
    assert [line.split()[0] for line in rows] == ["layers.0", "layers.1", "layers.1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rename", "layers"], "--rename: must be OLD=NEW"),
        (["--rename", "layer=x"], "rename layer=x: matches no recorded layer of A"),
        (["--tolerance", "-1"], "tolerance: must be a number of at least 0"),
        (["--steps", "5"], "--steps: must be a range such as 0:100"),
        (["--steps", "7:9"], "no tensor was recorded at the compared steps"),
    ],
)
def test_invalid_arguments_are_reported(tmp_path: Path, call: Call, arguments: list[str], message: str) -> None:
    assert message in call(main, run(tmp_path / "a"), run(tmp_path / "b"), *arguments).expect(2).err


def test_missing_run_is_reported(tmp_path: Path, call: Call) -> None:
    assert "folder not found" in call(main, run(tmp_path / "a"), tmp_path / "missing").expect(2).err


def test_function_diff_remains_after_the_import_of_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instrument, "diff", instrument.diff)  # restores it
    module = import_module("instrument.diff")
    assert instrument.diff is module
    assert type(module).__call__ is comparison.diff
