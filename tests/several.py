"""Runs of several processes, as torchrun starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

RUN = Path(__file__).parent / "run" / "ranks"  # has models of its own


def start(place: Path, *arguments: str, processes: int = 1) -> subprocess.CompletedProcess[str]:
    """`python -m instrument`, or what torchrun makes of it, in a folder."""
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"] if processes > 1 else []
    return subprocess.run(
        [sys.executable, "-m", *launcher, "instrument", *arguments],
        cwd=place,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(RUN)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
