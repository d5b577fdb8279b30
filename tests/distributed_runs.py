"""Distributed runs, started with and without torchrun."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pandas as pd
import torch
import torch.distributed as dist
from fork_server import Command
from training_runs import compose, train_here
from waiting import TIMEOUT

import instrument

RUN = Path(__file__).parent / "training"  # contains custom models for these tests


def run_processes(
    folder: Path, *arguments: str, processes: int = 1, module: str | Path = "instrument", machines: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a command in one or several processes, with the environment that torchrun would set.

    Args:
        machines: Whether each process has a working directory of its own below `folder`: `rank0`, `rank1`, ... Default: False.

    Returns:
        The exit code of the first rank that failed (0 if none failed), and the output of all processes.
    """
    folder.mkdir(exist_ok=True)
    # As with torchrun, the store is outside the started processes, on a free port.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=TIMEOUT))
    common = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(RUN)}
    if processes > 1:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        common |= {**address, "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    if processes > torch.cuda.device_count():  # NCCL refuses two processes on one GPU
        common["CUDA_VISIBLE_DEVICES"] = ""
    folders = [folder / f"rank{rank}" if machines else folder for rank in range(processes)]
    for each in folders:
        each.mkdir(exist_ok=True)
    started = [
        Command(folders[rank], module, arguments, {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, f"rank{rank}")
        for rank in range(processes)
    ]
    done = [command.wait() for command in started]
    code = next((each.returncode for each in done if each.returncode), 0)
    out, err = ("".join(getattr(each, stream) for each in done) for stream in ("stdout", "stderr"))
    return subprocess.CompletedProcess(list(arguments), code, out, err)


def start(folder: Path, name: str, *arguments: str, processes: int) -> subprocess.CompletedProcess[str]:
    """Train as `run_processes` does, but compose the configuration in this process, once for all ranks."""
    with contextlib.chdir(folder):
        _, raw = compose(*arguments)
    return run_processes(folder, json.dumps(raw), name, processes=processes, module=RUN / "train_config.py")


def train(folder: Path, name: str, *arguments: str, processes: int = 1) -> instrument.Run:
    """Train as `start` does, or in this process if there is one; load the run, which has to succeed."""
    if processes == 1:
        return train_here(folder / name, *arguments)
    done = start(folder, name, *arguments, processes=processes)
    assert done.returncode == 0, done.stderr
    return instrument.load(folder / name)


def matched(one: pd.DataFrame, other: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Return the rows of two tables next to each other; assert that they have the same keys, each once.

    The columns of the second table have the suffix `_there`.
    """
    both = one.merge(other, on=keys, suffixes=("", "_there"), how="outer", indicator=True, validate="1:1")
    assert (both["_merge"] == "both").all()
    assert len(both)
    return both


def assert_close(both: pd.DataFrame, name: str) -> None:
    """Assert that a column of `matched` is equal in both tables, except for the rounding of float32."""
    here, there = both[name], both[f"{name}_there"]
    assert (here.isna() == there.isna()).all(), name
    assert ((here - there).abs() <= 1e-5 * here.abs() + 1e-12)[here.notna()].all(), name


def torchrun(folder: Path, *arguments: str, processes: int) -> subprocess.CompletedProcess[str]:
    """Run `python -m instrument` with the real torchrun, for tests of the behavior of torchrun."""
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m", "instrument"]
    return subprocess.run(
        [sys.executable, "-m", *launcher, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
