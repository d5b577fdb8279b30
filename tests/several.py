"""Runs of several processes, as torchrun starts them."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from forked import Command
from waiting import HANGS

RUN = Path(__file__).parent / "run" / "ranks"  # has models of its own


def start(
    place: Path, *arguments: str, processes: int = 1, module: str | Path = "instrument"
) -> subprocess.CompletedProcess[str]:
    """`python -m instrument` in a folder, or as many of it as torchrun would start.

    Returns:
        The exit code of the first process that failed, and what all of them printed.
    """
    place.mkdir(exist_ok=True)
    # Torchrun too has the store in a process of its own, which finds a port that is free.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=HANGS))
    common = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(RUN)}
    if processes > 1:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        common |= {**address, "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    started = [
        Command(place, module, arguments, {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, f"rank{rank}")
        for rank in range(processes)
    ]
    done = [command.wait() for command in started]
    code = next((each.returncode for each in done if each.returncode), 0)
    out, err = ("".join(getattr(each, stream) for each in done) for stream in ("stdout", "stderr"))
    return subprocess.CompletedProcess(list(arguments), code, out, err)


def torchrun(place: Path, *arguments: str, processes: int) -> subprocess.CompletedProcess[str]:
    """The command that a user types, for what torchrun itself does."""
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m", "instrument"]
    return subprocess.run(
        [sys.executable, "-m", *launcher, *arguments],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=HANGS,
        check=False,
    )
