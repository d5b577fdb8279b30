"""Forked child processes: they leave the run, its files and its lock to the parent process."""

from __future__ import annotations

import os
import time
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hydra.types import RunMode
from torch import nn

import instrument
from instrument.commands import job
from instrument.errors import AlreadyAttachedError, ConfigError
from instrument.runtime.forks import OwnedByProcess
from instrument.storage.lock import is_locked

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
HOOKS = {"seen": {"layers": ".", "kind": "forward", "action": "record", "tensors": True}}
SECONDS = 30.0


def in_fork(function: Callable[[], object]) -> int:
    """Call a function in a forked process. Return its exit code: 0 without an exception, 1 with one, -9 if it hangs."""
    if not (child := os.fork()):
        code = 1
        try:
            function()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    deadline = time.monotonic() + SECONDS
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(child, 9)
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(ended[1])


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.spread(1)
@pytest.mark.parametrize("error", [None, SystemExit(0), ValueError(), ConfigError(), KeyboardInterrupt()], ids=repr)
def test_forked_process_leaves_the_run_to_its_parent(tmp_path: Path, error: BaseException | None) -> None:
    model, run = nn.Linear(2, 2), tmp_path / "run"
    block = instrument.attach(model, HOOKS, out=run)
    probe = block.__enter__()

    def step() -> None:
        model(torch.ones(1, 2))
        probe.end_step()

    def end_block() -> None:
        assert not model._forward_hooks
        with pytest.raises(AlreadyAttachedError, match="attach a probe in this process"):
            probe.end_step()
        assert not block.__exit__(type(error) if error else None, error, None)

    step()
    before = content(run)
    assert in_fork(end_block) == 0
    assert content(run) == before
    assert is_locked(run)
    step()
    assert not block.__exit__(None, None, None)
    found = instrument.load(run)
    assert (found.info["status"], found.count("tensors"), found.problems) == ("done", 2, [])
    assert not is_locked(run)


@pytest.mark.slow
def test_forked_process_can_attach_its_own_probe(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)

    def record(run: Path, *, forks: bool) -> None:
        with instrument.attach(model, HOOKS, out=run) as probe:
            model(torch.ones(1, 2))
            if forks:
                assert in_fork(lambda: record(tmp_path / "child", forks=False)) == 0
            probe.end_step()

    record(tmp_path / "parent", forks=True)
    assert [instrument.load(tmp_path / name).count("tensors") for name in ("parent", "child")] == [1, 1]


@pytest.mark.slow
def test_forked_process_inherits_a_probe_whose_start_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its exception is kept, for example in a notebook. A data loader forks its workers afterwards."""
    ignored: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", ignored.append)
    hooks = {"change": {"layers": ".", "kind": "forward", "action": "modify", "fn": {"_target_": "missing.function"}}}
    with pytest.raises(ConfigError) as kept, instrument.attach(nn.Linear(2, 2), hooks):
        pass

    def check() -> None:
        assert kept.value.__traceback__ is not None
        assert not ignored

    assert in_fork(check) == 0


def test_forked_process_does_not_finalize_what_its_parent_owns() -> None:
    """A lock is released, and a Parquet file gets its end, when the last reference is gone."""
    held = [OwnedByProcess()]
    reference = weakref.ref(held[0])

    def drop() -> None:
        held.clear()
        inherited = reference()
        assert inherited is not None
        assert inherited.is_inherited

    assert in_fork(drop) == 0
    assert not held[0].is_inherited
    held.clear()
    assert reference() is None


def test_forked_process_of_custom_code_keeps_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hydra = SimpleNamespace(runtime=SimpleNamespace(output_dir=tmp_path), mode=RunMode.RUN)
    monkeypatch.setattr(job, "HydraConfig", SimpleNamespace(get=lambda: hydra))
    block = job.report_errors()
    block.__enter__()
    error = RuntimeError("in a child")
    assert in_fork(lambda: block.__exit__(RuntimeError, error, None)) == 0
    with pytest.raises(SystemExit):
        block.__exit__(RuntimeError, error, None)
