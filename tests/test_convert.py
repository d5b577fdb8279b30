"""`python -m instrument.convert`: output, errors and complete runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import REPOSITORY, Call
from tiers import tiered

from instrument.commands.convert import main

SOURCES: dict[str, tuple[str, str]] = {
    "nvdlfw": (
        "source.yaml",
        "a: {enabled: true, layers: {layer_types: [layers]}, LogTensorStats: {enabled: true, tensors: [gradient], stats: [mean]}}",
    ),
    "msprobe": (
        "config.json",
        '{"task": "statistics", "step": [0], "level": "mix", "statistics": {"data_mode": ["forward"]}}',
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("tool", tiered(SOURCES, ["nvdlfw"]))
def test_converted_file_runs_as_an_experiment(tool: str, cli: Callable[..., Any], workdir: Path) -> None:
    name, text = SOURCES[tool]
    Path(name).write_text(text)
    assert main([name, "--from", tool, "-o", "conf/exp/mine.yaml"]) == 0
    small = ["model=mlp", "model.sizes=[64,8,10]", "data=digits", "data.slice.stop=64", "data.eval_slice.stop=32"]
    answer = cli("+exp=mine", *small, "train.steps=1", "hydra.run.dir=runs/mine").expect(0)
    assert "did not fire" not in answer.err
    assert "Recorded" in answer.out


def test_yaml_is_printed_without_out(tmp_path: Path, call: Call) -> None:
    source = tmp_path / "my config.json"
    source.write_text(json.dumps({"task": "statistics", "level": "L0", "dump_path": "/tmp/a\n# b", "c\n# d": 1}))
    captured = call(main, source, "--from", "msprobe").expect(0)
    assert yaml.safe_load(captured.out)["name"] == "my_config"
    moved = "my config.json: dump_path: pass hydra.run.dir=FOLDER to the run, or out= to instrument.attach\n"
    assert captured.err == f"{moved}my config.json: c # d: no counterpart\n"


def test_existing_files_are_not_overwritten(tmp_path: Path, call: Call) -> None:
    source, out = tmp_path / "config.json", tmp_path / "mine.yaml"
    source.write_text(SOURCES["msprobe"][1])
    out.write_text("kept")
    assert "--out: already exists" in call(main, source, "--from", "msprobe", "-o", out).expect(2).err
    assert out.read_text() == "kept"
    assert "cannot be written" in call(main, source, "--from", "msprobe", "-o", out / "mine.yaml").expect(1).err


@pytest.mark.parametrize(
    ("tool", "text", "message"),
    [
        ("nvdlfw", "", "is not a configuration of nvidia-dlfw-inspect"),
        ("nvdlfw", "[1, 2]", "is not a configuration of nvidia-dlfw-inspect"),
        ("nvdlfw", "task: statistics", "is not a configuration of nvidia-dlfw-inspect"),
        ("nvdlfw", "a: {enabled: true", "is not valid YAML"),
        ("nvdlfw", "a: !!bool x", "is not valid YAML"),
        ("nvdlfw", "a: {enabled: true, layers: {}}", "a.layers: selects no layers"),
        ("nvdlfw", "a: {enabled: true, layers: 3}", "a.layers: must be a mapping"),
        ("nvdlfw", "a: {enabled: maybe}", "a.enabled: must be true or false"),
        ("nvdlfw", "a: {enabled: true, layers: {layer_name_regex_pattern: '('}}", "is not a regular expression"),
        ("nvdlfw", "a: {enabled: true, layers: {layer_numbers: [x]}}", "a.layers.layer_numbers: must contain numbers"),
        (
            "nvdlfw",
            "a: {enabled: true, layers: {layer_types: [b]}, LogTensorStats: {stats: [min]}}",
            "names no tensors",
        ),
        (
            "nvdlfw",
            "a: {enabled: true, layers: {layer_types: [b]}, LogTensorStats: {tensors: [weight], stats: [min], freq: 0}}",
            "[weight].freq: the number of steps must be at least 1",
        ),
        ("msprobe", "[]", "is not a configuration of msprobe"),
        ("msprobe", "{", "is not valid JSON"),
        ("msprobe", '{"task": "statistic"}', "task: unknown task"),
        ("msprobe", '{"task": "tensor", "step": ["a"]}', "step: must contain numbers"),
        ("msprobe", '{"task": "tensor", "step": ["0-99999", 5]}', "step: contains more than 10,000 numbers"),
        ("msprobe", '{"task": "tensor", "tensor": []}', "tensor: must be a mapping"),
        ("msprobe", '{"level": "L0", "statistics": {"data_mode": ["up"]}}', "statistics.data_mode: unknown mode"),
        ("msprobe", '{"task": "tensor", "seed": "x"}', "seed: must be a whole number"),
        ("msprobe", '{"task": "tensor", "seed": 1.5}', "seed: must be a whole number"),
        (
            "nvdlfw",
            "a: {enabled: true, layers: {layer_types: [b]}, LogTensorStats: {tensors_struct: {}}}",
            "tensors_struct: must be a list of mappings",
        ),
    ],
)
def test_invalid_files_are_reported_with_their_key(
    tool: str, text: str, message: str, tmp_path: Path, call: Call
) -> None:
    source = tmp_path / ("source.yaml" if tool == "nvdlfw" else "source.json")
    source.write_text(text)
    assert message in call(main, source, "--from", tool, "-o", tmp_path / "out.yaml").expect(2).err
    assert not (tmp_path / "out.yaml").exists()


def test_unreadable_files_are_reported(tmp_path: Path, call: Call) -> None:
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe\x00")
    for file, message in (
        (tmp_path / "missing.json", "No such file"),
        (tmp_path, "Is a directory"),
        (binary, "not a text file in UTF-8"),
    ):
        assert message in call(main, file, "--from", "msprobe").expect(2).err


def test_guide_shows_the_output(workdir: Path, call: Call) -> None:
    page = (REPOSITORY / "docs" / "guides" / "converting.md").read_text()
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", page, re.M | re.S)
    shown = {language: [text for each, text in blocks if each == language] for language in ("yaml", "text")}
    Path("debug.yaml").write_text(shown["yaml"][0])
    captured = call(main, "debug.yaml", "--from", "nvdlfw").expect(0)
    assert captured.err == shown["text"][0]
    assert captured.out.endswith(shown["yaml"][1])
