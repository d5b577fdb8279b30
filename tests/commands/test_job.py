"""Fast imports: the garbage collector is paused during the imports of a job."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from instrument.commands.hydra_main import FULL_ERROR, command
from instrument.commands.job import importing, previous_attempt, restarted
from instrument.config.parse import parse_config


def test_garbage_collection_is_paused_during_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    with importing():  # PyTorch is imported
        assert gc.isenabled()
    monkeypatch.delitem(sys.modules, "torch")
    gc.unfreeze()
    try:
        with importing():
            assert not gc.isenabled()
        assert gc.isenabled()
        assert gc.get_freeze_count() > 1000
    finally:
        gc.unfreeze()


def test_disabled_garbage_collection_stays_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    frozen = gc.get_freeze_count()
    gc.disable()
    try:
        with importing():
            assert not gc.isenabled()
        assert not gc.isenabled()
        assert gc.get_freeze_count() == frozen
    finally:
        gc.enable()


def test_process_that_has_imported_duckdb_first_ends_without_output() -> None:
    code = "import duckdb\nfrom instrument.commands.job import importing\nwith importing(): pass"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout + ended.stderr == ""


def test_job_resumes_with_the_configuration_of_its_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-00000001.pt").touch()
    target = {"_target_": "mine.Any"}
    raw: dict[str, Any] = {"model": target, "task": target, "optimizer": target, "data": {"dataset": target}}
    raw |= {"train": {"steps": 3}, "seed": 1, "resume": None, "quiet": False, "plan": False, "report": False}
    changed = {**raw, "seed": 2, "quiet": True}  # a file has changed since
    config, resumed = restarted(parse_config(changed), changed, raw, tmp_path)
    assert resumed == {**raw, "quiet": True, "resume": str(tmp_path)}
    assert (config.seed, config.quiet, config.resume) == (1, True, str(tmp_path))


@pytest.mark.parametrize("text", ["", '{"status": "run'])
def test_job_with_a_damaged_record_starts_again(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "3"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "step-00000001.pt").touch()
    (folder / "run.json").write_text(text)  # the machine has failed
    target = {"_target_": "mine.Any"}
    raw = {"model": target, "task": target, "optimizer": target, "data": {"dataset": target}, "train": {"steps": 3}}
    earlier = previous_attempt(folder, {"seed": 1})
    assert earlier is not None
    config, unchanged = restarted(parse_config(raw), raw, earlier["config"], folder)
    assert (config.resume, unchanged) == (None, raw)
    assert list(folder.iterdir()) == []
    assert (tmp_path / ".aside" / "3.1" / "run.json").read_text() == text


@pytest.mark.parametrize("value", [None, "0"])
def test_command_restores_the_environment(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["instrument", "+exp=missing"])
    monkeypatch.delenv(FULL_ERROR, raising=False)
    if value is not None:
        monkeypatch.setenv(FULL_ERROR, value)
    with pytest.raises(SystemExit, match="2"):
        command(print)
    assert os.environ.get(FULL_ERROR) == value
