"""Folders of runs and sweeps that start at the same moment are different."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY
from waiting import TIMEOUT

import instrument
from instrument.commands.validation_callback import reserve_folder
from instrument.storage.remote_folder import SWEEP_RECORD

TINY = ("model=mlp", "model.sizes=[64,10]", "data=digits", "train.steps=2")
Cli = Callable[..., Any]


def run_twice_at_once(*arguments: str) -> list[tuple[int, str]]:
    """Run two processes with the same command line; return their exit codes and errors."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "instrument", *arguments]
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    errors = [process.communicate(timeout=TIMEOUT)[1] for process in processes]
    return [(process.returncode, error) for process, error in zip(processes, errors, strict=True)]


def test_concurrent_requests_get_different_folders(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        reserve = partial(reserve_folder, contains_time=True)
        folders = [folder for folder, _ in pool.map(reserve, [tmp_path / "runs" / "now"] * 64)]
    assert {folder.name for folder in folders} == {"now", *(f"now_{number}" for number in range(2, 65))}
    assert all(folder.is_dir() for folder in folders)


def test_folder_that_cannot_be_created_is_returned_unchanged(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert reserve_folder(tmp_path / "file" / "now", contains_time=True)[0] == tmp_path / "file" / "now"


def test_runs_and_sweeps_with_equal_names_get_numbered_folders(cli: Cli) -> None:
    for _ in range(2):
        assert cli(*TINY, "hydra.run.dir=runs/${now:%Y}").code == 0
    assert cli("-m", *TINY, "seed=1", "hydra.sweep.dir=runs/${now:%Y}").code == 0
    first, *others = sorted(path.name for path in Path("runs").iterdir())
    assert others == [f"{first}_2", f"{first}_3"]
    for folder in (first, f"{first}_2", f"{first}_3/0"):
        assert instrument.load(f"runs/{folder}").info["status"] == "done"


def test_sweep_in_the_folder_of_another_is_refused(cli: Cli) -> None:
    """The other sweep has written its record, but has not started its first job."""
    Path("out").mkdir()
    Path("out", SWEEP_RECORD).touch()
    assert "the folder already contains a sweep" in cli("-m", *TINY, "seed=1", "hydra.sweep.dir=out").expect(2).err
    assert [path.name for path in Path("out").iterdir()] == [SWEEP_RECORD]


@pytest.mark.slow
def test_simultaneous_sweeps_get_different_folders(workdir: Path) -> None:
    ended = run_twice_at_once("-m", *TINY, "seed=1,2", "hydra.sweep.dir=runs/sweep_${now:%Y}")
    assert [code for code, _ in ended] == [0, 0], ended
    folders = sorted(path.name for path in Path("runs").iterdir())
    assert len(folders) == 2
    assert folders[1] == f"{folders[0]}_2"
    for folder in folders:
        assert list(instrument.load(f"runs/{folder}").runs.status) == ["done", "done"]


@pytest.mark.slow
def test_simultaneous_runs_get_different_folders(workdir: Path) -> None:
    ended = run_twice_at_once(*TINY, "hydra.run.dir=runs/run_${now:%Y}")
    assert [code for code, _ in ended] == [0, 0], ended
    sweep = instrument.load("runs")
    assert len(sweep.folders) == 2
    assert sweep.runs.status.eq("done").all()


@pytest.mark.slow
def test_simultaneous_sweeps_in_one_folder_one_is_refused(workdir: Path) -> None:
    ended = run_twice_at_once("-m", *TINY, "seed=1,2", "hydra.sweep.dir=out")
    assert sorted(code for code, _ in ended) == [0, 2]
    assert any("the folder already contains a sweep" in error for _, error in ended)
    assert list(instrument.load("out").runs.status) == ["done", "done"]
