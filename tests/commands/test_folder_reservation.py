"""Folders of runs and sweeps that start at the same moment are different."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fork_server import Command

import instrument
from instrument.storage.remote_folder import SWEEP_RECORD

TINY = ("model=mlp", "model.sizes=[64,10]", "data=digits", "train.steps=2")
Cli = Callable[..., Any]


def run_twice_at_once(*arguments: str) -> list[tuple[int, str]]:
    """Run two processes with the same command line; return their exit codes and errors."""
    started = [Command(Path.cwd(), "instrument", arguments, {"OMP_NUM_THREADS": "1"}, name) for name in ("one", "two")]
    return [(ended.returncode, ended.stderr) for ended in (process.wait() for process in started)]


def test_sweep_in_the_folder_of_another_is_refused(cli: Cli) -> None:
    """The other sweep has written its record, but has not started its first job."""
    Path("out").mkdir()
    Path("out", SWEEP_RECORD).touch()
    err = cli("-m", *TINY, "seed=1", "hydra.sweep.dir=out").expect(2).err
    assert "the folder already contains a sweep" in err
    assert "python -m instrument.sweep out --rerun" in err
    assert [path.name for path in Path("out").iterdir()] == [SWEEP_RECORD]


@pytest.mark.slow
def test_simultaneous_sweeps_in_one_folder_one_is_refused(workdir: Path) -> None:
    ended = run_twice_at_once("-m", *TINY, "seed=1,2", "hydra.sweep.dir=out")
    assert sorted(code for code, _ in ended) == [0, 2]
    assert any("the folder already contains a sweep" in error for _, error in ended)
    assert list(instrument.load("out").runs.status) == ["done", "done"]
