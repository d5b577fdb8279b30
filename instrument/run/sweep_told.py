"""How a sweep ended, in a few lines."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from .sweep_jobs import DONE, Sweep, summary

SUBMITTED = ".submitit"  # where submitit keeps what its jobs print
MOST = 20  # jobs that are told of one by one


def tell_sweep(folder: Path) -> None:
    """Tell the user which jobs of a sweep are not done, why, and what does the rest."""
    sweep = Sweep(folder)
    jobs = sweep.jobs()
    left = [job for job in jobs if job.status != DONE]
    print(f"\n{len(jobs)} jobs in {folder}: {summary(jobs)}", file=sys.stderr)
    for job in left[:MOST]:
        parts = (str(job.folder), job.status, sweep.label(job), job.error)
        print("  ".join(part for part in parts if part), file=sys.stderr)
    if len(left) > MOST:
        print(f"and {len(left) - MOST} more", file=sys.stderr)
    if (terminals := folder / SUBMITTED).exists():
        print(f"terminals    {terminals}, of each job", file=sys.stderr)
    command = f"python -m instrument.sweep {shlex.quote(str(folder))}"
    print(f"all of them  {command}", file=sys.stderr)
    if left and sweep.is_laid_out:
        print(f"the rest     {command} --rerun", file=sys.stderr)
