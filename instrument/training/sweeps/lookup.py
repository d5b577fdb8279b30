"""Lookup of the jobs in a folder: a sweep, or runs without a sweep record."""

from __future__ import annotations

from pathlib import Path

from ...analysis.config_comparison import differing_overrides
from ...analysis.config_fields import to_yaml
from ...analysis.load import Run, load
from ...errors import ConfigError, Problem
from ...storage.remote_folder import SWEEP_RECORD, is_address
from ...storage.run_search import NoRunError
from .jobs import Jobs, Sweep, SweepJob, error_of, suppress_warnings

ALLOWED = "the folder of a sweep, or a folder that contains several runs"


class Runs(Jobs):
    """Runs below a folder without a sweep record, such as runs started by a shell loop.

    The existing runs are known; missing runs are not.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.swept = {key: [info["overrides"].get(key) for info in run.infos] for key in differing_overrides(run)}

    def jobs(self) -> list[SweepJob]:
        """Return all runs, sorted by number."""
        with suppress_warnings():
            infos = self.run.infos
        return [
            SweepJob(
                str(folder.relative_to(self.run.path)),
                folder,
                tuple(f"{key}={to_yaml(value)}" for key, value in info["overrides"].items()),
                info["status"],
                error_of(info),
            )
            for folder, info in zip(self.run.folders, infos, strict=True)
        ]


class RemoteSweep(Sweep):
    """A sweep in remote storage. Its record defines the planned jobs; the uploaded runs give their status.

    Args:
        run: All uploaded runs, loaded together.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run.path)
        self.runs = Runs(run)

    def _existing(self) -> dict[str, SweepJob]:
        return {job.name: job for job in self.runs.jobs()}


def jobs_in(folder: str) -> Jobs:
    """Find the sweep in a folder, or the runs below it.

    Raises:
        ConfigError: The folder contains neither, or it is the folder of a single run.
    """
    if not is_address(folder) and (Path(folder) / SWEEP_RECORD).exists():
        return Sweep(Path(folder))
    try:
        run = load(folder)
    except NoRunError as error:
        raise ConfigError(Problem("", f"no sweep found: {error}", given=folder, allowed=ALLOWED)) from None
    if run.folders == [run.path]:
        above = Path(folder).resolve().parent
        is_job = not is_address(folder) and (above / SWEEP_RECORD).exists()
        message = "this is the folder of a single run, not of a sweep"
        raise ConfigError(Problem("", message, folder, ALLOWED, [str(Path(folder).parent)] if is_job else ()))
    if is_address(folder) and (run.path / SWEEP_RECORD).exists():
        return RemoteSweep(run)
    return Runs(run)
