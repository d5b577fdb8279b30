"""Fast imports: the garbage collector is paused during the imports of a job."""

from __future__ import annotations

import gc
import subprocess
import sys
from types import ModuleType

import pytest

from instrument.commands.job import importing


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
