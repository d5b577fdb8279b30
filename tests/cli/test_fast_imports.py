"""Importing what a job needs."""

from __future__ import annotations

import gc
import sys

import pytest

from instrument.cli.fast_imports import importing


def test_no_garbage_is_collected_during_the_import(monkeypatch: pytest.MonkeyPatch) -> None:
    with importing():  # PyTorch is imported
        assert gc.isenabled()
    monkeypatch.delitem(sys.modules, "torch")
    try:
        with importing():
            assert not gc.isenabled()
        assert gc.isenabled()
        assert gc.get_freeze_count() > 1000
    finally:
        gc.unfreeze()


def test_a_collector_that_is_off_stays_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    gc.disable()
    try:
        with importing():
            assert not gc.isenabled()
        assert not gc.isenabled()
        assert gc.get_freeze_count() == 0
    finally:
        gc.enable()
