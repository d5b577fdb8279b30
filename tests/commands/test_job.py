"""Fast imports: the garbage collector is paused during the imports of a job."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from instrument.commands.job import importing, restarted
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
