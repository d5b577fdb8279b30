"""The summary of a finished sweep, in a limited number of lines."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from ...storage.folder_snapshot import SUBMITTED
from .jobs import DONE, STOPPED, Sweep, SweepJob, count_by_status
from .optuna_checks import best_trial

MAX_LISTED = 20  # maximum number of jobs listed one by one; more jobs are grouped by status and error
MAX_NAMES = 8  # maximum number of names in a line


def print_summary(folder: Path) -> None:
    """Print the jobs of a sweep that are not done, their errors, and the command that runs them again, to stderr."""
    sweep = Sweep(folder)
    jobs = sweep.jobs()
    if not jobs:
        print(f"no job was started in {folder}", file=sys.stderr)
        return
    print("", *job_lines(sweep, jobs), sep="\n", file=sys.stderr)
    for name, text in outcome(sweep, jobs).items():
        print(f"{name:<13}{text}", file=sys.stderr)
    if (terminals := folder / SUBMITTED).exists():
        print(f"job output   {terminals}", file=sys.stderr)
    command = f"python -m instrument.sweep {shlex.quote(str(folder))}"
    print(f"all jobs     {command}", file=sys.stderr)
    if any(job.status not in (DONE, STOPPED) for job in jobs) and sweep.has_known_jobs:
        print(f"rerun        {command} --rerun", file=sys.stderr)


def job_lines(sweep: Sweep, jobs: Sequence[SweepJob]) -> list[str]:
    """Return the number of jobs, and one line for each job or group of jobs that is not done."""
    unfinished = [job for job in jobs if job.status != DONE]
    if not unfinished:
        return [f"{len(jobs)} jobs in {sweep.folder}"]
    parts = [(str(job.folder), job.status, sweep.label(job), job.error) for job in unfinished[:MAX_LISTED]]
    single = ["  ".join(part for part in cells if part) for cells in parts]
    return [f"{len(jobs)} jobs in {sweep.folder}: {count_by_status(jobs)}", *(grouped_lines(unfinished) or single)]


def outcome(sweep: Sweep, jobs: Sequence[SweepJob]) -> dict[str, str]:
    """Return the result of a sweep as a whole, by label: its best trial and its remote folder, if it has them."""
    remote = {} if sweep.address is None else {"remote": sweep.address}
    return {**best_trial(sweep.folder, jobs), **remote}


def grouped_lines(unfinished: Sequence[SweepJob]) -> list[str]:
    """Return one line for each status and error, the most frequent first; empty for at most `MAX_LISTED` jobs."""
    if len(unfinished) <= MAX_LISTED:
        return []
    jobs_by_cause: dict[tuple[str, str], list[str]] = {}
    for job in unfinished:
        jobs_by_cause.setdefault((job.status, job.error or ""), []).append(job.name)
    groups = sorted(jobs_by_cause.items(), key=lambda group: -len(group[1]))
    lines = []
    for (status, error), names in groups[:MAX_LISTED]:
        listed = ", ".join([*names[:MAX_NAMES], *(["..."] if len(names) > MAX_NAMES else [])])
        lines.append(f"{len(names)} {status}  {listed}  {error}".rstrip())
    more = sum(len(names) for _, names in groups[MAX_LISTED:])
    return [*lines, f"and {more} more"] if more else lines
